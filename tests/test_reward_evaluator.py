from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForSequenceClassification

from tests.testing_utils import make_tokenizer
from trl.rewards.evaluate import RewardEvaluator


PROMPTS = ["ab", "abcdef", "a"]
COMPLETIONS = [" one", " two", " thirteen"]
COMPLETION_IDS = [[1], [2, 3], [4, 5, 6]]
ROLLOUT = (PROMPTS, COMPLETIONS, COMPLETION_IDS)


def length(completions, **kwargs):
    return [len(completion) for completion in completions]


def count(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


@pytest.fixture
def reward_model() -> LlamaForSequenceClassification:
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.3,
        num_labels=1,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(config)
    model.config._name_or_path = "org/tiny-reward"
    return model


def returning(value, name="custom"):
    def func(**kwargs):
        return value

    func.__name__ = name
    return func


def test_functions_get_rollouts_columns_and_state_by_keyword():
    received = {}

    def spy(**kwargs):
        received.update(kwargs)
        return [0.0] * 3

    columns = {"prompt": PROMPTS, "completion": [1, 2, 3], "completion_ids": [7, 8, 9], "answer": ["x", "y", "z"]}
    extra, metric = (lambda column, values: None), (lambda name, value: None)
    RewardEvaluator(spy).evaluate(*ROLLOUT, columns=columns, trainer_state="state", log_extra=extra, log_metric=metric)
    assert received == {
        "prompts": PROMPTS,
        "completions": COMPLETIONS,
        "completion_ids": COMPLETION_IDS,
        "answer": ["x", "y", "z"],
        "trainer_state": "state",
        "log_extra": extra,
        "log_metric": metric,
    }
    received.clear()
    RewardEvaluator(spy).evaluate(*ROLLOUT)
    assert received.keys() == {"prompts", "completions", "completion_ids", "trainer_state"}


def test_every_function_gets_a_column():
    rewards = RewardEvaluator([length, count]).evaluate(*ROLLOUT)
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [[4.0, 1.0], [4.0, 2.0], [9.0, 3.0]]


@pytest.mark.parametrize(
    "result",
    [
        [1, 0, True],
        (1.0, 0.0, 1.0),
        torch.tensor([1.0, 0.0, 1.0]),
        np.array([1, 0, 1]),
        [torch.tensor(1.0), np.float32(0.0), np.int64(1)],
    ],
    ids=["python", "tuple", "tensor", "array", "scalars"],
)
def test_any_kind_of_number_is_a_reward(result):
    assert RewardEvaluator(returning(result)).evaluate(*ROLLOUT).tolist() == [[1.0], [0.0], [1.0]]


def test_none_is_nan_and_a_completion_without_reward_is_warned_of(caplog):
    evaluator = RewardEvaluator([returning([None, 1.0, None], "first"), returning([2.0, 3.0, 4.0], "second")])
    with caplog.at_level(logging.WARNING):
        rewards = evaluator.evaluate(*ROLLOUT)
    assert torch.equal(rewards.isnan(), torch.tensor([[True, False], [False, False], [True, False]]))
    assert not caplog.records

    evaluator = RewardEvaluator([returning([1.0, None, None], "first"), returning([None, 3.0, None], "second")])
    with caplog.at_level(logging.WARNING):
        evaluator.evaluate(*ROLLOUT)
    assert "(first, second) rewarded 1 of 3 completions (the first is 2)" in caplog.text


def test_coroutines_are_awaited_together_and_beside_the_others():
    """Each waits until all have begun: one after the other would never end."""
    begun = threading.Barrier(3, timeout=10)

    async def first(completions, **kwargs):
        await asyncio.to_thread(begun.wait)
        return [1.0] * 3

    class Second:
        async def __call__(self, completions, **kwargs):
            await asyncio.to_thread(begun.wait)
            return [2.0, None, 2.0]

    def third(completions, **kwargs):
        begun.wait()
        return [3.0] * 3

    evaluator = RewardEvaluator([first, third, Second()])
    assert evaluator.names == ["first", "third", "Second"]
    rewards = evaluator.evaluate(*ROLLOUT).nan_to_num(-1.0)
    assert rewards.tolist() == [[1.0, 3.0, 2.0], [1.0, 3.0, -1.0], [1.0, 3.0, 2.0]]


def test_coroutines_keep_their_loop_and_work_within_a_running_one():
    loops = []

    async def reward(completions, **kwargs):
        loops.append(asyncio.get_running_loop())
        return [1.0] * 3

    evaluator = RewardEvaluator(reward)
    evaluator.evaluate(*ROLLOUT)

    async def notebook_cell():
        return evaluator.evaluate(*ROLLOUT)

    asyncio.run(notebook_cell())
    assert loops[0] is loops[1]
    evaluator.close()
    evaluator.close()
    assert loops[0].is_closed()
    evaluator.evaluate(*ROLLOUT)
    assert loops[2] is not loops[0]


def test_errors_in_functions_reach_the_caller():
    async def broken(completions, **kwargs):
        raise RuntimeError("judge is down")

    async def fine(completions, **kwargs):
        await asyncio.sleep(0)
        return [1.0] * 3

    with pytest.raises(RuntimeError, match="judge is down"):
        RewardEvaluator([fine, broken]).evaluate(*ROLLOUT)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        ([1.0, 2.0], ValueError, "'custom' returned 2 rewards for 3 completions"),
        ([1.0, math.nan, 2.0], ValueError, "'custom' returned nan for completion 1.*None"),
        ([1.0, 2.0, -math.inf], ValueError, "'custom' returned -inf for completion 2"),
        (torch.tensor([1.0, math.nan, 0.0]), ValueError, "'custom' returned nan for completion 1"),
        (["1.0", 2.0, 3.0], TypeError, "'custom' returned '1.0' for completion 0"),
        (torch.zeros(3, 2), TypeError, r"'custom' returned \[0\.0, 0\.0\] for completion 0"),
        (None, TypeError, "'custom' returned NoneType"),
        (1.0, TypeError, "'custom' returned float"),
    ],
    ids=str,
)
def test_bad_rewards_name_the_function_and_the_place(result, error, message):
    with pytest.raises(error, match=message):
        RewardEvaluator([length, returning(result)]).evaluate(*ROLLOUT)


