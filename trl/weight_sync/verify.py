"""Proof that the engine serves the policy that the trainer holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..generation.engine import PolicyMismatchError, RolloutEngine, SamplingConfig


@torch.no_grad()
def trainer_logprobs(model: nn.Module, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """Log probabilities, in nats, that the trainer's model gives to `completion` after `prompt`. Shape `[tokens]`."""
    device = next(model.parameters()).device
    token_ids = torch.tensor([[*prompt, *completion]], device=device)
    was_training = model.training
    model.eval()
    try:
        logits = model(input_ids=token_ids).logits[0, len(prompt) - 1 : -1].float()
    finally:
        model.train(was_training)
    return logits.log_softmax(-1).gather(1, token_ids[0, len(prompt) :, None])[:, 0].cpu()


def logprob_difference(
    engine: RolloutEngine, model: nn.Module, prompts: Sequence[Sequence[int]], max_tokens: int = 12
) -> float:
    """Largest difference between the log probabilities of engine and trainer.

    The engine completes each prompt greedily; the trainer's model then scores the same tokens.

    Args:
        engine (`RolloutEngine`): An engine that returns log probabilities.
        model (`nn.Module`): The trainer's model, adapters and all.
        prompts (`Sequence[Sequence[int]]`): Token ids of the probes.
        max_tokens (`int`, defaults to `12`): Tokens to complete for each.

    Returns:
        `float`: In nats. A few 1e-5 in float32; some 1e-2 in bfloat16, where kernels differ in rounding.
    """
    rollout = engine.generate(prompts, SamplingConfig(max_tokens=max_tokens, temperature=0.0))
    difference = 0.0
    for prompt, completion, logprobs in zip(prompts, rollout.completion_ids, rollout.logprobs, strict=True):
        expected = trainer_logprobs(model, prompt, completion)
        difference = max(difference, (expected - torch.tensor(logprobs)).abs().max().item())
    return difference


def check_logprobs(
    engine: RolloutEngine,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_tokens: int = 12,
    tolerance: float = 1e-3,
) -> float:
    """Raise [`PolicyMismatchError`] when engine and trainer disagree on any token by more than `tolerance` nats."""
    difference = logprob_difference(engine, model, prompts, max_tokens)
    if not difference <= tolerance:
        raise PolicyMismatchError(
            f"The engine's log probabilities differ from the trainer's by up to {difference:.2e} nats (tolerance "
            f"{tolerance:.0e}): it does not sample from the policy that is being trained."
        )
    return difference
