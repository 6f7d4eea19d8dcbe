"""Stacked experts and fused projections in a sweep: read and worked on once for as many points as memory holds."""

from pathlib import Path
from typing import Any

import pytest
import torch

import acemerge
from acemerge.output.resources import tensor_memory
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import ComputedTensor, is_computed
from acemerge.tensors import computing
from acemerge.tensors.task_vectors import load_task_vectors
from small_models import Models, fine_tuned, write_model
from sweeping import GRID, check_as_merged_alone

CONFIG = {"model_type": "gpt_oss", "hidden_size": 8}
EXPERTS = 3


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Gate and up of four experts lie in turns in one stack, [expert, in, out]."""
    folder = tmp_path_factory.mktemp("mixture")
    generator = torch.Generator().manual_seed(0)
    base = {
        "layers.0.mlp.experts.gate_up_proj": torch.randn(4, 8, 24, generator=generator),
        "layers.0.mlp.experts.down_proj": torch.randn(4, 12, 8, generator=generator),
        "layers.0.mlp.router.weight": torch.randn(4, 8, generator=generator),
    }
    experts = [write_model(folder / f"expert-{i}", fine_tuned(base, i), CONFIG) for i in range(EXPERTS)]
    return Models(write_model(folder / "base", base, CONFIG), experts)


@pytest.mark.parametrize(
    ("method", "settings"),
    [("ace", GRID), ("ace_auto", {"power": [0.25, 0.5], "ridge": [0.01, 0.1, 1.0]}), ("tsv_m", {"alpha": [0.5, 1.0]})],
)
def test_every_point_is_what_a_merge_writes(mixture: Models, tmp_path: Path, method: str, settings: dict[str, list[Any]]) -> None:
    """GRID and ace_auto's have more points than are made together, so some come in a further round."""
    result = acemerge.sweep(mixture.base, mixture.experts, tmp_path / "grid", settings, method)
    for number, point in enumerate(result.points):
        alone = acemerge.merge(mixture.base, mixture.experts, tmp_path / f"{number}", method, **point.settings)
        assert point.folder is not None
        check_as_merged_alone(point.folder, alone.output)


@pytest.mark.parametrize(("points", "rounds"), [(1, 1), (EXPERTS, 1), (EXPERTS + 1, 2)])
def test_matrices_are_read_once_for_as_many_points_as_there_are_experts(
    mixture: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: int, rounds: int
) -> None:
    reads: list[int] = []

    def counted(plan: Plan, planned: ComputedTensor, device: torch.device) -> Any:
        assert planned.fate.view.block is not None, planned.name
        reads.append(planned.fate.view.block)
        return load_task_vectors(plan, planned, device)

    monkeypatch.setattr(computing, "load_task_vectors", counted)
    settings = {"epsilon": [10.0 ** -(n + 2) for n in range(points)]}
    acemerge.sweep(mixture.base, mixture.experts, tmp_path / "grid", settings, "ace")
    of_gate_up, of_down = list(range(8)), list(range(4))
    assert sorted(reads) == sorted(rounds * (of_gate_up + of_down))


def test_memory_counts_what_is_made_together(mixture: Models) -> None:
    plan = acemerge.plan(mixture.base, mixture.experts, "tsv_m")
    stack = next(tensor for tensor in plan.tensors if tensor.name.endswith("gate_up_proj"))
    assert is_computed(stack)
    one, two, many = (tensor_memory(stack, settings) for settings in (1, 2, 100))
    assert two - one == stack.output_bytes
    assert many - one == (EXPERTS - 1) * stack.output_bytes, "float32 values, as many as experts"
