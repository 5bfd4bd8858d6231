"""``python -m tilekern.generate``: text as it comes, batches, ids, JSON, Ctrl-C and errors, on a tiny model."""

import json
import re
import runpy
import subprocess
import sys

import pytest
import tokenizers
import torch
from environments import ROOT
from test_text import byte_level
from transformers import GPT2Config, GPT2LMHeadModel

from tilekern.errors import ToolchainMissing
from tilekern.generate import main
from tilekern.inference import engine

PROMPT, OTHER = "a\u4f60", "0123456789"
# What the model writes at each position, whatever came before.
WRITTEN = "0123456 \u4f60\u597d, \x1b[1mGr\u00fc\u00dfe\t\U0001f600<eos> and on \u4f60\u597d!"
PAGE = ROOT / "docs" / "inference.md"
EXAMPLE = str(ROOT / "examples" / "generate_without_torch.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint that writes the ids of a text, one by position, with a tokenizer of bytes."""
    tokenizer = byte_level()
    ids, width = tokenizer.encode(WRITTEN, add_special_tokens=False).ids, 64
    assert 30 < len(ids) <= width
    end = tokenizer.token_to_id("<eos>")
    sizes = {"n_embd": width, "n_layer": 1, "n_head": 2, "n_positions": width, "tie_word_embeddings": False}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=tokenizer.get_vocab_size(), eos_token_id=end, **sizes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if ".ln_" in name and name.endswith("weight") else 0.0)
        model.transformer.wpe.weight.copy_(torch.eye(width))
        for position, token in enumerate(ids):
            model.lm_head.weight[token, position] = 1.0
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def ids_of(folder, prompt, new):
    """The tokenizer, the ids of a prompt and those that the model writes behind it."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    written = tokenizer.encode(WRITTEN, add_special_tokens=False).ids
    return tokenizer, ids, written[len(ids) - 1 :][:new]


def run(capsys, *arguments, code=0):
    capsys.readouterr()
    assert main([str(argument) for argument in (*arguments, "--dtype", "float32")]) == code
    return capsys.readouterr()


TIMES = r"tilekern: {} tokens in [\d.]+ s, the first after [\d.]+ s, then [\d.]+ tokens/s\n"


def test_a_prompt_s_text_is_the_whole_decode_and_comes_token_by_token(gpu, folder, capsys, monkeypatch):
    tokenizer, _, ids = ids_of(folder, PROMPT, 26)
    generate, came = engine.Engine.generate, []

    def told(*arguments, **options):
        for tokens in generate(*arguments, **options):
            yield tokens
            came.append(capsys.readouterr().out)

    monkeypatch.setattr(engine.Engine, "generate", told)
    last = run(capsys, folder, "--prompt", PROMPT, "--new", 26)
    assert "".join(came) + last.out == tokenizer.decode(ids).replace("\x1b", r"\x1b") + "\n"
    assert sum(map(bool, came)) > 4
    assert re.fullmatch(TIMES.format(26), last.err)


def test_prompts_of_a_batch_are_printed_each_at_its_end_under_its_number(gpu, folder, capsys):
    tokenizer, _, first = ids_of(folder, PROMPT, 20)
    _, _, second = ids_of(folder, OTHER, 20)
    over = second.index(tokenizer.token_to_id("<eos>")) + 1
    assert over < 20
    assert tokenizer.token_to_id("<eos>") not in first
    options = ("--prompt", PROMPT, "--prompt", OTHER, "--new", 20)
    wanted = "".join([f"[2]\n{tokenizer.decode(second[:over])}\n", f"[1]\n{tokenizer.decode(first)}\n"])
    ran = run(capsys, folder, *options)
    assert ran.out == wanted.replace("\x1b", r"\x1b")
    assert re.fullmatch(TIMES.format(20 + over), ran.err)
    document = json.loads(run(capsys, folder, *options, "--json").out)
    assert [one["ids"] for one in document["sequences"]] == [first, second[:over]]
    assert [one["finish_reason"] for one in document["sequences"]] == ["length", "end"]
    document = json.loads(run(capsys, folder, *options, "--json", "--ignore-ends").out)
    assert [one["ids"] for one in document["sequences"]] == [first, second]
    assert [one["finish_reason"] for one in document["sequences"]] == ["length", "length"]


def test_ids_need_no_tokenizers_and_are_printed_as_they_are_given(gpu, folder, capsys, monkeypatch):
    _, prompt, ids = ids_of(folder, PROMPT, 5)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    text = ",".join(map(str, prompt))
    assert run(capsys, folder, "--ids", text, "--new", 5).out == ",".join(map(str, ids)) + "\n"
    found = json.loads(run(capsys, folder, "--ids", text, "--new", 5, "--json").out)["sequences"]
    assert found == [
        {"prompt": None, "prompt_ids": prompt, "ids": ids, "text": None, "seed": 0, "finish_reason": "length"}
    ]
    assert run(capsys, folder, "--prompt", PROMPT, code=2) == (
        "", "tilekern: --prompt needs tokenizers, which is not installed: pip install 'tilekern[text]'\n",
    )  # fmt: skip


def test_int8_weights_write_the_same_text_where_they_lose_nothing(gpu, folder, capsys):
    """The weights are zeros and ones."""
    _, _, ids = ids_of(folder, PROMPT, 6)
    ran = run(capsys, folder, "--prompt", PROMPT, "--new", 6, "--json", "--weight-dtype", "int8")
    document = json.loads(ran.out)
    assert document["sequences"][0]["ids"] == ids
    assert (document["dtype"], document["weight_dtype"]) == ("float32", "int8")
    wrong = run(capsys, folder, "--prompt", PROMPT, "--weight-dtype", "int4", code=2).err
    assert wrong == "tilekern: weight_dtype must be int8 or that of dtype, float32, got 'int4'\n"


def test_a_paged_cache_writes_the_same_text(gpu, folder, capsys):
    _, prompt, ids = ids_of(folder, PROMPT, 6)
    options = ("--ids", ",".join(map(str, prompt)), "--new", 6, "--cache")
    assert run(capsys, folder, *options, "paged").out == ",".join(map(str, ids)) + "\n"
    wrong = run(capsys, folder, *options, "page", code=2).err
    assert wrong == "tilekern: cache must be one of static, paged, got 'page'\n"


def test_the_document_has_the_exact_text_and_its_fields_stand_in_the_page_and_in_the_help(gpu, folder, capsys):
    tokenizer, prompt, ids = ids_of(folder, PROMPT, 6)
    ran = run(capsys, folder, "--prompt", PROMPT, "--new", 6, "--json", "--context", 32)
    document = json.loads(ran.out)
    (sequence,) = document["sequences"]
    assert (document["model"], document["dtype"], document["context"]) == (str(folder), "float32", 32)
    assert sequence == {
        "prompt": PROMPT, "prompt_ids": prompt, "ids": ids, "text": tokenizer.decode(ids), "seed": 0,
        "finish_reason": "length",
    }  # fmt: skip
    assert document["tokens"] == 6
    assert 0 < document["first_token_s"] < document["generate_s"]
    assert document["tokens_per_s"] == pytest.approx(5 / (document["generate_s"] - document["first_token_s"]))
    assert re.fullmatch(TIMES.format(6), ran.err)
    section = PAGE.read_text().split("### JSON")[1].split("\n## ")[0]
    told = re.findall(r"^\| `(\w+)` \|", section, re.M)
    assert told == [name for name in document if name != "sequences"] + list(sequence)
    assert main(["--help"]) == 0
    fields = re.findall(r"\w+", capsys.readouterr().out.split("--json: ")[1].split("\n\n")[0])
    assert fields == [name for field in document for name in (field, *(sequence if field == "sequences" else ()))]


def test_one_token_has_no_rate(gpu, folder, capsys):
    assert json.loads(run(capsys, folder, "--ids", "5", "--new", 1, "--json").out)["tokens_per_s"] is None


def test_draws_follow_the_seed_and_each_prompt_has_its_own(gpu, folder, capsys):
    def ids(*more):
        options = ("--temperature", 3, "--top-k", 50, "--new", 6, "--json", *more)
        found = json.loads(run(capsys, folder, *options).out)["sequences"]
        return {one["seed"]: one["ids"] for one in found}

    twice = ids("--ids", "5,6", "--ids", "5,6", "--seed", 7)
    assert twice[7] != twice[8]
    assert ids("--ids", "5,6", "--seed", 8) == {8: twice[8]}


@pytest.mark.parametrize("form", ["text", "json"])
def test_ctrl_c_ends_with_what_came(gpu, folder, capsys, monkeypatch, form):
    tokenizer, _, ids = ids_of(folder, PROMPT, 3)
    generate = engine.Engine.generate

    def stopped(*arguments, **options):
        yield from generate(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.Engine, "generate", stopped)
    ran = run(capsys, folder, "--prompt", PROMPT, "--new", 3, *["--json"] * (form == "json"), code=130)
    if form == "json":
        (sequence,) = json.loads(ran.out)["sequences"]
        assert (sequence["ids"], sequence["finish_reason"]) == (ids, "stopped")
    else:
        assert ran.out == tokenizer.decode(ids) + "\n"
    assert re.fullmatch(TIMES.format("stopped; 3"), ran.err)


def test_ctrl_c_while_the_model_is_loaded_is_one_line(gpu, folder, capsys, monkeypatch):
    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("tilekern.inference.load", stopped)
    assert run(capsys, folder, "--prompt", PROMPT, code=130) == ("", "tilekern: stopped\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["FOLDER"], "give prompts by --prompt TEXT, or by --ids 1,2,3"),
        (["FOLDER", "--prompt", "a", "--ids", "1"], "by --ids 1,2,3, not by both"),
        (
            ["FOLDER", "--ids", "1,b"],
            "--ids must be whole numbers with commas between them, such as 15496,11, got",
        ),
        (["FOLDER", "--ids", "1,9999"], "ids are whole numbers from 0 to"),
        (["FOLDER", "--ids", ""], "--ids must be whole numbers"),
        (["FOLDER", "--ids", "1", "--new", "0"], "'--new': 0 is not in the range"),
        (["FOLDER", "--ids", "1", "--new", "99"], "do not fit a context of 64"),
        (["FOLDER", "--ids", "1", "--top-p", "2"], "top_p must be a number from 0 to 1, got 2.0"),
        (["FOLDER", "--ids", "1", "--gpu", "9"], "there is no GPU 9"),
        (["nowhere/at/all", "--prompt", "a"], "nowhere/at/all is neither a folder nor a file"),
        (["nowhere/at/all", "--ids", "1"], "nowhere/at/all is neither a folder nor a file"),
        (["", "--ids", "1"], "'' is neither a folder nor a file"),
        (["FOLDER", "--prompts", "a"], "No such option"),
    ],
)
def test_bad_input_is_one_line(gpu, folder, capsys, arguments, said):
    ran = run(capsys, *(str(folder) if word == "FOLDER" else word for word in arguments), code=2)
    assert ran.out == ""
    assert re.fullmatch(r"tilekern: [^\n]+\n", ran.err)
    assert said in ran.err


def test_a_compiler_that_is_missing_is_4(gpu, folder, capsys, monkeypatch):
    def missing(*arguments, **options):
        raise ToolchainMissing("the tile compiler is not installed")

    monkeypatch.setattr("tilekern.inference.load", missing)
    ran = run(capsys, folder, "--ids", "1", code=4)
    assert ran == ("", "tilekern: the tile compiler is not installed\n")


def test_a_tokenizer_with_more_ids_than_the_model_is_the_engine_s_error(gpu, folder, capsys, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    tokenizer = byte_level()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size() - 1
    assert f"from 0 to {size - 1}, got {size}\n" in run(capsys, tmp_path, "--prompt", "a <more>", code=2).err


def test_the_example_prints_each_text(gpu, folder, capsys, monkeypatch):
    """They end within a character, of which some bytes wait."""
    tokenizer, _, ids = ids_of(folder, PROMPT, 24)
    options = ("--model", str(folder), "--prompt", PROMPT, "--new", "24", "--samples", "2", "--dtype", "float32")
    monkeypatch.setattr(sys, "argv", [EXAMPLE, *options])
    capsys.readouterr()
    runpy.run_path(EXAMPLE, run_name="__main__")
    text = PROMPT + tokenizer.decode(ids)
    printed = capsys.readouterr()
    assert printed.out == f"{text}\n--- 2\n{text}\n"
    assert printed.err.startswith("48 tokens in ")


@pytest.mark.processes
def test_the_example_imports_no_torch():
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print('torch' in sys.modules, 'numpy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code, EXAMPLE], capture_output=True, text=True, check=True)
    assert ran.stdout == "False False\n"
