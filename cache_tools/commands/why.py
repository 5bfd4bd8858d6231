"""The command why: explain a lookup step by step, through the code that does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tilekern.cache import NOT_FRESH, CacheError, Hit, Step, Store, default_layers, parse_problem_key, problem_key
from tilekern.cache_tools.shared.installed import digest_today, spec_named, target_named, toolkit_key
from tilekern.cache_tools.shared.options import as_json, cache_dir, command
from tilekern.cache_tools.shared.printing import plain, print_result, time_us_of
from tilekern.warning import tell

if TYPE_CHECKING:
    from tilekern.spec import KernelSpec, Problem
    from tilekern.spec.targets import Target

# Outcomes of steps that found no record (:class:`tilekern.cache.Step`).
_ABSENT = ("not_there", "no_records", "no_other_bucket")


@command
@click.argument("kernel", metavar="KERNEL")
@click.argument("key", metavar="PROBLEM")
@click.option(
    "--gpu",
    "--target",
    "target_name",
    help="The GPU: its name, arch or key; default that of this machine; --target is deprecated.",
)
@cache_dir
@as_json
def why(kernel: str, key: str, target_name: str | None, store: Store, as_json: bool) -> None:
    """Explain a lookup step by step; PROBLEM has real sizes, such as rows=5000,columns=4096,dtype=bfloat16.

    Looks the problem up as a job on that GPU would, with the same code, and says for each record that it tries in
    which layer it is and why it is passed over, kept for later or taken.

    JSON: kernel, problem, problem_key, target, toolkit, source_digest, layers[], steps[] {layer, target,
    toolkit, problem_key, outcome, detail}, hit; all in docs/cache-json.md.
    """
    from tilekern.runtime.dispatch import find

    spec = spec_named(kernel)
    try:
        problem = spec.problem(**parse_problem_key(key))
    except ValueError as error:
        raise CacheError(str(error)) from None
    target = target_named(target_name)
    trace: list[Step] = []
    layers = default_layers(store.root, looking=True)
    hit = find(spec, spec.bucketed(problem), target, layers=layers, trace=trace)
    document = {
        "kernel": kernel,
        "problem": dict(problem),
        "problem_key": problem_key(dict(spec.bucketed(problem))),
        "target": target.key,
        "toolkit": toolkit_key(),
        "source_digest": digest_today(spec.module),
        "layers": [layer.name for layer in layers],
        "steps": [
            {
                "layer": step.layer,
                "target": step.target_key,
                "toolkit": step.toolkit_key,
                "problem_key": None if step.problem is None else problem_key(step.problem),
                "outcome": step.outcome,
                "detail": step.detail,
            }
            for step in trace
        ],
        "hit": hit and _summary(hit),
    }
    bucketed = spec.bucketed(problem)
    print_result(document, as_json, lambda: _print(document, trace, _otherwise(spec, bucketed, target)))


def _otherwise(spec: KernelSpec, problem: Problem, target: Target) -> str:
    """Return what a job does without a record."""
    default = spec.default(problem, target)
    if spec.implement(problem, default).composite:
        return (
            f"a job runs its default, {default.key}, by its kernels' own records, unless TILEKERN_ON_MISS is fallback "
            "or error"
        )
    return "a job goes by its miss policy (TILEKERN_ON_MISS)"


def _summary(hit: Hit) -> dict[str, Any]:
    address = hit.record.address
    return {
        "layer": hit.layer.name,
        "target": address.target_key,
        "toolkit": address.toolkit_key,
        "problem_key": address.problem_key,
        "provenance": hit.record.provenance,
        "time_us": time_us_of(hit.record),
        "config": hit.record.config,
        "exact_target": hit.exact_target,
        "exact_bucket": hit.exact_bucket,
        "fresh": hit.fresh,
    }


def _print(document: dict[str, Any], trace: list[Step], otherwise: str) -> None:
    asked = problem_key(document["problem"])
    tell(f"{document['kernel']} {asked} on {document['target']}")
    if asked != document["problem_key"]:
        tell(f"sizes are rounded up to their buckets: {document['problem_key']}")
    tell(f"the toolkit here: {document['toolkit'] or 'none, so the newest of a layer comes first'}")
    tell(f"the kernel's source: {document['source_digest']}")
    tell(f"layers: {', '.join(document['layers'])}")
    tried = [(number, plain(str(step))) for number, step in enumerate(trace, 1) if step.outcome not in _ABSENT]
    for number, text in tried:
        tell(f"{number:3}. {text}")
    holding = {step.layer for step in trace if step.outcome not in _ABSENT}
    if absent := [name for name in dict.fromkeys(step.layer for step in trace) if name and name not in holding]:
        tell(f"no such record in: {', '.join(absent)}")
    hit = document["hit"]
    if hit is None:
        tell(f"nothing serves it: {otherwise}, and puts it on the wanted list")
        if tried:
            tell(f"the nearest record: {tried[0][1]}")
        return
    gpu = "of this very GPU" if hit["exact_target"] else f"of another GPU of its arch, {hit['target']}"
    bucket = "its own bucket" if hit["exact_bucket"] else f"the nearest bucket, {hit['problem_key']}"
    other = document["toolkit"] not in (None, hit["toolkit"])
    tools = f", of another toolkit, {hit['toolkit']}" if other else ""
    tell(f"taken: from {hit['layer']}, {hit['provenance']}, {gpu}, {bucket}{tools}")
    if not hit["fresh"]:
        tell(f"it is {NOT_FRESH}; tune it again")
    tell(f"config: {plain(hit['config'])}")
