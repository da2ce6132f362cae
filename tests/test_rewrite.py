from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from trl.generation import AdapterModule
from trl.generation import rewrite as rewrite_module
from trl.generation.merged_weights import delta_factors, merge_error
from trl.generation.rewrite import Rewrite, relative_error, rewrite


def weights(rows=37, columns=23, rank=5, dtype=torch.bfloat16, size=1.0, seed=0):
    """`base`, `A` and `B`, whose product times 2 has about `size` of the magnitude of the base."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(rows, columns, generator=generator).to(dtype)
    lora_a = torch.randn(rank, columns, generator=generator)
    lora_b = torch.randn(rows, rank, generator=generator) * size / (2 * rank**0.5)
    return base, lora_a, lora_b


def rewrite_one(out, base, lora_a, lora_b, scaling=1.0):
    return rewrite([Rewrite(out, base, lora_b * scaling, lora_a)], base.dtype)


def expected(base, lora_a, lora_b, scaling=2.0):
    return base.double() + scaling * lora_b.double() @ lora_a.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("elements_at_a_time", [1, 100, 2**22])
def test_rewritten_weights_are_the_sum_rounded_once(monkeypatch, dtype, elements_at_a_time):
    monkeypatch.setattr(rewrite_module, "ELEMENTS_AT_A_TIME", elements_at_a_time)
    base, lora_a, lora_b = weights(dtype=dtype)
    out = torch.full_like(base, torch.nan)
    sums = rewrite_one(out, base, lora_a, lora_b, 2.0)
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
    assert low < relative_error(rewrite_one(None, base, lora_a, lora_b, 2.0)) < high


def test_a_thousand_rewrites_are_as_good_as_one():
    base, _, _ = weights()
    pristine, served, fresh = base.clone(), base.clone(), base.clone()
    for step in range(1000):
        _, lora_a, lora_b = weights(seed=step)
        rewrite_one(served, base, lora_a, lora_b)
    rewrite_one(fresh, base, lora_a, lora_b)
    assert torch.equal(served, fresh)
    assert torch.equal(base, pristine)


def test_weights_may_be_rewritten_in_place():
    base, lora_a, lora_b = weights()
    out = torch.empty_like(base)
    rewrite_one(out, base, lora_a, lora_b)
    rewrite_one(base, base, lora_a, lora_b)
    assert torch.equal(out, base)


def test_no_delta_has_no_error():
    base, lora_a, lora_b = weights()
    out = torch.empty_like(base)
    assert relative_error(rewrite_one(out, base, lora_a, torch.zeros_like(lora_b))) == 0.0
    assert torch.equal(out, base)


def test_weights_of_another_dtype_are_rounded_first():
    base, lora_a, lora_b = weights(dtype=torch.float32)
    out, expected_out = torch.empty(37, 23, dtype=torch.bfloat16), torch.empty(37, 23, dtype=torch.bfloat16)
    sums = rewrite([Rewrite(out, base, lora_b, lora_a)], torch.bfloat16)
    assert torch.equal(sums, rewrite_one(expected_out, base.bfloat16(), lora_a, lora_b))
    assert torch.equal(out, expected_out)


def test_delta_of_an_embedding_has_a_row_for_each_token():
    lora_a, lora_b = torch.randn(3, 8), torch.randn(8, 3)  # 8 tokens, 8 dimensions: shapes do not tell
    adapter = {
        "embed_tokens": AdapterModule(lora_a, lora_b, 2.0, is_embedding=True),
        "q_proj": AdapterModule(lora_a, lora_b, 2.0),
    }
    deltas = {name: left @ right for name, (left, right) in delta_factors(adapter).items()}
    torch.testing.assert_close(deltas["embed_tokens"], 2 * (lora_b @ lora_a).T)
    torch.testing.assert_close(deltas["q_proj"], 2 * lora_b @ lora_a)


def test_kernel_for_the_gpu_computes_the_same():
    """Without a GPU by Triton's interpreter, which has to be chosen before Triton is imported."""
    pytest.importorskip("triton")
    script = """
        import torch
        from tests.test_rewrite import weights
        from trl.generation.rewrite import Rewrite, _rewrite_by_rows, _rewrite_on_gpu

        device = "cuda" if torch.cuda.is_available() else "cpu"
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            by_rows, on_gpu = [], []
            # The first can be read and written with the widest loads and stores.
            for rows, columns, rank in ((64, 256, 16), (130, 300, 5), (30, 20, 40)):
                base, right, left = (each.to(device) for each in weights(rows, columns, rank, dtype))
                wide = torch.zeros(rows, 512, dtype=dtype, device=device)
                base = wide[:, 64 : 64 + columns].copy_(base)  # rows that do not follow each other at once
                transposed = right.T.contiguous().T  # as the factors of an embedding are
                by_rows.append(Rewrite(torch.empty_like(base), base, left, right))
                on_gpu.append(Rewrite(torch.empty_like(base), base, left, transposed))
            before = [weight.base.clone() for weight in on_gpu]
            sums = torch.stack([_rewrite_by_rows(weight, dtype) for weight in by_rows]).sum(dim=0)
            kernel_sums = _rewrite_on_gpu(on_gpu, dtype)
            torch.testing.assert_close(kernel_sums[1], sums[1], rtol=1e-5, atol=0)
            for ours, theirs in zip(on_gpu, by_rows):
                torch.testing.assert_close(ours.out, theirs.out, rtol=torch.finfo(dtype).eps, atol=1e-6)
                # The interpreter rounds bfloat16 to zero; a GPU does not.
                if dtype == torch.float16 or (dtype == torch.bfloat16 and device == "cuda"):
                    assert (ours.out == theirs.out).double().mean() > 0.999
                    torch.testing.assert_close(kernel_sums[0], sums[0], rtol=1e-3, atol=0)
            only_error = [weight._replace(out=None) for weight in on_gpu]
            torch.testing.assert_close(_rewrite_on_gpu(only_error, dtype), kernel_sums)
            assert all(torch.equal(weight.base, old) for weight, old in zip(on_gpu, before))
    """
    environment = dict(os.environ) if torch.cuda.is_available() else {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()


def test_error_is_estimated_from_some_modules():
    base, adapter = {}, {}
    for index in range(60):
        weight, lora_a, lora_b = weights(64, 48, size=0.005, seed=index)
        base[f"{index}"], adapter[f"{index}"] = weight, AdapterModule(lora_a, lora_b, 2.0)
    exact = relative_error(torch.stack([rewrite_one(None, base[name], *adapter[name][:3]) for name in base]))
    assert merge_error(adapter, base, torch.bfloat16) == pytest.approx(exact)
    estimate = merge_error(adapter, base, torch.bfloat16, num_modules=16)
    assert estimate == merge_error(adapter, base, torch.bfloat16, num_modules=16)
    assert estimate != exact
    assert estimate == pytest.approx(exact, rel=0.1)
