"""Write HTML documents with plots of Bokeh, each one file that opens from disk without a network."""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from bokeh.resources import Resources

NO_SCRIPTS = '<noscript><p class="notice">The plots and tables need JavaScript, which is off.</p></noscript>'
# The policy makes the browser refuse to load anything.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval';\
 style-src 'unsafe-inline'; img-src data: blob:; font-src data:">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.5rem; margin: 0 0 .5rem }}
dl {{ display: grid; grid-template-columns: max-content auto; gap: .1rem 1rem; margin: 0 0 1rem }}
dt {{ color: #595959 }}
dd {{ margin: 0 }}
.notice {{ border-left: 4px solid #d55e00; padding: .4rem .8rem; background: #fdf3ec; max-width: 60rem }}
{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
<script type="application/json" id="report-data">{data}</script>
{scripts}
<script>
const items = JSON.parse(document.getElementById("report-data").textContent)
const embed = (item) => Bokeh.embed.embed_item(item, document.getElementById(item.target_id))
Promise.all(items.map(embed)).then(() => {{
{start}}})
</script>
</body>
</html>
"""


def document(
    title: str, body: str, items: Sequence[Any], style: str, start: str, components: Iterable[str]
) -> str:  # fmt: skip
    """Return a document; the same parts always give the same text.

    Args:
        title: its title, as text.
        body: its HTML, with an element for each item.
        items: plots by ``bokeh.embed.json_item``, each with the id of its element.
        style: further style sheets.
        start: JavaScript that runs when all items are embedded.
        components: the parts of BokehJS that the items need.
    """
    # A script's text ends at the first "</", even in a string.
    data = json.dumps(_renumbered(items), separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    scripts = Resources("inline", components=list(components)).render()
    return _PAGE.format(
        title=html.escape(title), style=style, body=body, data=data, scripts=scripts, start=start
    )  # fmt: skip


def table_rows(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Return the rows of a table: its heads, which are HTML, and lines of text."""
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{body}"


def _renumbered(items: Any) -> Any:
    """Number the models' ids from 1, since Bokeh numbers them over the whole process."""
    fresh = (f"m{count}" for count in itertools.count(1))
    text = json.dumps(items)
    ids = {found: next(fresh) for found in dict.fromkeys(re.findall(r'"id": ?"(p\d+)"', text))}

    def renamed(value: dict[str, Any]) -> dict[str, Any]:
        return value | {name: ids[value[name]] for name in ("id", "root_id") if value.get(name) in ids}

    return json.loads(text, object_hook=renamed)
