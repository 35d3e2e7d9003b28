// The status page: follows the status stream and draws it.

import { listen } from "./answers.js";
import { columns, empty, evidence, followPointer, lines } from "./charts.js";
import { byId, element, show } from "./dom.js";
import { call, events, keyGiven } from "./wire.js";

const HISTORY_S = 3600, SHORTEST_S = 300, RECENT_S = 3600, SHOWN_INCIDENTS = 6, SAME_FAULT_S = 120, SHOWN_STRATA = 10, SHOWN_REPLAYS = 8;
const RETRY_MS = 1000, SILENT_MS = 5000;
const sum = (counts) => Object.values(counts).reduce((total, value) => total + value, 0);
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)}\u00a0%`);
const whole = (value) => Math.round(value).toLocaleString("en");
const rate = (value) => (value === 0 ? "0" : value < 1 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : whole(value));
const clock = (at) => new Date(1000 * at).toLocaleTimeString([], { hourCycle: "h23" });
const clockMinute = (at) => clock(at).slice(0, 5);

let status = null; // the newest
let history = []; // a point every ten seconds
let historyOf = null; // the start of the controller that has kept it
let everyS = 10;
let following = null; // aborts the stream
let heardAt = performance.now();
let locked = false; // until a key is entered
let stale = ""; // why the figures are not those of now

// ---- figures

/** A time as an operator reads it; `longest` is as far as the histogram reaches. */
function duration(seconds, longest = Infinity) {
  if (seconds === null) return "–";
  if (seconds >= longest) return `≥ ${longest} s`;
  if (seconds === 0) return "0";
  if (seconds < 0.01) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  return `${seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(1)} s`;
}

const shortName = (name) => name.split("#").at(-1);
const ago = (at) => {
  const seconds = Math.max(0, status.at - at);
  return seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
};
const recent = () => status.incidents.filter((incident) => status.at - incident.at < RECENT_S);
const tripped = () => status.replicas.filter((replica) => replica.breaker !== "closed");
const poolOf = (name) => status.replicas.find((replica) => replica.replica === name)?.pool;
const plural = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;

// ---- health

const pill = (text, tone) => element("span", { class: `pill ${tone}` }, text);

function drawHealth() {
  const open = tripped(), [latest] = recent(), { troubles } = status;
  const [text, tone] = stale ? [stale, "warn"]
    : open.length ? [`breaker ${open[0].breaker} on ${open.length} of ${status.replicas.length}`, "bad"]
    : latest ? [`${{ trip: "trip", canary: "failed canary" }[latest.kind] ?? "alarm"} ${ago(latest.at)} ago`, "bad"]
    : troubles.length ? [`${troubles[0].title}${troubles.length > 1 ? `, and ${troubles.length - 1} more` : ""}`, troubles[0].tone]
    : (status.verdicts.suspect ?? 0) > 0 ? ["suspect answers", "warn"]
    : status.totals.replayed > 0 ? ["healthy", "good"]
    : ["nothing checked yet", ""];
  if (byId("health").textContent !== text) byId("health").textContent = text; // a screen reader reads what changes
  byId("health").className = `pill ${tone}`;
}

/** Leads to what to do at an alert. */
const runbook = (alert) => element("span", { class: "runbook" }, "runbook ",
  element("a", { href: `page/runbooks.html#${alert.toLowerCase()}` }, alert));

/** What is wrong, with figures. */
function drawTroubles() {
  byId("troubles").hidden = !status.troubles.length;
  show(byId("trouble-list"), ...status.troubles.map((one) =>
    element("li", {}, pill(one.title, one.tone), element("span", {}, one.text), runbook(one.runbook))));
}

/** Trips and alarms by their cause, as far as time tells: those of one replica that followed each other closely. */
function faultsOf(incidents) {
  const faults = [];
  for (const one of incidents) { // the latest first
    const fault = faults.find((known) => known.some((other) => other.replica === one.replica && other.first_at - one.at < SAME_FAULT_S));
    if (fault) fault.push(one);
    else faults.push([one]);
  }
  return faults.map((fault) => fault.toSorted((one, other) => (other.kind === "trip") - (one.kind === "trip")));
}

