from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.testing_utils import make_model
from trl.trainer.memory import (
    ActivationEstimate,
    checkpointing_layers,
    estimate_activations,
    layers_to_checkpoint,
    saved_bytes,
)
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


@pytest.mark.parametrize(("free", "layers"), [(850, 0), (849, 1), (775, 1), (774, 2), (140, 10), (10, 10)])
def test_as_many_layers_recompute_as_do_not_fit(free, layers):
    estimate = ActivationEstimate(fixed=100, per_token=10, per_pair=0.5)  # 100 + 5 * 150 in all, so 75 for a layer
    number, why = layers_to_checkpoint(estimate, free, sequences=5, length=10, num_layers=10, share=1.0)
    assert number == layers
    assert f"{layers} of 10 layers" in why
    assert "5 sequences of 10 tokens" in why


def test_memory_is_what_it_was_settled_to_be():
    model = get_peft_model(make_model(num_hidden_layers=8, vocab_size=16), LoraConfig()).train()
    scorer = TokenScorer(model)
    layers = checkpointing_layers(model)
    assert len(layers) == 8

    def kept():
        return saved_bytes(model, lambda: scorer(model, MicroBatch.of_zeros(2, 128, torch.device("cpu"))))

    everything = kept()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers[5:]:
        layer.gradient_checkpointing = False
    assert kept() == pytest.approx(everything * 3 / 8, rel=0.2)
