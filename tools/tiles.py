#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cuts large images with small objects into overlapping tiles, and merges the detections in the tiles.

  .venv/bin/pip install opencv-python-headless
  tools/tiles.py cut DIR/annotations/val.json tiles/val.json     or a YOLO folder such as DIR/images/val
  ./eval --data tiles --weights best.pth --save-dt found.json    or ./demo --source tiles/val --json ...
  tools/tiles.py merge tiles/val.json found.json whole.json
  ./eval --gt DIR/annotations/val.json --dt whole.json

An object of which a tile shows less than half is an ignored region (iscrowd) there. An image of several tiles
is written as a whole, too, for objects larger than a tile. merge leaves out boxes at an inner edge of their
tile, and of two boxes of a class in different tiles with an IoU above 0.5 the worse one."""
import argparse, json, math, pathlib

import cv2, numpy

from read_data import read_data, read_image


def starts(length, side, overlap):
    """Returns the coordinates at which tiles begin, evenly spaced. length: of the image in pixels."""
    more = max(0, math.ceil((length - side) / max(1, side * (1 - overlap))))
    return [round((length - side) * k / more) if k else 0 for k in range(more + 1)]


def cut(args):
    data, folder, tiles, objects = read_data(args.data, args.images), args.out.with_suffix(""), [], []
    folder.mkdir(parents=True, exist_ok=True)
    for image in data["images"]:
        path, pixels = pathlib.Path(image["file_name"]), read_image(image["file_name"])
        if pixels is None:
            print(f"warning: {path} cannot be read and is left out")
            continue
        width, height = pixels.shape[1::-1]
        if (image.get("width") or width, image.get("height") or height) != (width, height):
            print(f"warning: {path} has another size than its annotation and is left out")
            continue
        xs, ys = (starts(length, args.size, args.overlap) for length in (width, height))
        parts = [(x, y, min(args.size, width), min(args.size, height)) for y in ys for x in xs]
        for x, y, w, h in parts + [(0, 0, width, height)] * (len(parts) > 1):
            part = {**image, "width": width, "height": height, "box": [x, y, w, h]}
            name = f"{path.stem}_{image['id']}_{x}_{y}_{w}x{h}.jpg"
            tiles.append({"id": len(tiles) + 1, "file_name": name, "width": w, "height": h, "part_of": part})
            cv2.imwrite(str(folder / name), pixels[y:y + h, x:x + w], [cv2.IMWRITE_JPEG_QUALITY, 95])
            for a in data["of_image"][str(image["id"])]:
                left, top, bw, bh = a["bbox"]
                corners = numpy.subtract([left, top, left + bw, top + bh], [x, y, x, y])
                x1, y1, x2, y2 = corners.clip(0, [w, h, w, h]).tolist()
                if x2 > x1 and y2 > y1:
                    area = (x2 - x1) * (y2 - y1)
                    objects.append({"id": len(objects) + 1, "image_id": len(tiles), "category_id": a["category_id"],
                                    "bbox": [x1, y1, x2 - x1, y2 - y1], "area": area,
                                    "iscrowd": int(a.get("iscrowd") or area < bw * bh / 2)})
    args.out.write_text(json.dumps({"images": tiles, "annotations": objects, "categories": data["categories"]}))
    print(f"{args.out}: {len(tiles)} tiles of {len(data['images'])} images")


def is_cut(box, part):
    """Returns whether a box in a tile touches an edge of it at which the image goes on."""
    start, size, low, extent = numpy.reshape(part["box"] + box, (4, 2))
    whole, near = (part["width"], part["height"]), max(4, 0.01 * size[0])  # objects that are cut end about there
    return ((start > 0) & (low < near) | (start + size < whole) & (low + extent > size - near)).any()


def merge(tiles, found, out):
    tiles, found, groups, whole = json.loads(tiles.read_text()), json.loads(found.read_text()), {}, []
    tile_named = {tile["file_name"]: tile for tile in tiles["images"]}
    if found and "boxes" in found[0]:  # of ./demo
        ids = {c["name"]: c["id"] for c in tiles["categories"]}
        found = [{**b, "file_name": entry["image"], "category_id": ids.get(b["name"], b["class"])}
                 for entry in found for b in entry["boxes"]]
    for d in found:
        tile = tile_named[pathlib.Path(d["file_name"]).name]
        if not is_cut(d["bbox"], part := tile["part_of"]):
            row = [d["score"], tile["id"], *numpy.add(d["bbox"], part["box"][:2] + [0, 0])]
            groups.setdefault((part["id"], part["file_name"], d["category_id"]), []).append(row)
    for (image, name, category), rows in groups.items():
        rows = numpy.array(sorted(rows, reverse=True))
        tile, low, high, area = rows[:, 1], rows[:, 2:4], rows[:, 2:4] + rows[:, 4:], rows[:, 4:].prod(1)
        alive = numpy.ones(len(rows), bool)
        for i in range(len(rows)):
            if alive[i]:
                both = (numpy.minimum(high, high[i]) - numpy.maximum(low, low[i])).clip(0).prod(1)
                alive &= (both <= 0.5 * (area + area[i] - both)) | (tile == tile[i])
        whole += [{"image_id": image, "file_name": name, "category_id": category, "score": score, "bbox": box}
                  for score, _, *box in rows[alive].tolist()]
    out.write_text(json.dumps(whole))
    print(f"{out}: {len(whole)} detections")


p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("command", choices=["cut", "merge"])
p.add_argument("data", type=pathlib.Path, help="cut: COCO JSON file or YOLO folder; merge: the file that cut wrote")
p.add_argument("found", type=pathlib.Path, nargs="?", help="merge: detections in the tiles")
p.add_argument("out", type=pathlib.Path, help="JSON file to write")
p.add_argument("--images", help="folder of the images of a COCO JSON file [the usual folders]")
p.add_argument("--size", type=int, default=640, help="side of a tile in pixels, such as the input size [640]")
p.add_argument("--overlap", type=float, default=0.2, help="overlap of tiles as a fraction of their side [0.2]")
args = p.parse_args()
cut(args) if args.command == "cut" else merge(args.data, args.found, args.out)
