"""The options of ``python -m tilekern.tune MODEL``: how they are read, and how ``--help`` groups them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tilekern import __version__
from tilekern.errors import InputError
from tuning.plan import known_ops

STAGES = ("plan", "compile", "measure")
LOCAL, RAY = "local", "ray"


@dataclass(frozen=True)
class Request:
    """A run as it was asked for; the fields are the options, lists taken apart."""

    model: str | None
    gpu: str
    tokens: Sequence[int]
    sequence: Sequence[int]
    dtype: Sequence[str]
    tp: int
    ops: Sequence[str]
    stages: Sequence[str]
    jobs: int | None
    timeout_s: float
    strategy: str
    executor: str
    gpus: int | None
    sweep: Path | None
    sign: Path | None
    cache_dir: Path | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Request:
        """From the options as click gives them.

        Raises:
            InputError: a list is empty or holds what its option does not know.
        """
        stages = words(given["stages"], "--stages")
        for stage in stages:
            if stage not in STAGES:
                raise InputError(f"unknown stage {stage!r}; known: {', '.join(STAGES)}")
        executor = given["executor"]
        if executor not in (LOCAL, RAY) and not executor.startswith("ray://"):
            raise InputError(f"unknown executor {executor!r}; known: local, ray, ray://HOST:PORT")
        changed = {
            "tokens": counts(given["tokens"], "--tokens", "2048,8192"),
            "sequence": counts(given["sequence"], "--sequence", "2048,4096") if given["sequence"] is not None else [],
            "dtype": words(given["dtype"], "--dtype"),
            "ops": words(given["ops"], "--ops") if given["ops"] is not None else known_ops(),
            "stages": stages,
        }
        return cls(**{**given, **changed})


def words(text: str, option: str) -> list[str]:
    """A list with commas between, taken apart.

    Raises:
        InputError: it is empty.
    """
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise InputError(f"{option} is empty; give a list with commas between")
    return found


def counts(text: str, option: str, such_as: str) -> list[int]:
    """A list of whole numbers with commas between, taken apart.

    Raises:
        InputError: it is none; ``such_as`` is what the message shows in its place.
    """
    try:
        return [int(part) for part in words(text, option)]
    except ValueError:
        raise InputError(f"{option} {text!r}: expected whole numbers with commas between, such as {such_as}") from None


class Seconds(click.FloatRange):
    """A time in seconds, up to a day: the system's clocks and waits take no infinite ones, and no NaN.

    Args:
        least: the shortest that is allowed.
    """

    def __init__(self, least: float) -> None:
        super().__init__(min=least, max=86_400.0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; fails as click's own types do."""
        found = float(super().convert(value, param, ctx))
        if math.isnan(found):
            self.fail(f"{value} is no time in seconds.", param, ctx)
        return found


class Folder(click.Path):
    """A folder, which need not be there; no name at all (a variable of the shell that is not set) would be this one."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; fails as click's own types do."""
        if value == "":
            self.fail("it must name a folder, and is empty.", param, ctx)
        return super().convert(value, param, ctx)


def tuner_command(**options: Any) -> Callable[[Callable[..., None]], click.Command]:
    """What ``click.command`` does, with what every command of the tuner has: ``-h`` and ``--version``."""
    settings = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
    version = click.version_option(__version__, prog_name="tilekern", message="%(prog)s %(version)s")
    return lambda function: version(click.command(context_settings=settings, **options)(function))


class GroupedCommand(click.Command):
    """A command whose help lists the options under headings.

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
