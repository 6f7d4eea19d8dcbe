"""CLIP: a model is an image encoder with its projection, and the classes are texts that a picture is compared with.

A model's logits are the cosines of a picture's embedding with the classes' embeddings, times the temperature. The classes come
with the rows, so a merged encoder needs no head, and no head is ever merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from acemerge.bench.data.task import Rows
from acemerge.bench.domains.heads import Heads
from acemerge.bench.domains.open_clip import is_open_clip, vision_settings, vision_tensors
from acemerge.bench.domains.text import quiet_transformers
from acemerge.checkpoints.folder import Checkpoint, open_checkpoint
from acemerge.errors import InputError

_VISION = "vision_model."
_PROJECTION = "visual_projection.weight"


@dataclass(frozen=True)
class PreparedImages:
    """Pictures, decoded and scaled when their batch is asked for, and the classes they are compared with."""

    images: Sequence[Any]
    labels: Tensor
    classes: Tensor
    processor: Any

    @cached_property
    def lengths(self) -> Tensor:
        """All the same."""
        return torch.zeros(len(self.labels), dtype=torch.long)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Scaled, cropped and normalised as OpenAI did."""
        pictures = [self.images[index].convert("RGB") for index in indices.tolist()]
        pixels: Tensor = self.processor(images=pictures, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "classes": self.classes}


@dataclass(frozen=True)
class ClipDomain:
    """See `Domain`."""

    name: str
    clip: Path | None
    """A folder of the whole pretrained CLIP, for the projection that fine-tuned encoders in transformers' layout lack."""
    heads: Heads
    image_size: int

    def load(self, folder: Path) -> nn.Module:
        """The encoder of a folder or file in transformers' or OpenCLIP's layout."""
        from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

        quiet_transformers()
        checkpoint = open_checkpoint(folder, folder.name)
        if is_open_clip(checkpoint.tensors):
            config, tensors = CLIPVisionConfig(**vision_settings(checkpoint)), vision_tensors(checkpoint)
        else:
            config, tensors = vision_config(checkpoint), self._tensors(checkpoint)
            config.projection_dim = len(tensors.get(_PROJECTION, ()))
        loaded: Any = CLIPVisionModelWithProjection.from_pretrained(
            None, config=config, state_dict=tensors, output_loading_info=True
        )
        model, report = loaded
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"])[:3])
            raise InputError(f"{folder}: not a whole CLIP image encoder; it lacks {missing}")
        encoder: nn.Module = model
        return encoder

    def _tensors(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """With or without the prefix; a whole CLIP's text side is left out."""
        prefixed = any(name.startswith(_VISION) for name in checkpoint.tensors)
        inner = {name for name in checkpoint.tensors if name.startswith(_VISION) or not prefixed}
        wanted = {name for name in inner if not name.endswith("position_ids") and name != _PROJECTION}
        tensors = {_VISION + name.removeprefix(_VISION): checkpoint.read(name).float() for name in wanted}
        projected = checkpoint if _PROJECTION in checkpoint.tensors else None
        if projected is None and self.clip is not None:
            projected = open_checkpoint(self.clip, self.clip.name)
        return tensors | ({_PROJECTION: projected.read(_PROJECTION).float()} if projected else {})

    def prepare(self, rows: Rows) -> PreparedImages:
        """Find the classes' embeddings; pictures wait for their batch."""
        assert rows.prompts is not None
        classes = self.heads.of(rows.prompts)
        labels = torch.tensor(list(map(int, rows.labels)))
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
            raise InputError(
                f"{rows.prompts.task}: labels from {int(labels.min())} to {int(labels.max())}, but {len(classes)} classes; these "
                "are not the data of this task"
            )
        return PreparedImages(rows.inputs, labels, classes, _processor(self.image_size))

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Cosines times the temperature."""
        embedded: Tensor = model(pixel_values=batch["pixel_values"]).image_embeds
        return normalize(embedded) @ batch["classes"].T


def vision_config(checkpoint: Checkpoint) -> Any:
    """Of an image encoder, or of a whole CLIP's."""
    from transformers import CLIPVisionConfig

    if not str(checkpoint.config.get("model_type", "")).startswith("clip"):
        raise InputError(f"{checkpoint.where}: its config.json describes no CLIP model")
    assert checkpoint.folder is not None  # where its config.json is
    config: Any = CLIPVisionConfig.from_pretrained(checkpoint.folder)
    config.dtype = None  # weights are read as float32
    return config


def _processor(size: int) -> Any:
    """OpenAI's scaling, cropping and normalisation, by Pillow whether torchvision is there or not: the two scale differently."""
    import transformers

    by_pillow = "CLIPImageProcessorPil"
    kind = getattr(transformers, by_pillow if hasattr(transformers, by_pillow) else "CLIPImageProcessor")
    return kind(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
