"""The table of a sweep: which score decides, and a damaged file."""

from pathlib import Path

import pytest

import acemerge
from acemerge.errors import InputError
from acemerge.sweeps.table import TABLE, Objective
from small_models import Models
from sweeping import ALPHAS


@pytest.mark.parametrize("content", ["", "{", '{"points": 3}', '{"points": {"a": {}}}'])
def test_a_damaged_table(models: Models, tmp_path: Path, content: str) -> None:
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / TABLE).write_text(content)
    with pytest.raises(InputError, match="cannot be read"):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS)


def test_the_first_score_decides_by_default() -> None:
    assert Objective().of({"b": 2.0, "a": 1.0}) == 2.0
    assert Objective("a", largest=False).of({"b": 2.0, "a": 1.0}) == -1.0
