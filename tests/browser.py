"""A real Chromium, for tests that look at the dashboard as a person would."""

from __future__ import annotations

import contextlib
import shutil

import pytest

from tests.processes import until

ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--disable-quic"),
]
PATIENCE_MS = 30_000


@contextlib.contextmanager
def chromium():
    """A browser; whatever its pages complain about is in `complaints`."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("there is no chromium here: `make test` installs it where it may")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield Pages(browser)
        browser.close()


class Pages:
    def __init__(self, browser):
        self._browser, self.complaints = browser, []

    def open(self, link, width=1280, height=800, **given):
        context = self._browser.new_context(viewport={"width": width, "height": height}, **given)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(link)
        return page


def when(page, expression, seconds=60.0):
    """Wait until it is so. (The page's own rules forbid playwright's way of waiting.)"""
    assert until(lambda: page.evaluate(expression), seconds), f"{expression}: {page.inner_text('body')[:2000]}"


def turn(page, name):
    """To another of its pages."""
    page.evaluate("name => { location.hash = `#/${name}`; }", name)
    page.wait_for_selector(f"#{name}:not([hidden])")


def overflow(page):
    """Pixels that one would have to scroll sideways."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def hard_to_use(page):
    """What axe-core finds to be serious, or worse."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page).response["violations"]
    return [
        (one["id"], [node["html"][:200] for node in one["nodes"]][:3])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
