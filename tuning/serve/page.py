"""The service's page: one document that asks its own host for the status and nothing else of anybody."""

from __future__ import annotations

import base64
import hashlib

_STYLE = """
:root { color-scheme: light dark; --line: #8886 }
:root { --soft: light-dark(#595959, #b0b0b0); --bad: light-dark(#a12b00, #ff9d7a) }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 90rem; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 0 .5rem }
h2 { font-size: 1.15rem; margin: 1.6rem 0 .4rem }
dl { display: grid; grid-template-columns: max-content auto; gap: .1rem 1rem; margin: 0 }
dt, .soft { color: var(--soft) }
dd { margin: 0; overflow-wrap: anywhere }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem .25rem 0; text-align: left; vertical-align: top }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
td { overflow-wrap: anywhere }
progress { width: min(30rem, 100%); height: 1rem }
.bad { color: var(--bad) }
[hidden] { display: none }
"""

_SCRIPT = """
"use strict"
const every_ms = 2000
const at = (id) => document.getElementById(id)
const put = (id, text) => { if (at(id).textContent !== text) at(id).textContent = text }
const values = (problem) => Object.entries(problem ?? {}).map(([name, value]) => `${name}=${value}`).join(" ")
const local = (time) => time ? new Date(time).toLocaleString() : ""
const fixed = (value, digits) => typeof value === "number" ? value.toFixed(digits) : ""

function rows(id, items, cells) {
  const found = items.map((item) => {
    const row = document.createElement("tr")
    for (const [text, kind] of cells(item)) {
      const cell = document.createElement("td")
      cell.textContent = text ?? ""
      if (kind) cell.className = kind
      row.append(cell)
    }
    return row
  })
  at(id).querySelector("tbody").replaceChildren(...found)
  at(id).hidden = items.length === 0
  at(`${id}-none`).hidden = items.length > 0
}

function show(known) {
  put("state", known.state)
  const here = known.gpu.here ? "measured here" : "not here: winners are predicted"
  put("gpu", `${known.gpu.name} (${known.gpu.arch}), ${here}`)
  put("toolkit", known.toolkit.key)
  put("host", `${known.host}, process ${known.process}, tilekern ${known.version}, since ${local(known.started)}`)
  const counts = ({root, waiting, failed, elsewhere, unknown}) =>
    `${root}: ${waiting} waiting, ${failed} failed, ${elsewhere} for other GPUs, ${unknown} unknown`
  put("caches", known.caches.map(counts).join("; "))
  const totals = known.totals
  const spent = `${fixed(totals.tuning_s, 0)} s of tuning in ${totals.passes} passes`
  put("totals", `${totals.published} published, ${totals.failed} failed, ${spent}`)
  put("error", known.error ?? "")
  at("trouble").hidden = !known.error
  at("batch").hidden = !known.batch
  at("batch-none").hidden = Boolean(known.batch)
  if (known.batch) {
    const {stage, done, of, items, cache} = known.batch
    put("stage", of ? `${stage}: ${done} of ${of}` : stage)
    put("items", items.map((item) => `${item.kernel} ${values(item.problem)}`).join("; ") + ` (${cache})`)
    if (of) { at("bar").max = of; at("bar").value = done } else at("bar").removeAttribute("value")
  }
  rows("queue", known.queue, (item) => [
    [item.kernel], [values(item.problem)], [item.gpu], [item.state, item.state === "failed" ? "bad" : ""],
    [item.misses, "number"], [fixed(item.lost_us, 1), "number"], [fixed(1000 * item.cost_s, 3), "number"],
    [item.why || item.reason],
  ])
  rows("history", known.history, (line) => [
    [local(line.time)], [line.event, line.event === "failed" ? "bad" : ""], [line.kernel], [values(line.problem)],
    [line.provenance], [fixed(line.time_us, 2), "number"], [fixed(line.gain_over_default, 2), "number"],
    [line.reason ?? values(line.config)],
  ])
}

async function refresh() {
  try {
    const answer = await fetch("status", {cache: "no-store"})
    if (answer.status === 401) { location.reload(); return }
    if (!answer.ok) throw new Error(`status ${answer.status}`)
    show(await answer.json())
    put("link", "")
    document.body.dataset.shown = "true"
  } catch (error) {
    put("link", `The service does not answer (${error.message}); what is shown is old.`)
  }
  setTimeout(refresh, every_ms)
}
refresh()
"""

_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>tilekern tuning service</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>tilekern tuning service</h1>
"""
_TAIL = """
</main>
</body>
</html>
"""


def _table(name: str, caption: str, columns: dict[str, bool], nothing: str) -> str:
    heads = "".join(
        f'<th scope="col"{" class=number" if is_number else ""}>{title}</th>' for title, is_number in columns.items()
    )
    return (
        f'<h2 id="{name}-title">{caption}</h2><p id="{name}-none" class="soft">{nothing}</p>'
        f'<div class="wide"><table id="{name}" aria-labelledby="{name}-title" hidden><thead><tr>{heads}</tr></thead>'
        "<tbody></tbody></table></div>"
    )


_QUEUE = {
    "kernel": False, "problem": False, "GPU": False, "state": False, "misses": True, "lost each, µs": True,
    "cost, ms": True, "remark": False,
}  # fmt: skip
_HISTORY = {
    "time": False, "event": False, "kernel": False, "problem": False, "how": False, "time, µs": True,
    "gain over default": True, "config or reason": False,
}  # fmt: skip
_BODY = (
    '<noscript><p class="bad">This page needs JavaScript, which is off; the same is in /status.</p></noscript>'
    '<p id="link" class="bad" role="alert"></p>'
    '<dl><dt>state</dt><dd id="state" role="status" aria-live="polite">asking</dd><dt>GPU</dt><dd id="gpu"></dd>'
    '<dt>toolkit</dt><dd id="toolkit"></dd><dt>host</dt><dd id="host"></dd><dt>caches</dt><dd id="caches"></dd>'
    '<dt>since the start</dt><dd id="totals"></dd></dl>'
    '<p id="trouble" class="bad" hidden>The last pass had trouble: <span id="error"></span></p>'
    '<h2>At work</h2><p id="batch-none" class="soft">Nothing is being tuned.</p>'
    '<div id="batch" hidden><p id="items"></p><p><progress id="bar" aria-labelledby="stage"></progress> '
    '<span id="stage"></span></p></div>'
    + _table("queue", "Queue", _QUEUE, "Nothing is wanted.")
    + _table("history", "History", _HISTORY, "Nothing has been published yet.")
)
PAGE = f"{_HEAD.format(style=_STYLE)}{_BODY}<script>{_SCRIPT}</script>{_TAIL}"
SIGN_IN = (
    f"{_HEAD.format(style=_STYLE)}"
    '<form method="get" action="/"><p><label>Token <input type="password" name="token" autocomplete="off" required '
    'autofocus></label> <button>Show</button></p><p class="soft">The service was started with a token. Programs send '
    "it as <code>Authorization: Bearer</code>.</p></form>"
    f"{_TAIL}"
)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# The browser runs this script and this style, talks to this host, and does nothing else.
POLICY = (
    f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; connect-src 'self'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
