"""Models beside Llama and Qwen2: each way that a policy of theirs reaches real vLLM on the CPU serves that policy."""

import pytest
import torch
from peft import get_peft_model
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.vllm_utils import DEVICE, build_engine, lora, move
from trl.weight_sync import check_logprobs


TOKENS = {"vocab_size": 260, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3, "initializer_range": 0.2}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    **TOKENS,
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "bloom": (BloomForCausalLM, BloomConfig(hidden_size=64, n_layer=2, n_head=2, **TOKENS)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(sliding_window=256, **SIZES)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=512, **TOKENS)),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **EXPERTS)),
}


def make_adapted(name, target):
    model_class, config = MODELS[name]
    config.architectures = [model_class.__name__]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).float().eval().to(DEVICE)
        return get_peft_model(model, lora(target_modules=[target], fan_in_fan_out=name == "gpt2"))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="what is served how is decided for the CPU, in float32")
@pytest.mark.parametrize(
    ("name", "target", "mode", "strategy"),
    [
        ("bloom", "query_key_value", "dynamic", "full"),
        ("gemma2", "q_proj", "dynamic", "dynamic"),
        ("gemma2", "q_proj", "merged", "merged"),
        ("gpt2", "c_attn", "merged", "full"),
        ("qwen3_moe", "q_proj", "auto", "merged"),
    ],
)
@pytest.mark.filterwarnings("ignore:The adapter cannot be served")
def test_vllm_serves_the_policy(name, target, mode, strategy):
    model = make_adapted(name, target)
    engine, sync = build_engine(model, vllm_lora_mode=mode)
    try:
        assert sync.plan.strategy == strategy
        move(model)
        sync.push(engine)
        check_logprobs(engine, model, [list(range(5, 45))], tolerance=1e-3)
    finally:
        engine.close()
