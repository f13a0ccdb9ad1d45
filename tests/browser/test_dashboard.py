"""The dashboard in headless Chromium: `make dashboard-test`, which installs playwright; CHROMIUM names the browser."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support import brokers
from tests.support.servers import Server, running

NAME = "<img src=x onerror=alert(1)>"
PROMPT = "Question: " + " ".join(str(i) for i in range(250)) + "\nAnswer:"
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}

# The lowest contrast of any text with what is behind it, as WCAG computes it; a text over several colours is left out.
CONTRASTS = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = channels(colour).map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (channels(colour)[3] !== 0) return colour;
    }
  };
  const found = [];
  for (const element of document.querySelectorAll("body *:not(svg *)")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest("option, .skip, .sr")) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))].sort();
    found.push([(b + 0.05) / (a + 0.05), element.textContent.trim().slice(0, 40)]);
  }
  return found.sort((a, b) => a[0] - b[0])[0];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "there is no chromium on PATH; install one, or name it by CHROMIUM"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module", params=["virtual", "paged", "static"])
def server(request: Any) -> Iterator[Server]:
    config = {"kv": request.param, "max_num_seqs": 6, "memory_budget": "64MiB"}
    with running(config, api_key=["sesame"], served_model_name=[NAME]) as started, under_load(started):
        yield started


@contextlib.contextmanager
def under_load(server: Server) -> Iterator[None]:
    """Four clients, two of which share a prefix."""
    end = threading.Event()

    def ask(prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": 1000, "ignore_eos": True}
        while not end.is_set():
            answer = httpx.post(
                f"{server.url}/v1/completions", json=body, headers={"Authorization": "Bearer sesame"}, timeout=60
            )
            assert answer.status_code == 200

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in (PROMPT, PROMPT, "w " + PROMPT, "w")]
    for thread in threads:
        thread.start()
    yield
    end.set()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def opened(browser: Browser, server: Server, size: str = "desktop", scheme: Any = "light") -> Iterator[Page]:
    """The page before the key is known; it must not have broken its policy, loaded other hosts, or shown a dialog."""
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    page.on("console", lambda message: faults.append(message.text) if "401" not in message.text else None)
    page.on(
        "request",
        lambda asked: (
            faults.append(asked.url) if not asked.url.startswith(server.url) or "sesame" in asked.url else None
        ),
    )
    page.goto(f"{server.url}/dashboard")
    try:
        yield page
    finally:
        context.close()
    assert faults == []


def log_in(page: Page, key: str = "sesame") -> None:
    expect(page.get_by_label("Key", exact=True)).to_be_focused()
    page.keyboard.type(key)
    page.keyboard.press("Enter")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_shows_what_runs(browser: Browser, server: Server, size: str, scheme: str) -> None:
    with opened(browser, server, size, scheme) as page:
        log_in(page)
        status = page.get_by_role("status")
        expect(status).to_have_text("Live", timeout=10_000)
        expect(page.locator("#running")).to_have_text("4", timeout=20_000)
        expect(page.locator("#server")).to_contain_text(NAME)
        expect(page.locator("#request-rows tr")).to_have_count(4)
        expect(page.locator("#generated")).not_to_have_text("0")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
        contrast, text = page.evaluate(CONTRASTS)
        assert contrast >= 4.5, text
        kv = page.locator("#server").inner_text().rpartition("=")[2]
        expect(page.get_by_role("heading", name="Block table")).to_be_visible(visible=kv == "paged")
        expect(page.get_by_role("heading", name="Map calls and waits")).to_be_visible(visible=kv == "virtual")
        if kv != "static":
            label = "4 slots in use, 2 of them share 1 prefix" if kv == "paged" else "4 slots in use"
            expect(page.get_by_role("img", name=label)).to_be_visible(timeout=20_000)
        page.get_by_text("Page map as a table").click()
        expect(page.locator("#map-rows tr").first).to_be_visible()
        page.get_by_text("Memory as a table").click()
        expect(page.locator("#memory-rows tr").first).to_contain_text("now")
        page.get_by_label("Whole context").check()
        expect(page.locator("#map")).to_contain_text("2,048")
        if kv == "paged":
            request = page.locator("#request-rows th").last.inner_text()  # the youngest
            page.get_by_label("Request", exact=True).select_option(request)
            expect(page.locator("#table-line")).to_contain_text(f"block_table[{request}] = [")
            expect(page.locator("#block-rows tr").first).to_contain_text("16/16")


def test_it_shows_the_pool_that_engines_share(browser: Browser) -> None:
    with brokers.running(16 * 2**20) as broker:
        config = {"kv_pool": brokers.NAME, "memory_budget": None, "max_num_seqs": 4, "kv_share": "at least 2MiB"}
        with running(config) as server, running(config), opened(browser, server, "phone") as page:
            expect(page.get_by_role("heading", name="Shared pool")).to_be_visible(timeout=10_000)
            expect(page.locator("#kv-pool-rows tr")).to_have_count(2)
            expect(page.locator("#kv-pool-rows tr").last).to_contain_text("model#2")
            expect(page.locator("#kv-pool-lead")).to_contain_text("16.0 MiB for all engines; this one is model.")
            expect(page.get_by_role("img", name="Of 16.0 MiB:")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
            contrast, text = page.evaluate(CONTRASTS)
            assert contrast >= 4.5, text
            broker.kill()
            expect(page.locator("#kv-pool-lead")).to_contain_text("its broker does not answer", timeout=10_000)
            expect(page.locator("#kv-pool-rows tr")).to_have_count(0)


def test_keys_and_the_keyboard(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        assert page.locator("#figures").is_hidden()
        log_in(page, "wrong")
        expect(page.get_by_role("alert")).to_have_text("The server does not know this key.")
        log_in(page, "kéy")
        expect(page.get_by_role("alert")).to_contain_text("ASCII")
        page.get_by_label("Key", exact=True).fill("")
        log_in(page)
        expect(page.get_by_role("status")).to_have_text("Live")
        expect(page.locator("main")).to_be_focused()
        assert page.url == f"{server.url}/dashboard"

        page.reload()
        expect(page.get_by_role("status")).to_have_text("Live")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the figures")).to_be_focused()
        page.keyboard.press("Tab")
        pause = page.get_by_role("button", name="Pause")
        expect(pause).to_be_focused()
        page.keyboard.press("Enter")
        expect(pause).to_have_attribute("aria-pressed", "true")
        page.wait_for_timeout(700)  # what was asked for before
        shown = page.locator("#request-rows").inner_text()
        page.wait_for_timeout(1500)
        assert page.locator("#request-rows").inner_text() == shown
        page.keyboard.press("Enter")
        expect(page.locator("#request-rows")).not_to_have_text(shown)
        page.get_by_role("button", name="Forget the key").click()
        expect(page.get_by_label("Key", exact=True)).to_be_focused()
        assert page.locator("#figures").is_hidden()
        page.reload()
        expect(page.get_by_label("Key", exact=True)).to_be_focused()


def test_the_live_region_speaks_of_changes_only(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        log_in(page)
        expect(page.get_by_role("status")).to_have_text("Live")
        page.evaluate(
            """() => {
              window.spoken = 0;
              const watch = new MutationObserver((changes) => { window.spoken += changes.length; });
              for (const live of document.querySelectorAll("[role=status], [role=alert], [aria-live]"))
                watch.observe(live, { childList: true, characterData: true, subtree: true });
            }"""
        )
        page.wait_for_timeout(3000)
        assert page.evaluate("window.spoken") == 0


def test_it_connects_again(browser: Browser) -> None:
    with running() as server:
        page = browser.new_page()
        page.goto(f"{server.url}/dashboard")
        expect(page.get_by_role("status")).to_have_text("Live", timeout=10_000)
        assert page.get_by_role("button", name="Forget the key").is_hidden(), "there is none"
        port = int(server.url.rpartition(":")[2])
        assert server.terminate() == 0
        expect(page.get_by_role("status")).to_contain_text("trying again")
        with running(port=port):
            expect(page.get_by_role("status")).to_have_text("Live", timeout=30_000)
        page.close()
