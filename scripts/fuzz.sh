#!/usr/bin/env bash
# Fuzzes the parsers (fuzz/): builds, runs each target from its corpus, keeps of what it found the least that reaches as much, and prints a table.
#
#   scripts/fuzz.sh [--seconds N] [--jobs N] [--no-build] [TARGET ...]     (no target: all of them; 60 seconds each, one after the other)
#
# A target is gguf, tokenizer, ... as fuzz/CMakeLists.txt names them. An input that takes more than 1 GB or 10 seconds is a finding as a crash is; inputs that fail are left in
# build/fuzz/found/TARGET. The corpora are fuzz/corpus/TARGET.base64, an input a line, at most 100 KB each; ctest replays them (fuzz_corpus.*).
# The exit status is 1 where something was found.
#
# Needs Debian's clang-14 and libclang-rt-14-dev, and LibTorch as the build does. ACCELERATE_FUZZ_DIR is the build folder (default: build/fuzz).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

seconds=60 jobs=1 build=1 targets=()
while [ $# -gt 0 ]; do
  case $1 in
    --seconds) seconds=$2; shift ;;
    --jobs) jobs=$2; shift ;;
    --no-build) build= ;;
    -*) fail "there is no option $1; see the head of this file" ;;
    *) targets+=("$1") ;;
  esac
  shift
done
mapfile -t known < <(cd fuzz && ls ./*_fuzz.cpp | sed 's|^\./||; s|_fuzz\.cpp$||')
[ ${#targets[@]} -gt 0 ] || targets=("${known[@]}")
for target in "${targets[@]}"; do [ -f "fuzz/${target}_fuzz.cpp" ] || fail "there is no target $target; there are: ${known[*]}"; done

folder=${ACCELERATE_FUZZ_DIR:-build/fuzz}
if [ -n "$build" ]; then
  command -v clang++-14 >/dev/null || fail "there is no clang++-14; sudo apt-get install --no-install-recommends clang-14 libclang-rt-14-dev"
  find_torch >/dev/null
  [ -f "$folder/build.ninja" ] || cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER=clang++-14 -DACCELERATE_FUZZ=ON -DACCELERATE_TESTS=OFF \
    -DACCELERATE_EXAMPLES=OFF -DACCELERATE_PCH=OFF -DTorch_DIR="$torch_dir" >"$deps/configure-fuzz.log" 2>&1 || { cat "$deps/configure-fuzz.log" >&2; fail "CMake could not configure"; }
  ninja -C "$folder" -j "$(num_jobs)" "${targets[@]/%/_fuzz}"
fi
for target in "${targets[@]}"; do [ -x "$folder/bin/${target}_fuzz" ] || fail "$folder/bin/${target}_fuzz has not been built"; done

most_corpus_bytes=100000 most_input_bytes=4096
limits=(-rss_limit_mb=1024 -timeout=10 -max_len=$most_input_bytes)
# The readers write small files; they belong into memory.
[ ! -w /dev/shm ] || export TMPDIR=/dev/shm
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=2048 OMP_NUM_THREADS=1

# unpack FILE FOLDER: a file for each line.
unpack() {
  local n=0 line
  mkdir -p "$2"
  [ -f "$1" ] || return 0
  while read -r line; do n=$((n + 1)); base64 -d <<<"$line" >"$2/seed$n"; done <"$1"
}

# pack FOLDER FILE: the smallest inputs first, as many as there is room for.
pack() {
  local bytes=0 name line
  while read -r name; do
    line=$(base64 -w 0 "$1/$name")
    bytes=$((bytes + ${#line} + 1))
    [ $bytes -le $most_corpus_bytes ] || break
    [ -z "$line" ] || printf '%s\n' "$line"
  done < <(find "$1" -type f -printf '%s %f\n' | sort -k1,1n -k2 | cut -d ' ' -f 2) >"$2.new"
  mv "$2.new" "$2"
}

# fuzz TARGET: runs it, and writes its corpus and its line of the table.
fuzz() {
  local program=$folder/bin/$1_fuzz corpus=fuzz/corpus/$1.base64 work=$folder/work/$1 found=$folder/found/$1 log=$folder/work/$1.log
  rm -rf "$work" "$log"
  mkdir -p "$found"
  unpack "$corpus" "$work/inputs"
  mkdir -p "$work/least"
  # A finding ends the run: it is to be repaired before what lies behind it is looked for.
  local status=0
  "$program" "$work/inputs" "${limits[@]}" -max_total_time="$seconds" -print_final_stats=1 -artifact_prefix="$found/" >"$log" 2>&1 || status=$?
  # A corpus is replaced by a whole one only.
  if "$program" -merge=1 "${limits[@]}" -artifact_prefix="$found/" "$work/least" "$work/inputs" >"$log.merge" 2>&1; then pack "$work/least" "$corpus"; else status=1; fi
  local runs covered
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  covered=$(sed -n 's/^#[0-9]*\t.* cov: \([0-9]*\) ft: .*/\1/p' "$log" | tail -n 1)
  printf '| %s | %s | %s | %s | %s (%s bytes) | %s |\n' "$1" "$seconds" "${runs:-?}" "${covered:-?}" "$(wc -l <"$corpus")" "$(wc -c <"$corpus")" "$([ $status = 0 ] && echo none || echo "see $log")" \
    >"$folder/work/$1.row"
}

for target in "${targets[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || true; done
  fuzz "$target" &
done
wait
status=0
printf '| target | seconds | executions | edges covered | corpus | findings |\n|---|---:|---:|---:|---:|---|\n'
for target in "${targets[@]}"; do
  cat "$folder/work/$target.row"
  grep -q '| none |$' "$folder/work/$target.row" || status=1
done
exit $status
