"""The first line of `--help`: how a verb is called."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class PlainUsage(TyperCommand):
    """Names arguments as their help does, `BASE EXPERT...`, whatever brackets the installed typer puts around them."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What follows the verb."""
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        named = [(param.metavar or str(param.name).upper(), param.required) for param in arguments]
        return [self.options_metavar or "", *(name if required else f"[{name}]" for name, required in named)]
