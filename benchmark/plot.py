"""Draws the figures in benchmark/results/ from the raw files there, and writes the tables of benchmark/README.md between
`<!-- table: NAME -->` and `<!-- end -->`:

    python benchmark/plot.py
    python benchmark/plot.py NAME.csv      # instead: the history of a population of your own, as `collect.py population` wrote it, as NAME.png
    python benchmark/plot.py runs/seeds                # instead: what benchmark/seeds.py has trained, as curves.png in the folder
"""

import csv
import json
import math
import re
import statistics
import sys
import textwrap
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np

from seeds import read_curves as read_settings
from seeds import table as compare_settings

RESULTS = Path(__file__).resolve().parent / "results"
README = Path(__file__).resolve().parent / "README.md"
STYLE = {  # name, colour, line: to be told apart without colour too
    "ours": ("ours", "#0b5fa5", "-"),
    "plain": ("ours, --no-normalize-input", "#2b8a3e", ":"),
    "sync": ("ours, --sync", "#2b8a3e", ":"),
    "last-action": ("ours, --last-action-reward", "#c2410c", "--"),
    "no-popart": ("ours, --no-normalize-returns", "#c2410c", "--"),
    "sf": ("Sample Factory 2.1.1", "#c2410c", "--"),
    "sf-4e-4": ("Sample Factory, learning rate 4e-4", "#7048a8", ":"),
    "cleanrl": ("CleanRL (published)", "#7048a8", "-."),
}
PEERS = {
    "doom_ours": "`appo_doom.py`",
    "doom_sf": "Sample Factory 2.1.1",
    "atari_ours": "`appo_atari.py`",
    "atari_sf": "Sample Factory 2.1.1 (EnvPool 0.9.0)",
    "atari_cleanrl": "CleanRL `ppo_atari_envpool.py`",
    "atari_cleanrl-1-epoch": "CleanRL, one epoch",
    "atari_sb3": "Stable-Baselines3 2.9.2, PPO",
    "atari_sb3-1-epoch": "Stable-Baselines3, one epoch",
    "atari_puffer-async": "PufferLib 3.0.0, two worker processes",
    "atari_puffer-native": "PufferLib 3.0.0, games in its main process",
    "dmlab_ours": "`appo_dmlab.py`",
    "dmlab_sf": "Sample Factory 2.1.1",
    **{f"{task}_{system}": name for task in ("halfcheetah", "ant") for system, name in dict(
        ours="`appo_mujoco.py`", bare="`dummy_sampler.py`: the tasks alone, random actions", sf="Sample Factory 2.1.1, its recipe",
        cleanrl="CleanRL `ppo_continuous_action.py`", sb3="Stable-Baselines3 2.9.2, PPO").items()},
}  # fmt: skip
FAMILIES = dict(doom="Doom", atari="Atari", dmlab="DeepMind Lab", halfcheetah="HalfCheetah", ant="Ant")


def read_curves(*names: str) -> dict[str, list[list[tuple[float, float, float]]]]:
    """System -> one list of points (seconds, step, return) a seed."""
    runs = defaultdict(list)
    for name in names:
        if (RESULTS / name).exists():
            rows = [line for line in open(RESULTS / name) if not line.startswith("#")]
            for row in csv.DictReader(rows):
                runs[row["run"]].append(tuple(float(row[key]) for key in ("seconds", "step", "return")))
    systems = defaultdict(list)
    for run, points in runs.items():
        systems[run.rsplit("_", 1)[0]].append(points)
    return systems


def reached(points, goal: float) -> tuple[float, float] | None:
    """(minutes, steps) of the first point at the goal."""
    return next(((seconds / 60, step) for seconds, step, value in points if value >= goal), None)


def read_json(name: str):
    return json.loads((RESULTS / name).read_text())


def about(file: Path, setting: str) -> list[dict]:
    """What the file says of each run with these flags: its machine, precision, mean lag, ..."""
    runs = [json.loads(line[1:]) for line in open(file) if line.startswith("#")]
    return [run for run in runs if all(f"--{flag}" in run["command"].split() for flag in setting.split())]


# ---- tables: name -> markdown


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def numbers(values) -> str:
    return ", ".join(f"{value:,.0f}" for value in sorted(values))


def learning_table() -> str:
    rows, systems = [], read_curves("learning_basic.csv")
    for system, name in (("ours", "`python appo_doom.py --env-id basic`"), ("sf", "Sample Factory 2.1.1")):
        minutes, steps = zip(*sorted(reached(points, 75) or (float("inf"), float("inf")) for points in systems[system]))
        rows.append([name, ", ".join(f"{m:.1f}" for m in minutes), f"**{statistics.median(minutes):.1f}**",
                     ", ".join(f"{step / 1000:.0f}k" for step in sorted(steps))])  # fmt: skip
    return table(["", "minutes to a mean return of 75 (three seeds)", "median", "steps"], rows)


def battle_table() -> str:
    rows, systems = [], read_curves("learning_battle.csv")
    for system, name in (("ours", "`appo_doom.py`"), ("sf", "Sample Factory 2.1.1"),
                         ("sf-4e-4", "the same at a learning rate of 4e-4")):  # fmt: skip
        if not (runs := systems[system]):  # not run yet
            continue
        to_ten = sorted(reached(points, 10) or (float("inf"), float("inf")) for points in runs)
        kills = [sorted(np.interp(frames / 4, *zip(*((step, value) for _, step, value in points))) for points in runs)
                 for frames in (1.5e6, 2.3e6)]  # fmt: skip
        rows.append([name, ", ".join(f"{m:.1f}" if step < float("inf") else "-" for m, step in to_ten),
                     ", ".join(f"{4 * step / 1e6:.1f}" if step < float("inf") else "-" for _, step in to_ten),
                     *(", ".join(f"{value:.1f}" for value in values) for values in kills)])  # fmt: skip
    columns = ("minutes to 10 kills (-: not reached)", "million frames to 10", "kills at 1.5 million frames", "at 2.3 million")
    return table(["", *columns], rows)


