#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""AP of small objects in large images, with and without tiles.

  bench/tiles.py [--build build] [--seeds 3]

Draws the photos of "bench/drawn.py large". Fine-tunes yolox-nano at 416 pixels on whole images, and on tiles (./pack --tiles),
with about the same number of steps. Evaluates each on whole images, without and with --tile. Needs OpenCV for Python."""
import argparse, json, os, pathlib, statistics, subprocess, sys

TILE = 416


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/tiles"))
    args = p.parse_args()
    weights = pathlib.Path(os.environ.get("YOLOX_SHARED", "../shared")) / "data/weights/yolox_nano_coco_v011_rebuilt.pth"

    def run(*command):
        subprocess.run([str(c) for c in command], check=True, stdout=subprocess.DEVNULL)

    data, packed = args.out / "data", args.out / "tiles.lmdb"
    if not packed.exists():
        run(sys.executable, pathlib.Path(__file__).parent / "drawn.py", "large", data)
        run(f"{args.build}/pack", "--data", data, "--tiles", TILE, "--out", packed)
    rows = {}
    for seed in range(args.seeds):
        # 6 whole images, or about 650 tiles: 160 epochs or 2, of 1 or 81 steps.
        for name, source, epochs in ("whole images", data, 160), ("tiles", packed, 2):
            folder = args.out / f"{name.split()[0]}-{seed}"
            run(f"{args.build}/train", "--data", source, "--model", "yolox-nano", "--weights", weights, "--size", TILE, "--bs", 8,
                "--epochs", epochs, "--eval-interval", 0, "--cache", "ram", "--no-multiscale", "--seed", seed, "--out", folder)
            for way, flags in ("whole", []), ("tiles", ["--tile", TILE]):
                result = folder / f"{way}.json"
                run(f"{args.build}/eval", "--data", data, "--weights", folder / "last.pth", "--json", result, "--report=", *flags)
                rows.setdefault((name, way), []).append(json.loads(result.read_text())["AP"])
                print(name, way, seed, round(rows[name, way][-1], 3), flush=True)
    print("| trained on | AP, whole images | AP, --tile |\n|---|---|---|")
    for name in "whole images", "tiles":
        cells = [f"{statistics.mean(v):.3f} ± {statistics.stdev(v):.3f}" if len(v) > 1 else f"{v[0]:.3f}" for v in (rows[name, w] for w in ("whole", "tiles"))]
        print(f"| {name} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
