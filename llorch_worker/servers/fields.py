"""What becomes of each field of a request at each server. Requests, and a table in the docs, are
made from this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

from llorch_worker.contract import Fault, GenerationRequest, describe
from llorch_worker.contract.request import CONFIG_FIELDS

Kind = Literal["vLLM", "SGLang", "llama-server", "another server"]
KINDS: Final[tuple[Kind, ...]] = ("vLLM", "SGLang", "llama-server", "another server")


_TABLE: Final = """
prompt                      sent                sent                sent                sent
prompt_token_ids            sent                sent                sent                refused
messages                    =                   =                   =                   =
tenant                      here                here                here                here
prompt_logprobs             refused             refused             refused             refused
model                       here                here                here                here
max_tokens                  sent                sent                sent                sent
cut_max_tokens              here                here                here                here
min_tokens                  sent                sent                refused             refused
temperature                 =                   =                   =                   =
top_p                       =                   =                   =                   =
top_k                       sent                sent                =                   refused
min_p                       =                   =                   =                   refused
presence_penalty            =                   =                   =                   =
frequency_penalty           =                   =                   =                   =
repetition_penalty          =                   =                   =repeat_penalty     refused
logit_bias                  =                   =                   =                   =
seed                        sent                sent                sent                sent
stop                        =                   =                   =                   =
include_stop_str_in_output  =                   =no_stop_trim       here                refused
skip_special_tokens         =                   =                   refused             refused
stop_token_ids              =                   =                   refused             refused
ignore_eos                  =                   =                   =                   refused
n                           here                here                here                here
logprobs                    refused             refused             sent                refused
response_format             sent                sent                sent                sent
structured_outputs          sent                sent                sent                refused
tools                       =                   =                   =                   =
tool_choice                 =                   =                   =                   =
parallel_tool_calls         =                   =                   =                   =
add_special_tokens          =                   refused             sent                refused
parse_special               true                true                sent                true
chat_template_kwargs        =                   =                   =                   refused
add_generation_prompt       sent                true                sent                true
continue_final_message      sent                sent                sent                refused
prediction                  idle                idle                idle                idle
speculation                 idle                idle                idle                idle
priority                    here                here                here                here
deadline_s                  here                here                here                here
idempotency_key             here                here                here                here
affinity_key                here                here                here                here
metadata                    here                here                here                here
generation_config           here                here                here                here
"""
"""Of each field of ``GenerationRequest`` at each of :data:`KINDS`. ``sent``: in a form of the
server's own (see :mod:`.bodies`); ``=``: as it is, in the parameter of this name; ``here``: done by
the worker, the queue or the sender; ``idle``: it changes no token; ``refused``; ``true``: the
server does so, and false is refused."""


FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    name: tuple(words) for name, *words in map(str.split, _TABLE.strip().splitlines())
}
ALWAYS_SENT: Final = frozenset(CONFIG_FIELDS) | {"presence_penalty", "frequency_penalty"}
"""Also at their defaults, because a server has defaults of its own."""


def words_for(kind: Kind) -> Iterator[tuple[str, str]]:
    """Each field, and the word for it in the column of this server."""
    column = KINDS.index(kind)
    return ((name, row[column]) for name, row in FIELDS.items())


def refuses(word: str, value: object) -> bool:
    return word == "refused" or (word == "true" and value is False)


def faults(request: GenerationRequest, kind: Kind) -> Iterator[Fault]:
    """A fault for each field whose value this server does not do."""
    for name, word in words_for(kind):
        value = getattr(request, name)
        if value == type(request).model_fields[name].default:
            continue
        if refuses(word, value):
            yield Fault(field=name, rule=f"is not done by {kind}", got=describe(value))
