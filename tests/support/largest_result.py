"""The largest tensor that some code makes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestResult(TorchDispatchMode):
    """Records how many elements the largest tensor has that any operation allocates."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        for value, declared in zip(results, func._schema.returns, strict=False):
            if isinstance(value, Tensor) and declared.alias_info is None:  # not a view, such as of a mapped file
                self.largest = max(self.largest, value.numel())
        return result
