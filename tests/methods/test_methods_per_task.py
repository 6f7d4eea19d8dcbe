"""EMR, TALL masks and Twin make one model per task: the formulas, and each task's model through the files that are written."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import acemerge
import model_zoo as zoo
from acemerge.cli.app import main
from acemerge.errors import InputError
from acemerge.execute import shard
from acemerge.methods import Context, Merged, get_method
from acemerge.output import task_models
from interruption import one_by_one, stop_at
from small_models import base_tensors, fine_tuned, write_model

Array = np.ndarray[Any, np.dtype[np.float64]]
Tensors = dict[str, Tensor]
METHODS = ["emr", "tall_mask", "twin"]
every_method = pytest.mark.parametrize("method", METHODS)
SHAPES = [(12, 8), (3, 20), (5,), (), (2, 3, 2, 2)]
PRECISIONS = {torch.float32: 1e-4, torch.float64: 1e-9}


# --- the formulas, of a whole model: {tensor: task vectors} -> per task {tensor: W_task - W0} --------------------------


def reference_emr(taus: Mapping[str, Array], rescale: str = "global") -> list[dict[str, Array]]:
    masked: list[dict[str, Array]] = [{} for _ in next(iter(taus.values()))]
    for name, tau in taus.items():
        g = np.where(tau.sum(0) > 0, 1.0, -1.0)
        m = tau * g > 0
        tau_u = g * np.abs(m * tau).max(0)
        for t, own in enumerate(masked):
            own[name] = m[t] * tau_u
    changes = []
    for t, own in enumerate(masked):
        size = {name: x.size if rescale == "tensor_means" else 1 for name, x in own.items()}
        top = sum(np.abs(tau[t]).sum() / size[name] for name, tau in taus.items())
        bottom = sum(np.abs(x).sum() / size[name] for name, x in own.items())
        changes.append({name: np.asarray((top / bottom if bottom > 0 else 0.0) * x) for name, x in own.items()})
    return changes


def reference_tall_mask(taus: Mapping[str, Array], mask_lambda: float = 0.4) -> list[dict[str, Array]]:
    changes: list[dict[str, Array]] = [{} for _ in next(iter(taus.values()))]
    for name, tau in taus.items():
        tau_M = tau.sum(0)
        for t, own in enumerate(changes):
            own[name] = np.asarray(tau_M * (np.abs(tau[t]) > mask_lambda * np.abs(tau_M - tau[t])))
    return changes


def reference_twin(taus: Mapping[str, Array], rank_share: float = 0.1, alpha: float = 0.3) -> list[dict[str, Array]]:
    changes: list[dict[str, Array]] = [{} for _ in next(iter(taus.values()))]
    for name, tau in taus.items():
        shared = alpha * tau.sum(0)
        for t, own in enumerate(changes):
            exclusive = tau[t] - shared
            if exclusive.ndim == 2:
                U, s, Vh = np.linalg.svd(exclusive, full_matrices=False)
                k = max(1, round(math.floor(1e6 * rank_share * len(s)) / 1e6 // 1)) if rank_share else 0
                exclusive = (U[:, :k] * s[:k]) @ Vh[:k]
            elif not rank_share:
                exclusive = exclusive * 0
            own[name] = np.asarray(shared + exclusive)
    return changes


REFERENCES: dict[str, Callable[..., list[dict[str, Array]]]] = {
    "emr": reference_emr,
    "tall_mask": reference_tall_mask,
    "twin": reference_twin,
}


def reference_shared(method: str, tau: Array) -> Array:
    """M, unscaled."""
    g = np.where(tau.sum(0) > 0, 1.0, -1.0)
    return np.asarray(g * np.abs((tau * g > 0) * tau).max(0) if method == "emr" else tau.sum(0))


# --- the kernels -------------------------------------------------------------------------------------------------------


def random_task_vectors(*shape: int, tasks: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    strengths = torch.tensor([0.02 * 1.7**t for t in range(tasks)]).view(-1, *[1] * len(shape))
    return (torch.randn(tasks, *shape, generator=generator) * strengths).to(dtype)


def run(method: str, task_vectors: Tensor, **options: Any) -> Merged:
    chosen = get_method(method)
    names = tuple(f"e{t}" for t in range(len(task_vectors)))
    return chosen(task_vectors, chosen.options(options), Context("layer.weight", names))


def rebuilt(merged: Merged, task: int) -> Tensor:
    """W_task - W0, by what `Merged` says of parts."""
    part = merged.parts[task]
    if "mask" in part:
        assert merged.shared is not None
        return part["scale"] * part["mask"] * merged.shared.double()
    change = merged.delta.double()
    if "left" in part:
        change = change + part["left"] @ part["right"]
    return change + part["delta"] if "delta" in part else change


def changes(method: str, task_vectors: Tensor, **options: Any) -> list[Tensor]:
    merged = run(method, task_vectors, **options)
    return [rebuilt(merged, t) for t in range(len(task_vectors))]


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("emr", {}),
    ("emr", {"rescale": "tensor_means"}),
    ("tall_mask", {}),
    ("tall_mask", {"mask_lambda": 1.1}),
    ("twin", {}),
    ("twin", {"rank_share": 0.4, "alpha": 0.5}),
    ("twin", {"rank_share": 0.9}),
    ("twin", {"rank_share": 0.0}),
    ("twin", {"rank_share": 1.0}),
]


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_formula(method: str, options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for tasks in (1, 2, 5):
        task_vectors = random_task_vectors(*shape, tasks=tasks, dtype=dtype)
        expected = REFERENCES[method]({"layer": task_vectors.double().numpy()}, **options)
        size = task_vectors.double().norm()
        for found, wanted in zip(changes(method, task_vectors, **options), expected, strict=True):
            assert (found.double() - torch.from_numpy(wanted["layer"])).norm() <= PRECISIONS[dtype] * size
        shared = torch.from_numpy(reference_shared(method, task_vectors.double().numpy()))
        alpha = options.get("alpha", get_method(method).options({}).alpha)
        assert (run(method, task_vectors, **options).delta - alpha * shared).norm() <= PRECISIONS[dtype] * size


@every_method
def test_one_expert_gives_that_expert_back(method: str) -> None:
    task_vectors = random_task_vectors(12, 8, tasks=1)
    options = {"rank_share": 1.0} if method == "twin" else {}
    torch.testing.assert_close(changes(method, task_vectors, **options)[0], task_vectors[0])


@every_method
def test_order_of_experts(method: str) -> None:
    task_vectors = random_task_vectors(12, 8, tasks=4, dtype=torch.float32)
    order = [2, 0, 3, 1]
    straight, turned = changes(method, task_vectors), changes(method, task_vectors[order])
    for place, task in enumerate(order):
        torch.testing.assert_close(turned[place], straight[task], rtol=1e-9, atol=1e-12)


@every_method
def test_size_of_the_task_vectors(method: str) -> None:
    task_vectors = random_task_vectors(12, 8)
    for small, large in zip(changes(method, task_vectors), changes(method, 4 * task_vectors), strict=True):
        torch.testing.assert_close(large, 4 * small)


@every_method
def test_transpose_equivariant(method: str) -> None:
    task_vectors = random_task_vectors(12, 8)
    for one, other in zip(changes(method, task_vectors), changes(method, task_vectors.mT.contiguous()), strict=True):
        torch.testing.assert_close(other, one.T)


@every_method
def test_frozen_experts(method: str) -> None:
    task_vectors = random_task_vectors(12, 8)
    task_vectors[1] = 0
    expected = REFERENCES[method]({"layer": task_vectors.numpy()})
    for found, wanted in zip(changes(method, task_vectors), expected, strict=True):
        torch.testing.assert_close(found, torch.from_numpy(wanted["layer"]))
    assert not any(change.any() for change in changes(method, torch.zeros(3, 4, 5)))


@every_method
def test_rank_one_experts_more_of_them_than_rows(method: str) -> None:
    task_vectors = random_task_vectors(4, 1, tasks=9) @ random_task_vectors(1, 3, tasks=9, seed=1)
    before = task_vectors.clone()
    first, second = changes(method, task_vectors), changes(method, task_vectors)
    assert all(torch.isfinite(a).all() and a.equal(b) for a, b in zip(first, second, strict=True))
    assert task_vectors.equal(before)


@every_method
def test_parts_do_not_share_memory_with_the_inputs(method: str) -> None:
    task_vectors = random_task_vectors(6)
    memory = task_vectors.untyped_storage().data_ptr()
    merged = run(method, task_vectors, alpha=0.0)
    for part in (value for own in merged.parts for value in own.values()):
        assert part.untyped_storage().data_ptr() != memory


# emr


def test_emr_copies_give_the_expert_back() -> None:
    task_vectors = random_task_vectors(12, 8, tasks=1).expand(3, 12, 8)
    assert all(torch.allclose(change, task_vectors[0]) for change in changes("emr", task_vectors))


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_emr_invariants(seed: int, tasks: int) -> None:
    task_vectors = random_task_vectors(6, 5, tasks=tasks, seed=seed)
    merged = run("emr", task_vectors)
    assert merged.shared is not None
    for tau, part in zip(task_vectors, merged.parts, strict=True):
        reconstruction = part["scale"] * part["mask"] * merged.shared
        if part["mask"].any():  # the same L1 norm
            torch.testing.assert_close(reconstruction.abs().sum(), tau.abs().sum())
        assert (reconstruction * tau >= 0).all()  # never the opposite sign
        agreeing = part["mask"] * tau
        assert ((part["mask"] * merged.shared).abs() >= agreeing.abs()).all()
        if agreeing.any():
            assert float(part["scale"]) <= float(tau.abs().sum() / agreeing.abs().sum()) * (1 + 1e-12)


def test_emr_a_sum_of_zero_elects_minus() -> None:
    tau = torch.tensor([1.0, -2.0, 3.0])
    assert run("emr", torch.stack([tau, -tau])).delta.equal(torch.tensor([-1.0, -2.0, -3.0]))


def test_emr_warns_of_an_expert_that_never_has_the_elected_sign() -> None:
    tau = torch.tensor([1.0, 2.0, 3.0])
    merged = run("emr", torch.stack([-tau, 5 * tau]))
    assert merged.parts[0]["scale"] == 0
    assert "'e0'" in merged.warnings[0]


def test_emr_scales_differ_where_tensors_differ_in_size() -> None:
    taus = {"long": random_task_vectors(40), "short": random_task_vectors(3, seed=1)}
    base = {name: torch.zeros(tau.shape[1:], dtype=torch.float64) for name, tau in taus.items()}
    statistics = {rescale: get_method("emr") for rescale in ("global", "tensor_means")}
    for rescale, method in statistics.items():
        options = method.options({"rescale": rescale})
        assert method.statistics is not None
        gathered = method.statistics(options, ("e0", "e1", "e2"))
        assert gathered is not None
        for name, tau in taus.items():
            gathered.observe(tau, Context(name, ("e0", "e1", "e2"), base[name]))
        assert not gathered.end_pass()
        expected = reference_emr({name: tau.numpy() for name, tau in taus.items()}, rescale)
        for name, tau in taus.items():
            merged = method(tau, options, Context(name, ("e0", "e1", "e2"), base[name], gathered))
            for task in range(3):
                torch.testing.assert_close(rebuilt(merged, task), torch.from_numpy(expected[task][name]))


# tall_mask


def test_tall_masks_of_disjoint_supports_are_the_supports() -> None:
    task_vectors = random_task_vectors(12, 8, tasks=2)
    task_vectors[0, :6] = 0
    task_vectors[1, 6:] = 0
    for found, tau in zip(changes("tall_mask", task_vectors), task_vectors, strict=True):
        assert found.equal(tau)


def test_tall_mask_raising_lambda_never_adds_entries() -> None:
    task_vectors = random_task_vectors(12, 8)
    masks = [run("tall_mask", task_vectors, mask_lambda=lam).parts[0]["mask"] for lam in (0.0, 0.2, 0.6, 2.0)]
    assert all(bool((more | ~fewer).all()) for more, fewer in itertools.pairwise(masks))


def test_tall_mask_of_ties() -> None:
    """tau_M is TIES with the sum of what agrees; the masks compare it with the whole task vectors."""
    task_vectors = random_task_vectors(12, 8)
    tau_M = acemerge.merge_task_vectors(task_vectors, method="ties", merge="sum", keep=0.3, alpha=1.0)
    for found, tau in zip(changes("tall_mask", task_vectors, merge="ties", keep=0.3), task_vectors, strict=True):
        torch.testing.assert_close(found, tau_M * (tau.abs() > 0.4 * (tau_M - tau).abs()))


# twin


def test_twin_with_every_direction_is_the_expert() -> None:
    task_vectors = random_task_vectors(12, 8)
    for found, tau in zip(changes("twin", task_vectors, rank_share=1.0), task_vectors, strict=True):
        torch.testing.assert_close(found, tau)


def test_twin_with_no_direction_is_the_shared_model() -> None:
    task_vectors = random_task_vectors(12, 8)
    assert all(found.equal(0.3 * task_vectors.sum(0)) for found in changes("twin", task_vectors, rank_share=0.0))


@pytest.mark.parametrize(("rank_share", "rank"), [(0.1, 1), (0.05, 1), (0.3, 3), (0.29, 2), (0.7, 7)])
def test_twin_rank(rank_share: float, rank: int) -> None:
    """(1 - 0.9) * 10 is 0.999... in floating point, yet one direction."""
    merged = run("twin", random_task_vectors(10, 40), rank_share=rank_share)
    assert {own["left"].shape for own in merged.parts} == {(10, rank)}
    assert {own["right"].shape for own in merged.parts} == {(rank, 40)}


def test_twin_keeps_what_is_not_a_matrix_whole() -> None:
    task_vectors = random_task_vectors(7)
    for found, tau in zip(changes("twin", task_vectors), task_vectors, strict=True):
        torch.testing.assert_close(found, tau)


def test_twin_stores_what_is_smaller() -> None:
    task_vectors = random_task_vectors(8, 8)
    assert all(own.keys() == {"left", "right"} for own in run("twin", task_vectors, rank_share=0.4).parts)
    assert all(own.keys() == {"delta"} for own in run("twin", task_vectors, rank_share=0.6).parts)


# --- through files -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Models:
    """A base and its experts, in memory and on disk."""

    root: Path
    base: Tensors
    experts: dict[str, Tensors]
    prefix: str = ""
    heads: dict[str, Tensors] = field(default_factory=dict)

    @property
    def folders(self) -> dict[str, Path]:
        return {name: self.root / name for name in self.experts}

    def merge(self, output: str, method: str, **options: Any) -> Path:
        acemerge.merge(self.root / "base", self.folders, self.root / output, method=method, **options)
        return self.root / output

    def weights(self) -> list[str]:
        return [name for name, weight in self.base.items() if weight.is_floating_point()]

    def _task_vectors(self, name: str) -> Tensor:
        """In float32, as the engine takes them, or in float64 if the models are."""
        wide = torch.promote_types(self.base[name].dtype, torch.float32)
        return torch.stack([e[name].to(wide) - self.base[name].to(wide) for e in self.experts.values()])

    def expected(self, method: str, **options: Any) -> dict[str, Tensors]:
        """Each task's model in float64 (integers as they are), under the base's names."""
        taus = {name: self._task_vectors(name).double().numpy() for name in self.weights()}
        return {
            expert: {name: w.double() + torch.from_numpy(change[name]) if name in change else w for name, w in self.base.items()}
            for expert, change in zip(self.experts, REFERENCES[method](taus, **options), strict=True)
        }


def write(
    root: Path,
    *,
    dtype: torch.dtype = torch.float32,
    model_type: str = "nobody-heard-of-it",
    prefix: str = "",
    heads: bool = False,
) -> Models:
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "h.0.attn.c_attn.weight": (8, 24),
        "h.0.attn.c_attn.bias": (24,),
        "stem.weight": (6, 3, 2, 2),
        "odd.weight": (7, 11),
    }
    base = {
        "frozen.weight": torch.randn(16, 16, generator=generator),  # nobody changes it
        **base_tensors(),
        **{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
    }
    base = {name: w.to(dtype) if w.is_floating_point() else w for name, w in base.items()}
    experts = {f"e{i}": {**fine_tuned(base, i), "frozen.weight": base["frozen.weight"]} for i in range(3)}
    experts = {e: {name: w.to(base[name].dtype) for name, w in own.items()} for e, own in experts.items()}
    own_heads = {e: {"classifier.weight": torch.randn(2 + i, 8, generator=generator)} for i, e in enumerate(experts) if heads}
    write_model(root / "base", base, {"model_type": model_type})
    for i, (name, tensors) in enumerate(experts.items()):
        stored = {prefix + key: value for key, value in tensors.items()} | own_heads.get(name, {})
        write_model(root / name, stored, {"model_type": model_type, "task": i})
    return Models(root, base, experts, prefix, own_heads)


def half_unit(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Half of the distance between neighbours of that dtype, at these values."""
    exponent = value.abs().clamp_min(torch.finfo(dtype).tiny).log2().floor()
    return torch.finfo(dtype).eps / 2 * 2**exponent


