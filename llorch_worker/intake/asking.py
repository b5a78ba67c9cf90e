"""What crosses between an intake's process and its keeper, and the limits of one request."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from llorch_worker.contract.errors import ERROR_CLASSES, InternalError, LlorchError
from llorch_worker.contract.quantities import human_bytes
from llorch_worker.processes.signals import signal_name

_MIB: Final = 2**20


class Phase(IntEnum):
    """What is being done for a request."""

    READS = 0
    ENCODES = 1
    """Renders the chat template, and encodes the text."""
    COMPILES = 2
    """The grammar."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may take."""

    cpu_s: float = 5.0
    """Processor time."""
    memory_bytes: int = 512 * _MIB
    """Beyond what was loaded before."""
    cpu_s_per_mib: float = 3.0
    """More of it for each MiB that the request has as JSON. SmolLM2's vocabulary takes 0.5 s for
    words, and 2.8 s for the spellings of control tokens."""
    memory_bytes_per_byte: int = 400
    """More of it for each byte. It takes 125 for words, 300 for Chinese, 380 for control tokens."""

    def cpu_s_of(self, request_bytes: int) -> float:
        return self.cpu_s + self.cpu_s_per_mib * request_bytes / _MIB

    def memory_bytes_of(self, request_bytes: int) -> int:
        return self.memory_bytes + self.memory_bytes_per_byte * request_bytes

    def broken(self, code: int, request_bytes: int) -> str:
        """What a request did to the process that it ended, with ``code`` as of ``Popen``."""
        match -code:
            case signal.SIGPROF:
                return f"takes more than {self.cpu_s_of(request_bytes):.3g} s of processor time"
            case signal.SIGALRM:
                return "got too little processor time for minutes"
            case signal.SIGABRT:
                # Libraries in Rust and C++ abort where they get no memory.
                return (
                    f"takes more than {human_bytes(self.memory_bytes_of(request_bytes))} of memory"
                )
            case number if number > 0:
                return f"crashes with {signal_name(number)}"
        return f"crashes with exit code {code}"


def frame(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """A line of JSON, and what it is about."""
    return b"%s\n%s" % (json.dumps(header).encode(), body)


def header_of(frame: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(frame[: frame.index(b"\n")])
    return header


def body_of(frame: bytes) -> bytes:
    return frame[frame.index(b"\n") + 1 :]


def error_of(args: list[Any]) -> LlorchError:
    """The error with these ``args``, in another process."""
    return ERROR_CLASSES.get(args[1], InternalError)(*args)
