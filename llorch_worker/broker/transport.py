"""A kombu transport whose consumers claim jobs instead of popping them.

Stock producers push to the same lists. kombu's own Redis transport pops a message with BRPOP,
registers it afterwards, and loses it if the worker dies in between. This one claims it with one
script that pops, counts the attempt and registers the lease (``lua/claim.lua``).

A job outlives its connection: it keeps running through a reconnect and is settled over another
connection when it ends.
"""

from __future__ import annotations

from typing import Any

from kombu import transport as kombu_transports
from kombu.transport import redis as kombu_redis

from llorch_worker.broker.claim_channel import ClaimChannel
from llorch_worker.broker.claims import ClaimTerms
from llorch_worker.broker.sentinel_channel import SentinelChannel


class ClaimTransport(kombu_redis.Transport):
    """kombu's Redis transport, with channels that claim."""

    Channel = ClaimChannel
    _loop: Any = None
    _next_look: Any = None

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        super().register_with_event_loop(connection, loop)
        self._loop = loop
        # What asked for a look before belonged to a connection that is lost.
        self._next_look = None

    def look_again_in(self, seconds: float) -> None:
        """Claims after ``seconds``, with or without a ring."""
        if self._next_look is not None:
            self._next_look.cancel()
        if self._loop is not None:
            self._next_look = self._loop.call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        self._next_look = None
        for channel in tuple(self.cycle._channels):
            channel.look_again()


class SentinelClaimChannel(ClaimChannel, SentinelChannel):
    """A channel that claims from the master that Sentinel names."""

    connection_class = SentinelChannel.connection_class
    connection_class_ssl = SentinelChannel.connection_class_ssl


class SentinelClaimTransport(ClaimTransport):
    """:class:`ClaimTransport` through Sentinel."""

    default_port = kombu_redis.SentinelTransport.default_port
    Channel = SentinelClaimChannel


_TRANSPORTS = {
    "redis": ClaimTransport,
    "rediss": ClaimTransport,
    "sentinel": SentinelClaimTransport,
}


def keep_claims(connection: Any) -> None:
    """Keeps the jobs of a lost connection in this worker; call it before the cleanup."""
    for channel in connection.transport.channels:
        channel.do_restore = False


def install(terms: ClaimTerms, worker: str) -> None:
    """Makes the Redis schemes select these transports in this process from now on.

    Every channel claims under the name ``worker`` and on ``terms``. This sets an alias rather than
    ``broker_transport``, because kombu shows that setting's value as the URL's scheme in banners,
    logs and ``inspect``.
    """
    ClaimChannel.terms, ClaimChannel.worker = terms, worker
    for scheme, transport in _TRANSPORTS.items():
        kombu_transports.TRANSPORT_ALIASES[scheme] = f"{__name__}:{transport.__name__}"
        kombu_transports._transport_cache.pop(scheme, None)
