#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds with each supported version of LibTorch, without CUDA, and runs the quick suite.
#   tests/torch_versions.sh            2.10.0 and 2.11.0
#   tests/torch_versions.sh 2.10.0     the given versions
set -euo pipefail
cd "$(dirname "$0")/.."
declare -A libraries=(  # of CUDA, that libtorch_cpu.so links
  [2.10.0]="nvidia-cuda-runtime-cu12==12.8.90 nvidia-cuda-cupti-cu12==12.8.90"
  [2.11.0]="nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85"
)
[ $# -gt 0 ] || set -- 2.10.0 2.11.0
for version; do
  build=build-torch-$version
  [ -e "$build/venv" ] || python3 -m venv "$build/venv"
  "$build/venv/bin/pip" install -q --disable-pip-version-check --no-deps "torch==$version" ${libraries[$version]}
  CMAKE_PREFIX_PATH=$(echo "$PWD/$build"/venv/lib/python3*/site-packages/torch) YOLOX_BUILD=$build YOLOX_CMAKE_ARGS=-DYOLOX_CUDA=OFF ./setup.sh tests
  tests/shards.sh "$build/tests" -- -tse=programs
done
