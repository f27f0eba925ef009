#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what only some tests need. What failed once, as it does offline, is not tried again. Run setup.sh before.
#   tests/install.sh BUILD
set -uo pipefail
cd "$(dirname "$0")/.."
build=$1
mkdir -p "$build/tried"
install() {  # NAME COMMAND...
  [ ! -e "$build/tried/$1" ] || return 1
  echo "== installing $1"
  touch "$build/tried/$1"
  "${@:2}" >/dev/null 2>&1 </dev/null
}
from_debian() {
  local quick="-qq -o Acquire::Retries=0 -o Acquire::http::Timeout=10 -o Acquire::https::Timeout=10"
  [ "$(id -u)" = 0 ] && command -v apt-get && apt-get $quick update &&
    DEBIAN_FRONTEND=noninteractive apt-get $quick install -y --no-install-recommends "$1"
}
# What scripts and tests import.
venv=.venv/bin/python
from_pypi() {
  { [ -x $venv ] || python3 -m venv .venv; } &&
    $venv -m pip install -q --disable-pip-version-check --retries 0 --timeout 10 "$1"
}
while read -r package module; do
  "${PYTHON:-$venv}" -c "import $module" >/dev/null 2>&1 || install $package from_pypi $package ||
    echo "there is no $package: tests that need it are skipped; type: $venv -m pip install $package"
done <<END
onnxruntime onnxruntime
opencv-python-headless cv2
pyyaml yaml
matplotlib matplotlib
pycocotools pycocotools
END
ls -d .venv/lib/python3*/site-packages/nvidia/nccl >/dev/null 2>&1 ||
  echo "LibTorch in .venv is without the libraries of CUDA: tests that start torchrun or import torch are skipped; type: $venv -m pip install torch"
# Some tests make two hosts out of network namespaces.
has_any() { PATH=$PATH:/usr/sbin command -v "$@" >/dev/null; }
while read -r package programs; do
  has_any $programs || install $package from_debian $package ||
    echo "there is no $package: tests that need it are skipped; type: apt-get install $package"
done <<END
iproute2 ip
END
