"""GRPO training of LoRA adapters with vLLM rollouts, where only the adapter goes into vLLM.

The public names are imported when they are first used, so that `import trl` is quick and needs neither torch nor vLLM.
"""

from typing import TYPE_CHECKING

from ._lazy import lazy_names


__version__ = "2.0.0.dev0"

_MODULES = {
    "GRPOConfig": ".trainer.grpo_config",
    "GRPOTrainer": ".trainer.grpo_trainer",
    "ModelConfig": ".trainer.model_config",
    "ScriptArguments": ".scripts.utils",
    "TrlParser": ".scripts.utils",
    "apply_chat_template": ".data_utils",
    "data_utils": ".data_utils",
    "extract_prompt": ".data_utils",
    "generation": ".generation",
    "get_dataset": ".scripts.utils",
    "get_peft_config": ".trainer.model_config",
    "get_quantization_config": ".trainer.model_config",
    "is_conversational": ".data_utils",
    "is_conversational_from_value": ".data_utils",
    "maybe_apply_chat_template": ".data_utils",
    "maybe_convert_to_chatml": ".data_utils",
    "maybe_extract_prompt": ".data_utils",
    "rewards": ".rewards",
    "scripts": ".scripts",
    "trainer": ".trainer",
    "weight_sync": ".weight_sync",
}

if TYPE_CHECKING:
    from . import data_utils, generation, rewards, scripts, trainer, weight_sync
    from .data_utils import (
        apply_chat_template,
        extract_prompt,
        is_conversational,
        is_conversational_from_value,
        maybe_apply_chat_template,
        maybe_convert_to_chatml,
        maybe_extract_prompt,
    )
    from .scripts.utils import ScriptArguments, TrlParser, get_dataset
    from .trainer.grpo_config import GRPOConfig
    from .trainer.grpo_trainer import GRPOTrainer
    from .trainer.model_config import ModelConfig, get_peft_config, get_quantization_config

__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "ModelConfig",
    "ScriptArguments",
    "TrlParser",
    "apply_chat_template",
    "data_utils",
    "extract_prompt",
    "generation",
    "get_dataset",
    "get_peft_config",
    "get_quantization_config",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_apply_chat_template",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "rewards",
    "scripts",
    "trainer",
    "weight_sync",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
