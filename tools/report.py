#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a page with the curves of a run, the errors of its best evaluation, the worst images, and the settings.
The page is one file that loads nothing and runs no script.

  .venv/bin/python tools/report.py runs/NAME                                # writes runs/NAME/report.html
  .venv/bin/python tools/report.py --truth gt.json --detections dt.json     # detections of any program, in COCO format

Needs: .venv/bin/pip install matplotlib numpy pycocotools"""
import argparse
import csv
import glob
import json
import os
import sys
import time

try:
    import numpy as np
    from errors import KIND_NAMES, MISSED, RIGHT, STEPS, Errors, hard_negatives, mean
    from page import bar, card, chart, escaped, number, page, picture, table, tiles
except ImportError as error:
    sys.exit(f"{error}; install: {sys.executable} -m pip install matplotlib numpy pycocotools")


def read_metrics(run):
    """Returns the columns of metrics.csv, metrics_2.csv and so on, by name. An empty cell is NaN."""
    rows, names = [], {}
    for path in sorted(glob.glob(glob.escape(run) + "/metrics*.csv"), key=lambda p: (len(p), p)):
        with open(path, newline="") as file:
            table = csv.DictReader(file.read().rpartition("\n")[0].splitlines())  # without a torn line
        rows += table
        names.update(dict.fromkeys(table.fieldnames or []))
    return {name: np.array([float(row.get(name) or "nan") for row in rows]) for name in names}


def duration(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02}m" if minutes >= 60 else f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"


def training_section(columns, settings):
    names, step, epoch = list(columns), columns["iteration"], columns["epoch"]
    none = np.full(len(step), np.nan)
    column = lambda name: columns.get(name, none)
    ap, speed, evaluating = column("AP"), column("images_per_second"), np.nansum(column("eval_seconds"))
    shown = []
    if np.isfinite(ap).any():
        shown = [(number(np.nanmax(ap)), f"best AP, in epoch {epoch[np.nanargmax(ap)]:g}"),
                 (number(ap[np.isfinite(ap)][-1]), "last AP")]
    shown += [(f"{epoch[-1]:g}", "epochs"), (f"{step[-1]:g}", "steps")]
    if (speed > 0).any():
        steps, speed = np.diff(step[speed > 0], prepend=0), speed[speed > 0]
        training = (steps * float(settings.get("bs") or 0) / speed)[steps > 0].sum()  # without lost steps
        shown += [(f"{speed.mean():.3g}", "images per second"), (duration(training), "training time")]
    shown += [(duration(evaluating), "evaluation time")] * bool(evaluating)
    x, x_name = (step / np.max(step / epoch), "epoch") if epoch[-1] > 2 else (step, "step")
    line = lambda name, label="", **style: (label, x, column(name), style)
    between = lambda first, last: names[names.index(first) + 1:names.index(last)] if {first, last} <= {*names} else []
    terms = [line(term, term) for term in between("loss", "positives_per_object")]
    charts = [
        chart("Loss", x_name, [line("loss", "total"), *terms, line("val_loss", "validation, without l1", color="#1b2330")]),
        chart("AP on the evaluation images", x_name, [line("AP", "AP"), line("AP50", "AP50")]),
        chart("Learning rate", x_name, [line("lr")]),
        chart("Gradient norm", x_name, [line("grad_norm", "before clipping")], limit=float(settings.get("clip") or 0))]
    charts += [chart(name, x_name, [line(name)]) for name in between("waiting_share", "AP") if name != "grad_norm"]
    charts += [chart("Images per second", x_name, [line("images_per_second")]),
               chart("Time spent waiting for images, %", x_name, [("", x, 100 * column("waiting_share"), {})])]
    return f"<section id='training'><h2>Training</h2>{tiles(shown)}<div class='cards'>{''.join(charts)}</div></section>"


def confusion_card(errors):
    names, n, matrix = errors.names, len(errors.names), errors.confusion
    mixed = matrix[:n, :n] * (1 - np.eye(n, dtype=int))
    shown = np.arange(n)
    if n > 20:  # the classes that are confused most
        shown = np.sort(np.lexsort((-errors.objects, -(mixed.sum(0) + mixed.sum(1))))[:20])
    rows = []
    for t in [*shown, n]:
        cells = []
        for p in [*shown, n]:
            part = matrix[t, p] / max(1, matrix[t].sum())
            style = f"background:rgb({'29 138 95' if t == p else '208 69 69'}/{part:.2f}){';color:#fff' if part > 0.45 else ''}"
            cells.append((f"style='{style}'", matrix[t, p] or ""))
        rows.append([escaped([*names, "background"][t]), *cells])
    text = "<p class='note'>Rows: truth. Columns: prediction.</p>" + table(
        "matrix", ["", *(f"<span>{escaped([*names, 'missed'][p])}</span>" for p in [*shown, n])], rows)
    pairs = sorted((-mixed[t, p], t, p) for t, p in np.argwhere(mixed))[:12]
    if pairs:
        text += "<p>Most frequent confusions:</p><ul class='mistakes'>" + "".join(
            f"<li><b>{escaped(names[t])}</b> detected as <b>{escaped(names[p])}</b> <small>{-count} of {errors.objects[t]}</small></li>"
            for count, t, p in pairs) + "</ul>"
    return card("Confusion matrix", text, f"IoU 0.5, score threshold {errors.score:.2f}. The shade is the fraction of the row."
                + f" Shown: the 20 of {n} classes that are confused most." * (n > 20), "wide")


def drawn_image(image, names, score, about, path):
    """An image with its right detections and, on top of them, its wrong detections and missed objects."""
    boxes = [(kind, box, names[c], f" {s:.2f}") for kind, box, c, s in
             zip(image.kinds, image.boxes, image.classes, image.scores) if s >= score]
    boxes += [(MISSED, image.object_boxes[t], names[image.object_classes[t]], "") for t in np.flatnonzero(image.missed_at(score))]
    w, h, uri = about.get("width"), about.get("height"), ""
    caption = ", ".join(f"{n} {KIND_NAMES[k]}" for k in range(RIGHT) if (n := sum(b[0] == k for b in boxes)))
    try:
        if path:
            *size, uri = picture(path, 480)
            w, h = (w, h) if os.path.basename(os.path.dirname(path)) == "val_worst" else size  # a smaller copy
    except (OSError, ValueError) as problem:
        caption += f"; {problem}"
    if not (w and h):  # as large as its boxes
        w, h = (max([1, *(min(box[i] + box[i + 2] + 1, 1e5) for _, box, _, _ in boxes)]) for i in (0, 1))
    font, shapes, texts, labels = max(w, h) / 34, f"<image width='{w}' height='{h}' href='{uri}'/>" * bool(uri), "", []
    for kind, (left, top, width, height), name, shown in sorted(boxes, key=lambda b: b[0] < RIGHT)[-200:]:
        place = f"x='{left:.1f}' y='{top:.1f}' width='{max(0, width):.1f}' height='{max(0, height):.1f}'"
        title = f"<title>{escaped(name)}{shown}: {KIND_NAMES[kind]}</title>"
        shapes += f"<rect class='under' {place}/><rect class='k{kind}' style='fill:none' {place}>{title}</rect>"
        text = (name if len(name) <= 20 else name[:19] + "…") + shown
        wide = 0.6 * font * len(text)
        x, y = max(0, min(left, w - wide)), max(font, min(top - font / 4, h))
        if kind < RIGHT and all(abs(y - b) >= font or x >= r or x + wide <= l for l, r, b in labels):  # does not hide another
            labels.append((x, x + wide, y))
            texts += f"<text class='k{kind}' x='{x:.1f}' y='{y:.1f}'>{escaped(text)}</text>"
    return (f"<figure><svg viewBox='0 0 {w:g} {h:g}' style='aspect-ratio:{w:g}/{h:g};font-size:{font:.1f}px'>{shapes}{texts}</svg>"
            f"<figcaption><b>{escaped(os.path.basename(about['file_name']))}</b> {escaped(caption)}</figcaption></figure>")


def evaluation_section(heading, truth, detections, path_of):
    errors = Errors(truth, detections)
    ap, recall, step, names = errors.ap, errors.recall, errors.step, errors.names
    at = errors.precision_at, errors.recall_at, errors.f1_at
    precision_at, recall_at, f1_at = (mean(v, 0) for v in at)
    shown = [(mean(ap[..., 0]), "AP"), (mean(ap[0, ..., 0]), "AP50"), (mean(ap[5, ..., 0]), "AP75"), (mean(recall[..., 0]), "AR"),
             (f1_at[step], "best F1")]
    about = ["wrong class, IoU at least 0.5", "right class, IoU 0.1 to 0.5", "wrong class, IoU 0.1 to 0.5",
             "second detection of an object", "detection of background, IoU < 0.1", "object without detection"]
    costs = [(f"{KIND_NAMES[k]}: {errors.counts[k]}<small>{about[k]}</small>", bar(errors.costs[k] / max(1e-9, *errors.costs), f"k{k}"),
              ("class='n'", f"{100 * errors.costs[k]:.1f}")) for k in range(6)]
    sizes = [(f"{name}<small>{extent}{errors.objects_of_area[k]} objects</small>",
              bar(mean(recall[..., k]), "", ";background:var(--faint)") + bar(mean(ap[..., k]), "", ";background:var(--bar)"),
              ("class='n'", number(mean(ap[..., k])))) for k, (name, extent) in enumerate(
                  [("all", ""), ("small", "up to 32², "), ("medium", "32² to 96², "), ("large", "from 96², ")])]
    lines = [(name, STEPS, mean(mean(ap[t, :, :, 0], 2), 0), {}) for name, t in
             (("IoU 0.5", [0]), ("0.75", [5]), ("0.5 to 0.95", range(10)))]
    each = [("", STEPS, ap[0, :, c, 0], {"color": "#9aa3b0", "linewidth": 0.7}) for c in range(len(names))] if 1 < len(names) <= 20 else []
    rows = []
    for c in np.argsort(-np.nan_to_num(mean(ap[..., 0], (0, 1)), nan=-1), kind="stable"):
        values = ap[0, :, c, 0], ap[5, :, c, 0], recall[:, c, 0], *(v[c, step] for v in at)
        rows.append((escaped(names[c]), errors.objects[c], ("class='ap'", bar(mean(ap[:, :, c, 0]), "") + number(mean(ap[:, :, c, 0]))),
                     *(number(mean(v)) for v in values)))
    images = {i["id"]: i for i in truth["images"]}
    worst = sorted((-i.cost(errors.score), i.id, i) for i in errors.images if i.cost(errors.score) > 0)
    paths = {id: path_of(images[id]) for _, id, _ in worst}
    worst = [w for w in worst if paths[w[1]] or not any(paths.values())][:24]
    drawn = "".join(drawn_image(i, names, errors.score, images[id], paths[id]) for _, id, i in worst)
    key = "".join(f"<span><i class='k{k}'></i>{KIND_NAMES[k]}</span>" for k in (RIGHT, *range(6)))
    negatives = [(escaped(i["file_name"]), f"{score:.2f}") for score, i in hard_negatives(truth, detections)[:20]]
    return (f"<section id='evaluation'><h2>Evaluation</h2><p class='note'>{escaped(heading)}</p>"
            + tiles((number(v), name) for v, name in shown) + "<div class='cards two'>"
            + card("Cost of each error type in AP50", table("bars", [], costs), "AP50 points gained by correcting all errors of one "
                   "type and nothing else (TIDE), and the number of errors. The values of different types do not add up.")
            + card("AP by size", table("bars", [], sizes), "Areas in square pixels of the image. Pale bars: AR, the recall with at most "
                   f"{errors.max_dets} detections of a class per image.")
            + chart("Precision over recall", "recall", lines + each, "Means over classes" + "; thin: each class at IoU 0.5" * bool(each) + ".", True)
            + chart("F1 by score threshold", "score threshold", [("F1", STEPS, f1_at, {}), ("precision", STEPS, precision_at, {}),
                                                                 ("recall", STEPS, recall_at, {})],
                    f"IoU 0.5, means over classes. Best F1 {number(f1_at[step])} at a score threshold of {errors.score:.2f}; use this value "
                    "for ./demo --conf.", True, mark=errors.score)
            + "</div>" + card("Classes", table("list", ["class", "objects", "AP", "AP50", "AP75", "AR", "precision", "recall", "F1"], rows),
                              f"Precision, recall and F1 at IoU 0.5 and a score threshold of {errors.score:.2f}.", "wide scroll")
            + confusion_card(errors)
            + f"<h3 class='head'>{f'The {len(worst)} images with the most errors' if worst else 'No image has errors'}</h3>"
            f"<p class='note key'>{key}</p><p class='note'>Detections with a score of at least {errors.score:.2f}, and missed objects. Sorted by "
            f"the number of missed objects plus the sum of the scores of wrong detections.</p><div class='images'>{drawn}</div>"
            + (card("Images without objects in which something is detected", table("list", ["image", "score"], negatives),
                    "Hard negatives: train with them, or label what is in them.", "wide") if negatives else "") + "</section>")


def pictures_section(run):
    figures = ""
    for name, about in (("labels.jpg", "Ground truth boxes of the training set"),
                        ("train_batch0.jpg", "The first training batch after augmentation, with its ground truth"),
                        ("val_batch0_pred.jpg", "The first images of the last evaluation: truth on the left, prediction on the right")):
        if os.path.exists(os.path.join(run, name)):
            figures += f"<figure><img alt='{name}' src='{picture(os.path.join(run, name), 1400)[2]}'><figcaption>{about}</figcaption></figure>"
    return f"<section id='pictures'><h2>Pictures</h2>{figures}</section>" if figures else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="run folder")
    parser.add_argument("--truth", help="COCO file with images and objects [RUN/val_truth.json]")
    parser.add_argument("--detections", help="COCO file with detections [RUN/val_detections.json]")
    parser.add_argument("--images", default="", help="folder of the images, if the truth names them without it")
    parser.add_argument("--hard-negatives", metavar="FILE.json", help="also write the images without objects in which something "
                        "is detected, as a COCO file")
    parser.add_argument("--out", help="the page [RUN/report.html, or report.html]")
    flags = parser.parse_args()
    run = flags.run or ""
    if not run and not (flags.truth and flags.detections):
        parser.error("give a run folder, or --truth and --detections")
    read = lambda path: json.load(open(path, encoding="utf-8"))
    settings = read(f"{run}/config.json") if run and os.path.exists(f"{run}/config.json") else {}
    settings = {**settings.pop("flags", {}), **settings.pop("chosen", {}), **settings}  # what was chosen counts
    truth, detections = flags.truth or f"{run}/val_truth.json", flags.detections or f"{run}/val_detections.json"

    def path_of(image):
        """Of a run on images that are no files, the worst ones are in val_worst."""
        candidates = [os.path.join(flags.images or os.path.dirname(truth), image["file_name"]), f"{run}/val_worst/{image['id']}.jpg"]
        return next((path for path in candidates if os.path.isfile(path)), None)

    title = os.path.basename(os.path.abspath(run)) if run else os.path.basename(detections)
    about = f"{detections} against {truth}"
    if settings:
        s = {name: str(value) for name, value in settings.items()}
        about = (f"{s['model']} on {s['data']}, torch {s['torch']}, revision {s['revision']}; {s['device_name']}, ranks: {s['ranks']}, "
                 f"threads of each: {s['threads']}; report of {time.strftime('%Y-%m-%d %H:%M')}")
    columns = read_metrics(run) if run else {}
    body = training_section(columns, settings) if len(columns.get("iteration", [])) else ""
    if flags.detections or os.path.exists(detections):
        truth_file = read(truth)
        heading = truth_file.get("info", {}).get("description") or f"{len(truth_file['images'])} images of {truth}"
        found = read(detections)
        body += evaluation_section(heading, truth_file, found, path_of)
        if flags.hard_negatives:
            with open(flags.hard_negatives, "w", encoding="utf-8") as file:
                images = [image for _, image in hard_negatives(truth_file, found)]
                json.dump({**truth_file, "images": images, "annotations": []}, file)
    body += pictures_section(run)
    values = "".join(f"<div><dt>{escaped(n)}</dt><dd>{escaped(json.dumps(v) if isinstance(v, bool) else v)}</dd></div>"
                     for n, v in settings.items() if v != "")
    body += f"<section id='settings'><h2>Settings</h2><div class='card'><dl>{values}</dl></div></section>" if values else ""
    out = flags.out or os.path.join(run, "report.html")
    part = f"{out}.tmp.{os.getpid()}"
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(page(title, about, body))
        os.replace(part, out)
    except OSError:  # such as a full disk
        if os.path.exists(part):
            os.remove(part)
        raise


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"error: {error}")
