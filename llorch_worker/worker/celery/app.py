"""The Celery app, built from Settings."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NoReturn

from celery import signals
from celery.exceptions import ImproperlyConfigured
from celery.utils.imports import NotAPackage
from celery.utils.text import str_to_list
from pydantic import ValidationError

from llorch_worker.broker.celery import transport
from llorch_worker.broker.celery.producer import OwnBroker
from llorch_worker.contract import LlorchError
from llorch_worker.contract.command_errors import USAGE, explain
from llorch_worker.contract.errors import BrokerRefused, InvalidUrl
from llorch_worker.engine.process.engine_process import ENGINE
from llorch_worker.settings import Settings
from llorch_worker.telemetry.logs.setup import CeleryLogs
from llorch_worker.telemetry.logs.streams import print_documents
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.celery import control
from llorch_worker.worker.celery.bootstep import ResidencyStep
from llorch_worker.worker.celery.config import worker_config
from llorch_worker.worker.celery.flower import show_all_queues
from llorch_worker.worker.celery.refusals import contradicting_variable
from llorch_worker.worker.celery.task import JobTask, register
from llorch_worker.worker.residency import Residency

_CELERY_COMMAND = "celery.bin.celery"
"""The module that is loaded in a ``celery`` command."""
_APP_OPTIONS = ("-A", "--app")
_CONFIGURED = ("CELERY_LOADER", "CELERY_CONFIG_MODULE")
"""What Celery imports for its configuration; the options --loader and --config set them."""


class LlorchApp(OwnBroker):
    """A Celery app that knows its settings and, in a worker, the resident model."""

    task_cls = JobTask
    settings: Settings
    own_config: dict[str, Any]
    """Celery's settings as made from ``settings``."""
    out_of_time = threading.Event()
    """Set when the worker must leave, whether or not Redis answers. Its pool replaces it."""
    residency: Residency | None = None
    """Set by the worker's bootstep."""
    assignment: Assignment | None = None
    """The device of this process; the bootstep assigns one if it is not set."""
    engine_class: str = ENGINE
    """``module:Class`` of the engine, which only its own process imports."""
    on_load_progress: Callable[[int, int], None] | None = None
    """Called with the bytes loaded and the bytes in total."""
    on_load_error: Callable[[LlorchError], None] | None = None
    """Called with the reason why the model cannot be loaded, in place of a line in the log."""


def build_app(settings: Settings) -> LlorchApp:
    """An app that can serve ``settings.model`` and send jobs to the workers that serve it."""
    app = LlorchApp("llorch")
    app.settings = settings
    app.own_config = worker_config(settings)
    app.conf.update(app.own_config)
    # Otherwise CELERY_RESULT_BACKEND comes before it.
    app.backend_cls = app.own_config["result_backend"]
    app.steps["worker"].add(ResidencyStep)
    register(app)
    return app


@signals.celeryd_init.connect  # type: ignore[untyped-decorator]
def _prepare_worker(instance: Any, options: Mapping[str, Any], **_: Any) -> None:
    control.install()
    # Of -Q and -X; Celery creates a queue that it does not know.
    instance.named_queues = [
        name
        for option in ("queues", "exclude_queues")
        for name in str_to_list(options.get(option)) or ()
    ]
    # Before the worker's first connection.
    settings: Settings = instance.app.settings
    CeleryLogs(settings.log_format).install()
    # Its banner has many lines.
    instance.quiet |= settings.log_format == "json"
    transport.install()


def build_from_environment(*modules: str) -> LlorchApp:
    """The app that ``modules`` offer, configured from ``LLORCH_*``.

    With wrong settings ``celery -A <module>`` ends with one sentence, because Celery would print
    the traceback of this import. A producer gets the exception, even in a ``celery`` command of
    its own.
    """
    in_command = _is_app_of_command(modules, sys.argv[1:])
    if in_command and "worker" in sys.argv and os.environ.get("LLORCH_LOG_FORMAT") == "json":
        print_documents()
    try:
        settings = Settings()
        if in_command and (refusal := contradicting_variable(settings.redis_url)):
            raise InvalidUrl(refusal)
        if in_command and "flower" in sys.argv and find_spec("flower"):
            show_all_queues()
        app = build_app(settings)
        app.finalize()  # reads what else configures Celery
        return app
    except (ValidationError, BrokerRefused) as error:
        if not in_command:
            raise
        explained = explain(error)
        assert explained is not None
        document, exit_code = explained
        _end(document.message, exit_code)
    except (ImportError, ImproperlyConfigured, NotAPackage) as error:
        foreign = [f"{name}={os.environ[name]}" for name in _CONFIGURED if os.environ.get(name)]
        if not in_command or not foreign:
            raise
        _end(f"cannot configure Celery by {' and '.join(foreign)}: {error}", USAGE)


def _end(sentence: str, exit_code: int) -> NoReturn:
    sys.stderr.write(f"error: {' '.join(sentence.split())}\n")
    raise SystemExit(exit_code) from None


def _is_app_of_command(modules: Sequence[str], arguments: list[str]) -> bool:
    """Whether this process is a ``celery`` command whose ``arguments`` name one of ``modules``."""
    if _CELERY_COMMAND not in sys.modules:
        return False
    words = " ".join(arguments).replace("=", " ").split()
    named = [app for option, app in pairwise(words) if option in _APP_OPTIONS]
    return any(re.sub(r"(\.app|:.*)$", "", app) in modules for app in named)
