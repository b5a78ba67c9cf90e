"""Free TCP ports, and a clear error for a port that is taken."""

from __future__ import annotations

import errno
import socket
from http.client import HTTPConnection, HTTPException

from llorch_worker.contract.command_errors import CommandError, usage_error

LOCALHOST = "127.0.0.1"
DEFAULT_FLOWER_PORT = 5555
DEFAULT_GATEWAY_PORT = 8080
DEFAULT_REDIS_PORT = 6379
_TRIED_PORTS = 50
_PROBE_TIMEOUT_S = 3.0


def is_free(port: int) -> bool:
    """Whether a server can listen on ``port`` at this moment."""
    if not 0 < port < 65536:
        raise usage_error(f"{port} is not a port: give a number from 1 to 65535")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((LOCALHOST, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def any_free_port() -> int:
    """A free port, chosen by the system."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
        candidate.bind((LOCALHOST, 0))
        return int(candidate.getsockname()[1])


def next_free(first: int) -> int:
    """The first free port from ``first`` on."""
    for port in range(first, min(first + _TRIED_PORTS, 65536)):
        if is_free(port):
            return port
    return any_free_port()


def choose(wanted: int | None, default: int, option: str) -> int:
    """``wanted`` if it is free, else an error; if None, the first free port from ``default`` on."""
    if wanted is None:
        return next_free(default)
    if not is_free(wanted):
        raise CommandError(
            "PORT_BUSY",
            f"port {wanted} is taken by another program: {remedy_for_taken(option)}",
        )
    return wanted


def remedy_for_taken(option: str) -> str:
    """What to do if the port given with ``option`` is taken."""
    return f"stop that program, give {option} another port, or omit {option} to take a free one"


def redis_answers(port: int) -> bool:
    """Whether a Redis listens on ``port`` of this machine, even if it asks for a password."""
    try:
        with socket.create_connection((LOCALHOST, port), _PROBE_TIMEOUT_S) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith((b"+PONG", b"-NOAUTH", b"-NOPERM", b"-LOADING"))
    except OSError:
        return False


def flower_answers(port: int) -> bool:
    """Whether Flower listens on ``port``."""
    connection = HTTPConnection(LOCALHOST, port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/healthcheck")
        return connection.getresponse().read(16).strip() == b"OK"
    except (HTTPException, OSError):
        return False
    finally:
        connection.close()
