"""Masks that describe to attention "tilekern" a row's sequences, a cache's room, and values not to be read."""

import contextlib

import pytest
import torch
from tiny_qwen3 import IDS, launches, make, worst
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import Qwen3Config
from transformers import masking_utils as makers
from transformers.models.qwen3 import modeling_qwen3

import tilekern
from tilekern import warning
from tilekern.errors import InputError, TilekernWarning
from tilekern.ops import packing
from tilekern.patch import attention as implementation
from tilekern.patch import positions, registry
from tilekern.patch.told import ToldMask
from tilekern.runtime import dispatch

WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
STARTS = torch.tensor([0, 3, 7], dtype=torch.int32)
PLACES = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
ROW = IDS[:1]


@pytest.fixture(autouse=True)
def known(monkeypatch):
    tilekern.apply(**dict.fromkeys(registry.known_ops(), False))
    monkeypatch.setattr(dispatch._state, "counters", {})


@pytest.fixture
def captured(monkeypatch):
    """A CUDA graph is captured, as far as anybody asks."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


@contextlib.contextmanager
def unread():
    """Values may not be read, as in a capture."""

    def refuse(*_):
        raise AssertionError("a value is read")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("__bool__", "__int__", "item", "tolist", "cpu", "nonzero"):
            patch.setattr(torch.Tensor, name, refuse)
        yield


def counts():
    return launches().get("attention_forward", 0), tilekern.stats()["attention_forward"]["fallbacks"]


def config(**changes):
    return Qwen3Config(**WINDOW | changes, attn_implementation="tilekern")


def asked(maker=makers.create_causal_mask, **more):
    """The mask of a row, as a model's own code asks for it."""
    given = {"config": config(), "inputs_embeds": torch.zeros(1, 7, 8), "attention_mask": None, "past_key_values": None}
    return maker(**given | more)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("starts", [STARTS, STARTS[:0]])
def test_a_told_mask_is_the_mask_for_who_looks_at_it(window, starts):
    told = ToldMask(starts, 4, window, 7, 9 if not len(starts) else 7, 2)
    place = torch.arange(7)
    seen = place <= place[:, None]
    seen = seen if window is None else seen & (place[:, None] - place < window)
    number = torch.searchsorted(starts.long(), place, right=True)
    seen = torch.nn.functional.pad(seen & (number == number[:, None]), (0, told.shape[3] - 7)).expand(told.shape)
    assert (told.dtype, told.device) == (torch.bool, torch.device("cpu"))
    for found, wanted in (
        (told & True, seen),
        (~told, ~seen),
        (told[:, 0, :, :3], seen[:, 0, :, :3]),
        (torch.zeros(told.shape).masked_fill(told, 1), seen.float()),
        (told.float(), seen.float()),
    ):
        assert type(found) is torch.Tensor
        assert torch.equal(found, wanted)
    for copy in (told.detach(), told.to("meta"), told.to(torch.bool)):
        assert isinstance(copy, ToldMask)
        assert (copy.shape, copy.longest, copy.window) == (told.shape, told.longest, told.window)


def test_numbers_of_sequences():
    def numbers(ids, visible=None):
        return positions.number_of_sequences(torch.tensor(ids), None if visible is None else torch.tensor([visible]))

    assert numbers([[0, 1, 2, 0, 1, 0, 0]]).tolist() == [0, 0, 0, 1, 1, 2, 3]
    assert numbers([[5, 6, 7, 5, 6]]).tolist() == [0, 0, 0, 1, 1]
    assert numbers([[4, 5, 0, 1, 2, 0]]).tolist() == [0, 0, 1, 1, 1, 2]
    # Positions that stand still, or leave some out, are of one sequence.
    assert numbers([[0, 1, 1, 1, 2, 9, 10]]).tolist() == [0] * 7
    # An image that comes first: of three axes time stands still, and all are lowest once.
    assert numbers([[[0, 0, 0, 0, 2]], [[0, 0, 1, 1, 2]], [[0, 1, 0, 1, 2]]]).tolist() == [0] * 5
    axes = torch.cat((torch.arange(3), torch.arange(4))).expand(3, 1, 7).tolist()
    assert numbers(axes).tolist() == [0, 0, 0, 1, 1, 1, 1]
    # Padding at the left, within, and at the right, whatever its positions are.
    assert numbers([[1, 1, 0, 1, 2]], [0, 0, 1, 1, 1]).tolist() == [0] * 5
    assert numbers([[0, 1, 0, 2, 3]], [1, 1, 0, 1, 1]).tolist() == [0] * 5
    assert numbers([[0, 1, 0, 1, 2, 0, 0]], [1, 1, 1, 1, 1, 0, 0]).tolist() == [0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("told", [{"past_key_values": None}, {"attention_mask": torch.ones(1, 7)}], ids=str)
def test_the_positions_of_a_call_are_found(told):
    found = asked(position_ids=PLACES, **told)
    assert found.starts.tolist() == [0, 3, 7]
    assert found.longest == 4
    windowed = asked(makers.create_sliding_window_causal_mask, position_ids=PLACES, **told)
    assert windowed.window == 3
    assert asked(position_ids=torch.arange(7)[None], **told) is None


def test_values_are_read_once_a_forward_and_not_at_all_where_a_model_counts_by_itself(monkeypatch):
    looks = []
    real = positions.cut
    monkeypatch.setattr(positions, "cut", lambda *given: looks.append(1) or real(*given))
    model = make(attention="tilekern", layers=2, **WINDOW)
    for given in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(ROW)}):
        model(input_ids=ROW, **given)
        assert not looks
    for given in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(ROW)}):
        model(input_ids=ROW, position_ids=PLACES.clone(), **given)
        assert looks == [1]
        looks.clear()
        model(ROW, given.get("attention_mask"), PLACES.clone(), **{"use_cache": given.get("use_cache")})
        assert looks == [1]
        looks.clear()
    model(input_ids=IDS, position_ids=PLACES)
    model(input_ids=ROW, position_ids=PLACES, cu_seq_lens_q=STARTS, cu_seq_lens_k=STARTS, max_length_q=4)
    assert not looks
    places = PLACES.clone()
    first = model(input_ids=ROW, position_ids=places).logits
    places.copy_(torch.arange(7))
    assert worst([model(input_ids=ROW, position_ids=places).logits], [model(input_ids=ROW).logits]) < 1e-6
    assert worst([first], [model(input_ids=ROW).logits]) > 1e-3


