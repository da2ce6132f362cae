"""Log probabilities of tokens, made from logits and without them."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.testing_utils import make_model
from trl.trainer import token_logprobs
from trl.trainer.rollouts import MicroBatch
from trl.trainer.token_logprobs import TokenScorer, entropy_from_logits, linear_logprobs, selective_log_softmax
from trl.trainer.utils import pad


# From logits


def random_logits(batch: int = 2, length: int = 600, vocab: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Longer than a chunk, and a view as `logits[:, :-1]` is."""
    generator = torch.Generator().manual_seed(2)
    logits = 4 * torch.randn(batch, length + 1, vocab, generator=generator)
    ids = torch.randint(vocab, (batch, length), generator=generator)
    return logits.requires_grad_(), ids


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_selective_log_softmax(temperature):
    logits, ids = random_logits()
    logprobs = selective_log_softmax(logits[:, :-1], ids, temperature)
    expected = (logits[:, :-1].double() / temperature).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logprobs, expected.float())

    upstream = torch.linspace(-1, 2, ids.numel()).view_as(ids)
    (gradient,) = torch.autograd.grad(logprobs, logits, upstream)
    (expected_gradient,) = torch.autograd.grad(expected, logits, upstream.double())
    torch.testing.assert_close(gradient, expected_gradient)


def test_selective_log_softmax_of_half_precision_is_computed_in_float32():
    logits, ids = random_logits()
    half = logits.detach().bfloat16().requires_grad_()
    logprobs = selective_log_softmax(half, torch.cat([ids, ids[:, :1]], dim=1))
    exact = selective_log_softmax(half.float(), torch.cat([ids, ids[:, :1]], dim=1))
    assert logprobs.dtype == torch.float32
    assert torch.equal(logprobs, exact)
    (gradient,) = torch.autograd.grad(logprobs.sum(), half)
    (exact_gradient,) = torch.autograd.grad(exact.sum(), half)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient, exact_gradient)


def test_selective_log_softmax_gradient_in_float64():
    logits, ids = random_logits(batch=2, length=3, vocab=5)
    logits = logits.detach()[:, :-1].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: selective_log_softmax(x, ids, 0.5), (logits,))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_entropy_from_logits(temperature):
    logits, _ = random_logits()
    entropies = entropy_from_logits(logits, temperature)
    expected = torch.distributions.Categorical(logits=logits.detach().double() / temperature).entropy()
    torch.testing.assert_close(entropies, expected.float())
    assert not entropies.requires_grad


def test_entropy_counts_impossible_tokens_as_nothing():
    logits = torch.tensor([[[0.0, 0.0, -math.inf], [1.0, -math.inf, -math.inf]]])
    torch.testing.assert_close(entropy_from_logits(logits), torch.tensor([[math.log(2), 0.0]]))


def test_nothing_waits_for_the_device():
    logits = torch.zeros(2, 3, 5, device="meta", requires_grad=True)
    ids = torch.zeros(2, 3, dtype=torch.long, device="meta")
    selective_log_softmax(logits, ids).sum().backward()
    entropy_from_logits(logits)
    hidden = torch.zeros(6, 4, device="meta", requires_grad=True)
    weight = torch.zeros(5, 4, device="meta")
    token_logprobs._LinearLogprobs.apply(hidden, weight, None, ids.flatten(), 1.0, True)[0].sum().backward()


# Without logits


