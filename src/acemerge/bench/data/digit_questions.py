"""Five questions about the handwritten digits that are inside scikit-learn, all of the same pictures, 8 pixels square."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from acemerge.bench.data.task import SPLIT_SEED, Rows, Splits, TrainedTask, split

TEST_PICTURES = 400
VALIDATION_PICTURES = 200


@dataclass(frozen=True)
class Pictures:
    """Images [picture, 1, 8, 8], from -1 (paper) to 1 (ink), and the digits that they show."""

    images: Tensor
    digits: Tensor


def load_pictures() -> tuple[Pictures, Pictures]:
    """The training and the test pictures."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    digits = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    test, train = order[:TEST_PICTURES], order[TEST_PICTURES:]
    return Pictures(images[train], digits[train]), Pictures(images[test], digits[test])


@dataclass(frozen=True)
class Question:
    """What is asked of every picture."""

    name: str
    classes: tuple[str, ...]
    class_of_digit: tuple[int, ...]

    def answers(self, digits: Tensor) -> Tensor:
        """The right class of each."""
        return torch.tensor(self.class_of_digit)[digits]

    def load(self) -> Splits:
        """The same pictures in the same order for every question."""
        train, test = load_pictures()
        return split(self._rows(train), self._rows(test), validation_rows=VALIDATION_PICTURES)

    def _rows(self, pictures: Pictures) -> Rows:
        return Rows(list(pictures.images[:, 0].numpy()), self.answers(pictures.digits).tolist())


QUESTIONS = (
    Question("digit", tuple("0123456789"), tuple(range(10))),
    Question("parity", ("even", "odd"), (0, 1, 0, 1, 0, 1, 0, 1, 0, 1)),
    Question("loops", ("no loop", "one loop", "two loops"), (1, 0, 0, 0, 0, 0, 1, 0, 2, 1)),
    Question("size", ("0 to 4", "5 to 9"), (0, 0, 0, 0, 0, 1, 1, 1, 1, 1)),
    Question("remainder", ("3n", "3n + 1", "3n + 2"), (0, 1, 2, 0, 1, 2, 0, 1, 2, 0)),
)

TASKS = tuple(TrainedTask(q.name, q.classes, q.load, "scikit-learn", 1197, 64, 2e-3, epochs=11) for q in QUESTIONS)
"""With the learning rate of an adapter."""
