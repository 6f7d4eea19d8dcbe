"""Shapes in signatures are checked at run time in every test."""

from jaxtyping import install_import_hook

install_import_hook(["acemerge.linalg", "acemerge.methods", "acemerge.task_vectors", "acemerge.api"], "beartype.beartype")
