"""One tokenizer that knows the tokens of several: the base's, with what the experts' have besides.

The base's tokens keep their ids. The others follow, expert by expert. Every token is written into the model's own vocabulary with
its id, also those that are only added to it, so that no loader numbers them anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from acemerge.checkpoints.folder import Checkpoint, read_json
from acemerge.checkpoints.tokenizer import TOKENIZER
from acemerge.errors import InputError

Ids = Mapping[str, int]
Content = dict[str, Any]


def union_ids(base: Ids, experts: Sequence[Ids]) -> Ids:
    """Token -> id of all of them.

    >>> union_ids({"a": 0, "b": 1}, [{"b": 0, "<x>": 1}, {"<y>": 7, "<x>": 8}])
    {'a': 0, 'b': 1, '<x>': 2, '<y>': 3}
    """
    ids = dict(base)
    end = max(ids.values(), default=-1) + 1
    for own in experts:
        for token in sorted(own, key=lambda token: own[token]):
            if token not in ids:
                ids[token] = end
                end += 1
    return ids


def union_problems(base: Checkpoint, experts: Sequence[Checkpoint], expert_ids: Sequence[Ids], base_ids: Ids) -> Iterator[str]:
    """Why these tokenizers cannot be made one; experts with the base's vocabulary do not matter."""
    try:
        ours = _content(base)
        for expert, ids in zip(experts, expert_ids, strict=True):
            if ids is not base_ids and expert.changes is None and (why := _unlike(ours, _content(expert), base_ids)):
                yield (
                    f"--tokenizer union: the tokenizers of base {base.where} and expert {expert.where} cannot be made one: "
                    f"{why}; use --tokenizer base or --tokenizer {expert.name}"
                )
        if isinstance(ours["model"]["vocab"], list) and sorted(set(base_ids.values())) != list(range(len(base_ids))):
            yield f"--tokenizer union: the ids of base {base.where}'s tokens are not 0, 1, 2, ..., as those of Unigram must be"
    except (InputError, OSError) as error:
        yield f"--tokenizer union: {error}"


def union_tokenizer(base: Checkpoint, experts: Sequence[Checkpoint], ids: Ids) -> Content:
    """The content of its tokenizer.json."""
    content = _content(base)
    model = content["model"]
    others = [_content(expert) for expert in experts]
    if isinstance(model["vocab"], list):
        _extend_scores(model["vocab"], others, ids)
    else:
        model["vocab"] = {**model["vocab"], **ids}
    if "merges" in model:
        _extend_merges(model["merges"], others)
    added = {entry["content"]: entry for entry in content.get("added_tokens") or []}
    for other in others:
        for entry in other.get("added_tokens") or []:
            added.setdefault(entry["content"], entry)
    content["added_tokens"] = sorted(({**entry, "id": ids[token]} for token, entry in added.items()), key=lambda own: own["id"])
    return content


def _content(model: Checkpoint) -> Content:
    if model.folder is None or not (model.folder / TOKENIZER).is_file():
        raise InputError(
            f"{model.where} has no tokenizer.json; AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers "
            "writes it"
        )
    content = read_json(model.folder / TOKENIZER)
    if not _is_plain(content):
        raise InputError(
            f"{model.folder / TOKENIZER}: is not as the library `tokenizers` writes it; save it again with transformers"
        )
    return content


def _is_plain(content: Content) -> bool:
    """Whether it has a vocabulary, merges and added tokens in the forms that are extended here."""
    model, added = content.get("model"), content.get("added_tokens") or []
    if not isinstance(model, dict) or not isinstance(added, list):
        return False
    vocabulary, merges = model.get("vocab"), model.get("merges", [])
    by_name = isinstance(vocabulary, dict) and all(isinstance(row, int) for row in vocabulary.values())
    in_order = isinstance(vocabulary, list) and all(_is_scored(entry) for entry in vocabulary)
    entries = all(isinstance(e, dict) and isinstance(e.get("content"), str) and isinstance(e.get("id"), int) for e in added)
    pairs = isinstance(merges, list) and all(isinstance(pair, str | list) and len(_pair(pair)) == 2 for pair in merges)
    return (by_name or in_order) and entries and pairs


def _is_scored(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], int | float)


def _unlike(ours: Content, theirs: Content, base_ids: Ids) -> str | None:
    """Tokens that were added to a vocabulary go with any other; those that text is cut into need the same way of cutting."""
    kinds = _kind(ours), _kind(theirs)
    if kinds[0] != kinds[1]:
        return f"one is {kinds[0]}, the other {kinds[1]}"
    added = {entry["content"] for entry in theirs.get("added_tokens") or []}
    vocabulary = theirs["model"]["vocab"]
    ordinary = [entry[0] for entry in vocabulary] if isinstance(vocabulary, list) else list(vocabulary)
    new = [token for token in ordinary if token not in base_ids and token not in added]
    if new and _spelling(ours) != _spelling(theirs):
        return f"they spell tokens differently, and {new[0]!a} is one that the base lacks"
    return None


def _kind(content: Content) -> str:
    """The name of its model; files of old versions do not say."""
    model = content["model"]
    guess = "Unigram" if isinstance(model.get("vocab"), list) else "BPE" if "merges" in model else "WordPiece"
    return str(model.get("type") or guess)


def _spelling(content: Content) -> tuple[Any, ...]:
    """How text stands in its tokens: as bytes or as letters, and how a word's beginning or end is marked."""
    around = json.dumps([content.get(part) for part in ("pre_tokenizer", "decoder")])
    model = content["model"]
    return '"ByteLevel"' in around, model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")


def _extend_scores(vocabulary: list[list[Any]], others: Sequence[Content], ids: Ids) -> None:
    """A Unigram vocabulary: an id is a place in the list. Added tokens have no score; text is cut at them before."""
    scores: dict[str, float] = {}
    for other in others:
        for token, score in other["model"]["vocab"]:
            scores.setdefault(token, score)
    for token in sorted(ids, key=lambda token: ids[token])[len(vocabulary) :]:
        vocabulary.append([token, scores.get(token, 0.0)])


def _extend_merges(merges: list[Any], others: Sequence[Content]) -> None:
    """A BPE's rules, after the base's own: [left, right], or as one text in files of old versions."""
    as_text = bool(merges) and isinstance(merges[0], str)
    known = set(map(_pair, merges))
    for other in others:
        for pair in map(_pair, other["model"].get("merges") or []):
            if pair not in known:
                known.add(pair)
                merges.append(" ".join(pair) if as_text else list(pair))


def _pair(merge: Any) -> tuple[str, ...]:
    return tuple(merge.split(" ") if isinstance(merge, str) else map(str, merge))
