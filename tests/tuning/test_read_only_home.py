"""A home that cannot be written: tuning goes on with --cache-dir, and says what it could not write.

The user is one whom permissions bind: where the tests run as root, root without the capabilities to override them.
"""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from environments import environment

from tilekern.cache import Store
from tilekern.compile.toolchain import toolkit

ROOT = Path(__file__).parents[2]
CAPABILITIES = "-dac_override,-dac_read_search,-fowner"
BOUND = ["setpriv", f"--bounding-set={CAPABILITIES}", f"--inh-caps={CAPABILITIES}"] if os.geteuid() == 0 else []
KEY = (
    "tokens=2048,batch=1,heads=16,kv_heads=8,head_dim=128,full=False,inverse=False,dtype=bfloat16,angle_dtype=bfloat16"
)
# A small model whose heads are those of Qwen3-0.6B: what run.sh has tuned, no test has to compile anew.
CONFIG = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 2, "vocab_size": 333,
}  # fmt: skip
TUNE = ["-m", "tilekern.tune", "acme/tiny", "--gpu", "B200", "--ops", "rope", "--tokens", "2048"]
# What loads no model.
ONE = ["--gpu", "B200", "--problem", "swiglu rows=64,columns=48,dtype=bfloat16"]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(BOUND) and shutil.which("setpriv") is None, reason="root is bound by nothing here"),
    pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed"),
]


@pytest.fixture
def hub():
    """As much of the hub as its client asks for one small file; its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found = self.path.startswith("/acme/tiny/resolve/") and self.path.endswith("/config.json")
            body = json.dumps(CONFIG).encode() if found else b""
            self.send_response(200 if found else 404)
            for name, value in (("ETag", f'"{"a" * 40}"'), ("X-Repo-Commit", "0" * 40), ("Content-Length", len(body))):
                self.send_header(name, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 (what the server calls)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir(mode=0o555)
    folder.chmod(0o555)
    yield folder
    assert not list(folder.iterdir())


@pytest.fixture
def run(home, hub):
    """Run Python there; what has been printed, and the lines of standard error that are no progress bar."""
    away = ("TILEKERN_", "XDG_", "HF_", "HUGGINGFACE_", "COLUMNS")

    def run(*command, code=0, **env):
        kept = environment(without=away, HOME=str(home), HF_ENDPOINT=hub)
        ran = subprocess.run(
            [*BOUND, sys.executable, *command],
            env=kept | env, cwd=home, capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        assert ran.returncode == code, ran.stderr
        return ran.stdout, [line for line in ran.stderr.splitlines() if "━" not in line]

    return run


def test_the_home_is_one_that_cannot_be_written(run, home):
    code = "import os, pathlib\ntry: pathlib.Path.home().joinpath('x').touch()\nexcept PermissionError: print('bound')"
    assert run("-c", code) == ("bound\n", [])


@pytest.mark.nightly
def test_tuning_goes_on_with_another_cache_and_names_what_it_could_not_write(run, home, tmp_path):
    """Under the policy that seals, for a model of the hub: neither the secret nor the hub's cache can be written."""
    out, said = run(*TUNE, "--cache-dir", str(tmp_path / "cache"), TILEKERN_TRUST="signed")
    assert "2 records in " in out
    hubs, seals, lines = said
    assert hubs.startswith(f"tilekern: cannot write the hub's cache, {home}/.cache: Permission denied; ")
    assert seals.startswith(
        f"tilekern: cannot write the secret of your seals, {home}/.config/tilekern/seal.key: Permission denied; "
    )
    assert lines.endswith("; what this run compiles, a later run compiles anew")
    store = Store(tmp_path / "cache")
    assert [entry.record.provenance for entry in store.entries()] == ["predicted"] * 2
    tools_go_on_with(run, tmp_path)


def tools_go_on_with(run, folder):
    """Every command of the cache's, on the cache that was just filled."""
    pack, key, away = str(folder / "a.pack"), str(folder / "a.key"), f"file://{folder}/away.pack"
    here = ["--cache-dir", str(folder / "cache")]
    commands = [
        ["ls", *here], ["ls", "--layers", *here], ["stats", *here], ["verify", *here], ["show", "rope", KEY, *here],
        ["why", "rope", KEY, "--gpu", "B200", *here], ["diff", str(folder / "cache"), str(folder / "cache")],
        ["wanted", "--clear", *here], ["pack", pack, *here], ["keygen", key], ["sign", pack, "--key", key],
        ["unpack", pack, *here], ["wheel", str(folder / "dist"), "--name", "acme", "--version", "1", *here],
        ["push", pack, away], ["pull", away, *here], ["prune", "--stale", "--yes", *here],
        ["clear", "--all", "--yes", *here],
    ]  # fmt: skip
    for command in commands:
        out, said = run("-m", "tilekern.cache_tools", *command)
        assert out, command
        assert said == [], command
    assert not list(Store(folder / "cache").entries())


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(ONE, id="tune", marks=pytest.mark.nightly),
        pytest.param(["preflight", *ONE, "--fix"], id="fix", marks=pytest.mark.nightly),
        pytest.param(["preflight", *ONE, "--fix", "--by", "compile"], id="compile", marks=pytest.mark.nightly),
        pytest.param(["serve", "--gpu", "B200", "--once"], id="serve"),
    ],
)
def test_without_another_cache_one_is_asked_for(run, home, command):
    out, (error,) = run("-m", "tilekern.tune", *command, code=2)
    assert out == ""
    assert f"{home}/.cache/tilekern" in error
    assert "Permission denied; choose another folder" in error
