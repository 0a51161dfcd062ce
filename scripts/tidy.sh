#!/usr/bin/env bash
# Clang's checks: clang-tidy with .clang-tidy, and the annotations of locks (-Wthread-safety), over src, cli and programs.
#
#   scripts/tidy.sh [FILE ...]        (no file: everything, about half an hour on 2 cores; files: the modules that they belong to)
#
# Needs Debian's clang-14 and clang-tidy-14, and LibTorch as the build does. The build folder is build/tidy; what passed is not checked again until it changes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

for tool in clang++-14 clang-tidy-14; do
  command -v "$tool" >/dev/null || fail "there is no $tool; sudo apt-get install --no-install-recommends clang-14 clang-tidy-14"
done
find_torch >/dev/null
folder=build/tidy
[ -f $folder/build.ninja ] || cmake --preset tidy -DTorch_DIR="$torch_dir" >"$deps/configure-tidy.log" 2>&1 || { cat "$deps/configure-tidy.log" >&2; fail "CMake could not configure"; }

if [ $# -eq 0 ]; then
  exec ninja -C $folder -j "$(num_jobs)" -k 0 installed
fi
# The sources of a module are compiled as one, so a file is checked with its module.
targets=()
for file in "$@"; do
  while read -r unit; do
    unit=${unit#"$folder/"}
    targets+=("$unit.o")
  done < <(grep -lrF --include='*.cxx' "$root/$file" $folder)
done
[ ${#targets[@]} -gt 0 ] || exit 0  # headers are checked with the sources that include them
mapfile -t targets < <(printf '%s\n' "${targets[@]}" | sort -u)
exec ninja -C $folder -j "$(num_jobs)" -k 0 "${targets[@]}"
