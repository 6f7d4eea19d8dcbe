"""The vocabulary that the output gets: read from the models' folders, as the recipe asks, with what there is to say of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.tokenizer import TOKENIZER, chat_template, has_tokenizer, token_ids
from acemerge.checkpoints.untrusted import read_bounded, shortened
from acemerge.checkpoints.vocabulary_tensors import embedding_rows, vocabulary_axes
from acemerge.errors import InputError, did_you_mean, disk_failed
from acemerge.planning.union_tokenizer import union_ids, union_problems
from acemerge.planning.vocabulary import Difference, Ids, Vocabulary, difference
from acemerge.planning.vocabulary_files import role_problems
from acemerge.recipe.recipe import Recipe


def choose_vocabulary(
    recipe: Recipe, base: Checkpoint, experts: Sequence[Checkpoint], config: Mapping[str, Any]
) -> VocabularyChoice:
    """Everything about the output's tokens. Without a wish, experts whose tokenizer cannot be read are no obstacle."""
    choice = VocabularyChoice(recipe, base, tuple(experts), config)
    try:
        choice.make()
    except InputError as error:
        choice.problems.extend(error.found)
    return choice


_FIELDS = ("tokenizer", "files_from", "token_sources", "chat_template", "pad_to_multiple_of")
"""Of the recipe."""


