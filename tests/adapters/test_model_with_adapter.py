"""MODEL+ADAPTER: a full model with an adapter merged into it, as peft merges it."""

from pathlib import Path

import pytest
import torch

import acemerge
from acemerge.errors import InputError
from adapter_merging import loaded
from lora_zoo import Zoo, build
from model_zoo import read_tensors
from small_models import fine_tuned, write_model


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return build(tmp_path_factory.mktemp("zoo"), "LlamaForCausalLM")


def test_as_an_expert_and_as_the_base(zoo: Zoo, tmp_path: Path) -> None:
    """On the base's own files it is what peft makes; as base and expert it comes out as itself."""
    name, adapter = next(iter(zoo.adapters.items()))
    both, expected = f"{zoo.base}+{adapter}", loaded(zoo, adapter)
    for output, base in ((tmp_path / "expert", str(zoo.base)), (tmp_path / "base", both)):
        acemerge.merge(base, [both], output, method="passthrough", force=True)
        found = read_tensors(output)
        for tensor in found:
            torch.testing.assert_close(found[tensor], expected[tensor], rtol=1e-5, atol=1e-6)
    assert f"{zoo.base.name}+{name}" in (tmp_path / "base/acemerge.yaml").read_text()


def test_on_another_model_than_the_base(zoo: Zoo, tmp_path: Path) -> None:
    """The adapter changes that model's weights, not the base's."""
    adapter = next(iter(zoo.adapters.values()))
    base = read_tensors(zoo.base)
    other = write_model(tmp_path / "other", fine_tuned(base, 1))
    (other / "config.json").write_bytes((zoo.base / "config.json").read_bytes())
    acemerge.merge(zoo.base, [f"{other}+{adapter}"], tmp_path / "out", method="passthrough", force=True)
    found, changed, theirs = read_tensors(tmp_path / "out"), loaded(zoo, adapter), read_tensors(other)
    for name in found:
        torch.testing.assert_close(found[name], theirs[name] + (changed[name] - base[name]), rtol=1e-4, atol=1e-5)


def test_what_is_not_there(zoo: Zoo, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        acemerge.merge(zoo.base, [f"{zoo.base}+{tmp_path}/nowhere"], tmp_path / "out", method="passthrough")
