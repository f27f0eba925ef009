#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""HTML for report.py: text, tables, charts and pictures. A page is one file that loads nothing and runs no script."""
import base64
import html
import io
import os

import numpy as np
from matplotlib import rcParams
from matplotlib.figure import Figure
from PIL import Image, ImageOps

rcParams.update({"svg.fonttype": "none", "text.parse_math": False, "font.size": 9})  # text stays text
COLOURS = ["#2563eb", "#e8710a", "#0d9465", "#9333ea", "#d0306b"]


def escaped(text):
    return html.escape("".join(c for c in str(text) if c >= " " or c in "\n\t"))


def number(value):
    return "–" if np.isnan(value) else f"{value:.3f}"


def tiles(values):
    return f"<div class='tiles'>{''.join(f'<div class=tile><b>{v}</b><span>{escaped(n)}</span></div>' for v, n in values)}</div>"


def card(title, content, note="", style=""):
    note = f"<p class='note'>{escaped(note)}</p>" if note else ""
    return f"<div class='card {style}'><h3>{escaped(title)}</h3>{content}{note}</div>"


def table(style, head, rows):
    """rows: texts of the cells in HTML, or (attributes, text). The first cell of a row is its heading."""
    text = "".join(f"<th>{cell}</th>" for cell in head)
    for first, *cells in rows:
        cells = [c if isinstance(c, tuple) else ("", c) for c in cells]
        text += f"</tr><tr><th>{first}</th>" + "".join(f"<td {attributes}>{cell}</td>" for attributes, cell in cells)
    return f"<table class='{style}'><tr>{text}</tr></table>"


def bar(part, style, colour=""):
    return f"<i class='{style}' style='width:{100 * np.nan_to_num(part):.1f}%{colour}'></i>"


def chart(title, x_name, lines, note="", unit=False, mark=None, limit=0):
    """lines: name, x, y, style for matplotlib. unit: both axes are 0 to 1. mark: x of a dashed line. limit: y of another."""
    figure = Figure(figsize=(6.2, 3.6) if unit else (4.4, 2.9), layout="constrained")
    axes = figure.add_subplot(xlabel=x_name)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dde2ea", linewidth=0.7)
    points = []
    for i, (name, x, y, style) in enumerate(lines):
        known = np.flatnonzero(np.isfinite(y))
        parts = np.array_split(known, min(300, len(known)) or 1)  # at most 300 points, each the mean of its neighbours
        x, y = ([v[part].mean() for part in parts if len(part)] for v in (x, y))
        points += y
        if y:
            axes.plot(x, y, **{"color": COLOURS[i % 5], "label": name, "marker": "" if unit or len(y) > 30 else ".", **style})
    if not points:
        return card(title, "<p class='none'>no data yet</p>", note, "chart")
    # The losses and gradient norms of the first steps are many times larger than all others.
    usual = np.quantile(points, 0.9, method="lower")
    top = 2 * usual if len(points) > 20 and max(points) > 3 * usual > 0 else max(points)
    if limit:
        visible = limit <= 3 * top
        axes.axhline(limit, color="#d04545", linestyle="--", label=f"clipped to {limit:g}{'' if visible else ', above this chart'}")
        top = max(top, limit) if visible else top
    if mark is not None:
        axes.axvline(mark, color="#5d6878", linestyle="--")
    axes.set(ylim=(0, 1 if unit else 1.05 * top or 1), **({"xlim": (0, 1)} if unit else {}))
    axes.locator_params(nbins=5, steps=[1, 2, 5, 10])
    if any(axes.get_legend_handles_labels()[1]):
        axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 1), ncols=3, frameon=False, handlelength=1, columnspacing=1)
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(["Creator", "Date", "Format", "Type"]))
    return card(title, file.getvalue()[file.getvalue().index("<svg"):], note, "chart")


def picture(path, side):
    """Returns width and height of an image after its EXIF rotation, and its data: URI with at most `side` pixels."""
    image = ImageOps.exif_transpose(Image.open(path))
    size = image.size
    if image.mode.startswith("I"):  # 16 bits
        image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.convert("RGB").save(file, "JPEG", quality=80)
    return *size, "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def page(title, about, body):
    with open(os.path.join(os.path.dirname(__file__), "report.css"), encoding="utf-8") as file:
        style = file.read()
    return f"""<!DOCTYPE html>
<html lang='en'><head><meta charset='utf-8'>
<meta http-equiv='Content-Security-Policy' content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name='viewport' content='width=device-width, initial-scale=1'><title>{escaped(title)}</title><style>{style}</style></head>
<body><main><h1>{escaped(title)}</h1><p class='about'>{escaped(about)}</p>
{body}</main></body></html>
"""
