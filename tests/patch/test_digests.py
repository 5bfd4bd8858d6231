"""Digests of functions, and the digests of the table."""

import ast
import copy
import functools
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import tilekern
from tilekern.patch import experts, loss, matching, patcher, patterns
from tilekern.patch import listing as command_line
from tilekern.patch.__main__ import main
from tilekern.patch.digests import FORMS, Table, digest_of, digest_of_tree, quoted, shape_of
from tilekern.patch.families import FAMILIES
from tilekern.patch.registry import patches
from tilekern.runtime.switches import OPS

pytestmark = pytest.mark.processes
SOME = ("gemma3", "gpt2", "llama4", "qwen3")

PLAIN = """
class Norm:
    def forward(self, x, eps=1e-6):
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
"""
SAME = '''
# A comment.

class Norm:
        """A docstring."""
        def forward(self, x, eps = 1e-6):
            """Another."""

            return (   # to the right
                x * (x.pow(2).mean(-1, keepdim=True)
                     + eps).rsqrt())
'''


def digest_in(text, path):
    """The digest of the function or class at a dotted path in a module's text."""
    found = ast.parse(text)
    for name in path.split("."):
        found = next(node for node in found.body if getattr(node, "name", None) == name)
    return digest_of_tree(found)


def test_words_and_layout_do_not_matter():
    assert digest_in(PLAIN, "Norm.forward") == digest_in(SAME, "Norm.forward")
    assert digest_in(PLAIN, "Norm") == digest_in(SAME, "Norm")


@pytest.mark.parametrize(
    ("old", "new"), [("1e-6", "1e-5"), ("pow(2)", "pow(3)"), (" + eps", " - eps"), ("keepdim=True", "")]
)
def test_code_does(old, new):
    assert digest_in(PLAIN, "Norm.forward") != digest_in(PLAIN.replace(old, new), "Norm.forward")


def test_other_strings_and_decorators_change_the_digest():
    bare = digest_in("def f():\n    return 1", "f")
    assert digest_in("def f():\n    'said'\n    return 1", "f") == bare
    assert digest_in("def f():\n    return 1\n    'said'", "f") != bare
    assert digest_in("@jit\ndef f():\n    return 1", "f") != bare


def test_the_digest_is_the_same_on_every_python():
    """Computed once with 3.11, 3.12 and 3.13, whose syntax trees differ in their empty fields."""
    assert digest_in("def f(a, *b, c=None, **d):\n    return f'{a!r:>3}', b, None", "f") == PINNED


PINNED = "d49ea07e3e742a74f7e990418f9dd8b3a7bc4c554e0e33138936f4783a5455b4"


def test_a_function_and_its_text_agree():
    assert digest_of(digest_of) == digest_in(Path(digest_of.__code__.co_filename).read_text(), "digest_of")


def test_what_is_not_there():
    with pytest.raises(ValueError, match="not a plain Python function"):
        digest_of(len)
    made: dict = {}
    exec("def f():\n    return 1", made)
    with pytest.raises(ValueError, match="source is not at hand"):
        digest_of(made["f"])


def test_functions_that_the_kernels_package_wraps_are_seen_through():
    layers = pytest.importorskip("kernels.layer")

    def rotate(q, k):
        return k, q

    wrapped = layers.use_kernel_forward_from_hub("rotary_pos_emb")(rotate)
    assert wrapped is not rotate
    assert digest_of(wrapped) == digest_of(rotate)
    wrapped.forward = lambda q, k: (q, k)
    with pytest.raises(ValueError, match="not a plain Python function"):
        digest_of(wrapped)


def test_what_transformers_wraps_around_a_layer_is_seen_through_and_nothing_else():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    forward = Qwen3DecoderLayer.forward
    text = Path(importlib.util.find_spec(Qwen3DecoderLayer.__module__).origin).read_text(encoding="utf-8")
    assert digest_of(forward) == digest_in(text, "Qwen3DecoderLayer.forward")

    @functools.wraps(forward)
    def timed(*args, **kwargs):
        return forward(*args, **kwargs)

    with pytest.raises(ValueError, match="something has been wrapped around it"):
        digest_of(timed)


