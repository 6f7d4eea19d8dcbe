"""Suites whose experts are LoRA adapters."""

from __future__ import annotations

from dataclasses import replace

from acemerge.bench.data import digit_questions, text_tasks
from acemerge.bench.domains.digits import DigitsDomain
from acemerge.bench.domains.lora import Lora, LoraDomain
from acemerge.bench.domains.text import TextDomain
from acemerge.bench.suites.registry import Suite

TEXT = Lora(rank=16, alpha=32, targets=("query", "key", "value", "dense"))
"""Every matrix of the encoder."""
TEXT_LEARNING_RATE = 5e-4
DIGITS = Lora(rank=8, alpha=16, targets=("q_proj", "v_proj", "fc1", "fc2"))


def lora_text_suite(name: str, count: int) -> Suite:
    """The first text tasks, on the same rows as full fine-tunes learn from. Factors need larger steps than whole matrices."""
    tasks = tuple(replace(task, learning_rate=TEXT_LEARNING_RATE) for task in text_tasks.TASKS[:count])
    return Suite(name, LoraDomain("lora-text", TextDomain(), TEXT), tasks)


def lora_digits_suite(name: str) -> Suite:
    """Five questions about the same pictures."""
    return Suite(name, LoraDomain("lora-digits", DigitsDomain(), DIGITS), digit_questions.TASKS)
