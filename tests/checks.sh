#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks the code with the tools of LLVM 14. Runs all checks, or those given as arguments (tests/checks.sh format tidy), two at a
# time. Prints one line per check: result, seconds, counts. Prints the full output of a failed check. Exit code 1 if any failed.
#   format    every source is formatted as .clang-format says and has an SPDX line, and nothing exceeds the limits of tests/caps.txt;
#             format --fix formats the sources
#   tidy      clang-tidy finds nothing in the headers and the libraries (.clang-tidy)
#   sanitize  the tests of readers and of own memory under the address and undefined behaviour sanitizers, then the fuzzers: each program of tests/fuzz
#             for YOLOX_FUZZ_SECONDS (60), starting from tests/fuzz/corpus; findings go to tests/fuzz/found
#   threads   the suite "threads" under the thread sanitizer
#   cuda      train compiles and links for CUDA 13; no kernel spills registers
#   gpu       gpu-check and bench/gpu.py on the simulated device of tests/simulated_cuda
set -uo pipefail
cd "$(dirname "$0")/.."
all=(gpu sanitize format tidy cuda threads)  # the longest first
if [ "$*" = "format --fix" ]; then git ls-files '*.hpp' '*.cpp' '*.cu' | xargs clang-format-14 -i && exit; fi
wanted=("${@:-${all[@]}}")
for check in "${wanted[@]}"; do
  [[ " ${all[*]} " == *" $check "* ]] || { echo "error: unknown check $check; the checks are: ${all[*]}"; exit 2; }
done

# setup FOLDER TARGETS SETTINGS...: builds the targets with clang.
setup() {
  YOLOX_BUILD=$1 CXX=clang++-14 YOLOX_CMAKE_ARGS="${*:3}" ./setup.sh $2
}
# For CUDA, so that the check cuda needs no build of its own. The tests are those whose cases read files of users, handle
# memory themselves, or contain code for CUDA.
build_sanitize() {
  local files="augment;bn_silu;cache;checkpoint;coco_.*;crash;data;dtr;formats;gpu.*;image;step_graphs;tensorboard"
  YOLOX_DRIVER=580 setup build-sanitize "$1" -DYOLOX_SANITIZE=address,undefined -DYOLOX_FUZZ=ON "-DYOLOX_TEST_FILES=$files"
}
build_threads() {
  setup build-threads "$1" -DYOLOX_CUDA=OFF -DYOLOX_SANITIZE=thread "-DYOLOX_TEST_FILES=cache;data" "-DYOLOX_FOLDERS=base;data;layers"
}

# Symbolizers of the sanitizers, and stack traces in their reports.
export ASAN_SYMBOLIZER_PATH=/usr/bin/llvm-symbolizer-14 UBSAN_OPTIONS=print_stacktrace=1

check_format() {
  local without
  without=$(git ls-files '*.h' '*.hpp' '*.cpp' '*.cu' '*.py' '*.sh' '*.cmake' '*.proto' CMakeLists.txt | xargs grep -L 'SPDX-License-Identifier: Apache-2.0')
  [ -z "$without" ] || { echo "no SPDX line: $without"; return 1; }
  tests/caps.py || return 1
  git ls-files '*.hpp' '*.cpp' '*.cu' | xargs clang-format-14 --dry-run -Werror && git ls-files '*.hpp' '*.cpp' '*.cu' | wc -l | sed 's/$/ files/'
}

check_tidy() {
  clang-tidy-14 --quiet --checks=-bugprone-suspicious-include -p build-sanitize --header-filter="^$PWD/(lib/)?([a-z]*/)?[^/]*\.[hc]pp\$" build-sanitize/all.cpp &&
    echo "$(git ls-files '*.hpp' 'lib/*.cpp' ':!tests' ':!bench' | wc -l) files"
}

run_tests() {  # BUILD FOLDER, ARGUMENTS: the last line of the output is "N cases"
  tests/shards.sh "$1/tests" -- "${@:2}" >"$1/tests.log" 2>&1
  local status=$?
  [ $status = 0 ] || cat "$1/tests.log"
  tail -n 1 "$1/tests.log" | sed 's/ passed.*/ cases/'
  return $status
}

