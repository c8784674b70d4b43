"""Makes the tables of benchmark/README.md and HISTORY.md, and the figures in benchmark/results/, from the raw results there:

    python benchmark/plot.py
    python benchmark/plot.py runs/seeds    # instead: what benchmark/seeds.py has trained, as curves.png in that folder
    python benchmark/plot.py NAME.csv      # instead: the history of a population, from `collect.py population NAME.csv FOLDER`, as NAME.png

There are two kinds of results: rates (systems and rounds) and curves (settings and seeds). plot.toml and the end of this file say what is made
from which file. A table stands in its document between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import csv
import json
import re
import statistics
import sys
import tomllib
from collections import defaultdict
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from seeds import table as settings_table

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

HERE = Path(__file__).resolve().parent
RESULTS, DOCUMENTS = HERE / "results", (HERE / "README.md", HERE / "HISTORY.md")
ROWS = tomllib.loads((HERE / "plot.toml").read_text())
HALF_HOUR, TWELVE_MINUTES, NEVER = 1800, 720, (np.inf, np.inf)  # seconds; and steps
Seeds = dict[str, np.ndarray]  # seed -> [points, 3]: seconds, step, mean return of the last 100 episodes

# ---- raw results


def read_csv(file: str | Path) -> list[dict[str, str]]:
    return list(csv.DictReader(line for line in open(RESULTS / file) if not line.startswith("#")))


def rates(file: str | Path) -> dict[str, list[float]]:
    """System -> the frames/s or steps/s of each round."""
    found = defaultdict(list)
    for run, rate in json.loads((RESULTS / file).read_text())["runs"].items():
        found[run.rsplit("_", 1)[0]].append(next(iter(rate.values())))
    return found


def read_curves(file: str | Path) -> dict[str, Seeds]:
    """Setting -> seed -> points. seeds.py writes both as columns, collect.py as one: SYSTEM_SEED."""
    found = defaultdict(lambda: defaultdict(list))
    for row in read_csv(file):
        setting, seed = row["run"].rsplit("_", 1) if "run" in row else (row["setting"], row["seed"])
        found[setting][seed].append([float(row[name]) for name in ("seconds", "step", "return")])
    return {setting: {seed: np.array(points) for seed, points in seeds.items()} for setting, seeds in found.items()}


def reached(seeds: Seeds, goal: float) -> list[tuple[float, float]]:
    """(seconds, steps) of each seed's first point at the goal."""
    return [min((tuple(point[:2]) for point in points if point[2] >= goal), default=NEVER) for points in seeds.values()]


def until(seeds: Seeds, seconds: float) -> Seeds:
    """A run that was resumed has later points, too."""
    return {seed: points[points[:, 0] <= seconds] for seed, points in seeds.items()}


def end_of(points: np.ndarray, seconds: float) -> float:
    """The mean over the last tenth of a time."""
    return points[points[:, 0] > 0.9 * seconds, 2].mean()


# ---- tables


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *rows))


def each(values: list[float], form: str = "{:,.0f}") -> str:
    return ", ".join(form.format(value) if value < np.inf else "-" for value in sorted(values))


def spread(values: list[float], form: str) -> str:
    """Their mean and, where there are several, the lowest and the highest."""
    return form.format(np.mean(values)) + (f" ({form} to {form})".format(min(values), max(values)) if len(values) > 1 else "")


def rates_table(header: list[str], form: str, rows: list[tuple]) -> str:
    """A row: labels, a file, two systems in it. Every round of both, and the ratio of the medians."""
    lines = []
    for *labels, file, one, other in rows:
        found = rates(file)
        ratio = statistics.median(found[one]) / statistics.median(found[other])
        lines.append([*labels, each(found[one]), each(found[other]), form.format(ratio)])
    return table(header, lines)


