"""Records that a lookup can use and a pack cannot hold."""

import pytest
from cache_samples import PROBLEM, put, sealed
from command_line import refused


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_a_record_with_a_number_beyond_all_bounds_is_broken_and_stops_a_pack(cli, as_json, root, tmp_path, number):
    large = {"like one": 0x7FF0 << 90, "negative": -(2**1000), "largest": 1.7976931348623157e308}
    put(root, problem={**PROBLEM, "rows": 1}, check=large)
    path = put(root, check={"relative": 0.001, **large})
    path.write_text(sealed(path.read_text().replace("0.001", number)))
    broken = as_json("verify", code=1)["broken"]
    assert [fault["path"] for fault in broken] == [str(path)]
    refused(cli("pack", str(tmp_path / "all.pack")), str(path), "JSON")
    assert cli("pack", str(tmp_path / "all.pack"), "--problem", "rows=1")[0] == 0
