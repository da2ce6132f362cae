"""Engines that sample completions from the policy."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names


_MODULES = {
    "AdapterModule": ".engine",
    "PolicyMismatchError": ".engine",
    "PolicyUpdate": ".engine",
    "PushReport": ".engine",
    "Rollout": ".engine",
    "RolloutEngine": ".engine",
    "SamplingConfig": ".engine",
    "check_engine": ".factory",
    "create_rollout_engine": ".factory",
}

if TYPE_CHECKING:
    from .engine import (
        AdapterModule,
        PolicyMismatchError,
        PolicyUpdate,
        PushReport,
        Rollout,
        RolloutEngine,
        SamplingConfig,
    )
    from .factory import check_engine, create_rollout_engine

__all__ = [
    "AdapterModule",
    "PolicyMismatchError",
    "PolicyUpdate",
    "PushReport",
    "Rollout",
    "RolloutEngine",
    "SamplingConfig",
    "check_engine",
    "create_rollout_engine",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
