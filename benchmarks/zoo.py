"""A zoo of tiny models, and the commands that merge them in every way there is: what `same_bytes.py` runs twice.

Commands are those of the public command line, with paths of inputs as they are and outputs relative to the current folder.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

import lora_zoo
import model_zoo
import paper_zoo
from data_statistics import write_rows

TWO_KINDS = ("ace", "ties")  # matrix by matrix, and every tensor after a pass over the whole model
LARGER_VOCABULARY = "paper's llama, larger vocabulary"
SHARDS = ("--shard-size", "4kB")
QUICK = {"adamerging": "-s steps=3 -s batch_size=4", "wudi": "-s steps=20"}
"""Options of methods that would take long."""


@dataclass(frozen=True)
class Command:
    """Arguments of `acemerge`; standard output goes to a file if one is named; `killed_at`: dies when it opens such a file."""

    arguments: tuple[str, ...]
    printed: str | None = None
    killed_at: str | None = None


@dataclass(frozen=True)
class Case:
    """Commands that write below `folder`. `same`: pairs of folders in it that must be equal, too."""

    name: str
    commands: list[Command]
    same: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> str:
        """Where its outputs are."""
        return self.name.replace(" ", "_")


@dataclass(frozen=True)
class Models:
    """A base and its experts, by name."""

    base: Path
    experts: Mapping[str, Path]

    @property
    def paths(self) -> list[Path]:
        """The base first."""
        return [self.base, *self.experts.values()]


class Zoo:
    """Makes the models below a folder, each when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[str, Models] = {}

    def models(self, name: str) -> Models:
        """The base and the experts of that name."""
        if name not in self._made:
            with lora_zoo.quiet():
                self._made[name] = MAKERS[name](self.folder / name.replace(" ", "_"))
        return self._made[name]

    def rows(self, name: str) -> Path:
        """Rows for the experts of these models."""
        folder = self.folder / f"{name}-rows"
        return folder if folder.exists() else write_rows(folder, self.models(name).experts, pixels=name == "vit")


# --- models ------------------------------------------------------------------------------------------------------------


def _of(make: Callable[..., model_zoo.Models], *arguments: Any, **settings: Any) -> Callable[[Path], Models]:
    def made(folder: Path) -> Models:
        found = make(folder, *arguments, **settings)
        return Models(found.base, found.experts)

    return made


def _paper(make: Callable[..., Any], experts: Any) -> Callable[[Path], Models]:
    def made(folder: Path) -> Models:
        make(folder, experts)
        return Models(folder / "base", {name: folder / name for name in experts})

    return made


def _torch_files(folder: Path) -> Models:
    paper_zoo.open_clip_models(folder, ("MNIST", "STL10"))
    places = {task: folder / "ViT-B-32" / f"{task}Val" for task in ("MNIST", "STL10")}
    experts = {task: place / "nonlinear_finetuned.pt" for task, place in places.items()}
    return Models(places["MNIST"] / "nonlinear_zeroshot.pt", experts)


def _adapters(class_name: str, full: Sequence[str] = ()) -> Callable[[Path], Models]:
    """Adapters; those named in `full` as the whole models that peft makes of them."""

    def made(folder: Path) -> Models:
        zoo = lora_zoo.build(folder, class_name)
        return Models(zoo.base, {name: zoo.full[name] if name in full else zoo.adapters[name] for name in zoo.adapters})

    return made


def _adapters_with_heads(folder: Path) -> Models:
    base = lora_zoo.write_base(folder / "base", "RobertaForMaskedLM")
    settings: dict[str, Any] = {"r": 2, "target_modules": ["query", "value"], "task_type": "SEQ_CLS"}
    experts = {
        name: lora_zoo.write_adapter(
            base, folder / name, "RobertaForSequenceClassification", seed=labels, labels=labels, **settings
        )
        for name, labels in model_zoo.LABELS.items()
    }
    return Models(base, experts)


