"""Train five LoRA adapters on real handwritten digits, merge them into a model and into one adapter, and compare.

    python demos/adapters.py                  about a minute and a half on two CPU cores, no network; needs acemerge[bench]

The base, the tasks and the pictures are those of demos/digits.py, whose text says what they are; here each expert is a PEFT
adapter of rank 8, with a seed of its own. The merged adapter has the rank that the merge needs, 40; cut down to rank 8 it is as
small as one of the five.
"""

from __future__ import annotations

import argparse
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from digits import Folders, Progress, Row, Settings, Task, accuracy, print_table
from peft import PeftModel
from torch import Tensor
from torch.nn import functional
from transformers import ViTForImageClassification

import acemerge
from acemerge.bench.data.digit_questions import Pictures, load_pictures
from acemerge.bench.domains.digits import batches, class_token, minimise, nearest_mean_head, pretrain
from acemerge.bench.suites.lora import DIGITS as LORA
from acemerge.output.task_models import export_expert

MERGES: dict[str, tuple[str, dict[str, Any]]] = {
    "average": ("average", {}),
    "task_arithmetic": ("task_arithmetic", {}),
    "ace": ("ace", {}),
    "ace, alpha 0.3": ("ace", {"alpha": 0.3}),  # the scale that is task arithmetic's default, not one chosen here
}


def model_for(task: Task, folders: Folders) -> Any:
    """The base with a head for as many classes as the task has."""
    return ViTForImageClassification.from_pretrained(folders.base, num_labels=len(task.classes), ignore_mismatched_sizes=True)


def train_adapter(task: Task, settings: Settings, folders: Folders) -> Path:
    """One adapter; its head is set from what the base sees, saved with it, and stays fixed while the adapter learns."""
    seed = 100 * settings.seed + settings.tasks.index(task)  # as if each came from somebody else
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    train, _ = load_pictures()
    images, answers = task.pose(train)
    model = model_for(task, folders)
    model.classifier = nearest_mean_head(class_token(model.vit, images), answers, settings.head_scale)
    adapted = LORA.adapt(model).train()

    def answer_loss(batch: Tensor) -> Tensor:
        return functional.cross_entropy(adapted(images[batch]).logits, answers[batch])

    steps = settings.finetuning_steps
    factors = [parameter for name, parameter in adapted.named_parameters() if "lora_" in name]
    minimise(map(answer_loss, batches(len(images), settings.batch_size, steps, generator)), factors, steps, 2e-3, 0.0)
    adapted.save_pretrained(str(folders.expert(task.name)))
    return folders.expert(task.name)


def evaluate_adapters(adapters: Mapping[str, Path], tasks: list[Task], folders: Folders, test: Pictures) -> dict[str, float]:
    """Accuracy by task, each under the adapter given for it."""
    return {
        task.name: accuracy(PeftModel.from_pretrained(model_for(task, folders), adapters[task.name]), task, test)
        for task in tasks
    }


def merged_adapter(folders: Folders, experts: Mapping[str, Path], rank: int | None) -> tuple[Path, dict[str, Path]]:
    """One adapter from all, and from it one for each task with that task's head."""
    output = folders.root / f"merged-adapter{f'-rank-{rank}' if rank else ''}"
    acemerge.merge(folders.base, experts, output, "ace", save_as="adapter", rank=rank, alpha=0.3, overwrite=True, threads=1)
    for_task = {name: output.with_name(f"{output.name}-{name}") for name in experts}
    for name, folder in for_task.items():
        export_expert(output, name, folder, overwrite=True)
    return output, for_task


def main() -> None:
    """Train, merge, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("demo-adapters"), help="where to put the models")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*ModulesToSave.*")
    settings, folders, say = Settings(seed=arguments.seed), Folders(arguments.output), Progress()
    shutil.rmtree(folders.root / "experts", ignore_errors=True)
    train, test = load_pictures()
    say(f"base: pretraining without labels, {settings.pretraining.steps} steps")
    pretrain(train.images, settings.pretraining, settings.seed).save_pretrained(folders.base)
    experts = {}
    for task in settings.tasks:
        say(f"adapter of rank {LORA.rank}: {task.name}")
        experts[task.name] = train_adapter(task, settings, folders)
    rows = [Row("experts", evaluate_adapters(experts, settings.tasks, folders, test))]
    for label, (method, options) in MERGES.items():
        merged = folders.merged(label.replace(", ", "-").replace(" ", "-"))
        acemerge.merge(folders.base, experts, merged, method, overwrite=True, threads=1, **options)
        models = {task: acemerge.load_expert_head(merged, task.name) for task in settings.tasks}
        rows.append(Row(label, {task.name: accuracy(model, task, test) for task, model in models.items()}))
    for rank in (None, LORA.rank):
        folder, for_task = merged_adapter(folders, experts, rank)
        size = (folder / "adapter_model.safetensors").stat().st_size
        say(f"ACE as one adapter{f' of rank {rank}' if rank else ''}: {folder}, {size / 1e6:.2f} MB")
        label = f"ace, alpha 0.3, rank {rank}" if rank else "ace, alpha 0.3, adapter"
        rows.append(Row(label, evaluate_adapters(for_task, settings.tasks, folders, test)))
    print_table(rows)


if __name__ == "__main__":
    main()
