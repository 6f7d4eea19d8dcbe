"""Every verb as a command line and a scene: what it reads in `given`, what is in its place `out` before."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind
from huggingface_hub import constants
from safetensors.torch import save_file

import acemerge
import lora_zoo
import vocabulary_zoo
from acemerge.bench.measure import experts
from acemerge.bench.measure import run as bench_run
from acemerge.bench.measure.experts import Experts
from acemerge.bench.measure.measured_merge import merge_here
from acemerge.bench.measure.side_by_side import run_side_by_side
from acemerge.bench.suites import registry as suites
from acemerge.output import publishing
from child import command
from data_statistics import write_rows
from gguf_files import write_gguf
from model_zoo import bert, quiet_transformers
from small_models import base_tensors, fine_tuned, write_model, write_models
from stand_in_hub import TOKEN, running_hub
from tiny_bench import DOMAIN, SUITE, TASKS

Work = Callable[[], object]

CACHE = "cache"
"""Of methods and of the bench, within `out`."""
_MODELS = ("given/base", "given/expert-0", "given/expert-1", "given/expert-2")
_TWO = _MODELS[:3]
_SHARDS = ("--shard-size", "1kB")
_BY_ALPHA = """case "$1" in *alpha=1) echo '{"fit": 3}';; *) echo '{"fit": 2}';; esac\n"""
_SCORE = ("--evaluate", "sh given/score.sh")


@dataclass(frozen=True)
class Verb:
    """A command that is disturbed."""

    name: str
    arguments: tuple[str, ...]
    """Paths start from the scene's folder."""
    prepare: Callable[[Path], object]
    """Writes the scene into an empty folder."""
    journals: tuple[str, ...] = ()
    """Files of `out` that say how far the work is, and so change on the way."""
    makes_room: tuple[str, ...] = ()
    """More arguments for a disk that is too small, if that is seen coming."""
    around: Callable[[Work], object] = lambda work: work()
    """What else the process needs."""
    slow: bool = False
    """It takes seconds, so that only some of its operations are hit unless more are asked for."""

    def run(self, *more: str) -> None:
        """In this process, in the scene's folder."""
        os.environ["ACEMERGE_CACHE"] = os.path.abspath(f"out/{CACHE}")
        self.around(lambda: command(*self.arguments, *more))


def small(folder: Path) -> None:
    write_models(folder / "given")


def with_earlier(folder: Path) -> None:
    small(folder)
    models = [folder / name for name in _MODELS]
    acemerge.merge(models[0], models[1:], folder / "out/merged", method="average", shard_size="1kB")


def merged(folder: Path) -> None:
    """Something per task, for `task`."""
    small(folder)
    models = [folder / name for name in _MODELS]
    acemerge.merge(models[0], models[1:], folder / "given/merged", method="emr", shard_size="1kB")


def with_earlier_export(folder: Path) -> None:
    merged(folder)
    acemerge.export_expert(folder / "given/merged", "expert-1", folder / "out/single")


def adapters(folder: Path) -> None:
    small(folder)
    for seed in range(3):
        shutil.rmtree(folder / f"given/expert-{seed}")
        place = folder / f"given/expert-{seed}"
        place.mkdir()
        tensors = base_tensors(seed + 1)
        save_file(
            {
                "base_model.model.layers.0.lora_A.weight": tensors["embed.weight"][:2].clone(),
                "base_model.model.layers.0.lora_B.weight": tensors["layers.0.weight"][:, :2].clone(),
            },
            place / "adapter_model.safetensors",
        )
        settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["layers.0"], "task_type": None}
        (place / "adapter_config.json").write_text(json.dumps(settings))


def staged(folder: Path) -> None:
    small(folder)
    inner = {"base": "base", "experts": ["expert-0", "expert-1"], "method": "average"}
    recipe = {"base": "base", "experts": [{"name": "pair", "merge": inner}, "expert-2"], "method": "task_arithmetic"}
    (folder / "given/recipe.yaml").write_text(json.dumps(recipe))


def mergekit(folder: Path) -> None:
    small(folder)
    experts = [{"model": f"expert-{i}", "parameters": {"weight": 0.5}} for i in range(3)]
    recipe = {"merge_method": "task_arithmetic", "base_model": "base", "models": experts, "dtype": "float32"}
    (folder / "given/recipe.yaml").write_text(json.dumps(recipe))


