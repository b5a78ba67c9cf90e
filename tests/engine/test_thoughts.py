"""What a model thinks before it answers comes apart from the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from llorch_worker.contract import GenerationRequest, GenerationResult, Tokens, read_journal
from llorch_worker.engine import Engine
from llorch_worker.engine.generation import Generation
from llorch_worker.text.chat import TemplateChat
from llorch_worker.text.chat_templates import ChatTemplates
from tests.engine.structured import TIMEOUT_S
from tests.engine.test_tools import Says

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if enable_thinking %}<think>\n{% endif %}"
)
RAIN = {"name": "x", "schema": {"enum": [{"rain": True}, {"rain": False}]}}
SHAPE = {"type": "json_schema", "json_schema": RAIN}
ANSWER = "<think>\nHm, it may rain.\n</think>\n\nIt rains."

Says_ = Callable[..., Generation]


@pytest.fixture
def says(loaded: Any, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Says_:
    """A request that the model answers with a given text: ``says(text, template, **fields)``."""

    def answer(text: str, template: str = TEMPLATE, **fields: Any) -> Generation:
        chat = TemplateChat(ChatTemplates({"default": template}, {}), loaded.tokenizer._codec, None)
        monkeypatch.setattr(loaded.tokenizer, "_chat", chat)
        journal = fields.pop("journal", None)
        request = asking(**fields)
        from llorch_worker.text import ChatOptions

        options = ChatOptions.of(request)
        prompt = loaded.tokenizer.encode_chat(request.messages, request.tools, options=options)
        (end,) = loaded.tokenizer.eos_token_ids
        ids = [*loaded.tokenizer.encode_inside(text), end]
        engine = make_engine(model=Says(loaded.model, len(prompt), ids))
        return engine.submit(request, job_id="job", journal=journal)

    return answer


def asking(**fields: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": "Weather?"}]
    return GenerationRequest(**{"messages": messages, "max_tokens": 200, "seed": 1, **fields})


def result_of(generation: Generation) -> GenerationResult:
    return generation.result(TIMEOUT_S)


def test_a_thought_is_no_text_in_events_and_result(says: Says_) -> None:
    generation = says(ANSWER, n=2)
    for choice in result_of(generation).choices:
        assert choice.reasoning_content == "Hm, it may rain."
        assert choice.text == "It rains."
        assert choice.finish_reason == "stop"
        events = [e for e in generation.events() if isinstance(e, Tokens)]
        own = [event for event in events if event.choice == choice.index]
        assert "".join(event.reasoning_content or "" for event in own) == "Hm, it may rain."
        assert "".join(event.text for event in own) == "It rains."
        assert tuple(i for event in own for i in event.ids) == choice.token_ids


def test_a_thought_that_the_prompt_opens_needs_no_tag(says: Says_) -> None:
    kwargs = {"enable_thinking": True}
    (choice,) = result_of(says("Hm.</think>It rains.", chat_template_kwargs=kwargs)).choices
    assert (choice.reasoning_content, choice.text) == ("Hm.", "It rains.")
    (choice,) = result_of(says("Hm, hm", chat_template_kwargs=kwargs)).choices
    assert (choice.reasoning_content, choice.text) == ("Hm, hm", "")


@pytest.mark.parametrize(
    ("said", "answer", "thought", "text"),
    [
        ("<think>\nHm", ", hm.</think>It rains.", ", hm.", "It rains."),
        ("<think>Hm.</think>It", " rains.", None, " rains."),
        ("It", " rains. <think>", None, " rains. <think>"),
    ],
)
def test_a_turn_goes_on_within_its_thought(
    says: Says_, said: str, answer: str, thought: str | None, text: str
) -> None:
    turns = [{"role": "user", "content": "How <think>?"}, {"role": "assistant", "content": said}]
    template = "{# </think> #}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    fields = {"messages": turns, "continue_final_message": True}
    generation = says(answer, template, **fields)
    (choice,) = result_of(generation).choices
    assert (choice.reasoning_content, choice.text) == (thought, text)
    events = [e for e in generation.events() if isinstance(e, Tokens)]
    assert "".join(e.reasoning_content or "" for e in events) == (thought or "")
    # A grammar begins behind the thought.
    (choice,) = result_of(says(answer, template, **fields, response_format=SHAPE)).choices
    assert choice.reasoning_content == thought
    assert json.loads(choice.text) in ({"rain": True}, {"rain": False})


def test_a_turn_goes_on_within_a_thought_that_the_template_opens(says: Says_) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Hm"}]
    template = "{# </think> #}{{ messages[0].content }}<think>\n{{ messages[1].content }}"
    fields = {"messages": turns, "continue_final_message": True}
    (choice,) = result_of(says(", hm.</think>It rains.", template, **fields)).choices
    assert (choice.reasoning_content, choice.text) == (", hm.", "It rains.")


def test_without_thoughts_in_the_template_tags_are_text(says: Says_) -> None:
    (choice,) = result_of(says(ANSWER, "{{ messages[0].content }}")).choices
    assert (choice.reasoning_content, choice.text) == (None, ANSWER)


def test_a_thought_survives_a_death_at_every_token(says: Says_) -> None:
    whole = says(ANSWER)
    expected = result_of(whole)
    events = [event for event in whole.events() if isinstance(event, Tokens)]
    for count in range(1, len(events), 3):
        journal = read_journal(events[:count])
        again = says(ANSWER, journal=journal)
        assert result_of(again).choices == expected.choices
        rest = [event for event in again.events() if isinstance(event, Tokens)]
        thought = journal.choices[0].thought + "".join(e.reasoning_content or "" for e in rest)
        assert thought == "Hm, it may rain."
        assert journal.choices[0].text + "".join(event.text for event in rest) == "It rains."


def test_a_grammar_begins_after_the_thought(says: Says_) -> None:
    fields = {"response_format": SHAPE, "chat_template_kwargs": {"enable_thinking": True}}
    (choice,) = result_of(says('Hm.</think>{"rain": true}', **fields)).choices
    assert choice.reasoning_content == "Hm."
    assert json.loads(choice.text) in ({"rain": True}, {"rain": False})
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("text", ["Hm", "<think>\nHm"], ids=["of the prompt", "of the model"])
def test_min_tokens_forbid_an_end_within_the_thought_before_a_grammar(
    says: Says_, text: str
) -> None:
    kwargs = {"enable_thinking": not text.startswith("<")}
    fields = {"response_format": SHAPE, "chat_template_kwargs": kwargs, "temperature": 0}
    (early,) = result_of(says(text, **fields)).choices
    *said, end = early.token_ids
    (choice,) = result_of(says(text, **fields, min_tokens=len(said) + 4)).choices
    assert choice.token_ids[: len(said)] == tuple(said)
    assert choice.token_ids.index(end) == len(said) + 4
    assert choice.finish_reason == "stop"


def test_behind_the_thought_a_grammar_goes_before_min_tokens(says: Says_) -> None:
    kwargs = {"enable_thinking": True}
    # With log probabilities, each token of the grammar is sampled.
    fields = {"response_format": SHAPE, "chat_template_kwargs": kwargs, "logprobs": 0}
    result = result_of(says("Hm.</think>", **fields))
    (choice,) = result.choices
    first = choice.token_ids[result.usage.reasoning]
    result = result_of(says("Hm.</think>", **fields, min_tokens=100, stop_token_ids=[first]))
    assert result.choices[0].token_ids[result.usage.reasoning] == first
    assert json.loads(result.text) in ({"rain": True}, {"rain": False})


def test_a_grammar_begins_after_a_thought_that_the_model_opens(says: Says_) -> None:
    (choice,) = result_of(says("<think>Hm.</think>", response_format=SHAPE)).choices
    assert choice.reasoning_content == "Hm."
    assert json.loads(choice.text) in ({"rain": True}, {"rain": False})
    (choice,) = result_of(says('{"rain": true}', response_format=SHAPE)).choices
    assert (choice.reasoning_content, choice.text) == (None, '{"rain": true}')


@pytest.mark.parametrize("tail", ["<think>\n\n</think>\n\n", ""])
def test_a_grammar_begins_at_once_where_no_thought_may_come(says: Says_, tail: str) -> None:
    template = f"{{{{ messages[0].content }}}}{tail}"
    (choice,) = result_of(says("<think>Hm.</think>", template, response_format=SHAPE)).choices
    assert choice.reasoning_content is None
    assert json.loads(choice.text) in ({"rain": True}, {"rain": False})


def test_a_forced_call_follows_the_thought(says: Says_) -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    template = f"{{% for t in tools or [] %}}{{{{ t | tojson }}}}{{% endfor %}}{TEMPLATE}"
    result = result_of(says("<think>Hm.</think>", template, **fields))
    (choice,) = result.choices
    assert (choice.reasoning_content, choice.text) == ("Hm.", "")
    assert [call.function.name for call in choice.tool_calls or ()] == ["weather"]


def test_usage_says_how_many_tokens_were_thoughts(says: Says_) -> None:
    kwargs = {"enable_thinking": True}
    result = result_of(says("Hm.</think>It rains.", chat_template_kwargs=kwargs))
    assert 0 < result.usage.reasoning < result.usage.completion
    assert result_of(says("It rains.", "{{ messages[0].content }}")).usage.reasoning == 0
