"""A task's data, from the hub or from files in the same layout: rows are read when they are asked for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from acemerge.bench.data.task import SPLIT_SEED, VALIDATION_ROWS, Rows
from acemerge.errors import InputError, first_line

_READERS = {"parquet": "parquet", "jsonl": "json", "json": "json", "csv": "csv"}


@dataclass(frozen=True)
class DataSource:
    """Where one task's rows are: a data set of the hub, or a folder that holds the same splits."""

    hub: str
    config: str | None = None
    folder: Path | None = None
    """Holds `train.parquet`, `test-00000-of-00002.parquet`, `validation.csv`, `test.jsonl` or `test/<class>/<picture>`."""

    @property
    def name(self) -> str:
        """For the record: the hub's name, or the folder's with a mark that changes when its files do."""
        if self.folder is None:
            return f"{self.hub} ({self.config})" if self.config else self.hub
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        stamps = [(str(path.relative_to(self.folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return f"local files '{self.folder.name}', {hashlib.sha256(repr(stamps).encode()).hexdigest()[:12]}"

    def open(self, split: str) -> Any:
        """The split, as the `datasets` library has it."""
        try:
            import datasets
        except ImportError:
            raise InputError("the paper's suites need datasets: pip install 'acemerge[eval]'") from None

        datasets.disable_progress_bars()
        try:
            if self.folder is not None:
                return self._open_files(split)
            return datasets.load_dataset(self.hub, self.config, split=split)
        except InputError:
            raise
        except Exception as error:  # the library and the hub client raise many unrelated types
            where = self.folder or self.hub
            raise InputError(
                f"{where}: split '{split}' could not be read: {first_line(error)}. Give the data as local files with --data"
            ) from None

    def _open_files(self, split: str) -> Any:
        import datasets

        assert self.folder is not None
        pattern = re.compile(rf"{split}(-\d{{5}}-of-\d{{5}})?\.({'|'.join(_READERS)})")
        for place in (self.folder, self.folder / "data"):
            files = sorted(path for path in place.glob(f"{split}*") if pattern.fullmatch(path.name))
            if files:
                reader = _READERS[files[0].suffix.removeprefix(".")]
                return datasets.load_dataset(reader, data_files=[str(file) for file in files], split="train")
        if (self.folder / split).is_dir():
            return datasets.load_dataset("imagefolder", data_dir=str(self.folder / split), split="train")
        raise InputError(
            f"{self.folder}: holds no split '{split}'; expected {split}.parquet, .csv or .jsonl, numbered {split}-*.parquet, or "
            f"a folder {split} of pictures, as {self.hub} on the hub has it"
        )


@dataclass(frozen=True)
class Column(Sequence[Any]):
    """What is made of each row when it is asked for, so that pictures are decoded one batch at a time."""

    dataset: Any
    make: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.dataset)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Column: ...
    def __getitem__(self, index: int | slice) -> Any:
        """One row's value, or a column of fewer rows."""
        if isinstance(index, slice):
            return Column(self.dataset.select(range(*index.indices(len(self)))), self.make)
        return self.make(self.dataset[index])


def find_column(dataset: Any, names: Sequence[str], where: object) -> str:
    """The first of these columns that the data have."""
    found = next((name for name in names if name in dataset.column_names), None)
    if found is None:
        raise InputError(f"{where}: expected a column {' or '.join(names)}, found {', '.join(dataset.column_names)}")
    return found


@dataclass(frozen=True)
class LazySplits:
    """Splits that are opened when they are asked for. See `SplitRows`."""

    source: DataSource
    make_rows: Callable[[Any], Rows]
    """From a data set to rows."""
    test_split: str
    train_split: str = "train"

    @property
    def test(self) -> Rows:
        """In the order of the data."""
        return self.make_rows(self.source.open(self.test_split))

    @property
    def validation(self) -> Rows:
        """Cut from the training rows."""
        return self._training_part(slice)

    @property
    def train(self) -> Rows:
        """What validation leaves."""
        return self._training_part(lambda cut: slice(cut, None))

    def _training_part(self, part: Callable[[int], slice]) -> Rows:
        dataset = self.source.open(self.train_split).shuffle(seed=SPLIT_SEED)
        cut = min(VALIDATION_ROWS, len(dataset) // 5)
        return self.make_rows(dataset.select(range(len(dataset))[part(cut)]))
