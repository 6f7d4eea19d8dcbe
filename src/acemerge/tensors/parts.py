"""What methods with one model per task write beside the output: each expert's own parts, and what all of them refer to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from acemerge.methods import Merged
from acemerge.numerics.frame import Factors
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import ComputedTensor
from acemerge.tensors.task_vectors import expert_names


def to_stored(merged: Tensor, planned: ComputedTensor, dtype: torch.dtype) -> Tensor:
    """What a method made, as it is written."""
    return planned.fate.view.to_stored(merged).to("cpu", dtype).reshape(planned.header.shape).contiguous()


def task_parts(plan: Plan, planned: ComputedTensor, merged: Merged) -> dict[str, dict[str, Tensor]]:
    """What is each expert's own, by its name; an expert that has nothing of its own is left out."""
    names = expert_names(plan, planned)
    stored = {expert: _stored_parts(own, planned) for expert, own in zip(names, merged.parts, strict=bool(merged.parts))}
    return {expert: own for expert, own in stored.items() if own}


def shared_vector(planned: ComputedTensor, merged: Merged) -> dict[str, Tensor]:
    """The vector that masks refer to; a copy, because the merged task vector may be the same memory."""
    if merged.shared is None:
        return {}
    return {"vector": to_stored(merged.shared, planned, _parts_dtype(planned)).clone()}


def lost_by_rounding(planned: ComputedTensor, exact: Tensor, value: Tensor) -> dict[str, Tensor]:
    """What a half-precision output lost of the shared model.

    A task's model is made from the shared one. Rounded twice it would carry noise as large as a small change of weights;
    these 8 further bits per entry leave the one rounding that its dtype needs.
    """
    if planned.output_dtype not in ("float16", "bfloat16"):
        return {}
    return {"lost": (to_stored(exact, planned, exact.dtype) - value).to(torch.bfloat16)}


def _parts_dtype(planned: ComputedTensor) -> torch.dtype:
    """Half precision would lose the small numbers that parts are made of."""
    return torch.float64 if planned.output_dtype == "float64" else torch.float32


def _stored_parts(parts: Mapping[str, Tensor], planned: ComputedTensor) -> dict[str, Tensor]:
    """One expert's parts of one tensor as they are written: in the stored layout, masks as packed bits."""
    dtype = _parts_dtype(planned)
    stored: dict[str, Tensor] = {}
    if "left" in parts:
        factors = planned.fate.view.low_rank_to_stored(Factors(parts["left"], parts["right"]))
        stored |= {"left": factors.left.to("cpu", dtype).contiguous(), "right": factors.right.to("cpu", dtype).contiguous()}
    if "delta" in parts:
        stored["delta"] = to_stored(parts["delta"], planned, dtype)
    if "mask" in parts:
        mask = to_stored(parts["mask"], planned, torch.bool)
        stored["mask"] = torch.from_numpy(np.packbits(mask.numpy()))
        stored["scale"] = parts["scale"].to("cpu", torch.float64)
    return stored
