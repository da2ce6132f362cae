"""Policies and engines for the tests that run real vLLM."""

from functools import partial
from types import SimpleNamespace

import torch
from peft import LoraConfig, get_peft_model

from tests.testing_utils import make_model
from trl.generation.factory import engine_capabilities
from trl.generation.vllm_engine import VllmEngine, VllmSettings
from trl.generation.vllm_worker import InitialWeights
from trl.weight_sync import WeightSync, base_tensors, select_sync
from trl.weight_sync.adapter import base_model
from trl.weight_sync.share import share_base


DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(**arguments):
    return LoraConfig(**({"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEAR} | arguments))


def make_policy(peft_config, architecture="llama", **model_arguments):
    """A tiny model with the adapter, or the model itself for `None`. The caller's random state is left alone."""
    model = make_model(architecture, **model_arguments).to(DEVICE)
    if peft_config is None:
        return model
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(model, peft_config)


def move(model, seed=1, scale=0.1):
    """Change every trained parameter in place, as an optimizer would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter.device))
    return model


def build_engine(
    model,
    vllm_enable_lora=None,
    vllm_lora_mode=None,
    max_lora_rank=None,
    vllm_share_base=False,
    recreate_every=None,
    dtype=torch.float32,
    **settings,
):
    """`(engine, sync)` for a model, as the trainer builds them."""
    config = SimpleNamespace(
        vllm_enable_lora=vllm_enable_lora,
        vllm_lora_mode=vllm_lora_mode,
        max_lora_rank=max_lora_rank,
        vllm_share_base=vllm_share_base,
    )
    plan = select_sync(model, config, engine_capabilities(base_model(model).config, dtype, DEVICE))
    settings = VllmSettings(dtype, DEVICE, max_num_seqs=8, extra={"enforce_eager": True}, **settings)
    shared = share_base(model, plan.fused_modules, dtype, DEVICE) if plan.share_base else []
    weights = InitialWeights(partial(base_tensors, model), shared)
    engine = VllmEngine(plan, base_model(model).config, weights, settings)
    return engine, WeightSync(model, plan, recreate_every)
