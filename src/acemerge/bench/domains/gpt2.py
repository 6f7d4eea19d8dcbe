"""A GPT-2 of small size, pretrained here on real text: its Conv1D weights are stored [in, out], the other way round from BERT's.

No GPT-2 weights come in packages, so the base is trained from nothing on the texts of the bench's own packages (training rows
only), with a vocabulary learnt from them. It is far weaker than GPT-2; what it shows is what orientation is worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acemerge.bench.data import text_tasks
from acemerge.bench.data.task import Rows, Task
from acemerge.bench.domains.text import LONGEST, PreparedTexts, mean_of_token_logits, quiet_transformers
from acemerge.bench.measure.experts import Experts

VOCABULARY = 4096
STEPS, BATCH, BLOCK, RATE = 900, 32, 64, 1e-3
PRETRAINING_TEXTS = 6_000
"""Of each source, at most."""

_END = "<|endoftext|>"
_CORPUS = ("snli", "jeopardy", "movie", "newsgroups", "spam", "toxic", "reuters_r8", "tweets_author")


class Gpt2Domain:
    """See `Domain`."""

    name = "gpt2"
    training: Mapping[str, Any] = {}

    def write_base(self, folder: Path) -> None:
        """Learn the vocabulary, then to predict the next token."""
        from transformers import GPT2Config, GPT2LMHeadModel

        quiet_transformers()
        texts = list(corpus())
        tokenizer = _learn_vocabulary(texts)
        tokenizer.save_pretrained(folder)
        tokens = torch.tensor(list(chain.from_iterable([*ids, 0] for ids in tokenizer(texts)["input_ids"])))
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=2 * BLOCK, n_embd=256, n_layer=4, n_head=8, bos_token_id=0, eos_token_id=0,
            pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, classifier_dropout=0.0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
        _pretrain(model, tokens)
        model.transformer.save_pretrained(folder)

    def new_expert(self, base: Path, task: Task) -> nn.Module:
        """The base with a new linear head."""
        from transformers import GPT2ForTokenClassification

        quiet_transformers()
        names = dict(enumerate(task.classes))
        label2id = {name: index for index, name in names.items()}
        model: nn.Module = GPT2ForTokenClassification.from_pretrained(base, id2label=names, label2id=label2id)
        return model

    def load(self, folder: Path) -> nn.Module:
        """An expert, or a merged model with its head."""
        from transformers import GPT2ForTokenClassification

        quiet_transformers()
        model: nn.Module = GPT2ForTokenClassification.from_pretrained(folder)
        return model

    def save(self, model: nn.Module, folder: Path) -> None:
        """With the tokenizer."""
        saved: Any = model
        saved.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)

    def prepare(self, rows: Rows) -> PreparedTexts:
        """Tokenise; the two texts of a pair follow each other."""
        joined = [row if isinstance(row, str) else _END.join(row) for row in rows.inputs]
        ids = _tokenizer()([text[: 8 * LONGEST] for text in joined], truncation=True, max_length=LONGEST)["input_ids"]
        ids = [row or [0] for row in ids]
        return PreparedTexts(ids, [[0] * len(row) for row in ids], torch.tensor(rows.labels))

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The mean of the tokens' logits."""
        return mean_of_token_logits(model, {name: batch[name] for name in ("input_ids", "attention_mask")})


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(Experts(Gpt2Domain(), 0).base)


def corpus() -> Iterator[str]:
    """Training texts of the tasks, the test and validation rows of which are never seen."""
    tasks = {task.name: task for task in text_tasks.TASKS}
    for name in _CORPUS:
        for row in tasks[name].load().train.first(PRETRAINING_TEXTS).inputs:
            yield (row if isinstance(row, str) else " ".join(row))[:800]


def _learn_vocabulary(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[_END], show_progress=False)
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=_END, eos_token=_END, unk_token=_END, pad_token=_END, model_max_length=2 * BLOCK
    )


def _pretrain(model: nn.Module, tokens: Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.05)
    for _ in range(STEPS):
        starts = torch.randint(len(tokens) - BLOCK, (BATCH,), generator=generator)
        batch = torch.stack([tokens[start : start + BLOCK] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


_RATES = {"movie": 3e-4, "acceptability": 5e-4, "newsgroups": 1e-3, "spam": 2e-4, "toxic": 2e-4, "reuters_r8": 5e-4}
"""A small model trained from nothing moves further in fine-tuning than a large one."""

TASKS = tuple(replace(task, learning_rate=_RATES[task.name]) for task in text_tasks.TASKS if task.name in _RATES)
