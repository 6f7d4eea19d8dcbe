"""Reading PEFT adapters: every change equals what peft's own merge does, and what cannot be read is refused by name."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora.config import BdLoraConfig, KasaConfig

import lora_zoo as zoo
from acemerge.adapters.adapter import Adapter, open_adapter
from acemerge.checkpoints.families import choose_family
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.cli.app import main
from acemerge.errors import InputError
from model_zoo import Tensors, rewrite


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """One base per transformers class, made once."""
    root = tmp_path_factory.mktemp("bases")

    def base(class_name: str) -> Path:
        folder = root / class_name
        return folder if folder.is_dir() else zoo.write_base(folder, class_name)

    return base


Bases = Callable[[str], Path]


def read(base: Path, adapter: Path) -> tuple[Adapter, Tensors]:
    """The adapter, and its change of every tensor of the base."""
    opened = open_checkpoint(base, "base")
    family = choose_family("auto", opened.config, opened.tensors)
    expert = open_adapter(adapter, "expert", opened, family)
    changes = {}
    for name in opened.tensors:
        value = opened.read(name)
        if expert.changes and name in expert.changes:
            changes[name] = expert.changes[name].expand(value)
        elif name in expert.tensors:
            changes[name] = expert.read(name) - value
        else:
            changes[name] = torch.zeros_like(value)
    return expert, changes


def differences(base: Path, full: Path) -> Tensors:
    before, after = open_checkpoint(base, "base"), open_checkpoint(full, "full")
    assert before.tensors.keys() <= after.tensors.keys()
    return {name: after.read(name) - before.read(name) for name in before.tensors}


def assert_equal_changes(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, change in expected.items():
        assert found[name].shape == change.shape, name
        assert (found[name] - change).abs().max() <= 1e-6, name


# --- what is read ------------------------------------------------------------------------------------------------------

GPT2, LLAMA, BERT, ROBERTA, VIT = (
    "GPT2ForSequenceClassification",
    "LlamaForCausalLM",
    "BertForSequenceClassification",
    "RobertaForSequenceClassification",
    "ViTForImageClassification",
)
_TARGETS: dict[str, list[str]] = {
    GPT2: ["c_attn", "c_proj", "c_fc"],
    "GPT2LMHeadModel": ["c_attn", "c_proj"],
    LLAMA: ["q_proj", "k_proj", "down_proj"],
    BERT: ["query", "value", "output.dense"],
    "BertModel": ["query", "value"],
    ROBERTA: ["query", "key", "intermediate.dense"],
    VIT: ["q_proj", "o_proj", "fc1", "fc2"],
}
_EVERYWHERE: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "lora_alpha": 6},
    "dora": {"use_dora": True},
    "bias_all": {"bias": "all"},
    "bias_lora_only": {"bias": "lora_only", "lora_alpha": 12},
}
_SPECIAL: list[tuple[str, str, dict[str, Any]]] = [
    ("rank_pattern", "GPT2LMHeadModel", {"rank_pattern": {"c_proj": 5, "h.1.attn.c_attn": 2}}),
    ("alpha_pattern", "GPT2LMHeadModel", {"alpha_pattern": {"c_proj": 7, r"h\.0\.attn\.c_attn": 1}, "use_rslora": True}),
    (
        "both_patterns",
        LLAMA,
        {"rank_pattern": {"^model.layers.0.self_attn.q_proj": 1, "q_proj": 6}, "alpha_pattern": {"k_proj": 3}},
    ),
    ("both_patterns", VIT, {"rank_pattern": {"fc1": 20}, "alpha_pattern": {"0.mlp.fc1": 5, "q_proj": 3}}),
    ("fan_in_fan_out", GPT2, {"fan_in_fan_out": True}),
    ("no_fan_in_fan_out", GPT2, {"fan_in_fan_out": False}),
    ("embeddings", GPT2, {"target_modules": ["wte", "wpe", "c_attn"], "use_rslora": True}),
    ("embeddings", LLAMA, {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    ("embeddings", "BertModel", {"target_modules": ["word_embeddings", "position_embeddings", "query"]}),
    ("tied_embeddings", "GPT2LMHeadModel", {"target_modules": ["wte", "c_attn"]}),
    ("embeddings_dora", GPT2, {"target_modules": ["wte", "c_attn"], "use_dora": True}),
    ("saved_embeddings", LLAMA, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    ("saved_embeddings_dora", LLAMA, {"modules_to_save": ["embed_tokens"], "use_dora": True, "use_rslora": True}),
    ("saved_norms", BERT, {"modules_to_save": ["LayerNorm"]}),
    ("saved_head", VIT, {"modules_to_save": ["classifier"]}),
    ("lora_bias", "BertModel", {"lora_bias": True, "lora_alpha": 12}),
    ("lora_bias_conv1d", "GPT2LMHeadModel", {"lora_bias": True}),
    ("lora_bias", VIT, {"lora_bias": True, "use_rslora": True}),
    ("conv", VIT, {"target_modules": ["projection", "q_proj"]}),
    ("conv_dora", VIT, {"target_modules": ["projection"], "use_dora": True}),
    ("conv_lora_bias", VIT, {"target_modules": ["projection"], "lora_bias": True}),
    ("conv_rank_above_out", VIT, {"target_modules": ["projection"], "r": 20}),
    ("rank_above_both_sides", LLAMA, {"r": 40}),
    ("all_linear", LLAMA, {"target_modules": "all-linear"}),
    ("layers_to_transform", LLAMA, {"layers_to_transform": [1]}),
    ("exclude_modules", ROBERTA, {"exclude_modules": ["roberta.encoder.layer.0.attention.self.query"]}),
    ("alpha_zero", LLAMA, {"lora_alpha": 0}),
    ("alpha_negative", LLAMA, {"lora_alpha": -3}),
    ("gaussian", LLAMA, {"init_lora_weights": "gaussian"}),
    ("orthogonal", LLAMA, {"init_lora_weights": "orthogonal"}),
    ("mica", LLAMA, {"init_lora_weights": "mica"}),
]
_CASES = [(kind, cls, s) for kind, s in _EVERYWHERE.items() for cls in (GPT2, LLAMA, BERT, ROBERTA, VIT)] + _SPECIAL


@pytest.mark.parametrize(("kind", "class_name", "settings"), _CASES, ids=[f"{kind}-{cls}" for kind, cls, _ in _CASES])
def test_changes_equal_pefts_merge(kind: str, class_name: str, settings: dict[str, Any], bases: Bases, tmp_path: Path) -> None:
    base = bases(class_name)
    with_targets = {"target_modules": _TARGETS[class_name], **settings}
    adapter = zoo.write_adapter(base, tmp_path / "adapter", class_name, **with_targets)
    expected = differences(base, zoo.expand(base, adapter, tmp_path / "full", class_name))
    expert, found = read(base, adapter)
    assert_equal_changes(found, expected)
    assert set(expert.tensors) <= set(found), "names that the base does not have"
    moved = {name for name, change in expected.items() if change.any()}
    assert moved or kind == "alpha_zero"
    assert moved <= set(expert.tensors)


def test_task_types_save_their_head_with_the_adapter(bases: Bases, tmp_path: Path) -> None:
    base = bases(BERT)
    adapter = zoo.write_adapter(base, tmp_path / "adapter", BERT, task_type="SEQ_CLS", target_modules=["query"])
    expert, found = read(base, adapter)
    assert {"classifier.weight", "classifier.bias"} <= set(expert.tensors)
    assert_equal_changes(found, differences(base, zoo.expand(base, adapter, tmp_path / "full", BERT)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("use_dora", [False, True])
def test_factors_of_other_precisions(dtype: torch.dtype, use_dora: bool, bases: Bases, tmp_path: Path) -> None:
    base = bases(LLAMA)
    whole = zoo.write_adapter(base, tmp_path / "whole", LLAMA, target_modules=["q_proj", "up_proj"], use_dora=use_dora)
    adapter = zoo.copy_adapter(whole, tmp_path / "adapter", lambda factors: {n: t.to(dtype) for n, t in factors.items()})
    _, found = read(base, adapter)
    assert_equal_changes(found, differences(base, zoo.expand(base, adapter, tmp_path / "full", LLAMA)))


def test_a_base_in_half_precision(bases: Bases, tmp_path: Path) -> None:
    half = rewrite(bases(LLAMA), tmp_path / "half", lambda tensors: {n: t.bfloat16() for n, t in tensors.items()})
    adapter = zoo.write_adapter(bases(LLAMA), tmp_path / "adapter", LLAMA, target_modules=["q_proj"])
    _, on_half = read(half, adapter)
    _, on_whole = read(bases(LLAMA), adapter)
    assert_equal_changes(on_half, on_whole)  # the change does not depend on the base


def test_pickled_weights(bases: Bases, tmp_path: Path) -> None:
    base = bases(GPT2)
    pickled = zoo.write_adapter(base, tmp_path / "bin", GPT2, safe=False, target_modules=["c_attn", "wte"], use_dora=True)
    assert (pickled / "adapter_model.bin").is_file()
    safe = zoo.write_adapter(base, tmp_path / "safe", GPT2, target_modules=["c_attn", "wte"], use_dora=True)
    _, found = read(base, pickled)
    _, expected = read(base, safe)
    assert all(found[name].equal(expected[name]) for name in expected)
    assert any(change.any() for change in found.values())


@pytest.mark.parametrize(
    ("base_class", "adapter_class", "target"),
    [
        ("BertModel", "BertForSequenceClassification", "query"),
        ("BertForMaskedLM", "BertModel", "query"),
        ("RobertaForMaskedLM", "RobertaForSequenceClassification", "dense"),
        ("RobertaModel", "RobertaForSequenceClassification", "value"),
        ("GPT2LMHeadModel", "GPT2ForSequenceClassification", "c_attn"),
        ("GPT2Model", "GPT2LMHeadModel", "c_proj"),
        ("GPT2ForSequenceClassification", "GPT2Model", "c_fc"),
        ("LlamaForCausalLM", "LlamaModel", "q_proj"),
        ("LlamaModel", "LlamaForCausalLM", "down_proj"),
        ("ViTModel", "ViTForImageClassification", "q_proj"),
        ("ViTForImageClassification", "ViTModel", "fc1"),
    ],
)
def test_names_with_and_without_a_prefix(base_class: str, adapter_class: str, target: str, bases: Bases, tmp_path: Path) -> None:
    """The adapter's own model has another prefix than the base: the changes are the same under the base's names."""
    base = bases(base_class)
    settings: dict[str, Any] = {"target_modules": f".*layer.*{target}" if target == "dense" else [target], "lora_alpha": 20}
    adapter = zoo.write_adapter(base, tmp_path / "adapter", adapter_class, **settings)
    full = zoo.expand(base, adapter, tmp_path / "full", adapter_class)
    expert, found = read(base, adapter)
    merged = open_checkpoint(full, "full")
    moved = {name for name, change in found.items() if change.any()}
    assert len(moved) == len(expert.changes or {}) >= 2
    opened = open_checkpoint(base, "base")
    values = {name.split(".", 1)[1] if name.split(".")[0] in _PREFIXES else name: merged.read(name) for name in merged.tensors}
    for name in moved:
        bare = name.split(".", 1)[1] if name.split(".")[0] in _PREFIXES else name
        assert (found[name] - (values[bare] - opened.read(name))).abs().max() <= 1e-6, name


_PREFIXES = ("bert", "roberta", "transformer", "model", "vit")


def test_one_changed_module_is_enough_to_find_the_prefix(bases: Bases, tmp_path: Path) -> None:
    base = bases("BertModel")
    target = "bert.encoder.layer.1.attention.self.query"
    adapter = zoo.write_adapter(base, tmp_path / "adapter", "BertForMaskedLM", target_modules=[target])
    _, found = read(base, adapter)
    assert [name for name, change in found.items() if change.any()] == ["encoder.layer.1.attention.self.query.weight"]


def test_checkpoints_saved_while_training_keep_the_adapters_name_in_keys(bases: Bases, tmp_path: Path) -> None:
    """state_dict() of the wrapped model has `.default.` in its names and the modules that saved ones stand in for."""
    base = bases(BERT)
    adapter = zoo.write_adapter(base, tmp_path / "adapter", BERT, task_type="SEQ_CLS", target_modules=["query"])

    def as_in_state_dict(factors: Tensors) -> Tensors:
        named = {re.sub(r"(lora_[AB])\.", r"\1.default.", name): value for name, value in factors.items()}
        heads = {name: value for name, value in named.items() if ".classifier." in name}
        inside = {name.replace(".classifier.", ".classifier.modules_to_save.default."): value for name, value in heads.items()}
        replaced = {name.replace(".classifier.", ".classifier.original_module."): value + 1 for name, value in heads.items()}
        return {**{name: value for name, value in named.items() if name not in heads}, **inside, **replaced}

    renamed = zoo.copy_adapter(adapter, tmp_path / "renamed", as_in_state_dict)
    _, expected = read(base, adapter)
    _, found = read(base, renamed)
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize("class_name", [GPT2, LLAMA, VIT])
def test_dora_that_was_never_trained_changes_nothing(class_name: str, bases: Bases, tmp_path: Path) -> None:
    """Exactly: rounding would be taken for an expert's opinion."""
    extra = {GPT2: ["wte"], LLAMA: ["embed_tokens"], VIT: ["projection"]}[class_name]
    settings: dict[str, Any] = {"target_modules": [*_TARGETS[class_name], *extra], "use_dora": True, "strength": 0.0}
    expert, found = read(bases(class_name), zoo.write_adapter(bases(class_name), tmp_path / "adapter", class_name, **settings))
    assert len(expert.changes or {}) > 4
    assert not any(change.any() for change in found.values())


