#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Benchmarks on the GPU of this machine: builds the programs, or takes those of a folder, and runs bench/gpu.py, which prints
# tables in the form of bench/RESULTS.md and writes JSON. Takes less than 8 minutes on a data-centre card.
#   bench/gpu.sh                              in a clone
#   bench/gpu.sh --data DIR --json gpu.json   with your images for the loader, training and evaluation
#   bench/gpu.sh --programs DIR               with programs that were built elsewhere
# For the columns of the Python YOLOX, give a Python that has it: YOLOX_PYTHON=peer/bin/python bench/gpu.sh
#   python3 -m venv peer && peer/bin/pip install pixeltable-yolox==0.4.3 torch==2.15.0
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
programs=()
if [[ " $* " != *" --programs"* ]]; then
  cd "$here/.."
  ./setup.sh train eval bench_train_step bench_dtr bench_loader
  programs=(--programs "${YOLOX_BUILD:-build}")
fi
exec "${YOLOX_PYTHON:-python3}" "$here/gpu.py" "${programs[@]}" "$@"
