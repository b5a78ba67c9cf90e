"""The base of OpenAI's documents that clients send."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SkipValidation,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from llorch_worker.contract import Fault, GenerationRequest, InvalidRequest, describe, shown
from llorch_worker.contract.kinds import Asked
from llorch_worker.contract.rules import rule_of
from llorch_worker.contract.values import broken_rules, few_values
from llorch_worker.misspelt import did_you_mean, meant
from llorch_worker.openai_api.known_fields import KNOWN_FIELDS, UNKNOWN, Known
from llorch_worker.openai_api.spelling import Spelt

AnyDocument = TypeVar("AnyDocument", bound=BaseModel)


class Shape(BaseModel):
    """A document from a client. A field that is not declared is refused, and null is as good as
    not given.

    Types are strict; ranges are left to :class:`GenerationRequest`, which has the only copy.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        return {name: value for name, value in document.items() if value is not None}


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "must be text that UTF-8 can encode") from None
    return text


Label = Annotated[str, AfterValidator(_encodable)]
"""A text that is stored or sent back as it is. JSON can escape half a character."""


Metadata = Annotated[
    dict[
        Annotated[Label, StringConstraints(max_length=64)],
        Annotated[Label, StringConstraints(max_length=512)],
    ],
    Field(max_length=16),
]
_NO_TEXTS = frozenset(
    (
        *("image", "image_url", "input_image", "computer_screenshot", "video_url"),
        *("document", "file", "input_file", "audio_url", "input_audio"),
    )
)


