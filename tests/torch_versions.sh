#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds with each supported version of LibTorch, without CUDA and without optimisation, and runs the quick suite.
#   tests/torch_versions.sh            all versions
#   tests/torch_versions.sh 2.10.0     the given versions
set -euo pipefail
cd "$(dirname "$0")/.."
eval "$(sed -n '/^cuda_13_0=/,/^)/p' setup.sh)"  # the versions, and the libraries that they link
[ $# -gt 0 ] || set -- "${!linked[@]}"
for version; do
  build=build-torch-$version
  [ -e "$build/venv" ] || python3 -m venv "$build/venv"
  "$build/venv/bin/pip" install -q --disable-pip-version-check --no-deps "torch==$version" ${linked[$version]}
  CMAKE_PREFIX_PATH=$(echo "$PWD/$build"/venv/lib/python3*/site-packages/torch) YOLOX_BUILD=$build YOLOX_CMAKE_ARGS="-DYOLOX_CUDA=OFF -DCMAKE_BUILD_TYPE=None" ./setup.sh tests
  tests/shards.sh "$build/tests" -- -tse=programs
done
