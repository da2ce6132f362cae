from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from .testing_utils import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The tiny byte-level tokenizer; shared, so do not change it (make your own with `make_tokenizer()`)."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids of six prompts, two of them longer than a block of vLLM's prefix cache (32)."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 250, (length,), generator=generator).tolist() for length in (3, 7, 20, 33, 40, 70)]


@pytest.fixture
def start_engine():
    """Returns `start(model, **options) -> (engine, sync)` (see `vllm_utils.build_engine`); closes them afterwards."""
    from .vllm_utils import build_engine

    engines = []

    def start(model, **options):
        engine, sync = build_engine(model, **options)
        engines.append(engine)
        return engine, sync

    yield start
    for engine in engines:
        engine.close()
