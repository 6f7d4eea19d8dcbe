"""llama2.c's files give the same model and the same tokens in transformers: against its own program, written again here."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from acemerge.bench.domains.llama2_c import Shape, make_tokenizer, read_tokens, read_weights
from tiny_llama import LETTERS, SHAPE, pieces, random_blocks, tokens_file, weights_file

MHA = replace(SHAPE, key_heads=SHAPE.heads)
UNTIED = replace(SHAPE, tied=False)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean() + 1e-5).sqrt()


def rotated(x: Tensor, position: int, head: int) -> Tensor:
    """Neighbours (0, 1), (2, 3), ... of every head, as run.c turns them."""
    out = x.clone()
    for i in range(0, len(x), 2):
        angle = torch.tensor(position / 10000.0 ** ((i % head) / head))
        out[i] = x[i] * angle.cos() - x[i + 1] * angle.sin()
        out[i + 1] = x[i] * angle.sin() + x[i + 1] * angle.cos()
    return out


def llama2_c_logits(shape: Shape, w: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """`forward` of run.c, token by token with its cache of keys and values."""
    cache: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(shape.layers)]
    logits = []
    for position, token in enumerate(tokens):
        x = w["model.embed_tokens.weight"][token]
        for layer in range(shape.layers):
            seen = rms_norm(x, w[".input_layernorm.weight"][layer])
            q, k, v = (w[f".self_attn.{name}_proj.weight"][layer] @ seen for name in "qkv")
            cache[layer].append((rotated(k, position, shape.head), v))
            q = rotated(q, position, shape.head)
            answers = []
            for h in range(shape.heads):
                own = slice(h * shape.head, (h + 1) * shape.head)
                key = h // (shape.heads // shape.key_heads)
                theirs = slice(key * shape.head, (key + 1) * shape.head)
                scores = torch.stack([q[own] @ past[theirs] / shape.head**0.5 for past, _ in cache[layer]]).softmax(0)
                answers.append(sum(score * past[theirs] for score, (_, past) in zip(scores, cache[layer], strict=True)))
            x = x + w[".self_attn.o_proj.weight"][layer] @ torch.cat(answers)
            seen = rms_norm(x, w[".post_attention_layernorm.weight"][layer])
            gate = w[".mlp.gate_proj.weight"][layer] @ seen
            x = x + w[".mlp.down_proj.weight"][layer] @ (gate * gate.sigmoid() * (w[".mlp.up_proj.weight"][layer] @ seen))
        output = w["model.embed_tokens.weight"] if shape.tied else w["lm_head.weight"]
        logits.append(output @ rms_norm(x, w["model.norm.weight"]))
    return torch.stack(logits)


@pytest.mark.parametrize("shape", [SHAPE, MHA, UNTIED], ids=["grouped", "all-heads", "untied"])
def test_the_model_answers_as_llama2_c(shape: Shape) -> None:
    blocks = random_blocks(shape)
    found, weights, rest = read_weights(weights_file(shape, blocks) + b"what follows")
    assert (found, rest) == (shape, b"what follows")
    model = LlamaForCausalLM(found.config()).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if shape.tied else [])
    tokens = [1, 7, 260, 3, 3, 250, 99, 14]
    with torch.inference_mode():
        ours = model(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, llama2_c_logits(shape, blocks, tokens), rtol=1e-4, atol=1e-4)


def llama2_c_encode(vocabulary: list[tuple[str, float]], text: str) -> list[int]:
    """`encode` of run.c: characters or their bytes first, then again and again the pair that makes the best token."""
    index = {piece: 259 + place for place, (piece, _) in enumerate(vocabulary)}
    score = {259 + place: score for place, (_, score) in enumerate(vocabulary)}
    name = {place: piece for piece, place in index.items()}
    tokens: list[int] = []
    for character in f" {text}":
        tokens += [index[character]] if character in index else [byte + 3 for byte in character.encode()]
    while True:
        best, where = -1e10, -1
        for i in range(len(tokens) - 1):
            joined = index.get(name.get(tokens[i], "\0") + name.get(tokens[i + 1], "\0"))
            if joined is not None and score[joined] > best:
                best, where = score[joined], i
        if where < 0:
            return [1, *tokens]
        tokens[where : where + 2] = [index[name[tokens[where]] + name[tokens[where + 1]]]]


def test_texts_become_the_tokens_of_llama2_c(tmp_path: Path) -> None:
    make_tokenizer(read_tokens(tokens_file(pieces())), 32).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    generator = random.Random(0)
    several = 0
    for _ in range(300):
        text = "".join(generator.choice(LETTERS + "   é漢z") for _ in range(generator.randrange(1, 20)))
        ids = tokenizer(text)["input_ids"]
        assert ids == llama2_c_encode(pieces(), text), text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        several += any(len(piece) > 2 for piece in tokenizer.convert_ids_to_tokens(ids))
    assert several > 100  # pieces of pieces


def test_bytes_go_by_their_place() -> None:
    tokens = read_tokens(tokens_file(pieces()))
    assert [token for token, _ in tokens[:4]] == ["<unk>", "<s>", "</s>", "<0x00>"]
    assert tokens[258] == ("<0xFF>", 0.0)
    assert tokens[259:] == [(piece.replace(" ", "▁"), score) for piece, score in pieces()]
