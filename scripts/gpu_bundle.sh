#!/usr/bin/env bash
# Packs what scripts/gpu_check.sh needs on a machine with a GPU and without network: this source tree, headers, and small libraries to link statically.
#
#   scripts/gpu_bundle.sh [FILE]     writes FILE (default: build/gpu_kit.tar.gz), at most 50 MiB. There: tar xf gpu_kit.tar.gz && accelerate/scripts/gpu_check.sh
#   scripts/gpu_bundle.sh --libraries [FILE]   the headers and libraries alone (default: .gpu_kit/libraries.tar.gz), for a machine that gets the sources otherwise
#
# The bundle has the commit and all changes since, as git knows the files. The libraries are this Debian's or Ubuntu's own, without those that LibTorch's
# wheel or CUDA bring; another release with an older g++ or C library may be unable to link them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

libraries_only=
[ "${1:-}" != --libraries ] || { libraries_only=1; shift; }
case ${1:-} in -*) fail "there is no option $1; see the head of this file" ;; esac
most_bytes=$((50 * 1024 * 1024))

install_system_packages
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/accelerate/.gpu_kit/prefix
mkdir -p "$prefix/include" "$prefix/lib/cmake"

# headers PACKAGE...: what they have in /usr/include, also what is there for this processor alone.
headers() {
  local package file name
  for package in "$@"; do
    while read -r file; do
      [ -f "$file" ] || continue
      name=${file#/usr/include/}
      name=${name#"$(uname -m)-linux-gnu/"}
      install -D -m 644 "$file" "$prefix/include/$name"
    done < <(dpkg -L "$package" | grep '^/usr/include/')
  done
}
headers nlohmann-json3-dev libfmt-dev libspdlog-dev libyaml-cpp-dev libicu-dev libpcre2-dev liburing-dev libssl-dev libgloo-dev libgtest-dev libgmock-dev
for library in yaml-cpp icuuc icudata pcre2-8 uring ssl crypto gtest gtest_main gmock gmock_main; do
  found=$(find /usr/lib -name "lib$library.a" | head -n 1)
  [ -n "$found" ] || fail "there is no lib$library.a in /usr/lib"
  install -m 644 "$found" "$prefix/lib/"
done

# package NAME TARGET [LIBRARY]: what find_package(NAME) finds there, in place of files that know where the system has it.
package() {
  local folder=$prefix/lib/cmake/$1
  mkdir -p "$folder"
  {
    echo "add_library($2 $([ -n "${3:-}" ] && echo STATIC || echo INTERFACE) IMPORTED)"
    # shellcheck disable=SC2016  # CMake's variable
    printf 'set_target_properties(%s PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CURRENT_LIST_DIR}/../../../include")\n' "$2"
    # shellcheck disable=SC2016
    [ -z "${3:-}" ] || printf 'set_target_properties(%s PROPERTIES IMPORTED_LOCATION "${CMAKE_CURRENT_LIST_DIR}/../../%s")\n' "$2" "$3"
  } >"$folder/$1Config.cmake"
}
package nlohmann_json nlohmann_json::nlohmann_json
package fmt fmt::fmt
package yaml-cpp yaml-cpp libyaml-cpp.a
dpkg-query -W -f '${Package} ${Version}\n' libyaml-cpp-dev libicu-dev libpcre2-dev liburing-dev libssl-dev libgtest-dev >"$prefix/versions.txt"

if [ -n "$libraries_only" ]; then
  file=${1:-$root/.gpu_kit/libraries.tar.gz}
  contents=(-C "$work/accelerate/.gpu_kit" prefix)
else
  file=${1:-$root/build/gpu_kit.tar.gz}
  # Files of results are many and of no use there.
  git ls-files -z --cached --others --exclude-standard | xargs -0 sh -c 'for file; do [ ! -f "$file" ] || echo "$file"; done' _ | tar cf - -T - | tar xf - -C "$work/accelerate"
  git describe --always --dirty >"$work/accelerate/.gpu_kit/version.txt"
  contents=(-C "$work" accelerate)
fi
case $file in /*) ;; *) file=$PWD/$file ;; esac
mkdir -p "$(dirname "$file")"
tar cf - "${contents[@]}" | gzip -9 >"$file.new"
size=$(stat -c %s "$file.new")
[ "$size" -le $most_bytes ] || fail "$file would have $size bytes, and $most_bytes are the most that some machines take"
mv "$file.new" "$file"
echo "$file: $((size / 1024)) KiB"
