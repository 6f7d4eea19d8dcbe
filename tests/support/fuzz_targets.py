"""What is fuzzed: for every parser of strangers' files, how an input becomes files, and what reads them.

An input is the content of one file, or a JSON object {name of a file: its content} where a format takes several. There a file of
weights is written as its header alone: what belongs around it, the right length and zeros for numbers, is put there, so that what
lies behind the first check is reached too.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import struct
import warnings
import zipfile
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import yaml
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save

import acemerge
from acemerge.calibration.measured import read_kept
from acemerge.calibration.texts import read_lines
from acemerge.checkpoints.card import base_models, licence
from acemerge.checkpoints.families import choose_family
from acemerge.checkpoints.folder import open_checkpoint, read_json
from acemerge.checkpoints.gguf_header import read_header
from acemerge.checkpoints.source import Source, Sources, resolve_source
from acemerge.checkpoints.tokenizer import chat_template, token_ids
from acemerge.errors import AcemergeError
from acemerge.execute.opening import make_plan
from acemerge.output.manifest import MANIFEST, read_merge
from acemerge.output.staging import staged_output
from acemerge.output.verify import verify_output
from acemerge.planning.vocabulary_files import side_files
from acemerge.recipe.arguments import parse_lists, parse_settings
from acemerge.recipe.mergekit import convert, is_mergekit
from acemerge.recipe.recipe import make_recipe, read_recipe
from acemerge.reports.merge_report import merge_page
from acemerge.routing.index import read_index
from acemerge.sweeps.points import make_points
from acemerge.sweeps.table import TABLE, Objective, read_table
from gguf_files import write_gguf
from small_models import base_tensors, fine_tuned, write_models

Work = Callable[[bytes], object]
LONGEST_MESSAGE = 20_000


@dataclass(frozen=True)
class Target:
    """One parser."""

    name: str
    shape: Literal["bytes", "json"]
    """How inputs are best changed."""
    prepare: Callable[[Path], Work]
    """In a folder of its own: what reads an input."""
    seeds: Callable[[], Sequence[bytes]]
    """Sound inputs."""


TARGETS: dict[str, Target] = {}


def target(seeds: Callable[[], Sequence[bytes]], shape: Literal["bytes", "json"] = "json") -> Callable[[Any], Any]:
    """Register what prepares it."""

    def register(prepare: Callable[[Path], Work]) -> Callable[[Path], Work]:
        name = prepare.__name__
        TARGETS[name] = Target(name, shape, prepare, seeds)
        return prepare

    return register


def survives(work: Callable[[], object]) -> None:
    """Only acemerge's own errors, and never an endless message."""
    message = "none"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
    except AcemergeError as error:
        message = str(error)
    assert 0 < len(message) < LONGEST_MESSAGE


# --- from an input to files --------------------------------------------------------------------------------------------

_MOST_DATA = 1_000_000


def framed(header: bytes, numbers: bytes = b"") -> bytes:
    """A whole safetensors file of a header: its length before it, these bytes or zeros for the numbers behind it."""
    try:
        entries = json.loads(header).values()
        ends = [entry["data_offsets"][1] for entry in entries if isinstance(entry, dict) and "data_offsets" in entry]
        size = max([0, *(end for end in ends if type(end) is int and end <= _MOST_DATA)])
    except (ValueError, AttributeError, TypeError, LookupError, RecursionError):
        size = 64
    return struct.pack("<Q", len(header)) + header + numbers[:size].ljust(size, b"\0")


def header_of(tensors: dict[str, torch.Tensor]) -> Any:
    """Of a file with these."""
    content = save(tensors)
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def write_files(folder: Path, content: bytes, names: Sequence[str]) -> None:
    """The files of an input, of those names only; others that the folder had by them are gone. `numbers` are its weights'."""
    try:
        files = json.loads(content)
    except (ValueError, RecursionError):
        files = {}
    try:
        numbers = b64decode(files["numbers"])
    except (ValueError, TypeError, LookupError):
        numbers = b""
    for name in names:
        path = folder / name
        path.unlink(missing_ok=True)
        if isinstance(files, dict) and name in files:
            text = files[name] if isinstance(files[name], str) else json.dumps(files[name])
            encoded = text.encode("utf-8", "surrogatepass")
            path.write_bytes(framed(encoded, numbers) if name.endswith(".safetensors") else encoded)


