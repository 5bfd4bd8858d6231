"""Attention's backward that keeps dS: each of its kernels, and the layout of dS in memory."""

from itertools import pairwise

import pytest
import torch
from spec_samples import assert_right, each, launched, plain_inputs, sized

from tilekern.kernels.attention import kept
from tilekern.kernels.attention.kept import DKDV, DQ, SUMS
from tilekern.kernels.attention.problem import mask
from tilekern.spec.targets import INTERPRETED, resolve

SIZES = {"batch": 2, "queries": 300, "keys": 300, "heads": 4, "kv_heads": 2, "head_dim": 20}
LENGTHS = [(1, 1), (300, 300), (400, 400), (100, 300), (300, 100), (128, 256)]
both = each([DKDV, DQ])
every_mask = pytest.mark.parametrize("causal", [False, True])
every_length = pytest.mark.parametrize(("queries", "keys"), LENGTHS)
packed_or_not = pytest.mark.parametrize("packed", [False, True])


def problem_of(spec, dtype="bfloat16", sizes=None, **flags):
    return sized(spec, dtype, **SIZES | (sizes or {})).but(**flags)


@both
@every_mask
@packed_or_not
@every_length
def test_kernels_on_every_mask_and_length(spec, causal, packed, queries, keys):
    problem = problem_of(spec, sizes={"queries": queries, "keys": keys}, causal=causal, packed=packed)
    assert_right(spec, problem, [spec.generic(problem)], plain_inputs(spec, problem))


@packed_or_not
@every_mask
@pytest.mark.parametrize(("tile_m", "tile_n", "tile_h"), [(64, 128, 2), (128, 64, 1), (128, 128, 2), (32, 64, 1)])
def test_dq_by_other_tiles_than_those_that_wrote(packed, causal, tile_m, tile_n, tile_h):
    problem = problem_of(DQ, causal=causal, packed=packed)
    config = DQ.generic(problem).but(tile_m=tile_m, tile_n=tile_n, tile_h=tile_h, schedule="block")
    assert_right(DQ, problem, [config], plain_inputs(DQ, problem))


@both
@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_default_configs(spec, head_dim):
    problem = problem_of(spec, sizes={"batch": 1, "head_dim": head_dim}, causal=True)
    assert_right(spec, problem, [spec.default(problem, INTERPRETED)], plain_inputs(spec, problem))


def test_parts_leave_room_in_the_shared_memory_of_blackwell():
    problem = problem_of(DKDV, sizes={"queries": 4096, "keys": 4096, "head_dim": 128}, causal=True)
    chosen = [DKDV.default(problem.but(apart=apart), resolve("B200"))["tile_n"] for apart in (False, True)]
    assert chosen == [128, 64]


@packed_or_not
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (5, 5)])
def test_parts_for_each_query_head(packed, heads, kv_heads):
    problem = problem_of(DKDV, sizes={"heads": heads, "kv_heads": kv_heads}, causal=True, packed=packed, apart=True)
    outputs = DKDV.outputs(problem, 1)
    assert [outputs[name][1] for name in ("dk", "dv", "kept")] == ["float32", "float32", "bfloat16"]
    assert outputs["dk"][0][2] == heads
    assert_right(DKDV, problem, [DKDV.generic(problem)], plain_inputs(DKDV, problem))


@pytest.mark.parametrize(("tokens", "group", "head_dim"), [(1, 1, 16), (100, 3, 20), (65, 8, 128)])
def test_sums_of_groups(tokens, group, head_dim):
    problem = sized(SUMS, "bfloat16", tokens=tokens, kv_heads=3, group=group, head_dim=head_dim)
    assert_right(SUMS, problem, [SUMS.generic(problem)], plain_inputs(SUMS, problem))


def test_sums_of_groups_are_added_in_the_order_of_the_heads():
    problem = sized(SUMS, "float32", tokens=40, kv_heads=2, group=5, head_dim=16)
    inputs = plain_inputs(SUMS, problem)
    found = launched(SUMS, problem, SUMS.generic(problem), inputs)
    for name in ("dk", "dv"):
        total = torch.zeros_like(found[name])
        for head in range(5):
            total = total + inputs[f"{name}_parts"][:, :, head]
        assert torch.equal(found[name], total)


@packed_or_not
@every_mask
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (100, 300), (300, 100)])
def test_what_is_kept_is_the_gradient_of_the_scores(packed, causal, queries, keys):
    """The kernel's check compares dk and dv alone: ``kept`` is read by the other kernel."""
    problem = problem_of(DKDV, sizes={"queries": queries, "keys": keys}, causal=causal, packed=packed)
    inputs = plain_inputs(DKDV, problem)
    found = launched(DKDV, problem, DKDV.generic(problem), inputs)["kept"]
    spans = [inputs[f"{side}_starts"].tolist() for side in ("query", "key")]
    entries = (
        list(zip(*(list(pairwise(starts)) for starts in spans), strict=True))
        if packed
        else [((0, queries), (0, keys))] * 2
    )
    # dq of keys that are unit vectors is dS.
    units = [
        torch.eye(keys, dtype=torch.float64)[: stop - first, None].expand(-1, 2, -1) for _, (first, stop) in entries
    ]
    got = kept.reference(
        found, torch.cat(units)[None] if packed else torch.stack(units), inputs["query_starts"], inputs["key_starts"],
        queries, 1.0, causal, packed,
    )["dq"]  # fmt: skip
    for number, ((a, b), (c, d)) in enumerate(entries):
        entry = 0 if packed else number
        expected = score_gradients(inputs, entry, slice(a, b), slice(c, d), causal)
        torch.testing.assert_close(got[entry, a:b, :, : d - c], expected, rtol=0.01, atol=0.01)


def score_gradients(inputs, entry, queries, keys, causal):
    """dS = P (dout v^T - delta), [queries, heads, keys], of one sequence."""
    q, dout = (inputs[name][entry, queries].double() for name in ("q", "dout"))
    k, v = (inputs[name][entry, keys].double().repeat_interleave(2, dim=1) for name in ("k", "v"))
    lse, delta = (inputs[name][entry, :, queries].double().T[..., None] for name in ("lse", "delta"))
    weights = torch.exp(torch.einsum("qhd,khd->qhk", q, k) * inputs["scale"] - lse)
    seen = mask(len(q), len(k), 0, causal, False, "cpu")[:, None]
    return (weights * (torch.einsum("qhd,khd->qhk", dout, v) - delta)).masked_fill(~seen, 0)