def peers_table(name: str = "peers", unit: str = "frames") -> str:
    result, rows = read_json(f"{name}.json"), []
    for system, name in PEERS.items():
        if system in result["medians"]:
            rates = [run[f"{unit}_per_second"] for key, run in result["runs"].items() if key.rsplit("_", 1)[0] == system]
            family, median = system.split("_")[0], result["medians"][system]
            ratio = f"{result['medians'][f'{family}_ours'] / median:.1f} x" if system in result["ratios"] else ""
            rows.append([FAMILIES[family], name, numbers(rates), f"**{median:,.0f}**", ratio])
    return table(["", "", f"{unit}/s, three runs", "median", "ours / this"], rows)


def ranks_table() -> str:
    result, rows = read_json("ranks.json"), []
    for family in ("doom", "atari"):
        for system, name in (("one", "one process, 2 workers"), ("ours", "two ranks, 1 worker each")):
            rates = [run["frames_per_second"] for key, run in result["runs"].items() if key.startswith(f"{family}_{system}_")]
            share = f"{statistics.median(rates) / result['medians'][f'{family}_one']:.2f}" if system == "ours" else ""
            rows.append([FAMILIES[family], name, numbers(rates), f"**{statistics.median(rates):,.0f}**", share])
    return table(["", "", "frames/s of all, three runs", "median", "share of one process"], rows)


def ranks_learning_table() -> str:
    """`basic`: of how many processes, each with how many games and samples in an update."""
    rows, small = [], ("num-workers=1 num-envs-per-worker=8 batch-size=256", 8, 256)
    for ranks, (setting, games, samples) in (
        (1, ("num-workers=2 batch-size=1024", 32, 1024)), (2, ("num-workers=1 batch-size=512", 16, 512)), (1, small), (2, small), (4, small),
    ):  # fmt: skip
        file = RESULTS / f"seeds_ranks_{ranks}.csv"
        runs, lag = read_settings(file)[setting].values(), statistics.median(run["lag"] for run in about(file, setting))
        seconds, steps = zip(*(min((tuple(point[:2]) for point in points if point[2] >= 75), default=(np.inf, np.inf)) for points in runs))
        rows.append([str(ranks), str(games), f"{ranks * samples:,}", f"{lag:.1f}", ", ".join(f"{step / 1000:.0f}k" for step in sorted(steps)),
                     f"{statistics.median(steps) / (ranks * samples):.0f}", f"{statistics.median(seconds):.0f}"])  # fmt: skip
    columns = ("games of each", "samples in an update", "lag", "steps of all to 75, three seeds", "updates, median", "seconds, median")
    return table(["processes", *columns], rows)


HALF_HOUR = 1800  # seconds; of a run that was resumed later ones do not count
# Sample Factory's paper: return after so many million frames, means over seeds, read off its curves (deadly_corridor x 100, its scale)
PAPER = dict(my_way_home=(0.54, 25), deadly_corridor=(532, 25), defend_the_center=(18.7, 25), health_gathering=(21.0, 25),
             defend_the_line=(24.6, 25), battle=(20, 50), battle2=(10, 150))  # fmt: skip
# PPO's paper (Schulman et al. 2017, table 6): means over three runs of 40 million frames, of each run's last 100 episodes
PPO_PAPER = {"SpaceInvaders-v5": 942.5, "Qbert-v5": 14293.3, "Seaquest-v5": 1204.5, "MsPacman-v5": 2096.5, "Enduro-v5": 758.3,
             "Boxing-v5": 94.6, "Freeway-v5": 32.5, "MontezumaRevenge-v5": 42.0}  # fmt: skip


def half_hour() -> dict[str, np.ndarray]:
    """Environment -> [points, 3]: seconds, step, mean return of the last 100 episodes."""
    runs = read_settings(RESULTS / "half_hour_doom.csv") | read_settings(RESULTS / "half_hour_atari.csv")
    found = {setting.removeprefix("env-id="): seeds[1] for setting, seeds in runs.items()}
    return {env_id: points[points[:, 0] <= HALF_HOUR] for env_id, points in found.items()}


def random_returns() -> dict[str, float]:
    rows = csv.DictReader(line for line in open(RESULTS / "random.csv") if not line.startswith("#"))
    return {row["env_id"]: float(row["return"]) for row in rows}


def published(env_id: str, step: float) -> str:
    """What others have published: the papers of Sample Factory and PPO, or CleanRL at the same number of steps."""
    if env_id in PAPER:
        value, millions = PAPER[env_id]
        return f"{value:g} (Sample Factory, {millions} million)"
    if env_id in PPO_PAPER:
        return f"{PPO_PAPER[env_id]:g} (PPO's paper, 40 million)"
    path = RESULTS / f"cleanrl_{env_id.removesuffix('-v5').lower()}.csv"
    if not path.exists():
        return ""
    ((points,),) = read_curves(path.name).values()
    return f"{np.interp(step, *zip(*((step, value) for _, step, value in points))):.1f} (CleanRL, the same)"


def half_hour_table() -> str:
    rows, at_random = [], random_returns()
    for env_id, points in half_hour().items():
        step, value = points[-1, 1], points[points[:, 0] > 0.9 * HALF_HOUR, 2].mean()
        file = RESULTS / f"half_hour_{'atari' if env_id.endswith('-v5') else 'doom'}.csv"
        (run,) = about(file, f"env-id={env_id}")
        rows.append([f"`{env_id}`", f"{at_random[env_id]:.2f}", f"**{value:.2f}**", f"{points[:, 2].max():.2f}", f"{4 * step / 1e6:.1f}",
                     published(env_id, step), run["precision"]])  # fmt: skip
    return table(["", "random actions", "return after half an hour", "highest", "million frames", "published (frames)", "encoder in"], rows)


