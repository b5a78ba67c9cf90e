"""Runs clients and frameworks that people really use, unmodified, against a gateway.

    llorch up --model hf:Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q4_K_M --name qwen
    python -m benches.clients http://localhost:8080/v1 --model qwen

The model's chat template must have a place for tools. Each client runs in an environment of its
own below ``--folder``, with the newest packages; those for JavaScript need npm. The answer of a
small model need not be right, so nothing is asserted of it but its form.
"""

# ruff: noqa: E501 - in the clients' code
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import venv
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.recording import recorded

LONGEST_S = 3600
BEGIN = """
import os
URL, MODEL = os.environ["OPENAI_BASE_URL"], os.environ["MODEL"]
SHORT = "Say hello in three words."
def weather(city: str) -> str:
    "The weather of a city."
    return f"sunny in {city}"
"""


@dataclass(frozen=True)
class Client:
    packages: str
    """What pip or npm installs."""
    code: str
    node: bool = False


CLIENTS = {
    "openai": Client(
        "openai pydantic",
        """
from openai import OpenAI
from pydantic import BaseModel
from typing import Literal
class Answer(BaseModel):
    colour: Literal["red", "green", "blue"]
api = OpenAI()
print(api.models.list().data[0].id, api.models.retrieve(MODEL).created)
turns = [{"role": "user", "content": SHORT}]
whole = api.chat.completions.create(model=MODEL, messages=turns, max_tokens=20)
turns += [whole.choices[0].message, {"role": "user", "content": "Again."}]
with api.chat.completions.stream(model=MODEL, messages=turns, max_tokens=400) as stream:
    for event in stream:
        pass
    print(stream.get_final_completion().choices[0].message.content)
parsed = api.chat.completions.parse(model=MODEL, messages=turns, response_format=Answer)
assert parsed.choices[0].message.parsed.colour is not None
response = api.responses.create(model=MODEL, input=SHORT, max_output_tokens=20)
assert response.output_text and response._request_id
""",
    ),
    "langchain-openai": Client(
        "langchain-openai",
        """
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from typing import Literal
class Answer(BaseModel):
    colour: Literal["red", "green", "blue"]
chat = ChatOpenAI(model=MODEL, base_url=URL, max_tokens=64, stream_usage=True)
print(chat.invoke(SHORT).content)
assert sum((c for c in chat.stream(SHORT)), start=next(chat.stream(SHORT))).usage_metadata
for method in ("json_schema", "function_calling", "json_mode"):
    asked = "A colour, as JSON with the key colour."
    answer = chat.with_structured_output(Answer, method=method, include_raw=True).invoke(asked)
    assert answer["raw"], method
bound = chat.bind_tools([weather], tool_choice="weather")
first = bound.invoke("The weather in Paris?")
(call,) = first.tool_calls
history = [("user", "The weather in Paris?"), first, ToolMessage("sunny", tool_call_id=call["id"])]
print(chat.bind_tools([weather]).invoke(history).content)
try:
    chat.invoke("word " * 20000)
    raise SystemExit("no error")
except Exception as error:
    assert type(error).__name__ == "OpenAIContextOverflowError", type(error)
""",
    ),
    "litellm": Client(
        "litellm",
        """
import litellm
call = {"model": f"openai/{MODEL}", "api_base": URL, "max_tokens": 64}
turns = [{"role": "user", "content": [{"type": "text", "text": SHORT, "cache_control": {"type": "ephemeral"}}]}]
first = litellm.completion(messages=turns, **call)
turns += [first.choices[0].message, {"role": "user", "content": "Again."}]
print("".join(c.choices[0].delta.content or "" for c in litellm.completion(messages=turns, stream=True, **call)))
tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
asked = litellm.completion(messages=turns, tools=[tool], tool_choice="required", **call).choices[0].message
turns += [asked] + [{"role": "tool", "tool_call_id": c.id, "name": "weather", "content": "sunny"} for c in asked.tool_calls]
litellm.completion(messages=turns, tools=[tool], **call)
print(litellm.responses(model=f"openai/{MODEL}", api_base=URL, input=SHORT, max_output_tokens=20).output[0])
try:
    litellm.completion(messages=[{"role": "user", "content": "word " * 20000}], **call)
    raise SystemExit("no error")
except litellm.ContextWindowExceededError:
    pass
""",
    ),
    "instructor": Client(
        "instructor",
        """
import instructor
from openai import OpenAI
from pydantic import BaseModel
from typing import Literal
class Answer(BaseModel):
    colour: Literal["red", "green", "blue"]
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA, instructor.Mode.MD_JSON, instructor.Mode.PARALLEL_TOOLS, instructor.Mode.RESPONSES_TOOLS):
    client = instructor.from_openai(OpenAI(), mode=mode)
    kind = Answer
    if mode is instructor.Mode.PARALLEL_TOOLS:
        from collections.abc import Iterable
        kind = Iterable[Answer]
    try:
        answer = client.chat.completions.create(model=MODEL, response_model=kind, max_retries=2, messages=[{"role": "user", "content": "Name a colour."}], max_tokens=100)
        print(mode, answer if kind is Answer else list(answer))
    except Exception as error:
        # A weak model may write no call where nothing makes it, or write on and on.
        assert type(error).__name__ in ("InstructorRetryException", "IncompleteOutputException"), error
        assert "Error code" not in str(error), (mode, str(error)[:2000])
        print(mode, "no JSON")
""",
    ),
    "pydantic-ai": Client(
        "pydantic-ai-slim[openai]",
        """
from pydantic import BaseModel
from typing import Literal
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.usage import UsageLimits
class Answer(BaseModel):
    colour: Literal["red", "green", "blue"]
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind(MODEL)
    first = Agent(model, model_settings={"max_tokens": 40}).run_sync(SHORT)
    Agent(model, tools=[weather], model_settings={"max_tokens": 40}).run_sync("Again.", message_history=first.all_messages())
    for output in (Answer, NativeOutput(Answer), PromptedOutput(Answer)):
        try:
            print(Agent(model, output_type=output, tools=[weather], model_settings={"max_tokens": 100}).run_sync("Name a colour.", usage_limits=UsageLimits(request_limit=4)).output)
        except (UnexpectedModelBehavior, UsageLimitExceeded) as error:
            assert "status_code" not in str(error)
            print(type(error).__name__)
""",
    ),
    "openai-agents": Client(
        "openai-agents",
        """
import asyncio
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded
from openai import AsyncOpenAI
from pydantic import BaseModel
from typing import Literal
set_tracing_disabled(True)
class Answer(BaseModel):
    colour: Literal["red", "green", "blue"]
async def main():
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(MODEL, AsyncOpenAI())
        other = Agent(name="other", instructions="Be brief.", model=model)
        settings = ModelSettings(max_tokens=600)
        for options in ({}, {"tools": [function_tool(weather)]}, {"handoffs": [other]}, {"output_type": Answer},
                        {"tools": [function_tool(weather)], "model_settings": ModelSettings(max_tokens=600, tool_choice="required")}):
            agent = Agent(name="first", instructions="Be brief.", model=model, **({"model_settings": settings} | options))
            try:
                result = await Runner.run(agent, "The weather in Paris?", max_turns=3)
                print(kind.__name__, list(options), str(result.final_output)[:40])
                again = result.to_input_list() + [{"role": "user", "content": "Again."}]
                streamed = Runner.run_streamed(agent, again, max_turns=3)
                async for _ in streamed.stream_events():
                    pass
            except MaxTurnsExceeded:
                print(kind.__name__, list(options), "too many turns")
asyncio.run(main())
""",
    ),
    "anthropic": Client(
        "anthropic",
        """
from anthropic import Anthropic
client = Anthropic(base_url=URL.removesuffix("/v1"), api_key="none")
tool = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
turns = [{"role": "user", "content": "The weather in Paris?"}]
common = {"model": MODEL, "tools": [tool], "system": "Be brief."}
print(client.messages.count_tokens(messages=turns, **common).input_tokens)
for choice in ({"type": "auto"}, {"type": "any", "disable_parallel_tool_use": True}):
    with client.messages.stream(messages=turns, max_tokens=100, tool_choice=choice, **common) as stream:
        for _ in stream:
            pass
        message = stream.get_final_message()
    print(message.stop_reason, [block.type for block in message.content])
results = [{"type": "tool_result", "tool_use_id": block.id, "content": weather("Paris")} for block in message.content if block.type == "tool_use"]
turns += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
print(client.messages.create(messages=turns, max_tokens=40, **common).content)
print(client.messages.create(messages=turns[:1], model=MODEL, max_tokens=40, thinking={"type": "enabled", "budget_tokens": 1024}).content)
""",
    ),
    "autogen": Client(
        "autogen-agentchat autogen-ext[openai]",
        """
import asyncio
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient
info = {"vision": False, "function_calling": True, "json_output": True, "family": ModelFamily.UNKNOWN, "structured_output": True}
async def main():
    client = OpenAIChatCompletionClient(model=MODEL, base_url=URL, model_info=info, max_tokens=40)
    writer = AssistantAgent("writer", client, tools=[weather], system_message="Be brief.", reflect_on_tool_use=True)
    critic = AssistantAgent("critic", client, model_client_stream=True, system_message="Criticise.")
    team = RoundRobinGroupChat([writer, critic], termination_condition=MaxMessageTermination(5))
    result = await team.run(task="The weather in Paris?")
    print(len(result.messages))
    await client.close()
asyncio.run(main())
""",
    ),
    "haystack": Client(
        "haystack-ai",
        """
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
tool = create_tool_from_function(weather)
for kind, limit in ((OpenAIChatGenerator, "max_completion_tokens"), (OpenAIResponsesChatGenerator, "max_output_tokens")):
    generator = kind(model=MODEL, api_base_url=URL, generation_kwargs={limit: 60})
    turns = [ChatMessage.from_system("Be brief."), ChatMessage.from_user("The weather in Paris?", name="ann")]
    reply = generator.run(turns)["replies"][0]
    generator.run([*turns, reply, ChatMessage.from_user("Again.")], streaming_callback=lambda chunk: None)
    print(Agent(chat_generator=generator, tools=[tool], max_agent_steps=3).run(messages=turns)["messages"][-1].text)
""",
    ),
    "llama-index": Client(
        "llama-index-llms-openai-like",
        """
import asyncio
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from typing import Literal
class Answer(BaseModel):
    colour: Literal["red", "green", "blue"]
llm = OpenAILike(model=MODEL, api_base=URL, api_key="none", is_chat_model=True, is_function_calling_model=True, context_window=2048, max_tokens=60)
first = llm.chat([ChatMessage(role="user", content=SHORT)]).message
print("".join(c.delta or "" for c in llm.stream_chat([ChatMessage(role="user", content=SHORT), first, ChatMessage(role="user", content="Again.")])))
print(llm.complete(SHORT))
print(llm.as_structured_llm(Answer).complete("Name a colour."))
async def main():
    print(await FunctionAgent(tools=[weather], llm=llm).run("The weather in Paris?", max_iterations=3))
try:
    asyncio.run(main())
except Exception as error:
    assert "iterations" in str(error), error
""",
    ),
    "openai-node": Client(
        "openai",
        """
import OpenAI from "openai";
const api = new OpenAI();
const model = process.env.MODEL;
const messages = [{ role: "user", content: "Say hello in three words." }];
const whole = await api.chat.completions.create({ model, messages, max_tokens: 20 });
messages.push(whole.choices[0].message, { role: "user", content: "Again." });
const stream = api.chat.completions.stream({ model, messages, max_tokens: 400 });
for await (const _ of stream);
console.log((await stream.finalChatCompletion()).choices[0].message.content);
const tools = [{ type: "function", function: { name: "weather", parse: JSON.parse, function: () => "sunny",
  parameters: { type: "object", properties: { city: { type: "string" } } } } }];
const runner = api.chat.completions.runTools({ model, messages, tools, max_tokens: 40 }, { maxChatCompletions: 3 });
await runner.done();
const response = await api.responses.create({ model, input: "Say hello.", max_output_tokens: 20 });
console.log(response.output_text, response._request_id);
for await (const event of await api.responses.create({ model, input: "Hi", max_output_tokens: 20, stream: true }));
""",
        node=True,
    ),
    "ai-sdk": Client(
        "ai @ai-sdk/openai @ai-sdk/openai-compatible zod",
        """
import { generateText, generateObject, streamText, tool, stepCountIs } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";
const baseURL = process.env.OPENAI_BASE_URL;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const like = createOpenAICompatible({ name: "llorch", baseURL, supportsStructuredOutputs: true, includeUsage: true });
const weather = tool({ description: "The weather.", inputSchema: z.object({ city: z.string() }), execute: async () => "sunny" });
for (const model of [openai(process.env.MODEL), openai.chat(process.env.MODEL), like(process.env.MODEL)]) {
  const maxOutputTokens = 60;
  const first = await generateText({ model, prompt: "Say hello.", maxOutputTokens });
  const messages = [{ role: "user", content: "Say hello." }, ...first.response.messages, { role: "user", content: "Again." }];
  const streamed = streamText({ model, messages, maxOutputTokens, onError: ({ error }) => { throw error; } });
  for await (const _ of streamed.textStream);
  await generateText({ model, prompt: "The weather in Paris?", tools: { weather }, toolChoice: "required", stopWhen: stepCountIs(2), maxOutputTokens });
  const made = await generateObject({ model, prompt: "Name a colour.", schema: z.object({ colour: z.enum(["red", "blue"]) }), maxOutputTokens });
  console.log(first.text.slice(0, 40), made.object);
}
""",
        node=True,
    ),
}


