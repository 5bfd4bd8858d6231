import pytest
import torch
from op_samples import launched_by

from tilekern import ops


def checked(found, ids, experts):
    """Hold a routing to what its words say."""
    flat = ids.reshape(-1).tolist()
    place = [number if 0 <= number < experts else experts for number in flat]
    order = sorted(range(len(flat)), key=lambda slot: (place[slot], slot))
    assert found.order.tolist() == order
    assert found.experts.tolist() == [place[slot] for slot in order]
    assert found.ranks.reshape(-1)[found.order.long()].tolist() == list(range(len(flat)))
    assert found.offsets.tolist() == [sum(number <= e for number in place) for e in range(experts)]
    assert {x.dtype for x in found} == {torch.int32}
    assert found.ranks.shape == ids.shape


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize(("tokens", "choices", "experts"), [(1, 1, 1), (9, 3, 5), (300, 2, 40), (7, 2, 300)])
def test_slots_are_sorted_by_expert_and_stay_in_order(dtype, tokens, choices, experts):
    ids = torch.randint(-1, experts + 2, (tokens, choices), generator=torch.Generator().manual_seed(0)).to(dtype)
    checked(ops.route(ids, experts), ids, experts)


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
def test_no_slot_at_all(shape):
    ids = torch.zeros(shape, dtype=torch.int64)
    checked(ops.route(ids, 4), ids, 4)


def test_it_is_two_launches_for_any_size():
    launched = launched_by(lambda: ops.route(torch.zeros(2000, 1, dtype=torch.int64), 4))
    assert launched == {"route_count": 1, "route_place": 1}
