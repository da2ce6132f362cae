"""Trainers and their configurations, imported when they are first used."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names


_MODULES = {
    "GRPOConfig": ".grpo_config",
    "GRPOTrainer": ".grpo_trainer",
    "ModelConfig": ".model_config",
    "get_peft_config": ".model_config",
    "get_quantization_config": ".model_config",
}

if TYPE_CHECKING:
    from .grpo_config import GRPOConfig
    from .grpo_trainer import GRPOTrainer
    from .model_config import ModelConfig, get_peft_config, get_quantization_config

__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "ModelConfig",
    "get_peft_config",
    "get_quantization_config",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
