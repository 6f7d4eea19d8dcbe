"""Each family that is merged: how to build it, and what must become of each of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

import acemerge
import model_zoo as zoo
from acemerge.execute.pipeline import MergeResult
from model_zoo import Models, Tensors, read_tensors, rewrite, swap_prefix

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


def merge(models: Models, output: Path, method: MethodName = "ace", **options: Any) -> MergeResult:
    return acemerge.merge(models.base, models.experts, output, method=method, **options)