def assert_is(found: Tensors, expected: Tensors, base: Tensors) -> None:
    """The formula rounded once to the tensor's dtype, but for a share of the change: parts are stored in float32 or float64."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if not value.is_floating_point():
            assert value.equal(expected[name])
            continue
        change = (expected[name] - base[name].double()).abs().max()
        error = (value.double() - expected[name]).abs()
        share = 1e-9 if base[name].dtype == torch.float64 else 1e-5
        allowed = 1.02 * half_unit(expected[name], value.dtype) + share * change
        assert (error <= allowed).all(), f"{name}: off by {(error / allowed).max():.3g} of what is allowed"


def check_tasks(models: Models, output: Path, method: str, **options: Any) -> None:
    """Export every expert's model and compare it with the formula."""
    for expert, expected in models.expected(method, **options).items():
        exported = acemerge.export_expert(output, expert, output.with_name(f"{output.name}-{expert}"))
        found = load_file(exported / "model.safetensors")
        head = models.heads.get(expert, {})
        for name, tensor in head.items():
            assert found.pop(name).equal(tensor)
        assert all(name.startswith(models.prefix) for name in found if head)
        assert_is({name.removeprefix(models.prefix if head else ""): w for name, w in found.items()}, expected, models.base)
        if head:
            assert json.loads((exported / "config.json").read_text())["task"] == int(expert[1:])


