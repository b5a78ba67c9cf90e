"""Celery apps of ours, and how logs show where they are connected."""

from __future__ import annotations

import pytest

from llorch_worker.broker.producer import producer_app


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
