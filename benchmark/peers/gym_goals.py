"""appo_gym.py with its default flags beside Stable-Baselines3's PPO with the settings of rl-baselines3-zoo, in alternation.

    python benchmark/peers/gym_goals.py --out FILE.csv             # steps and seconds to a goal, with another seed in each round
    python benchmark/peers/gym_goals.py --out FILE.json --speed    # steps/s, and of a bare loop
    python benchmark/peers/gym_goals.py --out FILE.csv -- --num-workers 4    # with flags for ours

A goal is a mean return of 100 episodes. Seconds are those of the whole command, imports and start of the actors included; ours are of a
copy of the file that reports four times a second instead of every five seconds. `bare` is a loop over the SyncVectorEnv of one worker with
random actions, in one process; the pipeline has two such workers, but learning and inference take most of two cores.
stable_baselines3_ppo.py says how the peer is installed; ours needs box2d and minigrid, too. Nothing else may run beside it.
"""

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = str(ROOT), str(HERE.parent)
import appo_gym  # noqa: E402
import collect  # noqa: E402

# Where Gymnasium says that it is solved; MiniGrid does not, and its best returns are a little below 1
GOALS = {
    "CartPole-v1": 475, "Acrobot-v1": -100, "LunarLander-v3": 200, "minigrid:MiniGrid-Empty-8x8-v0": 0.9,
    "minigrid:MiniGrid-DoorKey-5x5-v0": 0.9,
}  # fmt: skip
REPORTS = ("    SECONDS = 5 ", "    SECONDS = 0.25 ")  # between two reports


@dataclass
class Options:
    out: Path  # file for the result, a CSV or, with --speed, a JSON file
    speed: bool = False  # steps/s instead of goals
    sb3_python: str = sys.executable  # a Python that has stable-baselines3
    rounds: int = 3
    envs: tuple[str, ...] = tuple(GOALS)  # of these
    steps: int = 0  # of a run of either side. Default: up to 2,000,000 of ours and the zoo's number; for speed 400,000 and 100,000


def ours(env_id: str, seed: int, steps: int, goal: float, more: list[str]) -> dict:
    """A run until its report shows the goal, or for so many steps."""
    text = (ROOT / "appo_gym.py").read_text()
    assert text.count(REPORTS[0]) == 1
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "appo_gym.py"
        script.write_text(text.replace(*REPORTS))
        command = [sys.executable, str(script), "--env-id", env_id, "--seed", str(seed), "--device", "cpu", "--num-workers", "2"]
        flags = ["--total-timesteps", str(steps), "--train-dir", folder, *more]
        start, found = time.perf_counter(), dict(reached=False)
        with subprocess.Popen(command + flags, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            for line in process.stdout:
                if line.startswith(f"{env_id}: "):  # its actors start now
                    learning = time.perf_counter()
                if match := re.match(r"step ([\d,]+): return (-?[\d.]+),", line):
                    now = time.perf_counter()
                    found |= dict(steps=int(match[1].replace(",", "")), seconds=now - start)
                    found["steps_per_second"] = found["steps"] / (now - learning)
                    if float(match[2]) >= goal:
                        found["reached"] = True
                        process.send_signal(signal.SIGINT)
                        break
    return found


def stable_baselines3(python: str, env_id: str, seed: int, *flags: str) -> dict:
    start = time.perf_counter()
    command = [python, str(HERE / "stable_baselines3_ppo.py"), env_id, str(seed), *flags]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    return found | dict(seconds=time.perf_counter() - start)


def bare(env_id: str, seconds: float = 5.0) -> float:
    """Steps/s of one worker's environments with random actions, in this process."""
    envs = appo_gym.make_envs(appo_gym.Args(env_id=env_id), appo_gym.Args.num_envs // 2)
    envs.reset(seed=1)
    actions, steps, start = [envs.action_space.sample() for _ in range(1000)], 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        envs.step(actions[steps // envs.num_envs % 1000])
        steps += envs.num_envs
    envs.close()
    return steps / passed


def main() -> None:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, flags = tyro.cli(Options, args=sys.argv[1:split]), sys.argv[split + 1 :]
    runs = {}
    for env_id in options.envs:
        for seed in range(1, options.rounds + 1):
            goal = float("inf") if options.speed else GOALS[env_id]
            found = dict(ours=ours(env_id, seed, options.steps or (400_000 if options.speed else 2_000_000), goal, flags))
            steps = options.steps or (100_000 if options.speed else 0)  # 0: the zoo's
            found["sb3"] = stable_baselines3(options.sb3_python, env_id, seed, "--goal", str(goal), "--steps", str(steps))
            if options.speed:
                found = {side: dict(steps_per_second=run["steps_per_second"]) for side, run in found.items()}
                found["bare"] = dict(steps_per_second=bare(env_id))
            runs |= {f"{env_id}_{side}_{seed}": run for side, run in found.items()}
            print(env_id, seed, found, flush=True)
    if options.speed:
        return collect.write_rates(options.out, runs, "steps_per_second")
    points = {}  # of a run one, the goal; no return where it was not reached
    for name, run in runs.items():
        points[name] = [(run["seconds"], run["steps"], GOALS[name.split("_")[0]] if run["reached"] else float("nan"))]
    collect.write_curves(options.out, points)


if __name__ == "__main__":
    main()
