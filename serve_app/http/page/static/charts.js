// Charts as inline SVG, drawn at the size they are shown in.

import { element, shape, show } from "./dom.js";

const MARGIN = { left: 52, right: 12, top: 12, bottom: 22 };
const HEIGHT = 168;
const STEPS_S = [60, 120, 300, 600, 1200, 1800];
const pointed = new WeakMap(); // chart -> the time under the pointer
const time = (at) => new Date(1000 * at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

function canvas(place, height, label) {
  const width = Math.max(place.clientWidth, 200);
  const svg = shape(null, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  return { svg, width, height };
}

/** Say in place of a chart why there is none. */
export function empty(place, why) {
  show(place, element("p", { class: "empty" }, why));
}

/** The distance of grid lines, of which there are at most five. */
function gridStep(highest, whole) {
  const least = whole ? Math.max(highest / 5, 1) : highest / 5;
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= least * 0.999);
}

/** Runs of points without a gap. */
function runs(points, gap) {
  const found = [[]];
  let before = null;
  for (const point of points) {
    if (point[1] === null) found.push([]);
    else if (before !== null && point[0] - before > gap) found.push([point]);
    else found.at(-1).push(point);
    before = point[0];
  }
  return found.filter((run) => run.length);
}

function nearest(points, at) {
  let best = null;
  for (const point of points) if (best === null || Math.abs(point[0] - at) < Math.abs(best[0] - at)) best = point;
  return best;
}

/** What is known of the lines at the time that is pointed at, or of the newest points. */
function legend(series, at, format, marks) {
  const items = series.toReversed().map(({ kind, name, points }) => {
    const value = (at === null ? points.at(-1) : nearest(points, at))?.[1] ?? null;
    return element("li", {}, element("i", { class: `stroke ${kind}` }), name, element("b", {}, value === null ? "–" : format(value)));
  });
  if (marks) items.push(element("li", {}, element("i", { class: "stroke mark" }), "trip or alarm"));
  if (at !== null) items.push(element("li", { class: "when" }, `at ${time(at)}`));
  return element("ul", { class: "legend" }, ...items);
}

function timeAxis(svg, x, { from, to, height, left, right }) {
  const most = Math.max(2, Math.floor((right - left) / 64));
  const step = STEPS_S.find((seconds) => (to - from) / seconds <= most) ?? 3600;
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
    if (x(at) < left + 16 || x(at) > right - 16) continue;
    shape(svg, "text", { x: x(at), y: height - 5, "text-anchor": "middle" }, time(at));
  }
}

function drawLine(svg, { kind, points, filled }, x, y, bottom, gap) {
  for (const run of runs(points, gap)) {
    const path = run.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    if (filled) {
      const ends = [`${x(run.at(-1)[0]).toFixed(1)},${bottom}`, `${x(run[0][0]).toFixed(1)},${bottom}`];
      shape(svg, "polygon", { class: `area ${kind}`, points: `${path} ${ends.join(" ")}` });
    }
    shape(svg, "polyline", { class: `line ${kind}`, points: run.length > 1 ? path : `${path} ${path}` });
  }
}

/**
 * Lines over time, with the values at the pointer in the legend. `series`: {kind, name, points: [[second, value or
 * null]], filled}; `marks`: times of trips and alarms; `top`: of the scale, null = by the data, at least `least`.
 */
