"""What the model calls its modules that a written adapter belongs to: files do not always agree with it, or with each other."""

from __future__ import annotations

from collections.abc import Iterator

from acemerge.adapters.adapter import Adapter
from acemerge.adapters.change import LoraChange, Place
from acemerge.checkpoints.families import is_stored_in_out, matches, modern_name, prefix_exchange
from acemerge.checkpoints.folder import Checkpoint, architecture_of
from acemerge.checkpoints.tied import INPUT_EMBEDDINGS
from acemerge.planning.as_adapter import module_of
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import PlannedTensor

OUTPUT_LAYER = ("*lm_head.weight", "*embed_out.weight")
_GENERATING = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}


class ModelNames:
    """Of the modules that experts change: as the first expert has them that does."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._modules: dict[str, str] = {}
        for ours, theirs in _pairs(plan):
            self._modules.setdefault(module_of(ours), module_of(theirs))

    def of(self, planned: PlannedTensor) -> str:
        """A tensor's name in the model."""
        return f"{self._module(planned)}.{modern_name(planned.name).rpartition('.')[2]}"

    def _module(self, planned: PlannedTensor) -> str:
        module = module_of(planned.name)
        return self._modules.get(module, module)

    def place(self, planned: PlannedTensor) -> Place:
        """Where the factors of its change belong: where an adapter has them, or else in its linear layer."""
        for source in planned.experts:
            change = (self._plan.experts[source.expert].changes or {}).get(source.name or "")
            if isinstance(change, LoraChange):
                return change.place
        turned = is_stored_in_out(planned.name, self._plan.family, self._plan.base.tensors)
        return Place(self._module(planned), planned.header.shape, turned)

    def tied_copy(self, planned: PlannedTensor) -> str | None:
        """The output layer's name, if this is the table that it is tied to: peft saves such a module under both names."""
        has_own = any(matches(tensor.name, OUTPUT_LAYER) for tensor in self._plan.tensors)
        if has_own or task_type_of(self._plan.experts[0]) != "CAUSAL_LM" or not matches(planned.name, INPUT_EMBEDDINGS):
            return None
        return "lm_head.weight"


def task_type_of(expert: Checkpoint) -> str | None:
    """As peft names it, of a full model that writes text; others may need a head."""
    named = architecture_of(expert.config)
    return next((kind for ending, kind in _GENERATING.items() if named.endswith(ending)), None)


def _pairs(plan: Plan) -> Iterator[tuple[str, str]]:
    """A tensor's name in the base, and in the model that an expert is."""
    for adapter in (expert for expert in plan.experts if isinstance(expert, Adapter)):
        yield from adapter.own_names.items()
    for tensor in plan.tensors:
        for source in tensor.experts:
            expert = plan.experts[source.expert]
            if expert.changes is None and source.name:
                yield tensor.name, _in_full(tensor.name, source.name, plan.base, expert)


def _in_full(ours: str, theirs: str, base: Checkpoint, expert: Checkpoint) -> str:
    """The expert's own name; with the prefix that its file lacks, if base and expert are of one class and the base's has it.

    A file may lack what the model has (`h.0.attn` of the class whose module is `transformer.h.0.attn`), but never the reverse.
    """
    short, long = prefix_exchange(theirs, ours)
    same_class = expert.config.get("architectures") == base.config.get("architectures")
    return long + theirs.removeprefix(short) if same_class and len(long) > len(short) else theirs
