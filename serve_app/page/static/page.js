// The status page: follows the status stream and draws it.

import { listen } from "./answers.js";
import { columns, element, empty, evidence, lines } from "./charts.js";
import { call, events, keyGiven } from "./wire.js";

const HISTORY_S = 300, SPEED_S = 5, ACCEPTANCE_S = 30, NEAR_S = 60;
const RETRY_MS = 1000, SILENT_MS = 5000;
const byId = (id) => document.getElementById(id);
const sum = (counts) => Object.values(counts).reduce((total, value) => total + value, 0);
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);
const whole = (value) => Math.round(value).toLocaleString("en");

let status = null; // the newest
let history = [];
let following = null; // aborts the stream
let heardAt = performance.now();
let locked = false; // until a key is entered

// ---- figures

/** What was counted in the seconds up to a point; null if the history does not reach back or was reset. */
function change(index, seconds, key) {
  const last = history[index];
  let from = index;
  while (from > 0 && last.at - history[from - 1].at <= seconds + 0.5) from -= 1;
  const difference = last[key] - history[from][key];
  return from === index || difference < 0 ? null : { difference, seconds: last.at - history[from].at };
}

function rate(index, seconds, above, below) {
  const [over, under] = [change(index, seconds, above), change(index, seconds, below)];
  return over && under && under.difference > 0 ? over.difference / under.difference : null;
}

function alarms() {
  const { check_alarms, replay_alarms, logprob_violations, invariant_violations } = status;
  return sum(check_alarms) + sum(replay_alarms) + sum(logprob_violations) + sum(invariant_violations);
}

// ---- what is drawn

function tile(name, value, below, bad = false) {
  const parts = [element("span", {}, name), element("b", {}, value), element("small", {}, below)];
  return element("div", { class: bad ? "tile is-bad" : "tile" }, ...parts);
}

function drawTiles() {
  const now = history.at(-1), end = history.length - 1;
  const speed = change(end, SPEED_S, "emitted");
  const near = rate(end, NEAR_S, "accepted", "drafted");
  const accepted = near ?? (now.drafted ? now.accepted / now.drafted : null);
  const tme = now.replayed ? 1 + now.excess / now.replayed : null;
  const { verified = 0, suspect = 0, unverified = 0 } = status.verdicts;
  const mean = now.drafts ? `${(1 + now.accepted / now.drafts).toFixed(2)} tokens per drafted round` : "nothing drafted yet";
  const limit = status.about.max_tme;
  byId("tiles").replaceChildren(
    tile("Tokens per second", speed ? (speed.difference / speed.seconds).toFixed(1) : "–",
      `${status.running} running, ${status.waiting} waiting${status.replaying ? `, ${status.replaying} replaying` : ""}`),
    tile(near === null ? "Acceptance since the start" : "Acceptance, last minute", percent(accepted), mean),
    tile("Logprob drift (TME)", tme === null ? "–" : tme.toFixed(4),
      now.replayed ? `${whole(now.replayed)} tokens replayed; limit ${limit}` : "nothing replayed yet", tme > limit),
    tile("Alarms", whole(alarms()), "self-checks, replays, broken contracts", alarms() > 0),
    tile("Verified answers", whole(verified),
      `${whole(suspect)} suspect, ${whole(unverified)} not checked; distribution tested in ${whole(status.distributions.tested ?? 0)}`, suspect > 0),
  );
}

function drawHealth() {
  const tripped = status.replicas.filter((replica) => replica.breaker !== "closed");
  const suspect = status.verdicts.suspect ?? 0;
  const [text, tone] = tripped.length ? [`breaker ${tripped[0].breaker} on ${tripped.length} of ${status.replicas.length}`, "bad"]
    : alarms() > 0 ? ["alarms raised", "bad"]
    : suspect > 0 ? ["suspect answers", "bad"]
    : history.at(-1).replayed > 0 ? ["healthy", "good"]
    : ["nothing checked yet", ""];
  byId("health").textContent = text;
  byId("health").className = `pill ${tone}`;
}

function drawSpeed() {
  const points = history.map((point, index) => {
    const emitted = change(index, SPEED_S, "emitted");
    return [point.at, emitted && emitted.difference / emitted.seconds];
  });
  const place = byId("speed");
  if (!points.some((point) => point[1])) return empty(place, "No tokens were emitted in the last minutes. Send a prompt above.");
  lines(place, {
    series: [{ kind: "emitted", points, filled: true }], span: HISTORY_S, now: status.at, top: null,
    format: (value) => (value > 0 && value < 10 ? value.toFixed(1) : whole(value)), label: "Tokens per second over five minutes",
  });
}

