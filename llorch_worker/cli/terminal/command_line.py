"""A typer application whose errors are one sentence and an exit code."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract import ErrorDocument
from llorch_worker.contract.command_errors import (
    INTERRUPTED,
    USAGE,
    CommandError,
    explain,
    usage_error,
)

# click's UsageError, which newer releases of typer vendor and older ones import.
_UsageError = typer.BadParameter.__mro__[1]


_SERVICES = (["worker"], ["gateway"], ["exporter"], ["up"])
"""Their stderr is a log."""
_PLAIN = "llorch.plain"
"""The name by which Python's codecs know :func:`_in_plain_characters`."""
_MARKS = {"✓": "+", "✗": "x", "→": "->", "─": "-", "…": "...", "·": "-"}


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_without_type(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_without_type(super().get_params(ctx))


def _flags_without_type(parameters: list[Any]) -> list[Any]:
    """A flag takes no value, so its help needs no ``<bool>``."""
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return parameters


class _CommandLine(typer.Typer):
    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **{"cls": _Command, **options})


def command_line(**options: Any) -> typer.Typer:
    """An application for :func:`run`. Docstrings are its help, with paragraphs refilled."""
    return _CommandLine(
        cls=_Group,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


def run(app: typer.Typer, name: str) -> int:
    """Run ``app`` on ``sys.argv`` and return its exit code.

    Known errors are shown as one sentence. Other errors are defects and propagate.
    """
    as_json = _json_wanted() and sys.stdout is not None
    codecs.register_error(_PLAIN, _in_plain_characters)
    _open_streams()
    if sys.argv[1:2] in _SERVICES and os.environ.get("LLORCH_LOG_FORMAT") == "json":
        from llorch_worker.telemetry.logs.streams import print_documents

        print_documents()
    try:
        code = _run(app, name, as_json)
        sys.stdout.flush()
    except _NobodyReads:
        _give_up_stdout()
        return 0
    except StdoutError as error:
        _report(error.document(), as_json=False)
        return error.exit_code
    return code


def _run(app: typer.Typer, name: str, as_json: bool) -> int:
    try:
        code = app(prog_name=name, standalone_mode=False)
    except StdoutError:
        raise
    except typer.Abort:
        code = INTERRUPTED
    except BaseException as error:
        explained = explain(error)
        if isinstance(error, _UsageError):
            if not _sentence(error):
                return USAGE  # no arguments: the help is already printed
            explained = _usage_document(error), USAGE
        if isinstance(error, UnicodeEncodeError) and any(map(_is_not_text, sys.argv)):
            message = "an argument is not text in this locale's encoding; LC_ALL=C.UTF-8 is UTF-8"
            explained = explain(usage_error(message))
        if explained is None:
            raise
        _report(explained[0], as_json=as_json)
        return explained[1]
    if code == INTERRUPTED and as_json and (explained := explain(KeyboardInterrupt())):
        _report(explained[0], as_json=True)
    return code if isinstance(code, int) else 0


def _report(document: ErrorDocument, *, as_json: bool) -> None:
    """On stderr if stdout takes nothing."""
    try:
        Screen(as_json=as_json).error(document)
        sys.stdout.flush()
    except StdoutError:
        _give_up_stdout()
        Screen().error(document)


def _give_up_stdout() -> None:
    """What is left in the buffer goes nowhere, also when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _open_streams() -> None:
    """Opens the standard streams that the caller closed, as ``>&-`` does: Python has None for them,
    and the next socket would take their numbers. Those that are open take any text."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        os.open(os.devnull, os.O_WRONLY)
        sys.stdout = _ClosedStdout()
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _Stdout(
            sys.stdout.buffer, sys.stdout.encoding, _PLAIN, line_buffering=sys.stdout.isatty()
        )
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    elif isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors=_PLAIN)


class StdoutError(CommandError):
    """The result cannot be printed."""

    def __init__(self, reason: str) -> None:
        super().__init__("NO_STDOUT", f"{reason}, so the result cannot be printed")


class _NobodyReads(BaseException):
    """As ``llorch ... | head`` closes the pipe. rich and typer end the process with 1 if they see a
    BrokenPipeError."""


class _Stdout(io.TextIOWrapper):
    """stdout, where a full disk is one error and not one a command."""

    def write(self, text: str) -> int:
        with _printing():
            return super().write(text)

    def flush(self) -> None:
        with _printing():
            super().flush()


@contextmanager
def _printing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise _NobodyReads from None
    except OSError as error:
        raise StdoutError(f"stdout: {error.strerror}") from None


def _in_plain_characters(error: UnicodeError) -> tuple[str, int]:
    """A handler of Python's codecs: like ``backslashreplace``, but for our own marks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end]
    plain = (_MARKS.get(each, each.encode("ascii", "backslashreplace").decode()) for each in found)
    return "".join(plain), error.end


class _ClosedStdout(io.StringIO):
    """Services print nothing there and run without it."""

    def write(self, _text: str) -> int:
        raise StdoutError("stdout is closed")


def _usage_document(error: BaseException) -> ErrorDocument:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "llorch"
    message = f"{_sentence(error)}; see {command} --help"
    return ErrorDocument(code="USAGE", message=message, retriable=False)


def _sentence(error: BaseException) -> str:
    message = str(error.format_message()) if hasattr(error, "format_message") else str(error)
    # Newer versions of typer put the exception's kind before some values.
    return " ".join(message.split()).replace(": Value error, ", ": ").rstrip(".")


def _is_not_text(argument: str) -> bool:
    """Whether Python has kept bytes that it could not decode."""
    return argument != argument.encode(errors="replace").decode()


def _json_wanted() -> bool:
    """Whether the command line asks for ``--json``, even if it cannot be parsed."""
    arguments = sys.argv[1:]
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options
