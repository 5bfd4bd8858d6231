"""Attention of sequences that ranks share by torch's context parallelism; whole models are in the worker."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.tensor.experimental
from rank_jobs import finish, start

import tilekern
from tilekern.errors import InputError
from tilekern.patch import context_parallel, graphs
from tilekern.patch.attention import attend

WORKER = Path(__file__).with_name("context_worker.py")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")


@pytest.fixture
def replaced(monkeypatch):
    """torch's own stand-in for its attention, of ranks that are not there."""

    def replace(ranks):
        # Releases have it in different modules.
        home = inspect.unwrap(torch.distributed.tensor.experimental.context_parallel).__globals__
        mesh = SimpleNamespace(size=lambda: ranks, get_group=lambda: None, get_local_rank=lambda: 0)
        functional = torch.nn.functional
        monkeypatch.setattr(functional, "scaled_dot_product_attention", functional.scaled_dot_product_attention)
        monkeypatch.setitem(home, "_replaced_functions", {})
        given = functional.scaled_dot_product_attention, functional, mesh, lambda *x: x[1:], lambda *x: x[2]
        home["_distribute_function"](*given)

    return replace


def test_outside_of_a_context_and_with_one_rank_nothing_is_shared(replaced):
    assert context_parallel.shards_here() is None
    replaced(1)
    assert torch.nn.functional.scaled_dot_product_attention is not context_parallel.SDPA
    assert context_parallel.shards_here() is None


def test_a_stand_in_that_is_not_known_is_refused(replaced, monkeypatch):
    replaced(2)
    assert context_parallel.shards_here().size == 2
    monkeypatch.delitem(torch.nn.functional.scaled_dot_product_attention.__globals__, "_cp_options")
    with pytest.raises(InputError, match="does not know"):
        context_parallel.shards_here()


def test_attention_without_a_mask_is_refused(replaced):
    """Its rows may hold several sequences, or positions may not fit."""
    replaced(2)
    q = torch.zeros(1, 2, 4, 16)
    with pytest.raises(InputError, match="in context_parallel"):
        attend(True, torch.nn.Module(), q, q, q, None)


def test_steps_are_not_captured(replaced):
    """Its buffers change their sizes in place, and their ranks wait for each other."""
    assert not graphs.is_traced()
    replaced(2)
    assert graphs.is_traced()


def test_a_compiled_attention_notices_the_context(replaced):
    tilekern.apply()
    q = torch.zeros(1, 2, 4, 16)
    compiled = torch.compile(lambda q: attend(True, torch.nn.Module(), q, q, q, None)[0], backend="eager")
    compiled(q)
    replaced(2)
    with pytest.raises(Exception, match="in context_parallel"):
        compiled(q)
    tilekern.reset()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pieces_are_those_of_torch_s_balancer(ranks):
    try:
        from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
    except ImportError:
        pytest.skip("this torch has its balancer elsewhere")
    order = _HeadTailLoadBalancer(6 * ranks, ranks, "cpu")._generate_indices()[0]
    whole = torch.stack((torch.arange(6 * ranks), torch.arange(6 * ranks) + 100)).unsqueeze(-1)
    shards = context_parallel.Shards(None, ranks, 0, 2, {})
    parts = torch.stack([whole[:, own] for own in order.chunk(ranks)])
    assert torch.equal(shards.joined(parts), whole)
    assert torch.equal(shards.parted(whole), parts)
    in_one = context_parallel.Shards(None, ranks, 0, 1, {})
    assert torch.equal(in_one.joined(in_one.parted(whole)), whole)
    assert torch.equal(in_one.parted(whole)[0], whole[:, :6])


@pytest.mark.parametrize(
    ("heads", "keys", "ranks", "wanted"), [(8, 8, 4, 8), (8, 2, 4, 4), (24, 6, 4, 12), (6, 1, 3, 3)]
)
def test_key_heads_are_repeated_for_as_many_ranks(heads, keys, ranks, wanted):
    shards = context_parallel.Shards(None, ranks, 0, 1, {})
    x = torch.arange(keys).view(1, 1, keys, 1)
    found = context_parallel.with_enough_heads(shards, heads, x)
    assert found.shape[2] == wanted
    # Each query head still reads its own key head.
    assert torch.equal(found.repeat_interleave(heads // wanted, 2), x.repeat_interleave(heads // keys, 2))


@pytest.mark.processes
@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_losses_and_gradients_of_one_process(tmp_path, ranks):
    ended = finish(start(tmp_path, WORKER, ranks, "cpu", TILEKERN_INTERPRET="1", GLOO_SOCKET_IFNAME="lo"))
    assert [code for _, _, code in ended] == [0] * ranks, "\n".join(error[-3000:] for _, error, _ in ended)
