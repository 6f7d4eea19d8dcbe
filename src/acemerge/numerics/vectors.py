"""Tensors as vectors: whole, or one by row or column; their inner products, and sums of them with coefficients of their own.

What is made of the directions of weights (angles, arcs, means on a sphere) is a sum of the experts whose coefficients depend on
inner products alone. So one pass over a tensor finds the coefficients, another makes the sum, and nothing between the two is
larger than experts x experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.numerics.linalg import row_blocks


def vectors_of(tensors: Float[Tensor, "task *shape"], along: str) -> Float[Tensor, "task m n"]:
    """Each tensor as one vector ("tensor"), or as m of them: along its last axis ("row"), or along its first ("column")."""
    shape = tensors.shape[1:]
    if along == "tensor" or len(shape) < 2:
        return tensors.reshape(len(tensors), 1, math.prod(shape))
    if along == "column":
        return vectors_of(tensors.movedim(1, -1), "row")
    return tensors.reshape(len(tensors), math.prod(shape[:-1]), shape[-1])


def tensor_of(vectors: Float[Tensor, "m n"], shape: torch.Size, along: str) -> Float[Tensor, "*shape"]:
    """The tensor of this shape that `vectors_of` takes apart into these vectors."""
    if along == "column" and len(shape) > 1:
        return vectors.reshape(*shape[1:], shape[0]).movedim(-1, 0).contiguous()
    return vectors.reshape(shape)


def inner_products(
    vectors: Float[Tensor, "task m n"], origin: Float[Tensor, "m n"] | None = None
) -> Float[Tensor, "m task task"]:
    """<x_s, x_t> of each of the m vectors of every two tasks, in float64; x_t = vectors_t, plus the origin if there is one."""
    tasks, m, _ = vectors.shape
    products = torch.zeros(m, tasks, tasks, dtype=torch.float64, device=vectors.device)
    for some, part in _blocks(vectors):
        x = vectors[:, some, part].double()
        if origin is not None:
            x = x + origin[some, part].to(x)
        by_vector = x.transpose(0, 1)
        products[some] += by_vector @ by_vector.mT
    return products


def weighted_vectors(
    vectors: Float[Tensor, "task m n"], coefficients: Float[Tensor, "m task"], origin: Float[Tensor, "m n"] | None = None
) -> Float[Tensor, "m n"]:
    """sum_t c_t x_t in float64, each of the m with coefficients of its own; from the origin, if there is one, to that point.

    With x_t = origin + vectors_t that is sum_t c_t vectors_t + (sum_t c_t - 1) origin.
    """
    total = torch.empty(vectors.shape[1:], dtype=torch.float64, device=vectors.device)
    for some, part in _blocks(vectors):
        own = coefficients[some]
        total[some, part] = torch.einsum("mt,tmn->mn", own, vectors[:, some, part].double())
        if origin is not None:
            total[some, part] += (own.sum(1, keepdim=True) - 1) * origin[some, part].to(total)
    return total


def lengths_and_cosines(
    products: Float[Tensor, "m task task"],
) -> tuple[Float[Tensor, "m task"], Float[Tensor, "m task task"]]:
    """|x_t|, and <x_s, x_t> / (|x_s| |x_t|) within [-1, 1]; 0 where either is zero, as a direction that it does not have."""
    lengths = products.diagonal(dim1=1, dim2=2).sqrt()
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    return lengths, (products * inverse[:, :, None] * inverse[:, None, :]).clamp_(-1, 1)


def _blocks(vectors: Float[Tensor, "task m n"]) -> Iterator[tuple[slice, slice]]:
    """Which vectors, and which part of them, small enough to convert to float64 without doubling a large tensor."""
    tasks, m, n = vectors.shape
    for some in row_blocks(m, tasks * n):
        for part in row_blocks(n, tasks * (some.stop - some.start)):
            yield some, part
