"""`acemerge recipe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acemerge.cli.help_text import help_text
from acemerge.cli.usage import PlainUsage

recipe_app = typer.Typer(name="recipe", help="Recipes: merges written as files.", no_args_is_help=True, rich_markup_mode=None)


@recipe_app.callback()
def _recipes() -> None:
    pass


def convert_command(
    config: Annotated[Path, typer.Argument(help="A configuration of mergekit.", metavar="CONFIG.yaml")],
) -> None:
    """Print a mergekit configuration as a recipe of acemerge.

        acemerge recipe convert mergekit-config.yaml > recipe.yaml

    `acemerge merge mergekit-config.yaml -o OUT` does the same on the way. What cannot be honoured is refused by name and line.
    """
    import yaml

    from acemerge.errors import InputError
    from acemerge.recipe.arguments import recipe_from
    from acemerge.recipe.mergekit import is_mergekit
    from acemerge.recipe.recipe import read_recipe

    if not is_mergekit(read_recipe(config)):
        raise InputError(f"{config}: has no 'merge_method', so it is no configuration of mergekit; `acemerge plan` takes recipes")
    recipe, _ = recipe_from([str(config)], [], {})
    print(yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True), end="")


recipe_app.command("convert", cls=PlainUsage, help=help_text(convert_command))(convert_command)
