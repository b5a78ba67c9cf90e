"""The first lines of an intake's own process."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.contract.installing import install_command
from llorch_worker.intake.asking import frame
from llorch_worker.processes.frames import Frames


def main(connection: int, *_: int) -> None:
    """Serves the keeper at the other end of the socket ``connection`` until that closes."""
    # Before libraries are imported: a fork has none of their threads, and no text is traced.
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["RUST_BACKTRACE"] = "0"
    keeper = Frames(socket.socket(fileno=connection))
    with suppress(OSError):  # the keeper is gone
        first = keeper.receive()
        if first is not None:
            try:
                from llorch_worker.intake.desk import serve

                serve(keeper, connection, json.loads(first))
            except ModuleNotFoundError as error:
                lack = f"{error.name} is missing: {install_command('worker')}"
                keeper.send(frame({"error": ModelLoadFailed(lack).args}))
    os._exit(0)
