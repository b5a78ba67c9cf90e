"""Are forced calls of tools valid, in each dialect?

    python -m benches.tool_calls --model FILE.gguf [--dialects hermes,generic]

For each dialect a worker serves the file, with a chat template of that dialect in place of its
own, behind a gateway. The openai client asks 30 questions with five functions and ``tool_choice:
required``, every other one as a stream. A call is valid if its function is one of the five and its
arguments fit the schema of that function. ``right``: how often the model also chose the function
that the question is about, which no grammar can see to. ``own`` is the file's own template.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import run
from typing import Annotated, Any

import jsonschema_rs
import openai
import typer

from benches.command import main
from llorch_worker.settings import Settings
from llorch_worker.stack import ports
from llorch_worker.stack.plan import Plan
from llorch_worker.stack.stack import Stack
from llorch_worker.text.dialects import DIALECTS, GENERIC, Dialect

READY_S = 300.0
OWN = "own"
AT_ONCE = 4


def function(name: str, told: str, needed: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": needed.split(),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": told, "parameters": parameters},
    }


SHORT = {"type": "string", "maxLength": 40}
TOOLS = [
    function(
        "get_weather", "The weather of a city.", "city",
        city=SHORT, days={"type": "integer", "minimum": 1, "maximum": 14},
        unit={"enum": ["celsius", "fahrenheit"]},
    ),
    function(
        "send_mail", "Sends a mail.", "to subject",
        to={"type": "array", "items": SHORT, "minItems": 1, "maxItems": 3},
        subject=SHORT, urgent={"type": "boolean"},
    ),
    function(
        "add_event", "Adds an event to the calendar.", "title date",
        title=SHORT, date={"type": "string", "format": "date"},
        place={"anyOf": [SHORT, {"type": "null"}]},
    ),
    function(
        "convert", "Converts an amount of money.", "amount source target",
        amount={"type": "number", "minimum": 0, "maximum": 1_000_000},
        source={"enum": ["EUR", "USD", "CHF"]}, target={"enum": ["EUR", "USD", "CHF"]},
    ),
    function("list_files", "Lists the files of the user's folder.", ""),
]  # fmt: skip
QUESTIONS = {
    "get_weather": (
        "What is the weather in {}?", ("Bern", "Zürich", "New York", "São Paulo", "東京", "Oslo"),
    ),
    "send_mail": (
        "Write a mail to {} about the meeting.", ("Ann", "Bob and Al", "my boss", "Li", "Mia", "J"),
    ),
    "add_event": (
        "Put {} on 3 May 2026 into my calendar.",
        ("lunch", "the dentist", "a \"party\"", "the exam", "a run", "tea at the zoo"),
    ),
    "convert": (
        "How much are {} in francs?",
        ("20 euros", "5 dollars", "1000 EUR", "3.50 USD", "a million euros", "7 euros"),
    ),
    "list_files": (
        "{} files do I have?", ("What", "Which", "How many", "What PDF", "What new", "Which old"),
    ),
}  # fmt: skip
ASKED = [
    (name, question.format(what)) for name, (question, whats) in QUESTIONS.items() for what in whats
]


def template_of(dialect: Dialect) -> str:
    """ChatML that shows tools and calls as the dialect writes them; without tools if generic."""
    turns = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    if dialect is GENERIC:
        return turns
    form = dialect.write([("FUNCTION", "ARGUMENTS")])
    told = "{% raw %}To call a function, write: " + form + "{% endraw %}<|im_end|>\n"
    if dialect.tools_in_system:
        return (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
            "{% if m.tools %}<|tool|>{{ m.tools }}<|/tool|>"
            + told.removesuffix("<|im_end|>\n")
            + "{% endif %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
    return (
        "{% if tools %}<|im_start|>system\nYou can call these functions:\n"
        "{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}"
        + told
        + "{% endif %}"
        + turns
    )


def with_template(model: Path, dialect: Dialect, folder: Path) -> Path:
    """A copy of the file with another chat template."""
    copy = folder / f"{dialect.name}.gguf"
    command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force"]
    command += ["--chat-template", template_of(dialect), str(model), str(copy)]
    run(command, check=True, capture_output=True)
    return copy


def faults(answer: Any) -> str | None:
    """What is wrong with an answer; None if its calls are valid."""
    if not answer.message.tool_calls:
        return f"no call ({answer.finish_reason})"
    for call in answer.message.tool_calls:
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}
        if call.function.name not in schemas:
            return "an unknown function"
        try:
            arguments = json.loads(call.function.arguments)
        except ValueError:
            return f"arguments are no JSON ({answer.finish_reason})"
        if not jsonschema_rs.is_valid(schemas[call.function.name], arguments):
            return "arguments do not fit"
    if answer.message.content:
        return "text beside the call"
    return None if answer.finish_reason == "tool_calls" else answer.finish_reason


def ask(client: openai.OpenAI, number: int) -> tuple[str | None, bool]:
    """What is wrong with the answer to a question, and whether the function is the right one."""
    name, question = ASKED[number]
    fields: dict[str, Any] = {
        "model": "tools", "messages": [{"role": "user", "content": question}], "tools": TOOLS,
        "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300,
        "temperature": 0,
    }  # fmt: skip
    if number % 2:
        with client.chat.completions.stream(**fields) as stream:
            answer: Any = stream.get_final_completion().choices[0]
    else:
        answer = client.chat.completions.create(**fields).choices[0]
    calls = answer.message.tool_calls or ()
    return faults(answer), any(call.function.name == name for call in calls)


def measure(model: Path) -> tuple[list[str | None], int, float]:
    """The faults of all answers, how many functions were right, and the seconds it took."""
    settings = Settings(model=str(model), model_name="tools", max_context=2048)
    plan = Plan(
        settings=settings, workers=(("worker", "cpu"),), redis_url=None, flower_port=None,
        gateway_port=ports.any_free_port(),
    )  # fmt: skip
    with Stack(plan, lambda _name, _line: None) as stack:
        stack.start()
        stack.wait_ready(READY_S)
        stack.wait_for_servers(READY_S)
        client = openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key="none", timeout=600)
        began_s = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda number: ask(client, number), range(len(ASKED))))
    return (
        [fault for fault, _ in answers],
        sum(right for _, right in answers),
        time.monotonic() - began_s,
    )


def tool_calls(
    model: Annotated[Path, typer.Option(help="A GGUF file whose turns are ChatML.")],
    dialects: Annotated[str, typer.Option(help="Names; all by default.")] = "",
) -> int:
    """Ask 30 questions in each dialect; 1 if any call is not valid."""
    named = {dialect.name: dialect for dialect in DIALECTS}
    failed = 0
    print(f"{model.name}\n{'dialect':14} {'valid':>8} {'right':>6} {'s':>6}")
    for name in dialects.split(",") if dialects else [OWN, *named]:
        with tempfile.TemporaryDirectory() as folder:
            file = model if name == OWN else with_template(model, named[name], Path(folder))
            found, right, took_s = measure(file)
        wrong = [fault for fault in found if fault is not None]
        failed += len(wrong)
        valid = f"{len(found) - len(wrong)}/{len(found)}"
        print(f"{name:14} {valid:>8} {right:>6} {took_s:6.0f} {', '.join(sorted({*wrong}))}")
    return 1 if failed else 0


if __name__ == "__main__":
    main(tool_calls, "tool_calls")
