"""Packs by model: each has what its model asks for, whatever else the run tuned."""

import json
import shutil
from pathlib import Path

import pytest
from tuning_samples import SMALL

from tilekern.cache import PackLayer
from tilekern.errors import InputError
from tilekern.runtime.recorder import document
from tilekern.spec import Problem
from tilekern.tuning import cli
from tilekern.tuning.packs import pack_paths, write_packs
from tilekern.tuning.plan.steps import Planned
from tilekern.tuning.publishing import winners
from tilekern.tuning.sweep.folder import Sweep

TOOLKIT = {"key": "tileiras-1-cuda_tile-1", "tileiras": "1", "cuda_tile": "1"}
OTHER = (SMALL[0], Problem({**SMALL[1], "columns": 256}))


def columns_in(pack: Path) -> list[int]:
    layer = PackLayer(pack, "pack")
    return [
        problem["columns"]
        for target in layer.targets()
        for toolkit in layer.toolkits(target)
        for problem in layer.problems(target, toolkit, SMALL[0])
    ]


def test_each_model_has_a_pack_of_what_it_asks_for(compiled_sweep: Sweep, tmp_path: Path, h200):
    models = [Planned("a", (SMALL, OTHER)), Planned("Acme/B b", (SMALL,)), Planned("/x/c/config.json-tp2", (OTHER,))]
    paths = pack_paths(tmp_path / "new", models, h200)
    assert [path.name for path in paths] == ["a-h200.pack", "b-b-h200.pack", "c-tp2-h200.pack"]
    written = write_packs(paths, list(winners(compiled_sweep, TOOLKIT)))
    assert list(written.values()) == [1, 1, 0]
    first, second, empty = paths
    assert columns_in(first) == columns_in(second) == [SMALL[1]["columns"]]
    assert columns_in(empty) == []
    assert first.read_bytes() == second.read_bytes()


def test_packs_of_one_name_or_of_no_model_are_refused(tmp_path: Path, h200):
    with pytest.raises(InputError, match=r"--packs: m and Acme/M would both be m-h200.pack"):
        pack_paths(tmp_path, [Planned("m", ()), Planned("Acme/M", ())], h200)
    with pytest.raises(InputError, match="no MODEL is named"):
        pack_paths(tmp_path, [], h200)


def test_the_command_line_writes_them(compiled_sweep: Sweep, monkeypatch, tmp_path: Path, capsys, h200):
    monkeypatch.setattr("tilekern.tuning.commands.tune.here", lambda: None)
    sweep = shutil.copytree(compiled_sweep.folder, tmp_path / "sweep")
    model = tmp_path / "acme.json"
    model.write_text(json.dumps(document(h200, "acme", [SMALL])))
    where = ["--gpu", "H200", "--sweep", str(sweep), "--cache-dir", str(tmp_path / "cache")]
    assert cli.main([str(model), *where, "--packs", str(tmp_path / "packs"), "--json"]) == 0
    pack = tmp_path / "packs" / "acme-h200.pack"
    assert json.loads(capsys.readouterr().out)["packs"] == {str(pack): 1}
    assert columns_in(pack) == [SMALL[1]["columns"]]
    assert cli.main([str(model), *where, "--stages", "plan,compile", "--packs", "x"]) == 2
    assert "--packs needs a run that plans and measures" in capsys.readouterr().err
    assert cli.main(["--plan", str(model), *where, "--packs", "x"]) == 2
    assert "no MODEL is named" in capsys.readouterr().err
