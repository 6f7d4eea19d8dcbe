"""mergekit's configurations: what they become, and what is refused, by name and line."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from acemerge.errors import InputError
from acemerge.recipe.arguments import recipe_from
from acemerge.recipe.recipe import Recipe


def converted(folder: Path, text: str, **flags: Any) -> Recipe:
    path = folder / "config.yaml"
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    recipe, relative_to = recipe_from([str(path)], [], flags)
    assert relative_to == folder
    return recipe


TIES = """
    merge_method: ties
    base_model: org/llama@main
    models:
      - model: math
        parameters:
          weight: [0, 1]
          density: 0.5
      - model: ./code
        parameters: {weight: 0.3, density: 0.5}
      - model: org/llama@main
    parameters: {normalize: false, lambda: 0.9, int8_mask: true}
    dtype: float32
    out_dtype: bfloat16
"""


def test_ties(tmp_path: Path) -> None:
    recipe = converted(tmp_path, TIES)
    assert recipe.base == "org/llama@main"
    assert [(expert.model, expert.name) for expert in recipe.experts] == [("math", "math"), ("./code", "code")]
    assert recipe.method == "ties"
    assert recipe.options == {
        "weights": {"math": {"by_layer": [0, 1]}, "code": 0.3}, "merge": "sum", "keep": 0.5, "scope": "tensor", "alpha": 0.9,
    }  # fmt: skip
    assert recipe.dtype == "bfloat16"
    assert recipe.notes == ["int8_mask: saves memory in mergekit; here there is no mask to store, and the result is the same"]


def test_one_word_makes_it_ace(tmp_path: Path) -> None:
    recipe = converted(tmp_path, TIES.replace("merge_method: ties", "merge_method: ace"))
    assert (recipe.method, recipe.options) == ("ace", {"alpha": 0.9})
    assert [note.split(":")[0] for note in recipe.notes] == ["weight", "density", "normalize", "int8_mask"]
    assert all("method 'ace' has no such option" in note for note in recipe.notes)


def test_a_flag_makes_it_ace_too(tmp_path: Path) -> None:
    recipe = converted(tmp_path, TIES, method="ace")
    assert (recipe.method, recipe.options) == ("ace", {})


def test_options_of_our_own_methods_pass(tmp_path: Path) -> None:
    recipe = converted(
        tmp_path,
        """
        merge_method: ace
        base_model: base
        models: [{model: a}, {model: b}]
        parameters: {epsilon: 1.0e-3, tau: [0.1, 0.5]}
        """,
    )
    assert recipe.options == {"epsilon": 1e-3, "tau": {"by_layer": [0.1, 0.5]}}


def test_values_fall_through_from_model_to_slice_to_all(tmp_path: Path) -> None:
    recipe = converted(
        tmp_path,
        """
        merge_method: task_arithmetic
        base_model: base
        slices:
          - sources:
              - {model: base, layer_range: [0, 2]}
              - model: a
                layer_range: [0, 2]
                parameters: {weight: [{filter: mlp, value: 0.1}]}
              - {model: b, layer_range: [0, 2]}
            parameters: {weight: [{filter: q_proj, value: 0.2}]}
          - sources:
              - {model: base, layer_range: [2, 4]}
              - {model: a, layer_range: [2, 4]}
              - {model: b, layer_range: [2, 4]}
        parameters: {weight: 0.5}
        """,
    )
    first, second = recipe.slices
    mlp, q_proj = {"match": "*mlp*", "value": 0.1}, {"match": "*q_proj*", "value": 0.2}
    assert first.options["weights"] == {"a": [mlp, q_proj, {"value": 0.5}], "b": [q_proj, {"value": 0.5}]}
    assert second.options["weights"] == {"a": 0.5, "b": 0.5}
    assert second.layers == {"base": (2, 4), "a": (2, 4), "b": (2, 4)}


def test_base_is_one_of_the_models_where_weights_are_joined(tmp_path: Path) -> None:
    recipe = converted(
        tmp_path,
        """
        merge_method: slerp
        base_model: b
        models: [{model: a}, {model: b}]
        parameters: {t: 0.3}
        """,
    )
    assert recipe.base == "b"
    assert [expert.model for expert in recipe.experts] == ["b", "a"]


def test_model_and_adapter(tmp_path: Path) -> None:
    recipe = converted(
        tmp_path,
        """
        merge_method: linear
        models:
          - {model: llama+lora, parameters: {weight: 1}}
          - model: {model: {path: org/llama, revision: v2}, lora: other}
            parameters: {weight: 1}
        """,
    )
    assert [(expert.model, expert.name) for expert in recipe.experts] == [("llama+lora", "lora"), ("org/llama@v2+other", "other")]


def test_models_of_one_name_are_told_apart(tmp_path: Path) -> None:
    text = "merge_method: karcher\nmodels: [{model: x/it}, {model: y/it}, {model: z/base}]\n"
    assert [expert.name for expert in converted(tmp_path, text).experts] == ["it", "it_2", "base_2"]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("merge_method: ties\nbase_model: b\nmodel: [{model: a}]\n", 3, "mergekit has no field 'model': did you mean 'models'?"),
        ("merge_method: ties\nbase_model: b\nmodels:\n- {model: a}\n", 4, "method 'ties' needs a 'weight' for 'a'"),
        ("merge_method: ties\nmodels: [{model: a}]\n", 1, "method 'ties' needs a base_model"),
        ("merge_method: liner\nmodels: [{model: a}]\n", 1, "of mergekit's, did you mean 'linear'?"),
        (
            "merge_method: linear\nmodels:\n- model: a\n  parameters: {weight: heavy}\n",
            4,
            "'weight' must be a number; given: 'heavy'",
        ),
        (
            "merge_method: ties\nbase_model: b\nmodels: [{model: a}]\nparameters:\n  density: 2\n",
            5,
            "'density' must be a number above 0",
        ),
        (
            "merge_method: dare_ties\nbase_model: b\nmodels: [{model: a}]\nparameters: {density: [1, 0], weight: 1}\n",
            4,
            "'density' must",
        ),
        ("merge_method: ties\nbase_model: b\nmodels:\n- model: a\n  parameters:\n    wieght: 1\n    weight: 1\n", 6, "'wieght'"),
        ("merge_method: ties\nbase_model: b\nmodels: [{model: a}]\nparameters:\n  weight: 1\n  rescale: true\n", 6, "rescale:"),
        ("merge_method: linear\nmodels:\n- model: a\n  layer_range: [0, 1]\n", 4, "there is no field 'layer_range' here"),
        ("merge_method: linear\nslices:\n- sources:\n  - {model: a, layer_range: [2, 2]}\n", 4, "layer_range must be"),
        ("merge_method: linear\nmodels: [{model: a}]\nslices: []\nparameters: {normalize: false, weight: 2}\n", 4, "normalize:"),
        ("merge_method: linear\nmodels: [{model: a}]\nmodules: {x: 1}\n", 3, "several modules"),
        ("merge_method: slerp\nbase_model: a\nmodels: [{model: a}, {model: b}]\n", 1, "needs a 't'"),
        ("merge_method: slerp\nbase_model: c\nmodels: [{model: a}, {model: b}]\n", 2, "needs the base_model among its models"),
        ("merge_method: linear\nmodels: [{model: a}]\nparameters: {weight: 1}\ndtype: int8\n", 4, "dtype 'int8'"),
        ("merge_method: linear\nmodels: [{model: a}]\nparameters:\n  weight: [{filter: mlp, value: 1}]\n", 4, "without a value"),
        ("merge_method: linear\nmodels: [{model: a}]\nparameters:\n  weight: [a, 1]\n", 4, "values with filters"),
        ("merge_method: passthrough\nmodels: [{model: a}, {model: b}]\n", 2, "one model in each slice"),
    ],
)
def test_refused_by_name_and_line(tmp_path: Path, text: str, line: int, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        converted(tmp_path, text)
    assert str(caught.value).startswith(f"config.yaml, line {line}: ")
    assert problem in str(caught.value)


def test_numbers_that_yaml_takes_for_text(tmp_path: Path) -> None:
    text = "merge_method: linear\nmodels:\n- model: a\n  parameters: {weight: 1e-3}\n- model: b\n  parameters: {weight: 2}\n"
    assert converted(tmp_path, text).options["weights"] == {"a": 0.001, "b": 2}


def test_vocabularies(tmp_path: Path) -> None:
    recipe = converted(
        tmp_path,
        """
        merge_method: linear
        base_model: x/llama
        models:
          - {model: x/llama, parameters: {weight: 1}}
          - {model: y/chat, parameters: {weight: 1}}
        tokenizer:
          source: union
          pad_to_multiple_of: 8
          tokens:
            "<a>": {source: y/chat, force: true}
            "<b>": {source: {kind: zero}}
            "<c>": {source: {kind: model_token, model: y/chat, token: "<a>"}}
        chat_template: "{{ messages }}"
        """,
    )
    assert (recipe.tokenizer, recipe.pad_to_multiple_of, recipe.chat_template) == ("union", 8, "{{ messages }}")
    assert {token: (own.source, own.token, own.force) for token, own in recipe.token_sources.items()} == {
        "<a>": ("chat", None, True), "<b>": ("zero", None, False), "<c>": ("chat", "<a>", False),
    }  # fmt: skip
    short = "merge_method: karcher\nmodels: [{model: a}, {model: b}]\ntokenizer_source: "
    assert converted(tmp_path, f"{short}b\n").tokenizer == "b"
    assert converted(tmp_path, f"{short}base\n").tokenizer == "base"
    with pytest.raises(InputError, match="line 3: 'c' is none of the models"):
        converted(tmp_path, f"{short}c\n")
    with pytest.raises(InputError, match="line 4: 'alpaca': of the templates by name only chatml is known"):
        converted(tmp_path, f"{short}b\nchat_template: alpaca\n")


def test_the_chat_template_by_name(tmp_path: Path) -> None:
    text = "merge_method: karcher\nmodels: [{model: a}, {model: b}]\nchat_template: chatml\n"
    template = converted(tmp_path, text).chat_template
    assert template is not None
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    page = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)  # as transformers does
    told = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
    assert page.render(messages=turns) == told
    assert page.render(messages=turns[:1], add_generation_prompt=True).endswith("hello<|im_end|>\n<|im_start|>assistant\n")


SLICES = """
    merge_method: ties
    slices:
      - sources:
          - {model: a, layer_range: [0, 2], parameters: {weight: 1}}
        base_model: b
      - sources:
          - {model: a, layer_range: [2, 4], parameters: {weight: 1}}
        base_model: b
"""


def test_a_base_that_every_slice_names_is_that_of_the_merge(tmp_path: Path) -> None:
    recipe = converted(tmp_path, SLICES)
    assert recipe.base == "b"
    assert [expert.model for expert in recipe.experts] == ["a"]
    with_one = SLICES.replace("merge_method: ties", "base_model: b\n    merge_method: ties")
    assert converted(tmp_path, with_one) == recipe


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (SLICES.replace("base_model: b", "base_model: c", 1), 8),
        (SLICES.replace("        base_model: b\n", "", 1), 7),
        (SLICES.replace("merge_method: ties", "base_model: c\n    merge_method: ties"), 6),
    ],
)
def test_slices_with_bases_of_their_own_are_refused(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(InputError, match=f"line {line}: slices with different bases are not read"):
        converted(tmp_path, text)
