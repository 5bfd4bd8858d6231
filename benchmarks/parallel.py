"""Measure training steps of models on several GPUs of a host and on one GPU, tilekern and its peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.environment import facts
from benchmarks.providers import OURS
from benchmarks.results import Results, Row
from benchmarks.train import SAME_LOSS, Keep, Say, label, measure_jobs
from benchmarks.training import Job
from tilekern.tuning.plan.configs import config_named

BENCHMARK, LOSS_ON_ONE = "parallel", "loss_on_one"
MODELS = ("qwen3-8b", "qwen3-30b-a3b")
# The fastest trainers on one H200 without a compiler.
PROVIDERS = (OURS, "hf-sdpa-flash", "liger-triton")
WARM_UP = 3
# A rank that waits for a hung rank would wait for the limit of a whole model's training.
LIMIT_S = 75.0


def measure(
    models: Sequence[str], ways: Sequence[str], providers: Sequence[str], job: Job, keep: Keep, say: Say
) -> Results:
    """Train each model on one GPU and in each way of sharing; each combination has its own processes.

    A step has the same sequences in all ways, so its loss equals the loss of one GPU; under FSDP2 each rank takes its
    share.

    Args:
        models: models as the tuner takes them.
        ways: of :data:`benchmarks.sharing.WAYS`; ways for which a model has no plan are left out.
        providers: names of :data:`benchmarks.trainers.TRAINERS`.
        job: the job of each provider; the ways set its ``ranks``.
        keep, say: see :func:`benchmarks.train.measure`.

    Raises:
        InputError: an unknown provider or model, or nothing took a step.
    """
    jobs = [
        replace(job, provider=one, model=model, way=way, ranks=job.ranks if way else 1, limit_s=LIMIT_S)
        for model in models
        for way in ("", *_possible(model, ways))
        for one in providers
    ]
    run = facts() | {"models": list(models), "warm_up": job.warm_up, "gpus": job.ranks, "layers": job.layers}
    results = measure_jobs(jobs, run, BENCHMARK, keep, say)[0]
    results.rows.extend(beside_one(results, jobs))
    return results


def _possible(model: str, ways: Sequence[str]) -> list[str]:
    has_experts = bool(getattr(config_named(model)[1], "base_model_ep_plan", None))
    return [way for way in ways if way != "ep" or has_experts]


def beside_one(results: Results, jobs: Sequence[Job]) -> Iterator[Row]:
    """Compare the figures of several GPUs with one GPU: its loss, and the ratio of the rates."""
    for job in jobs:
        for tokens in job.tokens if job.way else ():
            case, alone = label(job, tokens), label(replace(job, way="", ranks=1), tokens)
            loss, rate = (results.row(case, job.provider, metric) for metric in ("loss", "tokens_per_s"))
            its_loss, its_rate = (results.row(alone, job.provider, metric) for metric in ("loss", "tokens_per_s"))
            if not (loss and rate and its_loss and its_rate):
                continue
            yield replace(its_loss, case=case, metric=LOSS_ON_ONE)
            yield replace(rate, metric="speedup", value=round(rate.value / its_rate.value, 4), unit="1", spread=0.0)
            if abs(loss.value - its_loss.value) > SAME_LOSS * abs(its_loss.value):
                results.run["notes"].append(
                    f"{case}: {job.provider} has a loss of {loss.value:.4g}, and of {its_loss.value:.4g} on one"
                )