def installed(name: str, folder: Path) -> tuple[Path, str]:
    """The folder with a client's packages, and the program that runs code there."""
    client = CLIENTS[name]
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    python = home / "venv" / "bin" / "python"
    if client.node:
        install = ["npm", "install", "--no-audit", "--no-fund"]
    else:
        install = [str(python), "-m", "pip", "install", "--quiet"]
        if not python.exists():
            venv.create(home / "venv", with_pip=True)
    with (home / "install.log").open("w") as log:
        command = [*install, *client.packages.split()]
        subprocess.run(command, cwd=home, stdout=log, stderr=log, check=True)
    return home, "node" if client.node else str(python)


def options(about: str, names: Collection[str]) -> argparse.ArgumentParser:
    """What every program that runs clients takes."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("url", help="of the gateway's API, with /v1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", nargs="*", choices=names, default=list(names))
    parser.add_argument("--folder", type=Path, default=Path("clients"), help="for environments")
    parser.add_argument("--record", type=Path, help="a folder for what each client posts")
    return parser


def ran(
    name: str, command: list[str], given: argparse.Namespace, **streams: Any
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Runs a client's program against the gateway; its output, and the seconds that it took."""
    began_s = time.monotonic()
    recording = given.record and recorded(given.url, given.record / f"{name}.jsonl")
    with recording or nullcontext(given.url) as url:
        done = subprocess.run(
            command,
            env=os.environ
            | {"OPENAI_API_KEY": "none", "MODEL": given.model, "OPENAI_BASE_URL": url}
            | {"PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
            **streams,
        )
    return done, time.monotonic() - began_s


def main() -> None:
    given = options(str(__doc__).partition("\n")[0], CLIENTS).parse_args()
    failed = []
    for name in given.only:
        client = CLIENTS[name]
        home, program = installed(name, given.folder.absolute())
        script = home / ("run.mjs" if client.node else "run.py")
        script.write_text(client.code if client.node else BEGIN + client.code)
        done, took_s = ran(name, [program, str(script)], given)
        print(f"{name:18} {'FAILED' if done.returncode else 'ok':7}{took_s:6.0f} s", flush=True)
        if done.returncode:
            failed.append(name)
            print(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
