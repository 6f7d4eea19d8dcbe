"""What methods that join directions share: whether these are of the experts' changes or of their whole weights."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.registry import Context
from acemerge.numerics.vectors import vectors_of

Joined = Annotated[
    Literal["changes", "weights"], Field(description="x_t: the experts' changes tau_t, or their whole weights W_t")
]


def origin_of(joined: str, context: Context, along: str = "tensor") -> Float[Tensor, "m n"] | None:
    """What is added to task vectors to get what is joined: W0 for whole weights, if there is a base; otherwise nothing."""
    if joined == "changes" or context.base is None:
        return None
    return vectors_of(context.base[None], along)[0]