FAMILIES: dict[str, Callable[[Path], Models]] = {
    "bert": _of(model_zoo.bert),
    "roberta": _of(model_zoo.roberta),
    "distilbert": _of(model_zoo.distilbert),
    "gpt2": _of(model_zoo.gpt2),
    "llama": _of(model_zoo.llama, tied=False),
    "llama tied": _of(model_zoo.llama, tied=True),
    "t5": _of(model_zoo.t5),
    "vit": _of(model_zoo.vit),
    "clip": _of(model_zoo.clip),
    "clip vision experts": _of(model_zoo.clip, expert="CLIPVisionModel"),
    "clip vision": _of(model_zoo.clip_vision),
    "open_clip": _of(model_zoo.open_clip),
    "generic": _of(model_zoo.unknown),
    "generic with a model_type": _of(model_zoo.unknown, model_type="nobody-heard-of-it"),
    "paper's clip": _paper(paper_zoo.clip_models, ("MNIST", "STL10")),
    "paper's open_clip, torch files": _torch_files,
    "paper's gpt2": _paper(paper_zoo.gpt2_models, {"cola": 2, "mnli": 3}),
    "paper's roberta": _paper(paper_zoo.roberta_models, {"cola": 2, "stsb": 0}),
    LARGER_VOCABULARY: _paper(paper_zoo.llama_models, ("math", "coding")),
}
WITH_HEADS = ("bert", "roberta", "distilbert", "gpt2", "vit", "paper's gpt2", "paper's roberta")
PRECISIONS = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16 experts of a float32 base": (torch.float32, torch.float16),
    "float64 experts of a bfloat16 base": (torch.bfloat16, torch.float64),
}
WITH_OWN_HEADS = "adapters with heads"
ADAPTERS = {**{f"adapters of {name}": _adapters(name) for name in lora_zoo.LORAS}, WITH_OWN_HEADS: _adapters_with_heads}
MIXED = "adapters and a whole model"

MAKERS = {
    **FAMILIES,
    **{
        name: _of(model_zoo.build_from_shapes, model_zoo.UNKNOWN_SHAPES, base_dtype=base, expert_dtype=expert)
        for name, (base, expert) in PRECISIONS.items()
    },
    **ADAPTERS,
    MIXED: _adapters("LlamaForCausalLM", ("code",)),
}


# --- commands ----------------------------------------------------------------------------------------------------------


