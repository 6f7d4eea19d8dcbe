"""The digits domain: a base pretrained for a few steps, and adapters under heads that stay fixed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from acemerge.bench.data.digit_questions import QUESTIONS, TASKS
from acemerge.bench.domains.digits import DigitsDomain, Pretraining
from acemerge.bench.domains.domain import is_of_head
from acemerge.bench.domains.lora import LoraDomain
from acemerge.bench.measure.evaluation import evaluate
from acemerge.bench.measure.experts import Experts, prepare_experts
from acemerge.bench.suites.lora import DIGITS

DOMAIN = LoraDomain("few-digits", DigitsDomain(Pretraining(hidden_size=32, layers=1, steps=40)), DIGITS)
TASK = replace(TASKS[2], train_rows=640, epochs=4, learning_rate=1e-2)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experts]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACEMERGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        prepare_experts(DOMAIN, [TASK], [0], lambda said: None, workers=1)
        yield Experts(DOMAIN, 0)


def test_no_picture_is_on_two_sides() -> None:
    splits = QUESTIONS[0].load()
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [1197, 200, 400]
    pictures = [{image.tobytes() for image in part.inputs} for part in (splits.train, splits.validation, splits.test)]
    assert sum(map(len, pictures)) == len(set.union(*pictures))


def test_questions_are_about_the_same_pictures() -> None:
    digits, loops = QUESTIONS[0].load(), QUESTIONS[2].load()
    assert all((a == b).all() for a, b in zip(digits.test.inputs, loops.test.inputs, strict=True))
    assert [QUESTIONS[2].class_of_digit[int(label)] for label in digits.test.labels] == list(loops.test.labels)


def test_the_head_is_what_the_base_sees_and_stays(experts: Experts) -> None:
    new = DOMAIN.new_expert(experts.base, TASK)
    assert not any(p.requires_grad for name, p in new.named_parameters() if is_of_head(name))
    saved = load_file(experts.folder(TASK) / "adapter_model.safetensors")["base_model.model.classifier.weight"]
    fresh = next(p for name, p in new.named_parameters() if name.endswith("modules_to_save.default.weight"))
    assert torch.equal(saved, fresh)


def test_the_expert_knows_more_than_the_base(experts: Experts) -> None:
    rows = DOMAIN.prepare(TASK.load().validation)
    base = DOMAIN.inner.new_expert(experts.base, TASK)
    expert = DOMAIN.load(experts.folder(TASK))
    assert evaluate(DOMAIN, expert, rows).share > evaluate(DOMAIN, base, rows).share + 0.05
