"""Mistakes in choosing an engine."""

import sys
from pathlib import Path

import pytest

from acemerge import InputError
from child import command, in_child
from small_models import Models, merge_into_shards


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine", "rya"], "there is no such engine; did you mean 'ray'?"),
        (["--ray-address", "auto"], "only the cluster engine uses it; pass --engine ray too"),
        (["--engine", "ray", "--device", "cuda:1"], "give cpu, or cuda"),
        (["--engine", "ray", "--device", "cpu,cpu"], "give cpu, or cuda"),
        (["--engine", "ray", "--ray-address", "127.0.0.1:1"], "no Ray cluster answers there"),
        (["--engine", "ray", "--ray-address", "ray://127.0.0.1:1"], "run acemerge on a machine of the cluster"),
        (["--engine", "ray", "--ray-address", "somewhere:else"], "no Ray cluster answers there"),
    ],
)
def test_mistakes_are_told_before_any_work(models: Models, tmp_path: Path, flags: list[str], message: str) -> None:
    ended = in_child(lambda: command("merge", *models.arguments, "-o", tmp_path / "out", *flags))
    assert ended.code == 2
    assert message in ended.err
    assert not list(tmp_path.glob("out*"))


def test_a_missing_ray_is_named(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'acemerge\[cluster\]'"):
        merge_into_shards(models, tmp_path / "out", engine="ray")