def all_cases(zoo: Zoo, methods: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Everything; `methods` is what `acemerge methods --json` says."""
    return [
        *(_family(zoo, name) for name in FAMILIES),
        *(_precision(zoo, name) for name in PRECISIONS),
        *(_method(zoo, method) for method in methods),
        *(_as_model_and_adapter(zoo, name) for name in [*ADAPTERS, MIXED]),
        _rules(zoo),
        _flags(zoo),
        *_sweeps(zoo),
        *(_resumed(zoo, name) for name in ("ace", "ties", "emr")),
        *(_ray(zoo, name) for name in ("ace", "emr")),
        *(_pages(zoo, name) for name in ("bert", "adapters of GPT2LMHeadModel")),
    ]


class _Writer:
    """The commands of one case, and where they write."""

    def __init__(self, zoo: Zoo, name: str) -> None:
        self.case = Case(name, [])
        self._zoo = zoo

    def run(self, *arguments: object, printed: str | None = None, killed_at: str | None = None) -> None:
        file = f"{self.case.folder}/{printed}" if printed else None
        self.case.commands.append(Command(tuple(map(str, arguments)), file, killed_at))

    def merge(self, models: str, output: str, *flags: object, experts: int | None = None) -> str:
        """Returns the folder that the merge writes."""
        folder = f"{self.case.folder}/{output}"
        self.run("merge", *self.inputs(models, experts), "-o", folder, "-q", *flags)
        return folder

    def inputs(self, models: str, experts: int | None = None) -> list[Path]:
        """The models as arguments; files that are named alike as a recipe that gives them names."""
        chosen = self._zoo.models(models)
        if chosen.base.is_dir():
            return chosen.paths[: None if experts is None else experts + 1]
        named = [{"model": str(path), "name": name} for name, path in chosen.experts.items()]
        return [self.recipe(models.split(",")[0], {"base": str(chosen.base), "experts": named})]

    def recipe(self, name: str, content: Mapping[str, Any]) -> Path:
        path = self._zoo.folder / f"{name.replace(' ', '_')}.yaml"
        path.write_text(yaml.safe_dump(dict(content)))
        return path

    def tasks(self, merged: str, experts: Iterable[str]) -> None:
        """Each expert's own model."""
        for expert in experts:
            self.run("task", merged, expert, "-o", f"{merged}-{expert}")


def _family(zoo: Zoo, name: str) -> Case:
    write = _Writer(zoo, f"family {name}")
    # Embeddings of another size are kept by matrix methods; others refuse them.
    methods = ("ace", "tsv_m") if name == LARGER_VOCABULARY else TWO_KINDS
    merged = [write.merge(name, method, "-m", method) for method in methods]
    write.run("verify", merged[0], "--json", printed="verified.json")
    if name in WITH_HEADS:
        write.tasks(merged[0], zoo.models(name).experts)
    return write.case


def _precision(zoo: Zoo, name: str) -> Case:
    write = _Writer(zoo, f"precision {name}")
    for method in (*TWO_KINDS, "emr"):
        merged = write.merge(name, method, "-m", method, *SHARDS)
        write.merge(name, f"{method}-in-float16", "-m", method, "--dtype", "float16")
    write.tasks(merged, ["red"])
    return write.case


def _method(zoo: Zoo, method: Mapping[str, Any]) -> Case:
    """On models with differing heads, on transposed matrices in shards of half precision, and on adapters."""
    name = method["name"]
    write = _Writer(zoo, f"method {name}")
    experts = 2 if name == "slerp" else None
    quick = QUICK.get(name, "").split()
    for models, flags in (("bert", []), ("gpt2", [*SHARDS, "--dtype", "bfloat16"])):
        data = ["--data", zoo.rows(models)] if method["uses"] == "data" else []
        merged = write.merge(models, models, "-m", name, *quick, *data, *flags, experts=experts)
        if method["per_task"]:
            write.tasks(merged, zoo.models(models).experts)
    if method["uses"] == "weights":
        write.merge("adapters of LlamaForCausalLM", "adapters", "-m", name, *quick, experts=experts)
    return write.case


def _as_model_and_adapter(zoo: Zoo, name: str) -> Case:
    write = _Writer(zoo, name)
    write.merge(name, "model")
    write.merge(name, "model-ties", "-m", "ties")
    if name != MIXED:
        adapter = write.merge(name, "adapter", "--as", "adapter")
        write.merge(name, "adapter-rank-2", "-m", "tsv_m", "--as", "adapter", "--rank", "2", "--dtype", "bfloat16")
    if name == WITH_OWN_HEADS:
        write.tasks(adapter, zoo.models(name).experts)
    return write.case


def _rules(zoo: Zoo) -> Case:
    write = _Writer(zoo, "recipe with rules")
    models = zoo.models("bert")
    rules = [
        {"match": "*attention*", "method": "ties", "options": {"keep": 0.4}},
        {"match": "*layer.1.*", "method": "tsv_m"},
        {"match": "*embeddings*", "do": "keep"},
    ]
    content = {
        "base": str(models.base),
        "experts": [{"model": str(path), "name": f"the-{name}-one"} for name, path in models.experts.items()],
        "method": "ace",
        "options": {"epsilon": 1e-3},
        "tensors": rules,
    }
    write.run("merge", write.recipe("rules", content), "-o", f"{write.case.folder}/out", "-q", "--report")
    return write.case


def _flags(zoo: Zoo) -> Case:
    write = _Writer(zoo, "other flags")
    write.merge("gpt2", "stored", "--orientation", "stored")
    write.merge("bert", "generic", "--preset", "generic", "--missing", "skip")
    write.merge("vit", "verified", "--verify", "--no-resume", "-m", "ace", "-s", "epsilon=1e-3", "-s", "refine=false")
    write.merge("llama", "threads", "--threads", "2", "-m", "ties", "-s", "scope=tensor")
    return write.case


def _sweeps(zoo: Zoo) -> list[Case]:
    score = zoo.folder / "score.py"
    score.write_text(_SCORE)
    evaluate = ["--evaluate", shlex.join([sys.executable, "-S", str(score)])]

    plain = _Writer(zoo, "sweep")
    grids: dict[str, tuple[str, list[object]]] = {
        "ace": ("bert", ["-m", "ace", "-s", "epsilon=1e-4,1e-2", "-s", "k_frac=0.1,0.5", "-s", "tau=0,0.3"]),
        "ties": ("gpt2", ["-m", "ties", "-s", "keep=0.1,0.3", "-s", "alpha=0.5,1", *SHARDS]),
        "emr": ("vit", ["-m", "emr", "-s", "alpha=0.5,1"]),
        "wudi": ("llama", ["-m", "wudi", "-s", "mode=closed_form", "-s", "alpha=0.5,1"]),
        "regmean": ("bert", ["-m", "regmean", "-s", "off_diagonal=0.5,0.9", "--data", zoo.rows("bert")]),
        "adapters": ("adapters of LlamaForCausalLM", ["-m", "ace", "-s", "epsilon=1e-4,1e-2", "--as", "adapter"]),
    }
    for name, (models, flags) in grids.items():
        plain.run("sweep", *plain.inputs(models), "-o", f"sweep/{name}", "-q", *flags)

    scored = _Writer(zoo, "sweep with evaluate")
    for keep in ("best", "all", "none"):
        flags = [*grids["ace"][1], "--keep", keep, "--at-once", "3", "--minimise", "loss", *evaluate]
        scored.run("sweep", *scored.inputs("bert"), "-o", f"{scored.case.folder}/{keep}", "-q", *flags)
    return [plain.case, scored.case]


_SCORE = '''"""Scores that depend on every byte of a model's weights."""
import hashlib, json, pathlib, sys
weights = b"".join(path.read_bytes() for path in sorted(pathlib.Path(sys.argv[1]).glob("*.safetensors")))
digest = hashlib.sha256(weights).digest()
print(json.dumps({"accuracy": digest[0] / 255, "loss": digest[1] / 255}))
'''


def _resumed(zoo: Zoo, method: str) -> Case:
    write = _Writer(zoo, f"resumed {method}")
    merge = ["merge", *write.inputs("gpt2"), "-m", method, "-q", *SHARDS]
    write.run(*merge, "-o", f"{write.case.folder}/whole")
    write.run(*merge, "-o", f"{write.case.folder}/resumed", killed_at="model-00004-of-*.safetensors")
    write.run(*merge, "-o", f"{write.case.folder}/resumed")
    return Case(write.case.name, write.case.commands, (("whole", "resumed"),))


def _ray(zoo: Zoo, method: str) -> Case:
    write = _Writer(zoo, f"ray {method}")
    write.merge("generic", "local", "-m", method, *SHARDS)
    write.merge("generic", "ray", "-m", method, *SHARDS, "--engine", "ray")
    return Case(write.case.name, write.case.commands, (("local", "ray"),))


def _pages(zoo: Zoo, name: str) -> Case:
    """The page of a merge with its figures, and that of a diagnosis with its numbers."""
    write = _Writer(zoo, f"pages {name}")
    folder = write.case.folder
    write.run("report", write.merge(name, "out"), "-o", f"{folder}/report.html", "--figures", f"{folder}/figures")
    write.run("diagnose", *write.inputs(name), "-q", "--json", "-o", f"{folder}/diagnosis.html", printed="diagnosis.json")
    return write.case