def test_copies_of_the_bases_embedding_are_left_out(bases: Bases, tmp_path: Path) -> None:
    base = bases(LLAMA)
    with zoo.quiet():
        model = peft.get_peft_model(zoo.load(base, LLAMA), peft.LoraConfig(r=2, target_modules=["embed_tokens"]))
        model.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=True)
    assert any("base_layer" in name for name in zoo.read_factors(tmp_path / "adapter"))
    expert, found = read(base, tmp_path / "adapter")
    assert set(expert.changes or {}) == {"model.embed_tokens.weight"}
    assert not any(change.any() for change in found.values())  # B and A as peft initialises them: no change yet


def test_grown_vocabularies_are_refused(bases: Bases, tmp_path: Path) -> None:
    base = bases(LLAMA)
    with zoo.quiet():
        model = zoo.load(base, LLAMA)
        model.resize_token_embeddings(44)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]))
        wrapped.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=True)
    with pytest.raises(InputError, match=r"comes with its own 'model.embed_tokens.weight' \[44, 16\].*larger vocabulary"):
        read(base, tmp_path / "adapter")


def test_a_copy_of_another_bases_embedding_is_refused(bases: Bases, tmp_path: Path) -> None:
    base = bases(LLAMA)
    other = rewrite(base, tmp_path / "other", lambda tensors: {n: t + 0.01 for n, t in tensors.items()})
    with zoo.quiet():
        model = peft.get_peft_model(zoo.load(other, LLAMA), peft.LoraConfig(r=2, target_modules=["embed_tokens"]))
        model.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=True)
    with pytest.raises(InputError, match="a change of another base"):
        read(base, tmp_path / "adapter")


