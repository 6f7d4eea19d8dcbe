"""The paper's numbers."""

from __future__ import annotations

import statistics

from acemerge.bench.domains.heads import prompts_of
from acemerge.bench.tables.paper import paper_rows, paper_tables
from acemerge.cli.bench import PAPER_SUITES
from acemerge.methods import all_methods


def test_the_papers_tables_belong_to_our_suites_tasks_and_methods() -> None:
    tables = paper_tables()
    assert set(tables) == set(PAPER_SUITES) - {"gpt2-glue-mm"}
    known = {"base", "experts", *(method.name for method in all_methods())}
    for suite, found in tables.items():
        assert set(found["main"]) - known <= {"fisher", "regmean"}
        if suite.startswith("clip"):
            assert all(prompts_of(task).classes for task in found["tasks"])
            assert len(found["tasks"]) == int(suite.rsplit("-", 1)[1])
    assert tables["gpt2-glue"]["main"]["ace"]["raw"]["average"] == 74.1
    assert tables["clip-vit-l14-20"]["main"]["ace"]["raw"]["average"] == 89.49
    some = paper_rows("gpt2-glue", "main", ["cola", "rte"])["ace"]
    assert some == {"raw": {"cola": 70.3, "rte": 62.5}}, "an average over other tasks is left out"


def test_the_papers_averages_are_means_of_its_tasks() -> None:
    """But for three, which the paper has so."""
    odd = []
    for suite, found in paper_tables().items():
        for row, kinds in found["main"].items():
            for scores in kinds.values():
                tasks = [scores[task] for task in found["tasks"] if task in scores]
                whole = len(tasks) == len(found["tasks"]) and "average" in scores
                if whole and abs(statistics.fmean(tasks) - scores["average"]) > 0.051:
                    odd.append((suite, row))
    assert odd == [("roberta-base-glue", "base"), ("roberta-base-glue", "dare_ties"), ("roberta-large-glue", "wudi")]
