"""The checks of ``llorch doctor``."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from urllib.parse import urlsplit

from llorch_worker.broker.connections.connection import broker_errors, connect
from llorch_worker.broker.connections.url import (
    NO_CLUSTER,
    how_to_change,
    is_sentinel,
    is_unix,
    safe_url,
)
from llorch_worker.broker.figures.fleet_client import FleetClient
from llorch_worker.broker.waiting.waiting import remedy_for
from llorch_worker.cli.terminal import extras
from llorch_worker.contract import LlorchError, ModelLoadFailed
from llorch_worker.contract.errors import (
    BrokerRefused,
    BrokerUnavailable,
    InvalidLoadOption,
    InvalidUrl,
)
from llorch_worker.contract.installing import install_command
from llorch_worker.contract.quantities import counted, human_bytes, human_count
from llorch_worker.gateway.settings import GatewaySettings
from llorch_worker.misspelt import misspelt
from llorch_worker.processors import thread_count
from llorch_worker.settings import Settings
from llorch_worker.stack import ports
from llorch_worker.stack.programs import find_redis_server

if TYPE_CHECKING:
    from llorch_worker.devices import Card
    from llorch_worker.engine.memory.load_plan import LoadPlan

OLDEST_REDIS = (6, 2)


@dataclass(frozen=True)
class Check:
    """The result of one check; ``remedy`` says what to do about a warning or failure."""

    subject: str
    verdict: Literal["ok", "warn", "fail"]
    finding: str
    remedy: str | None = None


def packages(*, starts_redis: bool) -> Iterator[Check]:
    """Python and the installed extras.

    ``starts_redis``: no URL was given, so ``llorch up`` would start a Redis here.
    """
    here = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Check("python", "ok", here)
    names = ("llorch-worker", "celery", "kombu", "redis", "pydantic")
    yield Check("packages", "ok", ", ".join(map(_installed, names)))
    needed_for = {
        "worker": "run workers",
        "embedded": "start Redis",
        "gateway": "run a gateway",
        "flower": "run Flower",
    }
    for extra, purpose in needed_for.items():
        missing = extras.missing_modules(extra)
        if extra == "embedded" and not (starts_redis and find_redis_server() is None):
            continue  # one is on the PATH, or elsewhere
        if missing:
            finding = f"not installed ({', '.join(missing)}): this machine cannot {purpose}"
            yield Check(extra, "warn", finding, install_command(extra))


def _installed(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} (checkout, not installed)"


def environment() -> Iterator[Check]:
    """Variables that look like settings and are none."""
    for name, right in misspelt(Settings, GatewaySettings).items():
        remedy = f"did you mean {right}?" if right else "remove it"
        yield Check("settings", "warn", f"{name} is no setting and has no effect", remedy)


def redis_server(url: str, *, asked_for: bool) -> Iterator[Check]:
    """Does Redis answer, and does it keep its data?

    ``asked_for``: a URL was given. Without one, a missing Redis is only a warning if ``llorch up``
    can start one.
    """
    try:
        with broker_errors(url), connect(url) as client:
            information: dict[str, Any] = dict(client.info())
    except InvalidUrl:
        raise  # like any wrong setting, in every command
    except BrokerUnavailable as error:
        yield _no_redis(url, error, asked_for=asked_for)
        return
    found = str(information.get("redis_version", "0"))
    parts = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    where = safe_url(url)
    if parts < OLDEST_REDIS:
        finding = f"{where} has version {found}, which is too old"
        remedy = "use Redis 6.2 or newer"
        yield Check("redis", "fail", finding, remedy)
    elif information.get("cluster_enabled"):
        yield Check("redis", "fail", f"{where} is in cluster mode", NO_CLUSTER)
    else:
        yield Check("redis", "ok", f"version {found} answers at {where}")
    yield from _redis_keeps(information, _redis_cli(url))


def _redis_cli(url: str) -> str:
    """How to reach that Redis from a shell; ``***`` stands for a password."""
    if is_sentinel(url):
        return "redis-cli -h MASTER"
    if is_unix(url):
        parts = urlsplit(url)
        login = f" --user {parts.username or 'default'} -a ***" if parts.password else ""
        return f"redis-cli -s {parts.path}{login}"
    return f"redis-cli -u {safe_url(url)}"


def _redis_keeps(information: dict[str, Any], redis_cli: str) -> Iterator[Check]:
    policy = information.get("maxmemory_policy", "unknown")
    limit = int(information.get("maxmemory", 0))
    used = f"{human_bytes(int(information.get('used_memory', 0)))} used"
    of = f"{used} of {human_bytes(limit)}" if limit else f"{used}, no limit"
    if policy == "noeviction":
        yield Check("memory", "ok", f"maxmemory-policy {policy}, {of}")
    else:
        finding = f"maxmemory-policy is {policy} ({of}): Redis may delete jobs"
        remedy = f"{redis_cli} config set maxmemory-policy noeviction"
        yield Check("memory", "fail" if limit else "warn", finding, remedy)
    if information.get("aof_enabled"):
        yield Check("storage", "ok", "append-only file is on")
    else:
        finding = "append-only file is off: jobs since the last snapshot are lost if Redis dies"
        remedy = f"{redis_cli} config set appendonly yes"
        yield Check("storage", "warn", finding, remedy)


def _no_redis(url: str, error: BrokerUnavailable, *, asked_for: bool) -> Check:
    if isinstance(error, BrokerRefused):
        finding = str(error).partition("; ")[0]
        remedy = f"{how_to_change(url)}: redis://[user:password@]host:port/database"
        return Check("redis", "fail", finding, remedy)
    server = None if asked_for else find_redis_server()
    if server is not None:
        finding = f"none at {safe_url(url)}; llorch up and llorch demo start their own"
        remedy = "to keep jobs across restarts, run a Redis and set LLORCH_REDIS_URL"
        return Check("redis", "warn", finding, remedy)
    finding = str(error).partition(";")[0]
    start = '"docker run -d -p 127.0.0.1:6379:6379 redis:7.4"'
    remedy = f"run redis-server, or {start}, or {how_to_change(url)}"
    return Check("redis", "fail", finding, remedy)


def devices(settings: Settings) -> Iterator[Check]:
    """Checks torch, the cards and their workers, and the device that a worker would take."""
    if "torch" in extras.missing_modules("worker"):
        return
    import torch

    from llorch_worker.devices import DeviceUnavailable, usable_cards
    from llorch_worker.engine.memory.compute_device import resolve_device

    yield Check("torch", "ok", f"torch {torch.__version__}")
    try:
        cards = usable_cards()
        no_cards = ""
    except DeviceUnavailable as error:
        cards, no_cards = (), error.message
    for number, card in enumerate(cards):
        yield _card(f"cuda:{number}", card, settings.device_locks)
    if fault := _device_fault(settings.device):
        names = ", ".join(["auto", "cpu", *(f"cuda:{number}" for number in range(len(cards)))])
        yield Check("device", "fail", fault, f"set --device or LLORCH_DEVICE to one of {names}")
        return
    if resolve_device(settings.device).type == "cpu":
        asked = settings.device == "cpu"
        why = "" if asked else f"; {no_cards or 'this torch is built without CUDA'}"
        finding = f"cpu, {counted(thread_count(), 'core')}{why}"
        remedy = "install a CUDA build of torch" if cards and not asked else None
        yield Check("device", "warn" if cards and not asked else "ok", finding, remedy)


def _device_fault(name: str) -> str | None:
    """The reason why the device cannot be used, or None."""
    from llorch_worker.engine.memory.compute_device import resolve_device

    try:
        resolve_device(name)
    except LlorchError as error:
        return error.message
    return None


def _card(name: str, card: Card, locks: Path) -> Check:
    from llorch_worker.worker.card.lock import CardLocks

    if card.fault is not None:
        finding = f"{name} ({card.name}) does not respond: {card.fault}"
        remedy = "check nvidia-smi and the kernel log; a lost card needs a reset or a reboot"
        return Check("device", "fail", finding, remedy)
    memory = "which shares the machine's memory"
    if card.free_bytes is not None and card.total_bytes is not None:
        memory = f"{human_bytes(card.free_bytes)} free of {human_bytes(card.total_bytes)}"
    try:
        holder = CardLocks(locks).holder(card)
        taken = f"in use by {holder}" if holder else "not in use"
    except OSError as error:
        taken = f"its lock cannot be read: {locks}: {error.strerror}"
    return Check("device", "ok", f"{name} ({card.name}) {card.model}, {memory}; {taken}")


def models(settings: Settings) -> Iterator[Check]:
    """Each model that a worker would serve: a file by itself, and a server's."""
    for each in settings.of_each_model:
        if each.engine_url is None:
            yield from _model_file(each)
        else:
            yield _model_of_server(each, each.engine_url)