def random_layer(
    length: int = 7, size: int = 6, vocab: int = 11, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ...]:
    """`hidden [2, length, size]`, `weight`, `bias` and token ids."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, length, size, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, size, generator=generator, dtype=dtype)
    bias = torch.randn(vocab, generator=generator, dtype=dtype)
    return hidden, weight, bias, torch.randint(vocab, (2, length), generator=generator)


@pytest.fixture(params=[1, 3, 100], ids="chunks of {}".format)
def chunk(request, monkeypatch):
    """Positions in a chunk: one, some, all."""
    monkeypatch.setattr(token_logprobs, "CHUNK_BYTES", request.param * 11 * 8)


@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_logprobs(chunk, with_bias):
    hidden, weight, bias, ids = random_layer()
    bias = bias if with_bias else None
    logprobs, entropies = linear_logprobs(hidden, weight, bias, ids, 0.7, with_entropy=True)
    distribution = torch.distributions.Categorical(logits=torch.nn.functional.linear(hidden, weight, bias) / 0.7)
    torch.testing.assert_close(logprobs, distribution.log_prob(ids))
    torch.testing.assert_close(entropies, distribution.entropy())
    assert not entropies.requires_grad

    upstream = torch.linspace(-1, 2, ids.numel()).view(ids.shape).double()
    (gradient,) = torch.autograd.grad(logprobs, hidden, upstream)
    (expected,) = torch.autograd.grad(distribution.log_prob(ids), hidden, upstream)
    torch.testing.assert_close(gradient, expected)


def test_linear_logprobs_without_gradient_and_entropy():
    hidden, weight, bias, ids = random_layer()
    logprobs, entropies = linear_logprobs(hidden.detach(), weight, bias, ids)
    expected = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1).gather(-1, ids.unsqueeze(-1))[..., 0]
    torch.testing.assert_close(logprobs, expected.detach())
    assert entropies is None
    assert not logprobs.requires_grad


def test_linear_logprobs_in_half_precision_are_as_good_as_from_logits():
    hidden, weight, bias, ids = random_layer(length=300, size=64, vocab=500)
    exact = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1).gather(-1, ids.unsqueeze(-1))[..., 0]
    (exact_gradient,) = torch.autograd.grad(exact.sum(), hidden)

    def errors(compute):
        half = hidden.detach().bfloat16().requires_grad_()
        logprobs = compute(half)
        (gradient,) = torch.autograd.grad(logprobs.sum(), half)
        assert logprobs.dtype == torch.float32
        assert gradient.dtype == torch.bfloat16
        return (logprobs - exact).abs().mean().item(), (gradient - exact_gradient).abs().mean().item()

    weight_16, bias_16 = weight.bfloat16(), bias.bfloat16()
    fused = errors(lambda half: linear_logprobs(half, weight_16, bias_16, ids)[0])
    usual = errors(lambda half: selective_log_softmax(torch.nn.functional.linear(half, weight_16, bias_16), ids))
    assert fused[0] <= 1.01 * usual[0]
    assert fused[1] <= 1.01 * usual[1]


def test_linear_logprobs_under_autocast_are_computed_in_its_dtype():
    hidden, weight, bias, ids = random_layer(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = linear_logprobs(hidden, weight, bias, ids)
    expected, _ = linear_logprobs(hidden.bfloat16(), weight.bfloat16(), bias.bfloat16(), ids)
    assert torch.equal(logprobs, expected)
    (gradient,) = torch.autograd.grad(logprobs.sum(), hidden)
    assert gradient.dtype == torch.float32


# Completions under a model


def make_batch(rows: list[tuple[list[int], list[int]]]) -> MicroBatch:
    return MicroBatch(
        prompt_ids=pad([prompt for prompt, _ in rows], 0, side="left"),
        prompt_mask=pad([[1] * len(prompt) for prompt, _ in rows], 0, side="left"),
        completion_ids=pad([completion for _, completion in rows], 0),
        completion_mask=pad([[1] * len(completion) for _, completion in rows], 0),
        loss_mask=None,
        advantages=None,
        normalizer=1.0,
    )


ROWS = [([5, 6, 7, 8], [9, 10]), ([11], [12, 13, 14, 15, 16])]


def make_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=260, n_positions=32, n_embd=32, n_layer=1, n_head=2)).eval()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("make", [make_model, make_gpt2], ids=["relative positions", "absolute positions"])
def test_padding_does_not_change_logprobs(make, fused):
    model = make().requires_grad_(False)
    scorer = TokenScorer(model, 0.7, fused)
    assert (scorer.head is not None) == fused
    logprobs, entropies = scorer(model, make_batch(ROWS), with_entropy=True)
    for index, (prompt, completion) in enumerate(ROWS):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.7
        distribution = torch.distributions.Categorical(logits=logits)
        own = slice(0, len(completion))
        torch.testing.assert_close(logprobs[index, own], distribution.log_prob(torch.tensor(completion)))
        torch.testing.assert_close(entropies[index, own], distribution.entropy())


def gradients(model, fused: bool) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logprobs, _ = TokenScorer(model, fused=fused)(model, make_batch(ROWS))
    logprobs.square().sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("tied", [True, False])
def test_adapter_gets_the_same_gradients_without_logits(tied):
    model = get_peft_model(make_model(tie_word_embeddings=tied), LoraConfig(init_lora_weights=False)).double()
    assert TokenScorer(model).head is model.get_output_embeddings()
    fused, usual = gradients(model, True), gradients(model, False)
    assert max(each.abs().max() for each in usual.values()) > 1e-2
    torch.testing.assert_close(fused, usual)


def capped() -> Gemma2ForCausalLM:
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, final_logit_softcapping=30.0,
    )  # fmt: skip
    return Gemma2ForCausalLM(config).requires_grad_(False)


@pytest.mark.parametrize(
    "make",
    [
        make_model,
        lambda: get_peft_model(make_model(), LoraConfig(target_modules=["q_proj", "lm_head"])),
        lambda: get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])),
        capped,
    ],
    ids=["trained whole", "adapter on lm_head", "lm_head trained", "logits are capped"],
)
def test_output_layer_that_cannot_be_left_out(make):
    assert TokenScorer(make()).head is None


def test_looking_at_the_output_layer_leaves_no_trace():
    model = get_peft_model(make_model(), LoraConfig(lora_dropout=0.5)).train()
    state = torch.get_rng_state()
    head = TokenScorer(model).head
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert "forward" not in vars(head)


def test_output_layer_is_itself_again_after_a_failure():
    model = make_model().requires_grad_(False)
    scorer = TokenScorer(model)
    batch = make_batch(ROWS)
    batch.completion_ids = batch.completion_ids + 1000
    with pytest.raises((IndexError, RuntimeError)):
        scorer(model, batch)
    assert "forward" not in vars(model.get_output_embeddings())