export function lines(place, { series, from, to, gap, marks, top = null, least, whole = false, format, name }) {
  const inside = series.map((one) => ({ ...one, points: one.points.filter(([at]) => at >= from) }));
  const values = inside.flatMap((one) => one.points.map((point) => point[1])).filter((value) => value !== null);
  const most = Math.max(...values, 0);
  const label = `${name}: ${inside.map((one) => `${one.name} ${one.points.at(-1)?.[1] == null ? "unknown" : format(one.points.at(-1)[1])}`).join(", ")}; highest ${format(most)}`;
  const { svg, width, height } = canvas(place, HEIGHT, label);
  const step = gridStep(top ?? Math.max(most, least), whole);
  const highest = top ?? step * Math.ceil(Math.max(most, least) / step - 1e-9);
  const left = MARGIN.left, right = width - MARGIN.right, bottom = height - MARGIN.bottom;
  const x = (at) => right - ((to - at) / (to - from)) * (right - left);
  const y = (value) => bottom - (Math.min(value, highest) / highest) * (bottom - MARGIN.top);
  for (let value = 0; value <= highest * 1.001; value += step) {
    shape(svg, "line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) });
    shape(svg, "text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, format(value).replace(/\.0+(?!\d)/, ""));
  }
  timeAxis(svg, x, { from, to, height, left, right });
  const near = marks.filter((at) => at >= from);
  for (const at of near) shape(svg, "line", { class: "mark", x1: x(at), x2: x(at), y1: MARGIN.top, y2: bottom });
  for (const one of inside) drawLine(svg, one, x, y, bottom, gap);
  const at = pointed.get(place) ?? null;
  if (at !== null) shape(svg, "line", { class: "pointer", x1: x(at), x2: x(at), y1: MARGIN.top, y2: bottom });
  show(place, svg, legend(inside, at, format, near.length > 0));
  place.timeAt = (pixel) => Math.min(to, Math.max(from, to - ((right - pixel) / (right - left)) * (to - from)));
}

/** Let a chart of lines show the values at the pointer; `redraw` draws it again. */
export function followPointer(place, redraw) {
  place.addEventListener("pointermove", (event) => {
    if (!place.timeAt) return;
    pointed.set(place, place.timeAt(event.clientX - place.getBoundingClientRect().left));
    redraw();
  });
  place.addEventListener("pointerleave", () => pointed.delete(place) && redraw());
}

/** Upright bars of shares. `bars`: {name, share, text, marks: [[kind, share]]}. */
export function columns(place, { bars, label }) {
  const { svg, width, height } = canvas(place, HEIGHT + 12, label);
  const right = width - MARGIN.right, bottom = height - MARGIN.bottom, top = MARGIN.top + 6;
  const y = (share) => bottom - share * (bottom - top);
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    shape(svg, "line", { class: "grid", x1: MARGIN.left, x2: right, y1: y(share), y2: y(share) });
    shape(svg, "text", { x: MARGIN.left - 6, y: y(share) + 4, "text-anchor": "end" }, `${share * 100} %`);
  }
  const room = (right - MARGIN.left) / bars.length;
  const thick = Math.min(room * 0.6, 56);
  bars.forEach(({ name, share, text, marks }, index) => {
    const middle = MARGIN.left + room * (index + 0.5);
    const group = shape(svg, "g", {});
    shape(group, "title", {}, text);
    shape(group, "rect", { class: "bar", x: middle - thick / 2, width: thick, y: y(share), height: bottom - y(share), rx: 2 });
    for (const [kind, at] of marks) {
      shape(group, "line", { class: `line ${kind}`, x1: middle - thick / 2 - 6, x2: middle + thick / 2 + 6, y1: y(at), y2: y(at) });
    }
    shape(svg, "text", { x: middle, y: height - 5, "text-anchor": "middle" }, `${room > 110 ? "position " : ""}${name}${room > 56 ? `: ${Math.round(share * 100)} %` : ""}`);
  });
  show(place, svg);
}

/**
 * E-values on a log scale, each with the line at which it alarms. `rows`: {name, value, alarm, text}, log10 both.
 */
export function evidence(place, { rows, label }) {
  const beside = place.clientWidth >= 560; // the names; above the bars otherwise
  const line = beside ? 22 : 36, left = beside ? 190 : 4, head = 20, bar = 14;
  const { svg, width } = canvas(place, head + rows.length * line + 4, label);
  const lowest = -3, highest = Math.max(8, ...rows.map((row) => Math.max(row.alarm, row.value) + 1));
  const right = width - MARGIN.right, alarms = rows.map((row) => row.alarm);
  const x = (log) => left + ((Math.min(Math.max(log, lowest), highest) - lowest) / (highest - lowest)) * (right - left);
  const foot = head + rows.length * line;
  for (let log = lowest; log <= highest; log += 3) {
    shape(svg, "line", { class: "grid", x1: x(log), x2: x(log), y1: head - 4, y2: foot });
    if (alarms.some((at) => Math.abs(x(at) - x(log)) < 44)) continue; // the word stands there
    const text = log === 0 ? "1" : `10${[...String(log)].map((sign) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[sign] ?? "⁻").join("")}`;
    shape(svg, "text", { x: x(log), y: 11, "text-anchor": log === lowest && !beside ? "start" : "middle" }, text);
  }
  rows.forEach(({ name, value, alarm, text }, index) => {
    const top = head + index * line, y = top + line - bar - 4;
    const group = shape(svg, "g", {});
    shape(group, "title", {}, text);
    shape(group, "text", { class: "strong", x: beside ? left - 10 : left, y: beside ? y + 11 : top + 13, "text-anchor": beside ? "end" : "start" }, name);
    shape(group, "rect", { class: "track", x: left, width: right - left, y, height: bar });
    const over = value >= alarm ? "bar over" : "bar";
    shape(group, "rect", { class: over, x: left, width: Math.max(x(value) - left, 2), y, height: bar, rx: 2 });
    shape(group, "line", { class: "alarm", x1: x(alarm), x2: x(alarm), y1: y - 2, y2: y + bar + 2 });
  });
  shape(svg, "text", { class: "alarm-text", x: x(Math.max(...alarms)), y: 11, "text-anchor": "middle" }, "alarm");
  show(place, svg);
}
