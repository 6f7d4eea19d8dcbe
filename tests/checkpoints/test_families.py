"""Each family end to end: which tensors merge, which way round, what the merge writes, and that transformers loads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import acemerge
import model_zoo as zoo
from acemerge.checkpoints.folder import from_state_dict
from acemerge.execute.pipeline import MergeResult
from acemerge.methods.ace import AceOptions
from acemerge.planning.planner import build_plan
from acemerge.recipe.recipe import make_recipe
from model_zoo import (
    Models,
    Tensors,
    ace_weight,
    assert_equal_tensors,
    assert_same_change,
    bitwise_equal,
    load_whole,
    mean_weight,
    read_tensors,
    rewrite,
    swap_prefix,
)

MethodName = Literal["ace", "average"]


def layers(prefix: str, *names: str) -> set[str]:
    """`prefix` with {} for the layer's number, once for each layer and name."""
    return {prefix.format(layer) + name for layer in range(zoo.LAYERS) for name in names}


def weights(modules: Iterable[str]) -> set[str]:
    return {f"{module}.weight" for module in modules}


def biases(modules: Iterable[str]) -> set[str]:
    return {f"{module}.bias" for module in modules}


def weights_and_biases(modules: Sequence[str]) -> set[str]:
    return weights(modules) | biases(modules)


@dataclass(frozen=True)
class Fates:
    """What must become of each of the base's tensors."""

    merged: set[str] = field(default_factory=set)
    stored_in_out: set[str] = field(default_factory=set)
    """Merged too, but stored the other way round from torch's Linear."""
    averaged: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    """Left at the base by ACE; averaged, like all the above, by `average`."""
    alone: set[str] = field(default_factory=set)
    """Left at the base by every method: a task's head, or a tensor that no expert has."""
    copied: set[str] = field(default_factory=set)

    def __or__(self, other: Fates) -> Fates:
        return Fates(**{f.name: getattr(self, f.name) | getattr(other, f.name) for f in fields(self)})

    def actions(self, method: MethodName) -> dict[str, str]:
        """Tensor -> what the plan calls its fate."""
        merged = self.merged | self.stored_in_out
        by_action = {"merged": merged, "averaged": self.averaged, "kept": self.kept | self.alone, "copied": self.copied}
        if method == "average":
            by_action = {"merged": merged | self.averaged | self.kept, "kept": self.alone, "copied": self.copied}
        return {name: action for action, names in by_action.items() for name in names}


@dataclass(frozen=True)
class Case:
    """A family: how to build it and what a merge must do."""

    build: Callable[[Path], Models]
    fates: Fates
    loads_as: str | None = None
    epsilon: float = 1e-5
    prefixes: tuple[str, str] = ("", "")
    """(the base's, the experts')."""

    def name_in_expert(self, name: str) -> str:
        ours, theirs = self.prefixes
        return theirs + name.removeprefix(ours)


# --- the families ------------------------------------------------------------------------------------------------------


def bert_like(prefix: str) -> Fates:
    layer = prefix + "encoder.layer.{}."
    dense = (
        "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
        "intermediate.dense", "output.dense",
    )  # fmt: skip
    norms = ("attention.output.LayerNorm", "output.LayerNorm")
    embeddings = ("word_embeddings.weight", "position_embeddings.weight", "token_type_embeddings.weight")
    return Fates(
        merged=layers(layer, *weights(dense)),
        kept=layers(layer, *biases(dense), *weights_and_biases(norms))
        | {f"{prefix}embeddings.{name}" for name in (*embeddings, "LayerNorm.weight", "LayerNorm.bias")},
    )


def bert_pooler(prefix: str) -> Fates:
    return Fates(merged={f"{prefix}pooler.dense.weight"}, kept={f"{prefix}pooler.dense.bias"})


BERT_LM_HEAD = Fates(
    alone={
        "cls.predictions.bias",
        *weights_and_biases(["cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"]),
    }
)
NEXT_SENTENCE_HEAD = Fates(alone={"cls.seq_relationship.weight", "cls.seq_relationship.bias"})
ROBERTA_LM_HEAD = Fates(alone={"lm_head.bias", *weights_and_biases(["lm_head.dense", "lm_head.layer_norm"])})

