"""What this worker refuses of Celery's options, commands and settings, and why.

Settings that reach it past ``LLORCH_*`` say the same in other words, or are refused.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from celery.app.utils import Settings as CelerySettings

from llorch_worker.broker.celery.producer import celery_url
from llorch_worker.broker.connections.url import RedisUrl, safe_url
from llorch_worker.broker.queues import queues
from llorch_worker.contract import REQUESTS, shown
from llorch_worker.contract.errors import InvalidUrl
from llorch_worker.worker.celery.pool import EnginePool

FIXED_SIZE = (
    "the number of jobs at once is fixed when the cache is allocated; restart the worker with "
    "another LLORCH_MAX_SEQUENCES, or start more workers"
)
NO_CHILDREN = "a worker is one process without children; restart the worker itself"
NO_TIME_LIMITS = "tasks have no time limits here; give jobs a deadline_s"
_VARIABLES = {
    "broker_url": ("CELERY_BROKER_URL", "-b/--broker"),
    "broker_read_url": ("CELERY_BROKER_READ_URL", ""),
    "broker_write_url": ("CELERY_BROKER_WRITE_URL", ""),
    "result_backend": ("CELERY_RESULT_BACKEND", "--result-backend"),
}
"""Variables that Celery puts before every setting, and the options that set them."""
_UNSET = (
    "broker_read_url", "broker_write_url", "broker_transport", "broker_host", "broker_port",
    "broker_user", "broker_password", "broker_vhost", "result_accept_content",
    "redis_host", "redis_port", "redis_db", "redis_username", "redis_password",
)  # fmt: skip
_DEFAULTS = dict.fromkeys(_UNSET) | {
    "control_exchange": "celery",
    "event_exchange": "celeryev",
    "task_always_eager": False,
    "worker_direct": False,
    "result_failure_expires": None,
    "worker_deduplicate_successful_tasks": False,
    "worker_enable_remote_control": True,
    "worker_soft_shutdown_timeout": 0,
}
"""Settings that must keep these values, beside those of the app itself."""
_TASK_ATTRIBUTES = {
    "acks_late": True,
    "acks_on_failure_or_timeout": True,
    "acks_on_failure": True,
    "ignore_result": False,
    "track_started": False,
    "serializer": "json",
    "time_limit": None,
    "soft_time_limit": None,
    "autoretry_for": (),
}
"""What the settings ``task_...`` and annotations must leave as it is."""
_REASONS = {
    "task_acks_late": "a job acknowledged early is lost with its worker",
    "task_acks_on_failure": "a failed job would stay in its queue",
    "task_acks_on_failure_or_timeout": "a failed job would stay in its queue",
    "task_ignore_result": "its result is how a job ends",
    "task_track_started": "the claim stores STARTED",
    "task_always_eager": "this process would run the next tasks of a chain itself",
    "task_autoretry_for": "an id runs once; workers try again by themselves",
    "task_time_limit": NO_TIME_LIMITS,
    "task_soft_time_limit": NO_TIME_LIMITS,
    "task_queues": "a worker serves the queues of its model; choose among them with -Q",
    "task_routes": "name the queue of a later task in its signature",
    "result_expires": "set LLORCH_RESULT_TTL_S",
    "result_failure_expires": "set LLORCH_RESULT_TTL_S, which is of every result",
    "result_extended": "it would store prompts with results",
    "accept_content": "jobs are JSON",
    "worker_concurrency": "set LLORCH_MAX_SEQUENCES",
    "control_exchange": "revokes and commands of other applications would not arrive",
    "event_exchange": "monitors of other applications would hear nothing",
    "worker_deduplicate_successful_tasks": "a job that runs again would end without a result",
    "worker_enable_remote_control": "a revoke could not end a running job",
    "worker_direct": "jobs are for any worker of their model",
    "worker_soft_shutdown_timeout": "set LLORCH_DRAIN_S",
    "worker_pool": "the worker needs its own pool",
}


def refused_option(worker: Any, options: Mapping[str, Any]) -> str | None:
    """The reason why ``worker`` must not start with these options of Celery's; None if it may."""
    if not issubclass(worker.pool_cls, EnginePool):
        return "the worker needs its own pool; start it without -P/--pool"
    refused = {
        "--autoscale": (options.get("autoscale"), FIXED_SIZE),
        "--time-limit": (worker.time_limit, NO_TIME_LIMITS),
        "--soft-time-limit": (worker.soft_time_limit, NO_TIME_LIMITS),
        "--max-tasks-per-child": (worker.max_tasks_per_child, NO_CHILDREN),
        "--max-memory-per-child": (worker.max_memory_per_child, NO_CHILDREN),
        "--pool-start-method": (options.get("pool_start_method"), NO_CHILDREN),
        "--prefetch-multiplier": (
            worker.prefetch_multiplier != 1,
            "a worker claims only jobs that it can start, and leaves the others to other workers",
        ),
        "--beat": (options.get("beat"), "run celery beat as a process of its own"),
        "--purge": (
            options.get("purge"),
            "it would drop jobs without ending them; end them with llorch cancel",
        ),
    }
    for option, (given, reason) in refused.items():
        if given:
            return f"{option} is refused: {reason}"
    return None


