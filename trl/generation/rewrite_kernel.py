"""The Triton kernel behind [`~trl.generation.rewrite.rewrite`]. Each weight is read once and written once."""

import torch
import triton
import triton.language as tl


BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_RANK = 64, 128, 16


def rewrite_blocks(
    out: torch.Tensor | None, base: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor
) -> torch.Tensor:
    """As `rewrite`, for factors in float32 that are contiguous, the scaling in `lora_b`."""
    rows, columns = base.shape
    grid = (-(-rows // BLOCK_ROWS), -(-columns // BLOCK_COLUMNS))
    # A sum for each block and one addition at the end, so that the result does not depend on which block was first.
    sums = torch.empty((grid[0] * grid[1], 2), dtype=torch.float32, device=base.device)
    target = base if out is None else out
    _rewrite_block[grid](
        target, base, lora_a, lora_b, sums,
        rows, columns, lora_a.shape[0],
        target.stride(0), base.stride(0),
        STORE=out is not None, ROWS=BLOCK_ROWS, COLUMNS=BLOCK_COLUMNS, RANK=BLOCK_RANK,
    )  # fmt: skip
    return sums.sum(dim=0, dtype=torch.float64)


@triton.jit
def _rewrite_block(
    out, base, lora_a, lora_b, sums,
    rows, columns, rank,
    out_stride, base_stride,
    STORE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    row = row.to(tl.int64)  # a weight may have more than 2**31 elements
    pristine = tl.load(base + row[:, None] * base_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    delta = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, rank, RANK):
        index = start + tl.arange(0, RANK)
        b = tl.load(
            lora_b + row[:, None] * rank + index[None, :],
            mask=(row < rows)[:, None] & (index < rank)[None, :],
            other=0.0,
        )
        a = tl.load(
            lora_a + index[:, None] * columns + column[None, :],
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
