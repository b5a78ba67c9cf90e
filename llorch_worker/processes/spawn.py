"""Starts a process that ends with this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from llorch_worker.processes import started


def spawn(
    module: str, descriptors: Iterable[int], *, kept: Iterable[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts ``main(*descriptors)`` of ``module`` in a new interpreter, with this one's path.

    The kernel kills the process when this one ends for any reason. It has a session of its own,
    ignores SIGINT, SIGTERM and SIGHUP, prints to this one's stderr, and of the open files gets
    ``descriptors`` and ``kept`` alone. Any thread may call it.
    """
    passed, held = list(descriptors), list(kept)
    # -P: neither the script's folder nor the current one is searched for modules.
    command = [sys.executable, "-P", started.__file__, str(os.getpid()), module]
    command += map(str, passed + held)
    environment = os.environ | {started.PATH_VARIABLE: json.dumps(sys.path)}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=passed + held,
            env=environment,
            start_new_session=True,
        )

    return _spawner().submit(start).result()


def memory_file(name: str) -> int:
    """The descriptor of a new file that is in no folder, to share with another process."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@cache
def _spawner() -> ThreadPoolExecutor:
    # The kernel's signal comes when the thread that started a process ends: this one lasts.
    return ThreadPoolExecutor(1, thread_name_prefix="llorch-spawner")
