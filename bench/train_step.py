#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the training step of our program and of the Python YOLOX (pixeltable-yolox of pip), alternately, and the
ratio of each pair.

  pip install pixeltable-yolox==0.4.3 torch==2.15.0     into the Python that runs this file
  cmake --build build --target bench_train_step
  python bench/train_step.py [--build build] [--pairs 5]

A step is forward, loss, backward, SGD and EMA, with the same torch version, threads, input size, batch size and number
of objects. A pair is one process of ours and one Python process. The start-up time is the time from exec to the end of
the first step.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

CASES = [("yolox-nano", 416, 8), ("yolox-s", 640, 2)]


def peer(model, size, batch, steps, threads):
    """Measures the Python YOLOX and prints JSON. Runs in a process of its own."""
    import copy
    import resource

    import torch
    from yolox.config import YoloxConfig

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    net = YoloxConfig.get_named_config(model).get_model()
    ema = copy.deepcopy(net).eval()
    for p in ema.parameters():
        p.requires_grad_(False)
    net.train()
    groups = [[], [], []]  # batch norm weights, convolution weights, biases
    for _, module in net.named_modules():
        if isinstance(getattr(module, "bias", None), torch.nn.Parameter):
            groups[2].append(module.bias)
        if isinstance(module, torch.nn.BatchNorm2d):
            groups[0].append(module.weight)
        elif isinstance(getattr(module, "weight", None), torch.nn.Parameter):
            groups[1].append(module.weight)
    sgd = torch.optim.SGD(groups[0], lr=1e-4, momentum=0.9, nesterov=True)
    sgd.add_param_group({"params": groups[1], "weight_decay": 5e-4})
    sgd.add_param_group({"params": groups[2]})
    images = torch.rand(batch, 3, size, size) * 255
    labels = torch.zeros(batch, 120, 5)
    r = torch.rand(batch, 20, 4)
    labels[:, :20, 0] = torch.randint(80, (batch, 20)).float()
    labels[:, :20, 1:3] = r[:, :, :2] * size
    labels[:, :20, 3:] = 10 + r[:, :, 2:] * size / 3
    times = []
    for i in range(steps + 2):
        start = time.perf_counter()
        out = net(images, labels)
        loss = out["total_loss"] if isinstance(out, dict) else out.total_loss
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        with torch.no_grad():
            state = net.state_dict()
            for key, value in ema.state_dict().items():
                if value.dtype.is_floating_point:
                    value *= 0.9998
                    value += (1 - 0.9998) * state[key].detach()
        if i >= 2 or steps == 0:
            times.append(time.perf_counter() - start)
        if steps == 0:
            break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": times, "peak_bytes": peak, "before_bytes": before}))


def run(command):
    start = time.perf_counter()
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return json.loads(text.strip().splitlines()[-1]), time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peer", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return peer(args.peer[0], *map(int, args.peer[1:]))

    def ours(model, size, batch, steps):
        flags = dict(model=model, size=size, bs=batch, steps=steps, threads=args.threads)
        return run([f"{args.build}/bench_train_step"] + [f"--{k}={v}" for k, v in flags.items()])

    def theirs(model, size, batch, steps):
        return run([sys.executable, __file__, "--peer", model, *map(str, (size, batch, steps, args.threads))])

    print(f"{args.threads} threads, {args.pairs} pairs, medians\n")
    print("| | ours | Python | ratio (min to max over the pairs) |\n|---|---|---|---|")
    for model, size, batch in CASES:
        pairs = [(ours(model, size, batch, args.steps)[0], theirs(model, size, batch, args.steps)[0]) for _ in range(args.pairs)]
        step = [(statistics.median(a["seconds"]), statistics.median(b["seconds"])) for a, b in pairs]
        peak = [(a["peak_bytes"] / 1e9, b["peak_bytes"] / 1e9) for a, b in pairs]
        for name, unit, rows in (("step", "s", step), ("peak memory of the process", "GB", peak)):
            ratios = sorted(a / b for a, b in rows)
            a, b = (statistics.median(r[i] for r in rows) for i in (0, 1))
            print(f"| {model} {size} batch {batch}: {name} | {a:.3f} {unit} | {b:.3f} {unit} | "
                  f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |", flush=True)
    model, size, batch = CASES[0]
    rows = [(ours(model, size, batch, 0)[1], theirs(model, size, batch, 0)[1]) for _ in range(args.pairs)]
    ratios = sorted(a / b for a, b in rows)
    print(f"| {model} {size} batch {batch}: start-up to the end of the first step | {statistics.median(r[0] for r in rows):.2f} s | "
          f"{statistics.median(r[1] for r in rows):.2f} s | {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |")


if __name__ == "__main__":
    main()
