"""Any domain with LoRA adapters for experts: PEFT folders of factors and a head, trained on a base that stays as it is."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from acemerge.adapters.adapter import is_adapter
from acemerge.bench.data.task import Rows, Task
from acemerge.bench.domains.domain import HEAD, Prepared, TrainableDomain, is_of_head
from acemerge.bench.measure.experts import Experts


@dataclass(frozen=True)
class Lora:
    """What an adapter changes: its factors have `rank` columns, and their product counts `alpha / rank` times."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    """The last part of the modules' names."""

    def adapt(self, model: nn.Module) -> Any:
        """The model with new factors, wrapped by PEFT. Its head is saved with them, and is trained if it was to be."""
        from peft import LoraConfig, get_peft_model

        head_learns = any(p.requires_grad for name, p in model.named_parameters() if is_of_head(name))
        head = HEAD.removesuffix(".")
        config = LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=list(self.targets), modules_to_save=[head])
        adapted = get_peft_model(model, config)
        if not head_learns:
            for name, parameter in adapted.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and not is_of_head(name))
        return adapted


class AdaptableDomain(TrainableDomain, Protocol):
    """One whose models can be built around an adapter."""

    def with_head(self, base: Path, classes: Sequence[str]) -> nn.Module:
        """The base with a head whose values do not matter."""


@dataclass(frozen=True)
class LoraDomain:
    """See `Domain`."""

    name: str
    inner: AdaptableDomain
    """Base, rows and logits are those of this domain."""
    lora: Lora

    @property
    def training(self) -> Mapping[str, Any]:
        """The adapter's shape, as JSON reads it back."""
        return {**self.inner.training, "lora": {**asdict(self.lora), "targets": list(self.lora.targets)}}

    def write_base(self, folder: Path) -> None:
        """The same."""
        self.inner.write_base(folder)

    def new_expert(self, base: Path, task: Task) -> nn.Module:
        """A new adapter and head. Factors start from random numbers, each task's from its own, as if somebody else trained it."""
        torch.manual_seed(zlib.crc32(f"{torch.initial_seed()} {task.name}".encode()))
        model: nn.Module = self.lora.adapt(self.inner.new_expert(base, task))
        return model

    def load(self, folder: Path) -> nn.Module:
        """An adapter on its base, added to the weights; or a merged model with its head."""
        if not is_adapter(folder):
            return self.inner.load(folder)
        from peft import PeftModel

        model = self.inner.with_head(Experts(self, 0).base, _classes(folder))
        loaded: nn.Module = PeftModel.from_pretrained(model, folder).merge_and_unload()
        return loaded

    def save(self, model: nn.Module, folder: Path) -> None:
        """As PEFT does."""
        saved: Any = model
        saved.save_pretrained(str(folder))

    def prepare(self, rows: Rows) -> Prepared:
        """The same."""
        return self.inner.prepare(rows)

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The same."""
        return self.inner.logits(model, batch)


def _classes(adapter: Path) -> list[str]:
    """As many as the saved head has; an adapter does not keep their names."""
    from peft import load_peft_weights

    weights = load_peft_weights(str(adapter), device="cpu")
    (head,) = (tensor for name, tensor in weights.items() if is_of_head(name) and name.endswith("weight"))
    return [str(index) for index in range(len(head))]