def when(runs: list[tuple[float, float]]) -> list[str]:
    """Steps and time of runs that reached a goal after (seconds, steps): of each, of more than three the median and the range. What was
    published has no time."""
    seconds, steps = [run[0] for run in runs], [run[1] for run in runs]

    def some(values: list[float], text) -> str:
        if len(values) > 3 and min(values) == np.inf:
            return "-"
        texts = [text(value) if value < np.inf else "-" for value in (statistics.median(values), *sorted(values))]
        return ", ".join(texts[1:]) if len(values) <= 3 else f"{texts[0]} ({texts[1]} to {texts[-1]})"

    counts = some(steps, lambda step: f"{step / 1e6:.1f}M" if step >= 1e6 else f"{step / 1e3:.0f}k")
    if not (last := max((second for second in seconds if second < np.inf), default=0)):
        return [counts]
    if last < 100:
        return [counts, some(seconds, "{:.0f}".format) + " s"]
    return [counts, some([second / 60 for second in seconds], "{:.1f}".format) + " min"]


def peer_curves(goal: float, *peers: list) -> dict[str, Seeds]:
    """A goal that was published is a point, without a time. A peer that was not run is left out."""
    found = {}
    for name, *source in peers:
        if len(source) == 1:
            found[name] = {"": np.array([[0, 1e6 * source[0], goal]])}
        elif source[1] in (curves := read_curves(source[0])):
            found[name] = curves[source[1]]
    return found


def learning_table() -> str:
    """When each run reached the goal, and between which returns they ended; when the first peer reached the same goal."""
    rows = []
    for flags, goal, file, setting, *peers in ROWS["learning"]:
        seeds, span = read_curves(file)[setting], ""
        if max(map(len, seeds.values())) > 1:  # all of the curve
            length = max(points[-1, 1] for points in seeds.values())
            ends = [points[-1, 2] for points in seeds.values() if points[-1, 1] > 0.9 * length]  # not of a run that was stopped
            end_of = [f"{end / 1000:.0f}k" if goal > 1e5 else f"{end:,.{0 if abs(goal) > 100 else 1}f}" for end in sorted({min(ends), max(ends)})]
            span = " to ".join(end_of) + f" ({length / 1e6:.2g}M)"
        peer = [f"{name}: {'; '.join(when(reached(lines, goal)))}" for name, lines in peer_curves(goal, *peers[:1]).items()] or [""]
        rows.append([f"`{flags}`", f"{goal:,}", *(when(reached(seeds, goal)) + ["-"])[:2], span, *peer])
    return table(["command", "goal", "steps to it", "time to it", "return at the end (steps)", "a peer: steps; time"], rows)


def half_hour() -> dict[str, np.ndarray]:
    runs = read_curves("half_hour_doom.csv") | read_curves("half_hour_atari.csv")
    return {setting.removeprefix("env-id="): until(seeds, HALF_HOUR)["1"] for setting, seeds in runs.items()}


def random_returns() -> dict[str, float]:
    return {row["env_id"]: float(row["return"]) for row in read_csv("random.csv")}


def half_hour_table() -> str:
    rows, at_random = [], random_returns()
    published = {row["env_id"]: f"{row['return']} ({row['by']}, {row['millions']} million)" for row in read_csv("published.csv")}
    for env_id, points in half_hour().items():
        if env_id in CLEANRL:
            curve = read_curves(CLEANRL[env_id])["cleanrl"]["1"]
            published[env_id] = f"{np.interp(points[-1, 1], curve[:, 1], curve[:, 2]):.1f} (CleanRL, the same)"
        rows.append([f"`{env_id}`", f"{at_random[env_id]:.2f}", f"**{end_of(points, HALF_HOUR):.2f}**", f"{points[:, 2].max():.2f}",
                     f"{4 * points[-1, 1] / 1e6:.1f}", published.get(env_id, "")])  # fmt: skip
    return table(["", "random actions", "return after half an hour", "highest", "million frames", "published (frames)"], rows)


def replay_runs() -> dict[str, dict[str, Seeds]]:
    """Game -> what is replayed -> seeds."""
    found = read_curves("replay.csv")
    return {game: {name: until(found[f"{setting} env-id={game}-v5"], TWELVE_MINUTES) for name, setting, _ in ROWS["replay"]}
            for game in ("Pong", "Breakout", "Seaquest")}  # fmt: skip


