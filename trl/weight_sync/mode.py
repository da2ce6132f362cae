"""Which way of serving an adapter is faster, found out on the run itself."""

from __future__ import annotations

import logging

from .select import DYNAMIC, MERGED


logger = logging.getLogger(__name__)

MERGE_ERROR_BOUND = 0.05
"""`"auto"` serves merged weights only while rounding changes the delta by less than this, relative to its norm."""

SAMPLES = 2
"""Rollouts measured each way before a decision. The faster counts: the first also warms caches up."""

ERROR_SAMPLE = 16
"""Modules that the error is estimated from before a policy is merged. A merge returns that of all."""

CHANGE = 0.5
"""Relative change of completion length or error after which a decision is made anew."""


class ModeChooser:
    """Decides before each push how the adapter is served, from what rollouts took so far.

    The adapter is served as it is (`"dynamic"`) while merging it would be too inexact. Then both ways are measured in
    turn, push and rollout together, and the faster one stays until completion length or error have changed by half.

    Args:
        bound (`float`, defaults to `MERGE_ERROR_BOUND`): Largest error that is merged with.
    """

    def __init__(self, bound: float = MERGE_ERROR_BOUND):
        self.bound = bound
        self.decision: str | None = None
        self._seconds_per_token: dict[str, list[float]] = {DYNAMIC: [], MERGED: []}
        self._mode = DYNAMIC
        self._error = 0.0
        self._length = 0.0
        self._decided_at = (0.0, 0.0)

    def choose(self, error: float) -> str:
        """How to serve the next policy, which has this error if it is merged: `"dynamic"` or `"merged"`."""
        # Far below the bound an error does not matter, so neither does its change.
        self._error = max(error, self.bound / 10)
        if self.decision is not None and self._has_changed():
            self.decision = None
            self._seconds_per_token = {DYNAMIC: [], MERGED: []}
        if error > self.bound:
            self._mode = DYNAMIC
        elif self.decision is not None:
            self._mode = self.decision
        else:
            unmeasured = [mode for mode, seconds in self._seconds_per_token.items() if len(seconds) < SAMPLES]
            self._mode = unmeasured[0] if unmeasured else self._decide()
        return self._mode

    def record(self, push_seconds: float, rollout_seconds: float, num_tokens: int, num_completions: int) -> None:
        """Take note of what the last push and the rollout after it took, and of the tokens that were sampled."""
        self._length = num_tokens / num_completions
        seconds = self._seconds_per_token[self._mode]
        seconds.append((push_seconds + rollout_seconds) / max(1, num_tokens))
        del seconds[:-SAMPLES]

    def _has_changed(self) -> bool:
        now = (self._length, self._error)
        return any(abs(new - old) > CHANGE * old for new, old in zip(now, self._decided_at, strict=True))

    def _decide(self) -> str:
        best = {mode: min(seconds) for mode, seconds in self._seconds_per_token.items()}
        self.decision = min(best, key=best.get)
        self._decided_at = (self._length, self._error)
        rates = ", ".join(f"{1 / seconds:.0f} tokens/s {mode}" for mode, seconds in best.items())
        logger.info(
            f"vllm_lora_mode='auto': {self.decision!r} from now on ({rates}; merging changes the adapter by "
            f"{self._error:.1%}; {self._length:.0f} tokens per completion)."
        )
        return self.decision
