"""Twin-Merging, its static part: a shared model and each task's exclusive knowledge, compressed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Merged, Options, method
from acemerge.numerics.linalg import leading_directions, weighted_sum
from acemerge.numerics.thresholds import count_of_share


@dataclass(frozen=True)
class TwinOptions(Options):
    """Defaults are the authors' mask rate of 0.9, and task arithmetic's scale."""

    rank_share: Annotated[
        float, Field(ge=0, le=1, description="share of singular directions kept of what is a task's own; 1 - the mask rate")
    ] = 0.1
    alpha: Annotated[
        float, Field(allow_inf_nan=False, description="scale of the shared model, theta_S = W0 + alpha * sum_t tau_t")
    ] = 0.3


def exclusive(rest: Float[Tensor, "*shape"], rank_share: float) -> Mapping[str, Tensor]:
    """E_t = SVD_k(W_t - theta_S), as factors where these are smaller than E_t; what is not a matrix is kept whole."""
    if rank_share == 0:
        return {}
    if rest.dim() != 2 or rank_share == 1:
        return {"delta": rest}
    rows, columns = rest.shape
    k = max(1, count_of_share(min(rows, columns), rank_share))
    leading = leading_directions(rest, min(k, rows, columns))
    roots = leading.values.sqrt()
    left, right = leading.left * roots, (leading.right * roots).T
    return {"left": left, "right": right} if k * (rows + columns) < rows * columns else {"delta": left @ right}


def _flops(tasks: int, rows: int, columns: int) -> float:
    """Of each task, the smaller Gram matrix and its leading tenth of eigenpairs."""
    small = min(rows, columns)
    return tasks * (1.2 * rows * columns * small + 3.0 * small**3)


def _parts_elements(options: TwinOptions, tasks: int, rows: int, columns: int) -> float:
    """Of each task, the factors, or E_t itself where that is smaller."""
    k = max(1, count_of_share(min(rows, columns), options.rank_share))
    return float(tasks * min(k * (rows + columns), rows * columns))


@method(
    "twin",
    title="Twin-Merging, static part",
    paper="Lu et al., Twin-Merging: Dynamic Integration of Modular Expertise in Model Merging, NeurIPS 2024",
    touches="all",
    per_task=True,
    flops=_flops,
    float64_elements=lambda tasks, rows, columns: (
        2.5 * rows * columns + min(rows, columns) ** 2 + 0.2 * tasks * min(rows, columns) * (rows + columns)
    ),
    parts_elements=_parts_elements,
)
def twin(task_vectors: Float[Tensor, "task *shape"], options: TwinOptions) -> Merged:
    """ONE MODEL PER TASK, not one merged model: theta_S + E_t, a shared task-arithmetic model and low-rank factors per task.

    theta_S = W0 + alpha sum_t tau_t, and E_t = SVD_k(W_t - theta_S) per matrix; biases, norms and other tensors that are not
    matrices keep E_t whole, so they are the expert's own. The paper's router, which mixes the E_t for each input, needs data and
    is not part of this. The model at the output's root is theta_S; `acemerge task` makes a task's model. Compare it with other
    one-model-per-task methods only.
    """
    M = weighted_sum(task_vectors, [1.0] * len(task_vectors))
    parts = [exclusive(tau - options.alpha * M, options.rank_share) for tau in task_vectors]
    return Merged(M, parts=parts)
