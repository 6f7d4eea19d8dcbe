"""Experts as transformers loads them: the class that the config names, from files on this machine, running no code of theirs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from acemerge.checkpoints.folder import Checkpoint, architecture_of
from acemerge.checkpoints.quantised.reading import QUANTIZATION
from acemerge.checkpoints.transformers_config import transformers_config
from acemerge.checkpoints.untrusted import check_runs_nothing
from acemerge.errors import InputError, first_line


def quiet_transformers() -> Any:
    """The library, without its reports on standard error."""
    try:
        import transformers
    except ImportError:
        raise InputError("running models on data needs transformers: pip install transformers") from None
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers


def model_class(expert: Checkpoint) -> Any:
    """The class of the expert's model."""
    if expert.folder is None or not expert.config:
        raise InputError(f"expert {expert.where}: give a folder with config.json, so that its model can be run on data")
    if QUANTIZATION in expert.config_changes:
        raise InputError(
            f"expert {expert.where}: is quantised, so its model is not run on data; make it a float model first: acemerge merge "
            f"{expert.folder} {expert.folder} -m passthrough -o FOLDER"
        )
    check_runs_nothing(expert.config, expert.folder)
    name = architecture_of(expert.config)
    library = quiet_transformers()
    found = getattr(library, name, None) if name else None
    if not (isinstance(found, type) and issubclass(found, library.PreTrainedModel)):
        raise InputError(
            f"{expert.folder / 'config.json'}: 'architectures' names no class of transformers ({name}), so the expert's model "
            "cannot be run on data; save the expert with save_pretrained"
        )
    return found


def model_config(expert: Checkpoint) -> Any:
    """As transformers understands config.json."""
    quiet_transformers()
    assert expert.folder is not None
    return transformers_config(expert.folder, f"expert {expert.where}")


def outline_model(expert: Checkpoint) -> nn.Module:
    """The expert's modules without values: nothing is read."""
    made = model_class(expert)
    with torch.device("meta"):
        model: nn.Module = made(copy.deepcopy(model_config(expert)))
    return model


def load_model(expert: Checkpoint) -> nn.Module:
    """The expert's model with its own head, in float32, or float64 if it is stored so."""
    made = model_class(expert)
    wide = any(header.dtype == "float64" for header in expert.tensors.values())
    try:
        model, report = made.from_pretrained(
            expert.folder,
            dtype=torch.float64 if wide else torch.float32,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"expert {expert.where}: transformers cannot load it ({first_line(error)})") from None
    if report["missing_keys"]:
        raise InputError(
            f"expert {expert.where}: {made.__name__} needs '{sorted(report['missing_keys'])[0]}', which its file lacks; give a "
            "whole model"
        )
    loaded: nn.Module = model.eval()
    return loaded
