#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares training recipes: trains each variant on each data set with each seed, evaluates last.pth, and prints a table.

  bench/recipes.py --seeds 0-4 --epochs 15 'official=--recipe official' 'new=' 'faster=--lr 2e-3'

The first variant is the reference of the differences, which are paired: same data set and seed. Each run trains yolox-nano
on one thread; --jobs runs train at once. runs.csv in --out collects the results. The same command continues after an
interruption, and runs only what is missing. The data sets are those of ../shared/data; --set NAME=DIR,SPLIT adds others,
whose SPLIT is evaluated. --images 12,25 trains on so many images of each set, which the seed chooses; 0 is all of them. AP
is that of the EMA weights, "raw" that of the weights without EMA."""
import argparse, concurrent.futures, csv, itertools, json, os, pathlib, random, shutil, statistics, subprocess, sys, threading

SHARED = pathlib.Path(os.environ.get("YOLOX_SHARED", "../shared")) / "data"
SETS = {"bccd": (SHARED / "bccd/BCCD", "test"), "deeppcb": (SHARED / "deeppcb", "val"), "cards": (SHARED / "cards", "test")}
WEIGHTS = SHARED / "weights/yolox_nano_coco_v011_rebuilt.pth"
COLUMNS = ["set", "images", "epochs", "seed", "variant", "flags", "AP", "AP50", "raw"]


def numbers(text):
    """'0-2,5' -> [0, 1, 2, 5]"""
    out = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("variants", nargs="+", metavar="NAME=FLAGS")
    p.add_argument("--sets", default=",".join(SETS))
    p.add_argument("--set", action="append", default=[], metavar="NAME=DIR,SPLIT")
    p.add_argument("--seeds", type=numbers, default=[0])
    p.add_argument("--epochs", type=numbers, default=[15])
    p.add_argument("--images", type=numbers, default=[0])
    p.add_argument("--bs", type=int, default=8)
    p.add_argument("--size", type=int, default=416)
    p.add_argument("--model", default="yolox-nano")
    p.add_argument("--weights", default=str(WEIGHTS))
    p.add_argument("--jobs", type=int, default=os.cpu_count())
    p.add_argument("--build", default="build")
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/recipes"))
    return p.parse_args()


def evaluate(args, split, weights, *flags):
    """Returns (AP, AP50)."""
    result = weights.with_suffix(".json")
    command = [f"{args.build}/eval", *split, "--weights", str(weights), "--json", str(result), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    metrics = json.loads(result.read_text())
    return metrics["AP"], metrics["AP50"]


def subset(source, to, images, seed):
    """Makes a data set of links to one of VOC's or YOLO's layouts, with fewer training images."""
    lists = source / "ImageSets/Main"
    kept = lambda all: set(random.Random(seed).sample(sorted(all), images))
    for place in source.rglob("*"):
        if place.is_file() and not place.name.endswith(".cache"):
            copy = to / place.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(place.resolve())
    if lists.exists():
        (to / "ImageSets/Main/train.txt").unlink()
        (to / "ImageSets/Main/train.txt").write_text("\n".join(sorted(kept((lists / "train.txt").read_text().split()))) + "\n")
        return
    pictures = [f for f in (to / "train").rglob("*") if f.suffix in (".jpg", ".png")]
    names = kept(f.stem for f in pictures)
    for file in (to / "train").rglob("*"):
        if file.is_symlink() and file.stem not in names:
            file.unlink()


def run(args, name, images, epochs, seed, variant, flags):
    """Trains and evaluates one run. Returns a row of runs.csv."""
    folder, split = SETS[name]
    out = args.out / f"{name}-{images}-{epochs}-{variant}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    if images:
        subset(folder, out / "data", images, seed)
        folder = out / "data"
    data = ["--data", str(folder), "--split", split]
    command = [f"{args.build}/train", *data, "--model", args.model, "--weights", args.weights, "--size", str(args.size), "--bs", str(args.bs),
               "--epochs", str(epochs), "--seed", str(seed), "--eval-interval", "0", "--save-minutes", "0", "--cache", "ram", "--workers", "1", "--threads", "1",
               "--out", str(out / "run"), *flags.split()]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    AP, AP50 = evaluate(args, data, out / "run/last.pth")
    raw, _ = evaluate(args, data, out / "run/last.pth", "--no-ema")
    return {"set": name, "images": images, "epochs": epochs, "seed": seed, "variant": variant, "flags": flags, "AP": AP, "AP50": AP50, "raw": raw}


def spread(values):
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values) if len(values) > 1 else 0:.4f}"


def print_table(rows, variants, args):
    value = {(r["set"], int(r["images"]), int(r["epochs"]), int(r["seed"]), r["variant"]): r for r in rows}
    print("| images | epochs | variant | " + " | ".join(args.sets) + " | mean | difference | raw below EMA |\n" + "|---" * (len(args.sets) + 6) + "|")
    for images, epochs, variant in itertools.product(args.images, args.epochs, variants):
        cells, runs = [], []
        for name in args.sets:
            mine = [(s, value[name, images, epochs, s, variant]) for s in args.seeds if (name, images, epochs, s, variant) in value]
            runs += [(name, s, r) for s, r in mine]
            cells.append(spread([float(r["AP"]) for _, r in mine]) if mine else "")
        if not runs:
            continue
        reference = [value.get((name, images, epochs, s, next(iter(variants)))) for name, s, _ in runs]
        pairs = [float(r["AP"]) - float(other["AP"]) for (_, _, r), other in zip(runs, reference) if other]
        good = sum(float(r["AP"]) >= float(r["raw"]) for _, _, r in runs)
        print(f"| {images or 'all'} | {epochs} | {variant} | " + " | ".join(cells) +
              f" | {statistics.mean(float(r['AP']) for _, _, r in runs):.4f} | {spread(pairs) if pairs else ''} | {good} of {len(runs)} |")


def main():
    args = parse()
    for text in args.set:
        name, _, place = text.partition("=")
        folder, _, split = place.rpartition(",")
        SETS[name] = (pathlib.Path(folder), split)
    args.sets = [s for s in args.sets.split(",") if s]
    variants = dict(v.partition("=")[::2] for v in args.variants)
    args.out.mkdir(parents=True, exist_ok=True)
    table, lock = args.out / "runs.csv", threading.Lock()
    rows = list(csv.DictReader(table.open())) if table.exists() else []
    have = {(r["set"], int(r["images"]), int(r["epochs"]), int(r["seed"]), r["variant"]) for r in rows}
    # Variants are the innermost loop, so that an interrupted comparison has as many pairs as possible.
    todo = [(name, images, e, seed, v, f) for images in args.images for e in args.epochs for seed in args.seeds for name in args.sets
            for v, f in variants.items() if (name, images, e, seed, v) not in have]
    if not table.exists():
        table.write_text(",".join(COLUMNS) + "\n")
    os.environ |= {"OMP_NUM_THREADS": "1", "YOLOX_NO_REPORT": "1"}

    def finish(job):
        row = run(args, *job)
        with lock, table.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)
        rows.append(row)
        print(f"{row['set']} images {row['images']} epochs {row['epochs']} seed {row['seed']} {row['variant']}: AP {row['AP']:.4f}, raw {row['raw']:.4f}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for done in [pool.submit(finish, job) for job in todo]:
            done.result()
    print_table(rows, variants, args)


if __name__ == "__main__":
    main()
