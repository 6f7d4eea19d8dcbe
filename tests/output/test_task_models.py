"""Experts with heads of their own: what is kept of them beside the merged backbone, and how a task's model comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import acemerge
import model_zoo as zoo
from model_zoo import LABELS, Models, Tensors, assert_equal_tensors, file_hashes, load_whole, read_tensors

INPUT_IDS = torch.tensor([[5, 9, 31, 7], [3, 3, 12, 39]])


@dataclass(frozen=True)
class Case:
    """A family of classifiers: which tensors are each expert's own, and what its backbone's names start with."""

    build: Callable[[Path], Models]
    architecture: str
    own: set[str]
    prefixes: tuple[str, str] = ("", "")
    """(the merged model's, the experts')."""


CASES = {
    "bert": Case(
        zoo.bert,
        "BertForSequenceClassification",
        {"classifier.weight", "classifier.bias", "bert.pooler.dense.weight", "bert.pooler.dense.bias"},
    ),
    "bert_model": Case(
        lambda root: zoo.bert(root, "BertModel"),
        "BertForSequenceClassification",
        {"classifier.weight", "classifier.bias"},
        ("", "bert."),
    ),
    "bert_with_next_sentence_head": Case(
        lambda root: zoo.bert(root, "BertForPreTraining"),
        "BertForSequenceClassification",
        {"classifier.weight", "classifier.bias"},
    ),
    "roberta": Case(
        zoo.roberta,
        "RobertaForSequenceClassification",
        {f"classifier.{layer}.{kind}" for layer in ("dense", "out_proj") for kind in ("weight", "bias")},
    ),
    "gpt2": Case(zoo.gpt2, "GPT2ForSequenceClassification", {"score.weight"}),
    "gpt2_model": Case(
        lambda root: zoo.gpt2(root, "GPT2Model"),
        "GPT2ForSequenceClassification",
        {"score.weight"},
        ("", "transformer."),
    ),
}


BOTH = [(name, expert) for name in CASES for expert in LABELS]


@dataclass(frozen=True)
class Merge:
    case: Case
    models: Models
    output: Path

    def expected(self, expert: str) -> Tensors:
        """That task's whole model: the expert's own tensors, and every other one as merged."""
        ours, theirs = self.case.prefixes
        tensors, merged = read_tensors(self.models.experts[expert]), read_tensors(self.output)
        return {
            name: tensor if name in self.case.own else merged[ours + name.removeprefix(theirs)]
            for name, tensor in tensors.items()
        }


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    with zoo.quiet_transformers():
        yield


@pytest.fixture(scope="module")
def get_merge(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Merge]:
    """Each family's experts, with tokenizers, and their merge; made when first asked for."""
    made: dict[str, Merge] = {}

    def get(name: str) -> Merge:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            models = CASES[name].build(root / "in")
            for expert in ("base", *models.experts):
                (root / "in" / expert / "tokenizer.json").write_text(f'{{"of": "{expert}"}}')
            acemerge.merge(models.base, models.experts, root / "out")
            made[name] = Merge(CASES[name], models, root / "out")
        return made[name]

    return get


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=INPUT_IDS).logits
    return found


# --- heads/<expert>/ ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_expert_has_a_head(get_merge: Callable[[str], Merge], name: str) -> None:
    assert sorted(path.name for path in (get_merge(name).output / "heads").iterdir()) == sorted(LABELS)


@pytest.mark.parametrize(("name", "expert"), BOTH)
def test_a_head_is_the_experts_own_tensors(get_merge: Callable[[str], Merge], name: str, expert: str) -> None:
    merge = get_merge(name)
    theirs = read_tensors(merge.models.experts[expert])
    head = load_file(merge.output / "heads" / expert / "head.safetensors")
    assert_equal_tensors(head, {own: theirs[own] for own in merge.case.own})


@pytest.mark.parametrize(("name", "expert"), BOTH)
def test_a_head_comes_with_the_experts_small_files(get_merge: Callable[[str], Merge], name: str, expert: str) -> None:
    merge = get_merge(name)
    folder, source = merge.output / "heads" / expert, merge.models.experts[expert]
    assert set(file_hashes(folder)) == {"head.safetensors", "head.json", "config.json", "tokenizer.json"}
    for file in ("config.json", "tokenizer.json"):
        assert (folder / file).read_bytes() == (source / file).read_bytes()


