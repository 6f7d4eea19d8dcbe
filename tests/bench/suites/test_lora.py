"""The suites of adapters by their names."""

from __future__ import annotations

from acemerge.bench.suites.registry import get_suite


def test_lora_text_8_differs_from_text_8_in_how_it_trains() -> None:
    full, lora = get_suite("text-8"), get_suite("lora-text-8")
    other = {field for t, f in zip(lora.tasks, full.tasks, strict=True) for field in vars(f) if vars(t)[field] != vars(f)[field]}
    assert other == {"learning_rate"}, "the same rows, as many of them, in the same batches"
    assert lora.experts(0).base != full.experts(0).base
    assert lora.folders(0).keys() == full.folders(0).keys()
    assert set(lora.folders(0).values()).isdisjoint(full.folders(0).values())


def test_lora_digits() -> None:
    suite = get_suite("lora-digits")
    assert [task.name for task in suite.tasks] == ["digit", "parity", "loops", "size", "remainder"]
    assert suite.domain.name == "lora-digits"
