"""The gateway as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from socket import gethostname

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from llorch_worker import __version__
from llorch_worker.broker.figures.history import keeping_history
from llorch_worker.broker.standing_in import standing_in
from llorch_worker.client.cancelling import beside
from llorch_worker.gateway import documentation, errors
from llorch_worker.gateway.access_log import logging_access
from llorch_worker.gateway.batches.runner import drive_all
from llorch_worker.gateway.body_limit import BodyLimit
from llorch_worker.gateway.collecting import Collecting
from llorch_worker.gateway.console import files as console_files
from llorch_worker.gateway.console import routes as console_routes
from llorch_worker.gateway.documentation import Documentation
from llorch_worker.gateway.entrance import entering
from llorch_worker.gateway.files.record import remove_expired_files
from llorch_worker.gateway.gateway import Gateway
from llorch_worker.gateway.limits import saying_limits
from llorch_worker.gateway.loopback import LoopbackOnly
from llorch_worker.gateway.measuring import measuring
from llorch_worker.gateway.open_requests import OpenRequests
from llorch_worker.gateway.plain_http import answering_head, naming_requests, one_spelling
from llorch_worker.gateway.request_spans import REQUEST_SPANS, without_query
from llorch_worker.gateway.routes import (
    batches,
    completions,
    files,
    health,
    jobs,
    messages,
    metrics,
    models,
    responses,
    texts,
    tokens,
    usage,
    webhooks,
)
from llorch_worker.gateway.settings import GatewaySettings
from llorch_worker.settings import Settings
from llorch_worker.telemetry.metrics.gateway_metrics import GatewayMetrics
from llorch_worker.telemetry.traces.tracing import is_traced, start_tracing

FILES_PATH = "/v1/files"
_ROUTERS = (
    health.router,
    metrics.router,
    models.router,
    completions.router,
    messages.router,
    responses.router,
    files.router,
    batches.router,
    jobs.router,
    texts.router,
    tokens.router,
    usage.router,
    webhooks.router,
    console_routes.router,
    console_files.router,
    documentation.router,
)


def create_app(settings: Settings, own: GatewaySettings) -> FastAPI:
    """The application. Raises ``CommandError`` if the file of keys cannot be read."""
    gateway = Gateway(settings, own)
    console = console_routes.Console(settings.redis_url)
    requests = OpenRequests()
    measured = GatewayMetrics(settings.redis_url)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        with standing_in(settings), keeping_history(settings.redis_url):
            async with (
                gateway.webhooks.running(),
                beside(drive_all(gateway.batches, gateway.new_run), "llorch-batches"),
                beside(remove_expired_files(gateway.files, gateway.file_store), "llorch-files"),
                Collecting(requests.count).running(),
            ):
                yield
        await requests.ended()
        await gateway.close()
        console.close()
        measured.close()
        await to_thread.run_sync(tracing.close)

    tracing = start_tracing("llorch-gateway", gethostname())
    app = FastAPI(
        title="llorch gateway",
        version=__version__,
        lifespan=running,
        telemetry=REQUEST_SPANS | {"tracing": is_traced()},
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    app.state.console = console
    app.state.metrics = measured
    app.state.documentation = Documentation(app, needs_key=own.keys is not None)
    app.state.scrapes = CapacityLimiter(metrics.MOST_SCRAPES)
    errors.install(app)
    for router in _ROUTERS:
        app.include_router(router)
    app.add_middleware(answering_head)
    app.add_middleware(
        BodyLimit,
        admit=gateway.caller,
        limit_of=lambda path: own.max_file_bytes if path == FILES_PATH else own.max_body_bytes,
        timeout_s=own.body_timeout_s,
    )
    if own.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=own.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    if own.keys is None:
        app.add_middleware(LoopbackOnly, origins=own.cors_origins)
    else:
        app.add_middleware(saying_limits)
    app.add_middleware(requests.middleware)
    app.add_middleware(measuring, metrics=measured, routes=app.routes)
    if is_traced():
        app.add_middleware(without_query)
    # Around everything: Starlette answers defects outside of all middleware.
    build = app.build_middleware_stack

    def stack() -> ASGIApp:
        return naming_requests(one_spelling(logging_access(entering(build(), gateway.name_of))))

    app.build_middleware_stack = stack  # type: ignore[method-assign]
    return app
