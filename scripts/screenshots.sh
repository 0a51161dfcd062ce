#!/usr/bin/env bash
# Makes the pictures of docs/pictures that show programs: the monitor's page, the summary of a model, and the report of a
# profile.
#
#   scripts/screenshots.sh [BIN] [OUT]     default: build/release/bin docs/pictures
#
# BIN holds `accelerate` and the example `monitoring`. Needs Debian's chromium.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin=$(cd "${1:-$root/build/release/bin}" && pwd)
out=$(cd "${2:-$root/docs/pictures}" && pwd)
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) ||
  { echo "screenshots.sh: no browser; on Debian: apt-get install chromium" >&2; exit 78; }
for program in accelerate monitoring; do
  [ -x "$bin/$program" ] || { echo "screenshots.sh: $bin/$program is missing; build it first" >&2; exit 78; }
done
work=$(mktemp -d)
job=
trap '[ -z "$job" ] || kill "$job" 2>/dev/null || true; wait; rm -rf "$work"' EXIT

# picture NAME WIDTH HEIGHT ADDRESS
picture() {
  HOME=$work "$browser" --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run \
    --disable-background-networking --user-data-dir="$work/profile" --window-size="$2,$3" --virtual-time-budget=4000 --screenshot="$work/$1" "$4" >"$work/browser.log" 2>&1 || true
  [ -s "$work/$1" ] || { echo "screenshots.sh: the browser made no picture of $4:" >&2; tail -5 "$work/browser.log" >&2; exit 1; }
  mv "$work/$1" "$out/$1"
  echo "$out/$1"
}

# A job that runs for a while, with what it writes kept: the summary is in it.
"$bin/accelerate" launch --cpu --num_processes 2 --main_process_port 0 --monitor_port 0 --monitor_seconds 0.5 --monitor_peak_flops 1e11 \
  "$bin/monitoring" --sharded --epochs 100000 >"$work/output" 2>"$work/errors" &
job=$!
for _ in $(seq 300); do
  grep -q "^epoch 2 " "$work/output" && break
  kill -0 "$job" 2>/dev/null || { cat "$work/errors" >&2; exit 1; }
  sleep 0.2
done
sleep 30  # for plots with something in them
url=$(grep -ho 'http://[^ ]*/' "$work/errors" "$work/output" | head -n 1)
picture monitor_page.png 1320 420 "$url"
kill "$job"
wait "$job" || true
job=

# From the summary's first line to its last, as a terminal shows it.
{
  echo '<!doctype html><meta charset="utf-8"><style>body { margin: 0; padding: 14px; background: #1e1e1e; color: #ddd } pre { font: 13px/1.35 monospace; margin: 0 }</style><pre>'
  sed -n '/^module /,/^epoch /{/^epoch /!p}' "$work/output" | sed -e 's/&/\&amp;/g' -e 's/</\&lt;/g'
  echo '</pre>'
} >"$work/summary.html"
grep -q '^in memory' "$work/summary.html" || { echo "screenshots.sh: the program printed no summary" >&2; exit 1; }
picture summary.png 900 $((16 + 18 * $(grep -c '' "$work/summary.html"))) "file://$work/summary.html"

if ! "$bin/accelerate" profile --out "$work/monitoring" --skip_first 8 --active 8 --repeat 1 launch --cpu --num_processes 2 --main_process_port 0 \
  "$bin/monitoring" --sharded --width 192 --epochs 1 >"$work/output" 2>&1; then
  cat "$work/output" >&2
  exit 1
fi
picture profile_report.png 1200 1000 "file://$work/monitoring/report.html"
