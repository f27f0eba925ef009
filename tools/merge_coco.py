#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Merges data sets into one COCO JSON file, and renames classes or makes them ignored regions.

  tools/merge_coco.py A/annotations/train.json B/images/train --out set/train.json      COCO and YOLO
  tools/merge_coco.py train.json --rename car=vehicle van=vehicle --ignore reflection --out set/train.json

Classes are matched by name, and an image that several sets have gets the boxes of all. The paths of the images are
absolute. An object of a class of --ignore becomes an ignored region (iscrowd), of the first class. A YOLO folder
needs opencv-python-headless, and pyyaml if there is a data.yaml. If the images of a JSON file are not below its
folder, write FILE.json:FOLDER."""
import argparse, json, pathlib

from read_data import read_data

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("data", nargs="+", help="COCO JSON file, or YOLO folder of images")
p.add_argument("--out", required=True, type=pathlib.Path, help="JSON file to write")
p.add_argument("--rename", nargs="+", default=[], metavar="OLD=NEW", help="several may get the same name")
p.add_argument("--ignore", nargs="+", default=[], metavar="NAME")
args = p.parse_args()
renamed = dict(pair.split("=", 1) for pair in args.rename)
images, categories, objects, known = {}, {}, {}, set()  # by path, by name, by what they are
for source in args.data:
    path, _, folder = source.partition(":")
    data = read_data(path, folder or None)
    known |= {c["name"] for c in data["categories"]}
    names = {c["id"]: renamed.get(c["name"], c["name"]) for c in data["categories"]}
    for name in names.values():
        if name not in args.ignore:
            categories.setdefault(name, {"id": len(categories) + 1, "name": name})
    for image in data["images"]:
        path = str(pathlib.Path(image["file_name"]).resolve())
        size = {"width": image["width"], "height": image["height"]}
        merged = images.setdefault(path, {"id": len(images) + 1, "file_name": path, **size})
        for a in data["of_image"][str(image["id"])]:
            name, crowd = names[a["category_id"]], int(a.get("iscrowd") or 0)
            objects.setdefault((merged["id"], name, *a["bbox"]), {**a, "image_id": merged["id"], "iscrowd": crowd})
unknown = (set(renamed) | set(args.ignore)) - known - set(renamed.values())
if unknown or not categories:
    p.error(f"no data set has the class {', '.join(sorted(unknown))}" if unknown else "--ignore leaves no class")
annotations = []
for (_, name, *_), a in objects.items():
    if name in args.ignore:
        a["iscrowd"] = 1
    annotations.append({**a, "id": len(annotations) + 1, "category_id": categories.get(name, {"id": 1})["id"]})
args.out.parent.mkdir(parents=True, exist_ok=True)
args.out.write_text(json.dumps({"images": list(images.values()), "annotations": annotations,
                                "categories": list(categories.values())}))
print(f"{args.out}: {len(images)} images, {len(annotations)} objects, {len(categories)} classes")
