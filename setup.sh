#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs missing packages and LibTorch, and builds the programs, or the given targets: ./setup.sh demo. quickstart.sh
# and test.sh call this script. Needs no network once everything is installed.
#   YOLOX_BUILD=build       build folder
#   YOLOX_DRIVER=580        version of the NVIDIA driver to build for [that of this machine]; none: without CUDA
#   YOLOX_CARD=7.0          compute capability of the oldest card to build for [that of this machine]
#   CMAKE_PREFIX_PATH=...   folder of another LibTorch; otherwise LibTorch is installed into .venv
#   YOLOX_CMAKE_ARGS=...    additional arguments for CMake
#   YOLOX_PACKAGES=...      additional Debian packages
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '3,/^set/s/^# \?//p' "$0"; exit ;;
  -*) echo "error: there is no option $1; ./setup.sh --help lists what there is" >&2; exit 2 ;;
esac
cd "$(dirname "$0")"
build=${YOLOX_BUILD:-build}

say() { printf '== %s\n' "$*"; }
# Runs a command. Prints every 30 seconds how long it has been running, and the output of progress().
patiently() {
  local start=$SECONDS status=0 beat
  while sleep 30 >/dev/null 2>&1; do say "  $((SECONDS - start)) s$(progress)"; done 9>&- &
  beat=$!
  disown $beat
  trap "kill $beat" EXIT
  "$@" || status=$?
  kill $beat
  trap - EXIT
  return $status
}
progress() { :; }

packages=(g++ cmake ninja-build ccache python3-venv libopencv-dev libjpeg-dev libcxxopts-dev rapidjson-dev
  libpugixml-dev libyaml-cpp-dev liblmdb-dev libzip-dev libgloo-dev libprotobuf-dev protobuf-compiler
  doctest-dev ${YOLOX_PACKAGES:-})
