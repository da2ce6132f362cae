"""Log probabilities and entropies of given tokens, without the logits of a whole batch in memory.

Shapes: `B` completions in a micro-batch, `T` tokens in a padded completion, `V` tokens in the vocabulary, `H` hidden
size. The logits of a micro-batch, `[B, T, V]`, are its largest tensor by far: 16 completions of 256 tokens from a
vocabulary of 152,000 take 1.2 GB in bfloat16 and 2.5 GB in float32. Where nothing in the output layer is trained they
are never made: see [`linear_logprobs`].
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..weight_sync.adapter import base_model
from .utils import forward_replaced


if TYPE_CHECKING:
    from .rollouts import MicroBatch


CHUNK_BYTES = 2**28
"""Size of the float32 logits that are made at a time."""


def selective_log_softmax(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log probability of one given token at every position.

    Computed in float32 (float64 for float64 logits) whatever the dtype of the logits, a few positions at a time:
    neither pass holds a float32 copy of all logits, and the only large tensor made is the gradient, in the dtype of
    the logits.

    Args:
        logits (`Tensor`): `[B, T, V]`.
        ids (`Tensor`): `[B, T]`, integer token ids.
        temperature (`float`, defaults to `1.0`): Divides the logits, in float32.

    Returns:
        `Tensor`: `[B, T]`, in nats.
    """
    return _SelectiveLogSoftmax.apply(logits, ids, temperature)


