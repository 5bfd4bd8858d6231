#!/usr/bin/env bash
# Lint, types and tests that need no GPU.
#
#   bash tests/run.sh          what a change must pass: on a branch the tests that its changes since origin/main can
#                              reach (tests/rooms.py), else all, with a share of the parameters; the README's commands,
#                              a whole tuning run among them, are one of the tests
#   bash tests/run.sh quick    those that start no processes and are not slow, with few examples and parameters: for
#                              while one works
#   bash tests/run.sh nightly  every test with all parameters, and examples drawn anew: PTX as it runs, browsers, Ray,
#                              kills at any moment; the cache under processes, failing calls and mutations, for long;
#                              then the versions of .ci/versions.toml (gigabytes of torch, some minutes each)
#
# Needs Python 3.11 or newer and a package index; no GPU. Works in .venv, or in the environment that TILEKERN_VENV
# names; one that has everything is used as it is. Writes to the clone and to one temporary folder, nowhere else.
# Cubins are kept in .cubins by the digest of what they are made from until no run has used them for a month; CI keeps
# that folder from run to run if it can. The quick tests keep Python's bytecode as well, in .bytecode.
set -euo pipefail
tier=${1:-all}
case $tier in all | quick | nightly) ;; *) echo "tests/run.sh: $tier is not a tier; give quick, nightly or nothing" >&2; exit 2 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch" ".bytecode$scratch"' EXIT
mkdir "$scratch/tmp" "$scratch/home"
export TMPDIR="$scratch/tmp" XDG_CACHE_HOME="$scratch/home" XDG_CONFIG_HOME="$scratch/home/settings" HF_HOME="$scratch/home/hub" PIP_CACHE_DIR="$scratch/home/pip"
export TILEKERN_CACHE_DIR="$scratch/cache" PYTHONPATH="$PWD" PIP_DISABLE_PIP_VERSION_CHECK=1
# Where Python is told to keep no bytecode, each process that a test starts would compile the source of torch and
# transformers anew: a `python -m tilekern.tune` took 7.7 s then, and takes 4.2 s.
unset PYTHONDONTWRITEBYTECODE
# As users have it: what is buffered may fail at exit.
unset PYTHONUNBUFFERED
export PYTHONPYCACHEPREFIX="$scratch/bytecode"
# To compile torch, transformers and the tests before the first of them takes three workers on two cores 17 s.
[ "$tier" != quick ] || PYTHONPYCACHEPREFIX="$PWD/.bytecode"
unset TILEKERN_CACHE_PATH TILEKERN_ON_MISS TILEKERN_INTERPRET
unset TILEKERN_TRUST TILEKERN_TRUST_ROOTS TILEKERN_TRUST_SHARED

step() { printf '\n== %s (%d s so far)\n' "$1" "$SECONDS"; }

venv=${TILEKERN_VENV:-.venv}
python=$venv/bin/python

# The compiler that the tests find keeps its cubins. Variables do not reach a compiler, so they stand in its script.
keep_cubins() {
    local kept=$scratch/compiler/nvidia/cu13/bin/tileiras cubins=$PWD/.cubins tileiras
    tileiras=$("$python" -c 'from tilekern.compile.toolchain import require_toolkit; print(require_toolkit().path)')
    mkdir -p "$cubins" "${kept%/*}"
    find "$cubins" -type f -mtime +30 -delete
    printf '#!/usr/bin/env bash\nCUBINS=%q TILEIRAS=%q RELEASE=%q exec bash %q "$@"\n' \
        "$cubins" "$tileiras" "$("$tileiras" --version | tail -n 1)" "$PWD/tests/kept_cubins.sh" >"$kept"
    chmod +x "$kept"
    export PYTHONPATH="$scratch/compiler:$PYTHONPATH"
}

has_all() {
    [ -x "$python" ] && "$python" - 2>"$scratch/missing" <<'PY'
import tomllib
from importlib.metadata import version
from packaging.requirements import Requirement

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
named = ("torch", "tools", "text", "compile", "cute", "docs", "inspect", "test")
needed = map(Requirement, [*project["dependencies"], *(need for name in named for need in extras[name])])
missing = [str(need) for need in needed if version(need.name) not in need.specifier]
if missing:
    raise SystemExit(f"missing: {', '.join(missing)}")
version("nvidia-cuda-tileiras")
PY
}

step "environment $venv"
if has_all; then
    echo "has everything"
else
    [ -s "$scratch/missing" ] && tail -n 1 "$scratch/missing"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "python3 must be 3.11 or newer" >&2; exit 2; }
    [ -x "$python" ] || python3 -m venv "$venv"
    # This torch has a build without CUDA; a plain `torch` may bring gigabytes of it. Compiling all that is installed,
    # of which the tests import little, would take pip a minute.
    "$python" -m pip install -q --no-compile torch==2.13.0 -e '.[test]'
fi
"$python" -V

# One more worker than the two cores that this is made for: many tests wait for processes that they have started. Quick
# ones do not, and a third worker costs its imports. Processes and workers look for garbage seldom, which took them a
# seventh of their time.
pytest() {
    mkdir -p "$scratch/seldom"
    printf 'import gc\n\ngc.set_threshold(50_000, 20, 20)\n' >"$scratch/seldom/sitecustomize.py"
    PYTHONPATH="$PYTHONPATH:$scratch/seldom" "$python" -m pytest --ignore tests/gpu "$@"
}
workers=3
in_workers() { pytest -n "$workers" --dist loadgroup "$@"; }

step "ruff"
"$python" -m ruff check .
"$python" -m ruff format --check .

if [ "$tier" = quick ]; then
    step "mypy"
    "$python" -m mypy
    step "pytest, the quick ones"
    keep_cubins
    workers=2
    HYPOTHESIS_PROFILE=quick TEST_PARAMETERS=few in_workers -m "not gpu and not nightly and not processes and not slow and not stress"
    printf '\n== all passed in %d s\n' "$SECONDS"
    exit
fi

# Types are checked beside one collection of the tests: each worker would compile their bytecode, and that of what they
# import, by itself.
step "mypy"
keep_cubins
pytest --collect-only -q -m "not gpu" >/dev/null 2>&1 &
collected=$!
"$python" -m mypy
wait "$collected" || true  # The workers report what is wrong with it.

step "pytest"
if [ "$tier" = nightly ]; then
    HYPOTHESIS_PROFILE=thorough in_workers -m "not gpu" --timeout 7200
    step "versions of Python, torch and transformers"
    "$python" .ci/matrix.py
else
    # A branch's tests are those that its changes can reach; on the main branch, or without one, all are.
    main=$(git merge-base HEAD origin/main 2>/dev/null || true)
    [ "$main" != "$(git rev-parse HEAD 2>/dev/null)" ] || main=
    TEST_CHANGES_SINCE=$main TEST_PARAMETERS=some in_workers -m "not gpu and not nightly"
fi

printf '\n== all passed in %d s\n' "$SECONDS"
