"""What a merge did, from its manifest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import acemerge
import lora_zoo
import model_zoo
from acemerge.methods.ace_auto import REACH
from acemerge.output.manifest import MANIFEST, read_merge
from acemerge.output.verify import verify_output
from acemerge.reports.merge_report import findings, merge_page
from command import Command
from layered_models import layered
from small_models import Models


def test_a_merge_s_report_shows_every_tensor_of_its_manifest(bert: Path) -> None:
    page = merge_page(read_merge(bert))
    manifest = json.loads((bert / MANIFEST).read_text())
    assert [record["name"] for record in page.table.records] == [tensor["name"] for tensor in manifest["tensors"]]
    by_name = {tensor["name"]: tensor for tensor in manifest["tensors"]}
    for record in page.table.records:
        assert record["fate"] == by_name[str(record["name"])]["action"]
        assert record["gamma"] == by_name[str(record["name"])].get("gamma")
    assert {figure.name for figure in page.figures} == {"heterogeneity", "lengths", "regulariser", "changes"}
    totals = manifest["totals"]
    assert f"{totals['merged']} merged, {totals['averaged']} averaged, {totals['kept']} kept" in page.verdict
    weights = sum(totals[f"{action}_weights"] for action in ("merged", "averaged", "kept", "copied"))
    assert f"{totals['merged_weights'] / weights:.1%} merged" in page.facts["of all weights"]


def test_merge_with_report_puts_it_into_the_output_and_its_account(models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out", report=True)
    assert (tmp_path / "out" / "report.html").is_file()
    found = verify_output(tmp_path / "out")
    assert not found.problems
    assert not found.foreign
    acemerge.merge(models.base, models.experts, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize("method", ["ace_auto", "average", "ties", "tsv_m", "emr"])
def test_methods_without_gamma_have_a_report_too(models: Models, tmp_path: Path, method: str) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out", method=method)
    page = merge_page(read_merge(tmp_path / "out"))
    assert page.to_html()
    assert "heterogeneity" not in [figure.name for figure in page.figures]
    assert ("one model per task" in "".join(finding.text for finding in page.findings)) == (method == "emr")


@pytest.mark.parametrize(("tau", "shown"), [(1e-6, True), (1e9, False)])
def test_gamma_is_drawn_where_it_decides_something(models: Models, tmp_path: Path, tau: float, shown: bool) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out", "ace", tau=tau)
    names = [figure.name for figure in merge_page(read_merge(tmp_path / "out")).figures]
    assert ("heterogeneity" in names) == shown


def test_warnings_reach_the_summary_and_the_details(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 3, 2)
    broken = model_zoo.read_tensors(experts[0])
    for name in [name for name in broken if name.startswith("layers.")]:
        broken[name] = torch.full_like(broken[name], torch.nan)
    model_zoo.write_tensors(experts[0], broken)
    acemerge.merge(base, experts, tmp_path / "out", allow_nonfinite=True)
    page = merge_page(read_merge(tmp_path / "out"))
    assert page.level == "caution"
    assert "12 warnings" in page.verdict
    (finding,) = [finding for finding in page.findings if "It is averaged, not merged" in finding.text]
    assert "11 more tensors like this one" in finding.text
    assert len(page.details["Warnings"].splitlines()) == 12


def test_an_adapter_s_report_has_ranks_and_errors(tmp_path: Path) -> None:
    zoo = lora_zoo.build(tmp_path, "LlamaForCausalLM")
    acemerge.merge(zoo.base, zoo.adapters, tmp_path / "out", save_as="adapter", rank=2)
    page = merge_page(read_merge(tmp_path / "out"))
    keys = [column.key for column in page.table.columns]
    assert "rank" in keys
    assert "error" in keys
    assert page.facts["written as"] == "one LoRA adapter"
    assert page.facts["ranks written"] == "2"
    assert "ranks" not in [figure.name for figure in page.figures]
    (finding,) = [finding for finding in page.findings if "which has rank 2 (relative error)" in finding.text]
    assert finding.level == "caution"
    assert finding.command == "acemerge merge acemerge.yaml -o again --rank 4"
    acemerge.merge(zoo.base, zoo.adapters, tmp_path / "whole", save_as="adapter")
    whole = merge_page(read_merge(tmp_path / "whole"))
    assert re.fullmatch(r"\d+ to \d+", whole.facts["ranks written"])
    assert "ranks" in [figure.name for figure in whole.figures]
    assert not any("Cutting" in finding.text for finding in merge_page(read_merge(tmp_path / "whole")).findings)


def test_an_idle_expert_is_named(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 1, 1)
    model_zoo.rewrite(base, tmp_path / "idle", lambda tensors: tensors)
    acemerge.merge(base, [*experts, tmp_path / "idle"], tmp_path / "out")
    (finding,) = [finding for finding in findings(read_merge(tmp_path / "out")) if "'idle' changed nothing" in finding.text]
    options = f"-s alpha=1.0 -s power=0.25 -s reach={REACH} -s ridge=0.01"
    assert finding.command == f"acemerge merge base expert-0 -m ace_auto {options} -o again"


def test_a_report_of_twelve_layers_is_small(twelve_layers: dict[str, Path]) -> None:
    assert twelve_layers["diagnosis"].stat().st_size < 2_000_000


@pytest.mark.parametrize(
    ("method", "facts"),
    [
        ("ace_auto", ["active experts", "overlap", "rank", "strength", "length"]),
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
    table = merge_page(read_merge(tmp_path / "out")).table
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
    assert merge_page(read_merge(tmp_path / "out")).to_html()
