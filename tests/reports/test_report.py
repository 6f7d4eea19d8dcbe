"""Reports: what a merge did, from its manifest; pages that are whole, self-contained and the same every time."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import acemerge
import lora_zoo
import model_zoo
from acemerge.diagnosis.report import diagnosis_page
from acemerge.errors import InputError
from acemerge.output.verify import verify_output
from acemerge.output.writer import MANIFEST
from acemerge.reports.account import read_account
from acemerge.reports.merge_report import findings, merge_page
from acemerge.reports.page import save_figures, write_report
from command import Command
from layered_models import layered
from small_models import Models, write_models


class Outline(HTMLParser):
    """Tags, ids and rows of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]
        if tag == "svg":
            self.labels.append(given.get("aria-label") or "")


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return write_models(tmp_path)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    family = model_zoo.bert(tmp_path)
    acemerge.merge(family.base, family.experts, tmp_path / "merged")
    return tmp_path / "merged"


def test_a_merge_s_report_shows_every_tensor_of_its_manifest(bert: Path) -> None:
    page = merge_page(read_account(bert))
    manifest = json.loads((bert / MANIFEST).read_text())
    assert [record["name"] for record in page.table.records] == [tensor["name"] for tensor in manifest["tensors"]]
    by_name = {tensor["name"]: tensor for tensor in manifest["tensors"]}
    for record in page.table.records:
        assert record["fate"] == by_name[str(record["name"])]["action"]
        assert record["gamma"] == by_name[str(record["name"])].get("gamma")
    assert {figure.name for figure in page.figures} == {"heterogeneity", "lengths", "regulariser", "changes"}
    totals = manifest["totals"]
    assert f"{totals['merged']} merged, {totals['averaged']} averaged, {totals['kept']} kept" in page.verdict


