"""The same small Llama checkpoints merged by acemerge and by other tools, compared number by number.

    python benchmarks/peers.py --mergekit ENV/bin/mergekit-yaml --fusion-bench ENV/bin/python

Each peer is used if the path of its command (mergekit 0.1.5) or of the Python that has it (FusionBench 0.2.33) is given; install
them in environments of their own. The figure is |W_ours - W_theirs| / |W_theirs - W0|, the worst tensor's and the whole model's.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from peer_configs import CONFIGS
from peer_words import by_token, make_models_with_words
from safetensors.torch import load_file, save_file
from torch import Tensor

import acemerge
from acemerge.execute.pipeline import run_merge
from acemerge.recipe.arguments import recipe_from
from acemerge.recipe.run_options import RunOptions

EXPERTS = ("expert-0", "expert-1", "expert-2")


@dataclass(frozen=True)
class Case:
    """A function of FusionBench's and our method."""

    function: str
    argument: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)


CASES = (
    Case("tsv_m", "", "tsv_m"),
    Case("iso_c", "", "iso_c"),
    Case("iso_cts", "0.8", "iso_cts", {"common": 0.8}),
    Case("wudi", "300", "wudi"),
)


def make_models(folder: Path) -> None:
    """A base and three fine-tunes of unequal strength."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=96, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=64, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder / "base")
    base = {name: weight.clone() for name, weight in model.state_dict().items()}
    for index, name in enumerate(EXPERTS):
        changed = {n: w + torch.randn_like(w) * 0.002 * 1.5**index for n, w in base.items()}
        model.load_state_dict(changed)
        model.save_pretrained(folder / name)


def run_mergekit(command: Path, config: Path, output: Path) -> dict[str, Tensor]:
    """Their result, by their own command."""
    arguments = [str(command), config.name, str(output), "--no-copy-tokenizer", "--no-write-model-card"]
    subprocess.run(arguments, check=True, capture_output=True, text=True, cwd=config.parent)
    return load_folder(output)


def run_config(config: Path, output: Path) -> dict[str, Tensor]:
    """Ours, of the same file."""
    recipe, relative_to = recipe_from([str(config)], [], {})
    run_merge(recipe, output, RunOptions(quiet=True), relative_to=relative_to)
    return load_folder(output)


# Runs where FusionBench is installed: task vectors in, merged task vector out.
_FUSION_BENCH = """
import sys, typing, typing_extensions
typing.override = typing_extensions.override  # it asks for Python 3.12
import torch
from safetensors.torch import load_file, save_file
name, argument, output, *inputs = sys.argv[1:]
vectors = [load_file(path) for path in inputs]
if name == "tsv_m":
    from fusion_bench.method.task_singular_vector.utils.TSVM_utils import compute_and_sum_svd_mem_reduction
    merged = compute_and_sum_svd_mem_reduction(vectors, accelerator="cpu")
elif name == "iso_c":
    from fusion_bench.method.isotropic_merging.iso_utils import iso_c
    merged = iso_c(vectors, accelerator="cpu")
elif name == "iso_cts":
    from fusion_bench.method.isotropic_merging.iso_utils import iso_cts
    merged = iso_cts(vectors, float(argument), accelerator="cpu")
else:
    from fusion_bench.method.wudi.wudi import wudi_merging
    merged = wudi_merging(vectors, accelerator="cpu", iter_num=int(argument))
save_file({k: v.detach().contiguous() for k, v in merged.items()}, output)
"""


def run_fusion_bench(python: Path, case: Case, folder: Path) -> dict[str, Tensor]:
    """Their function on our task vectors of the matrices that our plan merges."""
    base = load_folder(folder / "base")
    merged = [n for n in base if base[n].dim() == 2 and "embed" not in n and "lm_head" not in n]
    paths = []
    for name in EXPERTS:
        expert = load_folder(folder / name)
        paths.append(folder / f"{name}.vectors.safetensors")
        save_file({n: expert[n] - base[n] for n in merged}, paths[-1])
    output = folder / "theirs.safetensors"
    command = [python, "-c", _FUSION_BENCH, case.function, case.argument, output, *paths]
    subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True)
    return {name: base[name] + delta for name, delta in load_file(output).items()}


def load_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> str:
    """How many tensors were compared, the worst one's and the whole model's relative difference.

    A layer that the base does not have is measured by its own length.
    """
    found = {n: float((ours[n].double() - w.double()).norm()) for n, w in theirs.items()}
    changes = {n: float((w.double() - base[n].double() if n in base else w.double()).norm()) for n, w in theirs.items()}
    worst = max(found[n] / changes[n] if changes[n] else found[n] for n in theirs)
    whole = math.hypot(*found.values()) / math.hypot(*changes.values())
    extra = sorted(ours.keys() - theirs.keys())
    return f"{len(theirs)} | {worst:.1e} | {whole:.1e} |" + (f" only ours: {', '.join(extra)}" if extra else "")


def mergekit_rows(command: Path, folder: Path, only: str) -> Iterator[str]:
    """A line of the table per configuration whose title matches."""
    for number, (title, text) in enumerate(CONFIGS.items()):
        if not fnmatch(title, only):
            continue
        config = folder / f"config-{number}.yaml"
        config.write_text(textwrap.dedent(text))
        theirs = run_mergekit(command, config, folder / f"theirs-{number}")
        ours = run_config(config, folder / f"ours-{number}")
        base = load_folder(folder / "base")
        if "words" in text:
            ours, theirs, base = by_token(folder / f"ours-{number}", folder / f"theirs-{number}", folder / "words")
        yield f"| {title} | {differences(ours, theirs, base)}"


def fusion_bench_rows(python: Path, folder: Path) -> Iterator[str]:
    """A line of the table per function."""
    base = load_folder(folder / "base")
    for case in CASES:
        theirs = run_fusion_bench(python, case, folder)
        output = folder / f"ours-{case.method}"
        acemerge.merge(folder / "base", [folder / name for name in EXPERTS], output, method=case.method, **case.options)
        merged = load_folder(output)
        yield f"| FusionBench `{case.function}` {case.argument} | {differences({n: merged[n] for n in theirs}, theirs, base)}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", type=Path, help="path of mergekit-yaml")
    parser.add_argument("--fusion-bench", type=Path, help="path of a Python that has fusion_bench")
    parser.add_argument("--only", default="*", help="mergekit's configurations whose title matches, such as '*tokens*'")
    arguments = parser.parse_args()
    print("| configuration | tensors | worst tensor | whole model |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        make_models_with_words(Path(folder))
        if arguments.mergekit:
            for row in mergekit_rows(arguments.mergekit, Path(folder), arguments.only):
                print(row, flush=True)
        if arguments.fusion_bench:
            for row in fusion_bench_rows(arguments.fusion_bench, Path(folder)):
                print(row, flush=True)


if __name__ == "__main__":
    main()
