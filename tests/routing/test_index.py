"""`acemerge route`: an index that is whole or absent, and every mistake told before it is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import lora_zoo
from acemerge.checkpoints.content_hash import file_hash
from acemerge.errors import InputError
from acemerge.routing.index import read_index, write_index
from command import Command
from routing_team import Team, vectors


def test_the_command_writes_an_index_and_shows_it(team: Team, command: Command, tmp_path: Path) -> None:
    code, out, _ = command(*team.arguments, "-o", tmp_path / "team.route", "--beta", 0.8, "--top", 2)
    assert code == 0
    assert "3 adapters, centroids of 6 numbers, beta 0.8, tau 0.01, top 2" in out
    assert out.startswith("  math: math ")
    index = read_index(tmp_path / "team.route")
    assert list(index.record.adapters) == ["math", "code", "law"]
    for name, place in index.record.adapters.items():
        files = {file: file_hash(team.adapters[name] / file) for file in ("adapter_model.safetensors", "adapter_config.json")}
        assert place.files == files
    torch.testing.assert_close(index.centroids.norm(dim=1), torch.ones(3))
    assert str(tmp_path) not in index.record.model_dump_json()


def test_json_is_for_programs(team: Team, command: Command, tmp_path: Path) -> None:
    code, out, _ = command(*team.arguments, "-o", tmp_path / "team.route", "--json")
    assert code == 0
    assert json.loads(out)["kernel"] == {"beta": 0.2, "tau": 0.01, "top": 50}


def test_the_same_inputs_give_the_same_bytes(team: Team, command: Command, tmp_path: Path) -> None:
    for name in ("a", "b"):
        command(*team.arguments, "-o", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"math": None}, "has no centroid for adapter 'math'"),
        ({"art": torch.ones(6)}, "'art' is the name of no adapter that is given"),
        ({"law": torch.ones(5)}, r"centroids must be vectors of one size, found math [6], code [6], law [5]"),
        ({"law": torch.ones(2, 3)}, "centroids must be vectors of one size"),
        ({"law": torch.zeros(6)}, "'law' is zero or not finite"),
        ({"law": torch.full((6,), float("nan"))}, "'law' is zero or not finite"),
    ],
)
def test_bad_centroids_are_refused(
    change: dict[str, torch.Tensor | None], said: str, team: Team, command: Command, tmp_path: Path
) -> None:
    given = {name: vector for name, vector in {**vectors(), **change}.items() if vector is not None}
    save_file(given, tmp_path / "c.safetensors")
    arguments = ["route", *map(str, team.adapters.values()), "--centroids", tmp_path / "c.safetensors"]
    code, _, err = command(*arguments, "-o", tmp_path / "team.route")
    assert code == 2
    assert said in err
    assert not (tmp_path / "team.route").exists()


def test_everything_that_is_no_adapter_of_the_base_is_refused_at_once(team: Team, command: Command, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to choose among"):
        write_index([str(team.adapters["law"])], team.centroids, tmp_path / "i")
    larger = tmp_path / "wide"
    shutil.copytree(team.base, larger)
    code, _, err = command("route", team.base, larger, "--centroids", team.centroids, "-o", tmp_path / "i", "--base", team.base)
    assert code == 2
    assert err.count("is no adapter; make one of a full fine-tune with `acemerge extract`") == 2
    other = lora_zoo.write_base(tmp_path / "other", "BertModel")
    code, _, err = command(*team.arguments, "-o", tmp_path / "i", "--base", other)
    assert code == 2
    assert err.count("give the base that it was trained on, with --base") == 3
    assert not (tmp_path / "i").exists()


def test_bad_usage(team: Team, command: Command, tmp_path: Path) -> None:
    for flags, said in (
        (["--beta", 0], "--beta 0.0: give a number above 0"),
        (["--tau", 1], "--tau 1.0: give a share from 0 to less than 1"),
        (["--top", 0], "--top"),
    ):
        code, _, err = command(*team.arguments, "-o", tmp_path / "i", *flags)
        assert code == 2
        assert said in err
    code, _, err = command(*team.arguments, "-o", tmp_path)
    assert (code, "is a folder; give the name of a file" in err) == (2, True)
    twice = [str(team.adapters["law"])] * 2
    code, _, err = command("route", *twice, "--centroids", team.centroids, "-o", tmp_path / "i")
    assert (code, "are both called 'law'" in err) == (2, True)
    code, _, err = command("route", *team.adapters.values(), "--centroids", tmp_path / "none", "-o", tmp_path / "i")
    assert (code, "no such file; give a .safetensors file" in err) == (2, True)
    assert not (tmp_path / "i").exists()


def test_adapters_that_name_no_common_base_need_one(team: Team, command: Command, tmp_path: Path) -> None:
    for name in ("law", "code"):
        shutil.copytree(team.adapters[name], tmp_path / name)
    config = json.loads((tmp_path / "law" / "adapter_config.json").read_text())
    (tmp_path / "law" / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    save_file({name: vectors()[name] for name in ("law", "code")}, tmp_path / "c.safetensors")
    asked = ["route", tmp_path / "law", tmp_path / "code", "--centroids", tmp_path / "c.safetensors", "-o", tmp_path / "i"]
    code, _, err = command(*asked)
    assert (code, "do not name one base between them" in err) == (2, True)
    assert command(*asked, "--base", team.base)[0] == 0


@pytest.mark.parametrize("content", [b"", b"{}", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", b"x" * 100])
def test_what_is_no_index_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "i").write_bytes(content)
    with pytest.raises(InputError, match="is no index that `acemerge route` wrote"):
        read_index(tmp_path / "i")
    with pytest.raises(InputError, match="no such file"):
        read_index(tmp_path / "none")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "", "x\ny"])
def test_an_index_names_no_file_elsewhere(team: Team, tmp_path: Path, name: str) -> None:
    record = read_index(team.index).record.model_dump()
    record["base"]["files"] = {name: "blake3:" + "0" * 64}
    save_file({"centroids": torch.eye(3)}, tmp_path / "i", {"acemerge_route": json.dumps(record)})
    with pytest.raises(InputError, match="is no index that"):
        read_index(tmp_path / "i")


def test_an_index_of_other_centroids_than_adapters_is_refused(team: Team, tmp_path: Path) -> None:
    with safe_open(team.index, framework="pt") as opened:
        metadata = opened.metadata()
    save_file({"centroids": torch.ones(2, 6)}, tmp_path / "i", metadata=metadata)
    with pytest.raises(InputError, match="are not one vector for each of 3 adapters"):
        read_index(tmp_path / "i")
