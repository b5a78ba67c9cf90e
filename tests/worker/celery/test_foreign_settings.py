"""A setting that reaches Celery past ``LLORCH_*`` is refused if it says anything else."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME
from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import LlorchApp, build_app
from llorch_worker.worker.celery.refusals import refused_setting
from tests.forks import run_forked
from tests.services import (
    MODULE_PATH,
    RedisServer,
    WorkerProcess,
    environment,
    run_python,
    running_worker,
    token_ids,
)
from tests.worker.celery.remote import consumed

HERE = "redis://:secret@here:6379/0"
GET_S = 60


def app_at(url: str) -> LlorchApp:
    app = build_app(Settings(redis_url=url, model_name="toy"))
    assert app.conf.task_acks_late  # Celery reads its configuration only now
    return app


@pytest.mark.parametrize(
    ("variable", "setting"),
    [
        ("CELERY_BROKER_URL", "broker_url"),
        ("CELERY_BROKER_READ_URL", "broker_read_url"),
        ("CELERY_BROKER_WRITE_URL", "broker_write_url"),
        ("CELERY_RESULT_BACKEND", "result_backend"),
    ],
)
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@here:6379/1", "redis://:***@here:6379/1"),
        ("redis://:other@here:6379/0", "redis://:***@here:6379/0"),
        ("rediss://:secret@here:6379/0", "rediss://:***@here:6379/0"),
        ("redis://:secret@here/0;redis://:secret@there/0", "an unreadable URL"),
        ("amqp://secret:secret@there//", "amqp://secret:***@there//"),
        ("rpc://", "rpc://"),
    ],
)
def test_a_variable_of_celery_that_names_another_server_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, setting: str, url: str, shown: str
) -> None:
    monkeypatch.setenv(variable, url)
    said = refused_setting(app_at(HERE)) or ""
    assert said.startswith(f"{setting} = {shown} ({variable}")
    assert said.endswith("LLORCH_REDIS_URL alone names Redis, and says redis://:***@here:6379/0")


@pytest.mark.parametrize("url", [HERE, "redis://:secret@here", "redis://:secret@here:6379/", ""])
def test_a_variable_of_celery_that_names_the_same_server_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", url)
    monkeypatch.setenv("CELERY_RESULT_BACKEND", url)
    app = app_at(HERE)
    assert refused_setting(app) is None
    assert type(app.backend).__module__ == "llorch_worker.broker.celery.backend"
    with app.connection() as one, app.connection_for_read() as two:
        assert [one.port, two.password] == [6379, "secret"]


REFUSED: dict[str, Any] = {
    "accept_content": ["json", "pickle"],
    "broker_password": "secret",
    "broker_transport": "memory",
    "broker_transport_options": {"global_keyprefix": "secret"},
    "broker_url": "redis://:secret@there/0",
    "broker_connection_max_retries": 3,
    "control_exchange": "mine",
    "event_exchange": "mine",
    "redis_db": 4,
    "result_backend": "redis://:secret@here:6379/4",
    "result_backend_transport_options": {"global_keyprefix": "secret"},
    "result_expires": 60,
    "result_extended": True,
    "result_failure_expires": 60,
    "task_acks_late": False,
    "task_acks_on_failure_or_timeout": False,
    "task_always_eager": True,
    "task_ignore_result": True,
    "task_routes": {TASK_NAME: {"queue": "mine"}},
    "task_serializer": "pickle",
    "task_time_limit": 5,
    "task_track_started": True,
    "worker_cancel_long_running_tasks_on_connection_loss": True,
    "worker_concurrency": 3,
    "worker_deduplicate_successful_tasks": True,
    "worker_direct": True,
    "worker_enable_remote_control": False,
    "worker_pool": "solo",
    "worker_prefetch_multiplier": 4,
    "worker_soft_shutdown_timeout": 5,
}
ACCEPTED: dict[str, Any] = {
    "accept_content": ("json",),
    "broker_transport_options": {"visibility_timeout": 60},
    "broker_url": "redis://:secret@here",
    "result_expires": 86400,
    "task_acks_late": True,
    "task_default_queue": "mine",
    "timezone": "Europe/Berlin",
}


@pytest.mark.parametrize("setting", REFUSED)
@pytest.mark.parametrize("by", ["code", "configuration"])
def test_a_setting_that_would_change_an_answer_or_lose_a_job_is_refused_by_name(
    setting: str, by: str
) -> None:
    app = app_at(HERE)
    if by == "code":
        app.conf[setting] = REFUSED[setting]
    else:
        app.conf.maps[1][setting] = REFUSED[setting]
    said = refused_setting(app) or ""
    assert said.startswith(f"{setting} = ")
    assert ("(in the app's code)" if by == "code" else "(configured)") in said
    assert " is refused: " in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("ignore_result", True, "task_ignore_result = True (in an annotation)"),
        ("autoretry_for", (ValueError,), "task_autoretry_for = "),
    ],
)
def test_an_annotation_that_would_lose_the_result_is_refused(
    attribute: str, value: object, said: str
) -> None:
    app = app_at(HERE)
    app.conf.task_annotations = {"*": {attribute: value}}
    assert (refused_setting(app) or "").startswith(said)


def test_settings_that_change_nothing_or_are_obeyed_are_accepted() -> None:
    app = app_at(HERE)
    own = dict(app.own_config)
    app.conf.update(ACCEPTED)
    assert refused_setting(app) is None
    assert {name: app.conf[name] for name in own} == own


MODULE = "broker_transport_options = {'visibility_timeout': 60}\ntask_default_queue = 'mine'\n"


def module_in(folder: Path, text: str) -> dict[str, object]:
    (folder / "shop_config.py").write_text(text)
    return {
        "CELERY_CONFIG_MODULE": "shop_config",
        "PYTHONPATH": f"{MODULE_PATH}:{folder}",
        "model_name": "toy",
    }


def started(folder: Path, *arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """``celery <arguments>``, to its end. Celery looks for modules in ``folder``, where it runs."""
    variables = environment("redis://localhost:1/0", **settings)
    return run_forked("celery", *arguments, environment=variables, timeout_s=GET_S, folder=folder)


def test_a_worker_obeys_what_says_the_same_in_other_words(
    redis_server: RedisServer, stock: Celery, tmp_path: Path
) -> None:
    same = redis_server.url.removesuffix("/0")
    with (
        running_worker(
            redis_server.url, tmp_path, name="same", CELERY_BROKER_URL=same,
            CELERY_RESULT_BACKEND=same, **module_in(tmp_path, MODULE),
        ) as worker,
        Client(redis_server.url) as client,
    ):  # fmt: skip
        assert all(queue.startswith("llorch.toy") for queue in consumed(stock, worker))
        job = client.submit(prompt="x", model="toy", max_tokens=2)
        assert len(token_ids(job.stream(timeout=GET_S))) == 2
        assert stock.AsyncResult(job.id).get(timeout=GET_S)["text"] == "w0 w1 "


@pytest.mark.parametrize(
    ("app", "before", "after", "said"),
    [
        ("tasks", ("-b", "redis://:secret@there/0"), (), "error: broker_url = redis://:***@there/0"),
        ("tests.toy_app", ("--result-backend", "rpc://"), (), "result_backend = rpc:// ("),
        ("tests.toy_app", (), ("--", "task.acks_late=0"), "task_acks_late = False (on the command"),
        ("tests.toy_app", (), (), "task_ignore_result = True (in shop_config, CELERY_CONFIG_MOD"),
    ],
)  # fmt: skip
def test_a_refused_start_ends_with_2_before_it_connects(
    tmp_path: Path, app: str, before: tuple[str, ...], after: tuple[str, ...], said: str
) -> None:
    text = MODULE if before or after else "task_ignore_result = True\n"
    done = started(tmp_path, "-A", app, *before, "worker", *after, **module_in(tmp_path, text))
    assert done.returncode == 2
    assert said in done.stderr
    assert "secret" not in done.stderr


@pytest.mark.parametrize(
    ("text", "settings", "said"),
    [
        ("", {"CELERY_CONFIG_MODULE": "nowhere"}, "CELERY_CONFIG_MODULE=nowhere: No module named"),
        ("", {"CELERY_CONFIG_MODULE": "shop_config.py"}, "Did you mean 'shop_config'?"),
        ("", {"CELERY_LOADER": "nowhere:Loader"}, "CELERY_LOADER=nowhere:Loader"),
        ("CELERY_ACKS_LATE = True\ntask_protocol = 2\nresult_expires = 3", {}, "Cannot mix new"),
        ("CELERY_IGNORE_RESULT = True", {}, "task_ignore_result = True (in shop_config"),
    ],
)
def test_a_configuration_that_cannot_be_used_ends_the_start_with_one_sentence(
    tmp_path: Path, text: str, settings: dict[str, object], said: str
) -> None:
    settings = module_in(tmp_path, text) | settings
    done = started(tmp_path, "-A", "tasks", "worker", **settings)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


DELAY = """
import json
from tasks import generate
print(json.dumps(generate.delay(prompt="x", max_tokens=2).get(timeout=60)["text"]))
"""


def test_a_producer_sends_to_its_own_redis_beside_another_app_of_its_service(
    toy_worker: WorkerProcess, redis_server: RedisServer
) -> None:
    elsewhere = "redis://localhost:1/0"
    assert (
        run_python(
            DELAY, redis_server.url, model_name="toy",
            CELERY_BROKER_URL=elsewhere, CELERY_RESULT_BACKEND=elsewhere,
        )
        == "w0 w1 "
    )  # fmt: skip
