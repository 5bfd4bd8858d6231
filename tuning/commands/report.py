"""``python -m tilekern.tune report DIR``: writes a sweep's results as a page, as CSV and as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tilekern.errors import InputError
from tilekern.tuning.options import FOLDER, File, tuner_command
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.terminal import about_lost
from tilekern.warning import printable, tell

_FILE = File(dir_okay=False, allow_dash=True)
_STDOUT = Path("-")


@tuner_command(short_help="Write what a sweep found as a page, as CSV and as JSON.")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option("--html", "html_file", type=_FILE, help="The page; needs the extra tilekern[report].")
@click.option("--csv", "csv_file", type=_FILE, help="One line for each candidate.")
@click.option("--json", "json_file", type=_FILE, help="The same with what the sweep is of.")
def command(folder: Path, html_file: Path | None, csv_file: Path | None, json_file: Path | None) -> None:
    """Write the report on the sweep in DIR, whatever stage it is in.

    The page is one file that opens from disk with no network. Without options DIR/report.html, report.csv and
    report.json are written; with some, those files alone. The file "-" is standard output.
    """
    from tilekern.tuning.report import as_csv, as_html, as_json, report_of, write_report, write_text

    report = report_of(Sweep(folder, foreign=True))
    if not (html_file or csv_file or json_file):
        written = write_report(report, folder)
    else:
        asked = ((csv_file, as_csv), (json_file, as_json), (html_file, as_html))
        if [path for path, _ in asked].count(_STDOUT) > 1:
            raise InputError("standard output takes one form of the report; give the others files")
        written = []
        for path, form in asked:
            if path == _STDOUT:
                text = form(report)
                if sys.stdout is not None and sys.stdout.isatty():
                    text = "\n".join(map(printable, text.split("\n")))
                click.echo(text, nl=False)
            elif path:
                written.append(write_text(path, form(report)))
    if report.lost:
        tell(*about_lost(report.lost), err=True)
    for path in written:
        tell(str(path), err=_STDOUT in (html_file, csv_file, json_file))
