"""Adapters of mlx-lm and of kohya's scripts: the same changes as their formulas, or refused by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import acemerge
from acemerge.adapters.adapter import is_adapter
from acemerge.checkpoints.folder import open_checkpoint
from adapter_reading import LLAMA, Bases, Refuse, read
from model_zoo import Tensors

Q, DOWN, EMBEDDING = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.embed_tokens"
SETTINGS = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 3, "scale": 20.0, "dropout": 0.0}}


def factors(base: Path, modules: tuple[str, ...] = (Q, DOWN), rank: int = 3, seed: int = 0) -> Tensors:
    """As mlx-lm stores them; an embedding maps tokens to its width."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: header.shape for name, header in open_checkpoint(base, "base").tensors.items()}
    made = {}
    for module in modules:
        outputs, inputs = shapes[f"{module}.weight"][:: -1 if module == EMBEDDING else 1]
        made[f"{module}.lora_a"] = torch.randn(inputs, rank, generator=generator) / 10
        made[f"{module}.lora_b"] = torch.randn(rank, outputs, generator=generator) / 10
    return made


def mlx(folder: Path, tensors: Tensors, **changed: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**SETTINGS, **changed}))
    save_file(tensors, folder / "adapters.safetensors")
    return folder


def kohya(file: Path, base: Path, alpha: float | None = 2.0, prefix: str = "lora_te_") -> Path:
    """Two modules of different ranks."""
    tensors = {}
    for module, rank in ((Q, 3), (DOWN, 2)):
        own = factors(base, (module,), rank)
        name = prefix + module.replace(".", "_")
        tensors[f"{name}.lora_down.weight"] = own[f"{module}.lora_a"].T.contiguous()
        tensors[f"{name}.lora_up.weight"] = own[f"{module}.lora_b"].T.contiguous()
        if alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(alpha)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file)
    return file


