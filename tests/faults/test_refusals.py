"""Redis goes away while a worker refuses a message: the refusal is made good, no slot is lost."""

from __future__ import annotations

import json

import pytest

from llorch_worker.broker import queues, scripts
from llorch_worker.broker.jobs import dead_letters
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, LlorchError
from tests.faults.conftest import StartWorker
from tests.faults.proxy import FaultProxy, calls
from tests.faults.witness import Witness
from tests.latch import Latch
from tests.messages import GOOD_BODY, envelope
from tests.services import wait_until
from tests.store import held_ids

GET_S = 60
REFUSED = {
    "a body that is not one": envelope([1], headers={"task": TASK_NAME, "id": "refused"}),
    "an unknown task": envelope(GOOD_BODY, headers={"task": "nonsense", "id": "refused"}),
    "no envelope": {"headers": {"id": "refused"}},
}


@pytest.mark.parametrize("message", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_message_refused_while_redis_goes_away_ends_and_costs_no_slot(
    client: Client,
    witness: Witness,
    proxy: FaultProxy,
    start_worker: StartWorker,
    latch: Latch,
    message: dict[str, object],
    lost: str,
) -> None:
    # Redis knows the script, so the first call is the one that takes effect.
    scripts.load(client.redis, "bury")
    worker = start_worker("w1", url=proxy.url, max_sequences=2)
    refused = [json.dumps(message).replace("refused", f"refused-{n}") for n in range(2)]
    for number, one in enumerate(refused):
        set_trap = proxy.lose_request if lost == "request" else proxy.lose_reply
        # redis-py tries again itself; each try fails.
        traps = [set_trap(calls("bury")) for _ in range(20)]
        reconnects = worker.text().count("onnection to broker lost")
        client.redis.lpush(queues.normal_queue("toy"), one)
        wait_until(
            lambda before=reconnects, number=number: (
                worker.text().count("onnection to broker lost") > before
                or client.job(f"refused-{number}").status().ended
            ),
            what="the refusal to fail",
        )
        for trap in traps:
            proxy.disarm(trap)
    for number in range(2):
        with pytest.raises(LlorchError):
            client.job(f"refused-{number}").result(GET_S)
    wait_until(lambda: not held_ids(client.redis), what="every claim to be settled")
    letters = sorted(letter.id for letter in dead_letters.letters(client.redis))
    assert letters == ["refused-0", "refused-1"]
    jobs = [witness.begun(witness.send(60, latch.prompt())) for _ in range(2)]
    assert held_ids(client.redis) == {job.id for job in jobs}, "both slots serve"
    latch.open()
    witness.assert_whole(*jobs)
