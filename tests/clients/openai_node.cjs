// The OpenAI SDK for Node, against BASE_URL: prints what test_with_node.py checks, as one JSON object.
const OpenAI = require("openai");

const QUESTION = [{ role: "user", content: "What is the capital of France?" }];
const TOOL = {
  type: "function",
  function: {
    name: "temperature",
    parameters: {
      type: "object",
      properties: { city: { enum: ["Oslo", "Paris"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

async function errorOf(call) {
  try {
    await call;
    return null;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, param: error.param, message: error.message };
  }
}

async function main() {
  const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "unused", maxRetries: 0, timeout: 120_000 });
  const model = process.env.MODEL;
  const asked = { model, messages: QUESTION, temperature: 0, max_completion_tokens: 40 };
  const found = {};

  found.models = (await client.models.list()).data.map((one) => one.id);
  const whole = await client.chat.completions.create(asked);
  found.whole = whole.choices[0].message.content;
  found.wholeUsage = whole.usage;

  found.deltas = [];
  const stream = await client.chat.completions.create({
    ...asked,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    if (chunk.choices.length) found.deltas.push(chunk.choices[0].delta.content ?? "");
    else found.streamUsage = chunk.usage;
  }

  const helper = client.chat.completions.stream(asked);
  found.helperDeltas = [];
  helper.on("content", (delta) => found.helperDeltas.push(delta));
  found.helperFinal = await helper.finalContent();

  const forced = { ...asked, tools: [TOOL], tool_choice: "required", parallel_tool_calls: false };
  found.call = (await client.chat.completions.create(forced)).choices[0].message.tool_calls[0].function;
  const calls = await client.chat.completions.stream(forced).finalChatCompletion();
  found.streamedCall = calls.choices[0].message.tool_calls[0].function;

  const parsed = await client.chat.completions.parse({
    ...asked,
    response_format: {
      type: "json_schema",
      json_schema: { name: "city", schema: TOOL.function.parameters, strict: true },
    },
  });
  found.parsed = parsed.choices[0].message.parsed;

  const responding = { model, input: QUESTION[0].content, temperature: 0, max_output_tokens: 40 };
  found.response = (await client.responses.create(responding)).output_text;
  found.responseDeltas = [];
  for await (const event of await client.responses.create({ ...responding, stream: true })) {
    if (event.type === "response.output_text.delta") found.responseDeltas.push(event.delta);
  }

  found.text = (await client.completions.create({ model, prompt: "Water is", max_tokens: 6, temperature: 0 })).choices[0].text;

  found.aborted = 0;
  const long = await client.chat.completions.create({ ...asked, max_completion_tokens: 1000, stream: true, ignore_eos: true });
  for await (const chunk of long) {
    found.aborted += 1;
    if (found.aborted === 3) long.controller.abort();
  }

  found.errors = {
    model: await errorOf(client.chat.completions.create({ ...asked, model: "another" })),
    temperature: await errorOf(client.chat.completions.create({ ...asked, temperature: -1 })),
    field: await errorOf(client.chat.completions.create({ ...asked, no_such_field: 1 })),
  };
  process.stdout.write(JSON.stringify(found));
}

main();
