"""A routed model: what peft makes of the same adapters and weights, and of the plain sum of changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import acemerge
import lora_zoo
from acemerge.errors import InputError
from acemerge.routing.index import write_index
from acemerge.routing.model import RoutedModel
from model_zoo import read_tensors
from routing_team import CLASS, Team, vectors


def query(seed: int) -> Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def routed(team: Team) -> RoutedModel:
    return acemerge.load_routed(team.index)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def by_peft(team: Team, weights: dict[str, float]) -> dict[str, Tensor]:
    """What peft makes of several adapters with these weights."""
    with lora_zoo.quiet():
        names = list(weights)
        model = lora_zoo.peft_model(team.base, team.adapters[names[0]], CLASS)
        model.load_adapter(str(team.adapters[names[0]]), names[0])
        for name in names[1:]:
            model.load_adapter(str(team.adapters[name]), name)
        model.delete_adapter("default")
        model.add_weighted_adapter(names, list(weights.values()), "together", combination_type="cat")
        model.set_adapter("together")
        return values(model.merge_and_unload())


def by_hand(team: Team, weights: dict[str, float]) -> dict[str, Tensor]:
    """W0 + sum_k w_k (W_k - W0), with the W_k that peft expands each adapter to."""
    merged = {name: tensor.double() for name, tensor in read_tensors(team.base).items()}
    base = read_tensors(team.base)
    for name, weight in weights.items():
        with lora_zoo.quiet():
            own = values(lora_zoo.peft_model(team.base, team.adapters[name], CLASS).merge_and_unload())
        for tensor in merged:
            merged[tensor] = merged[tensor] + weight * (own[tensor].double() - base[tensor].double())
    return merged


def test_a_merge_is_pefts_of_the_same_weights(team: Team, routed: RoutedModel) -> None:
    for seed in range(3):
        weights = routed.weights(query(seed))
        assert 1 <= len(weights) <= 3
        found, theirs, plain = values(routed.merge_for(query(seed))), by_peft(team, weights), by_hand(team, weights)
        for name in found:
            torch.testing.assert_close(found[name], theirs[name], rtol=1e-5, atol=1e-6)
            if name in plain:  # a tied output layer is not stored
                torch.testing.assert_close(found[name].double(), plain[name], rtol=1e-5, atol=1e-6)


def test_one_adapter_alone_is_that_adapter(team: Team, routed: RoutedModel) -> None:
    theirs = by_peft(team, {"code": 1.0})
    torch.testing.assert_close(values(routed.merge({"code": 1.0})), theirs, rtol=1e-6, atol=1e-7)


def test_the_base_comes_back_bit_by_bit(routed: RoutedModel) -> None:
    before = values(routed.model)
    for seed in range(4):
        routed.merge_for(query(seed))
    after = values(routed.merge({}))
    assert all(before[name].equal(after[name]) for name in before)
    assert not all(before[name].equal(tensor) for name, tensor in values(routed.merge_for(query(0))).items())


def test_what_was_merged_lately_is_not_merged_again(team: Team) -> None:
    routed = acemerge.load_routed(team.index, cache=2)
    first = values(routed.merge_for(query(0)))
    routed.merge_for(query(1))
    assert routed.merges == 2
    again = values(routed.merge_for(query(0)))
    assert routed.merges == 2
    assert all(first[name].equal(again[name]) for name in first)
    routed.merge_for(query(2))  # now the second one is forgotten
    routed.merge_for(query(1))
    assert routed.merges == 4


def test_it_does_not_matter_what_was_merged_before(team: Team) -> None:
    alone = values(acemerge.load_routed(team.index, cache=0).merge_for(query(1)))
    routed = acemerge.load_routed(team.index, cache=0)
    for seed in (0, 2, 1):
        routed.merge_for(query(seed))
    assert all(alone[name].equal(tensor) for name, tensor in values(routed.model).items())


def test_a_call_merges_and_answers(team: Team) -> None:
    routed = acemerge.load_routed(team.index, embed=lambda word: vectors()[word].tolist())
    tokens = torch.tensor([[3, 5, 7]])
    logits = routed("law", input_ids=tokens).logits
    with torch.inference_mode():
        expected = routed.merge(routed.weights("law"))(input_ids=tokens).logits
    assert logits.equal(expected)
    assert next(iter(routed.weights("law"))) == "law"


def test_a_model_of_ones_own_is_used(team: Team) -> None:
    mine = lora_zoo.load(team.base, CLASS)
    routed = acemerge.load_routed(team.index, model=mine)
    assert routed.merge_for(query(0)) is mine
    torch.testing.assert_close(values(mine), values(acemerge.load_routed(team.index).merge_for(query(0))))


def test_another_model_than_the_base_is_refused(team: Team) -> None:
    with pytest.raises(InputError, match="which Linear does not hold as base"):
        acemerge.load_routed(team.index, model=nn.Linear(3, 2))


def test_queries_that_are_no_vectors_are_refused(team: Team, routed: RoutedModel) -> None:
    with pytest.raises(InputError, match=r"load the index with embed="):
        routed.weights("what is law?")
    with pytest.raises(InputError, match=r"has 6 finite numbers, as the centroids; found 4"):
        routed.weights(torch.ones(4))
    with pytest.raises(InputError, match="has no adapter 'art'; it has math, code, law"):
        routed.merge({"art": 1.0})
    with pytest.raises(InputError, match="cache=-1"):
        acemerge.load_routed(team.index, cache=-1)


def test_changed_adapters_are_refused_and_moved_ones_found(team: Team, tmp_path: Path) -> None:
    root = tmp_path / "elsewhere"
    for folder in (team.base, *team.adapters.values()):
        shutil.copytree(folder, root / folder.name)
    shutil.copy(team.index, root / "team.route")
    assert acemerge.load_routed(root / "team.route").weights(query(0))
    config = root / "law" / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 2', '"r":  2'))
    with pytest.raises(InputError, match=r"law/adapter_config.json: has changed since it was indexed"):
        acemerge.load_routed(root / "team.route")
    config.unlink()
    with pytest.raises(InputError, match=r"was indexed, and is not there any more"):
        acemerge.load_routed(root / "team.route")


def test_heads_of_ones_own_and_dora(team: Team, tmp_path: Path) -> None:
    """A head of a task is left out; a change that is no product of factors is merged by its value."""
    base = lora_zoo.write_base(tmp_path / "bert", "BertModel")
    for seed, name in enumerate(("one", "two")):
        lora_zoo.write_adapter(
            base, tmp_path / name, "BertForSequenceClassification", seed=seed, labels=2 + seed, task_type="SEQ_CLS",
            target_modules=["query"], use_dora=bool(seed),
        )  # fmt: skip
    save_file({"one": torch.tensor([1.0, 0.0]), "two": torch.tensor([0.0, 1.0])}, tmp_path / "c.safetensors")
    record = write_index(
        [str(tmp_path / "one"), str(tmp_path / "two")], tmp_path / "c.safetensors", tmp_path / "i", base=str(base)
    )
    assert record.adapters["one"].left_out
    routed = acemerge.load_routed(tmp_path / "i", model=lora_zoo.load(base, "BertModel"))
    merged = values(routed.merge({"two": 1.0}))
    with lora_zoo.quiet():
        theirs = values(lora_zoo.peft_model(base, tmp_path / "two", "BertForSequenceClassification", 3).merge_and_unload())
    shared = {name: tensor for name, tensor in theirs.items() if name.removeprefix("bert.") in merged}
    assert len(shared) > 10
    for name, tensor in shared.items():
        torch.testing.assert_close(merged[name.removeprefix("bert.")], tensor, rtol=1e-5, atol=1e-6)
