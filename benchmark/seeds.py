"""Trains every combination of some flags with several seeds, and compares what they reach over steps.

    python benchmark/seeds.py --seeds 1 2 3 --grid "env-id=basic,defend_the_center" "rnn-type=gru,lstm" --parallel 2 \
        -- python appo_doom.py --total-timesteps 300000
    python benchmark/seeds.py --seeds 1 2 3 --goals 5 10 --settings "" "ppo-clip-value=1.0" "vtrace-lambda=1 num-epochs=2" \
        -- python appo_doom.py --env-id battle --total-timesteps 700000
    python benchmark/seeds.py --seeds 1 2 3 --parallel 9 --slurm partition=gpu gpus-per-node=1 cpus-per-task=20 \
        -- python appo_doom.py --env-id battle
    python benchmark/plot.py runs/seeds    # the curves, mean and spread over seeds

A setting is a string of flags without their dashes, "" is the command as it stands; "NAME: FLAGS" gives it another name. An axis of the
grid is a flag and its values, or flags to choose one from ("sync,no-sync"). Every setting is combined with every value of each axis; the
first seed is trained with all combinations, then with each of --peers, then the next seed. A peer is "NAME: COMMAND", any program whose
runs collect.py can read; {seed} and {folder} in it are filled in. (Not a population: it has several curves.) At most --parallel runs go at once, each on its own share of the cores
(and with its own GPU, by CUDA_VISIBLE_DEVICES; where there are fewer GPUs than runs they share them).

The same line again goes on: finished runs, whose curves are in OUT, are not made again, and one that was cut off resumes; another command
wants another --folder. A run that fails is reported with its last lines, and the others go on. Ctrl-C stops all, with checkpoints. With
--report the table is printed and nothing is trained. With --slurm (pip install submitit) each run is a job of its own on Slurm, with these
parameters of `submitit.AutoExecutor`, in a folder that all machines see; keep this script running, it collects the curves. Before a job's
time is up its run is saved; the same line again resumes it. Where there is no Slurm, submitit runs them here.

A run does not know of those beside it: where a container's CPU quota is less than its cores, say their --num-workers.

Steps are compared, not minutes. Still, nothing else should run beside it: other work changes the policy lag, and with it what is learned
from a step. OUT has the mean lag of each run.

The table has, for each setting, the median of the steps to each goal (a mean raw return of the last 100 episodes) and how many of the runs
reached it, the mean return over all steps (the area under the curve) and over the last tenth of them, which are each run's own: where runs
end by the clock, settings that are faster are averaged over more steps. Ranges are 95 % bootstrap intervals
of the mean over seeds; of two or three seeds they are too narrow.
"""

import csv
import itertools
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent))
from collect import curve_of, machine_and_engines, read_events, used_args  # noqa: E402

COLUMNS = ["setting", "seed", "seconds", "step", "return"]


@dataclass
class Options:
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    settings: list[str] = field(default_factory=lambda: [""])  # flags of each setting, without dashes
    grid: list[str] = field(default_factory=list)  # "flag=value,value", combined with each other and with the settings
    peers: list[str] = field(default_factory=list)  # "name: command" of other programs, run beside
    parallel: int = 1  # how many runs go at once
    slurm: list[str] | None = None  # hand the runs to Slurm, with these parameters, each as name=value
    goals: list[float] = field(default_factory=list)  # returns of which the table says when they were reached
    folder: Path = Path("runs/seeds")  # the runs' train dir
    out: Path | None = None  # CSV file for the curves. Default: FOLDER/curves.csv
    report: bool = False  # print the table of what OUT holds, and train nothing


def combinations(settings: list[str], grid: list[str]) -> dict[str, str]:
    """Every setting with every value of each axis: its name -> its flags."""
    axes = [settings]
    for axis in grid:
        flag, _, values = axis.partition("=")
        axes.append([f"{flag}={value}" for value in values.split(",")] if values else flag.split(","))
    found = {}
    for setting, *more in itertools.product(*axes):
        name, flags = re.fullmatch(r"(?:([\w.-]+):(?= |$) ?)?(.*)", setting).groups()
        found[" ".join(filter(None, [name or flags, *more]))] = " ".join(filter(None, [flags, *more]))
    return found


def read_curves(out: Path) -> dict[str, dict[int, np.ndarray]]:
    """Setting -> seed -> [points, 3]: seconds, step, mean return of the last 100 episodes."""
    curves = defaultdict(lambda: defaultdict(list))
    if out.exists():
        for row in csv.DictReader(line for line in open(out) if not line.startswith("#")):
            curves[row["setting"]][int(row["seed"])].append([float(row[name]) for name in COLUMNS[2:]])
    return {setting: {seed: np.array(points) for seed, points in seeds.items()} for setting, seeds in curves.items()}


