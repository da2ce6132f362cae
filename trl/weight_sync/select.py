"""Which way the policy reaches the engine, decided before the engine is built.

[`select_sync`] is a pure function of the model, the configuration and what vLLM can do. Every check below it returns a
sentence that says why the adapter cannot be served as it is; all of them are kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftType
from peft.tuners import lora
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from .adapter import (
    VLLM_LORA_RANKS,
    active_adapters,
    base_model,
    is_bitsandbytes,
    lora_layers,
    policy_modules,
    required_rank,
    round_up_rank,
    ties_embeddings,
)


DYNAMIC = "dynamic"
MERGED = "merged"
AUTO = "auto"
FULL = "full"
NO_ADAPTER = "the model has no adapter"


@dataclass(frozen=True)
class EngineCapabilities:
    """What the installed vLLM can do with one architecture.

    Attributes:
        supports_lora (`bool`): Whether vLLM can serve adapters for the architecture.
        embedding_modules (`frozenset[str]`): Last names of the embedding modules that an adapter may target.
        fused_modules (`tuple[tuple[str, ...], ...]`): Last names of modules that vLLM keeps in one tensor, such as
            `("q_proj", "k_proj", "v_proj")`.
        architecture (`str`): Name of the architecture, for messages.
        dtype (`torch.dtype`): What the engine will compute in.
        lora_dtypes (`frozenset[torch.dtype]`, *optional*): What its LoRA kernels can compute in; any if `None`.
        packs_weights (`bool`): Whether it computes with copies of its weights in a layout of their own.
    """

    supports_lora: bool = True
    embedding_modules: frozenset[str] = frozenset({"embed_tokens", "lm_head"})
    fused_modules: tuple[tuple[str, ...], ...] = ()
    architecture: str = "the model"
    dtype: torch.dtype = torch.float32
    lora_dtypes: frozenset[torch.dtype] | None = None
    packs_weights: bool = False


@dataclass(frozen=True)
class SyncPlan:
    """How the policy reaches the engine.

    Attributes:
        strategy (`str`): `"dynamic"` (the adapter in vLLM's LoRA slots), `"merged"` (the engine puts the adapter into
            its weights), `"auto"` (now the one, now the other), or `"full"` (merged tensors are sent).
        reasons (`tuple[str, ...]`): Why it is not what was asked for, or not dynamic; empty when it is.
        adapter (`str` or `None`): Name of the PEFT adapter that is sent.
        max_lora_rank (`int` or `None`): Rank of the engine's LoRA buffers.
        target_modules (`tuple[str, ...]`): Last names of the modules that get LoRA buffers.
        untie_embeddings (`bool`): Whether the engine must keep `lm_head` apart from `embed_tokens`, because the
            policy's differ although the base model ties them.
        fused_modules (`tuple[tuple[str, ...], ...]`): See [`EngineCapabilities`].
        dtype (`torch.dtype`): What the engine computes in.
        share_base (`bool`): Whether the engine uses the trainer's base weights in place of a copy.
        share_reasons (`tuple[str, ...]`): Why it does not although it was asked to.
    """

    strategy: str
    reasons: tuple[str, ...] = ()
    adapter: str | None = None
    max_lora_rank: int | None = None
    target_modules: tuple[str, ...] = ()
    untie_embeddings: bool = False
    fused_modules: tuple[tuple[str, ...], ...] = ()
    dtype: torch.dtype = torch.float32
    share_base: bool = False
    share_reasons: tuple[str, ...] = ()

    @property
    def sends_adapter(self) -> bool:
        """Whether the adapter is sent, not tensors that it was merged into."""
        return self.strategy != FULL

    @property
    def has_lora_slots(self) -> bool:
        """Whether the engine can apply an adapter while it computes."""
        return self.strategy in (DYNAMIC, AUTO)


@dataclass(frozen=True)
class _Candidate:
    """The adapter under examination, as the checks see it."""

    model: nn.Module
    capabilities: EngineCapabilities
    names: list[str]
    name: str
    config: Any
    layers: dict[str, LoraLayer]


def _one_active_adapter(candidate: _Candidate) -> Iterator[str]:
    if len(candidate.names) != 1:
        yield f"{len(candidate.names)} adapters are active ({', '.join(candidate.names) or 'none'}), one is served"


def _is_lora(candidate: _Candidate) -> Iterator[str]:
    if candidate.config.peft_type != PeftType.LORA:
        yield f"the adapter is of type {PeftType(candidate.config.peft_type).value}, vLLM serves LORA"


def _engine_serves_lora(candidate: _Candidate) -> Iterator[str]:
    if not candidate.capabilities.supports_lora:
        yield f"vLLM serves no adapters for {candidate.capabilities.architecture}"


def _engine_computes_lora(candidate: _Candidate) -> Iterator[str]:
    dtype, served = candidate.capabilities.dtype, candidate.capabilities.lora_dtypes
    if served is not None and dtype not in served:
        names = " and ".join(sorted(str(name).removeprefix("torch.") for name in served))
        yield f"vLLM's LoRA kernels compute in {names} here, training is in {str(dtype).removeprefix('torch.')}"


def _experts_computed_with_lora(candidate: _Candidate) -> Iterator[str]:
    if candidate.capabilities.packs_weights and any(_experts(candidate.model)):
        yield "vLLM computes experts on a LoRA-enabled engine with kernels that need a GPU"


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module | None, nn.Module]]:
    return (located for located in policy_modules(base_model(model)) if "experts" in located[0].split("."))


def _rank_fits(candidate: _Candidate) -> Iterator[str]:
    rank = required_rank(candidate.config.r, candidate.layers, candidate.name)
    if round_up_rank(rank) is None:
        yield f"the adapter needs rank {rank}, vLLM serves at most {VLLM_LORA_RANKS[-1]}"


def _no_bias(candidate: _Candidate) -> Iterator[str]:
    if candidate.config.bias != "none":
        yield f"bias={candidate.config.bias!r} trains biases of the base model"
    if getattr(candidate.config, "lora_bias", False):
        yield "lora_bias=True adds a bias to the adapter"


def _no_variant(candidate: _Candidate) -> Iterator[str]:
    if candidate.config.use_dora:
        yield "use_dora=True (DoRA) rescales the merged weights"
        return
    variants = {
        type(layer.lora_variant[candidate.name]).__name__
        for layer in candidate.layers.values()
        if candidate.name in getattr(layer, "lora_variant", {})
    }
    for variant in sorted(variants):
        yield f"the LoRA variant {variant} computes more than B @ A"


def _layers_servable(candidate: _Candidate) -> Iterator[str]:
    seen = set()
    for name, layer in candidate.layers.items():
        last, base = name.rpartition(".")[2], layer.get_base_layer()
        if isinstance(layer, lora.layer.ParamWrapper) and (layer.num_experts != 1 or layer.parameter_name != "weight"):
            reason = (
                f"target_parameters adapts {last}.{layer.parameter_name}, which is not the matrix of a linear layer"
            )
        elif isinstance(base, nn.Embedding) or last == "lm_head":
            if last in candidate.capabilities.embedding_modules:
                continue
            reason = f"vLLM serves no adapter on {last} for {candidate.capabilities.architecture}"
        elif not _is_matrix(getattr(base, "weight", None)):
            reason = f"{last} is a {type(base).__name__}, vLLM adapts linear and embedding layers"
        else:
            continue
        if reason not in seen:
            seen.add(reason)
            yield reason


def _layers_mergeable(candidate: _Candidate) -> Iterator[str]:
    seen = set()
    for name, layer in candidate.layers.items():
        last, base = name.rpartition(".")[2], layer.get_base_layer()
        weight = getattr(base, "weight", None)
        if isinstance(layer, lora.layer.ParamWrapper) and (layer.num_experts != 1 or layer.parameter_name != "weight"):
            reason = (
                f"target_parameters adapts {last}.{layer.parameter_name}, which is not the matrix of a linear layer"
            )
        elif is_bitsandbytes(weight):
            reason = f"{last} is quantised, and its weight would have to be quantised again"
        elif isinstance(base, Conv1D):
            reason = f"{last} is a Conv1D, whose weight vLLM keeps transposed"
        elif not _is_matrix(weight):
            reason = f"{last} is a {type(base).__name__}, vLLM's weights of linear and embedding layers are rewritten"
        else:
            continue
        if reason not in seen:
            seen.add(reason)
            yield reason


def _is_matrix(weight: torch.Tensor | None) -> bool:
    # bitsandbytes keeps a 4-bit matrix packed in a column.
    return weight is not None and (weight.dim() == 2 or is_bitsandbytes(weight))


def _full_tensors_apart(candidate: _Candidate) -> Iterator[str]:
    """Full tensors beside the adapter must not share one of vLLM's fused tensors with an adapted module."""
    adapted = {
        sibling for name in candidate.layers for sibling in fused_siblings(name, candidate.capabilities.fused_modules)
    }
    for name, wrapper, _ in policy_modules(base_model(candidate.model)):
        if isinstance(wrapper, AuxiliaryTrainingWrapper) and name in adapted:
            yield f"{name} is trained in full beside an adapter on the same fused layer of vLLM"


