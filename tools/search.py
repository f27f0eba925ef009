#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Searches hyper-parameters of ./train with Optuna: short runs, of which the unpromising ones are stopped early.

  .venv/bin/pip install optuna
  tools/search.py --trials 20 -- --data DIR --weights yolox-s --epochs 20

Flags after -- go to each run. A trial is a run folder, searches/NAME/trialN. The search is kept in searches/NAME/search.db:
the same command continues it. Edit suggest() for other flags."""
import argparse, csv, math, os, pathlib, signal, subprocess, sys, time

import optuna


def suggest(trial):
    return {"lr": trial.suggest_float("lr", 2e-4, 1e-2, log=True), "weight-decay": trial.suggest_float("weight-decay", 1e-4, 0.1, log=True),
            "mosaic-prob": trial.suggest_float("mosaic-prob", 0, 1)}


def evaluations(run):
    """Returns [(step, AP)] of a run so far."""
    try:
        with open(run / "metrics.csv") as file:
            return [(int(float(r["iteration"])), float(r["AP"])) for r in csv.DictReader(file) if r["AP"]]
    except (OSError, KeyError):
        return []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--name", default="search")
    parser.add_argument("--train", default="./train", help="the program [./train]")
    own = sys.argv[1:sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    args, flags = parser.parse_args(own), sys.argv[len(own) + 2:]
    folder = pathlib.Path("searches", args.name)
    folder.mkdir(parents=True, exist_ok=True)

    def objective(trial):
        run = folder / f"trial{trial.number}"
        words = [w for name, value in suggest(trial).items() for w in (f"--{name}", str(value))]
        process = subprocess.Popen([args.train, "--eval-interval", "1", *flags, *words, "--out", str(run)], stdout=subprocess.DEVNULL)
        try:
            reported = 0
            while process.poll() is None:
                time.sleep(1)
                for step, ap in evaluations(run)[reported:]:
                    reported += 1
                    trial.report(ap, step)
                    if trial.should_prune():
                        raise optuna.TrialPruned()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait()
        if process.returncode:
            raise RuntimeError(f"{run}: exit code {process.returncode}")
        return max((ap for _, ap in evaluations(run)), default=0.0)

    study = optuna.create_study(direction="maximize", storage=f"sqlite:///{folder}/search.db", study_name=args.name, load_if_exists=True,
                                pruner=optuna.pruners.MedianPruner(n_startup_trials=4))
    study.optimize(objective, n_trials=args.trials, catch=(RuntimeError,))
    if any(t.state.name == "COMPLETE" for t in study.trials):
        best = study.best_trial
        print(f"best: {folder}/trial{best.number}, AP {best.value:.4f}:", *(f"--{k} {v}" for k, v in best.params.items()))


if __name__ == "__main__":
    main()