def commands_of(out: Path) -> dict[str, str]:
    """Run -> the command that has made it, without seed and folder."""
    found = [json.loads(line[2:]) for line in open(out) if line.startswith("# ")] if out.exists() else []
    return {about["run"]: about["command"] for about in found}


def refuse(sentence: str) -> NoReturn:
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


class Run:
    """One run: a setting, or a peer, with a seed."""

    def __init__(self, setting: str, seed: int, folder: Path, command: list[str], peer: bool = False):
        self.setting, self.seed, self.command = setting, seed, command
        self.name = f"{re.sub(r'[^A-Za-z0-9.-]+', '_', setting).strip('_') or 'default'}_{seed}"
        self.folder, self.output = folder / self.name, folder / f"{self.name}.txt"
        if peer:
            self.typed = [part.replace("{seed}", str(seed)).replace("{folder}", str(self.folder)) for part in command]
        else:
            self.typed = [*command, "--seed", str(seed), "--train-dir", str(folder), "--experiment", self.name]

    def check(self, finished: dict[str, str]) -> None:
        """Exits when another command has made or begun the run. finished: run -> command"""
        before = finished.get(self.name)
        if self.folder.exists() and self.output.exists():
            begun = [line[2:] for line in self.output.read_text().splitlines() if line.startswith("$ ")]
            before = before or (begun[-1] if begun else None)
        if before not in (None, " ".join(self.command)):
            refuse(f"{self.name} is there, made by another command ({before}): choose another --folder")

    def start(self, options: Options, share: int, executor) -> None:
        """Resumed if it was cut off; on share number `share` of this machine or, with an executor, on Slurm."""
        with open(self.output, "a") as output:
            print("$", *self.command, file=output)
        if executor:
            self.process = Job(executor.submit(execute, self.typed, str(self.output)))
            return
        cores = sorted(os.sched_getaffinity(0))
        environment = os.environ | gpus(share, options.parallel)
        try:
            os.sched_setaffinity(0, part(cores, share, options.parallel))  # which the run inherits
            with open(self.output, "a") as output:
                self.process = subprocess.Popen(
                    self.typed, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
                )
        finally:
            os.sched_setaffinity(0, cores)

    def report(self, error: Exception) -> None:
        """That the run has failed."""
        last = self.output.read_text().splitlines()[-8:] if self.output.exists() else []
        print(f"failed: {self.name} ({error}); the end of {self.output}:", *last, sep="\n    ", file=sys.stderr, flush=True)

    def add_curve(self, out: Path, machine: dict) -> None:
        """Raises ValueError when the run has reported nothing."""
        points = [(round(seconds, 1), step, round(value, 3)) for seconds, step, value in curve_of(self.folder, "curves") if value is not None]
        if not points:
            raise ValueError("no episode was over")
        about = dict(run=self.name, command=" ".join(self.command))
        if (self.folder / "cfg.json").exists():  # one of ours
            lag = statistics.mean(lag for _, _, lag in read_events(self.folder, "charts/SPS", "lag/mean"))
            about |= dict(precision=used_args(self.folder)["precision"], lag=round(lag, 2))
        about |= machine
        new = not out.exists()
        with open(out, "a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(COLUMNS)
            file.write(f"# {json.dumps(about)}\n")
            writer.writerows([self.setting, self.seed, *point] for point in points)


def part(things: list, share: int, shares: int) -> list:
    """Share number `share` of them; a single one, which others have too, where there are fewer than shares."""
    return things[share * len(things) // shares : (share + 1) * len(things) // shares] or [things[share * len(things) // shares]]


def gpus(share: int, shares: int) -> dict[str, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return dict(CUDA_VISIBLE_DEVICES=",".join(part(visible.split(","), share, shares)))


def execute(command: list[str], output: str) -> int:
    """What a job does. A signal that ends it is passed on to the run: some Slurms send it to all processes of a job, most
    to this one alone. SIGUSR2, which submitit has Slurm send a while before the job's time is up, would kill the run: it
    is told to end instead."""

    def end(*_):
        if "SLURM_JOB_ID" in os.environ:  # a second signal would kill a run that saves itself after the first
            time.sleep(5)
        process.terminate()

    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the run inherits that
    with open(output, "a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    signal.signal(signal.SIGUSR2, lambda *_: process.terminate())
    return process.wait()


class Job:
    """A job of submitit, used like a Popen."""

    def __init__(self, job):
        self.job, self.terminate, self.wait = job, job.cancel, job.wait

    def poll(self) -> int | None:
        if not self.job.done():
            return None
        if error := self.job.exception():
            print(error, file=sys.stderr)
        return 1 if error else self.job.result()


def executor_for(parameters: list[str], folder: Path):
    try:
        import submitit
    except ImportError:
        refuse("--slurm needs submitit: pip install submitit")
    executor = submitit.AutoExecutor(folder=folder / "jobs")
    general, given = executor._typed_parameters(), {"timeout_min": 24 * 60}
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        name = name.replace("-", "_")
        given[name if name in general else f"slurm_{name}"] = int(value) if value.isdigit() else value
    try:
        executor.update_parameters(**given)
    except (NameError, AssertionError) as error:
        refuse(f"--slurm: {error}")
    print(f"submitit runs the jobs: {executor.cluster}", flush=True)
    return executor


def train(command: list[str], options: Options, out: Path) -> int:
    """Makes the runs that OUT does not have. Returns the number of those that failed."""
    peers, runs = dict(peer.split(": ", 1) for peer in options.peers), []
    for seed in options.seeds:
        for setting, flags in combinations(options.settings, options.grid).items():
            runs.append(Run(setting, seed, options.folder, [*command, *(f"--{flag}" for flag in flags.split())]))
        runs += [Run(name, seed, options.folder, shlex.split(peer), peer=True) for name, peer in peers.items()]
    finished, failed = commands_of(out), 0
    machine = machine_and_engines()  # now: files may be edited, or another commit checked out, while it runs
    for run in runs:
        run.check(finished)
    options.folder.mkdir(parents=True, exist_ok=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    executor = executor_for(options.slurm, options.folder) if options.slurm is not None else None
    waiting = [run for run in runs if run.name not in finished]
    running: dict[int, Run] = {}  # by the share of the machine
    try:
        while waiting or running:
            for share in range(options.parallel):
                if share not in running and waiting:
                    run = waiting.pop(0)
                    try:
                        run.start(options, share, executor)
                    except OSError as error:  # there is no such program
                        failed += 1
                        run.report(error)
                        continue
                    running[share] = run
                    print(f"{time.strftime('%H:%M')} {run.name} began, {len(waiting)} are waiting", flush=True)
            time.sleep(0.2)
            for share, run in list(running.items()):
                if (code := run.process.poll()) is None:
                    continue
                del running[share]
                try:
                    if code:
                        raise ValueError(f"exit code {code}")
                    run.add_curve(out, machine)
                    print(f"{time.strftime('%H:%M')} {run.name} is done", flush=True)
                except (OSError, ValueError, LookupError) as error:
                    failed += 1
                    run.report(error)
    finally:  # Ctrl-C, SIGTERM
        for run in running.values():
            run.process.terminate()
        for run in running.values():
            run.process.wait()
    return failed


def interval(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    means = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return f"{np.mean(values):.2f} ({low:.2f} to {high:.2f})"


def table(curves: dict[str, dict[int, np.ndarray]], goals: list[float]) -> str:
    """Markdown, a row for each setting."""
    lines = [["setting", "seeds", *(f"steps to {goal:g}" for goal in goals), "mean return over all steps", "over the last tenth"]]
    lines.append(["---"] * len(lines[0]))
    for setting, seeds in curves.items():
        line, means, lasts = [f"`{setting}`" if setting else "default", str(len(seeds))], [], []
        for goal in goals:
            steps = [min(points[points[:, 2] >= goal, 1], default=np.inf) for points in seeds.values()]
            median, reached = statistics.median(steps), np.isfinite(steps).sum()
            line.append(f"{f'{median / 1000:,.0f}k' if median < np.inf else '-'} ({reached} of {len(seeds)})")
        for points in seeds.values():
            step, value = points[:, 1], points[:, 2]
            means.append(np.trapezoid(value, step) / (step[-1] - step[0]) if len(step) > 1 else value[0])
            lasts.append(value[step >= 0.9 * step[-1]].mean())
        lines.append([*line, interval(means), interval(lasts)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # the terminal was closed, and there was no nohup
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is off in a script's background jobs
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, command = tyro.cli(Options, args=sys.argv[1:split]), sys.argv[split + 1 :]
    out, failed = options.out or options.folder / "curves.csv", 0
    if not options.report:
        if not command:
            refuse("the command to run comes after --")
        if options.parallel < 1:
            refuse(f"--parallel {options.parallel}: at least one")
        failed = train(command, options, out)
    print(table(read_curves(out), options.goals))
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