def _no_other_trained_weights(candidate: _Candidate) -> Iterator[str]:
    trained = [
        f"{name}.{parameter_name}"
        for name, wrapper, module in policy_modules(base_model(candidate.model))
        if not isinstance(wrapper, AuxiliaryTrainingWrapper)
        for parameter_name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    ]
    if trained and candidate.config.bias == "none":
        yield f"{len(trained)} parameters of the base model are trained too ({trained[0]}, ...)"


_Check = Callable[[_Candidate], Iterator[str]]

_CHECKS_FOR_ANY_ADAPTER: tuple[_Check, ...] = (
    _one_active_adapter,
    _no_bias,
    _no_variant,
    _full_tensors_apart,
    _no_other_trained_weights,
)
_CHECKS: dict[str, tuple[_Check, ...]] = {
    DYNAMIC: (
        *_CHECKS_FOR_ANY_ADAPTER,
        _engine_serves_lora,
        _engine_computes_lora,
        _experts_computed_with_lora,
        _rank_fits,
        _layers_servable,
    ),
    MERGED: (*_CHECKS_FOR_ANY_ADAPTER, _layers_mergeable),
}


def fused_siblings(name: str, fused_modules: tuple[tuple[str, ...], ...]) -> list[str]:
    """Names of the modules that share one of vLLM's tensors with module `name`, itself included."""
    parent, _, last = name.rpartition(".")
    group = next((group for group in fused_modules if last in group), (last,))
    return [f"{parent}.{sibling}" if parent else sibling for sibling in group]


