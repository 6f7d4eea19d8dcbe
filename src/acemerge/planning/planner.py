"""Making the plan, from headers alone: every decision about every tensor, and every problem that headers show, all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any

from acemerge.adapters.adapter import Adapter
from acemerge.adapters.change import LoraChange
from acemerge.adapters.settings import EXPAND
from acemerge.checkpoints.experts import is_router
from acemerge.checkpoints.families import (
    BUFFERS,
    NOT_LINEAR,
    align_names,
    choose_family,
    is_output_layer,
    is_task_head,
    matches,
    may_be_added,
)
from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.quantised.reading import QUANTIZATION
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.checkpoints.tied import output_layers_tied_by_expert, tied_names
from acemerge.checkpoints.vocabulary_tensors import vocabulary_axes
from acemerge.errors import InputError, PreflightError
from acemerge.layer_names import relative_depths
from acemerge.methods import Method, Options, get_method
from acemerge.numerics.frame import Sides
from acemerge.planning.as_adapter import plan_as_adapter
from acemerge.planning.data import ExpertLayers, PlannedData
from acemerge.planning.eight_bits import plan_in_eight_bits
from acemerge.planning.fates import Action, Averaged, Copied, Core, ExpertTensor, Fate, Kept, Merged, experts_of
from acemerge.planning.matrices import matrix_shape_of, view_of_matrices, whole_view
from acemerge.planning.origins import origin_notes
from acemerge.planning.plan import Plan, PlannedHead, per_task_methods
from acemerge.planning.reasons import Reason, Why
from acemerge.planning.rows import LinedUp, OutputRows
from acemerge.planning.slices import slice_of_each
from acemerge.planning.tensor import Planned, PlannedTensor, computed
from acemerge.planning.view import View
from acemerge.planning.vocabulary import Vocabulary
from acemerge.planning.vocabulary_choice import VocabularyChoice, choose_vocabulary
from acemerge.recipe.recipe import EIGHT_BITS, Recipe, TensorRule
from acemerge.recipe.values import Place, values_at, varies


def build_plan(
    recipe: Recipe,
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    config: Mapping[str, Any],
    data: PlannedData | None = None,
    layers: ExpertLayers | None = None,
    chosen: VocabularyChoice | None = None,
) -> Plan:
    """Decide everything, or raise PreflightError with every problem found. Methods that use data need it and the layers.

    `chosen` is what was found of the vocabularies for another plan of the same models.
    """
    chosen = chosen or choose_vocabulary(recipe, base, experts, config)
    return _Planner(recipe, base, tuple(experts), config, data, layers, chosen).plan()


class _Planner:
    """Collects decisions and problems side by side, so that the user sees all problems at once."""

    def __init__(
        self,
        recipe: Recipe,
        base: Checkpoint,
        experts: tuple[Checkpoint, ...],
        config: Mapping[str, Any],
        data: PlannedData | None,
        layers: ExpertLayers | None,
        chosen: VocabularyChoice,
    ) -> None:
        self.recipe, self.base, self.experts, self.config, self.data, self.layers = recipe, base, experts, config, data, layers
        self.problems: list[str] = []
        self.notes: list[str] = list(recipe.notes)
        self.unlike_heads: list[str] = []
        self.strangers: dict[str, list[str]] = {}
        self.miscounts: dict[str, list[str]] = {}
        self.seen_options: dict[tuple[str, Options], Options] = {}  # so that equal ones are the same
        self.merged_as_one: dict[str, list[str]] = {}
        self.family = choose_family(recipe.preset, config, base.tensors)
        self.method = get_method(recipe.method)
        self.expert_names = tuple(expert.name for expert in experts)
        self.slices = slice_of_each(list(base.tensors), recipe.slices) if recipe.slices else {}
        self.options = self._options_at(self.method, recipe.options, next(iter(base.tensors), ""), self.expert_names)
        self.omitted = tied_names(base, config)
        # expert index -> {name in the base: name in the expert}
        self.names = [_invert(align_names(base.tensors, expert.tensors), expert.name) for expert in experts]
        self.tied = [output_layers_tied_by_expert(base, e, names) for e, names in zip(experts, self.names, strict=True)]
        self.tied_in_experts: dict[str, Mapping[str, str]] = {}
        self.chosen, self.vocabulary = chosen, chosen.vocabulary
        self.used_rules: set[int] = set()
        self.only_adapters = all(expert.changes is not None for expert in experts)

    def plan(self) -> Plan:
        self._check_models()
        tensors = tuple(self._decide(name) for name in self.base.tensors if name not in self.omitted)
        self.notes.extend(f"{_some(names)}: fused matrices, merged as one: {why}" for why, names in self.merged_as_one.items())
        heads = self._plan_heads(tensors)
        self._say_what_becomes_of_heads(tensors)
        if self.recipe.save_as == "adapter":
            as_adapter, problems = plan_as_adapter(tensors, self.experts, self.family, self.recipe)
            tensors, self.problems = tuple(as_adapter), [*self.problems, *problems]
        changes: Mapping[str, Any] = {}
        if self.recipe.dtype == EIGHT_BITS:
            tensors, changes = self._in_eight_bits(tensors)
        self._report_strangers()
        self._report_missing(tensors)
        self._note_changes_left_out(tensors)
        self._say_one_model_per_task(tensors)
        if self.layers:
            self.problems.extend(self.layers.problems(self.recipe, tensors))
        self.problems.extend(
            f"{problem} for {_some(names)}; give those a recipe rule of their own" for problem, names in self.miscounts.items()
        )
        for index, rule in enumerate(self.recipe.tensors):
            if index not in self.used_rules:
                self.problems.append(f"recipe: the pattern '{rule.match}' matches no tensor of the base; see `acemerge plan`")
        if self.problems:
            raise PreflightError(self.problems)
        return Plan(
            self.recipe, self.method, self.options, self.base, self.experts, self.family, tensors, heads, self.omitted,
            tuple(self.notes), changes, self.data, self.vocabulary,
        )  # fmt: skip

    def _in_eight_bits(self, tensors: Sequence[PlannedTensor]) -> tuple[tuple[PlannedTensor, ...], Mapping[str, Any]]:
        planned, settings, problems = plan_in_eight_bits(tensors, self.base, self.experts, self.names, self.family, self.recipe)
        for method in per_task_methods(tensors):
            problems.append(f"--dtype {EIGHT_BITS}: method '{method}' makes one model per task, whose parts are of floats")
        self.problems.extend(problems)
        return tuple(planned), {QUANTIZATION: settings}

    # -- whole models

    def _check_models(self) -> None:
        models = (self.base, *self.experts)
        for one, other in combinations(models, 2):
            if one is self.base and self.method.takes_base:
                continue
            if one.files and other.files and all(a.samefile(b) for a, b in zip(one.files, other.files, strict=False)):
                self.problems.append(f"{one.where} and {other.where} are the same files; give each model once")
        if not self.recipe.slices:  # whose tensors have as many experts as each slice says
            self.problems.extend(_miscounts(self.method, self.options, len(self.experts)))
        for expert in self.experts:
            if kinds := self._other_kind(expert):
                self.notes.append(f"expert '{expert.name}' is another kind of model than the base{kinds}")
        self.notes.extend(origin_notes(self.base, self.experts))
        self.notes.extend(self.chosen.notes)
        self.problems.extend(self.chosen.problems)
        if self.vocabulary and self.data:
            self._refuse_data(self.vocabulary)

    def _refuse_data(self, vocabulary: Vocabulary) -> None:
        """Models are run on the ids of an expert's own tokens, also the one that is being merged."""
        for expert, own in zip(self.experts, vocabulary.differences, strict=True):
            if own:
                self.problems.append(
                    f"a method that uses data runs models of one vocabulary, and expert {expert.where} has another than the "
                    "base's; leave it out, or choose a method that uses the weights alone"
                )

    # -- one tensor of the base

    def _decide(self, name: str) -> PlannedTensor:
        header = self.base.tensors[name]
        dtype = self.recipe.float_dtype if self.recipe.float_dtype and header.is_mergeable else header.dtype
        if header.dtype.startswith("float8"):
            self.problems.append(
                f"tensor '{name}' of {self.base.where} is stored as {header.dtype}; give its folder, with its config.json"
            )
        rows = self._output_rows(name, header)
        fate = self._fate(name, header)
        read = [header, *(expert.tensors[their] for expert, their in self._present(experts_of(fate)))]
        made = sum(each.nbytes for each in read if each.made)
        return Planned(name=name, header=header, output_dtype=dtype, fate=fate, rows=rows, made_bytes=made)

    def _output_rows(self, name: str, header: TensorHeader) -> OutputRows | None:
        """Of a tensor with a row for every token, if the output's tokens are not the base's."""
        rows = self.vocabulary.output_rows(name, header, self._sources(name)) if self.vocabulary else None
        if rows and not header.is_mergeable:
            self.problems.append(
                f"tensor '{name}' of {self.base.where} has {header.dtype} rows, which --tokenizer cannot rearrange"
            )
        return rows

    def _fate(self, name: str, header: TensorHeader) -> Fate:
        if not header.is_mergeable:
            return Copied(reason=Reason(Why.NOT_WEIGHTS, header.dtype))
        if matches(name, (*BUFFERS, *self.family.buffers)):
            return Copied(reason=Reason(Why.CONSTANT))
        rule = self._rule_for(name)
        if rule is not None and rule.do == "head":
            return Kept(reason=Reason(Why.TASK_HEAD_BY_RULE, rule.match))
        if rule is not None and rule.do == "keep":
            return Kept(reason=Reason(Why.RULE, rule.match))
        if not _forces(rule) and is_task_head(name):
            return self._fate_of_head(name, header)
        sources = self._sources(name)
        if not sources:
            return Kept(reason=Reason(Why.UNCHANGED if self.only_adapters else Why.ABSENT))
        action, reason = self._action(name, header, rule, sources)
        if action == "kept":
            self._note_shapes(name, header, sources)
            return Kept(reason=reason)
        self._check_shapes(name, header, sources)
        method, options = self._method_for(rule), self._options_for(rule, name, sources)
        if action == "averaged":
            method, options = get_method("average"), get_method("average").options({"alpha": options.alpha})
        elif options is not self.options or len(sources) < len(self.experts) or self.recipe.slices:
            for problem in _miscounts(method, options, len(sources)):
                self.miscounts.setdefault(problem, []).append(name)
        whole = all(their_name not in (expert.changes or {}) for expert, their_name in self._present(sources))
        computed_fate = Merged if action == "merged" else Averaged
        return computed_fate(
            reason=reason,
            method=method.name,
            options=options,
            view=self._view(name, action, method, options, sources),
            experts=sources,
            core=self._core(sources, method.core_sides(options)),
            in_pieces=method.is_elementwise(options) and whole,
        )

    def _fate_of_head(self, name: str, header: TensorHeader) -> Fate:
        if self.recipe.heads != "average":
            return Kept(reason=Reason(Why.TASK_HEAD if self.recipe.heads == "own" else Why.TASK_HEAD_LEFT))
        sources = self._sources(name)
        present = self._present(sources)
        if len(present) < len(self.experts) or any(expert.tensors[their].shape != header.shape for expert, their in present):
            self.unlike_heads.append(name)
            return Kept(reason=Reason(Why.TASK_HEAD))
        average = get_method("average")
        return Averaged(
            reason=Reason(Why.TASK_HEAD_AVERAGED), method=average.name, options=average.options({}), view=View(), experts=sources,
            core=self._core(sources, average.core_sides(average.options({}))),
            in_pieces=all(their not in (expert.changes or {}) for expert, their in present),
        )  # fmt: skip

    def _view(self, name: str, action: Action, method: Method, options: Options, sources: tuple[ExpertTensor, ...]) -> View:
        """How the method sees it: matrices [out, in], and, if it is for such, apart what the file has fused or stacked."""
        if action == "merged" and self.layers and method.touches in ("linear", "blocks"):
            return View(transposed=self.layers.stored_in_out(sources))
        if action == "averaged" or method.touches != "matrices" or method.is_elementwise(options):
            return whole_view(name, self.base.tensors, self.family, self.recipe)
        view, why_whole = view_of_matrices(name, self.base.tensors, self.family, self.recipe, self.config)
        if why_whole:
            self.merged_as_one.setdefault(why_whole, []).append(name)
        return view

    def _rule_for(self, name: str) -> TensorRule | None:
        for index, rule in enumerate(self.recipe.tensors):
            if matches(name, [rule.match]):
                self.used_rules.add(index)
                return rule
        return None

    def _method_for(self, rule: TensorRule | None) -> Method:
        if rule is None or rule.method is None:
            return self.method
        try:
            return get_method(rule.method)
        except InputError as error:
            raise InputError(f"recipe rule '{rule.match}': {error}") from None

    def _options_for(self, rule: TensorRule | None, name: str, sources: Sequence[ExpertTensor]) -> Options:
        """Of one tensor: the recipe's, changed by its slice and its rule, with the values that they have here."""
        asked, method = self._asked_in_slice(name), self._method_for(rule)
        changed = rule is not None and (rule.method is not None or bool(rule.options))
        if not changed and asked is self.recipe.options and not any(map(varies, asked.values())):
            return self.options
        experts = tuple(self.expert_names[source.expert] for source in sources)
        if rule is None or not changed:
            return self._options_at(method, asked, name, experts)
        try:
            return self._options_at(method, {**(asked if method is self.method else {}), **rule.options}, name, experts)
        except InputError as error:
            raise InputError(f"recipe rule '{rule.match}': {error}") from None

    def _asked_in_slice(self, name: str) -> Mapping[str, Any]:
        own = self.recipe.slices[self.slices[name][0]].options if name in self.slices else {}
        return {**self.recipe.options, **own} if own else self.recipe.options

    @cached_property
    def depths(self) -> Mapping[str, float]:
        """Of every tensor; only values that differ by layer ask for it."""
        return relative_depths(self.base.tensors)

    @cached_property
    def config_of_experts(self) -> Mapping[str, Any]:
        """The base's, with the classes of the models that the experts are: a classifier may be made of what wrote text."""
        classes = {name: None for expert in self.experts for name in self._classes_of(expert)}
        return {**self.config, "architectures": list(classes)}

    def _classes_of(self, expert: Checkpoint) -> Sequence[str]:
        config = expert.head_config(self.config, {}) if isinstance(expert, Adapter) else expert.config
        named = config.get("architectures") or self.config.get("architectures")
        return [str(name) for name in named] if isinstance(named, list) else []

    def _options_at(self, method: Method, asked: Mapping[str, Any], name: str, experts: tuple[str, ...]) -> Options:
        if any(map(varies, asked.values())):
            depth = self.slices[name][1] if name in self.slices else self.depths[name]
            asked = values_at(asked, Place(name, depth), experts, self.expert_names)
        options = method.options(asked).resolve(self.config_of_experts)
        return self.seen_options.setdefault((method.name, options), options)

    def _action(
        self, name: str, header: TensorHeader, rule: TensorRule | None, sources: tuple[ExpertTensor, ...]
    ) -> tuple[Action, Reason]:
        """Merged, averaged or kept, for a weight that at least one expert has."""
        method = self._method_for(rule)
        asked = Reason(Why.RULE, rule.match) if rule else Reason(Why.METHOD)
        if rule is not None and rule.do == "average":
            return "averaged", asked
        if method.touches == "all":
            return "merged", asked
        if method.touches in ("linear", "blocks"):
            assert self.layers is not None
            return self.layers.fate(method, sources)
        if not _forces(rule) and matches(name, self.family.kept):
            if method.rest == "average all" and self._equally_shaped(header, sources):
                return "averaged", Reason(Why.NOT_LINEAR_BY_PRESET, self.family.name)
            return "kept", Reason(Why.KEPT_BY_PRESET, self.family.name)
        rest: Action = "kept" if method.rest == "keep" else "averaged"
        shape = matrix_shape_of(name, header)
        if len(shape) != 2:
            return rest, Reason(Why.NOT_A_MATRIX, str(len(shape)))
        if min(shape) <= 1:
            return rest, Reason(Why.VECTOR)
        if not _forces(rule) and is_router(name, self.base.tensors):
            return rest, Reason(Why.ROUTER)
        if not _forces(rule) and matches(name, NOT_LINEAR):
            return rest, Reason(Why.NOT_LINEAR)
        if not _forces(rule) and matches(name, self.family.averaged):
            return rest, Reason(Why.NOT_LINEAR_BY_PRESET, self.family.name)
        return "merged", asked

    def _sources(self, name: str) -> tuple[ExpertTensor, ...]:
        """The experts that have it, in order; adapters that leave it as it is count, if anybody changes it."""
        names = [own.get(name) or tied.get(name) for own, tied in zip(self.names, self.tied, strict=True)]
        found = [ExpertTensor(index, theirs, self._lined_up(index, name, theirs)) for index, theirs in enumerate(names)]
        if all(source.name is None for source in found):
            return ()
        return tuple(source for source in found if source.name is not None or self.experts[source.expert].changes is not None)

    def _lined_up(self, index: int, name: str, theirs: str | None) -> LinedUp | None:
        if theirs is None or self.vocabulary is None:
            return None
        return self.vocabulary.lined_up(index, name, self.experts[index].tensors[theirs])

    def _core(self, sources: Sequence[ExpertTensor], sides: Sides | None) -> Core | None:
        """Of low-rank factors, if all experts change it by such and the method can merge them as such."""
        if sides is None:
            return None
        rank = 0
        for source in sources:
            if source.name is None:
                continue
            change = (self.experts[source.expert].changes or {}).get(source.name)
            if not isinstance(change, LoraChange) or not change.is_low_rank:
                return None
            rank += change.rank
        return Core(sides, rank)

    def _named(self, sources: Sequence[ExpertTensor]) -> list[ExpertTensor]:
        return [source for source in sources if source.name is not None]

    def _present(self, sources: Sequence[ExpertTensor]) -> list[tuple[Checkpoint, str]]:
        return [(self.experts[source.expert], source.name) for source in sources if source.name is not None]

    def _equally_shaped(self, header: TensorHeader, sources: Sequence[ExpertTensor]) -> bool:
        """Unlike a vocabulary that cannot be lined up."""
        for source, (expert, name) in zip(self._named(sources), self._present(sources), strict=True):
            theirs = expert.tensors[name].shape
            if header.shape != (source.rows.shape(theirs) if source.rows else theirs):
                return False
        return True

    def _note_shapes(self, name: str, header: TensorHeader, sources: tuple[ExpertTensor, ...]) -> None:
        """A kept tensor of another shape, such as a larger vocabulary, is no obstacle, but worth knowing; unless kinds differ."""
        for source, (expert, their_name) in zip(self._named(sources), self._present(sources), strict=True):
            theirs = expert.tensors[their_name].shape
            if header.shape in (theirs, source.rows.shape(theirs) if source.rows else theirs):
                continue
            if kinds := self._other_kind(expert):
                self.problems.append(
                    f"tensor '{name}': shape {list(header.shape)} in base {self.base.where}, {list(theirs)} in expert "
                    f"{expert.where}{kinds}; give fine-tunes of this base"
                )
            else:
                self.notes.append(
                    f"'{name}' is {list(theirs)} in expert '{expert.name}', {list(header.shape)} in the base, whose value is kept"
                    f"{self._without_tokenizer(source.expert, name)}"
                )

    def _without_tokenizer(self, expert: int, name: str) -> str:
        """What would help where another number of tokens is the cause."""
        if name not in vocabulary_axes(self.base, self.config) or self.experts[expert].changes is not None:
            return ""
        return "; with the tokenizer.json of both in their folders, rows are lined up by token"

    def _other_kind(self, expert: Checkpoint) -> str:
        """How the configs say that it is another kind of model, if they do."""
        theirs, ours = expert.config.get("model_type"), self.config.get("model_type")
        return f" (model_type '{theirs}' against '{ours}')" if theirs and ours and theirs != ours else ""

    def _check_shapes(self, name: str, header: TensorHeader, sources: tuple[ExpertTensor, ...]) -> None:
        for source, (expert, their_name) in zip(self._named(sources), self._present(sources), strict=True):
            theirs = expert.tensors[their_name]
            if (source.rows.shape(theirs.shape) if source.rows else theirs.shape) != header.shape:
                self.problems.append(
                    f"tensor '{name}': shape {list(header.shape)} in base {self.base.where}, {list(theirs.shape)} in expert "
                    f"{expert.where}; give fine-tunes of this base, or a recipe rule {{match: '{name}', do: keep}} (or do: head)"
                    f"{self._without_tokenizer(source.expert, name)}"
                )
            elif not theirs.is_mergeable:
                self.problems.append(
                    f"tensor '{name}': {header.dtype} in base {self.base.where}, {theirs.dtype} in expert {expert.where}; "
                    "give the expert's unquantised weights"
                )

    # -- what experts lack or add

    def _report_missing(self, tensors: Sequence[PlannedTensor]) -> None:
        taking_part = computed(tensors)
        for index, expert in enumerate(self.experts):
            lacking = [
                t.name
                for t in taking_part
                if all(source.expert != index for source in t.experts) and not self._left_out(t.name, expert.name)
            ]
            is_explained = expert.name in self.strangers and self._other_kind(expert)
            if not lacking or is_explained:
                continue
            listing = _some(lacking)
            if self.recipe.missing == "skip":
                self.notes.append(f"expert '{expert.name}' lacks {listing}: left out of those tensors' merges")
            else:
                self.problems.append(
                    f"expert {expert.where} lacks {listing}, which other experts have; complete its files, or pass "
                    "--missing skip to merge those tensors from the experts that have them"
                )
        unmatched = [tensor.name for tensor in tensors if tensor.fate.reason.why is Why.ABSENT]
        if unmatched:
            self.notes.append(f"no expert has {_some(unmatched)}: kept at the base")
        if not taking_part and not self.problems:
            self.problems.append(
                f"base {self.base.where} and the experts have no weights in common to merge; are these fine-tunes of this base?"
            )

    def _left_out(self, name: str, expert: str) -> bool:
        """Whether a slice leaves this expert out on purpose."""
        return name in self.slices and expert not in self.recipe.slices[self.slices[name][0]].layers

    def _note_changes_left_out(self, tensors: Sequence[PlannedTensor]) -> None:
        """An adapter stores only what it was told to change. What stays at the base nevertheless, unasked, is worth knowing."""
        left_out: dict[tuple[Reason, tuple[str, ...]], list[str]] = {}
        for tensor in tensors:
            reason = tensor.fate.reason
            asked = reason.is_task_head or reason.why is Why.RULE
            if isinstance(tensor.fate, Kept) and not asked and (changed_by := self._adapters_that_change(tensor)):
                left_out.setdefault((reason, changed_by), []).append(tensor.name)
        for (reason, changed_by), names in left_out.items():
            adapters = " and ".join(f"'{name}'" for name in changed_by)
            self.notes.append(
                f"what {adapters} changed of {_some(names)} is left out: {reason}; a recipe rule such as "
                f"{{match: '{names[0]}', do: average}} takes it in"
            )

    def _adapters_that_change(self, tensor: PlannedTensor) -> tuple[str, ...]:
        """By their names. One of another shape, such as a larger vocabulary, has a note of its own."""
        found = []
        for expert, names in zip(self.experts, self.names, strict=True):
            theirs = names.get(tensor.name)
            if expert.changes is not None and theirs and expert.tensors[theirs].shape == tensor.header.shape:
                found.append(expert.name)
        return tuple(found)

    def _say_one_model_per_task(self, tensors: Sequence[PlannedTensor]) -> None:
        for name in per_task_methods(tensors):
            if any(tensor.rows and tensor.method == name for tensor in tensors):
                self.problems.append(
                    f"method '{name}' makes one model per task, each with the base's vocabulary; leave out --tokenizer, "
                    "--files-from, token_sources and pad_to_multiple_of"
                )
            if self.recipe.save_as == "adapter":
                self.problems.append(f"--as adapter: method '{name}' makes one model per task, which one adapter cannot hold")
            self.notes.append(
                f"method '{name}' makes one model per task, not one merged model: the output's own weights are only what the "
                "tasks share; `acemerge task OUT EXPERT -o DIR` makes an expert's model"
            )

    def _plan_heads(self, tensors: Sequence[PlannedTensor]) -> tuple[PlannedHead, ...]:
        planned = {tensor.name: tensor for tensor in tensors}
        heads = []
        for index, names in enumerate(self.names):
            expert = self.experts[index]
            own = [theirs for ours, theirs in names.items() if self._belongs_to_head(ours, theirs, planned, expert)]
            if own:
                found = {theirs: ours for ours, theirs in names.items() if ours in planned and theirs not in own}
                backbone = expert.backbone(planned) if isinstance(expert, Adapter) else found
                heads.append(PlannedHead(index, tuple(own), backbone))
        return tuple(heads)

    def _say_what_becomes_of_heads(self, tensors: Sequence[PlannedTensor]) -> None:
        """Experts of one task, as in a model soup, may be expected to share a head."""
        if self.unlike_heads:
            names = _some(list(dict.fromkeys(self.unlike_heads)))
            self.problems.append(f"--heads average: the base and the experts have no {names} of the same shape; use --heads own")
        labels = [expert.config.get("id2label") for expert in self.experts]
        kept = [tensor.name for tensor in tensors if tensor.fate.reason.why is Why.TASK_HEAD]
        everywhere = [name for name in kept if all(name in names for names in self.names)]
        if len(labels) > 1 and labels[0] and all(own == labels[0] for own in labels) and everywhere:
            self.notes.append(
                f"the experts have the same labels, but the model keeps the base's head ({_some(everywhere)}); each expert's own "
                "is in heads/. --heads average averages them"
            )

    def _belongs_to_head(self, ours: str, theirs: str, planned: Mapping[str, PlannedTensor], expert: Checkpoint) -> bool:
        """Whether an expert's tensor is its own; reports it when it has no place in the output at all."""
        if ours in planned:
            return planned[ours].fate.reason.is_task_head
        if expert.changes and theirs in expert.changes:
            self.strangers.setdefault(expert.name, []).append(theirs)  # a change of nothing
            return False
        tied_copy = ours in self.omitted and expert.changes is None  # what an adapter saves is its own
        known_elsewhere = tied_copy or matches(theirs, (*BUFFERS, *self.family.buffers))
        if known_elsewhere or not expert.tensors[theirs].is_mergeable or self._is_tied_in(expert, theirs):
            return False
        rule = self._rule_for(ours) or self._rule_for(theirs)
        if may_be_added(theirs) or (rule is not None and rule.do == "head"):
            if self.recipe.heads == "average":
                self.unlike_heads.append(theirs)
            return self.recipe.heads == "own"
        self.strangers.setdefault(expert.name, []).append(theirs)
        return False

    def _report_strangers(self) -> None:
        """Tensors of an expert that have no place in the output."""
        for expert in self.experts:
            names = self.strangers.get(expert.name, [])
            if not names:
                continue
            listing = ", ".join(f"'{name}' {list(expert.tensors[name].shape)}{_letters(name)}" for name in names[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            kinds = self._other_kind(expert)
            noun, verb = ("tensor", "is") if len(names) == 1 else ("tensors", "are")
            self.problems.append(
                f"{noun} {listing}{more} of expert {expert.where} {verb} not in base {self.base.where}{kinds}; give "
                f"the base it was fine-tuned from{'' if kinds else _alternative(names[0], expert)}"
            )

    def _is_tied_in(self, expert: Checkpoint, name: str) -> bool:
        if expert.name not in self.tied_in_experts:
            self.tied_in_experts[expert.name] = tied_names(expert, expert.config)
        return name in self.tied_in_experts[expert.name]


def _forces(rule: TensorRule | None) -> bool:
    """Whether a rule says that a tensor is to be merged; one that only sets options leaves that to the preset."""
    return rule is not None and ("do" in rule.model_fields_set or rule.method is not None)


def _invert(aligned: Mapping[str, str], expert: str) -> dict[str, str]:
    inverted: dict[str, str] = {}
    for theirs, ours in aligned.items():
        if ours in inverted:
            raise PreflightError([f"expert '{expert}': tensors '{inverted[ours]}' and '{theirs}' both stand for '{ours}'"])
        inverted[ours] = theirs
    return inverted


def _miscounts(method: Method, options: Options, experts: int) -> list[str]:
    """What does not suit this number of experts."""
    found = []
    if method.experts is not None and method.experts != experts:
        wanted = "1 expert" if method.experts == 1 else f"{method.experts} experts"
        found.append(f"method '{method.name}' takes exactly {wanted}, {experts} were given")
    try:
        options.check(experts)
    except InputError as error:
        found.extend(error.found)
    return found


def _alternative(stranger: str, expert: Checkpoint) -> str:
    """What else can be done about a tensor that the base lacks."""
    if stranger not in (expert.changes or {}):
        return f", or a recipe rule {{match: '{stranger}', do: head}} to keep it as its own"
    # A change of nothing cannot be kept. An output layer that is tied to the embeddings is stored as these only.
    return f". If it is tied to the embeddings: {EXPAND}" if is_output_layer(stranger) else ""


def _letters(name: str) -> str:
    """A warning for names that may look like another's and are not."""
    return "" if name.isascii() else f" (not plain ASCII: {name!a})"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return f"{shown} and {len(names) - 3} more tensors" if len(names) > 3 else shown
