"""A real Sentinel."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services import (
    LOCALHOST,
    STOP_TIMEOUT_S,
    RedisServer,
    answers,
    free_port,
    redis_binaries,
    tethered,
    wait_until,
)

PASSWORD = "swordfish"
"""Of the Redis that the Sentinel watches."""


@contextmanager
def sentinel(folder: Path, master: RedisServer) -> Iterator[int]:
    """Runs a Sentinel that watches ``master``, and yields its port.

    It knows the replicas that the master has now; it learns of later ones after 10 s.
    """
    port = free_port()
    settings = folder / f"sentinel-{port}.conf"
    settings.write_text(
        f"port {port}\nbind {LOCALHOST}\ndir {folder}\nlogfile {folder}/sentinel-{port}.log\n"
        f"sentinel monitor jobs {LOCALHOST} {master.port} 1\n"
        f"sentinel auth-pass jobs {PASSWORD}\n"
    )
    command = tethered(str(redis_binaries()[0]), str(settings), "--sentinel")
    process = subprocess.Popen(command, start_new_session=True)
    try:
        wait_until(lambda: answers(port), what="the Sentinel")
        yield port
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
