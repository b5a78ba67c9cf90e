"""Measures every request."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llorch_worker.telemetry.metrics.gateway_metrics import GatewayMetrics


def measuring(app: ASGIApp, metrics: GatewayMetrics) -> ASGIApp:
    """``app``, with every request counted in ``metrics``."""

    async def measured(scope: Scope, receive: Receive, send: Send) -> None:
        # Scrapes are not what the gateway is for, and one that counted itself would never show 0.
        if scope["type"] != "http" or scope["path"] == "/metrics":
            return await app(scope, receive, send)
        with metrics.request(scope["method"]) as answer:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    answer.status = message["status"]
                await send(message)

            try:
                await app(scope, receive, noting)
            finally:
                # The router writes it there.
                if (route := scope.get("route")) is not None:
                    answer.route = route.path
        return None

    return measured