DISTILBERT_LAYER = "distilbert.transformer.layer.{}."
DISTILBERT_DENSE = ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "ffn.lin1", "ffn.lin2")
DISTILBERT = Fates(
    merged=layers(DISTILBERT_LAYER, *weights(DISTILBERT_DENSE)),
    kept=layers(DISTILBERT_LAYER, *biases(DISTILBERT_DENSE), *weights_and_biases(["sa_layer_norm", "output_layer_norm"]))
    | weights(["distilbert.embeddings.word_embeddings", "distilbert.embeddings.position_embeddings"])
    | weights_and_biases(["distilbert.embeddings.LayerNorm"]),
    alone=weights_and_biases(["vocab_transform", "vocab_layer_norm"]) | {"vocab_projector.bias"},
)


def gpt2_like(prefix: str) -> Fates:
    block = prefix + "h.{}."
    conv1d = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    return Fates(
        merged={f"{prefix}wte.weight", f"{prefix}wpe.weight"},
        stored_in_out=layers(block, *weights(conv1d)),
        averaged=layers(block, *biases(conv1d), *weights_and_biases(["ln_1", "ln_2"])) | weights_and_biases([f"{prefix}ln_f"]),
    )


LLAMA_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LLAMA = Fates(
    merged=layers("model.layers.{}.", *weights((*LLAMA_ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))),
    averaged=layers("model.layers.{}.", "input_layernorm.weight", "post_attention_layernorm.weight") | {"model.norm.weight"},
    kept={"model.embed_tokens.weight"},
)


def t5_attention(name: str) -> set[str]:
    return weights(f"{name}.{letter}" for letter in "qkvo")


