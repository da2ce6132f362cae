from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys

import pytest

import trl


LAZY_PACKAGES = ["trl", "trl.trainer", "trl.scripts"]


def type_checking_imports(module) -> set[str]:
    """Names imported under `if TYPE_CHECKING:`."""
    tree = ast.parse(inspect.getsource(module))
    blocks = [
        node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    imports = [node for block in blocks for node in block.body]
    return {alias.name for node in imports for alias in node.names}


def test_import_loads_no_heavy_library():
    code = "import sys, trl, trl.trainer; print({'torch', 'transformers', 'vllm', 'peft'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
    assert result.stderr == ""


def test_trainer_needs_no_vllm():
    code = "import sys; from trl import GRPOConfig, GRPOTrainer, TrlParser; print('vllm' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


@pytest.mark.parametrize("package", LAZY_PACKAGES)
def test_public_names_exist(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        assert inspect.ismodule(value) or value.__name__ == name


@pytest.mark.parametrize("package", LAZY_PACKAGES)
def test_public_names_are_listed_once_for_python_and_once_for_type_checkers(package):
    module = importlib.import_module(package)
    assert set(module.__all__) == set(module._MODULES) == type_checking_imports(module)
    assert set(module.__all__) <= set(dir(module))


def test_unknown_name():
    with pytest.raises(AttributeError, match="'trl' has no attribute 'NoSuchTrainer'"):
        trl.NoSuchTrainer  # noqa: B018
    with pytest.raises(ImportError):
        from trl import NoSuchTrainer  # noqa: F401
