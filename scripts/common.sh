# Set-up that quickstart.sh and test.sh share; sourced, not run. Every step looks first and does nothing when its result is there, so a
# second run takes a moment, and one that was interrupted goes on where it stopped.
#
# Environment:
#   ACCELERATE_DEPS_DIR    where the virtual environment and the data go (default: .deps in the repository, which git ignores)
#   ACCELERATE_JOBS        compilers that run at a time (default: one per core, as far as there are 2 GB of memory for each)
#   ACCELERATE_TORCH_SPEC  what pip installs as LibTorch (default: torch==2.13.0, the build for CPUs where pip's index has it; with an
#                          NVIDIA GPU the index's own choice). PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and pip.conf choose the index.
#   Torch_DIR, CMAKE_PREFIX_PATH   a LibTorch of yours, 2.11 or newer; then none is installed for the build
#   PYTHON                 interpreter that makes the virtual environment (default: python3)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
deps=${ACCELERATE_DEPS_DIR:-$root/.deps}
case $deps in /*) ;; *) deps=$root/$deps ;; esac
mkdir -p "$deps"
venv=$deps/venv
torch_version=2.13.0

trap 'printf "\ninterrupted; run it again to go on from here\n" >&2; exit 130' INT TERM

fail() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

# step NUMBER/OF TEXT: a line that says where we are.
step() { printf '\n[%s] %s\n' "$1" "$2"; }

# --- system packages ---------------------------------------------------------------------------------------------------------------

# Packages that the build needs, and packages that only make it faster or let more tests run.
required=(g++ make cmake ninja-build libgloo-dev libyaml-cpp-dev nlohmann-json3-dev libicu-dev libpcre2-dev liburing-dev libssl-dev libcurl4-openssl-dev zlib1g-dev libgtest-dev libgmock-dev libfmt-dev libspdlog-dev)
faster=(ccache mold openmpi-bin libjemalloc-dev)
# Packages that only tests need: a browser for the page of `accelerate launch --monitor_port` (without it those tests fail and say why), other ways to start processes, other shells, what builds the manual.
testing=(patch mpich chromium openssh-server openssh-client pdsh slurmctld slurmd slurm-client munge zsh fish mkdocs doxygen graphviz)

# cost_without PACKAGE: what is lost without one that the build can do without.
cost_without() {
  case $1 in
    ccache) echo "what has been compiled once is compiled again" ;;
    libjemalloc-dev) echo "\`accelerate generate\` and \`accelerate quantize\` take more memory" ;;
    mold) echo "programs are linked more slowly" ;;
    openmpi-bin) echo "programs can't be started by mpirun, and the tests that do so fail" ;;
    chromium) echo "the tests of the monitor's page fail" ;;
    openssh-*) echo "the tests that start machines by ssh fail" ;;
    pdsh) echo "the tests that start machines by pdsh fail" ;;
    slurm* | munge) echo "the tests with Slurm fail" ;;
    mkdocs | doxygen | graphviz) echo "the test of the manual and the API reference (docs.site) fails" ;;
    zsh | fish) echo "the test of completions in $1 fails" ;;
    *) echo "tests that need it fail" ;;
  esac
}

is_installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# missing PACKAGE...: those that are not installed.
missing() {
  local package
  for package in "$@"; do is_installed "$package" || printf '%s ' "$package"; done
}

# install_system_packages [PACKAGE...]: what the build needs, and those packages as far as they can be had.
install_system_packages() {
  local optional=("$@")
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    echo "This system has no apt; the build will say what it lacks. It needs what these Debian packages hold: ${required[*]} python3-venv"
    return
  fi
  local wanted=("${required[@]}") as_root=() lacking
  # An interpreter that can make virtual environments by itself does not need Debian's package.
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null || wanted+=(python3-venv)
  lacking=$(missing "${wanted[@]}")
  if [ -z "$lacking$(missing "${optional[@]}")" ]; then
    echo "all there"
    return
  fi
  if [ -z "$lacking" ] && [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
    echo "going on without $(missing "${optional[@]}"), which only root can install; tests that need it fail"
    return
  fi
  if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || fail "these packages are missing and installing them needs root. Run this, then start again:
  sudo apt-get update && sudo apt-get install -y --no-install-recommends $lacking$(missing "${faster[@]}" "${optional[@]}")"
    as_root=(sudo -n)
  fi
  echo "installing: $lacking$(missing "${optional[@]}")"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300)
  "${apt[@]}" update </dev/null || echo "apt-get update failed; trying with the package lists that are there"
  # shellcheck disable=SC2086  # one word per package
  [ -z "$lacking" ] || "${apt[@]}" install -y --no-install-recommends $lacking </dev/null >/dev/null || fail "apt-get could not install: $lacking"
  lacking=$(missing "${faster[@]}" "${optional[@]}")
  [ -n "$lacking" ] || return 0
  # shellcheck disable=SC2086
  "${apt[@]}" install -y --no-install-recommends $lacking </dev/null >/dev/null && return
  # apt installs nothing when one of several can't be had: what can be had is installed one by one.
  local package
  for package in $lacking; do
    "${apt[@]}" install -y --no-install-recommends "$package" </dev/null >/dev/null || echo "going on without $package: $(cost_without "$package")"
  done
}

# --- Python and LibTorch -----------------------------------------------------------------------------------------------------------

make_venv() {
  "$venv/bin/python" -c 'import pip' 2>/dev/null && return
  "${PYTHON:-python3}" -m venv --clear "$venv" || fail "${PYTHON:-python3} can't make a virtual environment in $venv; PYTHON chooses another interpreter"
}

# install_trackers: the packages of the trackers, in an environment of their own (they want other versions of what the others use).
install_trackers() {
  local venv=$deps/trackers
  pip_install mlflow-skinny==3.17.2 flask==3.1.3 flask-cors==6.0.5 graphene==3.4.3 pandas==3.1.1 wandb==0.31.0 comet_ml==3.58.8 clearml==2.1.12 aim==3.29.1 swanlab==0.10.3 \
    trackio==0.43.0 dvclive==3.49.1
}

# pip_install SPEC...: installs what has not been installed before; the list beside the packages is written once pip has succeeded.
pip_install() {
  local done_list=$venv/installed-by-accelerate.txt spec new=()
  make_venv
  for spec in "$@"; do grep -qxF -- "$spec" "$done_list" 2>/dev/null || new+=("$spec"); done
  [ ${#new[@]} -gt 0 ] || return 0
  echo "pip: ${new[*]}"
  # Few of the modules are ever imported: Python compiles these when they are.
  "$venv/bin/python" -m pip install -qq --no-compile --disable-pip-version-check --no-input "${new[@]}" </dev/null || return 1
  printf '%s\n' "${new[@]}" >>"$done_list"
}

wheel_torch_dir() { compgen -G "$venv/lib/python3*/site-packages/torch/share/cmake/Torch" | head -n 1 || true; }

