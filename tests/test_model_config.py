from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from peft import PeftConfig

from trl import ModelConfig, get_peft_config, get_quantization_config
from trl.trainer import model_config
from trl.trainer.model_config import get_model_init_kwargs


def test_defaults_are_those_of_trl():
    assert asdict(ModelConfig()) == {
        "model_name_or_path": None,
        "model_revision": "main",
        "dtype": "float32",
        "attn_implementation": None,
        "use_peft": False,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "lora_target_modules": None,
        "lora_target_parameters": None,
        "lora_modules_to_save": None,
        "lora_task_type": "CAUSAL_LM",
        "use_rslora": False,
        "use_dora": False,
        "load_in_8bit": False,
        "load_in_4bit": False,
        "bnb_4bit_quant_type": "nf4",
        "use_bnb_nested_quant": False,
        "bnb_4bit_quant_storage": None,
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (["q_proj"], ["q_proj"]),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        (["self_attn.q_proj"], ["self_attn.q_proj"]),
        (["all-linear"], "all-linear"),
        ("all-linear", "all-linear"),
        ([r".*layers\.[01]\..*q_proj"], r".*layers\.[01]\..*q_proj"),
    ],
)
def test_target_modules(given, expected):
    config = get_peft_config(ModelConfig(use_peft=True, lora_target_modules=given))
    # PEFT keeps lists of names as sets.
    assert config.target_modules == (set(expected) if isinstance(expected, list) else expected)


def test_every_lora_option_reaches_peft():
    config = get_peft_config(
        ModelConfig(
            use_peft=True,
            lora_r=4,
            lora_alpha=6,
            lora_dropout=0.5,
            lora_target_modules=["q_proj", "v_proj"],
            lora_target_parameters=["mlp.experts.down_proj"],
            lora_modules_to_save=["lm_head"],
            lora_task_type="SEQ_CLS",
            use_rslora=True,
            use_dora=True,
        )
    )
    assert isinstance(config, PeftConfig)
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 6, 0.5)
    assert config.target_modules == {"q_proj", "v_proj"}
    assert config.target_parameters == ["mlp.experts.down_proj"]
    assert config.modules_to_save == ["lm_head"]
    assert config.task_type == "SEQ_CLS"
    assert config.use_rslora
    assert config.use_dora
    assert config.bias == "none"


def test_no_adapter_and_no_quantisation_without_being_asked():
    assert get_peft_config(ModelConfig(lora_r=4)) is None
    assert get_quantization_config(ModelConfig()) is None


@pytest.fixture
def bitsandbytes(monkeypatch):
    """Only its presence is looked at: nothing is quantised here."""
    monkeypatch.setattr(model_config, "find_spec", lambda name: name)


def test_8_bits(bitsandbytes):
    config = get_quantization_config(ModelConfig(load_in_8bit=True))
    assert (config.load_in_8bit, config.load_in_4bit) == (True, False)


def test_4_bits(bitsandbytes):
    config = get_quantization_config(
        ModelConfig(
            load_in_4bit=True,
            dtype="float16",
            bnb_4bit_quant_type="fp4",
            use_bnb_nested_quant=True,
            bnb_4bit_quant_storage="bfloat16",
        )
    )
    assert (config.load_in_8bit, config.load_in_4bit) == (False, True)
    assert config.bnb_4bit_compute_dtype == torch.float16
    assert config.bnb_4bit_quant_type == "fp4"
    assert config.bnb_4bit_use_double_quant
    assert config.bnb_4bit_quant_storage == torch.bfloat16


def test_4_bits_with_the_stored_dtype(bitsandbytes):
    config = get_quantization_config(ModelConfig(load_in_4bit=True, dtype="auto"))
    assert config.bnb_4bit_compute_dtype == torch.float32


def test_quantisation_needs_bitsandbytes(monkeypatch):
    monkeypatch.setattr(model_config, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"load_in_4bit=True needs bitsandbytes.*trl\[quantization\]"):
        get_quantization_config(ModelConfig(load_in_4bit=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_in_8bit": True, "load_in_4bit": True}, "load_in_8bit and load_in_4bit"),
        ({"dtype": "fp32"}, "dtype='fp32' is not one of None, auto, bfloat16, float16, float32"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type='int4' is not one of fp4, nf4"),
        ({"bnb_4bit_quant_storage": "int8"}, "bnb_4bit_quant_storage='int8'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


def test_model_init_kwargs_leave_out_what_is_not_given():
    assert get_model_init_kwargs(ModelConfig(dtype=None)) == {"revision": "main"}
    assert get_model_init_kwargs(ModelConfig(model_revision="v1", dtype="bfloat16", attn_implementation="sdpa")) == {
        "revision": "v1",
        "attn_implementation": "sdpa",
        "dtype": "bfloat16",
    }
