"""Finds which of two training commands is faster, to one or two percent on a noisy machine: each is suspended while the other runs.

    python benchmark/turns.py --out FILE.json "old: python ../old/appo_gym.py --learning-rate 0" "new: python appo_gym.py --learning-rate 0"

They take turns of a few seconds, so that changes in the machine's speed, which last minutes, affect both. The rate is that of the actors'
requests, counted by their calls of write: so both commands must have one pipe per worker, with the same numbers of environments and splits.
With a learning rate of 0 both play alike; otherwise, if games cost more when they are played well, the comparison would include how well
each has learned. Doom needs --actor-timeout 0. Nothing else may run on the machine.
"""

import contextlib
import json
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from compare import by_name  # noqa: E402
from dummy_sampler import machine  # noqa: E402

SETTLE = 0.4  # seconds from when a run is resumed until its requests are counted


@dataclass
class Options:
    commands: tyro.conf.Positional[tuple[str, str]]  # "NAME: COMMAND" each; --train-dir, --experiment and --total-timesteps are added
    out: Path  # JSON file for the result
    turns: int = 40  # the number of turns of each command
    seconds: float = 3.0  # length of a turn in seconds
    warm_up: float = 20.0  # seconds that each command runs before the first turn


class Run:
    """A training run that is suspended except in its warm-up and its turns."""

    def __init__(self, command: str, folder: str):
        words = [*shlex.split(command), "--total-timesteps", "1000000000", "--train-dir", folder, "--experiment", "run"]
        self.main = psutil.Popen(words, stdout=subprocess.DEVNULL)
        self.others = []

    def warm_up(self, seconds: float) -> None:
        time.sleep(seconds)
        self.others = self.main.children(recursive=True)  # all of them must have started by now
        self.stop()

    def stop(self) -> None:
        for process in (self.main, *self.others):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                process.suspend()

    def go_on(self) -> None:
        for process in (self.main, *self.others):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def turn(self, seconds: float) -> float:
        """Resumes the run for one turn. Returns requests per second. Raises subprocess.CalledProcessError if the run has ended."""
        self.go_on()
        time.sleep(SETTLE)
        start, before = time.perf_counter(), self.writes()
        time.sleep(seconds)
        rate = (self.writes() - before) / (time.perf_counter() - start)
        if self.main.poll() is not None:
            raise subprocess.CalledProcessError(self.main.returncode, self.main.args)
        self.stop()
        return rate

    def writes(self) -> int:
        """Returns the number of write calls of all actors so far."""
        return sum(process.io_counters().write_count for process in self.others if process.is_running())

    def end(self) -> None:
        self.go_on()
        with contextlib.suppress(psutil.NoSuchProcess):
            self.main.send_signal(signal.SIGINT)
        self.main.wait()


def main() -> None:
    options = tyro.cli(Options)
    commands = by_name(options.commands)
    about = machine()  # now, since files may be edited during the runs
    rates = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        runs = {}
        for name, command in commands.items():
            runs[name] = Run(command, f"{folder}/{name}")
            stack.callback(runs[name].end)
            runs[name].warm_up(options.warm_up)
        for i in range(options.turns):
            for name in [*runs][:: 1 if i % 2 else -1]:
                rates[name].append(round(runs[name].turn(options.seconds), 1))
    ratios = [round(new / old, 3) for old, new in zip(*rates.values())]
    quartiles = [round(ratio, 3) for ratio in statistics.quantiles(ratios, n=4)]
    result = dict(machine=about, commands=commands, seconds=options.seconds, requests_per_second=rates, ratios=ratios, quartiles=quartiles)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print("ratios of the second to the first; lower quartile, median, upper quartile:", *quartiles)


if __name__ == "__main__":
    main()
