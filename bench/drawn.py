#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws a data set whose difficulty is known: circles, squares and triangles on a ground of blurred noise, in COCO format.

  bench/drawn.py rare DIR     photos of 160 x 160 pixels: 300 for training, in which 86 % of the objects are circles, 12 %
                              squares and 2 % triangles, and 300 for evaluation with a third of each

Needs OpenCV for Python."""
import json, pathlib, sys

import cv2
import numpy as np

CLASSES = ("circle", "square", "triangle")


def draw(rng, path, width, height, objects, sizes, shares):
    """Writes an image and returns its boxes: class, x, y, side."""
    small = rng.integers(60, 200, (height // 40, width // 40, 3), dtype=np.uint8)
    image = cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)
    image = cv2.add(image, rng.integers(0, 25, image.shape, dtype=np.uint8))
    boxes = []
    for _ in range(objects):
        kind, side = int(rng.choice(3, p=shares)), int(rng.integers(sizes[0], sizes[1] + 1))
        x, y = int(rng.integers(0, width - side)), int(rng.integers(0, height - side))
        if any(abs(x - b[1]) < max(side, b[3]) + 2 and abs(y - b[2]) < max(side, b[3]) + 2 for b in boxes):
            continue
        color = tuple(int(c) for c in (image[y + side // 2, x + side // 2].astype(int) + 90) % 256)
        if kind == 0:
            cv2.circle(image, (x + side // 2, y + side // 2), side // 2, color, -1, cv2.LINE_AA)
        elif kind == 1:
            cv2.rectangle(image, (x, y), (x + side, y + side), color, -1, cv2.LINE_AA)
        else:
            cv2.fillPoly(image, [np.array([[x + side // 2, y], [x, y + side], [x + side, y + side]])], color, cv2.LINE_AA)
        boxes.append((kind, x, y, side))
    cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, 92])
    return boxes


def write_set(folder, splits, width, height, objects, sizes):
    """splits: (name, images, share of each class)."""
    rng = np.random.default_rng(0)
    for split, count, shares in splits:
        (folder / split).mkdir(parents=True)
        (folder / "annotations").mkdir(exist_ok=True)
        coco = {"images": [], "annotations": [], "categories": [{"id": i, "name": name} for i, name in enumerate(CLASSES)]}
        for i in range(count):
            coco["images"].append({"id": i, "file_name": f"{i}.jpg", "width": width, "height": height})
            for kind, x, y, side in draw(rng, folder / split / f"{i}.jpg", width, height, objects, sizes, shares):
                coco["annotations"].append({"id": len(coco["annotations"]) + 1, "image_id": i, "category_id": kind, "bbox": [x, y, side, side],
                                            "area": side * side, "iscrowd": 0})
        (folder / "annotations" / f"{split}.json").write_text(json.dumps(coco))


def main():
    kind, folder = sys.argv[1:] if len(sys.argv) == 3 else sys.exit(__doc__)
    if kind == "rare":
        splits = [("train", 300, (0.86, 0.12, 0.02)), ("val", 300, (1 / 3, 1 / 3, 1 / 3))]
        write_set(pathlib.Path(folder), splits, 160, 160, 4, (14, 60))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
