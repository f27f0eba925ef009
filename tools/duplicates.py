#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finds images that a data set has twice, in one split or in both, and boxes of two classes on the same object.

  .venv/bin/pip install opencv-python-headless
  tools/duplicates.py DIR/annotations/train.json DIR/annotations/val.json       COCO
  tools/duplicates.py DIR/images/train DIR/images/val                           YOLO

Similar images are scaled or recompressed copies, and neighbouring frames of a video: their difference hashes differ
in at most 3 of 64 bits. If they are in both splits, AP is too high: move them into one. The exit code is 1 then."""
import argparse, collections, itertools, sys

import cv2

from read_data import read_data


def difference_hash(path):
    """Returns 64 bits: at 8 x 8 places, whether the place to the right is brighter. Returns None without contrast."""
    image = cv2.imread(path, cv2.IMREAD_GRAYSCALE)
    if image is None:
        print(f"warning: {path} cannot be read")
        return None
    small = cv2.resize(image, (9, 8), interpolation=cv2.INTER_AREA)
    bits = (small[:, 1:] > small[:, :-1]).flatten()
    return int("".join(str(int(bit)) for bit in bits), 2) if small.std() >= 4 else None


def iou(a, b):
    width = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    height = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    both = max(0, width) * max(0, height)
    return both / max(a[2] * a[3] + b[2] * b[3] - both, 1e-9)


def show(heading, lines):
    print(f"{heading}: {len(lines)}" + "".join("\n  " + line for line in lines))


p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("data", nargs="+", help="COCO JSON file or YOLO folder of each split")
p.add_argument("--images", help="folder of the images of the JSON files [below the folder of the data set]")
p.add_argument("--iou", type=float, default=0.8, help="of boxes on the same object [0.8]")
args = p.parse_args()
sets = [read_data(source, args.images) for source in args.data]
seen, buckets, within, across = [], collections.defaultdict(list), [], []
for split, data in enumerate(sets):
    for image in data["images"]:
        look = difference_hash(image["file_name"])
        if look is None:
            continue
        # Of four parts of 16 bits, at least one is equal if at most three bits differ.
        parts = [(k, look >> 16 * k & 0xffff) for k in range(4)]
        near = sorted({i for part in parts for i in buckets[part] if bin(seen[i][0] ^ look).count("1") <= 3})
        if near:
            _, other, name = seen[near[0]]
            (within if other == split else across).append(f"{name} and {image['file_name']}")
        for part in parts:
            buckets[part].append(len(seen))
        seen.append((look, split, image["file_name"]))
show("images of one split that look alike", within)
show("images of different splits that look alike (AP is too high)", across)
for source, data in zip(args.data, sets):
    names, pairs = {c["id"]: c["name"] for c in data["categories"]}, collections.Counter()
    for annotations in data["of_image"].values():
        for a, b in itertools.combinations(annotations, 2):
            if a["category_id"] != b["category_id"] and iou(a["bbox"], b["bbox"]) >= args.iou:
                pairs[tuple(sorted(names[x["category_id"]] for x in (a, b)))] += 1
    show(f"{source}: classes with boxes on the same object",
         [f"{a} and {b}: {count} times" for (a, b), count in pairs.most_common()])
sys.exit(1 if across else 0)
