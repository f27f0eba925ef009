#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains with two ranks while ranks, launchers and hosts are killed and stopped, disks fill up and networks are cut, and
proves that nothing is lost: at the end of each run, last.pth has the same weights, optimizer, counters and scores, bit by
bit, as that of an undisturbed run.

  .venv/bin/python bench/soak.py --data ../shared/data/deeppcb --events 300

Runs `./train --resume auto` again after each event, until the run is complete, and then the next run, until there were
enough events. Looks for processes, shared memory and temporary files that stay behind, and for memory and file
descriptors that grow. With the rights for network namespaces (root), every second attempt has its ranks on two hosts,
whose network is cut at times. Prints the counts of all events, and exits with 1 if anything was wrong."""
import argparse, collections, csv, os, pathlib, random, shutil, signal, subprocess, sys, tempfile, time

import torch

FLAGS = ("--model yolox-nano --size 64 --bs 16 --epochs 100 --eval-interval 20 --save-minutes 0.005 --timeout 5 "
         "--warmup-epochs 1 --no-multiscale --device cpu --workers 1").split()


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", required=True)
    p.add_argument("--build", default="build", type=pathlib.Path)
    p.add_argument("--events", type=int, default=300)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=pathlib.Path, default=None, help="folder of the runs; default: a temporary one, deleted")
    return p.parse_args()


def root(command):
    return subprocess.run(["sh", "-c", "PATH=$PATH:/usr/sbin:/sbin; " + command], stderr=subprocess.DEVNULL).returncode == 0


def make_hosts():
    """Two hosts, as network namespaces. Returns False without the rights for it."""
    return root("ip netns add soaka && ip netns add soakb && ip link add va netns soaka type veth peer name vb netns soakb && "
                "ip -n soaka addr add 10.77.0.1/24 dev va && ip -n soakb addr add 10.77.0.2/24 dev vb && "
                "for h in a b; do ip -n soak$h link set lo up; ip -n soak$h link set v$h up; done")


def descendants(pid):
    """Ids of the process and of all below it."""
    found, queue = [], [pid]
    while queue:
        p = queue.pop()
        found.append(p)
        try:
            for task in pathlib.Path(f"/proc/{p}/task").iterdir():
                queue += [int(c) for c in (task / "children").read_text().split()]
        except OSError:
            pass  # has ended
    return found


def processes_of(run):
    """Processes that train in this run folder."""
    found = []
    for p in pathlib.Path("/proc").iterdir():
        if p.name.isdigit():
            try:
                words = (p / "cmdline").read_bytes().split(b"\0")
                if str(run).encode() in words and b"/train" in words[0]:
                    found.append(int(p.name))
            except OSError:
                pass
    return found


def usage(pid):
    """Returns (resident kB, open file descriptors) of a process, or None."""
    try:
        resident = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4
        return resident, len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None


def send(pids, number):
    for p in pids:
        try:
            os.kill(p, number)
        except OSError:
            pass


class Attempt:
    """One start of ./train with two ranks: a launcher with both, or a rank on each of two hosts, as srun starts them."""

    def __init__(self, args, run, two_hosts):
        flags = [str(args.build.resolve() / "train"), "--data", str(pathlib.Path(args.data).resolve()), *FLAGS, "--resume", "auto", "--out", str(run)]
        self.run, self.log = run, open(run.parent / (run.name + ".log"), "ab")
        self.two_hosts, self.started = two_hosts, {}
        for host in ("a", "b") if two_hosts else ("a",):
            command = flags + ["--procs", "2"]
            environment = dict(os.environ, OMP_NUM_THREADS="1", YOLOX_NO_REPORT="1", PATH=os.environ["PATH"] + ":/usr/sbin:/sbin")
            if two_hosts:
                command = ["ip", "netns", "exec", "soak" + host] + flags
                environment.update(RANK="01"["ab".index(host)], WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
                                   MASTER_ADDR="10.77.0.1", MASTER_PORT="29511")
            # A file that is too large is then an error, and not a signal, like a full disk.
            self.started[host] = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL,
                                                  preexec_fn=lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN))

    def ended(self):
        return all(p.poll() is not None for p in self.started.values())

    def ranks(self):
        pids = [p.pid for p in self.started.values() if p.poll() is None]
        return pids if self.two_hosts else [p for pid in pids for p in descendants(pid) if p not in pids]

    def everything(self, host=None):
        return [p for h, l in self.started.items() if host in (None, h) for p in descendants(l.pid)]

    def wait(self, seconds):
        end = time.time() + seconds
        while not self.ended() and time.time() < end:
            time.sleep(0.02)
        return self.ended()


def disturb(kind, attempt, rng):
    """Does one event. Returns False if it was not possible, because the processes have not started or have ended."""
    ranks = attempt.ranks()
    if not ranks:
        return False
    host = rng.choice(list(attempt.started))
    if kind == "kill a rank":
        send([rng.choice(ranks)], signal.SIGKILL)
    elif kind == "kill a launcher":
        if attempt.two_hosts:
            return False
        attempt.started[host].kill()
    elif kind == "kill a host":
        send(attempt.everything(host), signal.SIGKILL)
    elif kind == "terminate":
        send([l.pid for l in attempt.started.values()], rng.choice([signal.SIGTERM, signal.SIGINT]))
    elif kind == "stop a rank for a while":
        rank = [rng.choice(ranks)]
        send(rank, signal.SIGSTOP)
        attempt.wait(rng.uniform(0.1, 2))
        send(rank, signal.SIGCONT)
    elif kind == "stop a rank for ever":
        rank = [rng.choice(ranks)]
        send(rank, signal.SIGSTOP)
        # The other rank ends after --timeout, and the launcher then ends this one. Before the first step, and between hosts,
        # somebody has to do it, as srun does.
        attempt.wait(25)
        send(rank, signal.SIGKILL)
    elif kind == "suspend all":
        pids = attempt.everything()
        send(pids, signal.SIGSTOP)
        time.sleep(7)  # longer than --timeout
        send(pids, signal.SIGCONT)
    elif kind == "full disk":
        for p in ranks:
            subprocess.run(["prlimit", "--pid", str(p), "--fsize=1000000"], stderr=subprocess.DEVNULL)
        attempt.wait(rng.uniform(0.5, 3))
        for p in ranks:
            subprocess.run(["prlimit", "--pid", str(p), "--fsize=unlimited"], stderr=subprocess.DEVNULL)
    elif kind == "cut the network":
        if not attempt.two_hosts:
            return False
        root("ip -n soakb link set vb down")
        attempt.wait(rng.choice([rng.uniform(0.1, 2), 25]))
        root("ip -n soakb link set vb up")
    return True


KINDS = ["kill a rank", "kill a launcher", "kill a host", "terminate", "stop a rank for a while", "stop a rank for ever", "suspend all", "full disk", "cut the network"]
WEIGHTS = [6, 4, 6, 4, 4, 1, 1, 4, 4]


def difference(a, b, where=""):
    """The path of the first entry in which two checkpoints differ, "" if they are equal. Does not compare settings, which
    have the folder of the run and the number of ranks of a launcher."""
    if isinstance(a, torch.Tensor):
        return "" if torch.equal(a, b) else where
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return where + ": other keys"
        return next((d for k in a if k not in ("flags", "chosen") and (d := difference(a[k], b[k], f"{where}.{k}"))), "")
    if isinstance(a, list):
        return next((d for i, (x, y) in enumerate(zip(a, b)) if (d := difference(x, y, f"{where}[{i}]"))), "")
    return "" if a == b or a != a and b != b else where


def scores(run):
    """Iteration -> AP and validation loss of each evaluation."""
    return {r["iteration"]: (r["AP"], r["AP50"], r["val_loss"]) for r in csv.DictReader(open(run / "metrics.csv")) if r["AP"]}


def load(run):
    return torch.load(run / "last.pth", weights_only=True)


def main():
    args = parse()
    rng = random.Random(args.seed)
    folder = args.out or pathlib.Path(tempfile.mkdtemp(prefix="soak"))
    folder.mkdir(parents=True, exist_ok=True)
    hosts = make_hosts()
    if not hosts:
        print("no network namespaces: all ranks on one host, and no network is cut")
    leftovers = lambda: {str(p) for d in ("/dev/shm", "/tmp") for p in pathlib.Path(d).iterdir()}
    before, problems, counts = leftovers(), [], collections.Counter()
    try:
        undisturbed = folder / "undisturbed"
        start = time.time()
        attempt, seen = Attempt(args, undisturbed, False), []
        while not attempt.wait(1):
            seen.append([usage(p) for p in attempt.ranks()])
        seconds = time.time() - start
        seen = [s for s in seen if len(s) == 2 and all(s)]
        early, late = seen[len(seen) // 4], seen[-2]
        print(f"undisturbed: {seconds:.0f} s; resident kB and descriptors of the ranks after a quarter: {early}, at the end: {late}", flush=True)
        if any(b[0] > 1.1 * a[0] or b[1] > a[1] + 2 for a, b in zip(early, late)):
            problems.append("memory or descriptors grow")
        expected = load(undisturbed)
        complete = attempts = 0
        done = False
        while sum(counts.values()) < args.events or not done:
            run = folder / f"run{complete}"
            two_hosts = hosts and attempts % 2 == 1
            attempts += 1
            attempt = Attempt(args, run, two_hosts)
            while not attempt.wait(rng.uniform(0.05, 5)) and sum(counts.values()) < args.events:
                kind = rng.choices(KINDS, WEIGHTS)[0]
                if disturb(kind, attempt, rng):
                    counts[kind] += 1
            if not attempt.wait(180 + 10 * seconds):
                problems.append(f"attempt {attempts} did not end")
                send(attempt.everything(), signal.SIGKILL)
                attempt.wait(10)
            time.sleep(0.3)
            if orphans := processes_of(run):
                time.sleep(3)
                if orphans := processes_of(run):
                    problems.append(f"attempt {attempts}: orphans {orphans}")
                    send(orphans, signal.SIGKILL)
            log = run.parent / (run.name + ".log")
            done = f"done: {run}/last.pth".encode() in log.read_bytes()
            if done:
                complete += 1
                if where := difference(expected, load(run)):
                    problems.append(f"{run}/last.pth differs from the undisturbed run at {where}")
                if scores(run) != scores(undisturbed):
                    problems.append(f"{run}/metrics.csv has other evaluations than the undisturbed run")
                print(f"run {complete} is complete after {attempts} attempts and {sum(counts.values())} events: {problems or 'all equal'}", flush=True)
        if new := sorted(p for p in leftovers() - before if "soak" not in p or p.startswith("/dev/shm")):
            problems.append("left in /dev/shm and /tmp: " + ", ".join(new))
    finally:
        if hosts:
            root("ip netns del soaka; ip netns del soakb")
    print(f"{sum(counts.values())} events in {attempts} attempts, {complete} complete runs")
    for kind in KINDS:
        print(f"  {counts[kind]:4} {kind}")
    for p in problems:
        print("PROBLEM:", p)
    if not args.out and not problems:
        shutil.rmtree(folder)
    sys.exit(bool(problems) or complete == 0)


if __name__ == "__main__":
    main()
