"""What acemerge needs may be used by whoever may use acemerge."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

from licences import LOCK, OF_SINGLE_FILES, PAGE, TOLERATED, is_copyleft, licence_of, needed, same_name

LISTED = {
    name: (licence, by) for name, licence, by in re.findall(r"^\| ([\w-]+) \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
}

LOCKED = {(same_name(name), found) for name, found in re.findall(r"^([\w.-]+)==([\w.]+)", LOCK.read_text(), re.MULTILINE)}


def test_every_package_that_runs_with_acemerge_is_listed_with_its_licence() -> None:
    """Of the versions that the lock names: others may state theirs in other words, or need other packages."""
    every = needed()
    assert {"torch", "numpy", "transformers", "ray", "lm-eval"} <= every.keys()
    found = {name: by for name, by in every.items() if (name, version(name).partition("+")[0]) in LOCKED}
    wrong = {name: licence_of(name) for name in found if LISTED.get(name, ("", ""))[0] != licence_of(name)}
    assert not wrong, "run python tests/support/licences.py, and look at what is new"
    if found == every:  # else other versions decide who needs whom
        assert all((LISTED[name][1] == "core") == ("" in by) for name, by in found.items())


def test_no_package_is_copyleft() -> None:
    found = {name: licence_of(name) for name in needed()}
    assert all(found.values()), "a package that states no licence"
    copyleft = {name: licence for name, licence in found.items() if is_copyleft(licence)}
    assert copyleft.keys() <= TOLERATED.keys(), copyleft


def test_the_core_has_nothing_that_needs_an_exception() -> None:
    found = needed()
    core = {name for name, by in found.items() if "" in by}
    assert not core & TOLERATED.keys()
    assert {name: by for name, by in found.items() if name in TOLERATED} == {"chardet": {"eval"}}, "the page says so"
    assert {name for name in core if OF_SINGLE_FILES.search(licence_of(name))} <= {"certifi", "tqdm"}


@pytest.mark.parametrize(
    ("licence", "copyleft"),
    [
        ("MIT", False), ("Apache-2.0 OR GPL-3.0-only", False), ("GPL-3.0-only AND MIT", True), ("LGPL-2.1-or-later", True),
        ("GNU Affero General Public License v3", True), ("MPL-2.0 AND MIT", False), ("GPL or Apache Software License", False),
    ],
)  # fmt: skip
def test_what_counts_as_copyleft(licence: str, copyleft: bool) -> None:
    assert is_copyleft(licence) == copyleft
