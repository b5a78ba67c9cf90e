"""Redis' own clock, which all processes share."""

from __future__ import annotations

from redis import Redis


def now_ms(client: Redis) -> int:
    """Milliseconds of Unix time. Raises ``RedisError``."""
    seconds, microseconds = client.time()
    return 1000 * int(seconds) + int(microseconds) // 1000
