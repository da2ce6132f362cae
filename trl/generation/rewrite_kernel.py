"""The Triton kernel behind [`~trl.generation.rewrite.rewrite`]. Each weight is read once and written once.

All weights of a model are made by one launch: a model has hundreds, and starting a kernel takes the host longer than
the kernel takes for a small weight. So the kernel gets a table of addresses and shapes, one row for each weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from .rewrite import Rewrite


BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_RANK, WARPS = 64, 128, 16, 4
ALIGNMENT = 16
"""Bytes that addresses and rows have to be a multiple of for the widest loads and stores."""


def rewrite_blocks(weights: Sequence[Rewrite], dtype: torch.dtype) -> torch.Tensor:
    """As `rewrite`, for weights on a GPU."""
    weights = [weight._replace(left=weight.left.contiguous(), right=weight.right.contiguous()) for weight in weights]
    groups: dict[tuple[torch.dtype, bool], list[Rewrite]] = {}
    for weight in weights:
        groups.setdefault((weight.base.dtype, _is_aligned(weight)), []).append(weight)
    sums = [_launch(group, dtype, aligned) for (_, aligned), group in groups.items()]
    return torch.cat(sums).sum(dim=0, dtype=torch.float64)


def _is_aligned(weight: Rewrite) -> bool:
    tensors = [tensor for tensor in weight if tensor is not None]
    return all(
        number % ALIGNMENT == 0
        for tensor in tensors
        for number in (tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), tensor.shape[1])
        if tensor is not weight.left  # is read by columns
    )


def _launch(weights: Sequence[Rewrite], dtype: torch.dtype, aligned: bool) -> torch.Tensor:
    device = weights[0].base.device
    counts = [-(-weight.base.shape[0] // BLOCK_ROWS) * -(-weight.base.shape[1] // BLOCK_COLUMNS) for weight in weights]
    firsts = [0, *accumulate(counts)]
    table = _to_device([_row(weight, first) for weight, first in zip(weights, firsts, strict=False)], device)
    weight_of_block = torch.repeat_interleave(_to_device(counts, device), output_size=firsts[-1])
    # A sum for each block and one addition at the end, so that the result does not depend on which block was first.
    sums = torch.empty((firsts[-1], 2), dtype=torch.float32, device=device)
    store = weights[0].out is not None
    _rewrite_block[(firsts[-1],)](
        table, weight_of_block, sums, weights[0].base, torch.empty(0, dtype=dtype, device=device),
        STORE=store, ALIGNMENT=ALIGNMENT if aligned else 1,
        ROWS=BLOCK_ROWS, COLUMNS=BLOCK_COLUMNS, RANK=BLOCK_RANK, num_warps=WARPS,
    )  # fmt: skip
    return sums


def _row(weight: Rewrite, first_block: int) -> tuple[int, ...]:
    out = weight.base if weight.out is None else weight.out
    rows, columns = weight.base.shape
    return (
        out.data_ptr(), weight.base.data_ptr(), weight.left.data_ptr(), weight.right.data_ptr(),
        out.stride(0), weight.base.stride(0), rows, columns, weight.right.shape[0], first_block,
    )  # fmt: skip


def _to_device(numbers: Iterable[int | tuple[int, ...]], device: torch.device) -> torch.Tensor:
    pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


@triton.jit
def _rewrite_block(
    table, weight_of_block, sums, any_base, any_out,
    STORE: tl.constexpr, ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    entry = table + 10 * tl.load(weight_of_block + block)
    out = tl.multiple_of(tl.load(entry).to(any_out.dtype), ALIGNMENT)
    base = tl.multiple_of(tl.load(entry + 1).to(any_base.dtype), ALIGNMENT)
    left = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    right = tl.multiple_of(tl.load(entry + 3).to(tl.pointer_type(tl.float32)), ALIGNMENT)
    out_stride = tl.multiple_of(tl.load(entry + 4), ALIGNMENT)
    base_stride = tl.multiple_of(tl.load(entry + 5), ALIGNMENT)
    rows = tl.load(entry + 6)
    columns = tl.multiple_of(tl.load(entry + 7), ALIGNMENT)
    rank = tl.load(entry + 8)
    block_of_weight = block - tl.load(entry + 9)
    blocks_across = tl.cdiv(columns, COLUMNS)

    # In 64 bits, as the table is: a weight may have more than 2**31 elements.
    row = (block_of_weight // blocks_across) * ROWS + tl.arange(0, ROWS)
    column = (block_of_weight % blocks_across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    held = tl.load(base + row[:, None] * base_stride + column[None, :], mask=inside, other=0.0)
    pristine = held.to(any_out.dtype.element_ty).to(tl.float32)
    delta = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, rank, RANK):
        index = start + tl.arange(0, RANK)
        b = tl.load(
            left + row[:, None] * rank + index[None, :],
            mask=(row < rows)[:, None] & (index < rank)[None, :],
            other=0.0,
        )
        a = tl.load(
            right + index[:, None] * columns + column[None, :],
            mask=(index < rank)[:, None] & (column < columns)[None, :],
            other=0.0,
        )
        # Three products of tensor cores, which together are as exact as one in float32.
        delta += tl.dot(b, a, input_precision="tf32x3")
    rounded = (pristine + delta).to(any_out.dtype.element_ty)
    if STORE:
        tl.store(out + row[:, None] * out_stride + column[None, :], rounded, mask=inside)
    missed = rounded.to(tl.float32) - pristine - delta
    tl.store(sums + 2 * block, tl.sum(missed * missed))
    tl.store(sums + 2 * block + 1, tl.sum(delta * delta))
