"""Models of several points, written in one pass over the inputs and published each in its own folder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from acemerge.execute.pipeline import Sources
from acemerge.execute.sweep import SweepEngine
from acemerge.output.input_hashes import InputHashes
from acemerge.output.model_card import write_documents
from acemerge.output.staging import Staging, staged_output
from acemerge.output.task_models import write_heads
from acemerge.planning.plan import Plan
from acemerge.planning.progress import show_progress


@dataclass(frozen=True)
class PointWriter:
    """Merges at any of the points, in one pass, and publishes their models."""

    output: Path
    sources: Sources
    device: torch.device
    hashes: InputHashes
    resume: bool
    overwrite: bool
    quiet: bool

    def write(self, names: Sequence[str], plans: Sequence[Plan]) -> list[int]:
        """Merge at these points in one pass and publish every model; how many warnings each merge gave."""
        with ExitStack() as open_outputs:
            stagings = [open_outputs.enter_context(self._staged(name, plan)) for name, plan in zip(names, plans, strict=True)]
            with show_progress(plans[0], quiet=self.quiet) as progress:
                for note in dict.fromkeys(staging.note for staging in stagings if staging.note):
                    progress.say(note)
                SweepEngine(plans, stagings, self.device, progress).run()
            hashes = self.hashes.all()
            for plan, staging in zip(plans, stagings, strict=True):
                write_heads(plan, staging.folder)
                staging.check_inputs(hashes)
                write_documents(plan, self.sources, staging, hashes)
            for model in (plans[0].base, *plans[0].experts):
                model.check_unchanged()
            return [_warnings(plan, staging) for plan, staging in zip(plans, stagings, strict=True)]

    def _staged(self, name: str, plan: Plan) -> AbstractContextManager[Staging]:
        folder = self.output / name
        return staged_output(folder, plan.digest, resume=self.resume, overwrite=self.overwrite, inputs=self.hashes)


def _warnings(plan: Plan, staging: Staging) -> int:
    return sum(len(record.warnings) for shard in plan.shards for record in staging.finished[shard].tensors)
