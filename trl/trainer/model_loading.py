"""From what the user gives as `model` to the policy that is trained, its tokenizer and its reference."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ..weight_sync.adapter import active_adapters, base_model
from .grpo_config import GRPOConfig


BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of the `init_lora_weights` with which PEFT takes the adapter's start out of the base weights."""


def short_name(model: str | PreTrainedModel | PeftModel) -> str:
    """Last part of the hub id or path that the model comes from; its class for one built in memory."""
    _check_type(model)
    name = model if isinstance(model, str) else base_model(model).config._name_or_path
    return name.rstrip("/").split("/")[-1] or type(base_model(model)).__name__


def check_types(args: Any, peft_config: Any) -> None:
    """Raise `TypeError` for arguments of `GRPOTrainer` that are something else than they should be."""
    if not isinstance(args, GRPOConfig):
        raise TypeError(f"args is a {type(args).__name__}: give a GRPOConfig, which has all its options.")
    if peft_config is not None and not isinstance(peft_config, PeftConfig):
        raise TypeError(f"peft_config is a {type(peft_config).__name__}: give a PeftConfig, such as LoraConfig(r=16).")


def load_policy(
    model: str | PreTrainedModel | PeftModel,
    args: GRPOConfig,
    peft_config: PeftConfig | None = None,
    quantization_config: Any = None,
) -> PreTrainedModel | PeftModel:
    """The model to train, with its adapter.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`): Hub id, path, or the model itself.
        args ([`GRPOConfig`]): `model_init_kwargs`, `trust_remote_code`, `disable_dropout` and `beta` are read.
        peft_config (`PeftConfig`, *optional*): Adapter to add.
        quantization_config (*optional*): For loading by name.

    Raises:
        TypeError: If `model` is none of these.
        ValueError: For a `PeftModel` together with `peft_config`, for `quantization_config` with a loaded model, and
            for an adapter whose reference cannot be had by switching it off (with `beta`).
    """
    if isinstance(model, str):
        policy = _from_name(model, args, quantization_config)
    elif isinstance(model, (PreTrainedModel, PeftModel)):
        _check_loaded(model, args, peft_config, quantization_config)
        policy = model
    else:
        raise TypeError(f"model is a {type(model).__name__}: give a hub id, a path, a PreTrainedModel or a PeftModel.")
    if peft_config is not None:
        # PEFT draws the adapter from the global generators, which transformers seeds only later.
        set_seed(args.seed)
        policy = get_peft_model(policy, peft_config)
    _check_trainable(policy)
    if args.beta > 0:
        _check_reference(policy, args.beta)
    if args.disable_dropout:
        _disable_dropout(policy)
    return policy


def _check_type(model: Any) -> None:
    if not isinstance(model, (str, PreTrainedModel, PeftModel)):
        raise TypeError(f"model is a {type(model).__name__}: give a hub id, a path, a PreTrainedModel or a PeftModel.")


def _from_name(name: str, args: GRPOConfig, quantization_config: Any) -> PreTrainedModel:
    arguments = {"dtype": "float32", "trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    if quantization_config is not None:
        arguments["quantization_config"] = quantization_config
    return AutoModelForCausalLM.from_pretrained(name, **arguments)


def _check_loaded(
    model: PreTrainedModel | PeftModel, args: GRPOConfig, peft_config: PeftConfig | None, quantization_config: Any
) -> None:
    if isinstance(model, PeftModel) and peft_config is not None:
        raise ValueError(
            "model is a PeftModel and peft_config is given too: leave out peft_config to train the adapter that the "
            "model has, or pass model.merge_and_unload() to start a new one on top of it."
        )
    for argument, value in (
        ("quantization_config", quantization_config),
        ("args.model_init_kwargs", args.model_init_kwargs),
    ):
        if value:
            raise ValueError(
                f"{argument}={value!r} is for loading a model, and model is loaded already: pass it to "
                "from_pretrained, or give the model by name."
            )


def _check_trainable(policy: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise ValueError(
            "The model has no trainable parameter. Load an adapter with PeftModel.from_pretrained(..., "
            "is_trainable=True), or give peft_config to add one."
        )


def _check_reference(policy: nn.Module, beta: float) -> None:
    """Raise where the model with its adapter switched off is not what the adapter started from."""
    for name in active_adapters(policy):
        config = policy.peft_config[name]
        init = getattr(config, "init_lora_weights", True)
        if isinstance(init, str) and init.startswith(BASE_CHANGING_INITS):
            raise ValueError(
                f"beta={beta} with init_lora_weights={init!r}: this initialisation changes the base weights, so the "
                "model without its adapter is no reference. Set beta=0.0, or init_lora_weights=True."
            )
        if getattr(config, "bias", "none") != "none":
            raise ValueError(
                f"beta={beta} with bias={config.bias!r}: the trained biases are part of the base model, so the model "
                "without its adapter is no reference. Set beta=0.0, or bias='none'."
            )


def _disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def let_gradients_through_checkpoints(policy: nn.Module, checkpointing_kwargs: dict[str, Any]) -> None:
    """Make an adapter trainable under re-entrant checkpoints.

    Such a checkpoint only has a backward pass if one of its inputs needs a gradient, and frozen embeddings give none
    that does.
    """
    if isinstance(policy, PeftModel) and checkpointing_kwargs["use_reentrant"]:
        policy.enable_input_require_grads()


def tuner_layers(policy: nn.Module) -> list[BaseTunerLayer]:
    """All layers of PEFT in the model."""
    return [module for module in policy.modules() if isinstance(module, BaseTunerLayer)]


@contextmanager
def inputs_not_cast(layers: Sequence[BaseTunerLayer]) -> Iterator[None]:
    """Have layers of PEFT leave the dtype of their input to autocast.

    PEFT casts an input to the dtype of the adapter, float32, and autocast casts it back: the values are the same, but
    every adapter of a layer then keeps a copy of its own for the backward pass. Only for code under autocast; a
    checkpoint that is recomputed has to find it as it was.
    """
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.cast_input_dtype_enabled = True


def load_tokenizer(model: PreTrainedModel | PeftModel, args: GRPOConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the same name and revision as the model.

    Raises:
        ValueError: For a model that has no name.
    """
    name = base_model(model).config._name_or_path
    if not name:
        raise ValueError("The model was built in memory, so it names no tokenizer: give processing_class.")
    revision = (args.model_init_kwargs or {}).get("revision")
    return AutoTokenizer.from_pretrained(
        name, trust_remote_code=args.trust_remote_code, **({"revision": revision} if revision else {})
    )


def settle_padding(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | PeftModel) -> None:
    """Give tokenizer and model a padding token where they have none: the end of text, which attention ignores.

    Raises:
        TypeError: If `tokenizer` is something else.
        ValueError: If it has no end of text either.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"processing_class is a {type(tokenizer).__name__}: only tokenizers work so far.")
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError("processing_class has neither pad_token nor eos_token: set one of them.")
        tokenizer.pad_token = tokenizer.eos_token
    root = base_model(model)
    for config in (root.config.get_text_config(), root.generation_config):
        if config is not None and getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = tokenizer.pad_token_id


def stop_token_ids(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of all tokens that end a completion: those of the model's generation config and the tokenizer's own."""
    generation_config = base_model(model).generation_config
    ids = getattr(generation_config, "eos_token_id", None)
    ids = ids if isinstance(ids, (list, tuple)) else [ids]
    return tuple(dict.fromkeys(int(each) for each in (*ids, tokenizer.eos_token_id) if each is not None))


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it is now, in eval mode, for a reference that does not move."""
    return copy.deepcopy(model).requires_grad_(False).eval()
