#include "launch/monitor/web_page.hpp"

namespace accelerate::launcher {
namespace {

// Everything that comes from a job gets into the page as textContent, never as HTML.
constexpr std::string_view kPage = R"page(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>accelerate launch</title>
<style nonce="NONCE">
  body { font: 15px/1.4 system-ui, sans-serif; margin: 1.5em; }
  h1 { font-size: 1.1em; margin: 0 0 .3em; }
  p { margin: .3em 0; }
  #trouble { color: #c62828; font-weight: bold; }
  table { border-collapse: collapse; margin-top: 1em; }
  th, td { text-align: left; padding: .2em .9em .2em 0; white-space: nowrap; border-bottom: 1px solid #8884; }
  th { font-weight: normal; opacity: .7; }
  .number { text-align: right; font-variant-numeric: tabular-nums; }
  .line { font-family: ui-monospace, monospace; font-size: .9em; white-space: pre-wrap; overflow-wrap: anywhere; width: 100%; }
  .running, .done { color: #2e7d32; }
  .failed { color: #c62828; font-weight: bold; }
  .starting, .stopping, .stopped { color: #b26a00; }
  .stale { opacity: .5; }
  #plots { display: flex; flex-wrap: wrap; gap: 1em 2em; margin-top: 1em; }
  figure { margin: 0; }
  figcaption { opacity: .8; }
  figcaption b { font-variant-numeric: tabular-nums; }
  svg { display: block; width: 260px; height: 84px; color: #1565c0; overflow: visible; }
  svg text { font-size: 10px; fill: #808080; }
  svg .axis { stroke: #8888; stroke-width: 1; }
  svg .range { fill: currentColor; fill-opacity: .2; }
  svg .mean { fill: none; stroke: currentColor; stroke-width: 1.5; stroke-linejoin: round; }
  @media (prefers-color-scheme: dark) { svg { color: #64b5f6; } }
</style>
</head>
<body>
<h1 id="program">accelerate launch</h1>
<p id="summary" role="status">…</p>
<p id="trouble" role="alert"></p>
<table id="ranks"><thead></thead><tbody></tbody></table>
<section id="plots" aria-label="over time, for the ranks of this machine: mean, and from least to most"></section>
<noscript>This page needs JavaScript; /state.json has the same.</noscript>
<script nonce="NONCE">
"use strict";
const units = ["B", "KiB", "MiB", "GiB", "TiB"];
function bytes(count) {
  let unit = 0;
  while (count >= 1000 && unit + 1 < units.length) { count /= 1024; ++unit; }
  return count.toFixed(unit > 0 && count < 10 ? 1 : 0) + " " + units[unit];
}
function clock(seconds) {
  const two = n => String(Math.floor(n)).padStart(2, "0");
  return seconds < 3600 ? Math.floor(seconds / 60) + ":" + two(seconds % 60) : Math.floor(seconds / 3600) + ":" + two(seconds / 60 % 60) + ":" + two(seconds % 60);
}
function prefixed(value) {
  const prefixes = ["", "k", "M", "G", "T", "P", "E"];
  let prefix = 0;
  while (value >= 999.5 && prefix + 1 < prefixes.length) { value /= 1000; ++prefix; }
  return value.toFixed(value >= 99.95 || (value === 0) ? 0 : value >= 1 || prefix ? 1 : 3) + prefixes[prefix];
}
const percent = share => (100 * share).toFixed(share < 0.0995 ? 1 : 0);
const known = (value, text) => value === null ? "–" : text(value);
const columns = [
  ["rank", "name", r => r.name],
  ["state", "state", r => r.end ? r.state + " (" + r.end + ")" : r.state],
  ["pid", "number", r => r.pid > 0 ? r.pid : "–"],
  ["time", "number", r => clock(r.seconds)],
  ["steps", "number", r => known(r.steps, String)],
  ["step/s", "number", r => known(r.steps_per_second, n => n.toFixed(n >= 100 ? 0 : n >= 1 ? 1 : 3))],
  ["CPU %", "number", r => known(r.cpu_percent, n => n.toFixed(0))],
  ["memory", "number", r => known(r.resident_bytes, bytes)],
  ["token/s", "number", r => known(r.tokens_per_second, prefixed), r => r.tokens_per_second],
  ["comm %", "number", r => known(r.comm_share, percent), r => r.comm_share],
  ["data %", "number", r => known(r.data_share, percent), r => r.data_share],
  ["MFU %", "number", r => known(r.utilisation, percent), r => r.utilisation],
  ["FLOP/s", "number", r => known(r.flops_per_second, prefixed), r => r.flops_per_second],
  ["GPU", "number", r => known(r.gpu, g => g.index + ": " + known(g.busy_percent, n => n + " %, ") + bytes(g.used_bytes) + " of " + bytes(g.total_bytes)), r => r.gpu],
  ["last line", "line", r => r.last_line],
];
function row(kind, cells) {
  const line = document.createElement("tr");
  for (const [classes, text] of cells) {
    const cell = document.createElement(kind);
    cell.className = classes;
    cell.textContent = text;
    if (kind === "th" && titles[text]) cell.title = titles[text];
    line.append(cell);
  }
  return line;
}
function show(state) {
  document.title = state.program + " – accelerate launch";
  document.getElementById("program").textContent = state.program;
  document.getElementById("summary").textContent = state.summary;
  const shown = columns.filter(([, , , has]) => !has || state.ranks.some(r => has(r) !== null));
  const table = document.getElementById("ranks");
  table.tHead.replaceChildren(row("th", shown.map(([title, classes]) => [classes, title])));
  table.tBodies[0].replaceChildren(...state.ranks.map(r => row("td", shown.map(([, classes, text]) => [classes === "state" ? "state " + r.state : classes, text(r)]))));
}
const titles = {"comm %": "share of its time that it waits for other ranks", "data %": "share of its time that it waits for batches", "MFU %": "model FLOPs utilisation: the model's operations, of what the device could do"};
const shapes = "http://www.w3.org/2000/svg";
function shape(kind, attributes, text) {
  const element = document.createElementNS(shapes, kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
const formats = {bytes: bytes, "%": n => n.toFixed(n < 9.95 ? 1 : 0) + " %", "/s": n => prefixed(n) + "/s", "FLOP/s": n => prefixed(n).replace(/([a-zA-Z]?)$/, " $1FLOP/s"), value: n => String(Number(n.toPrecision(4)))};
// The mean over ranks as a line, from least to most as an area; gaps where nobody knew.
function plot(seconds, figure) {
  const width = 260, top = 12, bottom = 68, from = seconds[0], long = Math.max(seconds[seconds.length - 1] - from, 1e-9);
  const format = formats[figure.unit] || prefixed;
  // Values that a program logs may be below zero, or far from it; all other plots begin there.
  const logged = figure.unit === "value", low = logged ? Math.min(...figure.least.filter(value => value !== null)) : 0;
  const most = Math.max(low, ...figure.most.filter(value => value !== null)) || (logged ? 0 : 1), span = most - low || 1;
  const x = i => (width * (seconds[i] - from) / long).toFixed(1), y = value => (bottom - (bottom - top) * (value - low) / span).toFixed(1);
  const runs = [];
  figure.mean.forEach((value, i) => {
    if (value === null) return;
    if (i === 0 || figure.mean[i - 1] === null) runs.push([]);
    runs[runs.length - 1].push(i);
  });
  const last = figure.mean.findLast(value => value !== null);
  const picture = shape("svg", {viewBox: "0 0 260 84", role: "img", "aria-label": figure.title + ": " + format(last) + ", at most " + format(most)});
  picture.append(shape("line", {class: "axis", x1: 0, x2: width, y1: bottom, y2: bottom}), shape("line", {class: "axis", x1: 0, x2: width, y1: top, y2: top}));
  for (const run of runs) {
    picture.append(shape("polygon", {class: "range", points: [...run.map(i => x(i) + "," + y(figure.most[i])), ...run.toReversed().map(i => x(i) + "," + y(figure.least[i]))].join(" ")}));
    picture.append(shape("polyline", {class: "mean", points: run.map(i => x(i) + "," + y(figure.mean[i])).join(" ")}));
  }
  picture.append(shape("text", {x: 0, y: top - 3}, format(most)), shape("text", {x: 0, y: bottom + 12}, clock(from)), shape("text", {x: width, y: bottom + 12, "text-anchor": "end"}, clock(from + long)));
  if (logged) picture.append(shape("text", {x: 0, y: bottom - 3}, format(low)));
  const place = document.createElement("figure"), caption = document.createElement("figcaption"), now = document.createElement("b");
  place.id = "plot-" + figure.name;
  now.textContent = format(last);
  caption.append(figure.title + " ", now);
  place.append(caption, picture);
  return place;
}
function draw(history) {
  document.getElementById("plots").replaceChildren(...(history.seconds.length < 2 ? [] : history.figures.map(figure => plot(history.seconds, figure))));
}
const get = async address => {
  const answer = await fetch(address, {cache: "no-store"});
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
};
async function look() {
  let seconds = 1;
  try {
    const state = await get("/state.json");
    show(state);
    draw(await get("/history.json"));
    seconds = state.interval;
    document.getElementById("trouble").textContent = "";
    document.body.className = "";
  } catch (error) {
    document.getElementById("trouble").textContent = "The launcher does not answer any more: the job has ended, or the connection is gone. This is the last that was known.";
    document.body.className = "stale";
    seconds = 3;
  }
  setTimeout(look, 1000 * Math.min(Math.max(seconds, 0.2), 60));
}
look();
</script>
</body>
</html>
)page";

}  // namespace

std::string page_with(const std::string& nonce) {
  constexpr std::string_view kPlace = "NONCE";
  std::string page(kPage);
  for (size_t at = 0; (at = page.find(kPlace, at)) != std::string::npos; at += nonce.size())
    page.replace(at, kPlace.size(), nonce);
  return page;
}

}  // namespace accelerate::launcher
