"""Builds the rollout engine that a configuration asks for."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..weight_sync.adapter import base_model
from ..weight_sync.select import EngineCapabilities, SyncPlan, announce, announce_sharing, select_sync
from ..weight_sync.share import SharedTensor, num_bytes, share_base
from ..weight_sync.strategies import base_tensors
from .engine import RolloutEngine
from .process_state import globals_kept, vllm_process


if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..trainer.grpo_config import GRPOConfig


logger = logging.getLogger(__name__)


def check_engine(args: GRPOConfig) -> None:
    """Raise `ImportError` when vLLM is asked for and not installed, or of an unsupported version."""
    if args.use_vllm:
        from . import vllm_worker

        vllm_worker.check_installed()


def create_rollout_engine(
    model: nn.Module, args: GRPOConfig, processing_class: Any, accelerator: Accelerator
) -> tuple[RolloutEngine, SyncPlan | None]:
    """Build the engine that samples the rollouts.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The policy, unwrapped.
        args ([`GRPOConfig`]): `use_vllm` chooses the engine, the other `vllm_*` fields configure it.
        processing_class: The tokenizer.
        accelerator (`Accelerator`): Gives device and number of processes.

    Returns:
        `(engine, plan)`: `plan` is `None` for an engine that samples from `model` itself.

    Raises:
        ImportError: When vLLM is asked for and not installed, or of an unsupported version.
        ValueError: When the policy cannot be served as asked for, or the configuration does not fit the machine.
    """
    if not args.use_vllm:
        from .transformers_engine import TransformersEngine

        return TransformersEngine(model, processing_class.pad_token_id, processing_class), None

    from . import vllm_engine, vllm_worker

    check_engine(args)
    _check_machine(args, accelerator)
    config = base_model(model).config
    _check_length(args, config)
    dtype = _serving_dtype(model, args)
    plan = select_sync(model, args, engine_capabilities(config, dtype, accelerator.device))
    announce(plan, has_adapter=hasattr(model, "peft_config"), logger=logger)
    announce_sharing(plan, logger)
    shared = share_base(model, plan.fused_modules, dtype, accelerator.device) if plan.share_base else []
    settings = vllm_engine.VllmSettings(
        dtype=dtype,
        device=accelerator.device,
        seed=args.seed,
        max_num_seqs=args.per_device_train_batch_size * args.steps_per_generation,
        max_model_length=args.vllm_max_model_length,
        gpu_memory_utilization=_memory_share(args, shared, accelerator.device),
        enable_sleep_mode=args.vllm_enable_sleep_mode,
        sleep_level=args.vllm_sleep_level,
        model_impl=args.vllm_model_impl,
        trust_remote_code=args.trust_remote_code,
        stop_strings="stop" in (args.generation_kwargs or {}),
    )
    weights = vllm_worker.InitialWeights(partial(base_tensors, model), shared)
    engine = vllm_engine.VllmEngine(plan, config, weights, settings, processing_class)
    return engine, plan


def engine_capabilities(config: Any, dtype: torch.dtype, device: torch.device) -> EngineCapabilities:
    """What the installed vLLM can do with the model that `config` describes, in `dtype` on `device`.

    Raises:
        ValueError: When vLLM does not know the architecture.
    """
    from . import vllm_worker

    names = ", ".join(config.architectures or ()) or type(config).__name__
    with globals_kept(), vllm_process({}):
        architecture = vllm_worker.describe_architecture(config)
    if architecture is None:
        raise ValueError(
            f"vLLM {vllm_worker.installed_version()} does not know the architecture {names}. Set use_vllm=False."
        )
    return EngineCapabilities(
        supports_lora=architecture.supports_lora,
        embedding_modules=architecture.embedding_modules,
        fused_modules=architecture.fused_modules,
        architecture=names,
        dtype=dtype,
        lora_dtypes=vllm_worker.lora_dtypes(device),
        packs_weights=vllm_worker.packs_weights(device),
    )


def _check_length(args: GRPOConfig, config: Any) -> None:
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    scaled = "factor" in (getattr(text, "rope_scaling", None) or getattr(text, "rope_parameters", None) or {})
    length = args.vllm_max_model_length
    if None not in (length, limit) and length > limit and not scaled:
        raise ValueError(
            f"vllm_max_model_length={length} is more than the {limit} positions that the model has. Give at most "
            "that, or leave it unset."
        )


def _serving_dtype(model: nn.Module, args: GRPOConfig) -> torch.dtype:
    """The dtype that the trainer computes in, so that both see the same rounding."""
    if args.bf16:
        return torch.bfloat16
    if args.fp16:
        return torch.float16
    return base_model(model).dtype


def _memory_share(args: GRPOConfig, shared: list[SharedTensor], device: torch.device) -> float:
    """vLLM's share of the memory. What it shares counts as its own, so that the cache does not grow by it instead."""
    if not shared or device.type != "cuda":
        return args.vllm_gpu_memory_utilization
    total = torch.cuda.get_device_properties(device).total_memory
    return max(0.01, args.vllm_gpu_memory_utilization - num_bytes(shared) / total)


def _check_machine(args: GRPOConfig, accelerator: Accelerator) -> None:
    if accelerator.num_processes > 1:
        raise ValueError(
            f"use_vllm=True with vllm_mode='colocate' runs in one process so far, not in {accelerator.num_processes}. "
            "Start one process, or set use_vllm=False."
        )
    if args.vllm_tensor_parallel_size != 1:
        raise ValueError(
            f"vllm_tensor_parallel_size={args.vllm_tensor_parallel_size} needs as many processes, and colocate mode "
            "runs in one so far. Set vllm_tensor_parallel_size=1."
        )
    if args.vllm_enable_sleep_mode and accelerator.device.type != "cuda":
        raise ValueError(
            f"vllm_enable_sleep_mode=True needs a CUDA device, not {accelerator.device.type!r}. Set it to False."
        )
