"""The adapter as the engine has to see it: canonical tensors, and the rank that they need.

PEFT lets every module have its own rank and scaling (`rank_pattern`, `alpha_pattern`, `use_rslora`), and vLLM versions
differ in which of these they honour. So nothing of it reaches the engine: the scaling that PEFT uses for a module is
part of its `B`, and the engine is told that every scaling is 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from ..generation.engine import AdapterModule


# Sizes of the LoRA buffers that vLLM accepts (`vllm.config.lora.MaxLoRARanks`, the same from 0.23 to 0.33).
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model under the adapters, or `model` itself where there are none."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def active_adapters(model: nn.Module) -> list[str]:
    """Names of the adapters that make up the policy, `[]` for a model without PEFT."""
    return list(model.active_adapters) if isinstance(model, PeftModel) else []


def is_bitsandbytes(parameter: torch.Tensor | None) -> bool:
    """Whether bitsandbytes keeps the parameter quantised. Told by name, so that it need not be installed."""
    return type(parameter).__name__ in ("Params4bit", "Int8Params")


def policy_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module | None, nn.Module]]:
    """Walk the model by checkpoint names, looking through what PEFT wrapped.

    Yields:
        `(name, wrapper, module)`: the name of the module in the checkpoint, the PEFT layer around it or `None`, and
        the module itself with the parameters of the base.
    """
    wrapper, module = None, model
    while isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        wrapper = wrapper or module
        module = module.original_module if isinstance(module, AuxiliaryTrainingWrapper) else module.base_layer
    yield prefix, wrapper, module
    for name, child in module.named_children():
        yield from policy_modules(child, f"{prefix}.{name}" if prefix else name)


def ties_embeddings(root: nn.Module) -> bool:
    """Whether the base model's output layer has the weights of its embeddings."""
    return bool(getattr(root.config.get_text_config(), "tie_word_embeddings", False))


def tied_head(root: nn.Module) -> nn.Module | None:
    """The output layer, if the base model ties it to the embeddings and nothing parts them."""
    inputs, head = root.get_input_embeddings(), root.get_output_embeddings()
    wrappers = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    if head is None or not ties_embeddings(root) or isinstance(inputs, wrappers) or isinstance(head, wrappers):
        return None
    alone = len(list(head.parameters())) == 1
    return head if alone and getattr(head, "weight", None) is getattr(inputs, "weight", head) else None


def sent_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module | None, nn.Module]]:
    """[`policy_modules`] of the base model that a checkpoint has tensors for: without an output layer that is tied."""
    root = base_model(model)
    tied = tied_head(root)
    return (located for located in policy_modules(root) if located[2] is not tied)


def lora_layers(model: nn.Module, adapter_name: str) -> dict[str, LoraLayer]:
    """LoRA layers of one adapter by the checkpoint name of the module that they adapt."""
    return {
        name: wrapper
        for name, wrapper, _ in policy_modules(base_model(model))
        if isinstance(wrapper, LoraLayer) and adapter_name in wrapper.scaling
    }


def factors(layer: LoraLayer, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The live parameters `A [rank, in]` and `B [out, rank]` of one layer, embeddings included."""
    if adapter_name in layer.lora_embedding_A:
        return layer.lora_embedding_A[adapter_name], layer.lora_embedding_B[adapter_name]
    return layer.lora_A[adapter_name].weight, layer.lora_B[adapter_name].weight


def canonical_adapter(layers: dict[str, LoraLayer], adapter_name: str) -> dict[str, AdapterModule]:
    """Describe the adapter for an engine, without copying it.

    Args:
        layers (`dict[str, LoraLayer]`): What [`lora_layers`] returned.
        adapter_name (`str`): The adapter.

    Returns:
        `dict[str, AdapterModule]`: Parameters by module name, with the scaling that PEFT applies in its forward pass
        still to be folded into `B` ([`~trl.generation.engine.fold_scaling`]).
    """
    adapter = {}
    for name, layer in layers.items():
        lora_a, lora_b = factors(layer, adapter_name)
        adapter[name] = AdapterModule(
            lora_a.detach(),
            lora_b.detach(),
            float(layer.scaling[adapter_name]),
            is_embedding=adapter_name in layer.lora_embedding_A,
        )
    return adapter


def required_rank(adapter_rank: int, layers: dict[str, LoraLayer], adapter_name: str) -> int:
    """Rank that the engine's buffers need.

    Args:
        adapter_rank (`int`): `r` of the adapter's configuration.
        layers (`dict[str, LoraLayer]`): Its layers. Their ranks are what PEFT made of `rank_pattern`, so a key that
            matches no target module does not count.
        adapter_name (`str`): The adapter.

    Returns:
        `int`: The largest of them.
    """
    return max([adapter_rank, *(layer.r[adapter_name] for layer in layers.values())])


def round_up_rank(rank: int) -> int | None:
    """Smallest rank that vLLM accepts and `rank` fits into; `None` above the largest (512)."""
    return next((size for size in VLLM_LORA_RANKS if size >= rank), None)
