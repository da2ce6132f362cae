from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.testing_utils import make_model
from trl.trainer.memory import ActivationEstimate, checkpointing_needed, estimate_activations, saved_bytes
from trl.trainer.rollouts import MicroBatch
from trl.trainer.token_logprobs import TokenScorer


def test_saved_bytes_counts_each_activation_once_and_no_parameter():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    inputs = torch.zeros(3, 8)
    # Kept: the input of the first layer, and the tanh, by itself and by the second layer.
    assert saved_bytes(model, lambda: model(inputs)) == 4 * (3 * 8 + 3 * 16)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])  # the second keeps scores, which grow with the square
def test_estimate_holds_for_longer_sequences_and_more_of_them(attention):
    model = get_peft_model(make_model(max_position_embeddings=1024, attn_implementation=attention), LoraConfig())
    scorer = TokenScorer(model)

    def forward(sequences, length):
        return scorer(model, MicroBatch.of_zeros(sequences, length, torch.device("cpu")))

    estimate = estimate_activations(model, lambda length: forward(1, length))
    measured = saved_bytes(model, lambda: forward(3, 700))
    assert estimate.total(3, 700) == pytest.approx(measured, rel=0.05)


def test_copies_of_weights_do_not_grow_with_the_batch():
    model = nn.Linear(512, 512).requires_grad_(False)

    def forward(length):
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.zeros(length, 512, requires_grad=True))

    estimate = estimate_activations(model, forward)
    assert estimate.fixed == pytest.approx(2 * 512 * 512, rel=1e-6)


@pytest.mark.parametrize(("free", "needed"), [(1000, False), (999, True)])
def test_checkpointing_is_needed_when_activations_do_not_fit(free, needed):
    estimate = ActivationEstimate(fixed=100, per_token=10, per_pair=1)
    answer, why = checkpointing_needed(estimate, free, sequences=5, length=10, share=1.1)
    assert answer == needed
    assert "5 sequences of 10 tokens" in why
