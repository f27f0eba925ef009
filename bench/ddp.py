#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times training on two ranks and on one rank with the same total batch size and
the same cores, alternately, and the ratio of each pair. Also measures how much
of the gradient all-reduce overlaps with backward.

    cmake --build build --target bench_ddp
    python bench/ddp.py [--build build] [--pairs 4]

Step: forward, loss, backward, all-reduce, clipping, SGD and EMA, with SyncBN.
Overlapped: part of the time of an all-reduce after backward that the Reducer
saves, because it all-reduces during backward; without SyncBN, whose all-reduces
also wait.
"""
import argparse
import json
import statistics
import subprocess

CASES = [("yolox-nano", 416, 8), ("yolox-s", 416, 4)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    a = parser.parse_args()

    def measure(model, size, batch, ranks):
        flags = dict(model=model, size=size, bs=batch, ranks=ranks, steps=a.steps)
        text = subprocess.run([f"{a.build}/bench_ddp"] + [f"--{k}={v}" for k, v in flags.items()],
                              check=True, capture_output=True, text=True).stdout
        return json.loads(text.strip().splitlines()[-1])

    print(f"{a.pairs} pairs, medians\n")
    print("| | 2 ranks | 1 rank | ratio (min to max over the pairs) | gradients | all-reduce after backward | "
          "during backward | overlapped |\n|---|---|---|---|---|---|---|---|")
    for model, size, batch in CASES:
        pairs = [(measure(model, size, batch, 2), measure(model, size, batch, 1)) for _ in range(a.pairs)]
        ratios = sorted(two["step"] / one["step"] for two, one in pairs)
        two, one = (statistics.median(p[i]["step"] for p in pairs) for i in (0, 1))
        alone, then, during = (statistics.median(p[0][k] for p in pairs) for k in ("alone", "then", "during"))
        hidden = f"{100 * (then - during) / (then - alone):.0f} %" if then > 1.05 * alone else "too short to measure"
        print(f"| {model} {size} batch {batch} | {two:.3f} s | {one:.3f} s | {statistics.median(ratios):.2f} "
              f"({ratios[0]:.2f} to {ratios[-1]:.2f}) | {pairs[0][0]['gradient_bytes'] / 1e6:.1f} MB | "
              f"{1e3 * (then - alone):+.0f} ms | {1e3 * (during - alone):+.0f} ms | {hidden} |", flush=True)


if __name__ == "__main__":
    main()
