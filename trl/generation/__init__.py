"""Engines that sample completions from the policy."""

from .engine import AdapterModule, PolicyUpdate, PushReport, Rollout, RolloutEngine, SamplingConfig
from .factory import create_rollout_engine


__all__ = [
    "AdapterModule",
    "PolicyUpdate",
    "PushReport",
    "Rollout",
    "RolloutEngine",
    "SamplingConfig",
    "create_rollout_engine",
]
