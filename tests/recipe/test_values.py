"""Values that differ by layer, by name and by expert, and what they say as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acemerge.errors import InputError
from acemerge.recipe.values import Place, as_text, between, from_text, values_at, varies

EXPERTS = ("math", "code")


def at(
    value: object, tensor: str = "layers.0.mlp.up_proj.weight", depth: float = 0.0, experts: tuple[str, ...] = EXPERTS
) -> object:
    return values_at({"option": value}, Place(tensor, depth), experts, EXPERTS)["option"]


def test_plain_values_stay() -> None:
    assert at(0.5) == 0.5
    assert at([0.7, 0.3]) == [0.7, 0.3]
    assert not varies([0.7, 0.3])


def test_by_layer() -> None:
    assert [at({"by_layer": [0, 1, 0]}, depth=depth) for depth in (0, 0.25, 0.5, 1)] == [0, 0.5, 1, 0]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.floats(0, 1))
def test_between_stays_between(stops: list[float], depth: float) -> None:
    assert min(stops) - 1e-12 <= between(stops, depth) <= max(stops) + 1e-12


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6))
def test_stops_are_met(stops: list[float]) -> None:
    found = [between(stops, index / (len(stops) - 1)) for index in range(len(stops))]
    assert found == pytest.approx(stops, abs=1e-9)


def test_by_name_the_first_that_matches() -> None:
    value = [{"match": "*mlp*", "value": {"by_layer": [0, 1]}}, {"value": 0.3}]
    assert at(value, depth=0.5) == 0.5
    assert at(value, "layers.0.attn.weight", depth=0.5) == 0.3


def test_for_each_expert_in_the_order_of_the_tensors_own() -> None:
    value = {"code": {"by_layer": [0, 1]}, "math": 0.3}
    assert at(value, depth=0.5) == [0.3, 0.5]
    assert at(value, depth=0.5, experts=("code",)) == [0.5]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"by_layer": []}, "numbers only"),
        ({"by_layer": [0, "a"]}, "numbers only"),
        ({"by_layer": [0, 1], "math": 1}, "numbers only"),
        ({"math": 1, "cod": 1}, "there is no such expert: did you mean 'code'?"),
        ({"math": 1}, "none for 'code'"),
        ([{"match": "*attn*", "value": 1}], "no value for tensor 'layers.0.mlp.up_proj.weight'"),
        ([{"filter": "mlp", "value": 1}], "{match: PATTERN, value: VALUE}"),
    ],
)
def test_refusals(value: object, problem: str) -> None:
    with pytest.raises(InputError, match="option 'option'") as caught:
        at(value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "value", [{"by_layer": [0.0, 0.5, 1.0]}, {"a": 0.5, "b": 1}, [{"match": "*mlp*", "value": 1}, {"value": 2}]]
)
def test_text_there_and_back(value: object) -> None:
    assert from_text(as_text(value)) == value


def test_text_that_is_none_of_these() -> None:
    assert from_text("mean") is None
    assert from_text("1e-5") is None
    with pytest.raises(InputError, match="cannot be read as JSON"):
        from_text("{a: 1}")