def test_the_table_knows_the_installed_release():
    for family in FAMILIES.values():
        assert {patch.op for patch in family.patches()} >= set(family.ops), family.model_type
        assert all(patch.attribute for patch in family.patches()), family.model_type


def test_the_command_prints_digests(tmp_path, capsys):
    def run(*arguments):
        code = main(list(arguments))
        out, errors = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, errors)

    installed, models = (
        Path(importlib.util.find_spec("transformers").origin).parent,
        tmp_path / "some/transformers/models",
    )
    models.mkdir(parents=True)
    for family in SOME:
        (models / family).symlink_to(installed / "models" / family)
    done = run(str(tmp_path / "some"))
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [line[0] for line in lines].count("missing") == len(FAMILIES) - len(SOME)
    assert {line[0] for line in lines} == {"known", "missing"}
    known = {(line[1], line[3]) for line in lines if line[0] == "known"}
    assert known >= {(patch.op, patch.target) for family in SOME for patch in patches(family)}
    old = tmp_path / "transformers" / "models" / "qwen3"
    old.mkdir(parents=True)
    (old / "modeling_qwen3.py").write_text("class Qwen3RMSNorm:\n    def forward(self, x):\n        return x\n")
    said = run(str(tmp_path)).stdout.splitlines()
    assert sum("modeling_qwen3 has a form that is known" in line for line in said) == len(FAMILIES["qwen3"].ops)
    assert sum("modeling_llama is not there" in line for line in said) == 1
    for wrong in (str(tmp_path / "none"), "--folder"):
        done = run(wrong)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert wrong in done.stderr
    assert run("-h").stdout == run("--help").stdout != ""
    assert run("--version").stdout == f"tilekern {tilekern.__version__}\n"


