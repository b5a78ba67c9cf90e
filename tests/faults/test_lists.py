"""A list of texts whose worker or engine is killed: what was computed is not computed again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from llorch_worker.client import Client
from llorch_worker.contract import EmbeddingResult, EmbedRequest, Vectors
from tests.encoders import text_of, write_encoder
from tests.services import WorkerProcess, own_redis, running_worker, wait_until

TEXTS = [text_of(number) for number in range(2_000)]
STEP_TOKENS, GATED_AFTER = 512, 700
GET_S = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


class Start:
    """Starts workers that wait for :attr:`gate` once they have computed some texts together."""

    def __init__(self, url: str, folder: Path, model: Path, stack: ExitStack) -> None:
        self._url, self._folder, self._model, self._stack = url, folder, model, stack
        self.gate, self._log = folder / "gate", folder / "computed"
        self.client = stack.enter_context(Client(url))

    def __call__(self, name: str) -> WorkerProcess:
        return self._stack.enter_context(
            running_worker(
                self._url,
                self._folder,
                app="tests.faults.gated_app",
                name=name,
                model=self._model,
                model_name="lists",
                max_step_tokens=STEP_TOKENS,
                watchdog_s=600,
                lease_s=2,
                sweep_s=0.5,
                GATE=self.gate,
                GATE_LOG=self._log,
                GATE_AFTER=GATED_AFTER,
            )
        )

    @property
    def computed(self) -> int:
        return self._log.read_text().count("\n") if self._log.exists() else 0


@pytest.fixture
def start(tmp_path: Path, folder: Path) -> Iterator[Start]:
    with own_redis() as server, ExitStack() as stack:
        yield Start(server.url, tmp_path, folder, stack)


@pytest.mark.parametrize("killed", ["engine", "worker"])
def test_what_a_list_has_is_not_computed_again(start: Start, killed: str) -> None:
    first, client = start("w1"), start.client
    job = client.submit(EmbedRequest(model="lists", input=TEXTS))
    wait_until(lambda: start.computed >= GATED_AFTER)
    computed = start.computed
    parts = []
    for entry in job.stream(timeout=GET_S):
        if isinstance(entry.event, Vectors):
            parts.append(entry.event)
            if entry.event.index + entry.event.count == computed:
                break
    if killed == "worker":
        first.process.kill()
        first.process.wait()
        start("w2")
    else:
        os.kill(first.engine_pid(), signal.SIGKILL)
    start.gate.touch()
    result = job.result(GET_S)
    assert isinstance(result, EmbeddingResult)
    assert (result.attempts, result.resumed) == (2, True)
    assert start.computed == len(TEXTS)
    whole = client.submit(EmbedRequest(model="lists", input=TEXTS)).result(GET_S)
    assert isinstance(whole, EmbeddingResult)
    np.testing.assert_allclose(result.vectors(), whole.vectors(), atol=1e-6)
    events = [entry.event for entry in job.stream(timeout=GET_S)]
    told = [event for event in events if isinstance(event, Vectors)]
    ends = [event.index + event.count for event in told]
    assert [event.index for event in told] == [0, *ends[:-1]], "each once, in order"
    assert all(event.total == len(TEXTS) for event in told)
