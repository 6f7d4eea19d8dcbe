"""Forked children, which other tests run commands in."""

import gc

from child import in_child


class LeftOver:
    """In a cycle, so that only the garbage collector finds it; says when it is destroyed."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        print("destroyed", flush=True)


def test_a_child_does_not_destroy_what_its_parent_left_over() -> None:
    gc.disable()
    try:
        LeftOver()
        assert in_child(gc.collect).out == ""
    finally:
        gc.enable()


def test_a_child_destroys_what_it_left_over_itself() -> None:
    def work() -> None:
        LeftOver()
        gc.collect()

    assert in_child(work).out == "destroyed\n"