# --- what is refused ---------------------------------------------------------------------------------------------------


def refuse(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one message with which the command line refuses an adapter; nothing is written."""
    output = adapter.parent / "out"
    before = sorted(adapter.parent.iterdir())
    monkeypatch.setattr(sys, "argv", ["acemerge", "merge", str(base), str(adapter), "-o", str(output), "--quiet"])
    with pytest.raises(SystemExit) as exit_:
        main()
    captured = capsys.readouterr()
    assert exit_.value.code == 2, captured.err
    assert captured.out == ""
    assert sorted(adapter.parent.iterdir()) == before
    assert "Traceback" not in captured.err
    assert captured.err.startswith("acemerge: error: ")
    assert str(adapter) in captured.err, "names the folder"
    return captured.err


Refuse = Callable[[Path, Path], str]


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refuse:
    return lambda base, adapter: refuse(base, adapter, monkeypatch, capsys)


_OTHER_TYPES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "IA3": (peft.IA3Config, {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LOHA": (peft.LoHaConfig, {"r": 2, "target_modules": ["q_proj"]}),
    "LOKR": (peft.LoKrConfig, {"r": 2, "target_modules": ["q_proj"]}),
    "ADALORA": (peft.AdaLoraConfig, {"target_modules": ["q_proj"], "total_step": 10}),
    "OFT": (peft.OFTConfig, {"target_modules": ["q_proj"], "oft_block_size": 4, "r": 0}),
    "VERA": (peft.VeraConfig, {"r": 2, "target_modules": ["q_proj"]}),
    "LN_TUNING": (peft.LNTuningConfig, {"target_modules": ["input_layernorm"]}),
    "FOURIERFT": (peft.FourierFTConfig, {"n_frequency": 4, "target_modules": ["q_proj"]}),
    "HRA": (peft.HRAConfig, {"r": 2, "target_modules": ["q_proj"]}),
    "TRAINABLE_TOKENS": (peft.TrainableTokensConfig, {"token_indices": [3, 5], "target_modules": ["embed_tokens"]}),
    "PROMPT_TUNING": (peft.PromptTuningConfig, {"num_virtual_tokens": 2, "task_type": "CAUSAL_LM"}),
    "PREFIX_TUNING": (peft.PrefixTuningConfig, {"num_virtual_tokens": 2, "task_type": "CAUSAL_LM"}),
}


@pytest.mark.parametrize("kind", _OTHER_TYPES)
def test_other_types_of_adapter_are_refused_by_name(kind: str, bases: Bases, refusal: Refuse, tmp_path: Path) -> None:
    config, settings = _OTHER_TYPES[kind]
    adapter = zoo.write_adapter(bases(LLAMA), tmp_path / "adapter", LLAMA, config=config, **settings)
    message = refusal(bases(LLAMA), adapter)
    assert f"a PEFT adapter of type {kind}; acemerge reads LORA" in message
    assert "merge_and_unload" in message


_OTHER_LORAS: dict[str, dict[str, Any]] = {
    "init_lora_weights='pissa'": {"init_lora_weights": "pissa"},
    "init_lora_weights='pissa_niter_2'": {"init_lora_weights": "pissa_niter_2"},
    "init_lora_weights='olora'": {"init_lora_weights": "olora"},
    "trainable_token_indices=[1, 2]": {"trainable_token_indices": [1, 2]},
    "layer_replication=[[0, 2], [0, 2]]": {"layer_replication": [(0, 2), (0, 2)]},
    "target_parameters=['q_proj.weight']": {"target_parameters": ["q_proj.weight"], "target_modules": []},
    "use_bdlora=": {"use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2)},
    "kasa_config=": {"kasa_config": KasaConfig()},
    "lora_bias together with bias='all'": {"lora_bias": True, "bias": "all", "target_modules": ["query"]},
}


@pytest.mark.parametrize("says", _OTHER_LORAS)
def test_other_variants_of_lora_are_refused_by_name(says: str, bases: Bases, refusal: Refuse, tmp_path: Path) -> None:
    class_name = BERT if "query" in str(_OTHER_LORAS[says]) else LLAMA
    settings = {"target_modules": ["q_proj"], **_OTHER_LORAS[says]}
    adapter = zoo.write_adapter(bases(class_name), tmp_path / "adapter", class_name, **settings)
    assert says in refusal(bases(class_name), adapter)


@pytest.fixture(scope="session")
def plain(bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with nothing wrong with it."""
    return zoo.write_adapter(
        bases(LLAMA), tmp_path_factory.mktemp("plain") / "adapter", LLAMA, target_modules=["q_proj", "k_proj"]
    )


@pytest.fixture(scope="session")
def dora(bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dora") / "adapter"
    return zoo.write_adapter(bases(LLAMA), folder, LLAMA, target_modules=["q_proj", "k_proj"], use_dora=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "invented_next_year"),
        ("use_qalora", True),
        ("alora_invocation_tokens", [1, 2]),
        ("arrow_config", {"top_k": 3}),
        ("corda_config", {"corda_method": "kpm"}),
        ("lora_ga_config", {"direction": "ArBr"}),
        ("megatron_config", {"tensor_parallel": 2}),
        ("monteclora_config", {"num_samples": 8}),
        ("velora_config", {"num_groups": 2}),
        ("option_invented_next_year", True),
        ("peft_type", "BOFT"),
        ("peft_type", None),
    ],
)
def test_settings_that_may_change_what_the_weights_mean(
    field: str, value: Any, bases: Bases, plain: Path, refusal: Refuse, tmp_path: Path
) -> None:
    """Variants that need data, hardware or a later peft to make: their settings are enough to refuse them."""
    adapter = zoo.copy_adapter(plain, tmp_path / "adapter")
    zoo.change_settings(adapter, **{field: value})
    message = refusal(bases(LLAMA), adapter)
    assert f"of type {value}" in message if field == "peft_type" else f"{field}={value!r}" in message