def unservable_reasons(model: nn.Module, capabilities: EngineCapabilities, strategy: str = DYNAMIC) -> list[str]:
    """Every reason why vLLM cannot be sent the model's adapter as it is, to serve it in one way; `[]` when it can.

    Args:
        model (`nn.Module`): The policy.
        capabilities ([`EngineCapabilities`]): What vLLM can do with it.
        strategy (`str`, defaults to `"dynamic"`): `"dynamic"` or `"merged"`.
    """
    if not hasattr(model, "peft_config"):
        return [NO_ADAPTER]
    names = active_adapters(model)
    name = names[0] if names else next(iter(model.peft_config))
    candidate = _Candidate(model, capabilities, names, name, model.peft_config[name], lora_layers(model, name))
    reasons = list(_is_lora(candidate))
    if reasons:
        return reasons
    return [reason for check in _CHECKS[strategy] for reason in check(candidate)]


def unshareable_reasons(model: nn.Module, strategy: str, capabilities: EngineCapabilities) -> Iterator[str]:
    """Every reason why an engine cannot use the trainer's base weights in place of a copy."""
    if capabilities.packs_weights:
        yield "vLLM computes with packed copies of its weights on the CPU"
    if strategy == FULL:
        yield "full weights are sent, which would be written over the trainer's"
    parameters = [
        parameter
        for _, wrapper, module in policy_modules(base_model(model))
        for parameter in module.parameters(recurse=False)
        if not isinstance(wrapper, AuxiliaryTrainingWrapper)
    ]
    if any(isinstance(wrapper, AuxiliaryTrainingWrapper) for _, wrapper, _ in policy_modules(base_model(model))):
        yield "some modules are trained in full and are sent beside the adapter"
    if any(is_bitsandbytes(parameter) for parameter in parameters):
        yield "the base is quantised, and vLLM computes with dequantised weights"
        return
    if strategy in (MERGED, AUTO):
        yield from _adapted_tied_weights(model)
    largest = max(parameters, key=lambda parameter: parameter.numel())
    if largest.dtype != capabilities.dtype:
        held, served = (str(dtype).removeprefix("torch.") for dtype in (largest.dtype, capabilities.dtype))
        yield f"the trainer holds its weights in {held}, vLLM computes in {served} (load the model in {served})"
    devices = {parameter.device.type for parameter in parameters}
    if len(devices) > 1 or "meta" in devices:
        yield f"the base is spread over devices ({', '.join(sorted(devices))})"


