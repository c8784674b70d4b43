"""Is one setting better than another? Trains each of them with several seeds and compares what they reach, over steps.

    python benchmark/seeds.py --out benchmark/results/seeds_battle.csv --seeds 1 2 3 4 5 --goals 5 10 \
        --settings "" "ppo-clip-value=1.0" "ppo-clip-value=1.0 num-epochs=2" -- python appo_doom.py --env-id battle --total-timesteps 700000

Runs one after the other: the first seed with every setting, then the next seed. A setting is a string of flags without their dashes, ""
is the command as it stands. The same line again goes on: runs that OUT holds are not made again, and one that was cut off resumes.
With --report the table is printed and nothing is trained.

Steps are compared, not minutes. Still, nothing else should run beside it: other work changes the policy lag, and with it what is learned
from a step. OUT has the mean lag of each run.

The table has, for each setting, the median of the steps to each goal (a mean raw return of the last 100 episodes) and how many of the runs
reached it, the mean return over all steps (the area under the curve) and over the last tenth of them. Ranges are 95 % bootstrap intervals of
the mean over seeds; of two or three seeds they are too narrow.
"""

import csv
import json
import re
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent))
from collect import machine_and_engines, read, read_events  # noqa: E402

COLUMNS = ["setting", "seed", "seconds", "step", "return"]


@dataclass
class Options:
    out: Path  # CSV file for the curves
    settings: list[str] = field(default_factory=lambda: [""])  # flags of each setting, without dashes
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    goals: list[float] = field(default_factory=list)  # returns of which the table says when they were reached
    folder: Path = Path("runs/seeds")  # the runs' train dir is a folder in this one, named like OUT
    report: bool = False  # print the table of what OUT holds, and train nothing


def read_curves(out: Path) -> dict[str, dict[int, np.ndarray]]:
    """Setting -> seed -> [points, 3]: seconds, step, mean return of the last 100 episodes."""
    curves = defaultdict(lambda: defaultdict(list))
    if out.exists():
        for row in csv.DictReader(line for line in open(out) if not line.startswith("#")):
            curves[row["setting"]][int(row["seed"])].append([float(row[name]) for name in COLUMNS[2:]])
    return {setting: {seed: np.array(points) for seed, points in seeds.items()} for setting, seeds in curves.items()}


def train(command: list[str], setting: str, seed: int, options: Options) -> None:
    """Makes or goes on with one run and adds its curve to OUT. Raises CalledProcessError."""
    name = f"{re.sub(r'[^a-z0-9.]+', '_', setting).strip('_') or 'default'}_{seed}"
    train_dir = options.folder / options.out.stem
    train_dir.mkdir(parents=True, exist_ok=True)
    flags = [*(f"--{flag}" for flag in setting.split()), "--seed", str(seed), "--train-dir", str(train_dir), "--experiment", name]
    with open(train_dir / f"{name}.txt", "a") as output:
        process = subprocess.Popen([*command, *flags], stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        except (KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, SystemExit):  # of Ctrl-C the run knows already; it saves
                process.terminate()
            process.wait()
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)
    points = []
    for seconds, step, value in read(train_dir / name):
        while points and points[-1][1] >= step:  # learned again after the run was resumed
            points.pop()
        if value is not None:
            points.append((round(seconds, 1), step, round(value, 3)))
    resolved = json.loads((train_dir / name / "cfg.json").read_text())["resolved"]
    lag = statistics.mean(lag for _, _, lag in read_events(train_dir / name, "charts/SPS", "lag/mean"))
    about = dict(run=name, command=" ".join([*command, *flags[:-6]]), precision=resolved["precision"], lag=round(lag, 2))
    about |= machine_and_engines()
    new = not options.out.exists()
    with open(options.out, "a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        file.write(f"# {json.dumps(about)}\n")
        writer.writerows([setting, seed, *point] for point in points)


def interval(values: list[float]) -> str:
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
            means.append(np.trapezoid(value, step) / (step[-1] - step[0]))
            lasts.append(value[step >= 0.9 * step[-1]].mean())
        lines.append([*line, interval(means), interval(lasts)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, command = tyro.cli(Options, args=sys.argv[1:split]), sys.argv[split + 1 :]
    if not options.report:
        if not command:
            sys.exit("error: the command to run comes after --")
        for seed in options.seeds:
            for setting in options.settings:
                if seed not in read_curves(options.out).get(setting, {}):
                    print(f"seed {seed} {setting}", flush=True)
                    try:
                        train(command, setting, seed, options)
                    except subprocess.CalledProcessError as error:
                        print(f"failed ({error.returncode}); see {options.folder / options.out.stem}", file=sys.stderr)
    print(table(read_curves(options.out), options.goals))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
