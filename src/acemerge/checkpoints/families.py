"""What differs by model family: which tensors take part, how matrices are stored, what is a head, how names line up.

Everything here is data about names and shapes; no tensor is read. Adding a family is one entry in FAMILIES.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from typing import Any

from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.errors import InputError, did_you_mean


@dataclass(frozen=True)
class Family:
    """A named preset of tensor rules. Patterns are shell-style and match the base's own tensor names."""

    name: str
    about: str
    """What merges."""
    model_types: frozenset[str] = frozenset()
    """`model_type` values of config.json."""
    signature: str = ""
    """Without a config: a tensor name that gives the family away."""
    kept: tuple[str, ...] = ()
    """Left at the base's value by methods for matrices, or averaged by those that average all."""
    kept_in_words: str = ""
    averaged: tuple[str, ...] = ()
    """Two-dimensional, yet not a linear map of activations: averaged by methods for matrices."""
    stored_in_out: tuple[str, ...] = ()
    """Matrices stored [in, out], the other way round from torch's Linear."""
    buffers: tuple[str, ...] = ()
    """Floating-point constants that are not weights."""
    fused_whole: bool = False
    """Whether methods for matrices merge fused ones, such as q, k and v in one (`fused.py`), as one unless told otherwise, as the
    ACE authors did in these families. In others they are merged apart."""


# What has a row for every token, and positions of language models.
_VOCABULARY = (
    "*embed_tokens*",
    "*embed_positions*",
    "*embed_in*",
    "*embed_out*",
    "*word_embedding*",
    "*tok_embeddings*",
    "*tokens_embed*",
    "*.embeddings.weight",  # Mamba, RWKV, XLM
    "*.embed.weight",
    "*.unembed.weight",
    "*wte*",
    "*lm_head*",
    "*output_projection.weight",
    "*predictions.decoder.weight",
    "decoder.weight",
    "output.weight",
    "*transformer.w.weight",
    "*input_embedding.weight",
    "*segment_embedding.weight",
    "*token_type_embed*",
    "*hash_tok_embedding.weight",
    "*ngram_embeddings*",
    "*codec_embed*",  # of sounds and pictures that a model writes as tokens
    "*codec_head*",
    "*generation_head.vision_head*",
    "log_softmax.mlp.*",  # Cohere's ASR
)
# Of towers for images and sound: positions, classes and queries that are added or looked up, and multiply nothing.
_LOOKUP_TABLES = (
    "*position_embed*",
    "*positional_embed*",
    "*pos_emb*",
    "*embedding",
    "*embeddings.weight",
    "*embedding.weight",
    "*embed_global.weight",
    "*bos_eos_token.weight",
    "*query_tokens*",
    "*latent_query",
    "*.query",
    "*.query_[0-9]*.weight",
    "*latents",
    "*column_embedder.weight",
    "*row_embedder.weight",
    "*relative_position_bias_table",
    "*rel_pos_*",
    "*embeddings_table*",
)
_CONV1D = ("*.c_attn.weight", "*.c_proj.weight", "*.c_fc.weight", "*.q_attn.weight")

