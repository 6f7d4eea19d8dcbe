"""Tiny checkpoints and data in the layout of the paper's suites: the same architectures, files and columns, random weights."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

LIBRARY: Any = import_module("transformers")
"""Much of it has no types."""

WORDS = (
    "a photo of the number character digit type pet flower food face looking showing emotion that looks they look at how are "
    "review movie centered satellite texture pattern thing object zoomed in traffic sign close up english premise answer "
    "question is not"
).split()


def tokenizer(folder: Path, special: Mapping[str, str], wrap: str | None, longest: int = 64) -> Any:
    """Every word is a token; special tokens come last. `wrap`: a template for one text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    kinds = list(dict.fromkeys(special.values()))
    vocabulary = {word: index for index, word in enumerate([*WORDS, *kinds])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if wrap:
        pair = wrap.replace("$A", "$A " + wrap.split()[-1] + " $B")
        inner.post_processor = processors.TemplateProcessing(wrap, pair, [(kind, vocabulary[kind]) for kind in kinds])
    made = LIBRARY.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=longest, **special)
    made.save_pretrained(folder)
    return made


def sentences(seed: int, count: int) -> list[str]:
    """Of three to eleven words."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randrange(3, 12))) for _ in range(count)]


def fine_tuned(model: Any, seed: int, size: float = 0.3) -> Any:
    """Random steps on all weights, so large that answers differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator) * (0.05 + float(parameter.abs().mean()))
    return model


# --- CLIP --------------------------------------------------------------------------------------------------------------