/** One fault: what, when, where, what it means, what to do first. */
function faultOf(fault) {
  const [{ replica }] = fault, at = Math.max(...fault.map((one) => one.at)), since = Math.min(...fault.map((one) => one.first_at));
  const pool = poolOf(replica), num = Math.max(...fault.map((one) => one.num)), times = num > 1 ? ` · ${plural(num, "time")} since ${clock(since)}` : "";
  const named = (one) => (one.words ? element("b", {}, one.words) : element("code", {}, one.name));
  const suspect = fault.filter((one) => one.suspect_since !== null && one.at - one.suspect_since >= 1)
    .map((one) => `Answers of it that ended between ${clock(one.suspect_since)} and ${clock(one.at)} are suspect.`);
  const doubtful = fault.map((one) => one.doubtful_since).filter(Boolean);
  if (doubtful.length) suspect.push(`Answers of it that ended after ${clock(Math.min(...doubtful))} and are not verified may be wrong; the runbook lists them.`);
  const unique = (field) => [...new Set(fault.map((one) => one[field]).filter(Boolean))];
  return element("li", {},
    element("p", { class: "incident-when" }, element("b", {}, clock(at)), ` ${ago(at)} ago`),
    element("div", {},
      element("h3", {}, ...unique("title").flatMap((title) => [pill(title, "bad"), " ", ...fault.filter((one) => one.title === title).flatMap((one) => [named(one), " "])])),
      ...fault.map((one) => element("p", {}, ...(fault.length > 1 ? [named(one), ": ", one.meaning] : [one.meaning[0].toUpperCase(), one.meaning.slice(1)]), ".")),
      ...[[...unique("look").slice(0, 1), ...suspect, ...unique("unseen")].join(" "), ...unique("effect")].filter(Boolean).map((text) => element("p", {}, text)),
      element("p", { class: "note" }, `${pool ? `${pool} ` : ""}replica `, element("b", {}, shortName(replica)), pool ? "" : ", gone since", times,
        ...unique("runbook").flatMap((alert) => [" · ", runbook(alert)]))));
}

/** A known fault in requests of a replica's own, and what became of it. */
function rehearsalOf({ replica, pool, rehearsal: one }) {
  const found = one.state !== "found" ? { running: "nobody has found it yet", missed: "nothing found it in time", failed: "it could not be tried; the log says why" }[one.state]
    : `${one.found_by} found it after ${plural(one.num_tokens, "token")} and ${duration(one.found_at - one.began_at)}; of the next answers, without speculation, ${whole(one.num_verified)} were right`;
  return element("p", {}, pill("rehearsal", { running: "warn", found: "good" }[one.state] ?? "bad"), ` ${pool} replica `, element("b", {}, shortName(replica)),
    ` answered requests of its own with a known fault from ${clock(one.began_at)}: ${found}. No client got such an answer.`);
}

function drawIncidents() {
  const { incidents } = status, open = tripped(), rehearsed = status.replicas.filter((replica) => replica.rehearsal);
  byId("incidents").hidden = !incidents.length && !open.length && !rehearsed.length;
  byId("incidents").classList.toggle("is-bad", recent().length > 0 || open.length > 0);
  show(byId("breakers"), ...open.map((replica) => element("p", {}, pill(`breaker ${replica.breaker}`, "bad"),
    ` ${replica.pool} replica `, element("b", {}, shortName(replica.replica)), ` for ${ago(replica.since)}: ${BREAKER[replica.breaker]}.`)));
  const faults = faultsOf(incidents), more = faults.length - SHOWN_INCIDENTS;
  show(byId("incident-list"), ...faults.slice(0, SHOWN_INCIDENTS).map(faultOf));
  show(byId("rehearsals"), ...rehearsed.map(rehearsalOf));
  byId("more-incidents").textContent = more > 0 ? `${plural(more, "older one")} in the status as JSON.` : "";
}

const BREAKER = {
  open: "it decodes without drafts until a canary passes", canary: "it tries speculation out on requests of its own",
  out: "it decodes without drafts until it is replaced",
};

function tile(name, value, below, bad = false) {
  const parts = [element("span", {}, name), element("b", {}, value), element("small", {}, below)];
  return element("div", { class: bad ? "tile is-bad" : "tile" }, ...parts);
}

function latencyTile(name, field) {
  const { now, about } = status, longest = about.longest_s[field];
  const [median, high] = [now[`${field}_p50_s`], now[`${field}_p95_s`]];
  return tile(name, duration(median, longest), median === null ? "no tokens in the last minute" : `median; p95 ${duration(high, longest)}`);
}

