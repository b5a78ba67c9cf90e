"""Keys have a fair share, of batches too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from llorch_worker.client import Client
from llorch_worker.gateway.batches.runner import MOST_AT_ONCE
from llorch_worker.gateway.fair_share import Due, fairly
from llorch_worker.gateway.keys import new_key
from tests.gateway.test_batches import begun, ended, line
from tests.gateways import running_gateway
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, running_worker
from tests.store import job_ids
from tests.waiting import wait_until


@pytest.fixture
def keyed(own_server: RedisServer, tmp_path: Path) -> Iterator[dict[str, openai.OpenAI]]:
    """Clients with two keys of one gateway."""
    made = {name: new_key(name) for name in ("alice", "bob")}
    file = tmp_path / "keys.toml"
    file.write_text("".join(entry for _, entry in made.values()))
    with running_gateway(own_server.url, tmp_path, keys=file) as gateway:
        yield {
            name: openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)
            for name, (key, _) in made.items()
        }


@pytest.fixture
def roomy_worker(own_server: RedisServer, tmp_path: Path) -> Iterator[WorkerProcess]:
    """A worker with room for all batches of the gateway."""
    with running_worker(own_server.url, tmp_path, model_name="toy", max_sequences=16) as worker:
        yield worker


@pytest.mark.usefixtures("roomy_worker")
def test_a_batch_of_one_key_does_not_wait_for_all_of_anothers(
    keyed: dict[str, openai.OpenAI], latch: Latch
) -> None:
    alice, bob = keyed["alice"], keyed["bob"]
    standing = [line("a", prompt=latch.prompt(), max_tokens=2)]
    first = [begun(alice, standing) for _ in range(MOST_AT_ONCE + 1)]
    statuses = lambda: [alice.batches.retrieve(each.id).status for each in first]  # noqa: E731
    wait_until(lambda: statuses().count("in_progress") == MOST_AT_ONCE)
    assert ended(bob, begun(bob, [line("b")])).status == "completed"
    latch.open()
    assert [ended(alice, each).status for each in first] == ["completed"] * len(first)


def test_a_line_of_one_key_does_not_wait_behind_anothers_in_the_queue(
    keyed: dict[str, openai.OpenAI],
    own_server: RedisServer,
    own_client: Client,
    latch: Latch,
    tmp_path: Path,
) -> None:
    alice, bob = keyed["alice"], keyed["bob"]
    lines = [line(f"a{n}", max_tokens=1) for n in range(8)]
    lines.append(line("last", prompt=latch.prompt(), max_tokens=2))
    with running_worker(own_server.url, tmp_path, model_name="toy", max_sequences=1) as worker:
        with worker.paused():
            first = begun(alice, lines)
            wait_until(lambda: len(job_ids(own_client.redis)) == len(lines))
            second = begun(bob, [line("b")])
            wait_until(lambda: len(job_ids(own_client.redis)) > len(lines))
        assert ended(bob, second).status == "completed"
        latch.open()
        assert ended(alice, first).status == "completed"


def test_who_has_the_fewest_under_way_is_next_and_of_a_key_the_oldest() -> None:
    waiting = [Due("a1", "a", ""), Due("a2", "a", ""), Due("b1", "b", ""), Due("a3", "a", "")]
    assert [each.id for each in fairly(waiting, {"a": 1}, 3)] == ["b1", "a1", "a2"]
    assert [each.id for each in fairly(waiting, {}, 9)] == ["a1", "b1", "a2", "a3"]
