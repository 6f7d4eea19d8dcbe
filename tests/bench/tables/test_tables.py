"""Tables of results."""

from __future__ import annotations

import pytest

from acemerge.bench.measure.metrics import Accuracy
from acemerge.bench.measure.run import Candidate, Result
from acemerge.bench.tables.tables import Row, as_cells


def test_a_table_takes_means_over_seeds() -> None:
    def result(seed: int, a: int, b: int) -> Result:
        return Result(seed, {"a": Accuracy(a, 100), "b": Accuracy(b, 200)}, None)

    experts = (result(0, 80, 100), result(1, 90, 100))
    row = Row(Candidate("x", {"method": "ace"}), (result(0, 40, 100), result(1, 45, 50)), experts)
    assert row.score("a") == pytest.approx(0.425)
    assert row.average == pytest.approx((0.4 + 0.5 + 0.45 + 0.25) / 4)
    assert row.normalised == pytest.approx((0.5 + 1.0 + 0.5 + 0.5) / 4)
    by_rows = ((0.24 / 100 + 0.25 / 200) + (0.2475 / 100 + 0.1875 / 200)) / 2 / 4
    by_seeds = ((0.45 - 0.4) ** 2 + (0.35 - 0.4) ** 2) / 1 / 2
    assert row.standard_error == pytest.approx((by_rows + by_seeds) ** 0.5)


def test_what_no_row_has_is_no_column() -> None:
    result = Result(0, {"a": Accuracy(1, 2)}, None)
    alone = Row(Candidate("x"), (result,), None)
    compared = Row(Candidate("y"), (result,), (result,))
    assert as_cells([alone]) == [["model", "a", "average", "±"], ["x", "50.0", "50.0", "35.4"]]
    assert as_cells([alone, compared])[0] == ["model", "a", "average", "±", "of experts"]
