"""Weights with the adapter in them, made from pristine ones: `W = W0 + scaling * B @ A`.

One pass: `W0` is read once, the delta is formed in float32 and never written, the sum is rounded once. So a rewrite
depends on nothing but its arguments, and after a thousand of them the weights are those of the first.

Rounding is what merging costs. In bfloat16 a weight moves only if the delta is above half a unit in its last place, so
of a small adapter most is lost. How much is returned with every rewrite.
"""

from __future__ import annotations

import torch


ROWS_AT_A_TIME = 2**22
"""Elements of a weight that the portable implementation works on at a time."""


def rewrite(
    out: torch.Tensor | None, base: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float = 1.0
) -> torch.Tensor:
    """Write `base + scaling * lora_b @ lora_a` to `out`.

    Args:
        out (`torch.Tensor`, *optional*): `[out_features, in_features]`, of any floating dtype; may be `base` itself.
            `None` to learn the error only.
        base (`torch.Tensor`): `[out_features, in_features]`, of the dtype of `out`.
        lora_a (`torch.Tensor`): `[rank, in_features]`.
        lora_b (`torch.Tensor`): `[out_features, rank]`.
        scaling (`float`, defaults to `1.0`): Factor of the product.

    Returns:
        `torch.Tensor`: `[2]`, in float64, on the device: the sum of squares of what rounding took away from the delta
        or added to it, and that of the delta. See [`relative_error`].
    """
    lora_a, lora_b = lora_a.float().contiguous(), (lora_b.float() * scaling).contiguous()
    if base.device.type == "cuda":
        return _rewrite_on_gpu(out, base, lora_a, lora_b)
    return _rewrite_by_rows(out, base, lora_a, lora_b)


def relative_error(sums: torch.Tensor) -> float:
    """`||W - W0 - delta|| / ||delta||` from the sums of one or many rewrites, `[..., 2]`; zero for no delta at all."""
    missed, delta = sums.reshape(-1, 2).sum(dim=0).tolist()
    return (missed / delta) ** 0.5 if delta > 0 else 0.0


def _rewrite_by_rows(
    out: torch.Tensor | None, base: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor
) -> torch.Tensor:
    sums = torch.zeros(2, dtype=torch.float64, device=base.device)
    step = max(1, ROWS_AT_A_TIME // base.shape[1])
    for start in range(0, base.shape[0], step):
        rows = slice(start, start + step)
        pristine = base[rows].float()
        delta = lora_b[rows] @ lora_a
        rounded = (pristine + delta).to(base.dtype)
        missed = rounded.float() - pristine - delta
        sums += torch.stack([missed.square().sum(dtype=torch.float64), delta.square().sum(dtype=torch.float64)])
        if out is not None:
            out[rows] = rounded
    return sums


def _rewrite_on_gpu(
    out: torch.Tensor | None, base: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor
) -> torch.Tensor:
    from .rewrite_kernel import rewrite_blocks  # imports Triton, which is there where there is a GPU for it

    return rewrite_blocks(out, base, lora_a, lora_b)
