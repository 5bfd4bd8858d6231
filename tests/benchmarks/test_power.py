"""Reading power and clock from nvidia-smi: a program of that name that prints like it stands for the real one."""

import os
import time

from benchmarks.power import PowerMeter, parsed

PRINTS = """#!/bin/sh
while true; do echo "698.12, 1410, 700.00"; echo "[N/A], 1410, 700.00"; echo "702.12, 1420, 700.00"; sleep 0.05; done
"""


def test_a_line_of_nvidia_smi():
    assert parsed("698.12, 1410, 700.00\n") == [698.12, 1410.0, 700.0]
    assert parsed("[N/A], 1410, 700.00\n") is None
    assert parsed("698.12, 1410\n") is None


def test_medians_of_what_was_read_in_between(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(PRINTS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with PowerMeter() as meter:
        started = time.perf_counter()
        time.sleep(0.5)
        ended = time.perf_counter()
        found = meter.between(started, ended)
        assert meter.between(ended + 100, ended + 200) is None
    assert found is not None
    assert found.samples >= 4
    assert found.watts in (698.12, 700.12, 702.12)
    assert found.limit_watts == 700.0
    assert 1410 <= found.sm_mhz <= 1420


def test_without_nvidia_smi_nothing_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with PowerMeter() as meter:
        assert meter.between(0.0, time.perf_counter()) is None
