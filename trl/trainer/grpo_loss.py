"""The arithmetic of GRPO: rewards to advantages, and with log probabilities of tokens to a loss.

Tensors in, tensors out, and nothing here waits for the device. Shapes in the docstrings: `B` completions in a
micro-batch, `T` tokens in a padded completion, `N` completions in a generation batch, `F` reward functions.

Metrics carry their reduction in their name: over processes and micro-batches, take the minimum of those that end in
`min`, the maximum of those that end in `max`, and the mean of all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


STD_EPSILON = 1e-4
"""Added to the standard deviation of rewards before dividing by it."""


# ---------------------------------------------------------------------------------------------------------------------
# Rewards and advantages
# ---------------------------------------------------------------------------------------------------------------------


def aggregate_rewards(rewards_per_func: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the rewards of each completion.

    Args:
        rewards_per_func (`Tensor`): `[N, F]`; NaN where a function gave no reward, which leaves it out of the sum.
        weights (`Tensor`): `[F]`.

    Returns:
        `Tensor`: `[N]`; zero for a completion that no function rewarded.
    """
    return (rewards_per_func * weights).nansum(dim=1)


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: str = "group") -> tuple[Tensor, Tensor]:
    """Advantage of each completion over the others sampled for the same prompt.

    `(reward - mean of the group) / (std + 1e-4)`, where `std` is that of the group, as in GRPO
    (https://huggingface.co/papers/2402.03300), or of the whole batch; or without dividing at all, as in Dr. GRPO
    (https://huggingface.co/papers/2503.20783).

    Args:
        rewards (`Tensor`): `[N]`; completions of one prompt are neighbours.
        num_generations (`int`): Completions per prompt; divides `N`.
        scale_rewards (`str`, defaults to `"group"`): `"group"`, `"batch"` or `"none"`.

    Returns:
        `tuple[Tensor, Tensor]`: Advantages `[N]`, and `[N]` the standard deviation (with `n - 1`; zero for a single
        reward) of the batch for `"batch"`, else of the completion's group. Where it is zero nothing can be learned.
    """
    if scale_rewards not in ("group", "batch", "none"):
        raise ValueError(f"scale_rewards={scale_rewards!r} is not known: use 'group', 'batch' or 'none'.")
    if rewards.numel() % num_generations:
        raise ValueError(f"{rewards.numel()} rewards do not make whole groups of num_generations={num_generations}.")
    groups = rewards.view(-1, num_generations)
    centered = (groups - groups.mean(dim=1, keepdim=True)).view(-1)
    if scale_rewards == "batch":
        std = _sample_std(rewards.view(1, -1)).expand_as(rewards)
    else:
        std = _sample_std(groups).repeat_interleave(num_generations, output_size=rewards.numel())
    advantages = centered if scale_rewards == "none" else centered / (std + STD_EPSILON)
    return advantages, std


def _sample_std(rows: Tensor) -> Tensor:
    return rows.std(dim=1) if rows.shape[1] > 1 else rows.new_zeros(rows.shape[0])


