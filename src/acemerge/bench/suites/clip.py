"""The paper's vision suites: 8, 14 and 20 tasks of CLIP ViT-B/32, B/16 and L/14.

Two families of checkpoints, not comparable with each other: those of the hub (transformers), and OpenCLIP files as TSV-M has
them, `<models>/<ViT-B-32>/<Task>Val/nonlinear_{zeroshot,finetuned}.pt` with `head_<Task>Val.pt`, which are the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from acemerge.bench.data.hub_rows import Column, DataSource, LazySplits, find_column
from acemerge.bench.data.task import Prompts, Rows, Task
from acemerge.bench.domains.clip import ClipDomain, vision_config
from acemerge.bench.domains.heads import StoredHeads, ZeroShotHeads, prompts_of
from acemerge.bench.domains.open_clip import check_text_side, vision_settings
from acemerge.bench.suites.given import GivenExperts, find_model, task_folder
from acemerge.bench.suites.options import SuiteOptions
from acemerge.bench.suites.registry import Suite
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.checkpoints.source import Source, expand_home
from acemerge.errors import InputError

_IMAGE = ("image", "img", "jpg", "png", "webp")
_LABEL = ("label", "labels", "cls", "fine_label")
_BATCH = 128


@dataclass(frozen=True)
class _Vision:
    """One data set: its names in both families of checkpoints, and where its pictures are."""

    name: str
    hub_expert: str
    """After the last underscore of the hub's experts, such as clip-vit-base-patch32_stanford-cars."""
    open_clip: str
    """As TSV-M's files call it."""
    data: str
    config: str | None = None
    test_split: str = "test"


# In the order of the paper's suites of 8, 14 and 20.
_TASKS = (
    _Vision("cars", "stanford-cars", "Cars", "tanganke/stanford_cars"),
    _Vision("dtd", "dtd", "DTD", "tanganke/dtd"),
    _Vision("eurosat", "eurosat", "EuroSAT", "tanganke/eurosat"),
    _Vision("gtsrb", "gtsrb", "GTSRB", "tanganke/gtsrb"),
    _Vision("mnist", "mnist", "MNIST", "ylecun/mnist"),
    _Vision("resisc45", "resisc45", "RESISC45", "tanganke/resisc45"),
    _Vision("sun397", "sun397", "SUN397", "tanganke/sun397"),
    _Vision("svhn", "svhn", "SVHN", "ufldl-stanford/svhn", "cropped_digits"),
    _Vision("cifar100", "cifar100", "CIFAR100", "tanganke/cifar100"),
    _Vision("stl10", "stl10", "STL10", "tanganke/stl10"),
    _Vision("flowers102", "oxford_flowers102", "Flowers102", "dpdl-benchmark/oxford_flowers102"),
    _Vision("oxford_iiit_pet", "oxford-iiit-pet", "OxfordIIITPet", "timm/oxford-iiit-pet"),
    _Vision("pcam", "pcam", "PCAM", "1aurent/PatchCamelyon"),
    _Vision("fer2013", "fer2013", "FER2013", "clip-benchmark/wds_fer2013"),
    _Vision("emnist", "emnist_letters", "EMNIST", "tanganke/emnist_letters"),
    _Vision("cifar10", "cifar10", "CIFAR10", "tanganke/cifar10"),
    _Vision("food101", "food101", "Food101", "ethz/food101", test_split="validation"),
    _Vision("fashion_mnist", "fashion_mnist", "FashionMNIST", "zalando-datasets/fashion_mnist"),
    _Vision("rendered_sst2", "rendered-sst2", "RenderedSST2", "nateraw/rendered-sst2"),
    _Vision("kmnist", "kmnist", "KMNIST", "tanganke/kmnist"),
)
# TSV-M's EMNIST is the digits, the hub's the letters.
_EMNIST_DIGITS = "tanganke/emnist_mnist"
_BACKBONES = {
    "b32": ("clip-vit-base-patch32", "ViT-B-32"),
    "b16": ("clip-vit-base-patch16", "ViT-B-16"),
    "l14": ("clip-vit-large-patch14", "ViT-L-14"),
}


def clip_suite(backbone: str, count: int, name: str, options: SuiteOptions) -> Suite:
    """The first `count` tasks, of the family that the folder of models holds; by default the hub's."""
    hub, open_clip = _BACKBONES[backbone]
    in_open_clip = options.models is not None and (expand_home(options.models) / open_clip).is_dir()
    make = _open_clip_suite if in_open_clip else _hub_suite
    return make(name, hub, open_clip, count, options)


