"""What this app changes of Flower."""

from __future__ import annotations

from typing import Any


def show_queues_of_later_workers() -> None:
    """Has the Broker page, and the API of the same figures, ask the workers for their queues.
    Flower itself asks when it starts, and when somebody opens its page of workers."""
    from flower.api.tasks import GetQueueLengths
    from flower.views.broker import BrokerView

    for handler in (BrokerView, GetQueueLengths):
        handler.get = _asking_first(handler.get)


def _asking_first(get: Any) -> Any:
    from tornado.web import authenticated

    async def ask_and_get(view: Any) -> None:
        await view.application.update_workers()
        await get(view)

    return authenticated(ask_and_get)