def test_rows_of_a_batch_are_as_transformers_has_them():
    """Apart without a cache and a mask, which FlashAttention's integration never sees."""
    for given in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(IDS)}):
        ours, theirs = (make(attention=name).eval() for name in ("tilekern", "sdpa"))
        found, wanted = (model(input_ids=IDS, position_ids=PLACES, **given).logits for model in (ours, theirs))
        assert worst([found], [wanted]) < 1e-5


def test_padding_around_packed_sequences():
    """A row of padding, two sequences, and padding."""
    model = make(attention="tilekern").eval()
    ids = torch.cat((ROW[:, :2], ROW, ROW[:, :3]), 1)
    places = torch.cat((torch.ones(1, 2, dtype=torch.long), PLACES, torch.zeros(1, 3, dtype=torch.long)), 1)
    visible = torch.tensor([[0] * 2 + [1] * 7 + [0] * 3])
    found = model(input_ids=ids, position_ids=places, attention_mask=visible).logits[:, 2:9]
    wanted = torch.cat([model(input_ids=part).logits for part in ROW.split((3, 4), 1)], 1)
    assert worst([found], [wanted]) < 1e-5


def test_keys_that_the_mask_does_not_cover_are_refused():
    layer, (q, k) = torch.nn.Module(), (torch.randn(1, 2, n, 16) for n in (7, 9))
    for told in (None, ToldMask(STARTS, 4, None, 7, 7, 1), ToldMask(STARTS[:0], 7, None, 7, 8, 1)):
        with pytest.raises(InputError, match="Module hands over 9 keys for 7 queries, and its mask tells of"):
            implementation.attend(True, layer, q, k, k, told)


def test_a_layer_that_a_checkpoint_runs_again_is_refused_a_cache():
    """As torchtune, accelerate and FSDP wrap layers; eager attention fails with an error about sizes."""
    model = make(attention="tilekern", layers=1).train()
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    with pytest.raises(InputError, match="use_cache=False"):
        model(input_ids=IDS).logits.sum().backward()
    model(input_ids=IDS, use_cache=False).logits.sum().backward()


def test_a_mask_covers_a_cache_longer_than_the_prompt():
    from transformers import StaticCache

    cache = StaticCache(config=config(num_hidden_layers=2), max_cache_len=16)
    for batch in (1, 2):
        told = asked(inputs_embeds=torch.zeros(batch, 7, 8), past_key_values=cache)
        assert isinstance(told, ToldMask) or told.dtype == torch.bool
        assert told.shape == (batch, 1, 7, 16)
        place = torch.arange(16)
        assert torch.equal((told & True)[0, 0], place <= place[:7, None])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("windowed", [False, True])
def test_a_captured_model_keeps_its_kernels_where_it_was_given_no_positions(windowed, monkeypatch):
    model = make(attention="tilekern", **(WINDOW if windowed else {})).eval()
    calls = [{"input_ids": x, "use_cache": cache} for x in (IDS, ROW) for cache in (False, None)]
    wanted = [model(**call).logits for call in calls]
    before = counts()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert worst([model(**call).logits for call in calls], wanted) < 1e-6
    assert counts() == (before[0] + 8, before[1])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("windowed", [False, True])
