"""The inputs that linear layers get, as Gram matrices that grow batch by batch: no activation is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from acemerge.calibration.inputs import Batch
from acemerge.calibration.run import ExpertModel
from acemerge.numerics.linalg import add_gram, mirror_lower


@dataclass
class LayerInputs:
    """By tensor of the base: sum of x x^T over the inputs x of the layers that hold it, and how many there were."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    real: Tensor | None = None
    """Of the batch under way, which tokens are not padding."""

    @contextmanager
    def watching(self, model: ExpertModel, names: Sequence[str]) -> Iterator[None]:
        """See everything that comes to these layers, however often and by however many modules they are called."""
        with ExitStack() as hooks:
            for name in names:
                for module, _ in model.owners[name]:
                    handle = module.register_forward_pre_hook(lambda _, given, name=name: self._observe(name, given[0]))
                    hooks.callback(handle.remove)
            yield

    def begin(self, batch: Batch, model: nn.Module) -> None:
        """Another batch comes. Where encoder and decoder have tokens of their own, all of them count."""
        mask = batch.get("attention_mask")
        two_sided = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        self.real = mask.bool() if mask is not None and mask.dim() == 2 and not two_sided else None

    def _observe(self, name: str, inputs: Tensor) -> None:
        x = self._without_padding(inputs.detach()).double().contiguous()
        if name not in self.sums:
            self.sums[name] = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
            self.counts[name] = 0
        add_gram(self.sums[name], x)
        self.counts[name] += len(x)

    def _without_padding(self, x: Tensor) -> Tensor:
        """[input, feature]."""
        if self.real is not None and x.dim() == 3 and x.shape[:2] == self.real.shape:
            return x[self.real.to(x.device)]
        flat = x.reshape(-1, x.shape[-1])
        if self.real is not None and x.dim() == 2 and len(flat) == self.real.numel() != len(self.real):
            return flat[self.real.reshape(-1).to(x.device)]
        return flat

    def grams(self) -> Mapping[str, Tensor]:
        """G = mean of x x^T, in float64, of every layer that got any input."""
        return {name: mirror_lower(total).div_(self.counts[name]).cpu() for name, total in self.sums.items() if self.counts[name]}
