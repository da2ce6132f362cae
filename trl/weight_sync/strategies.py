"""What a push sends: the adapter and the few full tensors beside it, or every tensor that the adapter changes.

Nothing here writes to the trainer's parameters. Merged tensors are computed on a copy of one layer at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from ..generation.engine import PolicyUpdate, PushReport, RolloutEngine
from ..generation.merged_weights import merge_error
from .adapter import (
    active_adapters,
    base_model,
    canonical_adapter,
    is_bitsandbytes,
    lora_layers,
    policy_modules,
    sent_modules,
)
from .mode import ERROR_SAMPLE, ModeChooser
from .select import AUTO, MERGED, SyncPlan, fused_siblings


NamedTensors = Iterator[tuple[str, torch.Tensor]]


def base_tensors(model: nn.Module) -> NamedTensors:
    """Parameters and persistent buffers of the base model by checkpoint name, adapters left out. No copies.

    An output layer that is tied to the embeddings is left out, as in a checkpoint.
    """
    for name, _, module in sent_modules(model):
        yield from _tensors(name, module)


def _tensors(name: str, module: nn.Module) -> NamedTensors:
    for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and key not in module._non_persistent_buffers_set:
            yield f"{name}.{key}" if name else key, _dequantized(module, tensor)


def _dequantized(module: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the trainer computes with: bitsandbytes dequantises a weight before each product."""
    if not is_bitsandbytes(tensor):
        return tensor.detach()
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(module).detach()


def _merged_tensors(name: str, layer: BaseTunerLayer, adapters: list[str]) -> NamedTensors:
    """Tensors of the layer with its adapters merged, computed in float32 on a copy."""
    merged = copy.deepcopy(layer).float()
    wrapper = merged
    while isinstance(wrapper, BaseTunerLayer):
        wrapper.merge(adapter_names=[adapter for adapter in adapters if _holds(wrapper, adapter)])
        wrapper = wrapper.base_layer
    yield from _tensors(name, wrapper)


def _holds(layer: BaseTunerLayer, adapter: str) -> bool:
    return any(adapter in getattr(layer, attribute, ()) for attribute in layer.adapter_layer_names)


def _auxiliary_tensors(name: str, wrapper: AuxiliaryTrainingWrapper, adapters: list[str]) -> NamedTensors:
    """Tensors of a module that is trained in full, or in some rows (`trainable_token_indices`)."""
    active = [adapter for adapter in adapters if adapter in wrapper._adapters]
    if not active:
        yield from _all_tensors(name, wrapper.original_module)
    elif isinstance(wrapper, ModulesToSaveWrapper):
        yield from _all_tensors(name, wrapper.modules_to_save[active[0]])
    else:
        weight = wrapper.token_adapter.get_merged_weights(active).detach()
        yield from (
            (key, weight if key == f"{name}.weight" else tensor)
            for key, tensor in _tensors(name, wrapper.original_module)
        )


def _all_tensors(prefix: str, module: nn.Module) -> NamedTensors:
    for name, _, child in policy_modules(module, prefix):
        yield from _tensors(name, child)


@torch.no_grad()
def policy_tensors(
    model: nn.Module,
    wanted: Callable[[nn.Module | None, nn.Module], bool],
    fused_modules: tuple[tuple[str, ...], ...],
) -> NamedTensors:
    """Tensors of the policy by checkpoint name, adapters merged, made one layer at a time.

    Args:
        model (`nn.Module`): The policy.
        wanted (callable): `(wrapper, module) -> bool`, whether the module's tensors are asked for.
        fused_modules (`tuple[tuple[str, ...], ...]`): Modules that vLLM keeps in one tensor come together.
    """
    adapters = active_adapters(model)
    located = {name: (wrapper, module) for name, wrapper, module in sent_modules(model)}
    names = dict.fromkeys(
        sibling
        for name, (wrapper, module) in located.items()
        if wanted(wrapper, module)
        for sibling in fused_siblings(name, fused_modules)
        if sibling in located
    )
    for name in names:
        wrapper, module = located[name]
        if isinstance(wrapper, BaseTunerLayer):
            yield from _merged_tensors(name, wrapper, adapters)
        elif isinstance(wrapper, AuxiliaryTrainingWrapper):
            yield from _auxiliary_tensors(name, wrapper, adapters)
        else:
            yield from _tensors(name, module)


def _is_auxiliary(wrapper: nn.Module | None, module: nn.Module) -> bool:
    return isinstance(wrapper, AuxiliaryTrainingWrapper)


def _is_changed(wrapper: nn.Module | None, module: nn.Module) -> bool:
    return wrapper is not None or any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _bases(
    model: nn.Module, layers: dict[str, LoraLayer], fused_modules: tuple[tuple[str, ...], ...]
) -> dict[str, nn.Module]:
    """The modules under the adapter, and those that share one of vLLM's tensors with them."""
    modules = {name: module for name, _, module in policy_modules(base_model(model))}
    names = dict.fromkeys(sibling for name in layers for sibling in fused_siblings(name, fused_modules))
    return {name: modules[name] for name in names if name in modules}


