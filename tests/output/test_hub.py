"""Uploads, to a stand-in on loopback."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

import acemerge
from command import Command
from small_models import Models, tree
from stand_in_hub import TOKEN, Hub, running_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as running:
        use(running, monkeypatch)
        yield running


def use(hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str | None = TOKEN) -> None:
    """The library reads its settings once, when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def merge(models: Models, output: Path, *more: object) -> list[object]:
    return ["merge", *models.arguments, "-o", output, "-m", "average", *more]


def test_a_merge_is_uploaded_whole_private_and_without_the_token(
    hub: Hub, models: Models, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "out"
    code, told, error = command(*merge(models, out, "--push", "somebody/model"))
    assert code == 0, error
    assert "GET /api/whoami-v2" in hub.requests[:2]  # before any work
    assert hub.created[-1]["name"] == "model"
    assert hub.created[-1].get("private") is True or hub.created[-1].get("visibility") == "private"
    assert hub.files == tree(out)
    assert "README.md" in hub.files
    assert f"uploaded to {hub.address}/somebody/model" in error
    assert TOKEN not in told + error
    assert all(TOKEN.encode() not in content for content in hub.files.values())


def test_an_extracted_adapter_is_uploaded_to_an_organisation(hub: Hub, models: Models, tmp_path: Path, command: Command) -> None:
    out, quiet = tmp_path / "out", ["-q", "--public"]
    code, told, error = command(
        "extract", models.base, models.experts[0], "-o", out, "--rank", 2, "--push", "our-org/lora", *quiet
    )
    assert (code, told, error) == (0, "", "")
    assert hub.created[-1]["organization"] == "our-org"
    assert hub.created[-1].get("private") is False or hub.created[-1].get("visibility") == "public"
    assert hub.files.keys() >= {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("token", "flags", "says"),
    [
        (None, ["--push", "somebody/model"], "nobody is logged in to the hub; log in with `hf auth login`, or set HF_TOKEN"),
        ("hf_wrong", ["--push", "somebody/model"], "the hub did not say who is logged in"),
        (TOKEN, ["--push", "model"], "write it as ORG/NAME"),
        (TOKEN, ["--push", "some where/model"], "write it as ORG/NAME"),
        (TOKEN, ["--push", "somebody-else/model"], "you are logged in as somebody, who may not write to 'somebody-else'"),
        (TOKEN, ["--push", "somebody/model", "--offline"], "needs the network"),
    ],
)
def test_nothing_is_begun_that_cannot_be_uploaded(
    token: str | None,
    flags: list[str],
    says: str,
    hub: Hub,
    models: Models,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(hub, monkeypatch, token)
    code, told, error = command(*merge(models, tmp_path / "out", *flags))
    assert code == 2
    assert told == ""
    assert says in error
    assert "hf_" not in error
    assert not (tmp_path / "out").exists()
    assert hub.created == []


def test_without_a_network_nothing_is_begun(hub: Hub, models: Models, tmp_path: Path, command: Command) -> None:
    constants.ENDPOINT = "http://127.0.0.1:9"  # nobody listens there; the fixture puts it back
    code, _, error = command(*merge(models, tmp_path / "out", "--push", "somebody/model"))
    assert code == 2
    assert "the hub did not say who is logged in" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fails", ["/preupload/", "/upload/", "/commit/"])
def test_after_a_failed_upload_the_folder_stays_and_push_goes_on(
    fails: str, hub: Hub, models: Models, tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    hub.fails = fails
    with caplog.at_level(logging.CRITICAL):
        code, _, error = command(*merge(models, out, "--push", "somebody/model"))
    assert code == 1
    assert f"{out} is whole, but was not uploaded: " in error
    assert f"to try again: acemerge push {out} somebody/model\n" in error
    assert TOKEN not in error
    assert acemerge.verify(out).problems == []
    hub.fails = ""
    sent = len([request for request in hub.requests if request.startswith("PUT")]) if fails == "/commit/" else 0
    code, _, error = command("push", out, "somebody/model")
    assert code == 0, error
    assert hub.files == tree(out)
    # What an earlier try brought there is not sent again.
    assert len([request for request in hub.requests if request.startswith("PUT")]) == (sent or 1 + (fails == "/upload/"))


def test_push_refuses_what_was_changed(hub: Hub, models: Models, tmp_path: Path, command: Command) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out", "average")
    (tmp_path / "out/config.json").write_text("{}")
    code, _, error = command("push", tmp_path / "out", "somebody/model")
    assert code == 2
    assert "config.json: its content has changed" in error
    assert hub.created == []
    assert command("push", models.base, "somebody/model")[0] == 2  # not ours


def test_push_from_python(hub: Hub, models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out", "average")
    assert acemerge.push(tmp_path / "out", "somebody/model") == f"{hub.address}/somebody/model"
    assert hub.files == tree(tmp_path / "out")
