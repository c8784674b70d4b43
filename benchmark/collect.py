"""Collects results of finished runs, ours and the peers' (TensorBoard events, or Sample Factory's out.txt), for benchmark/results/.

    python benchmark/collect.py curves OUT.csv FOLDER...   # return over steps and seconds
    python benchmark/collect.py tasks/NAME/episodic_return OUT.csv FOLDER...   # or any other tag of our own runs
    python benchmark/collect.py rates OUT.json FOLDER...   # frames/s, medians by system, ratios
    python benchmark/collect.py steps OUT.json FOLDER...   # the same in steps/s, for systems with different frameskips
    python benchmark/collect.py population OUT.csv FOLDER   # the exchanges of a run of appo_pbt_doom.py

A run has the name of its folder: FAMILY_SYSTEM_ROUND for rates and steps (without FAMILY there are no ratios), SYSTEM_SEED for curves.

The seconds of a curve count up to each report, from

* the first line of the run's log, so that they include the start of the games;
* the start of the actors, for appo_gym.py, which has no log;
* the first episode, for CleanRL.

Rates leave out the first 20 s after a run's first report. Returns are raw: those that Sample Factory logs are divided by its reward scale.
In its battle they are shaped, and the kills in its TensorBoard are used instead.
"""

import contextlib
import csv
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from dummy_sampler import machine  # noqa: E402

PEERS = ("sample-factory", "stable_baselines3", "pufferlib", "torch", "numpy", "gymnasium", "gym", "vizdoom", "envpool", "ale-py", "mujoco")
SF_SCALE = {"doom_basic": 0.01}  # reward scale of the returns that Sample Factory logs


def machine_and_engines() -> dict[str, str | int]:
    """Returns `machine` and the engines' versions. Commit and date are those of now: collect before anything else is checked out."""
    found = machine()
    for name in ("vizdoom", "envpool", "deepmind_lab"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def peers() -> dict[str, dict[str, str]]:
    """Returns the packages installed for each peer whose variable is set (the variables of rates.sh and learning.sh)."""
    found = {}
    code = "import importlib.metadata as m; print(*[f'{x.name}={x.version}' for x in m.distributions()])"
    for variable in os.environ.keys() & {"SF_PYTHON", "CLEANRL_PYTHON", "SB3_PYTHON", "PUFFERLIB_PYTHON"}:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):  # it is not there, so it was not used
            versions = dict(word.split("=") for word in subprocess.check_output([os.environ[variable], "-c", code], text=True).split())
            found[variable] = {name: version for name, version in sorted(versions.items()) if name in PEERS}
    if "CLEANRL" in os.environ:
        commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=os.environ["CLEANRL"], capture_output=True, text=True)
        found["CLEANRL"] = dict(commit=commit.stdout.strip())
    return found


