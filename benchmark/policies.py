"""Frames per second while learning: appo_doom.py beside appo_pbt_doom.py with one policy, and with two in the same number of rows.

    python benchmark/policies.py --out benchmark/results/policies.json

In alternation, each round in another order. Rates are by TensorBoard's clock, from the third report on, and of all policies together.
Machine: 2 cores without a GPU; five rounds take 14 minutes, and nothing else may run.
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

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {"base": ["appo_doom.py"], **{f"{n} of pbt": ["appo_pbt_doom.py", "--num-policies", str(n)] for n in (1, 2)}}


@dataclass
class Options:
    out: Path  # JSON file for the result
    env_id: str = "benchmark"
    rounds: int = 5
    seconds: float = 40.0  # of training in each run


def rate(command: list[str], options: Options) -> float:
    """Frames per second of a run, with 2 workers of 16 games and frameskip 4."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--env-id", options.env_id, "--num-workers", "2", "--num-envs-per-worker", "16", "--device", "cpu", "--train-for-seconds",
                 str(options.seconds), "--train-dir", folder, "--experiment", "run"]  # fmt: skip
        subprocess.run([sys.executable, str(ROOT / command[0]), *command[1:], *flags], check=True, stdout=subprocess.DEVNULL)
        total, run = 0.0, Path(folder) / "run"
        for place in sorted(run.glob("policy_*")) or [run]:
            events = EventAccumulator(str(place)).Reload().Scalars("charts/SPS")[2:]
            total += 4 * (events[-1].step - events[0].step) / (events[-1].wall_time - events[0].wall_time)
    return total


def main() -> None:
    options, rates = tyro.cli(Options), {name: [] for name in COMMANDS}
    if options.seconds < 30:
        sys.exit(f"error: --seconds {options.seconds}: a run needs at least 30 for its rate")
    for i in range(options.rounds):
        names = list(COMMANDS)
        for name in names[i % 3 :] + names[: i % 3]:
            rates[name].append(round(rate(COMMANDS[name], options)))
        print(i, {name: found[-1] for name, found in rates.items()}, flush=True)
    ratios = {}
    for one, two in (("1 of pbt", "base"), ("2 of pbt", "1 of pbt")):
        ratios[f"{one} / {two}"] = [round(a / b, 3) for a, b in zip(rates[one], rates[two])]
    medians = {name: statistics.median(found) for name, found in ratios.items()}
    print(medians)
    result = dict(machine=machine(), env_id=options.env_id, rounds=options.rounds, seconds=options.seconds)
    options.out.write_text(json.dumps(result | dict(frames_per_second=rates, ratios=ratios, median_ratio=medians), indent=2) + "\n")


if __name__ == "__main__":
    main()
