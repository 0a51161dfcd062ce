#!/usr/bin/env bash
# Builds everything and runs every test.
#
#   scripts/test.sh [PRESET] [arguments of ctest ...]        PRESET: release (default), dev, asan, tsan
#
# Ends with ctest's summary and its exit code. CTEST_PARALLEL_LEVEL says how many tests run at a time (default 4: many of them start
# several processes, and many wait). scripts/common.sh lists the other environment variables.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

preset=release
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  preset=$1
  shift
fi
case $preset in release | dev | asan | tsan) ;; *) fail "unknown preset '$preset'; known: release dev asan tsan" ;; esac

step 1/5 "system packages"
install_system_packages "${testing[@]}"
step 2/5 "LibTorch, and the Python packages that the tests compare with"
find_torch
# They need torch in Python too, also where the build uses another LibTorch.
[ -n "$(wheel_torch_dir)" ] || install_torch_wheel
pip_install numpy==2.4.6 safetensors==0.8.0 tokenizers==0.23.3 transformers==5.23.0 accelerate==1.15.0 tensorboard==2.21.0 gguf==0.19.0 schedulefree==1.4.1 bitsandbytes==0.50.2 peft==0.21.2 clang-format==14.0.6 'moto[server]==5.2.5' ||
  fail "pip could not install the packages that the tests compare with"
install_trackers || fail "pip could not install the packages of the trackers"
step 3/5 "weights and data"
fetch_data minilm pairs mnist smollm2
# A gigabyte to fetch, for one test that compiles one file.
[ -z "${CI:-}" ] || "$root/scripts/cuda_build.sh" --fetch-headers
step 4/5 "building all of preset '$preset' in build/$preset (about 15 minutes the first time on 2 cores; $(num_jobs) compilers at a time)"
# The tests of a label that has a target of its own need no others built.
targets=()
for ((i = 1; i < $#; ++i)); do
  if [ "${!i}" = -L ]; then
    next=$((i + 1))
    case ${!next} in tsan | quick) targets=("${!next}_tests") ;; esac
  fi
done
build "$preset" "${targets[@]}"

step 5/5 "tests"
# What was built goes to the disk first: a flush of a test's own file would wait for all of it.
sync -f "$root/build/$preset"
export ACCELERATE_TEST_PYTHON=$venv/bin/python ACCELERATE_TEST_TRACKERS_PYTHON=$deps/trackers/bin/python
ACCELERATE_TEST_DATA=$(cd "$deps/data" && pwd)
export ACCELERATE_TEST_DATA
# The peers must not look for anything on the network.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Several tests share the cores: a thread that waits for its team must not turn meanwhile.
export OMP_WAIT_POLICY=passive
# Tests with a peer in Python share one process that has imported what the peers need. It ends, and its socket goes, with this process.
ACCELERATE_TEST_PYTHON_SERVER=$(mktemp -d /tmp/accelerate-tests.XXXXXX)/python  # a socket's path may have 107 characters
export ACCELERATE_TEST_PYTHON_SERVER
"$ACCELERATE_TEST_PYTHON" "$root/tests/support/python_server.py" "$ACCELERATE_TEST_PYTHON_SERVER" >"$root/build/$preset/python_server.log" 2>&1 </dev/null &
until [ -S "$ACCELERATE_TEST_PYTHON_SERVER" ]; do
  kill -0 $! 2>/dev/null || fail "tests/support/python_server.py has ended; what it said is in build/$preset/python_server.log"
  sleep 0.1
done
run=(ctest --preset "$preset" -j "${CTEST_PARALLEL_LEVEL:-4}" "$@")
# ThreadSanitizer can't start where the kernel places programs at very random addresses; without that it can.
if [ "$preset" = tsan ] && setarch "$(uname -m)" -R true 2>/dev/null; then run=(setarch "$(uname -m)" -R "${run[@]}"); fi
exec "${run[@]}" </dev/null
