"""``python -m tilekern.generate MODEL --prompt TEXT``: generate with the engine that needs no torch.

The text goes to the standard output as it comes, and one line about the time to the standard error.
"""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tilekern.cache import CacheError
from tilekern.errors import InputError, needing
from tilekern.runtime.settings import check_settings
from tilekern.warning import HELP, command_line, fail, invoke, shown_plainly, tell, versioned

if TYPE_CHECKING:
    from tilekern.inference import Engine

_IDS = re.compile(r"\s*\d+\s*(,\s*\d+\s*)*", re.ASCII)
# A model may write what steers a terminal. Lines and tabs stay.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_EXIT_INTERRUPTED = 130


class _Stream(Protocol):
    """What is shown of ids that come one by one."""

    def add(self, token: int) -> str:
        """Return what an id completes."""

    def rest(self) -> str:
        """Return what still waits."""


class _Numbers:
    """Shows ids as ``--ids`` takes them."""

    def __init__(self) -> None:
        self._separator = ""

    def add(self, token: int) -> str:
        part, self._separator = f"{self._separator}{token}", ","
        return part

    def rest(self) -> str:
        return ""


@dataclass
class _Sequence:
    """A prompt and what came after it; ``text`` is None for a prompt of ids."""

    text: str | None
    prompt: list[int]
    stream: _Stream
    seed: int
    ids: list[int] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    is_over: bool = False

    def add(self, token: int) -> str:
        """Take the next id, and return what it completes."""
        self.ids.append(token)
        self.parts.append(self.stream.add(token))
        return self.parts[-1]

    def end(self) -> str:
        """Return what still waits; no more ids come."""
        self.is_over = True
        self.parts.append(self.stream.rest())
        return self.parts[-1]


@dataclass(frozen=True)
class _Request:
    """The command line, by its options."""

    model: str
    prompts: tuple[str, ...]
    ids: tuple[list[int], ...]
    new: int
    sampling: dict[str, Any]
    seed: int
    load: dict[str, Any]
    ignores_ends: bool
    as_json: bool

    def run(self) -> int:
        """Load the model, generate, print; return the exit code."""
        from tilekern.inference import Sampling, load

        sequences = self._sequences()
        ways = [Sampling(**self.sampling, seed=sequence.seed) for sequence in sequences]
        started = time.perf_counter()
        engine = load(self.model, **self.load)
        load_s = time.perf_counter() - started
        prompts = [sequence.prompt for sequence in sequences]
        run = _Run(sequences, is_quiet=self.as_json)
        run.take(engine.generate(prompts, self.new, ways, ignores_ends=self.ignores_ends))
        if self.as_json:
            tell(*json.dumps(self._document(engine, run, load_s), indent=1).splitlines())
        tell(f"tilekern: {run.summary()}", err=True)
        return _EXIT_INTERRUPTED if run.is_stopped else 0

    def _sequences(self) -> list[_Sequence]:
        from tilekern.inference.checkpoints import folder_of
        from tilekern.inference.text import Tokenizer

        if self.ids:
            return [_Sequence(None, ids, _Numbers(), self.seed + number) for number, ids in enumerate(self.ids)]
        folder = folder_of(self.model)
        with needing("--prompt"):
            tokenizer = Tokenizer(folder)
        return [
            _Sequence(text, tokenizer.encode(text), tokenizer.stream(), self.seed + number)
            for number, text in enumerate(self.prompts)
        ]

    def _document(self, engine: Engine, run: _Run, load_s: float) -> dict[str, Any]:
        ends = frozenset() if self.ignores_ends else engine.architecture.ends

        def reason(sequence: _Sequence) -> str:
            if sequence.ids and sequence.ids[-1] in ends:
                return "end"
            return "stopped" if run.is_stopped else "length"

        return {
            "model": self.model, "dtype": engine.dtype, "weight_dtype": engine.weight_dtype, "context": engine.context,
            "gpus": list(engine.gpus),
            "sequences": [
                {
                    "prompt": sequence.text, "prompt_ids": sequence.prompt, "ids": sequence.ids,
                    "text": None if sequence.text is None else "".join(sequence.parts), "seed": sequence.seed,
                    "finish_reason": reason(sequence),
                }
                for sequence in run.sequences
            ],
            "tokens": run.tokens, "load_s": load_s, "generate_s": run.generate_s,
            "first_token_s": run.first_token_s, "tokens_per_s": run.tokens_per_s,
        }  # fmt: skip


class _Run:
    """Takes the tokens of a batch, prints them unless it is quiet, and times them.

    Attributes:
        sequences: the batch.
        generate_s: seconds of all tokens.
        first_token_s: seconds to the first token of each sequence; None if there is none.
        is_stopped: whether Ctrl-C ended it.
    """

    def __init__(self, sequences: list[_Sequence], *, is_quiet: bool) -> None:
        self.sequences, self._is_quiet = sequences, is_quiet
        self.generate_s, self.is_stopped = 0.0, False
        self.first_token_s: float | None = None

    def take(self, steps: Iterator[list[int | None]]) -> None:
        """Take all tokens, or those that come before Ctrl-C."""
        started = time.perf_counter()
        try:
            for tokens in steps:
                if self.first_token_s is None:
                    self.first_token_s = time.perf_counter() - started
                self._take(tokens)
        except KeyboardInterrupt:
            self.is_stopped = True
        self.generate_s = time.perf_counter() - started
        for number, sequence in enumerate(self.sequences, 1):
            self._end(number, sequence)

    def _take(self, tokens: Sequence[int | None]) -> None:
        for number, (sequence, token) in enumerate(zip(self.sequences, tokens, strict=True), 1):
            if token is None:
                self._end(number, sequence)
            else:
                part = sequence.add(token)
                if len(self.sequences) == 1:
                    self._write(part)

    def _end(self, number: int, sequence: _Sequence) -> None:
        if sequence.is_over:
            return
        rest = sequence.end()
        self._write(f"{rest}\n" if len(self.sequences) == 1 else f"[{number}]\n{''.join(sequence.parts)}\n")

    def _write(self, text: str) -> None:
        if text and not self._is_quiet:
            sys.stdout.write(_CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text))
            sys.stdout.flush()

    @property
    def tokens(self) -> int:
        """The number of all new tokens."""
        return sum(len(sequence.ids) for sequence in self.sequences)

    @property
    def tokens_per_s(self) -> float | None:
        """The rate of the tokens after the first of each sequence; None if there are none."""
        others = self.tokens - len(self.sequences)
        return others / (self.generate_s - self.first_token_s) if self.first_token_s and others > 0 else None

    def summary(self) -> str:
        """Return the line about the time."""
        text = f"{'stopped; ' * self.is_stopped}{self.tokens} tokens in {self.generate_s:.3f} s"
        if self.first_token_s is not None:
            text += f", the first after {self.first_token_s:.3f} s"
        return text + (f", then {self.tokens_per_s:.1f} tokens/s" if self.tokens_per_s else "")


