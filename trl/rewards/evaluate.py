"""Calling reward functions and reward models, and checking what they return."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from trl.data_utils import apply_chat_template, is_conversational


logger = logging.getLogger(__name__)

RewardFunc = str | nn.Module | Callable[..., Any]

PASSED_BY_NAME = ("prompt", "completion", "completion_ids")
"""Dataset columns that reward functions do not get: rollouts take their place."""


class RewardEvaluator:
    """Everything that rewards a completion, called as one.

    A reward function is called with keyword arguments only: `prompts`, `completions` (text, or messages where the
    prompts are conversational), `completion_ids`, every other column of the dataset, `trainer_state`, and where the
    trainer offers them `log_extra(column, values)` and `log_metric(name, value)`. It returns one number for each
    completion, or `None` where it has no opinion. Coroutine functions are awaited together, on an event loop of their
    own, while the others run.

    A reward model is a sequence classifier; the first of its logits is the reward of prompt plus completion.

    Args:
        reward_funcs (one or a list of): Callable, coroutine function, sequence-classification model, or hub id or path
            of one.
        reward_processing_classes (tokenizer or list, *optional*): One for each reward function; `None` in the list, or
            altogether, loads the tokenizer that belongs to a reward model. Ignored for functions.
        reward_weights (`Sequence[float]`, *optional*): One for each reward function; all one by default.
        device (`torch.device` or `str`, defaults to `"cpu"`): Where reward models run and rewards are returned.
        model_init_kwargs (`Mapping`, *optional*): For loading the reward models that were given by name.

    Attributes:
        names (`list[str]`): Of the reward functions: `__name__`, or the last part of a model's path. A name that came
            before gets a number, so that all differ.
        weights (`Tensor`): `[F]`, float32, on `device`.

    Raises:
        ValueError: If there is no reward function, or not one processing class or weight for each.
        TypeError: If a reward function is none of what is accepted.
    """

    def __init__(
        self,
        reward_funcs: RewardFunc | Sequence[RewardFunc],
        reward_processing_classes: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
        reward_weights: Sequence[float] | None = None,
        device: torch.device | str = "cpu",
        model_init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        funcs = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        if not funcs:
            raise ValueError("reward_funcs is empty: give at least one reward function or reward model.")
        if reward_processing_classes is None:
            tokenizers = [None] * len(funcs)
        elif isinstance(reward_processing_classes, (list, tuple)):
            tokenizers = list(reward_processing_classes)
        else:
            tokenizers = [reward_processing_classes]
        weights = [1.0] * len(funcs) if reward_weights is None else list(reward_weights)
        for argument, values in (("reward_processing_classes", tokenizers), ("reward_weights", weights)):
            if len(values) != len(funcs):
                raise ValueError(
                    f"{argument} has {len(values)} elements for {len(funcs)} reward functions: give one for each."
                )

        self.device = torch.device(device)
        self.weights = torch.tensor(weights, dtype=torch.float32, device=self.device)
        self.names = _distinct([_name(func) for func in funcs])
        self._funcs = [
            _as_reward_function(func, tokenizer, self.device, model_init_kwargs)
            for func, tokenizer in zip(funcs, tokenizers, strict=True)
        ]
        self._coroutines = _CoroutineThread()

    def evaluate(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        columns: Mapping[str, list[Any]] | None = None,
        trainer_state: Any = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
    ) -> Tensor:
        """Reward every completion by every function.

        Args:
            prompts (`list`): `N` prompts, text or messages.
            completions (`list`): `N` completions, in the format of the prompts.
            completion_ids (`list[list[int]]`): Their tokens, without padding.
            columns (`Mapping[str, list]`, *optional*): The dataset's columns, `N` values each.
            trainer_state ([`~transformers.TrainerState`], *optional*): For functions that change during training.
            log_extra, log_metric (callables, *optional*): Handed on to the functions.

        Returns:
            `Tensor`: `[N, F]`, float32; NaN where a function returned `None`.

        Raises:
            ValueError: If a function returns another number of rewards than `N`, or NaN or infinity.
            TypeError: If it returns no list, or something in it is not a number.
        """
        arguments = {name: values for name, values in (columns or {}).items() if name not in PASSED_BY_NAME}
        if log_extra is not None:
            arguments["log_extra"] = log_extra
        if log_metric is not None:
            arguments["log_metric"] = log_metric
        calls = [
            functools.partial(
                func,
                prompts=prompts,
                completions=completions,
                completion_ids=completion_ids,
                trainer_state=trainer_state,
                **arguments,
            )
            for func in self._funcs
        ]
        awaited = [index for index, func in enumerate(self._funcs) if _is_coroutine_function(func)]
        pending = self._coroutines.start([calls[index] for index in awaited])
        results = [None if index in awaited else call() for index, call in enumerate(calls)]
        for index, result in zip(awaited, pending.result(), strict=True):
            results[index] = result

        columns_of_rewards = [
            _checked(name, result, len(completions)) for name, result in zip(self.names, results, strict=True)
        ]
        rewards = torch.tensor(columns_of_rewards, dtype=torch.float32, device=self.device).T.contiguous()
        _warn_of_unrewarded(columns_of_rewards, self.names)
        return rewards

    def close(self) -> None:
        """Stop the event loop of the coroutine functions. May be called twice."""
        self._coroutines.close()


class _RewardModel:
    """A sequence classifier as a reward function."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, device: torch.device) -> None:
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        # The classifier reads the logits of the last token that is not padding.
        model.config.pad_token_id = tokenizer.pad_token_id
        placed_already = getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)
        self.model = (model if placed_already else model.to(device)).eval()
        self.tokenizer = tokenizer

    @torch.no_grad()
    def __call__(self, prompts: list[Any], completions: list[Any], **unused: Any) -> list[float]:
        inputs = self.tokenizer(
            text=[self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)],
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        )
        parameter = next(self.model.parameters())
        return self.model(**inputs.to(parameter.device)).logits[:, 0].float().tolist()

    def _text(self, prompt: Any, completion: Any) -> str:
        if is_conversational({"prompt": prompt}):
            return apply_chat_template({"messages": prompt + completion}, self.tokenizer)["text"]
        return prompt + completion


