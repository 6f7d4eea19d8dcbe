"""acemerge diagnose."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import torch

import acemerge
from acemerge.diagnosis.report import diagnosis_page
from acemerge.reports.page import write_page
from command import Command
from layered_models import layered
from model_zoo import file_hashes, read_tensors
from outline import Outline
from small_models import write_model


def test_diagnose_command(run: Command, tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 3)
    code, out, err = run(
        "diagnose", base, *experts, "-o", tmp_path / "d.html", "--figures", tmp_path / "f", "-m", "ace", "-m", "ace:alpha=0.5"
    )
    assert code == 0, err
    assert "not accuracy" in out
    assert "average" in out, "always among the rows"
    assert not re.search("least|best|recommend|forecast|predict", out, re.I)
    assert "ace:alpha=0.5" in out
    outline = Outline((tmp_path / "d.html").read_text())
    assert len(set(outline.ids)) == len(outline.ids)
    assert {path.suffix for path in (tmp_path / "f").iterdir()} == {".svg", ".png"}
    assert all("var(--" not in path.read_text() for path in (tmp_path / "f").glob("*.svg"))
    write_page(diagnosis_page(acemerge.diagnose(base, experts, candidates=["ace", "ace:alpha=0.5"])), None, tmp_path / "again")
    assert file_hashes(tmp_path / "again") == file_hashes(tmp_path / "f"), "figures are the same every time"
    code, out, _ = run("diagnose", base, *experts, "--json", "--quick")
    assert code == 0
    found = json.loads(out)
    assert len(found["tensors"]) == 9
    assert found["level"] in ("good", "caution")
    assert list(found["forecasts"]) == ["ace_auto", "ace", "tsv_m", "task_arithmetic", "average"], "as asked for, not ranked"


def test_what_a_merge_will_note_is_told_already(run: Command, tmp_path: Path) -> None:
    base, [expert] = layered(tmp_path, 1, 1)
    (expert / "README.md").write_text("---\nbase_model: org/other\n---\n")
    noted = "note: expert 'expert-0' says it was made from 'org/other'"
    _, out, _ = run("diagnose", base, expert, "-m", "average", "-o", tmp_path / "page.html")
    assert noted in out
    assert "made from &#39;org/other&#39;" in (tmp_path / "page.html").read_text()
    assert noted in run("merge", base, expert, "-o", tmp_path / "out")[1]


def test_diagnose_compares_what_a_recipe_asks_for(run: Command, tmp_path: Path) -> None:
    layered(tmp_path, 1, 2)
    recipe = "base: base\nexperts: [expert-0, expert-1]\nmethod: ties\noptions: {keep: 0.4}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    code, out, err = run("diagnose", tmp_path / "recipe.yaml", "--json")
    assert code == 0, err
    assert json.loads(out)["candidates"][0] == "ties:keep=0.4"


def with_a_stranger(folder: Path) -> tuple[Path, Path]:
    base, _ = layered(folder, 1, 1)
    generator = torch.Generator().manual_seed(7)
    strange = {name: torch.randn(w.shape, generator=generator) for name, w in read_tensors(base).items()}
    return base, write_model(folder / "stranger", strange)


def test_do_not_merge_is_an_exit_code_of_its_own(run: Command, tmp_path: Path) -> None:
    base, stranger = with_a_stranger(tmp_path)
    code, out, err = run("diagnose", base, tmp_path / "expert-0", stranger, "-o", tmp_path / "d.html")
    assert (code, "Do not merge these as they are." in out) == (3, True), err
    assert (tmp_path / "d.html").exists(), "the page is written all the same"
    code, out, _ = run("diagnose", base, tmp_path / "expert-0", stranger, "--json")
    assert (code, json.loads(out)["level"]) == (3, "stop")


def test_quiet_says_only_what_is_amiss(run: Command, tmp_path: Path) -> None:
    code, out, err = run("diagnose", *with_a_stranger(tmp_path), "-q")
    assert (code, out) == (3, "")
    assert "warning: " in err
    assert "'stranger'" in err


def test_a_reader_that_leaves_early_changes_neither_page_nor_exit_code(tmp_path: Path) -> None:
    base, stranger = with_a_stranger(tmp_path)
    page = tmp_path / "page.html"
    command = f"{sys.executable} -m acemerge diagnose {base} {stranger} -o {page} | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 3, result.stderr
    assert page.read_text().endswith("</html>")


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