def read(folder: Path) -> Tensors:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("method", "options"), [variant for variant in VARIANTS if variant[1].get("rank_share") != 0.9])
def test_exports_follow_the_formula(tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    models = write(tmp_path)
    check_tasks(models, models.merge("out", method, **options), method, **options)


@every_method
@pytest.mark.parametrize("alpha", [-0.5, 0.0, 2.0])
def test_the_root_is_the_shared_model_whatever_alpha(tmp_path: Path, method: str, alpha: float) -> None:
    models = write(tmp_path)
    output = models.merge("out", method, alpha=alpha)
    check_tasks(models, output, method, **({"alpha": alpha} if method == "twin" else {}))
    for name, found in load_file(output / "model.safetensors").items():
        if found.is_floating_point():
            taus = torch.stack([e[name] - models.base[name] for e in models.experts.values()]).double().numpy()
            expected = models.base[name].double() + alpha * torch.from_numpy(reference_shared(method, taus))
            torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@every_method
def test_exports_with_heads_and_other_names(tmp_path: Path, method: str) -> None:
    models = write(tmp_path, prefix="net.", heads=True)
    check_tasks(models, models.merge("out", method), method)


@every_method
def test_exports_from_shards(tmp_path: Path, method: str) -> None:
    """The first shard holds only what nobody changed, and so has no parts."""
    models = write(tmp_path)
    output = models.merge("out", method, shard_size="1kB")
    shards = {path.name for path in output.glob("*.safetensors")}
    assert len(shards) > 3
    assert {path.name for path in (output / "tasks/e1").iterdir()} < shards
    check_tasks(models, output, method)


@every_method
def test_exports_of_transposed_tensors(tmp_path: Path, method: str) -> None:
    models = write(tmp_path, model_type="gpt2")
    output = models.merge("out", method)
    records = {r["name"]: r for r in json.loads((output / "acemerge_manifest.json").read_text())["tensors"]}
    assert records["h.0.attn.c_attn.weight"]["orientation"] == "stored [in, out], merged as [out, in]"
    check_tasks(models, output, method)


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(tmp_path: Path, method: str, dtype: torch.dtype) -> None:
    models = write(tmp_path, dtype=dtype, model_type="gpt2")
    output = models.merge("out", method)
    check_tasks(models, output, method)
    if method == "twin":
        return
    for expert, changed in models.expected(method).items():  # where the mask is 0, the base itself
        found = load_file(output.with_name(f"out-{expert}") / "model.safetensors")
        for name in models.weights():
            base = models.base[name]
            untouched = (changed[name] == base.double()) & (base.abs() > 0.01)
            assert found[name][untouched].equal(base[untouched])


@every_method
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_another_output_dtype(tmp_path: Path, method: str, dtype: str) -> None:
    models = write(tmp_path)
    output = models.merge("out", method, dtype=dtype)
    check_tasks(models, output, method)
    exported = load_file(tmp_path / "out-e0/model.safetensors")
    assert {w.dtype for w in exported.values() if w.is_floating_point()} == {getattr(torch, dtype)}


@every_method
def test_float64_models_keep_float64_parts(tmp_path: Path, method: str) -> None:
    models = write(tmp_path, dtype=torch.float64)
    check_tasks(models, models.merge("out", method), method)


@every_method
def test_reading_a_tensor_twice_gives_the_same(tmp_path: Path, method: str) -> None:
    models = write(tmp_path, dtype=torch.float64)
    model = task_models._open_task_model(models.merge("out", method), "e1")
    assert model.read("layers.0.weight").clone().equal(model.read("layers.0.weight"))


@every_method
def test_what_nobody_changed_is_the_bases_bit_for_bit(tmp_path: Path, method: str) -> None:
    models = write(tmp_path, dtype=torch.bfloat16)
    exported = acemerge.export_expert(models.merge("out", method), "e1", tmp_path / "task")
    assert load_file(exported / "model.safetensors")["frozen.weight"].equal(models.base["frozen.weight"])
    assert not any(name.startswith("frozen") for name in read(tmp_path / "out/tasks/e1"))


@every_method
def test_when_nobody_changed_anything_every_task_is_the_base(tmp_path: Path, method: str) -> None:
    models = write(tmp_path / "changed")
    write_model(tmp_path / "base", models.base)
    for name in "ab":
        write_model(tmp_path / name, models.base)
    acemerge.merge(tmp_path / "base", [tmp_path / "a", tmp_path / "b"], tmp_path / "out", method=method)
    exported = acemerge.export_expert(tmp_path / "out", "b", tmp_path / "task")
    zoo.assert_equal_tensors(load_file(exported / "model.safetensors"), models.base)


def test_sizes_on_disk(tmp_path: Path) -> None:
    base = {f"layers.{i}.weight": torch.randn(256, 256, generator=torch.Generator().manual_seed(i)) for i in range(3)}
    write_model(tmp_path / "base", base)
    for i in range(2):
        write_model(tmp_path / f"e{i}", fine_tuned(base, i))
    entries, header = 3 * 256 * 256, 1_000
    for method in METHODS:
        acemerge.merge(tmp_path / "base", [tmp_path / "e0", tmp_path / "e1"], tmp_path / method, method=method)
    for method in ("emr", "tall_mask"):
        assert entries / 8 <= (tmp_path / method / "tasks/e0/model.safetensors").stat().st_size <= entries / 8 + header
        assert (tmp_path / method / "shared/model.safetensors").stat().st_size <= 4 * entries + header
    assert (tmp_path / "twin/tasks/e0/model.safetensors").stat().st_size <= 3 * 25 * (256 + 256) * 4 + header
    assert not (tmp_path / "twin/shared").exists()
    acemerge.merge(tmp_path / "base", [tmp_path / "e0"], tmp_path / "half", method="emr", dtype="bfloat16")
    assert (tmp_path / "half/shared/model.safetensors").stat().st_size <= (4 + 2) * entries + header


def test_files_of_parts_are_aligned(tmp_path: Path) -> None:
    """Every tensor of a file starts at a multiple of its element's size, whatever was written before it."""
    models = write(tmp_path)
    output = models.merge("out", "emr", dtype="bfloat16")
    acemerge.export_expert(output, "e0", tmp_path / "task")
    files = [output / "tasks/e0/model.safetensors", output / "shared/model.safetensors", tmp_path / "task/model.safetensors"]
    sizes = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "U8": 1}
    for file in files:
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        assert length % 8 == 0
        assert all(e["data_offsets"][0] % sizes[e["dtype"]] == 0 for n, e in header.items() if n != "__metadata__")


