"""Sharing work: order, errors, nesting, and torch's number of threads, which is the process's."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from threadpoolctl import threadpool_info

from acemerge.execute.compute import compute_threads
from acemerge.methods import get_method
from acemerge.numerics.threads import available_threads, share, torch_at_rest


def blas_threads() -> set[int]:
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_results_come_in_the_order_of_the_items() -> None:
    with compute_threads(3):
        barrier = threading.Barrier(3)  # three at once, or it never ends

        def late(item: int) -> int:
            barrier.wait(60)
            return item * 2

        assert share(late, range(6)) == [0, 2, 4, 6, 8, 10]


def test_work_that_takes_memory_is_done_by_few_threads() -> None:
    with compute_threads(3):
        names = share(lambda _: threading.current_thread().name, range(20), at_once=1)
        assert set(names) == {threading.current_thread().name}

        def name_later(_: int) -> str:
            time.sleep(0.01)
            return threading.current_thread().name

        assert len(set(share(name_later, range(20), at_once=2))) == 2


def test_every_thread_works_alone() -> None:
    with compute_threads(2):
        inside = share(lambda _: (torch.get_num_threads(), blas_threads(), available_threads()), range(4))
        assert inside == [(1, {1}, 1)] * 4
        assert torch.get_num_threads() == 2
        assert blas_threads() == {2}


def test_shared_work_may_share_work() -> None:
    with compute_threads(2):
        assert share(lambda n: share(lambda k: n * k, range(3)), range(3)) == [[0, 0, 0], [0, 1, 2], [0, 2, 4]]


def test_an_error_comes_out_and_leaves_everything_as_it_was() -> None:
    def fail(item: int) -> None:
        raise ValueError(f"item {item}")

    with compute_threads(2):
        with pytest.raises(ValueError, match="item 0"):
            share(fail, range(3))
        assert torch.get_num_threads() == 2
        assert blas_threads() == {2}


def test_callers_in_different_threads_leave_torch_its_threads() -> None:
    with compute_threads(2):
        first_inside, second_inside = threading.Event(), threading.Event()

        def first() -> int:
            with torch_at_rest() as threads:
                first_inside.set()
                second_inside.wait(60)
            return threads

        def second() -> int:
            first_inside.wait(60)
            with torch_at_rest() as threads:
                second_inside.set()
                return threads

        with ThreadPoolExecutor(2) as pool:
            assert [future.result() for future in (pool.submit(first), pool.submit(second))] == [2, 2]
        assert torch.get_num_threads() == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    with compute_threads(2):
        share(abs, range(4))  # this process has its threads now
        child = os.fork()
        if not child:
            os._exit(0 if share(abs, [-1, -2, -3]) == [1, 2, 3] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("ace", shape) for shape in [(600, 520), (520, 900)]),  # in float32, and a Gram matrix that threads share
        *((name, shape) for name in ("ace", "tsv_m", "iso_cts", "iso_c", "actmat") for shape in [(150, 130), (130, 225)]),
    ],
)
def test_the_number_of_threads_changes_nothing_that_matters(name: str, shape: tuple[int, int]) -> None:
    method = get_method(name)
    task_vectors = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    merged = []
    for threads in (1, 2, 3):
        with compute_threads(threads):
            merged.append(method(task_vectors, method.options({})).delta)
    for other in merged[1:]:
        torch.testing.assert_close(other, merged[0], rtol=0, atol=1e-4 * float(merged[0].abs().max()))


_TWO = {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
_LATE = """
import torch
from threadpoolctl import threadpool_info
from acemerge.execute.compute import compute_threads
from acemerge.numerics.blas import syrk
from acemerge.numerics.threads import share

def threads():
    return {library["num_threads"] for library in threadpool_info() if "scipy.libs" in library["filepath"]}

torch.set_num_threads(2)
share(abs, [1, 2])  # looks for BLAS libraries before scipy's is there
assert not threads()
syrk(torch.zeros(4, 4), torch.ones(3, 4), 1.0)
assert share(lambda _: threads(), range(4)) == [{1}] * 4
"""


def test_a_library_that_is_loaded_late_is_limited_too() -> None:
    subprocess.run([sys.executable, "-c", _LATE], check=True, env=os.environ | _TWO)


def test_a_limit_of_threads_reaches_the_library() -> None:
    with_limit = _LATE.partition("torch.set_num_threads")[0] + "with compute_threads(1):\n    assert threads() == {1}\n"
    subprocess.run([sys.executable, "-c", with_limit], check=True, env=os.environ | _TWO)
