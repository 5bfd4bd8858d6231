"""Options of the tuner's commands: how they are read, and how ``--help`` groups them."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tilekern.errors import InputError
from tilekern.kernels import add_specs
from tilekern.runtime.switches import EXPERTS, EXTRAS, FP8_FORMATS, OPS, ROWWISE, fp8_format
from tilekern.spec.targets import KNOWN
from tilekern.tuning.plan.configs import require_model_name
from tilekern.tuning.plan.presets import PRESETS
from tilekern.tuning.plan.steps import OPTIMIZERS, Steps, steps_of
from tilekern.warning import HELP, versioned


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan: models to step, plans that exist, named problems; at least one of them.

    ``described`` is the first option that describes a model's steps, which a plan cannot use. ``kernels`` are those
    whose problems are planned; all where there are none.
    """

    models: Sequence[str]
    plans: Sequence[str]
    problems: Sequence[str]
    steps: Steps
    described: str | None
    kernels: Sequence[str] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> PlanRequest:
        """Read the options of :func:`plan_options` as click gives them.

        Raises:
            InputError: a value is not known, or steps are described and no model is named.
            tilekern.tuning.plan.configs.UnknownModel: a model is not a preset, a path or a hub id.
        """
        named = {name: given[name] for name in _STEPS if given[name] not in (None, False)}
        lists = {
            "tokens": "2048,8192",
            "sequence": "2048,4096",
            "decode": "1,8,64",
            "context": "4096,32768",
            "chunk": "512",
        }
        for name, such_as in lists.items():
            if name in named:
                named[name] = counts(named[name], f"--{name}", such_as)
        for name, option in (("dtype", "--dtype"), ("ops", "--op"), ("attention", "--attention")):
            if name in named:
                named[name] = words(named[name], option)
        for model in given["models"]:
            require_model_name(model)
        described = "--" + next(iter(named)).replace("ops", "op").replace("_", "-") if named else None
        if described and not given["models"] and (given["plans"] or given["problems"]):
            raise described_alone(described)
        steps = steps_of(**named, invariant=bool(given["invariant"]))
        kernels = words(given["kernels"], "--kernels") if given["kernels"] is not None else ()
        return cls(given["models"], given["plans"], given["problems"], steps, described, kernels)


def described_alone(option: str) -> InputError:
    """Return the error for an option that describes a model's steps, given with a plan."""
    return InputError(f"{option} describes the steps of a model, and a plan has its own sizes; leave it out")