@pytest.mark.parametrize("modules", [(Q, DOWN), (EMBEDDING,)])
def test_mlx_changes_are_its_formula(modules: tuple[str, ...], bases: Bases, tmp_path: Path) -> None:
    own = factors(bases(LLAMA), modules)
    _, found = read(bases(LLAMA), mlx(tmp_path / "adapter", own))
    for module in modules:
        a, b = own[f"{module}.lora_a"].double(), own[f"{module}.lora_b"].double()
        expected = 20.0 * (a @ b) if module == EMBEDDING else 20.0 * (a @ b).T
        assert (found[f"{module}.weight"] - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert sum(bool(change.any()) for change in found.values()) == len(modules)


def test_mlx_dora_is_its_formula(bases: Bases, tmp_path: Path) -> None:
    own = factors(bases(LLAMA), (Q,))
    W = open_checkpoint(bases(LLAMA), "base").read(f"{Q}.weight").double()
    own[f"{Q}.m"] = (1.5 * W.norm(dim=1)).float()
    _, found = read(bases(LLAMA), mlx(tmp_path / "adapter", own, fine_tune_type="dora"))
    adapted = W + 20.0 * (own[f"{Q}.lora_a"].double() @ own[f"{Q}.lora_b"].double()).T
    expected = (own[f"{Q}.m"].double() / adapted.norm(dim=1))[:, None] * adapted - W
    assert (found[f"{Q}.weight"] - expected).abs().max() <= 1e-5 * expected.abs().max()


UNUSED = "model.layers.1.self_attn.k_of_another_layer"


def with_unused(base: Path) -> Tensors:
    """A module that the base does not have, as mlx-lm saves it where the model never uses it: untrained."""
    return {**factors(base), f"{UNUSED}.lora_a": torch.randn(8, 3), f"{UNUSED}.lora_b": torch.zeros(3, 8)}


def test_mlx_modules_that_were_never_trained_may_be_missing_in_the_base(bases: Bases, tmp_path: Path) -> None:
    base = bases(LLAMA)
    _, expected = read(base, mlx(tmp_path / "without", factors(base)))
    expert, found = read(base, mlx(tmp_path / "with", with_unused(base)))
    assert f"{UNUSED}.weight" not in expert.tensors
    assert all(change.equal(expected[name]) for name, change in found.items())


def test_mlx_modules_that_were_trained_must_be_in_the_base(bases: Bases, tmp_path: Path, refusal: Refuse) -> None:
    base = bases(LLAMA)
    trained = {**with_unused(base), f"{UNUSED}.lora_b": torch.full((3, 8), 1e-9)}
    assert f"'{UNUSED}.weight'" in refusal(base, mlx(tmp_path / "trained", trained))
    of_nothing = {key: value for key, value in with_unused(base).items() if UNUSED in key}
    assert f"'{UNUSED}.weight'" in refusal(base, mlx(tmp_path / "another", of_nothing))


@pytest.mark.parametrize("alpha", [2.0, None])
@pytest.mark.parametrize("prefix", ["lora_te_", "lora_te1_", "lora_unet_", "lora_transformer_"])
def test_kohya_changes_are_its_formula(alpha: float | None, prefix: str, bases: Bases, tmp_path: Path) -> None:
    file = kohya(tmp_path / "folder" / "style.safetensors", bases(LLAMA), alpha, prefix)
    for given in (file, file.parent):
        assert is_adapter(given)
        _, found = read(bases(LLAMA), given)
        for module, rank in ((Q, 3), (DOWN, 2)):
            name = prefix + module.replace(".", "_")
            down, up = (load_file(file)[f"{name}.lora_{part}.weight"].double() for part in ("down", "up"))
            expected = (1.0 if alpha is None else alpha / rank) * up @ down
            assert (found[f"{module}.weight"] - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_they_merge_as_their_expanded_models_do(bases: Bases, tmp_path: Path) -> None:
    base = bases(LLAMA)
    adapters = [mlx(tmp_path / "mlx", factors(base)), kohya(tmp_path / "kohya.safetensors", base)]
    acemerge.merge(base, adapters, tmp_path / "out", method="average", quiet=True)
    before, merged = open_checkpoint(base, "base"), open_checkpoint(tmp_path / "out", "out")
    changes = [read(base, adapter)[1] for adapter in adapters]
    for name in (f"{Q}.weight", f"{DOWN}.weight"):
        expected = before.read(name) + (changes[0][name] + changes[1][name]) / 2
        assert (merged.read(name) - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_one_peft_adapter_out(bases: Bases, tmp_path: Path) -> None:
    base = bases(LLAMA)
    adapters = [mlx(tmp_path / str(seed), factors(base, seed=seed)) for seed in (1, 2)]
    acemerge.merge(base, adapters, tmp_path / "out", method="average", save_as="adapter", quiet=True)
    found = read(base, tmp_path / "out")[1]
    expected = [read(base, adapter)[1] for adapter in adapters]
    for name, change in found.items():
        assert (change - (expected[0][name] + expected[1][name]) / 2).abs().max() <= 1e-5, name


def test_the_adapter_written_has_the_names_of_the_base_not_of_the_trainer(bases: Bases, tmp_path: Path) -> None:
    base = bases(LLAMA)
    adapters = [
        mlx(tmp_path / str(seed), {f"language_model.{key}": value for key, value in factors(base, seed=seed).items()})
        for seed in (1, 2)
    ]
    acemerge.merge(base, adapters, tmp_path / "out", method="average", save_as="adapter", quiet=True)
    written = open_checkpoint(tmp_path / "out" / "adapter_model.safetensors", "out").tensors
    assert {name.rsplit(".lora_")[0] for name in written} == {f"base_model.model.{module}" for module in (Q, DOWN)}
    model = AutoModelForCausalLM.from_pretrained(base)
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    merged = PeftModel.from_pretrained(model, str(tmp_path / "out")).merge_and_unload().state_dict()
    changed = {name for name, value in merged.items() if not torch.equal(value, before[name])}
    assert changed == {f"{Q}.weight", f"{DOWN}.weight"}


def test_another_process_reads_the_same(bases: Bases, tmp_path: Path) -> None:
    expert, found = read(bases(LLAMA), mlx(tmp_path / "adapter", factors(bases(LLAMA))))
    assert expert.changes is not None
    change = pickle.loads(pickle.dumps(expert.changes[f"{Q}.weight"]))
    assert change.expand(torch.empty(0)).equal(found[f"{Q}.weight"])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type 'full'; acemerge reads lora and dora. Merge it"),
        ({"lora_parameters": {"rank": 3}}, "the scale in lora_parameters is None, not a number"),
        ({"lora_parameters": {"scale": 1.0}}, "the rank in lora_parameters is None"),
        ({"lora_parameters": None}, "without lora_parameters"),
        ({"lora_parameters": {"rank": 4, "scale": 1.0}}, "has rank 3, adapter_config.json says 4"),
        ({"lora_layers": 2, "lora_parameters": {"rank": 3, "scale": 1.0, "alpha": 16}}, "both scale=1.0 and alpha=16"),
    ],
)
def test_mlx_settings_refused(settings: dict[str, Any], told: str, bases: Bases, tmp_path: Path, refusal: Refuse) -> None:
    adapter = mlx(tmp_path / "adapter", factors(bases(LLAMA)), **settings)
    assert told in " ".join(refusal(bases(LLAMA), adapter).split())


@pytest.mark.parametrize(
    ("key", "shape", "told"),
    [
        ("model.layers.0.mlp.switch_mlp.up_proj.lora_a", (4, 3, 8), "stacked experts of a mixture"),
        ("model.layers.0.self_attn.qkv_proj.lora_a.0", (8, 3), "is no lora_a, lora_b or m"),
        (f"{EMBEDDING}.m", (8,), "DoRA on an embedding"),
        (f"{Q}.m", (8, 1), "has shape [8, 1], which is no m"),
    ],
)
def test_mlx_tensors_refused(key: str, shape: tuple[int, ...], told: str, bases: Bases, tmp_path: Path, refusal: Refuse) -> None:
    adapter = mlx(tmp_path / "adapter", {**factors(bases(LLAMA)), key: torch.ones(shape)})
    message = " ".join(refusal(bases(LLAMA), adapter).split())
    assert told in message
    assert key in message


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("lora_te_text_model_q.lora_down.weight", "stands for no matrix of base"),
        ("lora_te_model_norm.hada_w1_a", "a kohya network other than LoRA"),
        ("unet.down_blocks.0.to_q.lora_A.weight", "diffusers-style LoRA"),
        ("unet.down_blocks.0.to_q_lora.down.weight", "diffusers-style LoRA"),
    ],
)
def test_kohya_tensors_refused(key: str, told: str, bases: Bases, tmp_path: Path, refusal: Refuse) -> None:
    file = kohya(tmp_path / "style.safetensors", bases(LLAMA))
    save_file({**load_file(file), key: torch.ones(2, 2)}, file)
    message = " ".join(refusal(bases(LLAMA), file).split())
    assert told in message
    assert key in message
