"""The peers, and whether they are installed on this machine."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from benches.peers.contestants.contestant import (
    LLAMA_CPP,
    TRANSFORMERS,
    CannotRun,
)
from llorch_worker.engine_options import KvDtype

LLAMA_SERVER: Final = "llama-server"
BATCH_PEERS: Final = (LLAMA_CPP, TRANSFORMERS)
PEERS: Final = (*BATCH_PEERS, LLAMA_SERVER)
_MODULES: Final = {
    LLAMA_CPP: ("llama_cpp", "llama-cpp-python"),
    TRANSFORMERS: ("transformers", "transformers"),
}
"""The module that a peer needs, and the package that installs it."""

_KV_DTYPES: Final[dict[str, tuple[KvDtype, ...]]] = {
    LLAMA_CPP: ("auto", "int8"),
    LLAMA_SERVER: ("auto", "int8"),
}
"""What peers can keep keys and values in; the others have no choice. llama.cpp's int8 is q8_0, with
a scale for 32 numbers."""


def require_kv_dtype(peer: str, kv_dtype: KvDtype) -> None:
    """Raises :class:`CannotRun` if ``peer`` cannot keep keys and values so."""
    if kv_dtype not in _KV_DTYPES.get(peer, ("auto",)):
        raise CannotRun(f"it has no KV cache in {kv_dtype}")


def require_installed(peer: str) -> None:
    """Raises :class:`CannotRun` if the module that ``peer`` needs is missing."""
    module, package = _MODULES[peer]
    if find_spec(module) is None:
        raise CannotRun(f"it is not installed: pip install {package}")


def server_binary(given: Path | None) -> Path:
    """The ``given`` llama-server binary, else that on the PATH; raises :class:`CannotRun`."""
    binary = given or shutil.which(LLAMA_SERVER)
    if binary is None or not Path(binary).is_file():
        where = "on the PATH" if binary is None else f"at {binary}"
        raise CannotRun(f"not found {where}; give --llama-server PATH")
    return Path(binary)