# weights/get downloads with curl or wget.
command -v curl >/dev/null || command -v wget >/dev/null || packages+=(curl ca-certificates)
# Without root, the packages are unpacked into .packages. DT_RPATH, unlike the default DT_RUNPATH, is also used for the
# libraries that those in .packages need.
unpacked=$PWD/.packages
use_unpacked() {
  local lib arch
  lib=$(dirname "$unpacked"/usr/lib/*/libopencv_core.so)
  arch=$(basename "$lib")
  export PATH=$PATH:$unpacked/usr/bin CMAKE_PREFIX_PATH=${CMAKE_PREFIX_PATH:+$CMAKE_PREFIX_PATH:}$unpacked/usr
  export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$lib  # for protoc
  export CXXFLAGS="${CXXFLAGS:-} -isystem $unpacked/usr/include/$arch"
  export LDFLAGS="${LDFLAGS:-} -Wl,--disable-new-dtags,-rpath,$lib:$lib/blas:$lib/lapack:$unpacked/usr/lib:$unpacked/lib/$arch"
}
unpack() {
  local apt deb
  apt=(apt-get -qq -o Debug::NoLocking=1 -o Dir::State::lists="$unpacked/lists" -o Dir::Cache="$unpacked/cache")
  rm -rf "$unpacked"
  mkdir -p "$unpacked"/{lists,cache/archives}/partial
  "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends --download-only "$@" || return 1
  for deb in "$unpacked"/cache/archives/*.deb; do dpkg -x "$deb" "$unpacked" || return 1; done
  rm -r "$unpacked"/{lists,cache}
  echo "$@" >"$unpacked/done"
}
if command -v dpkg-query >/dev/null; then
  missing=()
  for p in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'install ok installed' || missing+=("$p")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    command="apt-get update && DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a apt-get install -y ${missing[*]}"
    if [ "$(id -u)" = 0 ]; then
      say "installing ${missing[*]}"
      (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}") \
        >"${TMPDIR:-/tmp}/yolox-apt.log" 2>&1 ||
        { tail -n 5 "${TMPDIR:-/tmp}/yolox-apt.log"; echo "error: cannot install packages; run: $command"; exit 1; }
    elif sudo -n true 2>/dev/null; then
      say "installing ${missing[*]}"
      sudo sh -c "$command" >/dev/null
    elif [ "$(cat "$unpacked/done" 2>/dev/null)" = "${missing[*]}" ]; then
      use_unpacked
    else
      say "no root: unpacking ${missing[*]} into .packages"
      unpack "${missing[@]}" >"$build.log" 2>&1 || {
        tail -n 5 "$build.log"
        echo "error: packages are missing; let somebody with root run this, then run setup.sh again:"
        echo "  sudo sh -c '$command'"
        exit 1
      }
      use_unpacked
    fi
  fi
else
  say "no Debian packages here: if libraries are missing, install those of docs/install.md, or use Docker"
fi

# The driver and the oldest card decide which CUDA, and so which LibTorch, works on this machine.
query() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null; }
driver=${YOLOX_DRIVER-$(query driver_version || cat /proc/driver/nvidia/version 2>/dev/null || true)}
driver=$(grep -oE '[0-9]{3}(\.[0-9]+)*' <<<"$driver" | head -n 1 || true)
card=${YOLOX_CARD-$([ -n "${YOLOX_DRIVER-}" ] || query compute_cap | sort -V || true)}
card=$(grep -oE '[0-9]+\.[0-9]' <<<"$card" | head -n 1 || true)
torch=2.15.0 cuda=ON machine="NVIDIA driver $driver${card:+, compute capability $card}" index=()
if [ -z "$driver" ]; then
  machine="no NVIDIA driver" cuda=OFF
elif [ "${driver%%.*}" -lt 525 ]; then
  machine+=": the driver is too old (LibTorch 2.10 needs 525, 2.15 needs 580)" cuda=OFF
elif [ "${driver%%.*}" -lt 580 ]; then
  torch=2.10.0  # with CUDA 12.8
fi
case $card in
  [1-4].*) machine+=": the card is too old (LibTorch 2.10 needs 5.0)" cuda=OFF ;;
  # CUDA 13 has no kernels for cards below 7.5. CUDA 12.8 has them for 7.0 (V100), 12.6 also for P100 and GTX 10.
  [56].*) torch=2.10.0 index=(--index-url https://download.pytorch.org/whl/cu126) ;;
  7.[0-4]) torch=2.10.0 ;;
esac

# The libraries of CUDA that libtorch_cpu.so links, for each version of LibTorch.
cuda_13_0="nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85"
declare -A linked=(
  [2.10.0]="nvidia-cuda-runtime-cu12==12.8.90 nvidia-cuda-cupti-cu12==12.8.90"
  [2.11.0]=$cuda_13_0 [2.12.1]=$cuda_13_0 [2.13.0]=$cuda_13_0 [2.14.1]=$cuda_13_0
  [2.15.0]="nvidia-cuda-runtime==13.2.86.* nvidia-cuda-cupti==13.2.86.*"
)
# nvcc, which compiles lib/layers/bn_silu.cu. For CUDA 12, PyPI has none.
declare -A nvcc=([2.15.0]="nvidia-cuda-nvcc==13.2.86.* nvidia-cuda-crt==13.2.86.* nvidia-nvvm==13.2.86.*")
# LibTorch is taken from CMAKE_PREFIX_PATH, else from the CMake cache of the build folder, else from the wheel in .venv.
own_torch() {
  local IFS=':;' p
  for p in ${CMAKE_PREFIX_PATH:-}; do
    if [ -e "$p/share/cmake/Torch/TorchConfig.cmake" ] || [ -e "$p/Torch/TorchConfig.cmake" ]; then return 0; fi
  done
  return 1
}
# Another setup.sh may run: ./test.sh in a second window. One at a time installs, and builds in the same folder.
alone() { flock -n 9 || { say "waiting for another setup.sh"; flock 9; }; }
installed() { ls -d .venv/lib/python3*/site-packages/$1 >/dev/null 2>&1; }
known=$(sed -n 's/^TORCH_CMAKE:[^=]*=//p' "$build/CMakeCache.txt" 2>/dev/null || true)
search=(-U TORCH_CMAKE)
exec 9<setup.sh
alone
if own_torch; then
  :
elif [ -e "$known/TorchConfig.cmake" ] && [[ $known != "$PWD"/.venv/* ]]; then
  search=()
else
  # Without CUDA, installs only the two libraries of CUDA that libtorch_cpu.so links: 1.3 GB instead of 4.6 GB. `import
  # torch` and torchrun need all of them.
  wheels=("torch==$torch" --no-deps ${linked[$torch]}) size="0.6 GB" suffix=
  [ $cuda = OFF ] || suffix=${index:++cu126}
  [ $cuda = OFF ] || wheels=("torch==$torch$suffix" ${index[@]+"${index[@]}"}) size="2 GB"
  if ! installed "torch-$torch$suffix*.dist-info" || { [ $cuda = ON ] && ! installed nvidia/nccl; }; then
    say "installing LibTorch $torch into .venv (downloads $size)"
    python3 -m venv .venv
    patiently .venv/bin/pip install -q --disable-pip-version-check "${wheels[@]}" ||
      { echo "error: cannot install LibTorch; run: .venv/bin/pip install ${wheels[*]}"; exit 1; }
  fi
  if [ $cuda = ON ] && [ -n "${nvcc[$torch]:-}" ] && ! installed nvidia/cu13/bin/nvcc &&
    ! PATH=$PATH:/usr/local/cuda/bin command -v nvcc >/dev/null; then
    say "installing nvcc into .venv (downloads 0.1 GB)"
    .venv/bin/pip install -q --disable-pip-version-check --no-deps ${nvcc[$torch]} ||
      echo "warning: cannot install nvcc; building without the fused norm kernels"
  fi
fi
# At the end of a run, train writes report.html with matplotlib. A linked .venv belongs to another checkout.
plots="matplotlib numpy pycocotools"
if [[ $# = 0 || " $* " == *" train "* ]] && [ ! -L .venv ] && ! { installed matplotlib && installed numpy && installed pycocotools; }; then
  say "installing $plots into .venv (downloads 0.04 GB)"
  { [ -x .venv/bin/python ] || python3 -m venv .venv; } &&
    .venv/bin/pip install -q --disable-pip-version-check --retries 0 --timeout 10 --only-binary :all: $plots 2>/dev/null ||
    echo "warning: runs will have no report.html; for it run: .venv/bin/pip install $plots"
fi
mkdir -p "$build"
exec 9>"$build/.lock"
alone
generator=()
if [ ! -e "$build/CMakeCache.txt" ] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
cmake -S . -B "$build" ${search[@]+"${search[@]}"} "${generator[@]}" -DYOLOX_CUDA=$cuda ${YOLOX_CMAKE_ARGS:-} >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
say "$machine; $(grep -oE 'LibTorch [0-9].*|demo is not built.*' "$build.log" || true)"
jobs=$(nproc) room=$(awk '/MemAvailable/ {print int($2 / 2300000)}' /proc/meminfo)  # a compiler process needs up to 2.3 GB
[ "$room" -ge "$jobs" ] || jobs=$((room > 0 ? room : 1))
[ $# -gt 0 ] || set -- train eval demo export pack
# Programs that were built before must not stay behind: an old eval would compute the old model.
for program in train eval demo export pack; do
  [ ! -e "$build/$program" ] || [[ " $* " == *" $program "* ]] || set -- "$@" "$program"
done
minutes=$(((6 + ($(grep -cw tests <<<"$*" || true) * 12)) / jobs + 1))
say "building $* in $build (for the first time: about $minutes minutes)"
progress() { grep -oE '^\[[0-9]+/[0-9]+\]' "$build.log" | tail -n 1 | sed 's/^/, step /' || true; }
build() { cmake --build "$build" -j "$jobs" --target "$@" >"$build.log" 2>&1; }
patiently build "$@" || { cat "$build.log"; exit 1; }
rm -f "$build.log"
for program in train eval demo export pack; do
  # Keeps existing links if this is a second build folder.
  [ ! -e "$build/$program" ] || { [ -e "$program" ] && [ "$build" != build ]; } || ln -sf "$build/$program" "$program"
done
