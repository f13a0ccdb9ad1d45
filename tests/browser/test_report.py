"""The report in headless Chromium, with the panel driven: `make dashboard-test`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from bench import cases
from bench.__main__ import main
from bench.harness.discovery import find
from bench.report import accountant
from tests.browser.test_dashboard import CONTRASTS, browser
from vattn.model_shapes import find_shape
from vattn.plan import plan

__all__ = ["browser"]

SIZES = {"desktop": (1400, 900), "phone": (420, 900)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    assert main(["report", "--records-only", "--out", str(folder)]) == 0
    return folder / "index.html"


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=SIZES)
def page(browser: Browser, file: Path, scheme: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    width, height = SIZES[request.param]
    opened = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    opened.on("request", lambda made: None if made.url == file.as_uri() else problems.append(made.url))
    opened.goto(file.as_uri())
    yield opened
    assert problems == []
    opened.close()


def test_it_can_be_read(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
    contrast, text = page.evaluate(CONTRASTS)
    assert contrast >= 4.5, text
    small = page.evaluate(
        """() => [...document.querySelectorAll("main *:not(svg *)")]
            .filter((each) => each.checkVisibility() && parseFloat(getComputedStyle(each).fontSize) < 11)
            .map((each) => each.textContent.slice(0, 40))"""
    )
    assert small == []
    for name in find(cases):
        assert page.locator(f"article#{name} h3").is_visible()


def test_text_of_plots_stays_within_them(page: Page) -> None:
    """A page's font may be wider than the one that the plot was laid out with."""
    outside = page.evaluate(
        """() => [...document.querySelectorAll("figure svg")].flatMap((svg) => {
            const box = svg.getBoundingClientRect(), slack = 0.02 * box.width;
            return [...svg.querySelectorAll("text")].filter((text) => {
                const own = text.getBoundingClientRect();
                return own.left < box.left - slack || own.right > box.right + slack
                    || own.top < box.top - slack || own.bottom > box.bottom + slack;
            }).map((text) => `${svg.closest("article").id}: ${text.textContent}`);
        })"""
    )
    assert outside == []


@pytest.mark.parametrize(
    ("model", "gpus", "tokens", "memory", "batch"),
    [("Llama-3-8B", 1, 8192, 60, 64), ("Yi-34B", 4, 131_072, 24, 1024), ("Gemma-2-9B", 2, 256, 1, 1)],
)
def test_the_panel_answers_as_the_plan_does(
    browser: Browser, file: Path, model: str, gpus: int, tokens: int, memory: int, batch: int
) -> None:
    page = browser.new_page()
    page.goto(file.as_uri())
    page.select_option("#panel-model", label=model)
    page.select_option("#panel-gpus", label=str(gpus))
    sliders = {
        "tokens": accountant.TOKENS.index(tokens),
        "memory": memory,
        "batch": batch.bit_length() - 1,
    }
    for name, value in sliders.items():
        page.locator(f"#panel-{name}").fill(str(value))
    lengths = accountant.load(tokens)
    made = plan(
        find_shape(model, tensor_parallel=gpus).groups,
        memory=memory << 30,
        max_context_len=max(lengths),
        max_batch_size=batch,
        lengths=lengths,
        block_sizes=accountant.BLOCK_SIZES,
    )
    shown = page.locator("#panel-fits tbody tr")
    assert shown.count() == len(made.options)
    for number, option in enumerate(made.options):
        cells = shown.nth(number).locator("td").all_inner_texts()
        assert cells[1] == f"{option.typical_requests:,}", cells[0]
        assert cells[3].endswith(f"{100 * option.mean_waste / option.held_bytes:.1f} %")
    baseline = next(option for option in made.options if option.block_tokens == 16)
    answer = page.locator("#panel-answer").inner_text()
    assert answer.startswith(f"{baseline.typical_requests:,} requests fit in blocks of 16 tokens")
    best = max(option.typical_requests for option in made.options if option.kind == "virtual" and option.offered)
    fit = [side for side, most in (("blocks", baseline.typical_requests), ("pages", best)) if most >= batch]
    said = {0: "fit in neither.", 1: f"fit only in {''.join(fit)}.", 2: "fit either way."}[len(fit)]
    assert answer.endswith(f"{batch:,} at a time {said}")
    page.close()