def foreign_queue(app: Any, named: Iterable[object]) -> str | None:
    """The reason why a worker cannot take jobs from the queues ``named``; None if it can."""
    own = [name for model in app.settings.served_names for name in queues(model)]
    for name in named:
        if name not in own:
            return f"this worker does not serve the queue {shown(name)}; it serves {', '.join(own)}"
    return None


def contradicting_variable(redis_url: str) -> str | None:
    """The reason why Celery's own variables cannot be obeyed; None if they say nothing else."""
    for name, (variable, option) in _VARIABLES.items():
        url = os.environ.get(variable)
        if url and not _same_redis(url, redis_url):
            source = f"{variable} or {option}" if option else variable
            return _refusal(name, url, source, redis_url)
    return None


def refused_setting(app: Any) -> str | None:
    """The reason why a worker of ``app`` must not start with Celery's configuration; None if it
    may. The app then has its own settings only, because the spelling of a URL matters, too."""
    redis_url = app.settings.redis_url
    refusal = contradicting_variable(redis_url)
    if refusal is not None:
        return refusal
    for name, own in (_DEFAULTS | app.own_config).items():
        for source, given in _given(app.conf, name):
            if not _same(name, given, own, redis_url):
                return _refusal(name, given, source, redis_url)
    for task in map(app.tasks.get, REQUESTS):
        for attribute, own in _TASK_ATTRIBUTES.items():
            given = getattr(task, attribute, own)  # older versions of Celery lack some
            if given != own:
                name = f"task_{attribute}"
                sources = (source for source, _ in _given(app.conf, name))
                return _refusal(name, given, next(sources, "in an annotation"), redis_url)
    app.conf.update(app.own_config)
    return None


def _given(conf: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Where else than in Celery's defaults ``name`` is set, and to what."""
    changes, *others = conf.maps[:-1]
    module = os.environ.get("CELERY_CONFIG_MODULE")
    configured = f"in {module}, CELERY_CONFIG_MODULE or --config" if module else "configured"
    sources = [_source(name, "in the app's code"), *(configured for _ in others)]
    for layer, source in zip((changes, *others), sources, strict=True):
        # Celery's own view also finds old names, such as CELERY_ACKS_LATE.
        view = CelerySettings({}, [layer], conf._keys, conf.prefix)
        if name in view:
            yield source, view[name]


def _source(name: str, otherwise: str) -> str:
    """Says whether ``name`` is among the ``key=value`` that follow ``--`` on the command line."""
    keys = (word.partition("=")[0].lower().replace(".", "_") for word in sys.argv)
    return "on the command line" if name in keys else otherwise


def _same(name: str, given: Any, own: Any, redis_url: str) -> bool:
    if name in _VARIABLES and isinstance(given, str):
        return given == own or _same_redis(given, redis_url)
    if name.endswith("transport_options") and isinstance(given, Mapping):
        # Nothing depends on a visibility timeout: leases say when a job is delivered again.
        return all(
            key == "visibility_timeout" or (key, value) in own.items()
            for key, value in given.items()
        )
    return bool(_plain(given) == _plain(own) or not (given or own))


def _plain(value: Any) -> Any:
    match value:
        case timedelta():
            return value.total_seconds()
        case tuple():
            return list(value)
    return value


def _same_redis(url: str, redis_url: str) -> bool:
    if url in (redis_url, celery_url(redis_url)):
        return True
    try:
        return RedisUrl.parse(url) == RedisUrl.parse(redis_url)
    except InvalidUrl:
        return False


def _refusal(name: str, given: Any, source: str, redis_url: str) -> str:
    if name.endswith("transport_options"):
        reason = "clients and other workers would not find its jobs and results"
    elif name in _VARIABLES or name.startswith(("broker_", "redis_")):
        reason = f"LLORCH_REDIS_URL alone names Redis, and says {safe_url(redis_url)}"
    else:
        reason = _REASONS.get(name, "the worker sets it itself")
    return f"{name} = {_without_credentials(name, given)} ({source}) is refused: {reason}"


def _without_credentials(name: str, value: Any) -> str:
    if name.endswith("_password"):
        return "***"
    match value:
        case str() if name in _VARIABLES or "://" in value or "@" in value:
            # A backend's class may precede its URL.
            return safe_url(re.sub(r"^[\w.]+:\w+\+", "", value))
        case bool() | int() | float() | None:
            return repr(value)
        case Mapping():
            return f"{{{', '.join(map(shown, value))}}}"
    return shown(value)
