"""ACE against the published procedure, on the matrices of one block of each of the paper's models, in one run.

    python benchmarks/ace_speed.py                          # all four models, one thread and all: about ten minutes
    python benchmarks/ace_speed.py --models vit-b16 --threads 1

Same tensors, interleaved, medians; both branches, forced by tau. Errors are relative to acemerge in float64, which the tests
compare with a transcription of the equations. `of GEMM` is the rate of the route's operations over that of a plain product of
matrices measured in the same run, in the precision that the route worked in.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from layers import BLOCKS, gemm_rate, interleaved, make_experts
from published import published_ace
from record import FOLDER, machine, save
from torch import Tensor

from acemerge.execute.compute import compute_threads
from acemerge.methods import Merged, get_method

ACE = get_method("ace")


@dataclass(frozen=True)
class Timing:
    """One matrix of a block, in one branch."""

    model: str
    threads: int
    branch: str
    shape: tuple[int, int]
    count: int
    """How often the block has it."""
    published_seconds: float
    our_seconds: float
    published_error: float
    our_error: float
    precision: str
    of_gemm: float


def route_flops(tasks: int, m: int, n: int, heterogeneous: bool) -> float:
    """Operations of products, factorisation and solves on acemerge's route; symmetric products count half.

    The eigendecomposition of step 6 counts as 4/3 s^3 for the tridiagonal form and 2 s^2 k for the way back.
    """
    small = min(m, n)
    products = tasks * (m * n * n + (2.0 * m * n * n if n <= m else m * m * n + 2.0 * m * m * n))
    solve = n**3 / 3 + 2.0 * m * n * n
    k = int(0.3 * small)
    refinement = 2.0 * m * n * n + m * n * small + 4 / 3 * small**3 + 2.0 * small * small * k + 4.0 * m * n * k
    return products + solve + (refinement if heterogeneous else 0.0)


def our_ace(task_vectors: Tensor, heterogeneous: bool) -> Merged:
    """Acemerge's ACE with the branch forced."""
    return ACE(task_vectors, ACE.options({"epsilon": 1e-5, "tau": 0.0 if heterogeneous else 1e9}))


def measure(model: str, count: int, repeats: int) -> Iterator[Timing]:
    """Every matrix of a block, in both branches."""
    block = BLOCKS[model]
    with compute_threads(count):
        rates = {"float32": gemm_rate(torch.float32), "float64": gemm_rate(torch.float64)}
        for shape, times in block.matrices.items():
            given = make_experts(block.tasks, shape)
            for heterogeneous in (False, True):
                exact = our_ace(given.double(), heterogeneous).delta
                published, ours = partial(published_ace, given, heterogeneous), partial(our_ace, given, heterogeneous)
                seconds = interleaved({"published": published, "ours": ours}, repeats)
                merged = ours()
                precision = str(merged.facts["precision"])
                rate = route_flops(block.tasks, *shape, heterogeneous) / seconds["ours"]
                yield Timing(
                    model=block.name,
                    threads=count,
                    branch="heterogeneous" if heterogeneous else "homogeneous",
                    shape=shape,
                    count=times,
                    published_seconds=seconds["published"],
                    our_seconds=seconds["ours"],
                    published_error=relative_error(published(), exact),
                    our_error=relative_error(merged.delta, exact),
                    precision=precision,
                    of_gemm=rate / rates[precision],
                )


def relative_error(found: Tensor, exact: Tensor) -> float:
    """The distance as a share of the exact one's length."""
    return float((found.double() - exact).norm() / exact.norm())


def show(timings: list[Timing]) -> Iterator[str]:
    """A table for each model, and its block as a whole."""
    yield "| model | threads | branch | matrix | published s | ours s | faster | their error | ours | precision | of GEMM |"
    yield "|---|---:|---|---|---:|---:|---:|---:|---:|---|---:|"
    for model, count, branch in dict.fromkeys((t.model, t.threads, t.branch) for t in timings):
        own = [t for t in timings if (t.model, t.threads, t.branch) == (model, count, branch)]
        start = f"| {model} | {count} | {branch}"
        for t in own:
            matrix = f"{t.shape[0]} x {t.shape[1]}" + (f" ({t.count} times)" if t.count > 1 else "")
            times = f"{t.published_seconds:.3f} | {t.our_seconds:.3f} | {t.published_seconds / t.our_seconds:.1f}x"
            errors = f"{t.published_error:.1e} | {t.our_error:.1e}"
            yield f"{start} | {matrix} | {times} | {errors} | {t.precision} | {t.of_gemm:.0%} |"
        published = sum(t.count * t.published_seconds for t in own)
        ours = sum(t.count * t.our_seconds for t in own)
        yield f"{start} | **whole block** | {published:.2f} | {ours:.2f} | **{published / ours:.1f}x** | | | | |"


def main() -> None:
    """Measure, print a table, write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(BLOCKS), default=[name for name in BLOCKS if name != "small"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, os.cpu_count() or 1])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=FOLDER / "ace_speed.json", help="where to write the measurements")
    arguments = parser.parse_args()
    where = machine()
    timings: list[Timing] = []
    for count in dict.fromkeys(arguments.threads):
        for model in arguments.models:
            for timing in measure(model, count, arguments.repeats):
                print(timing, file=sys.stderr, flush=True)
                timings.append(timing)
    print("\n".join(show(timings)))
    save(arguments.json, where, {"timings": [asdict(own) for own in timings]})


if __name__ == "__main__":
    main()
