#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures how long an edit takes to compile, without a compiler cache: from a change in loss.hpp to ./train, beside the
# smallest program with torch and the same precompiled header; and all programs and tests from scratch.
#   bench/edit.sh           both; the second takes some minutes
#   bench/edit.sh edit      the first only
# Run it on a quiet machine. The build is in build-edit.
set -euo pipefail
cd "$(dirname "$0")/.."
export CCACHE_DISABLE=1 YOLOX_BUILD=build-edit
TIMEFORMAT='%R %U %S'

# seconds TARGET SOURCE: touches the source, builds the target, and prints wall and CPU seconds.
seconds() {
  touch "$2"
  { time cmake --build $YOLOX_BUILD --target "$1" >/dev/null; } 2>&1 | awk '{print $1, $2 + $3}'
}
# best TARGET SOURCE: the least of three.
best() {
  for _ in 1 2 3; do seconds "$1" "$2"; done | sort -n | head -n 1
}

if [ "${1:-}" != edit ]; then
  rm -rf $YOLOX_BUILD
  start=$SECONDS
  ./setup.sh all
  echo "from scratch: all programs and tests in $((SECONDS - start)) s on $(nproc) cores (aim: 240 s)"
fi
./setup.sh train bench_hello >/dev/null
read -r hello hello_cpu <<<"$(best bench_hello bench/bench_hello.cpp)"
read -r edit edit_cpu <<<"$(best train loss.hpp)"
echo "hello-world with torch: $hello s, $hello_cpu s of CPU time"
echo "./train after a change in loss.hpp: $edit s, $edit_cpu s of CPU time"
awk "BEGIN {printf \"ratio: %.2f (CPU time: %.2f; aim: 3.3)\n\", $edit / $hello, $edit_cpu / $hello_cpu}"
