"""The peers, and whether they are installed on this machine."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from benches.peers.contestants.contestant import (
    CTRANSLATE2,
    LLAMA_CPP,
    ONNXRUNTIME,
    OPENVINO,
    TRANSFORMERS,
    TRANSFORMERS_CB,
    VLLM,
    CannotRun,
)
from benches.peers.contestants.process import Interpreter
from llorch_worker.engine_options import KvDtype
from llorch_worker.processors import usable_processors

LLAMA_SERVER: Final = "llama-server"
STOCK_CELERY: Final = "stock-celery"
VENV_PEERS: Final = (OPENVINO, CTRANSLATE2, ONNXRUNTIME, VLLM)
"""Peers with a virtual environment of their own, because their packages exclude ours."""
BATCH_PEERS: Final = (LLAMA_CPP, TRANSFORMERS, TRANSFORMERS_CB, *VENV_PEERS)
JOB_PEERS: Final = (LLAMA_SERVER, STOCK_CELERY)
PEERS: Final = (*BATCH_PEERS, *JOB_PEERS)
_MODULES: Final = {
    LLAMA_CPP: ("llama_cpp", "llama-cpp-python"),
    TRANSFORMERS: ("transformers", "transformers"),
    TRANSFORMERS_CB: ("transformers", "transformers"),
    STOCK_CELERY: ("transformers", "transformers"),
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


def interpreter_of(peer: str, venvs: Path | None, threads: int) -> Interpreter:
    """The Python of ``peer``: ours, or that of the folder ``venvs/peer``.

    Raises:
        CannotRun: the module or the folder that the peer needs is missing.
    """
    if peer not in VENV_PEERS:
        require_installed(peer)
        return Interpreter()
    if venvs is None:
        raise CannotRun("it runs in an environment of its own; give --venvs FOLDER")
    # Not resolved: the link's place is what makes it a virtual environment.
    python = venvs.absolute() / peer / "bin" / "python"
    if not python.is_file():
        raise CannotRun(f"not found: {python}")
    return Interpreter(python, _vllm_variables(python.parents[1], threads) if peer == VLLM else {})


def _vllm_variables(venv: Path, threads: int) -> dict[str, str]:
    """What vLLM's manual advises for CPUs, in one process and without calls to other machines."""
    openmp = venv / "lib" / "libiomp5.so"
    processors = [str(each.number) for each in usable_processors()[:threads]]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(processors) or "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    } | ({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {})


def server_binary(given: Path | None) -> Path:
    """The ``given`` llama-server binary, else that on the PATH; raises :class:`CannotRun`."""
    binary = given or shutil.which(LLAMA_SERVER)
    if binary is None or not Path(binary).is_file():
        where = "on the PATH" if binary is None else f"at {binary}"
        raise CannotRun(f"not found {where}; give --llama-server PATH")
    return Path(binary)
