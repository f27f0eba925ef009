#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs, builds, trains yolox-nano on the built-in scenes (--data shapes), evaluates it, and draws its detections.
# Takes some minutes. A second run needs no network.
set -euo pipefail
cd "$(dirname "$0")"
./setup.sh train eval demo
run=runs/quickstart
rm -rf "$run"

echo "== training yolox-nano on the built-in shapes (about 3 minutes on 2 cores)"
./train --data shapes --model yolox-nano --size 160 --bs 8 --epochs 10 --recipe finetune --mosaic-prob 0 \
  --eval-interval 5 --out "$run"

echo "== evaluating the best checkpoint"
./eval --data shapes --weights "$run/best.pth" --json "$run/eval.json"

echo "== drawing the detections"
./demo --source shapes --weights "$run/best.pth" --save "$run/pictures" --max-images 8

echo
echo "Checkpoint: $run/best.pth      Log: $run/log.txt      Metrics: $run/eval.json"
echo "Curves, errors, worst images: $run/report.html (open it in a browser)"
echo "Images with detections: $run/pictures"
echo "Next: ./train --help, and the README for your own data"
