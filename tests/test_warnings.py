"""Which warnings fail a test: those of our own modules, not other people's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import pytest

WARN = "import warnings\nwarnings.warn('mind the gap', FutureWarning, stacklevel=1)"
CALLED = "import warnings\ndef deprecated(): warnings.warn('use the other one', FutureWarning, stacklevel=2)"


def run_in(module: str, code: str, names: Mapping[str, object] | None = None) -> dict[str, object]:
    """What is defined after `code` ran as a part of `module`, which knows `names`."""
    names = {**(names or {}), "__name__": module}
    exec(code, names)
    return names


def test_this_file_is_one_of_ours() -> None:
    with pytest.raises(UserWarning, match="ours"):
        warnings.warn("ours", stacklevel=1)


@pytest.mark.parametrize("module", ["acemerge", "acemerge.numerics.linalg", "small_models", "script_digits", "record"])
def test_a_warning_of_our_own_module_is_an_error(module: str) -> None:
    with pytest.raises(FutureWarning, match="mind the gap"):
        run_in(module, WARN)


@pytest.mark.parametrize("module", ["peft.tuners", "torch.nn", "acemerger", "records"])
def test_a_warning_of_another_module_is_shown_and_fails_nothing(module: str) -> None:
    with warnings.catch_warnings(record=True) as shown:
        run_in(module, WARN)
    assert [str(warning.message) for warning in shown] == ["mind the gap"]


def test_a_library_that_warns_about_our_call_is_an_error() -> None:
    library = run_in("peft.tuners", CALLED)
    with pytest.raises(FutureWarning, match="use the other one"):
        run_in("acemerge.adapters", "deprecated()", library)


@pytest.mark.parametrize("module", ["numpy", "scipy.linalg", "torch"])
def test_numbers_that_go_wrong_in_a_library_are_an_error(module: str) -> None:
    with pytest.raises(RuntimeWarning):
        run_in(module, "import warnings\nwarnings.warn('ill-conditioned', RuntimeWarning, stacklevel=1)")
