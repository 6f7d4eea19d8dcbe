"""Methods that a diagnosis compares."""

from __future__ import annotations

from pathlib import Path

import pytest

import acemerge
import lora_zoo
from acemerge.errors import InputError
from layered_models import layered


def test_whole_model_methods_and_methods_without_a_core_are_compared_on_adapters_too(tmp_path: Path) -> None:
    zoo = lora_zoo.build(tmp_path, "GPT2LMHeadModel")
    found = acemerge.diagnose(zoo.base, zoo.adapters, candidates=["ties", "ace", "knots_ties"])
    for tensor in found.matrices:
        assert tensor.forecasts.keys() == {"ties", "ace", "knots_ties", "average"}


def test_weights_that_are_a_list_can_be_forecast(tmp_path: Path) -> None:
    base, experts = layered(tmp_path, 1, 2)
    found = acemerge.diagnose(base, experts, candidates=["linear:weights=1,0,normalise=false"])
    assert all(tensor.forecasts["linear:weights=1,0,normalise=false"].interference[0] == 0 for tensor in found.matrices)


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        ("emr", "-m emr: makes one model per task"),
        ("regmean", "-m regmean: uses data, and a diagnosis looks at weights alone"),
        ("ase", "there is no method 'ase'"),
        ("ace:epsilon", "write it as KEY=VALUE"),
        ("ace:epsilom=1", "method 'ace' has no option 'epsilom'"),
    ],
)
def test_a_wrong_candidate_is_told_in_the_user_s_words(tmp_path: Path, candidate: str, message: str) -> None:
    base, experts = layered(tmp_path, 1, 1)
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        acemerge.diagnose(base, experts, candidates=[candidate])
