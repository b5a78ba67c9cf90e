"""The processes that a forked command starts, as forks too: a worker's engine and intake, and the
workers, gateway and Flower of ``up`` and ``demo``.

Each of them would else import all anew: torch alone takes a second. A zygote is forked from the
command before that has a thread, and forks again for each process that the command starts. To the
command they look as others do: they are its own children, have a session or a process group of
their own, die with it, and get the descriptors that they are passed and no others. What starts
processes for itself, such as a worker that is ``fresh``, starts them as users' do.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import io
import json
import os
import platform
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from llorch_worker.processes import spawn, started
from llorch_worker.stack import children, tether

WITHOUT_PACKAGES = str(Path(__file__).parent / "without_packages")
"""The folder of packages that tests' processes shall not have, unless they say otherwise."""
SPAWNING = frozenset(
    {"worker", "gateway", "inspect", "doctor", "generate", "chat", "up", "demo", "flower"}
)
"""The commands that start processes, or that are started by one of these."""
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
"""The number of the system call."""
_CLONE_PARENT = 0x8000
_ZYGOTE = "test-zygote"
_MOST_BYTES, _MOST_DESCRIPTORS = 2**20, 16


def let_started_processes_fork() -> None:
    """From now on this process, which has one thread, forks where it starts a Python program."""
    if sys.platform != "linux" or _CLONE is None:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        ours.close()
        _serve(theirs, parent)
    theirs.close()
    zygote = _Zygote(ours)
    spawn.subprocess = _like_subprocess(zygote.spawned)  # type: ignore[assignment, attr-defined]
    children.subprocess = _like_subprocess(zygote.child)  # type: ignore[assignment, attr-defined]


def _like_subprocess(popen: object) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(subprocess), "Popen": popen})


