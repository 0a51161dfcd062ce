#!/usr/bin/env bash
# Builds the library and all programs, as far as they have not been built, and installs them.
#
#   scripts/install.sh [FOLDER]        FOLDER: default ~/.local, whose bin/ is on many users' PATH
#
# The same as scripts/quickstart.sh needs is installed first where it is missing. scripts/common.sh lists the environment variables.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

first=${1-}
[ $# -le 1 ] && [ "${first#-}" = "$first" ] || fail "found the arguments '$*', expected at most a folder"
called_from=${OLDPWD:-$root}
prefix=${first:-$HOME/.local}
case $prefix in /*) ;; *) prefix=$called_from/$prefix ;; esac

step 1/3 "system packages"
install_system_packages
step 2/3 "LibTorch (a download of 200 MB the first time)"
find_torch
step 3/3 "building the library and the programs ($(num_jobs) compilers at a time), and installing them in $prefix"
build release installed
cmake --install build/release --prefix "$prefix" >"$deps/install.log" || { cat "$deps/install.log" >&2; fail "the installation failed"; }
echo "installed: $prefix/bin/accelerate, and for CMake -DCMAKE_PREFIX_PATH=$prefix -DTorch_DIR=$torch_dir"
