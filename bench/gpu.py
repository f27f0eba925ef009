#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks on a GPU: training step and whole training beside the Python YOLOX, memory, launches, loader, evaluation, DTR.
Called by bench/gpu.sh. Prints tables in the form of bench/RESULTS.md. A part that fails says why, and the others run."""
import argparse, csv, json, os, pathlib, re, statistics, subprocess, sys, tempfile, time

PARTS = ["step", "launches", "train", "loader", "eval", "dtr", "batch"]


class Failed(Exception):
    """A command that failed: why, and its stdout until then."""

    def __init__(self, why, output=""):
        super().__init__(why)
        self.output = output or ""


def run(command, limit, folder=None):
    """Runs a command and returns its stdout. Throws Failed with the last line of its output."""
    try:
        r = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=limit, cwd=folder, env={**os.environ, "YOLOX_NO_REPORT": "1"})
    except subprocess.TimeoutExpired as e:
        raise Failed(f"stopped after {limit} s", e.stdout.decode() if isinstance(e.stdout, bytes) else e.stdout)
    except OSError as e:
        raise Failed(str(e))
    if r.returncode:
        raise Failed(((r.stderr or r.stdout).strip().splitlines() or [f"exit code {r.returncode}"])[-1], r.stdout)
    return r.stdout


def last_json(text):
    return json.loads(text.strip().splitlines()[-1])


def peer_step(model, size, batch, amp, steps, device, compiled=False, objects=20):
    """The training step of the Python YOLOX with its best settings, as JSON. Runs in a process of its own. steps: 0
    times the first step. compiled: with torch.compile of backbone and neck."""
    import copy
    import resource
    import torch
    from yolox.config import YoloxConfig

    cuda = device.startswith("cuda")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = amp == "tf32"
    torch.manual_seed(0)
    net = YoloxConfig.get_named_config(model).get_model().to(device).to(memory_format=torch.channels_last)
    ema = copy.deepcopy(net).eval()
    net.train()
    decay = [p for n, p in net.named_parameters() if p.dim() > 1]
    rest = [p for n, p in net.named_parameters() if p.dim() <= 1]
    sgd = torch.optim.SGD([{"params": decay, "weight_decay": 5e-4}, {"params": rest}], lr=1e-4, momentum=0.9, nesterov=True, fused=True)
    scaler = torch.amp.GradScaler(enabled=amp == "fp16" and cuda)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(amp)
    images = (torch.rand(batch, 3, size, size) * 255).to(device).to(memory_format=torch.channels_last)
    labels, r = torch.zeros(batch, 120, 5), torch.rand(batch, objects, 4)
    labels[:, :objects, 0] = torch.randint(80, (batch, objects)).float()
    labels[:, :objects, 1:3] = r[:, :, :2] * size
    labels[:, :objects, 3:] = 10 + r[:, :, 2:] * size / 3
    labels = labels.to(device)
    floats = [[v for v in m.state_dict().values() if v.dtype.is_floating_point] for m in (ema, net)]
    if compiled:
        net.backbone = torch.compile(net.backbone)
    together, times = min(5, steps) if cuda else 1, []
    warm_up = 2 * together if steps else 0

    def wait():
        if cuda:
            torch.cuda.synchronize()

    start = time.perf_counter()
    for i in range(max(1, steps + warm_up)):
        with torch.autocast(device.split(":")[0], dtype=dtype, enabled=dtype is not None):
            out = net(images, labels)
        loss = out["total_loss"] if isinstance(out, dict) else out.total_loss
        sgd.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()
        with torch.no_grad():
            torch._foreach_lerp_(floats[0], floats[1], 1 - 0.9998)
        if (i + 1) % together == 0:
            wait()
            if i >= warm_up:
                times.append((time.perf_counter() - start) / together)
            start = time.perf_counter()
    peak = torch.cuda.max_memory_reserved() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": times, "peak_bytes": peak}))


def table(title, heading, rows):
    print(f"\n## {title}\n| {' | '.join(heading)} |\n|{'---|' * len(heading)}")
    for row in rows:
        print(f"| {' | '.join(str(cell) for cell in row)} |", flush=True)


class Bench:
    def __init__(self, flags, folder):
        self.f, self.folder, self.results = flags, folder, {}
        self.size = 64 if flags.quick else 640
        self.batches = [int(n) for n in ("4" if flags.quick else flags.batches).split(",")]
        self.precisions = ["bf16"] if flags.quick else flags.amp.split(",")
        self.model = "yolox-nano" if flags.quick else "yolox-s"
        self.steps = 5 if flags.quick else 30
        self.data = flags.data or "shapes"

    def program(self, name):
        return pathlib.Path(self.f.programs, name).resolve()

    def ours(self, batch, amp, kinds, objects=20):
        """Times kinds of steps in one process, and those after a kind that fails in another one. Returns a dictionary for each."""
        found, left = {}, list(kinds)
        while left:
            command = [self.program("bench_train_step"), f"--model={self.model}", f"--size={self.size}", f"--bs={batch}", f"--amp={amp}",
                       f"--objects={objects}", f"--steps={self.steps}", f"--device={self.f.device}", f"--kinds={','.join(left)}", "--cudnn-benchmark"]
            try:
                output, why = run(command, 120 * len(left)), "no result"
            except Failed as e:
                output, why = e.output, str(e)
            for line in output.splitlines():
                result = json.loads(line)
                found[result["kind"]] = result
            left = [kind for kind in left if kind not in found]
            if left:
                found[left.pop(0)] = {"error": why}
        return found

    def theirs(self, batch, amp, compiled=0, objects=20):
        return last_json(run([sys.executable, __file__, "--peer", self.model, self.size, batch, amp, self.steps, self.f.device, compiled, objects], 180))

    def step(self):
        """Training step: images a second and memory."""
        rows, self.results["step"] = [], {}
        kinds, peers = ["plain", "norm", "graph", "both"], {"python": 0, "compiled": 1}
        for amp in self.precisions:
            for batch, objects in [(b, 20) for b in self.batches] + ([] if self.f.quick else [(self.batches[-1], 100)]):
                found = self.ours(batch, amp, kinds, objects)
                for name, compiled in peers.items():
                    try:
                        found[name] = self.theirs(batch, amp, compiled, objects)
                    except Failed as e:
                        found[name] = {"error": str(e)}
                row = {name: one if "error" in one else {"images_per_second": batch / statistics.median(one["seconds"]),
                                                         "gigabytes": one["peak_bytes"] / 1e9} for name, one in found.items()}
                self.results["step"][f"{amp} {batch} {objects}"] = row
                text = lambda name, key: f"{row[name][key]:.4g}" if key in row[name] else row[name]["error"][:60]
                best, other = (max(row[n].get("images_per_second", 0) for n in group) for group in (kinds, peers))
                ratio = f"{best / other:.2f}" if best and other else ""
                rows.append([f"{amp}, batch {batch}, {objects} objects", *(text(n, "images_per_second") for n in row), ratio,
                             *(text(n, "gigabytes") if "error" not in row[n] else "" for n in row)])
        names = ["plain", "fused norm", "CUDA graph", "both", "Python", "Python, torch.compile"]
        table(f"Training step, {self.model} {self.size}: images/s, then GB", ["", *names, "ours / Python", *names], rows)

    def train(self, *more, limit=150):
        command = [self.program("train"), "--data", self.data, "--model", self.model, "--size", self.size, "--device", self.f.device,
                   "--eval-interval", 0, "--epochs", 100, *more]
        return run(command, limit, self.folder)

    def intervals(self, name):
        """The rows of metrics.csv of a run that have a speed."""
        with open(pathlib.Path(self.folder, name, "metrics.csv")) as file:
            return [row for row in csv.DictReader(file) if row["images_per_second"]]

    def launches(self):
        """Kernels of a step, the time of each, and the time in which the GPU idles, from the trace of --profile."""
        out = self.train("--bs", self.batches[0], "--amp", "bf16", "--profile", "--out", "profile")
        events = json.load(open(pathlib.Path(self.folder, "profile", "trace.json")))["traceEvents"]
        on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in on_gpu)
        names = {}  # -> calls, microseconds
        for e in on_gpu:
            calls, time_of = names.get(e["name"], (0, 0))
            names[e["name"]] = calls + 1, time_of + e["dur"]
        slowest = sorted(names.items(), key=lambda item: -item[1][1])
        row = {"table": out.strip().splitlines()[-30:], "microseconds_of_all": sum(e["dur"] for e in on_gpu), "names": slowest[:60]}
        if kernels:
            busy, end = 0, kernels[0][0]
            for begin, until in kernels:
                busy += max(0, until - max(begin, end))
                end = max(end, until)
            row.update(kernels=len(kernels), idle=1 - busy / (end - kernels[0][0]))
        self.results["launches"] = row
        cells = [row.get("kernels", "none in the trace"), f"{100 * row['idle']:.1f} %" if kernels else ""]
        table(f"Traced step, bf16, batch {self.batches[0]}", ["kernels and copies in trace.json", "GPU idle"], [cells])

    def whole_training(self):
        """./train with mosaic and MixUp, from the images of --data."""
        rows, self.results["train"] = [], {}
        for batch in self.batches:
            for kind in "no-graph", "graph":
                name = f"train_{batch}_{kind}"
                try:
                    self.train("--bs", batch, "--amp", "bf16", f"--{kind}", "--no-multiscale", "--max-iters", 6 if self.f.quick else 60 if batch > 16 else 150,
                               "--out", name)
                except Failed as e:
                    rows.append([f"batch {batch}, --{kind}", str(e), ""])
                    continue
                found = self.intervals(name)
                late = found[len(found) // 2:] or found
                row = {k: statistics.median(float(r[k]) for r in late) for k in ("images_per_second", "waiting_share")}
                self.results["train"][f"{batch} {kind}"] = row
                rows.append([f"batch {batch}, --{kind}", f"{row['images_per_second']:.4g}", f"{100 * row['waiting_share']:.0f} %"])
        table(f"./train, {self.model} {self.size}, bf16, data: {self.data}", ["", "images/s", "waits for data"], rows)

    def loader(self):
        rows, self.results["loader"] = [], {}
        cores = len(os.sched_getaffinity(0))
        for threads in [n for n in (1, 2, 4, 8, 16, 32) if n <= cores]:
            out = last_json(run([self.program("bench_loader"), self.data, self.size, 16, threads, 1 if self.f.quick else 4], 60))
            self.results["loader"][threads] = out
            rows.append([threads, f"{out['images_per_second']:.4g}", f"{out['images_per_second'] / threads:.4g}"])
        table(f"Loader, {self.size} px, data: {self.data}", ["threads", "images/s", "per thread"], rows)

    def evaluation(self):
        weights = sorted(pathlib.Path(self.folder).glob("*/last.pth"))
        if not weights:
            self.train("--bs", self.batches[0], "--max-iters", 2, "--out", "for_eval")
            weights = [pathlib.Path(self.folder, "for_eval", "last.pth")]
        out = run([self.program("eval"), "--data", self.data, "--weights", weights[0], "--device", self.f.device, "--bs", 64, "--speed"], 120)
        self.results["eval"] = out.strip().splitlines()
        at = self.results["eval"].index("milliseconds per image:")
        print("\n## Evaluation, float32, batches of 64\n```\n" + "\n".join(self.results["eval"][at:at + 6]) + "\n```", flush=True)

    def dtr(self):
        out = run([self.program("bench_dtr"), f"--model={self.model}", f"--size={self.size}", f"--bs={self.batches[0]}", "--amp=bf16",
                   f"--device={self.f.device}", "--rounds=3", "--budgets=100,80,60,50,40", "--deterministic"], 150)
        self.results["dtr"] = out.strip().splitlines()
        print("\n## DTR\n" + out.strip(), flush=True)

    def batch(self):
        """The largest batch within 24 GB, with rematerialisation."""
        out = self.train("--bs", "auto", "--dtr", 0.06 if self.f.quick else 24, "--amp", "bf16", "--no-multiscale", "--max-iters", 1, "--out", "batch")
        found = re.search(r"--bs auto: (\d+)", out)
        self.results["batch"] = int(found.group(1)) if found else None
        table("Largest batch within 24 GB", ["images"], [[self.results["batch"]]])


def gpu_name():
    try:
        return run(["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,power.limit", "--format=csv,noheader"], 20).strip()
    except Failed:
        return "unknown (nvidia-smi failed)"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default="build", help="folder of the programs [build]")
    parser.add_argument("--data", help="data set, as for ./train [built-in scenes]")
    parser.add_argument("--json", default="gpu.json", help="file for the results [gpu.json]")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"[{','.join(PARTS)}]")
    parser.add_argument("--batches", default="16,64", help="batch sizes [16,64]")
    parser.add_argument("--amp", default="bf16,tf32", help="precisions of part step [bf16,tf32]")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--peer", nargs=8, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.peer:
        model, size, batch, amp, steps, device, compiled, objects = flags.peer
        return peer_step(model, int(size), int(batch), amp, int(steps), device, compiled == "1", int(objects))
    if flags.data and flags.data != "shapes":
        flags.data = os.path.abspath(flags.data)
    unknown = set(flags.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    start, failed = time.monotonic(), []
    print(f"GPU: {gpu_name()}")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(flags, folder)
        calls = {"step": bench.step, "launches": bench.launches, "train": bench.whole_training, "loader": bench.loader, "eval": bench.evaluation, "dtr": bench.dtr,
                 "batch": bench.batch}
        for part in flags.parts.split(","):
            try:
                calls[part]()
            except Exception as e:  # the other parts still count
                failed.append(part)
                print(f"\n{part} failed: {e}", file=sys.stderr, flush=True)
            pathlib.Path(flags.json).write_text(json.dumps({"GPU": gpu_name(), **bench.results}, indent=1) + "\n")
    print(f"\n{len(flags.parts.split(','))} parts, {len(failed)} failed, in {time.monotonic() - start:.0f} s; results in {flags.json}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
