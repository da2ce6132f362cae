"""Layers for training that keep less for the backward pass and go over memory less often than the model's own.

The values are the model's, up to the last rounding. Three things are done otherwise:

- A linear layer with an adapter, `y = x W^T + scaling * (x A^T) B^T`. PEFT makes the second term, scales it and adds
  it: five passes over a tensor as large as `y`. Here it is added to `y` by the product that makes it.
- A gated MLP, `down(act(gate) * up)`. Of the four tensors of its inner width that the backward pass needs, `act(gate)`
  and the product are made again instead of being kept.
- A norm keeps its input and not the copy of it in float32.

With a frozen base and no gradient checkpointing that nearly halves the activations of a transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .utils import forward_replaced


class LeanLayers:
    """The layers of a model that have a leaner way, found once. See [`LeanLayers.active`].

    Args:
        model (`nn.Module`): The policy. Its weights must be whole while it runs: not sharded, not offloaded.
        under_autocast (`bool`, defaults to `False`): Whether it runs under autocast. Without it, a layer whose adapter
            is of another dtype than its weight is left to PEFT.
    """

    def __init__(self, model: nn.Module, under_autocast: bool = False):
        self.under_autocast = under_autocast
        modules = [module for module in model.modules() if not _is_hooked(module)]
        self.linears = [module for module in modules if type(module) is lora.Linear]
        self.norms = [module for module in modules if _is_frozen_norm(module)]
        formula: dict[type, bool] = {}
        self.mlps = []
        for module in modules:
            if _has_parts_of_gated_mlp(module):
                if type(module) not in formula:
                    formula[type(module)] = _computes_gated_mlp(module)
                if formula[type(module)]:
                    self.mlps.append(module)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Have the layers compute the lean way. A backward pass that recomputes has to be inside as well."""
        with ExitStack() as stack:
            lean = {layer for layer in self.linears if _is_plain(layer, self.under_autocast)}
            for layer in lean:
                stack.enter_context(forward_replaced(layer, partial(_linear, layer)))
            for mlp in self.mlps:
                if mlp.down_proj in lean:
                    stack.enter_context(forward_replaced(mlp, partial(_gated_mlp, mlp)))
            for norm in self.norms:
                stack.enter_context(forward_replaced(norm, partial(_recomputed, norm.forward)))
            yield


# ---------------------------------------------------------------------------------------------------------------------
# Which layers
# ---------------------------------------------------------------------------------------------------------------------


def _is_plain(layer: lora.Linear, any_dtype: bool) -> bool:
    """Whether the layer is `x W^T + scaling * (x A^T) B^T` now, and nothing else."""
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return False
    (name,) = layer.active_adapters
    if name not in layer.lora_A or name in layer.lora_variant or layer.fan_in_fan_out:
        return False
    dropout = layer.lora_dropout[name]
    parts = (layer.base_layer, layer.lora_A[name], layer.lora_B[name])
    return (
        (isinstance(dropout, nn.Identity) or dropout.p == 0 or not dropout.training)
        and all(type(part) is nn.Linear and not _is_hooked(part) for part in parts)
        and (any_dtype or len({part.weight.dtype for part in parts}) == 1)
        and parts[2].bias is None
        and not any(parameter.requires_grad for parameter in layer.base_layer.parameters())
    )


def _is_hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def _is_frozen_norm(module: nn.Module) -> bool:
    is_norm = isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm")
    return is_norm and not any(parameter.requires_grad for parameter in module.parameters())


def _has_parts_of_gated_mlp(module: nn.Module) -> bool:
    names = ("gate_proj", "up_proj", "down_proj", "act_fn")
    return all(callable(getattr(module, name, None)) for name in names) and isinstance(module.down_proj, lora.Linear)


@torch.no_grad()
def _computes_gated_mlp(module: nn.Module) -> bool:
    """Whether the module is `down(act(gate(x)) * up(x))`, found out by trying."""
    weight = module.down_proj.get_base_layer().weight
    x = torch.linspace(-1, 1, weight.shape[0], dtype=weight.dtype, device=weight.device).view(1, 1, -1)
    was_training = module.training
    module.eval()  # no dropout
    try:
        formula = module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))
        return torch.equal(module(x), formula)
    finally:
        module.train(was_training)


