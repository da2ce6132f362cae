"""Weights with the adapter in them, made from pristine ones: `W = W0 + scaling * B @ A`.

One pass: `W0` is read once, the delta is formed in float32 and never written, the sum is rounded once. So a rewrite
depends on nothing but its arguments, and after a thousand of them the weights are those of the first.

Rounding is what merging costs. In bfloat16 a weight moves only if the delta is above half a unit in its last place, so
of a small adapter most is lost. How much is returned with every rewrite.
"""

from __future__ import annotations

from functools import cache
from typing import Any

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
    lora_a, lora_b = lora_a.float(), lora_b.float() * scaling
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
    rows, columns = base.shape
    block_rows, block_columns = 64, 128
    grid = (-(-rows // block_rows), -(-columns // block_columns))
    # A sum for each block and one addition at the end, so that the result does not depend on which block was first.
    sums = torch.empty((grid[0] * grid[1], 2), dtype=torch.float32, device=base.device)
    target = base if out is None else out
    _kernel()[grid](
        target, base, lora_a, lora_b, sums,
        rows, columns, lora_a.shape[0],
        target.stride(0), base.stride(0), lora_a.stride(0), lora_b.stride(0),
        STORE=out is not None, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, BLOCK_RANK=16,
    )  # fmt: skip
    return sums.sum(dim=0, dtype=torch.float64)


@cache
def _kernel() -> Any:
    """The Triton kernel; Triton is imported only where there is a GPU for it."""
    import triton
    import triton.language as tl

    @triton.jit
    def rewrite_block(
        out, base, lora_a, lora_b, sums,
        rows, columns, rank,
        out_stride, base_stride, a_stride, b_stride,
        STORE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        # A weight may have more than 2**31 elements.
        row = row.to(tl.int64)
        pristine = tl.load(base + row[:, None] * base_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        delta = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
        for start in range(0, rank, BLOCK_RANK):
            index = start + tl.arange(0, BLOCK_RANK)
            b = tl.load(
                lora_b + row[:, None] * b_stride + index[None, :],
                mask=(row < rows)[:, None] & (index < rank)[None, :],
                other=0.0,
            )
            a = tl.load(
                lora_a + index[:, None] * a_stride + column[None, :],
                mask=(index < rank)[:, None] & (column < columns)[None, :],
                other=0.0,
            )
            # Three products of tensor cores, which together are as exact as one in float32.
            delta += tl.dot(b, a, input_precision="tf32x3")
        rounded = (pristine + delta).to(base.dtype.element_ty)
        if STORE:
            tl.store(out + row[:, None] * out_stride + column[None, :], rounded, mask=inside)
        missed = rounded.to(tl.float32) - pristine - delta
        block = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(sums + 2 * block, tl.sum(missed * missed))
        tl.store(sums + 2 * block + 1, tl.sum(delta * delta))

    return rewrite_block
