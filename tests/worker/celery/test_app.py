from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import build_app
from tests.forks import run_forked
from tests.services import (
    RedisServer,
    WorkerProcess,
    environment,
    run_python,
    running_worker,
    wait_until,
)

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "gguf", "safetensors", "psutil")

LIGHT_IMPORT = f"""
import json, sys
for name in {HEAVY}:
    sys.modules[name] = None  # as if it were not installed
import tasks, llorch_worker.client, llorch_worker.broker.celery.transport
import llorch_worker.worker.main, llorch_worker.worker.celery.pool
import llorch_worker.worker.celery.bootstep
print(json.dumps(tasks.generate.name))
"""

DELAY = """
import json
from tasks import app, generate
fields = {"prompt": "x", "max_tokens": 2}
sent = [
    app.send_task("llorch.generate", kwargs=fields),
    app.send_task("llorch.generate", kwargs=fields | {"priority": "low", "model": "toy"}),
    app.send_task("llorch.generate", kwargs=fields, queue="llorch.toy:high"),
    generate.delay(prompt="x", max_tokens=2),
    generate.delay(prompt="x", max_tokens=2, priority="high"),
    generate.apply_async(kwargs={"prompt": "x", "max_tokens": 2, "priority": "low"}),
]
print(json.dumps([result.get(timeout=60)["text"] for result in sent]))
"""

DELAY_WRONG = """
import json
from tasks import generate
from llorch_worker.contract import InvalidRequest
faults = []
for args, fields in ((("x",), {}), ((), {"priority": 7, "prompt": "x"}), ((), {"nonsense": 1})):
    try:
        generate.delay(*args, **fields).get(timeout=60)
    except InvalidRequest as error:
        faults.append([fault.field for fault in error.faults])
print(json.dumps(faults))
"""


def test_producers_import_the_app_and_the_client_without_the_worker_extra() -> None:
    assert run_python(LIGHT_IMPORT, "redis://localhost:1/0") == "llorch.generate"


def test_our_app_sends_to_the_queue_of_the_model(
    toy_worker: WorkerProcess, redis_server: RedisServer
) -> None:
    assert run_python(DELAY, redis_server.url, model_name="toy") == ["w0 w1 "] * 6


def test_a_keeper_is_light_and_both_it_and_its_engine_keep_their_heaps_from_the_collector(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with running_worker(
        redis_server.url, tmp_path, name="frozen", fresh=True, model_name="frozen",
        TOY_COUNTS_FROZEN=1, app="tests.worker.celery.counting_app",
    ) as worker:  # fmt: skip
        assert wait_until(worker.card).engine["measured_bytes"]["frozen objects"] > 10_000
        frozen = wait_until(lambda: re.search(r"frozen in the keeper: (\d+)", worker.text()))
        assert int(frozen[1]) > 10_000
        mapped = Path(f"/proc/{worker.process.pid}/maps").read_text()
        heavy = ("torch", "numpy", "tokenizers", "transformers", "llguidance", "gguf")
        assert not {name for name in heavy if f"site-packages/{name}" in mapped}


def test_wrong_arguments_to_delay_are_refused_by_name(
    toy_worker: WorkerProcess, redis_server: RedisServer
) -> None:
    faults = run_python(DELAY_WRONG, redis_server.url, model_name="toy")
    assert faults[:2] == [["args"], ["priority"]]
    assert "nonsense" in faults[2]


def test_two_apps_in_one_process_keep_to_themselves(tmp_path: Path) -> None:
    one, two = (build_app(Settings(model=tmp_path / f"{name}.gguf")) for name in ("one", "two"))
    tasks = [app.tasks["llorch.generate"] for app in (one, two)]
    assert [task.app.settings.served_name for task in tasks] == ["one", "two"]


def test_a_task_call_without_a_resident_model_says_so() -> None:
    from llorch_worker.contract import InternalError
    from tasks import generate

    with pytest.raises(InternalError, match="llorch worker"):
        generate(prompt="x")


def celery(app: str, command: str, redis_url: str, **settings: object) -> tuple[int, str, str]:
    """The exit code of ``celery -A <app> <command>`` and what it printed."""
    variables = environment(redis_url, **settings)
    done = run_forked("celery", "-A", app, command, environment=variables, timeout_s=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("app", "command"), [("tasks", "worker"), ("llorch_worker.tasks:app", "report")]
)
def test_a_bad_setting_ends_a_celery_command_with_one_sentence(app: str, command: str) -> None:
    code, out, err = celery(app, command, "redis://localhost:1/0", max_sequences=0, kernels="x")
    _is_one_sentence(code, out, err)


def test_an_interpreter_of_its_own_ends_in_the_same_way() -> None:
    """With nothing said at an import, nor at its end."""
    variables = environment("redis://localhost:1/0", max_sequences=0, kernels="x")
    command = [sys.executable, "-m", "celery", "-A", "tasks", "worker"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    _is_one_sentence(done.returncode, done.stdout, done.stderr)


def _is_one_sentence(code: int, out: str, err: str) -> None:
    assert (code, out) == (2, "")
    (said,) = err.splitlines()
    assert said.startswith("error: LLORCH_KERNELS: ")
    assert "; LLORCH_MAX_SEQUENCES: must be greater than or equal to 1 (got '0')" in said


def test_an_invalid_url_ends_a_celery_command_with_one_sentence() -> None:
    code, out, err = celery("llorch_worker.tasks", "worker", "redis://localhost:1/jobs")
    assert (code, out) == (2, "")
    assert err == (
        "error: redis://localhost:1/jobs is not a Redis URL: it must end with a database number; "
        "correct LLORCH_REDIS_URL\n"
    )


@pytest.mark.parametrize(
    "own_command", ["", "import celery.bin.celery, sys; sys.argv[1:] = ['-A', 'shop']"]
)
def test_a_bad_setting_raises_in_a_producer(own_command: str) -> None:
    """Also in the worker of an application that sends us jobs."""
    source = f"""
{own_command}
import json
from pydantic import ValidationError
try:
    import tasks
except ValidationError as error:
    print(json.dumps(error.error_count()))
"""
    assert run_python(source, "redis://localhost:1/0", max_sequences=0) == 1


def test_settings_without_effect_are_named_in_the_workers_log(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    said = (
        "LLORCH_MAX_SEQUENCE is no setting and has no effect; did you mean LLORCH_MAX_SEQUENCES?",
        "LLORCH_MAX_DEATHS=2 ends jobs before LLORCH_MAX_ATTEMPTS=3 can",
        "LLORCH_PROCESSORS=0-4000: of these, only ",
    )
    options: dict[str, Any] = {"name": "misspelt", "model_name": "toy", "max_sequence": 3}
    options |= {"max_deaths": 2, "processors": "0-4000"}
    with running_worker(redis_server.url, tmp_path, **options) as worker:
        wait_until(lambda: all(sentence in worker.text() for sentence in said))


def test_a_celery_worker_with_a_setting_that_cannot_hold_here_ends_with_2(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    worker = WorkerProcess(
        redis_server.url, tmp_path / "log", model_name="toy", processors="4000-4001"
    )
    assert worker.wait_exit() == 2
    assert "LLORCH_PROCESSORS" in worker.text()