@contextmanager
def forking_engines() -> Iterator[SimpleNamespace]:
    """What :func:`.spawn` of this process, which may have threads, may have for ``subprocess``: it
    forks from a program that has none, and prints where this process prints now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = subprocess.Popen(
        [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    try:
        yield _like_subprocess(_Zygote(ours).spawned)
    finally:
        ours.close()
        program.wait()


class _Zygote:
    """This process' end of the connection to its zygote."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._asking = threading.Lock()

    def spawned(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """As ``subprocess.Popen`` of ``command``, which runs ``started.py``."""
        assert command[:3] == [sys.executable, "-P", started.__file__]
        passed: list[int] = options["pass_fds"]
        arguments = command[2 : -len(passed)]
        return self._fork(command, passed, options["env"], begin="spawned", arguments=arguments)

    def child(self, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """As ``subprocess.Popen`` of ``command``, which runs a program through ``tether.py``."""
        assert command[:4] == [sys.executable, "-I", "-S", tether.__file__]
        if command[6:9] != [sys.executable, "-P", "-m"]:
            return subprocess.Popen(command, **options)
        arguments = [*command[4:6], *command[9:]]
        output, inlet = os.pipe()
        try:
            forked = self._fork(
                command, [inlet], options["env"], begin="child", arguments=arguments
            )
        finally:
            os.close(inlet)
        forked.stdout = open(output, errors=options["errors"])  # noqa: SIM115
        return forked

    def _fork(
        self,
        command: list[str],
        passed: list[int],
        environment: Mapping[str, str],
        **how: object,
    ) -> _Forked:
        request = {
            "environment": dict(environment),
            "folder": os.getcwd(),
            "processors": sorted(os.sched_getaffinity(0)),
            **how,
        }
        with self._asking:
            socket.send_fds(self._connection, [json.dumps(request).encode()], passed)
            pid = int(self._connection.recv(_MOST_BYTES))
        if pid < 0:  # to kill that would kill all processes of this user
            raise BlockingIOError(errno.EAGAIN, "the zygote could not fork")
        return _Forked(pid, command)


class _Forked(subprocess.Popen[Any]):
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
    _call_this_process(_ZYGOTE)
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
    """The process that the command wanted, from its first line."""
    try:
        _close_all_but([0, 1, 2, *descriptors])
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.sched_setaffinity(0, request["processors"])
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        random.seed()
        if request["begin"] == "spawned":
            _begin_spawned(request["arguments"], descriptors)
        _begin_child(*request["arguments"], output=descriptors[0])
    except BaseException:  # noqa: BLE001 - nothing of the zygote may run on here
        traceback.print_exc()
        os._exit(1)


def _begin_spawned(arguments: list[str], descriptors: list[int]) -> NoReturn:
    os.setsid()
    os.dup2(2, 1)
    # Its command line is that of all forks.
    _call_this_process(arguments[-1])
    sys.argv = [*arguments, *map(str, descriptors)]
    started.main()
    os._exit(0)


def _begin_child(
    death_signal: str, parent: str, module: str, *arguments: str, output: int
) -> NoReturn:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(tether.PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != int(parent):
        os._exit(1)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    _call_this_process(next((word for word in arguments if word in SPAWNING), module))
    try:
        run_program(module, *arguments)
        code: object = 0
    except SystemExit as end:
        code = end.code
    os._exit(code if isinstance(code, int) else int(code is not None))


def run_program(module: str, *arguments: str) -> None:
    """``python -m <module> <arguments>``, or ``python -c <arguments>``, in a process just forked,
    which has its streams and its environment. Raises what the program raises, SystemExit too."""
    # A shell lets what it runs in the background ignore SIGINT, and tests may run there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What the interpreter takes from its environment when it starts.
    path = os.environ.get("PYTHONPATH", WITHOUT_PACKAGES).split(os.pathsep)
    sys.path[:] = [each for each in sys.path if each != WITHOUT_PACKAGES or each in path]
    warnings._processoptions(filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")))  # type: ignore[attr-defined]
    for name in ("stdout", "stderr"):
        # Its file may have been another kind of file.
        old = getattr(sys, name)
        binary = open(old.fileno(), "wb", closefd=False)  # noqa: SIM115 - as long as the process
        new = io.TextIOWrapper(
            binary,
            old.encoding,
            old.errors,
            line_buffering=name == "stderr",
            write_through="PYTHONUNBUFFERED" in os.environ,
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)  # keeps its file open, whatever takes its place
    if SPAWNING.intersection(arguments):
        let_started_processes_fork()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = [module, *arguments]
    try:
        if module == "-c":
            del sys.argv[1]
            exec(arguments[0], {"__name__": "__main__"})
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        # As the interpreter ends; a child of multiprocessing leaves the functions out.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()


def is_process_of(module: str, folder: Path) -> bool:
    """Whether ``folder`` of ``/proc`` is a process, spawned or forked, that runs ``module``."""
    spawned = [started.__file__.encode(), module.encode()]
    command = (folder / "cmdline").read_bytes().split(b"\0")
    name = (folder / "comm").read_bytes()  # of any process, so perhaps no text
    return name == f"{_name_of(module)}\n".encode() or set(spawned) <= set(command)


def is_zygote(pid: int) -> bool:
    """Whether the process only forks others; it ends soon after what it forks for."""
    try:
        return Path(f"/proc/{pid}/comm").read_bytes() == f"{_ZYGOTE}\n".encode()
    except OSError:
        return False


def _call_this_process(name: str) -> None:
    Path("/proc/self/comm").write_text(_name_of(name))


def _name_of(module: str) -> str:
    return ".".join(module.split(".")[-2:])[:15]


def _close_all_but(kept: list[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:  # that of the listing itself
                continue


if __name__ == "__main__":
    for _module in (
        "llguidance.numpy",
        "llorch_worker.engine.engine",
        "llorch_worker.engine.process.server",
        "llorch_worker.intake.desk",
        "llorch_worker.intake.serving",
        "llorch_worker.text.loading",
        "tests.engine.process.faulty_engine",
    ):
        import_module(_module)
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