def recipe_table() -> str:
    """Half an hour with somebody else's settings beside half an hour with the defaults."""
    rows, defaults, at_random = [], half_hour(), random_returns()
    for setting, seeds in read_settings(RESULTS / "recipe_appo_atari.csv").items():
        env_id, theirs = setting.removeprefix("env-id="), seeds[1][seeds[1][:, 0] <= HALF_HOUR]
        rows.append([f"`{env_id}`", f"{at_random[env_id]:.2f}" if env_id in at_random else ""])
        for points in (theirs, defaults.get(env_id)):
            if points is None:  # not run yet
                rows[-1] += ["", ""]
            else:
                rows[-1] += [f"**{points[points[:, 0] > 0.9 * HALF_HOUR, 2].mean():.2f}**", f"{4 * points[-1, 1] / 1e6:.1f}"]
        rows[-1].append("" if points is None else f"{np.interp(theirs[-1, 1], points[:, 1], points[:, 2]):.2f}")
    columns = ("recipe, half an hour", "million frames", "defaults, half an hour", "million frames", "defaults after as many frames")
    return table(["", "random actions", *columns], rows)


def throughput_table() -> str:
    rows = []
    for row in read_json("throughput.json")["frames_per_second"]:
        training, ceiling = statistics.mean(row["training"]), statistics.mean(row["ceiling"])
        rows.append([FAMILIES[row["family"]], f"{row['workers']} x {row['envs_per_worker']}", f"{training:,.0f}",
                     f"{ceiling:,.0f}", f"{training / ceiling:.0%}"])  # fmt: skip
    return table(["", "environments", "training, frames/s", "ceiling, frames/s", "share"], rows)


def parts_table() -> str:
    rows = []
    for family in ("doom", "atari", "dmlab"):
        result = read_json(f"parts_{family}.json")
        times = result["milliseconds_per_sample"]
        shares = [f"{statistics.median(x):.0%} ({min(x):.0%} to {max(x):.0%})" for x in result["shares"].values()]
        rows.append([
            FAMILIES[family], f"{result['simulation_milliseconds']:.2f}", f"{times['inference, batch 16']:.2f}",
            f"{times['learning, batch 1024']:.2f}", f"{result['estimate_frames_per_second']:,}", *shares,
        ])  # fmt: skip
    columns = ("game, ms", "acting, ms", "learning, ms", "together, frames/s", "dummy sampler", "random actions")
    return table(["", *columns], rows)


REPLAY_SPEED = {
    "none": "no replay: `appo_atari.py`",
    "two-epochs": "no replay, two epochs",
    "uniform": "uniform",
    "attentive": "attentive",
    "elite": "elite",
    "elite-kl": "elite by KL of the policies",
}


def replay_speed_table() -> str:
    result, rows = read_json("replay_speed.json"), []
    for name, label in REPLAY_SPEED.items():
        rates = [run["frames_per_second"] for run_name, run in result["runs"].items() if run_name.rsplit("_", 1)[0] == name]
        median = result["medians"][name]
        rows.append([label, numbers(rates), f"**{median:,.0f}**", f"{median / result['medians']['none']:.0%}"])
    return table(["replay", "frames/s, three runs", "median", "of those without"], rows)


def replay_parts_table() -> str:
    times = read_json("replay_parts.json")["milliseconds"]
    return table(["", "ms"], [[name, f"{value:.2f}"] for name, value in times.items()])


REPLAY = {  # setting: what it is called, colour, line
    "replay-share=0": ("no replay", "#495057", ":"),
    "replay-share=0 num-epochs=2": ("no replay, two epochs", "#7048a8", "-."),
    "replay=uniform": ("uniform", "#0b5fa5", "-"),
    "replay=attentive": ("attentive", "#2b8a3e", "--"),
    "replay=elite elite-strategy=1": ("elite 1", "#c2410c", "--"),
    "replay=elite elite-strategy=3": ("elite 3", "#c2410c", ":"),
}
TWELVE_MINUTES = 720  # seconds; of a run that was resumed later ones do not count


def replay_runs() -> dict[str, dict[str, list[np.ndarray]]]:
    """Game -> setting, as in REPLAY -> a seed's [points, 3]: seconds, step, mean return of the last 100 episodes."""
    found = read_settings(RESULTS / "replay.csv")
    games = dict.fromkeys(setting.split()[-1].removeprefix("env-id=") for setting in found)
    return {game: {setting: [points[points[:, 0] <= TWELVE_MINUTES] for points in found[f"{setting} env-id={game}"].values()]
                   for setting in REPLAY if f"{setting} env-id={game}" in found} for game in games}  # fmt: skip


def replay_table() -> str:
    """Every way of replaying at equal frames, as many as the slowest run of that game has, and after equal minutes: the mean over seeds
    (lowest to highest)."""

    def cell(values: list[float]) -> str:
        return f"**{np.mean(values):.1f}**" + (f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else "")

    rows = []
    for game, settings in replay_runs().items():
        start = max(points[0, 1] for runs in settings.values() for points in runs)
        end = min(points[-1, 1] for runs in settings.values() for points in runs)
        grid = np.linspace(start, end, 1000)
        for setting, runs in settings.items():
            equal = [np.interp(grid, points[:, 1], points[:, 2]) for points in runs]
            minutes = [points[points[:, 0] > 0.9 * TWELVE_MINUTES, 2].mean() for points in runs]
            millions = [4 * points[-1, 1] / 1e6 for points in runs]
            rows.append([f"`{game}`", REPLAY[setting][0], str(len(runs)), f"{4 * end / 1e6:.1f}", cell([x.mean() for x in equal]),
                         cell([x[-100:].mean() for x in equal]), cell(minutes), f"{np.mean(millions):.1f}"])  # fmt: skip
    columns = ("equal frames, millions", "mean return", "in their last tenth", "after 12 minutes", "frames in these, millions")
    return table(["", "replay", "seeds", *columns], rows)


# CleanRL's documentation: ppo_continuous_action.py on MuJoCo v4, mean and deviation over seeds, and after how many million steps; the last
# two are from its page of RPO
CLEANRL_MUJOCO = {"HalfCheetah-v4": (1443, 46, 1), "Walker2d-v4": (2288, 572, 1), "Hopper-v4": (2383, 272, 1), "Ant-v4": (1824, 906, 8),
                  "HumanoidStandup-v4": (109326, 16162, 8)}  # fmt: skip


