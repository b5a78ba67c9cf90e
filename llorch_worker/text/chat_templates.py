"""A model's Jinja chat templates: where its files keep them, which one is used, rendering."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from llorch_worker.contract import GenerationRequest, InvalidRequest
from llorch_worker.model_files.bounds import TEMPLATE_BYTES, TEMPLATES, check
from llorch_worker.model_files.side_file import exists, read_text
from llorch_worker.text.spellings import SURROGATE

MOST_SECONDS = 5.0
"""Of the processor that a template may take for a conversation."""
_KEY = "tokenizer.chat_template"


@dataclass(frozen=True)
class ChatOptions:
    """``kwargs``: more variables for the template. ``add_generation_prompt``: whether the prompt
    ends where an answer begins; ``continue_final_message``: whether it ends within the last turn.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @classmethod
    def of(cls, request: GenerationRequest) -> ChatOptions:
        return cls(
            request.chat_template_kwargs or {},
            add_generation_prompt=request.begins_answer,
            continue_final_message=request.continue_final_message,
        )


class ChatTemplates:
    """Templates by name, rendered in transformers' sandbox.

    ``default`` is used, or ``tool_use`` for a request with tools, as in transformers.
    ``special_tokens``: the spellings of bos_token, eos_token, ..., for the templates.
    """

    def __init__(self, named: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.named = named
        self._special_tokens: dict[str, Any] = dict(special_tokens)

    def chosen(self, *, tools: bool) -> str:
        """The template of a request. Raises InvalidRequest if the model has none for it."""
        template = self.named.get("tool_use") if tools else None
        template = template or self.named.get("default")
        if template is None:
            names = ", ".join(sorted(self.named))
            rule = f"the model has no default chat template, only some named {names}"
            raise InvalidRequest.from_fault("messages", rule, "a chat")
        return template

    def render(
        self,
        turns: Sequence[Any],
        tools: Sequence[Any] = (),
        options: ChatOptions = ChatOptions(),
    ) -> str:
        """The text of a conversation. Raises InvalidRequest, without the conversation's text."""
        # Imported late: transformers takes a second.
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import (
            _compile_jinja_template,
            render_jinja_template,
        )

        template = self.chosen(tools=bool(tools))
        try:
            # A pair, despite its annotation: the rendered chats, and indices within them.
            with _limited_time():
                # The same one that is rendered. Equal chats must have equal prompts.
                filters = _compile_jinja_template(template).environment.filters
                filters["random"] = lambda _context, items: next(iter(items), "")
                rendered: Any = render_jinja_template(
                    conversations=[list(turns)],
                    tools=list(tools) or None,
                    chat_template=template,
                    add_generation_prompt=options.add_generation_prompt,
                    continue_final_message=options.continue_final_message,
                    **{**options.kwargs, **self._special_tokens},
                )
        except _TooLong:
            rule = f"the model's chat template runs for more than {MOST_SECONDS:g} s"
            raise InvalidRequest.from_fault("messages", rule, f"{len(turns)} messages") from None
        except TemplateSyntaxError as error:
            rule = f"the model's chat template is broken in line {error.lineno}"
            raise InvalidRequest.from_fault("messages", rule, "a chat") from None
        except SyntaxError as error:
            # Of the Python that Jinja makes of it, such as "'break' outside loop".
            rule = f"the model's chat template is broken: {error.msg}"
            raise InvalidRequest.from_fault("messages", rule, "a chat") from None
        except MemoryError:
            rule = "the model's chat template takes more memory than there is for it"
            raise InvalidRequest.from_fault("messages", rule, f"{len(turns)} messages") from None
        except Exception as error:  # noqa: BLE001 a template is a program, which may raise any
            # Its message may quote the conversation. Pass on only what the template says.
            reason = str(error)
            if not reason or reason not in template:
                reason = f"it failed with {type(error).__name__}"
            rule = f"the model's chat template refuses them: {reason}"
            raise InvalidRequest.from_fault("messages", rule, f"{len(turns)} messages") from None
        return str(rendered[0][0])


class _TooLong(Exception):
    """A template runs on."""


@contextmanager
def _limited_time() -> Iterator[None]:
    """Raises :class:`_TooLong` at the first line of a template after :data:`MOST_SECONDS`.

    What one line computes in C it cannot end, as an intake's own process can.
    """
    deadline_s = time.thread_time() + MOST_SECONDS

    def watch(frame: FrameType, _event: str, _argument: object) -> Any:
        # Jinja's name for a compiled template. Lines of others are not traced.
        if frame.f_code.co_filename != "<template>":
            return None
        if time.thread_time() > deadline_s:
            raise _TooLong
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)


def templates_in_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a GGUF file by name."""
    others = {
        key.removeprefix(f"{_KEY}."): value
        for key, value in metadata.items()
        if key.startswith(f"{_KEY}.")
    }
    return _by_name(others) | _by_name(metadata.get(_KEY))


def templates_in_folder(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a folder by name; files come before those in tokenizer_config.json."""
    others = folder / "additional_chat_templates"
    if exists(others) and not others.is_dir():
        raise ValueError("additional_chat_templates is no folder")
    files = {file.stem: file for file in others.glob("*.jinja")}
    if exists(default := folder / "chat_template.jinja"):
        files["default"] = default
    if files:
        check("the number of chat templates", len(files), TEMPLATES)
        return _by_name({name: read_text(file) for name, file in files.items()})
    return _by_name(settings.get("chat_template"))


def _by_name(value: object) -> dict[str, str]:
    """The templates in a setting: one, an object by name, or a list of names and templates."""
    match value:
        case None | "":
            return {}
        case str():
            value = {"default": value}
        case list():
            value = {entry["name"]: entry["template"] for entry in value}
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("its chat_template is neither a template nor templates by name")
    check("the number of chat templates", len(value), TEMPLATES)
    for template in value.values():
        size = len(template.encode(errors="surrogatepass"))
        check("the size of a chat_template", size, TEMPLATE_BYTES)
    # Which UTF-8 cannot encode; they stand for what was no UTF-8 in the file.
    return {name: SURROGATE.sub("\ufffd", template) for name, template in value.items()}