T5_ENCODER, T5_DECODER = "encoder.block.{}.layer.", "decoder.block.{}.layer."
T5 = Fates(
    merged=layers(T5_ENCODER, *t5_attention("0.SelfAttention"), *weights(["1.DenseReluDense.wi", "1.DenseReluDense.wo"]))
    | layers(T5_DECODER, *t5_attention("0.SelfAttention"), *t5_attention("1.EncDecAttention"))
    | layers(T5_DECODER, *weights(["2.DenseReluDense.wi", "2.DenseReluDense.wo"])),
    averaged=layers(T5_ENCODER, *weights(["0.layer_norm", "1.layer_norm"]))
    | layers(T5_DECODER, *weights(["0.layer_norm", "1.layer_norm", "2.layer_norm"]))
    | weights(["encoder.final_layer_norm", "decoder.final_layer_norm"])
    | weights(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias" for side in ("encoder", "decoder")),
    kept={"shared.weight"},
)

VIT_LAYER = "vit.encoder.layer.{}."
VIT_DENSE = (
    "attention.attention.query", "attention.attention.key", "attention.attention.value", "attention.output.dense",
    "intermediate.dense", "output.dense",
)  # fmt: skip
VIT = Fates(
    merged=layers(VIT_LAYER, *weights(VIT_DENSE)),
    averaged=layers(VIT_LAYER, *biases(VIT_DENSE), *weights_and_biases(["layernorm_before", "layernorm_after"]))
    | weights_and_biases(["vit.embeddings.patch_embeddings.projection", "vit.layernorm"])
    | {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"},
    alone={"classifier.weight", "classifier.bias"},
)


def clip_encoder(prefix: str) -> Fates:
    layer = prefix + "encoder.layers.{}."
    dense = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")
    return Fates(
        merged=layers(layer, *weights(dense)),
        averaged=layers(layer, *biases(dense), *weights_and_biases(["layer_norm1", "layer_norm2"])),
    )


def clip_vision(prefix: str) -> Fates:
    return clip_encoder(prefix) | Fates(
        merged={f"{prefix}embeddings.position_embedding.weight"},
        averaged={f"{prefix}embeddings.class_embedding", f"{prefix}embeddings.patch_embedding.weight"}
        | weights_and_biases([f"{prefix}pre_layrnorm", f"{prefix}post_layernorm"]),
    )


CLIP_TEXT = clip_encoder("text_model.") | Fates(
    merged=weights(["text_model.embeddings.token_embedding", "text_model.embeddings.position_embedding"]),
    averaged=weights_and_biases(["text_model.final_layer_norm"]),
)
CLIP_JOINT = Fates(merged={"visual_projection.weight"}, averaged={"text_projection.weight", "logit_scale"})


def open_clip_transformer(prefix: str) -> Fates:
    block = prefix + "resblocks.{}."
    return Fates(
        merged=layers(block, "attn.in_proj_weight", *weights(["attn.out_proj", "mlp.c_fc", "mlp.c_proj"])),
        averaged=layers(block, "attn.in_proj_bias", *biases(["attn.out_proj", "mlp.c_fc", "mlp.c_proj"]))
        | layers(block, *weights_and_biases(["ln_1", "ln_2"])),
    )


OPEN_CLIP = (
    open_clip_transformer("transformer.")
    | open_clip_transformer("visual.transformer.")
    | Fates(
        merged={"positional_embedding", "token_embedding.weight", "visual.positional_embedding"},
        stored_in_out={"visual.proj"},
        averaged={"text_projection", "logit_scale", "visual.class_embedding", "visual.conv1.weight"}
        | weights_and_biases(["ln_final", "visual.ln_pre", "visual.ln_post"]),
    )
)

UNKNOWN = Fates(
    merged={"blocks.0.mix.weight", "blocks.0.widen.weight"},
    stored_in_out={"blocks.0.fold.weight"},
    averaged={
        "embed.weight", "stem.weight", "blocks.0.mix.bias", "blocks.0.widen.bias", "blocks.0.fold.bias", "blocks.0.norm.weight",
        "blocks.0.gate", "row.weight", "column.weight",
    },
    copied={"steps"},
)  # fmt: skip


def gpt2_as_on_the_hub(root: Path) -> Models:
    """The base has no prefix and stores its causal mask, as OpenAI's GPT-2 does."""
    models = zoo.gpt2(root, "GPT2Model")
    masks = {f"h.{layer}.attn.bias": torch.ones(12, 12).tril()[None, None] for layer in range(zoo.LAYERS)}
    return Models(rewrite(models.base, root / "hub", lambda tensors: {**tensors, **masks}), models.experts)


def bert_with_position_ids(root: Path) -> Models:
    models = zoo.bert(root, "BertModel", "BertModel")
    ids = {"embeddings.position_ids": torch.arange(12)[None]}
    return Models(rewrite(models.base, root / "older", lambda tensors: {**tensors, **ids}), models.experts)


def prefixed_clip_vision(root: Path) -> Models:
    models = zoo.clip_vision(root)
    add_prefix = swap_prefix("", "vision_model.")
    experts = {name: rewrite(path, root / "prefixed" / name, add_prefix) for name, path in models.experts.items()}
    return Models(rewrite(models.base, root / "prefixed" / "base", add_prefix), experts)


def clip_with_vision_experts(root: Path) -> Models:
    return zoo.clip(root, "CLIPVisionModel")


CASES = {
    "bert": Case(zoo.bert, bert_like("bert.") | BERT_LM_HEAD, "BertForMaskedLM"),
    "bert_with_next_sentence_head": Case(
        lambda root: zoo.bert(root, "BertForPreTraining"),
        bert_like("bert.") | bert_pooler("bert.") | BERT_LM_HEAD | NEXT_SENTENCE_HEAD,
        "BertForPreTraining",
    ),
    "bert_unprefixed": Case(
        bert_with_position_ids,
        bert_like("") | bert_pooler("") | Fates(copied={"embeddings.position_ids"}),
        "BertModel",
    ),
    "bert_unprefixed_base_of_classifiers": Case(
        lambda root: zoo.bert(root, "BertModel"), bert_like("") | bert_pooler(""), "BertModel", prefixes=("", "bert.")
    ),
    "roberta": Case(zoo.roberta, bert_like("roberta.") | ROBERTA_LM_HEAD, "RobertaForMaskedLM"),
    "distilbert": Case(zoo.distilbert, DISTILBERT, "DistilBertForMaskedLM"),
    "gpt2": Case(zoo.gpt2, gpt2_like("transformer."), "GPT2LMHeadModel", epsilon=4e-2),
    "gpt2_hub": Case(
        gpt2_as_on_the_hub,
        gpt2_like("") | Fates(copied=layers("h.{}.", "attn.bias")),
        "GPT2Model",
        epsilon=4e-2,
        prefixes=("", "transformer."),
    ),
    "gpt2_unprefixed": Case(lambda root: zoo.gpt2(root, "GPT2Model", "GPT2Model"), gpt2_like(""), "GPT2Model", epsilon=4e-2),
    "llama_tied": Case(lambda root: zoo.llama(root, tied=True), LLAMA, "LlamaForCausalLM"),
    "llama_untied": Case(lambda root: zoo.llama(root, tied=False), LLAMA | Fates(kept={"lm_head.weight"}), "LlamaForCausalLM"),
    "t5": Case(zoo.t5, T5, "T5ForConditionalGeneration"),
    "vit": Case(zoo.vit, VIT, "ViTForImageClassification"),
    "clip": Case(zoo.clip, clip_vision("vision_model.") | CLIP_TEXT | CLIP_JOINT, "CLIPModel"),
    "clip_with_vision_experts": Case(
        clip_with_vision_experts,
        clip_vision("vision_model.") | Fates(alone=set((CLIP_TEXT | CLIP_JOINT).actions("ace"))),
        "CLIPModel",
    ),
    "clip_vision": Case(zoo.clip_vision, clip_vision(""), "CLIPVisionModel"),
    "clip_vision_prefixed": Case(prefixed_clip_vision, clip_vision("vision_model."), "CLIPVisionModel"),
    "open_clip": Case(zoo.open_clip, OPEN_CLIP),
    "unknown_without_config": Case(zoo.unknown, UNKNOWN),
    "unknown_model_type": Case(lambda root: zoo.unknown(root, "unheard-of"), UNKNOWN),
}


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    with zoo.quiet_transformers():
        yield


@dataclass(frozen=True)
class Built:
    """A family on disk, and its merges, made when first asked for."""

    case: Case
    models: Models
    root: Path
    results: dict[MethodName, MergeResult] = field(default_factory=dict)

    def merge(self, method: MethodName) -> MergeResult:
        if method not in self.results:
            self.results[method] = merge(self.models, self.root / f"merged_by_{method}", method)
        return self.results[method]

    def tensors(self) -> tuple[Tensors, list[Tensors]]:
        return read_tensors(self.models.base), [read_tensors(path) for path in self.models.experts.values()]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """Each family's checkpoints, made when first asked for."""
    built: dict[str, Built] = {}

    def get(name: str) -> Built:
        if name not in built:
            root = tmp_path_factory.mktemp(name)
            built[name] = Built(CASES[name], CASES[name].build(root), root)
        return built[name]

    return get


def merge(models: Models, output: Path, method: MethodName = "ace", **options: Any) -> MergeResult:
    return acemerge.merge(models.base, models.experts, output, method=method, **options)


# --- every family ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", ["ace", "average"])
def test_every_tensor_meets_its_fate(build: Callable[[str], Built], name: str, method: MethodName) -> None:
    built = build(name)
    case = built.case
    result = built.merge(method)
    base, experts = built.tensors()
    merged = read_tensors(result.output)
    actions = case.fates.actions(method)
    assert merged.keys() == base.keys()
    assert {tensor.name: tensor.action for tensor in result.plan.tensors} == actions
    for tensor, action in actions.items():
        if action in ("kept", "copied"):
            assert bitwise_equal(merged[tensor], base[tensor]), f"{tensor} is not the base's, bit for bit"
            continue
        own = [expert[case.name_in_expert(tensor)] for expert in experts]
        if method == "ace" and action == "merged":
            expected = ace_weight(base[tensor], own, case.epsilon, transpose=tensor in case.fates.stored_in_out)
        else:
            expected = mean_weight(base[tensor], own)
        assert merged[tensor].dtype == base[tensor].dtype
        assert_same_change(tensor, merged[tensor], expected, base[tensor])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.loads_as])
