"""The page `/taskdb` in a real browser: Debian's `chromium` and `chromium-driver`.

The picture of it in the docs: `TASKDB_SCREENSHOT=docs/dashboard.png python -m pytest -m slow tests/e2e/test_browser.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from bench.workloads import cube
from tests.e2e import functions as f
from tests.support.cluster import Cluster, free_port, until

selenium = pytest.importorskip("selenium")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (shutil.which("chromium") and shutil.which("chromedriver")), reason="no chromium, or no chromedriver"),
]
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1400,1050",
)  # fmt: skip
#: How long the charts of the picture go back, at least. Seconds.
PICTURE_SECONDS = 20


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    dashboard = ("--dashboard", "--dashboard-address", f"127.0.0.1:{free_port()}")
    with Cluster(tmp_path, workers=2, scheduler=dashboard) as cluster:
        cluster.dashboard = f"http://{dashboard[-1]}"
        yield cluster


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for switch in (*SWITCHES, f"--user-data-dir={tmp_path / 'browser'}"):
        options.add_argument(switch)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield browser
    finally:
        browser.quit()


def model(browser: webdriver.Chrome, name: str, attribute: str) -> Any:
    """Of a part of the page, as the browser has it now. None before it is there."""
    script = """
        const page = window.Bokeh && Bokeh.documents[0];
        const found = page && page.get_model_by_name(arguments[0]);
        return found ? found[arguments[1]] : null;
    """
    return browser.execute_script(script, name, attribute)


def rows(browser: webdriver.Chrome) -> list[dict[str, Any]]:
    data = model(browser, "taskdb-graphs", "data") or {}
    return [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]


def drawn(browser: webdriver.Chrome) -> str:
    """All text that stands on the page, inside its shadow roots too."""
    script = """
        const texts = [];
        const walk = (node) => {
            if (node.shadowRoot) walk(node.shadowRoot);
            if (node.nodeType === Node.TEXT_NODE) texts.push(node.textContent);
            for (const child of node.childNodes) if (!["STYLE", "SCRIPT"].includes(child.nodeName)) walk(child);
        };
        walk(document.body);
        return texts.join(" ");
    """
    return str(browser.execute_script(script))


def test_the_page_follows_ten_million_tasks(cluster: Cluster, browser: webdriver.Chrome, tmp_path: Path) -> None:
    n = 216
    with Client(cluster.address) as client:
        browser.get(f"{cluster.dashboard}/status")
        link = until(lambda: browser.find_elements("link text", "Taskdb"), "the navigation has the page")[0]
        link.click()
        until(lambda: model(browser, "taskdb-words", "text"), "the page is there")
        large = client.compute(cube(n))
        small = client.map(f.slow_inc, range(400), seconds=0.02, pure=False, priority=1)
        bad = client.map(f.fail, range(30), pure=False, priority=1)
        until(lambda: any(row["tasks"] > n**3 and row["done"] > 100 for row in rows(browser)), "the large graph is shown")
        until(lambda: any(row["erred"] == 30 for row in rows(browser)), "what failed is shown")
        until(lambda: all(f"{row['done']:,}" in drawn(browser) for row in rows(browser)), "the table is drawn as it is by now")
        seen = len(model(browser, "taskdb-rows", "data")["time"])
        until(lambda: len(model(browser, "taskdb-rows", "data")["time"]) >= seen + 3, "the charts go on")
        text = until(lambda: (text := drawn(browser)) and "block_sum" in text and text, "the table is drawn")
        for words in ("live", cluster.url, "fail", "slow_inc"):
            assert words in text, words
        until(lambda: len(model(browser, "taskdb-rows", "data")["time"]) >= PICTURE_SECONDS, "the charts have some length")
        picture = Path(os.environ.get("TASKDB_SCREENSHOT") or tmp_path / "dashboard.png")
        assert browser.save_screenshot(str(picture.absolute()))
        assert picture.stat().st_size > 20_000
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []

        assert cluster.daemon is not None
        cluster.kill(cluster.daemon)
        until(lambda: "the daemon is gone" in drawn(browser), "the page says that the daemon is gone")
        cluster.start_again(cluster.daemon)
        until(lambda: "the daemon is gone" not in drawn(browser), "the page says that it is back")
        large.cancel()
        del large, small, bad
