"""Models that other people trained: a fine-tune of our base that must merge, and models of no common base that must not.

`sre-embedding-model` is somebody's fine-tune of all-MiniLM-L6-v2 for sentences about operating computer systems. It has no labels
to be tested with, so it counts as working when the merged model finds the same nearest sentences as it does. The folds of
`transcript-transformer` were each trained from their own random start: nothing in their weights corresponds.
"""

from __future__ import annotations

import io
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import acemerge
from acemerge.bench.evaluation import evaluate
from acemerge.bench.experts import Say, appearing
from acemerge.bench.packages import Package, cache_folder
from acemerge.bench.suites import Suite
from acemerge.bench.text import PreparedTexts, TextDomain, quiet_transformers
from acemerge.bench.text_tasks import load_commits
from acemerge.diagnosis.findings import RELATED
from acemerge.evaluate.metrics import Accuracy, Estimate

SRE = Package(
    "python", "sre-embedding-model", "1.0.0", "sre_embedding_model-1.0.0-py3-none-any.whl",
    "331acba0710211462cda9adaac17e32916cb3e1a9e69528195a68a851b1f523e",
)  # fmt: skip
FOLDS = Package(
    "python", "transcript-transformer", "1.1.1", "transcript_transformer-1.1.1-py3-none-any.whl",
    "a25d60300432760778a52fcdf882f3ce65cd4584307394d47076989388eb3cef",
)  # fmt: skip


def relatedness(base: Mapping[str, Tensor], expert: Mapping[str, Tensor]) -> float:
    """The median cosine of their matrices. Some may be constants that all models share, such as tables of positions."""
    matrices = [name for name, value in base.items() if value.dim() == 2 and value.is_floating_point() and name in expert]
    cosines = [torch.nn.functional.cosine_similarity(base[n].flatten(), expert[n].flatten(), 0) for n in matrices]
    return statistics.median(map(float, cosines))


def folds(count: int) -> list[dict[str, Tensor]]:
    """The first of the independently trained models. The files are read without running code."""
    archives = [content for _, content in FOLDS.read_all("*/tt_models/Homo_sapiens*.ckpt")][:count]
    return [torch.load(io.BytesIO(a), weights_only=True, map_location="cpu")["state_dict"] for a in archives]


def sre_folder() -> Path:
    """The third-party fine-tune as a folder."""
    folder = cache_folder() / "models" / "third-party" / "sre"
    if not folder.is_dir():
        with appearing(folder) as staging:
            for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
                (staging / file).write_bytes(SRE.read(f"*/model_weights/{file}"))
    return folder


@dataclass(frozen=True)
class ThirdParty:
    """What merging the third-party model with a suite's experts did."""

    related: dict[str, float]
    """Of every expert to its base, and of one independent model to another."""
    without: dict[str, Accuracy | Estimate]
    together: dict[str, Accuracy | Estimate]
    """Accuracy by task of the experts merged without the third-party model, and with it."""
    same_neighbour: dict[str, float]
    """How often a model's nearest sentence is that of the third-party model."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        share = {"without": self.without, "together": self.together}
        accuracy = {name: {task: asdict(score) for task, score in found.items()} for name, found in share.items()}
        return {"related": self.related, "accuracy": accuracy, "same_neighbour": self.same_neighbour}

    def grids(self) -> list[list[list[str]]]:
        """As tables."""
        accuracy = [["task", "our experts", "with sre"]]
        accuracy += [[t, f"{100 * self.without[t].share:.1f}", f"{100 * self.together[t].share:.1f}"] for t in self.without]
        neighbour = [["model", "same nearest sentence as sre"], *([n, f"{100 * s:.1f}"] for n, s in self.same_neighbour.items())]
        verdict = [["expert", "median cosine with base", "fine-tune of the base?"]]
        verdict += [[n, f"{c:.3f}", "yes" if c > RELATED else "NO: do not merge"] for n, c in self.related.items()]
        return [accuracy, neighbour, verdict]


def measure_third_party(suite: Suite, limit: int, say: Say) -> ThirdParty:
    """Merge by ACE with and without the third-party model; test the tasks, and whether its neighbours are found again."""
    experts, own = suite.experts(0), suite.folders(0)
    rows = {task.name: suite.domain.prepare(task.load().test.first(limit)) for task in suite.tasks}
    sentences = TextDomain().prepare(load_commits().validation)
    near_sre = nearest(sre_folder(), sentences)
    same = {"base": _agreement(near_sre, nearest(experts.base, sentences))}
    accuracy = []
    for label, models in (("our experts", own), ("our experts and sre", {**own, "sre": sre_folder()})):
        with tempfile.TemporaryDirectory(prefix="acemerge-bench-") as temporary:
            place = Path(temporary)
            acemerge.merge(experts.base, models, place / "merged", offline=True, threads=1)
            found = {}
            for name in own:
                folder = acemerge.export_expert(place / "merged", name, place / "task", overwrite=True)
                found[name] = evaluate(suite.domain, suite.domain.load(folder), rows[name])
            accuracy.append(found)
            same[label] = _agreement(near_sre, nearest(place / "merged", sentences))
        say(f"merged {label}")
    without, together = accuracy
    return ThirdParty(_related(experts.base, {**own, "sre": sre_folder()}), without, together, same)


def _related(base: Path, models: Mapping[str, Path]) -> dict[str, float]:
    from safetensors.torch import load_file

    ours = load_file(base / "model.safetensors")
    related = {}
    for name, folder in models.items():
        theirs = {key.removeprefix("bert."): value for key, value in load_file(folder / "model.safetensors").items()}
        related[name] = relatedness(ours, theirs)
    first, *others = folds(3)
    return related | {f"independent fold {i}": relatedness(first, other) for i, other in enumerate(others, 1)}


@torch.inference_mode()
def nearest(folder: Path, sentences: PreparedTexts) -> Tensor:
    """For every sentence, the nearest other one by the cosine of the means of their token vectors."""
    from transformers import BertModel

    quiet_transformers()
    model: torch.nn.Module = BertModel.from_pretrained(folder, add_pooling_layer=False)
    vectors = []
    for indices in torch.split(torch.arange(len(sentences.labels)), 50):
        batch = sentences.batch(indices)
        mask = batch["attention_mask"].unsqueeze(-1)
        vectors.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    unit = torch.nn.functional.normalize(torch.cat(vectors))
    return (unit @ unit.T).fill_diagonal_(-1).argmax(1)


def _agreement(a: Tensor, b: Tensor) -> float:
    return float((a == b).float().mean())
