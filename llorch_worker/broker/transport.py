"""kombu's Redis transport for workers, unharmed by what is no message and by a lost connection.

kombu decodes whatever it pops inside the worker's event loop: a list entry that is not one of its
envelopes ends the whole worker, or sends it round and round through reconnects. Here it is taken
off the list, noted by its size and left behind.

kombu also lets a closed channel return what it delivered, and cannot acknowledge through it any
more; with Redis gone the attempt ends the worker. Here the jobs that run when the connection is
lost run on, and are acknowledged when they end, over a connection of their own.

Producers keep the stock transport.
"""

from __future__ import annotations

import binascii
from queue import Empty
from typing import Any

from kombu import transport as kombu_transports
from kombu.log import get_logger
from kombu.transport import redis as kombu_redis
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads

logger = get_logger(__name__)

_SCHEMES = ("redis", "rediss")
_NO_ENVELOPE = (
    binascii.Error, LookupError, TypeError, ValueError, AttributeError, RecursionError
)  # fmt: skip


class JobChannel(kombu_redis.Channel):
    """Delivers what is a message and drops what is none; acknowledges after it was closed, too."""

    _kept_parameters: dict[str, Any]

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        if self.connection is None or self.connection.client is None:
            return dict(self._kept_parameters)
        parameters: dict[str, Any] = super()._connparams(asynchronous)  # type: ignore[no-untyped-call]
        if not asynchronous:
            self._kept_parameters = parameters
        return parameters

    def _brpop_read(self, **options: Any) -> bool:
        connection = self.client.connection
        try:
            reply = self.client.parse_response(connection, "BRPOP", **options)
        except self.connection_errors:
            # Closed, it is opened and registered anew at the next turn of the loop.
            connection.disconnect()
            raise
        finally:
            self._in_poll: Any = None
        self._flush_brpop_reauth()  # type: ignore[no-untyped-call]
        if not reply:
            raise Empty
        key, raw = reply
        queue = bytes_to_str(key).rsplit(self.sep, 1)[0]
        self._queue_cycle.rotate(queue)
        envelope = self._envelope(queue, raw)
        if envelope is not None:
            self.connection._deliver(envelope, queue)
        return True

    def _envelope(self, queue: str, raw: bytes) -> dict[str, Any] | None:
        try:
            envelope = loads(bytes_to_str(raw))
            # What delivery and acknowledgement will read, read once where failing is harmless.
            message = self.Message(envelope, channel=self)  # type: ignore[no-untyped-call]
            where = message.delivery_info["exchange"], message.delivery_info["routing_key"]
            valid = isinstance(message.delivery_tag, str) and all(
                isinstance(name, str) for name in where
            )
        except _NO_ENVELOPE:
            valid = False
        if valid:
            return dict(envelope)
        logger.error("dropped an entry of %d bytes from %s: it is no message", len(raw), queue)
        return None


class Transport(kombu_redis.Transport):
    """Redis with :class:`JobChannel`."""

    Channel = JobChannel


def keep_unacknowledged(connection: Any) -> None:
    """Before a lost connection is cleaned up: what it delivered stays with this worker."""
    for channel in connection.transport.channels:
        channel.do_restore = False


def install() -> None:
    """Makes ``redis://`` and ``rediss://`` mean this transport, in this process from now on.

    An alias rather than the ``broker_transport`` setting, because kombu shows the setting's value
    as the scheme of the URL in banners, logs and ``inspect``.
    """
    for scheme in _SCHEMES:
        kombu_transports.TRANSPORT_ALIASES[scheme] = f"{__name__}:Transport"
        kombu_transports._transport_cache.pop(scheme, None)