def mujoco_table() -> str:
    """The ends of the runs of one and of three million steps."""
    runs, rows = read_settings(RESULTS / "mujoco.csv"), []
    lengths = {"a million steps": (1e6, "total-timesteps=1000000 env-id="), "three million steps": (3e6, "env-id=")}
    for task, (mean, deviation, millions) in CLEANRL_MUJOCO.items():
        rows.append([f"`{task}`"])
        for length, start in lengths.values():
            found = runs[start + task].values()
            values = [np.interp(length, points[:, 1], points[:, 2]) for points in found]
            rows[-1] += [spread(values), f"{statistics.median(points[-1, 0] / 60 for points in found):.1f}"]
        rows[-1].append(f"{mean:,} ± {deviation:,} ({millions} million)")
    columns = [column for name in lengths for column in (name, "minutes")]
    return table(["", *columns, "CleanRL, published (steps)"], rows)


def spread(values: list[float]) -> str:
    """Their mean, and where there are several the range and how many."""
    more = f" ({min(values):,.0f} to {max(values):,.0f}; {len(values)})" if len(values) > 1 else ""
    return f"{np.mean(values):,.0f}{more}"


def mujoco_settings_table() -> str:
    """The return after a million steps with each setting: means over its seeds, with their range."""
    found = defaultdict(dict)
    for setting, seeds in read_settings(RESULTS / "seeds_mujoco.csv").items():
        flags = dict(flag.partition("=")[::2] for flag in setting.split())
        task, *columns = (flags.pop(name) for name in ("env-id", "num-envs-per-worker", "rollout", "batch-size", "num-epochs", "learning-rate"))
        other = " ".join(f"--{flag} {value}".strip() for flag, value in flags.items())
        found[*columns, f"`{other}`" if other else ""][task] = list(seeds.values())
    tasks = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")
    rows = [[*columns, *(spread([np.interp(1e6, *points.T[1:]) for points in runs[task]]) if task in runs else "" for task in tasks),
             f"{statistics.median(points[-1, 0] for points in runs[tasks[0]]) / 60:.1f}" if tasks[0] in runs else ""]
            for columns, runs in found.items()]  # fmt: skip
    return table(["games", "rollout", "batch", "epochs", "learning rate", "other", *(f"`{task}`" for task in tasks), "minutes"], rows)


def mujoco_lag_table() -> str:
    """Lag and return of each setting: means over its seeds, with their range."""
    lags = defaultdict(list)
    for line in open(RESULTS / "mujoco_lag.csv"):
        if line.startswith("#"):
            run = json.loads(line[1:])
        elif (setting := line.split(",")[0]) != "setting" and run:
            lags[setting].append(run["lag"])
            run = None
    rows = []
    for setting, seeds in read_settings(RESULTS / "mujoco_lag.csv").items():
        values = [np.interp(5e5, *points.T[1:]) for points in seeds.values()]
        rows.append([f"`{setting}`", f"{statistics.mean(lags[setting]):.1f}", spread(values)])
    return table(["setting", "mean lag, versions", "return after half a million steps"], rows)


def mujoco_parts_table() -> str:
    """Microseconds a sample of each part, for the sizes that were measured."""
    times, rows = read_json("mujoco_parts.json")["microseconds"], defaultdict(dict)
    for key, value in times.items():
        task, name, size = re.fullmatch(r"(.*): (.*) (\d+)", key).groups()
        rows[task, name][int(size)] = value
    sizes = sorted({size for row in rows.values() for size in row})
    return table(["", "part", *map(str, sizes)], [[f"`{task}`", f"`{name}`", *(f"{row[size]:.1f}" if size in row else "" for size in sizes)]
                                                  for (task, name), row in rows.items()])  # fmt: skip


def gym_learning_table() -> str:
    """Steps and seconds of every seed to the goal, and of their medians what the peer has of ours; a run that did not get there has a dash."""
    rows = []
    for env_id, sides in read_json("gym_learning.json")["envs"].items():
        cells, medians = [], {}
        for side in ("ours", "sb3"):
            for what, form in (("steps", lambda value: f"{value / 1000:,.0f}k"), ("seconds", lambda value: f"{value:.0f}")):
                cells.append(", ".join(form(run[what]) if run["reached"] else "-" for run in sides[side]))
                medians[side, what] = statistics.median(run[what] if run["reached"] else math.inf for run in sides[side])
        ratios = [medians["ours", what] / medians["sb3", what] for what in ("steps", "seconds")]
        rows.append([f"`{env_id.partition(':')[2] or env_id}`", *cells, *(f"{ratio:.2f}" if 0 < ratio < math.inf else "-" for ratio in ratios)])
    return table(["", "ours, steps", "seconds", "SB3, steps", "seconds", "steps, ours / SB3", "seconds, ours / SB3"], rows)


def gym_speed_table() -> str:
    """Steps/s: every round, and the medians' ratio."""
    names = dict(ours="`appo_gym.py`", sb3="Stable-Baselines3 2.9.2, PPO of its zoo", bare="one worker's environments alone, random actions")
    rows = []
    for env_id, sides in read_json("gym_speed.json")["envs"].items():
        ours = statistics.median(sides["ours"])
        for side, name in names.items():
            median = statistics.median(sides[side])
            rows.append([f"`{env_id}`", name, numbers(sides[side]), f"**{median:,.0f}**", "" if side == "ours" else f"{ours / median:.1f} x"])
    return table(["", "", "steps/s, three runs", "median", "ours / this"], rows)


def gym_parts_table() -> str:
    """Microseconds a step of each part."""
    envs = read_json("gym_parts.json")["envs"]
    rows = [[part, *(f"{found[part]:.1f}" for found in envs.values())] for part in next(iter(envs.values()))]
    return table(["part", *(f"`{env_id}`" for env_id in envs)], rows)


