"""The digits domain: a small vision transformer that has learnt, without labels, to restore damaged pictures of 8 pixels.

An expert's head is set before fine-tuning, from what the base already sees (the mean feature of every class), and stays fixed
while the rest learns: as with CLIP, whose heads come from its text encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from acemerge.bench.data.digit_questions import QUESTIONS
from acemerge.bench.data.task import Rows, Task
from acemerge.bench.domains.text import quiet_transformers
from acemerge.bench.domains.vision import PreparedPictures, stack_pictures
from acemerge.numerics.threads import torch_at_rest

PIXELS = 8
HEAD_SCALE = 10.0


@dataclass(frozen=True)
class Pretraining:
    """What the base depends on."""

    hidden_size: int = 96
    layers: int = 3
    attention_heads: int = 4
    patch_size: int = 4
    steps: int = 1200
    batch_size: int = 64
    rate: float = 1e-3
    weight_decay: float = 0.05
    damaged_share: float = 0.25

    def new_model(self) -> Any:
        """With random weights."""
        from transformers import ViTConfig, ViTModel

        config = ViTConfig(
            image_size=PIXELS,
            patch_size=self.patch_size,
            num_channels=1,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.attention_heads,
            intermediate_size=4 * self.hidden_size,
        )
        return ViTModel(config, add_pooling_layer=False)


@dataclass(frozen=True)
class DigitsDomain:
    """See `Domain`."""

    pretraining: Pretraining = Pretraining()
    name: str = "digits"

    @property
    def training(self) -> Mapping[str, Any]:
        """The head is not trained."""
        return {"head_scale": HEAD_SCALE}

    def write_base(self, folder: Path) -> None:
        """Pretrain on the training pictures; validation and test pictures are never seen."""
        quiet_transformers()
        pictures = stack_pictures(QUESTIONS[0].load().train)
        with torch_at_rest():  # threads on such small matrices mostly wait for each other
            pretrain(pictures.images, self.pretraining, seed=0).save_pretrained(folder)

    def with_head(self, base: Path, classes: Sequence[str]) -> Any:
        """The base with a random head."""
        from transformers import ViTForImageClassification

        quiet_transformers()
        names = dict(enumerate(classes))
        label2id = {name: index for index, name in names.items()}
        return ViTForImageClassification.from_pretrained(base, id2label=names, label2id=label2id)

    def new_expert(self, base: Path, task: Task) -> nn.Module:
        """The base with a head for what it sees in the training pictures."""
        model = self.with_head(base, task.classes)
        rows = stack_pictures(task.load().train)
        model.classifier = nearest_mean_head(class_token(model.vit, rows.images), rows.labels, HEAD_SCALE).requires_grad_(False)
        expert: nn.Module = model
        return expert

    def load(self, folder: Path) -> nn.Module:
        """An expert, or a merged model with its head."""
        from transformers import ViTForImageClassification

        quiet_transformers()
        model: nn.Module = ViTForImageClassification.from_pretrained(folder)
        return model

    def save(self, model: nn.Module, folder: Path) -> None:
        """As transformers does."""
        saved: Any = model
        saved.save_pretrained(folder)

    def prepare(self, rows: Rows) -> PreparedPictures:
        """Stack."""
        return stack_pictures(rows)

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The head's scores."""
        scores: Tensor = model(batch["images"]).logits
        return scores


def pretrain(images: Tensor, settings: Pretraining, seed: int) -> Any:
    """Learn to restore pictures with pixels wiped out, from the class token alone, so that it comes to hold the picture."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = settings.new_model().train()
    decoder = nn.Linear(settings.hidden_size, images[0].numel())

    def restoration_loss(batch: Tensor) -> Tensor:
        whole = shift(images[batch], generator)
        wiped = torch.rand(whole.shape, generator=generator) < settings.damaged_share
        restored = decoder(model(whole.masked_fill(wiped, -1.0)).last_hidden_state[:, 0])
        return functional.mse_loss(restored, whole.flatten(1))

    minimise(
        map(restoration_loss, batches(len(images), settings.batch_size, settings.steps, generator)),
        [*model.parameters(), *decoder.parameters()],
        settings.steps,
        settings.rate,
        settings.weight_decay,
    )
    return model


def batches(count: int, size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Random indices, with replacement."""
    return (torch.randint(count, (size,), generator=generator) for _ in range(steps))


def minimise(losses: Iterable[Tensor], parameters: list[nn.Parameter], steps: int, rate: float, weight_decay: float) -> None:
    """One optimiser step for each loss, which is computed only when its turn comes."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, cycle_momentum=False)
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Every picture moved by up to one pixel each way, with paper coming in at the edge."""
    padded = functional.pad(images, (1, 1, 1, 1), value=-1.0)
    top, left = torch.randint(3, (2, len(images), 1, 1), generator=generator)
    side = torch.arange(images.shape[-1])
    which = torch.arange(len(images)).view(-1, 1, 1)
    return padded[which, 0, top + side.view(1, -1, 1), left + side.view(1, 1, -1)].unsqueeze(1)


@torch.no_grad()
def class_token(backbone: nn.Module, images: Tensor) -> Tensor:
    """The features that a head sees, [picture, hidden]."""
    features: Tensor = backbone.train(False)(images).last_hidden_state[:, 0]
    return features


def nearest_mean_head(features: Tensor, answers: Tensor, scale: float) -> nn.Linear:
    """A head that says which class has the nearest mean feature: a logit is minus the squared distance to it, scaled.

    |f - m|^2 = |f|^2 - 2 f.m + |m|^2, and |f|^2 is the same for every class, so a linear head can say it.
    """
    means = torch.stack([features[answers == label].mean(0) for label in range(int(answers.max()) + 1)])
    spread = (features - features.mean(0)).square().sum(1).mean()
    head = nn.Linear(means.shape[1], means.shape[0])
    head.weight.data = means * (2 * scale / spread)
    head.bias.data = means.square().sum(1) * (-scale / spread)
    return head
