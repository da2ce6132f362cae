"""The leaner layers compute what the model's own do, keep less, and are gone afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Phi3Config, Qwen3Config

from trl.trainer.lean_layers import LeanLayers
from trl.trainer.memory import saved_bytes


SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "pad_token_id": 0,
}
CONFIGS = {each.model_type: each for each in (LlamaConfig, Qwen3Config, Gemma3TextConfig, Phi3Config)}


def adapted(model_type: str = "llama", dtype: torch.dtype = torch.float64, **options) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[model_type](**SIZES), dtype=dtype)
    options = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", **options}
    model = get_peft_model(model, LoraConfig(**options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    return model.train()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    ids = torch.arange(24).view(2, 12)
    logits = model(input_ids=ids).logits
    model.zero_grad()
    logits.logsumexp(dim=-1).square().mean().backward()
    trained = {name: each.grad.clone() for name, each in model.named_parameters() if each.requires_grad}
    return {"logits": logits.detach(), **trained}


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        *((each, {}) for each in CONFIGS),
        ("llama", {"use_rslora": True, "rank_pattern": {"q_proj": 2}}),
        ("llama", {"target_modules": ["q_proj", "up_proj"]}),
        ("llama", {"target_modules": ["down_proj"]}),
        ("llama", {"use_dora": True}),
        ("llama", {"bias": "lora_only"}),
    ],
)
def test_values_and_gradients_are_those_of_the_model(model_type, options):
    model = adapted(model_type, **options)
    expected = gradients(model)
    with LeanLayers(model).active():
        torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_the_same_under_gradient_checkpointing(reentrant):
    model = adapted()
    expected = gradients(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    with LeanLayers(model).active():
        torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)


def test_mixed_precision_is_no_less_exact_than_that_of_peft():
    exact = adapted(dtype=torch.float64)
    expected = gradients(exact)
    model = copy.deepcopy(exact).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()

    def errors() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(model)
        return torch.stack([(found[name] - expected[name]).norm() / expected[name].norm() for name in expected])

    of_peft = errors()
    with LeanLayers(model, under_autocast=True).active():
        of_ours = errors()
    assert of_ours.mean() < 1.1 * of_peft.mean()
    assert of_ours.max() < 0.1


@pytest.mark.parametrize(("model_type", "share"), [("llama", 0.66), ("phi3", 0.95)])
def test_less_is_kept_for_the_backward_pass(model_type, share):
    model = adapted(model_type, torch.bfloat16)
    ids = torch.arange(48).view(1, 48)
    usual = saved_bytes(model, lambda: model(input_ids=ids).logits)
    with LeanLayers(model).active():
        assert saved_bytes(model, lambda: model(input_ids=ids).logits) < share * usual


def test_an_adapter_of_another_dtype_is_left_to_peft_without_autocast():
    model = adapted(dtype=torch.float32)
    model.base_model.model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    expected = gradients(model)
    with LeanLayers(model).active():
        found = gradients(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_the_adapter_is_now_decides():
    model = adapted(lora_dropout=0.5)
    layers = LeanLayers(model)
    with layers.active(), torch.random.fork_rng():
        torch.manual_seed(1)
        dropped = gradients(model)
    torch.manual_seed(1)
    expected = gradients(model)
    torch.testing.assert_close(dropped, expected, rtol=1e-9, atol=1e-12)
    with model.disable_adapter(), torch.no_grad():
        base = model(input_ids=torch.arange(8)[None]).logits
        with layers.active():
            torch.testing.assert_close(model(input_ids=torch.arange(8)[None]).logits, base, rtol=1e-9, atol=1e-12)


def test_layers_are_the_models_own_afterwards():
    model = adapted()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(RuntimeError, match="on purpose"), LeanLayers(model).active():  # noqa: PT012
        assert "forward" in vars(model.base_model.model.model.layers[0].mlp)
        raise RuntimeError("on purpose")
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_a_layer_with_hooks_is_left_alone():
    model = adapted()
    called = []
    for module in model.modules():
        if type(module) is nn.Linear:
            module.register_forward_hook(lambda module, *_: called.append(module))
    layers = LeanLayers(model)
    called.clear()
    model(input_ids=torch.arange(8)[None])
    expected = len(called)
    with layers.active():
        model(input_ids=torch.arange(8)[None])
    assert len(called) == 2 * expected


def test_an_mlp_of_another_formula_is_left_alone():
    model = adapted()
    for layer in model.base_model.model.model.layers:
        mlp = layer.mlp
        mlp.forward = lambda x, mlp=mlp: 2 * mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    expected = gradients(model)
    with LeanLayers(model).active():
        torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)
