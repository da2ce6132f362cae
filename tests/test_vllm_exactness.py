"""Every kind of adapter: what vLLM samples from is what the trainer holds, and the trainer's base is left alone."""

import os

import pytest
import torch
from peft import IA3Config, LoHaConfig, PeftModel

from tests.testing_utils import make_model
from tests.vllm_utils import lora, make_policy, move
from trl.weight_sync import base_tensors, check_logprobs, logprob_difference


TOLERANCE = 1e-3


# name: (peft_config or None, strategy on Llama, strategy on Qwen2, arguments of make_model)
ADAPTERS = {
    "plain": (lora(), "dynamic", "dynamic", {}),
    "r=3": (lora(r=3), "dynamic", "dynamic", {}),
    "r=16 alpha=8": (lora(r=16, lora_alpha=8), "dynamic", "dynamic", {}),
    "rslora": (lora(use_rslora=True), "dynamic", "dynamic", {}),
    "q,v": (lora(target_modules=["q_proj", "v_proj"]), "dynamic", "dynamic", {}),
    "all-linear": (lora(target_modules="all-linear"), "dynamic", "dynamic", {}),
    "regex": (lora(target_modules=r".*layers\.1\..*(q_proj|down_proj)"), "dynamic", "dynamic", {}),
    "layers_to_transform": (lora(layers_to_transform=[1]), "dynamic", "dynamic", {}),
    "exclude_modules": (lora(exclude_modules=["k_proj", "up_proj"]), "dynamic", "dynamic", {}),
    "rank_pattern": (
        lora(rank_pattern={"q_proj": 2, r".*layers\.0\.mlp\.down_proj": 20, "no_such_module": 400}),
        "dynamic",
        "dynamic",
        {},
    ),
    "alpha_pattern": (lora(alpha_pattern={"v_proj": 3, r"layers\.1\.mlp\..*": 40}), "dynamic", "dynamic", {}),
    "both patterns, rslora": (
        lora(use_rslora=True, rank_pattern={"q_proj": 4, "o_proj": 12}, alpha_pattern={"q_proj": 7}),
        "dynamic",
        "dynamic",
        {},
    ),
    "lm_head": (lora(target_modules=["q_proj", "lm_head"]), "dynamic", "full", {}),
    "embed_tokens": (lora(target_modules=["q_proj", "embed_tokens"]), "dynamic", "full", {}),
    "lm_head, tied": (lora(target_modules=["q_proj", "lm_head"]), "dynamic", "full", {"tie_word_embeddings": True}),
    "embed_tokens, tied": (
        lora(target_modules=["q_proj", "embed_tokens"]),
        "dynamic",
        "full",
        {"tie_word_embeddings": True},
    ),
    "q,v, tied": (lora(target_modules=["q_proj", "v_proj"]), "dynamic", "dynamic", {"tie_word_embeddings": True}),
    "target_parameters": (
        lora(target_modules=["v_proj"], target_parameters=["q_proj.weight", "down_proj.weight"]),
        "dynamic",
        "dynamic",
        {},
    ),
    "gaussian": (lora(init_lora_weights="gaussian"), "dynamic", "dynamic", {}),
    "PiSSA": (lora(init_lora_weights="pissa"), "dynamic", "dynamic", {}),
    "OLoRA": (lora(init_lora_weights="olora"), "dynamic", "dynamic", {}),
    "modules_to_save lm_head": (
        lora(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "dynamic",
        "dynamic",
        {},
    ),
    "modules_to_save norm (all of them)": (lora(modules_to_save=["norm"]), "dynamic", "dynamic", {}),
    "modules_to_save embed_tokens": (lora(modules_to_save=["embed_tokens"]), "dynamic", "dynamic", {}),
    "modules_to_save lm_head, tied": (
        lora(modules_to_save=["lm_head"]),
        "dynamic",
        "dynamic",
        {"tie_word_embeddings": True},
    ),
    "modules_to_save in a fused layer": (
        lora(target_modules=["q_proj"], modules_to_save=["k_proj"]),
        "full",
        "full",
        {},
    ),
    "trainable_token_indices": (lora(trainable_token_indices=[3, 5, 70]), "dynamic", "dynamic", {}),
    "trainable_token_indices, tied": (
        lora(trainable_token_indices=[3, 5, 70]),
        "dynamic",
        "dynamic",
        {"tie_word_embeddings": True},
    ),
    "DoRA": (lora(use_dora=True), "full", "full", {}),
    "bias lora_only": (lora(target_modules=["q_proj", "v_proj"], bias="lora_only"), "full", "full", {}),
    "bias all": (lora(bias="all"), "full", "full", {}),
    "lora_bias": (
        lora(target_modules=["q_proj", "v_proj"], lora_bias=True),
        "full",
        "full",
        {"attention_bias": True},
    ),
    "IA3": (IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),)
    + ("full",) * 2
    + ({},),
    "LoHa": (LoHaConfig(r=4, alpha=8, target_modules=["q_proj", "down_proj"]), "full", "full", {}),
    "no PEFT": (None, "full", "full", {}),
    "rank 600": (lora(r=600, lora_alpha=600, target_modules=["q_proj"]), "full", "full", {}),
}


