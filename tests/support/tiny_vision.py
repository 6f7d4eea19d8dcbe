"""A tiny vision model, and tasks of tiny pictures."""

from __future__ import annotations

from functools import partial

import numpy as np

from acemerge.bench.data.task import Rows, Splits, TrainedTask, split
from acemerge.bench.domains.tiny_vit import TinyViTConfig

SMALL = TinyViTConfig(
    image_size=16, widths=(8, 12, 16, 20), depths=(1, 1, 1, 1), heads=(0, 2, 2, 2), windows=(0, 2, 2, 2), strides=(2, 1, 1)
)


def bright_side(axis: int) -> Splits:
    """Noise that is brighter on one side: which one?"""
    generator = np.random.default_rng(axis)
    images, labels = [], []
    for row in range(150):
        image = generator.integers(0, 120, (16, 16))
        half = np.moveaxis(image, axis, 0)[8 * (row % 2) : 8 * (row % 2) + 8]
        half += 100
        images.append(image.astype(np.uint8))
        labels.append(row % 2)
    return split(Rows(images, labels), test_rows=50, validation_rows=20)


TASKS = tuple(
    TrainedTask(name, ("first", "second"), partial(bright_side, axis), "made here", 80, 16, 1e-3, epochs=4)
    for axis, name in enumerate(("rows", "columns"))
)
