"""One delivery of a job: its unvalidated arguments and its enqueue time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.broker.queues import priority_of
from llorch_worker.contract import (
    REQUESTS,
    TASK_NAME,
    Fault,
    InvalidRequest,
    JobRequest,
    describe,
)
from llorch_worker.contract.plain_objects import unmark_plain

_JSON_FIELDS = frozenset(
    {"metadata", "tools", "response_format", "structured_outputs", "chat_template_kwargs"}
)
"""Fields with objects of any names."""


@dataclass(frozen=True)
class Delivery:
    """The arguments and headers that Celery passes to the task, not yet validated."""

    claim: Claim
    """The claim that this delivery alone belongs to; the job may be claimed again meanwhile."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    task: str = TASK_NAME
    args: Sequence[Any] = ()
    enqueued_at_s: float | None = None
    """Unix time at which the producer sent the job; None if the message does not say."""
    time_limits: Sequence[object] = ()
    """Celery's hard and soft time limit in seconds; None where there is none."""
    tenant: object = None
    """The one in whose line the job waited; None if it waited with the jobs without a tenant."""

    def request(self) -> JobRequest:
        """The validated request.

        Raises:
            InvalidRequest: a field breaks a rule, or the message has positional arguments, time
                limits, or a tenant in whose line it did not wait.
        """
        limits = zip(("time_limit", "soft_time_limit"), self.time_limits, strict=False)
        rule = "is not supported: give the job a deadline_s"
        faults = [Fault(field=name, rule=rule, got=describe(s)) for name, s in limits if s]
        if faults:
            raise InvalidRequest.from_faults(faults)
        if self.args:
            rule = "must be empty: fields go by name"
            raise InvalidRequest.from_fault("args", rule, describe(self.args))
        request = REQUESTS[self.task](
            **{
                name: unmark_plain(value) if name in _JSON_FIELDS else value
                for name, value in self.fields.items()
            }
        )
        if request.tenant not in (None, self.tenant):
            rule = "has a share only in jobs that Client or a gateway sends: leave it out"
            raise InvalidRequest.from_fault("tenant", rule, describe(request.tenant))
        queued = priority_of(self.claim.list_key)
        # A stock producer says it with the queue alone. A job from the high queue may be here
        # beyond the worker's room: if it preempted nothing, it would keep other high jobs out.
        if "priority" in self.fields and queued != "high":
            return request
        return request.model_copy(update={"priority": queued})

    def queued_at_s(self) -> float:
        """When the job was enqueued, as Unix time by this machine's clock.

        The wait is measured by Redis' clock, so a wrong clock of this machine neither shortens nor
        extends deadlines. If the producer sent no time, the first claim counts.
        """
        return self._here_s(self._since_s)

    def deadline_ms(self, deadline_s: float) -> float:
        """When a job with this ``deadline_s`` must have ended, by Redis' clock."""
        return 1e3 * (min(self._since_s, self.claim.claimed_ms / 1e3) + deadline_s)

    def retried_at_s(self) -> float | None:
        """When its dead letter was last retried, by this machine's clock; None if it never was.

        What is shown of the wait counts from there, and the deadline does not.
        """
        return None if self.claim.retried_ms is None else self._here_s(self.claim.retried_ms / 1e3)

    @property
    def _since_s(self) -> float:
        sent_s = self.enqueued_at_s
        return self.claim.first_claimed_ms / 1e3 if sent_s is None else sent_s

    def _here_s(self, since_s: float) -> float:
        return time.time() - max(0.0, self.claim.claimed_ms / 1e3 - since_s)
