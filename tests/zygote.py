"""The processes that a forked worker or gateway starts, its engine and its intake, as forks too.

A worker that :mod:`tests.forks` starts would else have each of them import all anew: torch alone
takes a second. A zygote is forked from the worker before that has a thread, and forks again for
each process that the worker spawns. To the worker they look as spawned ones do: they are its own
children, have a session of their own, begin in ``processes/started.py``, and get the descriptors
that they are passed and no others. What spawns for itself, such as a worker that is ``fresh``,
spawns.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from llorch_worker.processes import spawn, started

_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
"""The number of the system call."""
_CLONE_PARENT = 0x8000
_MOST_BYTES, _MOST_DESCRIPTORS = 2**20, 16


def let_spawned_processes_fork() -> None:
    """From now on :func:`.spawn` of this process, which has one thread, forks."""
    if sys.platform != "linux" or _CLONE is None:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        ours.close()
        _serve(theirs, parent)
    theirs.close()
    spawn.subprocess = SimpleNamespace(  # type: ignore[assignment, attr-defined]
        Popen=_Zygote(ours).popen, DEVNULL=subprocess.DEVNULL
    )


class _Zygote:
    """This process' end of the connection to its zygote."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._asking = threading.Lock()

    def popen(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """As ``subprocess.Popen`` of ``command``, which runs ``started.py``."""
        assert command[:3] == [sys.executable, "-P", started.__file__]
        passed: list[int] = options["pass_fds"]
        request = {
            "arguments": command[2 : -len(passed)],
            "environment": dict(options["env"]),
            "folder": os.getcwd(),
            "processors": sorted(os.sched_getaffinity(0)),
        }
        with self._asking:
            socket.send_fds(self._connection, [json.dumps(request).encode()], passed)
            pid = int(self._connection.recv(_MOST_BYTES))
        if pid < 0:  # to kill that would kill all processes of this user
            raise BlockingIOError(errno.EAGAIN, "the zygote could not fork")
        return _Forked(pid, command)


class _Forked(subprocess.Popen[bytes]):
    """A child that is there already."""

    def __init__(self, pid: int, command: list[str]) -> None:
        self._pid = pid
        super().__init__(command)

    def _execute_child(self, *_: object) -> None:
        self.pid = self._pid
        self._child_created = True


def _serve(connection: socket.socket, parent: int) -> NoReturn:
    """The zygote: forks for each request, until the worker ends."""
    libc = ctypes.PyDLL(None)  # keeps the interpreter's lock, of which the child gets a copy
    libc.prctl(started.PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(0)
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not request:
            os._exit(0)
        # The worker's child, not the zygote's.
        pid = libc.syscall(_CLONE, _CLONE_PARENT | int(signal.SIGCHLD), 0, 0, 0, 0)
        if pid == 0:
            _begin(json.loads(request), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(pid).encode())


def _begin(request: Mapping[str, Any], descriptors: list[int]) -> NoReturn:
    """The process that the worker wanted, from its first line."""
    try:
        _close_all_but([0, 1, 2, *descriptors])
        os.setsid()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        os.sched_setaffinity(0, request["processors"])
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        random.seed()
        module = request["arguments"][-1]
        # Its command line is that of all forks.
        Path("/proc/self/comm").write_text(_name_of(module))
        sys.argv = [*request["arguments"], *map(str, descriptors)]
        started.main()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - nothing of the zygote may run on here
        traceback.print_exc()
        os._exit(1)


def is_process_of(module: str, folder: Path) -> bool:
    """Whether ``folder`` of ``/proc`` is a process, spawned or forked, that runs ``module``."""
    spawned = [started.__file__.encode(), module.encode()]
    command = (folder / "cmdline").read_bytes().split(b"\0")
    return (folder / "comm").read_text() == f"{_name_of(module)}\n" or set(spawned) <= set(command)


def _name_of(module: str) -> str:
    return ".".join(module.split(".")[-2:])[:15]


def _close_all_but(kept: list[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:  # that of the listing itself
                continue
