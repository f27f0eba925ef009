#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the training step of our program and of the Python YOLOX (pixeltable-yolox of pip), in turn, and the
ratio of our time to that of each Python variant.

  pip install pixeltable-yolox==0.4.3 torch==2.15.0     into the Python that runs this file
  cmake --build build --target bench_train_step
  python bench/train_step.py [--build build] [--rounds 3] [--amp off,bf16] [--variants tuned,compiled]

A step is forward, loss, backward, SGD and EMA, with the same torch version, threads, input size, batch size and number
of objects. Variants of Python: `tuned` has channels-last weights and images, fused SGD and an EMA by foreach operators;
`compiled` is `tuned` with torch.compile of backbone and neck. A round is one process
of ours and one of each variant. The start-up time is the time from exec to the end of the first step, without
torch.compile.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from gpu import peer_step

CASES = [("yolox-nano", 416, 8), ("yolox-s", 640, 2)]


def run(command):
    start = time.perf_counter()
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return json.loads(text.strip().splitlines()[-1]), time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--amp", default="off,bf16", help="precisions")
    parser.add_argument("--variants", default="tuned,compiled", help="of the Python step")
    parser.add_argument("--peer", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        import torch
        torch.set_num_threads(args.threads)
        variant, amp, model = args.peer[:3]
        size, batch, steps = map(int, args.peer[3:])
        return peer_step(model, size, batch, amp, steps, "cpu", compiled=variant == "compiled")

    def measure(who, amp, model, size, batch, steps):
        if who == "ours":
            flags = dict(model=model, size=size, bs=batch, steps=steps, threads=args.threads, amp=amp)
            return run([f"{args.build}/bench_train_step"] + [f"--{k}={v}" for k, v in flags.items()])
        case = [who, amp, model, *map(str, (size, batch, steps))]
        return run([sys.executable, __file__, f"--threads={args.threads}", "--peer", *case])

    programs = ["ours"] + args.variants.split(",")

    def row(name, unit, rounds):
        """rounds: for each round, one value per program."""
        cells = [f"{statistics.median(r[0] for r in rounds):.3f} {unit}"]
        for i in range(1, len(rounds[0])):
            ratios = sorted(r[0] / r[i] for r in rounds)
            cells.append(f"{statistics.median(r[i] for r in rounds):.3f} {unit}: {statistics.median(ratios):.2f} "
                         f"({ratios[0]:.2f} to {ratios[-1]:.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)

    print(f"{args.threads} threads, {args.rounds} rounds, medians; ratio of ours to Python's (min to max)\n")
    print("| | ours | " + " | ".join(args.variants.split(",")) + " |")
    print("|---" * (len(programs) + 1) + "|")
    for amp in args.amp.split(","):
        for model, size, batch in CASES:
            case = (amp, model, size, batch)
            rounds = [[measure(who, *case, args.steps)[0] for who in programs] for _ in range(args.rounds)]
            name = f"{model} {size} batch {batch}, {'float32' if amp == 'off' else amp}"
            row(f"{name}: step", "s", [[statistics.median(p["seconds"]) for p in r] for r in rounds])
            row(f"{name}: peak memory of the process", "GB", [[p["peak_bytes"] / 1e9 for p in r] for r in rounds])
    started = [who for who in programs if who != "compiled"]
    case = ("off", *CASES[0])
    row(f"{CASES[0][0]}: start to the end of the first step", "s",
        [[measure(who, *case, 0)[1] for who in started] for _ in range(args.rounds)])


if __name__ == "__main__":
    main()
