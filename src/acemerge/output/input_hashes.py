"""Hashes of every input file, computed on the side while the merge runs: {model name: {file name: hash}}."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from acemerge.checkpoints.content_hash import algorithm_of, file_hash, name_in_hub_cache
from acemerge.checkpoints.hashed_ahead import hashed_ahead
from acemerge.errors import InputError
from acemerge.planning.plan import Plan
from acemerge.recipe.recipe import Recipe

Hashes = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class InputHashes:
    """The hashes that are there, and those still being computed."""

    futures: Mapping[str, Mapping[str, Future[str]]]
    verified: bool
    """Whether every file was read in full before the merge began."""

    def known(self) -> Hashes:
        """Those that are there by now."""
        return {
            model: {file: future.result() for file, future in files.items() if future.done() and not future.exception()}
            for model, files in self.futures.items()
        }

    def all(self) -> Hashes:
        """All of them, when they are there."""
        return {model: {file: future.result() for file, future in files.items()} for model, files in self.futures.items()}

    def check_expected(self, recipe: Recipe) -> None:
        """Before any work, the files' hashes must be those the recipe expects, if it expects any."""
        for model, files in recipe.inputs.items():
            for file, expected in files.items():
                future = self.futures.get(model, {}).get(file)
                actual = future.result() if future else "unknown: no such file"
                if actual != expected:
                    raise InputError(
                        f"{model}/{file}: its hash is {actual}, the recipe expects {expected}; get the same file, or remove "
                        "'inputs' from the recipe"
                    )


@contextmanager
def hashing_inputs(plan: Plan, *, verify: bool) -> Iterator[InputHashes]:
    """Hash in threads of their own, leaving one to the merge; with `verify`, every file in full and before anything else."""
    with ThreadPoolExecutor(max(1, torch.get_num_threads() - 1)) as pool:
        expected = plan.recipe.inputs
        futures = {
            model.name: {
                file.name: pool.submit(_input_hash, file, expected.get(model.name, {}).get(file.name), verify)
                for file in model.files
            }
            for model in (plan.base, *plan.experts)
        }
        try:
            hashes = InputHashes(futures, verify)
            if verify:
                hashes.all()
            hashes.check_expected(plan.recipe)
            yield hashes
        finally:
            pool.shutdown(cancel_futures=True)


def _input_hash(file: Path, expected: str | None, verify: bool) -> str:
    """By the algorithm that the recipe's expectation has; else that of the hub's cache, of whose files the name will do."""
    named = name_in_hub_cache(file)
    algorithm = algorithm_of(expected or named or "")
    if named and algorithm == "sha256" and not verify:
        return named
    return (algorithm == "blake3" and hashed_ahead(file)) or file_hash(file, algorithm)
