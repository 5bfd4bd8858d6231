"""The report's page in a real browser, opened from disk with no network."""

import dataclasses
import json
import time
from pathlib import Path

import pytest
from real_browser import NEEDS_BROWSER, opened
from report_samples import LARGE, measured, planned
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from tuning_samples import SMALL

from tilekern.tuning.report import Report, as_html, report_of
from tilekern.tuning.report.columns import problems_of
from tilekern.tuning.sweep.folder import Sweep

pytestmark = [pytest.mark.processes, pytest.mark.nightly, NEEDS_BROWSER]
FLAGS = (
    "--window-size=1500,2600",
    # Nothing but files can be reached: every name is unknown, and addresses go through a proxy that is not there.
    "--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9",
)  # fmt: skip
PATIENCE_S = 60
# Elements of a part of the page, which Bokeh keeps in shadow trees.
DEEP = """
const found = []
const walk = (element) => {
  if (element.matches(arguments[0])) found.push(element)
  for (const child of [...element.children, ...(element.shadowRoot?.children ?? [])]) walk(child)
}
walk(arguments[1] ?? document.body)
return found
"""
VIEW = "return Bokeh.index.find_one(Bokeh.documents[0].get_model_by_name(arguments[0])).el"
# Where a point lies in the window, in pixels.
PLACE = """
const plot = Bokeh.index.find_one(Bokeh.documents[0].get_model_by_name(arguments[0]))
plot.el.scrollIntoView({block: "center"})
const box = plot.canvas_view.el.getBoundingClientRect()
const {x_scale, y_scale} = plot.frame
return [box.left + x_scale.compute(arguments[1]), box.top + y_scale.compute(arguments[2])]
"""
# The points that a plot draws, by the names of what they stand for.
DRAWN = """
const plot = Bokeh.documents[0].get_model_by_name(arguments[0])
const found = {}
for (const view of Bokeh.index.find_one(plot).renderer_views.values()) {
  if (view.model.glyph?.type !== "Scatter") continue
  const {x, y} = view.model.glyph
  const data = view.model.data_source.data
  found[view.model.name] = [...view.all_indices].map((i) => [data[x.field][i], data[y.field][i]])
}
return found
"""


class Page:
    """A page in a browser: what can be seen, and what a reader does."""

    def __init__(self, driver: webdriver.Chrome, text: str, folder: Path):
        self.driver = driver
        path = folder / "report.html"
        path.write_text(text)
        driver.get_log("performance")
        driver.get(path.as_uri())
        self.until(lambda: driver.execute_script("return window.Bokeh?.documents[0]?.is_idle"))

    def until(self, holds):
        deadline = time.monotonic() + PATIENCE_S
        while not (found := holds()):
            assert time.monotonic() < deadline, f"waited {PATIENCE_S} s; the console: {self.console()}"
            time.sleep(0.02)
        return found

    def console(self) -> list[str]:
        """Warnings and errors so far."""
        return [line["message"] for line in self.driver.get_log("browser") if line["level"] in ("WARNING", "SEVERE")]

    def asked_for(self) -> set[str]:
        """The addresses that the page wanted to load."""
        events = [json.loads(line["message"])["message"] for line in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return {found["request"]["url"] for found in sent if found["documentURL"] == self.driver.current_url}

    def part(self, name: str):
        return self.driver.execute_script(VIEW, name)

    def inside(self, name: str, selector: str) -> list:
        return self.driver.execute_script(DEEP, selector, self.part(name))

    def drawn(self, plot: str) -> dict[str, list[list[float]]]:
        return self.driver.execute_script(DRAWN, plot)

    def hover(self, plot: str, x: float, y: float) -> str:
        """Return the text shown at a point of a plot."""
        left, top = self.driver.execute_script(PLACE, plot, x, y)
        actions = ActionChains(self.driver, duration=0)
        for step in (1, 0):  # a move that ends on the point: the browser tells a page of moves alone
            actions.w3c_actions.pointer_action.move_to_location(round(left) + step, round(top) + step)
        actions.perform()
        return self.until(lambda: "\n".join(tip.text for tip in self.driver.execute_script(DEEP, ".bk-Tooltip", None)))

    def leave(self) -> None:
        """Take the pointer off all plots; what was shown at a point is gone."""
        actions = ActionChains(self.driver, duration=0)
        actions.w3c_actions.pointer_action.move_to_location(1, 1)
        actions.perform()
        self.until(lambda: not any(tip.text for tip in self.driver.execute_script(DEEP, ".bk-Tooltip", None)))

    def click_point(self, plot: str, x: float, y: float) -> None:
        left, top = self.driver.execute_script(PLACE, plot, x, y)
        actions = ActionChains(self.driver, duration=0)
        actions.w3c_actions.pointer_action.move_to_location(round(left), round(top)).click()
        actions.perform()

    def choose(self, name: str, text: str) -> None:
        [found] = self.inside(name, "select")
        Select(found).select_by_visible_text(text)

    def head(self, table: str, title: str):
        heads = self.inside(table, ".slick-header-column")
        return next(head for head in heads if head.text.strip() == title)

    def sort(self, table: str, title: str) -> None:
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", self.part(table))
        self.head(table, title).click()

    def column(self, table: str, title: str) -> list[str]:
        """The texts that can be seen in a column, from top to bottom."""
        at = [head.text.strip() for head in self.inside(table, ".slick-header-column")].index(title)
        cells = self.driver.execute_script(
            "return arguments[0].map((row) => [row.getBoundingClientRect().top, row.children[arguments[1]].innerText])",
            self.inside(table, ".slick-row"), at,
        )  # fmt: skip
        return [text for _, text in sorted(cells, key=lambda cell: cell[0])]


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("browser"), *FLAGS) as found:
        yield found