@pytest.mark.parametrize("method", ["ace", "average"])
def test_transformers_loads_every_merged_weight(build: Callable[[str], Built], name: str, method: MethodName) -> None:
    built = build(name)
    output = built.merge(method).output
    load_whole(built.case.loads_as or "", output)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_untied", "clip"])
def test_the_loaded_model_has_the_merged_weights(build: Callable[[str], Built], name: str) -> None:
    built = build(name)
    output = built.merge("ace").output
    on_disk = read_tensors(output)
    in_memory = load_whole(built.case.loads_as or "", output).state_dict()
    assert_equal_tensors({key: in_memory[key] for key in on_disk}, on_disk)


def test_the_oracle_tells_the_two_orientations_apart(build: Callable[[str], Built]) -> None:
    # What makes the tests above sensitive to a wrong family rule.
    base, experts = build("gpt2").tensors()
    name = "transformer.h.0.mlp.c_fc.weight"
    own = [expert[name] for expert in experts]
    canonical, stored = (ace_weight(base[name], own, 4e-2, transpose=transpose) for transpose in (True, False))
    assert (canonical - stored).abs().max() > 0.05 * (canonical - base[name]).abs().max()


# --- epsilon -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "epsilon"),
    [
        ({"model_type": "gpt2"}, 4e-2),
        ({"model_type": "roberta", "hidden_size": 768}, 2e-4),
        ({"model_type": "roberta", "hidden_size": 1024}, 1e-5),
        ({"model_type": "bert", "hidden_size": 768}, 1e-5),
        ({"model_type": "llama"}, 1e-5),
        ({"model_type": "t5"}, 1e-5),
        ({"model_type": "clip"}, 1e-5),
        ({"model_type": "unheard-of"}, 1e-5),
        ({}, 1e-5),
    ],
)
def test_epsilon_is_the_papers_for_the_base(config: dict[str, Any], epsilon: float) -> None:
    assert AceOptions().resolve(config).epsilon == epsilon


