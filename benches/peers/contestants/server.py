"""The process of a contestant: ``python -m benches.peers.contestants.server NAME FD``."""

from __future__ import annotations

import sys
from importlib import import_module
from multiprocessing.connection import Connection

from benches.peers.contestants.contestant import (
    LLAMA_CPP,
    LLORCH,
    TRANSFORMERS,
    CannotRun,
    Terms,
)

ROOM = "benches.peers.contestants"
CLASSES = {
    LLORCH: (f"{ROOM}.llorch", "LlorchContestant"),
    LLAMA_CPP: (f"{ROOM}.llama_cpp", "LlamaCppContestant"),
    TRANSFORMERS: (f"{ROOM}.transformers", "TransformersContestant"),
}
MOST_SHOWN_CHARS = 200


def serve(connection: Connection, name: str) -> None:
    """Receives the terms, loads, then answers until the connection closes."""
    try:
        terms: Terms = connection.recv()
        module, class_name = CLASSES[name]
        contestant = getattr(import_module(module), class_name)(terms)
        connection.send(contestant.ready)
        while True:
            method, work = connection.recv()
            connection.send(getattr(contestant, method)(work))
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - any error of a library is reported in its row
        text = " ".join(str(error).split())[:MOST_SHOWN_CHARS]
        name = type(error).__name__
        connection.send(CannotRun(f"{name}: {text}" if text else name))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[2])), sys.argv[1])
