"""The paper's vision suites on tiny checkpoints in both layouts: whole commands, checked against a plain computation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.metrics import accuracy_score

import acemerge
from acemerge.bench.domains.clip import ClipDomain
from acemerge.bench.domains.heads import ZeroShotHeads, prompts_of
from acemerge.bench.suites.options import SuiteOptions
from acemerge.bench.suites.registry import get_suite
from paper_zoo import LIBRARY, OpenClip, clip_models, open_clip_models, picture_data, pictures
from running import rows_in, run_command

TASKS = ("mnist", "stl10", "food101")
Data = dict[str, tuple[list[Image.Image], list[int]]]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("clip")
    clip_models(folder / "models", TASKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACEMERGE_CACHE", str(folder / "cache"))
        patch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))
        yield folder


@pytest.fixture(scope="module")
def data(zoo: Path) -> Data:
    """The task's expert is right about two of three pictures."""
    found = {}
    for seed, task in enumerate(TASKS):
        images = pictures(seed, 12)
        answers = plain_answers(zoo / "models" / "base", load_file(zoo / "models" / task / "model.safetensors"), task, images)
        labels = [answer if row % 3 else (answer + 1) % len(prompts_of(task).classes) for row, answer in enumerate(answers)]
        picture_data(zoo / "data", task, images, labels, "validation" if task == "food101" else "test")
        found[task] = images, labels
    return found


def pixels(images: list[Image.Image]) -> torch.Tensor:
    processor = LIBRARY.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    made: torch.Tensor = processor(images=[image.convert("RGB") for image in images], return_tensors="pt")["pixel_values"]
    return made


@torch.inference_mode()
def plain_head(clip: Path, task: str) -> torch.Tensor:
    """One prompt at a time."""
    words: Any = LIBRARY.AutoTokenizer.from_pretrained(clip)
    model: Any = LIBRARY.CLIPModel.from_pretrained(clip).eval()
    classes = []
    for name in prompts_of(task).classes:
        vectors = []
        for template in prompts_of(task).templates:
            tokens = words(template.format(name), return_tensors="pt")
            vector = model.text_projection(model.text_model(**tokens).pooler_output)[0]
            vectors.append(vector / vector.norm())
        mean = torch.stack(vectors).mean(0)
        classes.append(mean / mean.norm())
    return torch.stack(classes)


def plain_accuracy(clip: Path, encoder: dict[str, torch.Tensor], task: str, data: Data) -> float:
    images, labels = data[task]
    return float(accuracy_score(labels, plain_answers(clip, encoder, task, images)))


@torch.inference_mode()
def plain_answers(clip: Path, encoder: dict[str, torch.Tensor], task: str, images: list[Image.Image]) -> list[int]:
    """With the whole CLIP, into which the encoder's weights are put."""
    model: Any = LIBRARY.CLIPModel.from_pretrained(clip).eval()
    wanted = {name: tensor for name, tensor in encoder.items() if name.startswith("vision_model.")}
    assert set(wanted) <= set(model.state_dict())
    model.load_state_dict(wanted, strict=False)
    embedded = model.visual_projection(model.vision_model(pixel_values=pixels(images)).pooler_output)
    cosines = torch.nn.functional.normalize(embedded) @ plain_head(clip, task).T
    return list(map(int, cosines.argmax(1)))


