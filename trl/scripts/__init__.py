"""What `trl` commands run, and what a training script needs besides a trainer."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names


_MODULES = {
    "ScriptArguments": ".utils",
    "TrlParser": ".utils",
    "get_dataset": ".utils",
}

if TYPE_CHECKING:
    from .utils import ScriptArguments, TrlParser, get_dataset

__all__ = [
    "ScriptArguments",
    "TrlParser",
    "get_dataset",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
