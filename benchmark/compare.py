"""Frames per second of two checkouts while learning, in alternation, four families: is a change as fast as what was there before?

    python benchmark/compare.py ../old . --out benchmark/results/compare.json

Every round trains each family with both checkouts, the second first in every other round. Rates are by TensorBoard's clock, from the third
report on. Machine: 2 cores without a GPU; five rounds take 30 minutes, and nothing else may run.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from dummy_sampler import machine  # noqa: E402

GAMES = {"doom": ("appo_doom.py", "benchmark"), "atari": ("appo_atari.py", "Breakout-v5"), "mujoco": ("appo_mujoco.py", "HalfCheetah-v5"),
         "gym": ("appo_gym.py", "CartPole-v1")}  # fmt: skip


@dataclass
class Options:
    old: tyro.conf.Positional[Path]  # a checkout
    new: tyro.conf.Positional[Path]  # another one
    out: Path  # JSON file for the result
    rounds: int = 5
    seconds: float = 32.0  # of training in each run


def rate(checkout: Path, script: str, env_id: str, seconds: float) -> float:
    """Frames per second of a run, with 2 workers and the file's own number of games."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(checkout.resolve() / script), "--env-id", env_id, "--num-workers", "2"]
        flags = ["--device", "cpu", "--train-for-seconds", str(seconds), "--train-dir", folder, "--experiment", "run"]
        subprocess.run(command + flags, check=True, stdout=subprocess.DEVNULL)
        events = EventAccumulator(str(Path(folder) / "run")).Reload().Scalars("charts/SPS")[2:]
    frames = {"appo_mujoco.py": 5, "appo_gym.py": 1}.get(script, 4)  # of a step
    return frames * (events[-1].step - events[0].step) / (events[-1].wall_time - events[0].wall_time)


def commit(checkout: Path) -> str:
    return subprocess.run(["git", "-C", checkout, "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()


def main() -> None:
    options = tyro.cli(Options)
    if options.seconds < 30:
        sys.exit(f"error: --seconds {options.seconds}: a run needs at least 30 for its rate")
    rates = {family: {"old": [], "new": []} for family in GAMES}
    for i in range(options.rounds):
        for family, game in GAMES.items():
            for side in ("old", "new") if i % 2 == 0 else ("new", "old"):
                rates[family][side].append(round(rate(getattr(options, side), *game, options.seconds)))
            print(i, family, {side: found[-1] for side, found in rates[family].items()}, flush=True)
    result = dict(machine=machine() | dict(commit=commit(options.new)), old_commit=commit(options.old), rounds=options.rounds,
                  seconds=options.seconds, frames_per_second=rates, median_ratio={})  # fmt: skip
    for family, found in rates.items():
        ratios = [new / old for old, new in zip(found["old"], found["new"])]
        result["median_ratio"][family] = round(statistics.median(ratios), 3)
        print(family, result["median_ratio"][family], [round(ratio, 3) for ratio in ratios])
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
