"""Every patched model computes the same by the named kernels, and is put back exactly."""

import pytest
import torch
from tiny_qwen3 import launched, launches, same, worst

import tilekern
from tilekern.patch import registry


def patch_class(model, **ops):
    """Patch the family of a model."""
    return tilekern.apply(model_type=model.config.get_text_config().model_type.removesuffix("_text"), **ops)


WAYS = {"class": patch_class, "model": tilekern.apply_to_model}
both_ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def only(*ops):
    """Switches by which some ops alone are patched."""
    return {op: op in ops for op in registry.known_ops()}


def counted(run):
    """Return a function's result, and the launches of each kernel in it."""
    before = launches()
    return run(), launched(before)


def held(model, way, run, kernels=(), tolerance=1e-5, exactly=False, **ops):
    """Hold what ``run`` gives for a model that ``way`` patches to what it gives before, and after all is put back.

    Args:
        model: the model, as it is.
        way: patches it with ``ops``.
        run: makes tensors of the model.
        kernels: launches in a run by kernel, 0 of what must not run.
        tolerance: of the largest relative error among the tensors.
        exactly: whether there are no launches but these.

    Returns:
        The launches in a run of the patched model.
    """
    expected = run(model)
    assert way(model, **ops)
    found, ran = counted(lambda: run(model))
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert worst(found, expected) < tolerance
    assert {name: ran.get(name, 0) for name in kernels} == dict(kernels)
    assert not exactly or ran == kernels
    is_put_back(lambda: run(model), expected)
    return ran


def is_put_back(run, expected):
    """After a reset a function gives what it gave, bit by bit, and launches nothing."""
    tilekern.reset()
    again, ran = counted(run)
    assert same(again, expected)
    assert not ran


def as_exact(ours, torchs, exact):
    """Hold the errors of tensors of two bytes to those of the model without patches, both against float32.

    The two round different intermediate values, so that neither is closer by rule: a quarter more is allowed, and 4e-3,
    one unit in the last place of a bfloat16.
    """
    for own, other, reference in zip(ours, torchs, exact, strict=True):
        assert worst([own], [reference]) <= 1.25 * worst([other], [reference]) + 4e-3


def trained(model, ids):
    """The loss, the logits and all gradients of a training step, by name."""
    torch.manual_seed(0)
    model.train().zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    gradients = {path: x.grad.clone() for path, x in model.named_parameters() if x.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach()} | gradients


def alike(found, expected):
    """Hold named tensors to others: numbers nearly, with their dtypes, and all else exactly."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype
        if x.is_floating_point():
            assert torch.allclose(found[name], x, rtol=1e-4, atol=1e-6 + 1e-5 * float(x.norm())), name
        else:
            assert torch.equal(found[name], x), name


def in_one_graph(model):
    """A model that is compiled as a whole."""
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def reasons(model, *ops):
    """Why modules of a model are not served by some ops, by module and op; empty where they are."""
    return {(row.module, row.op): row.reason for row in tilekern.report(model).rows if row.op in ops}
