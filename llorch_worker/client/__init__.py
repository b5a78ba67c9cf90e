"""Submits jobs, follows their tokens and reads their results, sync or async. Imports no torch."""

from llorch_worker.client.async_client import AsyncClient, AsyncJob
from llorch_worker.client.client import Client, Job
from llorch_worker.client.status import JobState, JobStatus
from llorch_worker.client.stream import StreamEntry
from llorch_worker.contract.errors import BrokerUnavailable

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "BrokerUnavailable",
    "Client",
    "Job",
    "JobState",
    "JobStatus",
    "StreamEntry",
]