def files(**content: Any) -> bytes:
    """An input of several files; `__` stands for a dot."""
    return json.dumps({name.replace("__", "."): value for name, value in content.items()}).encode()


def one_file(name: str, work: Callable[[Path], object]) -> Callable[[Path], Work]:
    """The input is that file."""

    def prepare(root: Path) -> Work:
        def run(content: bytes) -> object:
            (root / name).write_bytes(content)
            return work(root / name)

        return run

    return prepare


def open_and_read(path: Path) -> None:
    """Every tensor that a header names, if it is small."""
    model = open_checkpoint(path, "x")
    for name, header in model.tensors.items():
        if header.nbytes < _MOST_DATA:
            tensor = model.read(name)
            assert tuple(tensor.shape) == header.shape
            tensor.clone()


# --- weights -----------------------------------------------------------------------------------------------------------


def pickled(**options: Any) -> bytes:
    """What torch.save writes of the small model."""
    file = io.BytesIO()
    torch.save({"state_dict": base_tensors()}, file, **options)
    return file.getvalue()


def stream_of(archive: bytes) -> bytes:
    """The pickle itself."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return opened.read(next(name for name in opened.namelist() if name.endswith("data.pkl")))


@target(lambda: [save(base_tensors(), {"format": "pt"})], "bytes")
def safetensors_file(root: Path) -> Work:
    return one_file("model.safetensors", open_and_read)(root)


@target(lambda: [json.dumps(header_of(base_tensors())).encode()])
def safetensors_header(root: Path) -> Work:
    work = one_file("model.safetensors", open_and_read)(root)
    return lambda content: work(framed(content))


INDEX = {"weight_map": dict.fromkeys(base_tensors(), "model-00001-of-00001.safetensors")}
NAMED_IN_INDEX = ("model.safetensors.index.json", "model-00001-of-00001.safetensors")


@target(lambda: [json.dumps(dict(zip(NAMED_IN_INDEX, (INDEX, header_of(base_tensors())), strict=True))).encode()])
def index_of_shards(root: Path) -> Work:
    def work(content: bytes) -> None:
        write_files(root, content, NAMED_IN_INDEX)
        open_and_read(root)

    return work


@target(lambda: [stream_of(pickled())], "bytes")
def pickle_stream(root: Path) -> Work:
    """The pickle within a torch.save file, whose checksums are right."""
    with zipfile.ZipFile(io.BytesIO(pickled())) as opened:
        others = {name: opened.read(name) for name in opened.namelist()}
    own = next(name for name in others if name.endswith("data.pkl"))

    def work(content: bytes) -> None:
        with zipfile.ZipFile(root / "model.bin", "w") as archive:
            for name, value in {**others, own: content}.items():
                archive.writestr(name, value)
        open_and_read(root / "model.bin")

    return work


@target(lambda: [pickled()], "bytes")
def pickle_archive(root: Path) -> Work:
    return one_file("model.bin", open_and_read)(root)


@target(lambda: [pickled(_use_new_zipfile_serialization=False)], "bytes")
def pickle_before_archives(root: Path) -> Work:
    return one_file("model.pt", open_and_read)(root)


def gguf_headers() -> list[bytes]:
    """By the library's own writer."""
    made = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for kind in (Kind.Q8_0, Kind.F16):
            write_gguf(path, kind)
            numbers = min(tensor.start for tensor in read_header(path).tensors.values())
            made.append(path.read_bytes()[:numbers])
    return made


@target(gguf_headers, "bytes")
def gguf_header(root: Path) -> Work:
    """With zeros for numbers."""

    def work(content: bytes) -> None:
        path = root / "model.gguf"
        path.write_bytes(content)
        os.truncate(path, len(content) + 200_000)
        open_and_read(path)

    return work


# --- what is beside them -----------------------------------------------------------------------------------------------


@target(lambda: [b'{"a": [1, 2.5, null, true, "x"], "b": {"c": -1e9}}'], "bytes")
def json_file(root: Path) -> Work:
    return one_file("config.json", read_json)(root)


