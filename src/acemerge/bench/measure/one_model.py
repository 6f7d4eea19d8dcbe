"""One model on a suite: a merged folder, an expert, the base, or anybody's model of the same kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from acemerge.bench.measure.compare import describe_run, rows_in_paper
from acemerge.bench.measure.experts import Say
from acemerge.bench.measure.run import EXPERTS, Candidate, Job, has_heads, measure_all, model_hashes
from acemerge.bench.suites.registry import Suite
from acemerge.bench.tables.tables import Row, Table
from acemerge.checkpoints.source import Source
from acemerge.errors import InputError

_NO_HEADS = "has no heads of {names} beside it; choose tasks that it has with --tasks: {known}"


def evaluate_model(suite: Suite, model: Source, limit: int | None, with_experts: bool, say: Say) -> Table:
    """The table of one model, with the paper's rows below it. `with_experts`: also what share of the experts' scores is left."""
    _check_heads(suite, model.path)
    job = Job(suite, Candidate(model.short_name, model=model.path), 0, limit)
    needs_experts = job.needs_experts or with_experts or suite.between_experts
    if needs_experts:
        suite.prepare([0], say)
    else:
        replace(suite, tasks=()).prepare([0], say)  # the base alone, for its tokenizer
    jobs = [job, *([Job(suite, EXPERTS, 0, limit)] if with_experts else [])]
    result, *experts = measure_all(jobs, say, workers=1)
    row = Row(job.candidate, (result,), tuple(experts) or None)
    rows = [row, *(Row(EXPERTS, (found,), (found,)) for found in experts)]
    about = {"model": {"name": model.public_name, "sha256": model_hashes(model.path)}}
    about |= {**describe_run(suite, [0], limit, needs_experts), "data": {task.name: task.source for task in suite.tasks}}
    others = rows_in_paper(suite, "main")
    return Table(f"{model.short_name} on {suite.name}", about, tuple(rows), normalised=with_experts, others=others)


def _check_heads(suite: Suite, model: Path) -> None:
    """A model with heads must have those of all tasks; one with a head of its own is for one task."""
    if not suite.own_heads or not has_heads(model):
        return
    beside = {path.name for kind in ("heads", "tasks") for path in model.glob(f"{kind}/*") if path.is_dir()}
    lacking = [task.name for task in suite.tasks if task.expert not in beside]
    if beside and lacking:
        known = ", ".join(task.name for task in suite.tasks if task.expert in beside) or "none of this suite's"
        raise InputError(f"{model}: {_NO_HEADS.format(names=', '.join(lacking), known=known)}")
    if not beside and len(suite.tasks) > 1:
        names = ", ".join(task.name for task in suite.tasks)
        raise InputError(f"{model}: has a head of its own, so it is for one task; say which with --tasks: {names}")
