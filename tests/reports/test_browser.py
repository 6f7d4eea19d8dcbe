"""Reports in a real browser: Debian's chromium, driven by playwright. Without it these tests are skipped; CI installs it."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import acemerge
from acemerge.output.manifest import MANIFEST, read_merge
from acemerge.reports.merge_report import merge_page
from acemerge.reports.page import write_report
from layered_models import layered
from small_models import fine_tuned, write_model

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian package chromium)")

QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--disable-quic", "--disable-extensions", "--in-process-gpu"]  # fmt: skip
SIZES = {"desktop": (1280, 900), "phone": (360, 740)}


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield started
        started.close()


class Opened:
    """A page, and everything that it complained about or asked the network for."""

    def __init__(self, browser: Any, path: Path, size: str) -> None:
        width, height = SIZES[size]
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="light")
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())


@pytest.mark.parametrize("name", ["diagnosis", "merge"])
@pytest.mark.parametrize("size", SIZES)
def test_every_figure_is_visible_and_nothing_is_loaded(
    browser: Any, twelve_layers: dict[str, Path], name: str, size: str
) -> None:
    opened = Opened(browser, twelve_layers[name], size)
    for scheme in ("light", "dark"):
        opened.page.emulate_media(color_scheme=scheme)
        check_figures(opened.page, SIZES[size][0], scheme)
    assert opened.complaints == []
    assert opened.requests == [twelve_layers[name].as_uri()]
    opened.context.close()


def check_figures(page: Any, width: int, scheme: str) -> None:
    figures = page.locator("figure")
    assert figures.count() >= 3
    for index in range(figures.count()):
        box = figures.nth(index).locator("svg").bounding_box()
        assert box["width"] > 250
        assert box["height"] > 80
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width, "it does not fit the screen"
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    heights = page.evaluate("[...document.querySelectorAll('figure svg text')].map(t => t.getBoundingClientRect().height)")
    assert min(height for height in heights if height) >= 7, "letters too small to read"
    ground, ink = (page.evaluate(f"getComputedStyle(document.body).{what}") for what in ("backgroundColor", "color"))
    assert (sum(map(int, ground[4:-1].split(","))) > 380) == (scheme == "light")
    assert ground != ink


def column(page: Any, heading: str) -> list[str]:
    index = [text.strip() for text in page.locator("thead th button").all_text_contents()].index(heading)
    return [str(t) for t in page.locator(f"tbody tr:visible > :nth-child({index + 1})").all_inner_texts()]


@pytest.mark.parametrize(("name", "heading"), [("diagnosis", "gamma"), ("merge", "|M|")])
def test_sorting_by_numbers_puts_the_largest_first_and_the_empty_last(
    browser: Any, twelve_layers: dict[str, Path], name: str, heading: str
) -> None:
    opened = Opened(browser, twelve_layers[name], "desktop")
    button = opened.page.get_by_role("button", name=heading, exact=True)
    button.click()
    assert opened.page.locator("th[aria-sort=descending]").count() == 1
    numbers = [float(text) for text in column(opened.page, heading) if text]
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) > 40
    blank = [text == "" for text in column(opened.page, heading)]
    assert blank == sorted(blank), "what has no number comes last"
    button.click()
    numbers = [float(text) for text in column(opened.page, heading) if text]
    assert numbers == sorted(numbers)
    opened.context.close()


def test_sorting_by_name_knows_numbers(browser: Any, twelve_layers: dict[str, Path]) -> None:
    opened = Opened(browser, twelve_layers["diagnosis"], "desktop")
    opened.page.get_by_role("button", name="tensor", exact=True).click()
    names = column(opened.page, "tensor")
    assert names.index("layers.2.mlp.up_proj.weight") < names.index("layers.10.mlp.up_proj.weight")
    opened.context.close()


def test_filtering_by_name_and_kind(browser: Any, twelve_layers: dict[str, Path]) -> None:
    opened = Opened(browser, twelve_layers["diagnosis"], "phone")
    page = opened.page
    page.get_by_label("Name contains").fill("LAYERS.3.")
    assert len(column(page, "tensor")) == 4
    assert page.locator("#shown").inner_text() == "4 of 49 tensors"
    page.get_by_label("kind").select_option("MLP up")
    assert column(page, "tensor") == ["layers.3.mlp.up_proj.weight"]
    page.get_by_label("Name contains").fill("")
    assert len(column(page, "tensor")) == 12
    assert opened.complaints == []
    opened.context.close()


def test_kept_tensors_are_folded_away_until_they_are_asked_for(browser: Any, folded_page: Path) -> None:
    opened = Opened(browser, folded_page, "phone")
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES["phone"][0], "a long command scrolls by itself"
    assert page.locator("tbody tr:visible").count() == 14
    assert page.locator("#shown").inner_text() == "14 of 21 tensors; 7 more are kept"
    page.get_by_label("show 7 kept").check()
    assert page.locator("tbody tr:visible").count() == 21
    page.get_by_label("show 7 kept").uncheck()
    page.get_by_label("fate").select_option("kept")
    assert page.locator("#shown").inner_text() == "7 of 21 tensors"
    assert opened.complaints == []
    opened.context.close()


@pytest.mark.parametrize("size", SIZES)
def test_a_wide_table_says_that_it_goes_on(browser: Any, twelve_layers: dict[str, Path], size: str) -> None:
    opened = Opened(browser, twelve_layers["diagnosis"], size)
    page = opened.page
    assert re.fullmatch(r"\d+ more columns: scroll sideways →", page.locator("#hint").inner_text())
    page.evaluate("document.querySelector('.scroll').scrollLeft = 1e6")
    page.locator("#hint", has_text="back").wait_for()  # the page forbids what wait_for_function needs
    assert page.locator(".frame.more").count() == 0
    opened.context.close()


def test_every_picture_begins_below_its_title(browser: Any, twelve_layers: dict[str, Path]) -> None:
    opened = Opened(browser, twelve_layers["diagnosis"], "desktop")
    for figure in opened.page.locator("figure").all():
        title, picture = figure.locator("h3").bounding_box(), figure.locator("svg").bounding_box()
        assert picture["y"] - (title["y"] + title["height"]) < 12
    opened.context.close()


@pytest.mark.parametrize("name", ["diagnosis", "merge"])
def test_every_row_of_figures_is_full(browser: Any, twelve_layers: dict[str, Path], name: str) -> None:
    opened = Opened(browser, twelve_layers[name], "desktop")
    boxes = [figure.bounding_box() for figure in opened.page.locator("figure").all()]
    grid = opened.page.locator(".figures").bounding_box()
    rows: dict[int, list[Any]] = {}
    for box in boxes:
        rows.setdefault(round(box["y"]), []).append(box)
    for row in rows.values():
        assert max(box["x"] + box["width"] for box in row) == pytest.approx(grid["x"] + grid["width"], abs=1)
        assert max(box["height"] for box in row) == pytest.approx(min(box["height"] for box in row), abs=1)
    opened.context.close()


def test_the_table_comes_as_csv(browser: Any, folded_page: Path, tmp_path: Path) -> None:
    opened = Opened(browser, folded_page, "desktop")
    with opened.page.expect_download() as download:
        opened.page.get_by_role("button", name="Download all 21 rows as CSV").click()
    assert download.value.suggested_filename == "base-merged-by-ace_auto.csv"
    download.value.save_as(tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    manifest = json.loads((folded_page.with_suffix("") / MANIFEST).read_text())
    assert [row["tensor"] for row in rows] == [tensor["name"] for tensor in manifest["tensors"]], "also those folded away"
    for row, tensor in zip(rows, manifest["tensors"], strict=True):
        assert row["overlap"] == ("" if "overlap" not in tensor else repr(float(tensor["overlap"]))), "all digits"
    assert opened.complaints == []
    opened.context.close()


def test_commands_and_hashes_can_be_copied(browser: Any, folded_page: Path) -> None:
    opened = Opened(browser, folded_page, "desktop")
    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for button in ("#provenance ~ .next .copy", ".copy.hash"):
        first = opened.page.locator(button).first
        first.click()
        wanted = first.get_attribute("data-copy")
        assert opened.page.evaluate("navigator.clipboard.readText()") == wanted
    assert opened.complaints == []
    opened.context.close()


def test_the_page_prints(browser: Any, twelve_layers: dict[str, Path]) -> None:
    opened = Opened(browser, twelve_layers["diagnosis"], "desktop")
    opened.page.emulate_media(media="print")
    assert not opened.page.locator(".filters").is_visible()
    assert len(opened.page.pdf(format="A4")) > 20_000
    opened.context.close()


EVIL = (
    "$\\frac{1}{$<i>",
    "<script>window.ran=1</script>",
    "<img src=http://127.0.0.1:9/i onerror=window.ran=1>",
    "<svg onload=window.ran=1>",
    "\"' onmouseover='window.ran=1' autofocus onfocus='window.ran=1' x=\"",
    "</script><script>window.ran=1</script>",
    "</style><b>",
    "</pre></code></title><iframe src=http://127.0.0.1:9/f></iframe>",
    "{{ 7*7 }}{% x %}",
    "&lt;b&gt;",
    "javascript:window.ran=1",
    "<link rel=stylesheet href=http://127.0.0.1:9/c>",
    "url(http://127.0.0.1:9/u)",
    "\u202ex",
)


def poisoned(tmp_path: Path) -> Path:
    """A merge whose manifest somebody filled with all of these, wherever a page shows something."""
    base, experts = layered(tmp_path, 2, 2)
    acemerge.merge(base, experts, tmp_path / "out", "ace")
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    all_of_them = " ".join(EVIL)
    evil = iter(EVIL * 100)
    names = {expert: next(evil) for expert in manifest["experts"]}
    for tensor in manifest["tensors"]:
        tensor["name"] += next(evil)
        tensor["experts"] = {names[expert]: own for expert, own in tensor.get("experts", {}).items()}
        tensor |= {"branch": next(evil), "own": next(evil), "warnings": [next(evil)], "reason": next(evil), "action": next(evil)}
    manifest["experts"] = list(names.values())
    for field in ("base", "family", "method", "orientation", "acemerge"):
        manifest[field] = all_of_them
    manifest |= {
        "notes": list(EVIL), "cautions": list(EVIL), "versions": dict(zip(EVIL, EVIL, strict=True)),
        "inputs": {each: {each: each} for each in EVIL}, "unused": {each: [each] for each in EVIL},
        "heads": {each: [each] for each in EVIL}, "options": {"tau": 0.3, **{each: each for each in EVIL}},
    }  # fmt: skip
    (tmp_path / "out" / MANIFEST).write_text(json.dumps(manifest))
    return write_report(merge_page(read_merge(tmp_path / "out")), tmp_path / "report.html")


def named(tmp_path: Path) -> Path:
    """A diagnosis of models whose tensors are called so; a path may hold no slash, a tensor's name may."""
    evil = [each for each in EVIL if each.isprintable()]
    tensors = {
        f"layers.{i}.{each}.weight": torch.randn(6, 6, generator=torch.Generator().manual_seed(i)) for i, each in enumerate(evil)
    }
    base = write_model(tmp_path / "<b>base", tensors)
    experts = [write_model(tmp_path / f"<img src=x>{i}", fine_tuned(tensors, i)) for i in range(2)]
    return acemerge.diagnose(base, experts).write_report(tmp_path / "diagnosis.html")


@pytest.mark.parametrize("make", [poisoned, named])
def test_names_of_strangers_run_nothing_and_ask_for_nothing(browser: Any, tmp_path: Path, make: Any) -> None:
    page = make(tmp_path)
    opened = Opened(browser, page, "desktop")
    for choice in opened.page.locator("select").all():
        choice.select_option(index=1)
        choice.select_option(index=0)
    for heading in opened.page.locator("thead button").all():
        heading.click()
        heading.hover()
    opened.page.get_by_label("contains").first.fill("<script>")
    assert opened.page.evaluate("window.ran") is None
    assert opened.page.locator("body script").count() == 1, "the page's own"
    assert (
        opened.page.locator("iframe, object, embed, link[rel=stylesheet], img, svg[onload], [onerror], [onmouseover]").count()
        == 0
    )
    assert opened.requests == [page.as_uri()]
    assert opened.complaints == []
    opened.context.close()
