"""Pages that are whole, self-contained and the same every time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import acemerge
from acemerge.diagnosis.report import diagnosis_page
from acemerge.errors import InputError
from acemerge.output.manifest import MANIFEST, read_merge
from acemerge.reports.merge_report import merge_page
from acemerge.reports.page import write_report
from layered_models import layered
from outline import Outline


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


def test_the_same_merge_has_the_same_report(bert: Path, bert_report: Path, tmp_path: Path) -> None:
    again = write_report(merge_page(read_merge(bert)), tmp_path / "again.html")
    assert again.read_bytes() == bert_report.read_bytes()


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
    html = merge_page(read_merge(tmp_path / "out")).to_html()
    assert "<script>alert" not in html
    assert Outline(html).tags.count("script") == 1


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 1, 1)
    page = diagnosis_page(acemerge.diagnose(base, experts))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file, not a folder"):
        write_report(page, tmp_path / "file" / "report.html")
