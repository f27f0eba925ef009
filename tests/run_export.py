# SPDX-License-Identifier: Apache-2.0
"""Runs an exported file with ONNX Runtime or torch.jit.load, without code of this repository.

run_export.py MODEL IMAGES.json FOLDER OUT.json
    detects in the images of a COCO file and writes COCO detections; an ONNX file has NMS, the metadata define the preprocessing
"""
import json
import sys

import numpy as np


def load(path):
    """Returns the model as a function of images [B, 3, H, W], and its metadata."""
    if path.endswith(".onnx"):
        import onnxruntime
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        metadata = session.get_modelmeta().custom_metadata_map
        return lambda images: session.run(None, {"images": images})[0], metadata
    import torch
    metadata = dict.fromkeys(["classes", "size", "channel_order", "value_range", "letterbox", "output"], "")
    module = torch.jit.load(path, _extra_files=metadata)
    metadata = {key: text.decode() for key, text in metadata.items()}
    return lambda images: nms(module(torch.from_numpy(images)).numpy()[0]), metadata


def nms(rows):
    """Returns the detections [D, 7] of an image, as an ONNX file with NMS. rows: [A, 5 + classes]."""
    import cv2
    score, cls = rows[:, 4] * rows[:, 5:].max(1), rows[:, 5:].argmax(1)
    corner = rows[:, :2] - rows[:, 2:4] / 2
    kept = cv2.dnn.NMSBoxesBatched(np.concatenate([corner, rows[:, 2:4]], 1), score, cls, 0.01, 0.65)
    return np.column_stack([0 * score, corner, corner + rows[:, 2:4], score, cls])[np.array(kept, int)]


def detect(model, images, folder, out):
    import cv2
    run, metadata = load(model)
    assert metadata["channel_order"] == "BGR" and metadata["value_range"] == "255", metadata
    assert metadata["letterbox"] == "top left, border 114", metadata
    height, width = map(int, metadata["size"].split("x"))
    with open(images) as file:
        coco = json.load(file)
    categories = sorted(category["id"] for category in coco["categories"])
    found = []
    for entry in coco["images"]:
        image = cv2.imread(folder + "/" + entry["file_name"])
        scale = min(height / image.shape[0], width / image.shape[1])
        small = cv2.resize(image, (int(image.shape[1] * scale), int(image.shape[0] * scale)))
        boxed = np.full((1, height, width, 3), 114, np.uint8)
        boxed[0, :small.shape[0], :small.shape[1]] = small
        rows = run(np.ascontiguousarray(boxed.transpose(0, 3, 1, 2), np.float32))
        for _, x1, y1, x2, y2, score, cls in rows.tolist():
            box = [x1 / scale, y1 / scale, (x2 - x1) / scale, (y2 - y1) / scale]
            found.append({"image_id": entry["id"], "category_id": categories[int(cls)], "bbox": box, "score": score})
    with open(out, "w") as file:
        json.dump(found, file)
    print(len(found), "boxes")


if __name__ == "__main__":
    detect(*sys.argv[1:])