def clip_models(folder: Path, tasks: Sequence[str]) -> None:
    """`base`, a whole CLIP with tokenizer, and an image encoder for each task."""

    base = folder / "base"
    special = {"bos_token": "<start>", "unk_token": "<end>", "eos_token": "<end>", "pad_token": "<end>"}
    words = tokenizer(base, special, "<start> $A <end>")
    torch.manual_seed(0)
    common = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": 8}
    text = {**common, "vocab_size": len(words), "max_position_embeddings": 64, "bos_token_id": words.bos_token_id,
            "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}  # fmt: skip
    vision = {**common, "image_size": 32, "patch_size": 16}
    config = LIBRARY.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    fine_tuned(LIBRARY.CLIPModel(config), 1, 1.0).save_pretrained(base)
    for seed, task in enumerate(tasks):
        encoder: Any = LIBRARY.CLIPVisionModel.from_pretrained(base)
        fine_tuned(encoder, seed).save_pretrained(folder / task)


def pictures(seed: int, count: int) -> list[Image.Image]:
    """Of different sizes, grey and in colour."""
    generator = np.random.default_rng(seed)
    shapes = [(40, 50, 3) if index % 2 else (28, 28) for index in range(count)]
    return [Image.fromarray(generator.integers(256, size=shape, dtype=np.uint8)) for shape in shapes]


def picture_data(folder: Path, task: str, images: Sequence[Image.Image], labels: Sequence[int], split: str = "test") -> None:
    """Parquet files as the hub has them."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    table = datasets.Dataset.from_dict({"image": list(images), "label": list(labels)}, features)
    (folder / task).mkdir(parents=True, exist_ok=True)
    for name in ("train", split):
        table.to_parquet(folder / task / f"{name}-00000-of-00001.parquet")


class OpenClipBlock(torch.nn.Module):
    """OpenCLIP's residual block, from its published architecture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attn = torch.nn.MultiheadAttention(width, 1, batch_first=True)
        inner = {"c_fc": torch.nn.Linear(width, 2 * width), "c_proj": torch.nn.Linear(2 * width, width)}
        self.mlp = torch.nn.ModuleDict(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        wide = self.mlp["c_fc"](self.ln_2(x))
        narrow: torch.Tensor = self.mlp["c_proj"](wide * torch.sigmoid(1.702 * wide))
        return x + narrow


class OpenClip(torch.nn.Module):
    """An image encoder as TSV-M's files hold it: `model.visual.*`, and something left of the text side."""

    def __init__(self, width: int = 16, patch: int = 16, size: int = 32, projected: int = 8) -> None:
        super().__init__()
        visual = torch.nn.Module()
        visual.conv1 = torch.nn.Conv2d(3, width, patch, patch, bias=False)
        visual.class_embedding = torch.nn.Parameter(torch.randn(width))
        visual.positional_embedding = torch.nn.Parameter(torch.randn((size // patch) ** 2 + 1, width))
        visual.ln_pre, visual.ln_post = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        visual.transformer = torch.nn.Module()
        visual.transformer.resblocks = torch.nn.ModuleList(OpenClipBlock(width) for _ in range(2))
        visual.proj = torch.nn.Parameter(torch.randn(width, projected))
        self.model = torch.nn.Module()
        self.model.visual = visual
        self.model.logit_scale = torch.nn.Parameter(torch.tensor(4.0))
        self.model.text_projection = torch.nn.Parameter(torch.randn(4, projected))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        visual: Any = self.model.visual
        patches = visual.conv1(pixels).flatten(2).transpose(1, 2)
        first = visual.class_embedding.expand(len(pixels), 1, -1)
        x = visual.ln_pre(torch.cat([first, patches], 1) + visual.positional_embedding)
        for block in visual.transformer.resblocks:
            x = block(x)
        embedded: torch.Tensor = visual.ln_post(x[:, 0]) @ visual.proj
        return embedded


def open_clip_models(folder: Path, tasks: Sequence[str], size: str = "ViT-B-32") -> dict[str, OpenClip]:
    """TSV-M's files; returns the models, the base among them."""
    torch.manual_seed(0)
    models = {"base": OpenClip()}
    for seed, task in enumerate(tasks):
        expert = OpenClip()
        expert.load_state_dict(models["base"].state_dict())
        fine_tuned(expert.model.visual, seed)
        place = folder / size / f"{task}Val"
        place.mkdir(parents=True)
        torch.save(models["base"].state_dict(), place / "nonlinear_zeroshot.pt")
        torch.save(expert.state_dict(), place / "nonlinear_finetuned.pt")
        models[task] = expert
    return models


# --- text --------------------------------------------------------------------------------------------------------------


def glue_rows(columns: Sequence[str], classes: int, seed: int, count: int = 24) -> list[dict[str, Any]]:
    """With GLUE's columns; numbers from 0 to 5 where there are no classes."""
    texts = [sentences(seed + 100 * place, count) for place in range(len(columns))]
    generator = random.Random(seed)
    labels = [generator.randrange(classes) if classes else round(5 * generator.random(), 2) for _ in range(count)]
    return [{**dict(zip(columns, row, strict=True)), "label": label, "idx": index}
            for index, (row, label) in enumerate(zip(zip(*texts, strict=True), labels, strict=True))]  # fmt: skip


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """As lines of JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def gpt2_models(folder: Path, classes: Mapping[str, int]) -> None:
    """`base`, with a tokenizer that has no padding, and a classifier for each task."""

    end = "<|endoftext|>"
    words = tokenizer(folder / "base", {"bos_token": end, "eos_token": end, "unk_token": end}, None, 1024)
    common = {"vocab_size": len(words), "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.5}
    torch.manual_seed(0)
    base = LIBRARY.GPT2Model(LIBRARY.GPT2Config(**common))
    base.save_pretrained(folder / "base")
    _experts(
        folder,
        classes,
        lambda labels: LIBRARY.GPT2ForSequenceClassification(LIBRARY.GPT2Config(**common, num_labels=labels)),
        base,
    )


def roberta_models(folder: Path, classes: Mapping[str, int], place: str = "{task}") -> None:
    """`base`, and a classifier for each task where Twin-Merging has it."""

    special = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "cls_token": "<s>",
        "sep_token": "</s>",
    }
    words = tokenizer(folder / "base", special, "<s> $A </s>", 128)
    common = {"vocab_size": len(words), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "intermediate_size": 32, "max_position_embeddings": 140, "pad_token_id": words.pad_token_id,
              "type_vocab_size": 1, "initializer_range": 0.5}  # fmt: skip
    torch.manual_seed(0)
    base = LIBRARY.RobertaModel(LIBRARY.RobertaConfig(**common), add_pooling_layer=False)
    base.save_pretrained(folder / "base")
    make = lambda labels: LIBRARY.RobertaForSequenceClassification(LIBRARY.RobertaConfig(**common, num_labels=labels))  # noqa: E731
    _experts(folder, classes, make, base, place)


def _experts(folder: Path, classes: Mapping[str, int], make: Callable[[int], Any], base: Any, place: str = "{task}") -> None:
    """With large weights and a head that favours no class, so that answers differ from row to row."""
    for seed, (task, labels) in enumerate(classes.items()):
        model = make(labels or 1)
        model.base_model.load_state_dict(base.state_dict(), strict=False)
        fine_tuned(model, seed)
        if hasattr(model, "classifier"):
            with torch.no_grad():
                any_words = torch.randint(len(WORDS), (32, 8), generator=torch.Generator().manual_seed(seed))
                model.classifier.out_proj.bias -= model.eval()(input_ids=any_words).logits.mean(0)
        model.save_pretrained(folder / place.format(task=task))


def llama_models(folder: Path, experts: Sequence[str]) -> None:
    """`base` and its experts, the last with a larger vocabulary."""

    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    words = tokenizer(folder / "base", special, "<s> $A", 256)
    config = LIBRARY.LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LIBRARY.LlamaForCausalLM(config).save_pretrained(folder / "base")
    for seed, expert in enumerate(experts):
        model: Any = LIBRARY.LlamaForCausalLM.from_pretrained(folder / "base")
        if expert == experts[-1]:
            model.resize_token_embeddings(len(words) + 4)
        fine_tuned(model, seed, 1.0).save_pretrained(folder / expert)
        words.save_pretrained(folder / expert)