def replay_table() -> str:
    """Mean returns over equal frames, as many as the slowest run of the game has, and after equal minutes; and the speed."""
    header, rows, speed = ["replayed"], {name: [name] for name, *_ in ROWS["replay"]}, rates("replay_speed.json")
    for game, settings in replay_runs().items():
        runs = [points for seeds in settings.values() for points in seeds.values()]
        grid = np.linspace(max(points[0, 1] for points in runs), min(points[-1, 1] for points in runs), 1000)
        header += [f"{game}, equal frames", "minute 12"]
        for name, seeds in settings.items():
            means = [np.interp(grid, points[:, 1], points[:, 2]).mean() for points in seeds.values()]
            rows[name] += [spread(means, "{:.1f}"), spread([end_of(points, TWELVE_MINUTES) for points in seeds.values()], "{:.1f}")]
    base = statistics.median(speed["none"])
    shares = [f"{statistics.median(speed[system]) / base:.0%}" if system else "" for _, _, system in ROWS["replay"]]
    return table([*header, "frames/s"], [[*row, share] for row, share in zip(rows.values(), shares)])


def settings(file: str, *goals: float, steps: float = np.inf) -> str:
    """`steps`: how many of each run count."""
    return settings_table({setting: {seed: points[points[:, 1] <= steps] for seed, points in seeds.items()}
                           for setting, seeds in read_curves(file).items()}, goals)  # fmt: skip


def with_tables(text: str) -> str:
    def filled(mark: re.Match) -> str:
        return f"<!-- table: {mark[1]} -->\n{TABLES[mark[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", filled, text, flags=re.S)


# ---- figures

AXES = {"minutes": (0, 60), "thousand steps": (1, 1e3), "million steps": (1, 1e6), "million frames": (1, 2.5e5)}  # column, unit
LINES = [("#0b5fa5", "-"), ("#c2410c", "--"), ("#2b8a3e", ":"), ("#7048a8", "-."), ("#495057", "--"), ("#b8860b", ":"), ("#0f766e", "-.")]


def save(figure, out: Path, dpi: int = 110) -> None:
    figure.savefig(out, dpi=dpi)
    plt.close(figure)
    print(f"wrote {out}")


