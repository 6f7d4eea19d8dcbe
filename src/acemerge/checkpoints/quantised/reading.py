"""A quantised model as the floats that it stands for; or, of a way that is not read, what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from acemerge.checkpoints.families import choose_family, matches
from acemerge.checkpoints.quantised.bitsandbytes import bitsandbytes_weights
from acemerge.checkpoints.quantised.eight_bits import EightBits, StoredInEightBits
from acemerge.checkpoints.quantised.packed import awq_weights, gptq_weights, packed_weights
from acemerge.checkpoints.quantised.scaled import scaled_weights
from acemerge.checkpoints.quantised.weights import ORIGINAL, FloatWeight, StoredModel
from acemerge.checkpoints.tensor_header import MERGEABLE_DTYPES, TensorHeader
from acemerge.errors import InputError, PreflightError

if TYPE_CHECKING:
    from torch import Tensor

QUANTIZATION = "quantization_config"
"""What config.json calls it."""

Weights = Callable[[StoredModel], list[FloatWeight]]

_WAYS: Mapping[str, Weights] = {
    "fp8": scaled_weights,
    "bitsandbytes": bitsandbytes_weights,
    "gptq": gptq_weights,
    "awq": awq_weights,
}
_FORMATS_OF_COMPRESSED_TENSORS: Mapping[str, Weights] = {
    "float-quantized": scaled_weights,
    "int-quantized": scaled_weights,
    "naive-quantized": scaled_weights,
    "pack-quantized": packed_weights,
}
_MXFP4 = f"to MXFP4. {ORIGINAL}; or load it with transformers' Mxfp4Config(dequantize=True) and save_pretrained(FOLDER)"

_OF_ACTIVATIONS = tuple(
    f".{what}_{kind}" for what in ("input", "output", "activation", "q", "k", "v") for kind in ("scale", "zero_point")
)
"""Of what flows through a layer: a float model has none."""

_STANDS_FOR_FLOATS = ("float8", "int8", "uint8", "int32")


def dequantised(
    config: Mapping[str, Any], stored: Mapping[str, TensorHeader], read: Callable[[str], Tensor], where: str
) -> tuple[dict[str, TensorHeader], Mapping[str, FloatWeight]]:
    """The float tensors that a quantised model's stored ones stand for, and those that are made of others; or a clear error."""
    settings = config[QUANTIZATION]
    weights = _way(settings, where)
    dtype = next((own for key in ("dtype", "torch_dtype") if (own := config.get(key)) in MERGEABLE_DTYPES), "bfloat16")
    stored_in_out = choose_family("auto", config, stored).stored_in_out
    model = StoredModel(settings, stored, read, dtype, where, lambda name: matches(name, stored_in_out))
    found = weights(model)
    made_of = {part: weight for weight in found for part in weight.parts}
    headers: dict[str, TensorHeader] = {}
    for name, header in stored.items():
        if weight := made_of.get(name):
            headers[weight.name] = weight.header
        elif not name.endswith(_OF_ACTIVATIONS):
            headers[name] = header
    _check_nothing_left(headers, where)
    return headers, {weight.name: weight for weight in found}


def in_eight_bits(
    config: Mapping[str, Any], stored: Mapping[str, TensorHeader], made: Mapping[str, FloatWeight]
) -> StoredInEightBits | None:
    """How its matrices of 8-bit floats are stored, if it has any."""
    weights = {
        name: EightBits(scale.removeprefix(name), stored[scale].shape, weight.block, stored[scale].dtype, stored[name].dtype)
        for name, weight in made.items()
        if name in stored and stored[name].dtype.startswith("float8")
        for scale in weight.parts[1:2]
    }
    return StoredInEightBits(config[QUANTIZATION], weights) if weights else None


def _check_nothing_left(headers: Mapping[str, TensorHeader], where: str) -> None:
    """Numbers that stand for floats, and nothing says for which."""
    left = [
        f"tensor '{name}' of {where} is {header.dtype} {list(header.shape)}, and nothing beside it says for which floats it "
        f"stands. {ORIGINAL}"
        for name, header in headers.items()
        if len(header.shape) > 1 and header.dtype.startswith(_STANDS_FOR_FLOATS)
    ]
    if left:
        raise PreflightError(left)


def reader(made: Mapping[str, FloatWeight], read: Callable[[str], Tensor], where: str) -> Callable[[str], Tensor]:
    """How a tensor of such a model is read."""

    def read_as_floats(name: str) -> Tensor:
        weight = made.get(name)
        try:
            return weight.floats(*map(read, weight.parts)) if weight else read(name)
        except IndexError as error:  # which no header shows
            raise InputError(f"tensor '{name}' of {where}: {error}. Download it again, or give the float model.") from None

    return read_as_floats


def _way(settings: Any, where: str) -> Weights:
    """How its weights are read."""
    if not isinstance(settings, dict):
        raise InputError(f"{where} is quantised in an unknown way (config.json: {QUANTIZATION}). {ORIGINAL}")
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    of_compressed = _FORMATS_OF_COMPRESSED_TENSORS if method == "compressed-tensors" else {}
    if way := _known(of_compressed, settings.get("format")) or _known(_WAYS, method):
        return way
    if method == "mxfp4":
        raise InputError(f"{where} is quantised {_MXFP4}")
    named = f"{method}, format {settings['format']}" if settings.get("format") else method
    raise InputError(f"{where} is quantised by a method that acemerge does not read ({named}). {ORIGINAL}")


def _known(ways: Mapping[str, Weights], name: object) -> Weights | None:
    return ways.get(name) if isinstance(name, str) else None
