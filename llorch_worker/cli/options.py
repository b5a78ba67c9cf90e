"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from llorch_worker.contract.command_errors import invalid_settings
from llorch_worker.settings import DEMO_MODEL, Dtype, KvDtype, Settings

DEMO_WORD = "demo"

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
RedisOption = Annotated[
    str | None,
    typer.Option(
        "--redis",
        metavar="URL",
        help="Redis to use, redis://host:port/db.",
        envvar="LLORCH_REDIS_URL",
        show_envvar=True,
    ),
]
ModelFileOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="PATH",
        help="A .gguf file, a Hugging Face folder, or the word demo.",
        envvar="LLORCH_MODEL",
    ),
]
ModelNameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        help="The name that jobs ask for (default: the file's own).",
        envvar="LLORCH_MODEL_NAME",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="auto, cpu, cuda or cuda:N.", envvar="LLORCH_DEVICE"),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="auto, float32, bfloat16 or float16.",
        envvar="LLORCH_DTYPE",
    ),
]
KvDtypeOption = Annotated[
    KvDtype | None,
    typer.Option(
        "--kv-dtype",
        metavar="TYPE",
        help="Keys and values: auto (the compute dtype), fp8 or int8.",
        envvar="LLORCH_KV_DTYPE",
    ),
]
MaxSequencesOption = Annotated[
    int | None,
    typer.Option(
        "--max-sequences", help="The most sequences in flight.", envvar="LLORCH_MAX_SEQUENCES"
    ),
]
MaxContextOption = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        help="Tokens a sequence may hold (default: the model's own).",
        envvar="LLORCH_MAX_CONTEXT",
    ),
]
MaxStepTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-step-tokens",
        # In the brackets that it would get by itself, its variable is cut off at 80 columns.
        help="Token budget of one step. env var: LLORCH_MAX_STEP_TOKENS",
        envvar="LLORCH_MAX_STEP_TOKENS",
        show_envvar=False,
    ),
]
KvCacheBytesOption = Annotated[
    int | None,
    typer.Option("--kv-cache-bytes", help="Bytes for KV blocks.", envvar="LLORCH_KV_CACHE_BYTES"),
]
PrefixCachingOption = Annotated[
    bool | None,
    typer.Option(
        "--prefix-caching/--no-prefix-caching",
        help="Compute once what prompts have in common (default: yes).",
        envvar="LLORCH_PREFIX_CACHING",
        show_default=False,
    ),
]


def model_path(word: str | Path) -> Path:
    """The file or folder that ``word`` names; ``demo`` is the model that the package ships."""
    path = Path(word)
    return DEMO_MODEL if str(word) == DEMO_WORD and not path.exists() else path


def settings_from(**options: Any) -> Settings:
    """Settings from the environment, overridden by the ``options`` that were given.

    Name each setting that the command has an option for, with None where it was not given.

    Raises:
        CommandError: a value breaks a rule; says which, by option and variable.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if (model := given.get("model")) is not None:
        given["model"] = model_path(model)
    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise invalid_settings(error, options) from None
    return settings.model_copy(update={"model": model_path(settings.model)})


def given_options(context: typer.Context) -> dict[str, str]:
    """The options on the command line itself, not those of the environment: by parameter name."""
    given = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            given[str(parameter.name)] = parameter.opts[0]
    return given


def queue_of(settings: Settings) -> str:
    """The queue that jobs for the model of ``settings`` go to."""
    from llorch_worker.broker.queues import normal_queue

    return normal_queue(settings.served_name)
