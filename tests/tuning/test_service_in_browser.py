"""The service's page in a real browser, on a real service."""

import json
import signal
import time
from pathlib import Path

import pytest
from environments import without_kept_cubins
from real_browser import NEEDS_BROWSER, opened
from service_samples import Running, status, until, want
from tuning_samples import SMALL

from tilekern.cache import note_wanted
from tilekern.compile.toolchain import toolkit
from tilekern.spec.targets import resolve

pytestmark = [
    pytest.mark.processes,
    pytest.mark.nightly,
    NEEDS_BROWSER,
    pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed"),
]
FLAGS = (
    "--no-proxy-server", "--window-size=1300,1000", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
TOKEN = "correct-horse-battery-staple"
PORTRAYED = '</script><script>document.title = "owned"</script><img src=x onerror="document.title = 1">'


@pytest.fixture
def driver(browser):
    """The browser with an empty page and console: the page before may still ask a service that has ended."""
    browser.get("about:blank")
    browser.get_log("browser")
    return browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("browser"), *FLAGS) as found:
        yield found


def text(driver, name: str) -> str:
    return driver.find_element("id", name).text


def cells(driver, table: str) -> list[list[str]]:
    """The rows that can be seen, in one look: the page renews them."""
    return driver.execute_script(
        "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map((r) => "
        "[...r.cells].map((c) => c.innerText))",
        table,
    )


def console(driver) -> list[str]:
    return [line["message"] for line in driver.get_log("browser") if line["level"] in ("WARNING", "SEVERE")]


def test_the_page_follows_the_service(driver, tmp_path: Path):
    """From an empty queue over the batch at work to the history, with nothing reloaded by hand."""
    kernel, problem = SMALL
    note_wanted(tmp_path, kernel, dict(problem), resolve("B200").describe(), PORTRAYED)
    arguments = ("--gpu", "H200", "--cache-dir", tmp_path, "--poll", 0.2, "--listen", "127.0.0.1:0", "--jobs", 1)
    # A compiler that keeps no cubins: else the batch may be done before the page looks.
    with Running(*arguments, PATH=without_kept_cubins()) as running:
        url = running.url()
        until(lambda: status(url)["state"] == "idle")
        driver.get_log("performance")
        driver.get(url)
        until(lambda: text(driver, "state") == "idle")
        assert driver.title == "tilekern tuning service"
        assert text(driver, "gpu") == "H200 (sm_90), not here: winners are predicted"
        assert f"process {running.process.pid}" in text(driver, "host")
        assert text(driver, "caches") == f"{tmp_path}: 0 waiting, 0 failed, 1 for other GPUs, 0 unknown"
        [row] = cells(driver, "queue")
        assert row[:4] == [kernel, "rows=256 columns=128 dtype=bfloat16", "B200", "elsewhere"]
        assert driver.find_element("id", "history-none").is_displayed()
        want(tmp_path)
        until(lambda: text(driver, "state") == "tuning")
        until(lambda: text(driver, "stage").startswith("compile: "))
        assert driver.find_element("id", "bar").is_displayed()
        assert text(driver, "items").startswith("column_sum rows=256")
        # Each look has the browser work, and this takes seconds.
        until(lambda: text(driver, "state") == "idle" and cells(driver, "history"), every_s=0.2)
        [line] = cells(driver, "history")
        assert line[1:5] == ["published", kernel, "rows=256 columns=128 dtype=bfloat16", "predicted"]
        assert float(line[5]) > 0
        assert not driver.find_element("id", "batch").is_displayed()
        assert text(driver, "totals").startswith("1 published, 0 failed, ")
        assert driver.title == "tilekern tuning service"
        assert console(driver) == []
        events = [json.loads(line["message"])["message"] for line in driver.get_log("performance")]
        sent = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
        assert {found for found in sent if not found.startswith("data:")} == {url, f"{url}status"}
        running.send(signal.SIGTERM)
        assert running.end()[0] == 0
        until(lambda: "The service does not answer" in text(driver, "link"))


def test_texts_of_the_wanted_list_are_shown_and_not_run(driver, tmp_path: Path):
    kernel, problem = SMALL
    folder = tmp_path / "v1" / "wanted"
    note_wanted(tmp_path, kernel, dict(problem), {**resolve("B200").describe(), "name": PORTRAYED}, PORTRAYED)
    assert folder.exists()
    with Running("--gpu", "H200", "--cache-dir", tmp_path, "--listen", "127.0.0.1:0") as running:
        url = running.url()
        until(lambda: status(url)["queue"])
        driver.get(url)
        until(lambda: cells(driver, "queue"))
        [row] = cells(driver, "queue")
        assert row[2] == PORTRAYED
        time.sleep(0.3)
        assert driver.title == "tilekern tuning service"
        assert console(driver) == []


def test_the_browser_refuses_scripts_that_are_not_the_page_s(driver, tmp_path: Path):
    with Running("--gpu", "H200", "--cache-dir", tmp_path, "--listen", "127.0.0.1:0") as running:
        driver.get(running.url())
        until(lambda: text(driver, "state") == "idle")
        driver.execute_script(
            "const added = document.createElement('script'); added.textContent = 'document.title = 1';"
            "document.body.append(added)"
        )
        assert driver.title == "tilekern tuning service"
        assert any("Content Security Policy" in message for message in console(driver))


def test_a_reader_signs_in_with_the_token(driver, tmp_path: Path):
    arguments = ("--gpu", "H200", "--cache-dir", tmp_path, "--listen", "127.0.0.1:0")
    with Running(*arguments, TILEKERN_SERVE_TOKEN=TOKEN) as running:
        driver.get(url := running.url())
        field = driver.find_element("css selector", "input[type=password]")
        field.send_keys("not-the-token-of-it")
        field.submit()
        # Between two pages there is none.
        until(lambda: driver.find_elements("css selector", "input[type=password]"))
        driver.get(url)
        field = driver.find_element("css selector", "input[type=password]")
        field.send_keys(TOKEN)
        field.submit()
        until(lambda: driver.find_elements("id", "state"))
        until(lambda: text(driver, "state") == "idle")
        assert driver.current_url == url
        assert TOKEN not in driver.page_source
        assert driver.execute_script("return document.cookie") == ""
        running.send(signal.SIGTERM)
        code, output, errors = running.end()
    assert code == 0
    assert TOKEN not in output + errors


def test_the_page_can_be_used_without_seeing_it(driver, tmp_path: Path):
    """Names and roles as a screen reader gets them."""
    want(tmp_path, SMALL, "B200")
    with Running("--gpu", "H200", "--cache-dir", tmp_path, "--listen", "127.0.0.1:0") as running:
        driver.get(running.url())
        until(lambda: cells(driver, "queue"))
        assert driver.find_element("tag name", "html").get_attribute("lang") == "en"
        table = driver.find_element("id", "queue")
        assert (table.aria_role, table.accessible_name) == ("table", "Queue")
        heads = table.find_elements("css selector", "thead th[scope=col]")
        assert len(heads) == len(cells(driver, "queue")[0])
        assert driver.find_element("id", "state").aria_role == "status"
        assert driver.find_element("id", "bar").get_attribute("aria-labelledby") == "stage"
        assert [h.text for h in driver.find_elements("tag name", "h2")] == ["At work", "Queue", "History"]
