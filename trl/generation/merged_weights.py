"""The engine's own weights, rewritten with the adapter in them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from .engine import AdapterModule, PolicyMismatchError, fold_scaling
from .rewrite import Rewrite, relative_error, rewrite


class EngineWeight(Protocol):
    """One weight of an engine, however it is laid out. For vLLM see `vllm_worker.LayerWeight`.

    Attributes:
        modules (`tuple[str, ...]`): Modules of the checkpoint whose rows it holds, one after the other.
        dtype (`torch.dtype`): What the engine computes in.
        is_packed (`bool`): Whether the engine computes with a copy, which is made when the weight is finished.
    """

    modules: tuple[str, ...]
    dtype: torch.dtype
    is_packed: bool

    def begin(self, shape: tuple[int, int]) -> torch.Tensor:
        """The weight to be written to: the engine's own, or memory for a new one."""

    def finish(self, weight: torch.Tensor) -> None:
        """Have the engine compute with what was written."""

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether the engine computes with these values."""


class MergedWeights:
    """Weights of an engine that can be rewritten as `W0 + scaling * B @ A`, from a `W0` that somebody else keeps.

    Args:
        weights (`Sequence[EngineWeight]`): The weights to rewrite.
        base (`dict[str, torch.Tensor]`): The pristine weight, `[out, in]`, of every module in them.

    Raises:
        PolicyMismatchError: When the engine does not hold those weights the way it is expected to.
    """

    def __init__(self, weights: Sequence[EngineWeight], base: Mapping[str, torch.Tensor]):
        self.weights = weights
        self.dtype = weights[0].dtype
        wrong = [weight.modules[0] for weight in weights if not weight.holds(_joined(weight, base))]
        if wrong:
            raise PolicyMismatchError(
                f"The engine keeps {len(wrong)} weights in another way than the checkpoint ({', '.join(wrong[:3])}, "
                "...), so it cannot put the adapter into them. Set vllm_lora_mode='dynamic'."
            )

    @torch.no_grad()
    def write(self, adapter: Mapping[str, AdapterModule], base: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Rewrite all weights. With an empty adapter they are pristine again.

        Args:
            adapter (`dict[str, AdapterModule]`): By module name.
            base (`dict[str, torch.Tensor]`): The pristine weights.

        Returns:
            `torch.Tensor`: `[2]`, see [`~trl.generation.rewrite.relative_error`].

        Raises:
            ValueError: When weights with the adapter in them are not finite. What the engine serves then is undefined.
            PolicyMismatchError: When the engine does not compute with what was written.
        """
        # One kernel for everything, but where that would need memory for a second copy of everything.
        packed = any(weight.is_packed for weight in self.weights)
        groups = [[weight] for weight in self.weights] if packed else [self.weights]
        factors = delta_factors(adapter)
        return torch.stack([_write(group, factors, base) for group in groups]).sum(dim=0)


Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


def delta_factors(adapter: Mapping[str, AdapterModule]) -> Factors:
    """`left [rows, rank]` and `right [rank, columns]` of every module, in float32, whose product is its delta."""
    factors = {}
    for (name, module), lora_b in zip(adapter.items(), fold_scaling(adapter), strict=True):
        lora_a = module.lora_a.float()
        factors[name] = (lora_a.T, lora_b.T) if module.is_embedding else (lora_b, lora_a)
    return factors


def _write(weights: Sequence[EngineWeight], factors: Factors, base: Mapping[str, torch.Tensor]) -> torch.Tensor:
    changed, targets = [], []
    for weight in weights:
        parts = {module: base[module] for module in weight.modules}
        target = weight.begin((sum(len(part) for part in parts.values()), base[weight.modules[0]].shape[1]))
        targets.append(target)
        start = 0
        for module, part in parts.items():
            rows = target[start : start + len(part)]
            start += len(part)
            if module in factors:
                changed.append(Rewrite(rows, part, *factors[module]))
            else:
                rows.copy_(part, non_blocking=True)
    sums = rewrite(changed, weights[0].dtype)
    _check_overflow(sums, weights[0].dtype)
    for weight, target in zip(weights, targets, strict=True):
        weight.finish(target)
    return sums


class PristineCopy:
    """A copy, in host memory, of weights that are rewritten where the trainer holds them.

    Args:
        base (`dict[str, torch.Tensor]`): The weights, by module name.
    """

    def __init__(self, base: Mapping[str, torch.Tensor]):
        self.tensors = {name: _host_copy(tensor) for name, tensor in base.items()}
        self._checksums = _checksums(base)

    def check(self, base: Mapping[str, torch.Tensor]) -> None:
        """Raise [`PolicyMismatchError`] unless `base` is what was copied, to the bit."""
        changed = (_checksums(base) != self._checksums).tolist()
        wrong = [name for name, differs in zip(base, changed, strict=True) if differs]
        if wrong:
            raise PolicyMismatchError(
                f"{len(wrong)} base weights are not what they were when training started ({', '.join(wrong[:3])}, "
                "...). The base is frozen: do not write to it, or set vllm_share_base=False."
            )


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor)


def _checksums(base: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Sums of the weights' bits, which are the same in whatever order they are added."""
    bits = {2: torch.int16, 4: torch.int32}
    return torch.stack([each.view(bits[each.element_size()]).sum(dtype=torch.int64) for each in base.values()])


def merge_error(
    adapter: Mapping[str, AdapterModule],
    base: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    num_modules: int | None = None,
) -> float:
    """What rounding to `dtype` would change in the delta if the adapter were merged, relative to the delta's norm.

    Args:
        adapter (`dict[str, AdapterModule]`): By module name.
        base (`dict[str, torch.Tensor]`): The pristine weights.
        dtype (`torch.dtype`): That of the engine's weights.
        num_modules (`int`, *optional*): Look at so many modules only, the same ones each time, for an estimate.

    Raises:
        ValueError: When weights with the adapter in them are not finite.
    """
    names = list(adapter)
    if num_modules is not None and num_modules < len(names):
        names = random.Random(0).sample(names, num_modules)
    factors = delta_factors({name: adapter[name] for name in names})
    sums = rewrite([Rewrite(None, base[name], *factors[name]) for name in names], dtype)
    _check_overflow(sums, dtype)
    return relative_error(sums)


def _check_overflow(sums: torch.Tensor, dtype: torch.dtype) -> None:
    if not bool(sums.isfinite().all()):
        raise ValueError(
            f"Weights with the adapter in them overflow in {str(dtype).removeprefix('torch.')}, so they cannot be "
            "sampled from. Lower the learning rate or max_grad_norm, or set vllm_lora_mode='dynamic'."
        )


def _parts(weight: EngineWeight, base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {module: base[module].to(weight.dtype) for module in weight.modules}


def _joined(weight: EngineWeight, base: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(_parts(weight, base).values()))
