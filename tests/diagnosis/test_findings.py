"""What a diagnosis says, against experts made to show it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import acemerge
import model_zoo
from acemerge.diagnosis.findings import findings, verdict
from acemerge.diagnosis.report import diagnosis_page
from acemerge.diagnosis.summary import Summary
from acemerge.output.manifest import read_merge
from acemerge.output.overreach import overreach
from layered_models import layered
from small_models import write_model, write_models


def said(base: Path, experts: list[Path], **options: object) -> str:
    found = findings(acemerge.diagnose(base, experts, **options))  # type: ignore[arg-type]
    return "\n".join(f"{finding.level}: {finding.text} {finding.advice} {finding.command}" for finding in found)


def test_models_of_another_origin_are_refused(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 1)
    generator = torch.Generator().manual_seed(7)
    stranger = {name: torch.randn(w.shape, generator=generator) for name, w in model_zoo.read_tensors(base).items()}
    experts.append(write_model(tmp_path / "stranger", stranger))
    diagnosis = acemerge.diagnose(base, experts)
    level, sentence = verdict(findings(diagnosis))
    assert (level, sentence) == ("stop", "Do not merge these as they are.")
    text = said(base, experts)
    assert "stop: Expert 'stranger' does not look like a fine-tune of this base" in text
    assert "'expert-0' does not look" not in text
    assert text.endswith("acemerge diagnose base expert-0 -o diagnosis.html")
    assert "\n" not in text, "what else looks odd beside a stranger is not told"


def test_experts_that_moved_far_are_told_in_one_sentence(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 2, strength=0.5)
    text = said(base, experts, candidates=["average"])
    assert re.search(r"caution: 'expert-0', 'expert-1' moved far from the base: their changes are \d\d% to \d\d% of the", text)
    assert text.count("moved far") == 1


def test_good_experts_are_called_mergeable(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 3)
    level, _ = verdict(findings(acemerge.diagnose(base, experts, candidates=["average"])))
    assert level == "good"


def test_twins_opposites_idlers_and_giants_are_named(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 4)
    first, original = model_zoo.read_tensors(experts[0]), model_zoo.read_tensors(base)
    copies = {
        "twin": first,
        "opposite": {name: 2 * original[name] - w for name, w in first.items()},
        "idler": original,
        "giant": {name: original[name] + 5 * (w - original[name]) for name, w in model_zoo.read_tensors(experts[1]).items()},
    }
    experts = [*experts[:1], *experts[2:], *(write_model(tmp_path / name, tensors) for name, tensors in copies.items())]
    text = said(base, experts, candidates=["average"])
    assert "'expert-0' and 'twin' made nearly the same change" in text
    assert "'expert-0' and 'opposite' pull in opposite directions" in text
    assert "Expert 'idler' has not changed a single matrix" in text
    assert re.search(r"Expert 'giant' changed 2\d times as much", text)
    for advised in (
        "merge base expert-0 expert-2 expert-3 opposite idler giant -o merged\n",
        "merge base expert-0 expert-2 expert-3 twin opposite giant -o merged\n",
        "sweep base expert-0 opposite -m ace_auto -m average --evaluate 'python your_score.py' -o compared\n",
    ):
        assert f"acemerge {advised}" in text
    commands = re.findall("acemerge .*", text)
    assert len(commands) == len(set(commands)), "what two findings advise is shown once"


def test_a_dominating_regulariser_is_named_with_a_remedy(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 2, strength=1e-4)
    text = said(base, experts)
    assert "8 of 8 matrices the regulariser outweighs" in text
    assert "-s epsilon=1e-07" in text
    assert "acemerge sweep base expert-0 expert-1 -m ace --set epsilon=1e-05,1e-07 --evaluate" in text


def test_a_gamma_that_only_scale_makes_large_is_named(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    base = {"layers.0.mlp.up_proj.weight": torch.randn(16, 16, generator=generator)}
    folders = [write_model(tmp_path / "base", base)]
    for index, energy in enumerate((0.8, 1.2, 1.3)):
        change = torch.randn(16, 16, generator=generator)
        change *= math.sqrt(energy) / change.norm()
        folders.append(write_model(tmp_path / f"e{index}", {name: w + change for name, w in base.items()}))
    assert "In 1 of 1 matrices gamma is large because the experts' energies lie near 1" in said(folders[0], folders[1:])


def test_changes_in_column_means_are_named(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 1)
    shifted = {name: w + 0.05 for name, w in model_zoo.read_tensors(base).items()}
    experts.append(write_model(tmp_path / "shifted", shifted))
    assert "of the change of expert 'shifted' lies in column means" in said(base, experts)


def test_kept_tensors_that_an_expert_changed_are_named(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 1, 2)
    tensors = model_zoo.read_tensors(experts[0])
    tensors["embed_tokens.weight"] *= 2
    model_zoo.write_tensors(experts[0], tensors)
    text = said(base, experts, preset="llm")
    assert "Expert 'expert-0' changed 'embed_tokens.weight' by over 10%" in text
    assert "such as ace, keep the base's values; ace_auto averages" in text, "as their plans say"
    assert text.count("tensors: [{match: embed_tokens.weight, do: average}]") == 1


def test_only_the_text_of_a_recipe_with_rules_can_leave_an_expert_out(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 1, 2)
    diagnosis = replace(acemerge.diagnose(base, experts, candidates=["average"]), arguments=("recipe.yaml",))
    assert diagnosis.command("plan") == "acemerge plan recipe.yaml"
    assert diagnosis.command("merge", only={0}) == ""


def test_low_rank_changes_are_named(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    base = {"layers.0.mlp.up_proj.weight": torch.randn(60, 60, generator=generator)}
    lora = {
        name: w + 0.1 * torch.randn(60, 2, generator=generator) @ torch.randn(2, 60, generator=generator)
        for name, w in base.items()
    }
    full = {name: w + 0.1 * torch.randn(60, 60, generator=generator) for name, w in base.items()}
    folders = [write_model(tmp_path / name, tensors) for name, tensors in (("base", base), ("lora", lora), ("full", full))]
    text = said(folders[0], folders[1:])
    assert "The changes of expert 'lora' are carried by very few directions" in text
    assert "averaging LoRA experts kept 93%" in text


def test_no_method_is_recommended_by_ace_s_own_objective(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 2, 3)
    diagnosis = acemerge.diagnose(base, experts, candidates=["ace", "ties"])
    assert diagnosis.candidates == ("ace", "ties", "average")
    assert not [finding for finding in findings(diagnosis) if re.search("interference|objective|ties|least", finding.text)]
    page = diagnosis_page(diagnosis)
    [figure] = [figure for figure in page.figures if figure.name == "forecast"]
    assert "not accuracy" in figure.caption


def test_what_a_merge_will_warn_of_is_told_before(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    label = "tsv_m:alpha=8"
    diagnosis = acemerge.diagnose(models.base, models.experts, candidates=[label, "ace_auto"])
    merge = acemerge.merge(models.base, models.experts, tmp_path / "out", method="tsv_m", alpha=8.0, quiet=True)
    times = overreach(merge.plan, read_merge(tmp_path / "out").tensors)
    assert times is not None
    assert Summary(diagnosis).too_long == {label: pytest.approx(times, rel=1e-4)}
    assert len(merge.plan.cautions) == 1
    told = [finding for finding in findings(diagnosis) if f"{label} ({times:.1f} times)" in finding.text]
    assert [finding.level for finding in told] == ["caution"]
    assert "ace_auto (" not in told[0].text
