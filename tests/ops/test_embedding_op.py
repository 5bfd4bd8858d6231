"""embedding has the bits of torch's lookups, for ids of any shape, and refuses what does not fit."""

import pytest
import torch
from op_samples import DTYPES, LAYOUTS, laid_out, launched_by

import tilekern
from tilekern.errors import NoVariant
from tilekern.ops import embedding
from tilekern.runtime.plans import InterpretedPlan

VOCABULARY, PLACES, COLUMNS = 11, 7, 40


def tensors(dtype=torch.float32, *, shape=(2, 5), positioned=True, layout="contiguous", kind=torch.int64):
    """Ids and positions, of which one each is outside of its table, and tables."""
    generator = torch.Generator().manual_seed(0)

    def numbers(most, outside):
        drawn = torch.randint(most, shape, generator=generator)
        drawn.view(-1)[outside : outside + 1] = -1 if outside else most
        return laid_out(drawn.to(kind), layout)

    def table(rows):
        return laid_out(torch.randn(rows, COLUMNS, generator=generator).to(dtype), layout)

    given = {"ids": numbers(VOCABULARY, 0), "weight": table(VOCABULARY)}
    return given | ({"positions": numbers(PLACES, 1), "position_weight": table(PLACES)} if positioned else {})


def by_torch(ids, weight, positions=None, position_weight=None):
    there, rows = (ids >= 0) & (ids < len(weight)), torch.nn.functional.embedding
    found = rows(ids.where(there, 0), weight)
    if positions is not None:
        is_known = (positions >= 0) & (positions < len(position_weight))
        found, there = found + rows(positions.where(is_known, 0), position_weight), there & is_known
    return found.masked_fill(~there[..., None], 0)


def check(given):
    found = embedding(**given)
    assert found.is_contiguous()
    assert found.dtype == given["weight"].dtype
    assert torch.equal(found, by_torch(**given))


@pytest.mark.parametrize("positioned", [False, True])
@pytest.mark.parametrize("shape", [(2, 5), (3,), (1, 2, 3), ()])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch_has_the_bits_of_torch(dtype, shape, positioned):
    assert launched_by(lambda: check(tensors(dtype, shape=shape, positioned=positioned))) == {"embedding": 1}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_any_strides_and_integers(layout, kind):
    check(tensors(layout=layout, kind=kind))


@pytest.mark.parametrize("positioned", [False, True])
def test_torch_s_operations_where_there_is_no_kernel(positioned, monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    check(tensors(torch.float64, positioned=positioned))
    assert embedding(**tensors(shape=(0, 3), positioned=positioned)).shape == (0, 3, COLUMNS)


def test_where_no_variant_allows_the_arguments_torch_does_the_work(monkeypatch):
    def refuse(*_):
        raise NoVariant("embedding: none of the variants allows the arguments")

    monkeypatch.setattr(InterpretedPlan, "launch", refuse)
    with pytest.warns(RuntimeWarning, match="none of the variants"):
        check(tensors())


def test_a_gradient_is_refused():
    given = tensors()
    given["position_weight"].requires_grad_()
    with pytest.raises(RuntimeError, match="embedding has no gradient"):
        embedding(**given)
    with torch.no_grad():
        check(given)


def test_it_runs_in_the_invariant_mode():
    with tilekern.invariant():
        assert launched_by(lambda: check(tensors(torch.bfloat16))) == {"embedding": 1}


WRONG = [
    ({"weight": torch.zeros(3)}, r"weight must be \[vocabulary, columns\] and not empty, got \[3\]"),
    ({"weight": torch.zeros(0, COLUMNS)}, r"weight must be \[vocabulary, columns\] and not empty"),
    ({"positions": None}, "positions and position_weight must both be given"),
    ({"positions": torch.zeros(5).int()}, r"positions must have the shape \[2, 5\], got \[5\]"),
    ({"position_weight": torch.zeros(3, 8)}, r"position_weight must be \[positions, 40\] and not empty, got \[3, 8\]"),
    ({"position_weight": torch.zeros(0, COLUMNS)}, r"position_weight must be \[positions, 40\] and not empty"),
    ({"position_weight": torch.zeros(3, COLUMNS).half()}, "position_weight must be torch.float32 as weight is"),
    ({"ids": torch.zeros(2, 5)}, "ids must be of an integer dtype"),
    ({"weight": torch.zeros(3, COLUMNS, device="meta")}, "weight is on meta"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said for _, said in WRONG])
def test_wrong_arguments_are_named(changes, said):
    with pytest.raises(ValueError, match=f"^embedding: {said}"):
        embedding(**tensors() | changes)


def test_compiled_and_on_meta():
    given = tensors(torch.bfloat16)
    found = torch.compile(embedding, backend="aot_eager", fullgraph=True)(**given)
    assert torch.equal(found, by_torch(**given))
    with tilekern.trace(gpu="H200") as noted:
        assert embedding(**{name: x.to("meta") for name, x in given.items()}).shape == (2, 5, COLUMNS)
    assert [spec if isinstance(spec, str) else spec.name for spec, _ in noted.problems] == ["embedding"]
