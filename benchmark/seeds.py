"""Trains every combination of some flags with several seeds, and compares their returns over steps.

    python benchmark/seeds.py --seeds 1 2 3 --grid "env-id=basic,defend_the_center" "rnn-type=gru,lstm" --parallel 2 \
        -- python appo_doom.py --total-timesteps 300000
    python benchmark/seeds.py --seeds 1 2 3 --goals 5 10 --settings "" "ppo-clip-value=1.0" "vtrace-lambda=1 num-epochs=2" \
        -- python appo_doom.py --env-id battle --total-timesteps 700000
    python benchmark/seeds.py --seeds 1 2 3 --parallel 9 --slurm partition=gpu gpus-per-node=1 cpus-per-task=20 \
        -- python appo_doom.py --env-id battle
    python benchmark/plot.py runs/seeds    # plots the curves: mean and spread over seeds

* A setting is a string of flags without their dashes; "" is the command as it stands, and "NAME: FLAGS" gives the setting another name.
* An axis of --grid is a flag and its values, or flags to choose one from ("sync,no-sync"). Every setting is combined with every value of
  each axis.
* A peer is "NAME: COMMAND": any program whose runs collect.py can read (not a population, which has several curves). {seed} and {folder} in
  the command are filled in. With peers alone, no command is needed after --.

The first seed is trained with all combinations, then with all peers; then the next seed follows. At most --parallel runs go at once, each
on its own share of the cores and with its own GPU (by CUDA_VISIBLE_DEVICES); if there are fewer GPUs than runs, the runs share them. A run
does not know of those beside it: if a container's CPU quota is less than its cores, set --num-workers in the command.

To continue, type the same line again: finished runs, whose curves are in OUT, are skipped, and interrupted runs resume. Another command
needs another --folder. If a run fails, the end of its output is printed and the others go on. Ctrl-C stops all runs, which then save
checkpoints. With --report nothing is trained and the table is printed.

With --slurm (pip install submitit) each run is a Slurm job with these parameters of `submitit.AutoExecutor`, in a folder that all machines
see. Keep this script running, since it collects the curves. A run is saved before its job's time is up; the same line resumes it. Without
Slurm, submitit runs the jobs on this machine.

Runs are compared over steps, not over time. Still, nothing else should run beside them: other work changes the policy lag, and with it what
is learned from a step. OUT has the mean lag of each run.

For each setting, the table has

* the median number of steps to each goal (a mean raw return of the last 100 episodes), and how many of the runs reached it;
* the mean return over all steps (the area under the curve);
* the mean return over the last tenth of the steps.

The steps are each run's own: if runs end by the clock, faster settings are averaged over more steps. Ranges are 95 % bootstrap intervals of
the mean over seeds; with two or three seeds they are too narrow.
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
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])  # every setting is trained with each of them
    settings: list[str] = field(default_factory=lambda: [""])  # flags of each setting, without dashes; "NAME: FLAGS" names it
    grid: list[str] = field(default_factory=list)  # axes, "flag=value,value" or "flag,flag": combined with each other and the settings
    peers: list[str] = field(default_factory=list)  # "NAME: COMMAND" of other programs to compare with
    parallel: int = 1  # the number of runs at a time
    slurm: list[str] | None = None  # run Slurm jobs with these parameters, each NAME=VALUE
    goals: list[float] = field(default_factory=list)  # mean returns; the table has the steps until each is reached
    folder: Path = Path("runs/seeds")  # the runs' --train-dir
    out: Path | None = None  # CSV file for the curves. Default: FOLDER/curves.csv
    report: bool = False  # train nothing, only print the table of the runs in OUT


def combinations(settings: list[str], grid: list[str]) -> dict[str, str]:
    """Returns {name: flags} for every combination of a setting and a value of each axis."""
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
    """Returns {setting: {seed: [points, 3]}}; a point is seconds, step, mean return of the last 100 episodes."""
    curves = defaultdict(lambda: defaultdict(list))
    if out.exists():
        for row in csv.DictReader(line for line in open(out) if not line.startswith("#")):
            curves[row["setting"]][int(row["seed"])].append([float(row[name]) for name in COLUMNS[2:]])
    return {setting: {seed: np.array(points) for seed, points in seeds.items()} for setting, seeds in curves.items()}


def commands_of(out: Path) -> dict[str, str]:
    """Returns {run: command} of the finished runs; the commands are without seed and folder."""
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
        """Exits with a message if another command has made or begun the run. finished: {run: command}."""
        before = finished.get(self.name)
        if self.folder.exists() and self.output.exists():
            begun = [line[2:] for line in self.output.read_text().splitlines() if line.startswith("$ ")]
            before = before or (begun[-1] if begun else None)
        if before not in (None, " ".join(self.command)):
            refuse(f"{self.name} already exists, made by another command ({before}): choose another --folder")

    def start(self, options: Options, share: int, executor) -> None:
        """Starts the run, or resumes it if it was interrupted: on share number `share` of this machine or, with an executor, on Slurm."""
        with open(self.output, "a") as output:
            print("$", *self.command, file=output)
        if executor:
            self.process = Job(executor.submit(execute, self.typed, str(self.output)))
            return
        cores = sorted(os.sched_getaffinity(0))
        environment = os.environ | gpus(share, options.parallel)
        try:
            os.sched_setaffinity(0, part(cores, share, options.parallel))  # the run inherits this
            with open(self.output, "a") as output:
                self.process = subprocess.Popen(
                    self.typed, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
                )
        finally:
            os.sched_setaffinity(0, cores)

    def report(self, error: Exception) -> None:
        """Prints that the run has failed, and the end of its output."""
        last = self.output.read_text().splitlines()[-8:] if self.output.exists() else []
        print(f"failed: {self.name} ({error}); the end of {self.output}:", *last, sep="\n    ", file=sys.stderr, flush=True)

    def add_curve(self, out: Path, machine: dict) -> None:
        """Appends the run's curve to OUT. Raises ValueError if no episode has ended."""
        points = [(round(seconds, 1), step, round(value, 3)) for seconds, step, value in curve_of(self.folder, "curves") if value is not None]
        if not points:
            raise ValueError("no episode has ended")
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
    """Returns share number `share` of the things: if there are fewer things than shares, one thing that several shares have."""
    return things[share * len(things) // shares : (share + 1) * len(things) // shares] or [things[share * len(things) // shares]]


def gpus(share: int, shares: int) -> dict[str, str]:
    """Returns the environment variable that gives a run its share of the visible GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return dict(CUDA_VISIBLE_DEVICES=",".join(part(visible.split(","), share, shares)))


def execute(command: list[str], output: str) -> int:
    """Runs a command and returns its exit code: the body of a job. A signal that ends the job is passed on to the run, because most Slurm
    installations send it to this process alone; some send it to all processes of the job. SIGUSR2, which submitit has Slurm send a while
    before the job's time is up, would kill the run: the run gets SIGTERM instead."""

    def end(*_):
        if "SLURM_JOB_ID" in os.environ:  # the run may have got the signal: a second one now would kill it while it saves
            time.sleep(5)
        process.terminate()

    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the run inherits this
    with open(output, "a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    signal.signal(signal.SIGUSR2, lambda *_: process.terminate())
    return process.wait()


class Job:
    """A submitit job with the interface of a Popen."""

    def __init__(self, job):
        self.job, self.terminate, self.wait = job, job.cancel, job.wait

    def poll(self) -> int | None:
        if not self.job.done():
            return None
        if error := self.job.exception():
            print(error, file=sys.stderr)
        return 1 if error else self.job.result()


def executor_for(parameters: list[str], folder: Path):
    """Returns submitit's executor with the parameters of --slurm. Exits with a message if one is wrong."""
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
    """Trains the runs that are not in OUT. Returns the number of those that failed."""
    peers, runs = dict(peer.split(": ", 1) for peer in options.peers), []
    settings = combinations(options.settings, options.grid) if command else {}
    for seed in options.seeds:
        for setting, flags in settings.items():
            runs.append(Run(setting, seed, options.folder, [*command, *(f"--{flag}" for flag in flags.split())]))
        runs += [Run(name, seed, options.folder, shlex.split(peer), peer=True) for name, peer in peers.items()]
    finished, failed = commands_of(out), 0
    machine = machine_and_engines()  # now, since files may be edited, or another commit checked out, during the runs
    for run in runs:
        run.check(finished)
    options.folder.mkdir(parents=True, exist_ok=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    executor = executor_for(options.slurm, options.folder) if options.slurm is not None else None
    waiting = [run for run in runs if run.name not in finished]
    running: dict[int, Run] = {}  # keys: shares of the machine
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
                    print(f"{time.strftime('%H:%M')} {run.name} started, {len(waiting)} waiting", flush=True)
            time.sleep(0.2)
            for share, run in list(running.items()):
                if (code := run.process.poll()) is None:
                    continue
                del running[share]
                try:
                    if code:
                        raise ValueError(f"exit code {code}")
                    run.add_curve(out, machine)
                    print(f"{time.strftime('%H:%M')} {run.name} finished", flush=True)
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
    """Returns the mean and its 95 % bootstrap interval, as text."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    means = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return f"{np.mean(values):.2f} ({low:.2f} to {high:.2f})"


def table(curves: dict[str, dict[int, np.ndarray]], goals: list[float]) -> str:
    """Returns a Markdown table with a row for each setting."""
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
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # without nohup, a closed terminal ends the runs
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is off in a script's background jobs
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, command = tyro.cli(Options, args=sys.argv[1:split]), sys.argv[split + 1 :]
    out, failed = options.out or options.folder / "curves.csv", 0
    if not options.report:
        if not command and (not options.peers or options.grid or options.settings != [""]):
            refuse("no command to run: put it after --")
        if options.parallel < 1:
            refuse(f"--parallel {options.parallel} is out of range: at least 1")
        failed = train(command, options, out)
    print(table(read_curves(out), options.goals))
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
