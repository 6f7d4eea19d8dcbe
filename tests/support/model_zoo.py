"""Tiny checkpoints of every family the tests merge: a random base, and experts that are the base plus seeded noise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from blake3 import blake3
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging as untyped_logging

from reference_ace import reference_ace

logging: Any = untyped_logging
Tensors = dict[str, Tensor]

LAYERS = 2
LABELS = {"red": 2, "green": 3, "blue": 5}  # expert -> labels of its head, where it has one
STRENGTH = {"red": 0.02, "green": 0.05, "blue": 0.1}  # expert -> standard deviation of its noise

_TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 12,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}


@dataclass(frozen=True)
class Models:
    """A base and its experts on disk."""

    base: Path
    experts: dict[str, Path]

    @property
    def folders(self) -> list[Path]:
        return [self.base, *self.experts.values()]


# --- what transformers builds ------------------------------------------------------------------------------------------


def bert(root: Path, base: str = "BertForMaskedLM", expert: str = "BertForSequenceClassification") -> Models:
    return _build(root, base, expert, transformers.BertConfig(**_TEXT))


def roberta(root: Path, expert: str = "RobertaForSequenceClassification") -> Models:
    config = transformers.RobertaConfig(**_TEXT, bos_token_id=0, pad_token_id=1, eos_token_id=2)
    return _build(root, "RobertaForMaskedLM", expert, config)


def distilbert(root: Path) -> Models:
    config = transformers.DistilBertConfig(
        dim=16, n_layers=LAYERS, n_heads=2, hidden_dim=24, vocab_size=40, max_position_embeddings=12
    )
    return _build(root, "DistilBertForMaskedLM", "DistilBertForSequenceClassification", config)


def gpt2(root: Path, base: str = "GPT2LMHeadModel", expert: str = "GPT2ForSequenceClassification") -> Models:
    config = transformers.GPT2Config(
        n_embd=16, n_layer=LAYERS, n_head=2, n_inner=24, vocab_size=40, n_positions=12,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return _build(root, base, expert, config)


def llama(root: Path, *, tied: bool) -> Models:
    config = transformers.LlamaConfig(**_TEXT, num_key_value_heads=1, tie_word_embeddings=tied)
    return _build(root, "LlamaForCausalLM", "LlamaForCausalLM", config)


def t5(root: Path) -> Models:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=24, num_layers=LAYERS, num_heads=2, vocab_size=40, relative_attention_num_buckets=8
    )
    return _build(root, "T5ForConditionalGeneration", "T5ForConditionalGeneration", config)


def vit(root: Path) -> Models:
    return _build(root, "ViTForImageClassification", "ViTForImageClassification", transformers.ViTConfig(**_VISION))


def clip(root: Path, expert: str = "CLIPModel") -> Models:
    text = {**_TEXT, "bos_token_id": 0, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=_VISION, projection_dim=12)
    return _build(root, "CLIPModel", expert, config)


def clip_vision(root: Path) -> Models:
    return _build(root, "CLIPVisionModel", "CLIPVisionModel", transformers.CLIPVisionConfig(**_VISION))


def _build(root: Path, base_class: str, expert_class: str, config: Any) -> Models:
    with quiet_transformers(), torch.random.fork_rng():
        torch.manual_seed(0)
        base = getattr(transformers, base_class)(config)
        _add_noise(base, 0.05, seed=0)
        base.save_pretrained(root / "base")
        for seed, (name, labels) in enumerate(LABELS.items(), 1):
            settings = {"num_labels": labels, "ignore_mismatched_sizes": True} if "Classification" in expert_class else {}
            expert = getattr(transformers, expert_class).from_pretrained(root / "base", **settings)
            _add_noise(expert, STRENGTH[name], seed)
            expert.save_pretrained(root / name)
    return Models(root / "base", {name: root / name for name in LABELS})


def _add_noise(model: Any, strength: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=strength)


# --- what it does not --------------------------------------------------------------------------------------------------


def open_clip(root: Path) -> Models:
    width, hidden, embedding = 16, 24, 12

    def transformer(prefix: str) -> dict[str, tuple[int, ...]]:
        block = {
            "ln_1.weight": (width,), "ln_1.bias": (width,), "ln_2.weight": (width,), "ln_2.bias": (width,),
            "attn.in_proj_weight": (3 * width, width), "attn.in_proj_bias": (3 * width,),
            "attn.out_proj.weight": (width, width), "attn.out_proj.bias": (width,),
            "mlp.c_fc.weight": (hidden, width), "mlp.c_fc.bias": (hidden,),
            "mlp.c_proj.weight": (width, hidden), "mlp.c_proj.bias": (width,),
        }  # fmt: skip
        return {f"{prefix}resblocks.{i}.{name}": shape for i in range(LAYERS) for name, shape in block.items()}

    shapes: dict[str, tuple[int, ...]] = {
        "positional_embedding": (10, width), "text_projection": (width, embedding), "logit_scale": (),
        "token_embedding.weight": (40, width), "ln_final.weight": (width,), "ln_final.bias": (width,),
        "visual.class_embedding": (width,), "visual.positional_embedding": (5, width), "visual.proj": (width, embedding),
        "visual.conv1.weight": (width, 3, 4, 4), "visual.ln_pre.weight": (width,), "visual.ln_pre.bias": (width,),
        "visual.ln_post.weight": (width,), "visual.ln_post.bias": (width,),
        **transformer("transformer."), **transformer("visual.transformer."),
    }  # fmt: skip
    models = build_from_shapes(root, shapes, file="open_clip_model.safetensors")
    for folder in models.folders:
        (folder / "open_clip_config.json").write_text('{"model_cfg": {"embed_dim": 12}}\n')
    return models


UNKNOWN_SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (40, 16),
    "stem.weight": (16, 3, 5),
    "blocks.0.mix.weight": (16, 16),
    "blocks.0.mix.bias": (16,),
    "blocks.0.widen.weight": (24, 16),
    "blocks.0.widen.bias": (24,),
    "blocks.0.fold.weight": (24, 16),  # its bias gives it away as [in, out]
    "blocks.0.fold.bias": (16,),
    "blocks.0.norm.weight": (16,),
    "blocks.0.gate": (),
    "row.weight": (1, 16),
    "column.weight": (16, 1),
}


def unknown(root: Path, model_type: str | None = None) -> Models:
    """A family nobody has heard of, with an integer buffer; without a config, or with a model_type of its own."""
    models = build_from_shapes(root, UNKNOWN_SHAPES)
    for folder in models.folders:
        tensors = read_tensors(folder)
        write_tensors(folder, {**tensors, "steps": torch.tensor([3, len(tensors)])})
        if model_type is not None:
            (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return models


def build_from_shapes(
    root: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    file: str = "model.safetensors",
    base_dtype: torch.dtype = torch.float32,
    expert_dtype: torch.dtype = torch.float32,
) -> Models:
    """Random tensors of these shapes, and experts around them."""
    base = random_tensors(shapes, 0.3, seed=0)
    write_tensors(root / "base", {name: value.to(base_dtype) for name, value in base.items()}, file)
    for seed, (name, strength) in enumerate(STRENGTH.items(), 1):
        noise = random_tensors(shapes, strength, seed)
        write_tensors(root / name, {key: (base[key] + noise[key]).to(expert_dtype) for key in base}, file)
    return Models(root / "base", {name: root / name for name in STRENGTH})


def random_tensors(shapes: Mapping[str, tuple[int, ...]], strength: float, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: strength * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


# --- folders -----------------------------------------------------------------------------------------------------------


def read_tensors(folder: Path) -> Tensors:
    """Every tensor of a folder's safetensors files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def write_tensors(folder: Path, tensors: Tensors, file: str = "model.safetensors") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file, metadata={"format": "pt"})


