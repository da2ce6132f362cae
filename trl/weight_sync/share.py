"""One copy of the base weights for trainer and engine.

vLLM keeps `q_proj`, `k_proj` and `v_proj` in one tensor, and the two halves of an MLP's input in another. So the
trainer's frozen weights are laid out that way first, each module's parameter becoming a view of its rows, and the
engine then takes these tensors for its own. They belong to the trainer: an engine that sleeps, is rebuilt or closed
leaves them where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from .adapter import base_model, policy_modules
from .select import fused_siblings


class SharedTensor(NamedTuple):
    """Memory that trainer and engine can both use.

    Attributes:
        names (`tuple[str, ...]`): Tensors of the checkpoint whose rows it holds, one after the other.
        tensor (`torch.Tensor`): All of them.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor


def num_bytes(shared: list[SharedTensor]) -> int:
    """Size of all of them."""
    return sum(each.tensor.numel() * each.tensor.element_size() for each in shared)


@torch.no_grad()
def share_base(
    model: nn.Module, fused_modules: tuple[tuple[str, ...], ...], dtype: torch.dtype, device: torch.device
) -> list[SharedTensor]:
    """Lay the model's frozen weights out as the engine does. Values stay as they are, one layer is copied at a time.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The policy.
        fused_modules (`tuple[tuple[str, ...], ...]`): Last names of modules that the engine keeps in one tensor.
        dtype (`torch.dtype`): What the engine computes in; weights of another are left out.
        device (`torch.device`): Where it does; weights elsewhere are left out.

    Returns:
        `list[SharedTensor]`: What an engine may use in place of memory of its own.
    """
    modules = dict(_frozen_modules(model))
    shared: list[SharedTensor] = []
    done: set[int] = set()  # tied weights are one parameter in two modules
    for name, module in modules.items():
        group = [sibling for sibling in fused_siblings(name, fused_modules) if sibling in modules]
        if name != group[0]:
            continue
        for key, parameter in module._parameters.items():
            parameters = [modules[sibling]._parameters.get(key) for sibling in group]
            usable = all(each is not None and _is_usable(each, dtype, device) for each in parameters)
            if usable and id(parameter) not in done:
                done.update(map(id, parameters))
                shared.append(_in_one_tensor([f"{sibling}.{key}" for sibling in group], parameters))
    return shared


def _frozen_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, wrapper, module in policy_modules(base_model(model)):
        if name and not isinstance(wrapper, AuxiliaryTrainingWrapper):
            yield name, module


def _is_usable(parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> bool:
    return not parameter.requires_grad and parameter.dtype == dtype and parameter.device == device


def _in_one_tensor(names: list[str], parameters: list[nn.Parameter]) -> SharedTensor:
    if len(parameters) == 1:
        return SharedTensor(tuple(names), parameters[0].data)
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(parameters, joined.split([len(each) for each in parameters]), strict=True):
        parameter.data = rows
    return SharedTensor(tuple(names), joined)
