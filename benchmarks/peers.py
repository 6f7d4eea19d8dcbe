"""The same small Llama checkpoints merged by acemerge and by other tools, compared number by number.

    python benchmarks/peers.py --mergekit ENV/bin/mergekit-yaml --fusion-bench ENV/bin/python

Each peer is used if the path of its command (mergekit 0.1.5) or of the Python that has it (FusionBench 0.2.33) is given; install
them in environments of their own. The figure is |W_ours - W_theirs| / |W_theirs - W0|, the worst tensor's and the whole model's.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

import acemerge

EXPERTS = ("expert-0", "expert-1", "expert-2")


@dataclass(frozen=True)
class Case:
    """One definition as each side names it."""

    peer: str
    theirs: Mapping[str, Any]
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    experts: tuple[str, ...] = EXPERTS


def mergekit(theirs: str, method: str, ours: Mapping[str, Any], experts: tuple[str, ...] = EXPERTS, **settings: Any) -> Case:
    """A mergekit recipe beside our method; `per_model` and `globally` are its two kinds of parameters."""
    return Case("mergekit", {"method": theirs, **settings}, method, ours, experts)


CASES = (
    mergekit("linear", "linear", per_model={"weight": [0.5, 0.3, 0.2]}, ours={"weights": [0.5, 0.3, 0.2]}),
    mergekit("task_arithmetic", "task_arithmetic", per_model={"weight": [0.3] * 3}, ours={"alpha": 0.3}),
    mergekit(
        "ties", "ties", per_model={"weight": [1.0] * 3, "density": [0.2] * 3}, ours={"keep": 0.2, "scope": "tensor"}
    ),
    mergekit("ties", "ties", per_model={"weight": [1.0] * 3, "density": [1.0] * 3}, ours={"keep": 1.0}),
    mergekit(
        "dare_linear", "dare_task_arithmetic", per_model={"weight": [0.3] * 3, "density": [1.0] * 3},
        ours={"drop": 0.0, "alpha": 0.3},
    ),
    mergekit(
        "dare_ties", "dare_ties", per_model={"weight": [1.0] * 3, "density": [1.0] * 3},
        ours={"drop": 0.0, "keep": 1.0, "merge": "sum"},
    ),
    mergekit(
        "breadcrumbs", "breadcrumbs", per_model={"weight": [0.4] * 3, "density": [0.2] * 3, "gamma": [0.1] * 3},
        ours={"keep": 0.2, "outliers": 0.1, "scope": "tensor", "alpha": 0.4},
    ),
    mergekit("slerp", "slerp", experts=EXPERTS[:2], globally={"t": 0.3}, ours={"t": 0.3}),
    mergekit(
        "breadcrumbs_ties", "breadcrumbs_ties", per_model={"weight": [0.5, 0.3, 0.2], "density": [0.8] * 3, "gamma": [0.1] * 3},
        ours={"weights": [0.5, 0.3, 0.2], "keep": 0.8, "outliers": 0.1},
    ),
    mergekit(
        "della_linear", "della_linear", per_model={"weight": [0.5, 0.3, 0.2], "density": [1.0] * 3},
        ours={"weights": [0.5, 0.3, 0.2], "drop": 0.0, "window": 0.0},
    ),
    mergekit("model_stock", "model_stock", globally={"filter_wise": False}, ours={}),
    mergekit("model_stock", "model_stock", globally={"filter_wise": True}, ours={"scope": "row"}),
    mergekit("sce", "sce", globally={"select_topk": 0.25}, ours={"select": 0.25}),
    mergekit(
        "nuslerp", "nuslerp", experts=EXPERTS[:2], per_model={"weight": [0.7, 0.3]}, globally={"nuslerp_flatten": True},
        ours={"weights": [0.7, 0.3]},
    ),
    mergekit(
        "nuslerp", "nuslerp", experts=EXPERTS[:2], per_model={"weight": [0.7, 0.3]}, globally={"nuslerp_flatten": False},
        ours={"weights": [0.7, 0.3], "scope": "row"},
    ),
    mergekit("multislerp", "multislerp", per_model={"weight": [0.5, 0.3, 0.2]}, ours={"weights": [0.5, 0.3, 0.2]}),
    mergekit("karcher", "karcher", globally={"max_iter": 10}, ours={"iterations": 10}),
    mergekit("nearswap", "nearswap", experts=EXPERTS[:1], globally={"t": 0.001}, ours={"t": 0.001}),
    mergekit("arcee_fusion", "arcee_fusion", experts=EXPERTS[2:], ours={}),
    mergekit("ram", "ram", globally={"epsilon": 0.002}, ours={"epsilon": 0.002}),
    mergekit(
        "ramplus_tl", "ram_plus", globally={"epsilon": 0.002, "r": 0.1, "alpha": 0.2},
        ours={"epsilon": 0.002, "strength": 0.1, "limit": 0.2, "scope": "tensor"},
    ),
    Case("fusion_bench", {"function": "tsv_m"}, "tsv_m"),
    Case("fusion_bench", {"function": "iso_c"}, "iso_c"),
    Case("fusion_bench", {"function": "iso_cts", "fraction": 0.8}, "iso_cts", {"common": 0.8}),
    Case("fusion_bench", {"function": "wudi", "steps": 300}, "wudi"),
)  # fmt: skip


def make_models(folder: Path) -> None:
    """A base and three fine-tunes of unequal strength."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=64, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder / "base")
    base = {name: weight.clone() for name, weight in model.state_dict().items()}
    for index, name in enumerate(EXPERTS):
        changed = {n: w + torch.randn_like(w) * 0.002 * 1.5**index for n, w in base.items()}
        model.load_state_dict(changed)
        model.save_pretrained(folder / name)


