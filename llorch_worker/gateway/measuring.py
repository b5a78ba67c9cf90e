"""Measures every request."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi.routing import iter_route_contexts
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llorch_worker.telemetry.metrics.gateway_metrics import OTHER, GatewayMetrics


def measuring(app: ASGIApp, metrics: GatewayMetrics, routes: Sequence[BaseRoute]) -> ASGIApp:
    """``app``, with every request counted in ``metrics``. ``routes`` are all that it has."""
    # A route of an included router does not know the router's prefix.
    templates = {id(each.original_route): each.path for each in iter_route_contexts(routes)}

    async def measured(scope: Scope, receive: Receive, send: Send) -> None:
        # Scrapes are not what the gateway is for, and one that counted itself would never show 0.
        if scope["type"] != "http" or scope["path"] == "/metrics":
            return await app(scope, receive, send)
        with metrics.request(scope["method"]) as answer:
            began = False

            async def noting(message: Message) -> None:
                nonlocal began
                if message["type"] == "http.response.start":
                    answer.status, began = message["status"], True
                await send(message)

            try:
                await app(scope, receive, noting)
            except ClientDisconnect:
                raise
            except Exception:
                # Starlette answers it with 500, outside of all middleware.
                if not began:
                    answer.status = 500
                raise
            finally:
                # The router writes it there.
                answer.route = templates.get(id(scope.get("route"))) or OTHER
        return None

    return measured
