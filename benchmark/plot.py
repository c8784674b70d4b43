"""Draws the figures in benchmark/results/ from the raw files there: python benchmark/plot.py"""

import csv
import json
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
STYLE = {  # name, colour, line: to be told apart without colour too
    "ours": ("appo_doom.py", "#0b5fa5", "-"),
    "sync": ("appo_doom.py --sync", "#2b8a3e", ":"),
    "sf": ("Sample Factory 2.1.1", "#c2410c", "--"),
}


def read_curves(*names: str) -> dict[str, list[np.ndarray]]:
    """System -> one array [points, (seconds, step, return)] a seed."""
    runs = defaultdict(list)
    for name in names:
        if (RESULTS / name).exists():
            rows = [line for line in open(RESULTS / name) if not line.startswith("#")]
            for row in csv.DictReader(rows):
                runs[row["run"]].append([float(row[key]) for key in ("seconds", "step", "return")])
    systems = defaultdict(list)
    for run, points in runs.items():
        systems[run.rsplit("_", 1)[0]].append(np.array(points))
    return systems


def draw(systems, axis, column: int, scale: float, label: str) -> None:
    for system, seeds in systems.items():
        name, colour, line = STYLE[system]
        for i, points in enumerate(seeds):
            axis.plot(
                points[:, column] / scale,
                points[:, 2],
                line,
                color=colour,
                label=name if i == 0 else None,
                linewidth=1.4,
            )
    axis.set_xlabel(label)
    axis.grid(alpha=0.3)


def curves(title: str, goal: float, out: str, *names: str, without: str = "") -> None:
    systems = {system: seeds for system, seeds in read_curves(*names).items() if system != without}
    if not systems:
        return
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    draw(systems, axes[0], 0, 60, "minutes since the start")
    draw(systems, axes[1], 1, 1000, "thousand steps (4 frames each)")
    axes[0].set_ylabel("mean raw return, last 100 episodes")
    for axis in axes:
        axis.axhline(goal, color="black", linewidth=0.8, alpha=0.6)
    axes[0].legend(loc="lower right")
    figure.suptitle(title, fontsize=11)
    figure.savefig(RESULTS / out, dpi=130)
    for system, seeds in systems.items():
        reached = [next((tuple(point[:2]) for point in points if point[2] >= goal), None) for points in seeds]
        print(
            title,
            system,
            [f"{seconds / 60:.1f} min, {step / 1000:.0f}k steps" for seconds, step in filter(None, reached)],
        )
        if all(reached):
            print(f"   median {np.median([seconds for seconds, _ in reached]) / 60:.1f} min")


def throughput() -> None:
    path = RESULTS / "throughput.json"
    if not path.exists():
        return
    result = json.loads(path.read_text())
    figure, axis = plt.subplots(figsize=(6, 2), layout="constrained")
    for i, system in enumerate(("sf", "ours")):
        values = [run["frames_per_second"] for name, run in result["runs"].items() if name.startswith(system)]
        axis.barh(
            i,
            result["medians"][system],
            color=STYLE[system][1],
            hatch="//" if system == "sf" else None,
            edgecolor="white",
        )
        axis.plot(values, [i] * len(values), "k|", markersize=12)
        axis.text(max(values) * 1.03, i, f"{result['medians'][system]:,.0f}", va="center")
    axis.set_yticks([0, 1], [STYLE["sf"][0], STYLE["ours"][0]])
    axis.set_xlabel("frames per second while learning (bars: medians, ticks: runs)")
    axis.set_xlim(right=max(run["frames_per_second"] for run in result["runs"].values()) * 1.2)
    figure.savefig(RESULTS / "throughput.png", dpi=130)


if __name__ == "__main__":
    throughput()
    curves("basic, three seeds each, 2 cores without a GPU", 75, "learning_basic.png", "learning_basic.csv")
    curves("basic: asynchronous and synchronous", 75, "sync.png", "learning_basic.csv", "sync.csv", without="sf")
    curves("defend_the_center, default flags, 2 cores without a GPU", 10, "learning_defend.png", "learning_defend.csv")