def test_a_given_epsilon_beats_the_papers() -> None:
    assert AceOptions(epsilon=0.5).resolve({"model_type": "gpt2"}).epsilon == 0.5


@pytest.mark.parametrize("name", ["gpt2", "roberta", "llama_tied", "open_clip"])
def test_the_manifest_states_the_epsilon_used(build: Callable[[str], Built], name: str) -> None:
    built = build(name)
    manifest = json.loads((built.merge("ace").output / "acemerge_manifest.json").read_text())
    used = {record["options"]["epsilon"] for record in manifest["tensors"] if record["action"] == "merged"}
    assert used == {built.case.epsilon}


# --- orientation -------------------------------------------------------------------------------------------------------


def test_stored_orientation_takes_gpt2_as_stored(build: Callable[[str], Built], tmp_path: Path) -> None:
    built = build("gpt2")
    merge(built.models, tmp_path / "out", orientation="stored")
    merged = read_tensors(tmp_path / "out")
    base, experts = built.tensors()
    for name in built.case.fates.merged | built.case.fates.stored_in_out:
        expected = ace_weight(base[name], [expert[name] for expert in experts], 4e-2, transpose=False)
        assert_same_change(name, merged[name], expected, base[name])


def test_stored_orientation_changes_only_matrices_stored_in_out(build: Callable[[str], Built], tmp_path: Path) -> None:
    built = build("open_clip")
    merge(built.models, tmp_path / "out", orientation="stored")
    canonical, stored = read_tensors(built.merge("ace").output), read_tensors(tmp_path / "out")
    assert {name for name in canonical if not torch.equal(canonical[name], stored[name])} == {"visual.proj"}