def _model_of_server(settings: Settings, url: str) -> Check:
    """Does the server answer, and does it serve the model?"""
    if missing := extras.missing_modules("server"):
        finding = f"not installed ({', '.join(missing)}): workers cannot ask the server at {url}"
        return Check("server", "warn", finding, install_command("server"))
    from llorch_worker.servers.server_engine import Address, ServerEngine
    from llorch_worker.worker.engine_loader import key_of

    def away(reason: str) -> NoReturn:
        raise ModelLoadFailed(reason.removeprefix("waits for "))

    try:
        address = Address(url, key_of(settings), str(settings.model), settings.served_name)
        engine = ServerEngine.load(address, max_sequences=None, wait=away)
    except ModelLoadFailed as error:
        remedy = "start the server, or correct its URL, its key or the model's name"
        return Check("model", "fail", error.message, remedy)
    engine.close()
    return Check("model", "ok", f"{settings.served_name}: {engine.facts.device} at {url} serves it")


def _model_file(settings: Settings) -> Iterator[Check]:
    """Does the model's metadata load, and does the model fit? A missing device skips the latter."""
    if extras.missing_modules("worker"):
        return
    from llorch_worker.engine.memory.encoder_plan import plan_of
    from llorch_worker.engine.memory.load_plan import LoadPlan
    from llorch_worker.engine.memory.survey import sharing
    from llorch_worker.intake.process import IntakeProcess
    from llorch_worker.weights import open_checkpoint
    from llorch_worker.weights.contents import stored_numbers

    device_fault = _device_fault(settings.device)
    options = settings.engine_options
    if device_fault:
        options = replace(options, device="cpu")
    try:
        plan = plan_of(open_checkpoint(settings.model), sharing(options, settings.resident))
        with IntakeProcess(plan.checkpoint.path) as intake:
            intake.around()
    except LlorchError as error:
        remedy = (
            "lower LLORCH_MAX_CONTEXT, or leave it unset for the model's own"
            if isinstance(error, InvalidLoadOption)
            else "give --model or LLORCH_MODEL a .gguf file, a folder, hf:OWNER/NAME, or demo"
        )
        yield Check("model", "fail", error.message, remedy)
        return
    parameters = human_count(stored_numbers(plan.checkpoint))
    finding = f"{settings.served_name}: {parameters} parameters, context {plan.longest_context}"
    yield Check("model", "ok", finding)
    if device_fault:
        return
    if isinstance(plan, LoadPlan):
        yield _kernels(plan, wanted=settings.kernels)
    needs = f"needs {human_bytes(plan.total_bytes)} on {plan.device} as {plan.kept_as}"
    finding = f"{needs}; {human_bytes(plan.free_bytes)} free"
    if plan.misfit is None:
        yield Check("fit", "ok", finding)
    else:
        remedy = "lower LLORCH_MAX_CONTEXT or LLORCH_MAX_SEQUENCES, or take a smaller model"
        yield Check("fit", "fail", finding, remedy)


