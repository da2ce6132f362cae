"""How the policy that the trainer holds becomes the policy that the engine samples from."""

from .select import EngineCapabilities, SyncPlan, select_sync
from .strategies import WeightSync, base_tensors
from .verify import PolicyMismatchError, check_logprobs, logprob_difference


__all__ = [
    "EngineCapabilities",
    "PolicyMismatchError",
    "SyncPlan",
    "WeightSync",
    "base_tensors",
    "check_logprobs",
    "logprob_difference",
    "select_sync",
]
