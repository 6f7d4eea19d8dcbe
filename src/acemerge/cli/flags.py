"""Flags, declared once: a command that takes a group of options gets a flag for each of its fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from acemerge.errors import InputError
from acemerge.recipe.arguments import recipe_from, weights_text
from acemerge.recipe.recipe import Recipe
from acemerge.recipe.run_options import option

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="BASE EXPERT...",
        help="The base and its fine-tunes: folders, weight files, PEFT adapters or hub ids (org/name[@revision]). "
        "Or one recipe.yaml.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output, for programs.")]


@dataclass(frozen=True, kw_only=True)
class RecipeFlags:
    """A recipe's fields as far as flags give them."""

    method: list[str] | None = option(
        None, "Merging method, 'ace_auto' by default; see `acemerge methods`.", "-m", "--method", metavar="NAME"
    )
    settings: list[str] | None = option(
        None, "An option of the method, such as reach=0.03; repeatable.", "-s", "--set", metavar="KEY=VALUE"
    )
    weights: str | None = option(
        None, "How much each expert counts: 0.7,0.3 in their order, or math=0.7,code=0.3.", metavar="W,W|EXPERT=W,..."
    )
    data: str | None = option(
        None,
        "For methods that use data (regmean, fisher, ...): a suite of `acemerge bench`, such as text-8, or a folder with "
        "a file per expert, <expert>.jsonl or <expert>.safetensors.",
        metavar="SUITE|FOLDER",
    )
    preset: str | None = option(
        None,
        "Which tensors merge: auto (from the base's config), bert, gpt2, llm, vlm, seq2seq, t5, vit or generic.",
        metavar="NAME",
    )
    orientation: str | None = option(
        None,
        "canonical: matrices as [out, in] whatever their storage. stored: as they lie in the file.",
        metavar="canonical|stored",
    )
    fused: str | None = option(
        None,
        "q, k and v, or gate and up, in one matrix: merged 'apart' or 'whole'; by default as the preset says.",
        metavar="apart|whole",
    )
    missing: str | None = option(
        None, "A tensor that some experts lack: 'error', or 'skip' to merge it from those that have it.", metavar="error|skip"
    )
    heads: str | None = option(
        None,
        "Task heads: 'own' (the default; the base's in the model, each expert's in heads/), 'average' for experts with the same "
        "labels, or 'keep' the base's only.",
        metavar="own|average|keep",
    )
    tokenizer: str | None = option(
        None,
        "Whose tokens the output has: 'base' (the default), 'union' for those of all models, or an expert's name. Embeddings and "
        "output layers are lined up by token.",
        metavar="base|union|EXPERT",
    )
    files_from: str | None = option(
        None,
        "Take tokenizer, chat template and generation config from this expert; with --tokenizer, all but the tokenizer.",
        metavar="EXPERT",
    )
    dtype: str | None = option(
        None,
        "Output dtype: float32, bfloat16, float16, float64, or fp8: 8 bits with scales. By default each tensor keeps the base's.",
        metavar="DTYPE",
    )
    save_as: str | None = option(
        None,
        "What to write: 'model', or 'adapter' for one LoRA adapter; full fine-tunes then need --rank or --energy.",
        "--as",
        metavar="model|adapter",
    )
    rank: int | None = option(
        None,
        "Of an adapter: the largest rank to write. By default the merge's own, with nothing cut off.",
        least=1,
        metavar="N",
    )
    energy: float | None = option(
        None,
        "Of an adapter: for each matrix the smallest rank that keeps this share of its change's energy, such as 0.95.",
        metavar="SHARE",
    )
    save_rest: bool = option(
        False,
        "Of an adapter: also write, whole, what full fine-tunes changed and factors cannot hold: norms, biases, embeddings.",
        "--save-rest",
    )
    shard_size: str | None = option(None, "Largest output file, such as 500MB; 5GB by default.", metavar="SIZE")
    allow_nonfinite: bool = option(
        False, "NaN or infinite values in a model: average such tensors and warn, instead of stopping.", "--allow-nonfinite"
    )

    def recipes(self, models: list[str]) -> tuple[list[Recipe], Path]:
        """The same for each of several methods."""
        methods: list[list[str] | None] = [[name] for name in self.method] if self.method else [None]
        made = [replace(self, method=method).recipe(models) for method in methods]
        return [recipe for recipe, _ in made], made[0][1]

    def recipe(self, models: list[str]) -> tuple[Recipe, Path]:
        """The recipe that the models and these flags describe, and the folder its paths are relative to."""
        if len(self.method or []) > 1:
            raise InputError(f"-m {', -m '.join(self.method or [])}: a merge has one method; give -m once")
        given = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("method", "settings", "weights")
        }
        given["method"] = self.method[0] if self.method else None
        flags = {name: value for name, value in given.items() if value not in (None, False)}
        weights = [f"weights={weights_text(self.weights)}"] if self.weights else []
        return recipe_from(models, [*(self.settings or []), *weights], flags)


@dataclass(frozen=True)
class Group:
    """A class of options whose fields become flags, or some of them."""

    kind: type
    names: tuple[str, ...]

    def make(self, values: dict[str, Any]) -> Any:
        """The options, with what was given."""
        return self.kind(**values)


def only(kind: type, *names: str) -> Group:
    """These fields."""
    return Group(kind, names)


def without(kind: type, *names: str) -> Group:
    """All but these fields."""
    return Group(kind, tuple(field.name for field in fields(kind) if field.name not in names))


def with_flags(**groups: Group | type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command's parameters of these names be made of flags, one for each field.

    >>> @with_flags(run=only(RunOptions, "device"))
    ... def command(run: RunOptions) -> None: ...
    >>> list(inspect.signature(command).parameters)
    ['device']
    """
    chosen = {name: group if isinstance(group, Group) else without(group) for name, group in groups.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)

        @wraps(command)
        def call(**given: Any) -> None:
            made = {name: group.make({field: given.pop(field) for field in group.names}) for name, group in chosen.items()}
            command(**given, **made)

        call.__signature__ = signature.replace(parameters=list(_spread(signature, chosen)))  # type: ignore[attr-defined]
        return call

    return decorate


def _spread(signature: inspect.Signature, groups: dict[str, Group]) -> Iterable[inspect.Parameter]:
    """The parameters of a command, with those of a group in the group's place."""
    for name, parameter in signature.parameters.items():
        if name not in groups:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            continue
        group = groups[name]
        known, hints = {field.name: field for field in fields(group.kind)}, get_type_hints(group.kind)
        for field_name in group.names:
            yield _parameter(known[field_name], hints[field_name])


def _parameter(field: Field[Any], kind: Any) -> inspect.Parameter:
    about = field.metadata
    flag = typer.Option(*about["names"], help=about["help"], min=about["least"], metavar=about["metavar"])
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[kind, flag])
