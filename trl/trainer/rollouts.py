"""From dataset rows to prompts, and from completions to the micro-batches that are trained on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..data_utils import apply_chat_template, is_conversational
from .utils import pad


@dataclass
class Samples:
    """What one process sampled in one rollout: `N` prompts and their completions, as lists.

    Attributes:
        prompts (`list`): Text or messages, as reward functions see them.
        prompt_ids (`list[list[int]]`): Their tokens.
        completions (`list`): Text, or one message of the assistant each where the prompts are conversational.
        completion_ids (`list[list[int]]`): Their tokens, the stop token included.
        sampling_logprobs (`list[list[float]]` or `None`): Log probabilities by the engine, if it computes them.
        truncated (`list[bool]`): Whether a completion has no end.
    """

    prompts: list[Any]
    prompt_ids: list[list[int]]
    completions: list[Any]
    completion_ids: list[list[int]]
    sampling_logprobs: list[list[float]] | None
    truncated: list[bool]


@dataclass
class MicroBatch:
    """`B` samples as tensors: prompts of `P` tokens padded on the left, completions of `T` on the right.

    Attributes:
        prompt_ids, prompt_mask (`Tensor`): `[B, P]`; the mask is zero on padding.
        completion_ids, completion_mask (`Tensor`): `[B, T]`; the mask is zero on padding.
        loss_mask (`Tensor`): `[B, T]`, zero on tokens that the loss leaves out.
        advantages (`Tensor`): `[B]`.
        normalizer (`float`): Tokens that count in a micro-batch, on average over rollout and processes.
        sampling_logprobs, old_logprobs, ref_logprobs (`Tensor` or `None`): `[B, T]`, see [`~grpo_loss.LossInputs`].
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    loss_mask: Tensor
    advantages: Tensor
    normalizer: float
    sampling_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None

    @classmethod
    def of_zeros(cls, sequences: int, length: int, device: torch.device) -> MicroBatch:
        """Sequences of `length` tokens, all but the first of them completion, to try things with."""
        ids = torch.zeros((sequences, length), dtype=torch.long, device=device)
        ones = torch.ones_like(ids)
        return cls(
            ids[:, :1], ones[:, :1], ids[:, 1:], ones[:, 1:], ones[:, 1:], torch.zeros(sequences, device=device), 1.0
        )

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return MicroBatch(
            **{
                name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
                for name, value in values.items()
            }
        )


def tokenize_prompts(
    prompts: Sequence[Any], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any] | None = None
) -> list[list[int]]:
    """Token ids of prompts without padding.

    Messages go through the chat template, which leaves the assistant's turn open and writes its own special tokens;
    text gets those that the tokenizer adds.

    Raises:
        TypeError: For a prompt that is neither text nor a list of messages.
    """
    for prompt in prompts:
        if not isinstance(prompt, str) and not is_conversational({"prompt": prompt}):
            raise TypeError(
                f"A prompt is {prompt!r:.99}, of type {type(prompt).__name__}: a prompt is text or a list of messages "
                "with a role and a content. Filter or convert the column 'prompt'."
            )
    if is_conversational({"prompt": prompts[0]}):
        texts = [
            apply_chat_template({"prompt": prompt}, tokenizer, **(chat_template_kwargs or {}))["prompt"]
            for prompt in prompts
        ]
        return tokenizer(text=texts, add_special_tokens=False)["input_ids"]
    return tokenizer(text=list(prompts))["input_ids"]