@dataclass
class VocabularyChoice:
    """What was decided, and what there is to say."""

    recipe: Recipe
    base: Checkpoint
    experts: tuple[Checkpoint, ...]
    config: Mapping[str, Any]
    vocabulary: Vocabulary | None = None
    """None: all models have the same tokens in the same rows, as far as is known, and nothing else was asked for."""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _unknown: set[int] = field(default_factory=set)

    def make(self) -> None:
        """Decide, or raise InputError."""
        if self._asked and self.recipe.save_as == "adapter":
            raise InputError(f"{_flag(self._asked[0])}: an adapter has its base's vocabulary; leave it out, or --as adapter")
        self._check_names()
        tokenizer = self.recipe.tokenizer or self.recipe.files_from or "base"
        owner = self._model(tokenizer)
        tokenizer = "base" if owner is self.base and tokenizer != "union" else tokenizer
        roles = self._model(self.recipe.files_from) if self.recipe.files_from else owner
        self._check_have_tokenizers(owner, roles)
        if not self.recipe.chat_template:
            self.notes.extend(self._template_notes(roles))
        vocabularies = self._read()
        if vocabularies is None:
            return
        base_ids, expert_ids = vocabularies
        if not self._asked and all(ids is base_ids for ids in expert_ids) and not self._padded_otherwise():
            return
        ids = base_ids if owner is self.base else expert_ids[self._names.index(owner.name)]
        if tokenizer == "union":
            ids = union_ids(base_ids, expert_ids)
            self.problems.extend(union_problems(self.base, self.experts, expert_ids, base_ids))
        self._plan(tokenizer, owner, roles, base_ids, expert_ids, ids)

    @cached_property
    def _asked(self) -> list[str]:
        return [name for name in _FIELDS if getattr(self.recipe, name)]

    def _plan(
        self, tokenizer: str, owner: Checkpoint, roles: Checkpoint, base_ids: Ids, expert_ids: tuple[Ids, ...], ids: Ids
    ) -> None:
        axes, base_rows = vocabulary_axes(self.base, self.config), embedding_rows(self.base)
        if base_rows is None or not axes:
            if self._asked:
                raise InputError(
                    f"{_flag(self._asked[0])}: no tensor of base {self.base.where} is known to have a row for every token"
                )
            self.notes.extend(self._notes_without_rows(base_ids, expert_ids))
            return
        self.vocabulary = vocabulary = Vocabulary(
            tokenizer=tokenizer, base=self.base, experts=self.experts, owner=owner, roles=roles, base_ids=base_ids,
            expert_ids=expert_ids, unknown=frozenset(self._unknown), ids=ids, base_rows=base_rows,
            rows=self._rows(tokenizer, owner, base_rows, ids), axes=axes, token_sources=self.recipe.token_sources,
            chat_template=self.recipe.chat_template,
        )  # fmt: skip
        self.problems.extend(_adapter_problems(vocabulary))
        self.problems.extend(_source_problems(vocabulary))
        self.problems.extend(role_problems(vocabulary))
        self.notes.extend(_notes(vocabulary))

    # -- names

    @property
    def _names(self) -> list[str]:
        return [expert.name for expert in self.experts]

    def _model(self, name: str) -> Checkpoint:
        """By a name that is checked; the base, unless it is an expert's."""
        return next((expert for expert in self.experts if expert.name == name and name not in ("base", "union")), self.base)

    def _check_names(self) -> None:
        known = ["base", self.base.name, *self._names]
        asked = [("--tokenizer", self.recipe.tokenizer, [*known, "union"]), ("--files-from", self.recipe.files_from, known)]
        sources = self.recipe.token_sources.items()
        asked += [(f"token_sources, {_shown(token)}", own.source, ["base", "zero", *self._names]) for token, own in sources]
        for what, name, allowed in asked:
            if name is not None and name not in allowed:
                raise InputError(f"{what}: there is no expert '{name}': {did_you_mean(name, dict.fromkeys(allowed))}")

    def _check_have_tokenizers(self, *models: Checkpoint) -> None:
        for model in models:
            if model is not self.base and (model.folder is None or not has_tokenizer(model.folder)):
                raise InputError(f"expert {model.where} has no tokenizer; put its tokenizer.json into its folder")

    # -- reading

    def _read(self) -> tuple[Ids, tuple[Ids, ...]] | None:
        """The base's ids and each expert's; None if nothing differs, or nothing can be said."""
        if not self.base.folder or not has_tokenizer(self.base.folder):
            if self._asked:
                raise InputError(
                    f"{_flag(self._asked[0])}: base {self.base.where} has no tokenizer; put its tokenizer.json into its folder"
                )
            return None
        if not self._asked and all(map(self._has_same_file, self.experts)) and not self._padded_otherwise():
            return None
        try:
            base_ids = token_ids(self.base.folder)
            return base_ids, tuple(self._read_expert(index, base_ids) for index in range(len(self.experts)))
        except (InputError, OSError) as error:
            if self._asked or disk_failed(error):
                raise
            unlike = [expert.name for expert in self.experts if not self._has_same_file(expert)]
            self.notes.extend(map(_not_compared, unlike))
            return None

    def _read_expert(self, index: int, base_ids: Ids) -> Ids:
        expert = self.experts[index]
        if expert.folder is None or not has_tokenizer(expert.folder):
            self._unknown.add(index)
            return base_ids
        if self._has_same_file(expert):
            return base_ids
        try:
            ids = token_ids(expert.folder)
        except (InputError, OSError) as error:  # whose message would name a path of this machine in the manifest
            if self._asked or disk_failed(error):
                raise
            self.notes.append(_not_compared(expert.name))
            self._unknown.add(index)
            return base_ids
        return ids if difference(base_ids, ids) else base_ids

    def _has_same_file(self, expert: Checkpoint) -> bool:
        """Or none of its own, which is taken for the same."""
        if expert.folder is None or not has_tokenizer(expert.folder):
            return True
        paths = [self.base.folder / TOKENIZER, expert.folder / TOKENIZER] if self.base.folder else []
        try:
            return all(path.is_file() for path in paths) and read_bounded(paths[0]) == read_bounded(paths[1])
        except (InputError, OSError) as error:
            if disk_failed(error):
                raise
            return False

    def _padded_otherwise(self) -> bool:
        """Whether an expert with a tokenizer has more or fewer rows than the base."""
        with_tokenizer = [expert for expert in self.experts if expert.folder and has_tokenizer(expert.folder)]
        rows = embedding_rows(self.base)
        return any(expert.changes is None and embedding_rows(expert) not in (None, rows) for expert in with_tokenizer)

    def _rows(self, tokenizer: str, owner: Checkpoint, base_rows: int, ids: Ids) -> int:
        """Of the output's embeddings: the owner's, and more if a union needs them, or padding was asked for."""
        rows = embedding_rows(owner) or base_rows
        if tokenizer == "union":
            rows = max([rows, *(row + 1 for row in ids.values())])
        multiple = self.recipe.pad_to_multiple_of or 1
        return -(-rows // multiple) * multiple

    # -- what there is to say

    def _template_notes(self, roles: Checkpoint) -> Iterator[str]:
        """Chat templates that the output does not get."""
        for expert in self.experts:
            try:
                if expert is not roles and roles.folder and expert.folder:
                    yield from _template_note(roles, expert, is_base=roles is self.base)
            except (InputError, OSError) as error:
                if disk_failed(error):
                    raise
                yield _not_compared(expert.name)

    def _notes_without_rows(self, base_ids: Ids, expert_ids: Sequence[Ids]) -> Iterator[str]:
        for expert, ids in zip(self.experts, expert_ids, strict=True):
            own = difference(base_ids, ids)
            if own.moved:
                yield f"{_moved(expert, own, base_ids, ids)}; no tensor is known to have a row for every token: none is lined up"
            if own.added:
                yield f"{_added(expert, own)}; the output gets the base's tokenizer, which does not know them"


def _template_note(roles: Checkpoint, expert: Checkpoint, *, is_base: bool) -> Iterator[str]:
    assert roles.folder
    assert expert.folder
    ours, theirs = chat_template(roles.folder), chat_template(expert.folder)
    if theirs is None or (ours and ours[1] == theirs[1]):
        return
    whose = "the base" if is_base else f"expert '{roles.name}'"
    lacks = f"another than {whose}, whose own is taken" if ours else f"{whose} has none, and the output gets none"
    yield f"expert '{expert.name}' has a chat template ({theirs[0]}), {lacks}; --files-from {expert.name} takes this one"


def _notes(vocabulary: Vocabulary) -> Iterator[str]:
    """What is lined up, what is new, what is left out."""
    for expert, ids, own in zip(vocabulary.experts, vocabulary.expert_ids, vocabulary.differences, strict=True):
        if own.moved:
            then = "are not reordered" if expert.changes is not None else "are lined up by token"
            yield f"{_moved(expert, own, vocabulary.base_ids, ids)}; the rows of its embeddings and output layer {then}"
        if own.lacking:
            lacks = f"expert '{expert.name}' lacks {_count(own.lacking, 'token')} of the base, such as {_shown(own.lacking[0])}"
            yield f"{lacks}: it counts as one that did not change them"
        if new := [token for token in own.added if token in vocabulary.ids]:
            yield f"{_added(expert, own, new)}: their rows are taken from it"
        if lost := [token for token in own.added if token not in vocabulary.ids]:
            whose = "the base" if vocabulary.tokenizer == "base" else f"expert '{vocabulary.owner.name}'"
            yield (
                f"{_added(expert, own, lost)}; the output gets the tokenizer of {whose}, which does not know them, and no rows "
                f"for them: --tokenizer union keeps them{_or_its_own(expert, vocabulary)}"
            )
    if dropped := [token for token in vocabulary.base_ids if token not in vocabulary.ids]:
        yield (
            f"the output gets the tokenizer of expert '{vocabulary.owner.name}', which lacks {_count(dropped, 'token')} of the "
            f"base, such as {_shown(dropped[0])}: their rows are left out; --tokenizer union keeps them"
        )
    yield from _rowless(vocabulary)


def _rowless(vocabulary: Vocabulary) -> Iterator[str]:
    """Tokens without a row of their own: a tokenizer is often saved with one more than its model was resized for."""
    lost = [token for token, row in vocabulary.ids.items() if row >= vocabulary.rows]
    if lost:
        yield (
            f"the tokenizer that the output gets knows {_count(lost, 'token')}, such as {_shown(lost[0])}, for which its model "
            "has no row; --tokenizer union gives every token a row"
        )


def _or_its_own(expert: Checkpoint, vocabulary: Vocabulary) -> str:
    return "" if vocabulary.tokenizer == expert.name else f", --tokenizer {expert.name} takes this expert's"


def _moved(expert: Checkpoint, own: Difference, base_ids: Ids, ids: Ids) -> str:
    first = own.moved[0]
    return (
        f"expert '{expert.name}' has other ids than the base for {_count(own.moved, 'token')} "
        f"({_shown(first)} is {ids[first]}, not {base_ids[first]})"
    )


def _added(expert: Checkpoint, own: Difference, which: Sequence[str] = ()) -> str:
    tokens = which or own.added
    return f"expert '{expert.name}' has {_count(tokens, 'token')} that the base lacks, such as {_shown(tokens[0])}"


def _adapter_problems(vocabulary: Vocabulary) -> Iterator[str]:
    """An adapter's changes are of the base's rows, whatever tokenizer lies beside it."""
    for expert, own in zip(vocabulary.experts, vocabulary.differences, strict=True):
        if expert.changes is not None and own and (vocabulary.is_union or expert in (vocabulary.owner, vocabulary.roles)):
            flag = "--tokenizer union" if vocabulary.is_union else f"--tokenizer {expert.name}"
            yield (
                f"{flag}: expert {expert.where} is an adapter with another vocabulary than the base's, which cannot be lined up; "
                "merge it into its base first (peft: merge_and_unload) and give that model"
            )


def _source_problems(vocabulary: Vocabulary) -> Iterator[str]:
    """Of token_sources: tokens that the output, or the model named, does not have."""
    by_name = dict(zip((expert.name for expert in vocabulary.experts), vocabulary.expert_ids, strict=True))
    adapters = {expert.name for expert in vocabulary.experts if expert.changes is not None}
    for token, asked in vocabulary.token_sources.items():
        where = f"token_sources, {_shown(token)}"
        if token not in vocabulary.ids:
            yield f"{where}: the output's tokenizer has no such token; check its spelling, or use --tokenizer union"
        elif asked.source in adapters:
            yield f"{where}: expert '{asked.source}' is an adapter, which has no rows of its own"
        elif asked.source != "zero":
            wanted = asked.token or token
            ids = vocabulary.base_ids if asked.source == "base" else by_name[asked.source]
            if wanted not in ids or (asked.source == "base" and ids[wanted] >= vocabulary.base_rows):
                yield f"{where}: '{asked.source}' has no token {_shown(wanted)}"


def _not_compared(name: str) -> str:
    return f"the tokenizer of expert '{name}' was not compared with the base's: one of them cannot be read"


def _flag(field_name: str) -> str:
    return {"tokenizer": "--tokenizer", "files_from": "--files-from"}.get(field_name, field_name)


def _count(items: Sequence[object], noun: str) -> str:
    return f"1 {noun}" if len(items) == 1 else f"{len(items)} {noun}s"


def _shown(token: str) -> str:
    return shortened(ascii(token))
