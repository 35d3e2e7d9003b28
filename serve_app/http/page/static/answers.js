// The prompt box: streams answers, colours their tokens by kind, and compares speculation on and off.

import { byId, element } from "./dom.js";
import { call, events } from "./wire.js";

const KINDS = new Set(["first", "accepted", "recovered", "bonus"]);
let running = null;

/** The JSON events of a streamed reply. */
async function* chunks(body, signal) {
  const options = { method: "POST", headers: { "content-type": "application/json" }, signal, body: JSON.stringify(body) };
  for await (const { data } of events(await call("v1/chat/completions", options))) {
    if (data === "[DONE]") return;
    yield JSON.parse(data);
  }
}

/** What stands for a token that would take no room, so that it can be seen and pointed at; "" = its text will do. */
function markOf(text, entry) {
  if (!/^[\p{C}\p{M}]*$/u.test(text)) return "";
  if (text) return text.replace(/\n/g, "↵").replace(/[\p{C}\p{M}]/gu, "·");
  const bytes = entry.bytes ?? []; // part of a character: the token that completes it has the text
  return bytes.length ? bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ") : entry.token || "·";
}

/** One answer on the page. */
class Answer {
  constructor(title) {
    this.tokens = []; // {text, kind, logprob, top}
    this.content = "";
    this.decoder = new TextDecoder();
    this.state = element("span", { class: "pill" }, "waiting");
    this.text = element("div", { class: "text" });
    this.figures = element("p", { class: "figures" });
    this.box = element("article", { class: "answer" }, element("h3", {}, title, this.state), this.text, this.figures);
    this.box.answer = this;
    byId("answers").append(this.box);
  }

  async stream(body, signal) {
    this.began = performance.now();
    this.checked = body.verify;
    try {
      for await (const event of chunks(body, signal)) this.take(event);
      this.say(this.verdict ? [this.verdict, this.checks].filter(Boolean).join(": ") : "done", { verified: "good", suspect: "bad" }[this.verdict] ?? "");
    } catch (error) {
      const stopped = error.name === "AbortError";
      this.say(stopped ? "stopped" : "failed", stopped ? "" : "bad");
      if (!stopped) this.box.append(element("p", { class: "error" }, error.message));
    }
  }

  say(text, tone) {
    this.state.textContent = text;
    this.state.className = `pill ${tone}`;
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) this.usage = event.usage;
    if (event.verdict) this.verdict = event.verdict;
    if (event.checked) this.checks = event.checked.join(", ");
    const choice = event.choices[0];
    if (!choice) return this.show();
    this.content += choice.delta.content ?? "";
    (choice.logprobs?.content ?? []).forEach((entry, index) => this.add(entry, choice.token_kinds?.[index]));
    if (choice.finish_reason) this.finish();
    this.show();
  }

  add(entry, kind) {
    this.last = performance.now();
    this.first ??= this.last;
    this.say("answering", "");
    const text = this.decoder.decode(new Uint8Array(entry.bytes ?? []), { stream: true });
    const known = KINDS.has(kind) ? kind : "bonus";
    const span = element("span", { class: `tok kind-${known}` }, text);
    span.dataset.index = this.tokens.length;
    const mark = markOf(text, entry);
    if (mark) span.dataset.mark = mark;
    this.tokens.push({ text, mark, kind: known, logprob: entry.logprob, top: entry.top_logprobs ?? [], span });
    this.text.append(span);
  }

  /** What was generated and is no part of the text, such as the token that ends it, is shown as such. */
  finish() {
    let length = 0;
    for (const token of this.tokens) {
      length += token.text.length;
      token.span.classList.toggle("unsaid", length > this.content.length);
    }
    if (this.checked) this.say("being checked", "");
  }

  get speed() {
    return this.tokens.length > 1 ? ((this.tokens.length - 1) / (this.last - this.first)) * 1000 : null;
  }

  show() {
    const count = this.tokens.length;
    if (!count) return;
    const rounds = count - this.tokens.filter((token) => token.kind === "accepted").length;
    const said = [`${count} tokens`, `first after ${((this.first - this.began) / 1000).toFixed(2)} s`];
    if (this.speed !== null && Number.isFinite(this.speed)) said.push(`then ${this.speed.toFixed(1)} a second`);
    said.push(`${(count / rounds).toFixed(2)} tokens a round`);
    this.figures.textContent = said.join(" · ");
  }
}

