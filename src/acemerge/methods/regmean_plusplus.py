"""RegMean++: RegMean whose layers' inputs come through the merged model so far, block by block."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from acemerge.methods.registry import Context, Merged, method
from acemerge.methods.regmean import OffDiagonal, RegMeanOptions, regmean


@dataclass(frozen=True)
class RegMeanPlusPlusOptions(RegMeanOptions):
    """The authors' a and number of rows."""

    off_diagonal: OffDiagonal = 0.95


@method(
    "regmean_plusplus",
    title="RegMean++",
    paper="Nguyen et al., RegMean++: enhancing effectiveness and generalization of regression mean, 2025",
    touches="blocks",
    uses="data",
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