def renumbered(folder: Path) -> None:
    """An expert that added a token, and one that numbers its tokens otherwise."""
    base = vocabulary_zoo.base(folder / "given/base", "unigram")
    vocabulary_zoo.expert(base, folder / "given/expert-0", "<x>")
    other = vocabulary_zoo.expert(base, folder / "given/expert-1", seed=2)
    vocabulary_zoo.renumber(other, list(reversed(range(len(vocabulary_zoo.vocabulary(other))))))


def eight_bits(folder: Path) -> None:
    """8-bit floats with a scale for each block."""
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [4, 5]}
    base = base_tensors()
    for name, tensors in {"base": base, "expert-0": fine_tuned(base, 0), "expert-1": fine_tuned(base, 1)}.items():
        weight = tensors["layers.0.weight"]
        stored = {"layers.0.weight": weight.to(torch.float8_e4m3fn), "layers.0.weight_scale_inv": torch.ones(3, 2)}
        write_model(folder / "given" / name, tensors | stored, {"dtype": "float32", "quantization_config": settings})


def gguf(folder: Path) -> None:
    for number, kind in enumerate((Kind.F16, Kind.Q8_0, Kind.Q4_0)):
        write_gguf(folder / f"given/{number}.gguf", kind)


def routed(folder: Path) -> None:
    """In names that do not depend on the folder."""
    base = lora_zoo.write_base(folder / "given/base", "LlamaForCausalLM")
    for seed in range(2):
        lora_zoo.write_adapter(base, folder / f"given/lora-{seed}", "LlamaForCausalLM", seed=seed, r=2, target_modules=["q_proj"])
    save_file({f"lora-{seed}": torch.eye(3)[seed] for seed in range(2)}, folder / "given/centroids.safetensors")


def scored(folder: Path) -> None:
    small(folder)
    (folder / "given/score.sh").write_text(_BY_ALPHA)


def rows(folder: Path) -> None:
    """Models that answer, and a few rows of each one's task."""
    with quiet_transformers():
        models = bert(folder / "given")
    write_rows(folder / "given/rows", models.experts)


def without_exchange(work: Work) -> None:
    """As on a file system that cannot exchange two folders."""
    publishing.exchange = lambda one, other: False
    work()


def quietly(work: Work) -> None:
    """transformers tells of weights that an expert's head lacks."""
    with quiet_transformers():
        work()


def carelessly(work: Work) -> None:
    """Piece by piece, where it belongs."""
    with open("out/page.html", "wb", buffering=0) as file:
        file.write(b"a" * 4096)
        file.write(b"b" * 4096)


def with_hub(work: Work) -> None:
    """A hub on loopback, and somebody who is logged in there."""
    os.environ["HF_TOKEN"] = TOKEN
    first_free = os.open(os.devnull, os.O_WRONLY)  # else the hub gets the number of a standard output that is closed
    with running_hub() as hub:
        os.close(first_free)
        constants.ENDPOINT, constants.HF_HUB_DISABLE_XET, constants.HF_HUB_OFFLINE = hub.address, True, False
        work()


def with_tiny_suite(work: Work) -> None:
    """A suite that trains in a moment, in place of text-8; in this process, and without measuring what merging costs."""
    tasks = tuple(replace(task, train_rows=32, epochs=1) for task in TASKS)
    suites._SUITES["text-8"] = (lambda name, count: replace(SUITE, name=name, tasks=tasks), 3)
    parts: list[Any] = [experts, bench_run]
    for part in parts:
        part.run_side_by_side = lambda call, arguments, workers: run_side_by_side(call, arguments, 1)
        part.measured_merge = lambda *given: replace(merge_here(*given), seconds=1.0, peak_bytes=None)
    quietly(work)


def trained(folder: Path) -> None:
    """A model, and the suite's experts in the cache."""
    os.environ["ACEMERGE_CACHE"] = str(folder / "out" / CACHE)
    with_tiny_suite(lambda: suites.get_suite("text-8").prepare([0], lambda said: None))
    shutil.copytree(Experts(DOMAIN, 0).base, folder / "given/model")


_MERGE = ("merge", *_MODELS, "-o", "out/merged", *_SHARDS)
_SWEEP = ("sweep", *_MODELS, "-o", "out/grid", *_SHARDS)
_GRID = (*_SWEEP, "-m", "emr", "--set", "alpha=0.5,2,1", "--at-once", "2")
_BERT = ("given/base", "given/red", "given/green", "given/blue")
_FORCE = ("--force",)

