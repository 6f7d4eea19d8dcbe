"""What becomes of each tensor under methods that run the experts' models: decided by the modules that hold it."""

from __future__ import annotations

from collections.abc import Sequence

from acemerge.calibration.layout import Layout, read_layout
from acemerge.calibration.source import Data
from acemerge.checkpoints.folder import Checkpoint
from acemerge.errors import InputError, PreflightError
from acemerge.methods import Method, get_method
from acemerge.planning.fates import Action, ExpertTensor
from acemerge.planning.reasons import Reason, Why
from acemerge.planning.tensor import PlannedTensor, computed
from acemerge.recipe.recipe import Recipe


class LayerRules:
    """The experts' models in outline, without a row of data having been run."""

    def __init__(self, data: Data, experts: Sequence[Checkpoint]) -> None:
        self._experts = experts
        self._layouts = _layouts(data, experts)

    def fate(self, method: Method, sources: Sequence[ExpertTensor]) -> tuple[Action, Reason]:
        """Merged, averaged or kept, of a tensor that experts have."""
        layouts = [(self._layouts[source.expert], source.name or "") for source in sources]
        rest: Action = "kept" if method.rest == "keep" else "averaged"
        if method.touches == "blocks" and any(layout.places.get(name) == layout.blocks for layout, name in layouts):
            return "kept", Reason(Why.AFTER_BLOCKS)
        if not all(name in layout.memory for layout, name in layouts):
            return rest, Reason(Why.UNUSED)
        if not all(name in layout.linear for layout, name in layouts):
            return rest, Reason(Why.NOT_A_LINEAR_LAYER)
        if method.touches == "blocks" and any(layout.places.get(name, -1) < 0 for layout, name in layouts):
            return rest, Reason(Why.BEFORE_BLOCKS)
        return "merged", Reason(Why.METHOD)

    def stored_in_out(self, sources: Sequence[ExpertTensor]) -> bool:
        """Of a linear layer's weight, whether the files hold it [in, out]: its module knows."""
        return all(self._layouts[source.expert].linear[source.name or ""] for source in sources)

    def problems(self, recipe: Recipe, tensors: Sequence[PlannedTensor]) -> list[str]:
        """What the methods that go by layers cannot do."""
        methods = sorted({tensor.fate.method for tensor in computed(tensors) if tensor.action == "merged"})
        asked = [recipe.method, *(rule.method for rule in recipe.tensors if rule.method)]
        by_layer = [name for name in asked if get_method(name).touches in ("linear", "blocks")]
        by_block = [name for name in asked if get_method(name).touches == "blocks"]
        found = []
        if by_layer and recipe.orientation == "stored":
            found.append(f"--orientation stored: method '{by_layer[0]}' goes by the inputs of a layer, whatever the stored order")
        options = {tensor.fate.options for tensor in computed(tensors) if tensor.fate.method in by_block}
        if by_block and (len(methods) > 1 or len(options) > 1):
            found.append(
                f"method '{by_block[0]}' needs the whole merged model as it goes, so it must merge all of it with one set of "
                "options; rules may only average or keep tensors"
            )
        for expert, layout in zip(self._experts, self._layouts, strict=True):
            if by_block and len(layout.stacks) != 1:
                stacks = ", ".join(layout.stacks) or "none"
                found.append(f"method '{by_block[0]}' needs one stack of blocks; expert {expert.where} has {stacks}; use regmean")
        return found


def _layouts(data: Data, experts: Sequence[Checkpoint]) -> list[Layout]:
    problems: list[str] = []
    found = []
    for expert in experts:
        try:
            found.append(read_layout(data.outline(expert), expert))
        except InputError as error:
            problems.extend(error.found)
    if problems:
        raise PreflightError(problems)
    return found
