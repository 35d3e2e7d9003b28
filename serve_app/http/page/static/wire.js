// Talks to the service: with the API key of this tab, and with streams that an EventSource, which sends no key, could not read.

import { byId } from "./dom.js";

const PLACE = "key";
const waiting = []; // for a key

/** Where the key is kept: this tab, until it is closed. */
const key = () => sessionStorage.getItem(PLACE);

/** Fetch; an answer that is no success is thrown, with its status and the service's own words. */
export async function call(url, options = {}) {
  const headers = { ...options.headers };
  if (key()) headers.authorization = `Bearer ${key()}`;
  const response = await fetch(url, { ...options, headers });
  if (response.ok) return response;
  let why = `${response.status} ${response.statusText}`;
  try {
    why = (await response.json()).error.message;
  } catch { /* no reply of ours: the status has to do */ }
  if (response.status === 401 || response.status === 403) ask(); // last: who waits for a key does so before it is given
  throw Object.assign(new Error(why), { status: response.status });
}

/** The server-sent events of a response, as they come: {event, data}. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const fields = part.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]);
      const { event = "message", data } = Object.fromEntries(fields);
      if (data !== undefined) yield { event, data };
    }
  }
}

/** Resolves when somebody has entered a key. */
export const keyGiven = () => new Promise((resolve) => waiting.push(resolve));

function ask() {
  byId("unlock").hidden = false;
  byId("forget").hidden = !key();
}

byId("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(PLACE, byId("key").value.trim());
  byId("key").value = "";
  byId("unlock").hidden = true;
  byId("forget").hidden = false;
  for (const resolve of waiting.splice(0)) resolve();
});
byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(PLACE);
  location.reload();
});
byId("forget").hidden = !key();
