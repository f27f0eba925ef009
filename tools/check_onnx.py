#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs an ONNX file with ONNX Runtime, without code of this repository. ./export compares the outputs with those of
the model.

  .venv/bin/pip install onnxruntime
  tools/check_onnx.py MODEL.onnx [IN B,3,H,W OUT]...     reads images from IN, writes the output to OUT: raw float32"""
import sys

import numpy, onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
for source, shape, out in zip(*[iter(sys.argv[2:])] * 3):
    images = numpy.fromfile(source, numpy.float32).reshape([int(size) for size in shape.split(",")])
    session.run(None, {"images": images})[0].tofile(out)
