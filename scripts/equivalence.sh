#!/usr/bin/env bash
# Compares random training programs with plain LibTorch (docs/equivalence.md): builds `equivalence` and runs it from seeds that follow from the commit.
#
#   scripts/equivalence.sh [--minutes M] [--from SEED|TEXT] [--no-build] [options and files of `equivalence` ...]     (default: 3 minutes)
#
# The exit status is 1 where something differs; shrunk cases are left in build/equivalence-failures.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

minutes=3 from=$(git -C "$root" rev-parse HEAD 2>/dev/null || echo none) build=1 arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --minutes) minutes=$2; shift ;;
    --from) from=$2; shift ;;
    --no-build) build= ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
if [ -n "$build" ]; then
  find_torch >/dev/null
  build release equivalence
fi
export OMP_NUM_THREADS=1
exec "$root/build/release/bin/equivalence" --minutes "$minutes" --from "$from" --keep "$root/build/equivalence-failures" "${arguments[@]}"
