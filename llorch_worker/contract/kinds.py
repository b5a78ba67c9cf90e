"""The tasks, and what each takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from typing_extensions import TypeVar

from llorch_worker.contract.errors import InvalidRequest
from llorch_worker.contract.job_request import JobRequest, summary_of
from llorch_worker.contract.request import GenerationRequest
from llorch_worker.contract.result import GenerationResult, JobResult
from llorch_worker.contract.shown import shown
from llorch_worker.contract.texts_request import EmbedRequest, RerankRequest, ScoreRequest
from llorch_worker.contract.texts_result import EmbeddingResult, RerankResult, ScoreResult

REQUESTS: Final[Mapping[str, type[JobRequest]]] = {
    kind.task: kind for kind in (GenerationRequest, EmbedRequest, RerankRequest, ScoreRequest)
}
"""The request of each task, by the task's name."""
RESULTS: Final[Mapping[str, type[JobResult]]] = {
    GenerationRequest.task: GenerationResult,
    EmbedRequest.task: EmbeddingResult,
    RerankRequest.task: RerankResult,
    ScoreRequest.task: ScoreResult,
}
"""The result of each task, by the task's name."""
AnyResult = GenerationResult | EmbeddingResult | RerankResult | ScoreResult
"""Each has a field that no other one has."""
Asked = TypeVar("Asked", bound=JobRequest, default=GenerationRequest)
Result = TypeVar("Result", bound=JobResult, default=GenerationResult)
"""Of a job, which most often generates text."""
TASK_NAME: Final = GenerationRequest.task
TEXT_TASKS: Final = (EmbedRequest.task, RerankRequest.task, ScoreRequest.task)

_PATHS: Final = {
    GenerationRequest.task: "/v1/chat/completions",
    EmbedRequest.task: "/v1/embeddings",
    RerankRequest.task: "/v1/rerank",
    ScoreRequest.task: "/v1/score",
}


def summarise(fields: Mapping[str, Any], task: object = TASK_NAME) -> str:
    """The ``fields`` of a task's request, valid or not: see :func:`summary_of`."""
    kind = REQUESTS.get(task) if isinstance(task, str) else None
    return summary_of(kind or GenerationRequest, fields)


def check_task(request: JobRequest, model: str, tasks: Collection[str]) -> None:
    """Raises InvalidRequest if ``model`` does other ``tasks`` than the request's."""
    if request.task in tasks:
        return
    what = {TASK_NAME: "generates text", EmbedRequest.task: "makes vectors"}
    does = next((what[task] for task in tasks if task in what), "scores pairs of texts")
    paths = [_PATHS[task] for task in tasks if task in _PATHS]
    over_http = f"; over HTTP {_listed(paths)}" if paths else ""
    rule = f"{shown(model)} {does}: send {_listed(tasks)}{over_http}"
    raise InvalidRequest.from_fault("task", rule, request.task)


def _listed(tasks: Collection[str]) -> str:
    *others, last = tasks
    return f"{', '.join(others)} or {last}" if others else last