class WeightSync:
    """Keeps an engine on the trainer's policy.

    The policy has a version of its own. It rises when the trainer says so ([`policy_changed`]) and whenever the
    trained parameters have been written to since the last push, so an evaluation, a resumed run or a checkpoint loaded
    half way is never sampled from with old weights.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The policy.
        plan ([`SyncPlan`] or `None`): From [`select_sync`]. `None` for an engine that samples from `model` itself.
        recreate_every (`int`, *optional*): Rebuild the engine after this many policy updates.
    """

    def __init__(self, model: nn.Module, plan: SyncPlan | None, recreate_every: int | None = None):
        self.model = model
        self.plan = plan
        self.recreate_every = recreate_every
        self._version = 0
        self._first_pushed: int | None = None  # version that was the first to reach the engine as it is built now
        self._push_seconds = 0.0
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._seen = self._fingerprint()
        self._layers = lora_layers(model, plan.adapter) if plan is not None and plan.sends_adapter else {}
        self._bases = _bases(model, self._layers, plan.fused_modules) if self._layers else {}
        self.chooser = ModeChooser() if plan is not None and plan.strategy == AUTO else None
        self._has_auxiliary = any(isinstance(module, AuxiliaryTrainingWrapper) for module in model.modules())

    def _fingerprint(self) -> list[tuple[int, int]]:
        return [(parameter.data_ptr(), parameter._version) for parameter in self._trained.values()]

    @property
    def version(self) -> int:
        """Version of the policy that the trainer holds now, starting at 0."""
        fingerprint = self._fingerprint()
        if fingerprint != self._seen:
            self.policy_changed()
        return self._version

    def policy_changed(self) -> None:
        """Count a change of the policy. Call it where weights change in a way that autograd does not see."""
        self._version += 1
        self._seen = self._fingerprint()

    def export(self) -> PolicyUpdate:
        """The policy as it is now, for an engine. Refers to the live parameters; engines copy what they keep.

        Raises:
            ValueError: When another adapter is active than the engine was built for, when it is merged, and when full
                tensors are to be sent and a trained parameter holds NaN or infinity. (An adapter is checked by the
                engine, in the engine's dtype, where it may overflow.)
        """
        version = self.version
        if self.plan is None:
            return PolicyUpdate(version)
        if not self.plan.sends_adapter or self._has_auxiliary:
            self._check_finite()
        if not self.plan.sends_adapter:
            changed = partial(policy_tensors, self.model, _is_changed, self.plan.fused_modules)
            return PolicyUpdate(version, tensors=changed)
        self._check_adapter()
        adapter = canonical_adapter(self._layers, self.plan.adapter)
        base = {name: module.weight.detach() for name, module in self._bases.items()}
        merge = self.plan.strategy == MERGED
        if self.chooser is not None:
            error = merge_error(adapter, base, self.plan.dtype, num_modules=ERROR_SAMPLE)
            merge = self.chooser.choose(error) == MERGED
        beside = partial(policy_tensors, self.model, _is_auxiliary, self.plan.fused_modules)
        return PolicyUpdate(version, adapter, base if merge else None, beside if self._has_auxiliary else None)

    def _check_adapter(self) -> None:
        active = active_adapters(self.model)
        if active != [self.plan.adapter]:
            raise ValueError(
                f"The active adapters are {active}, but the engine was built to serve {self.plan.adapter!r}. Activate "
                "that one again, or make a new trainer."
            )
        merged = next((name for name, layer in self._layers.items() if layer.merged), None)
        if merged is not None:
            raise ValueError(
                f"The adapter was merged into the base weights of {merged!r}, which the engine has unmerged. Call "
                "`model.unmerge_adapter()` first."
            )

    @torch.no_grad()
    def _check_finite(self) -> None:
        # Full tensors replace what is served one at a time, so they are checked before the first.
        largest = torch._foreach_norm(list(self._trained.values()), float("inf"))
        finite = torch.stack([value.float().cpu() for value in largest]).isfinite().tolist()
        broken = [name for name, good in zip(self._trained, finite, strict=True) if not good]
        if broken:
            raise ValueError(
                f"{len(broken)} trained parameters hold NaN or infinity ({', '.join(broken[:3])}, ...). Nothing was "
                "sent; the engine keeps serving the policy before it."
            )

    def push(self, engine: RolloutEngine) -> PushReport | None:
        """Bring the engine to the current policy, and rebuild it first where that is due.

        Returns:
            [`PushReport`], or `None` when the engine already serves this version.

        Raises:
            PolicyMismatchError: When the engine does not hold what was sent.
        """
        if engine.policy_version == self.version:
            return None
        if self._first_pushed is None:
            self._first_pushed = self.version
        if self.recreate_every is not None and self.version - self._first_pushed >= self.recreate_every:
            engine.recreate()
            self._first_pushed = self.version
        report = engine.push(self.export())
        self._push_seconds = report.seconds
        return report

    def rolled_out(self, seconds: float, num_tokens: int, num_completions: int) -> None:
        """Take note of what a rollout took, for `vllm_lora_mode="auto"` to choose by."""
        if self.chooser is not None:
            self.chooser.record(self._push_seconds, seconds, num_tokens, num_completions)