def test_a_bench_of_hub_checkpoints(zoo: Path, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["bench", "clip-vit-b32-20", "--methods", "ace,tsv_m", "--models", zoo / "models", "--data", zoo / "data",
                 "--tasks", ",".join(TASKS), "--batch-size", 5, "-o", tmp_path]  # fmt: skip
    assert run_command(monkeypatch, *arguments) == 0
    rows = rows_in(tmp_path / "clip-vit-b32-20.json")
    assert rows["experts"]["average"] == pytest.approx(2 / 3)
    assert 0 < rows["ace"]["average"] < 1
    clip = zoo / "models" / "base"
    for task in TASKS:
        expert = load_file(zoo / "models" / task / "model.safetensors")
        assert rows["experts"]["scores"][task] == plain_accuracy(clip, expert, task, data)
        assert rows["base"]["scores"][task] == plain_accuracy(clip, load_file(clip / "model.safetensors"), task, data)

    acemerge.merge(clip, {task: zoo / "models" / task for task in TASKS}, tmp_path / "merged", "ace")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for task in TASKS:
        assert rows["ace"]["scores"][task] == plain_accuracy(clip, merged, task, data)
    assert rows["ace"]["paper"]["raw"] == {"mnist": 92.65, "stl10": 96.73, "food101": 80.71}, "no average over other tasks"
    about = json.loads((tmp_path / "clip-vit-b32-20.json").read_text())
    assert len(about["models"]["mnist"]["sha256"]["model.safetensors"]) == 64
    assert "bench clip-vit-b32-20" in about["command"]
    assert "| in the paper |" in (tmp_path / "clip-vit-b32-20.md").read_text().replace("|   in", "| in")


def test_evaluate_takes_a_merged_folder_an_expert_and_the_base(
    zoo: Path, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--suite", "clip-vit-b32-8", "--tasks", "mnist", "--models", zoo / "models", "--data", zoo / "data", "-o", tmp_path]
    clip = zoo / "models" / "base"
    for model in ("base", "stl10"):
        assert run_command(monkeypatch, "evaluate", zoo / "models" / model, *where) == 0
        score = rows_in(tmp_path / f"{model}-clip-vit-b32-8-mnist.json")[model]["scores"]["mnist"]
        assert score == plain_accuracy(clip, load_file(zoo / "models" / model / "model.safetensors"), "mnist", data)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "base").symlink_to(clip)
    where[5] = alone  # the experts are not needed, so they need not be there
    assert run_command(monkeypatch, "evaluate", zoo / "models" / "base", *where, "--limit", 5) == 0
    assert run_command(monkeypatch, "evaluate", zoo / "models" / "base", *where, "--limit", 5, "--with-experts") == 2
    shown = capsys.readouterr().out
    assert "paper: ace" in shown
    assert "99.5" in shown


def test_a_suite_serves_methods_that_look_at_training_rows(zoo: Path, data: Data) -> None:
    suite = get_suite("clip-vit-b32-8", SuiteOptions(zoo / "models", zoo / "data", ("mnist",)))
    splits = suite.tasks[0].load()
    assert (len(splits.train), len(splits.validation)) == (10, 2)
    prepared = suite.domain.prepare(splits.train.first(4))
    model = suite.domain.load(suite.folders(0)["mnist"])
    logits = suite.domain.logits(model, prepared.batch(torch.arange(4)))
    assert logits.shape == (4, 10)
    logits.logsumexp(1).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if name.endswith("q_proj.weight"))


def test_the_head_of_a_class_is_the_mean_of_its_prompts(zoo: Path) -> None:
    heads = ZeroShotHeads(zoo / "models" / "base")
    scale = load_file(zoo / "models" / "base" / "model.safetensors")["logit_scale"].exp()
    for task in ("eurosat", "fer2013"):
        plain = scale * plain_head(zoo / "models" / "base", task)
        torch.testing.assert_close(heads.of(prompts_of(task)), plain, rtol=1e-4, atol=1e-4)
        assert len(plain) == len(prompts_of(task).classes)


