"""RegMean: the Gram matrices of every linear layer's inputs, in each expert's own model."""

from __future__ import annotations

from functools import partial

import torch

from acemerge.calibration.layer_inputs import LayerInputs
from acemerge.calibration.measured import Measured, Tensors, keep
from acemerge.calibration.registry import measures
from acemerge.calibration.run import DataRun
from acemerge.methods.regmean import RegMeanOptions


@measures("regmean")
def measure_grams(run: DataRun, options: RegMeanOptions) -> Measured:
    """Each expert's Gram matrices in its own model, one expert at a time."""
    files = {}
    for index, expert in enumerate(run.experts):
        run.progress.say(f"inputs of the linear layers of '{expert.name}' on {run.inputs(index, options.rows).rows} rows")
        key = ["layer inputs", *run.key(index, options.rows)]
        files[expert.name] = [keep(key, partial(expert_grams, run, index, options.rows))]
    return Measured(files)


@torch.inference_mode()
def expert_grams(run: DataRun, expert: int, rows: int) -> Tensors:
    """G_t = mean of x x^T for every layer of one expert."""
    model, seen = run.load(expert), LayerInputs()
    with seen.watching(model, list(run.stored_names(expert))):
        for batch in run.inputs(expert, rows).batches():
            seen.begin(batch, model.module)
            run.run(expert, model, batch)
    return dict(seen.grams())