@pytest.mark.parametrize(
    ("path", "old", "new", "form"),
    [
        ("Qwen3RMSNorm.forward", "variance_epsilon)", "variance_epsilon + 1)", "norms.py:{} LlamaRMSNorm.forward"),
        ("apply_rotary_pos_emb", "+ (rotate_half(q)", "- (rotate_half(q)",
         "rotations.py:{} llama_apply_rotary_pos_emb"),
        ("Qwen3ForCausalLM.forward", "self.lm_head(", "2 * self.lm_head(", "heads.py:{} LlamaForCausalLM.forward"),
    ],
)  # fmt: skip
def test_the_command_shows_what_a_release_has_changed(tmp_path, capsys, path, old, new, form):
    """Between the nearest form and what lies in a folder: file, class or function, and line of both."""
    code = Path(importlib.util.find_spec("transformers.models.qwen3.modeling_qwen3").origin).read_text()
    altered = tmp_path / "transformers" / "models" / "qwen3" / "modeling_qwen3.py"
    altered.parent.mkdir(parents=True)
    altered.write_text(code)
    assert main(["--diff", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    assert code.count(old) == 1
    altered.write_text(code.replace(old, new))
    assert main(["--diff", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    holder, _, name = path.rpartition(".")
    start = code.index(f"class {holder}(") if holder else 0
    number = code[: code.index(f"def {name}(", start)].count("\n") + 1
    at = lines.index(f"+++ {altered}:{number} {path}")
    file, _, quote = form.partition(":{} ")
    text = (FORMS / file).read_text()
    holder, _, name = quote.rpartition(".")
    number = text[: text.index(f"def {name}(", text.index(f"class {holder}:") if holder else 0)].count("\n") + 1
    assert lines[at - 1] == f"--- tilekern/patch/forms/{form.format(number)}"
    changed = [line for line in lines[at + 1 :] if line.startswith(("+", "-"))]
    assert new.replace("(rotate_half(q)", "rotate_half(q)") in "".join(x for x in changed if x.startswith("+ "))


def test_each_form_serves_an_op():
    """No form is quoted twice, and those of whole functions are all in a table."""
    tables = [x for module in (matching, experts, loss) for x in vars(module).values() if isinstance(x, Table)]
    used = {(table.file, name) for table in tables for row in table.rows for name in row.split(" + ")}
    for file in ("norms", "mlps", "rotations", "experts"):
        forms = quoted(file)
        assert len({shape_of(function) for function in forms.values()}) == len(forms)
        by_patterns = {"GPT2MLP", "PhiMLP"}
        assert {(file, name.removesuffix(".forward")) for name in forms} <= used | {(file, x) for x in by_patterns}


def test_forms_of_statements_match_their_patterns():
    def attention(function):
        norms, rotations = {"q_norm", "k_norm", "qk_norm"}, ("apply_rotary_pos_emb", "apply_rotary_emb")
        turned = sum(patterns.qk_norm_rope(function, norms, rotation) for rotation in rotations)
        return turned or patterns.projected(function)

    sums = functools.partial(patterns.sums_and_norms, norms={"post_attention_layernorm", "pre_feedforward_layernorm"})
    for file, pattern in (("layers", sums), ("attentions", attention), ("heads", patterns.head_and_loss)):
        forms = {name: copy.deepcopy(x) for name, x in quoted(file).items() if name.endswith(".forward")}
        assert not [name for name, x in forms.items() if not pattern(x)]


def test_the_command_counts_by_op_on_one_screen(capsys, monkeypatch):
    found = patcher.list_patches("qwen3")
    odd = replace(found[0], status="changed", reason="it is another one")
    monkeypatch.setattr(command_line, "list_patches", lambda _: [*found[1:], odd])
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    assert {line.split()[0]: line.split()[1:3] for line in lines[1:-2]} == {
        one.patch.op: ["0" if one is found[0] else "1", "families"] for one in found
    }
    assert lines[-2].split()[:3] == ["changed", found[0].patch.op, "qwen3"]
    assert lines[-2].endswith("it is another one")
    assert lines[-1].startswith(f"1 families, {len(found)} patches, 1 do not fit")


def test_the_command_filters_by_model_and_op_and_has_json(capsys):
    assert main(["--model", "llama", "--op", "rope", "--json"]) == 0
    ((release),) = json.loads(capsys.readouterr().out)
    rows = release["patches"]
    for row, path in zip(rows, ("apply_rotary_pos_emb", "LlamaAttention.forward"), strict=True):
        assert (row["op"], row["model_type"], row["status"]) == ("rope", "llama", "available")
        assert row["target"] == f"transformers.models.llama.modeling_llama.{path}"
        assert row["digest"] in {digest for patch in patches("llama") for digest in patch.digests}
    assert main(["--model", "llama"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = dict.fromkeys(line.split()[1] for line in lines[1:])
    assert list(named) == [op for op in OPS if op in FAMILIES["llama"].ops]
    assert max(map(len, lines)) <= 100
    assert main(["--model", "llama", "--op", "layer_norm"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["no code of llama has a form that is known"]
    for arguments, said in ((["--model", "lama"], "did you mean llama?"), (["--op", "ropes"], "unknown op 'ropes'")):
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("tilekern: ")
        assert said in line


def test_the_command_takes_a_module_of_another_model(capsys, monkeypatch, tmp_path):
    source = matching.path_of("transformers.models.qwen3.modeling_qwen3").read_text()
    source = source.replace("Qwen3", "Mine").replace("from ...", "from transformers.")
    for name in ("of_mine/modeling.py", "modeling_of_mine.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name, own in (("of_mine.modeling", "of_mine"), ("modeling_of_mine", "modeling_of_mine")):
        assert main(["--model", name]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
        assert [line[:3] for line in lines] == [["available", op, own] for op in OPS if op in FAMILIES["qwen3"].ops]
        assert name not in sys.modules
    assert main(["--model", "blt"]) == 0
    assert "BltMLP.forward" in capsys.readouterr().out