def _asked(arguments: list[str] | None) -> _Request | int:
    """Return what a command line asks for, or the exit code."""
    import click

    @versioned
    @click.command(context_settings=HELP)
    @click.argument("model", metavar="MODEL")
    @click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt; several make a batch.")
    @click.option(
        "--ids", multiple=True, metavar="1,2,3", help="A prompt as ids, in place of --prompt; ids are printed."
    )
    @click.option("--new", type=click.IntRange(1), default=128, show_default=True, help="New tokens at most.")
    @click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
    @click.option("--top-k", type=int, default=0, show_default=True, help="Keep so many tokens; 0 keeps all.")
    @click.option(
        "--top-p", type=float, default=1.0, show_default=True, help="Keep the likeliest of this probability together."
    )
    @click.option("--min-p", type=float, default=0.0, show_default=True, help="Keep from this share of the likeliest.")
    @click.option(
        "--seed", type=int, default=0, show_default=True, help="Of the draws; each further prompt has the next number."
    )
    @click.option(
        "--dtype", default="bfloat16", show_default=True, help="bfloat16, float16, or float32 with products by TF32."
    )
    @click.option(
        "--weight-dtype", help="int8: weights of products in 8 bits, with a scale for each output. Default as --dtype."
    )
    @click.option(
        "--context", type=int, help="Tokens of a sequence at most; default as many as the model allows, at most 4096."
    )
    @click.option(
        "--cache",
        default="static",
        show_default=True,
        help="static: room for --context tokens of each sequence. paged: for its prompt and new tokens, by pages.",
    )
    @click.option("--heads", type=int, help="Heads of a state dict without config.json, such as minGPT's.")
    @click.option("--gpu", "device", metavar="NUMBER", type=int, default=0, show_default=True, help="Counted from 0.")
    @click.option(
        "--gpus",
        metavar="N|0,1",
        default="1",
        show_default=True,
        help="GPUs that share the model: how many, from --gpu on, or their numbers. More than one needs NCCL.",
    )
    @click.option("--ignore-ends", "ignores_ends", is_flag=True, help="Go on behind ids that end a text.")
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end in place of text.")
    def command(
        model: str, prompts: tuple[str, ...], ids: tuple[str, ...], new: int, seed: int, ignores_ends: bool,
        as_json: bool, dtype: str, weight_dtype: str | None, context: int | None, cache: str, heads: int | None,
        device: int, gpus: str, **sampling: Any,
    ) -> _Request:  # fmt: skip
        """Generate text with GPT-2, Llama or Qwen3, without torch.

        MODEL is a folder with config.json and safetensors, a file of weights, or a hub id. One prompt's text is printed
        as it comes, that of several when each ends, under its number. The time is told on standard error.

        --json: model, dtype, weight_dtype, context, gpus, sequences (prompt, prompt_ids, ids, text, seed,
        finish_reason), tokens, load_s, generate_s, first_token_s, tokens_per_s.
        """
        check_settings()
        if bool(prompts) == bool(ids):
            raise InputError("give prompts by --prompt TEXT, or by --ids 1,2,3" + ", not by both" * bool(ids))
        return _Request(
            model, prompts, tuple(map(_numbers, ids)), new, sampling, seed,
            {
                "dtype": dtype, "weight_dtype": weight_dtype, "context": context, "cache": cache, "heads": heads,
                "device": device, "gpus": _gpus(gpus),
            }, ignores_ends, as_json,
        )  # fmt: skip

    request = invoke(command, arguments, "python -m tilekern.generate")
    return request if isinstance(request, _Request) else int(request)  # --help


def _gpus(text: str) -> int | list[int]:
    if not _IDS.fullmatch(text):
        raise InputError(f"--gpus must be a number of GPUs, or their numbers with commas between, got {text!r:.40}")
    numbers = [int(number) for number in text.split(",")]
    return numbers if len(numbers) > 1 else numbers[0]


def _numbers(text: str) -> list[int]:
    if not _IDS.fullmatch(text):
        raise InputError(f"--ids must be whole numbers with commas between them, such as 15496,11, got {text!r:.40}")
    return [int(number) for number in text.split(",")]


@command_line("python -m tilekern.generate")
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code: 2 bad input, 4 no compiler, 130 Ctrl-C."""
    request = _asked(arguments)
    if not isinstance(request, _Request):
        return request
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model writes letters outside the terminal's encoding
    try:
        with shown_plainly():
            return request.run()
    except CacheError as error:
        return fail(str(error))


if __name__ == "__main__":
    sys.exit(main())
