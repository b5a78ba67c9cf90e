"""Optional packages, and a clear error if they are missing."""

from __future__ import annotations

from importlib.util import find_spec

from llorch_worker.contract.command_errors import EXTRA_OF_MODULE, MissingExtra


def missing_modules(extra: str) -> list[str]:
    """The modules of ``extra`` that are not installed. Imports none of them."""
    return [
        module
        for module, its_extra in EXTRA_OF_MODULE.items()
        if its_extra == extra and find_spec(module) is None
    ]


def require(extra: str) -> None:
    """Raise :class:`MissingExtra` unless every module of ``extra`` is installed."""
    if missing_modules(extra):
        raise MissingExtra(extra)
