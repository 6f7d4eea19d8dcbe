"""acemerge bench and acemerge demo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from acemerge.bench.analyses.variants import ANALYSES
from acemerge.bench.measure.compare import default_methods
from acemerge.bench.suites import registry as suites
from acemerge.bench.suites.paper import PAPER_SUITES
from acemerge.cli import bench as command
from acemerge.cli.app import main
from acemerge.cli.bench import SUITES
from acemerge.methods import all_methods


def test_commands_and_suites_go_together() -> None:
    assert set(SUITES) == set(suites._SUITES)
    assert set(command.PAPER_SUITES) == set(PAPER_SUITES)
    assert set(command.ANALYSES) == set(ANALYSES)
    names = {task.name for name in SUITES for task in suites.get_suite(name).tasks if name.startswith("text")}
    assert len(names) == 14
    assert {task.name for task in suites.get_suite("demo").tasks} == {"movie", "langid", "commits", "reuters_r8"}
    without_data = {method.name for method in all_methods() if method.uses == "weights"}
    assert set(default_methods(8)) == without_data - {"slerp", "nuslerp", "nearswap", "arcee_fusion", "passthrough"}
    for candidates in (make() for make in ANALYSES.values()):
        assert len({candidate.label for candidate in candidates}) == len(candidates)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "text-8", "--methods", "ace,tsvm"], "there is no method 'tsvm': did you mean 'tsv_m'?"),
        (["bench", "ablation", "--suite", "text-9"], "there is no suite 'text-9': did you mean 'text-8'?"),
        (["bench", "third-party", "--suite", "gpt2-6"], "use text-8, text-14 or a vision suite"),
        (["demo", "--ask", "Hello", "-o", "nowhere"], "run `acemerge demo` first"),
        (["demo", "-o", f"{__file__}/out"], "is a file, not a folder; give another place"),
        (["bench", "text-8", "-o", f"{__file__}/out"], "is a file, not a folder; give another place"),
        (["evaluate", "model", "--suite", "text-8", "-o", f"{__file__}/out"], "is a file, not a folder; give another place"),
    ],
)
def test_mistakes_are_told_before_any_work(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACEMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["acemerge", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