def null_table() -> str:
    rows = []
    for family in ("doom", "atari"):
        results = read_json(f"null_{family}.json")["results"]
        name = FAMILIES[family]
        rows.append([f"{name}, rows/s", *(f"{result['rows_per_second']:,}" for result in results)])
        rows.append([f"{name}, us a group of 16", *(f"{result['microseconds_per_group']:,.0f}" for result in results)])
    return table(["workers", *(str(result["workers"]) for result in results)], rows)


def policies_table() -> str:
    result, rows = read_json("policies.json"), []
    for key, name in (("base", "`appo_doom.py`"), ("1 of pbt", "`appo_pbt_doom.py --num-policies 1`"),
                      ("2 of pbt", "`appo_pbt_doom.py --num-policies 2`")):  # fmt: skip
        rates = result["frames_per_second"][key]
        shares = [ratio for pair, ratios in result["ratios"].items() if pair.startswith(f"{key} / ") for ratio in ratios]
        share = f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})" if shares else ""
        rows.append([name, numbers(rates), f"**{statistics.median(rates):,.0f}**", share])
    return table(["", "frames/s, all policies, five runs", "median", "share of the row above"], rows)


def self_play_table() -> str:
    """Games of results/self_play.txt, which is what evaluate.py printed, under the name of each file."""
    rows, number = [], r"(-?[\d.]+)"
    for file, text in re.findall(r"==> (\w+)\.txt <==\n(.*?)(?===>|\Z)", (RESULTS / "self_play.txt").read_text(), re.S):
        scores = {name: score for name, *score in re.findall(rf"policy (\S+): .*?frags {number}, deaths {number}", text)}
        pattern = r"(\S+) against (\S+): (\d+) wins, (\d+) losses, (\d+) ties; (.*) of the decided"
        for one, other, wins, losses, ties, share in re.findall(pattern, text):
            name = one if "/" in one else f"{file.removeprefix('bots_')}/{one}"  # against bots an experiment plays alone
            rows.append([name, other, wins, losses, ties, share, *scores[one]])
    return table(["policy", "against", "wins", "losses", "ties", "wins of the decided", "frags a game", "deaths"], rows)


def settings_table(env_id: str, *goals: float, steps: float = np.inf) -> str:
    """`steps`: how many of each run count."""
    runs = read_settings(RESULTS / f"seeds_{env_id}.csv")
    return compare_settings({setting: {seed: points[points[:, 1] <= steps] for seed, points in seeds.items()}
                             for setting, seeds in runs.items()}, goals)  # fmt: skip


TABLES = dict(gym_learning=gym_learning_table, gym_speed=gym_speed_table, gym_parts=gym_parts_table,
              learning=learning_table, battle=battle_table, peers=peers_table, ranks=ranks_table, half_hour=half_hour_table,
              ranks_learning=ranks_learning_table,
              peers_dmlab=partial(peers_table, "peers_dmlab"), peers_pufferlib=partial(peers_table, "peers_pufferlib"),
              recipe=recipe_table, mujoco=mujoco_table, mujoco_settings=mujoco_settings_table,
              mujoco_lag=mujoco_lag_table, mujoco_parts=mujoco_parts_table,
              peers_mujoco=partial(peers_table, "peers_mujoco", "steps"),
              replay=replay_table, replay_speed=replay_speed_table, replay_parts=replay_parts_table,
              settings_replay=partial(settings_table, "replay", 15, 25, steps=760_000),
              throughput=throughput_table, parts=parts_table, null=null_table, policies=policies_table, self_play=self_play_table,
              settings_battle=partial(settings_table, "battle", 5, 10), settings_basic=partial(settings_table, "basic", 50, 75),
              settings_sync=partial(settings_table, "sync", 0, 50, 75, steps=90_000),
              settings_lag=partial(settings_table, "lag", 5, 10),
              settings_precision=partial(settings_table, "precision", 5, 10, 15),
              settings_health=partial(settings_table, "health_gathering", 10, 20),
              settings_defend=partial(settings_table, "defend_the_center", 5, 10, 15))  # fmt: skip


def with_tables(readme: str) -> str:
    """Raises FileNotFoundError for a table whose results are not there."""

    def fill(match: re.Match) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, readme, flags=re.S)


# ---- figures


def machine_of(name: str) -> str:
    """On which a CSV file of results/ was made."""
    about = json.loads(next(line for line in open(RESULTS / name) if line.startswith("#"))[1:])
    return f"{about['cores']} cores, {'no GPU' if about['gpu'] == 'none' else about['gpu']}"


def curves(plt, title: str, goal: float | None, out: str, *names: str, without: str = "", unit: tuple = (1000, "thousand")) -> None:
    systems = {system: seeds for system, seeds in read_curves(*names).items() if system != without}
    if "ours" not in systems:  # not run yet
        return
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, column, scale, label in (
        (axes[0], 0, 60, "minutes since the start"),
        (axes[1], 1, unit[0], f"{unit[1]} steps (4 frames each)"),
    ):
        for system, seeds in systems.items():
            name, colour, line = STYLE[system]
            for i, points in enumerate(seeds):
                x, y = [point[column] / scale for point in points], [point[2] for point in points]
                if column or max(x) > 0:  # published curves have no minutes
                    axis.plot(x, y, line, color=colour, label=None if i else name, linewidth=1.4)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        if goal is not None:
            axis.axhline(goal, color="black", linewidth=0.8, alpha=0.6)
    axes[0].set_ylabel("mean raw return, last 100 episodes")
    axes[1].legend(loc="best", fontsize=8)
    figure.suptitle(f"{title}; {machine_of(names[0])}", fontsize=11)
    figure.savefig(RESULTS / out, dpi=130)


def popart(plt, *tasks: str) -> None:
    """Two tasks learned together, with and without values in units of their own."""
    figure, axes = plt.subplots(1, len(tasks), figsize=(9, 3.4), layout="constrained")
    for axis, task in zip(axes, tasks):
        for system, seeds in read_curves(f"popart_{task}.csv").items():
            name, colour, line = STYLE[system]
            for i, points in enumerate(seeds):
                axis.plot([step / 1000 for _, step, _ in points], [value for *_, value in points], line, color=colour,
                          label=None if i else name, linewidth=1.4)  # fmt: skip
        axis.set_title(task, fontsize=9)
        axis.set_xlabel("thousand steps of both tasks together")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean raw return, last 100 episodes")
    axes[0].legend(loc="best", fontsize=8)
    figure.suptitle("DeepMind Lab: two tasks at once", fontsize=11)
    figure.savefig(RESULTS / "popart_dmlab.png", dpi=130)


