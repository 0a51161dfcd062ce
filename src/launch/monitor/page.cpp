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
</style>
</head>
<body>
<h1 id="program">accelerate launch</h1>
<p id="summary" role="status">…</p>
<p id="trouble" role="alert"></p>
<table id="ranks"><thead></thead><tbody></tbody></table>
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
  ["GPU", "number", r => known(r.gpu, g => g.index + ": " + known(g.busy_percent, n => n + " %, ") + bytes(g.used_bytes) + " of " + bytes(g.total_bytes))],
  ["last line", "line", r => r.last_line],
];
function row(kind, cells) {
  const line = document.createElement("tr");
  for (const [classes, text] of cells) {
    const cell = document.createElement(kind);
    cell.className = classes;
    cell.textContent = text;
    line.append(cell);
  }
  return line;
}
function show(state) {
  document.title = state.program + " – accelerate launch";
  document.getElementById("program").textContent = state.program;
  document.getElementById("summary").textContent = state.summary;
  const shown = columns.filter(([title]) => title !== "GPU" || state.ranks.some(r => r.gpu));
  const table = document.getElementById("ranks");
  table.tHead.replaceChildren(row("th", shown.map(([title, classes]) => [classes, title])));
  table.tBodies[0].replaceChildren(...state.ranks.map(r => row("td", shown.map(([, classes, text]) => [classes === "state" ? "state " + r.state : classes, text(r)]))));
}
async function look() {
  let seconds = 1;
  try {
    const answer = await fetch("/state.json", {cache: "no-store"});
    if (!answer.ok) throw new Error(await answer.text());
    const state = await answer.json();
    show(state);
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
