"""The vision domain on a tiny model and tiny pictures: the encoder against plain transcriptions, training, merging, heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import acemerge
from acemerge.bench.data.task import Rows, Splits, TrainedTask, split
from acemerge.bench.domains import tiny_vit
from acemerge.bench.domains.tiny_vit import (
    AttentionBlock,
    FrozenNormConvolution,
    TinyViT,
    TinyViTConfig,
    WindowAttention,
    crop_attention_biases,
    from_checkpoint,
)
from acemerge.bench.domains.vision import VisionDomain
from acemerge.bench.measure.evaluation import evaluate
from acemerge.bench.measure.experts import Experts, train_expert
from acemerge.bench.suites.registry import Suite

SMALL = TinyViTConfig(
    image_size=16, widths=(8, 12, 16, 20), depths=(1, 1, 1, 1), heads=(0, 2, 2, 2), windows=(0, 2, 2, 2), strides=(2, 1, 1)
)


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter and statistic at random, so that nothing is a no-op."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(0.5 + 0.3 * torch.rand(tensor.shape, generator=generator) if "bn" in name else
                         0.3 * torch.randn(tensor.shape, generator=generator))  # fmt: skip
    return module


def test_the_batch_norm_is_folded_exactly() -> None:
    layer = randomised(FrozenNormConvolution(3, 4, 3, stride=2)).double()
    assert isinstance(layer, FrozenNormConvolution)
    pixels = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(layer.train()(pixels), layer.bn.eval()(layer.c(pixels)))
    assert not any(parameter.requires_grad for parameter in layer.bn.parameters())


def test_window_attention_is_the_papers_with_a_bias_by_distance() -> None:
    heads, window, width = 2, 3, 8
    layer = randomised(WindowAttention(width, heads, window)).double()
    assert isinstance(layer, WindowAttention)
    tokens = torch.randn(1, window * window, width, dtype=torch.float64)
    rows = layer.qkv(layer.norm(tokens))[0].view(-1, heads, 3 * width // heads)
    outputs = []
    for head in range(heads):
        query, key, value = rows[:, head].chunk(3, -1)
        scores = query @ key.T / math.sqrt(width / heads)
        for i in range(window * window):
            for j in range(window * window):
                down, across = abs(i // window - j // window), abs(i % window - j % window)
                scores[i, j] = scores[i, j] + layer.attention_biases[head, down, across]
        outputs.append(scores.softmax(-1) @ value)
    torch.testing.assert_close(layer(tokens)[0], layer.proj(torch.cat(outputs, -1)))


def test_a_grid_that_windows_do_not_divide_is_padded_with_zeros() -> None:
    block = randomised(AttentionBlock(8, 2, 3)).double()
    assert isinstance(block, AttentionBlock)
    grid = torch.randn(1, 4, 5, 8, dtype=torch.float64)
    attended = block._attend(grid)
    corner = torch.zeros(1, 3, 3, 8, dtype=torch.float64)
    corner[:, :1, :2] = grid[:, 3:, 3:]
    torch.testing.assert_close(attended[:, 3:, 3:], block.attn(corner.view(1, 9, 8)).view(1, 3, 3, 8)[:, :1, :2])


def published(model: TinyViT, windows: dict[int, int]) -> dict[str, Tensor]:
    """The model's tensors as checkpoints store them, with wider attention tables whose corners are the model's."""
    tensors = {**model.state_dict(), "head.weight": torch.zeros(3, 20), "head.bias": torch.zeros(3)}
    for name, tensor in tensors.items():
        if name.endswith("attention_biases"):
            side = windows[int(name.split(".")[1])]
            wide = torch.randn(len(tensor), side, side)
            wide[:, : tensor.shape[1], : tensor.shape[2]] = tensor
            tensors[name] = wide.flatten(1)
    return tensors


def test_a_checkpoint_loads_by_its_own_names_with_attention_tables_cropped() -> None:
    model = randomised(TinyViT(SMALL))
    assert isinstance(model, TinyViT)
    loaded = from_checkpoint(published(model, {1: 7, 2: 14, 3: 7}), SMALL)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_a_checkpoint_with_a_strange_tensor_is_refused() -> None:
    tensors = published(TinyViT(SMALL), {1: 7, 2: 14, 3: 7})
    with pytest.raises(RuntimeError, match="stranger"):
        from_checkpoint({**tensors, "stranger.weight": torch.zeros(1)}, SMALL)


def test_attention_tables_are_read_row_by_row() -> None:
    flat = torch.arange(2 * 16.0).view(2, 16)
    assert crop_attention_biases(flat, 2)[1].tolist() == [[16.0, 17.0], [20.0, 21.0]]


def test_grey_pictures_of_any_size_go_in() -> None:
    model = TinyViT(SMALL, ("no", "yes")).eval()
    grey = torch.randint(0, 256, (2, 1, 9, 9), dtype=torch.uint8)
    torch.testing.assert_close(model(grey), model(grey.expand(-1, 3, -1, -1)))


def test_folders_hold_the_whole_model(tmp_path: Path) -> None:
    model = randomised(TinyViT(SMALL, ("no", "yes")).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    domain = VisionDomain()
    domain.save(model, tmp_path)
    loaded = domain.load(tmp_path)
    assert isinstance(loaded, TinyViT)
    assert (loaded.config, loaded.labels) == (SMALL, ("no", "yes"))
    pictures = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    torch.testing.assert_close(loaded(pictures), model.eval()(pictures))


# --- the same path as the bench's: train experts, merge, put heads back, evaluate ---------------------------------------


def bright_side(axis: int) -> Splits:
    """Noise that is brighter on one side: which one?"""
    generator = np.random.default_rng(axis)
    images, labels = [], []
    for row in range(150):
        image = generator.integers(0, 120, (16, 16))
        half = np.moveaxis(image, axis, 0)[8 * (row % 2) : 8 * (row % 2) + 8]
        half += 100
        images.append(image.astype(np.uint8))
        labels.append(row % 2)
    return split(Rows(images, labels), test_rows=50, validation_rows=20)


TASKS = tuple(
    TrainedTask(name, ("first", "second"), partial(bright_side, axis), "made here", 80, 16, 1e-3, epochs=4)
    for axis, name in enumerate(("rows", "columns"))
)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experts]:
    """A small random base and two experts, in a cache of their own."""
    domain = VisionDomain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACEMERGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        trained = Experts(domain, 0)
        torch.manual_seed(0)
        TinyViT(SMALL).save(trained.base)
        for task in TASKS:
            train_expert(domain, task, 0)
        yield trained


def test_experts_learn_and_leave_batch_norms_alone(experts: Experts) -> None:
    base = tiny_vit.load(experts.base).state_dict()
    for task in TASKS:
        model = experts.domain.load(experts.folder(task))
        assert evaluate(experts.domain, model, experts.domain.prepare(task.load().test)).share > 0.9
        changed = {name for name, tensor in model.state_dict().items() if name in base and not torch.equal(tensor, base[name])}
        assert not any(".bn." in name for name in changed)
        assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} - changed == {
            "classifier.weight",
            "classifier.bias",
        }


def test_the_same_seed_gives_the_same_bytes(experts: Experts) -> None:
    weights = experts.folder(TASKS[0]) / "model.safetensors"
    before = weights.read_bytes()
    train_expert(VisionDomain(), TASKS[0], 0)
    assert weights.read_bytes() == before


def test_the_plan_merges_matrices_and_averages_the_rest(experts: Experts, tmp_path: Path) -> None:
    plan = acemerge.merge(experts.base, [experts.folder(task) for task in TASKS], tmp_path / "merged").plan
    fates = {tensor.name: tensor.action for tensor in plan.tensors}
    matrices = ("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight")
    for name, fate in fates.items():
        assert fate == ("merged" if name.endswith(matrices) else "copied" if name.endswith("tracked") else "averaged"), name
    assert list(fates.values()).count("merged") == 12
    assert [len(head.tensors) for head in plan.heads] == [2, 2]


@pytest.mark.parametrize(
    ("method", "options"),
    [("regmean", {}), ("regmean_plusplus", {}), ("fisher", {"rows": 20}), ("adamerging", {"steps": 5, "learning_rate": 0.02})],
)
def test_methods_that_use_data_take_the_suites_rows(
    experts: Experts, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    """A model with stages, convolutions and batch norms, that transformers does not know."""
    folders = {task.name: experts.folder(task) for task in TASKS}
    suite = Suite("bright-2", experts.domain, TASKS)
    result = acemerge.merge(experts.base, folders, tmp_path / "merged", method=method, data=suite, **options)
    merged = [tensor.name for tensor in result.plan.tensors if tensor.action == "merged"]
    if result.plan.method.touches != "all":
        assert len(merged) == 12, "the linear layers"
    for task in TASKS:
        model = experts.domain.load(acemerge.export_expert(tmp_path / "merged", task.name, tmp_path / task.name))
        assert evaluate(experts.domain, model, experts.domain.prepare(task.load().test)).share > 0.7


@pytest.mark.parametrize("method", ["average", "ace", "tsv_m", "emr"])
def test_a_merged_folder_gives_a_model_for_each_task(experts: Experts, tmp_path: Path, method: str) -> None:
    folders = {task.name: experts.folder(task) for task in TASKS}
    acemerge.merge(experts.base, folders, tmp_path / "merged", method=method)
    for task in TASKS:
        folder = acemerge.export_expert(tmp_path / "merged", task.name, tmp_path / task.name)
        model = experts.domain.load(folder)
        own = experts.domain.load(experts.folder(task)).state_dict()
        assert torch.equal(model.state_dict()["classifier.weight"], own["classifier.weight"])
        assert evaluate(experts.domain, model, experts.domain.prepare(task.load().test)).share > 0.7