class _CoroutineThread:
    """An event loop in a thread of its own, started at first use.

    The caller's thread may run a loop itself, as in a notebook, and the loop is the same at every call: clients that
    are bound to one live on.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, calls: list[Callable[[], Any]]) -> Future:
        """Begin to await all `calls`; the future's result is the list of theirs."""
        if not calls:
            done = Future()
            done.set_result([])
            return done
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trl-async-rewards")
            self._finalizer = weakref.finalize(self, _stop, self._thread, self._loop)
        return self._thread.submit(self._loop.run_until_complete, _gather(calls))

    def close(self) -> None:
        if self._loop is not None:
            self._finalizer()
            self._loop = None


async def _gather(calls: list[Callable[[], Any]]) -> list[Any]:
    # All are waited for even if one fails: what is left running would outlive the loop.
    results = await asyncio.gather(*(call() for call in calls), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _stop(thread: ThreadPoolExecutor, loop: asyncio.AbstractEventLoop) -> None:
    thread.shutdown(wait=True)
    loop.close()


def _as_reward_function(
    func: RewardFunc,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
    model_init_kwargs: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    if isinstance(func, str):
        func = AutoModelForSequenceClassification.from_pretrained(func, num_labels=1, **(model_init_kwargs or {}))
    if isinstance(func, nn.Module):
        return _RewardModel(func, tokenizer, device)
    return func


def _name(func: RewardFunc) -> str:
    if isinstance(func, nn.Module):
        func = func.config._name_or_path
    if isinstance(func, str):
        return func.rstrip("/").split("/")[-1]
    if not callable(func):
        raise TypeError(
            f"reward_funcs contains {func!r}: give a callable, a sequence-classification model, or a path to one."
        )
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, "__name__", type(func).__name__)


def _distinct(names: list[str]) -> list[str]:
    """Number the names that came before: `a, b, a` becomes `a, b, a_2`."""
    distinct: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in distinct:
            number += 1
            candidate = f"{name}_{number}"
        distinct.append(candidate)
    return distinct


def _is_coroutine_function(func: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None))  # noqa: B004


def _checked(name: str, result: Any, expected: int) -> list[float]:
    """The rewards of one function as floats, NaN for `None`; raises where one cannot be trained on."""
    if hasattr(result, "tolist"):  # a tensor or an array
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise TypeError(
            f"Reward function {name!r} returned {type(result).__name__}: it must return a list with one reward for "
            "each completion."
        )
    if len(result) != expected:
        raise ValueError(
            f"Reward function {name!r} returned {len(result)} rewards for {expected} completions: it must return one "
            "for each."
        )
    rewards = []
    for index, reward in enumerate(result):
        if reward is None:
            rewards.append(math.nan)
            continue
        if not hasattr(reward, "__float__"):
            raise TypeError(
                f"Reward function {name!r} returned {reward!r} for completion {index}: a reward is a number, or None "
                "to leave the function out for that completion."
            )
        if not math.isfinite(reward):
            raise ValueError(
                f"Reward function {name!r} returned {float(reward)} for completion {index}: rewards must be finite. "
                "Return None to leave the function out for that completion."
            )
        rewards.append(float(reward))
    return rewards


def _warn_of_unrewarded(rewards: list[list[float]], names: list[str]) -> None:
    unrewarded = [index for index, row in enumerate(zip(*rewards, strict=True)) if all(map(math.isnan, row))]
    if unrewarded:
        logger.warning(
            "No reward function (%s) rewarded %d of %d completions (the first is %d): they count as reward 0. Let one "
            "function return a number for every completion.",
            ", ".join(names),
            len(unrewarded),
            len(rewards[0]),
            unrewarded[0],
        )