# --- interrupted and damaged -------------------------------------------------------------------------------------------


def interrupt(models: Models, method: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("layers.1.weight", calls)))
        with pytest.raises(KeyboardInterrupt):
            models.merge("out", method, shard_size="1kB")
    assert any((models.root / "out.partial/tasks/e0").iterdir())
    return calls


@every_method
def test_a_resumed_merge_keeps_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    models = write(tmp_path)
    whole = models.merge("whole", method, shard_size="1kB")
    done = interrupt(models, method, monkeypatch)
    calls: list[str] = []
    monkeypatch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("", calls)))
    output = models.merge("out", method, shard_size="1kB")
    assert done[0] not in calls
    assert zoo.file_hashes(output) == zoo.file_hashes(whole)
    check_tasks(models, output, method)


@pytest.mark.parametrize("damage", ["changed", "removed"])
def test_a_shard_whose_parts_were_damaged_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    models = write(tmp_path)
    whole = models.merge("whole", "emr", shard_size="1kB")
    interrupt(models, "emr", monkeypatch)
    part = min((tmp_path / "out.partial/tasks/e0").iterdir())
    if damage == "changed":
        part.write_bytes(part.read_bytes()[:-1] + b"?")
    else:
        part.unlink()
    assert zoo.file_hashes(models.merge("out", "emr", shard_size="1kB")) == zoo.file_hashes(whole)


