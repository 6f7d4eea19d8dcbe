"""What every registered method promises, whatever it computes: the checks are `acemerge.testing`'s, which other packages use.

A method that uses data is given made-up measurements (`data_statistics.py`); whole models of such methods are merged in
`test_data_merges.py`, where there are models that run.
"""

from functools import partial

import pytest

from acemerge.methods import Method, all_methods
from acemerge.testing import Check, checks
from data_statistics import made_up_statistics

CASES = [(method, check) for method in all_methods() for check in checks(method.name)]


@pytest.mark.parametrize(("method", "check"), CASES, ids=[f"{method.name}-{check.name}" for method, check in CASES])
def test_a_method_keeps_its_promise(method: Method, check: Check) -> None:
    check(method.name, partial(made_up_statistics, method))