VERBS = (
    Verb("merge", (*_MERGE, "-m", "emr"), small, makes_room=_FORCE),
    Verb("merge --overwrite", (*_MERGE, "-m", "emr", "--overwrite"), with_earlier, makes_room=_FORCE),
    Verb("merge --overwrite, no exchange", (*_MERGE, "-m", "emr", "--overwrite"), with_earlier, around=without_exchange),
    Verb("merge of stages", ("merge", "given/recipe.yaml", "-o", "out/merged", *_SHARDS), staged, makes_room=_FORCE),
    Verb("merge of mergekit's recipe", ("merge", "given/recipe.yaml", "-o", "out/merged", *_SHARDS), mergekit, makes_room=_FORCE),
    Verb("merge of other tokenizers", ("merge", *_TWO, "-o", "out/merged"), renumbered, makes_room=_FORCE, around=quietly),
    Verb("merge --tokenizer union", ("merge", *_TWO, "-o", "out/merged", "--tokenizer", "union"), renumbered,
         makes_room=_FORCE, around=quietly),
    Verb("merge of 8-bit floats", ("merge", *_TWO, "-o", "out/merged", *_SHARDS), eight_bits, makes_room=_FORCE),
    Verb("merge of GGUF files", ("merge", "given/0.gguf", "given/1.gguf", "given/2.gguf", "-o", "out/merged"), gguf,
         makes_room=_FORCE, around=quietly),
    Verb("merge --as adapter", (*_MERGE, "-m", "average", "--as", "adapter"), adapters, makes_room=_FORCE),
    Verb("merge --report", (*_MERGE, "-m", "average", "--report"), small, makes_room=_FORCE, slow=True),
    Verb("merge --data", ("merge", *_BERT, "-o", "out/merged", "-m", "regmean", "--data", "given/rows"), rows,
         makes_room=_FORCE, around=quietly, slow=True),
    Verb("merge --tune", ("merge", *_BERT, "-o", "out/merged", "--tune", "given/rows"), rows,
         journals=("merged-tuning/sweep.json",), makes_room=_FORCE, around=quietly, slow=True),
    Verb("merge --push", (*_MERGE, "-m", "average", "--push", "somebody/model", "--overwrite"), small, around=with_hub),
    Verb("sweep", (*_GRID, "--keep", "all"), small, journals=("grid/sweep.json",), makes_room=_FORCE),
    Verb("sweep --evaluate", (*_GRID, *_SCORE), scored, journals=("grid/sweep.json",), makes_room=_FORCE),
    Verb("sweep --search", (*_SWEEP, "-m", "average", "--set", "alpha=0.5..2", "--search", "4", "--report", *_SCORE), scored,
         journals=("grid/sweep.json",), makes_room=_FORCE, slow=True),
    Verb("sweep --rows", ("sweep", *_BERT, "-o", "out/grid", "-m", "average", "--set", "alpha=0.5,1", "--rows", "given/rows"),
         rows, journals=("grid/sweep.json",), makes_room=_FORCE, around=quietly, slow=True),
    Verb("task", ("task", "given/merged", "expert-1", "-o", "out/single"), merged),
    Verb("task --overwrite", ("task", "given/merged", "expert-0", "-o", "out/single", "--overwrite"), with_earlier_export),
    Verb("extract", ("extract", *_MODELS[:2], "-o", "out/lora", "--rank", "2"), small, makes_room=_FORCE),
    Verb("route", ("route", "given/lora-0", "given/lora-1", "--base", "given/base", "--centroids", "given/centroids.safetensors",
                   "-o", "out/team.route"), routed),
    Verb("diagnose", ("diagnose", *_MODELS, "-o", "out/page.html", "--figures", "out/figures", "--quick"), small, slow=True),
    Verb("report", ("report", "given/merged", "-o", "out/page.html", "--figures", "out/figures"), merged, slow=True),
    Verb("push", ("push", "given/merged", "somebody/model"), merged, around=with_hub),
    Verb("bench", ("bench", "text-8", "--seeds", "1", "--limit", "20", "--methods", "average", "-o", "out/tables"),
         lambda folder: None, around=with_tiny_suite, slow=True),
    Verb("evaluate", ("evaluate", "given/model", "--suite", "text-8", "--limit", "20", "-o", "out/tables"), trained,
         around=with_tiny_suite, slow=True),
    Verb("plan", ("plan", *_MODELS, "-o", "out/merged"), small),
    Verb("verify", ("verify", "given/merged"), merged),
    Verb("recipe convert", ("recipe", "convert", "given/recipe.yaml"), mergekit),
    Verb("methods", ("methods",), lambda folder: None),
)  # fmt: skip
"""All that write files, and some that only write to standard output."""

CARELESS = Verb("careless", (), lambda folder: None, around=carelessly)
"""What the harness must find."""
