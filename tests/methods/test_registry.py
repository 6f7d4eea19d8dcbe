import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
import torch
from pydantic import Field
from torch import Tensor

import acemerge
from acemerge.errors import InputError
from acemerge.methods import Merged, Options, all_methods, get_method, mergekit_names, method, registry


@dataclass(frozen=True)
class FirstOptions(Options):
    which: Annotated[int, Field(ge=0, description="whose task vector")] = 0
    sign: Literal["plus", "minus"] = "plus"
    alpha: float = 2.0


def register_first() -> None:
    @method("first", title="The first expert", paper="none", touches="all")
    def first(task_vectors: Tensor, options: FirstOptions) -> Tensor:
        """One expert wins."""
        return task_vectors[options.which] * (1 if options.sign == "plus" else -1)


class EntryPoint:
    name = "first"

    @staticmethod
    def load() -> None:
        register_first()


@pytest.fixture
def with_plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A method from another package, found by its entry point."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [EntryPoint] if group == "acemerge.methods" else [])
    registry._discover.cache_clear()
    yield
    registry._registered.pop("first", None)
    registry._discover.cache_clear()


def test_a_method_from_another_package(with_plugin: None) -> None:
    assert "first" in [m.name for m in all_methods()]
    task_vectors = torch.rand(2, 3, 4)
    merged = acemerge.merge_task_vectors(task_vectors, method="first", which=1, sign="minus")
    assert merged.equal(-2 * task_vectors[1])
    described = {option.name: option for option in get_method("first").describe_options()}
    assert described["which"].allowed == "a whole number >= 0"
    assert described["sign"].allowed == "one of 'plus', 'minus'"


def test_a_method_is_found_by_its_file() -> None:
    """Without importing all the others."""
    code = "import sys, acemerge; acemerge.get_method('linear'); sys.exit('acemerge.methods.karcher' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["registry", "no.such", "", "linear "])
def test_a_file_that_has_no_method_is_none(name: str) -> None:
    with pytest.raises(InputError, match="there is no method"):
        get_method(name)


@pytest.mark.parametrize("name", [m.name for m in all_methods()])
def test_every_method_explains_itself(name: str) -> None:
    described = get_method(name)
    assert described.summary
    assert described.paper
    assert all(option.meaning and option.allowed for option in described.describe_options())
    assert described.flops(8, 768, 768) > 0


def test_a_kernel_may_return_facts() -> None:
    result = get_method("ace")(torch.rand(2, 4, 4), get_method("ace").options({"epsilon": 0.1}))
    assert isinstance(result, Merged)
    assert result.facts["branch"] in ("homogeneous", "heterogeneous")


@pytest.mark.parametrize(
    ("config", "epsilon"),
    [
        ({"model_type": "gpt2"}, 4e-2),
        ({"model_type": "roberta", "hidden_size": 768}, 2e-4),
        ({"model_type": "roberta", "hidden_size": 1024}, 1e-5),
        ({"model_type": "clip"}, 1e-5),
        ({}, 1e-5),
    ],
)
def test_epsilon_paper_resolves_from_the_config(config: dict[str, object], epsilon: float) -> None:
    options = get_method("ace").options({}).resolve(config)
    assert vars(options)["epsilon"] == epsilon


@pytest.mark.parametrize(
    ("name", "option", "hint"),
    [
        ("ties", "density", "mergekit's density is called 'keep' here"),
        ("ties", "lambda", "mergekit's lambda is called 'alpha' here"),
        ("linear", "weight", "mergekit's weight is called 'weights' here"),
        ("task_arithmetic", "weight", "mergekit's weight is called 'weights' here"),
        ("dare_ties", "density", "mergekit's density is 1 - 'drop' here"),
        ("della", "epsilon", "mergekit's epsilon is half of 'window' here"),
        ("breadcrumbs", "gamma", "mergekit's gamma is called 'outliers' here"),
        ("model_stock", "filter_wise", "mergekit's filter_wise: true is 'scope=row' here"),
        ("nuslerp", "nuslerp_row_wise", "mergekit's nuslerp_row_wise: true is 'scope=column' here"),
        ("karcher", "tol", "mergekit's tol is called 'tolerance' here"),
        ("ties", "normalize", "mergekit's normalize: true is 'merge=mean' here, and false 'merge=sum'"),
        ("breadcrumbs", "normalize", "mergekit's normalize: true divides by the sum of the weights"),
        ("ties", "rescale", "mergekit's rescale: true has no counterpart"),
        ("ace", "int8_mask", "mergekit's int8_mask changes nothing in the result; leave it out"),
        ("ace", "lambda", "mergekit's lambda is called 'alpha' here"),
    ],
)
def test_options_of_mergekit_are_explained_not_accepted(name: str, option: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"has no option '{option}': {hint}"):
        get_method(name).options({option: 0.5})


_GENERAL = "int8_mask lambda normalize rescale weight density"
OF_MERGEKIT = {  # the parameters of its 0.1.5, by our names of its methods
    "linear": "weight normalize",
    "slerp": "t",
    "nuslerp": "weight nuslerp_row_wise nuslerp_flatten",
    "multislerp": "weight normalize_weights eps",
    "karcher": "max_iter tol",
    "task_arithmetic": _GENERAL,
    "ties": _GENERAL,
    "dare_task_arithmetic": _GENERAL,
    "dare_ties": _GENERAL,
    "della": f"{_GENERAL} epsilon",
    "della_linear": f"{_GENERAL} epsilon",
    "breadcrumbs": f"{_GENERAL} gamma",
    "breadcrumbs_ties": f"{_GENERAL} gamma",
    "model_stock": "filter_wise",
    "sce": "int8_mask select_topk",
    "nearswap": "t",
    "ram": "epsilon",
    "ram_plus": "r alpha epsilon",
    "passthrough": "scale",
}


@pytest.mark.parametrize("name", OF_MERGEKIT)
def test_every_option_of_mergekit_is_ours_or_explained(name: str) -> None:
    ours = {option.name for option in get_method(name).describe_options()}
    others = [option for option in OF_MERGEKIT[name].split() if option not in ours]
    assert all(mergekit_names.mergekit_hint(name, option) for option in others)


def test_hints_name_options_that_there_are() -> None:
    for name, told in mergekit_names._NAMES.items():
        known = {option.name for option in get_method(name).describe_options()}
        assert {ours for _, ours in told.values() if ours} <= known
        assert not known & told.keys()
