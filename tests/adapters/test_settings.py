"""Kinds of adapter and settings that cannot be read are refused by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
from peft.tuners.lora.config import BdLoraConfig, KasaConfig

import lora_zoo as zoo
from acemerge.cli.app import main
from adapter_reading import BERT, LLAMA, Bases, Refuse

_OTHER_TYPES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "IA3": (peft.IA3Config, {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LOHA": (peft.LoHaConfig, {"r": 2, "target_modules": ["q_proj"]}),
    "LOKR": (peft.LoKrConfig, {"r": 2, "target_modules": ["q_proj"]}),
    "ADALORA": (peft.AdaLoraConfig, {"target_modules": ["q_proj"], "total_step": 10}),
    "OFT": (peft.OFTConfig, {"target_modules": ["q_proj"], "oft_block_size": 4, "r": 0}),
    "VERA": (peft.VeraConfig, {"r": 2, "target_modules": ["q_proj"]}),
    "LN_TUNING": (peft.LNTuningConfig, {"target_modules": ["input_layernorm"]}),
    "FOURIERFT": (peft.FourierFTConfig, {"n_frequency": 4, "target_modules": ["q_proj"]}),
    "HRA": (peft.HRAConfig, {"r": 2, "target_modules": ["q_proj"]}),
    "TRAINABLE_TOKENS": (peft.TrainableTokensConfig, {"token_indices": [3, 5], "target_modules": ["embed_tokens"]}),
    "PROMPT_TUNING": (peft.PromptTuningConfig, {"num_virtual_tokens": 2, "task_type": "CAUSAL_LM"}),
    "PREFIX_TUNING": (peft.PrefixTuningConfig, {"num_virtual_tokens": 2, "task_type": "CAUSAL_LM"}),
}


@pytest.mark.parametrize("kind", _OTHER_TYPES)
def test_other_types_of_adapter_are_refused_by_name(kind: str, bases: Bases, refusal: Refuse, tmp_path: Path) -> None:
    config, settings = _OTHER_TYPES[kind]
    adapter = zoo.write_adapter(bases(LLAMA), tmp_path / "adapter", LLAMA, config=config, **settings)
    message = refusal(bases(LLAMA), adapter)
    assert f"a PEFT adapter of type {kind}; acemerge reads LORA" in message
    assert "merge_and_unload" in message


_OTHER_LORAS: dict[str, dict[str, Any]] = {
    "init_lora_weights='pissa'": {"init_lora_weights": "pissa"},
    "init_lora_weights='pissa_niter_2'": {"init_lora_weights": "pissa_niter_2"},
    "init_lora_weights='olora'": {"init_lora_weights": "olora"},
    "trainable_token_indices=[1, 2]": {"trainable_token_indices": [1, 2]},
    "layer_replication=[[0, 2], [0, 2]]": {"layer_replication": [(0, 2), (0, 2)]},
    "use_bdlora=": {"use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2)},
    "kasa_config=": {"kasa_config": KasaConfig()},
    "lora_bias together with bias='all'": {"lora_bias": True, "bias": "all", "target_modules": ["query"]},
}


@pytest.mark.parametrize("says", _OTHER_LORAS)
def test_other_variants_of_lora_are_refused_by_name(says: str, bases: Bases, refusal: Refuse, tmp_path: Path) -> None:
    class_name = BERT if "query" in str(_OTHER_LORAS[says]) else LLAMA
    settings = {"target_modules": ["q_proj"], **_OTHER_LORAS[says]}
    adapter = zoo.write_adapter(bases(class_name), tmp_path / "adapter", class_name, **settings)
    assert says in refusal(bases(class_name), adapter)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "invented_next_year"),
        ("use_qalora", True),
        ("alora_invocation_tokens", [1, 2]),
        ("arrow_config", {"top_k": 3}),
        ("corda_config", {"corda_method": "kpm"}),
        ("lora_ga_config", {"direction": "ArBr"}),
        ("megatron_config", {"tensor_parallel": 2}),
        ("monteclora_config", {"num_samples": 8}),
        ("velora_config", {"num_groups": 2}),
        ("option_invented_next_year", True),
        ("peft_type", "BOFT"),
        ("peft_type", None),
    ],
)
def test_settings_that_may_change_what_the_weights_mean(
    field: str, value: Any, bases: Bases, plain: Path, refusal: Refuse, tmp_path: Path
) -> None:
    """Variants that need data, hardware or a later peft to make: their settings are enough to refuse them."""
    adapter = zoo.copy_adapter(plain, tmp_path / "adapter")
    zoo.change_settings(adapter, **{field: value})
    message = refusal(bases(LLAMA), adapter)
    assert f"of type {value}" in message if field == "peft_type" else f"{field}={value!r}" in message


_BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "patterns in a list": ({"rank_pattern": ["q_proj"]}, "rank_pattern must be a mapping"),
    "no pattern": ({"alpha_pattern": {"q_proj(": 3}}, r"alpha_pattern: 'q_proj\(' is not a pattern"),
    "alpha in words": ({"lora_alpha": "eight"}, "lora_alpha of 'model.layers.0.self_attn.[qk]_proj' is 'eight', not a number"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha of .* is None, not a number"),
    "alpha is not finite": ({"lora_alpha": float("inf")}, "lora_alpha of .* is inf, not a number|not JSON|Infinity"),
    "own alpha in words": ({"alpha_pattern": {"q_proj": "x"}}, "lora_alpha of .*q_proj' is 'x', not a number"),
    "another rank": ({"r": 5}, "has rank 4, adapter_config.json says 5"),
    "no rank": ({"r": None}, "has rank 4, adapter_config.json says None"),
    "own rank in words": ({"rank_pattern": {"q_proj": "4"}}, "has rank 4, adapter_config.json says '?4"),
}


@pytest.mark.parametrize("case", _BAD_SETTINGS)
def test_bad_settings(case: str, bases: Bases, plain: Path, refusal: Refuse, tmp_path: Path) -> None:
    settings, says = _BAD_SETTINGS[case]
    adapter = zoo.copy_adapter(plain, tmp_path / "adapter")
    zoo.change_settings(adapter, **settings)
    message = refusal(bases(LLAMA), adapter)
    assert re.search(says, message), message


@pytest.mark.parametrize(
    ("text", "says"), [("{", "JSON"), ("[1, 2]", "expected a JSON object"), ("", "JSON"), ("null", "expected a JSON object")]
)
def test_a_config_that_is_not_json(text: str, says: str, bases: Bases, plain: Path, refusal: Refuse, tmp_path: Path) -> None:
    adapter = zoo.copy_adapter(plain, tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text(text)
    message = refusal(bases(LLAMA), adapter)
    assert says in message
    assert "adapter_config.json" in message


@pytest.mark.parametrize(("field", "value"), [("auto_mapping", "text"), ("task_type", ["SEQ_CLS"]), ("modules_to_save", 3)])
def test_odd_values_of_settings_that_are_hardly_used(
    field: str, value: Any, bases: Bases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stranger's file: refused or read, but never a traceback."""
    adapter = zoo.write_adapter(bases(BERT), tmp_path / "adapter", BERT, task_type="SEQ_CLS", target_modules=["query"])
    zoo.change_settings(adapter, **{field: value})
    for save_as in ("model", "adapter"):
        arguments = ["merge", str(bases(BERT)), str(adapter), "-o", str(tmp_path / f"as-{save_as}"), "--as", save_as, "-q"]
        monkeypatch.setattr(sys, "argv", ["acemerge", *arguments])
        code = 0
        try:
            main()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        message = capsys.readouterr().err
        assert code == 0 or (code == 2 and field in message), message
