"""Docstrings as help: a terminal has its own width."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def flowing(command: Callable[..., Any]) -> str:
    """The command's docstring, each paragraph in one line; typer keeps the line ends of all but
    the first."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