# LibTorch as a Python package. The index's default build for x86-64 is the one for NVIDIA's GPUs, several gigabytes; without a GPU the build for CPUs is asked for
# by its full name first.
install_torch_wheel() {
  if [ -n "${ACCELERATE_TORCH_SPEC:-}" ]; then
    pip_install "$ACCELERATE_TORCH_SPEC" || fail "pip could not install '$ACCELERATE_TORCH_SPEC' (ACCELERATE_TORCH_SPEC)"
  elif ! grep -qxE "torch={2,3}$torch_version(\+cpu)?" "$venv/installed-by-accelerate.txt" 2>/dev/null; then
    { [ ! -e /dev/nvidiactl ] && pip_install "torch==$torch_version+cpu" 2>/dev/null; } || pip_install "torch===$torch_version" || pip_install "torch==$torch_version" ||
      fail "pip could not install torch $torch_version; it needs a Python package index that has it, and Python 3.10 or newer"
  fi
  [ ! -e "$(wheel_torch_dir)/../../../lib/libtorch_cuda.so" ] || install_cuda_headers
}

# Adds what NVIDIA's headers beside a LibTorch for its GPUs lack, of the same version.
install_cuda_headers() {
  local runtime
  runtime=$("$venv/bin/python" -c 'import importlib.metadata as m; print(".".join(m.version("nvidia-cuda-runtime").split(".")[:2]))') ||
    fail "torch in $venv is a build for NVIDIA GPUs, but there is no nvidia-cuda-runtime beside it; remove $venv and start again"
  pip_install "nvidia-cuda-crt==$runtime.*" "nvidia-cuda-cccl==$runtime.*" || fail "pip could not install nvidia-cuda-crt and nvidia-cuda-cccl $runtime"
}

# find_torch: sets torch_dir to the folder of TorchConfig.cmake, installing LibTorch when none was given.
find_torch() {
  local folder
  torch_dir=${Torch_DIR:-}
  for folder in ${CMAKE_PREFIX_PATH:+${CMAKE_PREFIX_PATH//[:;]/ }}; do
    [ -n "$torch_dir" ] || [ ! -f "$folder/share/cmake/Torch/TorchConfig.cmake" ] || torch_dir=$folder/share/cmake/Torch
    [ -n "$torch_dir" ] || [ ! -f "$folder/Torch/TorchConfig.cmake" ] || torch_dir=$folder/Torch
  done
  if [ -n "$torch_dir" ]; then
    [ -f "$torch_dir/TorchConfig.cmake" ] || fail "Torch_DIR is '$torch_dir', which has no TorchConfig.cmake; it is the folder share/cmake/Torch of a LibTorch"
  else
    install_torch_wheel
    torch_dir=$(wheel_torch_dir)
    [ -n "$torch_dir" ] || fail "the torch package in $venv holds no CMake files; remove $venv and start again"
  fi
  echo "LibTorch: $torch_dir"
}

# fetch_data NAME...: weights and data sets into $deps/data, see fetch_data.sh.
fetch_data() {
  make_venv
  PYTHON=$venv/bin/python "$root/scripts/fetch_data.sh" "$deps/data" "$@"
}

# --- build -------------------------------------------------------------------------------------------------------------------------

cores() { env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc; }

num_jobs() {
  local memory_gb
  memory_gb=$(awk '/^MemTotal:/ { print int($2 / 1048576) }' /proc/meminfo)
  local n=$(( memory_gb / 2 < $(cores) ? memory_gb / 2 : $(cores) ))
  echo "${ACCELERATE_JOBS:-$(( n > 1 ? n : 1 ))}"
}

# build PRESET [TARGET...]: configures when needed and builds the targets, or everything, in build/PRESET.
build() {
  local preset=$1 folder=$root/build/$1
  shift
  if [ ! -f "$folder/build.ninja" ] || ! grep -qxF -e "Torch_DIR:UNINITIALIZED=$torch_dir" -e "Torch_DIR:PATH=$torch_dir" "$folder/CMakeCache.txt"; then
    cmake --preset "$preset" -DTorch_DIR="$torch_dir" >"$deps/configure-$preset.log" 2>&1 || { cat "$deps/configure-$preset.log" >&2; fail "CMake could not configure"; }
  fi
  [ $# -gt 0 ] || [ "$preset" != tsan ] || set -- tsan_tests
  NINJA_STATUS='[%f/%t] ' "${PYTHON:-python3}" "$root/scripts/build_progress.py" "$folder" -j "$(num_jobs)" "$@" || fail "the build failed; the compiler's message is above"
}