def run_mergekit(command: Path, case: Case, folder: Path) -> dict[str, Tensor]:
    """Their result, by their own command."""
    per_model = case.theirs.get("per_model", {})
    models = [
        {"model": str(folder / name), "parameters": {key: values[i] for key, values in per_model.items()}}
        for i, name in enumerate(case.experts)
    ]
    two_models = case.theirs["method"] == "slerp"
    recipe: dict[str, Any] = {"merge_method": case.theirs["method"], "models": models, "dtype": "float32"}
    if case.theirs["method"] not in ("linear", "karcher"):
        recipe["base_model"] = str(folder / (case.experts[0] if two_models else "base"))
    if "globally" in case.theirs:
        recipe["parameters"] = case.theirs["globally"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    output = folder / "theirs"
    arguments = [command, folder / "recipe.yaml", output, "--no-copy-tokenizer"]
    subprocess.run([str(a) for a in arguments], check=True, capture_output=True, text=True)
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
    for name in case.experts:
        expert = load_folder(folder / name)
        paths.append(folder / f"{name}.vectors.safetensors")
        save_file({n: expert[n] - base[n] for n in merged}, paths[-1])
    output = folder / "theirs.safetensors"
    argument = str(case.theirs.get("fraction", case.theirs.get("steps", "")))
    command = [python, "-c", _FUSION_BENCH, case.theirs["function"], argument, output, *paths]
    subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True)
    return {name: base[name] + delta for name, delta in load_file(output).items()}


def load_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def compare(case: Case, theirs: Mapping[str, Tensor], folder: Path) -> tuple[float, float, int]:
    """Worst tensor's and whole model's relative difference, and how many tensors were compared."""
    experts = [folder / name for name in case.experts]
    output = folder / f"ours-{case.method}"
    acemerge.merge(folder / "base", experts, output, method=case.method, overwrite=True, **case.options)
    ours, base = load_folder(output), load_folder(folder / "base")
    differences = {n: (ours[n] - w).norm().item() for n, w in theirs.items()}
    changes = {n: (w - base[n]).norm().item() for n, w in theirs.items()}
    worst = max(differences[n] / changes[n] for n in theirs if changes[n] > 0)
    whole = torch.tensor(list(differences.values())).norm() / torch.tensor(list(changes.values())).norm()
    return worst, float(whole), len(theirs)


def rows(arguments: argparse.Namespace, folder: Path) -> Iterator[str]:
    """A line of the table per case whose peer is there."""
    for case in CASES:
        tool = arguments.mergekit if case.peer == "mergekit" else arguments.fusion_bench
        if tool is None:
            continue
        run = run_mergekit if case.peer == "mergekit" else run_fusion_bench
        with tempfile.TemporaryDirectory() as scratch:
            for name in ("base", *EXPERTS):
                (Path(scratch) / name).symlink_to(folder / name)
            worst, whole, count = compare(case, run(tool, case, Path(scratch)), Path(scratch))
        options = ", ".join(f"{key}={value}" for key, value in case.options.items()) or "defaults"
        settings = {k: v for k, v in case.theirs.items() if k in ("per_model", "globally")}
        theirs = ", ".join(
            f"{k}={v[0] if isinstance(v, list) and len(set(v)) == 1 else v}"
            for kind in settings.values()
            for k, v in kind.items()
        )
        name = case.theirs.get("method", case.theirs.get("function"))
        yield f"| {case.peer} `{name}` {theirs} | `{case.method}` {options} | {count} | {worst:.1e} | {whole:.1e} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", type=Path, help="path of mergekit-yaml")
    parser.add_argument("--fusion-bench", type=Path, help="path of a Python that has fusion_bench")
    arguments = parser.parse_args()
    print("| theirs | ours | tensors | worst tensor | whole model |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        for row in rows(arguments, Path(folder)):
            print(row, flush=True)


if __name__ == "__main__":
    main()
