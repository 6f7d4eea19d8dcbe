"""Models that other people trained: a fine-tune of our base that must merge, and models of no common base that must not.

`sre-embedding-model` is somebody's fine-tune of all-MiniLM-L6-v2 for sentences about operating computer systems. Its own work is
to put a term next to what operators mean by it, so it is tested by finding the term for every meaning (`operations_terms`). The
folds of `transcript-transformer` were each trained from their own random start: nothing in their weights corresponds.
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

from acemerge.bench.data.operations_terms import TERMS
from acemerge.bench.data.packages import Package
from acemerge.bench.domains.text import quiet_transformers
from acemerge.bench.measure.evaluation import evaluate
from acemerge.bench.measure.experts import Say
from acemerge.bench.measure.merging import merge_experts
from acemerge.bench.measure.metrics import Accuracy, Estimate
from acemerge.bench.suites.registry import Suite
from acemerge.cache import cache_folder
from acemerge.output.task_models import export_expert
from acemerge.output.whole_files import replace_folder
from acemerge.planning.kinship import RELATED

SRE = Package(
    "python", "sre-embedding-model", "1.0.0", "sre_embedding_model-1.0.0-py3-none-any.whl",
    "331acba0710211462cda9adaac17e32916cb3e1a9e69528195a68a851b1f523e",
)  # fmt: skip
FOLDS = Package(
    "python", "transcript-transformer", "1.1.1", "transcript_transformer-1.1.1-py3-none-any.whl",
    "a25d60300432760778a52fcdf882f3ce65cd4584307394d47076989388eb3cef",
)  # fmt: skip


METHODS = ("ace", "tsv_m", "cart", "task_arithmetic", "average")


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
        with replace_folder(folder) as staging:
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
    terms_found: dict[str, float]
    """For how many of the meanings a model's nearest term is the right one."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        share = {"without": self.without, "together": self.together}
        accuracy = {name: {task: asdict(score) for task, score in found.items()} for name, found in share.items()}
        return {"related": self.related, "accuracy": accuracy, "terms_found": self.terms_found}

    def grids(self) -> list[list[list[str]]]:
        """As tables."""
        accuracy = [["task", "our experts", "with sre"]]
        accuracy += [[t, f"{100 * self.without[t].share:.1f}", f"{100 * self.together[t].share:.1f}"] for t in self.without]
        terms = [["model", "terms found by their meaning"], *([n, f"{100 * s:.1f}"] for n, s in self.terms_found.items())]
        verdict = [["expert", "median cosine with base", "fine-tune of the base?"]]
        verdict += [[n, f"{c:.3f}", "yes" if c > RELATED else "NO: do not merge"] for n, c in self.related.items()]
        return [accuracy, terms, verdict]


def measure_third_party(suite: Suite, limit: int, say: Say) -> ThirdParty:
    """Merge with and without the third-party model: our tasks with what ACE merged, the model's own work with every method."""
    experts, own = suite.experts(0), suite.folders(0)
    rows = {task.name: suite.domain.prepare(task.load().test.first(limit)) for task in suite.tasks}
    everyone = {**own, "sre": sre_folder()}
    terms = {"base": terms_found(experts.base), "sre": terms_found(sre_folder())}
    accuracy = {}
    for method in METHODS:
        for label, models in (("without sre", own), ("with sre", everyone)):
            with tempfile.TemporaryDirectory(prefix="acemerge-bench-") as temporary:
                merged, single = Path(temporary) / "merged", Path(temporary) / "task"
                merge_experts(experts.base, models, merged, {"method": method})
                terms[f"{method} {label}"] = terms_found(merged)
                if method == "ace":
                    heads = {name: export_expert(merged, name, single / name) for name in own}
                    accuracy[label] = {n: evaluate(suite.domain, suite.domain.load(heads[n]), rows[n]) for n in own}
            say(f"merged by {method} {label}")
    return ThirdParty(_related(experts.base, everyone), accuracy["without sre"], accuracy["with sre"], terms)


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
def terms_found(folder: Path) -> float:
    """The share of meanings whose nearest term, by the cosine of the means of token vectors, is the right one."""
    from transformers import AutoTokenizer, BertModel

    quiet_transformers()
    model: torch.nn.Module = BertModel.from_pretrained(folder, add_pooling_layer=False)
    tokens = AutoTokenizer.from_pretrained(sre_folder(), trust_remote_code=False)(
        [*TERMS, *TERMS.values()], padding=True, return_tensors="pt"
    )
    mask = tokens["attention_mask"].unsqueeze(-1)
    vectors = torch.nn.functional.normalize((model(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1))
    terms, meanings = vectors.chunk(2)
    return float(((meanings @ terms.T).argmax(1) == torch.arange(len(terms))).float().mean())
