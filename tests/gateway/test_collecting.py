"""A collection looks at what is new, and at everything if much of it may be garbage."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from llorch_worker.gateway import collecting
from llorch_worker.gateway.collecting import Collecting


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _collects_when_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "EVERY_S", 3600)


def test_what_survived_is_left_out_until_it_is_mostly_garbage() -> None:
    requests = 0

    async def main() -> None:
        nonlocal requests
        own = Collecting(lambda: requests)
        async with own.running():
            assert not gc.isenabled()
            count = gc.get_freeze_count()
            requests = 1 + count // collecting.OBJECTS
            nodes = [Node() for _ in range(count + 1000)]
            first, last = weakref.ref(nodes[0]), weakref.ref(nodes[-1])
            own.collect()
            del nodes
            own.look_at_all()
            own.collect()
            assert first() is not None, "the requests may need it"
            requests = 0
            own.look_at_all()
            own.collect()
            assert (first(), last()) == (None, None)

    asyncio.run(main())
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_cycle_that_ends_between_two_collections_is_collected() -> None:
    async def main() -> None:
        own = Collecting(lambda: 0)
        async with own.running():
            node = weakref.ref(Node())
            assert node() is not None
            own.collect()
            assert node() is None

    asyncio.run(main())
