#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the throughput of our data loader and of the Python YOLOX (pixeltable-yolox of pip), alternately, and the
ratio of each pair. Unit: complete training samples (mosaic, MixUp, affine, HSV jitter, letterbox) per second.

  pip install pixeltable-yolox==0.4.3 torch==2.15.0     into the Python that runs this file
  cmake --build build --target bench_loader
  python bench/loader.py --data ../shared/data/coco128_json [--build build] [--rounds 3]
"""
import argparse
import json
import subprocess
import sys
import time

SIZE, BATCH, SECONDS = 640, 16, 12


def peer(data, workers):
    """Measures the Python YOLOX and prints JSON. Runs in a process of its own."""
    import glob
    import os

    import torch
    from yolox.config import YoloxConfig

    torch.set_num_threads(1)
    config = YoloxConfig.get_named_config("yolox-s")
    config.data_dir = data
    config.train_ann = os.path.basename(glob.glob(os.path.join(data, "annotations", "*train*.json"))[0])
    config.train_img_dir = os.path.basename(os.path.dirname(glob.glob(os.path.join(data, "*", "*.jpg"))[0]))
    config.input_size = (SIZE, SIZE)
    config.data_num_workers = workers
    loader = iter(config.get_data_loader(BATCH, False))
    for _ in range(4):
        next(loader)
    start, images = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        images += next(loader)[0].shape[0]
    print(json.dumps({"images_per_second": images / (time.perf_counter() - start)}), flush=True)
    os._exit(0)  # the worker processes of the loader do not exit


def run(command):
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return json.loads(out.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--build", default="build")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", default="2", help="numbers of threads of ours and of workers of Python, such as 1,2 [2]")
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        peer(args.data, args.peer)
    for threads in map(int, args.threads.split(",")):
        measure(args, threads)


def measure(args, threads):
    caches = ["none", "ram"]
    rows = {c: [] for c in caches}
    for _ in range(args.rounds):
        theirs = run([sys.executable, __file__, "--data", args.data, "--peer", str(threads)])["images_per_second"]
        for c in caches:
            ours = run([args.build + "/bench_loader", args.data, str(SIZE), str(BATCH), str(threads), str(SECONDS), c])
            rows[c].append((ours, theirs))
    print(f"{SIZE} px, batches of {BATCH}, {threads} threads or workers, {args.rounds} rounds\n")
    print("| | ours | Python | ratio (min to max) |\n|---|---|---|---|")
    middle = lambda values: sorted(values)[len(values) // 2]
    for c in caches:
        ratios = [o["images_per_second"] / t for o, t in rows[c]]
        print(f"| {'from JPEG files' if c == 'none' else '--cache ' + c}: samples per second "
              f"| {middle([o['images_per_second'] for o, _ in rows[c]]):.0f} | {middle([t for _, t in rows[c]]):.0f} "
              f"| {middle(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")
    print("\nStages of one sample of ours on one thread, ms:")
    for c in caches:
        parts = {k: middle([o[k] for o, _ in rows[c]]) for k in rows[c][0][0]}
        rest = parts["sample_ms"] - parts["decode_ms"] - parts["warp_ms"] - parts["colour_ms"]
        print(f"  {c}: decode {parts['decode_ms']:.2f}, warp and mix {parts['warp_ms']:.2f}, colour {parts['colour_ms']:.2f}, "
              f"assembly and waiting {rest:.2f}; decoding alone would allow {1000 * threads / parts['decode_ms']:.0f} samples/s")


if __name__ == "__main__":
    main()
