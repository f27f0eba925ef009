#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of logging (log, metrics, TensorBoard, remarks) and of checkpoints, in percent of the step time.

    python bench/overhead.py [--train build/train] [--rounds 3]

Reads both times from the table of ./train --profile. Counts one checkpoint per epoch of 125 steps, as for
--data shapes, and one every 10 minutes.
"""
import argparse
import re
import statistics
import subprocess
import tempfile


def profile(train, model, size, batch):
    with tempfile.TemporaryDirectory() as folder:
        text = subprocess.run(
            [train, "--data", "shapes", "--model", model, "--size", str(size), "--bs", str(batch),
             "--no-multiscale", "--profile", "--out", folder + "/r"],
            check=True, capture_output=True, text=True).stdout
    row = r"^{} +([\d.]+) +[\d.]+ +[\d.]+% +([\d.]+)$"
    parts = {name: re.search(row.format(name), text, re.M).groups() for name in ("logging", "saving", "step")}
    step = float(parts["step"][0]) - float(parts["saving"][0])
    save = float(parts["saving"][0]) / float(parts["saving"][1])
    return step, float(parts["logging"][0]), save


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--train", default="build/train")
    arguments.add_argument("--rounds", type=int, default=3)
    a = arguments.parse_args()
    for model, size, batch in (("yolox-nano", 416, 8), ("yolox-s", 640, 2)):
        rounds = [profile(a.train, model, size, batch) for _ in range(a.rounds)]
        step, logging, save = (statistics.median(values) for values in zip(*rounds))
        share = [100 * (t + s / 125 + s * st / 600e3) / st for st, t, s in rounds]
        print(f"{model} {size} batch {batch}: step {step:.0f} ms, logging {logging:.3f} ms, checkpoint {save:.0f} ms; "
              f"together {statistics.median(share):.2f} % of a step ({min(share):.2f} to {max(share):.2f})")


if __name__ == "__main__":
    main()
