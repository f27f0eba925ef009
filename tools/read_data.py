# SPDX-License-Identifier: Apache-2.0
"""Reads the data sets that tiles.py, duplicates.py and merge_coco.py take: a COCO JSON file, or a folder of images such
as DIR/images/train, with labels in YOLO format or without labels."""
import collections, json, pathlib


def image_folder(path, name):
    """Returns the folder of the images of a COCO JSON file, of which one has this name."""
    if pathlib.PurePath(name).is_absolute():
        return path.parent
    root = path.parent.parent if path.parent.name == "annotations" else path.parent
    folders = sorted((p for p in root.rglob("*") if p.is_dir()), key=lambda p: (p.name not in path.stem, p))
    found = [folder for folder in [root, *folders] if (folder / name).is_file()]
    if found and (len(found) == 1 or found[0].name in path.stem):
        return found[0]
    raise SystemExit(f"error: {path}: {found[0]} and {found[1]} both have {name}; give the folder (--help)" if found else
                     f"error: {path}: the image {name} is not below {root}; give its folder (--help)")


def label_file(image):
    """Returns the YOLO label file of an image: a/images/val/b.jpg -> a/labels/val/b.txt, or the one beside the image."""
    parts = list(image.parts)
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    file, beside = pathlib.Path(*parts).with_suffix(".txt"), image.with_suffix(".txt")
    return beside if beside.exists() and not file.exists() else file


def class_names(folder):
    """Returns the class names of a YOLO folder by number: those of a data.yaml or classes.txt above it or in its labels."""
    labels = label_file(folder / "x.jpg").parent
    for place in (folder, labels, labels.parent, *folder.absolute().parents[:3]):
        if (place / "data.yaml").is_file():
            import yaml  # pip install pyyaml
            names = yaml.safe_load((place / "data.yaml").read_text())["names"]
            if isinstance(names, str):
                names = (place / names).read_text("utf-8-sig").splitlines()
            return dict(names if isinstance(names, dict) else enumerate(names))
        if (place / "classes.txt").is_file():
            return dict(enumerate((place / "classes.txt").read_text("utf-8-sig").splitlines()))
    return {}


def read_image(path):
    """Returns an image in BGR, or None. Refuses 16 bits, whose upper 8 alone are black if the values are small."""
    import cv2  # pip install opencv-python-headless
    pixels = cv2.imread(str(path), cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH)
    if pixels is not None and pixels.dtype != "uint8":
        raise SystemExit(f"error: {path} has 16 bits; convert the images to 8 bits: ./train --dry-run says how")
    return pixels


def read_yolo(folder):
    import cv2
    data, names = {"images": [], "annotations": []}, class_names(folder)
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and cv2.haveImageReader(str(p))):
        height, width = read_image(path).shape[:2]
        data["images"].append({"id": len(data["images"]) + 1, "file_name": str(path), "width": width, "height": height})
        for line in filter(str.strip, label_file(path).read_text().splitlines() if label_file(path).exists() else []):
            cls, *v = map(float, line.split())
            if len(v) != 4 and (len(v) < 6 or len(v) % 2):
                raise SystemExit(f"error: {label_file(path)}: neither a box nor a polygon: {line}")
            if len(v) == 4:  # otherwise a polygon
                v = [v[0] - v[2] / 2, v[1] - v[3] / 2, v[0] + v[2] / 2, v[1] + v[3] / 2]
            x, y = min(v[::2]) * width, min(v[1::2]) * height
            w, h = max(v[::2]) * width - x, max(v[1::2]) * height - y
            data["annotations"].append({"id": len(data["annotations"]) + 1, "image_id": len(data["images"]), "iscrowd": 0,
                                        "category_id": int(cls), "bbox": [x, y, w, h], "area": w * h})
    if data["annotations"] and not names:
        raise SystemExit(f"error: {folder}: no data.yaml or classes.txt names the classes")
    if unknown := {a["category_id"] for a in data["annotations"]} - names.keys():
        raise SystemExit(f"error: {folder}: the labels have the classes {sorted(unknown)}, which have no name")
    data["categories"] = [{"id": number, "name": name} for number, name in names.items()]
    return data


def read_data(source, images=None):
    """Returns a data set in COCO form. file_name is the path of an image, of_image has the annotations by the text of
    an image id.
    images: folder of the images of a JSON file; None: the usual places."""
    source = pathlib.Path(source)
    data = read_yolo(source) if source.is_dir() else json.loads(source.read_text("utf-8-sig"))
    if not source.is_dir():
        folder = pathlib.Path(images) if images else image_folder(source, data["images"][0]["file_name"])
        for image in data["images"]:
            image["file_name"] = str(folder / image["file_name"])
    data["of_image"] = collections.defaultdict(list)
    for annotation in data["annotations"]:
        if annotation.get("bbox"):
            data["of_image"][str(annotation["image_id"])].append(annotation)
    return data
