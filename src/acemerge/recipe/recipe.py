"""The recipe: everything a user can ask for, validated in one place."""

from __future__ import annotations

import re
import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

try:
    from yaml import CSafeLoader as FastLoader
except ImportError:  # PyYAML without its part in C
    from yaml import SafeLoader as FastLoader  # type: ignore[assignment]

from acemerge.checkpoints.content_hash import ContentHash
from acemerge.checkpoints.untrusted import read_bounded
from acemerge.errors import MOST_SHOWN, InputError, did_you_mean
from acemerge.recipe.sizes import parse_size

Fused = Literal["auto", "apart", "whole"]
Orientation = Literal["canonical", "stored"]
_SHORT_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def _dtype_name(given: object) -> object:
    """Torch's own dtypes and the usual short names are understood too."""
    name = str(given).removeprefix("torch.")
    return _SHORT_DTYPES.get(name, name)


Dtype = Annotated[Literal["float64", "float32", "float16", "bfloat16", "fp8"], BeforeValidator(_dtype_name)]
EIGHT_BITS: Dtype = "fp8"
"""Matrices in 8 bits with scales; the rest keeps the base's dtype."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Expert(_Strict):
    """One fine-tuned model; `name` is what tables and head folders call it (by default its folder's name)."""

    model: str = ""
    name: str | None = Field(default=None, pattern=r"^\w[\w.+-]*$")
    merge: Recipe | None = None
    """Instead of a model: a merge that is made first."""

    @model_validator(mode="after")
    def _model_or_merge(self) -> Self:
        if bool(self.model) == bool(self.merge):
            raise ValueError("give either 'model' or 'merge'")
        if self.merge:
            _check_stage(self.name or "", self.merge)
        return self

    @property
    def stage(self) -> Stage | None:
        """The merge that makes it, if it is one."""
        return Stage(name=self.name or "", merge=self.merge) if self.merge else None


class Stage(_Strict):
    """A model that is itself a merge, made first; `name` is its folder's."""

    name: str
    merge: Recipe

    @model_validator(mode="after")
    def _is_a_model(self) -> Self:
        _check_stage(self.name, self.merge)
        return self


def _check_stage(name: str, merge: Recipe) -> None:
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise ValueError("a merge as base or expert needs a 'name'")
    for field in ("save_as", "rank", "energy", "save_rest"):
        if field in merge.model_fields_set:
            raise ValueError(f"stage '{name}': a stage is a model, so '{field}' is for the outer merge only")


class TensorRule(_Strict):
    """What to do with the tensors of the base whose name matches a shell-style pattern. The first rule that matches wins."""

    match: str
    do: Literal["merge", "average", "keep", "head"] = "merge"
    method: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _method_needs_merge(self) -> Self:
        if self.do != "merge" and (self.method or self.options):
            raise ValueError(f"do: {self.do} takes no method or options; only do: merge does")
        return self


class Slice(_Strict):
    """A run of the output's layers: which layers of which models are merged into them, and what is special about it."""

    layers: dict[str, tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]]]
    """Model ('base', or an expert's name) -> its first layer, and the one after its last."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the method, in these layers; a value by layer goes from the first of them to the last."""

    @model_validator(mode="after")
    def _equally_long(self) -> Self:
        lengths = {end - start for start, end in self.layers.values()}
        if len(lengths) != 1 or min(lengths) < 1:
            raise ValueError("give each model a run of layers [first, one after the last], all of the same length")
        return self

    @property
    def length(self) -> int:
        """How many layers it makes."""
        return next(end - start for start, end in self.layers.values())


class TokenSource(_Strict):
    """Where the row of a token comes from: `base`, an expert's name, or `zero`."""

    source: str
    token: str | None = None
    """The row that the source has for this token instead."""
    force: bool = True
    """Also where the base has the token, whose row would otherwise be merged like all others."""


