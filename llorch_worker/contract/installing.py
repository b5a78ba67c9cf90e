"""The command that adds an extra to this installation."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import llorch_worker

NAME = "llorch-worker"


def install_command(extra: str) -> str:
    """A shell command that installs the package again as it was installed here, with ``extra``.

    It names a place and never the package alone: a package index may have another one of that name.
    Where pip noted no place, a checkout of the package must be the working directory.
    """
    return shlex.join([sys.executable, "-m", "pip", "install", *_what(extra)])


def _what(extra: str) -> list[str]:
    """pip's arguments, from the place that it noted in ``direct_url.json`` (PEP 610)."""
    noted = _direct_url()
    if noted is None:
        checkout = Path(llorch_worker.__file__).parents[1]
        is_checkout = (checkout / "pyproject.toml").exists()
        return ["--editable", f"{checkout}[{extra}]"] if is_checkout else [f".[{extra}]"]
    url = urlsplit(noted["url"])
    if "vcs_info" in noted:
        vcs = noted["vcs_info"]
        return [f"{NAME}[{extra}] @ {vcs['vcs']}+{noted['url']}@{vcs['commit_id']}"]
    if url.scheme != "file":
        return [f"{NAME}[{extra}] @ {noted['url']}"]
    place = f"{unquote(url.path)}[{extra}]"
    return ["--editable", place] if noted.get("dir_info", {}).get("editable") else [place]


def _direct_url() -> dict[str, Any] | None:
    try:
        text = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    return None if text is None else json.loads(text)
