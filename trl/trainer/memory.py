"""How much memory a training step needs, measured instead of guessed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


PROBE_LENGTHS = (64, 128, 256)
GIBIBYTE = 2**30


@dataclass(frozen=True)
class ActivationEstimate:
    """Bytes that one forward pass keeps for the backward pass.

    Attributes:
        fixed (`float`): Whatever the length: copies of frozen weights in the dtype of autocast.
        per_token (`float`): For each token.
        per_pair (`float`): For each pair of tokens of one sequence, where attention scores are kept.
    """

    fixed: float
    per_token: float
    per_pair: float

    def total(self, sequences: int, length: int) -> float:
        """Bytes for a micro-batch of `sequences`, each of `length` tokens."""
        return self.fixed + sequences * (self.per_token * length + self.per_pair * length**2)


def saved_bytes(model: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes of all tensors that autograd keeps during `forward`, without the model's own parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # The result holds the graph, so that no storage is freed and its address taken again.
        result = forward()
    del result
    return sum(kept.values())


def estimate_activations(model: nn.Module, forward: Callable[[int], object]) -> ActivationEstimate:
    """Measure short sequences and put a parabola through them, which every transformer's memory lies on.

    Args:
        model (`nn.Module`): The model, in the mode that it is trained in.
        forward (callable): Runs one sequence of the given length and returns something that holds the graph.
    """
    lengths = torch.tensor(PROBE_LENGTHS, dtype=torch.float64)
    measured = torch.tensor([saved_bytes(model, partial(forward, each)) for each in PROBE_LENGTHS]).double()
    fixed, per_token, per_pair = torch.linalg.solve(torch.stack([lengths**0, lengths, lengths**2], dim=1), measured)
    return ActivationEstimate(max(0.0, fixed.item()), per_token.item(), max(0.0, per_pair.item()))


def free_bytes(device: torch.device) -> int | None:
    """What is left of a GPU's memory, with what torch holds in reserve. `None` for other devices."""
    if device.type != "cuda":
        return None
    unused, _ = torch.cuda.mem_get_info(device)
    return unused + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def layers_to_checkpoint(
    estimate: ActivationEstimate, free: int, sequences: int, length: int, num_layers: int, share: float = 0.8
) -> tuple[int, str]:
    """How many layers of a model have to recompute their activations in the backward pass, and why.

    Args:
        estimate ([`ActivationEstimate`]): Of the model without checkpoints.
        free (`int`): Bytes that are free.
        sequences, length (`int`): The largest micro-batch that can come, in sequences and tokens.
        num_layers (`int`): Layers that the model has.
        share (`float`, defaults to `0.8`): How much of `free` activations may take. The rest is for what is not
            counted: gradients, a chunk of logits, what a checkpoint keeps, and gaps between blocks.

    Returns:
        `tuple[int, str]`: From 0 to `num_layers`, and a line for the log.
    """
    needed = estimate.total(sequences, length)
    excess = max(0.0, needed - share * free)
    layers = min(num_layers, math.ceil(num_layers * excess / max(1.0, needed - estimate.fixed)))
    return layers, (
        f"Gradient checkpointing: {layers} of {num_layers} layers. Without it a micro-batch of {sequences} sequences "
        f"of {length} tokens keeps {needed / GIBIBYTE:.1f} GiB of activations, and {free / GIBIBYTE:.1f} GiB are "
        "free. Set gradient_checkpointing to choose all or none."
    )


def checkpointing_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers of a transformers model that can recompute their activations, in their order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
