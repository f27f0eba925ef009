#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks that a refactoring changes no output: builds two revisions, runs the same commands with both, and compares the
# SHA-256 of their outputs. Of a checkpoint, it compares the tensors and counters, not the flags. Prints one line per
# output. Exit code 1 if any differs.
#   tests/same_bytes.sh REV          compares REV with the working tree
#   tests/same_bytes.sh REV OTHER    compares REV with the revision OTHER
# Builds are kept in build-same/REVISION. Both use the LibTorch of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
[ $# -ge 1 ] || { sed -n '3,8s/^# //p' "$0"; exit 2; }

# build REV: builds a revision and prints the folder of its programs. REV "" is the working tree.
build() {
  if [ -z "$1" ]; then
    ./setup.sh train eval demo export >&2
    echo "$root/${YOLOX_BUILD:-build}"
    return
  fi
  local rev folder
  rev=$(git rev-parse --short "$1^{commit}")
  folder=$root/build-same/$rev
  if [ ! -e "$folder/build/train" ]; then
    git worktree add --force --detach "$folder" "$rev" >&2
    [ ! -e .venv ] || ln -sfn "$root/.venv" "$folder/.venv"
    (cd "$folder" && ./setup.sh train eval demo export >&2)
  fi
  echo "$folder/build"
}

# outputs PROGRAMS FOLDER: runs all commands in FOLDER, and prints the SHA-256 and the name of each output.
outputs() {
  local programs=$1 folder=$2 name
  rm -rf "$folder"
  mkdir -p "$folder"
  cd "$folder"
  export OMP_NUM_THREADS=1
  local common="--data shapes --model yolox-nano --size 64 --bs 4 --epochs 2 --max-iters 12 --eval-interval 0"
  common+=" --deterministic --device cpu"
  run() { "$programs/$@" >"$folder/log" 2>&1 || { cat "$folder/log" >&2; echo "error: $* failed" >&2; exit 1; }; }
  run train $common --out plain
  run train $common --procs 2 --out ranks
  run train $common --procs 2 --accum 2 --no-sync-bn --out ranks_accum
  run train $common --dtr 0.038 --out dtr
  run train $common --accum 2 --out accum
  run train $common --amp bf16 --optimizer adamw --lr 0.0001 --out bf16
  run train $common --amp fp16 --clip 1 --out fp16
  run train $common --freeze backbone --out frozen
  run train ${common/12/5} --out resumed
  run train --resume resumed --max-iters 12
  run train ${common/--eval-interval 0/--eval-interval 1 --conf 0.001} --out evaluated
  run eval --data shapes --weights evaluated/best.pth --conf 0.001 --json eval.json --device cpu
  run demo --source shapes --weights plain/last.pth --max-images 6 --conf 0.005 --save demo --json demo.json --device cpu
  run export --weights plain/last.pth --out model.onnx --nms --dynamic
  # An ONNX file contains the git revision.
  protoc --decode_raw <model.onnx | grep -vE '^  2: "[0-9a-f]{7,}[^"]*"$' >onnx.txt
  # Times differ between runs.
  sed -i -E 's/,"error_analysis":.*/}/; s/"(seconds|load|preprocess|forward|decode|nms|images_per_second)[a-z_]*": ?[0-9.e+-]+/"\1": 0/g' eval.json
  python3 "$root/tests/same_bytes.py" */*.pth evaluated/metrics.csv
  sha256sum eval.json demo.json onnx.txt
  find demo -type f | sort | xargs sha256sum
}

first=$(build "$1")
second=$(build "${2:-}")
mkdir -p "$root/build-same"
(outputs "$first" "$root/build-same/first") >"$root/build-same/first.sha256"
(outputs "$second" "$root/build-same/second") >"$root/build-same/second.sha256"
python3 - "$root/build-same/first.sha256" "$root/build-same/second.sha256" <<'END'
import sys
first, second = ({line.split()[1]: line.split()[0] for line in open(path)} for path in sys.argv[1:])
names = list(first) + [name for name in second if name not in first]
differ = [name for name in names if first.get(name) != second.get(name)]
for name in names:
    print('differs' if name in differ else 'same   ', first.get(name, 'missing')[:12], second.get(name, 'missing')[:12], name)
print('%d outputs, %d differ' % (len(names), len(differ)))
sys.exit(bool(differ) or not names)
END
