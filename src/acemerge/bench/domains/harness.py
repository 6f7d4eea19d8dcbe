"""Language models on tasks of lm-eval, the library itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from acemerge.bench.data.task import Rows, Task
from acemerge.bench.domains.domain import Prepared
from acemerge.bench.measure.evaluation import Judge, Part
from acemerge.bench.measure.metrics import Estimate
from acemerge.bench.suites.options import SuiteOptions
from acemerge.checkpoints.folder import read_json
from acemerge.checkpoints.untrusted import check_runs_nothing
from acemerge.errors import InputError

if TYPE_CHECKING:
    from acemerge.bench.suites.registry import Suite


@dataclass(frozen=True)
class Benchmark:
    """One of lm-eval's tasks, and which of its metrics counts."""

    name: str
    expert: str
    metric: str
    """As lm-eval calls it, with its filter."""
    runs_code: bool = False


# The paper names tasks, not metrics. Its scores on xquad are no multiples of 1/1190, so they are F1; those of the others are
# multiples of one row. Which filter of gsm8k_cot it took is not to be told; all metrics are in the result.
BENCHMARKS = (
    Benchmark("xquad_zh", "multilingual", "f1,none"),
    Benchmark("xquad_vi", "multilingual", "f1,none"),
    Benchmark("gsm8k_cot", "math", "exact_match,strict-match"),
    Benchmark("mathqa", "coding", "acc,none"),
    Benchmark("humaneval", "coding", "pass@1,create_test", runs_code=True),
)


class CausalDomain:
    """Models that lm-eval asks. See `Domain`."""

    name = "causal"

    def load(self, folder: Path) -> nn.Module:
        """The model as it is."""
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
        return model

    def prepare(self, rows: Rows) -> Prepared:
        """There are none."""
        raise InputError(f"lm-eval asks its questions itself; {len(rows)} rows cannot be prepared")

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Of the next token."""
        scores: Tensor = model(**batch).logits[:, -1]
        return scores


def harness_judge(benchmarks: Sequence[Benchmark], options: SuiteOptions) -> tuple[Judge, str]:
    """A judge that asks lm-eval, and which lm-eval it is. With a folder of data, task files there replace lm-eval's own."""
    try:
        import lm_eval
    except ImportError:
        raise InputError("this needs lm-eval: pip install 'acemerge[eval]'") from None
    code = [benchmark.name for benchmark in benchmarks if benchmark.runs_code]
    if code and not options.run_generated_code:
        raise InputError(
            f"{', '.join(code)} runs the code that the model writes, on this machine. Allow it with --run-generated-code, in a "
            "container that has nothing to lose, or leave it out with --tasks"
        )
    metrics = {benchmark.name: benchmark.metric for benchmark in benchmarks}
    tasks = options.data
    if tasks is not None and not list(tasks.glob("*.yaml")):
        raise InputError(f"--data {tasks}: holds no lm-eval task files (*.yaml); leave --data out to use lm-eval's own")
    source = f"lm-eval {lm_eval.__version__}" + (f", tasks of '{tasks.name}'" if tasks else "")
    return partial(_judge, metrics, tasks, options.run_generated_code), source


def _judge(
    metrics: dict[str, str],
    tasks: Path | None,
    consent: bool,
    suite: Suite,
    folder: Path,
    task: Task,
    part: Part,
    limit: int | None,
    seed: int,  # noqa: ARG001
) -> Estimate:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    if part != "test":
        raise InputError(f"{task.name}: lm-eval's tasks have no validation rows to choose by")
    check_runs_nothing(read_json(folder / "config.json"), folder)
    if consent:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # the metric's own lock, besides lm-eval's
    manager = TaskManager(include_path=str(tasks), include_defaults=False) if tasks else TaskManager()
    found = simple_evaluate(
        model="hf", model_args={"pretrained": str(folder), "trust_remote_code": False}, tasks=[task.name], limit=limit,
        task_manager=manager, batch_size=suite.compute.batch_size, device=suite.compute.device, log_samples=False,
        confirm_run_unsafe_code=consent,
    )  # fmt: skip
    return _estimate(found, task.name, metrics[task.name])


def _estimate(found: Any, task: str, metric: str) -> Estimate:
    scores = found["results"][task]
    if metric not in scores:
        raise InputError(f"{task}: lm-eval gave no {metric}, but {', '.join(name for name in scores if ',' in name)}")
    name, _, kind = metric.partition(",")
    error = scores.get(f"{name}_stderr,{kind}")
    numbers = {key: float(value) for key, value in scores.items() if "," in key and isinstance(value, int | float)}
    rows = int(found["n-samples"][task]["effective"])
    return Estimate(metric, float(scores[metric]), float(error) if isinstance(error, int | float) else 0.0, rows, numbers)
