"""What a tensor costs: bytes read and written, operations, and memory at the peak."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from acemerge.methods import get_method
from acemerge.numerics.low_rank import nearest_elements, nearest_flops
from acemerge.numerics.pieces import entries_at_work
from acemerge.planning.fates import Core, Merged
from acemerge.planning.tensor import ComputedTensor, PlannedTensor, apart, core_shape, is_computed, matrix_shape


def input_bytes(tensor: PlannedTensor) -> int:
    """What is read for it, in the base's dtype; of adapters, their factors, in float32."""
    if is_computed(tensor) and tensor.fate.core:
        _, rows, columns = matrix_shape(tensor)
        return (rows + columns) * tensor.fate.core.rank * 4 + (tensor.header.nbytes if tensor.form == "value" else 0)
    if tensor.form == "absent":
        return 0
    return tensor.header.nbytes * (1 + len(tensor.experts))


def parts_bytes(tensor: PlannedTensor) -> int:
    """What a method with one model per task writes for it to shared/ and tasks/, at most."""
    if not is_computed(tensor) or not get_method(tensor.fate.method).per_task:
        return 0
    size = 8 if tensor.output_dtype == "float64" else 4
    lost_by_rounding = 2 * tensor.header.elements if tensor.output_dtype in ("float16", "bfloat16") else 0
    elements = get_method(tensor.fate.method).parts_elements(tensor.fate.options, *matrix_shape(tensor))
    return int(size * elements) + lost_by_rounding


def flops(tensor: PlannedTensor) -> float:
    """Estimated operations."""
    return sum(map(_flops, apart(tensor))) if is_computed(tensor) else 0.0


FLOPS_PER_BYTE = 40.0
"""To read a byte, make a number of it and write the result takes about as long as so many operations."""


def work(tensor: PlannedTensor) -> float:
    """How long it takes, in operations. Only good for comparing tensors with each other."""
    return flops(tensor) + FLOPS_PER_BYTE * (input_bytes(tensor) + tensor.output_bytes)


def _flops(tensor: ComputedTensor) -> float:
    work = get_method(tensor.fate.method).flops(*core_shape(tensor))
    if core := tensor.fate.core:  # to the core by QR, and back
        _, rows, columns = matrix_shape(tensor)
        work += 4.0 * (rows + columns) * core.rank**2 + 2.0 * rows * columns * core.rank
    elif tensor.form == "factors":
        work += nearest_flops(*matrix_shape(tensor)[1:], tensor.factors_rank)
    return work


# Measured by benchmarks/load.py, from 200 to 20,000 tensors of 3 to 65 models: it counts where there are thousands.
_OF_A_TENSOR = 13_000
_OF_A_STORED_TENSOR = 1_700
_COPIES_OF_A_NAME = 8
_OF_A_MODEL = 500_000
_OF_THREADS = 28_000_000
"""Stacks and buffers of the threads that hash and write, and what the allocator keeps, which differs from run to run."""
_THREADS = 4
_LARGEST_KEPT = 2**25
"""What is smaller, glibc may keep when it is no longer needed."""
KEPT_OF_MADE = 4
"""Times their size, of floats made of quantised tensors, which come and go between what stays: 3.5 measured with 2048 x 2048."""


def account_bytes(planned: int, models: Sequence[Collection[str]]) -> int:
    """Of what is noted of every tensor: in its plan, in its record, and in the header of each model's file."""
    letters = sum(len(name) for name in models[0])
    stored = sum(map(len, models))
    return (
        _OF_THREADS
        + _OF_A_MODEL * len(models)
        + _OF_A_TENSOR * planned
        + _OF_A_STORED_TENSOR * stored
        + _COPIES_OF_A_NAME * letters * len(models)
    )


def peak_memory(tensor: PlannedTensor) -> int:
    """Estimated bytes of this process's own memory while this tensor is merged. Of the inputs, only quantised ones need any."""
    before_rounding = tensor.output_header.nbytes if tensor.eight_bits else 0
    return _merging_memory(tensor) + KEPT_OF_MADE * (tensor.made_bytes + before_rounding)


def _merging_memory(tensor: PlannedTensor) -> int:
    if not is_computed(tensor):
        return tensor.output_bytes
    if tensor.fate.core:
        return _peak_memory_in_core(tensor, tensor.fate.core)
    if tensor.fate.in_pieces:
        # One is merged while the one before is written.
        at_work = entries_at_work(len(tensor.experts), tensor.header.elements, _THREADS) * _working_size(tensor)
        kept = 2 * min(tensor.output_bytes, _LARGEST_KEPT)
        return 2 * tensor.output_bytes + kept + at_work + _lining_up(tensor) * sum(bool(source.rows) for source in tensor.experts)
    matrices = apart(tensor)
    on_its_way = max(matrix.output_bytes for matrix in matrices) if tensor.fate.view.is_apart else 0
    return max(map(_working_memory, matrices)) + on_its_way + tensor.output_bytes + _lining_up(tensor)


def _working_memory(matrix: ComputedTensor) -> int:
    """Task vectors and what the method needs besides. Of matrices that are merged apart, one is at work at a time."""
    whole = matrix.header.elements * _working_size(matrix)
    working = get_method(matrix.fate.method).float64_elements(*matrix_shape(matrix)) * 8
    if matrix.form == "factors":
        working = max(working, nearest_elements(*matrix_shape(matrix)[1:], matrix.factors_rank) * 8)
    return int(len(matrix.fate.experts) * whole + max(working, whole))


def _lining_up(tensor: PlannedTensor) -> int:
    """Of one copy of the tensor, if rows are put in another order."""
    moved = tensor.rows or any(source.rows for source in tensor.experts)
    return tensor.header.elements * _working_size(tensor) if moved else 0


def _peak_memory_in_core(tensor: ComputedTensor, core: Core) -> int:
    tasks, p, q = core_shape(tensor)
    _, rows, columns = matrix_shape(tensor)
    bases = 3.0 * (rows + columns) * (core.rank + 1)
    working = tasks * p * q + get_method(tensor.fate.method).float64_elements(tasks, p, q)
    leaving = tensor.header.elements * _working_size(tensor) if tensor.form == "value" else 0
    return int(8 * (bases + working) + tensor.output_bytes + leaving)


def _working_size(tensor: PlannedTensor) -> int:
    return 8 if tensor.header.dtype == "float64" else 4


def wholes_at_once(tensor: ComputedTensor) -> int:
    """Of a tensor whose matrices are merged apart, how many settings' values are made together.

    They take no more than the experts' changes would if it were merged as one.
    """
    changes = len(tensor.fate.experts) * tensor.header.elements * _working_size(tensor)
    return max(1, changes // max(1, tensor.output_header.nbytes))


def measured_bytes(tensor: PlannedTensor) -> int:
    """Of one expert, while its model runs on data."""
    if not is_computed(tensor) or not isinstance(tensor.fate, Merged):
        return 0
    return int(8 * get_method(tensor.fate.method).measured_elements(*matrix_shape(tensor)))
