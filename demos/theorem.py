"""The premise of ACE, executed: a layer's weight change reveals the second moment of the inputs it was trained on.

    python demos/theorem.py

A linear layer y = W x is trained by SGD on inputs whose second moment Sigma is known. Each step changes W by -lr r x^T, with r
the residual. Where residuals are independent of the inputs, the cross terms of

    D^T D = lr^2 sum_ij (r_i . r_j) x_i x_j^T,        D = W_trained - W0,

vanish in expectation and D^T D is proportional to Sigma (Theorem 1 of the paper). The residual of a layer that still has
something to learn depends on its input; D^T D then leans towards what is learnt, here a change of rank one, and the alignment is
lost. So it is when training goes on until W moves back and forth: its own movement ties residuals to inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

OUTPUTS, INPUTS, STEPS, RATE = 512, 32, 2000, 3e-5


def second_moment(generator: torch.Generator) -> Tensor:
    """A covariance with a decaying spectrum in a random basis."""
    basis: Tensor = torch.linalg.qr(torch.randn(INPUTS, INPUTS, generator=generator, dtype=torch.float64))[0]
    spectrum = 1 / torch.arange(1, INPUTS + 1, dtype=torch.float64)
    return (basis * spectrum) @ basis.T


def weight_change(sigma: Tensor, distance: float, rate: float, generator: torch.Generator) -> Tensor:
    """D after one pass of SGD: the layer starts `distance` from the solution in one direction, targets carry noise of size 1."""
    root = torch.linalg.cholesky(sigma)
    solution = torch.randn(OUTPUTS, INPUTS, generator=generator, dtype=torch.float64)
    left, right = (torch.randn(size, generator=generator, dtype=torch.float64) for size in (OUTPUTS, INPUTS))
    start = solution + distance * torch.outer(left, right / right.norm())
    weight = start.clone()
    for _ in range(STEPS):
        x = root @ torch.randn(INPUTS, generator=generator, dtype=torch.float64)
        noise = torch.randn(OUTPUTS, generator=generator, dtype=torch.float64)
        weight -= rate * torch.outer(weight @ x - (solution @ x + noise), x)
    return weight - start


def alignment(a: Tensor, b: Tensor) -> float:
    """The cosine of two matrices."""
    return float((a * b).sum() / (a.norm() * b.norm()))


def measure(distance: float, rate: float = RATE, seed: int = 0) -> float:
    """Alignment of D^T D with the inputs' true second moment."""
    generator = torch.Generator().manual_seed(seed)
    sigma = second_moment(generator)
    D = weight_change(sigma, distance, rate, generator)
    return alignment(D.T @ D, sigma)


def main() -> None:
    """Print the alignment as residuals come to depend on the inputs."""
    identity = alignment(torch.eye(INPUTS, dtype=torch.float64), second_moment(torch.Generator().manual_seed(0)))
    print(f"alignment of D^T D with the inputs' second moment ({OUTPUTS} x {INPUTS}, {STEPS} steps)")
    print(f"  knowing nothing (the identity)                {identity:.3f}")
    for distance in (0.0, 0.1, 0.3, 1.0, 3.0):
        print(f"  starting {distance:3.1f} from the solution                {measure(distance):.3f}")
    for rate in (3e-4, 3e-3):
        print(f"  starting at the solution, step size x {rate / RATE:3.0f}     {measure(0.0, rate):.3f}")


if __name__ == "__main__":
    main()