@pytest.fixture(scope="module")
def report(compiled_sweep: Sweep, tmp_path_factory) -> Report:
    return report_of(measured(compiled_sweep, tmp_path_factory.mktemp("measured") / "sweep"))


@pytest.fixture(scope="module")
def text(report: Report) -> str:
    return as_html(report)


@pytest.fixture
def page(driver, text: str, tmp_path: Path) -> Page:
    """A page that was just opened, for tests that change it or ask what it has said."""
    return Page(driver, text, tmp_path)


def spaced(point) -> str:
    return " ".join(f"{name}={value}" for name, value in point.items())


def points(rows, x: str, y: str) -> list[list[float]]:
    """Return the points that a plot should draw for rows, by their ranks in the page."""
    ranked = [dataclasses.asdict(row) | {"rank": at} for at, row in enumerate(rows, 1) if row.time_us is not None]
    found = [[row[x], row[y]] for row in ranked]
    return sorted([a, b] for a, b in found if a is not None and b is not None)


PLOTS = {
    "times": ("rank", "time_us"),
    "registers": ("registers", "time_us"),
    "roofline": ("resident_blocks", "share_of_roofline"),
    "models": ("predicted_us", "measured_us"),
}


def all_drawn(page: Page, plot: str) -> list[list[float]]:
    return sorted(point for found in page.drawn(plot).values() for point in found)


def test_it_opens_with_no_error_and_asks_for_nothing(page: Page):
    assert page.driver.title == "Tuning of Test-1B <b> on H200"
    assert "580.159.03" in page.driver.find_element("tag name", "dl").text
    assert page.console() == []
    asked = page.asked_for()
    assert page.driver.current_url in asked
    assert not [url for url in asked - {page.driver.current_url} if not url.startswith("data:")]


def test_the_browser_refuses_to_load_anything(page: Page):
    """What the page promises holds for whatever runs in it."""
    refused = page.driver.execute_async_script(
        "const done = arguments[0]; fetch('https://example.com').then(() => done(false), () => done(true))"
    )
    assert refused
    assert any("Content Security Policy" in message for message in page.console())


def test_the_plots_draw_every_candidate_with_a_time_and_the_winners_with_their_share_and_gain(
    page: Page, report: Report
):
    small, _ = problems_of(report.rows)
    winner = next(row for row in small if row.winner)
    for plot, axes in PLOTS.items():
        assert all_drawn(page, plot) == points(small, *axes), plot
        assert page.drawn(plot)["winner"] == points([winner], *axes), plot
        [canvas, *_] = page.inside(plot, "canvas")
        assert canvas.is_displayed(), plot
    won = [row for row in report.rows if row.winner]
    assert all_drawn(page, "share") == points(won, "time_us", "share_of_roofline")
    assert all_drawn(page, "gain") == points(won, "time_us", "gain_over_default")


def test_hovering_a_point_shows_its_config_and_figures(page: Page, report: Report):
    small, _ = problems_of(report.rows)
    winner = small[0]
    for plot, axes in PLOTS.items():
        [place] = points([winner], *axes)
        shown = page.hover(plot, *place)
        for part in (
            spaced(winner.config),
            "5.00 ± 0.10 µs, measured 85 times",
            "80.0 % of the roofline, 2.000 x the default",
            f"{winner.registers} registers",
        ):
            assert part in shown, plot
        page.leave()