def curves(out: Path, title: str, columns: int, panels: list[tuple], height: float = 2.3) -> None:
    """A panel: title, x axis, {name of a line: seeds}, perhaps (name, return) of a level. Seeds are thin; the mean of several is
    thick, as far as all of them go."""
    names, handles, rows = [name for panel in panels for name in panel[2]], {}, -(-len(panels) // columns)
    styles = dict(zip(dict.fromkeys(names), LINES * len(names)))
    figure, axes = plt.subplots(rows, columns, figsize=(max(9, 2.2 * columns), height * rows + 0.5), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (heading, x, lines, *levels) in zip(axes.flat, panels):
        column, unit = AXES[x]
        for name, seeds in lines.items():
            runs, (colour, dashes) = [(points[:, column] / unit, points[:, 2]) for points in seeds.values()], styles[name]
            if not any(at.any() for at, _ in runs):  # published curves have no minutes
                continue
            for at, value in runs:
                (handles[name],) = axis.plot(at, value, dashes, marker="o" if len(at) < 13 else None, markersize=3, color=colour,
                                             linewidth=1.3 if len(runs) == 1 else 0.7, alpha=1 if len(runs) == 1 else 0.5)  # fmt: skip
            if len(runs) > 1:
                grid = np.linspace(max(at[0] for at, _ in runs), min(at[-1] for at, _ in runs), 200)
                (handles[name],) = axis.plot(grid, np.mean([np.interp(grid, *run) for run in runs], axis=0), dashes, color=colour)
        for name, value in levels:
            handles[name] = axis.axhline(value, color="black", linestyle=":", linewidth=1)
        axis.set_title(heading, fontsize=8)
        axis.set_xlabel(x, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, fontsize=8)
    figure.supylabel("mean raw return, last 100 episodes", fontsize=8)
    figure.suptitle(title, fontsize=10)
    save(figure, out)


def over_both(games: dict[str, dict[str, Seeds]], x: str) -> list[tuple]:
    """A panel of each game over x, and below them one of each over minutes."""
    return [(game, axis, lines) for axis in (x, "minutes") for game, lines in games.items()]


def learning_figure(out: Path, files: tuple[str, ...]) -> None:
    games = {flags.split()[2]: {"ours": read_curves(file)[setting], **peer_curves(goal, *peers)}
             for flags, goal, file, setting, *peers in ROWS["learning"] if flags.startswith(files)}  # fmt: skip
    curves(out, "thin: seeds, thick: their mean", 4 if len(games) > 5 else len(games), over_both(games, "million steps"))


def long_battle_figure(out: Path) -> None:
    paper = np.array([[0, 2.5e5 * float(row["million_frames"]), float(row["return"])] for row in read_csv("paper_battle.csv")])
    (ours,) = read_curves("learning_battle_long.csv")["ours"].values()
    lines = {"ours: kills, one run": {"1": ours}, "Sample Factory's paper: shaped return": {"": paper[paper[:, 1] <= 5e7]}}
    curves(out, "battle", 1, [("", "million frames", lines)], 2.8)


def half_hour_figure(out: Path) -> None:
    at_random = random_returns()
    panels = [(env_id, "minutes", {"default flags, one seed": {"1": points}}, ("random actions", at_random[env_id]))
              for env_id, points in half_hour().items()]  # fmt: skip
    curves(out, "half an hour on 2 cores without a GPU", 5, panels, 1.8)


def settings_figure(out: Path) -> None:
    found = read_curves("seeds_battle.csv")
    default = found.pop("")
    panels = [(f"{setting} ({len(seeds)})", "thousand steps", {f"default ({len(default)})": default, "one setting changed (seeds)": seeds})
              for setting, seeds in found.items()]  # fmt: skip
    curves(out, "battle: kills; thin: seeds, thick: their mean", 3, panels)


def replay_figure(out: Path) -> None:
    curves(out, "twelve minutes of each game", 3, over_both(replay_runs(), "million frames"))


def combinations(folder: Path) -> None:
    """A panel for each environment, a line for each setting."""
    panels = defaultdict(dict)
    for setting, seeds in read_curves(folder / "curves.csv").items() if (folder / "curves.csv").exists() else ():
        env_id = next((flag for flag in setting.split() if flag.startswith("env-id=")), "")
        panels[env_id][f"{' '.join(setting.replace(env_id, '').split()) or 'default'} ({len(seeds)})"] = seeds
    if not panels:
        sys.exit(f"error: {folder} has no finished run")
    panels = [(env_id.removeprefix("env-id="), "thousand steps", lines) for env_id, lines in panels.items()]
    curves(folder / "curves.png", "thin: seeds (how many), thick: their mean", min(3, len(panels)), panels, 3)


def bars(out: Path, rows: list[tuple]) -> None:
    """Of rates: a bar for each system in the rows of `rates_table`, all of one file, a tick for each round."""
    systems, machine = {}, json.loads((RESULTS / rows[0][2]).read_text())["machine"]
    for label, peer, file, one, other in rows:  # a label: "Doom", or "Doom, ours in bfloat16"
        systems[label if "ours" in label else f"{label}: ours"] = rates(file)[one]
        systems[f"{label.split(',')[0]}: {peer}"] = rates(file)[other]
    figure, axis = plt.subplots(figsize=(9, 0.38 * len(systems) + 0.8), layout="constrained")
    for i, (name, rounds) in enumerate(reversed(systems.items())):
        ours = "ours" in name
        axis.barh(i, statistics.median(rounds), color=LINES[0 if ours else 1][0], hatch=None if ours else "//", edgecolor="white")
        axis.plot(rounds, [i] * len(rounds), "k|", markersize=12)
        axis.text(max(rounds) * 1.02, i, f"{statistics.median(rounds):,.0f}", va="center")
    axis.set_yticks(range(len(systems)), list(systems)[::-1])
    axis.set_xlabel("frames per second while learning (bars: medians, ticks: runs)")
    axis.set_title(f"{machine['cpu']}, {machine['cores']} cores, no GPU; float32 where nothing else is said", fontsize=9)
    axis.set_xlim(right=1.15 * max(map(max, systems.values())))
    save(figure, out, dpi=130)


def population(out: Path, title: str, file: str | Path) -> None:
    """The objective and the first eight numbers that changed. A ring is a policy that was replaced, in the colour of the one whose weights
    it got."""
    rows = read_csv(file)
    others = ("step", "policy", "weights_of", "objective")
    names = ["objective", *[name for name in rows[0] if name not in others and len({row[name] for row in rows}) > 1][:8]]
    figure, axes = plt.subplots(-(-len(names) // 3), 3, figsize=(9, 2.4 * -(-len(names) // 3)), squeeze=False, layout="constrained")
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names):
        for policy in sorted({int(row["policy"]) for row in rows}):
            own = [row for row in rows if int(row["policy"]) == policy and row[name]]  # an objective is empty until episodes have ended
            points = [(float(row["step"]) / 1000, float(row[name]), row["weights_of"]) for row in own]
            draw = axis.plot if name == "objective" else partial(axis.step, where="post")  # other numbers hold until the next row
            draw([point[0] for point in points], [point[1] for point in points], color=f"C{policy}", label=f"policy {policy}")
            for step, value, source in points:
                if source != str(policy):
                    axis.plot(step, value, "o", markerfacecolor="none", color=f"C{source}")
        values = [float(row[name]) for row in rows if row[name]]
        if max(values) > 10 * min(values) > 0:
            axis.set_yscale("log")
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("thousand steps of a policy", fontsize=8)
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=7)
    figure.suptitle(title, fontsize=11)
    save(figure, out)


# ---- which result feeds what; the rest is in plot.toml

CLEANRL = {"Pong-v5": "cleanrl_pong.csv", "Breakout-v5": "cleanrl_breakout.csv"}  # published curves
TABLES = dict(
    peers=partial(rates_table, ["", "peer", "ours, frames/s", "peer, frames/s", "ours / peer"], "**{:.1f} x**", ROWS["peers"]),
    ceiling=partial(rates_table, ["", "environments", "training, frames/s", "alone, frames/s", "share"], "**{:.0%}**", ROWS["ceiling"]),
    ranks=partial(rates_table, ["", "two ranks, 1 worker each, frames/s", "one process, 2 workers", "share"], "{:.2f}", ROWS["ranks"]),
    learning=learning_table,
    half_hour=half_hour_table,
    replay=replay_table,
    settings_battle=partial(settings, "seeds_battle.csv", 5, 10),
    settings_basic=partial(settings, "seeds_basic.csv", 50, 75),
    settings_health=partial(settings, "seeds_health_gathering.csv", 10, 20),
    settings_defend=partial(settings, "seeds_defend_the_center.csv", 5, 10, 15),
    settings_lag=partial(settings, "seeds_lag.csv", 5, 10),
    settings_precision=partial(settings, "seeds_precision.csv", 5, 10, 15),
    settings_sync=partial(settings, "seeds_sync.csv", 0, 50, 75, steps=90_000),
    settings_replay=partial(settings, "seeds_replay.csv", 15, 25, steps=760_000),
)
FIGURES = {
    "peers.png": partial(bars, rows=[row for row in ROWS["peers"] if row[2] == "peers.json"]),
    "learning.png": partial(learning_figure, files=("appo_doom", "appo_atari", "appo_dmlab")),
    "mujoco.png": partial(learning_figure, files=("appo_mujoco",)),
    "learning_battle_long.png": long_battle_figure,
    "half_hour.png": half_hour_figure,
    "seeds_battle.png": settings_figure,
    "replay.png": replay_figure,
    "pbt_basic.png": partial(population, title="basic: three of four policies start with a ruinous learning rate", file="pbt_basic.csv"),
}


def main() -> None:
    if sys.argv[1:] and sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(0 if sys.argv[1] in ("-h", "--help") else 2)
    if sys.argv[1:]:
        path = Path(sys.argv[1]).absolute()
        return combinations(path) if path.is_dir() else population(path.with_suffix(".png"), path.stem, path)
    for name, figure in FIGURES.items():
        figure(RESULTS / name)
    for document in DOCUMENTS:
        document.write_text(with_tables(document.read_text()))


if __name__ == "__main__":
    main()