def small_plan(root: Path, expert: Path, **asked: Any) -> Any:
    """Of a merge of the small base with one expert."""
    sources = Sources(Source("x", root / "base"), (Source("y", expert),), ("x", "y"))
    return make_plan(make_recipe({"base": "x", "experts": ["y"], **asked}), sources)


CONFIGS = [
    {"model_type": "bert", "architectures": ["BertModel"], "tie_word_embeddings": True, "dtype": "float16"},
    {"model_type": "llama", "torch_dtype": "bfloat16", "num_hidden_layers": 2, "text_config": {"model_type": "gpt2"}},
]


@target(lambda: [json.dumps(config).encode() for config in CONFIGS])
def config_of_a_model(root: Path) -> Work:
    write_models(root, experts=1)

    def work(content: bytes) -> None:
        (root / "base/config.json").write_bytes(content)
        choose_family("auto", read_json(root / "base/config.json"), [])
        assert small_plan(root, root / "expert-0").digest

    return work


TOKENS = {"<s>": 0, "the": 1, "cat": 2, "<x>": 3}
TOKENIZER = {
    "model": {"type": "BPE", "vocab": TOKENS, "merges": ["t h", ["c", "at"]]},
    "added_tokens": [{"content": "<s>", "id": 0, "special": True}, {"content": "<new>", "id": 4}],
}
UNIGRAM = {"model": {"type": "Unigram", "vocab": [["<s>", -1.0], ["the", -2.5], ["sat", -3.0]]}, "added_tokens": []}
ROLES = {"eos_token_id": [1, 2], "bos_token_id": 0, "bad_words_ids": [[1]], "vocab_size": 5}
SETTINGS = {
    "eos_token": {"content": "<s>"},
    "chat_template": "{{ messages }}",
    "added_tokens_decoder": {"4": {"content": "<new>"}},
}
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "chat_template.jinja",
)  # fmt: skip


def tokenizers() -> list[bytes]:
    both = {"tokenizer_config__json": SETTINGS, "config__json": ROLES, "generation_config__json": ROLES}
    return [
        files(tokenizer__json=TOKENIZER, special_tokens_map__json={"eos_token": "<s>"}, **both),
        files(tokenizer__json=UNIGRAM, chat_template__jinja="{{ messages }}", **both),
        files(vocab__json=TOKENS, added_tokens__json={"<new>": 4}, **both),
        files(vocab__txt="<s>\nthe\ncat\n<x>\n", **both),
    ]


def tokenizer_target(**asked: str) -> Callable[[Path], Work]:
    def prepare(root: Path) -> Work:
        for name, rows in (("base", 4), ("y", 5)):
            (root / name).mkdir()
            (root / name / "model.safetensors").write_bytes(save({"embed_tokens.weight": torch.ones(rows, 2)}))
        write_files(root / "base", files(tokenizer__json=TOKENIZER, config__json={"vocab_size": 4}), TOKENIZER_FILES)

        def work(content: bytes) -> None:
            write_files(root / "y", content, TOKENIZER_FILES)
            chat_template(root / "y")
            with suppress(AcemergeError):
                token_ids(root / "y")
            plan = small_plan(root, root / "y", method="average", **asked)
            written = [file() for file in side_files(plan.base, plan.vocabulary).values() if not isinstance(file, Path)]
            assert json.dumps(written)

        return work

    return prepare


TARGETS |= {
    name: Target(name, "json", tokenizer_target(**asked), tokenizers)
    for name, asked in {
        "tokenizer": {},
        "tokenizer_in_a_union": {"tokenizer": "union"},
        "tokenizer_of_an_expert": {"tokenizer": "y", "files_from": "y"},
    }.items()
}


@target(lambda: [b"---\nlicense: mit\nbase_model:\n- a/b\n- 'c'\n---\n# x\n", b"---\nbase_model: a/b\n---\n"], "bytes")
def model_card(root: Path) -> Work:
    def work(card: Path) -> None:
        named = licence(card.parent)
        assert named is None or named.isprintable()
        assert all(name.isprintable() for name in base_models(card.parent))

    return one_file("README.md", work)(root)