_STEPS = {
    "engine": click.option(
        "--engine",
        is_flag=True,
        help="Steps are those of tilekern.inference, and need no torch: tokens of --decode sequences (1 if not given), "
        "prompts of --context, and with --tokens the logits of whole sequences.",
    ),
    "weight_dtype": click.option(
        "--weight-dtype", metavar="int8", help="With --engine: weights of products are int8; by default as --dtype."
    ),
    "tokens": click.option("--tokens", help="Tokens of a step (batch times sequence).  [default: 2048,8192]"),
    "sequence": click.option(
        "--sequence", metavar="TEXT", help="Tokens of a sequence; by default a step is one sequence."
    ),
    "decode": click.option(
        "--decode", metavar="TEXT", help="Sequences that generation decodes at once, as 1,8,64; by default none."
    ),
    "context": click.option("--context", metavar="TEXT", help="Tokens of a decoded sequence.  [default: 4096]"),
    "chunk": click.option(
        "--chunk", metavar="TEXT", help="Tokens of a chunk, where prompts are computed in chunks too; by default whole."
    ),
    "paged": click.option(
        "--paged",
        is_flag=True,
        help="Tokens are decoded by transformers' generate_batch too; with --engine, from its paged cache too.",
    ),
    "dtype": click.option("--dtype", help="bfloat16 (bf16), float16 (fp16), float32 (fp32).  [default: bfloat16]"),
    "autocast": click.option(
        "--autocast",
        is_flag=True,
        help="Weights are float32, and autocast casts their products to bfloat16, as Trainer(bf16=True) does.",
    ),
    "hooks": click.option(
        "--hooks",
        is_flag=True,
        help="Also steps whose ops run one by one: under hooks, as of a device_map over GPUs, or torch.compile.",
    ),
    "tp": click.option(
        "--tp",
        type=click.IntRange(min=1),
        help="Tensor-parallel degree: ranks of a model; with --engine its GPUs.  [default: 1]",
    ),
    "packed": click.option("--packed", is_flag=True, help="Sequences are packed into a batch of one (cu_seq_lens_q)."),
    "padded": click.option("--padded", is_flag=True, help="Sequences are padded to one length, with a mask."),
    "experts": click.option("--experts", is_flag=True, help="Experts run tilekern's kernels: apply(experts=True)."),
    "fp8": click.option(
        "--fp8",
        is_flag=False,
        flag_value=ROWWISE,
        metavar=f"[{'|'.join(FP8_FORMATS)}]",
        callback=lambda _context, _option, word: word and fp8_format(word, "the name of a model"),
        help=f"Linear layers run 8-bit floats, {ROWWISE} if no word follows: apply(fp8=...).",
    ),
    "checkpointing": click.option("--checkpointing", is_flag=True, help="Activations are recomputed in the backward."),
    "optimizer": click.option(
        "--optimizer", type=click.Choice(OPTIMIZERS), help="tilekern.AdamW, or none.  [default: adamw]"
    ),
    "attention": click.option(
        "--attention", help="attn_implementation: tilekern, tilekern_nondeterministic.  [default: tilekern]"
    ),
    "ops": click.option(
        "--op",
        "--ops",
        "ops",
        help=f"The ops that are patched: {', '.join((*OPS, *EXTRAS))}.  [default: all but {EXPERTS}]",
    ),
}
_OTHERS = {
    "invariant": click.option(
        "--invariant", is_flag=True,
        help="Plan tilekern.invariant() too, and find kernels that give a row the same bits at all sizes of the plan.",
    ),
    "models": click.argument("models", nargs=-1, metavar="[MODEL]..."),
    "plans": click.option(
        "--plan", "plans", multiple=True, metavar="FILE|wanted",
        help="A plan of tilekern.trace, or the problems that jobs missed; may be repeated.",
    ),
    "problems": click.option(
        "--problem", "problems", multiple=True, metavar="'NAME SIZES'",
        help="An op or a kernel: 'rms_norm rows=8192,columns=4096,dtype=bfloat16'; may be repeated.",
    ),
    "kernels": click.option(
        "--kernels", metavar="TEXT",
        help="Plan problems of these kernels alone, as skinny_linear,decode_attention; by default of all.",
    ),
}  # fmt: skip
PLAN_OPTIONS = (*_STEPS, *_OTHERS)


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add to a command the argument and options that say what to plan."""
    for option in reversed([*_OTHERS.values(), *_STEPS.values()]):
        command = option(command)
    return command


def words(text: str, option: str) -> list[str]:
    """Split a list at its commas.

    Raises:
        InputError: it is empty.
    """
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise InputError(f"{option} is empty; give a list with commas between")
    return found


def counts(text: str, option: str, such_as: str) -> list[int]:
    """Split a list of whole numbers at its commas.

    Raises:
        InputError: it is none, or looks like one number whose thousands are set off by commas; ``such_as`` is what the
            message shows in its place.
    """
    parts = words(text, option)
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise InputError(f"{option} {text!r}: expected whole numbers with commas between, such as {such_as}")
    if is_grouped(text):
        one = text.replace(",", "")
        raise InputError(
            f"{option} {text!r}: did you mean {one}? Commas stand between numbers; for {len(parts)} of them put a space"
            f" behind each comma: {', '.join(str(int(part)) for part in parts)!r}"
        )
    if odd := [part for part in parts if part != "0" and part.startswith("0")]:
        raise InputError(f"{option} {text!r}: {odd[0]} begins with a zero; commas stand between numbers, not in them")
    return [int(part) for part in parts]


# Sizes that people write in thousands are multiples of it, and two numbers that stand in a list make one hardly ever.
_ROUND = 2048


def is_grouped(text: str) -> bool:
    """Return whether a text looks like one number with commas at its thousands: ``2,048``, ``16,384``."""
    if not re.fullmatch(r"[1-9][0-9]{0,2}(,[0-9]{3})+", text.strip()):
        return False
    return any(part.startswith("0") for part in text.split(",")) or int(text.replace(",", "")) % _ROUND == 0


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Seconds(click.FloatRange):
    """A time in seconds, or with a unit (``90s``, ``10m``, ``1.5h``), up to a day.

    The system's clocks and waits take no infinite ones, and no NaN.

    Args:
        least: the shortest that is allowed.
    """

    def __init__(self, least: float) -> None:
        super().__init__(min=least, max=86_400.0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number of seconds."""
        unit = _UNITS_S.get(value.strip()[-1:]) if isinstance(value, str) else None
        if unit is not None and re.fullmatch(r"\d*\.?\d+", number := value.strip()[:-1]):
            value = unit * float(number)
        try:
            is_time = not math.isnan(float(value))
        except ValueError:
            is_time = False
        if not is_time:
            self.fail(f"{value} is not a time in seconds; pass a number such as 30, or 10m or 1.5h.", param, ctx)
        return float(super().convert(value, param, ctx))


class File(click.Path):
    """A file; an empty name, as of an unset variable of the shell, is refused: it would mean the current folder.

    Args:
        options: as of ``click.Path``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if value == "":
            self.fail(f"it must name a {'file' if self.file_okay else 'folder'}, and is empty.", param, ctx)
        return super().convert(value, param, ctx)


# A folder, which need not exist.
FOLDER = File(file_okay=False)
GPU_NAMES = ", ".join(target.name for target in KNOWN)
# Ends the help of commands that take models. click would break a name at a hyphen; it leaves lines behind "\b" alone.
NAMES = "\b\n" + textwrap.fill(
    f"Presets: {', '.join(PRESETS)}. GPUs: {GPU_NAMES}.", 76, break_on_hyphens=False, break_long_words=False
)


def tuner_command(**options: Any) -> Callable[[Callable[..., None]], click.Command]:
    """``click.command`` with the options of every command of the tuner: ``-h``, ``--version`` and ``--specs``."""
    specs = click.option(
        "--specs", multiple=True, metavar="MODULE", expose_value=False, is_eager=True,
        callback=lambda _context, _option, names: add_specs(*names),
        help="A module with kernels of your own, in a tuple SPECS; may be repeated.",
    )  # fmt: skip
    return lambda function: versioned(specs(click.command(context_settings=HELP, **options)(function)))


class GroupedCommand(click.Command):
    """A command whose help lists its options under headings.

    Args:
        groups: the names of parameters by heading; those of no group join the last.
    """

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, group by group."""
        options = {option.name or "": option for option in self.get_params(ctx) if isinstance(option, click.Option)}
        grouped = {name for names in self._groups.values() for name in names}
        *first, (last, names) = self._groups.items()
        for heading, group in (*first, (last, [*names, *(name for name in options if name not in grouped)])):
            with formatter.section(heading):
                formatter.write_dl([record for name in group if (record := options[name].get_help_record(ctx))])
