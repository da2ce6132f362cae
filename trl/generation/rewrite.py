"""Weights with the adapter in them, made from pristine ones: `W = W0 + scaling * B @ A`.

One pass: `W0` is read once, the delta is formed in float32 and never written, the sum is rounded once. So a rewrite
depends on nothing but its arguments, and after a thousand of them the weights are those of the first.

Rounding is what merging costs. In bfloat16 a weight moves only if the delta is above half a unit in its last place, so
of a small adapter most is lost. How much is returned with every rewrite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


ELEMENTS_AT_A_TIME = 2**22
"""Elements of a weight that the portable implementation works on at a time."""


class Rewrite(NamedTuple):
    """One weight and what to make of it: `out = base + left @ right`.

    Attributes:
        out (`torch.Tensor` or `None`): `[rows, columns]`; may be `base` itself. `None` to learn the error only.
        base (`torch.Tensor`): `[rows, columns]`, of any floating dtype.
        left (`torch.Tensor`): `[rows, rank]`, in float32, the adapter's scaling in it.
        right (`torch.Tensor`): `[rank, columns]`, in float32.
    """

    out: torch.Tensor | None
    base: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor


@torch.no_grad()
def rewrite(weights: Sequence[Rewrite], dtype: torch.dtype) -> torch.Tensor:
    """Make all of these weights. On a GPU that is one kernel for all of them.

    Args:
        weights (`Sequence[Rewrite]`): On one device. Either all have an `out` or none has.
        dtype (`torch.dtype`): That of every `out`. A `base` of another is rounded to it first: that is what an engine
            of this dtype serves without the adapter.

    Returns:
        `torch.Tensor`: `[2]`, in float64, on the device: the sum of squares of what rounding took away from the deltas
        or added to them, and that of the deltas. See [`relative_error`].
    """
    if not weights:
        return torch.zeros(2, dtype=torch.float64)
    if weights[0].base.device.type == "cuda":
        return _rewrite_on_gpu(weights, dtype)
    return torch.stack([_rewrite_by_rows(weight, dtype) for weight in weights]).sum(dim=0)


def relative_error(sums: torch.Tensor) -> float:
    """`||W - W0 - delta|| / ||delta||` from the sums of one or many rewrites, `[..., 2]`; zero for no delta at all."""
    missed, delta = sums.reshape(-1, 2).sum(dim=0).tolist()
    return (missed / delta) ** 0.5 if delta > 0 else 0.0


def _rewrite_by_rows(weight: Rewrite, dtype: torch.dtype) -> torch.Tensor:
    out, base, left, right = weight
    sums = torch.zeros(2, dtype=torch.float64, device=base.device)
    step = max(1, ELEMENTS_AT_A_TIME // base.shape[1])
    for start in range(0, base.shape[0], step):
        rows = slice(start, start + step)
        pristine = base[rows].to(dtype).float()
        delta = left[rows] @ right
        rounded = (pristine + delta).to(dtype)
        missed = rounded.float() - pristine - delta
        sums += torch.stack([missed.square().sum(dtype=torch.float64), delta.square().sum(dtype=torch.float64)])
        if out is not None:
            out[rows] = rounded
    return sums


def _rewrite_on_gpu(weights: Sequence[Rewrite], dtype: torch.dtype) -> torch.Tensor:
    from .rewrite_kernel import rewrite_blocks  # imports Triton, which is there where there is a GPU for it

    return rewrite_blocks(weights, dtype)
