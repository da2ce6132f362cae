from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from trl.generation import AdapterModule
from trl.generation import rewrite as rewrite_module
from trl.generation.merged_weights import merge_error
from trl.generation.rewrite import relative_error, rewrite


def weights(rows=37, columns=23, rank=5, dtype=torch.bfloat16, size=1.0, seed=0):
    """`base`, `A` and `B`, whose product times 2 has about `size` of the magnitude of the base."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(rows, columns, generator=generator).to(dtype)
    lora_a = torch.randn(rank, columns, generator=generator)
    lora_b = torch.randn(rows, rank, generator=generator) * size / (2 * rank**0.5)
    return base, lora_a, lora_b


def expected(base, lora_a, lora_b, scaling=2.0):
    return base.double() + scaling * lora_b.double() @ lora_a.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows_at_a_time", [1, 100, 2**22])
def test_rewritten_weights_are_the_sum_rounded_once(monkeypatch, dtype, rows_at_a_time):
    monkeypatch.setattr(rewrite_module, "ROWS_AT_A_TIME", rows_at_a_time)
    base, lora_a, lora_b = weights(dtype=dtype)
    out = torch.full_like(base, torch.nan)
    sums = rewrite(out, base, lora_a, lora_b, 2.0)
    exact = expected(base, lora_a, lora_b)
    if dtype == torch.float32:
        torch.testing.assert_close(out, exact.float())
    else:
        unit = torch.finfo(dtype).eps * exact.abs()
        assert ((out.double() - exact).abs() <= 0.51 * unit + 1e-6).all()
    delta = exact - base.double()
    error = (out.double() - exact).norm() / delta.norm()
    assert relative_error(sums) == pytest.approx(error.item(), rel=1e-2, abs=1e-7)


@pytest.mark.parametrize(("size", "low", "high"), [(0.0007, 0.8, 1.1), (0.007, 0.15, 0.4), (0.07, 0.01, 0.05)])
def test_rounding_loses_most_of_a_small_delta(size, low, high):
    base, lora_a, lora_b = weights(400, 300, size=size)
    assert low < relative_error(rewrite(None, base, lora_a, lora_b, 2.0)) < high


def test_a_thousand_rewrites_are_as_good_as_one():
    base, _, _ = weights()
    pristine, served, fresh = base.clone(), base.clone(), base.clone()
    for step in range(1000):
        _, lora_a, lora_b = weights(seed=step)
        rewrite(served, base, lora_a, lora_b)
    rewrite(fresh, base, lora_a, lora_b)
    assert torch.equal(served, fresh)
    assert torch.equal(base, pristine)


def test_weights_may_be_rewritten_in_place():
    base, lora_a, lora_b = weights()
    out = torch.empty_like(base)
    rewrite(out, base, lora_a, lora_b)
    rewrite(base, base, lora_a, lora_b)
    assert torch.equal(out, base)


def test_no_delta_has_no_error():
    base, lora_a, lora_b = weights()
    out = torch.empty_like(base)
    assert relative_error(rewrite(out, base, lora_a, torch.zeros_like(lora_b))) == 0.0
    assert torch.equal(out, base)


def test_kernel_for_the_gpu_computes_the_same():
    """Without a GPU by Triton's interpreter, which has to be chosen before Triton is imported."""
    pytest.importorskip("triton")
    script = """
        import torch
        from tests.test_rewrite import weights
        from trl.generation.rewrite import _rewrite_by_rows, _rewrite_on_gpu, rewrite

        device = "cuda" if torch.cuda.is_available() else "cpu"
        for rank, dtype in ((5, torch.bfloat16), (16, torch.float32), (40, torch.float16)):
            base, lora_a, lora_b = (each.to(device) for each in weights(130, 300, rank, dtype))
            wide = torch.zeros(130, 512, dtype=dtype, device=device)
            base = wide[:, 100:400].copy_(base)  # rows that do not follow each other at once
            by_rows, on_gpu = torch.empty_like(base), torch.empty_like(base)
            sums = _rewrite_by_rows(by_rows, base, lora_a, lora_b)
            kernel_sums = _rewrite_on_gpu(on_gpu, base, lora_a, lora_b)
            torch.testing.assert_close(on_gpu, by_rows, rtol=torch.finfo(dtype).eps, atol=1e-6)
            torch.testing.assert_close(kernel_sums[1], sums[1], rtol=1e-5, atol=0)
            # The interpreter rounds bfloat16 to zero; a GPU does not.
            if dtype == torch.float16 or (dtype == torch.bfloat16 and device == "cuda"):
                assert (on_gpu == by_rows).double().mean() > 0.999
                torch.testing.assert_close(kernel_sums[0], sums[0], rtol=1e-3, atol=0)
            before = base.clone()
            torch.testing.assert_close(_rewrite_on_gpu(None, base, lora_a, lora_b), kernel_sums)
            assert torch.equal(base, before)

        # Factors of an embedding come transposed.
        rewrite.__globals__["_rewrite_by_rows"] = _rewrite_on_gpu  # as on a GPU
        rewrite(on_gpu, base, lora_a.T.contiguous().T, lora_b.T.contiguous().T)
        torch.testing.assert_close(on_gpu, by_rows, rtol=torch.finfo(dtype).eps, atol=1e-6)
    """
    environment = dict(os.environ) if torch.cuda.is_available() else {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()


def test_error_is_estimated_from_some_modules():
    base, adapter = {}, {}
    for index in range(60):
        weight, lora_a, lora_b = weights(64, 48, size=0.005, seed=index)
        base[f"{index}"], adapter[f"{index}"] = weight, AdapterModule(lora_a, lora_b, 2.0)
    exact = relative_error(torch.stack([rewrite(None, base[name], *adapter[name]) for name in base]))
    assert merge_error(adapter, base, torch.bfloat16) == pytest.approx(exact)
    estimate = merge_error(adapter, base, torch.bfloat16, num_modules=16)
    assert estimate == merge_error(adapter, base, torch.bfloat16, num_modules=16)
    assert estimate != exact
    assert estimate == pytest.approx(exact, rel=0.1)