def test_another_method_starts_over_without_the_old_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = write(tmp_path)
    interrupt(models, "emr", monkeypatch)
    output = models.merge("out", "average", shard_size="1kB")
    assert not (output / "tasks").exists()
    assert not (output / "shared").exists()


def test_a_missing_file_of_parts_is_named(tmp_path: Path) -> None:
    output = write(tmp_path).merge("out", "emr")
    (output / "tasks/e1/model.safetensors").unlink()
    with pytest.raises(InputError, match=r"tasks/e1/model.safetensors: missing, but named in acemerge_manifest.json"):
        acemerge.export_expert(output, "e1", tmp_path / "task")
    assert not (tmp_path / "task").exists()


def test_an_unknown_expert_gets_a_hint(tmp_path: Path) -> None:
    output = write(tmp_path).merge("out", "twin", rank_share=0.0)  # no part at all, yet three tasks
    with pytest.raises(InputError, match=r"'e': did you mean 'e\d'\? Known: e0, e1, e2"):
        acemerge.export_expert(output, "e", tmp_path / "task")


def test_the_manifest_has_the_parts_hashes(tmp_path: Path) -> None:
    output = write(tmp_path).merge("out", "emr")
    manifest = json.loads((output / "acemerge_manifest.json").read_text())
    hashes = zoo.file_hashes(output)
    assert manifest["parts"] == {path: sha for path, sha in hashes.items() if path.startswith(("shared/", "tasks/"))}
    assert len(manifest["parts"]) == 4
    assert manifest["per_task"] is True


