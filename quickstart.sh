#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs, builds, trains yolox-nano on the built-in scenes (--data shapes), evaluates it, and draws its detections.
# Takes some minutes, and prints at the end how many for each part. Ctrl-C during the training ends it early; what it
# has learned is evaluated. A second run needs no network.
set -euo pipefail
[ $# = 0 ] || { sed -n '3,/^set/s/^# \?//p' "$0"; exit; }
cd "$(dirname "$0")"
run=runs/quickstart times=()
part() {
  [ -z "${part:-}" ] || times+=("$part $((SECONDS - since)) s")
  part=$1 since=$SECONDS
}

part "installing and building train"
./setup.sh train
nice ./setup.sh eval demo >"build/quickstart.log" 2>&1 &  # the training leaves a core for it
others=$!

part training
rm -rf "$run"
echo "== training yolox-nano on the built-in shapes (about 2 minutes on 2 cores)"
./train --data shapes --model yolox-nano --size 128 --bs 8 --epochs 4 --lr 0.004 --recipe finetune --mosaic-prob 0 \
  --eval-interval 2 --out "$run"
weights=$run/best.pth
[ -e "$weights" ] || weights=$run/last.pth

part "building eval and demo"
wait $others || { cat build/quickstart.log; exit 1; }

part evaluating
echo "== evaluating $weights"
./eval --data shapes --weights "$weights" --json "$run/eval.json"

part drawing
echo "== drawing the detections"
./demo --source shapes --weights "$weights" --save "$run/pictures" --max-images 8

part end
echo
echo "Checkpoint: $weights      Log: $run/log.txt      Metrics: $run/eval.json"
echo "Curves, errors, worst images: $run/report.html (open it in a browser)"
echo "Images with detections: $run/pictures"
printf -v list ', %s' "${times[@]}"
echo "Time: ${list:2}"
echo "Next: ./train --help, and the README for your own data"
