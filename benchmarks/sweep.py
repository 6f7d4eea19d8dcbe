"""What a grid of 45 settings of ACE costs, in merges: 5 epsilon x 3 tau x 3 k_frac, tensor by tensor, in the same run.

    python benchmarks/sweep.py                       # 8 experts, 768x768, 768x3072 and 3072x768, one thread
    python benchmarks/sweep.py --experts 4 --width 256 --repeats 5

One merge and one sweep take turns; the ratio is that of their medians, beside the smallest and largest ratio of a single turn.
Only the method is timed, not reading and writing. The merge is at the default epsilon and k_frac: where all three tau lie on one
side of the tensor's gamma, in that branch; where they lie on both, in the heterogeneous one, the dearer. A merge in which float32
proves too imprecise is done again in float64, so it says in which precision the merge and the 45 points were done. `/ dearest` is
the ratio to the dearest merge of the grid itself, at its smallest epsilon and largest k_frac. The last column is the largest
relative difference between a point of the sweep and a merge of its own, over a point of each branch.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from layers import interleaved, make_experts

from acemerge.execute.compute import compute_threads
from acemerge.methods import Context, Merged, get_method
from acemerge.methods.ace import AceOptions, heterogeneity
from acemerge.methods.shared_routes import merge_at_points

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
    smallest: float = 1e-6
    """The smallest epsilon; the others are ten times the one before."""

    def grid(self, gamma: float) -> list[AceOptions]:
        """The 45 settings."""
        epsilons = [self.smallest * 10**i for i in range(5)]
        return [AceOptions(epsilon=e, tau=tau, k_frac=k) for e, tau, k in product(epsilons, TAUS[self.side](gamma), K_FRACS)]


def measure(case: Case, repeats: int) -> str:
    """One line of the table."""
    task_vectors, ace = make_experts(case.experts, (case.rows, case.columns)), get_method("ace")
    context = Context(experts=tuple(map(str, range(case.experts))))
    gamma = heterogeneity([float(D.double().square().sum()) for D in task_vectors])
    grid = case.grid(gamma)
    one = AceOptions(epsilon=1e-5, tau=min(options.tau for options in grid), k_frac=0.3)
    dearest = replace(one, epsilon=case.smallest, k_frac=max(K_FRACS))

    def sweep() -> Iterator[tuple[list[int], Merged]]:
        return merge_at_points(ace, task_vectors, grid, [context] * len(grid))

    routes = {
        "merge": lambda: ace(task_vectors, one, context),
        "dearest": lambda: ace(task_vectors, dearest, context),
        "sweep": lambda: [None for _ in sweep()],
    }
    turns = [interleaved(routes, 1) for _ in range(repeats + 1)][1:]  # the first is for warming up
    merge, dear, whole = (statistics.median(turn[name] for turn in turns) for name in routes)
    single = sorted(turn["sweep"] / turn["merge"] for turn in turns)
    checked = {grid.index(o): o for o in (min(grid, key=lambda o: o.tau), max(grid, key=lambda o: o.tau))}
    worst, in_float32 = 0.0, 0
    for points, merged in sweep():
        in_float32 += len(points) * (merged.facts["precision"] == "float32")
        for point in checked.keys() & set(points):
            own = ace(task_vectors, checked[point], context).delta
            worst = max(worst, float((merged.delta - own).norm() / own.norm()))
    precision = ace(task_vectors, one, context).facts["precision"]
    return (
        f"{f'{case.rows}x{case.columns}':10} {case.side:14} {precision} {in_float32:7} {merge:9.2f} {whole:8.2f} "
        f"{whole / merge:7.2f}   {single[0]:.2f} to {single[-1]:.2f} {whole / dear:9.2f}   {worst:.0e}"
    )


def main() -> None:
    """Measure every shape in every branch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("experts", 8), ("width", 768), ("repeats", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--smallest", type=float, default=1e-6, help="epsilon; four more, each ten times the one before")
    given = parser.parse_args()
    print("tensor     the tau are    merge in float32  merge, s sweep, s   ratio   of single turns  / dearest  difference")
    with compute_threads(given.threads):
        for rows, columns in ((1, 1), (1, 4), (4, 1)):
            for side in TAUS:
                case = Case(given.experts, rows * given.width, columns * given.width, side, given.smallest)
                print(measure(case, given.repeats), flush=True)


if __name__ == "__main__":
    main()