# --- parts of a model only ---------------------------------------------------------------------------------------------


def test_rules_may_mix_methods_and_scales(tmp_path: Path) -> None:
    models = write(tmp_path)
    rules: list[dict[str, Any]] = [
        {"match": "layers.0.*", "method": "tall_mask", "options": {"alpha": 0.7}},
        {"match": "odd.*", "method": "twin"},
        {"match": "layers.1.*", "do": "average"},
    ]
    result = acemerge.merge(tmp_path / "base", models.folders, tmp_path / "out", method="average", alpha=0.9, tensors=rules)
    assert [re.findall(r"method '(\w+)'", note)[0] for note in result.plan.notes] == ["tall_mask", "twin"]
    exported = load_file(acemerge.export_expert(tmp_path / "out", "e2", tmp_path / "task") / "model.safetensors")
    root = load_file(tmp_path / "out/model.safetensors")
    expected = {method: models.expected(method)["e2"] for method in ("tall_mask", "twin")}
    for name, found in exported.items():
        method = "tall_mask" if name.startswith("layers.0") else "twin" if name.startswith("odd") else None
        if method:
            assert_is({name: found}, {name: expected[method][name]}, models.base)
        else:
            assert found.equal(root[name])


def test_a_tensor_that_an_expert_lacks_comes_from_the_shared_model(tmp_path: Path) -> None:
    models = write(tmp_path)
    zoo.rewrite(tmp_path / "e1", tmp_path / "lacking", lambda own: {n: w for n, w in own.items() if n != "odd.weight"})
    folders = {**models.folders, "e1": tmp_path / "lacking"}
    acemerge.merge(tmp_path / "base", folders, tmp_path / "out", method="emr", missing="skip")
    exported = load_file(acemerge.export_expert(tmp_path / "out", "e1", tmp_path / "task") / "model.safetensors")
    root = load_file(tmp_path / "out/model.safetensors")
    assert exported["odd.weight"].equal(root["odd.weight"])
    assert not exported["layers.0.weight"].equal(root["layers.0.weight"])


