"""What checkpoints look like on disk, coming in and going out: files, wrappers, ties, dtypes, buffers, side files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import acemerge
import model_zoo as zoo
from model_zoo import (
    Models,
    Tensors,
    ace_weight,
    assert_equal_tensors,
    assert_same_change,
    bitwise_equal,
    file_hashes,
    load_whole,
    mean_weight,
    read_tensors,
    rewrite,
    swap_prefix,
    write_tensors,
)

INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    with zoo.quiet_transformers():
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return zoo.unknown(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def plain_merge(plain: Models, tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    return merged_tensors(plain, tmp_path_factory.mktemp("plain_merge"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return zoo.llama(tmp_path_factory.mktemp("llama"), tied=False)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return zoo.bert(tmp_path_factory.mktemp("bert"))


def merge(models: Models, output: Path, **options: Any) -> None:
    acemerge.merge(models.base, models.experts, output, **options)


def merged_tensors(models: Models, root: Path, **options: Any) -> Tensors:
    merge(models, root / "out", **options)
    return read_tensors(root / "out")


def convert(models: Models, root: Path, change: Callable[[Path, Path], Path]) -> Models:
    """Every model written anew below `root` by `change(source, target)`, which returns the new path."""
    experts = {name: change(path, root / name) for name, path in models.experts.items()}
    return Models(change(models.base, root / "base"), experts)


def copy_without_weights(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    return target


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    names = list(tensors)
    middle = len(names) // 2
    return {name: tensors[name] for name in names[:middle]}, {name: tensors[name] for name in names[middle:]}


# --- shards ------------------------------------------------------------------------------------------------------------


def to_shards(source: Path, target: Path) -> Path:
    copy_without_weights(source, target)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(halves(read_tensors(source)), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        write_tensors(target, tensors, file)
        weight_map |= dict.fromkeys(tensors, file)
    (target / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return target


def to_unindexed_shards(source: Path, target: Path) -> Path:
    (to_shards(source, target) / INDEX).unlink()
    return target


@pytest.mark.parametrize("change", [to_shards, to_unindexed_shards])
def test_sharded_inputs_give_the_same_as_single_files(
    plain: Models, plain_merge: Tensors, tmp_path: Path, change: Callable[[Path, Path], Path]
) -> None:
    sharded = convert(plain, tmp_path, change)
    assert_equal_tensors(merged_tensors(sharded, tmp_path), plain_merge)
    assert not (tmp_path / "out" / INDEX).exists()


def test_shards_and_single_files_mix(plain: Models, plain_merge: Tensors, tmp_path: Path) -> None:
    mixed = Models(
        to_shards(plain.base, tmp_path / "base"), {**plain.experts, "red": to_shards(plain.experts["red"], tmp_path / "red")}
    )
    assert_equal_tensors(merged_tensors(mixed, tmp_path), plain_merge)


def test_sharded_output_holds_the_same_tensors(llama: Models, tmp_path: Path) -> None:
    merge(llama, tmp_path / "single")
    merge(llama, tmp_path / "sharded", shard_size=4_000)
    assert_equal_tensors(read_tensors(tmp_path / "sharded"), read_tensors(tmp_path / "single"))


def test_the_index_describes_the_shards(llama: Models, tmp_path: Path) -> None:
    merge(llama, tmp_path / "out", shard_size=4_000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    contents = {file.name: load_file(file) for file in files}
    sizes = {file: sum(tensor.nbytes for tensor in tensors.values()) for file, tensors in contents.items()}
    assert [file.name for file in files] == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert index["weight_map"] == {name: file for file, tensors in contents.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert all(size <= 4_000 for size in sizes.values())


def test_transformers_loads_sharded_output(llama: Models, tmp_path: Path) -> None:
    merge(llama, tmp_path / "out", shard_size=4_000)
    loaded = load_whole("LlamaForCausalLM", tmp_path / "out").state_dict()
    assert_equal_tensors(loaded, read_tensors(tmp_path / "out"))


def test_a_tensor_larger_than_a_shard_gets_its_own(plain: Models, plain_merge: Tensors, tmp_path: Path) -> None:
    assert_equal_tensors(merged_tensors(plain, tmp_path, shard_size=1_000), plain_merge)
    holding = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    assert [set(tensors) for tensors in holding if "embed.weight" in tensors] == [{"embed.weight"}]


def test_every_shard_says_it_is_torchs(llama: Models, tmp_path: Path) -> None:
    merge(llama, tmp_path / "out", shard_size=4_000)
    for file in (tmp_path / "out").glob("*.safetensors"):
        handle: Any = safe_open(file, framework="pt")
        assert handle.metadata() == {"format": "pt"}


# --- torch.save files --------------------------------------------------------------------------------------------------


def to_bin(source: Path, target: Path) -> Path:
    torch.save(read_tensors(source), copy_without_weights(source, target) / "pytorch_model.bin")
    return target


def to_sharded_bin(source: Path, target: Path) -> Path:
    copy_without_weights(source, target)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(halves(read_tensors(source)), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save(tensors, target / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (target / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return target


def to_legacy_bin(source: Path, target: Path) -> Path:
    file = copy_without_weights(source, target) / "pytorch_model.bin"
    torch.save(read_tensors(source), file, _use_new_zipfile_serialization=False)
    return target


def to_transposed_bin(source: Path, target: Path) -> Path:
    """Matrices whose memory runs column by column, as after `weight.T`."""
    tensors = {name: tensor.T.contiguous().T if tensor.dim() == 2 else tensor for name, tensor in read_tensors(source).items()}
    torch.save(tensors, copy_without_weights(source, target) / "pytorch_model.bin")
    return target


def to_file(wrap: Callable[[Tensors], Any], suffix: str = ".pt") -> Callable[[Path, Path], Path]:
    def change(source: Path, target: Path) -> Path:
        file = target.with_suffix(suffix)
        file.parent.mkdir(exist_ok=True)
        torch.save(wrap(read_tensors(source)), file)
        return file

    return change


@pytest.mark.parametrize("change", [to_bin, to_sharded_bin, to_legacy_bin, to_transposed_bin])
def test_bin_folders_give_the_same_as_safetensors(
    plain: Models, plain_merge: Tensors, tmp_path: Path, change: Callable[[Path, Path], Path]
) -> None:
    assert_equal_tensors(merged_tensors(convert(plain, tmp_path, change), tmp_path), plain_merge)


def test_a_bin_base_is_published_as_safetensors_only(bert: Models, tmp_path: Path) -> None:
    merge(convert(bert, tmp_path, to_sharded_bin), tmp_path / "out")
    assert not [file for file in file_hashes(tmp_path / "out") if ".bin" in file]
    load_whole("BertForMaskedLM", tmp_path / "out")


WRAPPERS: dict[str, Callable[[Tensors], Any]] = {
    "plain": lambda tensors: tensors,
    "state_dict": lambda tensors: {"state_dict": tensors, "epoch": 3},
    "model": lambda tensors: {"model": tensors, "optimizer": {"state": {0: torch.zeros(2)}}},
    "model_state_dict": lambda tensors: {"model_state_dict": tensors},
    "two_deep": lambda tensors: {"model": {"state_dict": tensors}},
}


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_bare_files_give_the_same_as_folders(
    plain: Models, plain_merge: Tensors, tmp_path: Path, wrapper: str, suffix: str
) -> None:
    files = convert(plain, tmp_path / "in", to_file(WRAPPERS[wrapper], suffix))
    assert_equal_tensors(merged_tensors(files, tmp_path), plain_merge)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_experts_may_carry_the_prefix_of_data_parallel_training(
    plain: Models, plain_merge: Tensors, tmp_path: Path, wrapper: str
) -> None:
    add_module = swap_prefix("", "module.")
    files = convert(plain, tmp_path / "in", to_file(lambda tensors: WRAPPERS[wrapper](add_module(tensors))))
    assert_equal_tensors(merged_tensors(Models(plain.base, files.experts), tmp_path), plain_merge)


def test_a_file_without_a_folder_is_named_by_its_stem(plain: Models, tmp_path: Path) -> None:
    files = convert(plain, tmp_path / "in", to_file(WRAPPERS["plain"]))
    acemerge.merge(files.base, list(files.experts.values()), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "acemerge_manifest.json").read_text())
    assert (manifest["base"], manifest["experts"]) == ("base", ["red", "green", "blue"])


class Trap:
    """Unpickling this creates a file: code that must never run."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("role", ["base", "red"])