def _is_text(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _NO_TEXTS:
        raise PydanticCustomError("part", "must be a text; {kind} is not read here", {"kind": kind})
    return part


ONLY_TEXT = BeforeValidator(_is_text)
"""Of a part of a message: an image or a file is refused by its name."""
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _refuse(value: Any) -> Any:
    if value is not None:
        raise PydanticCustomError("unsupported", "unsupported field")
    return value


Unsupported = Annotated[None, BeforeValidator(_refuse)]
"""A field that would change the answer."""
CallbackUrl = Annotated[str, Field(min_length=1, max_length=2_048)]


MOST_FIELDS = 1_000
MOST_TURNS = 4_000
"""A client's turns. They may outnumber the contract's messages: neighbours become one message."""
MOST_OFFERED = 1_000
"""A client's tools, those that are no functions included."""


class WholeBody(Spelt, Shape):
    """What is not only a part of a document. A field that is not declared changes nothing, unless
    :data:`KNOWN_FIELDS` or ``of_others`` says that it would, or it is a known one but for a
    slip."""

    model_config = ConfigDict(extra="allow")
    of_others: ClassVar[Mapping[str, Known]] = {}
    """Fields that other bodies have, and what to send here in place of them."""
    bounded_elsewhere: ClassVar[Collection[str]] = ()
    """Fields that may hold many values; whoever reads them counts."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core)
        fields = handler.resolve_ref_schema(schema).get("properties", {})
        for name in {**KNOWN_FIELDS, **cls.of_others}:
            known = cls._known(name)
            instead = f"; send {known.instead}" if known.instead else ""
            refused = {"description": f"Refused{instead}.", "deprecated": True}
            harmless = {"description": "Accepted, and changes nothing."}
            fields.setdefault(name, harmless if known.harmless else refused)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _has_few_values(cls, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        if len(document) > MOST_FIELDS:
            rule = "must have at most {limit} fields"
            raise PydanticCustomError("values", rule, {"limit": MOST_FIELDS})
        few_values({k: v for k, v in document.items() if k not in cls.bounded_elsewhere})
        return document

    @property
    def unknown(self) -> list[str]:
        """The fields that say something, but nothing is done about them here."""
        return [fault.field for fault in self._undone()]

    def refuse_unknown(self) -> None:
        """Raises ``InvalidRequest`` if there are any."""
        if faults := self._undone():
            raise InvalidRequest.from_faults(faults)

    def refusals(self) -> list[Fault]:
        """Those that would change the answer."""
        known = KNOWN_FIELDS.keys() | self.of_others.keys()
        return [fault for fault in self._undone() if fault.field in known]

    def _undone(self) -> list[Fault]:
        return [
            Fault(field=shown(name), rule=known.rule, got=describe(value))
            for name, value in (self.model_extra or {}).items()
            if not (known := self._known(name)).changes_nothing(value)
        ]

    @classmethod
    def _known(cls, name: str) -> Known:
        known = cls.of_others.get(name) or KNOWN_FIELDS.get(name, UNKNOWN)
        field = known.instead.partition(".")[0]
        if not field.isidentifier() or cls._takes(field):
            return known
        return known._replace(instead="")

    @classmethod
    def _takes(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        return field is not None and field.annotation is not type(None)


class KeyedBody(WholeBody):
    """A body that becomes jobs; with a key, only once."""

    idempotency_key: SkipValidation[str | None] = None
    """A second request with the same key gets the first one's answer. A client that hangs up does
    not cancel a request with a key, because it may ask again. Also the header Idempotency-Key."""

    def keyed(self, idempotency_key: str | None) -> Self:
        """With this key, from a header; one in the body goes before it."""
        if idempotency_key is None or self.idempotency_key is not None:
            return self
        return self.model_copy(update={"idempotency_key": idempotency_key})


def request_of(
    kind: type[Asked],
    fields: Mapping[str, Any],
    faults: Iterable[Fault] = (),
    place: Callable[[str], str] = str,
) -> Asked:
    """The contract's request with these ``fields``, without those that are None.

    ``faults``: rules that the body breaks besides. ``place``: where the client's document has a
    field of the contract.

    Raises:
        InvalidRequest: with all faults.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    found = list(faults)
    try:
        request = kind(**given)
    except InvalidRequest as error:
        found += [fault.model_copy(update={"field": place(fault.field)}) for fault in error.faults]
    if found:
        raise InvalidRequest.from_faults(found)
    return request


def generation_request(
    fields: Mapping[str, Any],
    names: Mapping[str, str],
    faults: Iterable[Fault] = (),
    place: Callable[[str], str] = str,
) -> GenerationRequest:
    """As :func:`request_of`; the answer may be as long as the context allows.

    ``names``: the client's own name of a field, where it differs; ``place`` gets it.
    """

    def named(field: str) -> str:
        first, dot, rest = field.partition(".")
        return place(f"{names.get(first, first)}{dot}{rest}")

    return request_of(GenerationRequest, {"cut_max_tokens": True, **fields}, faults, named)


def with_effort(kwargs: Any, effort: ReasoningEffort | None) -> Any:
    """The template's variables, those for ``effort`` included; what is no object stays."""
    if effort is None or not isinstance(kwargs, dict | type(None)):
        return kwargs
    # Templates know no more than xhigh.
    effort = "xhigh" if effort == "max" else effort
    # Families read either.
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **(kwargs or {})}


def read_as(kind: type[AnyDocument], fields: Any) -> AnyDocument:
    """A client's document. Raises ``InvalidRequest``."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequest.from_faults(faults_of(broken_rules(error))) from None


def faults_of(errors: Iterable[ErrorDetails | Mapping[str, Any]]) -> list[Fault]:
    """What pydantic found in a document from a client, without its values."""
    return [
        Fault(
            field=".".join(shown(str(part)) for part in error["loc"]) or "body",
            rule=_unknown(error["loc"]) if error["type"] == "extra_forbidden" else rule_of(error),
            got=describe(error["input"]),
        )
        for error in errors
    ]


def _unknown(place: Sequence[int | str]) -> str:
    # What refuses all that it does not know, and is not nested, is a job.
    right = meant(str(place[0]), GenerationRequest.model_fields) if len(place) == 1 else ""
    return did_you_mean(right, UNKNOWN.rule)