# --- prefixes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefixed", ["base", "experts", "red", "base red"])
@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("clip_vision", "vision_model."),
        ("bert_unprefixed", "bert."),
        ("gpt2_unprefixed", "transformer."),
        ("open_clip", "module."),
    ],
)
def test_prefixes_may_differ_between_models(
    build: Callable[[str], Built], tmp_path: Path, name: str, prefix: str, prefixed: str
) -> None:
    plain = build(name).models
    add = swap_prefix("", prefix)

    def variant(model: str, path: Path) -> Path:
        chosen = model in prefixed.split() or (prefixed == "experts" and model != "base")
        return rewrite(path, tmp_path / "in" / model, add) if chosen else path

    mixed = Models(variant("base", plain.base), {name: variant(name, path) for name, path in plain.experts.items()})
    merge(mixed, tmp_path / "mixed", "average")

    expected = read_tensors(build(name).merge("average").output)
    assert_equal_tensors(read_tensors(tmp_path / "mixed"), add(expected) if "base" in prefixed.split() else expected)


@pytest.mark.parametrize("unprefixed", [("red",), ("red", "green", "blue")])
def test_vision_experts_of_a_whole_clip_need_no_prefix(
    build: Callable[[str], Built], tmp_path: Path, unprefixed: tuple[str, ...]
) -> None:
    built = build("clip_with_vision_experts")
    strip = swap_prefix("vision_model.", "")
    experts = {
        name: rewrite(path, tmp_path / "in" / name, strip) if name in unprefixed else path
        for name, path in built.models.experts.items()
    }
    merge(Models(built.models.base, experts), tmp_path / "out")
    assert_equal_tensors(read_tensors(tmp_path / "out"), read_tensors(built.merge("ace").output))
    load_whole("CLIPModel", tmp_path / "out")


def test_a_vision_base_refuses_experts_with_a_text_tower(build: Callable[[str], Built], tmp_path: Path) -> None:
    whole = build("clip").models

    def vision_only(tensors: Tensors) -> Tensors:
        return {name: tensor for name, tensor in tensors.items() if name.startswith("vision_model.")}

    base = rewrite(whole.base, tmp_path / "base", vision_only)
    with pytest.raises(acemerge.PreflightError, match=r"text_model\.\S+ .* are not in base"):
        merge(Models(base, whole.experts), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["ace", "average"])
def test_layer_norms_of_older_berts_are_named_gamma_and_beta(
    build: Callable[[str], Built], tmp_path: Path, method: MethodName
) -> None:
    # google-bert/bert-base-uncased is stored so; transformers renames on load and saves experts with weight and bias.
    built = build("bert")

    def older(tensors: Tensors) -> Tensors:
        renamed = ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")
        return {name.replace(*renamed[0]).replace(*renamed[1]): tensor for name, tensor in tensors.items()}

    base = rewrite(built.models.base, tmp_path / "older", older)
    merge(Models(base, built.models.experts), tmp_path / "out", method)
    assert_equal_tensors(read_tensors(tmp_path / "out"), older(read_tensors(built.merge(method).output)))
    load_whole("BertForMaskedLM", tmp_path / "out")


def test_tables_of_attention_biases_are_no_linear_maps() -> None:
    """Swin's and TinyViT's: two-dimensional, but a number for each head and distance."""
    names = ("blocks.0.attn.relative_position_bias_table", "blocks.0.attn.attention_biases", "blocks.0.mlp.fc1.weight")
    base = {name: torch.zeros(4, 6) for name in names}
    experts = [{name: torch.full((4, 6), float(i)) * torch.arange(6) for name in names} for i in (1, 3)]
    recipe = make_recipe({"base": "base", "experts": ["a", "b"]})
    plan = build_plan(
        recipe, from_state_dict(base, "base"), [from_state_dict(e, n) for e, n in zip(experts, "ab", strict=True)], {}
    )
    assert [tensor.action for tensor in plan.tensors] == ["averaged", "averaged", "merged"]
