#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the network of one image on the CPU: ours, ONNX Runtime and OpenVINO, in turn.

  pip install onnxruntime openvino     into the Python that runs this file
  cmake --build build --target export bench_forward
  python bench/forward.py --weights FILE [--build build] [--rounds 3]

Ours is bench_forward: the network and the decoding of boxes, as demo runs them. The peers run the file that `export`
writes for the same weights and size. All have an image of random numbers, and all cores.
"""
import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time


def median_ms(call, runs):
    times = []
    for i in range(runs + 5):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[5:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", required=True)
    parser.add_argument("--build", default="build")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=50, help="runs of each per round")
    args = parser.parse_args()
    import numpy
    import onnxruntime
    import openvino
    threads = os.cpu_count()
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model.onnx"
        subprocess.run([f"{args.build}/export", "--weights", args.weights, "--out", model], check=True, stdout=subprocess.DEVNULL)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        image = numpy.random.rand(*session.get_inputs()[0].shape).astype(numpy.float32) * 255
        name = session.get_inputs()[0].name
        vino = {p: openvino.Core().compile_model(model, "CPU", {
            "INFERENCE_PRECISION_HINT": p, "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}).create_infer_request()
            for p in ("f32", "bf16")}

        def ours():
            command = [f"{args.build}/bench_forward", "--weights", args.weights, "--runs", str(args.runs), "--threads", str(threads)]
            text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            return 1e3 * statistics.median(json.loads(text)["seconds"])

        programs = {
            "ours": ours,
            "ONNX Runtime": lambda: median_ms(lambda: session.run(None, {name: image}), args.runs),
            "OpenVINO": lambda: median_ms(lambda: vino["f32"].infer({0: image}), args.runs),
            "OpenVINO in bf16": lambda: median_ms(lambda: vino["bf16"].infer({0: image}), args.runs)}
        rounds = [{k: f() for k, f in programs.items()} for _ in range(args.rounds)]
        print(f"{threads} threads, {args.rounds} rounds, medians, input {image.shape}\n")
        print("| | time | ours / this (min to max) |\n|---|---|---|")
        for k in programs:
            ratios = sorted(r["ours"] / r[k] for r in rounds)
            print(f"| {k} | {statistics.median(r[k] for r in rounds):.1f} ms | {statistics.median(ratios):.2f} "
                  f"({ratios[0]:.2f} to {ratios[-1]:.2f}) |")


if __name__ == "__main__":
    main()
