"""Files beside the weights that fit the output's vocabulary: tokenizer, chat template, generation config, config.json; heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import acemerge
import vocabulary_zoo as zoo
from acemerge.errors import InputError
from model_zoo import quiet_transformers

TEMPLATE = "{% for message in messages %}{{ message['content'] }}<end>{% endfor %}"


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """A base, an expert that chats with a token of its own at the end, and one with another token; all ids of both are others."""
    base = zoo.base(tmp_path / "base")
    chat, other = zoo.expert(base, tmp_path / "chat", "<end>"), zoo.expert(base, tmp_path / "other", "<x>", seed=2)
    for folder, seed in ((chat, 1), (other, 2)):
        zoo.renumber(folder, torch.randperm(281, generator=torch.Generator().manual_seed(seed)).tolist())
    own = transformers.AutoTokenizer.from_pretrained(chat)
    own.eos_token, own.chat_template = "<end>", TEMPLATE
    own.save_pretrained(chat)
    edit(chat / "generation_config.json", eos_token_id=[own.convert_tokens_to_ids("<end>"), own.convert_tokens_to_ids("</s>")])
    edit(chat / "config.json", eos_token_id=own.convert_tokens_to_ids("<end>"))
    return [base, chat, other]


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("asked", [{"files_from": "chat"}, {"tokenizer": "chat"}, {"tokenizer": "union", "files_from": "chat"}])
def test_files_of_an_expert(asked: dict[str, Any], models: list[Path], tmp_path: Path) -> None:
    base, *experts = models
    acemerge.merge(base, experts, tmp_path / "out", **asked)
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert own.eos_token == "<end>"
    assert own.chat_template == TEMPLATE
    assert own.decode(own.apply_chat_template([{"role": "user", "content": "hello"}], return_dict=False)) == "hello<end>"
    generation, config = read(tmp_path / "out/generation_config.json"), read(tmp_path / "out/config.json")
    assert own.convert_ids_to_tokens(generation["eos_token_id"]) == ["<end>", "</s>"]
    assert own.convert_ids_to_tokens(generation["bos_token_id"]) == "<s>"
    assert own.convert_ids_to_tokens(config["eos_token_id"]) == "<end>"
    assert own.convert_ids_to_tokens(config["bos_token_id"]) == "<s>"
    assert len(own) == config["vocab_size"] == (282 if "union" in asked.values() else 281)
    with_same_vocabulary = "union" not in asked.values()
    assert (
        (tmp_path / "out/tokenizer.json").read_bytes() == (experts[0] / "tokenizer.json").read_bytes()
    ) == with_same_vocabulary


def test_a_union_keeps_the_bases_roles_and_files(models: list[Path], tmp_path: Path) -> None:
    base, *experts = models
    made = acemerge.merge(base, experts, tmp_path / "out", tokenizer="union")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "</s>"
    assert (tmp_path / "out/generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    assert read(tmp_path / "out/config.json") == {**read(base / "config.json"), "vocab_size": 282}
    assert any("expert 'chat' has a chat template" in note and "--files-from chat takes" in note for note in made.plan.notes)


def test_without_a_wish_files_are_the_bases_byte_for_byte(models: list[Path], tmp_path: Path) -> None:
    base, *experts = models
    acemerge.merge(base, experts, tmp_path / "out")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()


def test_files_from_an_expert_with_the_bases_tokens(tmp_path: Path) -> None:
    """Nothing but the files is different: the weights are those of a plain merge."""
    base = zoo.base(tmp_path / "base")
    chat = zoo.expert(base, tmp_path / "chat")
    (chat / "chat_template.jinja").write_text("{{ messages }}")
    acemerge.merge(base, [chat], tmp_path / "plain", "average")
    made = acemerge.merge(base, [chat], tmp_path / "out", "average", files_from="chat")
    assert made.plan.notes == ()
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()


def test_special_tokens_that_the_output_does_not_know(models: list[Path]) -> None:
    base, *experts = models
    with pytest.raises(
        InputError, match="--files-from chat: its eos_token is '<end>', which the output's tokenizer does not know"
    ):
        acemerge.plan(base, experts, tokenizer="base", files_from="chat")


def test_a_chat_template_of_ones_own(models: list[Path], tmp_path: Path) -> None:
    base, *experts = models
    edit(base / "tokenizer_config.json", chat_template="{{ old }}")
    made = acemerge.merge(base, experts, tmp_path / "out", chat_template="{{ messages[0]['content'] }}!")
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert own.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    assert not any("chat template" in note for note in made.plan.notes)


def test_the_dtype_is_edited_too(models: list[Path], tmp_path: Path) -> None:
    base, *experts = models
    acemerge.merge(base, experts, tmp_path / "out", tokenizer="union", dtype="bfloat16")
    config = read(tmp_path / "out/config.json")
    assert (config["dtype"], config["vocab_size"]) == ("bfloat16", 282)


# --- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [None, "union", "b"])
def test_a_tasks_model_has_the_merged_models_vocabulary(choice: str | None, tmp_path: Path) -> None:
    base = zoo.base(tmp_path / "base", "wordpiece", "bert")
    for seed, name in enumerate(("a", "b"), 1):
        zoo.expert(base, tmp_path / "tuned" / name, f"<{name}>", seed=seed)
        zoo.renumber(tmp_path / "tuned" / name, [*range(5), *reversed(range(5, len(zoo.vocabulary(tmp_path / "tuned" / name))))])
        with quiet_transformers():
            model = transformers.AutoModelForSequenceClassification.from_pretrained(
                tmp_path / "tuned" / name, num_labels=2 + seed
            )
            model.save_pretrained(tmp_path / name)
        transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned" / name).save_pretrained(tmp_path / name)
    acemerge.merge(base, [tmp_path / "a", tmp_path / "b"], tmp_path / "out", tokenizer=choice)
    merged = zoo.vocabulary(tmp_path / "out")
    for labels, name in enumerate(("a", "b"), 3):
        acemerge.export_expert(tmp_path / "out", name, tmp_path / f"task-{name}")
        model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
            tmp_path / f"task-{name}", output_loading_info=True
        )
        assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert zoo.vocabulary(tmp_path / f"task-{name}") == merged
        own = transformers.AutoTokenizer.from_pretrained(tmp_path / f"task-{name}")
        assert model(**own("the cat", return_tensors="pt")).logits.shape == (1, labels)
        assert acemerge.load_expert_head(tmp_path / "out", name).config.vocab_size == model.config.vocab_size


def test_an_output_layer_that_is_an_experts_own(tmp_path: Path) -> None:
    """The base has none: the expert's, over its own tokens, is put in the output's order."""
    full = zoo.base(tmp_path / "full")
    base = tmp_path / "base"
    with quiet_transformers():
        transformers.AutoModel.from_pretrained(full).save_pretrained(base)
    transformers.AutoTokenizer.from_pretrained(full).save_pretrained(base)
    expert = zoo.expert(full, tmp_path / "a", "<x>")
    zoo.renumber(expert, list(reversed(range(281))))
    acemerge.merge(base, [expert], tmp_path / "out", tokenizer="union")
    acemerge.export_expert(tmp_path / "out", "a", tmp_path / "task")
    wanted, found = zoo.rows_by_token(expert, "lm_head.weight"), zoo.rows_by_token(tmp_path / "task", "lm_head.weight")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(row, found[token]) for token, row in wanted.items())
