"""What is written beside the weights: copied files, index, model card, resolved recipe, manifest. Nothing local in them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from acemerge.checkpoints.card import licence
from acemerge.checkpoints.folder import with_changes
from acemerge.checkpoints.side_files import CONFIG, copy_side_file, write_side_file
from acemerge.checkpoints.source import Source, Sources
from acemerge.errors import printable
from acemerge.output.adapter_writer import write_adapter_config
from acemerge.output.input_hashes import Hashes
from acemerge.output.manifest import Manifest, manifest_of, write_manifest
from acemerge.output.staging import Staging
from acemerge.planning.plan import Plan
from acemerge.planning.shares import ACTIONS, shares_told
from acemerge.planning.vocabulary_files import side_files
from acemerge.version import __version__


def write_documents(
    plan: Plan,
    sources: Sources,
    staging: Staging,
    hashes: Hashes,
    stages: Mapping[Path, Any],
    add_page: Callable[[Manifest, Path], None] | None = None,
) -> None:
    """Everything of the output folder but the weights and the heads; `add_page` makes a page of the manifest."""
    folder, dtype = staging.folder, plan.recipe.float_dtype
    if plan.recipe.save_as == "adapter":
        write_adapter_config(plan, sources, folder)
    else:
        for name, file in side_files(plan.base, plan.vocabulary).items():
            if isinstance(file, Path):
                copy_side_file(file, folder, dtype, {**plan.base.config_changes, **plan.config_changes})
            else:
                write_side_file(name, _with_settings(name, file(), plan), folder, dtype)
        if plan.base.config and not (folder / CONFIG).exists():  # which a single file may state itself
            write_side_file(CONFIG, _with_settings(CONFIG, plan.base.config, plan), folder, dtype)
        _write_index(plan, folder)
    recipe = resolved_recipe(plan, sources, hashes, stages)
    (folder / "acemerge.yaml").write_text(_RECIPE_HEADING + recipe, encoding="utf-8")
    (folder / "README.md").write_text(model_card(plan, sources, recipe, hashes), encoding="utf-8")
    told = {name: record for source, name in _models(plan, sources) if (record := stages.get(source.path))}
    manifest = manifest_of(plan, staging.finished, hashes, told)
    if add_page:
        add_page(manifest, folder)
    write_manifest(folder, manifest, manifest.outputs | manifest.parts)


def _with_settings(name: str, content: Mapping[str, Any] | str, plan: Plan) -> Mapping[str, Any] | str:
    """config.json says how the weights are quantised."""
    return content if isinstance(content, str) or name != CONFIG else with_changes(content, plan.config_changes)


_RECIPE_HEADING = f"""\
# The merge that made this model, with every option resolved (acemerge {__version__}).
# Repeat it where these models are: acemerge merge acemerge.yaml -o OUT
"""


def _write_index(plan: Plan, folder: Path) -> None:
    if len(plan.shards) == 1:
        return
    weight_map = {name: shard for shard, tensors in plan.shards.items() for tensor in tensors for name, _ in tensor.written}
    total_size = sum(tensor.output_bytes for tensor in plan.tensors)
    parameters = sum(tensor.output_header.elements for tensor in plan.tensors)
    index = {
        "metadata": {"total_parameters": parameters, "total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _models(plan: Plan, sources: Sources) -> list[tuple[Source, str]]:
    names = [model.name for model in (plan.base, *plan.experts)]
    return list(zip((sources.base, *sources.experts), names, strict=True))


def resolved_recipe(plan: Plan, sources: Sources, hashes: Hashes, stages: Mapping[Path, Any]) -> str:
    """A recipe that `acemerge merge` takes: public names, every option explicit, the inputs' hashes."""
    fields = plan.recipe.model_dump(exclude={"inputs", "base", "experts", "options"}, exclude_defaults=True)
    if plan.recipe.data:
        fields["data"] = Path(plan.recipe.data).name  # a suite's name, or the folder's own: no local path
    base, *experts = public_names([sources.base, *sources.experts])
    (of_base, base_name), *of_experts = [(stages.get(source.path), name) for source, name in _models(plan, sources)]
    resolved = {
        "base": {"name": base_name, "merge": of_base["recipe"]} if of_base else base,
        "experts": [
            {"merge": stage["recipe"], "name": name} if stage else {"model": model, "name": name}
            for model, (stage, name) in zip(experts, of_experts, strict=True)
        ],
        "method": plan.method.name,
        "options": plan.asked_options,
        "preset": plan.family.name,
        "orientation": plan.recipe.orientation,
        **{key: value for key, value in fields.items() if key not in ("method", "preset", "orientation")},
        "inputs": {model: dict(files) for model, files in hashes.items()},
    }
    readable = yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True)
    is_plain = all(printable(line) == line for line in readable.split("\n"))
    return readable if is_plain else yaml.safe_dump(resolved, sort_keys=False)