# Cases that take long at -O0, and whose code others run, too.
slow='loader: batches depend on seed*,dtr: gradients*,dtr: equal to a plain step*,dtr: rematerialisation repeats no*'
slow+=',dtr: the automatic budget*'
# Leak detection is off, because torch and OpenCV keep allocations until the process ends. The quarantine of freed
# memory is small, because cases that measure memory count it.
check_sanitize() {
  build_sanitize "tests fuzzers" || return 1
  ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=64 run_tests build-sanitize -tse=programs "-tce=$slow" >build-sanitize/cases || { cat build-sanitize/cases; return 1; }
  export -f fuzz_one
  printf '%s\n' coco voc yolo | xargs -P 2 -I {} bash -c 'fuzz_one {}' >build-sanitize/fuzz.log
  local status=$?
  if [ $status = 0 ]; then cat build-sanitize/cases build-sanitize/fuzz.log | paste -sd, | sed 's/,/, /g'; else cat build-sanitize/fuzz.log; fi
  return $status
}
# Inputs that reach new code are kept in build-sanitize/corpus, where the next run continues.
fuzz_one() {
  local new=build-sanitize/corpus/$1 log=build-sanitize/$1.log
  mkdir -p "$new" tests/fuzz/found
  if "build-sanitize/fuzz_$1" -max_total_time="${YOLOX_FUZZ_SECONDS:-60}" -timeout=20 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="tests/fuzz/found/$1-" "$new" "tests/fuzz/corpus/$1" >"$log" 2>&1; then
    echo "$1 $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs"
  else
    grep -v '^#' "$log"
    echo "reproduce: build-sanitize/fuzz_$1 $(sed -n 's/.*Test unit written to //p' "$log")"
    return 1
  fi
}

check_threads() {
  build_threads tests || return 1
  TSAN_OPTIONS="suppressions=$PWD/tests/sanitizers/threads.txt:external_symbolizer_path=$ASAN_SYMBOLIZER_PATH" \
    run_tests build-threads -ts=threads
}

check_cuda() {
  build_sanitize train || return 1
  local log=build-sanitize/bn_silu.log
  # One line per kernel and architecture. It names a stack frame, and registers in memory.
  ! grep spill $log | grep -v '0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads' || return 1
  echo "$(grep -c spill $log) kernels, at most $(grep -o 'Used [0-9]*' $log | sort -k2n | tail -n 1 | tr -dc 0-9) registers, no spills"
}

check_gpu() {
  # .ci/run runs all tests with this build.
  local build=build-simulated log=build-simulated/gpu-check.log
  export YOLOX_BUILD=$build YOLOX_CMAKE_ARGS=-DYOLOX_SIMULATED_CUDA=ON
  ./setup.sh tests train eval demo export pack bench_train_step || return 1
  YOLOX_GPU_SECONDS=3600 ./gpu-check >"$log" 2>&1
  local status=$?
  [ $status = 0 ] || cat "$log"
  tail -n 1 "$log"
  [ $status = 0 ] || return $status
  .venv/bin/python bench/gpu.py --programs $build --quick --parts step --json $build/gpu.json >"$log" 2>&1 &&
    [ "$(grep -c images_per_second $build/gpu.json)" = 4 ] || { cat "$log"; return 1; }
  SIMULATED_CUDA_DEVICES=3 build-simulated/tests --device cuda \
    -tc='ranks: collectives*,ranks: SyncBN*,ranks: gradients*' >"$log" 2>&1 || { cat "$log"; return 1; }
}

run() {  # CHECK: runs it and prints its line
  local start=$SECONDS log=$logs/$1 word=ok
  "check_$1" >"$log" 2>&1 || { word=FAILED; touch "$logs/failed"; }
  [ $word = ok ] || cat "$log"
  printf '%-8s %-6s %3d s  %s\n' "$1" $word $((SECONDS - start)) "$([ $word = FAILED ] || tail -n 1 "$log")"
}

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export YOLOX_PACKAGES="clang-14 clang-tidy-14 clang-format-14 llvm-14 libclang-rt-14-dev"
start=$SECONDS
# Before the parallel checks, which need the same packages; clang-tidy needs onnx.pb.h and the precompiled header.
case "${wanted[*]}" in
  gpu | threads) ;;
  format) build_threads yolox_onnx || exit 1 ;;  # for clang-format; the smallest build
  *) build_sanitize "yolox_onnx CMakeFiles/yolox.dir/cmake_pch.hxx.pch" || exit 1 ;;
esac
for check in "${wanted[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n; done
  run "$check" &
done
wait
echo "== checks took $((SECONDS - start)) s"
[ ! -e "$logs/failed" ]
