"""kombu's Redis transport for control commands and events, as workers need it: jobs come another
way, see ``worker/claimer.py``. What Redis refuses here, or others write here, ends no worker."""

from __future__ import annotations

from queue import Empty
from typing import Any

from kombu import transport as kombu_transports
from kombu.log import get_logger
from kombu.transport import redis as kombu_redis
from redis.exceptions import RedisError, ResponseError

from llorch_worker.broker.connections.connection import is_refused_write
from llorch_worker.broker.connections.outage import RedisOutage
from llorch_worker.broker.connections.sentinel import FollowingConnection
from llorch_worker.broker.connections.time_limits import LimitedConnection, LimitedSSLConnection
from llorch_worker.broker.messages.body import is_exit

logger = get_logger(__name__)

# kombu annotates little of what channels are made of.
_Channel: Any = kombu_redis.Channel
_QoS: Any = kombu_redis.QoS
_SentinelChannel: Any = kombu_redis.SentinelChannel
_Transport: Any = kombu_redis.Transport


class NothingUnacknowledged(_QoS):  # type: ignore[misc]
    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing, where kombu's would end a worker that starts at maxmemory: no control
        command is ever delivered again."""


class ControlChannel(_Channel):  # type: ignore[misc]
    """kombu's channel, hardened."""

    QoS = NothingUnacknowledged
    connection_class: Any = LimitedConnection
    connection_class_ssl: Any = LimitedSSLConnection

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._binding = RedisOutage("keep queues for replies")
        super().__init__(*args, **kwargs)

    def _size(self, queue: str) -> int:  # noqa: ARG002 - kombu's signature
        """What nobody reads of a queue that is declared. kombu asks in a transaction, which Redis
        refuses at maxmemory."""
        return 0

    def _queue_bind(self, exchange: str, *args: Any) -> None:
        try:
            super()._queue_bind(exchange, *args)
        except ResponseError as error:
            if not is_refused_write(error):
                raise
            # Only producers use the tables; workers receive inspect and revoke by pub/sub. Raising
            # the error would end the worker, and only workers can make room at maxmemory.
            logger.debug("not bound to %s: %s", exchange, error)

    def maybe_refresh_binding_expiry(self) -> None:
        """Like kombu's, which logs a traceback each second while Redis refuses."""
        try:
            super().maybe_refresh_binding_expiry()
        except ResponseError as error:
            self._binding.failed(error)

    def _refresh_bindings(self, consumed: list[str]) -> None:
        # A channel without such queues asks Redis nothing, so that its success means nothing.
        super()._refresh_bindings(consumed)
        self._binding.over()

    def get_table(self, exchange: str) -> list[tuple[str, ...]]:
        """The queues that take replies; also those of apps with kombu's option ``sep=":"``, as
        Celery's documentation shows it. One of them would otherwise keep all replies back."""
        parts = (
            each if len(each) == 3 else tuple(each[0].split(":"))
            for each in super().get_table(exchange)
        )
        return [each for each in parts if len(each) == 3]

    def _receive_one(self, c: Any) -> Any:
        """Like kombu's, but what it cannot read of a control message ends no worker. All workers
        hear the same one."""
        try:
            return super()._receive_one(c)
        except (RedisError, OSError, Empty):
            raise
        except BaseException as error:
            if is_exit(error):
                raise
            logger.error("ignored a control message that cannot be read")
            raise Empty from None

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        # As in all our connections, so that Redis refuses the same on each.
        parameters: dict[str, Any] = super()._connparams(asynchronous)
        return parameters | {"protocol": 2}


class ControlTransport(_Transport):  # type: ignore[misc]
    Channel = ControlChannel


class SentinelControlChannel(ControlChannel, _SentinelChannel):  # type: ignore[misc]
    connection_class = FollowingConnection
    connection_class_ssl = _SentinelChannel.connection_class_ssl


class SentinelControlTransport(ControlTransport):
    """:class:`ControlTransport` through Sentinel."""

    default_port = kombu_redis.SentinelTransport.default_port
    Channel = SentinelControlChannel


_TRANSPORTS = {
    "redis": ControlTransport,
    "rediss": ControlTransport,
    "sentinel": SentinelControlTransport,
}


def install() -> None:
    """Makes the Redis schemes select these transports in this process from now on.

    This sets an alias rather than ``broker_transport``, because kombu shows that setting's value as
    the URL's scheme in banners, logs and ``inspect``.
    """
    for scheme, transport in _TRANSPORTS.items():
        kombu_transports.TRANSPORT_ALIASES[scheme] = f"{__name__}:{transport.__name__}"
        kombu_transports._transport_cache.pop(scheme, None)