# ---------------------------------------------------------------------------------------------------------------------
# What they compute
# ---------------------------------------------------------------------------------------------------------------------


def _linear(layer: lora.Linear, x: Tensor) -> Tensor:
    return _LoraLinear.apply(x, *_weights(layer))


def _gated_mlp(mlp: nn.Module, x: Tensor) -> Tensor:
    return _GatedDown.apply(mlp.gate_proj(x), mlp.up_proj(x), mlp.act_fn, *_weights(mlp.down_proj))


def _recomputed(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(x)
    return checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)


def _weights(layer: lora.Linear) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float]:
    (name,) = layer.active_adapters
    base = layer.base_layer
    return base.weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]


class _LoraLinear(torch.autograd.Function):
    """`y = x W^T + bias + scaling * (x A^T) B^T`. `W` and `bias` get no gradient."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
    ) -> Tensor:
        x = x.to(_dtype(x))
        y, inner = _adapted(x, weight, bias, lora_a, lora_b, scaling)
        ctx.save_for_backward(x, inner, weight, lora_a, lora_b)
        ctx.scaling = scaling
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Any, ...]:
        x, inner, weight, lora_a, lora_b = ctx.saved_tensors
        grad_x, grad_a, grad_b = _adapted_backward(
            grad, x, inner, weight, lora_a, lora_b, ctx.scaling, ctx.needs_input_grad[0]
        )
        return grad_x, None, None, grad_a, grad_b, None


class _GatedDown(torch.autograd.Function):
    """The same for `x = act(gate) * up`, which is formed again in the backward pass."""

    @staticmethod
    def forward(
        ctx, gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor],
        weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float,
    ) -> Tensor:  # fmt: skip
        x = act(gate) * up
        y, inner = _adapted(x.to(_dtype(x)), weight, bias, lora_a, lora_b, scaling)
        ctx.save_for_backward(gate, up, inner, weight, lora_a, lora_b)
        ctx.act, ctx.scaling = act, scaling
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Any, ...]:
        gate, up, inner, weight, lora_a, lora_b = ctx.saved_tensors
        with torch.enable_grad():
            gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
            x = ctx.act(gate) * up
        grad_x, grad_a, grad_b = _adapted_backward(
            grad, x.detach().to(grad.dtype), inner, weight, lora_a, lora_b, ctx.scaling
        )
        grad_gate, grad_up = torch.autograd.grad(x, (gate, up), grad_x.to(x.dtype))
        return grad_gate, grad_up, None, None, None, grad_a, grad_b, None


def _dtype(x: Tensor) -> torch.dtype:
    """What a linear layer computes in."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _adapted(
    x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """`y [..., out]` and `x A^T [tokens, rank]`, for `x [..., in]`."""
    bias = None if bias is None else bias.to(x.dtype)
    y = F.linear(x, weight.to(x.dtype), bias)
    inner = x.flatten(0, -2) @ lora_a.to(x.dtype).T
    y.view(-1, y.shape[-1]).addmm_(inner, (lora_b * scaling).to(x.dtype).T)
    return y, inner


def _adapted_backward(
    grad: Tensor, x: Tensor, inner: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float,
    needs_grad_x: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Gradients of `x`, `A` and `B`."""
    rows = grad.flatten(0, -2)
    grad_inner = rows @ (lora_b * scaling).to(grad.dtype)
    grad_a = grad_inner.T @ x.flatten(0, -2)
    grad_b = (rows.T @ inner).to(lora_b.dtype) * scaling
    grad_x = None
    if needs_grad_x:
        grad_x = (rows @ weight.to(grad.dtype)).addmm_(grad_inner, lora_a.to(grad.dtype)).view(x.shape)
    return grad_x, grad_a.to(lora_a.dtype), grad_b
