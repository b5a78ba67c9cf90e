"""What Prometheus asks for. Only operators may ask, because it shows the whole fleet."""

from __future__ import annotations

import anyio
from anyio import CapacityLimiter
from fastapi import APIRouter, Depends, Request, Response

from llorch_worker.gateway.console.routes import operator
from llorch_worker.telemetry.metrics.gateway_metrics import GatewayMetrics
from llorch_worker.telemetry.metrics.http_server import exposition

router = APIRouter(include_in_schema=False, dependencies=[Depends(operator)])

MOST_SCRAPES = 2
"""As many threads may wait for Redis; the other requests have theirs."""


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """This gateway's requests and the whole fleet."""
    found: GatewayMetrics = request.app.state.metrics
    limiter: CapacityLimiter = request.app.state.scrapes
    body, content_type = await anyio.to_thread.run_sync(
        exposition, found.registry, request.headers.get("accept"), limiter=limiter
    )
    return Response(body, media_type=None, headers={"Content-Type": content_type})