def test_a_click_on_a_head_sorts_by_it(page: Page, report: Report):
    small, _ = problems_of(report.rows)
    shown = page.column("candidates", "time, µs")
    assert shown[0] == "5.00"
    for title, field in (("registers", "registers"), ("time, µs", "time_us"), ("#", "number")):
        page.sort("candidates", title)
        up = numbers(page.until(lambda t=title: page.column("candidates", t)))
        known = sorted(value for row in small if (value := getattr(row, field)) is not None)
        assert up == pytest.approx(known[: len(up)], abs=0.01)
        page.sort("candidates", title)
        down = numbers(page.column("candidates", title))
        assert down == pytest.approx(known[::-1][: len(down)], abs=0.01)
    page.sort("candidates", "status")
    states = page.column("candidates", "status")
    assert states == sorted(row.status for row in small)[: len(states)]


def numbers(texts: list[str]) -> list[float]:
    return [float(text.replace(",", "")) for text in texts if text]


def test_another_problem_changes_plots_heading_and_table(page: Page, report: Report):
    _, large = problems_of(report.rows)
    before = {plot: all_drawn(page, plot) for plot in PLOTS}
    page.choose("problem", f"{LARGE[0]} {spaced(LARGE[1])}")
    page.until(lambda: spaced(LARGE[1]) in page.part("heading").text)
    for plot, axes in PLOTS.items():
        assert all_drawn(page, plot) == points(large, *axes) != before[plot]
    assert numbers(page.column("candidates", "time, µs"))[0] == large[0].time_us
    [place] = points(large[:1], *PLOTS["times"])
    assert spaced(large[0].config) in page.hover("times", *place)
    page.choose("problem", f"{SMALL[0]} {spaced(SMALL[1])}")
    page.until(lambda: spaced(SMALL[1]) in page.part("heading").text)
    assert {plot: all_drawn(page, plot) for plot in PLOTS} == before


def test_a_click_on_a_winner_chooses_its_problem(page: Page, report: Report):
    _, large = problems_of(report.rows)
    page.click_point("gain", large[0].time_us, large[0].gain_over_default)
    page.until(lambda: spaced(LARGE[1]) in page.part("heading").text)
    [line] = [row for row in page.inside("winners", ".slick-row") if spaced(SMALL[1]) in row.text]
    line.find_element("css selector", ".slick-cell").click()
    page.until(lambda: spaced(SMALL[1]) in page.part("heading").text)
    assert page.console() == []


def test_the_table_shows_the_candidates_that_are_asked_for(page: Page, report: Report):
    small, _ = problems_of(report.rows)
    page.choose("status", "failed")
    assert page.until(lambda: page.column("candidates", "status") == ["failed"])
    assert "</script><b>out of registers</b>" in page.column("candidates", "remark")[0]
    page.choose("status", "any")
    [field] = page.inside("search", "input")
    field.send_keys("tile_n=32 tma=True")
    wanted = {str(row.number) for row in small if row.config.get("tile_n") == 32 and row.config["tma"]}
    assert page.until(lambda: set(page.column("candidates", "#")) == wanted)
    field.send_keys(*[Keys.BACKSPACE] * 30)
    page.until(lambda: len(page.column("candidates", "#")) > len(wanted))
    assert page.console() == []


def test_a_page_of_predictions_says_that_they_are(driver, compiled_sweep: Sweep, tmp_path: Path):
    report = report_of(planned(compiled_sweep, tmp_path / "sweep"))
    page = Page(driver, as_html(report), tmp_path)
    assert "Nothing was measured" in driver.find_element("css selector", ".notice").text
    assert set(page.column("winners", "time is")) == {"predicted"}
    assert set(page.drawn("times")) == {"predicted", "default", "winner"}
    winner = next(row for row in problems_of(report.rows)[0] if row.winner)
    [place] = points([winner], "resident_blocks", "share_of_roofline")
    assert f"{winner.time_us:.2f} µs, predicted" in page.hover("roofline", *place)
    assert page.console() == []


@pytest.mark.slow
def test_a_large_sweep_opens_within_five_seconds(driver, report: Report, tmp_path: Path):
    """Measure the processor time of the page's thread, which a busy machine does not lengthen."""
    rows = [row for row in report.rows if row.problem == SMALL[1]] * 2
    many = [
        dataclasses.replace(row, problem=row.problem.but(rows=256 + at), number=number, winner=number == 1)
        for at in range(143)
        for number, row in enumerate(rows)
    ]
    assert len(many) > 4800
    driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    page = Page(driver, as_html(dataclasses.replace(report, rows=tuple(many))), tmp_path)
    opened_s = busy_s(driver)
    assert opened_s < 5
    assert len(Select(page.inside("problem", "select")[0]).options) == 143
    page.choose("problem", f"{SMALL[0]} {spaced(SMALL[1].but(rows=398))}")
    page.until(lambda: "rows=398" in page.part("heading").text)
    page.sort("winners", "time, µs")
    assert busy_s(driver) - opened_s < 2
    assert page.console() == []


def busy_s(driver) -> float:
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")
