"""TinyViT (Wu et al., 2022), the small vision transformer of the vision suites, at any picture size, as a picture classifier.

Convolutions lead from pixels to a grid a quarter of the picture's side. Stage 0 is made of inverted bottlenecks; the later
stages alternate attention within square windows, a depthwise convolution and an MLP. A three-convolution step leads from one
stage to the next, wider one. Parameter names are the published checkpoints' own, so their tensors load as they are. Only the
attention biases are stored by both distances, [heads, window, window], where the checkpoints flatten them: a smaller window is
then a corner of the table.

Every BatchNorm is frozen, statistics, scale and shift: it is a constant per channel, folded into its convolution.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

PIXEL_MEAN = (123.675, 116.28, 103.53)
PIXEL_STD = (58.395, 57.12, 57.375)
EXPANSION = 4
"""How much wider the inside of a bottleneck or an MLP is."""


@dataclass(frozen=True)
class TinyViTConfig:
    """The shape of the encoder: one entry for each of the four stages (the first has neither heads nor windows)."""

    image_size: int = 56
    widths: tuple[int, ...] = (64, 128, 160, 320)
    depths: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (0, 4, 5, 10)
    windows: tuple[int, ...] = (0, 7, 4, 4)
    strides: tuple[int, ...] = (2, 2, 1)
    """From each stage to the next. MobileSAM keeps the grid before the last stage; the classifier of the paper halves it."""


class FrozenNormConvolution(nn.Module):
    """A convolution and the BatchNorm after it, which is folded in as a constant."""

    def __init__(self, width_in: int, width: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.c = nn.Conv2d(width_in, width, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(width).requires_grad_(False)

    def forward(self, pixels: Float[Tensor, "batch in height width"]) -> Float[Tensor, "batch out height_ width_"]:
        """Convolve and normalise, in one pass."""
        norm, convolution = self.bn, self.c
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        return functional.conv2d(
            pixels,
            convolution.weight * scale.view(-1, 1, 1, 1),
            norm.bias - norm.running_mean * scale,
            convolution.stride,
            convolution.padding,
            groups=convolution.groups,
        )


class PatchEmbedding(nn.Module):
    """Pixels to a grid of a quarter of the side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.seq = nn.Sequential(
            FrozenNormConvolution(3, width // 2, 3, stride=2), nn.GELU(), FrozenNormConvolution(width // 2, width, 3, stride=2)
        )

    def forward(self, pixels: Float[Tensor, "batch 3 height width"]) -> Tensor:
        """Two convolutions of stride two."""
        grid: Tensor = self.seq(pixels)
        return grid


class Bottleneck(nn.Module):
    """Widen, look at the neighbourhood, narrow, and add: the inverted bottleneck of the first stage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = FrozenNormConvolution(width, EXPANSION * width)
        self.conv2 = FrozenNormConvolution(EXPANSION * width, EXPANSION * width, 3, groups=EXPANSION * width)
        self.conv3 = FrozenNormConvolution(EXPANSION * width, width)

    def forward(self, grid: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch channel height width"]:
        """The activation comes after the sum."""
        wide = functional.gelu(self.conv2(functional.gelu(self.conv1(grid))))
        return functional.gelu(grid + self.conv3(wide))


class Downsampling(nn.Module):
    """From one stage's width and grid to the next one's."""

    def __init__(self, width: int, next_width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = FrozenNormConvolution(width, next_width)
        self.conv2 = FrozenNormConvolution(next_width, next_width, 3, stride, groups=next_width)
        self.conv3 = FrozenNormConvolution(next_width, next_width)

    def forward(self, grid: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch next height_ width_"]:
        """Widen, reduce the grid, mix."""
        reduced: Tensor = self.conv3(functional.gelu(self.conv2(functional.gelu(self.conv1(grid)))))
        return reduced


class WindowAttention(nn.Module):
    """Attention within a window, with a bias that depends on the distances down and across."""

    distances: Tensor

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.attention_biases = nn.Parameter(torch.zeros(heads, window, window))
        rows, columns = (steps.flatten() for steps in torch.meshgrid(*[torch.arange(window)] * 2, indexing="ij"))
        distances = torch.stack([(along[:, None] - along).abs() for along in (rows, columns)])
        self.register_buffer("distances", distances, persistent=False)

    def forward(self, tokens: Float[Tensor, "window token width"]) -> Float[Tensor, "window token width"]:
        """The checkpoints keep each head's query, key and value rows together."""
        count, length, width = tokens.shape
        projected = self.qkv(self.norm(tokens)).view(count, length, self.heads, 3, width // self.heads)
        query, key, value = projected.permute(3, 0, 2, 1, 4)
        bias = self.attention_biases[:, self.distances[0], self.distances[1]]
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        mixed: Tensor = self.proj(seen.transpose(1, 2).reshape(count, length, width))
        return mixed


class Perceptron(nn.Module):
    """The MLP, with its own norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, EXPANSION * width)
        self.fc2 = nn.Linear(EXPANSION * width, width)

    def forward(self, tokens: Float[Tensor, "*grid width"]) -> Float[Tensor, "*grid width"]:
        """Norm, widen, narrow."""
        narrowed: Tensor = self.fc2(functional.gelu(self.fc1(self.norm(tokens))))
        return narrowed


class AttentionBlock(nn.Module):
    """Window attention, a depthwise convolution across window borders, an MLP."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.attn = WindowAttention(width, heads, window)
        self.local_conv = FrozenNormConvolution(width, width, 3, groups=width)
        self.mlp = Perceptron(width)

    def forward(self, grid: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch channel height width"]:
        """The convolution is the one step without a residual."""
        attended = grid + self._attend(grid.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        tokens = self.local_conv(attended).permute(0, 2, 3, 1)
        mixed: Tensor = tokens + self.mlp(tokens)
        return mixed.permute(0, 3, 1, 2)

    def _attend(self, grid: Float[Tensor, "batch height width channel"]) -> Float[Tensor, "batch height width channel"]:
        """Cut into windows, the last ones padded with zeros, attend within each, and put together again."""
        batch, height, width, channels = grid.shape
        side = self.window
        padded = functional.pad(grid, (0, 0, 0, -width % side, 0, -height % side))
        down, across = padded.shape[1] // side, padded.shape[2] // side
        windows = padded.view(batch, down, side, across, side, channels).transpose(2, 3)
        attended: Tensor = self.attn(windows.reshape(-1, side * side, channels)).view(windows.shape)
        return attended.transpose(2, 3).reshape(padded.shape)[:, :height, :width]


class Stage(nn.Module):
    """Blocks of one width, and the step to the next stage if there is one."""

    def __init__(self, blocks: list[nn.Module], downsample: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample

    def forward(self, grid: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch next height_ width_"]:
        """Blocks in turn."""
        for block in self.blocks:
            grid = block(grid)
        if self.downsample is not None:
            grid = self.downsample(grid)
        return grid


class TinyViT(nn.Module):
    """The encoder, and with labels a linear head for them."""

    mean: Tensor
    std: Tensor

    def __init__(self, config: TinyViTConfig, labels: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.config = config
        self.labels = labels
        self.patch_embed = PatchEmbedding(config.widths[0])
        self.layers = nn.ModuleList(_stage(config, number) for number in range(len(config.widths)))
        self.norm_head = nn.LayerNorm(config.widths[-1])
        self.classifier = nn.Linear(config.widths[-1], len(labels)) if labels else None
        self.register_buffer("mean", torch.tensor(PIXEL_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(PIXEL_STD).view(3, 1, 1), persistent=False)

    def grid(self, pixels: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch channel height_ width_"]:
        """What the last stage sees at every place of normalised pictures."""
        grid = self.patch_embed(pixels)
        for stage in self.layers:
            grid = stage(grid)
        return grid  # type: ignore[no-any-return]

    def features(self, images: UInt8[Tensor, "batch channel height width"]) -> Float[Tensor, "batch feature"]:
        """The mean over the grid, for pictures of any size, grey or in colour."""
        side = self.config.image_size
        pixels = images.float()
        if images.shape[-2:] != (side, side):
            pixels = functional.interpolate(pixels, (side, side), mode="bilinear", antialias=True, align_corners=False)
        normalised = (pixels.expand(-1, 3, -1, -1) - self.mean) / self.std
        pooled: Tensor = self.norm_head(self.grid(normalised).mean((2, 3)))
        return pooled

    def forward(self, images: UInt8[Tensor, "batch channel height width"]) -> Float[Tensor, "batch label"]:
        """A score for every label."""
        assert self.classifier is not None, "an encoder without labels has features only"
        scores: Tensor = self.classifier(self.features(images))
        return scores

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, as Hugging Face folders have them."""
        folder.mkdir(parents=True, exist_ok=True)
        described: dict[str, Any] = {"model_type": "tiny_vit", **asdict(self.config)}
        if self.labels:
            described["id2label"] = dict(enumerate(self.labels))
        (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _stage(config: TinyViTConfig, number: int) -> Stage:
    width, depth = config.widths[number], config.depths[number]
    if number == 0:
        blocks: list[nn.Module] = [Bottleneck(width) for _ in range(depth)]
    else:
        blocks = [AttentionBlock(width, config.heads[number], config.windows[number]) for _ in range(depth)]
    last = number + 1 == len(config.widths)
    return Stage(blocks, None if last else Downsampling(width, config.widths[number + 1], config.strides[number]))


def load(folder: Path) -> TinyViT:
    """The model in a folder, for inference."""
    described = json.loads((folder / "config.json").read_text())
    shape: dict[str, Any] = {field.name: described[field.name] for field in fields(TinyViTConfig)}
    shape = {name: tuple(value) if isinstance(value, list) else value for name, value in shape.items()}
    names = described.get("id2label", {})
    model = TinyViT(TinyViTConfig(**shape), tuple(names[key] for key in sorted(names, key=int)))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def from_checkpoint(tensors: Mapping[str, Tensor], config: TinyViTConfig) -> TinyViT:
    """The encoder of a published checkpoint: its tensors by their own names, attention tables cut to the config's windows.

    The checkpoint's own outputs (`head`, and MobileSAM's `neck`) are not a part of it; every other name must fit.
    """
    model = TinyViT(config)
    encoder = {name: tensor for name, tensor in tensors.items() if name.split(".")[0] not in ("head", "neck")}
    for name, tensor in encoder.items():
        if name.endswith("attention_biases"):
            window = config.windows[int(name.split(".")[1])]
            encoder[name] = crop_attention_biases(tensor, window)
    model.load_state_dict(encoder)
    return model.eval()


def crop_attention_biases(flat: Float[Tensor, "heads distances"], window: int) -> Float[Tensor, "heads {window} {window}"]:
    """The biases of a smaller window. The checkpoints list the distances (down, across) row by row.

    >>> crop_attention_biases(torch.arange(9.0).view(1, 9), 2).tolist()
    [[[0.0, 1.0], [3.0, 4.0]]]
    """
    heads, distances = flat.shape
    side = round(distances**0.5)
    return flat.view(heads, side, side)[:, :window, :window].contiguous()
