"""A fuzz target per parser: whatever a file holds, the answer is a value or one of acemerge's own errors.

`make fuzz` runs the same for longer, with other random numbers every time: see `conftest.py`.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save

import model_zoo
from acemerge.calibration.files import FileData
from acemerge.checkpoints.card import base_models, licence
from acemerge.checkpoints.families import choose_family
from acemerge.checkpoints.folder import open_checkpoint, read_json
from acemerge.checkpoints.source import Source, Sources, resolve_source
from acemerge.execute.opening import make_plan
from acemerge.methods import get_method
from acemerge.planning.vocabulary_files import side_files
from acemerge.recipe.arguments import parse_lists, parse_settings
from acemerge.recipe.recipe import Recipe, make_recipe
from acemerge.recipe.sizes import parse_size
from acemerge.sweeps.points import make_points
from fuzz import Bounded, read_corpus
from fuzz_targets import TARGETS, Target, open_and_read, survives
from small_models import base_tensors, write_models

FOLDERS: dict[str, Path] = {}


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    FOLDERS["scratch"] = tmp_path_factory.mktemp("fuzz")


@st.composite
def damaged(draw: st.DrawFn, sound: bytes) -> bytes:
    """A sound file with a few bytes changed, cut out, put in or repeated."""
    chooser = draw(st.randoms(use_true_random=False))
    content = bytearray(sound)
    for _ in range(draw(st.integers(1, 6))):
        _damage(content, chooser)
    return bytes(content)


def _damage(content: bytearray, chooser: random.Random) -> None:
    at = chooser.randrange(len(content) + 1)
    length = chooser.choice([1, 1, 2, 4, 8, 64])
    kind = chooser.choice(["flip", "cut", "insert", "repeat", "number", "end"])
    if kind == "flip" and at < len(content):
        content[at] ^= 1 << chooser.randrange(8)
    elif kind == "cut":
        del content[at : at + length]
    elif kind == "insert":
        content[at:at] = chooser.randbytes(length)
    elif kind == "repeat":
        content[at:at] = content[at : at + length] * chooser.choice([1, 2, 100])
    elif kind == "number":
        content[at : at + 8] = struct.pack("<Q", chooser.choice([0, 1, 2**31, 2**32, 2**63, 2**64 - 1]))
    else:
        del content[at:]


def as_file(content: bytes, name: str) -> Path:
    path = FOLDERS["scratch"] / name
    path.write_bytes(content)
    return path


# --- every target: what coverage found, and damage of all kinds ----------------------------------------------------------


@pytest.fixture(scope="module", params=TARGETS)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Bounded]:
    """One target, and what runs an input of it."""
    chosen = TARGETS[request.param]
    return chosen, Bounded(chosen.prepare(tmp_path_factory.mktemp(chosen.name)))


def test_the_corpus(prepared: tuple[Target, Bounded]) -> None:
    """Sound files, what fuzzing found to reach other code, and what once failed: each in little time and memory."""
    chosen, run = prepared
    kept = read_corpus(chosen.name)
    assert kept, "python tests/support/fuzz.py --keep --only " + chosen.name
    for content in [*chosen.seeds(), *kept]:
        run(content)


@given(st.data())
def test_damaged_inputs(prepared: tuple[Target, Bounded], data: st.DataObject) -> None:
    chosen, run = prepared
    run(data.draw(st.sampled_from(seeds_of(chosen.name)).flatmap(damaged)))


@cache
def seeds_of(name: str) -> Sequence[bytes]:
    return TARGETS[name].seeds()


# --- weights -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_zoo.bert(tmp_path_factory.mktemp("bert")).experts["red"]


SHAPES = st.lists(st.integers(0, 3), max_size=4)
DTYPES = st.sampled_from([torch.int64, torch.int32, torch.float32, torch.bool, torch.bfloat16])
INPUT_NAMES = st.sampled_from(["input_ids", "attention_mask", "token_type_ids", "pixel_values", "labels", "input"])


@given(st.dictionaries(INPUT_NAMES, st.tuples(SHAPES, DTYPES, st.integers(-2, 60))))
def test_ready_inputs(bert: Path, given: dict[str, tuple[list[int], torch.dtype, int]]) -> None:
    tensors = {name: torch.full(shape, value).to(dtype) for name, (shape, dtype, value) in given.items()}
    as_file(save(tensors), "red.safetensors")
    expert = open_checkpoint(bert, "red")
    survives(lambda: FileData.open(FOLDERS["scratch"], expert, [expert]))


HEADER_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
HEADER_ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F64", "BF16", "I64", "BOOL", "F8_E8M0", "X"]) | HEADER_VALUES,
        "shape": st.lists(st.integers(-2, 9) | st.integers(0, 2**64), max_size=4) | HEADER_VALUES,
        "data_offsets": st.lists(st.integers(-1, 64) | st.integers(0, 2**64), min_size=1, max_size=3) | HEADER_VALUES,
    },
)


HEADER_NAMES = st.text(max_size=6) | st.just("__metadata__")


@given(st.dictionaries(HEADER_NAMES, HEADER_ENTRIES | HEADER_VALUES, max_size=4), st.binary(max_size=64))
def test_safetensors_headers(header: dict[str, Any], data: bytes) -> None:
    encoded = json.dumps(header).encode()
    survives(lambda: open_and_read(as_file(struct.pack("<Q", len(encoded)) + encoded + data, "model.safetensors")))


# --- JSON --------------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(b"[" * 100_000)
@example(b"1" * 10_000)
def test_json(content: bytes) -> None:
    survives(lambda: read_json(as_file(content, "config.json")))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=12), st.text(max_size=12) | JSON, max_size=4) | JSON)
def test_index_files(weight_map: Any) -> None:
    folder = FOLDERS["scratch"] / "indexed"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(save(base_tensors()))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    survives(lambda: open_checkpoint(folder, "x"))


CONFIG_KEYS = ("model_type", "tie_word_embeddings", "quantization_config", "architectures", "dtype", "torch_dtype")


@given(st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON))
def test_configs(config: dict[str, Any]) -> None:
    """Whatever a config says about the model, planning either works or explains."""
    root = FOLDERS["scratch"] / "configs"
    if not root.exists():
        write_models(root)
    (root / "base/config.json").write_text(json.dumps(config))
    recipe = make_recipe({"base": "x", "experts": ["y"]})
    sources = Sources(Source("x", root / "base"), (Source("y", root / "expert-0"),), ("x", "y"))
    survives(lambda: make_plan(recipe, sources).digest)
    survives(lambda: choose_family("auto", config, []))


TOKEN = st.sampled_from(["<s>", "the", "cat", "<x>"])
VOCABULARY = (
    JSON | st.dictionaries(TOKEN, JSON | st.integers(0, 6)) | st.lists(st.tuples(TOKEN, st.floats(-9, 0)) | JSON, max_size=5)
)
ADDED = JSON | st.lists(st.fixed_dictionaries({"content": TOKEN | JSON, "id": st.integers(0, 6) | JSON}) | JSON, max_size=3)
TOKENIZER = st.fixed_dictionaries(
    {"model": st.fixed_dictionaries({"vocab": VOCABULARY}, optional={"merges": JSON, "type": JSON}) | JSON, "added_tokens": ADDED}
)
ID_FIELDS = st.dictionaries(st.sampled_from(["eos_token_id", "bad_words_ids", "eos_token", "chat_template", "vocab_size"]), JSON)


@given(TOKENIZER, TOKENIZER, ID_FIELDS, st.sampled_from([{}, {"tokenizer": "union"}, {"tokenizer": "y"}, {"files_from": "y"}]))
def test_tokenizers(ours: Any, theirs: Any, fields: dict[str, Any], asked: dict[str, str]) -> None:
    """Whatever two tokenizers and the files beside them say, a merge is planned with all its files, or refused."""
    root = FOLDERS["scratch"] / "tokenizers"
    for name, content in (("base", ours), ("y", theirs)):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "model.safetensors").write_bytes(save({"embed_tokens.weight": torch.ones(4, 2)}))
        (root / name / "tokenizer.json").write_text(json.dumps(content))
        for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
            (root / name / file).write_text(json.dumps(fields if name == "y" else {"vocab_size": 4}))
    sources = Sources(Source("base", root / "base"), (Source("y", root / "y"),), ("base", "y"))
    recipe = make_recipe({"base": "base", "experts": ["y"], "method": "average", **asked})

    def work() -> None:
        plan = make_plan(recipe, sources)
        assert plan.digest
        written = [file() for file in side_files(plan.base, plan.vocabulary).values() if not isinstance(file, Path)]
        assert json.dumps(written)

    survives(work)


LORA = save(
    {
        "base_model.model.layers.0.lora_A.weight": torch.ones(2, 8),
        "base_model.model.layers.0.lora_B.weight": torch.ones(12, 2),
        "base_model.model.embed.lora_embedding_A": torch.ones(2, 20),
        "base_model.model.embed.lora_embedding_B": torch.ones(8, 2),
        "base_model.model.layers.0.bias": torch.ones(12),
    },
    {"format": "pt"},
)
LORA_SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
LORA_KEYS = (
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_dora", "use_rslora", "lora_bias", "bias",
    "auto_mapping", "task_type", "init_lora_weights", "modules_to_save", "fan_in_fan_out",
    "base_model_name_or_path", "something_new",
)  # fmt: skip


def plan_with_adapter(settings: bytes, weights: bytes) -> None:
    root = FOLDERS["scratch"] / "adapters"
    if not root.exists():
        write_models(root)
        (root / "lora").mkdir()
    (root / "lora/adapter_config.json").write_bytes(settings)
    (root / "lora/adapter_model.safetensors").write_bytes(weights)
    recipe = make_recipe({"base": "x", "experts": ["y"]})
    sources = Sources(Source("x", root / "base"), (Source("y", root / "lora"),), ("x", "y"))
    survives(lambda: make_plan(recipe, sources).digest)


@given(
    st.dictionaries(st.sampled_from(LORA_KEYS), JSON | st.just(True) | st.dictionaries(st.text(max_size=20), JSON, max_size=2))
)
@example({"rank_pattern": {"(a+)+b": 2}})
@example({"lora_alpha": 10**400})
def test_settings_of_adapters(changed: dict[str, Any]) -> None:
    plan_with_adapter(json.dumps({**LORA_SETTINGS, **changed}).encode(), LORA)


@given(damaged(LORA), st.booleans())
def test_weights_of_adapters(content: bytes, use_dora: bool) -> None:
    plan_with_adapter(json.dumps({**LORA_SETTINGS, "use_dora": use_dora}).encode(), content)


# --- recipes and arguments ---------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from([*Recipe.model_fields, "mehtod"]), JSON))
def test_recipes(fields: dict[str, Any]) -> None:
    survives(lambda: make_recipe(fields))


@given(st.sampled_from(["ace", "ties", "linear", "slerp", "della", "wudi"]), st.data())
def test_options_of_methods(name: str, data: st.DataObject) -> None:
    method = get_method(name)
    known = [option.name for option in method.describe_options()]
    options = data.draw(st.dictionaries(st.sampled_from([*known, "unknown"]), JSON, max_size=3))
    survives(lambda: method.options(options).check(3))


@given(st.lists(st.text(max_size=20) | st.from_regex(r"\A[a-z]{1,5}=[-+0-9.e]{1,8}\Z"), max_size=3))
def test_settings_on_the_command_line(settings: list[str]) -> None:
    survives(lambda: get_method("ace").options(parse_settings(settings)))


@given(st.text(max_size=30) | st.from_regex(r"\A[ 0-9.]{0,6}[kmgtKMGT]?i?b?\Z"))
def test_sizes(text: str) -> None:
    try:
        size = parse_size(text)
    except ValueError:
        return
    assert size >= 0


@given(st.lists(st.text(alphabet="epsilontau=,[]1.-e ", max_size=30), max_size=3))
@example(["epsilon=[1,2],3", "tau=]"])
def test_grids_on_the_command_line(settings: list[str]) -> None:
    survives(lambda: make_points(get_method("ace"), parse_lists(settings)))


@given(st.text(max_size=60))
@example("~nobody-of-that-name/model")
@example("a" * 300)
@example("\x00")
def test_model_names(text: str) -> None:
    survives(lambda: resolve_source(text, relative_to=FOLDERS["scratch"], offline=True))


@given(
    st.text(max_size=100)
    | st.tuples(st.sampled_from(["license: ", "base_model: ", "base_model:\n- "]), st.text(max_size=50)).map(
        lambda field: f"---\n{''.join(field)}\n---\n"
    )
)
def test_model_cards(text: str) -> None:
    root = FOLDERS["scratch"] / "cards"
    root.mkdir(exist_ok=True)
    (root / "README.md").write_bytes(text.encode("utf-8", "surrogatepass"))
    named = licence(root)
    assert named is None or named.isprintable()
    assert all(name.isprintable() for name in base_models(root))