def _tasks(count: int, name: str, options: SuiteOptions, digits: bool) -> tuple[Task, ...]:
    chosen = []
    for vision in options.choose(_TASKS[:count], name):
        is_digits = digits and vision.name == "emnist"
        source = DataSource(_EMNIST_DIGITS if is_digits else vision.data, vision.config, task_folder(options.data, vision.name))
        prompts = _digits() if is_digits else prompts_of(vision.name)
        load = partial(_splits, source, prompts, vision.test_split)
        chosen.append(Task(vision.name, prompts.classes, load, source.name))
    return tuple(chosen)


def _digits() -> Prompts:
    digits = prompts_of("mnist")
    return Prompts("emnist", digits.classes, digits.templates)


def _splits(source: DataSource, prompts: Prompts, test_split: str) -> LazySplits:
    return LazySplits(source, partial(_rows, prompts, source.name), test_split)


def _rows(prompts: Prompts, where: str, dataset: Any) -> Rows:
    import datasets

    image, label = find_column(dataset, _IMAGE, where), find_column(dataset, _LABEL, where)
    if not isinstance(dataset.features[image], datasets.Image):
        dataset = dataset.cast_column(image, datasets.Image())
    return Rows(Column(dataset, partial(_cell, image)), list(dataset[label]), prompts)


def _cell(column: str, row: Any) -> Any:
    return row[column]


def _hub_suite(name: str, hub: str, _: str, count: int, options: SuiteOptions) -> Suite:
    tasks = _tasks(count, name, options, digits=False)
    clip = find_model(options.models, ("base", hub), f"openai/{hub}")
    experts = {}
    for task in tasks:
        hub_expert = f"{hub}_{next(v.hub_expert for v in _TASKS if v.name == task.name)}"
        experts[task.name] = partial(find_model, options.models, (task.name, hub_expert), f"tanganke/{hub_expert}")
    opened = open_checkpoint(clip.path, clip.short_name)
    if "text_config" not in opened.config:
        raise InputError(
            f"{clip.path}: not a whole CLIP model (no text_config in config.json); zero-shot heads need its text side"
        )
    domain = ClipDomain(hub, clip.path, ZeroShotHeads(clip.path, options.device), vision_config(opened).image_size)
    return Suite(name, domain, tasks, GivenExperts(clip, experts), options.compute(_BATCH), own_heads=False, limit=None)


def _open_clip_suite(name: str, hub: str, open_clip: str, count: int, options: SuiteOptions) -> Suite:
    assert options.models is not None
    root = expand_home(options.models) / open_clip
    tasks = _tasks(count, name, options, digits=True)
    names = {vision.name: vision.open_clip for vision in _TASKS}
    base = _file(root, names[tasks[0].name], "nonlinear_zeroshot")
    given = GivenExperts(base, {task.name: partial(_fine_tuned, root, names[task.name], base.path) for task in tasks})
    heads = StoredHeads(root, names, _TextSide(options.models, hub, options.device))
    domain = ClipDomain(open_clip, None, heads, vision_settings(open_checkpoint(base.path, "base"))["image_size"])
    return Suite(name, domain, tasks, given, options.compute(_BATCH), own_heads=False, limit=None)


def _file(root: Path, task: str, stem: str) -> Source:
    file = root / f"{task}Val" / f"{stem}.pt"
    if not file.is_file():
        raise InputError(f"{file}: missing; download TSV-M's checkpoints of {root.name}, or choose other tasks with --tasks")
    return Source(str(file), file)


def _fine_tuned(root: Path, task: str, base: Path) -> Source:
    source = _file(root, task, "nonlinear_finetuned")
    check_text_side(open_checkpoint(base, "base"), open_checkpoint(source.path, task))
    return source


@dataclass(frozen=True)
class _TextSide:
    """Zero-shot heads by the CLIP that the files were fine-tuned from, looked for only when a head is not stored."""

    models: Path
    hub: str
    device: str

    def of(self, prompts: Prompts) -> Any:
        """See `Heads`."""
        local = expand_home(self.models) / self.hub
        clip = find_model(self.models if local.is_dir() else None, (self.hub,), f"openai/{self.hub}")
        return ZeroShotHeads(clip.path, self.device).of(prompts)
