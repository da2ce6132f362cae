"""What a rollout engine is: the protocol that the trainer speaks, and the data that passes through it.

Data flows one way: prompt token ids go in, a [`Rollout`] stamped with the version of the policy that sampled it comes
out. A new policy reaches the engine as a [`PolicyUpdate`], and nothing else changes the weights that it samples from.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch


class PolicyMismatchError(RuntimeError):
    """What the engine would sample from is not the policy that was sent. Raised instead of serving it."""


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are sampled. The same meaning in every engine.

    Args:
        max_tokens (`int`): Most tokens in one completion, the stop token included.
        temperature (`float`, defaults to `1.0`): Divides the logits; `0.0` decodes greedily.
        top_p (`float`, defaults to `1.0`): Nucleus mass in `(0, 1]`; `1.0` keeps every token.
        top_k (`int`, defaults to `0`): Keep this many most likely tokens; `0` keeps every token.
        min_p (`float`, *optional*): Drop tokens less likely than this fraction of the most likely one.
        repetition_penalty (`float`, defaults to `1.0`): Above 1 discourages tokens already in prompt or completion.
        stop_token_ids (`tuple[int, ...]`): Token ids that end a completion. The stop token stays in the completion.
        extra (`Mapping[str, Any]`): `generation_kwargs` of the user, handed to the engine's own sampling parameters.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """Completions of one batch of prompts.

    Attributes:
        completion_ids (`list[list[int]]`): Token ids of each completion, in the order of the prompts, without padding.
        logprobs (`list[list[float]]` or `None`): Log probability, in nats, of every completion token under the
            distribution that it was sampled from (after temperature and truncation). `None` where the engine is the
            trainer's own model.
        policy_version (`int`): Version of the policy that sampled them.
    """

    completion_ids: list[list[int]]
    logprobs: list[list[float]] | None
    policy_version: int


class AdapterModule(NamedTuple):
    """One LoRA pair in canonical form: the engine computes `y += B @ (A @ x)`, scaling already folded into `B`.

    Attributes:
        lora_a (`torch.Tensor`): `[rank, in_features]` (`[rank, vocab_size]` for an embedding).
        lora_b (`torch.Tensor`): `[out_features, rank]` (`[embedding_dim, rank]` for an embedding), times `scaling`.
        scaling (`float`): What still has to be multiplied into `lora_b`, in float32, before it is cast. `1.0` once
            folded.
        is_embedding (`bool`): Whether the weight, which has a row for each token, is the transpose of `B @ A`.
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    scaling: float = 1.0
    is_embedding: bool = False


@torch.no_grad()
def fold_scaling(adapter: Mapping[str, AdapterModule]) -> list[torch.Tensor]:
    """`scaling * B` of every module, multiplied in float32, as new tensors in the order of `adapter`."""
    lora_b = [module.lora_b.float() for module in adapter.values()]
    if not lora_b:
        return []
    return list(torch._foreach_mul(lora_b, [module.scaling for module in adapter.values()]))


def adapter_bytes(adapter: Mapping[str, AdapterModule]) -> int:
    """Size of an adapter's factors in the dtype that they have."""
    factors = [factor for module in adapter.values() for factor in (module.lora_a, module.lora_b)]
    return sum(factor.numel() * factor.element_size() for factor in factors)


@dataclass(frozen=True)
class PolicyUpdate:
    """A policy on its way into an engine.

    Attributes:
        version (`int`): Version of the policy that is served once the update is in.
        adapter (`dict[str, AdapterModule]`): Canonical adapter by module name as in the checkpoint; empty where full
            tensors hold all of the policy.
        base (`dict[str, torch.Tensor]`, *optional*): Pristine weights by module name. Where given, the engine serves
            weights that it makes of them and the adapter; otherwise it applies the adapter while it computes. Holds
            every module that shares one of the engine's weights with an adapted one.
        tensors (callable returning an iterator of `(name, tensor)`): Full tensors beside the adapter, by checkpoint
            name, made one at a time each time it is called. `None` where there are none.
    """

    version: int
    adapter: dict[str, AdapterModule] = field(default_factory=dict)
    base: dict[str, torch.Tensor] | None = None
    tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]] | None = None


@dataclass(frozen=True)
class PushReport:
    """What one push did.

    Attributes:
        version (`int`): The version now served.
        num_bytes (`int`): What was handed to the engine, pristine weights not counted.
        seconds (`float`): On the host's clock.
        merge_error (`float`, *optional*): Where the engine merged the adapter: what rounding changed in the delta,
            relative to its norm.
    """

    version: int
    num_bytes: int
    seconds: float
    merge_error: float | None = None


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions from the policy it was last given.

    `policy_version` is the version being served, or `None` when no policy can be served (nothing pushed yet, or a push
    that broke half way); `generate` refuses to run then. `max_model_length` is the most tokens of prompt and
    completion together, `None` for no limit.
    """

    policy_version: int | None
    max_model_length: int | None

    def generate(
        self, prompt_token_ids: Sequence[Sequence[int]], sampling: SamplingConfig, seed: int | None = None
    ) -> Rollout:
        """Sample one completion for each prompt (repeat a prompt for several). `seed` makes the call repeatable."""

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise `ValueError` for options in `sampling.extra` that the engine does not have."""

    def push(self, update: PolicyUpdate) -> PushReport:
        """Serve `update` from now on, or raise and go on serving what was served before."""

    def sleep(self) -> None:
        """Give device memory back until [`wake`]. A no-op for engines that hold none."""

    def wake(self) -> None:
        """Take the memory again. After a sleep that dropped weights `policy_version` is `None` until the next push."""

    def recreate(self) -> None:
        """Build the engine anew, releasing whatever memory the old one held. The next push brings the policy back."""

    def close(self) -> None:
        """Release everything. The engine cannot be used afterwards. May be called twice."""


def check_known(extra: Mapping[str, Any], known: Collection[str], engine: str) -> None:
    """Raise `ValueError` for `generation_kwargs` that are not among the sampling options of an engine."""
    unknown = sorted(set(extra) - set(known))
    if unknown:
        near = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ValueError(
            f"generation_kwargs has {', '.join(map(repr, unknown))}, which {engine} has no sampling option for.{hint}"
        )
