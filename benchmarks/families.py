"""Every model_type of the installed transformers: is its smallest model planned, merged and loaded again?

    python benchmarks/families.py                     # all of them, about ten minutes; writes the table into docs/families.md
    python benchmarks/families.py qwen2_vl gpt_oss    # these only, each tensor's fate printed

A base and two experts of random weights are saved by transformers, merged by the default method and loaded. It works if the
output has the base's tensors and transformers misses none of them, finds none that it does not know, and none of another shape.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_configs import VOCABULARY
from tiny_models import Kind, kinds, time_limit, tiny_model

import acemerge
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.execute.pipeline import MergeResult

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
BEGIN, END = "<!-- table of benchmarks/families.py -->", "<!-- end of the table -->"
SECONDS = 60


@dataclass(frozen=True)
class Tried:
    """What came of one model_type."""

    model_type: str
    kind: str
    preset: str = ""
    problem: str = ""
    """Why it could not be made or did not work."""
    made: bool = True
    vocabulary_merged: tuple[str, ...] = ()
    """Tensors with a row or column for each token that a method for matrices merges."""


def main() -> None:
    """Try them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*")
    given = parser.parse_args().model_types
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    known = kinds()
    tried = []
    for model_type in given or known:
        found = attempt(model_type, known[model_type], show=bool(given))
        tried.append(found)
        print(
            model_type, found.kind, found.preset, found.problem, *found.vocabulary_merged, sep="\t", file=sys.stderr, flush=True
        )
    if not given:
        write_table(tried)


def attempt(model_type: str, kind: Kind, *, show: bool = False) -> Tried:
    """Make, merge and load one."""
    try:
        with time_limit(SECONDS):
            model = tiny_model(model_type, kind)
    except Exception as error:
        return Tried(model_type, kind.about, problem=_line(error), made=False)
    preset = ""
    try:
        with tempfile.TemporaryDirectory() as folder, time_limit(SECONDS):
            result = _merged(model, Path(folder))
            preset = result.plan.family.name
            if show:
                _show(result)
            _check_loads(type(model), result, Path(folder))
            return Tried(model_type, kind.about, preset, vocabulary_merged=tuple(_vocabulary_merged(result)))
    except Exception as error:
        return Tried(model_type, kind.about, preset, _line(error))


def _merged(model: transformers.PreTrainedModel, folder: Path) -> MergeResult:
    """A base and two experts, merged."""
    model.save_pretrained(folder / "base")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(before[name] + 0.02 * torch.randn(weight.shape, generator=generator))
        model.save_pretrained(folder / f"expert-{seed}")
    experts = [folder / f"expert-{seed}" for seed in (1, 2)]
    # The first weights of many models are zeros or ones, beside which any change is large.
    return acemerge.merge(folder / "base", experts, folder / "out", quiet=True, force=True)


def _check_loads(model_class: type[transformers.PreTrainedModel], result: MergeResult, folder: Path) -> None:
    base, out = (open_checkpoint(folder / name, name).tensors for name in ("base", "out"))
    stored = {name: header.shape for name, header in base.items() if name not in result.plan.omitted}
    if stored != {name: header.shape for name, header in out.items()}:
        raise ValueError(f"the output lacks or adds tensors: {sorted(stored.keys() ^ out.keys())[:3]}")
    try:
        told_of_base = _told_of_loading(model_class, folder / "base")
    except Exception as error:  # whatever it is, it has nothing to do with the merge
        raise ValueError(f"transformers does not load what it saved: {error}") from None
    told = _told_of_loading(model_class, folder / "out")
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if told[what] != told_of_base[what]:
            raise ValueError(f"loading: {what} {sorted(told[what])[:3]}")


def _told_of_loading(model_class: type[transformers.PreTrainedModel], folder: Path) -> dict[str, Any]:
    """As all classes load: some have a way of their own that looks for more than weights, and cannot be asked what it found."""
    _, told = transformers.PreTrainedModel.from_pretrained.__func__(model_class, folder, output_loading_info=True)
    return dict(told)


def _vocabulary_merged(result: MergeResult) -> Iterable[str]:
    return (tensor.name for tensor in result.plan.tensors if tensor.action == "merged" and VOCABULARY in tensor.header.shape)


def _show(result: MergeResult) -> None:
    for tensor in result.plan.to_json()["tensors"]:
        told = [tensor["action"], tensor["reason"], tensor.get("orientation", "")]
        print(f"{tensor['name']:70} {tensor['shape']!s:16}", *filter(None, told))
    print(*result.plan.notes, sep="\n")


def _line(error: Exception) -> str:
    """The last line of what it says, which is the cause; without what breaks a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = next((line for line in reversed(lines) if "Error" in line), lines[0])
    return f"{type(error).__name__}: {text}".replace("|", "/")[:110]


# --- the table ---------------------------------------------------------------------------------------------------------


def write_table(tried: Sequence[Tried]) -> None:
    """Between the markers of the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(tried)}\n{END}{after}", encoding="utf-8")


def table(tried: Sequence[Tried]) -> str:
    """Model types by kind and preset; those that do not work with their reasons."""
    works = [one for one in tried if not one.problem]
    unmade = [one for one in tried if not one.made]
    failed = [one for one in tried if one.problem and one.made]
    generic = sum(one.preset == "generic" for one in works)
    lines = [
        f"Of {len(tried)} model types of transformers {transformers.__version__}, {len(works) - generic} work with a preset of "
        f"their own, {generic} with the generic one, {len(failed)} do not, and {len(unmade)} could not be made here.",
        "",
        "| kind | preset | model types |",
        "|---|---|---|",
    ]
    for kind, preset in dict.fromkeys((one.kind, one.preset) for one in sorted(works, key=lambda one: (one.kind, one.preset))):
        own = sorted(one.model_type for one in works if (one.kind, one.preset) == (kind, preset))
        lines.append(f"| {kind} | `{preset}` | {', '.join(own)} |")
    for title, ones in (("does not work", failed), ("could not be made", unmade)):
        if ones:
            lines += ["", f"| {title} | why |", "|---|---|", *(f"| {one.model_type} | {one.problem} |" for one in ones)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