def _as_source(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


def _as_expert(value: Any) -> Any:
    return {"model": value} if isinstance(value, str) else value


COMMAND_LINE = "command line"
"""Where a recipe comes from that is no file."""
DEFAULT_METHOD = "ace_auto"
"""What merges where nobody says how: docs/results.md has what it was measured to do, and against what."""
_A_MODEL, _A_STAGE = "(model)", "(stage)"
"""What a base is given as."""


class Recipe(_Strict):
    """A merge, as a file or as the command line gives it."""

    base: Annotated[
        Annotated[str, Tag(_A_MODEL)] | Annotated[Stage, Tag(_A_STAGE)],
        Discriminator(lambda value: _A_STAGE if isinstance(value, dict | Stage) else _A_MODEL),
    ]
    experts: Annotated[list[Expert], BeforeValidator(lambda v: [_as_expert(e) for e in v] if isinstance(v, list) else v)]
    method: str = DEFAULT_METHOD
    options: dict[str, Any] = Field(default_factory=dict)
    data: str | None = None
    """For methods that use data: one of the bench's suites, or a folder with a file per expert."""
    tensors: list[TensorRule] = Field(default_factory=list)
    slices: list[Slice] = Field(default_factory=list)
    """The output's layers in order, from runs of layers of the models; without, each layer is merged with its like."""
    preset: str = "auto"
    orientation: Orientation = "canonical"
    fused: Fused = "auto"
    """Of q, k and v, or gate and up, in one: methods for matrices merge them apart or as one whole; auto: as the preset says."""
    missing: Literal["error", "skip"] = "error"
    heads: Literal["own", "average", "keep"] = "own"
    """Of tasks. own: the base's in the model, each expert's in heads/; average: the experts' mean; keep: the base's only."""
    tokenizer: str | None = None
    """Whose tokens the output has: `base` (the default), `union` or an expert's name. Rows are lined up by token in any case."""
    files_from: str | None = None
    """Whose chat template, special tokens and generation config the output gets; and whose tokenizer, unless that is given."""
    token_sources: dict[str, Annotated[TokenSource, BeforeValidator(_as_source)]] = Field(default_factory=dict)
    """Token -> where its row comes from. By default a token that the base lacks has the mean of the experts' that have it."""
    chat_template: str | None = None
    """The text of one, in Jinja, instead of those that the models have."""
    pad_to_multiple_of: Annotated[int, Field(ge=1)] | None = None
    """Of the rows of the output's embeddings."""
    dtype: Dtype | None = None
    allow_nonfinite: bool = False
    """Whether NaN and infinite values of the inputs go into the output, with a warning, instead of stopping the merge."""
    save_as: Literal["model", "adapter"] = "model"
    rank: Annotated[int, Field(ge=1)] | None = None
    """Of an adapter: the largest rank to write; by default the merge's own, which leaves nothing out."""
    energy: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of an adapter: the smallest rank that keeps this share of a change's energy, the square of its length, for each matrix."""
    save_rest: bool = False
    """Of an adapter: whether it also holds, whole, what full fine-tunes changed and factors cannot hold: norms, biases, ..."""
    shard_size: Annotated[int, BeforeValidator(parse_size), Field(ge=1_000)] = 5_000_000_000
    notes: list[str] = Field(default_factory=list)
    """For whoever reads the plan or the manifest."""
    inputs: dict[str, dict[str, ContentHash]] = Field(default_factory=dict)
    """Expected hashes of weight files, {model name: {file name: hash}}: as written beside every output, checked if given."""

    @property
    def float_dtype(self) -> str | None:
        """What all floats of the output are converted to, if they are."""
        return None if self.dtype == EIGHT_BITS else self.dtype

    @model_validator(mode="after")
    def _experts_make_sense(self) -> Self:
        if not self.experts:
            raise ValueError("give at least one expert")
        for name in ("rank", "energy", "save_rest"):
            if getattr(self, name) and self.save_as != "adapter":
                raise ValueError(f"{name}: only an adapter has one; say also save_as: adapter (--as adapter)")
        names = [expert.name for expert in self.experts if expert.name]
        if len(set(names)) < len(names):
            raise ValueError(f"two experts have the same name: {', '.join(names)}")
        return self


def make_recipe(fields: dict[str, Any], origin: str = "recipe") -> Recipe:
    """A validated recipe, or one error that repeats the user's own words."""
    for name in fields:
        if name not in Recipe.model_fields:
            raise InputError(f"{origin}: there is no field '{name}': {did_you_mean(str(name), Recipe.model_fields)}")
    try:
        return Recipe.model_validate(_with_bases(fields))
    except ValidationError as error:
        found = [_explain(origin, dict(each)) for each in error.errors()]
        more = [f"{origin}: and {len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
        raise InputError(*found[:MOST_SHOWN], *more) from None


def _with_bases(fields: Any) -> Any:
    """Stages that name no base have that of the merge around them."""
    if not isinstance(fields, dict) or not isinstance(fields.get("experts"), list):
        return fields
    outer = {"base": _staged(fields["base"], {})} if "base" in fields else {}
    return {**fields, **outer, "experts": [_staged(expert, outer) for expert in fields["experts"]]}


def _staged(model: Any, outer: dict[str, Any]) -> Any:
    if not isinstance(model, dict) or not isinstance(model.get("merge"), dict):
        return model
    return {**model, "merge": _with_bases({**outer, **model["merge"]})}


def _explain(origin: str, error: dict[str, Any]) -> str:
    """One of pydantic's findings, in words."""
    where = ".".join(str(part) for part in error["loc"] if part not in (_A_MODEL, _A_STAGE))
    reason = str(error["msg"]).removeprefix("Value error, ")
    if not where:
        return f"{origin}: {reason}"
    if error["type"] == "extra_forbidden":
        *path, field = error["loc"]
        kinds: dict[str, type[_Strict]] = {
            "tensors": TensorRule, "slices": Slice, "token_sources": TokenSource, "experts": Expert, "merge": Recipe,
        }  # fmt: skip
        known = next((kinds[part].model_fields for part in reversed(path) if part in kinds), Recipe.model_fields)
        return f"{origin}: {where}: there is no such field: {did_you_mean(str(field), known)}"
    by_flag = origin == COMMAND_LINE and len(error["loc"]) == 1
    asked = f"--{'as' if where == 'save_as' else where.replace('_', '-')}" if by_flag else f"{origin}: {where}"
    return f"{asked}: {reason} (given: {reprlib.repr(error['input'])})"


_NO_NAME = "<byte string>"  # what YAML calls a file that it is given the content of
_LARGEST_RECIPE = 200_000  # bytes: a thousand rules
_DEEPEST_RECIPE = 20


_QUOTE = "A pattern that begins with * needs quotes: match: '*embeddings*'"


class _RecipeLoader(FastLoader):
    """Plain values only: tags that would make objects are refused, and so is a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader, but each key once."""
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.YAMLError(f"'{key.value}' is given twice, the second time in line {key.start_mark.line + 1}")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parse_recipe(text: bytes) -> Any:
    """YAML without what a recipe has no use for: aliases, which make a few lines endless, and endless nesting."""
    depth = 0
    for event in yaml.parse(text, Loader=_RecipeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"aliases (*name) are not allowed in a recipe; write the value out. {_QUOTE}")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_RECIPE:
            raise yaml.YAMLError("nested too deeply for a recipe")
    return yaml.load(text, _RecipeLoader)


def read_recipe(path: Path) -> dict[str, Any]:
    """The fields of a recipe file, not yet validated, so that the command line can override them."""
    try:
        fields = _parse_recipe(read_bounded(path, _LARGEST_RECIPE))
    except FileNotFoundError:
        raise InputError(f"{path}: no such recipe file") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        told = f"{path}: cannot be read as YAML: {str(error).replace(_NO_NAME, path.name)}"
        raise InputError(*told.splitlines(), *([_QUOTE] if "scanning an alias" in told else [])) from None
    if not isinstance(fields, dict):
        raise InputError(f"{path}: a recipe is a mapping with 'base' and 'experts'; found {type(fields).__name__}")
    return fields