/** What drafts gain now; the time only where the engine has timed steps with and without them. */
function gain({ time_saved: saved }, near) {
  if (!near) return status.about.drafter === "none" ? "no drafter is configured" : "nothing drafted in the last minute";
  if (saved === null) return "against 1 without drafts";
  const share = `${Math.abs(100 * saved).toFixed(0)} %`;
  return saved < 0 ? `drafts make decoding about ${share} slower` : `drafts save about ${share} of decoding time`;
}

function drawTiles() {
  const { now, totals, replicas } = status;
  const { verified = 0, logprobs_only = 0, suspect = 0, unverified = 0 } = status.verdicts;
  const others = `${logprobs_only ? `${whole(logprobs_only)} logprobs only, ` : ""}${whole(unverified)} not checked`;
  const tme = totals.replayed ? 1 + totals.excess / totals.replayed : null, limit = status.about.max_tme;
  const pools = Object.entries(Object.groupBy(replicas, ({ pool }) => pool)).map(([pool, own]) => `${own.length} ${pool}`);
  const near = now.acceptance !== null, ever = totals.drafted ? totals.accepted / totals.drafted : null;
  const denied = (status.refusals.unauthenticated ?? 0) + (status.refusals.forbidden ?? 0);
  const refused = sum(status.refusals) - denied, failed = status.requests.error ?? 0;
  const open = tripped().length, found = status.incidents.length;
  show(byId("tiles"),
    tile("Replicas", whole(replicas.length), open ? `${plural(open, "breaker")} not closed` : pools.join(", ") || "none has reported yet", open > 0),
    tile("Requests", `${rate(now.requests_per_s)} /s`, `${whole(status.running)} running, ${whole(status.waiting)} waiting`),
    latencyTile("Time to first token", "first_token"),
    latencyTile("Inter-token latency", "per_token"),
    tile("429s and errors", `${whole(now.refused)} and ${whole(now.failed)}`, `last minute; ${whole(refused)} and ${whole(failed)} in all`,
      now.failed > 0),
    tile("Trips and alarms", whole(found), found ? `latest ${ago(status.incidents[0].at)} ago` : `none since ${clockMinute(status.started_at)}`, recent().length > 0),
    tile("Output tokens", `${rate(now.tokens_per_s)} /s`, status.replaying ? `and ${plural(status.replaying, "replay")} running` : `${whole(totals.emitted)} since the start`),
    tile(near ? "Acceptance" : "Acceptance, since the start", percent(near ? now.acceptance : ever),
      near ? `the verifier expects ${percent(now.expected_acceptance)}` : totals.drafted ? "nothing drafted in the last minute" : "nothing drafted yet"),
    tile("Tokens a round", near ? now.tokens_per_round.toFixed(2) : "–", gain(now, near)),
    tile("KV cache in use", now.kv_usage === null ? "–" : percent(now.kv_usage),
      now.cache_hit_rate === null ? "no prompts in the last minute" : `${percent(now.cache_hit_rate)} of prompt tokens cached`),
    tile("Logprob drift (TME)", tme === null ? "–" : tme.toFixed(4),
      totals.replayed ? `limit ${limit}; ${whole(totals.replayed)} tokens replayed` : "nothing replayed yet", tme > limit),
    suspect > 0 ? tile("Suspect answers", whole(suspect), `${whole(verified)} verified, ${others}`, true)
      : tile("Verified answers", whole(verified), `none suspect, ${others}`),
  );
}

// ---- charts

/** From when charts reach: an hour ago, or less where the controller has less. */
const since = () => Math.max(status.at - HISTORY_S, Math.min(status.started_at, status.at - SHORTEST_S));

function course(field, kind, name, filled = false) {
  return { kind, name, filled, points: [...history, status.now].map((point) => [point.at, point[field]]) };
}

