"""minGPT's state dicts: the logits of all its sizes beside torch, and weights that came from Hugging Face's GPT-2."""

import json

import pytest
import torch
from emulated import read
from small_models import OF_GPT2, draw_weights, ids_of
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.mingpt import SIZES, MinGPT, state_of
from tilekern.inference import load

VOCABULARY = 97
LARGEST = [pytest.param("gpt2", marks=pytest.mark.nightly)]


def saved_mingpt(size, path):
    model = MinGPT(size, VOCABULARY, positions=16)
    draw_weights(model, 0.8 * SIZES[size][2] ** -0.5)
    torch.save(model.state_dict(), path)
    return model


def distance(x, reference):
    return (x.double() - reference).norm() / reference.norm()


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [*(size for size in SIZES if size != "gpt2"), *LARGEST])
def test_logits_of_a_state_dict_are_as_near_as_torch_s(gpu, tmp_path, size, dtype):
    """Judged by float64's, and by how far torch's in the same dtype are from them."""
    model, ids = saved_mingpt(size, tmp_path / "model.pt"), ids_of(6, 6)
    engine = load(tmp_path, heads=SIZES[size][1], dtype=str(dtype).removeprefix("torch."))
    found, given = read(engine.forward(ids)), torch.tensor(ids)
    with torch.no_grad():
        by_torch = model.to(dtype)(given).flatten(0, 1)
        # The weights are those that were rounded on their way to the GPU.
        reference = model.double()(given).flatten(0, 1)
    assert distance(found, reference) < 1.3 * distance(by_torch, reference)
    assert distance(found, reference) < {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}[dtype]


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_carried_over_from_hugging_face_have_the_same_bits(gpu, tmp_path, is_tied):
    (tmp_path / "theirs").mkdir()
    theirs = GPT2LMHeadModel(GPT2Config(**OF_GPT2, tie_word_embeddings=is_tied)).eval()
    draw_weights(theirs, 0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    # A tied head is stored as well, as minGPT has no other.
    ours = state_of(theirs.state_dict())
    torch.save(ours, tmp_path / "model.pt")
    ids = ids_of(7)
    found = [
        read(load(where, dtype="float32", **more).forward(ids)).clone()
        for where, more in ((tmp_path / "theirs", {}), (tmp_path / "model.pt", {"heads": 3}))
    ]
    assert torch.equal(*found)
    with torch.no_grad():
        assert distance(found[0], theirs.double()(torch.tensor(ids)).logits[0]) < 2e-6


def test_the_folder_of_a_run_of_mingpt_s(gpu, tmp_path):
    """Its config.json is minGPT's own, which does not tell the sizes."""
    model = saved_mingpt("nano", tmp_path / "model.pt")
    (tmp_path / "config.json").write_text(json.dumps({"system": {"seed": 3407}, "model": {"model_type": "gpt-nano"}}))
    (ids,) = ids_of(5)
    (tokens,) = load(tmp_path, heads=3, dtype="float32").generate([ids], 1)
    with torch.no_grad():
        assert tokens == [model(torch.tensor([ids]))[0, -1].argmax()]
