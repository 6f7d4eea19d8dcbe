"""NearSwap: one expert's small changes whole, its large ones cut to a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.errors import InputError
from acemerge.methods.registry import Context, Options, method


@dataclass(frozen=True)
class NearswapOptions(Options):
    """The bound is that of the model with which the method was published; mergekit has no default."""

    t: Annotated[float, Field(ge=0, allow_inf_nan=False, description="how far an entry may go from the base's value")] = 1e-4


@method(
    "nearswap",
    title="NearSwap",
    paper="alchemonaut, QuartetAnemoi-70B-t0.0001, Hugging Face, 2024; as mergekit has it",
    touches="all",
    experts=1,
    elementwise=True,
)
def nearswap(task_vectors: Float[Tensor, "task *shape"], options: NearswapOptions, context: Context) -> Float[Tensor, "*shape"]:
    """One expert's values where they are near the base's: M = tau cut to [-t, t], on every floating-point tensor.

    Entries that differ by less than t are taken from the expert, the others go t towards it.
    """
    if len(task_vectors) != 1:
        experts = ", ".join(context.experts)
        raise InputError(f"tensor '{context.tensor}': nearswap takes exactly 1 expert, not {len(task_vectors)} ({experts})")
    return task_vectors[0].clamp(-options.t, options.t)
