"""Small models of 8-bit floats on a GPU under what else their users do; quick, as all layers have one size."""

import json
import threading
from pathlib import Path

import fp8_training as training
import pytest
import torch
from gpu_processes import assert_ranks_end_well, ended

import tilekern
import tilekern.fp8
from tilekern.compile.toolchain import toolkit
from tilekern.patch.graphs import graphs_of
from tilekern.spec.targets import here

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")]
ROWS = 8192


@pytest.fixture(autouse=True)
def hopper():
    """Skip GPUs without 8-bit floats; what ran must not have fallen back."""
    if not here().has_fp8:
        pytest.skip("8-bit floats need a GPU of sm_90 or newer")
    yield
    tilekern.reset()
    assert not training.fallbacks()


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


def test_a_step_is_near_bfloat16s_and_repeats():
    plain, found, again = training.step(training.made(converted=False)), *(training.step(training.made()) for _ in "12")
    assert abs(found[0] - plain[0]) / plain[0] < 0.02
    for one, other in zip(found[1:], plain[1:], strict=True):
        assert torch.nn.functional.cosine_similarity(one.flatten().float(), other.flatten().float(), 0) > 0.95
    assert_same(again, found)


@pytest.mark.parametrize("power", [16, -20])
def test_gradients_of_a_scaled_loss_are_scaled_to_the_bit(power):
    plain, scaled = (training.step(training.made(), scale) for scale in (1.0, 2.0**power))
    assert_same([x / 2.0**power for x in scaled[1:]], plain[1:])


def test_expandable_segments_give_the_same_losses():
    run = ended(Path(training.__file__), PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout.splitlines()[-1]) == {"losses": training.losses(training.made()), "fallbacks": {}}


def test_layers_without_kernels_run_in_their_dtype_and_are_counted(tmp_path):
    found = []
    for plain in ((), ("plain",)):
        # No pack has kernels of this many columns.
        environment = {"TILEKERN_CACHE_DIR": str(tmp_path), "TILEKERN_ON_MISS": "fallback"}
        run = ended(Path(training.__file__), "528", *plain, **environment)
        assert run.returncode == 0, run.stderr[-2000:]
        found.append(json.loads(run.stdout.splitlines()[-1]))
    assert found[0]["losses"] == found[1]["losses"]
    # Each layer of each step: the MLP's are no op of their own where nothing is patched.
    assert found[0]["fallbacks"] == {"fp8_matmul": 2 * training.LAYERS}
    assert found[1]["fallbacks"] == {}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs here")
def test_a_gpu_that_is_not_current_gives_the_same_bits():
    wanted = training.step(training.made())
    found = training.step(training.made(device="cuda:1"))
    assert torch.cuda.current_device() == 0
    assert_same([x.to("cuda:0") for x in found], wanted)


def test_captured_steps_have_the_bits_of_eager_ones():
    # Of eager attention, transformers' mask waits for the GPU: such a step cannot be captured.
    model = tilekern.graphed(training.made(patched=True))
    assert training.losses(model, 6) == training.losses(training.made(patched=True), 6)
    assert graphs_of(model)[""].replays >= 2, str(graphs_of(model)[""])


def test_threads_train_models_side_by_side():
    wanted, found = training.losses(training.made(), 3), [None, None]
    models = [training.made() for _ in found]

    def train(n):
        with torch.cuda.stream(torch.cuda.Stream()):
            found[n] = training.losses(models[n], 3)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=train, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted, wanted]


def test_a_scaler_of_losses_sees_what_is_not_finite_and_steps_else():
    model, scaler, ids = training.made(torch.float32), torch.amp.GradScaler("cuda", init_scale=2.0**10), training.ids()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weight = model.model.layers[0].mlp.up_proj.weight
    for factor, moves in ((1.0, True), (float("inf"), False)):
        before, scale = weight.detach().clone(), scaler.get_scale()
        optimizer.zero_grad()
        with torch.amp.autocast("cuda", torch.float16):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, weight) != moves
        assert (scaler.get_scale() < scale) != moves


def test_of_an_input_one_byte_for_a_number_stays():
    layer = torch.nn.Linear(training.SIDE, training.SIDE, bias=False, device="cuda", dtype=torch.bfloat16)
    layer.__class__ = tilekern.fp8.Linear
    x = torch.randn(ROWS, training.SIDE, device="cuda", dtype=torch.bfloat16)
    layer(x).sum().backward()  # which compiles, and makes the gradient
    torch.cuda.synchronize()
    del x
    before = torch.cuda.memory_allocated()
    y = layer(torch.randn(ROWS, training.SIDE, device="cuda", dtype=torch.bfloat16))
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    # Numbers, and scales of 4 bytes for each row.
    assert kept <= ROWS * (training.SIDE + 4) + 65536
    (y.sum() * 0).backward()


def test_queries_and_keys_are_kept_once_and_the_bits_are_the_same(monkeypatch):
    found, kept = [], []
    for is_lean in (True, False):
        if not is_lean:
            monkeypatch.setattr("tilekern.ops.fp8_layer_products.Fp8Products.is_lean", False)
        model = training.made(patched=True)
        found.append(training.step(model))  # which compiles
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = training.loss_of(model)
        kept.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        del loss, model
    assert_same(*found)
    numbers = 2 * training.SIZES["num_hidden_layers"] * training.ids().numel() * training.SIDE
    assert kept[1] - kept[0] == pytest.approx(2 * numbers, rel=0.02)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs here")
def test_two_gpus_gather_8_bits_with_the_bits_of_whole_weights(tmp_path):
    assert_ranks_end_well(tmp_path, "fp8_worker.py", 2, tmp_path)
