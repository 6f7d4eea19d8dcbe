"""Theorem 1 of the paper, on a linear layer trained by SGD (demos/theorem.py)."""

from scripts import load_script

theorem = load_script("demos/theorem.py")


def test_weight_change_reveals_the_input_covariance_when_residuals_are_independent() -> None:
    assert theorem.measure(distance=0.0) > 0.97


def test_it_does_not_when_residuals_depend_on_the_inputs() -> None:
    assert theorem.measure(distance=1.0) < 0.6
