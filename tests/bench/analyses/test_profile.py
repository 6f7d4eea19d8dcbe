"""What ACE finds in every matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

import acemerge
from acemerge.bench.analyses.profile import profile, profile_table
from acemerge.bench.measure.experts import Experts
from tiny_bench import SUITE


def test_profile_matches_a_merge(cache: Path, tmp_path: Path) -> None:
    experts = Experts(SUITE.domain, 0)
    folders = {task.name: experts.folder(task) for task in SUITE.tasks}
    result = acemerge.merge(experts.base, folders, tmp_path / "merged", "ace")
    gammas = {record["name"]: record["gamma"] for record in result.tensors if record["action"] == "merged"}
    found = profile(SUITE, 0)
    assert {tensor.name: tensor.gamma for tensor in found.matrices} == pytest.approx(gammas)
    homogeneous = [tensor.spectra for tensor in found.matrices if not tensor.heterogeneous and tensor.spectra]
    assert all(spectra.plain == spectra.merged for spectra in homogeneous), "nothing is refined there"
    assert len(profile_table(found)) == 1 + 6
