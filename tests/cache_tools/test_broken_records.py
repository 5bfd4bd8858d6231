"""Records with numbers that no float can hold."""

import warnings

import pytest
from cache_samples import PROBLEM, find, put, sealed

from tilekern.cache import FolderLayer


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_a_record_with_a_number_beyond_all_bounds_is_bad_for_every_reader(cli, as_json, root, tmp_path, number):
    large = {"like one": 0x7FF0 << 90, "negative": -(2**1000), "largest": 1.7976931348623157e308}
    put(root, problem={**PROBLEM, "rows": 1}, check=large)
    path = put(root, check={"relative": 0.001, **large})
    path.write_text(sealed(path.read_text().replace("0.001", number)))
    broken = as_json("verify", code=1)["broken"]
    assert [fault["path"] for fault in broken] == [str(path)]
    assert "Number out of range" in broken[0]["problem"]
    assert "1 unreadable record left out" in cli("pack", str(tmp_path / "all.pack"))[1]
    with warnings.catch_warnings(action="ignore"):
        assert find([FolderLayer(root, "user")]).record.problem["rows"] == 1
