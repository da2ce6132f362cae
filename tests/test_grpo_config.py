from __future__ import annotations

import dataclasses
import json

import pytest
from transformers import HfArgumentParser

from trl import GRPOConfig


# Of TRL 1.16, which scripts rely on.
TRL_DEFAULTS = {
    "learning_rate": 1e-6,
    "logging_steps": 10,
    "remove_unused_columns": False,
    "num_generations": 8,
    "max_completion_length": 512,
    "shuffle_dataset": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_model_impl": "vllm",
    "vllm_enable_sleep_mode": False,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_length": None,
    "vllm_tensor_parallel_size": 1,
    "beta": 0.0,
    "num_iterations": 1,
    "epsilon": 0.2,
    "epsilon_high": None,
    "reward_weights": None,
    "scale_rewards": "group",
    "loss_type": "dapo",
    "mask_truncated_completions": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "use_bias_correction_kl": True,
    "log_completions": False,
    "vllm_enable_lora": None,
    "max_lora_rank": None,
    "vllm_recreate_every": None,
}


def test_defaults():
    config = GRPOConfig("out", use_cpu=True)
    assert {name: getattr(config, name) for name in TRL_DEFAULTS} == TRL_DEFAULTS


def test_bf16_is_off_where_there_is_no_device_for_it():
    assert GRPOConfig("out", use_cpu=True).bf16 is False
    assert GRPOConfig("out", use_cpu=True, bf16=True).bf16 is True


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1, 8)),
        ({"gradient_accumulation_steps": 4}, (4, 32)),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, (2, 16)),
        ({"generation_batch_size": 24}, (3, 24)),
        ({"generation_batch_size": 24, "steps_per_generation": 3}, (3, 24)),
    ],
)
def test_size_of_a_rollout(options, expected):
    config = GRPOConfig("out", use_cpu=True, **options)
    assert (config.steps_per_generation, config.generation_batch_size) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_generations": 1}, ("num_generations=1", "at least 2")),
        ({"num_generations": 3}, ("generation_batch_size=8", "num_generations=3", "24", "2, 4, 8")),
        ({"generation_batch_size": 20}, ("generation_batch_size=20", "16 and 24")),
        (
            {"generation_batch_size": 16, "steps_per_generation": 3},
            ("steps_per_generation=3", "steps_per_generation=2"),
        ),
        ({"eval_strategy": "steps", "per_device_eval_batch_size": 12}, ("per_device_eval_batch_size=12", "8 and 16")),
        (
            {"eval_strategy": "steps", "num_generations_eval": 5},
            ("per_device_eval_batch_size=8", "num_generations_eval=5", "5 and 10"),
        ),
        ({"max_lora_rank": 24}, ("max_lora_rank=24", "1, 8, 16, 32, 64, 128, 256, 320, 512")),
        ({"vllm_recreate_every": 0}, ("vllm_recreate_every=0", "at least 1")),
        ({"vllm_enable_lora": True}, ("vllm_enable_lora=True", "use_vllm=True")),
        ({"vllm_lora_mode": "auto"}, ("vllm_lora_mode='auto'", "use_vllm=True")),
        ({"vllm_lora_mode": "fast", "use_vllm": True}, ("vllm_lora_mode='fast'", "'dynamic', 'merged', 'auto'")),
        (
            {"vllm_lora_mode": "auto", "vllm_enable_lora": False, "use_vllm": True},
            ("vllm_lora_mode='auto'", "vllm_enable_lora=False", "vllm_lora_mode='merged'"),
        ),
        ({"vllm_share_base": True}, ("vllm_share_base=True", "use_vllm=True")),
        ({"num_generations": 2.5}, ("num_generations=2.5", "whole number of at least 2")),
        ({"per_device_train_batch_size": 0}, ("per_device_train_batch_size=0", "at least 1")),
        ({"vllm_gpu_memory_utilization": "a"}, ("vllm_gpu_memory_utilization='a', a str", "at most 1")),
        ({"vllm_enable_lora": "yes", "use_vllm": True}, ("vllm_enable_lora='yes'", "True, False")),
        ({"vllm_mode": "server"}, ("vllm_mode='server'", "colocate", "later")),
        ({"loss_type": "sapo"}, ("loss_type='sapo'", "'grpo', 'bnpo', 'dr_grpo', 'dapo'")),
        ({"scale_rewards": "std"}, ("scale_rewards='std'", "'group', 'batch', 'none'")),
        ({"vllm_importance_sampling_mode": "mask"}, ("vllm_importance_sampling_mode='mask'", "'token_mask'")),
        (
            {"vllm_importance_sampling_clip_min": 4.0},
            ("vllm_importance_sampling_clip_min=4.0", "vllm_importance_sampling_clip_max=3.0"),
        ),
        ({"temperature": 0.0}, ("temperature=0.0", "top_k=1")),
        ({"top_p": 0.0}, ("top_p=0.0",)),
        ({"epsilon": -0.1}, ("epsilon=-0.1",)),
        ({"beta": -1.0}, ("beta=-1.0",)),
        ({"num_iterations": 0}, ("num_iterations=0",)),
        ({"max_completion_length": 0}, ("max_completion_length=0",)),
        ({"vllm_gpu_memory_utilization": 30}, ("vllm_gpu_memory_utilization=30",)),
        ({"auto_find_batch_size": True}, ("auto_find_batch_size=True", "per_device_train_batch_size")),
        ({"generation_kwargs": "top_p"}, ("generation_kwargs='top_p'", "JSON")),
    ],
)
def test_bad_values_are_refused(options, words):
    with pytest.raises(ValueError, match=words[0]) as error:
        GRPOConfig("out", use_cpu=True, **options)
    assert [word for word in words if word not in str(error.value)] == []


def test_option_that_is_not_there_is_named():
    with pytest.raises(TypeError, match="delta"):
        GRPOConfig("out", delta=2.0)


@pytest.mark.parametrize(("given", "meant"), [(True, "group"), (False, "none"), ("False", "none"), ("batch", "batch")])
def test_scale_rewards_may_be_a_bool(given, meant):
    assert GRPOConfig("out", use_cpu=True, scale_rewards=given).scale_rewards == meant


def test_old_name_of_clip_max():
    with pytest.warns(FutureWarning, match="vllm_importance_sampling_clip_max"):
        config = GRPOConfig("out", use_cpu=True, vllm_importance_sampling_cap=2.0)
    assert config.vllm_importance_sampling_clip_max == 2.0


def test_config_can_be_made_from_its_own_values():
    config = GRPOConfig("out", use_cpu=True, gradient_accumulation_steps=2)
    assert dataclasses.replace(config, beta=0.1).generation_batch_size == config.generation_batch_size


def test_command_line():
    generation_kwargs = {"presence_penalty": 0.5, "skip": [1, 2]}
    (config,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(
        [
            *("--output_dir", "out", "--use_cpu", "--num_generations", "4", "--min_p", "0.1"),
            *("--generation_kwargs", json.dumps(generation_kwargs), "--reward_weights", "1", "0.5"),
            *("--scale_rewards", "false", "--no_shuffle_dataset", "--max_lora_rank", "32"),
        ]
    )
    assert (config.num_generations, config.min_p, config.max_lora_rank) == (4, 0.1, 32)
    assert config.generation_kwargs == generation_kwargs
    assert (config.reward_weights, config.scale_rewards, config.shuffle_dataset) == ([1.0, 0.5], "none", False)
    assert config.vllm_enable_lora is None


def test_memory_is_not_pinned_without_a_device_to_pin_it_for():
    config = GRPOConfig("out")
    assert config.dataloader_pin_memory == (config.device.type != "cpu")
