"""Fields that are known ones but for a slip."""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import Any, Self

from pydantic import BaseModel, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.values import broken_rules
from llorch_worker.misspelt import did_you_mean, meant
from llorch_worker.openai_api.known_fields import ELSEWHERE, KNOWN_FIELDS

MOST_LOOKED_AT = 100
"""Unknown fields of one object. Each is compared with every known one."""


class Spelt(BaseModel):
    """A document whose unknown fields are passed over, unless one is a known field but for a slip:
    then it is refused, because whoever sent it meant that field."""

    @model_validator(mode="wrap")
    @classmethod
    def _without_slips(cls, document: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        slips = slips_of(cls, document) if isinstance(document, dict) else {}
        if not slips:
            return validate(document)
        found = [
            _error("slip", did_you_mean(right), (name,), document[name])
            for name, right in slips.items()
        ]
        try:
            validate({name: value for name, value in document.items() if name not in slips})
        except ValidationError as error:
            found += [
                _error(e["type"], e["msg"], e["loc"], e["input"]) for e in broken_rules(error)
            ]
        raise ValidationError.from_exception_data(cls.__name__, found)


def slips_of(kind: type[BaseModel], document: dict[str, Any]) -> dict[str, str]:
    """Each field of ``document`` that says something and is a slip -> what it seems to mean."""
    own = _names(kind)
    unknown = (name for name, value in document.items() if name not in own and value is not None)
    found = {name: _meant(kind, name) for name in islice(unknown, MOST_LOOKED_AT)}
    return {name: right for name, right in found.items() if right}


def _meant(kind: type[BaseModel], name: str) -> str:
    if name in KNOWN_FIELDS or name in ELSEWHERE or name in GenerationRequest.model_fields:
        return ""
    return meant(name, _names(kind), surely=True)


@cache
def _names(kind: type[BaseModel]) -> frozenset[str]:
    """The fields that a document may have."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def _error(kind: str, rule: str, place: tuple[int | str, ...], value: Any) -> InitErrorDetails:
    # Without values to fill in, the rule is taken as it is.
    return InitErrorDetails(type=PydanticCustomError(kind, rule), loc=place, input=value)