@pytest.mark.parametrize(("name", "expert"), BOTH)
def test_a_head_knows_the_backbones_names(get_merge: Callable[[str], Merge], name: str, expert: str) -> None:
    merge = get_merge(name)
    ours, theirs = merge.case.prefixes
    backbone = read_tensors(merge.models.experts[expert]).keys() - merge.case.own
    names = json.loads((merge.output / "heads" / expert / "head.json").read_text())["backbone"]
    assert names == {tensor: ours + tensor.removeprefix(theirs) for tensor in backbone}


def test_the_merged_model_itself_has_no_head(get_merge: Callable[[str], Merge]) -> None:
    merge = get_merge("gpt2")
    assert read_tensors(merge.output).keys() == read_tensors(merge.models.base).keys()


def test_a_base_with_a_head_keeps_its_own(tmp_path: Path) -> None:
    models = zoo.bert(tmp_path, "BertForSequenceClassification")
    acemerge.merge(models.base, models.experts, tmp_path / "out", method="average")
    own = ("classifier.weight", "classifier.bias")
    base, merged, green = (read_tensors(folder) for folder in (models.base, tmp_path / "out", models.experts["green"]))
    assert_equal_tensors({name: merged[name] for name in own}, {name: base[name] for name in own})
    loaded = acemerge.load_expert_head(tmp_path / "out", "green").state_dict()
    assert_equal_tensors({name: loaded[name] for name in own}, {name: green[name] for name in own})


# --- load_expert_head --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "expert"), BOTH)
def test_loading_gives_the_experts_head_on_the_merged_backbone(get_merge: Callable[[str], Merge], name: str, expert: str) -> None:
    merge = get_merge(name)
    model = acemerge.load_expert_head(merge.output, expert)
    assert type(model).__name__ == merge.case.architecture
    assert_equal_tensors(model.state_dict(), merge.expected(expert))


@pytest.mark.parametrize(("name", "expert"), BOTH)
def test_a_loaded_model_gives_its_tasks_logits(get_merge: Callable[[str], Merge], name: str, expert: str) -> None:
    model = acemerge.load_expert_head(get_merge(name).output, expert)
    found = logits(model)
    assert found.shape == (len(INPUT_IDS), LABELS[expert])
    assert torch.isfinite(found).all()
    assert not model.training


def test_tasks_do_not_share_memory(get_merge: Callable[[str], Merge]) -> None:
    output = get_merge("bert").output
    before = file_hashes(output)
    model = acemerge.load_expert_head(output, "red")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert file_hashes(output) == before
    assert_equal_tensors(acemerge.load_expert_head(output, "red").state_dict(), get_merge("bert").expected("red"))


# --- export_expert -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "expert"), BOTH)
def test_an_exported_folder_is_that_tasks_model(
    get_merge: Callable[[str], Merge], tmp_path: Path, name: str, expert: str
) -> None:
    merge = get_merge(name)
    assert acemerge.export_expert(merge.output, expert, tmp_path / "task") == tmp_path / "task"
    exported = load_whole("AutoModelForSequenceClassification", tmp_path / "task")
    assert type(exported).__name__ == merge.case.architecture
    assert_equal_tensors(read_tensors(tmp_path / "task"), merge.expected(expert))
    assert torch.equal(logits(exported), logits(acemerge.load_expert_head(merge.output, expert)))


def test_an_exported_folder_has_the_experts_config_and_tokenizer(get_merge: Callable[[str], Merge], tmp_path: Path) -> None:
    merge = get_merge("gpt2")
    acemerge.export_expert(merge.output, "blue", tmp_path / "task")
    for file in ("config.json", "tokenizer.json"):
        assert (tmp_path / "task" / file).read_bytes() == (merge.models.experts["blue"] / file).read_bytes()
    assert not {"head.json", "head.safetensors", "heads"} & {path.name for path in (tmp_path / "task").iterdir()}


