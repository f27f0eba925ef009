#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Errors of detections, for report.py: AP as in COCO, by pycocotools. At IoU 0.5 also the kinds of errors of TIDE (arXiv 2008.08115,
section 2) with their cost in AP50, precision, recall and F1 by score, and the confusion matrix."""
import contextlib
import warnings

import numpy as np
from pycocotools import mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

# Kinds of detections, and MISSED of objects. IGNORED: matched to a crowd or a difficult object.
CLASS, LOCALISATION, BOTH, DUPLICATE, BACKGROUND, MISSED, RIGHT, IGNORED = range(8)
KIND_NAMES = ["class", "localisation", "both", "duplicate", "background", "missed", "right", "not counted"]
STEPS = np.arange(101) / 100  # scores of the curves


def mean(values, axis=None):
    """The mean of the values that are defined."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of no value
        return np.nanmean(values, axis)


def coco_evaluation(truth, detections, max_dets):
    """max_dets: detections of a class per image. Numbers the objects, because pycocotools never finds one with the id 0, and takes the last one of an id several times."""
    objects = [{"iscrowd": 0, "area": a["bbox"][2] * a["bbox"][3], **a, "id": i} for i, a in enumerate(truth["annotations"], 1)]
    found = [{**d, "id": i, "iscrowd": 0, "area": d["bbox"][2] * d["bbox"][3]} for i, d in enumerate(detections, 1)]
    sets = []
    with contextlib.redirect_stdout(None):
        for boxes in objects, found:
            sets.append(COCO())
            sets[-1].dataset = {"images": truth["images"], "categories": truth["categories"], "annotations": boxes}
            sets[-1].createIndex()
        e = COCOeval(*sets, "bbox")
        e.params.maxDets = [max_dets]
        e.evaluate()
        e.accumulate()
    return e


class ImageErrors:
    """The detections of an image, by descending score: boxes, classes, scores, kinds, and for each
    match: index of its object; -1 if it is not right
    correction: LOCALISATION or CLASS if correcting it makes the detection match an object, with its index in `near`
    gets: no detection matches that object, and this is the first one that would
    The objects: object_boxes, object_classes, counted (not crowds), missed (also after the corrections), iou [detections, objects]."""

    def __init__(self, e, i):
        p, self.id = e.params, e.params.imgIds[i]
        place = {c: k for k, c in enumerate(p.catIds)}
        objects = [a for a in e.cocoGt.imgToAnns[self.id] if a["category_id"] in place]
        index = {a["id"]: t for t, a in enumerate(objects)}
        self.counted, found = np.zeros(len(objects), bool), []
        for k in range(len(p.catIds)):  # as COCO matches at IoU 0.5, objects of all areas
            matched = e.evalImgs[k * len(p.areaRng) * len(p.imgIds) + i]
            if matched:
                self.counted[[index[a] for a in matched["gtIds"]]] = np.logical_not(matched["gtIgnore"])
                found += zip(matched["dtIds"], matched["dtMatches"][0], matched["dtIgnore"][0])
        found.sort(key=lambda f: (-e.cocoDt.anns[f[0]]["score"], f[0]))
        detections = [e.cocoDt.anns[f[0]] for f in found]
        self.areas = np.array([a["area"] for a in objects], float)[self.counted]
        self.boxes, self.object_boxes = [d["bbox"] for d in detections], [a["bbox"] for a in objects]
        self.classes, self.object_classes = (np.array([place[a["category_id"]] for a in of], int) for of in (detections, objects))
        self.scores = np.array([d["score"] for d in detections], float)
        ignored = np.array([f[2] for f in found], bool)
        self.match = np.array([-1 if f[2] else index.get(int(f[1]), -1) for f in found], int)
        self.iou = np.zeros((len(detections), len(objects)))
        if self.iou.size:
            self.iou[:] = mask.iou(np.array(self.boxes, float), np.array(self.object_boxes, float), [0] * len(objects))
        same_class = self.classes[:, None] == self.object_classes
        same, other = (np.where(self.counted & of, self.iou, 0) for of in (same_class, ~same_class))
        most_same, most_other = same.max(1, initial=0), other.max(1, initial=0)
        self.kinds = np.select(
            [self.match >= 0, (most_same >= 0.1) & (most_same < 0.5), most_other >= 0.5, most_same >= 0.5, most_other >= 0.1],
            [RIGHT, LOCALISATION, CLASS, DUPLICATE, BOTH], BACKGROUND)
        self.correction = np.where(np.isin(self.kinds, [LOCALISATION, CLASS]), self.kinds, -1)
        self.kinds[ignored] = IGNORED  # but may have a correction, as in tidecv
        self.gets, self.missed, self.near = np.zeros(len(found), bool), self.counted.copy(), np.full(len(found), -1)
        self.missed[self.match[self.match >= 0]] = False
        for d in np.flatnonzero(self.correction >= 0):
            t = self.near[d] = (same if self.correction[d] == LOCALISATION else other)[d].argmax()
            self.gets[d], self.missed[t] = self.missed[t], False

    def missed_at(self, score):
        """The objects that no detection of at least this score matches."""
        missed = self.counted.copy()
        missed[self.match[(self.match >= 0) & (self.scores >= score)]] = False
        return missed

    def wrong_at(self, score):
        return (self.scores >= score) & (self.kinds < RIGHT)

    def cost(self, score):
        """Missed objects, plus the scores of the wrong detections."""
        return self.missed_at(score).sum() + self.scores[self.wrong_at(score)].sum()


def average_precision(right, objects):
    """right: of each detection by descending score. The mean precision at 101 recalls, as in COCO."""
    hits = np.flatnonzero(right)
    count = np.arange(1, len(hits) + 1)
    precision = np.maximum.accumulate((count / (hits + 1))[::-1])[::-1]
    return np.append(precision, 0)[np.searchsorted(count / objects, np.arange(101) * 0.01)].mean()


