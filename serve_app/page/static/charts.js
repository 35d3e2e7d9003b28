// Charts as inline SVG, drawn at the size they are shown in.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 46, right: 10, top: 12, bottom: 22 };

/** An element with text or children: text is never markup. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(parent, name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function canvas(place, height, label) {
  const width = Math.max(place.clientWidth, 200);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  place.replaceChildren(svg);
  return { svg, width, height };
}

/** Say in place of a chart why there is none. */
export function empty(place, why) {
  place.replaceChildren(element("p", { class: "empty" }, why));
}

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((top) => top >= value * 1.02);
}

/** Runs of points without a gap. */
function runs(points) {
  const found = [[]];
  for (const point of points) {
    if (point[1] === null) found.push([]);
    else found.at(-1).push(point);
  }
  return found.filter((run) => run.length);
}

/**
 * Lines over the last seconds. `series`: {kind, points: [[second, value or null]], filled}; `top` null = by the data.
 */
export function lines(place, { series, span, now, top, format, label }) {
  const { svg, width, height } = canvas(place, 190, label);
  const values = series.flatMap((one) => one.points.map((point) => point[1])).filter((value) => value !== null);
  const highest = top ?? niceTop(Math.max(...values, 1));
  const right = width - MARGIN.right, bottom = height - MARGIN.bottom;
  const x = (at) => right - ((now - at) / span) * (right - MARGIN.left);
  const y = (value) => bottom - (value / highest) * (bottom - MARGIN.top);
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const at = y(highest * share);
    shape(svg, "line", { class: "grid", x1: MARGIN.left, x2: right, y1: at, y2: at });
    shape(svg, "text", { x: MARGIN.left - 6, y: at + 4, "text-anchor": "end" }, format(highest * share));
  }
  const steps = width < 420 ? 2 : 5;
  for (let step = 0; step <= steps; step++) {
    const ago = (span * step) / steps;
    const anchor = step === 0 ? "end" : step === steps ? "start" : "middle";
    const text = ago === 0 ? "now" : ago < 60 ? `-${ago} s` : `-${+(ago / 60).toFixed(1)} min`;
    shape(svg, "text", { x: x(now - ago), y: height - 5, "text-anchor": anchor }, text);
  }
  for (const { kind, points, filled } of series) {
    for (const run of runs(points.filter(([at]) => at >= now - span))) {
      const path = run.map(([at, value]) => `${x(at).toFixed(1)},${y(Math.min(value, highest)).toFixed(1)}`).join(" ");
      if (filled) {
        const ends = [`${x(run.at(-1)[0]).toFixed(1)},${bottom}`, `${x(run[0][0]).toFixed(1)},${bottom}`];
        shape(svg, "polygon", { class: "area", points: `${path} ${ends.join(" ")}` });
      }
      shape(svg, "polyline", { class: `line ${kind}`, points: path });
    }
  }
}

/** Upright bars of shares. `bars`: {name, share, text}. */
export function columns(place, { bars, label }) {
  const { svg, width, height } = canvas(place, 190, label);
  const right = width - MARGIN.right, bottom = height - MARGIN.bottom;
  const y = (share) => bottom - share * (bottom - MARGIN.top);
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    shape(svg, "line", { class: "grid", x1: MARGIN.left, x2: right, y1: y(share), y2: y(share) });
    shape(svg, "text", { x: MARGIN.left - 6, y: y(share) + 4, "text-anchor": "end" }, `${share * 100} %`);
  }
  const room = (right - MARGIN.left) / bars.length;
  const thick = Math.min(room * 0.66, 64);
  bars.forEach(({ name, share, text }, index) => {
    const middle = MARGIN.left + room * (index + 0.5);
    const bar = { class: "bar", x: middle - thick / 2, width: thick, y: y(share), height: bottom - y(share), rx: 3 };
    shape(shape(svg, "rect", bar), "title", {}, text);
    shape(svg, "text", { x: middle, y: height - 5, "text-anchor": "middle" }, name);
    if (room > 34) {
      const over = Math.max(y(share) - 4, MARGIN.top - 2);
      shape(svg, "text", { class: "strong", x: middle, y: over, "text-anchor": "middle" }, `${Math.round(share * 100)} %`);
    }
  });
}

/**
 * E-values on a log scale, each with the line at which it alarms. `rows`: {name, value, alarm, text}, log10 both.
 */
export function evidence(place, { rows, label }) {
  const line = 21, left = 104, head = 20;
  const { svg, width } = canvas(place, head + rows.length * line + 4, label);
  const lowest = -3, highest = Math.max(8, ...rows.map((row) => Math.max(row.alarm, row.value) + 1));
  const right = width - MARGIN.right, alarms = rows.map((row) => row.alarm);
  const x = (log) => left + ((Math.min(Math.max(log, lowest), highest) - lowest) / (highest - lowest)) * (right - left);
  const foot = head + rows.length * line;
  for (let log = lowest; log <= highest; log += 3) {
    shape(svg, "line", { class: "grid", x1: x(log), x2: x(log), y1: head - 4, y2: foot });
    if (alarms.some((at) => Math.abs(x(at) - x(log)) < 44)) continue; // the word stands there
    const text = log === 0 ? "1" : `10${[...String(log)].map((sign) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[sign] ?? "⁻").join("")}`;
    shape(svg, "text", { x: x(log), y: 11, "text-anchor": "middle" }, text);
  }
  rows.forEach(({ name, value, alarm, text }, index) => {
    const top = head + index * line;
    const group = shape(svg, "g", {});
    shape(group, "title", {}, text);
    shape(group, "text", { class: "strong", x: left - 8, y: top + 14, "text-anchor": "end" }, name);
    shape(group, "rect", { class: "track", x: left, width: right - left, y: top + 3, height: line - 7, opacity: 0.6 });
    const over = value >= alarm ? "bar over" : "bar";
    shape(group, "rect", { class: over, x: left, width: Math.max(x(value) - left, 2), y: top + 3, height: line - 7, rx: 2 });
    shape(group, "line", { class: "alarm", x1: x(alarm), x2: x(alarm), y1: top + 1, y2: top + line - 2 });
  });
  shape(svg, "text", { class: "alarm-text", x: x(Math.max(...alarms)), y: 11, "text-anchor": "middle" }, "alarm");
}