@pytest.mark.parametrize("name", ["bert_model", "gpt2"])
def test_exporting_from_shards_in_another_dtype(get_merge: Callable[[str], Merge], tmp_path: Path, name: str) -> None:
    models = get_merge(name).models
    acemerge.merge(models.base, models.experts, tmp_path / "out", dtype="bfloat16", shard_size=4_000)
    acemerge.export_expert(tmp_path / "out", "green", tmp_path / "task")
    exported = load_whole("AutoModelForSequenceClassification", tmp_path / "task")
    loaded = acemerge.load_expert_head(tmp_path / "out", "green")
    assert_equal_tensors(exported.state_dict(), loaded.state_dict())
    assert torch.equal(logits(exported), logits(loaded))
    assert {tensor.dtype for tensor in read_tensors(tmp_path / "task").values()} == {torch.bfloat16}
    assert exported.dtype == torch.bfloat16


def test_a_merge_is_never_replaced_by_an_export(get_merge: Callable[[str], Merge], tmp_path: Path) -> None:
    models = get_merge("bert").models
    for name in ("out", "other"):
        acemerge.merge(models.base, models.experts, tmp_path / name)
    with pytest.raises(acemerge.InputError, match="is, holds or lies in"):
        acemerge.export_expert(tmp_path / "out", "red", tmp_path / "out", overwrite=True)
    with pytest.raises(acemerge.InputError, match="is a merge, not an earlier export"):
        acemerge.export_expert(tmp_path / "out", "red", tmp_path / "other", overwrite=True)
    for _ in range(2):
        acemerge.export_expert(tmp_path / "out", "red", tmp_path / "task", overwrite=True)


def test_exporting_twice_gives_the_same_bytes(get_merge: Callable[[str], Merge], tmp_path: Path) -> None:
    for folder in ("first", "second"):
        acemerge.export_expert(get_merge("bert").output, "red", tmp_path / folder)
    assert file_hashes(tmp_path / "first") == file_hashes(tmp_path / "second")


def test_an_existing_folder_is_not_replaced(get_merge: Callable[[str], Merge], tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(acemerge.InputError, match="already exists"):
        acemerge.export_expert(get_merge("bert").output, "red", tmp_path)
    assert file_hashes(tmp_path).keys() == {"mine.txt"}


# --- mistakes ----------------------------------------------------------------------------------------------------------


def load(folder: Path, expert: str, tmp_path: Path) -> None:
    acemerge.load_expert_head(folder, expert)


def export(folder: Path, expert: str, tmp_path: Path) -> None:
    acemerge.export_expert(folder, expert, tmp_path / "task")


@pytest.mark.parametrize("verb", [load, export])
def test_an_unknown_expert_gets_a_hint(
    get_merge: Callable[[str], Merge], tmp_path: Path, verb: Callable[[Path, str, Path], None]
) -> None:
    with pytest.raises(acemerge.InputError, match=r"'grene': did you mean 'green'\? Known: blue, green, red"):
        verb(get_merge("bert").output, "grene", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", [load, export])
def test_a_folder_without_heads_is_refused(
    get_merge: Callable[[str], Merge], tmp_path: Path, verb: Callable[[Path, str, Path], None]
) -> None:
    with pytest.raises(acemerge.InputError, match="holds no heads"):
        verb(get_merge("bert").models.base, "red", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", [load, export])
def test_a_head_from_a_bare_file_has_no_config_to_go_by(
    get_merge: Callable[[str], Merge], tmp_path: Path, verb: Callable[[Path, str, Path], None]
) -> None:
    # The base's config names another architecture and another number of labels: it must not stand in.
    models = get_merge("gpt2").models
    file = models.experts["green"] / "model.safetensors"
    acemerge.merge(models.base, {"green": file, "red": models.experts["red"]}, tmp_path / "out")
    with pytest.raises(acemerge.InputError, match=r"config\.json"):
        verb(tmp_path / "out", "green", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_merge_of_models_without_heads_writes_none(tmp_path: Path) -> None:
    models = zoo.unknown(tmp_path)
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    with pytest.raises(acemerge.InputError, match="holds no heads"):
        acemerge.load_expert_head(tmp_path / "out", "red")