def test_a_captured_model_computes_what_it_cannot_look_at_by_sdpa_and_says_so(windowed, monkeypatch):
    model = make(attention="tilekern", **(WINDOW if windowed else {})).eval()
    visible = torch.ones_like(IDS)
    visible[0, :3] = 0
    calls = [
        {"input_ids": ROW, "position_ids": PLACES},
        {"input_ids": ROW, "position_ids": PLACES, "use_cache": False},
        {"input_ids": ROW, "position_ids": PLACES, "attention_mask": torch.ones_like(ROW)},
        {"input_ids": IDS, "position_ids": PLACES, "use_cache": False},
        {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)},
        {"input_ids": IDS, "attention_mask": visible},
    ]

    def run():
        out = [model(**call).logits for call in calls]
        return [*out[:-1], out[-1][visible.bool()]]

    wanted, before = run(), counts()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(TilekernWarning, match="cannot be looked at while a model is compiled or captured") as said:
        found = run()
    assert worst(found, wanted) < 1e-5
    assert counts() == (before[0], before[1] + 12)
    assert len(said) == 1


@pytest.mark.usefixtures("captured")
def test_no_value_is_read_in_a_capture():
    frames = {"position_ids": PLACES}
    mask = torch.ones(1, 7, dtype=torch.bool)
    with unread():
        made = [asked(**more) for more in ({}, frames, {"attention_mask": mask}, frames | {"attention_mask": mask})]
        lengths = packing.longest(STARTS, 7)
    assert made[0] is None
    assert [type(x) for x in made[1:]] == [torch.Tensor] * 3
    for apart in (made[1], made[3]):
        assert not apart[0, 0, 3:, :3].any()
    assert lengths == 7


def test_the_longest_sequence_is_read_for_the_first_layer_alone(monkeypatch):
    reads = []
    real = torch.Tensor.__int__
    monkeypatch.setattr(torch.Tensor, "__int__", lambda x: reads.append(1) or real(x))
    starts = STARTS.clone()
    assert [packing.longest(starts, 7) for _ in range(3)] == [4, 4, 4]
    assert len(reads) == 1
    starts[1] = 1
    assert packing.longest(starts, 7) == 6
    assert packing.longest(STARTS, 7) == 4


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("windowed", [False, True])
def test_a_model_that_is_compiled_as_a_whole(windowed):
    model = make(attention="tilekern", layers=2, **(WINDOW if windowed else {})).eval()
    for call, kernels in (
        ({"input_ids": IDS}, 2),
        ({"input_ids": ROW, "use_cache": False}, 2),
        ({"input_ids": ROW, "position_ids": PLACES, "use_cache": False}, 0),
        ({"input_ids": ROW, "position_ids": PLACES}, 0),
        ({"input_ids": ROW, "position_ids": PLACES, "attention_mask": torch.ones_like(ROW)}, 0),
    ):
        wanted, before = model(**call).logits, counts()
        torch._dynamo.reset()
        with contextlib.nullcontext() if kernels else pytest.warns(TilekernWarning, match="cannot be looked at"):
            found = torch.compile(model, fullgraph=True, backend="eager")(**call).logits
        assert worst([found], [wanted]) < 1e-5
        assert counts() == (before[0] + kernels, before[1] + 2 - kernels)
        warning._said.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.nightly
def test_layers_that_are_compiled_by_themselves_run_the_kernels_on_packed_rows():
    model = make(attention="tilekern").eval()
    wanted = torch.cat([model(input_ids=part).logits for part in ROW.split((3, 4), 1)], 1)
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    before = counts()
    assert worst([model(input_ids=ROW, position_ids=PLACES).logits], [wanted]) < 1e-5
    assert worst([model(input_ids=IDS).logits], [make(attention="eager").eval()(input_ids=IDS).logits]) < 1e-5
    assert counts() == (before[0] + 4, before[1])


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.nightly
@pytest.mark.parametrize(("positions", "ran"), [({}, (1, 0)), ({"position_ids": PLACES}, (0, 1))])
def test_a_graph_that_is_broken_before_the_mask_asks_the_frames_that_run_as_python(monkeypatch, positions, ran):
    make_mask = modeling_qwen3.create_causal_mask

    def behind_a_break(*arguments, **options):
        torch._dynamo.graph_break()
        return make_mask(*arguments, **options)

    call = {"input_ids": ROW, "labels": ROW, "use_cache": False, **positions}
    wanted, before = make(attention="sdpa", layers=1).train()(**call).loss, counts()
    monkeypatch.setattr(modeling_qwen3, "create_causal_mask", behind_a_break)
    torch._dynamo.reset()
    model = make(attention="tilekern", layers=1).train()
    model.compile(backend="aot_eager")
    assert worst([model(**call).loss], [wanted]) < 1e-4
    assert counts() == (before[0] + ran[0], before[1] + ran[1])