# ---------------------------------------------------------------------------------------------------------------------
# Loss
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossConfig:
    """Which GRPO loss. Names and defaults are those of [`GRPOConfig`].

    Args:
        max_completion_length (`int`): Longest completion that can be sampled; the divisor of `"dr_grpo"`.
        loss_type (`str`, defaults to `"dapo"`): How the loss of tokens becomes one number; a key of `AGGREGATIONS`.
        epsilon_low (`float`, defaults to `0.2`): The probability ratio is clipped below `1 - epsilon_low`.
        epsilon_high (`float`, defaults to `0.2`): ... and above `1 + epsilon_high`.
        beta (`float`, defaults to `0.0`): Weight of the KL divergence from the reference policy.
        use_bias_correction_kl (`bool`, defaults to `True`): Multiply the KL term by the probability ratio.
        importance_sampling_correction (`bool`, defaults to `True`): Weight the loss by how much likelier the old
            policy, as the trainer computes it, makes the completion than the sampler did.
        importance_sampling_mode (`str`, defaults to `"sequence_mask"`): `"token_truncate"`, `"token_mask"`,
            `"sequence_truncate"` or `"sequence_mask"`; see [`sampler_importance_weights`].
        importance_sampling_clip_max (`float`, *optional*, defaults to `3.0`): Largest weight; `None` for no limit.
        importance_sampling_clip_min (`float`, *optional*): Smallest weight; `None` for no limit.

    Raises:
        ValueError: For a `loss_type` or mode that does not exist and for limits that no value can keep.
    """

    max_completion_length: int
    loss_type: str = "dapo"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    importance_sampling_correction: bool = True
    importance_sampling_mode: str = "sequence_mask"
    importance_sampling_clip_max: float | None = 3.0
    importance_sampling_clip_min: float | None = None

    def __post_init__(self) -> None:
        if self.loss_type not in AGGREGATIONS:
            raise ValueError(f"loss_type={self.loss_type!r} is not known: use one of {sorted(AGGREGATIONS)}.")
        if self.importance_sampling_mode not in IMPORTANCE_SAMPLING_MODES:
            raise ValueError(
                f"vllm_importance_sampling_mode={self.importance_sampling_mode!r} is not known: use one of "
                f"{list(IMPORTANCE_SAMPLING_MODES)}."
            )
        for name in ("epsilon_low", "epsilon_high", "beta"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative: give a value of at least 0.")
        low, high = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"vllm_importance_sampling_clip_min={low} is above vllm_importance_sampling_clip_max={high}: no "
                "weight would be kept. Lower the first or raise the second."
            )


@dataclass
class LossInputs:
    """One micro-batch.

    Values where `mask` is zero are never looked at, so padding may hold anything.

    Attributes:
        logprobs (`Tensor`): `[B, T]`, log probability of the sampled tokens under the policy; carries the gradient.
        mask (`Tensor`): `[B, T]`, nonzero where a completion token counts.
        advantages (`Tensor`): `[B]`.
        old_logprobs (`Tensor`, *optional*): `[B, T]` under the policy that sampled, computed by the trainer. `None`
            where that is still the current policy: `logprobs`, detached, stands in for it.
        sampling_logprobs (`Tensor`, *optional*): `[B, T]`, as the rollout engine reported them.
        ref_logprobs (`Tensor`, *optional*): `[B, T]` under the reference policy; needed if `beta` is not zero.
        entropies (`Tensor`, *optional*): `[B, T]`, logged only.
        normalizer (`Tensor` or `float`, defaults to `1.0`): Divisor of `"dapo"`: the tokens that count in all
            micro-batches of all processes of one optimizer step, divided by the number of processes.
    """

    logprobs: Tensor
    mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor | None = None
    sampling_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropies: Tensor | None = None
    normalizer: Tensor | float = 1.0


