"""What replaces fixtures of Celery's suite, so that its tasks run in this package's worker.

The worker lives in the tests' process, as in Celery's own runs, because many tests look into it.
All its parts are ours: transport, pool, consumer, request, result backend, and the threads around
the engine, which is the toy engine. The tests' tasks stand beside ``llorch.generate``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import celery.app.task
import celery.contrib.testing.app
import pytest
from celery import signals
from celery.contrib.testing.worker import TestWorkController
from celery.utils.nodenames import anon_nodename

from llorch_worker.broker.queues import normal_queue
from llorch_worker.settings import Settings
from llorch_worker.worker.celery import bootstep
from llorch_worker.worker.celery.app import LlorchApp
from llorch_worker.worker.celery.bootstep import ResidencyStep
from llorch_worker.worker.celery.config import worker_config
from llorch_worker.worker.celery.pool import EnginePool
from llorch_worker.worker.celery.request import JobRequest
from llorch_worker.worker.celery.task import register

SETTINGS = Settings()


class SuiteApp(LlorchApp):
    """The app of a test. Its result backend's URL begins with ``redis``, because the tests for
    Redis look for that."""

    settings = SETTINGS
    engine_class = "tests.toy_engine:ToyEngine"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loader.override_backends = {
            "redis": "llorch_worker.broker.celery.backend:ResultBackend"
        }


celery.contrib.testing.app.Celery = SuiteApp
# A test configures its app in its own way.
setattr(bootstep, "refused_setting", lambda _app: None)  # noqa: B010 - mypy
# Of the tests' tasks that are no tasks of an app.
celery.app.task.Task.Request = JobRequest


@pytest.fixture(scope="session")
def celery_config() -> dict[str, Any]:
    return worker_config(SETTINGS) | {
        "result_backend": SETTINGS.redis_url,
        # In a worker of this package only jobs go to its queue by themselves.
        "task_default_queue": normal_queue(SETTINGS.served_name),
        "task_create_missing_queues": False,
    }


@pytest.fixture(scope="session")
def celery_worker_pool(
    celery_session_app: SuiteApp, celery_config: dict[str, Any]
) -> type[EnginePool]:
    # As the `celery worker` command does before it builds the worker; installs our transport.
    instance = SimpleNamespace(app=celery_session_app, quiet=True)
    TestWorkController.named_queues = ()
    celery_session_app.own_config = dict(celery_config)
    register(celery_session_app)
    signals.celeryd_init.send(sender=anon_nodename(), instance=instance, options={})
    celery_session_app.steps["worker"].add(ResidencyStep)
    return EnginePool


@pytest.fixture(autouse=True)
def ZZZZ_set_app_current(app: SuiteApp, celery_session_app: SuiteApp) -> None:  # noqa: N802, ARG001
    # Celery's also checks that the only queue is named `celery`.
    app.set_current()
    app.set_default()
