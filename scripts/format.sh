#!/usr/bin/env bash
# Formats the C++ sources by .clang-format.
#
#   scripts/format.sh [--check] [FILE ...]     (no file: all that git knows of)
#
# --check changes nothing, names what it would change, and ends with 1 then; with 77 where there is no clang-format 14, whose results another version
# does not give. CLANG_FORMAT names it; else it is looked for beside $ACCELERATE_TEST_PYTHON, in .deps and in PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_formatter() {
  local candidate
  for candidate in ${CLANG_FORMAT:-} ${ACCELERATE_TEST_PYTHON:+"$(dirname "$ACCELERATE_TEST_PYTHON")/clang-format"} .deps/venv/bin/clang-format clang-format-14 clang-format; do
    if "$candidate" --version 2>/dev/null | grep -q 'version 14\.'; then
      echo "$candidate"
      return
    fi
  done
  echo "format.sh: no clang-format 14 here; \`pip install clang-format==14.0.6\` gives one, CLANG_FORMAT=… names another place" >&2
  exit 77
}

way=(-i)
if [ "${1:-}" = --check ]; then
  way=(--dry-run -Werror)
  shift
fi
formatter=$(find_formatter)
if [ $# -gt 0 ]; then printf '%s\0' "$@"; else git ls-files -z -- '*.cpp' '*.hpp' '*.h' '*.cuh'; fi |
  xargs -0 -n 50 -P "$(nproc)" "$formatter" --style=file "${way[@]}" || exit 1
