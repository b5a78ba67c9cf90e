"""The one definition of a generation request.

Names, ranges and defaults follow vLLM's ``SamplingParams``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from llorch_worker.contract.errors import Fault, InvalidRequest
from llorch_worker.contract.job_request import JobRequest
from llorch_worker.contract.message import MAX_PROMPT_CHARS, Message
from llorch_worker.contract.output_format import (
    NOT_EMPTY,
    ResponseFormat,
    StructuredOutputs,
    as_tuple,
)
from llorch_worker.contract.shown import describe
from llorch_worker.contract.template_fields import TemplateKwargs, template_faults
from llorch_worker.contract.token_ids import MAX_COUNT, LogitBias, PromptTokenIds, TokenId
from llorch_worker.contract.tools import NamedToolChoice, ToolChoice, Tools
from llorch_worker.contract.values import few_values

MAX_MESSAGES = 1_000
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_CHOICES = 16
DEFAULT_MAX_TOKENS = 256
MAX_LOGPROBS = 20
MAX_AFFINITY_KEY_CHARS = 200
MAX_SEED = 2**63 - 1

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")

ConfigField = Literal["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"]
CONFIG_FIELDS: tuple[ConfigField, ...] = get_args(ConfigField)
"""What a model's files may set for requests that do not."""


def _stop_as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else as_tuple(value)