def battle(plt) -> None:
    """One long run over frames, beside the points of the paper's curve."""
    (points,) = read_curves("learning_battle_long.csv")["ours"]
    paper = list(csv.DictReader(line for line in open(RESULTS / "paper_battle.csv") if not line.startswith("#")))
    figure, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
    axis.plot([step * 4 / 1e6 for _, step, _ in points], [kills for *_, kills in points], color=STYLE["ours"][1],
              label=f"ours, kills: one run of {points[-1][0] / 3600:.1f} hours on 2 cores without a GPU")  # fmt: skip
    axis.plot([float(row["million_frames"]) for row in paper], [float(row["return"]) for row in paper], "v-.", color=STYLE["sf"][1],
              markersize=5, label="Sample Factory in its paper, shaped return (about 1 more than kills): mean over seeds")  # fmt: skip
    axis.set_xscale("log")
    axis.set_xlim(left=0.1)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("million frames")
    axis.set_ylabel("return of an episode")
    axis.grid(alpha=0.3)
    axis.legend(loc="upper left", fontsize=8)
    figure.suptitle("battle", fontsize=11)
    figure.savefig(RESULTS / "learning_battle_long.png", dpi=130)


def seeds(plt) -> None:
    """Every setting beside the default: each seed, and their mean."""
    curves = read_settings(RESULTS / "seeds_battle.csv")
    default, others = curves.pop(""), list(curves)
    columns = min(3, len(others))
    figure, axes = plt.subplots(-(-len(others) // columns), columns, figsize=(9, 2.6 * -(-len(others) // columns)), sharex=True, sharey=True,
                                squeeze=False, layout="constrained")  # fmt: skip
    for axis in axes.flat[len(others) :]:
        axis.set_visible(False)
    for axis, setting in zip(axes.flat, others):
        for runs, colour, line in ((default, "#0b5fa5", "-"), (curves[setting], "#c2410c", "--")):
            grid = np.linspace(0, min(points[-1, 1] for points in runs.values()), 200)
            values = [np.interp(grid, points[:, 1], points[:, 2]) for points in runs.values()]
            for value in values:
                axis.plot(grid / 1000, value, line, color=colour, alpha=0.35, linewidth=0.8)
            axis.plot(grid / 1000, np.mean(values, axis=0), line, color=colour, linewidth=1.8)
        axis.set_title(f"{textwrap.fill(setting, 36, break_on_hyphens=False)} ({len(curves[setting])})", fontsize=8, color="#c2410c")
        axis.grid(alpha=0.3)
    axes[0, 0].legend([axes[0, 0].lines[len(default)]], [f"default ({len(default)})"], loc="upper left", fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("thousand steps")
    for axis in axes[:, 0]:
        axis.set_ylabel("kills, last 100 episodes")
    figure.suptitle("battle: one setting changed (seeds in brackets; thick: their mean)", fontsize=11)
    figure.savefig(RESULTS / "seeds_battle.png", dpi=130)


def panels(plt) -> None:
    """A panel for each environment: half an hour, above the return of random actions."""
    runs, at_random = half_hour(), random_returns()
    columns = min(5, len(runs))
    lines = -(-len(runs) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(9, 1.9 * lines + 0.3), squeeze=False, layout="constrained")
    for axis, (env_id, points) in zip(axes.flat, runs.items()):
        axis.plot(points[:, 0] / 60, points[:, 2], color=STYLE["ours"][1], linewidth=1.4)
        axis.axhline(at_random[env_id], color="black", linestyle=":", linewidth=1)
        axis.set_title(env_id, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(runs) :]:
        axis.set_visible(False)
    figure.supxlabel("minutes", fontsize=8)
    figure.suptitle("mean raw return of the last 100 episodes (dotted: random actions), default flags, one seed; "
                    f"{machine_of('half_hour_doom.csv')}", fontsize=10)  # fmt: skip
    figure.savefig(RESULTS / "half_hour.png", dpi=130)


def replay(plt) -> None:
    """A panel for each game over frames and, below it, over minutes: the mean of the seeds."""
    games = replay_runs()
    figure, axes = plt.subplots(2, len(games), figsize=(9, 5), squeeze=False, layout="constrained")
    for (game, settings), column in zip(games.items(), axes.T):
        for axis, (x, scale) in zip(column, ((1, 4e-6), (0, 1 / 60))):
            for setting, runs in settings.items():
                name, colour, line = REPLAY[setting]
                grid = np.linspace(max(points[0, x] for points in runs), min(points[-1, x] for points in runs), 200)
                values = np.mean([np.interp(grid, points[:, x], points[:, 2]) for points in runs], axis=0)
                axis.plot(grid * scale, values, line, color=colour, linewidth=1.4, label=name)
            axis.grid(alpha=0.3)
            axis.tick_params(labelsize=8)
        column[0].set_title(game, fontsize=9)
        column[0].set_xlabel("million frames", fontsize=8)
        column[1].set_xlabel("minutes", fontsize=8)
    axes[0, 0].legend(fontsize=7)
    figure.supylabel("mean raw return, last 100 episodes", fontsize=8)
    figure.suptitle(f"replay: twelve minutes, mean over the seeds of the table; {machine_of('replay.csv')}", fontsize=10)
    figure.savefig(RESULTS / "replay.png", dpi=130)


def draw_seeds(axis, seeds, x: int, scale: float, line: str, color: str, name: str) -> None:
    """Each seed thin and their mean thick, where all have points; x: 0 for seconds, 1 for steps."""
    grid = np.linspace(max(points[0, x] for points in seeds), min(points[-1, x] for points in seeds), 200)
    values = [np.interp(grid, points[:, x], points[:, 2]) for points in seeds]
    for value in values:
        axis.plot(grid * scale, value, line, color=color, alpha=0.35, linewidth=0.8)
    axis.plot(grid * scale, np.mean(values, axis=0), line, color=color, linewidth=1.8, label=name)


def mujoco(plt) -> None:
    """Each task over steps and, below it, over minutes: runs of three and of one million steps, the mean of their seeds. CleanRL's published
    numbers, and its one run here."""
    runs = read_settings(RESULTS / "mujoco.csv")
    figure, axes = plt.subplots(2, len(CLEANRL_MUJOCO), figsize=(11, 4.6), layout="constrained")
    for (task, (mean, deviation, millions)), column in zip(CLEANRL_MUJOCO.items(), axes.T):
        for axis, x, scale in ((column[0], 1, 1e-6), (column[1], 0, 1 / 60)):
            for setting, line, name in ((f"env-id={task}", "-", "ours"), (f"total-timesteps=1000000 env-id={task}", ":", "ours, one million")):
                draw_seeds(axis, runs[setting].values(), x, scale, line, STYLE["ours"][1], name)
            if task == "HalfCheetah-v4":
                ((points,),) = read_curves("cleanrl_mujoco.csv").values()
                axis.plot([point[x] * scale for point in points], [point[2] for point in points], color=STYLE["cleanrl"][1], linewidth=1.2,
                          label="CleanRL, a run here")  # fmt: skip
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.3)
        if millions == 1:
            column[0].errorbar(1, mean, deviation, fmt="o", color=STYLE["cleanrl"][1], markersize=4, capsize=3, label="CleanRL, published")
        column[0].set_title(task, fontsize=9)
        column[0].set_xlabel("million steps", fontsize=8)
        column[1].set_xlabel("minutes", fontsize=8)
    axes[0, 0].legend(fontsize=6)
    figure.supylabel("mean raw return, last 100 episodes", fontsize=8)
    figure.suptitle(f"thin: seeds, thick: their mean; {machine_of('mujoco.csv')}", fontsize=10)
    figure.savefig(RESULTS / "mujoco.png", dpi=130)


def mujoco_lag(plt) -> None:
    """A panel with the KL penalty and one without: the mean of the seeds over steps, with more and more lag."""
    runs = read_settings(RESULTS / "mujoco_lag.csv")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for axis, coefficient in zip(axes, ("0.1", "0")):
        for i, (setting, name) in enumerate({"sync": "--sync", "max-batches-ahead=1": "one iteration ahead (default)",
                                             "max-batches-ahead=4": "four iterations ahead"}.items()):  # fmt: skip
            draw_seeds(axis, runs[f"{setting} kl-loss-coef={coefficient}"].values(), 1, 1e-6, ("-", "--", ":")[i], f"C{i}", name)
        axis.set_title(f"--kl-loss-coef {coefficient}", fontsize=9)
        axis.set_xlabel("million steps")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean raw return, last 100 episodes")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"HalfCheetah-v4; thin: seeds, thick: their mean; {machine_of('mujoco_lag.csv')}", fontsize=10)
    figure.savefig(RESULTS / "mujoco_lag.png", dpi=130)


def combinations(plt, curves: dict[str, dict[int, np.ndarray]], out: Path) -> None:
    """A panel for each environment, a line for each setting: the mean over seeds between the lowest and the highest of them."""
    panels = defaultdict(dict)
    for setting, runs in curves.items():
        flags = setting.split()
        env_id = next((flag for flag in flags if flag.startswith("env-id=")), "")
        panels[env_id][" ".join(flag for flag in flags if flag != env_id) or "default"] = runs
    if not panels:
        sys.exit(f"error: no run is finished in {out.parent}")
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(max(6, 3.2 * columns), 2.8 * lines), squeeze=False, layout="constrained")
    for axis, (env_id, settings) in zip(axes.flat, panels.items()):
        for i, (setting, runs) in enumerate(settings.items()):
            grid = np.linspace(max(run[0, 1] for run in runs.values()), min(run[-1, 1] for run in runs.values()), 200)
            values = [np.interp(grid, run[:, 1], run[:, 2]) for run in runs.values()]
            axis.plot(grid / 1000, np.mean(values, axis=0), ("-", "--", ":", "-.")[i % 4], color=f"C{i}", label=f"{setting} ({len(runs)})")
            axis.fill_between(grid / 1000, np.min(values, axis=0), np.max(values, axis=0), color=f"C{i}", alpha=0.2)
        axis.set_title(env_id.removeprefix("env-id="), fontsize=9)
        axis.set_xlabel("thousand steps")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("mean raw return,\nlast 100 episodes")
    figure.suptitle("mean over seeds (how many), between the lowest and the highest", fontsize=10)
    figure.savefig(out, dpi=130)


