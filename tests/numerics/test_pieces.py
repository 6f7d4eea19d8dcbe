"""Merging a piece at a time gives the bits of merging whole tensors."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import acemerge
from acemerge.checkpoints.folder import from_state_dict
from acemerge.errors import MergeError
from acemerge.execute import passes as statistics
from acemerge.execute.passes import gather_statistics
from acemerge.methods import all_methods, get_method
from acemerge.numerics import pieces
from acemerge.numerics.pieces import Stored, merge_pieces, squared_norms
from acemerge.planning.plan import Plan
from acemerge.planning.planner import build_plan
from acemerge.planning.progress import SilentProgress
from acemerge.planning.tensor import computed
from acemerge.recipe.recipe import make_recipe
from acemerge.tensors.merging import merge_tensor

CPU = torch.device("cpu")
ELEMENTWISE = [m for m in all_methods() if m.is_elementwise(m.options({}))]
FURTHER_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"weights": [0.5, -0.2, 1.0]}),
    ("ties", {"keep": 0.3, "scope": "tensor"}),
    ("ties", {"keep": 1.0, "merge": "sum"}),
    ("nearswap", {"t": 0.3}),
    ("ram_plus", {"epsilon": 0.3, "scope": "tensor", "limit": 5.0}),
]
CASES = [*((m.name, {}) for m in ELEMENTWISE), *FURTHER_OPTIONS]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces and parts even of small tensors."""
    monkeypatch.setattr(pieces, "_ENTRIES", 3 * 1024)
    monkeypatch.setattr(pieces, "_PART", 2500)


