"""A merge whose inputs do not fit in memory: 8 experts of 4 GB and their base, by ACE, to the end.

    python benchmarks/large.py --folder /somewhere/with/42GB         # or: make large
    python benchmarks/large.py --method ties --layers 4

The models are made by streaming and go away afterwards. Reported are the time, the bytes read and written, and the peak of the
process's anonymous memory against the memory of the machine and the size of the inputs. The page cache starts without the
models, as far as the system drops them on request. The output is verified.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from footprint import run_command
from llamas import Llama, add_shapes, shapes_of, write_models
from record import FOLDER, machine, print_table, save

EIGHT_OF_FOUR_GB = Llama(layers=290, hidden=768, inner=2048, vocabulary=32_000, experts=8)


def forget(folder: Path) -> None:
    """Ask the system to drop the models from the page cache."""
    for path in folder.glob("*/model.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Make, merge, verify, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="ace")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, help="where to put the models (a temporary folder by default)")
    parser.add_argument("--json", type=Path, default=FOLDER / "large.json")
    add_shapes(parser, EIGHT_OF_FOUR_GB)
    given = parser.parse_args()
    llama, where = shapes_of(given), machine()
    needed, free = 2 * llama.elements * (llama.experts + 2), shutil.disk_usage(given.folder or tempfile.gettempdir()).free
    if needed * 1.02 > free:
        raise SystemExit(f"the models need {needed / 1e9:.0f} GB, the disk has {free / 1e9:.0f} GB free; give another --folder")
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        folder = Path(temporary)
        write_models(llama, folder)
        forget(folder)
        models = [folder / name for name in ("base", *llama.expert_names)]
        merge = [sys.executable, "-m", "acemerge", "merge", *models, "-o", folder / "merged", "-m", given.method, "-q"]
        run = run_command([*merge, "--threads", str(given.threads)], log=folder / "log")
        output = (folder / "merged" / "model.safetensors").stat().st_size
        run_command([sys.executable, "-m", "acemerge", "verify", folder / "merged"], log=folder / "log")
    inputs = 2 * llama.elements * (llama.experts + 1)
    print_table(
        ["", f"{llama.experts} experts by {given.method}"],
        [
            ["inputs", f"{inputs / 1e9:.1f} GB"], ["memory of the machine", f"{where['memory_gb']} GB"],
            ["peak anonymous memory", f"{run.peak / 1e9:.2f} GB"], ["written", f"{output / 1e9:.1f} GB"],
            ["time", f"{run.seconds / 60:.1f} minutes"],
        ],
    )  # fmt: skip
    result = {"seconds": run.seconds, "cpu_seconds": run.cpu_seconds, "peak_bytes": run.peak}
    settings = {"method": given.method, "threads": given.threads, "models": asdict(llama)}
    save(given.json, where, {**settings, "input_bytes": inputs, "output_bytes": output, **result})


if __name__ == "__main__":
    main()