ROWS = b'{"text": "one", "text_pair": "two", "label": 1}\n{"text": "three", "text_pair": "four"}\n'


@target(lambda: [ROWS], "bytes")
def rows_of_data(root: Path) -> Work:
    return one_file("rows.jsonl", read_lines)(root)


# --- adapters and quantised models -------------------------------------------------------------------------------------


NONE: Mapping[str, torch.Tensor] = {}


def lora_header(names: Callable[[str, str], str], more: Mapping[str, torch.Tensor] = NONE, turned: bool = False) -> Any:
    """Factors for the first layer of the small base."""
    down, up = torch.ones(2, 8), torch.ones(12, 2)
    factors = {names("layers.0", "down"): down, names("layers.0", "up"): up}
    return header_of({name: value.T.contiguous() if turned else value for name, value in factors.items()} | dict(more))


def peft() -> list[bytes]:
    def name(module: str, part: str) -> str:
        return f"base_model.model.{module}.lora_{'A' if part == 'down' else 'B'}.weight"

    weights = lora_header(name)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "task_type": "SEQ_CLS", "target_modules": ["layers.0"]}
    rich = {"use_rslora": True, "rank_pattern": {"layers.*": 2}, "alpha_pattern": {"0": 8}, "modules_to_save": ["classifier"]}
    with_dora = lora_header(name, {"base_model.model.layers.0.lora_magnitude_vector": torch.ones(12)})
    return [
        files(adapter_config__json=settings, adapter_model__safetensors=weights),
        files(adapter_config__json={**settings, **rich}, adapter_model__safetensors=weights),
        files(adapter_config__json={**settings, "use_dora": True}, adapter_model__safetensors=with_dora),
    ]


def mlx() -> list[bytes]:
    weights = lora_header(lambda module, part: f"{module}.lora_{'a' if part == 'down' else 'b'}", turned=True)
    settings = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": {"rank": 2, "scale": 20.0}}
    return [files(adapter_config__json=settings, adapters__safetensors=weights)]


def kohya() -> list[bytes]:
    header = lora_header(lambda module, part: f"lora_te_{module.replace('.', '_')}.lora_{part}.weight")
    return [files(style__safetensors=header)]


def adapter_target(names: Sequence[str]) -> Callable[[Path], Work]:
    def prepare(root: Path) -> Work:
        write_models(root, experts=0)
        (root / "lora").mkdir()

        def work(content: bytes) -> None:
            write_files(root / "lora", content, names)
            plan = small_plan(root, root / "lora", method="average")
            for tensor in plan.experts[0].tensors:
                plan.experts[0].stored(tensor)

        return work

    return prepare


_PEFT_FILES, _MLX_FILES = (("adapter_config.json", f"{name}.safetensors") for name in ("adapter_model", "adapters"))
TARGETS |= {
    "adapter_of_peft": Target("adapter_of_peft", "json", adapter_target(_PEFT_FILES), peft),
    "adapter_of_mlx": Target("adapter_of_mlx", "json", adapter_target(_MLX_FILES), mlx),
    "adapter_of_kohya": Target("adapter_of_kohya", "json", adapter_target(["style.safetensors"]), kohya),
}


SAMPLES = Path(__file__).parents[1] / "checkpoints/quantised_by_libraries.json"


def tensor_of(said: Mapping[str, Any]) -> torch.Tensor:
    """One of the samples'."""
    content = torch.frombuffer(bytearray(b64decode(said["bytes"])), dtype=torch.uint8)
    return content.view(getattr(torch, said["dtype"])).reshape(said["shape"])


def quantised() -> list[bytes]:
    """As libraries store it, and the two ways that need no library."""
    eight_bits = torch.ones(12, 8).to(torch.float8_e4m3fn)
    channel = {"num_bits": 8, "type": "float", "strategy": "channel"}
    compressed = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": {"weights": channel}}}
    ways: list[tuple[Any, dict[str, torch.Tensor]]] = [
        ({"quant_method": "fp8", "weight_block_size": [4, 5]}, {"w": eight_bits, "w_scale_inv": torch.ones(3, 2)}),
        (compressed, {"w.weight": eight_bits, "w.weight_scale": torch.ones(12, 1)}),
    ]
    samples = json.loads(SAMPLES.read_text())
    ways += [(one["settings"], {name: tensor_of(said) for name, said in one["stored"].items()}) for one in samples]
    made = []
    for settings, tensors in ways:
        content = save(tensors)
        numbers = b64encode(content[8 + int.from_bytes(content[:8], "little") :]).decode()
        config = {"dtype": "float32", "quantization_config": settings}
        made.append(files(config__json=config, model__safetensors=header_of(tensors), numbers=numbers))
    return made


