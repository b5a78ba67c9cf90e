"""The process of a contestant: ``python -m benches.peers.contestants.server NAME FD``."""

from __future__ import annotations

import sys
from importlib import import_module
from multiprocessing.connection import Connection

from benches.peers.contestants.contestant import (
    LLAMA_CPP,
    LLORCH,
    TRANSFORMERS,
    Failed,
    Terms,
    WarmUp,
    Work,
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
            match connection.recv():
                case WarmUp(work):
                    contestant.warm_up(work)
                    connection.send(None)
                case Work() as work:
                    connection.send(contestant.run(work))
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - any error of a library is reported in its row
        text = " ".join(str(error).split())[:MOST_SHOWN_CHARS]
        connection.send(Failed(f"{type(error).__name__}: {text}" if text else type(error).__name__))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[2])), sys.argv[1])
