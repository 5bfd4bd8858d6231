"""ncu's table of counters as results."""

from pathlib import Path

import pytest

from benchmarks.counters import CASES, counted_cases, read_table, rows_of, short_name
from benchmarks.suites import model_cases
from tilekern.tuning.plan.configs import config_named

TABLE = """==PROF== Connected to process 7
"ID","Kernel Name","gpu__time_duration.sum","gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","launch__registers_per_thread"
"","","us","%","%","register/thread"
"0","attention_forward_Kt1_A4bf16_1v8l0","1,234.5","20.5","70","168"
"1","attention_forward_Kt1_A4bf16_1v8l0","1,233.5","21.5","71","168"
"2","void at::native::copy<float>(int)","2","90","","32"
"""


def test_launches_of_a_kernel_are_one_case_with_their_means():
    rows = list(rows_of("attention forward", read_table(TABLE.splitlines())))
    found = {(row.case, row.metric): (row.value, row.unit) for row in rows}
    ours, copy = "attention forward: attention_forward", "attention forward: void at::native::copy<float>"
    assert found[ours, "launches"] == (2, "1")
    assert found[ours, "time"] == (1234.0, "us")
    assert found[ours, "memory, of peak"] == (21.0, "%")
    assert found[ours, "tensor cores, of peak"] == (70.5, "%")
    assert found[copy, "time"] == (2.0, "us")
    assert (copy, "tensor cores, of peak") not in found


def test_times_are_microseconds_whatever_ncu_says_them_in():
    table = TABLE.replace('"us"', '"ns"')
    assert {row.value for row in rows_of("", read_table(table.splitlines())) if row.metric == "time"} == {1.234, 0.002}


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("matmul_plain_Kt1_A2bf16_1v8l0", "matmul_plain"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN"),
    ],
)
def test_names_of_kernels_are_without_their_arguments(symbol, name):
    assert short_name(symbol) == name


def test_each_case_is_there_once_and_the_suite_s_are_of_a_sweep():
    metrics = {case.label: case.metrics for case in counted_cases()}
    assert len(metrics) == len(counted_cases())
    assert all(metric in metrics[label] for label, metric in CASES)
    swept = {case.label for case in model_cases(config_named("llama-3-8b")[1], 8192)}
    assert {label for label, _ in CASES if label.split(" ")[0] in ("sparsemax", "group_norm", "kl_div")} <= swept


def test_a_run_without_kernels_has_no_rows():
    assert list(rows_of("nothing", read_table(TABLE.splitlines()[:3]))) == []


def test_a_real_page_is_read():
    page = Path(__file__).parent / "data" / "ncu_rms_norm_backward.csv"
    found = {(row.case, row.metric): row.value for row in rows_of("", read_table(page.read_text().splitlines()))}
    assert {case for case, _ in found} == {": rms_norm_backward_persistent", ": column_sum"}
    dx = {metric: value for (case, metric), value in found.items() if "rms_norm" in case}
    assert (dx["memory, of peak"], dx["L2 cache, of peak"], dx["multiprocessors, of peak"]) == (78.27, 87.02, 62.87)
    assert (dx["registers a thread"], dx["waves"], dx["launches"]) == (80, 1, 1)
    assert 40 < dx["time"] < 60
