"""The same faults for acemerge and for mergekit: what each does, as a table.

    python benchmarks/faults.py --mergekit ENV/bin/mergekit-yaml

Every fault is made in a fresh copy of small Llama checkpoints (a base and two experts); both tools then merge them by task
arithmetic, by their own command lines, with 8 GB of address space so that no fault takes the machine with it. Reported are the
exit code, what is in the output's place afterwards, and the last line of the message. For faults in the middle of a merge the
models have 220 MB each, and the fault comes when the first output file appears. Needs Linux; the full disk needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

EXPERTS = ("expert-0", "expert-1")
WEIGHTS = "model.safetensors"
MEMORY_LIMIT = 8 * 2**30


# --- the two tools -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tool:
    """How a tool is called, and how its recipe says the same thing."""

    name: str
    command: list[str]

    def write_recipe(self, folder: Path, option: str = "") -> Path:
        """Task arithmetic of the two experts; `option` is a further one, misspelt."""
        if self.name == "acemerge":
            options = {"alpha": 0.3, **({option: 0.2} if option else {})}
            recipe: dict[str, Any] = {"base": "base", "experts": list(EXPERTS), "method": "task_arithmetic", "options": options}
        else:
            parameters = {"weight": 0.3, **({option: 0.2} if option else {})}
            models = [{"model": str(folder / name), "parameters": parameters} for name in EXPERTS]
            base = str(folder / "base")
            recipe = {"merge_method": "task_arithmetic", "base_model": base, "models": models, "dtype": "float32"}
        path = folder / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return path

    def arguments(self, folder: Path, megabytes: float) -> list[str]:
        """The command line; mergekit counts a shard in parameters."""
        recipe, output = folder / f"{self.name}.yaml", self.output(folder)
        if self.name == "acemerge":
            return [*self.command, "merge", str(recipe), "-o", str(output), "--shard-size", f"{megabytes}MB", "-q"]
        return [*self.command, str(recipe), str(output), "--no-copy-tokenizer", "--out-shard-size", str(int(megabytes * 250_000))]

    def output(self, folder: Path) -> Path:
        """Where the result goes."""
        return folder / "disk" / self.name


# --- faults ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """How it is made, before or during the merge; what the merge is then called with."""

    title: str
    prepare: Callable[[Path, Tool], object] = lambda folder, tool: None  # noqa: ARG005
    during: Callable[[Path, Tool, subprocess.Popen[str]], object] | None = None
    shard_megabytes: float = 20
    disk: str | None = None


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change an expert's tensors."""
    path = folder / EXPERTS[1] / WEIGHTS
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def put_nan(tensors: dict[str, torch.Tensor]) -> None:
    """Three of them."""
    tensors["model.layers.0.mlp.up_proj.weight"].view(-1)[:3] = float("nan")


def cut(path: Path) -> None:
    """Half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def name_twice(folder: Path) -> None:
    """A header with one name for two descriptions."""
    path = folder / EXPERTS[1] / WEIGHTS
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    first = json.dumps({"model.norm.weight": header["model.norm.weight"]})[1:-1]
    encoded = (json.dumps(header)[:-1] + ", " + first + "}").encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :])


def point_elsewhere(folder: Path) -> None:
    """An index whose shards are in another model's folder."""
    names = load_file(folder / EXPERTS[1] / WEIGHTS)
    (folder / EXPERTS[1] / WEIGHTS).unlink()
    weight_map = dict.fromkeys(names, f"../{EXPERTS[0]}/{WEIGHTS}")
    (folder / EXPERTS[1] / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))


class Trap:
    """Unpickling this creates a file: code that must never run."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.marker,)


def as_pickle(folder: Path, extra: Mapping[str, object]) -> Path:
    """An expert as pytorch_model.bin, with something besides."""
    tensors = load_file(folder / EXPERTS[1] / WEIGHTS)
    (folder / EXPERTS[1] / WEIGHTS).unlink()
    torch.save({**extra, **tensors}, folder / EXPERTS[1] / "pytorch_model.bin")
    return folder / EXPERTS[1] / "pytorch_model.bin"


def make_bomb(folder: Path) -> None:
    """A pickle that unpacks to 2 GB."""
    path = as_pickle(folder, {})
    plain = path.with_suffix(".plain")
    path.rename(plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new:
        for entry in old.infolist():
            with new.open(entry.filename, "w", force_zip64=True) as file:
                file.write(old.read(entry))
                for _ in range(20 if entry.filename.endswith("data.pkl") else 0):
                    file.write(bytes(100_000_000))
    plain.unlink()


def link_out(folder: Path) -> None:
    """The base's config is somewhere else."""
    shutil.move(folder / "base/config.json", folder / "elsewhere.json")
    (folder / "base/config.json").symlink_to(folder / "elsewhere.json")