# --- with transformers -------------------------------------------------------------------------------------------------


def task_vectors_of(models: zoo.Models, names: Mapping[str, str]) -> dict[str, Array]:
    base = zoo.read_tensors(models.base)
    experts = [zoo.read_tensors(folder) for folder in models.experts.values()]
    return {ours: torch.stack([e[theirs] - base[ours] for e in experts]).double().numpy() for theirs, ours in names.items()}


@every_method
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_loaded_models_follow_the_formula(tmp_path: Path, method: str, family: str) -> None:
    """GPT-2 classifiers with heads of their own on a language model's backbone; Llamas without any."""
    models = zoo.gpt2(tmp_path) if family == "gpt2" else zoo.llama(tmp_path, tied=False)
    acemerge.merge(models.base, models.experts, tmp_path / "out", method=method)
    with zoo.quiet_transformers():
        loaded = acemerge.load_expert_head(tmp_path / "out", "blue")
    state, expert, base = loaded.state_dict(), zoo.read_tensors(models.experts["blue"]), zoo.read_tensors(models.base)
    own = {"score.weight"} if family == "gpt2" else set()
    assert state.keys() == expert.keys()
    assert all(state[name].equal(expert[name]) for name in own)
    names = {theirs: theirs for theirs in expert if theirs not in own}
    change = REFERENCES[method](task_vectors_of(models, names))[list(models.experts).index("blue")]
    expected = {name: base[name].double() + torch.from_numpy(change[name]) for name in names}
    assert_is({name: state[name] for name in names}, expected, base)
    tokens = torch.tensor([[5, 9, 31, 7]])
    with torch.no_grad():
        assert torch.isfinite(loaded(input_ids=tokens).logits).all()