const CHARTS = {
  requests: {
    name: "Requests per second", series: () => [course("requests_per_s", "first", "finished", true)],
    format: rate, least: 0.1, why: "No request has finished yet.",
  },
  "first-token": {
    name: "Time to first token", series: () => [course("first_token_p95_s", "second", "p95"), course("first_token_p50_s", "first", "median")],
    format: (value) => duration(value, status.about.longest_s.first_token), least: 0.01, why: "No request has had its first token yet.",
  },
  "per-token": {
    name: "Inter-token latency", series: () => [course("per_token_p95_s", "second", "p95"), course("per_token_p50_s", "first", "median")],
    format: (value) => duration(value, status.about.longest_s.per_token), least: 0.001, why: "No answer of more than one token yet.",
  },
  errors: {
    name: "429s and errors a minute", series: () => [course("refused", "second", "429s"), course("failed", "bad", "errors", true)],
    format: whole, least: 4, whole: true, always: true,
  },
  tokens: {
    name: "Output tokens per second", series: () => [course("tokens_per_s", "first", "all replicas", true)],
    format: rate, least: 1, why: "No tokens were emitted yet. Send a prompt below.",
  },
  load: {
    name: "Requests running and waiting", series: () => [course("waiting", "second", "waiting"), course("running", "first", "running", true)],
    format: whole, least: 4, whole: true, always: true,
  },
  kv: {
    name: "KV cache in use", series: () => [course("kv_usage", "first", "fullest replica", true)],
    format: (share) => `${Math.round(share * 100)} %`, least: 1, top: 1, why: "No replica has reported its KV cache yet.",
  },
  "prefix-cache": {
    name: "Prefix cache hits", series: () => [course("cache_hit_rate", "first", "of prompt tokens", true)],
    format: (share) => `${Math.round(share * 100)} %`, least: 1, top: 1, why: "No prompt was found in the prefix cache yet.",
  },
  preemptions: {
    name: "Preemptions a minute", series: () => [course("preemptions", "bad", "sequences computed again", true)],
    format: whole, least: 4, whole: true, always: true,
  },
  acceptance: {
    name: "Accepted share of draft tokens",
    series: () => [course("achievable_acceptance", "third", "achievable"), course("expected_acceptance", "second", "expected"), course("acceptance", "first", "observed")],
    format: (share) => `${Math.round(share * 100)} %`, least: 1, top: 1,
    get why() {
      return status.about.drafter === "none" ? "No drafter is configured."
        : "Nothing was drafted yet. Short answers to new prompts may leave a drafter nothing to draft from.";
    },
  },
};

function drawChart(id) {
  const { series, why, always = false, ...rest } = CHARTS[id];
  const drawn = series(), from = since();
  const known = always || drawn.some((one) => one.points.some(([at, value]) => at >= from && value));
  if (!known) return empty(byId(id), why);
  const marks = status.incidents.map((incident) => incident.at);
  lines(byId(id), { ...rest, series: drawn, from, to: status.at, gap: 3.5 * everyS, marks });
}

function drawSpan() {
  const young = status.at - status.started_at < HISTORY_S;
  byId("span").textContent = young ? `since ${clockMinute(status.started_at)}, when the controller started` : "the last hour";
}

function drawPositions() {
  const drafted = status.positions.filter((position) => position.drafted > 0);
  const { sampled = [], greedy = [] } = status.held_out;
  byId("held-out").hidden = !sampled.length && !greedy.length;
  if (!drafted.length) return empty(byId("positions"), "Nothing has been drafted yet.");
  const bars = drafted.map(({ drafted: all, accepted }, index) => {
    const marks = [["trained", sampled], ["trained-greedy", greedy]].filter(([, rates]) => index < rates.length).map(([kind, rates]) => [kind, rates[index]]);
    const said = marks.map(([kind, share]) => `, training ${percent(share)} at temperature ${kind === "trained" ? 1 : 0}`).join("");
    return { name: index + 1, share: accepted / all, marks, text: `position ${index + 1}: ${whole(accepted)} of ${whole(all)} drafts accepted${said}` };
  });
  columns(byId("positions"), { bars, label: `Acceptance by draft position; ${bars.map((bar) => bar.text).join("; ")}` });
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
    name: status.names[check.check] ?? check.check,
    value: check.log_e / Math.LN10,
    alarm: check.log_threshold / Math.LN10,
    text: `${status.checks[check.check] ?? check.check}: ${whole(check.num)} terms, z ${check.z.toFixed(2)}, on ${check.replica}`,
  }));
  const over = rows.filter((row) => row.value >= row.alarm).map((row) => row.name);
  evidence(byId("checks"), { rows, label: `E-values of ${plural(rows.length, "self-check")}, on a log scale; above the alarm line: ${over.join(", ") || "none"}` });
}

// ---- tables

