#!/usr/bin/env bash
# Builds what touches CUDA, on a machine that need have no GPU and no CUDA toolkit: LibTorch's wheels for NVIDIA's GPUs and NVIDIA's headers come from pip's index.
#
#   scripts/cuda_build.sh [VERSION ...]         library, programs, tests labelled gpu, benchmarks and examples, with preset cuda in build/cuda-VERSION, for each of
#                                               these versions of LibTorch (default: 2.11.0 2.13.0); then the same against 2.11.0's part for CPUs. 10 GB of wheels.
#   scripts/cuda_build.sh --fetch-headers       gets the headers alone, and the compiler for scripts/nvrtc_check.py (1 GB of wheels, of which 140 MB are kept)
#   scripts/cuda_build.sh --syntax              compiles the files that only CUDA builds have, without code and with those headers: seconds. Exit status 77 without them.
#
# scripts/common.sh lists the environment variables; CXX is the compiler of --syntax, Torch_DIR its LibTorch, which may be one for CPUs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cuda_only=(src/comm/backends/nccl.cpp src/model/cuda_graphs/cuda_recorder.cpp src/codes/cuda/nvrtc.cpp)
headers=$deps/cuda_headers

fetch_headers() {
  [ ! -f "$headers/complete" ] || [ ! -f "$headers/nvidia/cu13/lib/libnvrtc.so.13" ] || return 0
  make_venv
  rm -rf "$headers"
  mkdir -p "$headers/wheels"
  # As LibTorch 2.13.0 for CUDA 13.0 asks for them, and what its wheel leaves out.
  "$venv/bin/python" -m pip download -q --disable-pip-version-check --no-input --no-deps -d "$headers/wheels" nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85 \
    nvidia-cublas==13.1.1.3 nvidia-cusparse==12.6.3.3 nvidia-cusolver==12.0.4.66 nvidia-nccl-cu13==2.29.7 nvidia-cuda-nvrtc==13.0.88 || fail "pip could not get NVIDIA's headers"
  "$venv/bin/python" - "$headers" <<'EOF'
import glob, sys, zipfile
for wheel in glob.glob(sys.argv[1] + "/wheels/*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(sys.argv[1], [name for name in archive.namelist() if "/include/" in name or ("/libnvrtc" in name and ".alt." not in name)])
EOF
  rm -r "$headers/wheels"
  # LibTorch's build for CUDA writes this header, and its build for CPUs leaves it out.
  mkdir -p "$headers/torch/c10/cuda/impl"
  echo '#define C10_CUDA_BUILD_SHARED_LIBS' >"$headers/torch/c10/cuda/impl/cuda_cmake_macros.h"
  touch "$headers/complete"
}

syntax() {
  [ -f "$headers/complete" ] || { echo "NVIDIA's headers are not here; scripts/cuda_build.sh --fetch-headers gets them"; exit 77; }
  find_torch >/dev/null
  local torch=$torch_dir/../../../include
  # As one source: most of what each takes is LibTorch's headers.
  printf '#include "%s"\n' "${cuda_only[@]}" |
    "${CXX:-c++}" -std=c++20 -fsyntax-only -Wall -Wextra -Wno-unused-parameter -Werror -DUSE_DISTRIBUTED -DUSE_C10D_NCCL -DFMT_HEADER_ONLY -I. -Iinclude -Isrc -isystem "$torch" -isystem "$torch/torch/csrc/api/include" \
      -isystem "$headers/torch" -isystem "$headers/nvidia/cu13/include" -isystem "$headers/nvidia/nccl/include" -x c++ -
  echo "${cuda_only[*]}: fine"
}

# build_with VERSION FOLDER [CMAKE OPTION...]: preset cuda with this version of LibTorch, in FOLDER.
build_with() {
  local version=$1 folder=$2
  shift 2
  venv=$deps/torch-$version
  make_venv
  pip_install "torch===$version" numpy || fail "pip could not install torch $version"
  torch_dir=$(wheel_torch_dir)
  [ ! -e "$torch_dir/../../../lib/libtorch_cuda.so" ] || install_cuda_headers
  [ -f "$folder/build.ninja" ] || cmake --preset cuda -B "$folder" -DTorch_DIR="$torch_dir" "$@" >"$deps/configure-${folder##*/}.log" 2>&1 || { cat "$deps/configure-${folder##*/}.log" >&2; fail "CMake could not configure"; }
  ninja -C "$folder" -j "$(num_jobs)" || fail "the build failed; the compiler's message is above"
  "$folder/bin/accelerate" env | grep -E 'LibTorch|Back ends'
  (cd "$folder" && ctest -L gpu --no-tests=error) || fail "a test labelled gpu failed"
}

case ${1:-} in
  --fetch-headers) fetch_headers ;;
  --syntax) syntax ;;
  -*) fail "there is no option $1; see the head of this file" ;;
  *)
    [ $# -gt 0 ] || set -- 2.11.0 2.13.0
    install_system_packages
    for version in "$@"; do
      step "$version" "LibTorch $version for NVIDIA's GPUs"
      build_with "$version" "build/cuda-$version"
      "build/cuda-$version/bin/accelerate" env | grep -q 'Back ends:.*nccl' || fail "nccl was left out"
    done
    # Pip's index has no wheel of it for CPUs alone; the part for CPUs is the same.
    step 2.11.0 "LibTorch 2.11.0, its part for CPUs"
    build_with 2.11.0 build/cpu-2.11.0 -DACCELERATE_CUDA=OFF
    ;;
esac
