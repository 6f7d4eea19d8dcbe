"""What methods for matrices lose on a language model by leaving its embeddings, which are its output layer too, at the base.

    python benchmarks/embeddings.py --seeds 1

Each method as it is and with a rule that averages the embeddings, on test texts. What is done is kept, as in the bench.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from acemerge.bench.measure.compare import describe_run, rows_of
from acemerge.bench.measure.run import BASE, EXPERTS, Candidate
from acemerge.bench.suites.registry import get_suite
from acemerge.bench.tables.show import publish_table
from acemerge.bench.tables.tables import Table

SUITE = "stories-6"
EMBEDDINGS = [{"match": "*embed_tokens*", "do": "average"}]


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="tsv_m,cart,iso_cts,ace")
    parser.add_argument("--seeds", type=int, default=1, help="sets of experts")
    parser.add_argument("--limit", type=int, default=200, help="test texts of each kind")
    parser.add_argument("--folder", type=Path, default=Path("bench-output"))
    given = parser.parse_args()
    suite, seeds = get_suite(SUITE), list(range(given.seeds))
    methods = [Candidate(name, {"method": name}) for name in ("average", "ace_auto", *given.methods.split(","))]
    averaged = [
        Candidate(f"{name}, embeddings averaged", {"method": name, "tensors": EMBEDDINGS}) for name in given.methods.split(",")
    ]
    rows = rows_of(suite, [BASE, EXPERTS, *methods, *averaged], seeds, given.limit, print)
    table = Table(f"Embeddings left alone or averaged on {SUITE}", describe_run(suite, seeds, given.limit), rows)
    publish_table(table, given.folder, f"embeddings-{SUITE}")


if __name__ == "__main__":
    main()