class Errors:
    """Errors of a data set. What is undefined, such as the AP of a class without objects, is NaN.

    names [class]; objects [class] and objects_of_area [area]: without crowds
    ap [10 IoU, 101 recall, class, area], recall [10 IoU, class, area]: of COCO, with max_dets of a class per image
    images: ImageErrors, by id
    counts, costs [6 kinds]: costs in AP50, if all errors of a kind and nothing else were corrected
    precision_at, recall_at, f1_at [class, 101]: by score, see STEPS; step, score: those of the best F1
    confusion [classes and background, classes and missed]: at this score"""

    def __init__(self, truth, detections):
        self.max_dets = truth.get("info", {}).get("max_dets", 100)
        e = coco_evaluation(truth, detections, self.max_dets)
        self.names = [c["name"] for c in e.cocoGt.loadCats(e.params.catIds)]
        self.ap, self.recall = (np.where(v < 0, np.nan, v)[..., -1] for v in (e.eval["precision"], e.eval["recall"]))
        self.images = [ImageErrors(e, i) for i in range(len(e.params.imgIds))]
        objects = np.concatenate([image.object_classes[image.counted] for image in self.images])
        missed = np.concatenate([image.object_classes[image.missed] for image in self.images])
        self.objects, missed = (np.bincount(of, minlength=len(self.names)) for of in (objects, missed))
        areas = np.concatenate([image.areas for image in self.images])
        self.objects_of_area = [int(((areas >= low) & (areas <= high)).sum()) for low, high in e.params.areaRng]
        # Detections of all images: class, position, score, kind, correction, gets. Those that get an object of another class
        # stand in the list of that class, too, as copies.
        rows, copies, position = [np.empty((0, 6))], [np.empty((0, 6))], 0
        for image in self.images:
            positions = np.arange(position, position := position + len(image.scores))
            rows.append(np.stack([image.classes, positions, image.scores, image.kinds, image.correction, image.gets], 1))
            copied = image.gets & (image.correction == CLASS)
            copies.append(rows[-1][copied])
            copies[-1][:, 0] = image.object_classes[image.near[copied]]
        rows, copies = np.concatenate(rows), np.concatenate(copies)
        kinds, corrections, gets = rows[:, 3:].T.astype(int)
        counted = np.where(kinds == IGNORED, np.where(gets, corrections, IGNORED), kinds)
        self.counts = np.bincount(counted, minlength=8)[:6]
        self.counts[MISSED] = missed.sum()
        rows = np.concatenate([np.insert(rows, 6, 0, 1), np.insert(copies, 6, 1, 1)])
        rows = rows[np.lexsort((rows[:, 1], -rows[:, 2]))]
        corrected = np.full((7, len(self.names)), np.nan)  # AP50 by kind; the last one corrects nothing
        self.precision_at, self.recall_at, self.f1_at = np.full((3, len(self.names), 101), np.nan)
        for c in np.flatnonzero(self.objects):
            score, kind, correction, gets, copy = rows[rows[:, 0] == c, 2:].T
            own = copy == 0
            for k in range(7):
                right = np.where(own, (kind == RIGHT) | ((k == LOCALISATION) & (correction == k) & (gets > 0)), k == CLASS)
                listed = right | (own & (kind != IGNORED) & (kind != k))
                left = self.objects[c] - missed[c] * (k == MISSED)
                corrected[k, c] = average_precision(right[listed], left) if left else np.nan
            found, right = (of.sum() - np.searchsorted(score[of][::-1], STEPS) for of in (own & (kind != IGNORED), own & (kind == RIGHT)))
            self.precision_at[c] = np.where(found > 0, right / np.maximum(found, 1), np.nan)
            self.recall_at[c], self.f1_at[c] = right / self.objects[c], 2 * right / (found + self.objects[c])
        self.costs = np.nan_to_num(np.maximum(0, mean(corrected[:6], 1) - mean(corrected[6])))
        f1 = np.nan_to_num(mean(self.f1_at, 0))
        best = np.flatnonzero(f1 == f1.max())
        best = best[best - np.arange(len(best)) == best[0]]  # neighbours
        self.step = int(best[0] + best[-1]) // 2 if f1.max() > 0 else 25
        self.score = STEPS[self.step]
        self.confusion = np.zeros((len(self.names) + 1,) * 2, int)
        for image in self.images:
            self.confuse(image)

    def confuse(self, image):
        """Pairs the detections and objects that are left over by descending IoU."""
        wrong, missed = image.wrong_at(self.score), image.missed_at(self.score)
        found = image.object_classes[image.counted & ~missed]
        np.add.at(self.confusion, (found, found), 1)
        pairs = np.argwhere((image.iou >= 0.5) & wrong[:, None] & missed)
        for _, t, d in sorted((-image.iou[d, t], t, d) for d, t in pairs):
            if missed[t] and wrong[d]:
                missed[t] = wrong[d] = False
                self.confusion[image.object_classes[t], image.classes[d]] += 1
        np.add.at(self.confusion, (image.object_classes[missed], -1), 1)
        np.add.at(self.confusion, (-1, image.classes[wrong]), 1)


def hard_negatives(truth, detections):
    """Images without objects in which something is detected with a score of 0.3 or more: [(score, image), ...], the worst first."""
    with_objects, scores = {a["image_id"] for a in truth["annotations"]}, {}
    for d in detections:
        scores[d["image_id"]] = max(d["score"], scores.get(d["image_id"], 0))
    found = [(scores.get(i["id"], 0), i) for i in truth["images"] if i["id"] not in with_objects]
    return sorted((f for f in found if f[0] >= 0.3), key=lambda f: -f[0])
