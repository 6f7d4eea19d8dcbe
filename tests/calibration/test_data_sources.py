"""Where data comes from: files and suites, and every mistake in them told in one sentence before any work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import acemerge
import model_zoo
from acemerge.calibration.source import open_data
from acemerge.calibration.texts import read_texts
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.errors import AcemergeError
from data_statistics import write_rows
from model_zoo import Models, quiet_transformers, write_tensors
from small_models import write_models


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACEMERGE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return model_zoo.bert(tmp_path / "models")


def refusal(models: Models, tmp_path: Path, method: str = "regmean", **settings: Any) -> str:
    """The one message with which a merge ends that leaves nothing behind."""
    with pytest.raises(AcemergeError) as caught, quiet_transformers():
        acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", method=method, **settings)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "cache").exists(), "nothing was measured"
    return str(caught.value)


def test_data_and_method_must_go_together(models: Models, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", models.experts)
    without = refusal(models, tmp_path)
    assert "method 'regmean' uses data of every expert's task besides the weights; pass --data with one of" in without
    needless = refusal(models, tmp_path, method="ace", data=rows)
    assert "uses the weights alone; leave --data out, or choose one of adamerging, fisher, regmean, regmean_plusplus" in needless
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


# --- texts -------------------------------------------------------------------------------------------------------------


def add_tokenizer(folder: Path, words: int = 40) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[UNK]": 0, "[PAD]": 1, **{f"w{i}": i for i in range(2, words)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", model_max_length=10).save_pretrained(
        folder
    )


def write_texts(folder: Path, models: Models, *lines: Any) -> Path:
    folder.mkdir()
    for name in models.experts:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        (folder / f"{name}.jsonl").write_text(text + "\n")
    return folder


def test_texts_are_tokenised_cut_and_padded(models: Models, tmp_path: Path) -> None:
    add_tokenizer(models.base)
    long = " ".join(f"w{i}" for i in range(2, 30))
    folder = write_texts(tmp_path / "rows", models, {"text": "w5 w6", "label": 1}, "", {"text": long})
    base, red = open_checkpoint(models.base, "base"), open_checkpoint(models.experts["red"], "red")
    with quiet_transformers():
        texts = read_texts(folder / "red.jsonl", base, red)
    assert texts.lengths.tolist() == [2, 10]
    batch = texts.batch(torch.tensor([1, 0]))
    assert batch["input_ids"][0].tolist() == list(range(2, 12))
    assert batch["attention_mask"][1].tolist() == [1, 1] + [0] * 8
    assert batch["input_ids"][1].tolist()[:2] == [5, 6]


@pytest.mark.parametrize("method", ["regmean", "fisher"])
def test_a_merge_with_texts(method: str, models: Models, tmp_path: Path) -> None:
    add_tokenizer(models.base)
    lines = [{"text": f"w{i} w{i + 1} w7", "text_pair": f"w{i + 2}"} for i in range(2, 12)]
    rows = write_texts(tmp_path / "rows", models, *lines)
    with quiet_transformers():
        result = acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", method=method, data=rows)
    assert result.plan.to_json()["data"]["about"] == "files of rows"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "holds no rows"),
        (["not JSON"], "line 1: cannot be read as JSON"),
        (["[1]"], "line 1: expected an object"),
        ([{"txt": "w5"}], "there is no field 'txt': did you mean 'text'?"),
        ([{"text": 5}], "'text' must be text, found int"),
        ([{"label": 5}], "'text' must be text, found NoneType"),
        ([{"text": "w5"}, {"text": "w5", "text_pair": "w6"}], "line 2: give 'text_pair' on every line, or on none"),
        ([{"text": ""}], "row 1 has no tokens"),
    ],
)
def test_wrong_texts_are_told_before_any_work(lines: list[Any], expected: str, models: Models, tmp_path: Path) -> None:
    add_tokenizer(models.base)
    assert expected in refusal(models, tmp_path, data=write_texts(tmp_path / "rows", models, *lines))


def test_texts_need_a_tokenizer_with_the_models_words(models: Models, tmp_path: Path) -> None:
    rows = write_texts(tmp_path / "rows", models, {"text": "w5 w60"})
    assert "has a tokenizer; put its files beside one of them" in refusal(models, tmp_path, data=rows)
    add_tokenizer(models.base, words=70)
    assert "token 60 is not in the vocabulary" in refusal(models, tmp_path, data=rows)


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
