// The last hour as charts: lines on axes with units.

import { call } from "./api.js";
import { byId, el, setText } from "./dom.js";
import { count, duration, rate } from "./format.js";

const SPAN_S = 3600;
/** Points further apart than this are not joined: no gateway ran in between. */
const GAP_S = 100;
const WIDTH = 320;
const HEIGHT = 110;
const LEFT = 52;
const BOTTOM = 18;
const TOP = 6;
const MARKS_MIN = [60, 40, 20, 0];
const SVG = "http://www.w3.org/2000/svg";

const CHARTS = [
  { title: "Tokens/s", unit: rate, lines: { tokens_per_s: "tokens/s" } },
  { title: "Jobs", unit: count, lines: { waiting: "waiting", running: "running" } },
  { title: "First token", unit: duration, lines: { first_token_p50_ms: "p50", first_token_p95_ms: "p95" } },
  { title: "Failed jobs a minute", unit: rate, lines: { failures_per_min: "failures/min" } },
];

export class History {
  constructor() {
    this.charts = CHARTS.map((chart) => {
      const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "chart" });
      const legend = el("span", { class: "legend" });
      byId("history").append(el("figure", {}, el("figcaption", { class: "line" }, el("span", {}, chart.title), legend), svg));
      return { ...chart, svg, legend };
    });
  }

  async look() {
    const { points } = await call("console/api/history");
    const now = Date.now() / 1000;
    for (const chart of this.charts) draw(chart, points, now);
    setText(byId("history-hint"), points.length < 2 ? "The first points come within a minute." : "");
  }
}

function draw({ title, unit, lines, svg, legend }, points, now) {
  const names = Object.keys(lines);
  const values = points.flatMap((point) => names.map((name) => point[name] ?? 0));
  const most = roundUp(Math.max(...values, 0));
  const x = (at) => LEFT + ((WIDTH - LEFT - 4) * (SPAN_S - (now - at))) / SPAN_S;
  const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * value) / most;
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const at = y(most * share);
    parts.push(shape("line", { x1: LEFT, x2: WIDTH, y1: at, y2: at, class: "grid" }));
    // One job has no half.
    if (share === 1 || unit(most * share) !== unit(most)) parts.push(words(LEFT - 5, at + 3.5, share ? unit(most * share) : "0", "end"));
  }
  for (const minutes of MARKS_MIN) {
    const at = x(now - 60 * minutes);
    parts.push(words(at, HEIGHT - 4, minutes ? `−${minutes} min` : "now", minutes === 60 ? "start" : minutes ? "middle" : "end"));
  }
  const said = [];
  legend.replaceChildren();
  names.forEach((name, i) => {
    parts.push(...joined(points, name).map((run) => shape("polyline", { class: `line${i}`, points: run.map((p) => `${x(p.at).toFixed(1)},${y(p[name]).toFixed(1)}`).join(" ") })));
    const last = points.at(-1)?.[name];
    const now = last === undefined ? "–" : unit(last);
    legend.append(el("i", { class: `line${i}` }), `${lines[name]} ${now} `);
    const own = points.map((point) => point[name]).filter((value) => value !== undefined);
    said.push(own.length ? `${lines[name]} now ${now}, at most ${unit(Math.max(...own))}` : `${lines[name]}: nothing yet`);
  });
  svg.replaceChildren(...parts);
  svg.setAttribute("aria-label", `${title} in the last hour: ${said.join("; ")}`);
}

/** The points that have a value, as runs without a gap. */
function joined(points, name) {
  const runs = [];
  let last = null;
  for (const point of points) {
    if (point[name] === undefined) continue;
    if (last === null || point.at - last > GAP_S) runs.push([]);
    runs.at(-1).push(point);
    last = point.at;
  }
  // A point alone is a short line.
  return runs.map((run) => (run.length > 1 ? run : [{ ...run[0], at: run[0].at - 20 }, run[0]]));
}

/** The next of these times a power of ten; their halves are short, too. */
function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value);
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function words(x, y, text, anchor) {
  const made = shape("text", { x, y, "text-anchor": anchor });
  made.append(text);
  return made;
}
