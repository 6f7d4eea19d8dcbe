"""The tokenizer of a base that is a single GGUF file, which holds it in its metadata: made into files by transformers."""

from __future__ import annotations

import sys
from pathlib import Path

from acemerge.calibration.models import quiet_transformers
from acemerge.errors import disk_failed, first_line, printable
from acemerge.planning.plan import Plan


def write_own_tokenizer(plan: Plan, folder: Path) -> None:
    """Into the output's folder. A model is worth having without it, so a failure is only told."""
    file = plan.base.files[0] if plan.base.files else None
    given = any(path.name.startswith("tokenizer") for path in plan.base.side_files())
    if file is None or file.suffix != ".gguf" or given or plan.recipe.save_as == "adapter":
        return
    try:
        tokenizer = quiet_transformers().AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True, trust_remote_code=False
        )
        tokenizer.save_pretrained(folder)
    except Exception as error:  # transformers' converters fail in many ways; none is worth a merge
        if disk_failed(error):
            raise
        told = (
            f"warning: the output has no tokenizer: transformers cannot make it from {file.name} ({first_line(error)}); copy the "
            "tokenizer's files of the float model into it"
        )
        print(printable(told), file=sys.stderr, flush=True)
