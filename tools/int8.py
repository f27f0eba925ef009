#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Quantises an exported model to int8 with ONNX Runtime, and prints AP and time before and after.

  .venv/bin/pip install onnxruntime onnx opencv-python-headless
  ./export --weights runs/NAME/best.pth --nms --conf 0.01 --nms-iou 0.65 --out model.onnx
  tools/int8.py --model model.onnx --calibrate DIR/train --gt DIR/annotations/instances_val.json --images DIR/val

The first layer, depthwise layers and the last layer of each branch of the head stay in float32: 256 values are too few for them."""
import argparse, json, pathlib, subprocess, sys, time

import cv2, numpy, onnx, onnxruntime
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process


def letterbox(path, height, width):
    """Returns the network's input for an image, and its scale."""
    image = cv2.imread(str(path), cv2.IMREAD_COLOR)
    scale = min(height / image.shape[0], width / image.shape[1])
    small = cv2.resize(image, (int(image.shape[1] * scale), int(image.shape[0] * scale)))
    padded = numpy.full((height, width, 3), 114, numpy.uint8)
    padded[:small.shape[0], :small.shape[1]] = small
    return padded.transpose(2, 0, 1)[None].astype(numpy.float32), scale


class Calibration(CalibrationDataReader):
    def __init__(self, paths, size):
        self.inputs = ({"images": letterbox(p, *size)[0]} for p in paths)

    def get_next(self):
        return next(self.inputs, None)


def layers_in_float(path):
    """Returns the names of the first convolution, the depthwise ones, and those after which no other convolution follows."""
    nodes = onnx.load(path).graph.node
    convolutions = [n for n in nodes if n.op_type == "Conv"]
    users = {name: [n for n in nodes if name in n.input] for n in nodes for name in n.output}

    def reaches_convolution(node, seen):
        for name in node.output:
            for user in users.get(name, []):
                if user.op_type == "Conv" or (id(user) not in seen and not seen.add(id(user)) and reaches_convolution(user, seen)):
                    return True
        return False

    depthwise = [n for n in convolutions if any(a.name == "group" and a.i > 1 for a in n.attribute)]
    return [n.name for n in [convolutions[0], *depthwise, *(n for n in convolutions if not reaches_convolution(n, set()))]]


def evaluate(model, truth, classes, folder, size, program, name):
    """Writes the detections of a model, prints the AP that ./eval computes, and returns the milliseconds per image."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    ids, found, seconds = {c["name"]: c["id"] for c in truth["categories"]}, [], 0
    for image in truth["images"]:
        pixels, scale = letterbox(folder / image["file_name"], *size)
        start = time.perf_counter()
        rows = session.run(None, {"images": pixels})[0]
        seconds += time.perf_counter() - start
        for _, x1, y1, x2, y2, score, cls in rows:
            found.append({"image_id": image["id"], "category_id": ids[classes[int(cls)]], "score": float(score),
                          "bbox": [float(v) / scale for v in (x1, y1, x2 - x1, y2 - y1)]})
    detections = pathlib.Path(model).with_suffix(".json")
    detections.write_text(json.dumps(found))
    text = subprocess.run([program, "--gt", name, "--dt", str(detections)], capture_output=True, text=True, check=True).stdout
    print(f"{model}:", *[line.strip() for line in text.splitlines() if "Average Precision" in line][:2], sep="\n  ")
    return 1000 * seconds / len(truth["images"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in "--model", "--calibrate", "--gt", "--images":
        parser.add_argument(flag, required=True)
    parser.add_argument("--count", type=int, default=100, help="calibration images [100]")
    parser.add_argument("--eval", default="./eval", help="the program [./eval]")
    args = parser.parse_args()
    metadata = onnxruntime.InferenceSession(args.model, providers=["CPUExecutionProvider"]).get_modelmeta().custom_metadata_map
    size = tuple(map(int, metadata["size"].split("x")))
    truth, classes = json.loads(pathlib.Path(args.gt).read_text()), metadata["classes"].split("\n")
    if missing := set(classes) - {c["name"] for c in truth["categories"]}:  # the file may have more categories than the model
        sys.exit(f"error: {args.gt} has no category {', '.join(sorted(missing))}")
    photos = sorted(p for p in pathlib.Path(args.calibrate).iterdir() if p.suffix.lower() in (".jpg", ".jpeg", ".png"))[:args.count]
    if not photos:
        sys.exit(f"error: no image in {args.calibrate}")
    prepared, small = str(pathlib.Path(args.model).with_suffix(".prepared.onnx")), str(pathlib.Path(args.model).with_suffix(".int8.onnx"))
    quant_pre_process(args.model, prepared, skip_symbolic_shape=True)
    quantize_static(prepared, small, Calibration(photos, size), quant_format=QuantFormat.QDQ, per_channel=True, op_types_to_quantize=["Conv"],
                    activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, nodes_to_exclude=layers_in_float(prepared),
                    calibrate_method=CalibrationMethod.Percentile, extra_options={"CalibPercentile": 99.99})
    before, after = (evaluate(m, truth, classes, pathlib.Path(args.images), size, args.eval, args.gt) for m in (args.model, small))
    print(f"time per image: {before:.1f} ms, int8 {after:.1f} ms; file: {small}, "
          f"{pathlib.Path(small).stat().st_size / 1e6:.1f} of {pathlib.Path(args.model).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
