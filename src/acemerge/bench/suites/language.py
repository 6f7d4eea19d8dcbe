"""The paper's language suites: GPT-2 and RoBERTa on GLUE, Llama-3.2-3B-Instruct on lm-eval's tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from acemerge.bench.data.glue import GLUE, GLUE_TASKS, MATCHED, ClassifierDomain, GlueTask, glue_splits
from acemerge.bench.data.hub_rows import DataSource, LazySplits
from acemerge.bench.data.task import Rows, Splits, Task
from acemerge.bench.domains.harness import BENCHMARKS, CausalDomain, harness_judge
from acemerge.bench.suites.given import GivenExperts, find_model, task_folder
from acemerge.bench.suites.options import SuiteOptions
from acemerge.bench.suites.registry import Suite
from acemerge.checkpoints.source import Source, expand_home
from acemerge.checkpoints.untrusted import parse_json, read_bounded
from acemerge.errors import InputError

_GPT2_TASKS = ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2")
_GPT2_LONGEST = 512
_ROBERTA_LONGEST = 128
# The order of `dataset_ids` in Twin-Merging's file.
_TWIN_ORDER = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
_TWIN_FILE = "discriminative/data/test.json of github.com/LZY-the-boys/Twin-Merging"
_BATCH = 32


def gpt2_suite(mnli: str, name: str, options: SuiteOptions) -> Suite:
    """FusionBench's experts; plain accuracy for every task, CoLA included, on the validation split."""
    wanted = options.choose([GLUE_TASKS[task] for task in _GPT2_TASKS], name)
    tasks = []
    for task in wanted:
        source = DataSource(GLUE, task.name, task_folder(options.data, task.name))
        split = mnli if task.test_split == MATCHED else task.test_split
        tasks.append(Task(task.name, task.classes, partial(glue_splits, task, source, split), f"{source.name}, {split}"))
    base = find_model(options.models, ("base", "gpt2"), "openai-community/gpt2")
    experts = {
        task.name: partial(find_model, options.models, (task.name, f"gpt2_{task.name}"), f"tanganke/gpt2_{task.name}")
        for task in tasks
    }
    domain = ClassifierDomain("gpt2-glue", base.path, _GPT2_LONGEST)
    return Suite(name, domain, tuple(tasks), GivenExperts(base, experts), options.compute(_BATCH), limit=None)


def roberta_suite(size: str, name: str, options: SuiteOptions) -> Suite:
    """Twin-Merging's experts and rows; GLUE's own metrics, as shares of the expert's."""
    if options.data is None:
        raise InputError(f"{name} needs --data with a folder that holds test.json: {_TWIN_FILE}")
    data = expand_home(options.data)
    wanted = options.choose([GLUE_TASKS[task] for task in _TWIN_ORDER], name)
    tasks = []
    for task in wanted:
        source = DataSource(GLUE, task.name, data / task.name if (data / task.name).is_dir() else None)
        splits = partial(_TwinSplits, data / "test.json", task, source)
        tasks.append(Task(task.name, task.classes, splits, _twin_source(data / "test.json"), metric=task.metric))
    model = f"roberta-{size}"
    base = _roberta_base(model, options)
    experts = {task.name: partial(_roberta_expert, model, task.name, options) for task in tasks}
    domain = ClassifierDomain(f"{model}-glue", base.path, _ROBERTA_LONGEST)
    given = GivenExperts(base, experts)
    return Suite(name, domain, tuple(tasks), given, options.compute(_BATCH), normalised=True, limit=None)


def _roberta_base(model: str, options: SuiteOptions) -> Source:
    """Its own folder among the models, else the hub's: Twin-Merging's release has the experts alone."""
    here = options.models is not None and any((expand_home(options.models) / place).is_dir() for place in ("base", model))
    return find_model(options.models if here else None, ("base", model), f"FacebookAI/{model}")


def _roberta_expert(model: str, task: str, options: SuiteOptions) -> Source:
    inner = f"{task}/{model}_lr1e-05"
    places = (task, inner, f"roberta/{inner}", f"{model}/{inner}", f"{model.replace('-', '_')}/{inner}")
    if options.models is not None:
        return find_model(options.models, places, f"lu-vae/roberta-glue ({inner})")
    return _roberta_from_hub(model, inner, places)