function drawCourse() {
  const place = byId("course");
  const series = [["achievable", "achievable"], ["expected", "expected"], ["observed", "accepted"]].map(([kind, key]) => ({
    kind, points: history.map((point, index) => [point.at, rate(index, ACCEPTANCE_S, key, "drafted")]),
  }));
  if (!series[2].points.some((point) => point[1] !== null)) {
    return empty(place, status.about.drafter === "none" ? "No drafter is configured."
      : "Nothing was drafted in the last minutes. Short answers to new prompts may leave a drafter nothing to draft from.");
  }
  lines(place, { series, span: HISTORY_S, now: status.at, top: 1, format: (share) => `${Math.round(share * 100)} %`,
    label: "Observed, expected and achievable acceptance over five minutes" });
}

function drawPositions() {
  const drafted = status.positions.filter((position) => position.drafted > 0);
  if (!drafted.length) return empty(byId("positions"), "Nothing has been drafted since the start.");
  columns(byId("positions"), {
    bars: drafted.map(({ drafted: all, accepted }, index) => ({
      name: `${index + 1}`, share: accepted / all, text: `position ${index + 1}: ${whole(accepted)} of ${whole(all)} drafts accepted`,
    })),
    label: "Acceptance at each draft position",
  });
}

function drawChecks() {
  const worst = new Map();
  for (const replica of status.replicas) {
    for (const check of replica.checks) {
      const known = worst.get(check.check);
      if (check.num && (!known || check.log_e - check.log_threshold > known.log_e - known.log_threshold)) {
        worst.set(check.check, { ...check, replica: replica.replica });
      }
    }
  }
  if (!worst.size) return empty(byId("checks"), "No sampling has been checked yet: greedy answers sample nothing. Send a prompt with a temperature above 0.");
  const rows = [...worst.values()].map((check) => ({
    name: check.check.replace("coupled_", "coupled "),
    value: check.log_e / Math.LN10,
    alarm: check.log_threshold / Math.LN10,
    text: `${status.check_meanings[check.check] ?? check.check}: ${whole(check.num)} terms, z ${check.z.toFixed(2)}, on ${check.replica}`,
  }));
  evidence(byId("checks"), { rows, label: "E-values of the self-checks, on a log scale with their alarm lines" });
}

/** A table; `columns`: [heading, whether numeric], `rows`: lists of strings and elements. */
function table(place, columns, rows, why) {
  if (!rows.length) return empty(place, why);
  const kind = (index) => (columns[index][1] ? { class: "num" } : {});
  const head = element("tr", {}, ...columns.map(([name], index) => element("th", { ...kind(index), scope: "col" }, name)));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell, index) => element("td", kind(index), cell))));
  place.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

const pill = (text, tone) => element("span", { class: `pill ${tone}` }, text);
/** The verdict, with the reason if it is not obvious. */
const verdict = (one, tone) => element("span", {}, pill(one.verdict, tone), one.reason === "replayed" ? "" : ` ${one.reason}`);
const shortName = (name) => name.split("#").at(-1);
const ago = (at) => {
  const seconds = Math.max(0, status.at - at);
  return seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
};

function drawReplicas() {
  const rows = status.replicas.map((replica) => [
    replica.pool, shortName(replica.replica), replica.kernels_off ? pill("off", "bad") : replica.kernels || "–", pill(replica.breaker, replica.breaker === "closed" ? "good" : "bad"),
    replica.speculating === undefined ? "–" : replica.speculating ? "on" : "off", replica.mode, `${replica.running ?? "–"}`,
    `${replica.waiting ?? "–"}`, `${replica.replaying ?? "–"}`, replica.kv_usage === undefined ? "–" : percent(replica.kv_usage), ago(replica.since), replica.reason || "–",
  ]);
  const columns = [["pool"], ["replica"], ["kernels"], ["breaker"], ["speculation"], ["mode"], ["running", true], ["waiting", true],
    ["replays", true], ["KV in use", true], ["state age", true], ["last trip"]];
  table(byId("replicas"), columns, rows, "No replica has reported yet. Replicas report each second once their model is loaded.");
}

/** Why replicas are slow; each reason is shown once. */
function drawSlow() {
  const why = [...new Set(status.replicas.map((replica) => replica.kernels_off).filter(Boolean))];
  byId("slow").textContent = `Some replicas run without their kernels, which is slow: ${why.join("; ")}.`;
  byId("slow").hidden = !why.length;
}

function drawStrata() {
  const rows = status.strata.map(({ stratum, meaning, tokens, tme, alarms: raised }) => {
    const name = element("span", { title: meaning }, stratum);
    return [name, whole(tokens), pill(tme.toFixed(4), tme > status.about.max_tme ? "bad" : "good"), whole(raised)];
  });
  table(byId("strata"), [["stratum"], ["tokens", true], ["TME", true], ["alarms", true]], rows,
    status.about.replay_share > 0 ? "Nothing has been replayed yet. A share of answers is replayed soon after they finish."
      : "Replays are off (replay.sample_rate is 0): only answers to requests with `verify` are replayed.");
}

