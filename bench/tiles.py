#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""AP of small objects in large images, with and without tiles.

  bench/tiles.py [--build build] [--seeds 3]

Draws photos of 4000 x 3000 pixels with circles, squares and triangles of 10 to 40 pixels on a ground of blurred noise, 6 for
training and 4 for evaluation. Fine-tunes yolox-nano at 416 pixels on whole images, and on tiles (./pack --tiles), with about
the same number of steps. Evaluates each on whole images, without and with --tile. Needs OpenCV for Python."""
import argparse, json, os, pathlib, statistics, subprocess

import cv2
import numpy as np

WIDTH, HEIGHT, OBJECTS, TILE = 4000, 3000, 120, 416


def draw(rng, path):
    """Writes an image and returns its boxes: class, x, y, w, h."""
    small = rng.integers(60, 200, (HEIGHT // 40, WIDTH // 40, 3), dtype=np.uint8)
    image = cv2.resize(small, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    image = cv2.add(image, rng.integers(0, 25, image.shape, dtype=np.uint8))
    boxes = []
    for _ in range(OBJECTS):
        kind, size = int(rng.integers(0, 3)), int(rng.integers(10, 41))
        x, y = int(rng.integers(0, WIDTH - size)), int(rng.integers(0, HEIGHT - size))
        if any(abs(x - b[1]) < size + b[3] and abs(y - b[2]) < size + b[4] for b in boxes):
            continue
        ground = image[y + size // 2, x + size // 2].astype(int)
        color = tuple(int(c) for c in (ground + 90) % 256)
        if kind == 0:
            cv2.circle(image, (x + size // 2, y + size // 2), size // 2, color, -1, cv2.LINE_AA)
        elif kind == 1:
            cv2.rectangle(image, (x, y), (x + size, y + size), color, -1, cv2.LINE_AA)
        else:
            cv2.fillPoly(image, [np.array([[x + size // 2, y], [x, y + size], [x + size, y + size]])], color, cv2.LINE_AA)
        boxes.append((kind, x, y, size, size))
    cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, 92])
    return boxes


def write_set(folder):
    rng = np.random.default_rng(0)
    for split, count in ("train", 6), ("val", 4):
        (folder / split).mkdir(parents=True)
        (folder / "annotations").mkdir(exist_ok=True)
        coco = {"images": [], "annotations": [], "categories": [{"id": i, "name": n} for i, n in enumerate(("circle", "square", "triangle"))]}
        for i in range(count):
            coco["images"].append({"id": i, "file_name": f"{i}.jpg", "width": WIDTH, "height": HEIGHT})
            for kind, x, y, w, h in draw(rng, folder / split / f"{i}.jpg"):
                coco["annotations"].append({"id": len(coco["annotations"]) + 1, "image_id": i, "category_id": kind, "bbox": [x, y, w, h],
                                            "area": w * h, "iscrowd": 0})
        (folder / "annotations" / f"{split}.json").write_text(json.dumps(coco))


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
        write_set(data)
        run(f"{args.build}/pack", "--data", data, "--tiles", TILE, "--out", packed)
    rows = {}
    for seed in range(args.seeds):
        # 6 whole images, or about 900 tiles: 240 epochs or 2, of 1 or 110 steps.
        for name, source, epochs in ("whole images", data, 240), ("tiles", packed, 2):
            folder = args.out / f"{name.split()[0]}-{seed}"
            run(f"{args.build}/train", "--data", source, "--model", "yolox-nano", "--weights", weights, "--size", TILE, "--bs", 8,
                "--epochs", epochs, "--eval-interval", 0, "--no-multiscale", "--seed", seed, "--out", folder)
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
