"""Score a merged model on validation rows of its experts' tasks: the last line is what `acemerge sweep --evaluate` reads.

    acemerge sweep BASE movie hedge spam -o grid --set epsilon=1e-5,1e-3 --evaluate "python demos/score_text.py"

The experts are those that `acemerge bench text-8` trains; test rows are left for the model that is chosen.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import acemerge
from acemerge.bench.suites.registry import get_suite

ROWS = 200


def main(merged: Path) -> None:
    """One accuracy for each task with a head in the folder, and first their mean."""
    suite = get_suite("text-8")
    scores = {}
    for task in (task for task in suite.tasks if (merged / "heads" / task.expert).is_dir()):
        with tempfile.TemporaryDirectory() as folder:
            model = acemerge.export_expert(merged, task.expert, Path(folder) / "model")
            scores[task.name] = suite.judge(suite, model, task, "validation", ROWS, 0).share
    print(json.dumps({"mean": statistics.fmean(scores.values()), **scores}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