def _roberta_from_hub(model: str, inner: str, places: tuple[str, ...]) -> Source:
    from huggingface_hub import constants, snapshot_download

    try:
        root = Path(
            snapshot_download("lu-vae/roberta-glue", allow_patterns=[f"*{inner}/*"], local_files_only=constants.HF_HUB_OFFLINE)
        )
    except Exception as error:  # the hub client raises a dozen unrelated types
        raise InputError(
            f"lu-vae/roberta-glue: could not be fetched ({type(error).__name__}); give --models, or go online"
        ) from None
    try:
        found = find_model(root, places, f"lu-vae/roberta-glue ({inner})")
    except InputError:
        raise InputError(
            f"lu-vae/roberta-glue: has no {inner}; get the experts of {model} from Twin-Merging's authors, and give --models"
        ) from None
    return Source("lu-vae/roberta-glue", found.path, f"lu-vae/roberta-glue/{inner}", root.name)


@dataclass(frozen=True)
class _TwinSplits:
    """Test rows of Twin-Merging's file, tokenised already; training rows of GLUE. See `SplitRows`."""

    file: Path
    task: GlueTask
    glue: DataSource

    @property
    def test(self) -> Rows:
        """Those of this task, in the file's order."""
        number = _TWIN_ORDER.index(self.task.name)
        rows = [row for row in _read_twin(self.file) if row["dataset_ids"] == number]
        if not rows:
            raise InputError(f"{self.file}: has no row with dataset_ids {number}, {self.task.name}; expected {_TWIN_FILE}")
        return Rows([row["input_ids"] for row in rows], [row["label"] for row in rows])

    @property
    def validation(self) -> Rows:
        """See `LazySplits`."""
        return self._glue.validation

    @property
    def train(self) -> Rows:
        """See `LazySplits`."""
        return self._glue.train

    @property
    def _glue(self) -> LazySplits:
        return glue_splits(self.task, self.glue, self.task.test_split)


def _twin_source(file: Path) -> str:
    from acemerge.checkpoints.content_hash import named_sha256

    if not file.is_file():
        raise InputError(f"{file}: missing; expected {_TWIN_FILE}")
    return f"Twin-Merging's test.json, {named_sha256(file)[:12]}"


def _read_twin(file: Path) -> list[dict[str, Any]]:
    rows = parse_json(read_bounded(file), file)
    needed = {"input_ids", "label", "dataset_ids"}
    if not isinstance(rows, list) or not all(isinstance(row, dict) and needed <= row.keys() for row in rows):
        raise InputError(f"{file}: expected a list of rows with {', '.join(sorted(needed))}: {_TWIN_FILE}")
    return rows


def llama_suite(name: str, options: SuiteOptions) -> Suite:
    """MergeBench's experts, measured by lm-eval."""
    wanted = options.choose(BENCHMARKS, name)
    judge, source = harness_judge(wanted, options)
    tasks = tuple(Task(task.name, (), partial(_no_rows, task.name), source, taught=task.expert) for task in wanted)
    hub = "Llama-3.2-3B-Instruct"
    base = find_model(options.models, ("base", hub), f"meta-llama/{hub}")
    experts = {
        expert: partial(find_model, options.models, (expert, f"{hub}_{expert}"), f"MergeBench/{hub}_{expert}")
        for expert in dict.fromkeys(task.expert for task in tasks)
    }
    # Some experts have a larger vocabulary than the base.
    vocabulary: Mapping[str, Any] = {"tensors": [{"match": match, "do": "keep"} for match in ("*embed_tokens*", "*lm_head*")]}
    return Suite(
        name, CausalDomain(), tasks, GivenExperts(base, experts), options.compute(8), judge, own_heads=False, normalised=True,
        merge=vocabulary, limit=None,
    )  # fmt: skip


def _no_rows(task: str) -> Splits:
    raise InputError(f"{task}: lm-eval asks its questions itself; there are no rows to learn from or to choose by")
