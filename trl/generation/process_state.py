"""Leaves the process as it was: environment variables, random state and log levels, around code that changes them."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from accelerate.utils import patch_environment


@contextmanager
def private_environment(variables: dict[str, str]) -> Iterator[None]:
    """Run with `variables` set, put `os.environ` back afterwards, and add to `variables` what was set in between."""
    before = dict(os.environ)
    try:
        with patch_environment(**variables):
            try:
                yield
            finally:
                variables.update({name: value for name, value in os.environ.items() if before.get(name) != value})
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def random_state_kept(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Leave the caller's random state as it was, whatever is drawn or seeded inside; inside, start from `seed`."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if seed is not None:
                # vLLM's second model runner draws the seeds of its requests from NumPy.
                torch.manual_seed(seed)
                np.random.seed(seed % 2**32)
                random.seed(seed)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def globals_kept() -> Iterator[None]:
    """Put back what building an engine replaces in the interpreter and in torch.

    Counting frozen objects takes 0.1 s in a large process: this is for building, not for every call.
    """
    hook, path, set_num_threads, frozen = sys.excepthook, list(sys.path), torch.set_num_threads, gc.get_freeze_count()
    try:
        yield
    finally:
        sys.excepthook, torch.set_num_threads = hook, set_num_threads
        sys.path[:] = path
        if frozen == 0:
            gc.unfreeze()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep vLLM's log and its libraries' deprecation warnings off a normal run."""
    logger = logging.getLogger("vllm")
    level = logger.level
    # Setting a level clears the caches of every logger there is, so it is done only where it changes something.
    turn_down = os.environ.get("VLLM_LOGGING_LEVEL") == "ERROR" and level != logging.ERROR
    if turn_down:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if turn_down:
            logger.setLevel(level)


@contextmanager
def vllm_process(variables: dict[str, str]) -> Iterator[None]:
    """Surroundings of every call into vLLM.

    Args:
        variables (`dict[str, str]`): The engine's environment variables. vLLM sets more while it runs: they are added
            to it, so that the next call finds them, and leave `os.environ` with the context.
    """
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        variables.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with ExitStack() as stack:
        stack.enter_context(private_environment(variables))
        import vllm.logger  # noqa: F401  importing it sets the log level, which comes before turning it down

        stack.enter_context(_quiet())
        yield
