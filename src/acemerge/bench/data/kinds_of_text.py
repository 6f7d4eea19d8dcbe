"""Six kinds of text, each to be learnt by a language model: the texts of the classification tasks, without their classes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from acemerge.bench.data import text_tasks
from acemerge.bench.data.packages import Package
from acemerge.bench.data.task import Rows, Splits, TrainedTask

Text = Callable[[Any], str]


def on_one_line(row: str) -> str:
    """A text, whatever its layout."""
    return " ".join(row.split())


def both_texts(row: tuple[str, str]) -> str:
    """One after the other."""
    return on_one_line(" ".join(row))


def second_text(row: tuple[str, str]) -> str:
    """Without the category or name that the first one is."""
    return on_one_line(row[1])


def load_texts(load: Callable[[], Splits], text: Text) -> Splits:
    """The texts of a task's three parts, each once. What is held out may also be a training row, of another class: not here."""
    splits = load()
    validation, test = _texts(splits.validation, text), _texts(splits.test, text)
    held_out = {*validation.inputs, *test.inputs}
    return Splits(_texts(splits.train, text, held_out), validation, test)


def _texts(rows: Rows, text: Text, but: Collection[str] = ()) -> Rows:
    texts = [found for found in dict.fromkeys(map(text, rows.inputs)) if found and found not in but]
    return Rows(texts, [0] * len(texts))


def _kind(
    name: str, load: Callable[[], Splits], text: Text, package: Package, train_rows: int, batch_size: int, learning_rate: float
) -> TrainedTask:
    source = f"{package.name} {package.version}, texts"
    return TrainedTask(name, (), partial(load_texts, load, text), source, train_rows, batch_size, learning_rate, metric="loss")


TASKS = (
    _kind("captions", text_tasks.load_snli, both_texts, text_tasks.NLI, 1600, 8, 3e-4),
    _kind("quiz", text_tasks.load_jeopardy, second_text, text_tasks.WEAVIATE, 1600, 8, 3e-4),
    _kind("tweets", text_tasks.load_tweet_entity, second_text, text_tasks.TWITTER, 1200, 8, 3e-4),
    _kind("reviews", text_tasks.load_movie, on_one_line, text_tasks.VADER, 1600, 8, 3e-4),
    _kind("mails", text_tasks.load_spam, on_one_line, text_tasks.SPAM_ASSASSIN, 800, 4, 3e-4),
    _kind(
        "news", partial(text_tasks.load_orange, "reuters-r8", text_tasks.REUTERS), on_one_line, text_tasks.ORANGE, 800, 4, 3e-4
    ),
)