function drawLatest() {
  const tones = { verified: "good", suspect: "bad" };
  const rows = status.latest.map((one) => [
    ago(one.at), verdict(one, tones[one.verdict] ?? ""), one.checked.join(", ") || "–", whole(one.num_tokens), one.tme === null ? "–" : one.tme.toFixed(4),
    one.max_drift_nats === null ? "–" : one.max_drift_nats ? one.max_drift_nats.toExponential(1) : "0", `${shortName(one.replica)} → ${shortName(one.replayed_by) || "–"}`,
  ]);
  const columns = [["ago"], ["verdict"], ["checked"], ["tokens", true], ["TME", true], ["max drift, nats", true], ["replicas"]];
  table(byId("latest"), columns, rows, "No answer has been replayed yet.");
}

function drawCounts() {
  const now = history.at(-1);
  const list = (totals) => Object.entries(totals).filter(([, value]) => value).map(([name, value]) => `${whole(value)} ${name}`).join(", ") || "none";
  const counts = {
    "Tokens emitted": whole(now.emitted), "Tokens drafted": whole(now.drafted), "Drafts accepted": whole(now.accepted),
    "Expected by the verifier": whole(now.expected), "Achievable with these drafts": whole(now.achievable),
    Requests: list(status.requests), Replays: list(status.replays), "Distribution tests of replayed answers": list(status.distributions), Handoffs: list(status.handoffs),
    "Breaker trips": list(status.trips), "Canary trials of speculation": list(status.canaries),
    "Self-check alarms": list(status.check_alarms), "Replay alarms": list(status.replay_alarms),
    "Logprob contract violations": list(status.logprob_violations), "Invariant violations": list(status.invariant_violations),
  };
  byId("counts").replaceChildren(...Object.entries(counts).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function draw() {
  if (!status || !history.length) return;
  const { model, quantization, topology, drafter, verifies } = status.about;
  byId("about").textContent = `${model}${quantization ? ` (${quantization})` : ""} · ${topology} · drafter ${drafter}`;
  byId("verify-label").hidden = !verifies;
  byId("verify").disabled = !verifies;
  byId("heard").textContent = `counting for ${ago(status.started_at)}`;
  for (const part of [drawSlow, drawTiles, drawHealth, drawSpeed, drawCourse, drawPositions, drawChecks, drawReplicas, drawStrata, drawLatest, drawCounts]) part();
}

// ---- the stream

function take(update) {
  if (status && status.started_at !== update.started_at) history = []; // a new referee, which counts from 0
  status = update;
  history = history.concat(update.history).filter((point) => point.at >= update.at - HISTORY_S - ACCEPTANCE_S);
  draw();
}

function trouble(text) {
  byId("connection").textContent = text;
  byId("connection").hidden = !text;
}

function hear({ event, data }) {
  heardAt = performance.now();
  if (event === "trouble") return trouble(`${JSON.parse(data).message} The figures below are the last received.`);
  trouble("");
  take(JSON.parse(data));
}

/** Read stream after stream; each continues where the previous one ended. */
async function follow(signal) {
  let last = "";
  while (!signal.aborted) {
    try {
      const headers = last ? { "last-event-id": last } : {};
      for await (const event of events(await call("status/events", { signal, headers }))) {
        if (signal.aborted) return;
        last = event.id || last;
        hear(event);
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 403) {
        locked = true;
        trouble(`The figures need an API key. ${error.message}`);
        await keyGiven();
        locked = false;
        heardAt = performance.now();
        continue;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function connect() {
  following?.abort();
  following = new AbortController();
  follow(following.signal);
}

setInterval(() => {
  if (document.hidden || locked || performance.now() - heardAt < SILENT_MS) return;
  trouble("The connection is lost; retrying. The figures below are the last received.");
}, RETRY_MS);

document.addEventListener("visibilitychange", () => {
  if (document.hidden) return following.abort();
  heardAt = performance.now();
  history = []; // the new stream starts with the full history
  connect();
});

// ---- colours

const THEMES = ["auto", "light", "dark"];

function wear(theme) {
  byId("theme").textContent = theme;
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

byId("theme").addEventListener("click", () => {
  const theme = THEMES[(THEMES.indexOf(byId("theme").textContent) + 1) % THEMES.length];
  localStorage.setItem("theme", theme);
  wear(theme);
});
wear(THEMES.find((theme) => theme === localStorage.getItem("theme")) ?? "auto");
window.addEventListener("resize", draw);
listen(() => status?.about.model ?? "");
connect();
