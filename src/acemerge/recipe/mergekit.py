"""A configuration of mergekit as a recipe of ours: every field is honoured, or refused by name and line.

    merge_method: ties                  method: ties
    base_model: llama                   base: llama
    models:                             experts: [math, code]
      - model: math                     options: {weights: {math: 0.5, code: 0.3}, keep: ..., scope: tensor}
        parameters: {weight: 0.5}

What mergekit's methods are called here, and their parameters, is in `mergekit_methods`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from acemerge.errors import InputError, did_you_mean
from acemerge.recipe.mergekit_methods import TRANSLATIONS, Parameters, Setting, Translation, translation_of
from acemerge.recipe.yaml_lines import Key, Lines

_FIELDS = frozenset(
    "merge_method base_model models slices modules parameters dtype out_dtype tokenizer_source tokenizer chat_template".split()
)


CHATML = """{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""The format by which many chat models mark turns."""


def is_mergekit(fields: Mapping[str, Any]) -> bool:
    """Whether a file is one of mergekit's: recipes of ours have no `merge_method`."""
    return "merge_method" in fields


@dataclass(frozen=True)
class Source:
    """A model as one of mergekit's slices or lists has it."""

    model: str
    parameters: Mapping[str, Any]
    key: Key
    layers: tuple[int, int] | None = None


@dataclass(frozen=True)
class OutputSlice:
    """What mergekit merges into one run of layers; `models` is one slice of all layers."""

    sources: Sequence[Source]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    key: Key = ()


def convert(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The fields of our recipe."""
    return _Conversion(fields, Lines(path)).recipe()


def _near(method: str) -> str:
    return did_you_mean(method, TRANSLATIONS)


class _Conversion:
    def __init__(self, fields: Mapping[str, Any], lines: Lines) -> None:
        self.fields, self.lines = fields, lines
        self.notes: list[str] = []
        for name in fields:
            if name not in _FIELDS:
                self.refuse((name,), f"mergekit has no field '{name}': {did_you_mean(str(name), _FIELDS)}")
        if "modules" in fields:
            self.refuse(("modules",), "models of several modules are not read; give the merge of one of them with 'models'")
        self.slices = self._read_slices()
        self.base = self._read_base()
        self.translation = self._translation()

    def refuse(self, key: Key, problem: str) -> NoReturn:
        """An error that says where."""
        raise InputError(f"{self.lines.where(key)}: {problem}")

    # -- what is merged

    def _read_slices(self) -> list[OutputSlice]:
        given = [name for name in ("models", "slices") if self.fields.get(name)]
        if len(given) != 1:
            self.refuse((given[-1],) if given else (), "give either 'models' or 'slices'")
        if given == ["models"]:
            return [OutputSlice(self._sources(self.fields["models"], ("models",), layers=False), key=("models",))]
        return [self._slice(each, ("slices", index)) for index, each in enumerate(self._list(("slices",)))]

    def _slice(self, each: Any, key: Key) -> OutputSlice:
        self._only(each, key, {"sources", "parameters", "base_model", "residual_weight"})
        if each.get("residual_weight") is not None:
            self.refuse((*key, "residual_weight"), "'residual_weight' is not read, by mergekit's own methods either; drop it")
        sources = self._sources(each.get("sources") or [], (*key, "sources"), layers=True)
        return OutputSlice(sources, self._parameters(each, key), key)

    def _read_base(self) -> str | None:
        """That of the whole merge, or the one that every slice names."""
        found = self._model(self.fields["base_model"], ("base_model",)) if self.fields.get("base_model") else None
        slices = self.fields.get("slices") or []
        own = {
            index: self._model(each["base_model"], ("slices", index, "base_model"))
            for index, each in enumerate(slices)
            if each.get("base_model")
        }
        for index, model in own.items():
            if model != (found or own[min(own)]) or (found is None and len(own) < len(slices)):
                problem = "slices with different bases are not read; give one base_model for the whole merge, or merge in stages"
                self.refuse(("slices", index, "base_model"), problem)
        return found or next(iter(own.values()), None)

    def _sources(self, given: Any, key: Key, layers: bool) -> list[Source]:
        if not isinstance(given, list) or not given:
            self.refuse(key, f"'{key[-1]}' must be a list of models")
        found = []
        for index, each in enumerate(given):
            own = (*key, index)
            self._only(each, own, {"model", "parameters"} | ({"layer_range"} if layers else set()))
            if "model" not in each:
                self.refuse(own, "a model is missing: write 'model: FOLDER'")
            span = self._layer_range(each.get("layer_range"), (*own, "layer_range")) if layers else None
            found.append(Source(self._model(each["model"], (*own, "model")), self._parameters(each, own), own, span))
        return found

    def _layer_range(self, given: Any, key: Key) -> tuple[int, int]:
        numbers = isinstance(given, list) and len(given) == 2 and all(type(number) is int for number in given)
        if not numbers or not 0 <= given[0] < given[1]:
            self.refuse(key, f"layer_range must be [first, one after the last]; given: {given}")
        return given[0], given[1]

    def _model(self, given: Any, key: Key) -> str:
        """A folder or a hub id, with a revision if it has one, `+` an adapter."""
        if isinstance(given, str):
            return given
        self._only(given, key, {"model", "lora", "override_architecture"})
        if given.get("override_architecture"):
            problem = "override_architecture is not read; drop it, the base's config.json says what it is"
            self.refuse((*key, "override_architecture"), problem)
        parts = [self._path(given[name], (*key, name)) for name in ("model", "lora") if given.get(name)]
        if not given.get("model"):
            self.refuse(key, "a model is missing: write 'model: FOLDER'")
        return "+".join(parts)

    def _path(self, given: Any, key: Key) -> str:
        if isinstance(given, str):
            return given
        self._only(given, key, {"path", "revision"})
        return f"{given.get('path')}@{given['revision']}" if given.get("revision") else str(given.get("path"))

    def _parameters(self, each: Mapping[str, Any], key: Key) -> Mapping[str, Any]:
        parameters = each.get("parameters") or {}
        if not isinstance(parameters, dict):
            self.refuse((*key, "parameters"), "parameters must be a mapping of names to values")
        return dict(parameters)

    def _list(self, key: Key) -> list[Any]:
        given = self.fields[str(key[0])]
        if not isinstance(given, list):
            self.refuse(key, f"'{key[0]}' must be a list")
        return list(given)

    def _only(self, each: Any, key: Key, known: set[str]) -> None:
        if not isinstance(each, dict):
            self.refuse(key, f"expected a mapping with {', '.join(sorted(known))}; given: {each!r}")
        for name in each:
            if name not in known:
                self.refuse((*key, name), f"there is no field '{name}' here: {did_you_mean(str(name), known)}")

    # -- as a recipe

    def _translation(self) -> Translation:
        method = str(self.fields["merge_method"])
        found = translation_of(method)
        if found.base == "apart" and self.base is None:
            others = "" if method in TRANSLATIONS else f", if it is one of ours; of mergekit's, {_near(method)}"
            self.refuse(("merge_method",), f"method '{method}' needs a base_model{others}")
        return found

    def recipe(self) -> dict[str, Any]:
        models = list(dict.fromkeys(source.model for each in self.slices for source in each.sources))
        base = self.base or models[0]
        experts = self._experts(models, base)
        names = _names(experts)
        fields: dict[str, Any] = {
            "base": base,
            "experts": [{"model": model, "name": names[model]} for model in experts],
            "method": self.translation.method,
        }
        by_slice = [self._options(each, names) for each in self.slices]
        if len(by_slice) == 1 or all(options == by_slice[0] for options in by_slice):
            fields["options"] = by_slice[0]
        if self.slices[0].sources[0].layers is not None:
            of_their_own = "options" not in fields
            fields["slices"] = [
                {"layers": self._layers(each, names, base), **({"options": options} if of_their_own else {})}
                for each, options in zip(self.slices, by_slice, strict=True)
            ]
            fields.setdefault("options", {})
        fields |= self._dtype() | self._tokenizer(names)
        return {**fields, **({"notes": self.notes} if self.notes else {})}

    def _experts(self, models: Sequence[str], base: str) -> list[str]:
        """In mergekit's order; the base is one of them where a method joins weights, and apart where it joins changes."""
        if self.translation.base == "apart" or (self.translation.base == "either" and self.base):
            experts = [model for model in models if model != base]
            if not experts:
                self.refuse(("models",), "the base is the only model; give at least one other")
            return experts
        if self.translation.base == "first":
            if self.base not in models:
                self.refuse(("base_model",), f"method '{self.fields['merge_method']}' needs the base_model among its models")
            return [base, *(model for model in models if model != base)]
        return list(models)

    def _options(self, each: OutputSlice, names: Mapping[str, str]) -> dict[str, Any]:
        sources = {names[source.model]: source for source in each.sources if source.model in names}
        found = Parameters(
            method=str(self.fields["merge_method"]),
            experts=tuple(dict.fromkeys(names.values())),
            per_model={name: Setting(source.parameters, (*source.key, "parameters")) for name, source in sources.items()},
            globally=[
                Setting(each.parameters, (*each.key, "parameters")),
                Setting(self._parameters(self.fields, ()), ("parameters",)),
            ],
            base_given=self.base is not None,
            refuse=self.refuse,
            note=self.notes.append,
        )
        return self.translation.options(found)

    def _layers(self, each: OutputSlice, names: Mapping[str, str], base: str) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for source in each.sources:
            assert source.layers is not None
            name = names.get(source.model, "base")
            if name in found:
                self.refuse(source.key, f"'{source.model}' is given twice in one slice; give each model once")
            found[name] = source.layers
        if base in names and self.translation.base == "first":
            found = {"base": found[names[base]], **found}
        return found

    def _dtype(self) -> dict[str, Any]:
        name = "out_dtype" if self.fields.get("out_dtype") else "dtype"
        dtype = self.fields.get(name)
        if dtype in (None, "auto"):
            return {}
        if dtype not in ("float64", "float32", "float16", "bfloat16"):
            self.refuse((name,), f"dtype '{dtype}' cannot be written; use float32, float16, bfloat16 or float64")
        return {"dtype": dtype}

    # -- its vocabulary

    def _tokenizer(self, names: Mapping[str, str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        given = self.fields.get("tokenizer")
        if given is not None:
            self._only(given, ("tokenizer",), {"source", "tokens", "pad_to_multiple_of"})
            found["tokenizer"] = self._named(given.get("source", "union"), ("tokenizer", "source"), names)
            tokens = given.get("tokens") or {}
            if not isinstance(tokens, dict):
                self.refuse(("tokenizer", "tokens"), "tokens must be a mapping of tokens to sources")
            sources = {str(t): self._token(own, ("tokenizer", "tokens", t), names) for t, own in tokens.items()}
            found |= {"token_sources": sources} if sources else {}
            found |= {"pad_to_multiple_of": given["pad_to_multiple_of"]} if given.get("pad_to_multiple_of") else {}
        elif self.fields.get("tokenizer_source"):
            found["tokenizer"] = self._named(self.fields["tokenizer_source"], ("tokenizer_source",), names)
        return found | self._chat_template()

    def _named(self, given: Any, key: Key, names: Mapping[str, str]) -> str:
        """base, union, or a model by the name that it has here."""
        if given in ("base", "union"):
            return str(given)
        model = self._model(given, key)
        if model not in names and model != self.base:
            self.refuse(key, f"'{model}' is none of the models of this merge")
        return names.get(model, "base")

    def _token(self, given: Any, key: Key, names: Mapping[str, str]) -> dict[str, Any]:
        """mergekit keeps a row that the base has unless it is told to force another."""
        self._only(given, key, {"source", "force"})
        source, force = given.get("source"), bool(given.get("force", False))
        if not isinstance(source, dict) or "kind" not in source:
            if source is None:
                self.refuse(key, "a source is missing: write 'source: MODEL'")
            return {"source": self._named(source, (*key, "source"), names), "force": force}
        if source["kind"] == "zero":
            return {"source": "zero", "force": force}
        self._only(source, (*key, "source"), {"kind", "model", "token", "token_id"})
        if source["kind"] != "model_token" or "token" not in source:
            self.refuse((*key, "source"), "give the token itself: {kind: model_token, model: MODEL, token: TOKEN}")
        owner = self._named(source.get("model"), (*key, "source", "model"), names)
        return {"source": owner, "token": str(source["token"]), "force": force}

    def _chat_template(self) -> dict[str, Any]:
        template = self.fields.get("chat_template")
        if template is None:
            return {}
        if template == "chatml":
            return {"chat_template": CHATML}
        if "{" not in str(template):
            problem = f"'{template}': of the templates by name only chatml is known; write the template itself, in Jinja"
            self.refuse(("chat_template",), f"{problem}, or take a model's with --files-from")
        return {"chat_template": str(template)}


def _names(models: Sequence[str]) -> dict[str, str]:
    """Model -> what its options and slices call it: the last part of its path, told apart by numbers."""
    names: dict[str, str] = {}
    for model in models:
        last = re.sub(r"[^\w.-]", "_", re.split(r"[/\\]", model.split("+")[-1].split("@")[0].rstrip("/\\"))[-1]).lstrip("_.-")
        name, number = last or "model", 1
        while name in names.values() or name == "base":
            number += 1
            name = f"{last}_{number}"
        names[model] = name
    return names
