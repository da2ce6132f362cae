"""Engines as the trainer builds them, for the benchmarks."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from trl.generation.engine import SamplingConfig
from trl.generation.factory import engine_capabilities
from trl.generation.vllm_engine import VllmEngine, VllmSettings
from trl.generation.vllm_worker import InitialWeights
from trl.weight_sync import WeightSync, base_tensors, select_sync
from trl.weight_sync.adapter import base_model
from trl.weight_sync.share import share_base
from trl.weight_sync.verify import trainer_logprobs


def build_engine(
    model,
    device: str,
    dtype: torch.dtype,
    vllm_enable_lora=None,
    vllm_lora_mode=None,
    vllm_share_base=False,
    **settings,
):
    """`(engine, sync)` as the trainer builds them."""
    config = SimpleNamespace(
        vllm_enable_lora=vllm_enable_lora,
        vllm_lora_mode=vllm_lora_mode,
        max_lora_rank=None,
        vllm_share_base=vllm_share_base,
    )
    root = base_model(model)
    plan = select_sync(model, config, engine_capabilities(root.config, dtype, torch.device(device)))
    settings = VllmSettings(dtype=dtype, device=torch.device(device), **settings)
    shared = share_base(model, plan.fused_modules, dtype, torch.device(device)) if plan.share_base else []
    weights = InitialWeights(lambda: base_tensors(model), shared)
    return VllmEngine(plan, root.config, weights, settings), WeightSync(model, plan)


def agreement(engine, model, prompts, max_tokens: int = 12) -> dict[str, float]:
    """Mean and largest difference, in nats, of the engine's and the trainer's log probabilities of sampled tokens."""
    rollout = engine.generate(prompts, SamplingConfig(max_tokens=max_tokens), seed=0)
    differences = []
    for prompt, completion, logprobs in zip(prompts, rollout.completion_ids, rollout.logprobs, strict=True):
        differences += (trainer_logprobs(model, prompt, completion) - torch.tensor(logprobs)).abs().tolist()
    return {"mean": sum(differences) / len(differences), "max": max(differences), "tokens": len(differences)}


class Always:
    """Stands in for the chooser of `vllm_lora_mode="auto"`, so that one engine can be measured both ways."""

    def __init__(self, mode: str):
        self.mode = mode

    def choose(self, error: float) -> str:
        return self.mode

    def record(self, *_) -> None:
        pass


def set_mode(sync: WeightSync, engine: VllmEngine, mode: str):
    """Serve the policy in this way from now on. Returns the report of the push."""
    sync.chooser = Always(mode)
    sync.policy_changed()
    return sync.push(engine)