# --- files that are not what they should be ----------------------------------------------------------------------------

Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda factors: {**factors, Q0 + part: change(factors[Q0 + part])}


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda factors: {name: value for name, value in factors.items() if name != Q0 + part}


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda factors: {name.replace(old, new): value for name, value in factors.items()}


_BROKEN: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no B": (without("B.weight"), r"'model.layers.0.self_attn.q_proj' has no lora_B"),
    "no A": (without("A.weight"), r"'model.layers.0.self_attn.q_proj' has no lora_A"),
    "ranks differ": (changed("B.weight", lambda B: B[:, :3]), r"do not fit each other: A is \[4, 16\], B is \[16, 3\]"),
    "A is a vector": (changed("A.weight", lambda A: A[0]), r"do not fit each other: A is \[16\]"),
    "B is a stack": (changed("B.weight", lambda B: B.expand(2, 16, 4)), "do not fit each other"),
    "B is a window": (changed("B.weight", lambda B: B[..., None, None].expand(16, 4, 3, 3)), "do not fit each other"),
    "rank 0": (lambda f: changed("A.weight", lambda A: A[:0])(changed("B.weight", lambda B: B[:, :0])(f)), "do not fit each"),
    "another rank": (
        lambda f: changed("A.weight", lambda A: A[:3])(changed("B.weight", lambda B: B[:, :3])(f)),
        r"'model.layers.0.self_attn.q_proj' has rank 3, adapter_config.json says 4",
    ),
    "absurd rank": (
        lambda f: changed("A.weight", lambda A: torch.zeros(70_000, 16))(
            changed("B.weight", lambda B: torch.zeros(16, 70_000))(f)
        ),
        "q_proj.*70000",
    ),
    "integers": (changed("A.weight", torch.Tensor.int), "int32 and float32, not floating-point weights"),
    "longer inputs": (changed("A.weight", lambda A: torch.ones(4, 18)), r"q_proj.weight': shape \[16, 16\] in base.*\[16, 18\]"),
    "longer outputs": (changed("B.weight", lambda B: torch.ones(18, 4)), r"q_proj.weight': shape \[16, 16\] in base.*\[18, 16\]"),
    "unknown modules": (renamed("self_attn", "cross_attn"), r"'model.layers.0.cross_attn.*not in base"),
    "deeper model": (renamed("layers.1.", "layers.7."), r"'model.layers.7.self_attn.*not in base"),
    "unknown kind": (renamed("lora_A.weight", "lora_E"), "lora_E' belongs to a kind of adapter"),
    "unknown tensor": (lambda f: {**f, "base_model.model.model.prompt": torch.ones(3)}, "model.prompt' belongs to a kind"),
    "a bias of A": (lambda f: {**f, Q0 + "A.bias": torch.ones(4)}, "lora_A.bias' belongs to a kind"),
    "two kinds of one module": (lambda f: {**f, Q0 + "embedding_A": f[Q0 + "A.weight"] + 1}, "q_proj.*belongs to a kind"),
    "another adapter's name": (renamed("lora_A.weight", "lora_A.other.weight"), "lora_A.other.weight' belongs to a kind"),
    "twice": (
        lambda f: {**f, Q0 + "A.default.weight": f[Q0 + "A.weight"] + 1},
        "lora_A.*both stand for|lora_A.default.weight' and",
    ),
    "magnitude without DoRA": (lambda f: {**f, Q0 + "magnitude_vector": torch.ones(16)}, "lora_magnitude_vector.*use_dora"),
    "bias without lora_bias": (lambda f: {**f, Q0 + "B.bias": torch.ones(16)}, "lora_B.bias.*lora_bias"),
    "nothing at all": (lambda f: {}, "holds no tensors"),
}


