"""The engine's own weights, rewritten with the adapter in them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from .engine import AdapterModule, PolicyMismatchError
from .rewrite import relative_error, rewrite


class EngineWeight(Protocol):
    """One weight of an engine, however it is laid out. For vLLM see `vllm_worker.LayerWeight`.

    Attributes:
        modules (`tuple[str, ...]`): Modules of the checkpoint whose rows it holds, one after the other.
        dtype (`torch.dtype`): What the engine computes in.
    """

    modules: tuple[str, ...]
    dtype: torch.dtype

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
            PolicyMismatchError: When the engine does not compute with what was written.
        """
        sums = []
        for weight in self.weights:
            parts = _parts(weight, base)
            shape = (sum(part.shape[0] for part in parts.values()), base[weight.modules[0]].shape[1])
            target = weight.begin(shape)
            start = 0
            for module, part in parts.items():
                rows = target[start : start + part.shape[0]]
                start += part.shape[0]
                if module in adapter:
                    sums.append(rewrite_module(rows, part, adapter[module]))
                else:
                    rows.copy_(part, non_blocking=True)
            weight.finish(target)
        return torch.stack(sums).sum(dim=0) if sums else torch.zeros(2)


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
    """
    names = list(adapter)
    if num_modules is not None and num_modules < len(names):
        names = random.Random(0).sample(names, num_modules)
    with torch.no_grad():
        return relative_error(
            torch.stack([rewrite_module(None, base[name].to(dtype), adapter[name]) for name in names])
        )


def rewrite_module(out: torch.Tensor | None, base: torch.Tensor, module: AdapterModule) -> torch.Tensor:
    """[`rewrite`] for one module. An embedding, `[vocab, dim]`, has its factors the other way round."""
    lora_a, lora_b = module.lora_a, module.lora_b
    if base.shape != (lora_b.shape[0], lora_a.shape[1]):
        lora_a, lora_b = lora_b.T, lora_a.T
    return rewrite(out, base, lora_a, lora_b, module.scaling)


def _parts(weight: EngineWeight, base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {module: base[module].to(weight.dtype) for module in weight.modules}


def _joined(weight: EngineWeight, base: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(_parts(weight, base).values()))