@torch.no_grad()
def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of the distribution over the next token, in nats: `[B, T, V]` to `[B, T]`, in float32.

    For monitoring: no gradient flows through it, so that it costs no memory in the backward pass.
    """
    entropies = torch.empty(logits.shape[:2], dtype=_accumulation_dtype(logits), device=logits.device)
    for chunk in _chunks(logits):
        entropies[chunk] = _entropy(_scaled(logits[chunk], temperature).log_softmax(dim=-1))
    return entropies


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log probabilities of given tokens under a frozen output layer, its logits made a few positions at a time.

    As only the hidden states need a gradient, it is known per position before the loss is: for the token `i`,
    `d logprob / d hidden = (weight[i] - softmax(logits) @ weight) / temperature`. This vector of size `H` is computed
    while the logits are at hand and kept instead of them; the backward pass multiplies it by the gradient of the loss.
    So the work is that of the usual way (two matrix products), and nothing of size `V` outlives a chunk.

    Args:
        hidden (`Tensor`): `[B, T, H]`, what goes into the output layer.
        weight (`Tensor`): `[V, H]`. Gets no gradient.
        bias (`Tensor`, *optional*): `[V]`. Gets no gradient.
        ids (`Tensor`): `[B, T]`, integer token ids.
        temperature (`float`, defaults to `1.0`): Divides the logits, in float32.
        with_entropy (`bool`, defaults to `False`): Compute entropies too, without gradient.

    Returns:
        `tuple[Tensor, Tensor | None]`: Log probabilities and entropies, `[B, T]` each, in nats, in float32 (float64
        for float64 weights).
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    logprobs, entropies = _LinearLogprobs.apply(
        hidden.to(weight.dtype).flatten(0, 1), weight, bias, ids.flatten(), temperature, with_entropy
    )
    return logprobs.view(ids.shape), entropies.view(ids.shape) if with_entropy else None


class _SelectiveLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        selected = torch.empty(ids.shape, dtype=_accumulation_dtype(logits), device=logits.device)
        normalizers = torch.empty_like(selected)
        for chunk in _chunks(logits):
            scaled = _scaled(logits[chunk], temperature)
            normalizers[chunk] = scaled.logsumexp(dim=-1)
            selected[chunk] = scaled.gather(-1, ids[chunk].unsqueeze(-1)).squeeze(-1) - normalizers[chunk]
        ctx.save_for_backward(logits, ids, normalizers)
        ctx.temperature = temperature
        return selected

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_selected: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, normalizers = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for chunk in _chunks(logits):
            probabilities = (_scaled(logits[chunk], ctx.temperature) - normalizers[chunk].unsqueeze(-1)).exp_()
            weight = (grad_selected[chunk] / ctx.temperature).to(probabilities.dtype).unsqueeze(-1)
            grad = probabilities.mul_(-weight).scatter_add_(-1, ids[chunk].unsqueeze(-1), weight)
            grad_logits[chunk] = grad.to(logits.dtype)
        return grad_logits, None, None


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        selected = torch.empty(ids.shape, dtype=_accumulation_dtype(hidden), device=hidden.device)
        entropies = torch.empty_like(selected) if with_entropy else selected.new_empty(0)
        slopes = torch.empty_like(hidden) if hidden.requires_grad else None
        size = max(1, CHUNK_BYTES // (weight.shape[0] * selected.element_size()))
        for start in range(0, len(ids), size):
            chunk = slice(start, start + size)
            index = ids[chunk].unsqueeze(-1)
            logprobs = _scaled(F.linear(hidden[chunk], weight, bias), temperature).log_softmax(dim=-1)
            selected[chunk] = logprobs.gather(-1, index).squeeze(-1)
            if with_entropy:
                entropies[chunk] = _entropy(logprobs)
            if slopes is not None:
                # 1 - p of the token itself is formed before rounding: where p is close to 1 nothing else is left.
                pull = logprobs.exp_().neg_().scatter_add_(-1, index, torch.ones_like(selected[chunk]).unsqueeze(-1))
                slopes[chunk] = pull.div_(temperature).to(weight.dtype) @ weight
        if slopes is not None:
            ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(entropies)
        return selected, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_selected: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return (slopes * grad_selected.unsqueeze(-1)).to(slopes.dtype), None, None, None, None, None


def _entropy(logprobs: Tensor) -> Tensor:
    # A token of probability zero adds nothing, but exp(-inf) * -inf is NaN.
    return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(dim=-1)


def _chunks(logits: Tensor, size: int = 256) -> Iterator[tuple[int, slice]]:
    """Indices of runs of at most `size` positions. Never flattens: `logits[:, :-1]` would be copied."""
    for row in range(logits.shape[0]):
        for start in range(0, logits.shape[1], size):
            yield row, slice(start, start + size)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.to(_accumulation_dtype(logits)) / temperature


def _accumulation_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


# --------------------------------------------------------------------------------------------------------------------
# Completions under a model
# --------------------------------------------------------------------------------------------------------------------


class TokenScorer:
    """Gives the log probabilities of completions under a model.

    What the model can be asked for is found out once: whether it takes positions, whether it can leave out logits that
    are not needed, and whether [`linear_logprobs`] can stand in for its output layer.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model, not wrapped.
        temperature (`float`, defaults to `1.0`): Divides the logits.
        fused (`bool`, defaults to `True`): Use [`linear_logprobs`] where that is possible.

    Attributes:
        head (`nn.Linear` or `None`): The output layer, where [`linear_logprobs`] stands in for it.
    """

    def __init__(self, model: nn.Module, temperature: float = 1.0, fused: bool = True):
        accepted = inspect.signature(type(base_model(model)).forward).parameters
        self.temperature = temperature
        self.takes_positions = "position_ids" in accepted
        self.can_leave_out_logits = "logits_to_keep" in accepted
        self.head = _frozen_head(base_model(model)) if fused else None

    def __call__(
        self, model: nn.Module, batch: MicroBatch, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Score the completions of `batch`.

        Padding has no influence: positions count from the first token of a prompt, where the model takes them.

        Args:
            model (`nn.Module`): The model, wrapped or not.
            batch ([`MicroBatch`]): On the model's device.
            with_entropy (`bool`, defaults to `False`): Compute the entropy as well, without gradient.

        Returns:
            `tuple[Tensor, Tensor | None]`: Log probabilities `[B, T]`, in nats, and entropies `[B, T]`.
        """
        ids = batch.completion_ids
        if self.head is None:
            logits = self._logits(model, batch)
            logprobs = selective_log_softmax(logits, ids, self.temperature)
            return logprobs, entropy_from_logits(logits, self.temperature) if with_entropy else None

        def forward(hidden: Tensor) -> Tensor:
            weight, bias = self.head.weight, self.head.bias
            kept = _before_completion(hidden, ids)
            outputs = linear_logprobs(kept, weight, bias, ids, self.temperature, with_entropy)
            return torch.stack([each for each in outputs if each is not None], dim=-1)

        # What takes the place of logits leaves the model as they do, so that wrappers see it pass.
        with forward_replaced(self.head, forward):
            outputs = self._forward(model, batch)
        return outputs[..., 0], outputs[..., 1] if with_entropy else None

    def _logits(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        return _before_completion(self._forward(model, batch), batch.completion_ids)

    def _forward(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        attention_mask = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1)
        optional = {}
        if self.can_leave_out_logits:
            optional["logits_to_keep"] = batch.completion_ids.shape[1] + 1
        if self.takes_positions:
            optional["position_ids"] = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        return model(
            input_ids=torch.cat([batch.prompt_ids, batch.completion_ids], dim=1),
            attention_mask=attention_mask,
            use_cache=False,
            **optional,
        ).logits


def _before_completion(values: Tensor, completion_ids: Tensor) -> Tensor:
    """The positions that predict the completion: each is the one before a token of it."""
    return values[:, -completion_ids.shape[1] - 1 : -1]


def _frozen_head(model: nn.Module) -> nn.Linear | None:
    """The output layer of a causal language model, if [`linear_logprobs`] can stand in for it; otherwise `None`.

    It can where the layer is a plain linear one of which nothing is trained, and where the model gives out what the
    layer returns as it is. Some models scale or cap their logits: a forward pass of one token finds that out.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or any(parameter.requires_grad for parameter in head.parameters()):
        return None
    device = head.weight.device
    marks = torch.tensor([[[3.0, -700.0]]], device=device)
    was_training = model.training
    model.eval()  # no dropout, which would draw random numbers
    try:
        with torch.no_grad(), forward_replaced(head, lambda hidden: marks):
            logits = model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=device), use_cache=False).logits
    finally:
        model.train(was_training)
    return head if logits.shape == marks.shape and torch.equal(logits.float(), marks) else None
