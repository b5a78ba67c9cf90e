"""Exceptions by name."""

from __future__ import annotations

from importlib import import_module


class NoException(BaseException):
    """As a producer's library might raise it."""


def make(name: str) -> BaseException:
    module, _, attribute = name.rpartition(".")
    kind = getattr(import_module(module), attribute)
    for arguments in (
        *((), ("x",), ("x", [ValueError()]), ("x", "x", 0), ("x", 0, 1, "x")),
        *(("utf-8", b"x", 0, 1, "x"), ("utf-8", "x", 0, 1, "x")),
    ):
        try:
            error: BaseException = kind(*arguments)
        except TypeError:
            continue
        return error
    raise AssertionError(f"{name} takes other arguments")
