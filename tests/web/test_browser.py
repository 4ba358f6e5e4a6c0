"""The page in a real browser: every view, live, by keyboard, in both colour schemes, escaped."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from metatrainer.ledger import Ledger
from metatrainer.web.app import make_app
from tests.web.conftest import add_step
from tests.web.test_app import EPISODE, VIEWS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
RUN = "/run/nano-try-1"
CONTRAST = """
() => {
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = numbers(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const weak = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest("svg, .skip")) continue;
    const a = light(numbers(getComputedStyle(element).color)), b = light(ground(element));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) weak.push([element.outerHTML.slice(0, 80), ratio]);
  }
  return weak;
}
"""
"""Texts whose contrast is below what WCAG 2.2 AA asks for (4.5)."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM, "these tests need Chromium; on Debian: apt install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    """Where a server shows the run."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(make_app(run.parent), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """A page that fails the test for any error, refusal or request to elsewhere."""
    page = browser.new_page(base_url=address)
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(address) else wrong.append(r.url))
    yield page
    page.close()
    assert not wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_is_readable_and_harmless(page: Page, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    for view in VIEWS:
        page.goto(view)
        assert "taken" not in page.title()
        assert page.locator("h1").count() == 1
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate("[...document.images].length") == 0
        for plot in page.locator("[data-chart]").all():
            assert plot.locator("canvas").count() == 1


def test_all_views_fit_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    for view in VIEWS:
        page.goto(view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view


def test_an_open_page_follows_the_run(page: Page, run: Path) -> None:
    page.goto(RUN)
    assert "3 of 4" in page.inner_text("dl")
    with Ledger(run / "ledger.sqlite") as ledger:
        add_step(ledger, 3, 4)
    page.wait_for_selector('a[href$="/train/3"]', timeout=20_000, state="attached")
    assert "4 of 4" in page.inner_text("dl")
    assert page.locator("[data-chart] canvas").count() == page.locator("[data-chart]").count()


def test_what_is_open_stays_open_when_the_page_is_renewed(page: Page, run: Path) -> None:
    page.goto(RUN)
    page.locator("details > summary").first.click()
    page.evaluate("document.activeElement.blur()")
    with Ledger(run / "ledger.sqlite") as ledger:
        add_step(ledger, 3, 4)
    page.wait_for_selector('a[href$="/train/3"]', timeout=20_000, state="attached")
    assert page.locator("details").first.evaluate("e => e.open")


def test_the_keyboard_leads_from_the_run_to_a_job_and_back(page: Page) -> None:
    page.goto(RUN)
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/train/2")
    page.keyboard.press("[")
    page.wait_for_url("**/train/1")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/episode/{EPISODE}")
    page.keyboard.press("u")
    page.wait_for_url("**/train/1")
    page.keyboard.press("u")
    page.wait_for_url(f"**{RUN}")
    page.keyboard.press("h")
    page.wait_for_url("**/")


def test_a_point_of_a_chart_leads_to_its_step(page: Page) -> None:
    page.goto(RUN)
    over = page.locator("[data-chart] .u-over").first
    box = over.bounding_box()
    assert box
    over.hover(position={"x": box["width"] / 2, "y": box["height"] / 2})
    over.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
    page.wait_for_url("**/train/1")


def test_runs_are_compared_from_the_list(page: Page) -> None:
    page.goto("/")
    page.get_by_label("compare nano-try-1").check()
    page.get_by_role("button").click()
    page.wait_for_url("**/compare?run=nano-try-1")
    assert page.locator("canvas").count() == 4


def test_the_page_works_without_its_script(browser: Browser, address: str) -> None:
    context = browser.new_context(java_script_enabled=False, base_url=address)
    page = context.new_page()
    page.goto(RUN)
    page.locator("details > summary").first.click()
    page.locator('details[open] a[href$="/train/1"]').first.click()
    assert page.url.endswith("/train/1")
    context.close()


def test_a_server_that_comes_back_is_found_again(browser: Browser, address: str, run: Path) -> None:
    """While the server answers nothing of use the page stays, and it goes on afterwards."""
    page = browser.new_page(base_url=address)
    page.route("**/version", lambda route: route.fulfill(status=500, body="no"))
    page.goto(RUN)
    time.sleep(2.5)
    assert page.locator("h1").inner_text() == "nano-try-1"
    page.unroute("**/version")
    with Ledger(run / "ledger.sqlite") as ledger:
        add_step(ledger, 3, 4)
    page.wait_for_selector('a[href$="/train/3"]', timeout=20_000, state="attached")
    page.close()
