"""Zero-shot heads: a class is the mean of its prompts' text embeddings. They belong to the task and are never merged."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from acemerge.bench.data.task import Prompts
from acemerge.bench.domains.text import quiet_transformers
from acemerge.cache import cache_folder
from acemerge.checkpoints.content_hash import named_sha256
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.errors import InputError
from acemerge.output.whole_files import replace_file
from acemerge.output.writer import write_tensors

_TEXTS_AT_ONCE = 256


@cache
def prompts_of(task: str) -> Prompts:
    """Class names in the order of the labels, and templates.

    They are those of OpenAI's CLIP (MIT licence), in FusionBench's order and spelling, with which the hub's experts were trained.
    """
    found = json.loads((files(__package__) / "prompts.json").read_text(encoding="utf-8"))[task]
    return Prompts(task, tuple(found["classes"]), tuple(found["templates"]))


class Heads(Protocol):
    """Where the classes' vectors come from."""

    def of(self, prompts: Prompts) -> Tensor:
        """[class, feature], the temperature included."""


@dataclass(frozen=True)
class ZeroShotHeads:
    """From the text side of a CLIP model."""

    clip: Path
    device: str = "cpu"

    def of(self, prompts: Prompts) -> Tensor:
        """Computed once, then kept in the cache."""
        file = cache_folder() / "heads" / f"{prompts.task}-{self._digest(prompts)}.safetensors"
        if not file.is_file():
            with replace_file(file) as staged:
                write_tensors(staged, {"head": self._embed(prompts)})
        return open_checkpoint(file, prompts.task).read("head")

    def _digest(self, prompts: Prompts) -> str:
        weights = [named_sha256(path) for path in open_checkpoint(self.clip, self.clip.name).files]
        return hashlib.sha256(repr((weights, prompts)).encode()).hexdigest()[:16]

    @torch.inference_mode()
    def _embed(self, prompts: Prompts) -> Tensor:
        """Embed every prompt, normalise, average over a class's prompts, normalise again."""
        from transformers import AutoTokenizer, CLIPTextModelWithProjection

        quiet_transformers()
        tokenizer = AutoTokenizer.from_pretrained(self.clip, trust_remote_code=False)
        loaded: Any = CLIPTextModelWithProjection.from_pretrained(self.clip)
        model = loaded.to(self.device).eval()
        texts = [template.replace("{}", name) for name in prompts.classes for template in prompts.templates]
        embedded = []
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            tokens = tokenizer(texts[start : start + _TEXTS_AT_ONCE], padding=True, truncation=True, return_tensors="pt")
            embedded.append(normalize(model(**tokens.to(self.device)).text_embeds.float().cpu()))
        by_class = torch.cat(embedded).reshape(len(prompts.classes), len(prompts.templates), -1)
        scale = open_checkpoint(self.clip, self.clip.name).read("logit_scale").float().exp()
        return scale * normalize(by_class.mean(1))


@dataclass(frozen=True)
class StoredHeads:
    """From files beside OpenCLIP checkpoints: `head_<Task>Val.safetensors`, or `.pt` if it holds plain tensors."""

    folder: Path
    names: dict[str, str]
    """Of each task, as the files call it."""
    otherwise: Heads
    """For tasks without a file."""

    def of(self, prompts: Prompts) -> Tensor:
        """The file's weight."""
        stem = f"head_{self.names[prompts.task]}Val"
        for file in (self.folder / f"{stem}.safetensors", self.folder / f"{stem}.pt"):
            if file.is_file():
                return _read_head(file, len(prompts.classes))
        return self.otherwise.of(prompts)


def _read_head(file: Path, classes: int) -> Tensor:
    try:
        head = open_checkpoint(file, file.name)
    except InputError as error:
        if file.suffix != ".pt":
            raise
        raise InputError(
            f"{file}: a pickled module, which could run code when loaded, so it is not. If you trust it, convert it where its "
            f"own code is importable: python -c \"import torch, safetensors.torch as s; h = torch.load('{file.name}', "
            f"weights_only=False, map_location='cpu'); s.save_file({{'weight': h.weight.detach().contiguous()}}, "
            f"'{file.stem}.safetensors')\"; or remove it, and the head is made from the prompts"
        ) from error
    if "weight" not in head.tensors:
        raise InputError(f"{file}: expected a tensor 'weight' [class, feature], found {', '.join(head.tensors)}")
    weight = head.read("weight").float()
    if "bias" in head.tensors and head.read("bias").any():
        raise InputError(f"{file}: has a bias, which a zero-shot head has not; is it another kind of head?")
    if len(weight) != classes:
        raise InputError(f"{file}: has {len(weight)} classes, the task {classes}; is it the head of another task?")
    return weight