@target(quantised)
def quantised_model(root: Path) -> Work:
    def work(content: bytes) -> None:
        write_files(root, content, ("config.json", "model.safetensors"))
        open_and_read(root)

    return work


# --- a whole merge -----------------------------------------------------------------------------------------------------

CONFIG_FILES = (
    "base/config.json",
    "base/generation_config.json",
    "full/config.json",
    "lora/adapter_config.json",
    "lora/notes.txt",
)


def configs_of_a_merge() -> list[bytes]:
    classes = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}}
    lora = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "task_type": "SEQ_CLS", "modules_to_save": ["classifier"]}
    named = {**lora, "task_type": None, "auto_mapping": {"base_model_class": "BertModel", "parent_library": "transformers"}}
    base = {"model_type": "bert", "architectures": ["BertModel"], "tie_word_embeddings": True, "dtype": "float32"}
    inputs = [dict(zip(CONFIG_FILES, (base, {"eos_token_id": 1}, classes, own, "x"), strict=True)) for own in (lora, named)]
    return [json.dumps(each).encode() for each in inputs]


@target(configs_of_a_merge)
def merge_of_strangers(root: Path) -> Work:
    """A base, a fine-tune and an adapter with heads of their own, merged and exported again."""
    write_models(root, experts=1)
    (root / "expert-0").rename(root / "full")
    tensors = fine_tuned(base_tensors(), 1) | {"classifier.weight": torch.ones(2, 8)}
    (root / "full/model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    (root / "lora").mkdir()
    factors = {"lora_A": torch.ones(2, 8), "lora_B": torch.ones(12, 2)}
    weights = {f"base_model.model.layers.0.{part}.weight": value for part, value in factors.items()}
    weights["base_model.model.classifier.weight"] = torch.ones(3, 8)
    (root / "lora/adapter_model.safetensors").write_bytes(save(weights))

    def work(content: bytes) -> None:
        for name in ("out", "task"):
            shutil.rmtree(root / name, ignore_errors=True)
        write_files(root, content, CONFIG_FILES)
        acemerge.merge(root / "base", [root / "full", root / "lora"], root / "out", method="average", quiet=True)
        for expert in ("full", "lora"):
            acemerge.export_expert(root / "out", expert, root / "task", overwrite=True)

    return work


# --- recipes and arguments ---------------------------------------------------------------------------------------------

RECIPES: list[Any] = [
    {
        "base": "base",
        "experts": ["a", {"model": "b", "name": "second"}],
        "method": "ace",
        "options": {"epsilon": 0.1},
        "tensors": [{"match": "*.bias", "do": "keep"}, {"match": "*", "method": "ties", "options": {"keep": 0.2}}],
        "shard_size": "5GB",
        "inputs": {"base": {"model.safetensors": "blake3:" + "0" * 64}},
    },
    {
        "base": {"name": "s", "merge": {"base": "b", "experts": ["c"]}},
        "experts": [{"name": "t", "merge": {"experts": ["d"]}}],
        "slices": [{"layers": {"base": [0, 2], "t": [1, 3]}}],
        "token_sources": {"<x>": {"source": "zero"}, "y": "base"},
        "pad_to_multiple_of": 8,
    },
]


@target(lambda: [yaml.safe_dump(recipe).encode() for recipe in RECIPES], "bytes")
def recipe_file(root: Path) -> Work:
    return one_file("recipe.yaml", lambda path: make_recipe(read_recipe(path)))(root)


@target(lambda: [json.dumps(recipe).encode() for recipe in RECIPES])
def recipe_fields(root: Path) -> Work:
    return one_file("recipe.yaml", lambda path: make_recipe(read_recipe(path)))(root)


OF_MERGEKIT: list[Any] = [
    {
        "merge_method": "ties",
        "base_model": "llama",
        "models": [
            {"model": "math", "parameters": {"weight": [0.5, 0.1], "density": 0.3}},
            {"model": {"model": "a", "lora": "b"}},
        ],
        "parameters": {"normalize": True, "int8_mask": True, "weight": 0.5, "density": 0.5},
        "dtype": "bfloat16",
        "tokenizer": {"source": "union", "tokens": {"<x>": {"source": "math", "force": True}}},
        "chat_template": "auto",
    },
    {
        "merge_method": "passthrough",
        "slices": [
            {"sources": [{"model": "a", "layer_range": [0, 2]}]},
            {
                "sources": [
                    {
                        "model": "b",
                        "layer_range": [1, 3],
                        "parameters": {"scale": [{"filter": "o_proj", "value": 0.0}, {"value": 1.0}]},
                    }
                ]
            },
        ],
        "tokenizer_source": "base",
    },
    {
        "merge_method": "slerp",
        "base_model": "a",
        "slices": [{"sources": [{"model": m, "layer_range": [0, 4]} for m in "ab"]}],
        "parameters": {"t": [{"filter": "mlp", "value": [0, 1]}, {"value": 0.5}]},
        "out_dtype": "float16",
    },
]


@target(lambda: [json.dumps(recipe).encode() for recipe in OF_MERGEKIT])
def recipe_of_mergekit(root: Path) -> Work:
    def work(path: Path) -> None:
        fields = read_recipe(path)
        if is_mergekit(fields):
            make_recipe(convert(fields, path))

    return one_file("recipe.yaml", work)(root)


@target(lambda: [b"epsilon=0.5\ntau=1,2", b"alpha=[0.1, 0.2]\nrefine=true"], "bytes")
def settings_of_a_sweep(root: Path) -> Work:
    from acemerge.methods import get_method

    def work(content: bytes) -> None:
        given = content.decode(errors="replace").split("\n")[:4]
        get_method("ace").options(parse_settings(given[:1]))
        make_points(get_method("ace"), parse_lists(given))

    return work


@target(lambda: [b"owner/model@main", b"a+b", b"~/model", b"./models/x.safetensors"], "bytes")
def name_of_a_model(root: Path) -> Work:
    return lambda content: resolve_source(content.decode(errors="replace"), relative_to=root, offline=True)


# --- what acemerge reads of its own ------------------------------------------------------------------------------------


def a_merge(root: Path) -> Path:
    """With heads, parts and everything."""
    models = write_models(root)
    for index, expert in enumerate(models.experts):
        tensors = fine_tuned(base_tensors(), index) | {"classifier.weight": torch.ones(2, 8)}
        (expert / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    acemerge.merge(models.base, models.experts, root / "merged", method="emr", quiet=True)
    return root / "merged"


OWN_FILES = (MANIFEST, "heads/expert-0/head.json", "heads/expert-0/config.json", "config.json")


def own_files() -> list[bytes]:
    with TemporaryDirectory() as folder:
        merged = a_merge(Path(folder))
        content = {name: json.loads((merged / name).read_text()) for name in OWN_FILES}
    content[MANIFEST]["tensors"] = content[MANIFEST]["tensors"][:3]
    return [json.dumps(content).encode()]


@target(own_files)
def merge_to_verify(root: Path) -> Work:
    merged = a_merge(root)

    def work(content: bytes) -> None:
        write_files(merged, content, OWN_FILES)
        verify_output(merged)

    return work


@target(own_files)
def merge_to_export(root: Path) -> Work:
    merged = a_merge(root)

    def work(content: bytes) -> None:
        write_files(merged, content, OWN_FILES)
        shutil.rmtree(root / "task", ignore_errors=True)
        acemerge.export_expert(merged, "expert-0", root / "task")

    return work


def manifests() -> list[bytes]:
    made = []
    with TemporaryDirectory() as folder:
        models = write_models(Path(folder))
        for method in ("ace", "ties"):
            acemerge.merge(models.base, models.experts, Path(folder) / method, method=method, quiet=True)
            made.append((Path(folder) / method / MANIFEST).read_bytes())
    return made


@target(manifests)
def merge_to_report(root: Path) -> Work:
    """The page without its pictures, which a library draws: a tenth of a second each."""

    def work(content: bytes) -> None:
        (root / MANIFEST).write_bytes(content)
        account = read_merge(root)
        page = merge_page(account)
        assert page.table.rows is not None
        assert page.verdict

    return work


@target(manifests)
def merge_to_page(root: Path) -> Work:
    """With its pictures."""

    def work(content: bytes) -> None:
        (root / MANIFEST).write_bytes(content)
        assert "<html" in merge_page(read_merge(root)).to_html()

    return work


STATE = {
    "digest": "d",
    "finished": {"model.safetensors": {"hash": "blake3:" + "0" * 64, "parts": {"tasks/a/model.safetensors": "1"}, "tensors": []}},
    "inputs": {"base": {"model.safetensors": "2"}},
}


@target(lambda: [json.dumps(STATE).encode()])
def note_of_an_interrupted_run(root: Path) -> Work:
    """Whatever it says, only files whose checksums hold are reused, and nothing outside the folder is touched."""
    (root / "precious").write_text("mine")

    def work(content: bytes) -> None:
        shutil.rmtree(root / "out", ignore_errors=True)
        (root / "out.partial").mkdir(exist_ok=True)
        (root / "out.partial/.acemerge-state.json").write_bytes(content)
        (root / "out.partial/model.safetensors").write_bytes(b"stale")
        with staged_output(root / "out", "d", resume=True) as staging:
            assert not any(staging.reusable(shard) for shard in [*staging.finished, "model.safetensors"])
        assert (root / "precious").read_text() == "mine"

    return work


ROUTE = {
    "acemerge": "0",
    "base": {"where": "base", "files": {"model.safetensors": "blake3:" + "0" * 64}},
    "adapters": {
        name: {"where": name, "files": {"adapter_model.safetensors": "blake3:" + "1" * 64}, "left_out": ["score.weight"]}
        for name in ("a", "b")
    },
    "kernel": {"beta": 0.5, "tau": 0.01, "top": 2},
}


@target(lambda: [json.dumps({"record": ROUTE, "header": header_of({"centroids": torch.eye(2)})}).encode()])
def index_of_adapters(root: Path) -> Work:
    """Read, and its models looked for."""
    for name in ("base", "a", "b"):
        (root / name).mkdir()

    def work(content: bytes) -> None:
        try:
            given = json.loads(content)
            header, record = given["header"], json.dumps(given["record"])
        except (ValueError, TypeError, LookupError, RecursionError):
            return
        if isinstance(header, dict):
            header = {"__metadata__": {"acemerge_route": record}} | header
        (root / "team.route").write_bytes(framed(json.dumps(header).encode()))
        index = read_index(root / "team.route")
        assert len(index.centroids) == len(index.record.adapters)
        for place in (index.record.base, *index.record.adapters.values()):
            with suppress(AcemergeError):
                index.find(place, offline=True)

    return work


@target(lambda: [save({"centroids": torch.eye(2)}, {"acemerge_route": json.dumps(ROUTE)})], "bytes")
def file_of_an_index(root: Path) -> Work:
    return one_file("team.route", read_index)(root)


SWEEP = {
    "method": "ace",
    "models": {"base": {"model.safetensors": 12}},
    "search": None,
    "references": {},
    "points": {"tau=0.1": {"settings": {"tau": 0.1}, "digest": "d", "scores": {"a": 0.5, "b": None}}},
}


@target(lambda: [json.dumps(SWEEP).encode()])
def table_of_a_sweep(root: Path) -> Work:
    def work(path: Path) -> None:
        table = read_table(path.parent)
        table.best_of(list(table.points), Objective())

    return one_file(TABLE, work)(root)


@target(lambda: [save({"x:inputs": torch.ones(3, 3), "rows": torch.tensor([5])})], "bytes")
def kept_measurement(root: Path) -> Work:
    def work(path: Path) -> None:
        kept = read_kept(path)
        if kept is not None:
            for name, header in kept.tensors.items():
                assert header.nbytes > _MOST_DATA or math.prod(kept.read(name).shape) == header.elements

    return one_file("kept.safetensors", work)(root)