FAMILIES = (
    Family(
        "bert",
        "encoder matrices merge",
        frozenset(
            (
                "bert roberta xlm-roberta camembert distilbert electra mpnet albert deberta deberta-v2 roformer ernie roc_bert"
            ).split()
        ),
        signature="*encoder.layer.*.attention.self.query.weight",
        kept=("*bias*", "*LayerNorm*", "*layer_norm*", "*embeddings*", "*embed_positions*"),
        kept_in_words="embeddings, biases and norms",
    ),
    Family(
        "gpt2",
        "everything merges, embeddings included; Conv1D matrices are stored [in, out]",
        frozenset("gpt2 openai-gpt imagegpt decision_transformer".split()),
        signature="*h.*.attn.c_attn.weight",
        stored_in_out=_CONV1D,
        buffers=("*.attn.bias", "*.attn.masked_bias"),
        fused_whole=True,
    ),
    Family(
        "llm",
        "attention and MLP matrices merge, norms average",
        frozenset(
            (
                "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text phi phi3 olmo"
                " olmo2 olmo3 cohere starcoder2 stablelm granite smollm3 opt gpt_neox gptj falcon bloom"
                " deepseek_v2 deepseek_v3 cohere2 glm glm4 glm4_moe gpt_oss llama4_text qwen3_next gemma4_text"
            ).split()
        ),
        signature="*layers.*.self_attn.q_proj.weight",
        kept=_VOCABULARY,
        kept_in_words="embed_tokens and lm_head",
        averaged=("*pos_emb*.weight", "*position_embed*.weight"),
    ),
    Family(
        "vlm",
        "as llm; matrices of towers for images or sound and of projectors merge too, their lookup tables average",
        frozenset(
            (
                "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe gemma3 gemma3n gemma4 llava llava_next"
                " llava_onevision mistral3 llama4 paligemma idefics2 idefics3 smolvlm internvl glm4v glm4v_moe cohere2_vision"
                " qwen2_audio voxtral chameleon diffusion_gemma nemotron_h_omni"
            ).split()
        ),
        kept=("*shared.weight", *_VOCABULARY),
        kept_in_words="embed_tokens and lm_head",
        averaged=_LOOKUP_TABLES,
        stored_in_out=("*mm_input_projection_weight",),  # Gemma3's projector multiplies by it from the right
    ),
    Family(
        "seq2seq",
        "matrices of encoder and decoder merge, norms and convolutions average",
        frozenset(
            "bart mbart marian pegasus pegasus_x m2m_100 nllb-moe blenderbot blenderbot-small led plbart fsmt whisper".split()
        ),
        kept=("*shared.weight", "*proj_out.weight", *_VOCABULARY),
        kept_in_words="vocabulary and positions",
        averaged=("*relative_attention_bias*", *_LOOKUP_TABLES),
    ),
    Family(
        "t5",
        "attention and MLP matrices merge, norms and position buckets average",
        frozenset("t5 mt5 umt5 longt5".split()),
        signature="*block.*.layer.*.SelfAttention.q.weight",
        kept=("*shared.weight", "*embed_tokens*", "*lm_head*"),
        kept_in_words="vocabulary and output layer",
        averaged=("*relative_attention_bias*",),
    ),
    Family(
        "vit",
        "everything merges (CLIP, ViT, SigLIP, open_clip); text_projection averages",
        frozenset(
            (
                "vit clip clip_vision_model clip_text_model siglip siglip_vision_model siglip2 deit beit dinov2"
                " dinov3_vit vit_mae vit_msn chinese_clip"
            ).split()
        ),
        signature="*visual.transformer.resblocks.*.attn.in_proj_weight",
        averaged=("*text_projection*",),
        stored_in_out=("*visual.proj", "visual.proj", "*text_projection"),
        fused_whole=True,
    ),
    Family(
        "generic",
        "matrices merge; lookup tables, the output layer over a vocabulary, vectors and convolutions average",
        averaged=(
            "*embed*.weight",
            "*wte.weight",
            "*wpe.weight",
            "*embedding*",
            "*lm_head.weight",  # a lookup table backwards, in many models the same one
            "*embed_out.weight",
            "*head.decoder.weight",
            "*shared.weight",
            "*relative_position_bias_table",  # Swin and its kin: a number per head and distance, added, not multiplied
            "*attention_biases",
            "*level_embed",
            "cls.weight",  # UltraBERT's output layer
            "encoder.out.weight",  # Granite's CTC: over the vocabulary, and back
            "encoder.out_mid.weight",
            "*rel_pos_emb.weight",
            "*latents",
        ),
    ),
)

# Constants that some versions of transformers store and others do not.
BUFFERS = ("*position_ids", "*inv_freq", "*relative_position_index", "*num_batches_tracked", "*pos_idx_to_embed")

# Never a linear map of activations, whatever its shape: biases, which a mixture of experts stacks to a matrix, what a
# state-space model (Mamba and its kin) decays, skips and steps by, and the entries of a sound codec's book.
NOT_LINEAR = ("*bias", "*bias_[uv]", "*A_log", "*.D", "*.dt_bias", "*codebook.embed_sum")

# A task's own output layer: never merged, each expert's is kept beside the output.
_TASK_HEAD_MODULES = {"classifier", "score", "qa_outputs", "classification_head", "classification_heads"}
# Layers that a task may add to a base that lacks them.
_ADDED_MODULES = _TASK_HEAD_MODULES | {
    "pooler",
    "pre_classifier",
    "lm_head",
    "cls",
    "logits_proj",
    "summary",
    "heads",
    "head",
}


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether any pattern covers the name."""
    return _matcher(tuple(patterns)).match(name) is not None


@lru_cache
def _matcher(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """All of them as one expression: a plan asks for every tensor. Without any it matches nothing."""
    return re.compile("|".join(map(translate, patterns)) if patterns else r"(?!)")


def is_task_head(name: str) -> bool:
    """Whether a tensor is a task's output layer, by its module's name.

    >>> is_task_head("classifier.out_proj.weight"), is_task_head("head.weight"), is_task_head("vision_model.head.mlp.fc1.weight")
    (True, True, False)

    A head that pools by attention has more of its own than a linear layer has:

    >>> is_task_head("vision_tower.head.probe")
    False
    """
    *modules, parameter = name.split(".")
    is_linear_head = modules[-1:] == ["head"] and parameter in ("weight", "bias")
    return is_linear_head or not _TASK_HEAD_MODULES.isdisjoint(modules)


def may_be_added(name: str) -> bool:
    """Whether a tensor that the base does not have can be taken for a part of the expert's head."""
    return not _ADDED_MODULES.isdisjoint(name.split(".")[:-1])


