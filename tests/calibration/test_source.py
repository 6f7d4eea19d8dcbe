"""Where data comes from: files and suites, and every mistake in them told in one sentence before any work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import acemerge
import model_zoo
from acemerge.calibration.source import open_data
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.errors import AcemergeError
from data_statistics import write_rows
from model_zoo import Models, quiet_transformers, write_tensors
from refused_data import refusal
from small_models import write_models


def test_data_and_method_must_go_together(models: Models, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", models.experts)
    without = refusal(models, tmp_path)
    assert "method 'regmean' uses data of every expert's task besides the weights; pass --data with one of" in without
    needless = refusal(models, tmp_path, method="ace", data=rows)
    choices = "adamerging, fisher, mingle, regmean, regmean_plusplus"
    assert f"uses the weights alone; leave --data out, or choose one of {choices}" in needless
    by_rule = refusal(models, tmp_path, method="ace", tensors=[{"match": "*query*", "method": "regmean"}])
    assert "method 'regmean' uses data" in by_rule


def test_neither_a_folder_nor_a_suite(models: Models, tmp_path: Path) -> None:
    message = refusal(models, tmp_path, data="text-9")
    assert "--data text-9: no such folder, and there is no suite 'text-9': did you mean 'text-8'?" in message


def test_suites_are_found_whatever_is_imported_first() -> None:
    """In a task on another machine, say. The bench is imported when a suite is asked for by name, and not before."""
    script = """
        import sys
        import acemerge.execute.ray_task
        from acemerge.calibration.suite import find_suite
        assert not any(name.startswith("acemerge.bench") for name in sys.modules)
        print(find_suite("text-8").name)
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "text-8\n"


def test_experts_are_called_as_their_tasks(models: Models, tmp_path: Path) -> None:
    assert "--data text-8: has no task for expert 'red'" in refusal(models, tmp_path, data="text-8")


Change = Callable[[Path, dict[str, Tensor]], None]


def rewritten(**tensors: Tensor | None) -> Change:
    def change(file: Path, old: dict[str, Tensor]) -> None:
        new = {name: tensor for name, tensor in {**old, **tensors}.items() if tensor is not None}
        write_tensors(file.parent, new, file.name)

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda file, _: file.unlink(), "no data for expert 'red'"),
        (rewritten(input_id=torch.ones(12, 7, dtype=torch.long)), "takes no input 'input_id'; did you mean 'input_ids'?"),
        (rewritten(input_ids=None), "holds no 'input_ids', which BertForSequenceClassification takes"),
        (rewritten(input_ids=torch.full((12, 7), 40)), "token 40 is not in the vocabulary of expert 'red'"),
        (rewritten(input_ids=torch.full((12, 7), -1)), "token -1 is not in the vocabulary"),
        (rewritten(input_ids=torch.ones(12, 7)), "'input_ids' must be int64 or int32 [row, token], found torch.float32 [12, 7]"),
        (rewritten(attention_mask=torch.ones(12, 6, dtype=torch.long)), "must have one shape"),
        (rewritten(attention_mask=torch.ones(11, 7, dtype=torch.long)), "rows found"),
        (
            rewritten(input_ids=torch.ones(0, 7, dtype=torch.long), attention_mask=None, labels=None),
            "holds no rows; give at least one",
        ),
        (lambda file, _: file.write_bytes(b"no tensors"), "not a whole safetensors file"),
        (lambda file, _: file.with_suffix(".jsonl").write_text("{}"), "has both red.safetensors and red.jsonl"),
    ],
)
def test_a_wrong_file_is_told_before_any_work(change: Change, expected: str, models: Models, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", models.experts)
    change(rows / "red.safetensors", load_file(rows / "red.safetensors"))
    message = refusal(models, tmp_path, data=rows)
    assert expected in message
    assert "red" in message


def test_all_wrong_files_are_told_at_once(models: Models, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", ["red"])
    message = refusal(models, tmp_path, data=rows)
    assert "2 problems" in message
    assert "green.jsonl" in message
    assert "blue.jsonl" in message


def test_pictures_of_another_size(tmp_path: Path) -> None:
    models = model_zoo.vit(tmp_path / "models")
    rows = write_rows(tmp_path / "rows", models.experts, pixels=True)
    write_tensors(rows, {"pixel_values": torch.zeros(2, 3, 9, 9)}, "red.safetensors")
    assert "must be float32 [row, 3, 8, 8], found torch.float32 [2, 3, 9, 9]" in refusal(models, tmp_path, data=rows)


def test_a_model_that_cannot_be_run(tmp_path: Path) -> None:
    small = write_models(tmp_path / "small")
    rows = write_rows(tmp_path / "rows", ["expert-0", "expert-1", "expert-2"])
    with pytest.raises(AcemergeError, match="'architectures' names no class of transformers"):
        acemerge.merge(small.base, small.experts, tmp_path / "out", method="fisher", data=rows)


def test_models_without_heads_have_no_answers(tmp_path: Path) -> None:
    models = model_zoo.clip_vision(tmp_path / "models")
    rows = write_rows(tmp_path / "rows", models.experts, pixels=True)
    experts = list(models.experts.values())
    with quiet_transformers():
        acemerge.merge(models.base, experts, tmp_path / "regmean", method="regmean", data=rows)
        for method in ("fisher", "adamerging"):
            with pytest.raises(AcemergeError, match="has no head and gives no logits"):
                acemerge.merge(models.base, experts, tmp_path / method, method=method, data=rows)


def test_adapters_are_refused(models: Models, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    rows = write_rows(tmp_path / "rows", ["red", "lora"])
    with quiet_transformers():
        model = transformers.BertForSequenceClassification.from_pretrained(models.experts["red"])
        config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
        peft.get_peft_model(model, config).save_pretrained(tmp_path / "lora")
        with pytest.raises(AcemergeError, match=r"runs every expert's model on data, and expert 'lora'.* is an adapter"):
            acemerge.merge(models.base, [models.experts["red"], tmp_path / "lora"], tmp_path / "out", method="regmean", data=rows)


def test_the_stored_order_is_no_choice(models: Models, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", models.experts)
    assert "whatever the stored order" in refusal(models, tmp_path, data=rows, orientation="stored")


def test_blocks_must_be_merged_by_one_method(models: Models, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", models.experts)
    rule = {"match": "*query.weight", "method": "ties"}
    assert "rules may only average or keep" in refusal(models, tmp_path, "regmean_plusplus", data=rows, tensors=[rule])
    kept = {"match": "*query.weight", "do": "keep"}
    with quiet_transformers():
        acemerge.merge(
            models.base, list(models.experts.values()), tmp_path / "out", "regmean_plusplus", data=rows, tensors=[kept]
        )


def test_a_suite_gives_training_rows_only(tmp_path: Path) -> None:
    from tiny_bench import SUITE

    model = model_zoo.bert(tmp_path / "models")
    named = [open_checkpoint(model.experts["red"], task.name) for task in SUITE.tasks]
    data = open_data(SUITE, named[0], named)
    for task, expert in zip(SUITE.tasks, named, strict=True):
        inputs = data.inputs(expert, 30)
        expected = SUITE.domain.prepare(task.load().train.first(30)).batch(torch.arange(30))
        assert inputs.rows == 30
        assert next(inputs.batches_in_order(30))["input_ids"].equal(expected["input_ids"])
    assert data.about == "tiny-3, training rows"