def _kernels(plan: LoadPlan, *, wanted: str) -> Check:
    """The kernels that a worker would use, and why it cannot use faster ones."""
    from llorch_worker.kernels import native_absence

    chosen = f"{plan.kernels.ops.name} for {plan.dtype_name}"
    absence = native_absence() if plan.device.type == "cpu" and wanted == "auto" else None
    if absence is None:
        return Check("kernels", "ok", f"{chosen}: {plan.kernels.reason}")
    finding = f"{chosen}; native kernels are unavailable: {absence}"
    return Check("kernels", "warn", finding)


def flower(asked_for: int | None) -> Iterator[Check]:
    """Is Flower's port free, or does Flower listen on it already?

    A taken default port is only a warning: ``llorch up`` takes the next free one.
    """
    if extras.missing_modules("flower"):
        return
    port = ports.DEFAULT_FLOWER_PORT if asked_for is None else asked_for
    if ports.is_free(port):
        yield Check("flower", "ok", f"port {port} is free")
    elif ports.flower_answers(port):
        finding = f"Flower answers at http://localhost:{port}"
        yield Check("flower", "ok", finding)
    else:
        finding = f"port {port} is taken by another program"
        if asked_for is None:
            yield Check("flower", "warn", finding, "no need: llorch up takes the next free port")
        else:
            yield Check("flower", "fail", finding, ports.remedy_for_taken("--flower-port"))


def served_workers(url: str, before: Sequence[Check]) -> Iterator[Check]:
    """The running workers, from their announcements in Redis, unless a check ``before`` failed."""
    if any(check.subject == "redis" and check.verdict != "ok" for check in before):
        return
    try:
        with FleetClient(url) as client:
            fleet = client.fleet()
    except BrokerUnavailable:
        return  # the Redis check reports that
    if not fleet.workers:
        finding = "no worker is running: jobs wait until one for their model starts"
        remedy = "start one with llorch worker or llorch up"
        yield Check("workers", "warn", finding, remedy)
    for found in fleet.workers:
        finding = f"{found.hostname} serves {found.model} on {found.device}"
        yield Check("workers", "ok", finding)
    for load in fleet.models:
        if load.mixture:
            remedy = "replace the others, or serve them under another name (LLORCH_MODEL_NAME)"
            yield Check("workers", "warn", load.mixture, remedy)
    models = [load.model for load in fleet.models]
    for queue, jobs in fleet.unserved.items():
        finding = f"{counted(jobs, 'job')} in {queue!r}, which no worker serves"
        yield Check("queues", "warn", finding, remedy_for(queue, models))
    for sentence in (each for load in fleet.models for each in load.wrong_keys):
        yield Check("queues", "fail", f"a queue is stopped: {sentence}")