def test_a_whole_clip_is_needed_and_labels_must_fit(
    zoo: Path, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture_data(tmp_path / "data", "mnist", pictures(0, 3), [0, 10, 1])
    where = ["--suite", "clip-vit-b32-8", "--tasks", "mnist", "--models", zoo / "models", "--data", tmp_path / "data"]
    assert run_command(monkeypatch, "evaluate", zoo / "models" / "base", *where) == 2
    assert "10 classes; these are not the data of this task" in capsys.readouterr().err
    where[3] = "cars"
    assert run_command(monkeypatch, "evaluate", zoo / "models" / "base", *where) == 2
    assert "has no folder cars" in capsys.readouterr().err
    where[3] = "cards"
    assert run_command(monkeypatch, "evaluate", zoo / "models" / "base", *where) == 2
    assert "did you mean 'cars'?" in capsys.readouterr().err


# --- OpenCLIP ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def open_clip(zoo: Path, data: Data) -> dict[str, OpenClip]:
    models = open_clip_models(zoo / "open_clip", ("MNIST", "STL10"))
    generator = torch.Generator().manual_seed(0)
    save_file({"weight": torch.randn(10, 8, generator=generator)}, zoo / "open_clip" / "ViT-B-32" / "head_MNISTVal.safetensors")
    copytree(zoo / "models" / "base", zoo / "open_clip" / "clip-vit-base-patch32")  # makes the other head, from prompts
    return models


def test_open_clip_encoders_compute_what_open_clip_computes(zoo: Path, open_clip: dict[str, OpenClip], data: Data) -> None:
    domain = ClipDomain("ViT-B-32", None, ZeroShotHeads(zoo), 32)
    model: Any = domain.load(zoo / "open_clip" / "ViT-B-32" / "MNISTVal" / "nonlinear_finetuned.pt").eval()
    batch = pixels(data["mnist"][0])
    with torch.inference_mode():
        torch.testing.assert_close(model(pixel_values=batch).image_embeds, open_clip["MNIST"](batch), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_bench_of_open_clip_files(
    zoo: Path, open_clip: dict[str, OpenClip], data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ["--models", zoo / "open_clip", "--data", zoo / "data", "--tasks", "mnist,stl10", "-o", tmp_path]
    assert run_command(monkeypatch, "bench", "clip-vit-b32-14", "--methods", "task_arithmetic", *where) == 0
    rows = rows_in(tmp_path / "clip-vit-b32-14.json")
    stored = load_file(zoo / "open_clip" / "ViT-B-32" / "head_MNISTVal.safetensors")["weight"]
    for name, task, head in (("MNIST", "mnist", stored), ("STL10", "stl10", plain_head(zoo / "models" / "base", "stl10"))):
        images, labels = data[task]
        for row, model in (("experts", open_clip[name]), ("base", open_clip["base"])):
            answers = (torch.nn.functional.normalize(model(pixels(images))) @ head.T).argmax(1)
            assert rows[row]["scores"][task] == accuracy_score(labels, answers)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("pickle", "a pickled module, which could run code when loaded"),
        ("text", "'model.text_projection' differs from the base's"),
        ("classes", "has 3 classes, the task 10"),
        ("missing", "nonlinear_finetuned.pt: missing; download TSV-M's checkpoints"),
    ],
)
def test_open_clip_files_that_do_not_fit_are_refused(
    spoil: str,
    message: str,
    data: Data,
    zoo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    models = open_clip_models(tmp_path, ("MNIST",))
    place = tmp_path / "ViT-B-32"
    if spoil == "pickle":
        torch.save(torch.nn.Linear(8, 10), place / "head_MNISTVal.pt")
    elif spoil == "text":
        models["MNIST"].model.get_parameter("text_projection").data += 1
        torch.save(models["MNIST"].state_dict(), place / "MNISTVal" / "nonlinear_finetuned.pt")
    elif spoil == "classes":
        torch.save({"weight": torch.zeros(3, 8)}, place / "head_MNISTVal.pt")
    else:
        (place / "MNISTVal" / "nonlinear_finetuned.pt").unlink()
    where = ["--tasks", "mnist", "--models", tmp_path, "--data", zoo / "data"]
    assert run_command(monkeypatch, "bench", "clip-vit-b32-8", "--methods", "average", *where) == 2
    assert message in capsys.readouterr().err
