"""Pages that are whole, self-contained and the same every time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import acemerge
from acemerge.checkpoints.content_hash import file_hash
from acemerge.diagnosis.report import diagnosis_page
from acemerge.errors import AcemergeError, InputError
from acemerge.output.manifest import MANIFEST, read_merge
from acemerge.reports.merge_report import merge_page
from acemerge.reports.page import write_page, write_report
from layered_models import layered
from outline import Outline
from small_models import tree


def test_the_page_is_one_file_that_loads_nothing(bert: Path, bert_report: Path) -> None:
    html = bert_report.read_text()
    outline = Outline(html)
    assert len(set(outline.ids)) == len(outline.ids), "an id is there twice"
    assert outline.tags.count("tr") == 1 + len(read_merge(bert).tensors)
    assert len(outline.labels) == 4
    assert all(len(label) > 30 for label in outline.labels), "every figure says in words what it shows"
    assert all(link.startswith(("#", "data:")) for link in outline.links)
    addresses = set(re.findall(r"https?://[^\"'\s<)]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, not addresses
    assert "default-src 'none'" in html


def test_a_merge_s_page_says_where_it_comes_from(bert: Path, bert_report: Path) -> None:
    manifest, html = read_merge(bert), bert_report.read_text()
    assert {"acemerge", "python", "torch"} <= set(manifest.versions)
    shown = [*manifest.versions.values(), *(sha for files in manifest.inputs.values() for sha in files.values())]
    assert all(each in html for each in shown)
    assert "acemerge merge acemerge.yaml -o again" in html


def test_a_diagnosis_says_where_it_comes_from_without_local_paths(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 1, 2)
    diagnosis = acemerge.diagnose(base, experts, candidates=["ace:tau=1e9"], quick=True, orientation="stored")
    page = diagnosis_page(diagnosis)
    expected = "acemerge diagnose base expert-0 expert-1 --orientation stored -m ace:tau=1e9 -m average --quick -o report.html"
    assert page.provenance.command == expected
    assert "acemerge merge base expert-0 expert-1 --orientation stored -o merged --report" in page.commands.values()
    weights = {path.name: file_hash(path / "model.safetensors") for path in (base, *experts)}
    assert {model: files["model.safetensors"] for model, files in page.provenance.inputs.items()} == weights
    html = page.to_html()
    assert all(sha in html for sha in weights.values())
    assert str(tmp_path) not in html


def test_the_same_merge_has_the_same_report(bert: Path, bert_report: Path, tmp_path: Path) -> None:
    again = write_report(merge_page(read_merge(bert)), tmp_path / "again.html")
    assert again.read_bytes() == bert_report.read_bytes()


def test_names_cannot_inject_anything(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 1, 1)
    acemerge.merge(base, experts, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    evil = "<script>alert(1)</script>.\"'&"
    manifest["tensors"][0]["name"] = manifest["base"] = manifest["notes"] = evil
    manifest["notes"] = [evil]
    manifest["experts"] = [evil]
    manifest["tensors"][1]["experts"] = {evil: "x"}
    (tmp_path / "out" / MANIFEST).write_text(json.dumps(manifest))
    html = merge_page(read_merge(tmp_path / "out")).to_html()
    assert "<script>alert" not in html
    assert Outline(html).tags.count("script") == 1


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, experts = layered(tmp_path, 1, 1)
    page = diagnosis_page(acemerge.diagnose(base, experts))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file, not a folder"):
        write_report(page, tmp_path / "file" / "report.html")
    before, write = tree(tmp_path), Path.write_bytes

    def until_it_is_full(path: Path, content: bytes) -> int:
        if ".png" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", until_it_is_full)
    with pytest.raises(AcemergeError, match=r"-o .*page.html and --figures .*: cannot be written \(No space left on device\)"):
        write_page(page, tmp_path / "page.html", tmp_path / "figures")
    assert tree(tmp_path) == before
    assert not (tmp_path / "figures").exists()
