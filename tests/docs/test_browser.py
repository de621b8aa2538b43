"""The built site in a real browser, and its links into the network."""

from __future__ import annotations

import shutil
import threading
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.docs.site import build

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.storm

PAGES = [
    "index.html",
    "reference/contract.html",
    "reference/api/communicator.html",
    "reference/command_line.html",
    "measured/speed.html",
]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served: browsers give the clipboard to no page of a file."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: sync_api.Browser, address: str) -> Iterator[sync_api.Page]:
    """A page at whose end the browser's console has no errors."""
    context = browser.new_context(
        base_url=address, permissions=["clipboard-read", "clipboard-write"]
    )
    page = context.new_page()
    errors: list[str] = []

    def note(message: sync_api.ConsoleMessage) -> None:
        if message.type == "error" and not message.location["url"].endswith("/favicon.ico"):
            errors.append(f"{message.location['url']}: {message.text}")

    page.on("console", note)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert not errors


@pytest.mark.parametrize("name", PAGES)
def test_a_page_renders(page: sync_api.Page, name: str) -> None:
    page.goto(name)
    assert page.locator("h1").first.is_visible()
    assert page.locator(".sidebar-tree a").count() > 5
    for image in page.locator("article img").all():
        image.scroll_into_view_if_needed()
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0


@pytest.mark.parametrize("words", ["has not called it", "CollectiveMismatch"])
def test_search_finds_an_error_by_its_words(page: sync_api.Page, words: str) -> None:
    page.goto("index.html")
    page.get_by_placeholder("Search").fill(words)
    page.keyboard.press("Enter")
    found = page.locator("#search-results a")
    found.first.wait_for()
    page.locator("#search-results .search-summary").wait_for()
    assert any("reference/errors" in (link.get_attribute("href") or "") for link in found.all())


def test_the_copy_button_copies_a_block(page: sync_api.Page) -> None:
    page.goto("reference/api/communicator.html")
    block = page.locator("div.highlight:has(button.copybtn)").first
    block.hover()
    block.locator("button.copybtn").click()
    page.locator("button.copybtn.success").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() == block.locator("pre").inner_text().strip()
    assert "all_reduce" in copied


def test_dark_and_light_have_other_backgrounds(page: sync_api.Page) -> None:
    backgrounds = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto("index.html")
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2


def test_links_into_the_network_lead_somewhere(tmp_path: Path) -> None:
    try:
        urllib.request.urlopen("https://docs.python.org/3/objects.inv", timeout=10).close()
    except OSError as error:
        pytest.skip(f"there is no network: {error}")
    build(tmp_path / "links", "linkcheck")