def laugh(folder: Path, tool: Tool) -> None:
    """A recipe of ten lines that stands for a thousand million values."""
    lines = ["a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    field = "base" if tool.name == "acemerge" else "merge_method"
    path = folder / f"{tool.name}.yaml"
    path.write_text("\n".join([*lines, path.read_text(), f"{field}: *i"]))


def older_output(folder: Path, tool: Tool) -> None:
    """An earlier merge in more shards is where the output goes."""
    subprocess.run(tool.arguments(folder, 0.2), check=True, capture_output=True)


def when_the_first_file_appears(action: Callable[[Path, Tool, subprocess.Popen[str]], object]) -> Any:
    """Wait for the first shard in the output, or in its staging folder."""

    def during(folder: Path, tool: Tool, process: subprocess.Popen[str]) -> object:
        while process.poll() is None and not list((folder / "disk").rglob("model*.safetensors")):
            time.sleep(0.002)
        time.sleep(0.05)
        return action(folder, tool, process)

    return during


def send(number: signal.Signals) -> Any:
    """A signal in the middle."""
    return when_the_first_file_appears(lambda folder, tool, process: process.send_signal(number))  # noqa: ARG005


def truncate_input(folder: Path, tool: Tool, process: subprocess.Popen[str]) -> None:  # noqa: ARG001
    """Somebody writes an expert anew."""
    cut(folder / EXPERTS[1] / WEIGHTS)


def start_second(folder: Path, tool: Tool, process: subprocess.Popen[str]) -> str:  # noqa: ARG001
    """The same merge once more, into the same output, started while the first runs."""
    second = subprocess.run(tool.arguments(folder, 20), capture_output=True, text=True, check=False, env=environment())
    return f"the second: exit {second.returncode} `{last_line(second.stderr)}`; the first: "


SMALL = (
    Fault("none", lambda folder, tool: None),  # noqa: ARG005
    Fault("NaN in an expert", lambda folder, tool: edit(folder, put_nan)),  # noqa: ARG005
    Fault("an expert lacks a tensor", lambda folder, tool: edit(folder, lambda t: t.pop("model.norm.weight"))),  # noqa: ARG005
    Fault(
        "an expert's tensor has another shape",
        lambda folder, tool: edit(folder, lambda t: t.update({"model.norm.weight": torch.ones(50)})),  # noqa: ARG005
    ),
    Fault("a misspelt option (`wieght`)", lambda folder, tool: tool.write_recipe(folder, "wieght")),
    Fault("an older output with more shards in the output's place", older_output),
    Fault("an expert's file cut in half", lambda folder, tool: cut(folder / EXPERTS[1] / WEIGHTS)),  # noqa: ARG005
    Fault("a header that names a tensor twice", lambda folder, tool: name_twice(folder)),  # noqa: ARG005
    Fault("an index with shards in `../`", lambda folder, tool: point_elsewhere(folder)),  # noqa: ARG005
    Fault("code in a `.bin`", lambda folder, tool: as_pickle(folder, {"x": Trap(folder / "ran")})),  # noqa: ARG005
    Fault("a zip bomb as `.bin` (2 GB)", lambda folder, tool: make_bomb(folder)),  # noqa: ARG005
    Fault("a recipe with a billion laughs", laugh),
    Fault(
        "config.json a link out of the folder",
        lambda folder, tool: link_out(folder),  # noqa: ARG005
    ),
)
LARGE = (
    Fault("SIGKILL in the middle", during=send(signal.SIGKILL)),
    Fault("SIGINT in the middle", during=send(signal.SIGINT)),
    Fault("an input cut in half in the middle", during=when_the_first_file_appears(truncate_input)),
    Fault("a second run into the same output", during=when_the_first_file_appears(start_second)),
    Fault("a disk that fills up (100 MB)", disk="100M"),
)


# --- what comes of it --------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """One thread, no network."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def limited(arguments: list[str]) -> list[str]:
    """The same command with a bound on its memory."""
    return ["prlimit", f"--as={MEMORY_LIMIT}", *arguments]


def last_line(text: str) -> str:
    """The end of a message, without paths of this machine."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    line = lines[-1] if lines else "no message"
    return line.replace(tempfile.gettempdir(), "...").replace("|", "/")[:140]


def run(fault: Fault, tool: Tool, models: Path, limit: int) -> str:
    """Make the fault, merge, and say what happened, in one table cell."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "models"
        shutil.copytree(models, folder)
        (folder / "disk").mkdir()
        tool.write_recipe(folder)
        arguments = tool.arguments(folder, fault.shard_megabytes)
        try:
            if fault.disk:
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={fault.disk}", "tmpfs", str(folder / "disk")], check=True)
                arguments += ["--force"] if tool.name == "acemerge" else []
            fault.prepare(folder, tool)
            return merge_and_describe(fault, tool, folder, arguments, limit)
        finally:
            if fault.disk:
                subprocess.run(["umount", str(folder / "disk")], check=False)


def merge_and_describe(fault: Fault, tool: Tool, folder: Path, arguments: list[str], limit: int) -> str:
    """The merge itself."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(limited(arguments), stdout=subprocess.DEVNULL, stderr=errors, text=True, env=environment()) as process,
    ):
        note = (fault.during(folder, tool, process) if fault.during else None) or ""
        try:
            code = str(process.wait(timeout=limit))
        except subprocess.TimeoutExpired:
            process.kill()
            code = f"still running after {limit} s"
        errors.seek(0)
        message = errors.read()
    trace = ", traceback" if "Traceback" in message else ""
    ran = ", CODE RAN" if (folder / "ran").exists() else ""
    said = f"`{last_line(message)}`" if code != "0" else ""
    return f"{note}exit {code}{trace}{ran}; {describe(tool.output(folder), folder)}. {said}"


def describe(output: Path, folder: Path) -> str:
    """What a user finds in the output's place."""
    if not output.exists():
        left = sorted(path.name for path in (folder / "disk").iterdir())
        return f"no output{f' ({left[0]} for the next run)' if left else ''}"
    expected = load_file(folder / "base" / WEIGHTS).keys()
    shards = sorted(output.glob("*.safetensors"))
    index = output / f"{WEIGHTS}.index.json"
    if (output / WEIGHTS).exists():
        named = [output / WEIGHTS]
    elif index.exists():
        named = sorted({output / shard for shard in json.loads(index.read_text())["weight_map"].values()})
    else:
        return f"half an output: {len(shards)} shards, no index"
    try:
        tensors = {name: tensor for path in named for name, tensor in load_file(path).items()}
    except Exception as error:
        return f"an output that does not load ({type(error).__name__})"
    bad = sum(not tensor.isfinite().all() for tensor in tensors.values())
    stale = len(set(shards) - set(named))
    notes = [f"{len(tensors)} of {len(expected)} tensors"]
    notes += [f"{bad} with NaN"] if bad else []
    notes += [f"{stale} stale shards beside"] if stale else []
    return f"an output with {', '.join(notes)}"


def make_models(folder: Path, width: int, layers: int, vocabulary: int) -> None:
    """A base and experts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder / "base", max_shard_size="10GB")
    base = {name: weight.clone() for name, weight in model.state_dict().items()}
    for name in EXPERTS:
        model.load_state_dict({n: w + torch.randn_like(w) * 0.002 for n, w in base.items()})
        model.save_pretrained(folder / name, max_shard_size="10GB")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", type=Path, help="path of mergekit-yaml")
    parser.add_argument("--limit", type=int, default=180, help="seconds after which a merge counts as endless")
    parser.add_argument("--only", default="", help="part of a fault's name")
    arguments = parser.parse_args()
    tools = [Tool("acemerge", [sys.executable, "-m", "acemerge"])]
    tools += [Tool("mergekit", [str(arguments.mergekit)])] if arguments.mergekit else []
    print(f"| fault | {' | '.join(tool.name for tool in tools)} |\n|---|{'---|' * len(tools)}")
    for faults, shape in ((SMALL, (96, 2, 300)), (LARGE, (768, 6, 8000))):
        chosen = [fault for fault in faults if arguments.only in fault.title]
        with tempfile.TemporaryDirectory() as folder:
            if chosen:
                make_models(Path(folder), *shape)
            for fault in chosen:
                cells = [run(fault, tool, Path(folder), arguments.limit) for tool in tools]
                print(f"| {fault.title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
