"""TinyViT, against plain transcriptions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from acemerge.bench.domains.tiny_vit import (
    AttentionBlock,
    FrozenNormConvolution,
    TinyViT,
    WindowAttention,
    crop_attention_biases,
    from_checkpoint,
)
from acemerge.bench.domains.vision import VisionDomain
from tiny_vision import SMALL


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