def _adapted_tied_weights(model: nn.Module) -> Iterator[str]:
    """The adapter of one module must not be put into the weight of another."""
    names: dict[int, list[str]] = {}
    adapted = set()
    for name, wrapper, module in policy_modules(base_model(model)):
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.device.type != "meta":
            names.setdefault(weight.data_ptr(), []).append(name)
            if isinstance(wrapper, LoraLayer):
                adapted.add(weight.data_ptr())
    tied = [" and ".join(names[address]) for address in names if address in adapted and len(names[address]) > 1]
    if tied:
        yield f"{tied[0]} are one tensor in the trainer, into which the adapter of one would be put for all"


def _check_can_be_pushed(model: nn.Module) -> None:
    """Raise for policies that no strategy can put into vLLM."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") or hasattr(parameter, "full_tensor"):
            raise ValueError(
                f"Parameter {name!r} is sharded over processes (DeepSpeed ZeRO-3 or FSDP). Weights can be sent to "
                "vLLM only from unsharded models so far: train in one process, or set use_vllm=False."
            )
    for name in active_adapters(model):
        config = model.peft_config[name]
        if config.is_prompt_learning:
            raise ValueError(
                f"Adapter {name!r} is of type {PeftType(config.peft_type).value}: it changes the model's input, not "
                "its weights, so vLLM cannot sample from it. Use an adapter that changes weights, such as LoRA, or "
                "set use_vllm=False."
            )
    for name, wrapper, base in policy_modules(base_model(model)):
        for key, parameter in base.named_parameters(recurse=False):
            if not parameter.is_floating_point() and not is_bitsandbytes(parameter):
                raise ValueError(
                    f"{name}.{key} is quantised ({parameter.dtype}) in a way that cannot be sent to vLLM. Load the "
                    "model unquantised or with bitsandbytes, or set use_vllm=False."
                )
        if not isinstance(wrapper, BaseTunerLayer):
            continue
        if wrapper.merged:
            raise ValueError(
                f"The adapter of {name!r} is merged into its base weights, so training it would change nothing that "
                "is sampled from. Call `model.unmerge_adapter()`, or `model.merge_and_unload()` and add a new adapter."
            )
        if any(getattr(wrapper, "lora_bias", {}).values()) and getattr(base, "bias", None) is None:
            raise ValueError(
                f"lora_bias=True on {name!r}, which has no bias: vLLM has no place for the adapter's bias. Target "
                "only modules with a bias, set lora_bias=False, or set use_vllm=False."
            )


def _check_experts(model: nn.Module, capabilities: EngineCapabilities) -> None:
    """Raise for trained experts on the CPU: vLLM keeps computing with the packed copies of those before."""
    for name, wrapper, module in _experts(model) if capabilities.packs_weights else ():
        if wrapper is not None or any(each.requires_grad for each in module.parameters(recurse=False)):
            raise ValueError(
                f"The experts are trained ({name}), and vLLM on the CPU cannot be sent new ones. Train other modules "
                "only (target_modules), run on a GPU, or set use_vllm=False."
            )


def _check_can_be_merged(model: nn.Module, reasons: tuple[str, ...]) -> None:
    """Raise for merged weights on a quantised base: they would have to be quantised again, to something else."""
    for name, wrapper, base in policy_modules(base_model(model)):
        if isinstance(wrapper, BaseTunerLayer) and is_bitsandbytes(getattr(base, "weight", None)):
            raise ValueError(
                f"The adapter has to be merged for vLLM ({'; '.join(reasons)}), but {name} is quantised, and a merged "
                "weight cannot be quantised exactly. Use an adapter that vLLM can serve as it is, an unquantised "
                "base, or use_vllm=False."
            )


def _buffer_rank(model: nn.Module, max_lora_rank: int | None, adapter: str) -> int:
    rank = required_rank(model.peft_config[adapter].r, lora_layers(model, adapter), adapter)
    needed = round_up_rank(rank)
    if max_lora_rank is None:
        return needed
    if max_lora_rank < rank:
        raise ValueError(
            f"max_lora_rank={max_lora_rank} is too small: the adapter has rank {rank} and needs "
            f"max_lora_rank={needed}. Set that, or leave max_lora_rank unset to have it computed."
        )
    return max_lora_rank


def _needs_untied_embeddings(model: nn.Module) -> bool:
    """Whether the adapter makes input and output embeddings differ that the base model ties."""
    root = base_model(model)
    if not ties_embeddings(root):
        return False
    ends = ("embed_tokens", "lm_head")
    return any(wrapper is not None and name.endswith(ends) for name, wrapper, _ in policy_modules(root))


def select_sync(model: nn.Module, config: Any, capabilities: EngineCapabilities) -> SyncPlan:
    """Decide how the policy reaches the engine. Nothing is changed and nothing is logged.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The policy.
        config ([`GRPOConfig`]): `vllm_enable_lora`, `vllm_lora_mode`, `max_lora_rank` and `vllm_share_base` are
            read.
        capabilities ([`EngineCapabilities`]): What vLLM can do with this architecture.

    Returns:
        [`SyncPlan`]

    Raises:
        ValueError: For `vllm_enable_lora=True` with an adapter that cannot be served (all reasons are named), for a
            `max_lora_rank` below the adapter's rank, and for policies that cannot be put into vLLM at all.
    """
    _check_can_be_pushed(model)
    _check_experts(model, capabilities)
    mode = config.vllm_lora_mode or DYNAMIC
    if config.vllm_enable_lora is False and mode != MERGED:
        strategy, reasons = FULL, ("vllm_enable_lora=False",)
    else:
        against = {each: tuple(unservable_reasons(model, capabilities, each)) for each in (DYNAMIC, MERGED)}
        strategy, reasons = _choose(mode, against)
    if config.vllm_enable_lora and reasons == (NO_ADAPTER,):
        raise ValueError(
            "vllm_enable_lora=True, but the model has no adapter that vLLM could serve. Give "
            "peft_config=LoraConfig(...) or a PeftModel, or leave vllm_enable_lora unset."
        )
    if config.vllm_enable_lora and strategy == FULL:
        listed = "".join(f"\n- {reason}" for reason in reasons)
        raise ValueError(
            f"vllm_enable_lora=True, but vLLM cannot serve this adapter as it is:{listed}\nChange the adapter, or "
            "leave vllm_enable_lora unset to send merged weights instead."
        )
    shared = {
        "untie_embeddings": _needs_untied_embeddings(model),
        "fused_modules": capabilities.fused_modules,
        "dtype": capabilities.dtype,
    }
    if config.vllm_share_base:
        shared["share_reasons"] = tuple(unshareable_reasons(model, strategy, capabilities))
        shared["share_base"] = not shared["share_reasons"]
    if strategy == FULL:
        _check_can_be_merged(model, reasons)
        return SyncPlan(FULL, reasons, **shared)

    adapter = active_adapters(model)[0]
    targets = tuple(sorted({name.rpartition(".")[2] for name in lora_layers(model, adapter)}))
    rank = None if strategy == MERGED else _buffer_rank(model, config.max_lora_rank, adapter)
    return SyncPlan(strategy, reasons, adapter, rank, targets, **shared)


def _choose(mode: str, against: dict[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...]]:
    """The strategy for a mode, and what speaks against the mode itself."""
    if mode != AUTO:
        return (FULL if against[mode] else mode), against[mode]
    possible = [strategy for strategy, reasons in against.items() if not reasons]
    reasons = tuple(dict.fromkeys((*against[DYNAMIC], *against[MERGED])))
    return (AUTO if len(possible) == 2 else possible[0] if possible else FULL), reasons


def announce(plan: SyncPlan, has_adapter: bool, logger: Any) -> None:
    """Say once how the policy reaches the engine: at INFO, or as a warning where an adapter has to be merged."""
    because = "; ".join(plan.reasons)
    if plan.strategy == FULL and has_adapter and plan.reasons != ("vllm_enable_lora=False",):
        warnings.warn(
            f"The adapter cannot be served by vLLM as it is, so merged weights are sent: {because}. Set "
            "vllm_enable_lora=False to choose this and silence the warning.",
            stacklevel=3,
        )
        return
    described = {
        DYNAMIC: f"vLLM serves the adapter {plan.adapter!r} itself (LoRA buffers of rank {plan.max_lora_rank})",
        MERGED: f"vLLM puts the adapter {plan.adapter!r} into its own weights",
        AUTO: f"vLLM serves the adapter {plan.adapter!r} itself or puts it into its weights, whatever is faster",
        FULL: "vLLM is sent full weights",
    }[plan.strategy]
    logger.info(f"{described}{f' ({because})' if because else ''}.")


def announce_sharing(plan: SyncPlan, logger: Any) -> None:
    """Say once why the base weights are held twice although they were to be shared."""
    if plan.share_reasons:
        logger.warning(f"vllm_share_base=True has no effect: {'; '.join(plan.share_reasons)}.")
