"""A view takes a stored tensor to a method and back."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize("transposed", [False, True])
def test_a_fused_matrix_apart_and_together(transposed: bool) -> None:
    q, k, v = (torch.full((2, 5), float(i)) for i in range(3))
    fused = torch.cat([q, k, v])
    stored = fused.T.contiguous() if transposed else fused
    view = View(transposed=transposed, fused=3)
    assert view.to_method(stored).equal(fused), "seen as one until it is taken apart"
    blocks = view.apart()
    assert [block.to_method(stored).tolist() for block in blocks] == [q.tolist(), k.tolist(), v.tolist()]
    assert [block.own_shape(tuple(stored.shape)) for block in blocks] == [tuple(block.own(stored).shape) for block in blocks]
    joined = view.together([block.to_stored(block.to_method(stored)) for block in blocks])
    assert joined.equal(stored)


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
    for block in View(transposed=transposed, fused=3).apart():
        seen = block.low_rank_to_method(factors)
        assert (seen.left @ seen.right).allclose(block.to_method(factors.left @ factors.right))