def models(dtype: torch.dtype) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Fine-tunes with many entries that cancel exactly, negative zeros in the base, and a tensor that nobody changed."""
    generator = torch.Generator().manual_seed(0)
    base = {"a.weight": torch.randn(90, 70, generator=generator), "b.bias": torch.randn(4000, generator=generator)}
    base |= {"c.weight": torch.ones(7, 3), "d": torch.randn((), generator=generator), "e": torch.ones(0, 4)}
    base["a.weight"][:3] = -0.0
    steps = [0.25, -0.25, 0.5]
    experts = [
        {n: w if n == "c.weight" else w + step * torch.randint(-2, 3, w.shape, generator=generator) for n, w in base.items()}
        for step in steps
    ]
    return {n: w.to(dtype) for n, w in base.items()}, [{n: w.to(dtype) for n, w in expert.items()} for expert in experts]


def make_plan(method: str, options: dict[str, Any], dtype: torch.dtype) -> Plan:
    base, experts = models(dtype)
    experts = experts[: get_method(method).experts]
    names = [f"expert-{i}" for i in range(len(experts))]
    recipe = make_recipe({"base": "base", "experts": names, "method": method, "options": options})
    opened = [from_state_dict(expert, name) for expert, name in zip(experts, names, strict=True)]
    return build_plan(recipe, from_state_dict(base, "base"), opened, {})


def merged(plan: Plan) -> dict[str, Tensor]:
    gathered = gather_statistics(plan, CPU, SilentProgress())
    return {t.name: merge_tensor(plan, t, CPU, gathered.get(t.setting)).value for t in plan.tensors}


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else bits(tensor[None])


@pytest.mark.parametrize(("method", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_bits_as_whole_tensors(method: str, options: dict[str, Any], dtype: torch.dtype, threads: int) -> None:
    plan = make_plan(method, options, dtype)
    tensors = computed(plan.tensors)
    assert len(tensors) == len(plan.tensors)
    assert all(tensor.fate.in_pieces for tensor in tensors)
    whole = merged(
        replace(plan, tensors=tuple(replace(tensor, fate=replace(tensor.fate, in_pieces=False)) for tensor in tensors))
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        in_pieces = merged(plan)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for name, value in whole.items():
        assert in_pieces[name].dtype == value.dtype
        assert in_pieces[name].shape == value.shape
        assert bits(in_pieces[name]) == bits(value), name


def test_every_piece_is_seen_once_and_in_order() -> None:
    entries = torch.arange(7001.0)
    stored = Stored(entries, [entries * 2, None])
    places = stored.each(lambda piece: (piece.where, piece.base.clone(), piece.task_vectors.clone()))
    assert len(places) > 3
    assert torch.cat([base for _, base, _ in places]).equal(entries)
    assert torch.cat([task_vectors[0] for _, _, task_vectors in places]).equal(entries)
    assert not any(task_vectors[1].any() for _, _, task_vectors in places)
    assert [where.start for where, _, _ in places] == sorted(where.start for where, _, _ in places)


def test_norms_are_those_of_the_whole_tensor() -> None:
    generator = torch.Generator().manual_seed(0)
    base, expert = torch.randn(9000, generator=generator), torch.randn(9000, generator=generator)
    value = torch.empty(9000)
    found = merge_pieces(Stored(base, [expert]), lambda task_vectors: task_vectors.sum(0), value)
    exact = math.fsum(((expert - base).double() ** 2).tolist())
    assert found.energies == pytest.approx([exact], rel=3e-7)
    assert found.merged_energy == pytest.approx(exact, rel=3e-7)
    assert found.finite
    assert value.equal(expert - base + base)


@pytest.mark.parametrize("size", [1e-42, 1e-25, 1e-15, 1.0, 1e15, 1e30])
@pytest.mark.parametrize("length", [1000, 1024, 4096])
def test_squared_norms_of_any_size_are_right(size: float, length: int) -> None:
    rows = torch.randn(2, length, generator=torch.Generator().manual_seed(0)) * size
    exact = [math.fsum(x * x for x in row) for row in rows.tolist()]
    assert squared_norms(rows) == pytest.approx(exact, rel=3e-7, abs=0)
    assert squared_norms(torch.zeros(2, length)) == [0.0, 0.0]
    rows[1, 5] = float("nan")
    assert math.isnan(squared_norms(rows)[1])


@pytest.mark.parametrize("method", ["average", "ties"])
def test_a_value_that_is_not_finite_in_the_last_piece_is_found(method: str) -> None:
    base, experts = models(torch.float32)
    experts[1]["b.bias"][-1] = float("nan")
    with pytest.raises(MergeError, match=r"'b\.bias': 'expert 1' has 1 NaN"):
        acemerge.merge_state_dicts(base, experts, method=method)


def test_an_output_that_overflows_in_its_dtype_is_refused(tmp_path: Path) -> None:
    base = {"w": torch.zeros(5000, dtype=torch.float16)}
    expert = {"w": torch.zeros(5000, dtype=torch.float16)}
    expert["w"][-1] = 60000
    with pytest.raises(MergeError, match="not finite in float16"):
        acemerge.merge_state_dicts(base, [expert], method="task_arithmetic", alpha=2.0)


def test_a_tensor_with_infinities_that_nobody_changed_does_not_spoil_the_thresholds() -> None:
    base, experts = models(torch.float32)
    plain = acemerge.merge_state_dicts(base, experts, method="ties")
    mask = torch.full((3000,), float("-inf"))
    with_mask = acemerge.merge_state_dicts(base | {"m": mask}, [e | {"m": mask} for e in experts], method="ties")
    assert with_mask.pop("m").equal(mask)
    assert all(bits(with_mask[name]) == bits(value) for name, value in plain.items())


def test_whole_task_vectors_are_never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    base, experts = models(torch.float32)
    monkeypatch.setattr(statistics, "load_task_vectors", lambda *_: pytest.fail("a whole tensor was loaded"))
    monkeypatch.setattr("acemerge.tensors.computing.load_task_vectors", lambda *_: pytest.fail("a whole tensor was loaded"))
    for method in ELEMENTWISE:
        acemerge.merge_state_dicts(base, experts[: method.experts], method=method.name)