def check_prompts_fit(
    argument: str,
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> None:
    """Raise for a prompt that leaves no room for a completion in the engine's context.

    Args:
        argument (`str`): What the dataset was given as, for the message.
        dataset (`Dataset`): Rows with a `prompt`.
        tokenizer (`PreTrainedTokenizerBase`): The trainer's.
        context (`int`): Tokens that the engine holds, prompt and completion together.
        chat_template_kwargs (`dict`, *optional*): As for [`tokenize_prompts`].

    Raises:
        ValueError: Names the first such row and its length in tokens.
    """
    for index, prompt in enumerate(_prompts(dataset)):
        # No token is shorter than a byte, so all but the longest prompts need not be tokenised.
        if _most_tokens(prompt) < context:
            continue
        num_tokens = len(tokenize_prompts([prompt], tokenizer, chat_template_kwargs)[0])
        if num_tokens >= context:
            raise ValueError(
                f"Row {index} of {argument} has a prompt of {num_tokens} tokens, and the engine's context holds "
                f"{context}, completion included: filter or shorten the prompts, or raise vllm_max_model_length."
            )


def longest_prompt(dataset: Any, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict | None = None) -> int:
    """Tokens of the prompt that takes most bytes, which is the longest one or nearly so."""
    prompt = max(_prompts(dataset), key=_most_tokens)
    return len(tokenize_prompts([prompt], tokenizer, chat_template_kwargs)[0])


def _prompts(dataset: Any) -> Iterable[Any]:
    return dataset["prompt"] if hasattr(dataset, "column_names") else (row["prompt"] for row in dataset)


def _most_tokens(prompt: Any) -> float:
    """An upper bound of a prompt's tokens, with room for what a chat template adds; infinity for what is no prompt."""
    if isinstance(prompt, str):
        return len(prompt.encode()) + 2
    if not is_conversational({"prompt": prompt}):
        return math.inf
    return 512 + sum(len(str(message["content"]).encode()) + 64 for message in prompt)


def decode_completions(
    prompts: Sequence[Any], completion_ids: list[list[int]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Any], list[Any]]:
    """Prompts and completions as reward functions see them.

    A conversational prompt that ends with the beginning of the assistant's message gives it to the completion, which
    is then the whole message.
    """
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    if not is_conversational({"prompt": prompts[0]}):
        return list(prompts), texts
    asked, answered = [], []
    for prompt, text in zip(prompts, texts, strict=True):
        begun = prompt[-1]["role"] == "assistant"
        asked.append(prompt[:-1] if begun else prompt)
        answered.append([{"role": "assistant", "content": prompt[-1]["content"] + text if begun else text}])
    return asked, answered


def micro_batch_order(lengths: Sequence[int], seed: int, size_of_update: int, by_length: bool = True) -> list[int]:
    """Which samples of a rollout share an update, and within it a micro-batch.

    Chance decides on the update. Within one, samples of similar length come together, because a micro-batch is padded
    to its longest; the longest come first, so that a run that needs too much memory fails at once. Where updates and
    rollouts do not end together, chance decides on everything.

    Args:
        lengths (`Sequence[int]`): `N` lengths in tokens, prompt and completion together.
        seed (`int`): Seed of the permutation.
        size_of_update (`int`): Samples of this process that go into one optimizer step.
        by_length (`bool`, defaults to `True`): Whether to sort. A loss that divides by the tokens of each micro-batch
            depends on which samples are in it.

    Returns:
        `list[int]`: A permutation of the samples.
    """
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    # An update that begins within this rollout and ends in the next would get the short samples of this one.
    straddles = len(lengths) % size_of_update and size_of_update % len(lengths)
    if straddles or not by_length:
        return order
    return [
        sample
        for start in range(0, len(order), size_of_update)
        for sample in sorted(order[start : start + size_of_update], key=lambda sample: -lengths[sample])
    ]


def split_into_micro_batches(
    samples: Samples,
    advantages: Tensor,
    normalizer: float,
    num_micro_batches: int,
    order: Sequence[int],
    pad_token_id: int,
    mask_truncated: bool = False,
) -> list[MicroBatch]:
    """Tensors of all samples, on the CPU, each micro-batch padded to its own longest prompt and completion.

    Args:
        samples ([`Samples`]): `N` of them.
        advantages (`Tensor`): `[N]`.
        normalizer (`float`): Goes into every micro-batch.
        num_micro_batches (`int`): Divides `N`.
        order (`Sequence[int]`): Permutation of the samples before they are split.
        pad_token_id (`int`): Fills prompts and completions.
        mask_truncated (`bool`, defaults to `False`): Leave completions without an end out of the loss.
    """
    size = len(order) // num_micro_batches
    batches = []
    for start in range(0, size * num_micro_batches, size):
        rows = order[start : start + size]
        prompts = [samples.prompt_ids[row] for row in rows]
        completions = [samples.completion_ids[row] for row in rows]
        completion_mask = pad([[1] * len(each) for each in completions], 0)
        counted = [not (mask_truncated and samples.truncated[row]) for row in rows]
        logprobs = samples.sampling_logprobs
        batches.append(
            MicroBatch(
                prompt_ids=pad(prompts, pad_token_id, side="left"),
                prompt_mask=pad([[1] * len(each) for each in prompts], 0, side="left"),
                completion_ids=pad(completions, pad_token_id),
                completion_mask=completion_mask,
                loss_mask=completion_mask * torch.tensor(counted).unsqueeze(1),
                advantages=advantages[list(rows)],
                normalizer=normalizer,
                sampling_logprobs=logprobs and pad([logprobs[row] for row in rows], 0.0, dtype=torch.float32),
            )
        )
    return batches