# --- what users are told -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """Runs `acemerge ...` in this process."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> str:
        self.monkeypatch.setattr(sys, "argv", ["acemerge", *map(str, arguments)])
        main_error = None
        try:
            main()
        except SystemExit as error:
            main_error = error.code
        out, err = self.capsys.readouterr()
        assert not main_error, err
        return " ".join(out.split())


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@every_method
def test_it_is_said_everywhere_that_this_is_not_one_merged_model(tmp_path: Path, command: Command, method: str) -> None:
    models = write(tmp_path)
    arguments = [tmp_path / "base", *models.folders.values(), "-m", method]
    plan = command("plan", *arguments)
    assert f"note: method '{method}' makes one model per task, not one merged model" in plan
    assert "writes at most" in plan
    assert "shared/ and tasks/" in plan
    assert json.loads(command("plan", *arguments, "--json"))["per_task"] is True
    assert "one model per task, not one merged model" in command("merge", *arguments, "-o", tmp_path / "out")
    described = command("methods", method)
    assert "ONE MODEL PER TASK, not one merged model" in described
    assert "`acemerge task OUT EXPERT -o DIR`" in described
    assert json.loads(command("methods", method, "--json"))[0]["per_task"] is True
    card = (tmp_path / "out/README.md").read_text()
    assert "One model per task, not one merged model, made from 3 fine-tuned ones" in card
    assert "## Not one merged model" in card
    assert "acemerge task this-folder e0 -o OUT" in card
    assert "`e0`, `e1`, `e2`" in card


def test_methods_that_make_one_model_say_so(tmp_path: Path, command: Command) -> None:
    models = write(tmp_path)
    out = command("merge", tmp_path / "base", *models.folders.values(), "-m", "average", "-o", tmp_path / "out")
    assert "per task" not in out
    assert "One model made from 3 fine-tuned ones" in (tmp_path / "out/README.md").read_text()
    assert "per task" not in (tmp_path / "out/README.md").read_text()
    listed = command("methods")
    assert "a model per task" in listed
    assert json.loads(command("methods", "average", "--json"))[0]["per_task"] is False


def test_the_task_command(tmp_path: Path, command: Command) -> None:
    models = write(tmp_path)
    output = models.merge("out", "emr")
    assert "the merged model for the task of 'e1'" in command("task", output, "e1", "-o", tmp_path / "task")
    assert_is(load_file(tmp_path / "task/model.safetensors"), models.expected("emr")["e1"], models.base)
    assert "low-rank factors" in command("task", "--help")