def public_names(sources: Sequence[Source]) -> list[str]:
    """Names without a local path; models of the same name are told apart by their parent folder's."""
    names = [source.public_name for source in sources]
    return [
        f"{source.path.resolve().parent.name}/{name}" if names.count(name) > 1 and not source.hub_id else name
        for source, name in zip(sources, names, strict=True)
    ]


def model_card(plan: Plan, sources: Sources, recipe: str, hashes: Hashes) -> str:
    """README.md: front matter for the hub, then what was merged, how, and how to use it."""
    is_adapter = plan.recipe.save_as == "adapter"
    models = [sources.base] if is_adapter else [sources.base, *sources.experts]
    hub_models = [source.hub_id for source in models if source.hub_id]
    front: dict[str, Any] = {}
    if hub_models:
        front |= {"base_model": hub_models, "base_model_relation": "adapter" if is_adapter else "merge"}
    front |= {"library_name": "peft" if is_adapter else "transformers", "tags": ["merge", "acemerge"]}
    if plan.base.folder and (named := licence(plan.base.folder)):
        front["license"] = named
    files = "\n".join(
        f"| {_text(model)} | {_code(file)} | `{told}` |" for model, own in hashes.items() for file, told in own.items()
    )
    experts = "\n".join(f"- {_text(source.public_name)}" for source in sources.experts)
    counts = ", ".join(f"{plan.count(action)} {action}" for action in ACTIONS)
    shown = recipe.split("\ninputs:")[0].strip()  # of stages, the inputs stay: they are indented
    tied = f", {len(plan.omitted)} tied and stored once" if plan.omitted else ""
    fence = "`" * max(3, 1 + _longest_run("`", shown))
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

{_heading(plan)}

Base: {_text(sources.base.public_name)}. Experts:

{experts}

Tensors: {counts}{tied}. Of all weights: {shares_told(plan.weights)}. `acemerge_manifest.json` says which, and why.
{_tokenizer_section(plan)}{_adapter_section(plan)}{_per_task_section(plan)}{_heads_section(plan)}
## Recipe

{fence}yaml
{shown}
{fence}

## Inputs

| model | file | hash |
|---|---|---|
{files}
"""


_MARKS_OF_MARKDOWN = re.compile(r"([`*\[\]<>|&!#~]|(?<![^\W_])_|_(?![^\W_])|\\(?![-+.)]))")
"""Underscores only where they are not inside a word."""


def _text(name: str) -> str:
    """What somebody called a folder, as plain text of Markdown: no HTML, no link, no picture."""
    one_line = printable(name.replace("\n", " ")).strip()
    return _MARKS_OF_MARKDOWN.sub(r"\\\1", re.sub(r"^(\d*)([-+.)])", r"\1\\\2", one_line))


def _code(name: str) -> str:
    """The same of a file, in a cell of a table."""
    fence = "`" * (1 + _longest_run("`", name))
    room = " " if name.startswith("`") or name.endswith("`") else ""
    return fence + room + printable(name.replace("\n", " ")).replace("|", "\\|") + room + fence


def _longest_run(letter: str, text: str) -> int:
    return max((len(run) for run in re.findall(f"{letter}+", text)), default=0)


def _heading(plan: Plan) -> str:
    if plan.is_extraction:
        [expert] = plan.experts
        made = (
            f"The change from {_text(plan.base.name)} to its fine-tune {_text(expert.name)} as low-rank factors, extracted with"
        )
        return f"# {_text(expert.name)} as an adapter of {_text(plan.base.name)}\n\n{made}\nacemerge {__version__}."
    return f"""# {_text(plan.base.name)} merged by {plan.method.title}