@pytest.mark.parametrize("case", _BROKEN)
def test_broken_weights(case: str, bases: Bases, plain: Path, refusal: Refuse, tmp_path: Path) -> None:
    change, says = _BROKEN[case]
    adapter = zoo.copy_adapter(plain, tmp_path / "adapter", change)
    message = refusal(bases(LLAMA), adapter)
    assert re.search(says, message), message
    assert message.count("\n  - ") == 1, message  # one mistake, one line


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("magnitude_vector"), "'model.layers.0.self_attn.q_proj' has no lora_magnitude_vector"),
        (changed("magnitude_vector", lambda m: m[:15]), r"lora_magnitude_vector.*15.*16"),
    ],
    ids=["no lengths", "too few lengths"],
)
def test_broken_dora(
    change: Callable[[Tensors], Tensors], says: str, bases: Bases, dora: Path, refusal: Refuse, tmp_path: Path
) -> None:
    adapter = zoo.copy_adapter(dora, tmp_path / "adapter", change)
    message = refusal(bases(LLAMA), adapter)
    assert re.search(says, message), message


def test_lora_bias_without_its_biases(bases: Bases, refusal: Refuse, tmp_path: Path) -> None:
    whole = zoo.write_adapter(bases("BertModel"), tmp_path / "whole", "BertModel", target_modules=["query"], lora_bias=True)
    adapter = zoo.copy_adapter(whole, tmp_path / "adapter", lambda f: {n: t for n, t in f.items() if "0" in n or "bias" not in n})
    assert "'encoder.layer.1.attention.self.query' has no lora_B.bias" in refusal(bases("BertModel"), adapter)


_BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "patterns in a list": ({"rank_pattern": ["q_proj"]}, "rank_pattern must be a mapping"),
    "no pattern": ({"alpha_pattern": {"q_proj(": 3}}, r"alpha_pattern: 'q_proj\(' is not a pattern"),
    "alpha in words": ({"lora_alpha": "eight"}, "lora_alpha of 'model.layers.0.self_attn.[qk]_proj' is 'eight', not a number"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha of .* is None, not a number"),
    "alpha is not finite": ({"lora_alpha": float("inf")}, "lora_alpha of .* is inf, not a number|not JSON|Infinity"),
    "own alpha in words": ({"alpha_pattern": {"q_proj": "x"}}, "lora_alpha of .*q_proj' is 'x', not a number"),
    "another rank": ({"r": 5}, "has rank 4, adapter_config.json says 5"),
    "no rank": ({"r": None}, "has rank 4, adapter_config.json says None"),
    "own rank in words": ({"rank_pattern": {"q_proj": "4"}}, "has rank 4, adapter_config.json says '?4"),
}


@pytest.mark.parametrize("case", _BAD_SETTINGS)
def test_bad_settings(case: str, bases: Bases, plain: Path, refusal: Refuse, tmp_path: Path) -> None:
    settings, says = _BAD_SETTINGS[case]
    adapter = zoo.copy_adapter(plain, tmp_path / "adapter")
    zoo.change_settings(adapter, **settings)
    message = refusal(bases(LLAMA), adapter)
    assert re.search(says, message), message


