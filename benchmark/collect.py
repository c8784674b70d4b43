"""Reads finished runs, ours (a folder with TensorBoard events) and Sample Factory's (a folder with its out.txt), into benchmark/results/.

    python benchmark/collect.py curves OUT.csv FOLDER...   # return over steps and seconds
    python benchmark/collect.py rates OUT.json FOLDER...   # frames/s after 20 s of warm-up, median by system, ratio

Seconds count from a run's first line of log to each report, so they include the start of the games. Returns are raw: those that
Sample Factory logs are divided by its reward scale.
"""

import csv
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from pathlib import Path

SF_SCALE = {"doom_basic": 0.01}  # of the return that Sample Factory logs


def read_ours(folder: Path) -> list[tuple[float, int, float | None]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    returns = {event.step: event.value for event in events.Scalars("charts/episodic_return")}
    start = datetime.datetime.strptime((folder / "log.txt").read_text()[:19], "%Y-%m-%d %H:%M:%S").timestamp()
    return [(event.wall_time - start, event.step, returns.get(event.step)) for event in events.Scalars("charts/SPS")]


def read_sample_factory(folder: Path) -> list[tuple[float, int, float | None]]:
    text = re.sub(r"\x1b\[[0-9;]*m", "", (folder / "out.txt").read_text())
    scale = SF_SCALE.get(json.loads((folder / "sf" / "config.json").read_text())["env"], 1.0)
    points, start = [], None
    for stamp, line in re.findall(r"^\[([\d\- :,]+)\]\[\d+\] (.*)$", text, re.M):
        seconds = datetime.datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp()
        start = seconds if start is None else start
        if found := re.search(r"Total num frames: (\d+)", line):
            points.append((seconds - start, int(found[1]) // 4, None))
        elif (found := re.search(r"Avg episode reward: \[\(0, '([-\d.]+)'\)\]", line)) and points:
            points[-1] = (*points[-1][:2], float(found[1]) / scale)
    return points


def read(folder: Path):
    return read_sample_factory(folder) if (folder / "out.txt").exists() else read_ours(folder)


def machine() -> dict[str, str]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    import torch

    return dict(cpu=cpu[1] if cpu else platform.processor(), cores=len(os.sched_getaffinity(0)), isa=torch.backends.cpu.get_cpu_capability(),
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "none", torch=torch.__version__,
                python=platform.python_version(), commit=git.stdout.strip(), date=datetime.date.today().isoformat())  # fmt: skip


def main() -> None:
    kind, out, folders = sys.argv[1], Path(sys.argv[2]), [Path(folder) for folder in sys.argv[3:]]
    if kind == "curves":
        with open(out, "w", newline="") as file:
            file.write("# " + json.dumps(machine()) + "\n")
            writer = csv.writer(file)
            writer.writerow(["run", "seconds", "step", "return"])
            for folder in folders:
                for seconds, step, value in read(folder):
                    if value is not None:
                        writer.writerow([folder.name, round(seconds, 1), step, round(value, 2)])
        return
    rates = {}
    for folder in folders:
        points = [point for point in read(folder) if point[0] >= 20]
        (begin, first, _), (end, last, _) = points[0], points[-1]
        rates[folder.name] = dict(
            frames_per_second=round(4 * (last - first) / (end - begin)), window_seconds=round(end - begin)
        )
    systems = {}
    for name, rate in rates.items():
        systems.setdefault(name.rsplit("_", 1)[0], []).append(rate["frames_per_second"])
    medians = {name: statistics.median(values) for name, values in systems.items()}
    ratios = {
        f"{name} / sf": round(value / medians["sf"], 2)
        for name, value in medians.items()
        if name != "sf" and "sf" in medians
    }
    out.write_text(json.dumps(dict(machine=machine(), medians=medians, ratios=ratios, runs=rates), indent=2) + "\n")
    print(json.dumps(dict(medians=medians, ratios=ratios)))


if __name__ == "__main__":
    main()