class GenerationRequest(JobRequest):
    """What to generate, and how. Immutable.

    Raises:
        InvalidRequest: with one :class:`Fault` for each rule that a field breaks.
    """

    task = "llorch.generate"

    prompt: str | None = Field(None, min_length=1, max_length=MAX_PROMPT_CHARS)
    prompt_token_ids: PromptTokenIds | None = None
    messages: Annotated[
        Annotated[tuple[Message, ...], Field(max_length=MAX_MESSAGES), NOT_EMPTY] | None,
        BeforeValidator(as_tuple),
    ] = None

    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Also score the prompt's own tokens, with this many alternatives each."""

    max_tokens: int | None = Field(None, ge=0, le=MAX_COUNT)
    """None: 256, or with ``cut_max_tokens`` as many as the context holds beside the prompt."""
    cut_max_tokens: bool = False
    """Whether more ``max_tokens`` than the context holds beside the prompt are cut to what it
    holds. Else they are refused."""
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT), AfterValidator(lambda k: max(k, 0))] = 0
    """0 is off, and so is -1, vLLM's spelling of it."""
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: LogitBias | None = None
    seed: Annotated[
        int | None,
        Field(ge=-1, le=MAX_SEED),
        AfterValidator(lambda seed: None if seed == -1 else seed),
    ] = None
    """None: drawn from the job's id. -1 means the same, as in vLLM."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)], ...],
        Field(max_length=MAX_STOP_STRINGS),
        BeforeValidator(_stop_as_tuple, json_schema_input_type=str | list[str]),
    ] = ()
    include_stop_str_in_output: bool = False
    """Whether the text ends with the stop string that ended it."""
    skip_special_tokens: bool = True
    """Whether control tokens give no text. The one that ends the answer never does."""
    stop_token_ids: Annotated[
        tuple[TokenId, ...], Field(max_length=128), BeforeValidator(as_tuple)
    ] = ()
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    tools: Tools = ()
    tool_choice: ToolChoice | None = None
    """None: ``auto`` if there are tools."""
    parallel_tool_calls: bool = True
    """Whether an answer may hold more than one call. With a named function it never does."""

    add_special_tokens: bool = True
    """Whether a ``prompt`` gets what the model puts around a text, such as BOS."""
    parse_special: bool | None = None
    """Whether spellings of control tokens in a ``prompt`` become these tokens. None: they stay
    text, but with ``prompt_logprobs`` a prompt that has one is refused: the count of its tokens is
    not what the client expects."""
    chat_template_kwargs: TemplateKwargs | None = None
    """Variables for the chat template, such as ``enable_thinking``."""
    add_generation_prompt: bool | None = None
    """Whether the prompt of a chat ends where an answer begins. None: unless the last turn goes
    on."""
    continue_final_message: bool = False
    """Whether the answer goes on in the last turn, which is an assistant's."""

    prediction: str | None = Field(None, max_length=MAX_PROMPT_CHARS)
    """What the text may say. It changes no token, and makes the text faster where it is right."""
    speculation: Literal["auto", "off"] = "auto"
    """``auto``: as the worker is set. The tokens are the same with and without."""
    affinity_key: str | None = Field(None, min_length=1, max_length=MAX_AFFINITY_KEY_CHARS)
    """Jobs with the same key go to the same worker if that makes none wait; by default those whose
    prompts begin alike."""
    generation_config: Annotated[tuple[ConfigField, ...], BeforeValidator(as_tuple)] = ()
    """Fields whose values the sender took from the model's files: see :mod:`.generation_config`.
    They change nothing, and the result says which they are."""

    def __init__(self, /, **fields: Any) -> None:
        super().__init__(**fields)  # for type checkers: fields may be lists

    @model_validator(mode="before")
    @classmethod
    def _exactly_one_prompt(cls, fields: Any) -> Any:
        # Runs before the fields are validated, so that all faults are reported together.
        if not isinstance(fields, Mapping):
            # A body that is no object; pydantic says so.
            return fields
        few_values(fields)
        given = [name for name in PROMPT_FIELDS if fields.get(name) is not None]
        if len(given) != 1:
            fault = Fault(
                field=" | ".join(PROMPT_FIELDS),
                rule="exactly one of them must be given",
                got=" and ".join(given) or "none",
            )
            others = {k: v for k, v in fields.items() if k not in PROMPT_FIELDS}
            try:
                cls(prompt="a stand-in", **others)
            except InvalidRequest as error:
                raise InvalidRequest.from_faults([fault, *error.faults]) from None
            raise InvalidRequest.from_faults([fault])
        # Null is as good as not given, also where whoever sends the job has a value of its own.
        return {k: v for k, v in fields.items() if v is not None or k not in cls.model_fields}

    @field_validator("max_tokens")
    @classmethod
    def _some_work(cls, value: int | None, info: ValidationInfo) -> int | None:
        # prompt_logprobs is declared first and absent here only if it is itself invalid.
        if value == 0 and info.data.get("prompt_logprobs", 0) is None:
            raise PydanticCustomError("max_tokens", "must be at least 1, or 0 with prompt_logprobs")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _choice_among_tools(
        cls, value: ToolChoice | None, info: ValidationInfo
    ) -> ToolChoice | None:
        # tools is declared first and absent here only if it is itself invalid.
        names = {tool.function.name for tool in info.data.get("tools", ())}
        if "tools" not in info.data or value in (None, "none"):
            return value
        if not names:
            raise PydanticCustomError("tool_choice", "needs tools to choose from")
        if isinstance(value, NamedToolChoice) and value.function.name not in names:
            raise PydanticCustomError("tool_choice", "must name one of the tools")
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> GenerationRequest:
        faults = []
        if self.tools and self.messages is None:
            faults.append(Fault(field="tools", rule="need messages", got=describe(self.tools)))
        if self.prompt is None:
            given = {"add_special_tokens": not self.add_special_tokens}
            given["parse_special"] = self.parse_special is not None
            faults += [
                Fault(field=name, rule="needs prompt", got=describe(getattr(self, name)))
                for name, has in given.items()
                if has
            ]
        faults += template_faults(
            self.messages,
            self.chat_template_kwargs,
            self.add_generation_prompt,
            self.continue_final_message,
        )
        shapes = {
            "response_format": self._has_format,
            "structured_outputs": self.structured_outputs is not None,
        }
        shaping = [name for name, has in shapes.items() if has]
        if len(shaping) > 1:
            rule = "at most one of them may shape the text"
            faults.append(Fault(field=" | ".join(shapes), rule=rule, got=" and ".join(shaping)))
        if faults:
            raise InvalidRequest.from_faults(faults)
        return self

    @property
    def _has_format(self) -> bool:
        return self.response_format not in (None, ResponseFormat(type="text"))

    @property
    def shapes_text(self) -> bool:
        """Whether the answer, if it is no call of a tool, must be a text of some form."""
        return self._has_format or self.structured_outputs is not None

    @property
    def begins_answer(self) -> bool:
        """Whether the prompt of a chat ends where an answer begins."""
        given = self.add_generation_prompt
        return not self.continue_final_message if given is None else given

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of each choice; None: as many as the context holds."""
        return _most_tokens(self.max_tokens, cut=self.cut_max_tokens)

    @property
    def least_tokens(self) -> int:
        """The tokens for which the context must have room beside the prompt."""
        least, most = max(1, self.min_tokens), self.most_tokens
        if most is None:
            return least
        return min(least, most) if self.cut_max_tokens else most

    @property
    def forces_a_call(self) -> bool:
        """Whether the answer must be a call of a tool."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)

    @property
    def may_call(self) -> bool:
        """Whether the answer may be calls of tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def calls_in_parallel(self) -> bool:
        """Whether it may be several: a named function is called once."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, NamedToolChoice)

    @field_validator("min_tokens")
    @classmethod
    def _min_tokens_within_max(cls, value: int, info: ValidationInfo) -> int:
        # Both are declared first and absent here only if they are themselves invalid.
        if "max_tokens" not in info.data or "cut_max_tokens" not in info.data:
            return value
        most = _most_tokens(info.data["max_tokens"], cut=info.data["cut_max_tokens"])
        if most is not None and value > most:
            raise PydanticCustomError("min_tokens", "must not exceed max_tokens")
        return value

    @property
    def taken_config(self) -> dict[str, Any]:
        """The fields that the sender took from the model's files, with their values."""
        return {name: getattr(self, name) for name in self.generation_config}


def _most_tokens(max_tokens: int | None, *, cut: bool) -> int | None:
    return DEFAULT_MAX_TOKENS if max_tokens is None and not cut else max_tokens
