"""What a grid of 45 settings of ACE costs, in merges: 5 epsilon x 3 tau x 3 k_frac, tensor by tensor, in the same run.

    python benchmarks/sweep.py                       # 8 experts, 768x768, 768x3072 and 3072x768, one thread
    python benchmarks/sweep.py --experts 4 --width 256 --repeats 5

One merge and one sweep take turns; the ratio is that of their medians, beside the smallest and largest ratio of a single turn.
Only the method is timed, not reading and writing. Where all three tau lie on one side of the tensor's gamma, the merge is of that
branch; where they lie on both, it is the heterogeneous one, the dearer. The last column is the largest relative difference
between a point of the sweep and a merge of its own, over a point of each branch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from acemerge.methods import Context, get_method
from acemerge.methods.ace import AceOptions, heterogeneity
from acemerge.methods.sweeps import merge_at_points
from acemerge.pipeline import compute_threads

EPSILONS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
K_FRACS = (0.1, 0.3, 0.5)
TAUS = {
    "homogeneous": lambda gamma: (1.5 * gamma, 2 * gamma, 3 * gamma),
    "heterogeneous": lambda gamma: (0.1 * gamma, 0.3 * gamma, 0.5 * gamma),
    "both": lambda gamma: (0.5 * gamma, 0.9 * gamma, 2 * gamma),
}


@dataclass(frozen=True)
class Case:
    """A tensor of this shape, and on which side of its gamma the three tau lie."""

    experts: int
    rows: int
    columns: int
    side: str

    def task_vectors(self) -> Tensor:
        """Random, of unequal strength, with the decaying spectrum that task vectors have."""
        generator = torch.Generator().manual_seed(0)
        decay = torch.arange(1, self.columns + 1) ** -0.5
        strengths = torch.tensor([1e-3 * 1.6**t for t in range(self.experts)])
        noise = torch.randn(self.experts, self.rows, self.columns, generator=generator)
        return noise * decay * strengths[:, None, None]

    def grid(self, gamma: float) -> list[AceOptions]:
        """The 45 settings."""
        return [AceOptions(epsilon=e, tau=tau, k_frac=k) for e, tau, k in product(EPSILONS, TAUS[self.side](gamma), K_FRACS)]


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(case: Case, repeats: int) -> str:
    """One line of the table."""
    task_vectors, ace = case.task_vectors(), get_method("ace")
    context = Context(experts=tuple(map(str, range(case.experts))))
    gamma = heterogeneity([float(D.double().square().sum()) for D in task_vectors])
    grid = case.grid(gamma)
    one = AceOptions(epsilon=1e-5, tau=min(options.tau for options in grid), k_frac=0.3)
    turns = []
    for turn in range(repeats + 1):
        merge = seconds(lambda: ace(task_vectors, one, context))
        sweep = seconds(lambda: [None for _ in merge_at_points(ace, task_vectors, grid, [context] * len(grid))])
        if turn:  # the first is for warming up
            turns.append((merge, sweep))
    checked = {grid.index(o): o for o in (min(grid, key=lambda o: o.tau), max(grid, key=lambda o: o.tau))}
    worst = 0.0
    for points, merged in merge_at_points(ace, task_vectors, grid, [context] * len(grid)):
        for point in checked.keys() & set(points):
            own = ace(task_vectors, checked[point], context).delta
            worst = max(worst, float((merged.delta - own).norm() / own.norm()))
    merge, sweep = (statistics.median(column) for column in zip(*turns, strict=True))
    single = sorted(sweep / merge for merge, sweep in turns)
    return (
        f"{case.rows}x{case.columns:<6} {case.side:14} {merge:8.2f} {sweep:8.2f} {sweep / merge:7.2f}   "
        f"{single[0]:.2f} to {single[-1]:.2f}   {worst:.0e}"
    )


def main() -> None:
    """Measure every shape in every branch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("experts", 8), ("width", 768), ("repeats", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    print("tensor     tau are       merge, s sweep, s   ratio   of single turns   difference")
    with compute_threads(given.threads):
        for rows, columns in ((1, 1), (1, 4), (4, 1)):
            for side in TAUS:
                case = Case(given.experts, rows * given.width, columns * given.width, side)
                print(measure(case, given.repeats), flush=True)


if __name__ == "__main__":
    main()
