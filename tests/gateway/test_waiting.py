"""Jobs end with the client that waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import pytest

from llorch_worker.contract import GenerationRequest, QueueFull
from llorch_worker.gateway.gateway import Gateway
from llorch_worker.gateway.keys import Caller
from llorch_worker.gateway.waiting import Waiting

REQUEST = GenerationRequest(prompt="Once")


class SlowGateway:
    """Redis has taken a job, and its answer is still to come."""

    def __init__(self) -> None:
        self.taken = asyncio.Event()
        self.answered = asyncio.Event()
        self.refusal: Exception | None = None
        self.cancelled: list[Any] = []
        self.left = asyncio.Event()

    async def submit(self, *_: Any, **options: Any) -> str:
        self.taken.set()
        await self.answered.wait()
        if self.refusal is not None:
            raise self.refusal
        return "job"

    async def leave(self, _: Caller, jobs: Iterable[Any], **how: bool) -> None:
        self.cancelled += [job for job in jobs if how["cancel"]]
        self.left.set()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("refusal", [None, QueueFull("full")])
def test_a_client_that_hangs_up_while_its_job_is_sent_cancels_it(
    refusal: Exception | None, times: int
) -> None:
    async def main() -> None:
        gateway = SlowGateway()
        gateway.refusal = refusal
        waiting = Waiting(cast(Gateway, gateway), Caller(), comes_back=False)
        sending = asyncio.create_task(waiting.submit(REQUEST))
        await gateway.taken.wait()
        for _ in range(times):
            sending.cancel()
            await asyncio.sleep(0)
        gateway.answered.set()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await gateway.left.wait()
        assert gateway.cancelled == ([] if refusal else ["job"])

    asyncio.run(main())