@pytest.mark.parametrize(
    ("text", "says"), [("{", "JSON"), ("[1, 2]", "expected a JSON object"), ("", "JSON"), ("null", "expected a JSON object")]
)
def test_a_config_that_is_not_json(text: str, says: str, bases: Bases, plain: Path, refusal: Refuse, tmp_path: Path) -> None:
    adapter = zoo.copy_adapter(plain, tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text(text)
    message = refusal(bases(LLAMA), adapter)
    assert says in message
    assert "adapter_config.json" in message


def test_weights_that_are_missing_or_cut_short(bases: Bases, plain: Path, refusal: Refuse, tmp_path: Path) -> None:
    adapter = zoo.copy_adapter(plain, tmp_path / "adapter")
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "not a whole safetensors file" in refusal(bases(LLAMA), adapter)
    weights.unlink()
    assert "neither adapter_model.safetensors nor adapter_model.bin" in refusal(bases(LLAMA), adapter)


@pytest.mark.parametrize(("field", "value"), [("auto_mapping", "text"), ("task_type", ["SEQ_CLS"]), ("modules_to_save", 3)])
def test_odd_values_of_settings_that_are_hardly_used(
    field: str, value: Any, bases: Bases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stranger's file: refused or read, but never a traceback."""
    adapter = zoo.write_adapter(bases(BERT), tmp_path / "adapter", BERT, task_type="SEQ_CLS", target_modules=["query"])
    zoo.change_settings(adapter, **{field: value})
    for save_as in ("model", "adapter"):
        arguments = ["merge", str(bases(BERT)), str(adapter), "-o", str(tmp_path / f"as-{save_as}"), "--as", save_as, "-q"]
        monkeypatch.setattr(sys, "argv", ["acemerge", *arguments])
        code = 0
        try:
            main()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        message = capsys.readouterr().err
        assert code == 0 or (code == 2 and field in message), message


def test_every_broken_adapter_is_reported_at_once(
    bases: Bases, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [zoo.copy_adapter(plain, tmp_path / f"broken-{i}", without(f"{part}.weight")) for i, part in enumerate("AB")]
    monkeypatch.setattr(
        sys, "argv", ["acemerge", "merge", str(bases(LLAMA)), str(plain), *map(str, broken), "-o", str(tmp_path / "o")]
    )
    with pytest.raises(SystemExit):
        main()
    message = capsys.readouterr().err
    assert "2 problems found" in message
    assert "broken-0" in message
    assert "broken-1" in message


@pytest.mark.parametrize("save_as", ["model", "adapter"])
@pytest.mark.parametrize("part", ["A.weight", "B.weight"])
def test_nan_factors(
    save_as: str, part: str, bases: Bases, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    adapter = zoo.copy_adapter(
        plain, tmp_path / "adapter", changed(part, lambda f: f.index_fill(0, torch.tensor([1]), float("nan")))
    )
    arguments = ["merge", str(bases(LLAMA)), str(plain), str(adapter), "-o", str(tmp_path / "out"), "--as", save_as, "-q"]
    monkeypatch.setattr(sys, "argv", ["acemerge", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1  # headers do not show it
    message = capsys.readouterr().err
    assert re.search(rf"{adapter}.* has \d+ NaN or infinite values in '{re.escape(Q0 + part)}'", message), message
    assert not (tmp_path / "out").exists()


def test_an_adapter_as_the_base_is_refused(plain: Path, refusal: Refuse, tmp_path: Path) -> None:
    adapter = shutil.copytree(plain, tmp_path / "adapter")
    assert "a PEFT adapter, not a full model; give it as an expert" in refusal(adapter, adapter)


def test_the_base_prefix_is_not_guessed_from_shapes_alone(bases: Bases, refusal: Refuse, tmp_path: Path) -> None:
    """An adapter of another family, with matrices of the same shapes."""
    adapter = zoo.write_adapter(bases("BertModel"), tmp_path / "adapter", "BertModel", target_modules=["query", "value"])
    message = refusal(bases(LLAMA), adapter)
    assert "encoder.layer.0.attention.self.query.weight' [16, 16]" in message
    assert "not in base" in message