def test_the_page_is_one_file_that_loads_nothing(bert: Path, tmp_path: Path) -> None:
    html = write_report(merge_page(read_account(bert)), tmp_path / "report.html").read_text()
    outline = Outline(html)
    assert len(set(outline.ids)) == len(outline.ids), "an id is there twice"
    assert outline.tags.count("tr") == 1 + len(read_account(bert).tensors)
    assert len(outline.labels) == 4
    assert all(len(label) > 30 for label in outline.labels), "every figure says in words what it shows"
    assert all(link.startswith(("#", "data:")) for link in outline.links)
    addresses = set(re.findall(r"https?://[^\"'\s<)]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, not addresses
    assert "default-src 'none'" in html


def test_the_same_merge_has_the_same_report(bert: Path, tmp_path: Path) -> None:
    first, second = (write_report(merge_page(read_account(bert)), tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert first == second


def test_names_cannot_inject_anything(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 1, 1)
    acemerge.merge(base, experts, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    evil = "<script>alert(1)</script>\"'&"
    manifest["tensors"][0]["name"] = manifest["base"] = manifest["notes"] = evil
    manifest["notes"] = [evil]
    manifest["experts"] = [evil]
    manifest["tensors"][1]["experts"] = {evil: "x"}
    (tmp_path / "out" / MANIFEST).write_text(json.dumps(manifest))
    html = merge_page(read_account(tmp_path / "out")).to_html()
    assert "<script>alert" not in html
    assert Outline(html).tags.count("script") == 1


def test_merge_with_report_puts_it_into_the_output_and_its_account(models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out", report=True)
    assert (tmp_path / "out" / "report.html").is_file()
    found = verify_output(tmp_path / "out")
    assert not found.problems
    assert not found.foreign
    acemerge.merge(models.base, models.experts, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize("method", ["average", "ties", "tsv_m", "emr"])
def test_methods_without_gamma_have_a_report_too(models: Models, tmp_path: Path, method: str) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out", method=method)
    page = merge_page(read_account(tmp_path / "out"))
    assert page.to_html()
    assert "heterogeneity" not in [figure.name for figure in page.figures]
    assert ("one model per task" in "".join(finding.text for finding in page.findings)) == (method == "emr")


@pytest.mark.parametrize(
    ("method", "facts"),
    [
        ("ace", ["active experts", "gamma", "branch", "ridge share", "precision"]),
        ("tsv_m", ["active experts", "directions each", "weakest direction"]),
        ("nan", ["coefficient expert-0", "coefficient expert-1", "coefficient expert-2"]),
        ("emr", ["rescale expert-0", "rescale expert-1", "rescale expert-2"]),
        ("core_space", ["core rows", "core columns"]),
    ],
)
def test_the_table_and_the_terminal_show_what_the_method_tells(
    run: Command, models: Models, tmp_path: Path, method: str, facts: list[str]
) -> None:
    code, out, _ = run("merge", *models.arguments, "-o", tmp_path / "out", "-m", method, "-v")
    assert code == 0
    heading = next(line for line in out.splitlines() if line.lstrip().startswith("tensor"))
    table = merge_page(read_account(tmp_path / "out")).table
    columns = {column.title: column for column in table.columns}
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    for fact in facts:
        assert fact in heading
        assert columns[fact].meaning
        key = columns[fact].key
        assert [row[key] for row in table.records] == [tensor.get(key) for tensor in manifest["tensors"]]


def test_the_report_of_a_method_that_is_not_installed_here(models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out", method="nan")
    content = json.loads((tmp_path / "out" / MANIFEST).read_text())
    for tensor in content["tensors"]:
        tensor |= {"method": "somebodys_own"} if "method" in tensor else {}
    (tmp_path / "out" / MANIFEST).write_text(json.dumps(content))
    assert merge_page(read_account(tmp_path / "out")).to_html()


def test_warnings_reach_the_summary_and_the_details(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 3, 2)
    acemerge.merge(base, experts, tmp_path / "out", alpha=50.0)
    page = merge_page(read_account(tmp_path / "out"))
    assert page.level == "caution"
    assert "12 warnings" in page.verdict
    (finding,) = [finding for finding in page.findings if "x the largest task vector" in finding.text]
    assert "11 more tensors like this one" in finding.text
    assert len(page.details["Warnings"].splitlines()) == 12


def test_an_adapter_s_report_has_ranks_and_errors(tmp_path: Path) -> None:
    zoo = lora_zoo.build(tmp_path, "LlamaForCausalLM")
    acemerge.merge(zoo.base, zoo.adapters, tmp_path / "out", save_as="adapter", rank=2)
    page = merge_page(read_account(tmp_path / "out"))
    keys = [column.key for column in page.table.columns]
    assert "rank" in keys
    assert "error" in keys
    assert page.facts["written as"] == "one LoRA adapter"
    (finding,) = [finding for finding in page.findings if "which has rank 2 (relative error)" in finding.text]
    assert finding.level == "caution"
    acemerge.merge(zoo.base, zoo.adapters, tmp_path / "whole", save_as="adapter")
    assert not any("Cutting" in finding.text for finding in merge_page(read_account(tmp_path / "whole")).findings)


def test_an_idle_expert_is_named(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 1, 1)
    model_zoo.rewrite(base, tmp_path / "idle", lambda tensors: tensors)
    acemerge.merge(base, [*experts, tmp_path / "idle"], tmp_path / "out")
    assert any("'idle' changed nothing" in finding.text for finding in findings(read_account(tmp_path / "out")))


# --- the commands ------------------------------------------------------------------------------------------------------


def test_report_command(run: Command, bert: Path, tmp_path: Path) -> None:
    code, out, err = run("report", bert, "--figures", tmp_path / "figures")
    assert code == 0, err
    assert "Every tensor is accounted for" in out
    assert (tmp_path / "merged.html").is_file()
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"heterogeneity.svg", "heterogeneity.png", "changes.svg", "changes.png"} <= names


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not an output of `acemerge merge`"),
        ({"exported": "red"}, "is one task's model"),
        ({"tensors": []}, "damaged, or of another version"),
        ([], "expected a JSON object"),
    ],
)
def test_report_of_something_else_is_refused(run: Command, tmp_path: Path, content: object, message: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if content is not None:
        (folder / MANIFEST).write_text(json.dumps(content))
    code, _, err = run("report", folder)
    assert code == 2
    assert message in err
    assert not list(tmp_path.glob("*.html"))


def test_diagnose_command(run: Command, tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 3)
    code, out, err = run(
        "diagnose", base, *experts, "-o", tmp_path / "d.html", "--figures", tmp_path / "f", "-m", "ace", "-m", "ace:alpha=0.5"
    )
    assert code == 0, err
    assert "Least predicted interference" in out
    assert "ace:alpha=0.5" in out
    outline = Outline((tmp_path / "d.html").read_text())
    assert len(set(outline.ids)) == len(outline.ids)
    assert {path.suffix for path in (tmp_path / "f").iterdir()} == {".svg", ".png"}
    code, out, _ = run("diagnose", base, *experts, "--json", "--quick")
    assert code == 0
    found = json.loads(out)
    assert len(found["tensors"]) == 9
    assert found["level"] in ("good", "caution")
    assert list(found["forecasts"].values()) == sorted(found["forecasts"].values())


def test_diagnose_compares_what_a_recipe_asks_for(run: Command, tmp_path: Path) -> None:
    layered(tmp_path, 1, 2)
    recipe = "base: base\nexperts: [expert-0, expert-1]\nmethod: ties\noptions: {keep: 0.4}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    code, out, err = run("diagnose", tmp_path / "recipe.yaml", "--json")
    assert code == 0, err
    assert json.loads(out)["candidates"][0] == "ties:keep=0.4"


def test_diagnose_mistakes(run: Command, tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 1, 2)
    (tmp_path / "folder").mkdir()
    code, _, err = run("diagnose", base, *experts, "-o", tmp_path / "folder")
    assert (code, "is a folder" in err) == (2, True)
    (tmp_path / "file").write_text("")
    for option, place in (("-o", tmp_path / "file" / "x.html"), ("--figures", tmp_path / "file")):
        code, out, err = run("diagnose", base, *experts, option, place)
        assert (code, out) == (2, ""), "before any work"
        assert "is a file, not a folder" in err
    code, _, err = run("diagnose", base, *experts, "-m", "twin", "-o", tmp_path / "d.html")
    assert (code, "one model per task" in err) == (2, True)
    code, _, err = run("diagnose", base, tmp_path / "nobody", "-o", tmp_path / "d.html")
    assert code == 2
    assert not (tmp_path / "d.html").exists()


def test_a_report_needs_its_libraries(run: Command, bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    code, _, err = run("report", bert)
    assert code == 2
    assert "pip install 'acemerge[report]'" in err


def test_a_report_of_twelve_layers_is_small(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 12, 8)
    path = acemerge.diagnose(base, experts).write_report(tmp_path / "report.html")
    assert path.stat().st_size < 2_000_000


def test_figures_as_files_are_the_same_every_time(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 2)
    found = acemerge.diagnose(base, experts)
    for name in ("a", "b"):
        save_figures(diagnosis_page(found), tmp_path / name)
    assert model_zoo.file_hashes(tmp_path / "a") == model_zoo.file_hashes(tmp_path / "b")
    assert all("var(--" not in path.read_text() for path in (tmp_path / "a").glob("*.svg"))


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 1, 1)
    page = diagnosis_page(acemerge.diagnose(base, experts))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file, not a folder"):
        write_report(page, tmp_path / "file" / "report.html")
