// AI SDK: its model messages, over responses, chats, and its client of services like OpenAI's.
// As sending.py: a history a line of standard input, a report of each way a line of standard output.

import { createInterface } from "node:readline";
import { generateText, jsonSchema, tool } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const baseURL = process.env.OPENAI_BASE_URL;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const like = createOpenAICompatible({ name: "llorch", baseURL, supportsStructuredOutputs: true, includeUsage: true });
const WAYS = {
  responses: openai.responses(process.env.MODEL),
  chat: openai.chat(process.env.MODEL),
  compatible: like(process.env.MODEL),
};
const WEATHER = { type: "text", value: "sunny" };

const textOf = (turn) => turn.texts.join("\n");
const partsOf = (turn) => turn.texts.map((text) => ({ type: "text", text }));

function objectOf(spelling) {
  try {
    const value = JSON.parse(spelling);
    return value !== null && typeof value === "object" && !Array.isArray(value) ? value : {};
  } catch {
    return spelling; // as an invalid call keeps it
  }
}

const resultOf = (call, output) => ({ type: "tool-result", toolCallId: call.id, toolName: call.name, output });

function outputOf(turn) {
  if (turn.failed) return { type: "error-text", value: textOf(turn) };
  if (turn.parts) return { type: "content", value: partsOf(turn) };
  return turn.texts.length > 1 ? { type: "json", value: turn.texts } : { type: "text", value: textOf(turn) };
}

function messageOf(turn) {
  if (turn.role === "system" || turn.role === "developer") return { role: "system", content: textOf(turn) };
  if (turn.role === "user") return { role: "user", content: turn.parts ? partsOf(turn) : textOf(turn) };
  if (turn.role === "tool") return { role: "tool", content: [resultOf(turn.call, outputOf(turn))] };
  const content = turn.refusal ? [{ type: "text", text: turn.refusal }] : partsOf(turn);
  if (turn.thought !== null) content.unshift({ type: "reasoning", text: turn.thought });
  for (const call of turn.calls)
    content.push({ type: "tool-call", toolCallId: call.id, toolName: call.name, input: objectOf(call.arguments) });
  return { role: "assistant", content: turn.parts || turn.calls.length || turn.thought !== null ? content : textOf(turn) };
}

async function asked(model, messages, history) {
  const tools = Object.fromEntries(
    history.tools.map(({ function: f }) => [f.name, tool({ description: f.description, inputSchema: jsonSchema(f.parameters) })]),
  );
  const answer = await generateText({
    model, messages, tools, toolChoice: history.choice ?? undefined,
    maxOutputTokens: 24, maxRetries: 0, allowSystemInMessages: true,
  });
  const calls = answer.toolCalls.filter((call) => !call.invalid);
  const results = calls.map((call) => resultOf({ id: call.toolCallId, name: call.toolName }, WEATHER));
  const said = answer.response.messages;
  return results.length ? [...said, { role: "tool", content: results }] : said;
}

globalThis.AI_SDK_LOG_WARNINGS = false;
for await (const line of createInterface({ input: process.stdin })) {
  const history = JSON.parse(line);
  for (const [way, model] of Object.entries(WAYS)) {
    let error = null;
    try {
      const messages = history.turns.map(messageOf);
      const answer = await asked(model, messages, history);
      await asked(model, [...messages, ...answer, { role: "user", content: "Again." }], history);
    } catch (caught) {
      const failed = `${caught.statusCode ?? caught.name} ${caught.message} ${caught.responseBody ?? ""}`;
      // It takes no answer whose call the length has cut off.
      error = caught.name === "AI_ToolChoiceViolationError" ? null : failed;
    }
    console.log(JSON.stringify({ way, seed: history.seed, error }));
  }
}
