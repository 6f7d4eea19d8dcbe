"""The files beside the weights that fit the output's vocabulary: tokenizer, chat template, generation config and config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from acemerge.checkpoints.folder import Checkpoint, read_json
from acemerge.checkpoints.tokenizer import (
    GENERATION,
    OTHER_VOCABULARIES,
    SETTINGS,
    TEMPLATE,
    TEMPLATE_FILES,
    TOKENIZER,
    TOKENIZER_FILES,
)
from acemerge.checkpoints.vocabulary_tensors import embedding_rows, vocabulary_axes
from acemerge.planning.union_tokenizer import union_tokenizer
from acemerge.planning.vocabulary import Ids, Vocabulary

CONFIG = "config.json"
Content = dict[str, Any]
SideFile = Path | Callable[[], Content | str]
"""A file to be copied, or what gives the content of one to be written."""

_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"))
_LISTS_OF_IDS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")


def side_files(base: Checkpoint, vocabulary: Vocabulary | None) -> dict[str, SideFile]:
    """By name."""
    own: dict[str, SideFile] = {path.name: path for path in base.side_files()}
    if vocabulary is None:
        return own
    files = {name: file for name, file in own.items() if name not in (*TOKENIZER_FILES, GENERATION)}
    files |= _tokenizer_files(vocabulary)
    if generation := _side_file(vocabulary.roles, GENERATION):
        fits = vocabulary.fits(vocabulary.roles)
        files[GENERATION] = generation if fits else partial(_translated_file, generation, vocabulary)
    if CONFIG in files and not (vocabulary.roles is base and vocabulary.fits(base) and vocabulary.rows == vocabulary.base_rows):
        files[CONFIG] = partial(output_config, vocabulary)
    return files


def _tokenizer_files(vocabulary: Vocabulary) -> dict[str, SideFile]:
    owner, roles = vocabulary.owner, vocabulary.roles
    files: dict[str, SideFile] = {path.name: path for path in owner.side_files() if path.name in TOKENIZER_FILES}
    if vocabulary.is_union:
        files = {name: file for name, file in files.items() if name not in OTHER_VOCABULARIES}
        files[TOKENIZER] = partial(_union, vocabulary)
        files[SETTINGS] = partial(_settings, vocabulary)
    if roles is not owner:
        of_roles = (*TEMPLATE_FILES, "special_tokens_map.json")
        files = {name: file for name, file in files.items() if name not in of_roles}
        files |= {name: path for name in of_roles if (path := _side_file(roles, name))}
        files[SETTINGS] = partial(_settings, vocabulary)
    if (template := vocabulary.chat_template) is not None:
        files = {name: file for name, file in files.items() if name not in TEMPLATE_FILES}
        files[TEMPLATE] = lambda: template
        files[SETTINGS] = partial(_settings, vocabulary)
    return files


def output_config(vocabulary: Vocabulary) -> Content:
    """The base's config with the output's vocabulary: its size, and the special tokens of the model whose these are to be."""
    config = fitted_config(vocabulary, vocabulary.base, vocabulary.base.config)
    if vocabulary.roles is vocabulary.base:
        return config
    return _with_roles(config, fitted_config(vocabulary, vocabulary.roles, vocabulary.roles.config))


def fitted_config(vocabulary: Vocabulary, model: Checkpoint, config: Mapping[str, Any]) -> Content:
    """A config that was made for a model's vocabulary, for the output's."""
    ids, rows = vocabulary.ids_of(model), embedding_rows(model) or vocabulary.base_rows
    sizes = {model.tensors[name].shape[axis] for name, axis in vocabulary_axes(model, config).items()}

    def fitted(part: Mapping[str, Any]) -> Content:
        return {key: fit(key, value) for key, value in part.items()}

    def fit(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return fitted(value)
        if key.startswith("vocab_size") and isinstance(value, int) and value in sizes:
            return value + vocabulary.rows - rows
        return _translate(value, ids, vocabulary.ids) if _holds_ids(key) else value

    return fitted(config)


def _with_roles(config: Content, theirs: Mapping[str, Any]) -> Content:
    """With another's special tokens, wherever it names any."""
    named = {key: value for key, value in theirs.items() if _holds_ids(key) and value is not None}
    parts = {key: _with_roles(value, theirs[key]) for key, value in config.items() if _are_parts(value, theirs.get(key))}
    return {**config, **named, **parts}


