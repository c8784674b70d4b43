"""Compares the frames per second of training commands (steps, if a file has no frames), for example of two settings, files or checkouts.

    python benchmark/compare.py --out FILE.json "old: python ../old/appo_doom.py --env-id battle" "new: python appo_doom.py --env-id battle"

Each round runs each command once, in an order that changes from round to round. A rate is measured from a run's third report on, by the
times that TensorBoard has for the reports, and summed over the policies of a population. Ratios are those of medians, relative to the first
command. A file without --train-for-seconds is ended by SIGINT; its seconds count from its start, with START_UP added. Nothing else may run
on the machine.
"""

import json
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from dummy_sampler import machine  # noqa: E402

START_UP = 10.0  # seconds until training begins, approximately


@dataclass
class Options:
    commands: tyro.conf.Positional[list[str]]  # "NAME: COMMAND" each; --train-dir, --experiment and --total-timesteps are added
    out: Path  # JSON file for the result
    rounds: int = 3  # the number of runs of each command
    seconds: float = 40.0  # seconds of training in each run, at least 30


def train(command: str, seconds: float, folder: str) -> None:
    """Trains with a command for some seconds; the run is folder/run. Raises subprocess.CalledProcessError if it fails."""
    words = [*shlex.split(command), "--total-timesteps", "1000000000", "--train-dir", folder, "--experiment", "run"]
    knows_time = any("train_for_seconds" in Path(word).read_text() for word in words if word.endswith(".py"))
    flags = ["--train-for-seconds", str(seconds)] if knows_time else []
    process = subprocess.Popen(words + flags, stdout=subprocess.DEVNULL)
    try:
        code = process.wait(None if knows_time else seconds + START_UP)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        code = process.wait()
        code = 0 if code == 130 else code
    finally:
        process.kill()  # in case it still runs
    if code:
        raise subprocess.CalledProcessError(code, words)


def rate(command: str, seconds: float) -> float:
    """Runs a command and returns its frames per second."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        train(command, seconds, folder)
        total, run = 0.0, Path(folder, "run")
        for place in sorted(run.glob("policy_*")) or [run]:
            events = EventAccumulator(str(place)).Reload()
            steps, frames = events.Scalars("charts/SPS")[2:], "charts/FPS" in events.Tags()["scalars"]
            frames_of_step = events.Scalars("charts/FPS")[-1].value / steps[-1].value if frames else 1
            total += frames_of_step * (steps[-1].step - steps[0].step) / (steps[-1].wall_time - steps[0].wall_time)
    return total


def by_name(typed: Sequence[str]) -> dict[str, str]:
    """Returns {name: command}. Exits with a message if a command has no name, or the name of another."""
    commands = dict(command.partition(": ")[::2] for command in typed)
    if len(commands) < len(typed) or not all(commands.values()):
        sys.exit('error: each command must be "NAME: COMMAND", with a name of its own')
    return commands


def main() -> None:
    options = tyro.cli(Options)
    commands = by_name(options.commands)
    if options.seconds < 30:
        sys.exit(f"error: --seconds {options.seconds}: at least 30 are needed to measure a rate")
    about = machine()  # now, since files may be edited during the runs
    rates, names = {name: [] for name in commands}, list(commands)
    for i in range(options.rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            rates[name].append(round(rate(commands[name], options.seconds)))
            print(i + 1, name, rates[name][-1], flush=True)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    ratios = {name: round(median / medians[names[0]], 3) for name, median in medians.items()}
    result = dict(machine=about, commands=commands, seconds=options.seconds, frames_per_second=rates, medians=medians, ratios=ratios)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
