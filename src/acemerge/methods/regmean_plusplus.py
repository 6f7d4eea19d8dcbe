"""RegMean++: RegMean whose layers' inputs come through the merged model so far, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.calibration.layer_inputs import LayerInputs
from acemerge.calibration.layout import BEFORE, read_layout
from acemerge.calibration.measured import Measured, Tensors, keep
from acemerge.calibration.run import DataRun, ExpertModel
from acemerge.checkpoints.formats.registry import WeightsFile
from acemerge.methods.registry import Context, Merged, method
from acemerge.methods.regmean import OffDiagonal, RegMeanOptions, regmean
from acemerge.planning.plan import PlannedTensor
from acemerge.tensors.task_vectors import merge_tensor


@dataclass(frozen=True)
class RegMeanPlusPlusOptions(RegMeanOptions):
    """The authors' a and number of rows."""

    off_diagonal: OffDiagonal = 0.95


class _Reached(Exception):  # noqa: N818
    """The block of interest is done; the rest of the model has nothing to add."""


@dataclass(frozen=True)
class _Stack:
    """One model whose first blocks are merged already, and the plan's tensors by the block they belong to."""

    run: DataRun
    model: ExpertModel
    blocks: list[torch.nn.Module]
    tensors: dict[int, list[PlannedTensor]]

    def install_merged(self, place: int, measured: Measured) -> None:
        """Merge the tensors of one place exactly as the merge itself will, and put them into the model."""
        for planned in self.tensors[place]:
            self.model.install(planned.name, merge_tensor(self.run.plan, planned, self.run.device, measured).value)

    def install_expert(self, place: int, expert: int) -> None:
        """Expert t's own block on the merged blocks below it."""
        checkpoint, names = self.run.experts[expert], self.run.backbone_names(expert)
        for planned in self.tensors[place]:
            if planned.name in names:
                self.model.install(planned.name, checkpoint.read(names[planned.name]))


def measure_block_by_block(run: DataRun, options: RegMeanPlusPlusOptions) -> Measured:
    """Each expert's Gram matrices for block l, its inputs having come through the merged blocks before l."""
    stack = _open_stack(run)
    files: dict[str, list[WeightsFile]] = {expert.name: [] for expert in run.experts}
    measured = Measured(files)
    stack.install_merged(BEFORE, measured)
    for place in range(len(stack.blocks)):
        run.progress.say(f"inputs of block {place + 1} of {len(stack.blocks)} behind the merged blocks before it")
        for index, expert in enumerate(run.experts):
            key = ["merged inputs", options.off_diagonal, options.rows, place, index, _key(run, options.rows)]
            files[expert.name].append(keep(key, partial(_block_grams, stack, place, index, options.rows)))
        if place < len(stack.blocks) - 1:
            stack.install_merged(place, measured)
    return measured


def _key(run: DataRun, rows: int) -> list[Any]:
    """The merged blocks depend on all experts, on the base, and on what the plan does to every tensor."""
    fates = [[t.name, t.action, t.method, t.output_dtype] for t in run.plan.tensors]
    return [run.hashes[run.plan.base.name], fates, *(run.key(index, rows) for index in range(len(run.experts)))]


def _open_stack(run: DataRun) -> _Stack:
    """The first expert's model serves for all: what is its own, the head, is never reached."""
    model = run.load(0)
    layout, names = read_layout(model.module, run.experts[0]), run.backbone_names(0)
    tensors: dict[int, list[PlannedTensor]] = {place: [] for place in range(BEFORE, layout.blocks + 1)}
    for planned in run.plan.tensors:
        if planned.name in model.owners:
            tensors[layout.places[names[planned.name]]].append(planned)
    blocks = model.module.get_submodule(layout.stacks[0])
    return _Stack(run, model, list(blocks.children()), tensors)


@torch.inference_mode()
def _block_grams(stack: _Stack, place: int, expert: int, rows: int) -> Tensors:
    stack.install_expert(place, expert)
    layers = [t.name for t in stack.tensors[place] if t.method == "regmean_plusplus" and t.action == "merged"]
    seen = LayerInputs()
    with seen.watching(stack.model, layers), _stopping_after(stack.blocks[place]):
        for batch in stack.run.inputs(expert, rows).batches():
            seen.begin(batch, stack.model.module)
            try:
                stack.run.run(expert, stack.model, batch)
            except _Reached:
                continue
    return dict(seen.grams())


@contextmanager
def _stopping_after(block: torch.nn.Module) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _Reached

    handle = block.register_forward_hook(stop)
    try:
        yield
    finally:
        handle.remove()


@method(
    "regmean_plusplus",
    title="RegMean++",
    paper="Nguyen et al., RegMean++: enhancing effectiveness and generalization of regression mean, 2025",
    touches="blocks",
    measure=measure_block_by_block,
    flops=lambda tasks, rows, columns: columns**3 / 3 + 2.0 * (tasks + 1) * rows * columns**2,
    float64_elements=lambda tasks, rows, columns: 3.0 * columns**2 + 2.0 * rows * columns,  # noqa: ARG005
    measured_elements=lambda tasks, rows, columns: 1.0 * columns**2,  # noqa: ARG005
)
def regmean_plusplus(task_vectors: Float[Tensor, "task out in"], options: RegMeanPlusPlusOptions, context: Context) -> Merged:
    """Uses data. RegMean, block by block: each block's inputs have come through the merged blocks before it.

    RegMean measures a layer's inputs in the expert, where all layers below are the expert's own; in the merged model they are
    not. Here the layers below are the merged ones. What comes after the last block keeps the base's value.
    """
    result = regmean(task_vectors, options, context)
    assert isinstance(result, Merged)
    return result
