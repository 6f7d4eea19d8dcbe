"""A view takes a stored tensor to a method and back."""

from __future__ import annotations

import pytest
import torch

from acemerge.checkpoints.fused import Fused
from acemerge.numerics.frame import Factors
from acemerge.planning.view import View


@pytest.mark.parametrize("view", [View(), View(transposed=True)])
def test_there_and_back(view: View) -> None:
    stored = torch.arange(12.0).view(4, 3)
    assert view.to_stored(view.to_method(stored)).equal(stored)
    assert view.apart() == [view]


def test_a_matrix_stored_in_out_is_seen_out_in() -> None:
    stored = torch.arange(12.0).view(4, 3)
    assert View(transposed=True).to_method(stored).equal(stored.T)
    assert View().to_method(stored) is stored


def joined(view: View, stored: torch.Tensor) -> torch.Tensor:
    """Every matrix to the method and back to its place."""
    whole = torch.full_like(stored, torch.nan)
    for block in view.apart():
        block.put(block.to_stored(block.to_method(stored)).contiguous(), whole)
    return whole


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("fused", [Fused((2, 2, 2)), Fused((4, 1, 1)), Fused((2, 1, 1), 2), Fused((1, 1), 3)], ids=str)
def test_a_fused_matrix_apart_and_together(transposed: bool, fused: Fused) -> None:
    matrices = [torch.full((fused.repeats, part, 5), float(i)) for i, part in enumerate(fused.parts)]
    whole = torch.cat(matrices, 1).flatten(0, 1)
    stored = whole.T.contiguous() if transposed else whole
    view = View(transposed=transposed, fused=fused)
    assert view.to_method(stored).equal(whole), "seen as one until it is taken apart"
    blocks = view.apart()
    assert [block.to_method(stored).tolist() for block in blocks] == [matrix.flatten(0, 1).tolist() for matrix in matrices]
    assert [block.own_shape(tuple(stored.shape)) for block in blocks] == [tuple(block.own(stored).shape) for block in blocks]
    assert joined(view, stored).equal(stored)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("fused", [None, Fused((4, 2)), Fused((1, 1), 3)], ids=str)
def test_a_stack_apart_and_together(transposed: bool, fused: Fused | None) -> None:
    matrices = torch.arange(90.0).view(3, 6, 5)
    stored = matrices.mT.contiguous() if transposed else matrices
    view = View(transposed=transposed, stacked=3, fused=fused)
    blocks, alone = view.apart(), View(transposed=transposed, fused=fused).apart()
    seen = [part.to_method(matrix) for matrix in stored for part in alone]
    assert [block.to_method(stored).tolist() for block in blocks] == [matrix.tolist() for matrix in seen]
    assert [block.own_shape(tuple(stored.shape)) for block in blocks] == [tuple(block.own(stored).shape) for block in blocks]
    assert [block.within_matrix for block in blocks] == alone * 3
    assert [block.matrix for block in blocks] == [expert for expert in range(3) for _ in alone]
    assert joined(view, stored).equal(stored)


def test_a_stack_of_one_is_apart_too() -> None:
    [block] = View(stacked=1).apart()
    assert block.to_method(torch.ones(1, 4, 3)).shape == (4, 3)


def test_orientation_in_words() -> None:
    assert View().orientation == "as stored"
    assert View(transposed=True, fused=Fused((2, 2, 2))).orientation == "stored [in, out], merged as [out, in], as 3 matrices"
    assert View(fused=Fused((4, 1, 1), 2)).orientation == "as stored, as 3 matrices of 8, 2 and 2 outputs that lie in turns"
    assert View(stacked=8).orientation == "8 matrices, each as stored"


@pytest.mark.parametrize("transposed", [False, True])
def test_factors_are_seen_as_their_product_is(transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    factors = Factors(torch.randn(6, 2, generator=generator), torch.randn(2, 9, generator=generator))
    whole = View(transposed=transposed)
    turned = whole.low_rank_to_method(factors)
    assert (turned.left @ turned.right).allclose(whole.to_method(factors.left @ factors.right))
    back = whole.low_rank_to_stored(turned)
    assert back.left.equal(factors.left)
    assert back.right.equal(factors.right)
    outputs = 9 if transposed else 6
    for fused in (Fused((outputs // 3,) * 3), Fused((1, 2), outputs // 3)):
        for block in View(transposed=transposed, fused=fused).apart():
            seen = block.low_rank_to_method(factors)
            assert (seen.left @ seen.right).allclose(block.to_method(factors.left @ factors.right))
