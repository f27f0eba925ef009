#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times training on two ranks and on one rank with the same total batch size and
the same cores, alternately, and the ratio of each pair. Also measures how much
of the gradient all-reduce overlaps with backward.

    cmake --build build --target bench_ddp
    python bench/ddp.py [--build build] [--pairs 4]
    python bench/ddp.py --network 1000,1    # hosts with a network of 1000 Mbit/s and 1 ms; needs root

Step: forward, loss, backward, all-reduce, clipping, SGD and EMA, with SyncBN.
Overlapped: part of the time of an all-reduce after backward that the Reducer
saves, because it all-reduces during backward; without SyncBN, whose all-reduces
also wait.

With --network, 1, 2 and 4 ranks train on hosts of their own, with two images of
nano or one of s each. The time of a step is compared with a calculation: the
time of as many trainings beside each other that are not connected, the
all-reduces of SyncBN, each as between idle ranks, and the time for which the
network carries gradients. Backward hides nothing of that, because SyncBN waits
behind the gradients.
"""
import argparse
import json
import os
import statistics
import subprocess

from network import Network

CASES = [("yolox-nano", 416, 8), ("yolox-s", 416, 4)]


def run_together(commands, environments):
    """Runs the commands at the same time, each on one core. Returns what each prints in its last line."""
    running = [subprocess.Popen(["taskset", "-c", str(i % os.cpu_count()), *command], env={**os.environ, **environment},
                                stdout=subprocess.PIPE, text=True)
               for i, (command, environment) in enumerate(zip(commands, environments))]
    out = [json.loads(p.communicate()[0].strip().splitlines()[-1]) for p in running]
    assert all(p.returncode == 0 for p in running)
    return out


def compare_with_calculation(a):
    """Prints the time of a step on 1, 2 and 4 hosts beside the calculated time."""
    bandwidth, delay = (float(v) for v in a.network.split(","))
    print(f"{bandwidth:g} Mbit/s, {delay:g} ms, {a.pairs} rounds, medians\n")
    print("| | ranks | step | calculated | ratio (min to max over the rounds) | not connected | all-reduces of SyncBN | gradients |\n" + "|---" * 8 + "|")
    for model, size, share in ("yolox-nano", 416, 2), ("yolox-s", 416, 1):
        for ranks in 1, 2, 4:
            flags = [f"{a.build}/bench_ddp", f"--model={model}", f"--size={size}", f"--steps={a.steps}", "--beside", "--ranks=1"]
            rounds = []
            for _ in range(a.pairs):
                alone = max(r["step"] for r in run_together([[*flags, f"--bs={share}"]] * ranks, [{}] * ranks))
                with Network(ranks, bandwidth * 1e6, delay * 1e-3) as network:
                    environments = [{"RANK": str(r), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                                     "MASTER_ADDR": network.address(0), "MASTER_PORT": "29500"} for r in range(ranks)]
                    commands = [network.on(r, [*flags, f"--bs={share * ranks}"]) for r in range(ranks)]
                    result = run_together(commands, environments)[0]
                small = 2 * result["norms"] * result["small"]
                gradients = 2 * (ranks - 1) / ranks * result["gradient_bytes"] * 8 / (bandwidth * 1e6)
                calculated = alone + small + gradients
                rounds.append((calculated / result["step"], result["step"], calculated, alone, small, gradients, result["small"]))
            low, high = min(rounds)[0], max(rounds)[0]
            ratio, step, calculated, alone, small, gradients, one = (statistics.median(v) for v in zip(*rounds))
            print(f"| {model} {size}, {share} images per rank | {ranks} | {step:.2f} s | {calculated:.2f} s | {ratio:.2f} ({low:.2f} to {high:.2f}) | "
                  f"{alone:.2f} s | {small:.2f} s, {2 * result['norms']} of {1e3 * one:.1f} ms | {gradients:.2f} s |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--network", metavar="MBIT/S,MS", help="compare with the calculation on such a network")
    a = parser.parse_args()
    if a.network:
        compare_with_calculation(a)
        return

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