def test_a_pickled_module_is_refused_with_a_way_out(plain: Models, tmp_path: Path, role: str) -> None:
    module = tmp_path / "whole.pt"
    torch.save(nn.Linear(2, 2), module)
    models = Models(module, plain.experts) if role == "base" else Models(plain.base, {**plain.experts, role: module})
    before = file_hashes(tmp_path)
    with pytest.raises(acemerge.InputError, match=r"whole\.pt: cannot be loaded safely .*safetensors\.torch\.save_file"):
        merge(models, tmp_path / "out")
    assert file_hashes(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["whole.pt"]


def test_code_in_a_pickle_is_not_run(plain: Models, tmp_path: Path) -> None:
    torch.save({"state_dict": {"embed.weight": Trap(tmp_path / "ran")}}, tmp_path / "trap.pt")
    with pytest.raises(acemerge.InputError, match=r"trap\.pt: cannot be loaded safely"):
        merge(Models(plain.base, {"trap": tmp_path / "trap.pt"}), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["trap.pt"]


def test_a_file_without_tensors_is_refused(plain: Models, tmp_path: Path) -> None:
    torch.save({"state_dict": {"epoch": 3}}, tmp_path / "empty.pt")
    with pytest.raises(acemerge.InputError, match=r"empty\.pt: holds no state dict of tensors"):
        merge(Models(plain.base, {"empty": tmp_path / "empty.pt"}), tmp_path / "out")


# --- tied weights ------------------------------------------------------------------------------------------------------

TIED: dict[str, tuple[Callable[[Path], Models], str, str, tuple[str, ...]]] = {
    # family: (builder, class, the embedding, other names that stand for it)
    "llama": (lambda root: zoo.llama(root, tied=True), "LlamaForCausalLM", "model.embed_tokens.weight", ("lm_head.weight",)),
    "gpt2": (
        lambda root: zoo.gpt2(root, expert="GPT2LMHeadModel"),
        "GPT2LMHeadModel",
        "transformer.wte.weight",
        ("lm_head.weight",),
    ),
    "t5": (
        zoo.t5,
        "T5ForConditionalGeneration",
        "shared.weight",
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
    ),
    "bert": (
        lambda root: zoo.bert(root, expert="BertForMaskedLM"),
        "BertForMaskedLM",
        "bert.embeddings.word_embeddings.weight",
        ("cls.predictions.decoder.weight",),
    ),
    "roberta": (
        lambda root: zoo.roberta(root, "RobertaForMaskedLM"),
        "RobertaForMaskedLM",
        "roberta.embeddings.word_embeddings.weight",
        ("lm_head.decoder.weight",),
    ),
}


@pytest.fixture(scope="module")
def build_tied(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Models, Tensors]]:
    """A family's models, which store the embedding once, and their average; made when first asked for."""
    built: dict[str, tuple[Models, Tensors]] = {}

    def get(family: str) -> tuple[Models, Tensors]:
        if family not in built:
            root = tmp_path_factory.mktemp(family)
            models = TIED[family][0](root / "in")
            built[family] = models, merged_tensors(models, root, method="average")
        return built[family]

    return get


def with_copies(tensors: Tensors, family: str, *, first: bool) -> Tensors:
    """The embedding under all its names, sharing memory; the copies before or after everything else."""
    _, _, embedding, copies = TIED[family]
    extra = dict.fromkeys(copies, tensors[embedding])
    return {**extra, **tensors} if first else {**tensors, **extra}


def store_twice(family: str) -> Callable[[Path, Path], Path]:
    def clone(tensors: Tensors) -> Tensors:
        return {name: tensor.clone() for name, tensor in with_copies(tensors, family, first=False).items()}

    return lambda source, target: rewrite(source, target, clone)


def share_storage(family: str, *, first: bool) -> Callable[[Path, Path], Path]:
    def change(source: Path, target: Path) -> Path:
        tensors = with_copies(read_tensors(source), family, first=first)
        torch.save(tensors, copy_without_weights(source, target) / "pytorch_model.bin")
        return target

    return change


def assert_loads_tied(family: str, folder: Path) -> None:
    model = load_whole(TIED[family][1], folder)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied, "the output embedding is a weight of its own"


STORED: dict[str, Callable[[str], Callable[[Path, Path], Path]]] = {
    "twice": store_twice,
    "shared": lambda family: share_storage(family, first=False),
    "shared_head_first": lambda family: share_storage(family, first=True),
}


@pytest.mark.parametrize("where", ["base", "experts", "all"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("family", TIED)
def test_a_tied_copy_is_left_out_and_loads_tied(
    build_tied: Callable[[str], tuple[Models, Tensors]], tmp_path: Path, family: str, stored: str, where: str
) -> None:
    models, stored_once = build_tied(family)
    redundant = convert(models, tmp_path, STORED[stored](family))
    base = models.base if where == "experts" else redundant.base
    experts = models.experts if where == "base" else redundant.experts
    found = merged_tensors(Models(base, experts), tmp_path, method="average")
    assert_loads_tied(family, tmp_path / "out")
    assert_equal_tensors(found, stored_once)
    assert not (tmp_path / "out" / "heads").exists()


@pytest.mark.parametrize("first", [False, True])
def test_shared_storage_ties_without_a_word_in_the_config(
    build_tied: Callable[[str], tuple[Models, Tensors]], tmp_path: Path, first: bool
) -> None:
    models, stored_once = build_tied("gpt2")
    base = share_storage("gpt2", first=first)(models.base, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    del config["tie_word_embeddings"]
    (base / "config.json").write_text(json.dumps(config))
    found = merged_tensors(Models(base, models.experts), tmp_path, method="average")
    assert_equal_tensors(found, stored_once)


def test_gpt2_merges_its_embedding_whichever_name_comes_first(tmp_path: Path) -> None:
    # The experts are classifiers: they know the embedding, not the lm_head that shares its memory in the base.
    models = zoo.gpt2(tmp_path / "in")
    base = share_storage("gpt2", first=True)(models.base, tmp_path / "base")
    expected = merged_tensors(models, tmp_path / "plain")
    assert_equal_tensors(merged_tensors(Models(base, models.experts), tmp_path), expected)


def test_an_untied_head_is_kept(llama: Models, tmp_path: Path) -> None:
    assert bitwise_equal(merged_tensors(llama, tmp_path)["lm_head.weight"], read_tensors(llama.base)["lm_head.weight"])


def test_experts_that_tie_what_the_base_does_not(tmp_path: Path) -> None:
    """Their output layer is their input embedding, so that is what merges into the base's own output layer."""
    models = zoo.llama(tmp_path / "in", tied=True)
    base = zoo.rewrite(models.base, tmp_path / "base", lambda t: {**t, "lm_head.weight": 2 * t["model.embed_tokens.weight"]})
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    found = merged_tensors(Models(base, models.experts), tmp_path, method="average")
    experts = [read_tensors(folder)["model.embed_tokens.weight"] for folder in models.experts.values()]
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        torch.testing.assert_close(found[name], torch.stack(experts).mean(0))
    assert load_whole("LlamaForCausalLM", tmp_path / "out").lm_head.weight.equal(found["lm_head.weight"])


# --- dtypes ------------------------------------------------------------------------------------------------------------

MIXES = [
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
    (torch.float64, torch.float64),
]
MATRICES = {"blocks.0.mix.weight": False, "blocks.0.widen.weight": False, "blocks.0.fold.weight": True}  # stored [in, out]?


def assert_close_to_float64(models: Models, found: Tensors, dtype: torch.dtype, tolerance: float) -> None:
    """Every tensor, against ACE and means of the files' values in float64."""
    base = read_tensors(models.base)
    experts = [read_tensors(path) for path in models.experts.values()]
    for name, value in base.items():
        if not value.is_floating_point():
            assert bitwise_equal(found[name], value)
            continue
        own = [expert[name] for expert in experts]
        is_matrix = name in MATRICES
        expected = ace_weight(value, own, 1e-5, transpose=MATRICES[name]) if is_matrix else mean_weight(value, own)
        assert found[name].dtype == dtype
        assert_same_change(name, found[name], expected, value, tolerance)


@pytest.mark.parametrize(("base", "experts"), MIXES, ids=str)
def test_output_has_the_bases_dtype(tmp_path: Path, base: torch.dtype, experts: torch.dtype) -> None:
    models = zoo.build_from_shapes(tmp_path, zoo.UNKNOWN_SHAPES, base_dtype=base, expert_dtype=experts)
    tolerance = 1e-9 if base == torch.float64 else 1e-5
    assert_close_to_float64(models, merged_tensors(models, tmp_path), base, tolerance)


def test_experts_may_differ_in_dtype(plain: Models, tmp_path: Path) -> None:
    def cast(dtype: torch.dtype) -> Callable[[Tensors], Tensors]:
        return lambda tensors: {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}

    dtypes = {"red": torch.bfloat16, "green": torch.float16, "blue": torch.float64}
    experts = {name: rewrite(plain.experts[name], tmp_path / name, cast(dtype)) for name, dtype in dtypes.items()}
    models = Models(plain.base, experts)
    assert_close_to_float64(models, merged_tensors(models, tmp_path), torch.float32, 1e-5)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_a_dtype_can_be_asked_for(plain: Models, tmp_path: Path, dtype: str) -> None:
    found = merged_tensors(plain, tmp_path, dtype=dtype)
    assert_close_to_float64(plain, found, getattr(torch, dtype), 1e-5)


def test_an_asked_for_dtype_also_holds_for_kept_tensors(llama: Models, tmp_path: Path) -> None:
    found = merged_tensors(llama, tmp_path, dtype="bfloat16")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert bitwise_equal(found["lm_head.weight"], read_tensors(llama.base)["lm_head.weight"].bfloat16())
    assert load_whole("LlamaForCausalLM", tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_only_the_dtype_of_the_config_is_edited(llama: Models, tmp_path: Path, key: str) -> None:
    base = shutil.copytree(llama.base, tmp_path / "base")
    text = (base / "config.json").read_text().replace('"dtype": "float32"', f'"{key}": "float32"')
    (base / "config.json").write_text(text)
    merge(Models(base, llama.experts), tmp_path / "out", dtype="bfloat16")
    assert (tmp_path / "out" / "config.json").read_text() == text.replace(f'"{key}": "float32"', f'"{key}": "bfloat16"')


# --- tensors that are not weights, or hardly ---------------------------------------------------------------------------


def odd_models(root: Path, odd: Tensors, theirs: Tensors) -> Models:
    """A base with odd tensors, and experts with other values in them."""
    models = zoo.build_from_shapes(root / "in", {"mix.weight": (8, 8)})
    for folder in models.folders:
        write_tensors(folder, {**read_tensors(folder), **(odd if folder == models.base else theirs)})
    return models


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (torch.arange(6)[None], torch.ones(1, 6, dtype=torch.int64)),
        (torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)),
        (torch.tensor([1, 255], dtype=torch.uint8), torch.tensor([3, 4], dtype=torch.uint8)),
        (torch.tensor([True, False, True]), torch.tensor([False, False, True])),
        (torch.ones(6, 6, dtype=torch.bool).tril(), torch.ones(6, 6, dtype=torch.bool)),
        (torch.tensor(7), torch.tensor(9)),
    ],
    ids=["int64", "int32", "uint8", "bool", "bool_matrix", "0-D_int64"],
)
def test_buffers_are_the_bases(tmp_path: Path, ours: Tensor, theirs: Tensor) -> None:
    found = merged_tensors(odd_models(tmp_path, {"odd": ours}, {"odd": theirs}), tmp_path)
    assert bitwise_equal(found["odd"], ours)


def test_buffers_keep_their_dtype_when_another_is_asked_for(tmp_path: Path) -> None:
    odd = {"ids": torch.arange(6), "mask": torch.tensor([True, False])}
    found = merged_tensors(odd_models(tmp_path, odd, odd), tmp_path, dtype="float16")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "ids": torch.int64, "mask": torch.bool, "mix.weight": torch.float16,
    }  # fmt: skip


@pytest.mark.parametrize("method", ["ace", "average"])
def test_a_lone_number_is_averaged(tmp_path: Path, method: str) -> None:
    models = odd_models(tmp_path, {"logit_scale": torch.tensor(2.5)}, {"logit_scale": torch.tensor(3.0)})
    found = merged_tensors(models, tmp_path, method=method)
    assert bitwise_equal(found["logit_scale"], torch.tensor(3.0))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
@pytest.mark.parametrize("method", ["ace", "average"])
def test_empty_tensors_pass_through(tmp_path: Path, method: str, shape: tuple[int, ...]) -> None:
    empty = {"a_first": torch.zeros(shape), "z_last": torch.zeros(shape)}
    found = merged_tensors(odd_models(tmp_path, empty, empty), tmp_path, method=method)
    assert [found[name].shape for name in empty] == [shape, shape]


def test_a_tensor_that_nobody_changed_is_the_bases(plain: Models, tmp_path: Path) -> None:
    name = "blocks.0.mix.weight"
    base = read_tensors(plain.base)
    experts = {
        expert: rewrite(path, tmp_path / expert, lambda tensors: {**tensors, name: base[name]})
        for expert, path in plain.experts.items()
    }
    assert bitwise_equal(merged_tensors(Models(plain.base, experts), tmp_path)[name], base[name])


# --- what lies beside the weights --------------------------------------------------------------------------------------

SIDE_FILES = {
    "tokenizer.json": b'{"model":  {"vocab": {"\xc3\xa9": 0}}}\r\n',
    "vocab.txt": b"[PAD]\n[UNK]\n\xff\xfe",
    "chat_template.jinja": b"{% for m in messages %}{{ m }}{% endfor %}",
    "preprocessor_config.json": b"{}",
}


@pytest.fixture
def furnished(bert: Models, tmp_path: Path) -> Models:
    """A base with a tokenizer and other company, and experts with their own."""
    base = shutil.copytree(bert.base, tmp_path / "in" / "base")
    red = shutil.copytree(bert.experts["red"], tmp_path / "in" / "red")
    for name, content in SIDE_FILES.items():
        (base / name).write_bytes(content)
        (red / name).write_bytes(b"the expert's own " + content)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\nabout the base\n")
    (base / "training_args.bin").write_bytes(b"not weights")
    (base / "runs").mkdir()
    (base / "runs" / "events.log").write_text("noise")
    return Models(base, {**bert.experts, "red": red})


def test_side_files_are_copied_byte_for_byte(furnished: Models, tmp_path: Path) -> None:
    merge(furnished, tmp_path / "out")
    copied = {*SIDE_FILES, "config.json"}
    assert {name: (tmp_path / "out" / name).read_bytes() for name in copied} == {
        name: (furnished.base / name).read_bytes() for name in copied
    }


def test_the_output_holds_what_it_should_and_no_more(furnished: Models, tmp_path: Path) -> None:
    merge(furnished, tmp_path / "out")
    own = {"model.safetensors", "config.json", "README.md", "acemerge.yaml", "acemerge_manifest.json", "heads"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == own | set(SIDE_FILES)
    assert "about the base" not in (tmp_path / "out" / "README.md").read_text()


def test_nothing_local_is_written(furnished: Models, tmp_path: Path) -> None:
    merge(furnished, tmp_path / "out")
    texts = [path for path in (tmp_path / "out").rglob("*") if path.suffix in (".md", ".yaml", ".json")]
    assert [path.name for path in texts if str(tmp_path).encode() in path.read_bytes()] == []


def test_inputs_are_untouched(furnished: Models, tmp_path: Path) -> None:
    before = [file_hashes(folder) for folder in furnished.folders]
    merge(furnished, tmp_path / "out")
    assert [file_hashes(folder) for folder in furnished.folders] == before


@pytest.mark.parametrize("shard_size", [4_000, 1_000_000])
def test_two_merges_give_the_same_bytes(furnished: Models, tmp_path: Path, shard_size: int) -> None:
    merge(furnished, tmp_path / "first", shard_size=shard_size)
    merge(furnished, tmp_path / "second", shard_size=shard_size)
    assert file_hashes(tmp_path / "first") == file_hashes(tmp_path / "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "in", "second"]
