"""Tiny tokenizer and models, made on the spot: tests need no model hub and no file."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)


SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>"]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% if not (continue_final_message and loop.last) %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_ARCHITECTURES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer of 260 tokens: 4 special ones (pad 0, bos 1, eos `<|im_end|>` 3), then the 256 bytes.

    Any text round-trips, nothing is added when encoding, and the chat template is ChatML.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def make_model(
    architecture: str = "llama",
    tie_word_embeddings: bool = False,
    vocab_size: int | None = None,
    seed: int = 0,
    **overrides,
) -> PreTrainedModel:
    """Random float32 causal language model of two layers, in eval mode.

    The caller's random state is left alone. Weights (biases too) are drawn wide enough for the logits to differ
    clearly from token to token.

    Args:
        architecture (`str`, defaults to `"llama"`): `"llama"`, or `"qwen2"` (biases on q, k and v).
        tie_word_embeddings (`bool`, defaults to `False`): Share input and output embeddings.
        vocab_size (`int`, *optional*): Rows of the embeddings; that of [`make_tokenizer`] (260) if `None`.
        seed (`int`, defaults to `0`): Seed of the weights.
        **overrides: Any field of the configuration, e.g. `num_hidden_layers=1`.
    """
    config_class, model_class = _ARCHITECTURES[architecture]
    fields = {
        "vocab_size": vocab_size or len(SPECIAL_TOKENS) + 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": tie_word_embeddings,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 3,
    }
    config = config_class(**{**fields, **overrides})
    config.architectures = [model_class.__name__]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).float()
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.normal_(parameter, std=config.initializer_range)
    return model.eval()