def base_state(model):
    trained = {parameter.data_ptr() for parameter in model.parameters() if parameter.requires_grad}
    return {name: tensor.clone() for name, tensor in base_tensors(model) if tensor.data_ptr() not in trained}


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_engine_serves_the_policy(name, architecture, start_engine, prompts, tmp_path):
    peft_config, *strategies, model_arguments = ADAPTERS[name]
    if architecture == "qwen2":
        model_arguments = {key: value for key, value in model_arguments.items() if key != "attention_bias"}
    model = make_policy(peft_config, architecture, **model_arguments)
    move(model)
    environment, base = dict(os.environ), base_state(model)

    engine, sync = start_engine(model)
    assert sync.plan.strategy == strategies[architecture == "qwen2"], sync.plan.reasons
    sync.push(engine)
    check_logprobs(engine, model, prompts, tolerance=TOLERANCE)

    # A second policy replaces the first, and the first would not have passed for it.
    move(model, seed=2)
    assert logprob_difference(engine, model, prompts) > 10 * TOLERANCE
    sync.push(engine)
    check_logprobs(engine, model, prompts, tolerance=TOLERANCE)

    assert dict(os.environ) == environment
    for key, tensor in base_state(model).items():
        assert torch.equal(tensor, base[key]), key

    model.save_pretrained(tmp_path)
    if peft_config is not None:
        restored = PeftModel.from_pretrained(make_model(architecture, **model_arguments), tmp_path).eval()
        token_ids = torch.tensor([prompts[3]])
        with torch.no_grad():
            torch.testing.assert_close(restored(token_ids).logits, model.eval()(token_ids).logits)


MERGEABLE = [(name, "llama") for name, row in ADAPTERS.items() if row[1] == "dynamic"]
MERGEABLE += [(name, "qwen2") for name in ("plain", "q,v", "lm_head", "embed_tokens, tied", "trainable_token_indices")]


@pytest.mark.parametrize(("name", "architecture"), MERGEABLE)
def test_engine_puts_the_adapter_into_its_weights(name, architecture, start_engine, prompts):
    peft_config, *strategies, model_arguments = ADAPTERS[name]
    model = make_policy(peft_config, architecture, **model_arguments)
    move(model)
    environment, base = dict(os.environ), base_state(model)
    both_ways = strategies[architecture == "qwen2"] == "dynamic"

    engine, sync = start_engine(model, vllm_lora_mode="auto" if both_ways else "merged")
    assert sync.plan.strategy == ("auto" if both_ways else "merged"), sync.plan.reasons
    # From one way of serving to the other and back, the policy moving each time.
    for seed, mode in enumerate(["merged", "merged", *(["dynamic", "merged"] if both_ways else [])]):
        move(model, seed)
        if engine.policy_version is not None:
            assert logprob_difference(engine, model, prompts) > 10 * TOLERANCE
        if both_ways:
            sync.chooser = Choice(mode)
        report = sync.push(engine)
        assert (report.merge_error is None) == (mode == "dynamic")
        check_logprobs(engine, model, prompts, tolerance=TOLERANCE)

    assert dict(os.environ) == environment
    for key, tensor in base_state(model).items():
        assert torch.equal(tensor, base[key]), key


class Choice:
    """Stands in for a `ModeChooser` that has decided."""

    def __init__(self, mode):
        self.mode = mode

    def choose(self, error):
        return self.mode