def head_module(name: str) -> str:
    """The module that a head's tensor belongs to, as a whole.

    >>> head_module("classifier.out_proj.weight")
    'classifier'
    """
    parts = name.split(".")[:-1]
    end = next((index for index, part in enumerate(parts, 1) if part in _ADDED_MODULES), len(parts))
    return ".".join(parts[:end])


def is_output_layer(name: str) -> bool:
    """Whether a tensor belongs to what a model puts on its backbone: a task's head, or the head it was pretrained with."""
    return not (_ADDED_MODULES - {"pooler"}).isdisjoint(name.split(".")[:-1])


def choose_family(preset: str, config: Mapping[str, Any], names: Iterable[str]) -> Family:
    """The named preset, or with 'auto' the one for the config's model_type, else the one the tensor names show."""
    if preset != "auto":
        by_name = {family.name: family for family in FAMILIES}
        if preset not in by_name:
            raise InputError(f"there is no preset '{preset}': {did_you_mean(preset, [*by_name, 'auto'])}")
        return by_name[preset]
    generic = FAMILIES[-1]
    model_type = config.get("model_type")
    if model_type and isinstance(model_type, str):
        listed = next((family for family in FAMILIES if model_type in family.model_types), None)
        return listed or _by_architecture(config)
    names = list(names)
    signed = (family for family in FAMILIES if family.signature)
    return next((family for family in signed if any(fnmatchcase(name, family.signature) for name in names)), generic)


def _by_architecture(config: Mapping[str, Any]) -> Family:
    """Of a model type that no family lists: by how its class's name ends, and whether towers have configs of their own."""
    by_name = {family.name: family for family in FAMILIES}
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if not architecture.endswith((*_DECODERS, "ForConditionalGeneration")):
        return by_name["generic"]
    if any(isinstance(config.get(part), Mapping) for part in _TOWERS):
        return by_name["vlm"]
    return by_name["llm" if architecture.endswith(_DECODERS) else "seq2seq"]


_DECODERS = ("ForCausalLM", "LMHeadModel")
_TOWERS = ("text_config", "vision_config", "audio_config", "thinker_config")


def is_stored_in_out(name: str, family: Family, tensors: Mapping[str, TensorHeader]) -> bool:
    """Whether a matrix is stored [in, out]: the family says so, or its bias has the length of the second axis only."""
    if matches(name, family.stored_in_out):
        return True
    bias = tensors.get(name.removesuffix("weight") + "bias") if name.endswith(".weight") else None
    rows, columns = tensors[name].shape
    return bias is not None and bias.shape == (columns,) and rows != columns


def prefix_exchange(theirs: str, ours: str) -> tuple[str, str]:
    """The prefixes in which two names of the same tensor differ.

    >>> prefix_exchange("vit.layers.0.attention.q_proj.weight", "encoder.layer.0.attention.attention.query.weight")
    ('vit.', '')
    """
    one, other = modern_name(theirs).split("."), modern_name(ours).split(".")
    while one and other and one[-1] == other[-1]:
        one.pop(), other.pop()
    return "".join(f"{part}." for part in one), "".join(f"{part}." for part in other)


# --- lining up names ---------------------------------------------------------------------------------------------------


