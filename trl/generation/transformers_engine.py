"""Rollouts by the model that is trained itself, with `generate` of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from .engine import PolicyUpdate, PushReport, Rollout, SamplingConfig, check_known


class TransformersEngine:
    """Samples from the trainer's own model, so the policy is always the newest and a push moves nothing.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The policy, unwrapped.
        pad_token_id (`int`): Fills prompts on the left up to the length of the longest.
        tokenizer (*optional*): Needed for `stop_strings` among the sampling options.
    """

    def __init__(self, model: nn.Module, pad_token_id: int, tokenizer: Any = None):
        self.model = model
        self.pad_token_id = pad_token_id
        self.tokenizer = tokenizer
        self.max_model_length: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.policy_version: int | None = None

    def push(self, update: PolicyUpdate) -> PushReport:
        """Take note of the version."""
        self.policy_version = update.version
        return PushReport(update.version, num_bytes=0, seconds=0.0)

    def generate(
        self, prompt_token_ids: Sequence[Sequence[int]], sampling: SamplingConfig, seed: int | None = None
    ) -> Rollout:
        """Sample one completion for each prompt, all in one batch.

        The model is in eval mode meanwhile; its mode, its own generation config and the random state are put back.

        Args:
            prompt_token_ids (`Sequence[Sequence[int]]`): Prompts without padding.
            sampling ([`SamplingConfig`]): How to sample.
            seed (`int`, *optional*): Makes the call repeatable.

        Raises:
            RuntimeError: When the engine is closed, or no policy was pushed.
            ValueError: When a prompt is empty, or leaves no room in the model's context.
        """
        if self.policy_version is None:
            raise RuntimeError("The engine is closed or was never given a policy: push one first.")
        self._check_prompts(prompt_token_ids)
        input_ids, attention_mask = self._left_padded(prompt_token_ids)
        with torch.no_grad(), self._evaluating(), _seeded(seed, input_ids.device):
            with self._generation_config(_generation_config(sampling, self.pad_token_id)) as generation_config:
                sequences = self.model.generate(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    generation_config=generation_config,
                    tokenizer=self.tokenizer,
                )
        completions = sequences[:, input_ids.shape[1] :].tolist()
        completion_ids = [_up_to_stop(token_ids, sampling.stop_token_ids) for token_ids in completions]
        return Rollout(completion_ids, logprobs=None, policy_version=self.policy_version)

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise `ValueError` for options in `sampling.extra` that transformers does not have."""
        check_known(sampling.extra, GenerationConfig().to_dict().keys(), "transformers")

    def sleep(self) -> None:
        """Nothing to give back: the model is the trainer's."""

    def wake(self) -> None:
        """Nothing to take again."""

    def recreate(self) -> None:
        """Nothing to build; the next push brings the version."""
        self.policy_version = None

    def close(self) -> None:
        """Stop serving. May be called twice."""
        self.policy_version = None

    def _check_prompts(self, prompt_token_ids: Sequence[Sequence[int]]) -> None:
        context = self.max_model_length
        for index, token_ids in enumerate(prompt_token_ids):
            if not token_ids or (context is not None and len(token_ids) >= context):
                raise ValueError(
                    f"Prompt {index} has {len(token_ids)} tokens; the model's context holds {context}, completion "
                    "included, and a prompt needs at least one. Shorten or filter the prompts."
                )

    def _left_padded(self, prompt_token_ids: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, prompt_token_ids))
        rows = [[self.pad_token_id] * (width - len(token_ids)) + list(token_ids) for token_ids in prompt_token_ids]
        masks = [[0] * (width - len(token_ids)) + [1] * len(token_ids) for token_ids in prompt_token_ids]
        device = next(self.model.parameters()).device
        return torch.tensor(rows, device=device), torch.tensor(masks, device=device)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Eval mode, which turns gradient checkpointing off as well; every module gets its own mode back."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

    @contextmanager
    def _generation_config(self, generation_config: GenerationConfig) -> Iterator[GenerationConfig]:
        """Put the model's own generation config aside: what is not set would be taken from there."""
        owner = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        own = owner.generation_config
        owner.generation_config = generation_config
        try:
            yield generation_config
        finally:
            owner.generation_config = own


def _generation_config(sampling: SamplingConfig, pad_token_id: int) -> GenerationConfig:
    arguments: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "do_sample": sampling.temperature > 0,
        "repetition_penalty": sampling.repetition_penalty,
        "eos_token_id": list(sampling.stop_token_ids) or None,
        "pad_token_id": pad_token_id,
        "use_cache": True,
    }
    if sampling.temperature > 0:
        arguments |= {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
        }
    return GenerationConfig(**(arguments | dict(sampling.extra)))


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Random state of `seed`; what it was before comes back."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _up_to_stop(token_ids: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    """The tokens up to the first stop token, which stays."""
    for position, token_id in enumerate(token_ids):
        if token_id in stop_token_ids:
            return token_ids[: position + 1]
    return token_ids