/** A table; `columns`: [heading, whether numeric], `rows`: lists of strings and elements. On narrow screens each row is a list. */
function table(place, columns, rows, why) {
  if (!rows.length) return empty(place, why);
  const kind = (index) => (columns[index][1] ? { class: "num" } : {});
  const head = element("tr", {}, ...columns.map(([name], index) => element("th", { ...kind(index), scope: "col" }, name)));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell, index) => element("td", { ...kind(index), "data-name": columns[index][0] }, cell))));
  show(place, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

/** The verdict, with the reason if it is not obvious. */
const verdict = (one, tone) => element("span", {}, pill(one.verdict, tone), one.reason === "replayed" ? "" : ` ${one.reason}`);

const nameOf = (replica) => element("code", {}, shortName(replica.replica));

/** Median and p95 of a replica's latency; prefill replicas answer no client. */
function latencies(replica, field) {
  const [median, high] = [replica[`${field}_p50_s`] ?? null, replica[`${field}_p95_s`] ?? null], longest = status.about.longest_s[field];
  return median === null ? "–" : `${duration(median, longest)} / ${duration(high, longest)}`;
}

function drawReplicas() {
  const { replicas, routers } = status;
  const load = [
    ...replicas.map((replica) => [
      replica.pool, nameOf(replica), pill(replica.breaker, replica.breaker === "closed" ? "good" : "bad"),
      replica.speculating === undefined ? "–" : replica.speculating ? "on" : "off",
      whole(replica.running ?? 0), whole(replica.waiting ?? 0), whole(replica.replaying ?? 0),
      replica.kv_usage === undefined ? "–" : percent(replica.kv_usage), latencies(replica, "first_token"), latencies(replica, "per_token"),
    ]),
    ...routers.map((router) => ["router", nameOf(router), ..."––––––", latencies(router, "first_token"), latencies(router, "per_token")]),
  ];
  table(byId("replicas"), [["pool"], ["replica"], ["breaker"], ["speculation"], ["running", true], ["waiting", true], ["replays", true], ["KV in use", true],
    ["first token, median / p95", true], ["inter-token, median / p95", true]], load,
  "No replica has reported yet. Replicas report each second once their model is loaded.");
  const build = replicas.map((replica) => [
    replica.pool, nameOf(replica), replica.mode, replica.reason || "none", ago(replica.since), replica.version || "–",
    replica.started_at ? ago(replica.started_at) : "–", element("span", { title: replica.node_id ?? "" }, replica.node || "–"), replica.device || "–",
    replica.kernels_off ? pill("off", "warn") : replica.kernels || "–",
  ]);
  table(byId("builds"), [["pool"], ["replica"], ["mode"], ["last trip"], ["in this state", true], ["version"], ["up for", true], ["node"], ["device"],
    ["kernels"]], build, "What each runs is known once it has reported.");
}

/** Why replicas are slow; each reason is shown once. */
function drawSlow() {
  const why = [...new Set(status.replicas.map((replica) => replica.kernels_off).filter(Boolean))];
  byId("slow").textContent = `Some replicas run without their kernels, which is slow: ${why.join("; ")}.`;
  byId("slow").hidden = !why.length;
}

/** All tokens, then those whose drift is the highest; the others on demand. */
function drawStrata() {
  const rows = status.strata.toSorted((one, other) => (other.stratum === "all") - (one.stratum === "all") || other.tme - one.tme)
    .map(({ stratum, meaning, tokens, tme, alarms: raised }) => [
      element("span", {}, `${meaning} `, element("code", {}, stratum)), whole(tokens),
      pill(tme.toFixed(4), raised ? "bad" : tme > status.about.max_tme ? "warn" : "good"), whole(raised),
    ]);
  const columns = [["which tokens"], ["tokens", true], ["TME", true], ["alarms", true]];
  table(byId("strata"), columns, rows.slice(0, SHOWN_STRATA),
    status.about.shares["replay.sample_rate"] > 0 ? "Nothing has been replayed yet. A share of answers is replayed soon after they finish."
      : "Replays are off (replay.sample_rate is 0): only answers to requests with verify are replayed.");
  table(byId("more-strata"), columns, rows.slice(SHOWN_STRATA), "");
  byId("others").hidden = rows.length <= SHOWN_STRATA;
  byId("num-others").textContent = `${whole(rows.length - SHOWN_STRATA)} more, with less drift`;
}

function drawLatest() {
  const tones = { verified: "good", suspect: "bad" };
  const rows = status.latest.slice(0, SHOWN_REPLAYS).map((one) => [
    `${ago(one.at)} ago`, verdict(one, tones[one.verdict] ?? ""), whole(one.num_tokens), one.tme === null ? "–" : one.tme.toFixed(4),
    one.max_drift_nats === null ? "–" : one.max_drift_nats ? one.max_drift_nats.toExponential(1) : "0",
    element("code", {}, `${shortName(one.replica)} → ${shortName(one.replayed_by) || "–"}`),
  ]);
  const columns = [["when"], ["verdict"], ["tokens", true], ["TME", true], ["max drift, nats", true], ["by"]];
  table(byId("latest"), columns, rows, "No answer has been replayed yet.");
}

function drawCounts() {
  const { totals } = status;
  const words = (name) => status.names[name] ?? name.replaceAll("_", " ");
  const list = (counted) => Object.entries(counted).filter(([, value]) => value).map(([name, value]) => `${whole(value)} ${words(name)}`).join(", ") || "none";
  const counts = {
    "Tokens emitted": whole(totals.emitted), "Tokens drafted": whole(totals.drafted), "Drafts accepted": whole(totals.accepted),
    "Expected by the verifier": whole(totals.expected), "Achievable with these drafts": whole(totals.achievable),
    Requests: list(status.requests), "Refused requests": list(status.refusals), Replays: list(status.replays),
    "Distribution tests": list(status.distributions), Handoffs: list(status.handoffs), "Failed prefills": list(status.prefill_failures),
    "Breaker trips": list(status.trips), "Canary trials": list(status.canaries),
    "Self-check alarms": list(status.check_alarms), "Replay alarms": list(status.replay_alarms),
    "Logprob violations": list(status.logprob_violations), "Invariant violations": list(status.invariant_violations),
  };
  show(byId("counts"), ...Object.entries(counts).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function draw() {
  if (!status) return;
  const { model, quantization, topology, drafter, max_num_seqs: most, verifies, grafana, assumes_rounding } = status.about;
  byId("about").textContent = `${model}${quantization ? ` (${quantization})` : ""} · ${topology} · drafter ${drafter} · up to ${most} at once${assumes_rounding ? " · rounding not calibrated: replays raise alarms, and trip no breaker" : ""}`;
  byId("verify-label").hidden = !verifies;
  byId("verify").disabled = !verifies;
  byId("grafana").hidden = !grafana;
  if (grafana) byId("grafana").href = `${grafana.replace(/\/+$/, "")}/d/truespec-overview`;
  byId("heard").textContent = `counting since ${clock(status.started_at)}`;
  for (const part of [drawSlow, drawHealth, drawTroubles, drawIncidents, drawTiles, drawSpan, drawPositions, drawChecks, drawReplicas, drawStrata, drawLatest, drawCounts]) part();
  for (const id of Object.keys(CHARTS)) drawChart(id);
}

// ---- the stream

function take(update) {
  if (update.started_at !== historyOf) history = []; // a new controller, which counts from 0
  historyOf = update.started_at;
  if (!history.length || update.now.at - history.at(-1).at >= everyS) history.push(update.now);
  history = history.filter((point) => point.at >= update.at - HISTORY_S);
  status = update;
  draw();
}

/** The hour so far; without it the page begins with what comes. */
async function recall(signal) {
  try {
    const { every_s, started_at, points } = await (await call("status/history", { signal })).json();
    everyS = every_s;
    historyOf = started_at;
    history = points.at.map((_, index) => Object.fromEntries(Object.entries(points).map(([name, values]) => [name, values[index]])));
  } catch (error) {
    if (signal.aborted || error.status === 401 || error.status === 403) throw error;
  }
}

/** Say why the figures are not those of now; `short` is what stands in the place of the health. */
function trouble(text, short = "") {
  byId("connection").textContent = text;
  byId("connection").hidden = !text;
  stale = short;
  if (status) drawHealth();
}

function hear({ event, data }) {
  heardAt = performance.now();
  if (event === "trouble") {
    const { message } = JSON.parse(data);
    return trouble(status ? `${message} The figures below are the last received.` : message, "no new figures");
  }
  trouble("");
  take(JSON.parse(data));
}

/** Read stream after stream. */
async function follow(signal) {
  while (!signal.aborted) {
    try {
      await recall(signal);
      for await (const event of events(await call("status/events", { signal }))) {
        if (signal.aborted) return;
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
  if (status) trouble("The connection is lost; retrying. The figures below are the last received.", "connection lost");
  else trouble("Connecting… the service has not answered yet.");
}, RETRY_MS);

document.addEventListener("visibilitychange", () => {
  if (document.hidden) return following.abort();
  heardAt = performance.now();
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
for (const id of Object.keys(CHARTS)) followPointer(byId(id), () => status && drawChart(id));
listen(() => status?.about.model ?? "");
connect();