def population(plt, title: str, log: Path, out: Path, most: int = 8) -> None:
    """The history that `collect.py population` wrote: the objective and the numbers that changed, at most `most` of them. A ring is a policy
    that was replaced, in the colour of the one whose weights it got."""
    rows = list(csv.DictReader(open(log)))
    others = ("step", "policy", "kind", "weights_of", "objective")
    numbers = [name for name in rows[0] if name not in others and len({row[name] for row in rows}) > 1][:most]
    columns = min(3, len(numbers) + 1)
    lines = -(-(len(numbers) + 1) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(9, 2.4 * lines), sharex=True, squeeze=False, layout="constrained")
    for axis, name in zip(axes.flat, ["objective", *numbers]):
        for policy in sorted({int(row["policy"]) for row in rows}):
            points = [row for row in rows if int(row["policy"]) == policy and row[name]]
            steps, values = [int(row["step"]) / 1000 for row in points], [float(row[name]) for row in points]
            # a number holds until the next row; an objective is of the moment
            axis.plot(steps, values, color=f"C{policy}", drawstyle="default" if name == "objective" else "steps-post", label=f"policy {policy}")
            for x, y, row in zip(steps, values, points):
                if row["weights_of"] != row["policy"]:
                    axis.plot(x, y, "o", markerfacecolor="none", color=f"C{row['weights_of']}")
        if name != "objective":  # which is empty until episodes have ended
            low, *_, high = sorted(float(row[name]) for row in rows)
            if high > 10 * low > 0:
                axis.set_yscale("log")
        axis.set_title(name, fontsize=9)
        axis.grid(alpha=0.3)
    for i, axis in enumerate(axes.flat):
        axis.set_visible(i <= len(numbers))
        if i + columns > len(numbers):  # nothing is below it
            axis.set_xlabel("thousand steps of a policy")
            axis.tick_params(labelbottom=True)
    axes[0, 0].legend(fontsize=7)
    figure.suptitle(title, fontsize=11)
    figure.savefig(out, dpi=130)