/** Show what is known of a token under the pointer, or under the finger. */
function detail(event) {
  const span = event.target.closest(".text .tok");
  if (!span) return;
  document.querySelector(".tok.picked")?.classList.remove("picked");
  span.classList.add("picked");
  const { text, mark, kind, logprob, top } = span.closest(".answer").answer.tokens[span.dataset.index];
  const percent = (value) => `${(100 * Math.exp(value)).toFixed(value > -0.01 ? 2 : 1)} %`;
  const parts = [element("code", {}, text ? JSON.stringify(text) : mark), ` ${kind} · logprob ${logprob.toFixed(4)} · ${percent(logprob)}`];
  for (const [index, other] of top.entries()) {
    parts.push(index ? ", " : " · likeliest: ", element("code", {}, JSON.stringify(other.token)), ` ${percent(other.logprob)}`);
  }
  byId("token").replaceChildren(...parts);
  byId("token").hidden = false;
}

function compare(on, off) {
  const place = byId("compared");
  if (!on.tokens.length || !off.tokens.length) return;
  const ratio = on.speed && off.speed ? ` Speculation decoded ${(on.speed / off.speed).toFixed(2)} times as fast.` : "";
  const parts = off.tokens.findIndex((token, index) => token.text !== on.tokens[index]?.text);
  const same = parts < 0 && on.tokens.length === off.tokens.length;
  place.textContent = same
    ? `The same text, token for token.${ratio}`
    : `The texts part at token ${(parts < 0 ? off.tokens.length : parts) + 1}: two tokens were as likely there as the arithmetic can tell, or one text was cut short.${ratio}`;
  place.hidden = false;
}

function requestBody(model, seed, speculate, mode) {
  const body = {
    model,
    messages: [{ role: "user", content: byId("prompt").value }],
    max_tokens: byId("max-tokens").valueAsNumber || 80,
    temperature: Number.isNaN(byId("temperature").valueAsNumber) ? 0 : byId("temperature").valueAsNumber,
    seed,
    stream: true,
    stream_options: { include_usage: true },
    logprobs: true,
    top_logprobs: 3,
    return_token_kinds: true,
    speculate,
  };
  if (mode === "both") body.reproducible = true; // the text is then a function of prompt and seed alone
  if (byId("verify").checked && !byId("verify").disabled) body.verify = true;
  return body;
}

async function run(model, signal) {
  const mode = document.querySelector("input[name=mode]:checked").value;
  const given = byId("seed").valueAsNumber;
  const seed = Number.isNaN(given) ? Math.floor(Math.random() * 2 ** 32) : given;
  byId("answers").replaceChildren();
  byId("compared").hidden = byId("token").hidden = true;
  const wanted = mode === "both" ? ["on", "off"] : [mode];
  const answers = wanted.map((each) => new Answer(`Speculation ${each}`));
  for (const [index, answer] of answers.entries()) { // one after the other: together they would slow each other
    await answer.stream(requestBody(model, seed, wanted[index] === "on", mode), signal);
  }
  if (answers.length === 2) compare(...answers);
}

/** Let the prompt box work; `model` gives the name of the model. */
export function listen(model) {
  byId("ask").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return running.abort();
    running = new AbortController();
    byId("send").textContent = "Stop";
    try {
      await run(model(), running.signal);
    } finally {
      running = null;
      byId("send").textContent = "Send";
    }
  });
  byId("answers").addEventListener("pointerover", detail);
  byId("answers").addEventListener("click", detail);
}