def rewrite(source: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy of a model's folder with its tensors changed or renamed."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    write_tensors(target, change(read_tensors(source)))
    return target


def copy_models(models: Models, root: Path) -> Models:
    """Copies that a test may change."""
    for folder in models.folders:
        shutil.copytree(folder, root / folder.name)
    return Models(root / models.base.name, {name: root / folder.name for name, folder in models.experts.items()})


def swap_prefix(old: str, new: str) -> Callable[[Tensors], Tensors]:
    """For `rewrite`: the names that start with `old` start with `new` instead."""
    return lambda tensors: {new + name.removeprefix(old) if name.startswith(old) else name: tensors[name] for name in tensors}


def file_hashes(folder: Path) -> dict[str, str]:
    """Relative path -> hash of every file below a folder, as manifests have it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): f"blake3:{blake3(path.read_bytes()).hexdigest()}" for path in files}


def load_whole(class_name: str, folder: Path) -> Any:
    """The folder as that transformers class, which must find every weight it needs and no other."""
    model, report = getattr(transformers, class_name).from_pretrained(folder, output_loading_info=True)
    problems = {kind: list(found) for kind, found in report.items() if found}
    assert not problems, f"{class_name} from {folder}: {problems}"
    return model.eval()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers reports fresh heads and progress on stderr; neither is news here."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


# --- what the merge must give, computed from the files -----------------------------------------------------------------


def stacked_deltas(base: Tensor, experts: Iterable[Tensor]) -> Tensor:
    return torch.stack([expert.double() - base.double() for expert in experts])


def ace_weight(base: Tensor, experts: Iterable[Tensor], epsilon: float, *, transpose: bool) -> Tensor:
    deltas = stacked_deltas(base, experts)
    oriented = deltas.transpose(1, 2) if transpose else deltas
    merged = torch.from_numpy(np.asarray(reference_ace(oriented.numpy(), epsilon=epsilon).merged))
    return base.double() + (merged.T if transpose else merged)


def mean_weight(base: Tensor, experts: Iterable[Tensor]) -> Tensor:
    return base.double() + stacked_deltas(base, experts).mean(0)


def assert_same_change(name: str, merged: Tensor, expected: Tensor, base: Tensor, tolerance: float = 1e-4) -> None:
    """Equal to within a share of the change, beyond what storing it in its dtype rounds."""
    change = expected - base.double()
    error = (merged.double() - expected).abs().max()
    rounding = torch.finfo(merged.dtype).eps * expected.abs().max()
    assert error <= tolerance * change.abs().max() + rounding, (
        f"{name}: off by {error:.3g} of a change of {change.abs().max():.3g}"
    )


def assert_equal_tensors(found: Tensors, expected: Tensors) -> None:
    """The same names, and the same bits in each."""
    assert set(found) == set(expected), (
        f"too many: {sorted(set(found) - set(expected))}, {sorted(set(expected) - set(found))} lack"
    )
    differing = [name for name in found if not bitwise_equal(found[name], expected[name])]
    assert not differing, f"differ: {differing}"


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
