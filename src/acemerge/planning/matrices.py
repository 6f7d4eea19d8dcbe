"""Which matrices a tensor holds, and so which view methods for matrices have of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from acemerge.checkpoints.experts import stack_is_stored_in_out, stacked_matrices
from acemerge.checkpoints.families import Family, is_stored_in_out
from acemerge.checkpoints.fused import fused_matrices
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.planning.view import View
from acemerge.recipe.recipe import Recipe


def matrix_shape_of(name: str, header: TensorHeader) -> tuple[int, ...]:
    """Of one of the matrices, if the tensor is a stack of them; its own otherwise."""
    return header.shape[1:] if stacked_matrices(name, header) else header.shape


def whole_view(name: str, tensors: Mapping[str, TensorHeader], family: Family, recipe: Recipe) -> View:
    """The tensor as one, a matrix as [out, in]."""
    if recipe.orientation == "stored" or len(tensors[name].shape) != 2:
        return View()
    return View(transposed=is_stored_in_out(name, family, tensors))


def view_of_matrices(
    name: str, tensors: Mapping[str, TensorHeader], family: Family, recipe: Recipe, config: Mapping[str, Any]
) -> tuple[View, str]:
    """Each matrix [out, in] for itself; and why fused ones are merged as one nevertheless, if that has to be told."""
    header = tensors[name]
    stacked = stacked_matrices(name, header)
    view = whole_view(name, tensors, family, recipe)
    if stacked:
        turned = recipe.orientation != "stored" and stack_is_stored_in_out(name, tensors, config)
        view = View(stacked=stacked, transposed=turned)
    if recipe.fused == "whole" or recipe.orientation == "stored" or (recipe.fused == "auto" and family.fused_whole):
        return view, ""
    matrix = matrix_shape_of(name, header)
    fused, is_fused = fused_matrices(name, matrix[1 if view.transposed else 0], config)
    if not is_fused:
        return view, ""
    if fused is None:
        return view, "their sizes do not fit the config"
    if recipe.save_as == "adapter" and not stacked:
        return view, "an adapter has one change of them"
    return replace(view, fused=fused), ""
