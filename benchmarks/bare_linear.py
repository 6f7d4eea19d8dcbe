"""The least that a linear merge in bfloat16 by torch takes: no hashes, no checks, no plan, no manifest, no waiting for the disk.

    python benchmarks/bare_linear.py --mergekit ENV/bin/mergekit-yaml --repeats 5

The program below imports torch, reads the four experts, sums them in float32 and writes one file; its output cannot be trusted
after a crash and loads only because all models lie alike in their files. It takes turns with `acemerge merge` and mergekit, as in
end_to_end.py, and says how much faster than mergekit a merge by torch could be on the machine at all.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from end_to_end import CASES, acemerge_command, arguments, measure, mergekit_command
from llamas import shapes_of, warm, write_models
from record import FOLDER, machine, print_table, save

PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import os
import torch

experts, output, threads = [Path(name) for name in sys.argv[3:]], Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
files = [os.open(expert / "model.safetensors", os.O_RDONLY) for expert in experts]
size = os.fstat(files[0]).st_size
start = 8 + int.from_bytes(os.pread(files[0], 8, 0), "little")
output.mkdir()
target = os.open(output / "model.safetensors", os.O_CREAT | os.O_WRONLY)
os.pwrite(target, os.pread(files[0], start, 0), 0)
BLOCK = 1 << 20

def work(first):
    buffer, total = bytearray(BLOCK), torch.empty(BLOCK // 2)
    values = torch.frombuffer(buffer, dtype=torch.bfloat16)
    for place in range(start + first * BLOCK, size, threads * BLOCK):
        length = min(BLOCK, size - place)
        n = length // 2
        for i, file in enumerate(files):
            os.preadv(file, [memoryview(buffer)[:length]], place)
            total[:n].copy_(values[:n]) if i == 0 else total[:n].add_(values[:n])
        values[:n].copy_(total[:n].mul_(1 / len(files)))
        os.pwrite(target, memoryview(buffer)[:length], place)

with ThreadPoolExecutor(threads) as pool:
    list(pool.map(work, range(threads)))
"""


def main() -> None:
    """Make, take turns, report."""
    given = arguments()
    llama, where, case = shapes_of(given), machine(), CASES[0]
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        write_models(llama, folder)
        warm(folder)
        experts = [folder / expert for expert in llama.expert_names]
        commands: dict[str, list[str | Path]] = {
            "acemerge": acemerge_command(case, llama, folder, given.threads),
            "torch, bare": [sys.executable, "-c", PROGRAM, folder / "merged", str(given.threads), *experts],
            "mergekit": mergekit_command(Path(given.mergekit), case, llama, folder, given.threads),
        }
        runs = measure(commands, folder, given.threads, given.repeats)
    seconds = {tool: [run.seconds for run in own] for tool, own in runs.items()}
    work = {tool: [run.cpu_seconds for run in own] for tool, own in runs.items()}
    theirs = statistics.median(seconds["mergekit"])
    rows = [
        [tool, f"{statistics.median(own):.1f}", f"{min(own):.1f}", f"{theirs / statistics.median(own):.1f}",
         f"{statistics.median(work[tool]):.1f}"]
        for tool, own in seconds.items()
    ]  # fmt: skip
    print_table(["linear", "seconds", "least", "times faster than mergekit", "processor s"], rows)
    save(FOLDER / "bare_linear.json", where, {"threads": given.threads, "seconds": seconds, "cpu_seconds": work})


if __name__ == "__main__":
    main()
