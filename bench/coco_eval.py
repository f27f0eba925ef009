# SPDX-License-Identifier: Apache-2.0
"""Times COCO evaluation, from JSON files to the 12 metrics: our C++,
faster-coco-eval and ultrafast-pycocotools of pip, in turn, and the ratios.

    python bench/coco_eval.py --program build/bench_coco_eval [--rounds 5]
        [--images 5000] [--detections 500000]

This Python needs numpy, pycocotools and the packages of PEERS. The data set is
synthetic, seeded, and has the size of COCO val2017: ground truths with the
size distribution of COCO, detections that are jittered ground truths and noise.
"""
import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

PEERS = ["faster-coco-eval", "ultrafast-pycocotools"]
KEYS = "AP AP50 AP75 APs APm APl AR1 AR10 AR100 ARs ARm ARl".split()


def make_data(folder, images, truths, detections, classes, seed=0):
    rng = np.random.default_rng(seed)
    # Few classes are frequent, as in COCO, and an image contains at most 4 classes.
    frequency = 1.0 / np.arange(1, classes + 1)
    frequency /= frequency.sum()
    present = [rng.choice(classes, size=4, p=frequency) for _ in range(images)]
    image = rng.integers(0, images, truths)
    category = np.array([rng.choice(present[i]) for i in image])
    size = np.exp(rng.normal(4.0, 1.0, truths)).clip(4, 400)  # side in pixels
    aspect = np.exp(rng.normal(0, 0.4, truths))
    w, h = (size * aspect).clip(2, 600), (size / aspect).clip(2, 440)
    x, y = rng.random(truths) * (640 - w), rng.random(truths) * (480 - h)
    crowd = rng.random(truths) < 0.012
    boxes = np.stack([x, y, w, h], 1).round(2)
    gt = {
        "images": [{"id": int(i) * 7 + 1, "file_name": f"{i:012d}.jpg", "width": 640, "height": 480}
                   for i in rng.permutation(images)],
        "categories": [{"id": k + 1, "name": f"class {k}"} for k in range(classes)],
        "annotations": [{"id": n + 1, "image_id": int(image[n]) * 7 + 1, "category_id": int(category[n]) + 1,
                         "bbox": boxes[n].tolist(), "area": float(round(boxes[n, 2] * boxes[n, 3] * 0.7, 4)),
                         "iscrowd": int(crowd[n])} for n in range(truths)],
    }
    # A third of the detections are jittered ground truths, whose score falls with the jitter. The others are noise.
    around = rng.integers(0, truths, detections // 3)
    jitter = np.abs(rng.normal(0, 0.25, len(around)))
    wh = boxes[around][:, [2, 3]]
    near = boxes[around].copy()
    near[:, :2] += rng.normal(0, 1, wh.shape) * jitter[:, None] * wh * 0.5
    near[:, 2:] *= np.exp(rng.normal(0, 1, wh.shape) * jitter[:, None] * 0.5)
    near_category = np.where(rng.random(len(around)) < 0.9, category[around], rng.integers(0, classes, len(around)))
    near_score = (np.exp(-3 * jitter) * rng.random(len(around)) ** 0.5).clip(0.01, 1)
    far_count = detections - len(around)
    far_image = rng.integers(0, images, far_count)
    far_category = np.array([present[i][k] for i, k in zip(far_image, rng.integers(0, 4, far_count))])
    far = np.stack([rng.random(far_count) * 600, rng.random(far_count) * 440,
                    np.exp(rng.normal(4, 1, far_count)), np.exp(rng.normal(4, 1, far_count))], 1)
    far_score = 0.01 + 0.5 * rng.random(far_count) ** 4
    rows = list(zip(np.concatenate([image[around], far_image]), np.concatenate([near_category, far_category]),
                    np.concatenate([near, far]).astype(np.float32), np.concatenate([near_score, far_score])))
    rows.sort(key=lambda row: (row[0], -row[3]))  # by image, best score first, as an evaluation writes them
    dt = [{"image_id": int(i) * 7 + 1, "category_id": int(c) + 1, "bbox": [float(v) for v in box],
           "score": float(np.float32(s))} for i, c, box, s in rows]
    paths = os.path.join(folder, "gt.json"), os.path.join(folder, "dt.json")
    for path, content in zip(paths, (gt, dt)):
        with open(path, "w") as file:
            json.dump(content, file)
    return paths


def run_python(package, gt_path, dt_path):
    """Returns the seconds from files to metrics, without imports, and the 12 metrics."""
    if package == "pycocotools":
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval as Eval
    elif package == "ultrafast-pycocotools":
        from ultrafast_pycocotools import COCO, COCOeval as Eval
    else:
        from faster_coco_eval import COCO, COCOeval_faster as Eval
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        start = time.perf_counter()
        gt = COCO(gt_path)
        evaluation = Eval(gt, gt.loadRes(dt_path), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        return time.perf_counter() - start, [float(v) for v in evaluation.stats[:12]]


def run_ours(program, gt_path, dt_path):
    """Returns the seconds of the whole process including its start, its JSON report, and the 12 metrics."""
    start = time.perf_counter()
    done = subprocess.run([program, "--gt", gt_path, "--dt", dt_path], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        sys.exit(done.stderr)
    report = json.loads(done.stdout)
    return seconds, report, report["stats"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--truths", type=int, default=36800)
    parser.add_argument("--detections", type=int, default=500000)
    parser.add_argument("--classes", type=int, default=80)
    parser.add_argument("--no-pycocotools", action="store_true", help="do not compare the metrics with pycocotools")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = make_data(folder, args.images, args.truths, args.detections, args.classes)
        print(f"{args.images} images, {args.truths} ground truths, {args.detections} detections, "
              f"{args.classes} classes, {os.cpu_count()} cores\n")
        print("| from files to the 12 numbers | time | ours / this (min to max) |\n|---|---|---|")
        ours, theirs = [], {peer: [] for peer in PEERS}
        for _ in range(args.rounds):
            ours.append(run_ours(args.program, *paths))
            for peer in PEERS:
                theirs[peer].append(run_python(peer, *paths)[0])
        seconds = [run[0] for run in ours]
        stats = ours[0][2]
        parts = [f"{statistics.median(run[1][k] for run in ours):.3f}" for k in ("read_gt", "read_dt", "evaluate")]
        print(f"| ours: ground truth {parts[0]}, detections {parts[1]}, evaluation {parts[2]} s | {statistics.median(seconds):.3f} s | |")
        for peer in PEERS:
            ratios = sorted(x / y for x, y in zip(seconds, theirs[peer]))
            print(f"| {peer} | {statistics.median(theirs[peer]):.3f} s | "
                  f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |")
        if not args.no_pycocotools:
            seconds, exact = run_python("pycocotools", *paths)
            print(f"pycocotools ({seconds:.1f} s):")
            for key, x, y in zip(KEYS, stats, exact):
                print(f"  {key:6} ours {x:.6f}  pycocotools {y:.6f}  difference {abs(x - y):.1e}")


if __name__ == "__main__":
    main()
