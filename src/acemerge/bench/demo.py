"""`acemerge demo`: the real thing in a few minutes. A real base, experts trained here, merged and compared, one to talk to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from acemerge.bench.data.task import Task
from acemerge.bench.measure.compare import compare
from acemerge.bench.measure.experts import Say
from acemerge.bench.measure.merging import merge_experts
from acemerge.bench.suites.registry import Suite, get_suite
from acemerge.bench.tables.tables import Table
from acemerge.errors import InputError
from acemerge.output.task_models import load_expert_head
from acemerge.recipe.recipe import DEFAULT_METHOD

METHODS = ("average", "task_arithmetic", "tsv_m", "ace", DEFAULT_METHOD)
SENTENCE = "A slow, dull film with wooden acting and no story at all"
TEST_ROWS = 200
LONGEST = 100
"""Letters of a test row that is shown."""
HEADS_KNOW_ONE_TASK = (
    "Each head knows sentences of its own task only, and always names one of its classes: to a film review, the heads for "
    "commit messages and news answer too, and mean little."
)


def run_demo(output: Path, say: Say) -> Table:
    """Train, merge, compare, and leave base, experts and the model that the default method merged in `output`."""
    suite = get_suite("demo")
    say("The base is all-MiniLM-L6-v2, a BERT of 23 million weights. Each expert is a full fine-tune of it for one task.")
    suite.prepare([0], say)
    table = compare(suite, METHODS, [0], TEST_ROWS, (), say)
    experts, folders = suite.experts(0), suite.folders(0)
    for name, folder in {"base": experts.base, **{f"experts/{task}": folder for task, folder in folders.items()}}.items():
        _link(output / name, folder)
    merge_experts(experts.base, folders, output / "merged", {"method": DEFAULT_METHOD}, overwrite=True)
    return table


def _link(link: Path, folder: Path) -> None:
    """Show a folder of the cache in the output, for the commands that the README gives."""
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    link.symlink_to(folder.resolve(), target_is_directory=True)


@dataclass(frozen=True)
class Question:
    """A test row, and the class that it belongs to."""

    task: str
    text: str
    truth: str


def first_questions(suite: Suite) -> list[Question]:
    """Of each task the first test row that fits a line: chosen by nothing else, so the model may well be wrong."""
    return [_first_short(task) for task in suite.tasks]


def _first_short(task: Task) -> Question:
    rows = task.load().test
    texts = enumerate(" ".join(str(text).split()) for text in rows.inputs)
    index, text = next((index, text) for index, text in texts if len(text) <= LONGEST)
    return Question(task.name, text, task.classes[int(rows.labels[index])])


def ask(merged: Path, sentences: Mapping[str, str]) -> Iterator[tuple[str, str, float]]:
    """What one merged backbone says of a sentence under an expert's head, for each head named: (task, class, probability)."""
    import torch
    from transformers import AutoTokenizer

    from acemerge.bench.domains.text import mean_of_token_logits, quiet_transformers

    quiet_transformers()
    tokenizer = AutoTokenizer.from_pretrained(merged, trust_remote_code=False)
    for head, sentence in sentences.items():
        model = load_expert_head(merged, head)
        with torch.inference_mode():
            shares = mean_of_token_logits(model, dict(tokenizer(sentence, return_tensors="pt", truncation=True)))[0].softmax(0)
        best = int(shares.argmax())
        yield head, model.config.id2label[best], float(shares[best])


def heads_of(merged: Path) -> list[str]:
    """The tasks that a merged model has heads for."""
    if not (merged / "heads").is_dir():
        raise InputError(f"{merged}: no merged model with heads; run `acemerge demo` first")
    return sorted(path.name for path in (merged / "heads").iterdir())
