"""What `--help` looks like to somebody with a small window."""

from __future__ import annotations

import re

from command import Command


def verbs(listing: str) -> list[str]:
    return re.findall(r"^  ([\w.-]+) ", listing.partition("Commands:")[2], re.M)


def test_help_of_every_verb_fits_80_columns_and_cuts_nothing(run: Command) -> None:
    pages: dict[tuple[str, ...], str] = {(): run("--help")[1]}
    pages |= {(verb,): run(verb, "--help")[1] for verb in verbs(pages[()])}
    pages |= {(group, verb): run(group, verb, "--help")[1] for group in ("bench", "recipe") for verb in verbs(pages[(group,)])}
    assert len(pages) > 40
    for verb, page in pages.items():
        assert "…" not in page, verb
        _, said = page.split("\n", 1)  # usage, where EXPERT... means several
        assert not re.search(r"\w\.\.\.$", said, re.M), verb  # a sentence that was cut
        assert max(map(len, page.splitlines())) <= 80, verb


def test_examples_in_help_keep_their_lines(run: Command) -> None:
    _, page, _ = run("sweep", "--help")
    assert '    acemerge sweep base math code -o grid -s reach=0.03,0.06,0.12 \\\n        --evaluate "python score.py"\n' in page


def test_a_misspelt_verb_or_option_is_told_what_it_may_mean(run: Command) -> None:
    assert "Did you mean 'merge'?" in run("mrge")[2]
    assert "--method" in run("merge", "--methd", "ties", "a", "b", "-o", "c")[2]


def test_usage_names_arguments_as_their_help_does(run: Command) -> None:
    first = {verb: run(*verb.split(), "--help")[1].split("\n")[0] for verb in ("merge", "methods", "route", "recipe convert")}
    assert first == {
        "merge": "Usage: acemerge merge [OPTIONS] BASE EXPERT...",
        "methods": "Usage: acemerge methods [OPTIONS] [NAME]",
        "route": "Usage: acemerge route [OPTIONS] ADAPTER...",
        "recipe convert": "Usage: acemerge recipe convert [OPTIONS] CONFIG.yaml",
    }
