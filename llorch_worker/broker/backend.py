"""Celery's Redis result backend, with one end for each job.

Keys and documents are Celery's own, so ``AsyncResult`` of any app reads them. The write differs:
one script (``lua/finish.lua``) stores the state only while the claim holds and the job has not
ended, and writes the stream's last events in the same step.
"""

from __future__ import annotations

from typing import Any

from celery.backends.redis import RedisBackend, SentinelBackend

from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.broker.message import encode_json
from llorch_worker.broker.results import SUCCESS, decode_state, result_meta, terminal_event
from llorch_worker.broker.scripts import run_script
from llorch_worker.contract import GenerationResult, LlorchError, encode_event


class _OneEnd:
    """A mixin for Celery's backends; see the module's docstring."""

    def _store_result(
        self: Any,
        task_id: str,
        result: Any,
        state: str,
        traceback: str | None = None,
        request: Any = None,
        **_: Any,
    ) -> Any:
        # Like Celery's, but without the arguments: ``result_extended`` would store the prompt.
        children = self.current_task_children(request)
        meta = result_meta(task_id, state, result, traceback=traceback, children=children)
        for name, of_request in (("group_id", "group"), ("parent_id", "parent_id")):
            if related := getattr(request, of_request, None):
                meta[name] = related
        document = encode_json(meta)
        end: Any = result if state == SUCCESS else decode_state(document).end
        event = ""
        # Celery's own tasks, such as celery.accumulate, return other values and have no stream.
        if isinstance(end, GenerationResult | LlorchError):
            event = encode_event(terminal_event(end))
        claim = HELD_CLAIMS.get(task_id)
        entries: tuple[Any, ...] = ()
        if claim is not None and event:
            last = HELD_CLAIMS.last_entries(claim)
            entries = (last.first_entry, *map(encode_event, last.events))
        stored = run_script(
            self.client,
            "finish",
            [
                task_id,
                "" if claim is None else claim.fence,
                document,
                self.app.settings.result_ttl_s,
                event,
                self.app.settings.stream_ttl_s,
                *entries,
            ],
        )
        if claim is not None and event and stored:
            HELD_CLAIMS.note_end(claim)
        return result


class ResultBackend(_OneEnd, RedisBackend):  # type: ignore[misc]
    """The backend for ``redis://`` and ``rediss://``."""


class SentinelResultBackend(_OneEnd, SentinelBackend):  # type: ignore[misc]
    """The backend for ``sentinel://``."""
