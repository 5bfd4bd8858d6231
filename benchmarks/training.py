"""Train a model at one length after another in a fresh process; append each result to a file as a line.

python -m benchmarks.training JOB LINES

JOB is a :class:`Job` as JSON. The process loads its modules and patches, says that it is ready, and waits for a line on
its standard input: its turn. If several processes share a model, it starts the others, which write no lines. Each line
of LINES is an object with a ``kind``: ``ready``, ``length`` (the kernels that ran, the times of a length's steps, peak
memory, loss, power and clock), ``again`` (times of further steps in a later turn), ``begun``, ``profile``, ``floor``,
``note``, or ``out_of_memory`` for the last length.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import profiling, sharing
from benchmarks.models import make_model
from benchmarks.power import PowerMeter
from benchmarks.served import doubts
from benchmarks.sources import kernels_used
from benchmarks.trainers import Trainer, has_our_attention, trainer_named
from tilekern.patch.stepping import auto_class
from tilekern.tuning.plan.configs import config_named

LEARNING_RATE = 1e-5
Line = dict[str, Any]
# The line that a process writes before it waits for its turn.
READY: Line = {"kind": "ready"}
# Steps of a later turn that are not timed: memory was given back after the turn before.
WARM_UP_AGAIN = 2
# Kinds of checkpoints of layers, and their names in results.
CHECKPOINTS = {
    "": "", "full": "checkpointing", "attention": "checkpointing, attention kept",
    "offload": "checkpointing, attention kept, on the host",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """The work of one process: ``timed`` is the number of timed steps of each of ``tokens``, after ``warm_up``.

    A step is a batch of sequences of ``sequence`` tokens, or one sequence if that is 0. With ``lora`` only adapters of
    that rank train, on all linear layers, in the model's dtype; with 0 all weights do. ``checkpointing`` is one of
    :data:`CHECKPOINTS`. ``ranks`` processes share the model in one of :data:`benchmarks.sharing.WAYS`; ``limit_s`` are
    the seconds that they may take, 0 for the provider's. With ``autocast`` weights are float32, and their products are
    cast to bfloat16. All lengths are taken anew in each of ``turns``, by the same model.
    """

    provider: str
    model: str
    layers: int
    tokens: tuple[int, ...]
    timed: tuple[int, ...]
    warm_up: int = 2
    device: str = "cuda"
    checkpointing: str = ""
    profile: bool = False
    sequence: int = 0
    lora: int = 0
    way: str = ""
    ranks: int = 1
    limit_s: float = 0.0
    autocast: bool = False
    turns: int = 1

    @classmethod
    def read(cls, text: str) -> Job:
        """Parse the text of :meth:`written`."""
        found = json.loads(text)
        return cls(**{**found, "tokens": tuple(found["tokens"]), "timed": tuple(found["timed"])})

    def written(self) -> str:
        """Return the job as text."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Loop:
    """A model, its optimizer, and the training step; ``mesh`` are the ranks that share each sequence, if any do.

    ``casts``: whether autocast casts products to bfloat16.
    """

    trainer: Trainer
    model: Any
    optimizer: Any
    device: str
    shares: int = 1
    mesh: Any = None
    casts: bool = False

    def step(self, ids: Any) -> Any:
        """Take one step on random tokens; return its loss."""
        import torch

        self.optimizer.zero_grad(set_to_none=True)
        with self.trainer.held_to_backend(), sharing.inputs_of(ids, self.mesh) as given:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.casts):
                loss = self.model(**given).loss
            loss.backward()
        self.optimizer.step()
        return loss.detach()

    def timed_step(self, ids: Any) -> tuple[float, float, Any]:
        """Return the seconds of a step between two waits for the GPU, those of the host alone, and its loss."""
        self.wait()
        started = time.perf_counter()
        loss = self.step(ids)
        on_host = time.perf_counter()
        self.wait()
        return time.perf_counter() - started, on_host - started, loss

    def wait(self) -> None:
        """Wait for the GPU."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        """Free the last step's memory, and reset the memory count."""
        import torch

        self.optimizer.zero_grad(set_to_none=True)
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def tokens(self, count: int, sequence: int) -> Any:
        """Draw the same random tokens for every provider, [batch, sequence]; one sequence if ``sequence`` is 0.

        If ranks share the batch, return this rank's share.
        """
        import torch

        generator = torch.Generator(device=self.device).manual_seed(count)
        vocabulary, length = self.model.config.get_text_config().vocab_size, sequence or count
        ids = torch.randint(0, vocabulary, (count // length, length), device=self.device, generator=generator)
        return ids.chunk(self.shares)[sharing.rank() % self.shares]


def run(job: Job) -> Iterator[Line]:
    """Train at each length in turn; a length that does not fit is the last. :data:`READY` comes before a later turn."""
    import torch

    loop = begin(job)
    yield {"kind": "begun", "attention": loop.trainer.attention, "patched": _patched()}
    done = []
    for tokens, timed in zip(job.tokens, job.timed, strict=True):
        try:
            ids = loop.tokens(tokens, job.sequence)
            with kernels_used() as used:
                trained = train(loop, ids, job.warm_up, timed)
            yield {"kind": "length", "tokens": tokens, "kernels": used, **trained}
            done.append((tokens, timed))
            if job.profile:
                yield {"kind": "profile", "tokens": tokens, "parts_ms": _profile(loop, ids)}
        except torch.OutOfMemoryError:
            yield {"kind": "out_of_memory", "tokens": tokens}
            break
    loop.free()
    if job.profile:
        config = config_named(job.model)[1]
        for tokens, _ in done:
            floor = profiling.matmul_floor_ms(config, job.layers or config.num_hidden_layers, tokens, job.device)
            yield {"kind": "floor", "tokens": tokens, "matmuls_ms": floor}
    yield from ({"kind": "note", "text": line} for line in doubts())
    for _ in range(job.turns - 1):
        yield READY
        for tokens, timed in done:
            ids = loop.tokens(tokens, job.sequence)
            steps = [loop.timed_step(ids) for _ in range(WARM_UP_AGAIN + timed)][WARM_UP_AGAIN:]
            yield {"kind": "again", "tokens": tokens, **_times(steps)}
            loop.free()


def prepare(job: Job) -> None:
    """Load the modules of a job and patch, so that the waiting process is ready to make its model."""
    config = config_named(job.model)[1]
    auto_class(config)._model_mapping[type(config)]
    trainer_named(job.provider).patch(config)


def begin(job: Job) -> Loop:
    """Make the model on its device, and its optimizer."""
    trainer, config = trainer_named(job.provider), config_named(job.model)[1]
    model = make_model(config, job.layers, trainer.attention, job.device, "float32" if job.autocast else "bfloat16")
    trainer.convert(model)
    if job.way:
        model = sharing.shared(model, job.way, job.ranks, job.device)
    if job.checkpointing:
        _checkpoint(model, job.checkpointing)
    if job.lora:
        model = _adapted(model, job.lora)
    mesh = sharing.mesh_of(model, job.way, job.ranks, job.device, drops_masks=not has_our_attention(job.provider))
    trainer.compile(model)
    shares = job.ranks if job.way == "fsdp" else 1
    optimizer = trainer.optimizer(model, LEARNING_RATE)
    return Loop(trainer, model, optimizer, job.device, shares, mesh, job.autocast)


def _checkpoint(model: Any, kind: str) -> None:
    if kind == "full":
        model.gradient_checkpointing_enable()
        return
    import tilekern

    keep = functools.partial(tilekern.keep_attention, offload=kind == "offload")
    options = {"use_reentrant": False, "context_fn": keep}
    if kind == "offload":
        model.activation_checkpointing_enable(options, offload=True)
    else:
        model.gradient_checkpointing_enable(options)


def _adapted(model: Any, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    how = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, how, autocast_adapter_dtype=False)


def train(loop: Loop, ids: Any, warm_up: int, timed: int) -> Line:
    """Take steps on these tokens; return their times, those of host and GPU, the peak of memory, and the last loss."""
    loop.free()
    with PowerMeter() as meter:
        steps = [loop.timed_step(ids) for _ in range(warm_up)]
        started = time.perf_counter()
        steps += [loop.timed_step(ids) for _ in range(timed)]
        draw = meter.between(started, time.perf_counter())
    line: Line = {"warm_up": _times(steps[:warm_up])["timed"], **_times(steps[warm_up:])}
    line |= {"loss": float(sharing.averaged(steps[-1][2]))} | _peaks(loop.device)
    if loop.device == "cuda":
        parts = profiling.profile(lambda: loop.timed_step(ids))
        line["gpu_ms"] = parts[profiling.TOTAL] - parts.get(profiling.IDLE, 0.0)
    return line | ({"draw": asdict(draw)} if draw else {})


def _times(steps: Sequence[tuple[float, float, Any]]) -> Line:
    return {"timed": [taken for taken, _, _ in steps], "host": [on_host for _, on_host, _ in steps]}


def _peaks(device: str) -> Line:
    import torch

    if device != "cuda":
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak_bytes": allocated, "reserved_bytes": reserved}


def _profile(loop: Loop, ids: Any) -> dict[str, float]:
    loop.step(ids)
    return profiling.profile(lambda: loop.timed_step(ids))


def _patched() -> list[str]:
    import tilekern

    return list(tilekern.get_patched_ops())


def has_a_turn(lines: str) -> bool:
    """Write to the file that this process is ready, and wait for its turn; return False if its parent has ended."""
    with Path(lines).open("a", encoding="utf-8") as file:
        file.write(json.dumps(READY) + "\n")
    return bool(sys.stdin.readline())


def main(text: str, lines: str) -> None:
    """Do a job when told to; append each line to a file at once, so that none is lost if the process dies."""
    job = Job.read(text)
    with sharing.others(job.ranks, [text, lines]):
        prepare(job)
        first = sharing.rank() == 0
        if first and not has_a_turn(lines):
            return
        sharing.join(job.ranks, job.device, f"{lines}.meet")
        with Path(lines if first else os.devnull).open("a", encoding="utf-8") as file:
            for line in run(job):
                if line == READY:
                    if first and not has_a_turn(lines):
                        return
                    continue
                file.write(json.dumps(line) + "\n")
                file.flush()
                if not first and line["kind"] == "out_of_memory":
                    raise SystemExit("another rank is out of memory")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