def used_args(folder: Path) -> dict:
    """Returns the settings that a run of ours was trained with; a file without a flag for precision computes in float32. Where cfg.json has
    None the value was derived, and is read from TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = json.loads((folder / "cfg.json").read_text())
    used, derived = dict(precision="float32") | (cfg["resolved"] if "resolved" in cfg else cfg["args"]), {}  # "resolved": up to 4fd3bc9
    for file in sorted(folder.rglob("events.out.tfevents*")) if None in used.values() else ():
        events = EventAccumulator(str(file)).Reload()
        if "args/text_summary" in events.Tags()["tensors"]:
            derived = json.loads(events.Tensors("args/text_summary")[-1].tensor_proto.string_val[0])
    return used | {name: derived.get(name) for name, value in used.items() if value is None}


def read_events(folder: Path, steps: str, returns: str | None = None) -> list[tuple[float, int, float | None]]:
    """Returns points (seconds, step, return or None). steps, returns: tags. Seconds count from the beginning of the first session that has
    reported anything: from its first line in log.txt or, without a log, from its args; for other systems, from their first event. For a
    resumed run, the time between sessions is left out, and so are reports on steps that were lost when a session ended."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if len([*folder.glob("policy_*")]) > 1:
        raise ValueError(f"{folder} has several policies: pass one of its folders policy_*")
    points, args = [], []
    for file in sorted(folder.rglob("events.out.tfevents*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        args += events.Tensors("args/text_summary") if "args/text_summary" in events.Tags()["tensors"] else []
        if steps in (tags := events.Tags()["scalars"]):  # a short run may have ended no episode
            values = {event.step: event.value for event in events.Scalars(returns)} if returns in tags else {}
            points += [(event.wall_time, event.step, values.get(event.step)) for event in events.Scalars(steps)]
    if not points:
        return []
    starts, log = [event.wall_time for event in args], folder / "log.txt"
    if log.exists():
        stamps = re.findall(r"^([\d-]{10} [\d:]{8}) .*\n(?:[\d-]{10} [\d:]{8} )?(?:a new run in|resuming) ", log.read_text(), re.M)
        starts = [datetime.datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S").timestamp() for stamp in stamps]
    start = max((moment for moment in starts if moment <= points[0][0]), default=points[0][0])  # of the first session that reported
    between, last, result = 0.0, start, []
    for time, step, value in points:
        if time - last > 60 and result:  # reports come every few seconds
            between += time - last
        while result and result[-1][1] >= step:
            result.pop()
        result.append((time - start - between, step, value))
        last = time
    return result


def read_sample_factory(folder: Path) -> list[tuple[float, int, float | None]]:
    """Returns points (seconds, step, mean return or None); in the battle the kills take the place of the return."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", (folder / "out.txt").read_text())
    config = json.loads((folder / "sf" / "config.json").read_text())
    env, frameskip = config["env"], config["env_frameskip"]
    if env == "doom_battle":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        start = datetime.datetime.strptime(re.search(r"\[(\d[^\]]*)\]", text)[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        events = EventAccumulator(str(folder / "sf" / ".summary" / "0"), size_guidance={"scalars": 0}).Reload()
        kills = events.Scalars("policy_stats/avg_true_objective")
        return [(event.wall_time - start, event.step // 4, event.value) for event in kills]
    scale = SF_SCALE.get(env, 1.0)
    points, start = [], None
    for stamp, line in re.findall(r"^\[([\d\- :,]+)\]\[\d+\] (.*)$", text, re.M):
        seconds = datetime.datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp()
        start = seconds if start is None else start
        if found := re.search(r"Total num frames: (\d+)", line):
            points.append((seconds - start, int(found[1]) // frameskip, None))
        elif (found := re.search(r"Avg episode reward: \[\(0, '([-\d.]+)'\)\]", line)) and points:
            points[-1] = (*points[-1][:2], float(found[1]) / scale)
    return points


def read_cleanrl(folder: Path) -> list[tuple[float, int, float]]:
    """Returns points (seconds, step, mean return of the last 100 episodes), one for each episode, since CleanRL logs the return
    of each. Seconds count from the first."""
    points = read_events(folder, "charts/episodic_return", "charts/episodic_return")
    returns = [value for _, _, value in points]
    return [(seconds, step, statistics.mean(returns[max(0, i - 99) : i + 1])) for i, (seconds, step, _) in enumerate(points)]


def read(folder: Path):
    """Returns the points (seconds, step, mean return or None) of a run."""
    if (folder / "out.txt").exists():
        return read_sample_factory(folder)
    if (folder / "cfg.json").exists():
        return read_events(folder, "charts/SPS", "charts/episodic_return")
    if (folder / "runs").exists():  # CleanRL
        return read_events(folder, "charts/SPS")
    return read_events(folder, "time/fps", "rollout/ep_rew_mean")  # Stable-Baselines3


def read_population(folder: Path) -> list[dict]:
    """Returns a row for each policy at the start of a session and at each exchange, with its numbers from then on. The objective, and the
    policy whose weights it continues with, are taken from the log."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows, sessions = [], re.split("(?= games)", (folder / "log.txt").read_text())[1:]
    log = "".join(session for session in sessions if re.search(r"\d step [\d,]+: ", session))  # only sessions with an iteration
    log = re.findall(r"(?:( games)|policy (\d+) \(\w+ (\S+)\) is (?:replaced by policy (\d+))?)", log)
    for place in sorted(folder.glob("policy_*")):
        policy, events = int(place.name[-2:]), EventAccumulator(str(place), size_guidance={"scalars": 0}).Reload()
        own = [line for line in log if line[0] or int(line[1]) == policy]
        names = [tag for tag in events.Tags()["scalars"] if tag.startswith("pbt/")]
        for (_, _, objective, donor), *numbers in zip(own, *map(events.Scalars, names), strict=True):
            row = dict(step=numbers[0].step, policy=policy, weights_of=int(donor or policy), objective=objective)
            rows.append(row | {name.removeprefix("pbt/"): float(f"{event.value:.6g}") for name, event in zip(names, numbers)})
    return sorted(rows, key=lambda row: (row["step"], row["policy"]))


def write_population(out: Path, folder: Path) -> None:
    rows = read_population(folder)
    with open(out, "w", newline="") as file:
        file.write(f"# {json.dumps(machine_and_engines())}\n")
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def curve_of(folder: Path, tag: str) -> list[tuple]:
    """Returns the points of a run: with its return if `tag` is "curves", else with the metric of that tag."""
    if tag != "curves":
        return read_events(folder, tag, tag)
    return read_cleanrl(folder) if (folder / "runs").exists() else read(folder)


def write_curves(out: Path, curves: dict[str, list[tuple]]) -> None:
    """Writes the points (seconds, step, return) of each run as CSV."""
    with open(out, "w", newline="") as file:
        file.write(f"# {json.dumps(machine_and_engines())}\n")
        writer = csv.writer(file)
        writer.writerow(["run", "seconds", "step", "return"])
        for run, points in curves.items():
            writer.writerows([run, round(seconds, 1), step, round(value, 2)] for seconds, step, value in points if value is not None)


def rate_of(folder: Path, unit: str) -> dict[str, int | str]:
    """Returns a run's rate, with its window and, for our runs, some settings. Raises ValueError if the run is too short."""
    frames_of_step = 1 if unit == "steps_per_second" else 4
    if (folder / "rate.json").exists():  # written by pufferlib_atari.py or, for the games alone, by dummy_sampler.py
        rate = json.loads((folder / "rate.json").read_text())
        if "results" in rate:
            rate = {unit: round(rate["results"][0]["frames_per_second"] / (rate["frameskip"] if frames_of_step == 1 else 1))}
        return rate
    points = read(folder)  # only those with new steps count: a batch may take many seconds
    points = [point for last, point in pairwise([(0.0, 0, None), *points]) if point[1] > last[1]]
    points = [point for point in points if point[0] >= points[0][0] + 20]
    if len(points) < 2:
        raise ValueError(f"{folder} is too short for a rate: train it for more seconds or more steps")
    (begin, first, _), (end, last, _) = points[0], points[-1]
    rate = {unit: round(frames_of_step * (last - first) / (end - begin)), "window_seconds": round(end - begin)}
    if (folder / "cfg.json").exists():  # ours
        used = used_args(folder)
        rate |= {name: used[name] for name in ("device", "precision", "batch_size")}
    return rate


def write_rates(out: Path, runs: dict[str, dict], unit: str) -> None:
    """Writes the rates of runs with their medians and ratios as JSON, and prints medians and ratios. runs: {FAMILY_SYSTEM_ROUND: what
    `rate_of` returns}."""
    systems = {}
    for name, rate in runs.items():
        systems.setdefault(name.rsplit("_", 1)[0], []).append(rate[unit])
    medians, ratios = {name: statistics.median(values) for name, values in systems.items()}, {}
    for name, value in medians.items():  # ours relative to each peer of the same family
        ours = f"{name.split('_')[0]}_ours"
        if name != ours and ours in medians:
            ratios[name] = round(medians[ours] / value, 2)
    out.write_text(json.dumps(dict(machine=machine_and_engines(), peers=peers(), medians=medians, ratios=ratios, runs=runs), indent=2) + "\n")
    print(json.dumps(dict(medians=medians, ratios=ratios)))


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    kind, out, folders = sys.argv[1], Path(sys.argv[2]), [Path(folder) for folder in sys.argv[3:]]
    if kind == "population":
        write_population(out, folders[0])
    elif kind in ("rates", "steps"):
        unit = "steps_per_second" if kind == "steps" else "frames_per_second"
        runs = {}
        for folder in folders:
            try:
                runs[folder.name] = rate_of(folder, unit)
            except ValueError as error:
                print(f"skipped: {error}", file=sys.stderr)
        write_rates(out, runs, unit)
    elif kind == "curves" or "/" in kind:
        write_curves(out, {folder.name: curve_of(folder, kind) for folder in folders})
    else:
        sys.exit(f"error: {kind} is unknown: use curves, rates, steps, population or the tag of a metric")


if __name__ == "__main__":
    main()
