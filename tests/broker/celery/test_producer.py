"""Celery apps of ours, and how logs show where they are connected."""

from __future__ import annotations

import pytest
from kombu import Connection, Exchange, Queue

from llorch_worker.broker.celery.producer import producer_app


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://u@h:1/0", "redis://u@h:1/0"),
        ("redis://:secret@h:1/0", "redis://:**@h:1/0"),
        ("redis://u:secret@h:1/0", "redis://u:**@h:1/0"),
    ],
)
def test_a_connection_shows_a_mask_only_for_a_password(url: str, shown: str) -> None:
    with producer_app(url) as app:
        connection = app.connection()
        assert (connection.as_uri(), connection.clone().as_uri()) == (shown, shown)


def test_a_consumer_is_cancelled_amid_its_cancel_as_by_a_second_ctrl_c() -> None:
    with producer_app("redis://unused:6379/0") as app, Connection("memory://") as connection:
        channel = connection.default_channel
        queues = [Queue(name, Exchange(name), name) for name in ("a", "b", "c")]
        consumer = app.amqp.TaskConsumer(channel, queues=queues)
        consumer.consume()
        cancelled: list[str] = []

        def cancel(tag: str) -> None:
            cancelled.append(tag)
            if len(cancelled) == 1:
                consumer.cancel()

        channel.basic_cancel = cancel
        consumer.cancel()
        assert len(cancelled) == 3
        assert not any(consumer.consuming_from(queue) for queue in queues)