@dataclass
class LossOutputs:
    """The loss and what was measured on the way.

    Attributes:
        loss (`Tensor`): Scalar. Still to be divided by the number of micro-batches of the optimizer step, except with
            `"dapo"`, whose normalizer already spans them.
        metrics (`dict[str, Tensor]`): Detached scalars under TRL's names.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def grpo_loss(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Clipped policy-gradient loss with group-relative advantages (https://huggingface.co/papers/2402.03300).

    For every token `w * -min(ratio * A, clip(ratio) * A) + beta * KL`, aggregated as `config.loss_type` says, where
    `w` is the weight against the sampler.

    Raises:
        ValueError: If `config.beta` is not zero and `inputs.ref_logprobs` is missing.
    """
    mask = inputs.mask.bool()
    metrics: dict[str, Tensor] = {}
    old_logprobs = inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs

    ratio = _masked_difference(inputs.logprobs, old_logprobs, mask).exp()
    per_token_loss, clip_metrics = clipped_policy_loss(
        ratio, inputs.advantages, mask, config.epsilon_low, config.epsilon_high
    )
    metrics |= clip_metrics

    if inputs.sampling_logprobs is not None:
        difference = _masked_difference(old_logprobs, inputs.sampling_logprobs, mask).abs()
        metrics["sampling/sampling_logp_difference/mean"] = _masked_mean(difference, mask)
        metrics["sampling/sampling_logp_difference/max"] = difference.amax()
        if config.importance_sampling_correction:
            weights = sampler_importance_weights(
                old_logprobs,
                inputs.sampling_logprobs,
                mask,
                config.importance_sampling_mode,
                config.importance_sampling_clip_max,
                config.importance_sampling_clip_min,
            )
            per_token_loss = per_token_loss * weights
            metrics |= _importance_weight_metrics(weights, mask)

    if config.beta != 0.0:
        if inputs.ref_logprobs is None:
            raise ValueError(f"beta={config.beta} needs ref_logprobs, the log probabilities of the reference policy.")
        kl = kl_k3(inputs.logprobs, inputs.ref_logprobs, mask)
        if config.use_bias_correction_kl:
            kl = kl * ratio
        per_token_loss = per_token_loss + config.beta * kl
        metrics["kl"] = _masked_mean(kl.detach(), mask)

    if inputs.entropies is not None:
        metrics["entropy"] = _masked_mean(inputs.entropies.detach(), mask)

    aggregate = AGGREGATIONS[config.loss_type]
    loss = aggregate(per_token_loss, mask, inputs.normalizer, config.max_completion_length)
    return LossOutputs(loss, metrics)


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, mask: Tensor, epsilon_low: float, epsilon_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, negated, with its own limit on either side (https://huggingface.co/papers/2503.14476).

    Args:
        ratio (`Tensor`): `[B, T]`, probability of a token under the policy over that under the old policy.
        advantages (`Tensor`): `[B]`.
        mask (`Tensor`): `[B, T]`, for the metrics.
        epsilon_low, epsilon_high (`float`): The ratio is kept within `[1 - epsilon_low, 1 + epsilon_high]`.

    Returns:
        `tuple[Tensor, dict[str, Tensor]]`: `[B, T]` loss, and the fraction of tokens whose gradient the clip removed.
    """
    advantages = advantages.unsqueeze(1)
    low, high = 1 - epsilon_low, 1 + epsilon_high
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)

    clipped_low = (ratio < low) & (advantages < 0)
    clipped_high = (ratio > high) & (advantages > 0)
    low_mean, high_mean = _masked_mean(clipped_low, mask), _masked_mean(clipped_high, mask)
    metrics = {
        "clip_ratio/low_mean": low_mean,
        "clip_ratio/low_min": low_mean,
        "clip_ratio/high_mean": high_mean,
        "clip_ratio/high_max": high_mean,
        "clip_ratio/region_mean": _masked_mean(clipped_low | clipped_high, mask),
    }
    return loss, metrics


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) at every token: `exp(d) - d - 1` with `d = ref_logprobs - logprobs`.

    Never negative, and unbiased for tokens sampled from the policy (k3 in http://joschu.net/blog/kl-approx.html). For
    tokens of an older policy it is unbiased once multiplied by the probability ratio
    (https://huggingface.co/papers/2512.02556).
    """
    difference = _masked_difference(ref_logprobs, logprobs, mask)
    return difference.exp() - difference - 1


def sampler_importance_weights(
    old_logprobs: Tensor,
    sampling_logprobs: Tensor,
    mask: Tensor,
    mode: str = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """Weights that undo the mismatch between the sampler's probabilities and the trainer's, under the same policy.

    Args:
        old_logprobs, sampling_logprobs (`Tensor`): `[B, T]`, by the trainer and by the rollout engine.
        mask (`Tensor`): `[B, T]`, nonzero where a token counts.
        mode (`str`, defaults to `"sequence_mask"`): `"token_..."` gives every token the ratio of its probabilities,
            `"sequence_..."` gives the completion the product of those of its tokens. `"..._truncate"` moves a weight
            to the limit that it exceeds, `"..._mask"` drops it to zero.
        clip_max (`float`, *optional*, defaults to `3.0`): Upper limit.
        clip_min (`float`, *optional*): Lower limit.

    Returns:
        `Tensor`: Without gradient, `[B, T]` for tokens, `[B, 1]` for sequences.
    """
    sum_over_sequence, limit = IMPORTANCE_SAMPLING_MODES[mode]
    log_weights = _masked_difference(old_logprobs, sampling_logprobs, mask).detach()
    if sum_over_sequence:
        log_weights = log_weights.sum(dim=1, keepdim=True)
    return limit(log_weights.exp(), clip_min, clip_max)


def _truncate(weights: Tensor, low: float | None, high: float | None) -> Tensor:
    return weights if low is None and high is None else weights.clamp(low, high)


def _zero_outside(weights: Tensor, low: float | None, high: float | None) -> Tensor:
    if low is not None:
        weights = weights.masked_fill(weights < low, 0.0)
    if high is not None:
        weights = weights.masked_fill(weights > high, 0.0)
    return weights


IMPORTANCE_SAMPLING_MODES: dict[str, tuple[bool, Callable[[Tensor, float | None, float | None], Tensor]]] = {
    "token_truncate": (False, _truncate),
    "token_mask": (False, _zero_outside),
    "sequence_truncate": (True, _truncate),
    "sequence_mask": (True, _zero_outside),
}
"""Mode to (one weight for the whole sequence?, what happens to a weight outside the limits)."""


def _importance_weight_metrics(weights: Tensor, mask: Tensor) -> dict[str, Tensor]:
    if weights.shape[1] == 1:  # one weight for each sequence, and all of them count
        mask = torch.ones_like(weights, dtype=torch.bool)
    smallest = weights.masked_fill(~mask, torch.inf).amin()
    return {
        "sampling/importance_sampling_ratio/min": torch.where(mask.any(), smallest, 0.0),
        "sampling/importance_sampling_ratio/mean": _masked_mean(weights, mask),
        "sampling/importance_sampling_ratio/max": weights.masked_fill(~mask, 0.0).amax(),
    }


def _mean_of_sequence_means(loss: Tensor, mask: Tensor, normalizer: Tensor | float, max_length: int) -> Tensor:
    return (_masked_sum(loss, mask, dim=1) / mask.sum(dim=1).clamp(min=1)).mean()


def _mean_over_micro_batch(loss: Tensor, mask: Tensor, normalizer: Tensor | float, max_length: int) -> Tensor:
    return _masked_mean(loss, mask)


def _sum_over_longest(loss: Tensor, mask: Tensor, normalizer: Tensor | float, max_length: int) -> Tensor:
    return _masked_sum(loss, mask) / (loss.shape[0] * max_length)


def _sum_over_normalizer(loss: Tensor, mask: Tensor, normalizer: Tensor | float, max_length: int) -> Tensor:
    # Zero means that nothing counts and the sum is zero too. Not clamp(min=1): divided by the number of processes, a
    # true count may lie below one. A plain number stays one: making it a tensor on a GPU would wait for the GPU.
    if isinstance(normalizer, Tensor):
        divisor = normalizer.masked_fill(normalizer == 0, 1)
    else:
        divisor = normalizer or 1.0
    return _masked_sum(loss, mask) / divisor


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Tensor | float, int], Tensor]] = {
    "grpo": _mean_of_sequence_means,  # https://huggingface.co/papers/2402.03300
    "bnpo": _mean_over_micro_batch,
    "dr_grpo": _sum_over_longest,  # https://huggingface.co/papers/2503.20783
    "dapo": _sum_over_normalizer,  # https://huggingface.co/papers/2503.14476
}
"""`loss_type` to the function that turns the loss of tokens `[B, T]` into a scalar."""


def _masked_difference(left: Tensor, right: Tensor, mask: Tensor) -> Tensor:
    """`left - right` in float32 where the mask is set, zero elsewhere whatever the padding holds."""
    return torch.where(mask.bool(), left.float() - right.float(), 0.0)


def _masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    return torch.where(mask, values, 0.0).sum(dim=dim)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return _masked_sum(values, mask) / mask.sum().clamp(min=1)
