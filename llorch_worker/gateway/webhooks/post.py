"""One attempt to deliver a webhook."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime

import httpcore
from standardwebhooks import Webhook as Signer

from llorch_worker.gateway.webhooks.address import ForbiddenAddress, PinnedBackend
from llorch_worker.gateway.webhooks.outbox import Webhook

ATTEMPT_S = 15.0
"""How long a receiver has for its answer."""
CONNECT_S = 5.0
_TIMEOUTS = {"connect": CONNECT_S, "read": ATTEMPT_S, "write": ATTEMPT_S, "pool": ATTEMPT_S}


class NotDelivered(Exception):
    """The receiver did not take it. The message names no part of the URL."""

    def __init__(self, reason: str, *, for_good: bool = False, answered: bool = True) -> None:
        super().__init__(reason)
        self.for_good, self.answered = for_good, answered


class Poster:
    """Posts bodies to URLs. It follows no redirect and reads no body of an answer."""

    def __init__(self, *, private: bool) -> None:
        """``private``: whether private addresses are allowed."""
        self._private = private
        self._ssl = ssl.create_default_context()
        # Each key's own: slow name servers of one must not hold up the webhooks of others.
        self._pools: dict[str, httpcore.AsyncConnectionPool] = {}

    def _pool(self, caller: str) -> httpcore.AsyncConnectionPool:
        if caller not in self._pools:
            self._pools[caller] = httpcore.AsyncConnectionPool(
                ssl_context=self._ssl,
                # Those who deliver bound it; waiting here for slow receivers would fail others.
                max_connections=None,
                max_keepalive_connections=0,
                network_backend=PinnedBackend(private=self._private),
            )
        return self._pools[caller]

    async def post(self, webhook: Webhook, secret: str) -> None:
        """Raises ``NotDelivered`` unless the receiver answers 2xx."""
        body = webhook.body or ""
        now = datetime.now(UTC)
        headers: dict[str | bytes, str | bytes] = {
            "Content-Type": "application/json",
            "User-Agent": "llorch-webhooks",
            "webhook-id": webhook.id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": Signer(secret).sign(webhook.id, now, body),
        }
        try:
            async with asyncio.timeout(ATTEMPT_S):
                async with self._pool(webhook.caller).stream(
                    "POST",
                    webhook.url,
                    headers=headers,
                    content=body.encode(),
                    extensions={"timeout": _TIMEOUTS},
                ) as response:
                    status = response.status
        except (TimeoutError, httpcore.TimeoutException):
            raise NotDelivered(f"no answer within {ATTEMPT_S:g} s", answered=False) from None
        except ForbiddenAddress as error:
            raise NotDelivered(str(error)) from None
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            reason = f"{type(error).__name__}: the connection failed"
            raise NotDelivered(reason, answered=False) from None
        if not 200 <= status < 300:
            # 410 is how a receiver says that it wants no more of them.
            raise NotDelivered(f"the receiver answered {status}", for_good=status == 410)

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.aclose()
