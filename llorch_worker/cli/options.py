"""Options that several commands share, including those generated from the fields of Settings."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import ValidationError

from llorch_worker.contract.command_errors import invalid_settings, option_of
from llorch_worker.settings import Settings

WORKER_SETTINGS = (
    "model",
    "model_name",
    "redis_url",
    "engine_url",
    "dtype",
    "kv_dtype",
    "max_sequences",
    "max_context",
    "max_step_tokens",
    "kv_cache_bytes",
    "prefix_caching",
    "drafter",
    "pooling",
)
"""The settings of a worker that ``llorch worker`` and ``llorch up`` have as options."""

_SEVERAL = ("models", "models_folder")

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
IntervalOption = Annotated[
    float,
    typer.Option(
        "--interval", metavar="S", min=0.2, max=3600.0, help="Seconds between two readings."
    ),
]
DEFAULT_INTERVAL_S = 2.0
FlowerPortOption = Annotated[
    int | None,
    typer.Option("--flower-port", help="Flower's port (default: the first free one from 5555)."),
]
GatewayPortOption = Annotated[
    int | None,
    typer.Option(
        "--gateway-port", help="The gateway's port (default: the first free one from 8080)."
    ),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]

Command = Callable[..., Any]


def settings_options(*names: str) -> Callable[[Command], Command]:
    """Give a command an option for each of these fields of Settings.

    Its parameter ``settings`` receives the Settings from the environment and the options.
    """
    options = {name: Annotated[_setting_type(name) | None, _setting_option(name)] for name in names}
    return with_options(
        "settings", options, lambda given: settings_from(**{**dict.fromkeys(names), **given})
    )


def settings_of_each_model(*names: str) -> Callable[[Command], Command]:
    """As :func:`settings_options`, but ``--model`` may be repeated: the parameter ``models``
    receives Settings for each, or for the environment's model alone."""
    options = {name: Annotated[_setting_type(name) | None, _setting_option(name)] for name in names}
    options["model"] = Annotated[list[str] | None, _setting_option("model")]

    def gather(given: dict[str, Any]) -> list[Settings]:
        models = given.get("model", [None])
        return [settings_from(**{**dict.fromkeys(names), **given, "model": m}) for m in models]

    return with_options("models", options, gather)


def settings_of_one_worker(*names: str) -> Callable[[Command], Command]:
    """As :func:`settings_options`, but ``--model`` may be repeated: the worker serves them all."""
    options = {name: Annotated[_setting_type(name) | None, _setting_option(name)] for name in names}
    options["model"] = Annotated[list[str] | None, _setting_option("model")]

    def gather(given: dict[str, Any]) -> Settings:
        models = given.pop("model", [])
        if len(models) > 1 or (models and _has_several(given)):
            given |= {"models": ",".join(models)}
        elif models:
            given |= {"model": models[0]}
        return settings_from(**{**dict.fromkeys(names), **given})

    return with_options("settings", options, gather)


def _has_several(given: Mapping[str, Any]) -> bool:
    return any(os.environ.get(f"LLORCH_{name.upper()}") or name in given for name in _SEVERAL)


def _setting_type(name: str) -> Any:
    kind = Settings.model_fields[name].annotation
    # Settings validates it.
    text = _is_path(kind) or _is_choice(kind) or name.endswith("_bytes")
    return str if text else kind


def _is_path(kind: Any) -> bool:
    return kind in (Path, Path | None)


def _is_choice(kind: Any) -> bool:
    """Whether it is a literal, which may also be None."""
    return any(get_origin(each) is Literal for each in (kind, *get_args(kind)))


def _setting_option(name: str) -> Any:
    field = Settings.model_fields[name]
    option = option_of(name)
    if field.annotation is bool:
        option = f"{option}/--no-{option.removeprefix('--')}"
    choice = _is_choice(field.annotation)
    metavar = "URL" if name.endswith("_url") else "TYPE" if choice else None
    if _is_path(field.annotation):
        metavar = "PATH"
    if name.endswith("_bytes"):
        metavar = "SIZE"
    # typer's own note on the variable, from envvar=, is too wide for 80 columns.
    help = f"{field.description} env var: ``LLORCH_{name.upper()}``"
    return typer.Option(option, metavar=metavar, help=help)


def with_options(
    parameter: str, options: Mapping[str, Any], gather: Callable[[dict[str, Any]], Any]
) -> Callable[[Command], Command]:
    """Replace a command's ``parameter`` with ``options``: names and their Annotated types.

    The command receives the result of ``gather`` on the given options.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for own in signature.parameters.values():
            if own.name != parameter:
                parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            parameters += [
                inspect.Parameter(name, own.KEYWORD_ONLY, default=None, annotation=annotation)
                for name, annotation in options.items()
            ]

        @functools.wraps(command)
        def with_gathered(**values: Any) -> Any:
            given = {name: values.pop(name) for name in options}
            given = {name: value for name, value in given.items() if value not in (None, [])}
            return command(**values, **{parameter: gather(given)})

        with_gathered.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        with_gathered.__annotations__ = {each.name: each.annotation for each in parameters}
        return with_gathered

    return decorate


def settings_from(**options: Any) -> Settings:
    """Settings from the environment, overridden by the ``options`` that are not None.

    Raises:
        CommandError: a value breaks a rule; names its variable, and its option if it is among
            ``options``.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        raise invalid_settings(error, options) from None