def peers(plt) -> None:
    result = read_json("peers.json")
    systems = [system for system in PEERS if system in result["medians"]][::-1]
    figure, axis = plt.subplots(figsize=(9, 0.38 * len(systems) + 0.8), layout="constrained")
    for i, system in enumerate(systems):
        values = [run["frames_per_second"] for key, run in result["runs"].items() if key.rsplit("_", 1)[0] == system]
        median, ours = result["medians"][system], system.endswith("ours")
        axis.barh(i, median, color=STYLE["ours" if ours else "sf"][1], hatch=None if ours else "//", edgecolor="white")
        axis.plot(values, [i] * len(values), "k|", markersize=12)
        axis.text(max(values) * 1.02, i, f"{median:,.0f}", va="center")
    axis.set_yticks(range(len(systems)), [f"{s.split('_')[0].capitalize()}: {PEERS[s].replace('`', '')}" for s in systems])
    axis.set_xlabel("frames per second while learning (bars: medians, ticks: runs)")
    axis.set_xlim(right=max(run["frames_per_second"] for run in result["runs"].values()) * 1.15)
    figure.savefig(RESULTS / "peers.png", dpi=130)


def throughput(plt) -> None:
    result = read_json("throughput.json")
    cores = result["machine"]["cores"]
    gpu = result["machine"]["gpu"] if result["frames_per_second"][0]["device"] != "cpu" else "none"
    paper = list(csv.DictReader(line for line in open(RESULTS / "paper_throughput.csv") if not line.startswith("#")))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    for axis, family in zip(axes, ("doom", "atari")):
        rows = [row for row in result["frames_per_second"] if row["family"] == family]
        x = [row["workers"] * row["envs_per_worker"] / cores for row in rows]
        for kind, label, style in (
            ("ceiling", "simulator alone, random actions", "s--"),
            ("training", f"ours, training, {cores} cores, GPU: {gpu}", "o-"),
        ):
            axis.plot(x, [statistics.mean(row[kind]) / cores for row in rows], style, color=STYLE["ours"][1], label=label)
            for row, at in zip(rows, x):
                axis.plot([at] * len(row[kind]), [value / cores for value in row[kind]], "k_", markersize=6)
        here, games = read_json("peers.json"), {"doom": 32, "atari": 64}[family]  # of benchmark/peers.sh
        label = f"Sample Factory 2.1.1, {here['machine']['cores']} cores, GPU: {here['machine']['gpu']}"
        axis.plot(games / here["machine"]["cores"], here["medians"][f"{family}_sf"] / here["machine"]["cores"], "X", color=STYLE["sf"][1],
                  label=label, markersize=8)  # fmt: skip
        for system, label, style in (
            ("1", "Sample Factory in its paper, 10 cores + GPU", "^:"),
            ("2", "Sample Factory in its paper, 36 cores + GPUs", "v-."),
        ):
            points = [row for row in paper if row["system"] == system]
            axis.plot([int(p["envs"]) / int(p["cores"]) for p in points], [int(p[family]) / int(p["cores"]) for p in points], style,
                      color=STYLE["sf"][1], label=label, markersize=5)  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_xticks([2, 4, 8, 16, 32, 64], ["2", "4", "8", "16", "32", "64"])
        axis.set_ylim(bottom=0)
        axis.set_title({"doom": "Doom (benchmark)", "atari": "Atari (Breakout)"}[family], fontsize=11)
        axis.set_xlabel("environments per core")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("frames per second and core")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(RESULTS / "throughput.png", dpi=130)


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if sys.argv[1:]:
        path = Path(sys.argv[1])
        if path.is_dir():
            return combinations(plt, read_settings(path / "curves.csv"), path / "curves.png")
        return population(plt, path.stem, path, path.with_suffix(".png"))
    throughput(plt)
    peers(plt)
    seeds(plt)
    panels(plt)
    replay(plt)
    mujoco(plt)
    mujoco_lag(plt)
    curves(plt, "basic, three seeds each", 75, "learning_basic.png", "learning_basic.csv")
    curves(plt, "battle", 10, "learning_battle.png", "learning_battle.csv")
    battle(plt)
    curves(plt, "basic: asynchronous and synchronous", 75, "sync.png", "learning_basic.csv", "sync.csv", without="sf")
    curves(plt, "defend_the_center, --learning-rate 1e-4", 10, "learning_defend.png", "learning_defend.csv")
    if (log := RESULTS / "pbt_basic.csv").exists():
        population(plt, "basic: four policies, three of which start with a ruinous learning rate", log, RESULTS / "pbt_basic.png")
    curves(plt, "DeepMind Lab: rooms_collect_good_objects_train", None, "learning_dmlab.png", "learning_dmlab.csv")
    curves(plt, "DeepMind Lab: rooms_collect_good_objects_train", None, "last_action_dmlab.png", "last_action_dmlab.csv")
    popart(plt, "rooms_collect_good_objects_train", "rooms_exploit_deferred_effects_train")
    for game, goal in (("pong", 18), ("breakout", None)):
        curves(plt, f"{game.capitalize()}, default flags", goal, f"learning_{game}.png", f"learning_{game}.csv",
               f"cleanrl_{game}.csv", unit=(1e6, "million"))  # fmt: skip
    README.write_text(with_tables(README.read_text()))


if __name__ == "__main__":
    main()