def _are_parts(*values: Any) -> bool:
    return all(isinstance(value, Mapping) for value in values)


def role_problems(vocabulary: Vocabulary) -> Iterator[str]:
    """Special tokens, by the files that name them, that the output's tokenizer does not know."""
    roles, own_ids = vocabulary.roles, vocabulary.ids_of(vocabulary.roles)
    if vocabulary.fits(roles):
        return
    settings = read_json(path) if (path := _side_file(roles, SETTINGS)) else {}
    named = {role: _content(settings[role]) for role in _ROLES if settings.get(role)}
    generation = read_json(path) if (path := _side_file(roles, GENERATION)) else {}
    tokens = {row: token for token, row in own_ids.items()}
    for key, value in generation.items():
        if _holds_ids(key):
            named |= {f"{GENERATION}, {key}": tokens[row] for row in _flat(value) if row in tokens}
    for role, token in named.items():
        if token not in vocabulary.ids:
            yield (
                f"--files-from {roles.name}: its {role} is {token!a}, which the output's tokenizer does not know; use "
                f"--tokenizer union or --tokenizer {roles.name}"
            )
            return


def _union(vocabulary: Vocabulary) -> Content:
    pairs = zip(vocabulary.experts, vocabulary.expert_ids, strict=True)
    others = [expert for expert, ids in pairs if ids is not vocabulary.base_ids and expert.changes is None]
    return union_tokenizer(vocabulary.base, others, vocabulary.ids)


def _settings(vocabulary: Vocabulary) -> Content:
    """tokenizer_config.json: the owner's, with the special tokens and the template of whose these are to be."""
    path, given = _side_file(vocabulary.owner, SETTINGS), _side_file(vocabulary.roles, SETTINGS)
    content, theirs = read_json(path) if path else {}, read_json(given) if given else {}
    if vocabulary.roles is not vocabulary.owner:
        kept = {key: value for key, value in content.items() if key not in (*_ROLES, "chat_template")}
        content = kept | {key: theirs[key] for key in (*_ROLES, "chat_template") if theirs.get(key)}
    if vocabulary.chat_template is not None:
        content.pop("chat_template", None)
    decoder = content.get("added_tokens_decoder")
    if vocabulary.is_union and isinstance(decoder, dict):
        added = {str(entry["id"]): entry for entry in _union(vocabulary)["added_tokens"]}
        details = {row: {key: value for key, value in entry.items() if key != "id"} for row, entry in added.items()}
        content["added_tokens_decoder"] = {**details, **decoder}
    return content


def _translated_file(path: Path, vocabulary: Vocabulary) -> Content:
    own_ids = vocabulary.ids_of(vocabulary.roles)
    content = read_json(path)
    return {k: _translate(v, own_ids, vocabulary.ids) if _holds_ids(k) else v for k, v in content.items()}


def _translate(value: Any, old: Ids, new: Ids) -> Any:
    """An id, or lists of them; one whose token the output does not have becomes null, or is left out of a list."""
    if old is new:
        return value
    tokens = {row: token for token, row in old.items()}

    def one(given: Any) -> Any:
        if isinstance(given, list):
            return [found for entry in given if (found := one(entry)) is not None]
        return new.get(tokens[given]) if isinstance(given, int) and given in tokens else given

    return one(value)


def _holds_ids(key: str) -> bool:
    return key.endswith(("_token_id", "_token_ids", "_token_index")) or key in _LISTS_OF_IDS


def _flat(value: Any) -> list[int]:
    if isinstance(value, list):
        return [row for entry in value for row in _flat(entry)]
    return [value] if isinstance(value, int) else []


def _content(token: Any) -> str:
    """A special token is given as text, or with how it is to be matched."""
    return str(token.get("content")) if isinstance(token, dict) else str(token)


def _side_file(model: Checkpoint, name: str) -> Path | None:
    return next((path for path in model.side_files() if path.name == name), None)