def test_names_and_weights(reward_model):
    evaluator = RewardEvaluator(
        [length, functools.partial(length, bonus=1), reward_model, length],
        [None, None, make_tokenizer(), None],
        reward_weights=[1, 0.5, 2.0, 0.0],
    )
    assert evaluator.names == ["length", "length_2", "tiny-reward", "length_3"]
    assert evaluator.weights.tolist() == [1.0, 0.5, 2.0, 0.0]
    assert evaluator.weights.dtype == torch.float32
    assert RewardEvaluator([length, count]).weights.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"reward_funcs": []}, ValueError, "reward_funcs is empty"),
        ({"reward_funcs": [3]}, TypeError, "reward_funcs contains 3"),
        ({"reward_funcs": length, "reward_weights": [1.0, 2.0]}, ValueError, "reward_weights has 2 .* 1 reward"),
        (
            {"reward_funcs": [length, count], "reward_processing_classes": [None]},
            ValueError,
            "reward_processing_classes has 1 .* 2 reward",
        ),
    ],
)
def test_construction_refuses_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        RewardEvaluator(**arguments)


def expected_scores(model, tokenizer, texts):
    """One text at a time, without padding: the score head on the hidden state of the last token."""
    scores = []
    for text in texts:
        ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
        hidden = model.model(input_ids=ids).last_hidden_state[0, -1]
        scores.append(model.score(hidden).item())
    return scores


@pytest.mark.parametrize("has_pad_token", [True, False])
def test_reward_model_scores_text(reward_model, has_pad_token):
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
    )
    masks = []
    reward_model.register_forward_pre_hook(
        lambda model, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    if not has_pad_token:
        tokenizer.pad_token = None
    evaluator = RewardEvaluator(reward_model, tokenizer)
    texts = [prompt + completion for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    expected = expected_scores(reward_model, tokenizer, texts)
    assert len({round(score, 3) for score in expected}) == 3
    rewards = evaluator.evaluate(*ROLLOUT, columns={"answer": [1, 2, 3]})
    torch.testing.assert_close(rewards, torch.tensor(expected).unsqueeze(1), rtol=1e-4, atol=1e-5)
    assert not rewards.requires_grad
    lengths = [len(text) for text in texts]
    assert masks[0].tolist() == [[1] * length + [0] * (max(lengths) - length) for length in lengths]


def test_reward_model_scores_messages_by_the_chat_template(reward_model):
    tokenizer = make_tokenizer()
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    completions = [[{"role": "assistant", "content": completion}] for completion in COMPLETIONS]
    texts = [
        f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{completion}<|im_end|>\n"
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)
    ]
    expected = expected_scores(reward_model.eval(), tokenizer, texts)
    rewards = RewardEvaluator([reward_model], [tokenizer]).evaluate(prompts, completions, COMPLETION_IDS)
    torch.testing.assert_close(rewards, torch.tensor(expected).unsqueeze(1), rtol=1e-4, atol=1e-5)


def test_reward_model_by_path_brings_its_tokenizer(reward_model, tmp_path):
    path = tmp_path / "saved-reward"
    reward_model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    evaluator = RewardEvaluator([str(path), length], model_init_kwargs={"dtype": torch.bfloat16})
    assert evaluator.names == ["saved-reward", "length"]
    rewards = evaluator.evaluate(*ROLLOUT)
    half = LlamaForSequenceClassification.from_pretrained(path, dtype=torch.bfloat16)
    in_memory = RewardEvaluator(half, make_tokenizer()).evaluate(*ROLLOUT)
    assert torch.equal(rewards[:, :1], in_memory)


def test_reward_model_is_evaluated_without_dropout(reward_model):
    reward_model.train()
    RewardEvaluator(reward_model, make_tokenizer())
    assert not reward_model.training
