"""The vision domain: MobileSAM's image encoder, a TinyViT of 5 million weights, with a linear head on the mean of its grid."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from acemerge.bench.data.task import Rows, Task
from acemerge.bench.data.vision_packages import MOBILE_SAM
from acemerge.bench.domains import tiny_vit
from acemerge.bench.domains.domain import HEAD
from acemerge.bench.domains.tiny_vit import TinyViT, TinyViTConfig

_ENCODER = "image_encoder."


@dataclass(frozen=True)
class PreparedPictures:
    """All rows as one tensor; a task's pictures have one size and number of channels."""

    images: Tensor
    labels: Tensor

    @cached_property
    def lengths(self) -> Tensor:
        """All the same."""
        return torch.zeros(len(self.labels), dtype=torch.long)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """The pictures of these rows."""
        return {"images": self.images[indices]}


def stack_pictures(rows: Rows) -> PreparedPictures:
    """Channels first; one channel if the pictures are grey."""
    stacked = torch.from_numpy(np.stack(rows.inputs))
    images = stacked.unsqueeze(1) if stacked.ndim == 3 else stacked.permute(0, 3, 1, 2)
    return PreparedPictures(images.contiguous(), torch.tensor(rows.labels))


class VisionDomain:
    """See `Domain`."""

    name = "vision"
    training: Mapping[str, Any] = {}

    def write_base(self, folder: Path) -> None:
        """The encoder, its attention windows cut to what pictures of this size need."""
        checkpoint = torch.load(io.BytesIO(MOBILE_SAM.read("mobilesam/weights/mobile_sam.pt")), weights_only=True)
        encoder = {name.removeprefix(_ENCODER): tensor for name, tensor in checkpoint.items() if name.startswith(_ENCODER)}
        tiny_vit.from_checkpoint(encoder, TinyViTConfig()).save(folder)

    def new_expert(self, base: Path, task: Task) -> nn.Module:
        """The base with a new linear head."""
        encoder = tiny_vit.load(base)
        model = TinyViT(encoder.config, task.classes)
        missing, _ = model.load_state_dict(encoder.state_dict(), strict=False)
        assert all(name.startswith(HEAD) for name in missing), missing
        return _fast(model)

    def load(self, folder: Path) -> nn.Module:
        """An expert, or a merged model with its head."""
        return _fast(tiny_vit.load(folder))

    def save(self, model: nn.Module, folder: Path) -> None:
        """The inverse of `load`."""
        assert isinstance(model, TinyViT)
        model.save(folder)

    def prepare(self, rows: Rows) -> PreparedPictures:
        """Grey pictures have one channel; the model repeats it."""
        return stack_pictures(rows)

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The head's scores."""
        scores: Tensor = model(batch["images"])
        return scores


def _fast(model: TinyViT) -> TinyViT:
    """Channels last: a quarter faster on a processor."""
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
