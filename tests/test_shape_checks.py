"""Wrong shapes do not pass unnoticed in these tests: functions, registered methods and dataclasses check theirs."""

from collections.abc import Iterator

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation, BeartypeCallHintReturnViolation, BeartypeDoorHintViolation
from jaxtyping import Float
from torch import Tensor

from acemerge.methods import get_method
from acemerge.methods.average import average
from acemerge.numerics import linalg
from acemerge.numerics.frame import Factors
from shape_checks import checked


def test_arguments_that_do_not_fit_each_other() -> None:
    with pytest.raises(BeartypeCallHintParamViolation, match="add_gram"):
        linalg.add_gram(torch.zeros(3, 3), torch.zeros(5, 4))
    linalg.add_gram(torch.zeros(4, 4), torch.zeros(5, 4))


def test_fields_that_do_not_fit_each_other() -> None:
    with pytest.raises(BeartypeCallHintParamViolation, match="Factors"):
        Factors(torch.zeros(5, 2), torch.zeros(3, 4))


def test_results_that_do_not_fit_the_arguments() -> None:
    def turned(x: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        return x.T

    with pytest.raises(BeartypeCallHintReturnViolation):
        checked(turned)(torch.zeros(2, 3))


def test_registered_methods_are_checked() -> None:
    assert get_method("average").kernel is average
    with pytest.raises(BeartypeCallHintParamViolation, match="average"):
        average(torch.zeros(2, 3, dtype=torch.int64), get_method("average").options({}))


def test_what_a_generator_is_given_is_checked_at_the_call() -> None:
    def rows(x: Float[Tensor, "rows columns"], y: Float[Tensor, "rows columns"]) -> Iterator[Tensor]:
        yield from x + y

    with pytest.raises(BeartypeDoorHintViolation):
        checked(rows)(torch.zeros(2, 3), torch.zeros(3, 3))
    pairs = [checked(rows)(torch.zeros(n, 3), torch.zeros(n, 3)) for n in (2, 4)]
    assert [len(list(pair)) for pair in pairs] == [2, 4], "each has shapes of its own"
