"""The peers, and whether they are installed on this machine."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from benches.peers.contestants.contestant import (
    LLAMA_CPP,
    TRANSFORMERS,
    TRANSFORMERS_CB,
    CannotRun,
)

LLAMA_SERVER: Final = "llama-server"
STOCK_CELERY: Final = "stock-celery"
BATCH_PEERS: Final = (LLAMA_CPP, TRANSFORMERS, TRANSFORMERS_CB)
JOB_PEERS: Final = (LLAMA_SERVER, STOCK_CELERY)
PEERS: Final = (*BATCH_PEERS, *JOB_PEERS)
_MODULES: Final = {
    LLAMA_CPP: ("llama_cpp", "llama-cpp-python"),
    TRANSFORMERS: ("transformers", "transformers"),
    TRANSFORMERS_CB: ("transformers", "transformers"),
    STOCK_CELERY: ("transformers", "transformers"),
}
"""The module that a peer needs, and the package that installs it."""


def require_installed(peer: str) -> None:
    """Raises :class:`CannotRun` if the module that ``peer`` needs is missing."""
    module, package = _MODULES[peer]
    if find_spec(module) is None:
        raise CannotRun(f"it is not installed: pip install {package}")


def llama_server(given: Path | None) -> Path:
    """The ``given`` llama-server binary, else that on the PATH; raises :class:`CannotRun`."""
    binary = given or shutil.which(LLAMA_SERVER)
    if binary is None or not Path(binary).is_file():
        where = "on the PATH" if binary is None else f"at {binary}"
        raise CannotRun(f"not found {where}; give --llama-server PATH")
    return Path(binary)
