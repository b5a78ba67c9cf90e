"""The settings of a process, read once from ``LLORCH_*`` variables and passed down frozen."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from llorch_worker.demo_model import DEMO, demo_model, model_path
from llorch_worker.engine_options import (
    DrafterChoice,
    Dtype,
    EngineOptions,
    KernelChoice,
    KvDtype,
    PoolingChoice,
    PrefixSharing,
)

_BYTE_SIZE = TypeAdapter(ByteSize)


def _read_bytes(value: Any) -> Any:
    try:
        return int(_BYTE_SIZE.validate_python(value)) if isinstance(value, str) else value
    except ValidationError:
        raise PydanticCustomError(
            "bytes", "must be a number of bytes, or a size such as 512MiB, 8GB or 1.5GiB"
        ) from None


def _form(pattern: str, rule: str) -> AfterValidator:
    """None or a text of this form, which ``rule`` puts in words for users."""

    def check(text: str | None) -> str | None:
        if text is None or re.fullmatch(pattern, text):
            return text
        raise PydanticCustomError("form", rule)

    return AfterValidator(check)


Bytes = Annotated[int, BeforeValidator(_read_bytes), Field(ge=1)]
"""A size: bytes, or a number with a unit. ``KiB`` is 1024 bytes, ``KB`` 1000."""

LONGEST_S = 10**9
"""30 years: timers and Redis take no much longer times, and no infinite ones."""
Seconds = Annotated[float, Field(le=LONGEST_S, allow_inf_nan=False)]
WholeSeconds = Annotated[int, Field(ge=1, le=LONGEST_S)]

LogFormat = Literal["text", "json"]
"""``text``: lines to read; ``json``: one document a line, and one line a job."""

MAX_MESSAGE_BYTES = 32 * 2**20
DEAD_LETTERS_BYTES = 256 * 2**20

_ENGINE = EngineOptions()
_WEIGHT = r"[A-Za-z0-9._-]+=[1-9][0-9]{0,3}"
_HTTP = re.compile("https?://")
_SERVER = re.compile(r"(?P<url>https?://[^\s/?#@=]+(/[^\s?#@=]*)?)=(?P<model>.+)")
_SERVER_RULE = (
    "must be http://host:port/v1=NAME for a server, with the model as the server calls it, without "
    "a user or a key, and without --engine (LLORCH_ENGINE_URL)"
)


def _no_server(model: Any) -> Any:
    """What is left of ``URL=NAME`` where that is no server: see :meth:`Settings._find_server`."""
    if isinstance(model, str) and _HTTP.match(model):
        raise PydanticCustomError("server", _SERVER_RULE)
    return model


def _locks_folder() -> Path:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        # No folder takes files. Only a worker on a GPU needs one, and says so.
        folder = "/tmp"
    return Path(folder, "llorch-devices")


class Settings(BaseSettings):
    """One frozen object; each field is the environment variable ``LLORCH_<FIELD>``.

    An empty variable counts as unset, because compose files and systemd units pass on variables
    that their own environment lacks as empty ones.
    """

    model_config = SettingsConfigDict(
        env_prefix="LLORCH_",
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        # The docstrings are also the help of the options that set these fields.
        use_attribute_docstrings=True,
    )

    redis_url: str = "redis://localhost:6379/0"
    """Redis for jobs, event streams and results: ``redis://host:port/db``."""

    model: Annotated[Path, BeforeValidator(model_path), BeforeValidator(_no_server)] = Field(
        default_factory=demo_model
    )
    """A .gguf file, a Hugging Face folder, ``hf:OWNER/NAME:QUANT`` of the hub, ``URL=NAME`` of a
    server (see ``engine_url``), or ``demo``, a small model to try."""
    models_folder: Path | None = None
    """A folder of .gguf files and Hugging Face folders: the worker serves each."""
    models: str = Field("", validate_default=True)
    """Several models for one worker in place of ``model``, between commas. It keeps one loaded, or
    ``resident``, and changes as the jobs that wait ask for. Those of servers, ``URL=NAME``, are
    always there."""
    model_name: Annotated[
        str | None, _form("[A-Za-z0-9._-]{1,200}", "must be 1 to 200 of A-Za-z0-9._-")
    ] = None
    """The name that jobs ask for; by default the name of the file or folder."""
    resident: int = Field(1, ge=1, validate_default=True)
    """How many of its models a worker keeps loaded at a time. They share its threads and its memory
    alike."""
    pin: str = ""
    """A model by name that the worker keeps loaded."""
    max_wait_s: Seconds = Field(60.0, gt=0)
    """How long jobs wait at most until a worker begins to load their model."""
    min_resident_s: Seconds = Field(10.0, ge=0)
    """How long a worker keeps a model at least."""
    idle_unload_s: Seconds | None = Field(None, gt=0)
    """After so long without jobs the engine ends; the next job has it loaded again. By default it
    stays."""
    engine_url: Annotated[
        str | None,
        _form(
            r"https?://[^\s/?#@]+(/[^\s?#@]*)?",
            "must be http://host:port/v1, without a user or a key: LLORCH_ENGINE_KEY has the key",
        ),
        AfterValidator(lambda url: url and url.rstrip("/")),
    ] = None
    """A server with OpenAI's API that computes in place of a model file: vLLM, SGLang, llama-server
    or another. ``--model`` is then the model as the server calls it."""
    engine_key: SecretStr | None = None
    """The server's key."""
    engine_key_file: Path | None = None
    """A file with the server's key, read again each time that the server comes back."""

    device: Annotated[
        str,
        _form(r"auto|cpu|cuda(:\d+)?", "must be auto, cpu, cuda, or cuda:N with a card's number"),
    ] = "auto"
    """``auto``, ``cpu``, ``cuda`` (the first free GPU) or ``cuda:N``."""
    processors: Annotated[
        str | None,
        _form(r"\d+(-\d+)?(,\d+(-\d+)?)*", "must be numbers and ranges, such as 0-7,16"),
    ] = None
    """Processors of a worker's threads, such as ``0-7,16``; by default all that the
    process may use. ``llorch up`` divides them among its CPU workers."""
    device_locks: Path = Field(default_factory=_locks_folder)
    """Folder of the locks that give each GPU one worker. Containers of a host must share it."""
    dtype: Dtype = "auto"
    """``auto``, ``float32``, ``bfloat16`` or ``float16``."""
    kernels: KernelChoice = "auto"
    """``auto`` (the fastest), ``torch``, or the instruction set of a CPU: ``avx2``, ``avxvnni``,
    ``avx512``, ``avx512vnni``, ``avx512bf16``, ``amx``, ``neon`` or ``neonbf16``."""
    kv_dtype: KvDtype = "auto"
    """Type of cached keys and values: ``auto`` (the compute dtype), ``fp8`` or ``int8``."""
    cuda_graphs: bool = True
    """Record decode steps as CUDA graphs and replay them."""
    batch_invariant: bool | None = None
    """Give a request the same tokens whatever else runs; by default in float32 only."""
    generation_config: Literal["auto", "none"] = "auto"
    """``auto``: temperature, top_p, top_k, min_p, repetition_penalty and most tokens that a job
    does not name are those of the model's files. ``none``: a worker does not announce them, a
    sender does not take them."""
    drafter: DrafterChoice = Field(_ENGINE.drafter, validate_default=True)
    """Draft tokens and check several in one step: ``off``, ``lookup`` in the sequence's own
    prompt and text, or ``suffix``, also in the recent texts of its tenant. ``auto``: ``suffix`` on
    CPUs where batches change no bit, else ``off``. The tokens stay the same."""
    suffix_bytes: Bytes = Field(_ENGINE.suffix_bytes, ge=2**16)
    """Memory for the recent texts of all tenants; the oldest go first."""
    max_sequences: int | None = Field(None, ge=1, le=1024)
    """Most sequences in flight; also Celery's concurrency and prefetch. By default 16 on a CPU, on
    a card 256, or as many as it has memory for."""
    max_context: int | None = Field(None, ge=1)
    """Most tokens in a sequence; by default the model's own context."""
    max_step_tokens: int | None = Field(None, ge=1)
    """Token budget of one engine step. It limits how long a long prompt delays running decodes. By
    default 512 on a CPU, on a card 8192, or what it has memory for."""
    kv_cache_bytes: Bytes | None = None
    """Size of the KV blocks, such as ``8GB``; by default enough for ``max_sequences`` full
    contexts, if they fit."""
    prefix_caching: bool = True
    """Reuse KV blocks for prompts with a common prefix."""
    prefix_sharing: PrefixSharing = "all"
    """Whose prompts share these blocks: ``all`` jobs', or those of each ``tenant`` apart."""
    pooling: PoolingChoice | None = None
    """How vectors are made of a text's tokens where the model's files do not say: ``last``,
    ``mean`` or ``cls``. A model that generates does both then. ``rank``: a folder of
    Qwen3-Reranker scores pairs, and generates nothing."""
    placement: bool = True
    """Prefer, for prompts with a common prefix, a worker that has the prefix in its cache."""

    low_waits_at_most_s: Seconds = Field(_ENGINE.low_waits_at_most_s, ge=0)
    """How long more urgent jobs may pass a lower priority; then its first job starts next."""
    tenant_weights: Annotated[
        str,
        _form(
            rf"({_WEIGHT}(,{_WEIGHT})*)?",
            "must be like acme=3,beta=2, with weights from 1 to 9999",
        ),
    ] = ""
    """``acme=3,beta=2``: a tenant's share of the workers, where others have 1."""

    lease_s: Seconds = Field(10.0, ge=1)
    """How long a job stays with a worker that no longer renews its leases."""
    sweep_s: Seconds = Field(5.0, gt=0)
    """How often workers look for jobs of dead workers. A job resumes within lease + sweep."""
    watchdog_s: Seconds = Field(60.0, ge=1)
    """If a step takes longer than this, the engine is killed, and the worker starts another."""
    max_attempts: int = Field(3, ge=1)
    """A job that kills this many engines without progress in between ends as ATTEMPTS_EXHAUSTED and
    becomes a dead letter."""
    max_deaths: int = Field(20, ge=1)
    """A job that loses this many engines and workers in all ends the same way."""
    max_message_bytes: Bytes = Field(MAX_MESSAGE_BYTES, ge=2**16)
    """The largest body of a message, once it is inflated; a larger one is refused."""
    dead_letters_bytes: Bytes = Field(DEAD_LETTERS_BYTES, ge=2**20)
    """Memory in Redis for dead letters, a quarter of it for those of one key or tenant; the oldest
    go first."""
    queue_limit: int = Field(10_000, ge=0)
    """The most jobs that may wait for this model before clients get QUEUE_FULL; 0: no limit."""
    drain_s: Seconds = Field(300.0, ge=0)
    """How long a stopping worker may finish its jobs; the rest go back to the queue."""
    residency_check_s: Seconds = Field(60.0, gt=0)
    """How often a worker checks that its GPU answers and holds the model and the cache."""
    health_file: Path | None = None
    """A file for probes, one for each worker. The worker renews it every 5 s while it takes jobs
    and its engine advances."""

    metrics_port: int | None = Field(None, ge=1, le=65535)
    """Serve metrics for Prometheus at the first free of 20 ports from here; by default off."""
    metrics_host: str = "127.0.0.1"
    """Address for metrics. Everyone who can reach it may read them."""

    log_format: LogFormat = "text"
    """How workers, gateways and exporters log: ``text``, or ``json`` with one line a job."""

    flush_interval_ms: int = Field(20, ge=1, le=50)
    """How often the publisher writes new tokens to the jobs' streams."""
    stream_ttl_s: WholeSeconds = 24 * 3600
    """How long a job's event stream stays after its end."""
    result_ttl_s: WholeSeconds = 24 * 3600
    """How long a job's result stays."""

    usage_days: int = Field(92, ge=0, le=36_500)
    """How many days the counts of what each tenant used are kept; 0 counts nothing."""

    @model_validator(mode="before")
    @classmethod
    def _find_server(cls, data: Any) -> Any:
        """Reads a model ``URL=NAME`` as an engine's URL and its model."""
        if not isinstance(data, dict) or data.get("engine_url"):
            return data
        if not (server := _SERVER.fullmatch(str(data.get("model")))):
            return data
        if data.get("models") or data.get("models_folder"):  # these replace it
            return {name: value for name, value in data.items() if name != "model"}
        return data | {"engine_url": server["url"], "model": server["model"]}

    @field_validator("models")
    @classmethod
    def _has_a_name_for_each(cls, models: str, info: ValidationInfo) -> str:
        folder = info.data.get("models_folder")
        if folder is not None and not _several("", folder):
            raise PydanticCustomError(
                "models", f"is empty, and LLORCH_MODELS_FOLDER {folder} holds no model"
            )
        several = _several(models, folder)
        if any(url is None and _HTTP.match(model) for url, model in several):
            raise PydanticCustomError("models", _SERVER_RULE)
        names = Counter(default_model_name(Path(model)) for _, model in several)
        if twice := [name for name, count in names.items() if count > 1]:
            raise PydanticCustomError(
                "models", f"names two models that would both be served as {twice[0]}"
            )
        return models

    @field_validator("model_name")
    @classmethod
    def _names_one_model(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is not None and len(_names(info)) > 1:
            raise PydanticCustomError("model_name", "names one model: leave it out with several")
        return name

    @field_validator("resident")
    @classmethod
    def _keeps_what_it_has(cls, resident: int, info: ValidationInfo) -> int:
        most = max(1, sum(url is None for url, _ in _given(info)))
        if resident > most:
            raise PydanticCustomError(
                "resident",
                f"must be at most {most}, as many as there are models that are no server's",
            )
        return resident

    @field_validator("pin")
    @classmethod
    def _pins_its_own(cls, pin: str, info: ValidationInfo) -> str:
        names = _names(info)
        if pin and pin not in names:
            served = ", ".join(names) or "one model alone, which it keeps"
            raise PydanticCustomError("pin", f"must be a model of this worker, which has {served}")
        return pin

    @field_validator("pooling")
    @classmethod
    def _makes_vectors_of_one_model(
        cls, pooling: PoolingChoice | None, info: ValidationInfo
    ) -> PoolingChoice | None:
        if pooling is not None and len(_names(info)) > 1:
            raise PydanticCustomError(
                "pooling",
                "is for one model: it would concern each of several",
            )
        return pooling

    @field_validator("engine_url")
    @classmethod
    def _serves_a_named_model(cls, url: str | None, info: ValidationInfo) -> str | None:
        if url is not None and _names(info):
            raise PydanticCustomError(
                "engine_url",
                "serves one model: name it with LLORCH_MODEL, or among several write URL=NAME",
            )
        if url is not None and info.data.get("model") in (None, demo_model()):
            raise PydanticCustomError(
                "engine_url", "needs --model (LLORCH_MODEL) too: the model as the server calls it"
            )
        return url

    @field_validator("drafter", mode="before")
    @classmethod
    def _has_no_former_name(cls, word: object) -> object:
        former = "LLORCH_SPECULATION", "LLORCH_DRAFT_MODEL"
        if word == "model" or any(os.environ.get(name) for name in former):
            raise PydanticCustomError(
                "removed",
                "must be auto, off, lookup or suffix, without LLORCH_SPECULATION, the former name, "
                "and without LLORCH_DRAFT_MODEL: the draft model was removed",
            )
        return word

    @property
    def of_each_model(self) -> tuple[Settings, ...]:
        """Settings of a worker of each of its models alone; these themselves if it has one."""
        alone = {"models": "", "models_folder": None, "pin": ""}
        several = _several(self.models, self.models_folder)
        return tuple(
            self.model_copy(update={"engine_url": url, "model": Path(model)} | alone)
            for url, model in several
        ) or (self,)

    @property
    def computes_here(self) -> bool:
        """Whether not all of its models are servers'."""
        return any(each.engine_url is None for each in self.of_each_model)

    @property
    def seats(self) -> int:
        """How many models a worker keeps at a time: ``resident`` and those of servers."""
        servers = sum(each.engine_url is not None for each in self.of_each_model)
        return servers + self.resident * self.computes_here

    @property
    def served_name(self) -> str:
        """The name of ``model`` as jobs and queues use it."""
        return self.model_name or default_model_name(self.model)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of a worker's models."""
        return tuple(each.served_name for each in self.of_each_model)

    @property
    def engine_options(self) -> EngineOptions:
        """The settings that the engine reads."""
        own = type(self).model_fields
        names = (each.name for each in fields(_ENGINE) if each.name in own)
        return EngineOptions(**{name: getattr(self, name) for name in names})

    @property
    def environment(self) -> dict[str, str]:
        """These settings as the ``LLORCH_*`` variables that a child process reads them from."""
        # A key is only in the environment that children inherit.
        return {
            f"LLORCH_{name.upper()}": str(value)
            for name, value in self.model_dump(exclude={"engine_key"}).items()
            if value is not None
        }


def _several(models: str, folder: Path | str | None) -> list[tuple[str | None, str]]:
    """The server of each of ``models`` and of the folder's, None for a file, and the model."""
    found: list[tuple[str | None, str]] = []
    for word in filter(None, map(str.strip, models.split(","))):
        server = _SERVER.fullmatch(word)
        found.append(
            (server["url"].rstrip("/"), server["model"])
            if server
            else (None, word if _HTTP.match(word) else str(model_path(word)))
        )
    if folder:
        found += sorted(
            (None, str(each))
            for each in Path(folder).glob("*")
            if each.suffix == ".gguf" or (each / "config.json").is_file()
        )
    return found


def _given(info: ValidationInfo) -> list[tuple[str | None, str]]:
    """Several models; none if the worker has one."""
    return _several(info.data.get("models", ""), info.data.get("models_folder"))


def _names(info: ValidationInfo) -> list[str]:
    return [default_model_name(Path(model)) for _, model in _given(info)]


def default_model_name(path: Path) -> str:
    """A file's stem or a folder's name: ``models/tiny.gguf`` and ``models/tiny/`` are ``tiny``,
    and so is ``hf:OWNER/tiny:Q4_K_M``.

    What a queue's name cannot hold becomes a hyphen: ``my model.gguf`` is ``my-model``. The demo's
    model is ``demo``, whichever it is.
    """
    if path == demo_model():
        return DEMO
    if hub_name := re.match(r"hf:[^/]+/([^:@]+)", str(path)):
        return re.sub(r"[^A-Za-z0-9._-]+", "-", hub_name[1])
    name = path.stem if path.suffix == ".gguf" else path.resolve().name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name) or "model"
