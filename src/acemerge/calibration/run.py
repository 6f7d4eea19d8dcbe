"""What a method's measurement gets: the plan, the experts' models and inputs, and a name for everything they depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from acemerge.calibration.inputs import Batch, Inputs
from acemerge.calibration.layout import Owner, all_tensors, owners_of, read_layout
from acemerge.calibration.source import Data
from acemerge.checkpoints.families import align_names
from acemerge.checkpoints.folder import Checkpoint
from acemerge.errors import AcemergeError, InputError, first_line
from acemerge.planning.plan import Plan
from acemerge.planning.progress import Progress
from acemerge.planning.tensor import ComputedTensor


@dataclass(frozen=True)
class ExpertModel:
    """An expert's model, ready to run, and where in it each of the base's tensors is."""

    module: nn.Module
    owners: Mapping[str, Sequence[Owner]]
    """By the base's name: the modules that hold it. A tensor that the model does not use is not here."""

    def tensor(self, name: str) -> Tensor:
        """The model's own value of one of the base's tensors."""
        module, attribute = self.owners[name][0]
        value: Tensor = getattr(module, attribute)
        return value

    @torch.no_grad()
    def install(self, name: str, value: Tensor) -> None:
        """Put another value in its place. One of another shape, such as a kept vocabulary's, cannot be."""
        if value.shape == self.tensor(name).shape:
            self.tensor(name).copy_(value)


@dataclass(frozen=True)
class DataRun:
    """One measurement, for the tensors that one method merges with one set of options."""

    plan: Plan
    tensors: Sequence[ComputedTensor]
    hashes: Mapping[str, Mapping[str, str]]
    """Hash of every model's files."""
    device: torch.device
    progress: Progress

    @cached_property
    def data(self) -> Data:
        """What the plan was made with: the plan itself knows no more than its name."""
        assert isinstance(self.plan.data, Data)
        return self.plan.data

    @property
    def experts(self) -> Sequence[Checkpoint]:
        """In the order of the task vectors."""
        return self.plan.experts

    def stored_names(self, expert: int) -> dict[str, str]:
        """Name in the base -> name in this expert's files, of the tensors that this method merges."""
        sources = ((tensor.name, source) for tensor in self.tensors for source in tensor.experts)
        return {name: source.name for name, source in sources if source.expert == expert and source.name}

    def backbone_names(self, expert: int) -> dict[str, str]:
        """The same of all tensors but this expert's own head: those that are averaged or kept, too."""
        checkpoint = self.experts[expert]
        own = {name for head in self.plan.heads if head.expert == expert for name in head.tensors}
        aligned = align_names(self.plan.base.tensors, checkpoint.tensors)
        return {ours: theirs for theirs, ours in aligned.items() if theirs not in own}

    def inputs(self, expert: int, rows: int) -> Inputs:
        """This expert's rows."""
        return self.data.inputs(self.experts[expert], rows)

    def key(self, expert: int, rows: int) -> list[Any]:
        """Everything that what this expert's model does with its rows depends on."""
        model = self.experts[expert]
        inputs = self.inputs(expert, rows).sha256
        return [self.hashes[model.name], model.config, self.data.reader, inputs, self.stored_names(expert)]

    def load(self, expert: int) -> ExpertModel:
        """This expert's model, in float32 (float64 if it is stored so), checked against its files."""
        checkpoint = self.experts[expert]
        module = self.data.load(checkpoint)
        module.requires_grad_(False)
        layout, tensors, owners = read_layout(module, checkpoint), all_tensors(module), owners_of(module)
        names = self.backbone_names(expert)
        found: dict[str, Sequence[Owner]] = {}
        for planned in self.plan.tensors:
            stored = names.get(planned.name, "")
            if stored in layout.memory:
                value = tensors[layout.memory[stored]]
                _check_same(checkpoint, stored, value)
                found[planned.name] = owners[id(value)]
        module.to(self.device).eval()
        return ExpertModel(module, found)

    def run(self, expert: int, model: ExpertModel, batch: Batch) -> None:
        """Run a model on one batch."""
        with self._explained(expert):
            self.data.run(model.module, self._placed(batch, model))

    def logits(self, expert: int, model: ExpertModel, batch: Batch) -> Tensor:
        """[answer, class]: one answer per row, or per token of a model that answers for every token. Padding does not count."""
        with self._explained(expert):
            batch = self._placed(batch, model)
            logits = self.data.logits(model.module, batch)
        if logits.dim() == 2:
            return logits
        mask = batch.get("attention_mask")
        real = mask.bool() if mask is not None and mask.shape == logits.shape[:2] else torch.ones(logits.shape[:2]).bool()
        return logits[real.to(logits.device)]

    def _placed(self, batch: Batch, model: ExpertModel) -> Batch:
        """Where the model is, and numbers in its precision."""
        precision = next(model.module.parameters()).dtype
        return {
            name: tensor.to(self.device, precision if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in batch.items()
        }

    @contextmanager
    def _explained(self, expert: int) -> Iterator[None]:
        """A model can fail on its inputs in any way; the user needs one sentence."""
        try:
            yield
        except (AcemergeError, MemoryError):
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            if "allocate memory" in str(error):
                raise
            model = f"the model of expert {self.experts[expert].where}"
            raise InputError(
                f"--data ({self.data.about}): {model} cannot run on its rows ({first_line(error)}); give rows that it takes"
            ) from None


def _check_same(checkpoint: Checkpoint, stored: str, value: Tensor) -> None:
    if not torch.allclose(checkpoint.read(stored).to(value.dtype), value, rtol=0, atol=0, equal_nan=True):
        raise InputError(
            f"expert {checkpoint.where}: its model does not hold '{stored}' as its file does, so what is measured would not be "
            "the expert's; save it again with this version of transformers"
        )