{_made(plan)} {len(plan.experts)} fine-tuned ones, from {_used(plan)}, with
acemerge {__version__} and the method `{plan.method.name}` ({plan.method.paper})."""


def _used(plan: Plan) -> str:
    return f"their weights and data of their tasks ({_text(plan.data.about)}; no labels)" if plan.data else "their weights alone"


def _made(plan: Plan) -> str:
    if plan.recipe.save_as == "adapter":
        return "One adapter made from"
    return "One model per task, not one merged model, made from" if plan.per_task_methods else "One model made from"


def _tokenizer_section(plan: Plan) -> str:
    """Whose tokens it has, where models differ in theirs."""
    if plan.vocabulary is None:
        return ""
    whose = {"base": "the base's", "union": "a union of all models'"}.get(
        plan.vocabulary.tokenizer, f"`{plan.vocabulary.owner.name}`'s"
    )
    return f"\nTokenizer: {whose}, {len(plan.vocabulary.ids)} tokens. Embeddings and output layers were lined up by token.\n"


def _adapter_section(plan: Plan) -> str:
    if plan.recipe.save_as != "adapter":
        return ""
    whole = f"of the rank that the merge has, so nothing is lost but by rounding to {plan.recipe.float_dtype or 'float32'}"
    rank = _rank_asked_for(plan) or whole
    return f"""
## An adapter

This is a PEFT LoRA adapter {rank}. It changes the base and needs it:

```python
from peft import PeftModel

model = PeftModel.from_pretrained(base_model, "this-folder")
```
"""


def _rank_asked_for(plan: Plan) -> str:
    most = f"of rank {plan.recipe.rank} at most" if plan.recipe.rank else ""
    kept = f"that keeps {plan.recipe.energy:.0%} of each matrix' change" if plan.recipe.energy else ""
    return ", ".join(filter(None, (most, kept)))


def _per_task_section(plan: Plan) -> str:
    if not plan.per_task_methods:
        return ""
    methods = " and ".join(f"`{name}`" for name in plan.per_task_methods)
    names = ", ".join(f"`{expert.name}`" for expert in plan.experts)
    example = plan.experts[0].name
    return f"""
## Not one merged model

{methods} makes **one model per task**. The weights at the top of this folder are only what the tasks
share, and are not any task's model; `tasks/` holds each task's own small parts, and `shared/` what these
parts refer to. You must know which task an input belongs to. Do not compare the results with those of
methods that make one merged model.

The tasks: {names}. The model for one of them, as a folder of its own:

```sh
acemerge task this-folder {example} -o OUT
```

or in Python: `acemerge.load_expert_head("this-folder", "{example}")`.
"""


def _heads_section(plan: Plan) -> str:
    if not plan.heads:
        return ""
    names = ", ".join(f"`{plan.experts[head.expert].name}`" for head in plan.heads)
    if plan.per_task_methods:
        return f"\nEach task's model gets its expert's own head, from `heads/`: {names}.\n"
    example = plan.experts[plan.heads[0].expert].name
    if plan.recipe.save_as == "adapter":
        command = f"acemerge task this-folder {example} -o OUT"
        return f"\nThe experts' own heads are in `heads/`: {names}. An adapter with one of them: `{command}`.\n"
    return f"""
## One task at a time

The experts' own heads are in `heads/`: {names}. A model for one of these tasks:

```python
import acemerge

model = acemerge.load_expert_head("this-folder", "{example}")
```

or, as a folder of its own: `acemerge task this-folder {example} -o OUT`.
"""