def align_names(base: Mapping[str, TensorHeader], expert: Mapping[str, TensorHeader]) -> dict[str, str]:
    """Each of the expert's tensor names -> the name it has, or would have, in the base.

    The same backbone is stored with and without a prefix (`bert.`, `transformer.`, `vision_model.`, `module.`), depending on
    the class that saved it. Of all ways to exchange one leading prefix for another, take the one under which most tensors
    agree in name and shape; names as they are win a tie. A model of several towers may have exchanged one prefix for each: what
    is left over is tried again, if all tensors of a prefix agree.
    """
    if expert.keys() <= base.keys():
        return {name: name for name in expert}
    ours = {modern_name(name): name for name in base}
    modern_base = {modern_name(name): header for name, header in base.items()}
    modern_expert = {modern_name(name): header for name, header in expert.items()}
    choices = [("", "")]
    if not (modern_expert.keys() <= modern_base.keys() or modern_base.keys() <= modern_expert.keys()):
        choices += [(old, new) for old in _prefixes(modern_expert) for new in _prefixes(modern_base)]
    old, new = max(choices, key=lambda choice: (_agreement(modern_base, modern_expert, *choice), choice == ("", "")))
    exchanged = {name: _exchange(modern_name(name), old, new, modern_base) for name in expert}
    if len(choices) > 1:
        exchanged |= _other_towers(modern_base, expert, exchanged)
    return {name: ours.get(aligned, aligned) for name, aligned in exchanged.items()}


def _other_towers(
    base: Mapping[str, TensorHeader], expert: Mapping[str, TensorHeader], exchanged: Mapping[str, str]
) -> dict[str, str]:
    """Names that found no place yet and find one if all tensors that share their prefix exchange it for another."""
    left = {modern_name(name): expert[name] for name, aligned in exchanged.items() if aligned not in base}
    taken = set(exchanged.values())
    free = {name: header for name, header in base.items() if name not in taken}
    found: dict[str, str] = {}
    for old in (prefix for prefix in _prefixes(left) if prefix):
        own = {name: header for name, header in left.items() if name.startswith(old) and name not in found}
        for new in _prefixes(free):
            if len(own) > 1 and _agreement(free, own, old, new) == len(own):
                found |= {name: new + name.removeprefix(old) for name in own}
                break
    return {name: found[modern_name(name)] for name in expert if modern_name(name) in found}


# Old name -> today's. The first BERT checkpoints say gamma and beta. ViT's files keep names that its modules no longer have, and
# adapters go by the modules; BERT's modules are renamed along with them, alike on both sides, which does no harm.
_RENAMED = (
    (re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"),
    (re.compile(r"encoder\.layer\.(\d+)\.attention\.attention\.(q|k|v)(uery|ey|alue)\."), r"layers.\1.attention.\2_proj."),
    (re.compile(r"encoder\.layer\.(\d+)\.attention\.output\.dense\."), r"layers.\1.attention.o_proj."),
    (re.compile(r"encoder\.layer\.(\d+)\.intermediate\.dense\."), r"layers.\1.mlp.fc1."),
    (re.compile(r"encoder\.layer\.(\d+)\.output\.dense\."), r"layers.\1.mlp.fc2."),
    (re.compile(r"encoder\.layer\.(\d+)\.layernorm_"), r"layers.\1.layernorm_"),
    (re.compile(r"\.block_sparse_moe\.(gate|experts)\b"), r".mlp.\1"),
)


def modern_name(name: str) -> str:
    """A tensor's name as it is today.

    >>> modern_name("bert.embeddings.LayerNorm.gamma")
    'bert.embeddings.LayerNorm.weight'
    >>> modern_name("vit.encoder.layer.0.attention.attention.query.weight")
    'vit.layers.0.attention.q_proj.weight'
    >>> modern_name("model.layers.0.block_sparse_moe.gate.weight")
    'model.layers.0.mlp.gate.weight'
    """
    for old, new in _RENAMED:
        name = old.sub(new, name)
    return name


def _prefixes(names: Iterable[str]) -> list[str]:
    """The empty prefix and every leading run of one or two name parts, in order of appearance.

    A head's module is no prefix: a classifier is not another model's lm_head, even where their shapes agree.
    """
    found = {"": None}
    for name in names:
        parts = name.split(".")
        for length in (1, 2):
            leading = parts[:length]
            if len(parts) > length and _ADDED_MODULES.isdisjoint(leading) and not any(part.isdigit() for part in leading):
                found[".".join(parts[:length]) + "."] = None
    return list(found)


def _exchange(name: str, old: str, new: str, base: Mapping[str, TensorHeader]) -> str:
    exchanged = new + name.removeprefix(old) if name.startswith(old) else name
    return name if exchanged not in base and name in base else exchanged


def _agreement(base: Mapping[str, TensorHeader], expert: Mapping[str, TensorHeader], old: str, new: str) -> int:
    """How many of the expert's tensors find one of the same name and shape in the base."""
    found = ((base.get(_exchange(name, old, new, base)), header) for name, header in expert.items())
    return sum(1 for in_base, header in found if in_base is not None and in_base.shape == header.shape)
