"""The loss against a reference in plain python floats, one token at a time."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from trl.trainer.grpo_loss import (
    AGGREGATIONS,
    IMPORTANCE_SAMPLING_MODES,
    LossConfig,
    LossInputs,
    aggregate_rewards,
    group_advantages,
    grpo_loss,
    sampler_importance_weights,
)


MAX_COMPLETION_LENGTH = 9


def random_inputs(seed: int = 0, lengths: tuple[int, ...] = (5, 3, 0, 1, 4), width: int = 5, **replace) -> LossInputs:
    """Right-padded completions, one of them masked whole, policies far enough apart for every clip to bite."""
    generator = torch.Generator().manual_seed(seed)

    def logprobs(std):
        return base + std * torch.randn(len(lengths), width, generator=generator)

    base = torch.zeros(len(lengths), width)
    base = logprobs(1.0) - 2.0
    fields = {
        "logprobs": logprobs(0.4).requires_grad_(),
        "mask": (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).long(),
        "advantages": torch.randn(len(lengths), generator=generator),
        "old_logprobs": base,
        "sampling_logprobs": logprobs(0.5),
        "ref_logprobs": logprobs(0.5),
        "entropies": logprobs(1.0).abs().requires_grad_(),
        "normalizer": 7.5,
    }
    return LossInputs(**{**fields, **replace})


def reference_loss(inputs: LossInputs, config: LossConfig) -> tuple[float, list[list[float]], dict[str, float]]:
    """Loss, its gradient by the logprobs and the metrics, by loops over floats; derivatives by hand."""
    rows = [[t for t in range(inputs.mask.shape[1]) if inputs.mask[b, t].item()] for b in range(inputs.mask.shape[0])]
    new = inputs.logprobs.tolist()
    old = new if inputs.old_logprobs is None else inputs.old_logprobs.tolist()
    num_tokens = sum(len(row) for row in rows)

    weights = [[1.0] * len(row) for row in new]
    reported_weights, differences = [], []
    if inputs.sampling_logprobs is not None:
        sampled = inputs.sampling_logprobs.tolist()
        differences = [abs(old[b][t] - sampled[b][t]) for b, row in enumerate(rows) for t in row]
    if inputs.sampling_logprobs is not None and config.importance_sampling_correction:
        low = -math.inf if config.importance_sampling_clip_min is None else config.importance_sampling_clip_min
        high = math.inf if config.importance_sampling_clip_max is None else config.importance_sampling_clip_max
        for b, row in enumerate(rows):
            factors = [math.exp(old[b][t] - sampled[b][t]) for t in row]
            if config.importance_sampling_mode.startswith("sequence"):
                factors = [math.prod(factors, start=1.0)]
            if config.importance_sampling_mode.endswith("truncate"):
                factors = [min(max(w, low), high) for w in factors]
            else:
                factors = [w if low <= w <= high else 0.0 for w in factors]
            reported_weights += factors
            for position, t in enumerate(row):
                weights[b][t] = factors[position if len(factors) > 1 else 0]

    sums, gradients = [], []
    clipped_low = clipped_high = 0
    kls = []
    for b, row in enumerate(rows):
        total, gradient = 0.0, [0.0] * len(new[b])
        advantage = inputs.advantages[b].item()
        for t in row:
            ratio = math.exp(new[b][t] - old[b][t])
            is_low = advantage < 0 and ratio < 1 - config.epsilon_low
            is_high = advantage > 0 and ratio > 1 + config.epsilon_high
            clipped_low += is_low
            clipped_high += is_high
            if is_low or is_high:
                kept = 1 - config.epsilon_low if is_low else 1 + config.epsilon_high
                total -= weights[b][t] * kept * advantage
            else:
                total -= weights[b][t] * ratio * advantage
                gradient[t] -= weights[b][t] * ratio * advantage
            if config.beta:
                d = inputs.ref_logprobs[b, t].item() - new[b][t]
                kl, kl_gradient = math.exp(d) - d - 1, 1 - math.exp(d)
                if config.use_bias_correction_kl:
                    kl, kl_gradient = kl * ratio, (kl_gradient + kl) * ratio
                kls.append(kl)
                total += config.beta * kl
                gradient[t] += config.beta * kl_gradient
        sums.append(total)
        gradients.append(gradient)

    divisors = {
        "grpo": [len(rows) * max(1, len(row)) for row in rows],
        "bnpo": [max(1, num_tokens)] * len(rows),
        "dr_grpo": [len(rows) * config.max_completion_length] * len(rows),
        "dapo": [float(inputs.normalizer) or 1.0] * len(rows),
    }[config.loss_type]
    loss = sum(total / divisor for total, divisor in zip(sums, divisors, strict=True))
    gradients = [[g / divisor for g in row] for row, divisor in zip(gradients, divisors, strict=True)]

    def mean(values):
        values = list(values)
        return sum(values) / max(1, len(values))

    metrics = {
        "clip_ratio/low_mean": clipped_low / max(1, num_tokens),
        "clip_ratio/low_min": clipped_low / max(1, num_tokens),
        "clip_ratio/high_mean": clipped_high / max(1, num_tokens),
        "clip_ratio/high_max": clipped_high / max(1, num_tokens),
        "clip_ratio/region_mean": (clipped_low + clipped_high) / max(1, num_tokens),
    }
    if inputs.entropies is not None:
        metrics["entropy"] = mean(inputs.entropies[b, t].item() for b, row in enumerate(rows) for t in row)
    if config.beta:
        metrics["kl"] = mean(kls)
    if inputs.sampling_logprobs is not None:
        metrics["sampling/sampling_logp_difference/mean"] = mean(differences)
        metrics["sampling/sampling_logp_difference/max"] = max(differences, default=0.0)
        if config.importance_sampling_correction:
            metrics["sampling/importance_sampling_ratio/min"] = min(reported_weights, default=0.0)
            metrics["sampling/importance_sampling_ratio/mean"] = mean(reported_weights)
            metrics["sampling/importance_sampling_ratio/max"] = max(reported_weights, default=0.0)
    return loss, gradients, metrics


def check_against_reference(inputs: LossInputs, config: LossConfig) -> None:
    outputs = grpo_loss(inputs, config)
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
    loss, expected_gradient, metrics = reference_loss(inputs, config)
    assert outputs.loss.shape == ()
    torch.testing.assert_close(outputs.loss.item(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(expected_gradient), rtol=1e-4, atol=1e-6)
    assert outputs.metrics.keys() == metrics.keys()
    assert not any(value.requires_grad or value.dim() for value in outputs.metrics.values())
    measured = {name: value.item() for name, value in outputs.metrics.items()}
    torch.testing.assert_close(measured, metrics, rtol=1e-5, atol=1e-6)


def make_config(**fields) -> LossConfig:
    return LossConfig(**{"max_completion_length": MAX_COMPLETION_LENGTH, **fields})


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_every_loss_type_and_importance_sampling_mode(loss_type, mode, beta):
    config = make_config(
        loss_type=loss_type,
        importance_sampling_mode=mode,
        importance_sampling_clip_max=1.2,
        importance_sampling_clip_min=0.7,
        beta=beta,
        epsilon_low=0.15,
        epsilon_high=0.3,
    )
    for seed in range(3):
        check_against_reference(random_inputs(seed), config)


@pytest.mark.parametrize(
    "fields",
    [
        {"importance_sampling_correction": False},
        {"importance_sampling_clip_max": None},
        {"beta": 0.5, "use_bias_correction_kl": False},
        {"epsilon_low": 0.0, "epsilon_high": 10.0},
    ],
    ids=str,
)
def test_config_fields(fields):
    check_against_reference(random_inputs(), make_config(**fields))


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
@pytest.mark.parametrize(
    "inputs",
    [
        random_inputs(lengths=(0, 0), width=3, normalizer=torch.tensor(0)),
        random_inputs(lengths=(0, 0), width=3, normalizer=0.0),
        random_inputs(lengths=(1,), width=1),
        random_inputs(old_logprobs=None),
        random_inputs(sampling_logprobs=None),
        random_inputs(entropies=None),
        random_inputs(normalizer=torch.tensor(0.25)),
        random_inputs(mask=torch.tensor([[0, 1, 1, 0, 1]] * 5)),
    ],
    ids=[
        "all masked, tensor normalizer",
        "all masked, float normalizer",
        "one token",
        "no old logprobs",
        "no sampler",
        "no entropies",
        "normalizer below one",
        "holes in the mask",
    ],
)
@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_inputs(loss_type, inputs, mode):
    check_against_reference(inputs, make_config(loss_type=loss_type, importance_sampling_mode=mode))


def test_without_old_logprobs_the_gradient_is_the_policy_gradient():
    inputs = random_inputs(old_logprobs=None, sampling_logprobs=None)
    (gradient,) = torch.autograd.grad(grpo_loss(inputs, make_config(loss_type="bnpo")).loss, inputs.logprobs)
    expected = -inputs.advantages.unsqueeze(1) * inputs.mask / inputs.mask.sum()
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_padding_is_never_looked_at(loss_type, garbage):
    config = make_config(loss_type=loss_type, beta=0.1, importance_sampling_mode="token_truncate")
    inputs = random_inputs()
    clean = grpo_loss(inputs, config)
    padded = {}
    for name in ("logprobs", "old_logprobs", "sampling_logprobs", "ref_logprobs", "entropies"):
        values = getattr(inputs, name).detach()
        padded[name] = torch.where(inputs.mask.bool(), values, garbage).requires_grad_(name == "logprobs")
    outputs = grpo_loss(random_inputs(**padded), config)
    torch.testing.assert_close(outputs.loss, clean.loss)
    torch.testing.assert_close(outputs.metrics, clean.metrics)
    (gradient,) = torch.autograd.grad(outputs.loss, padded["logprobs"])
    torch.testing.assert_close(gradient, torch.autograd.grad(clean.loss, inputs.logprobs)[0])


def test_dapo_over_micro_batches_is_one_mean_over_all_tokens():
    inputs = random_inputs()
    normalizer = inputs.mask.sum()
    whole = grpo_loss(random_inputs(normalizer=normalizer), make_config(loss_type="dapo")).loss
    parts = 0.0
    for rows in (slice(0, 2), slice(2, 5)):
        names = ("logprobs", "mask", "advantages", "old_logprobs", "sampling_logprobs")
        part = LossInputs(**{name: getattr(inputs, name)[rows] for name in names}, normalizer=normalizer)
        parts += grpo_loss(part, make_config(loss_type="dapo")).loss
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(whole, grpo_loss(inputs, make_config(loss_type="bnpo")).loss)


def test_half_precision_logprobs_are_compared_in_float32():
    inputs = random_inputs()
    names = ("logprobs", "old_logprobs", "sampling_logprobs", "ref_logprobs")
    half = {name: getattr(inputs, name).detach().bfloat16() for name in names}
    config = make_config(beta=0.2)
    outputs = grpo_loss(random_inputs(**half), config)
    torch.testing.assert_close(
        outputs.loss, grpo_loss(random_inputs(**{k: v.float() for k, v in half.items()}), config).loss
    )


def test_importance_weights_carry_no_gradient():
    old = torch.zeros(2, 3, requires_grad=True)
    assert not sampler_importance_weights(old, torch.ones(2, 3), torch.ones(2, 3)).requires_grad


@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_nothing_waits_for_the_device(loss_type, mode):
    """Tensors on the meta device have no values: reading one, as a host-device sync would, raises."""
    inputs = random_inputs(normalizer=torch.tensor(7))
    on_meta = {name: value.detach().to("meta") for name, value in vars(inputs).items()}
    on_meta["logprobs"].requires_grad_()
    config = make_config(
        loss_type=loss_type, importance_sampling_mode=mode, importance_sampling_clip_min=0.1, beta=0.1
    )
    outputs = grpo_loss(LossInputs(**on_meta), config)
    outputs.loss.backward()
    rewards = aggregate_rewards(torch.zeros(6, 2, device="meta"), torch.ones(2, device="meta"))
    group_advantages(rewards, 3)


def test_kl_without_reference_is_an_error():
    with pytest.raises(ValueError, match=r"beta=0\.1 needs ref_logprobs"):
        grpo_loss(random_inputs(ref_logprobs=None), make_config(beta=0.1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type='ppo'.*bnpo"),
        ({"importance_sampling_mode": "token"}, "vllm_importance_sampling_mode='token'.*sequence_mask"),
        ({"epsilon_low": -0.1}, "epsilon_low=-0.1"),
        ({"beta": -1.0}, "beta=-1.0"),
        ({"importance_sampling_clip_min": 4.0}, "vllm_importance_sampling_clip_min=4.0"),
    ],
)
def test_config_refuses_bad_values(fields, message):
    with pytest.raises(ValueError, match=message):
        make_config(**fields)


# Rewards and advantages


def test_aggregate_rewards_leaves_out_what_was_not_given():
    nan = math.nan
    rewards = torch.tensor([[1.0, 2.0, 3.0], [nan, 2.0, 3.0], [1.0, nan, nan], [nan, nan, nan]])
    weights = torch.tensor([1.0, 0.5, -2.0])
    torch.testing.assert_close(aggregate_rewards(rewards, weights), torch.tensor([-4.0, -5.0, 1.0, 0.0]))


@pytest.mark.parametrize("num_generations", [1, 2, 3, 6])
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_group_advantages(scale_rewards, num_generations):
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(1)).tolist()
    rewards[:num_generations] = [0.1] * num_generations

    def deviation(values):
        mean = sum(values) / len(values)
        return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0

    advantages, stds = [], []
    for start in range(0, len(rewards), num_generations):
        group = rewards[start : start + num_generations]
        std = deviation(rewards if scale_rewards == "batch" else group)
        for reward in group:
            centered = reward - sum(group) / len(group)
            advantages.append(centered if scale_rewards == "none" else centered / (std + 1e-4))
            stds.append(std)

    measured, measured_stds = group_advantages(torch.tensor(rewards), num_generations, scale_rewards)
    torch.testing.assert_close(measured, torch.tensor(advantages), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(measured_stds, torch.tensor(stds), rtol=1e-5, atol=1e-7)


def test_group_advantages_refuses_bad_input():
    with pytest.raises(ValueError, match=r"5 rewards.*num_generations=2"):
        group_advantages(torch.zeros(5), 2)
    with pytest.raises(ValueError, match=r"scale_rewards='std'.*'batch'"):
        group_advantages(torch.zeros(4), 2, "std")


def test_reference_bites():
    """The random inputs reach both clips, both limits on the weights, and both signs of the advantage."""
    seen = set()
    for seed, mode in itertools.product(range(3), ("token_mask", "sequence_mask")):
        config = make_config(
            importance_sampling_mode=mode, importance_sampling_clip_max=1.2, importance_sampling_clip_min=0.7
        )
        metrics = reference_loss(random_inputs(seed), config)[2]
        seen |= {name for name in ("clip_ratio/low_mean", "clip_ratio/high_mean") if metrics[name] > 0}
        seen |= {mode} if metrics["sampling/importance_sampling_ratio/min"] == 0 else set()
    assert seen == {"clip_ratio/low_mean", "clip_ratio/high_mean", "token_mask", "sequence_mask"}
