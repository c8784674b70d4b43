"""appo_gym.py with its default flags beside Stable-Baselines3's PPO with the settings of rl-baselines3-zoo, in alternation.

    python benchmark/gym_peers.py learning --out benchmark/results/gym_learning.json    # steps and seconds to a goal, three seeds
    python benchmark/gym_peers.py speed --out benchmark/results/gym_speed.json          # steps/s, three rounds, and of a bare loop
    python benchmark/gym_peers.py parts --out benchmark/results/gym_parts.json          # what a step costs, part by part

--sb3-python is that of: python -m venv .venv-sb3 && .venv-sb3/bin/pip install torch==2.13.0 stable-baselines3==2.9.2 box2d
    minigrid. Ours needs box2d and minigrid, too. Machine: 2 cores without a GPU; nothing else may run beside it.

A goal is a mean return of 100 episodes. Seconds are those of the whole command, imports and start of the actors included; ours are of a copy of
the file that reports four times a second instead of every five seconds. `bare` is a loop over the SyncVectorEnv of one worker with random actions,
in one process; the pipeline has two such workers, but learning and inference take most of the two cores.
"""

import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from dummy_sampler import machine  # noqa: E402

import appo_gym  # noqa: E402

# Where Gymnasium says that it is solved; MiniGrid does not, and its best returns are a little below 1
GOALS = {
    "CartPole-v1": 475, "Acrobot-v1": -100, "LunarLander-v3": 200, "minigrid:MiniGrid-Empty-8x8-v0": 0.9,
    "minigrid:MiniGrid-DoorKey-5x5-v0": 0.9,
}  # fmt: skip


@dataclass
class Options:
    what: tyro.conf.Positional[Literal["learning", "speed", "parts"]]
    out: Path  # JSON file for the result
    sb3_python: str = sys.executable  # a Python that has stable-baselines3
    rounds: int = 3  # seeds, or repetitions
    envs: tuple[str, ...] = tuple(GOALS)  # of these


def ours(env_id: str, seed: int, goal: float, steps: int) -> dict:
    """A run until its report shows the goal, or for so many steps."""
    text = (HERE.parent / "appo_gym.py").read_text()
    assert text.count('(seconds := change["time"]) < 5:') == 1
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "appo_gym.py"
        script.write_text(text.replace('(seconds := change["time"]) < 5:', '(seconds := change["time"]) < 0.25:'))
        command = [sys.executable, str(script), "--env-id", env_id, "--seed", str(seed), "--device", "cpu", "--num-workers", "2"]
        flags = ["--total-timesteps", str(steps), "--train-dir", folder]
        start, found = time.perf_counter(), dict(reached=False)
        with subprocess.Popen(command + flags, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            for line in process.stdout:
                if line.startswith("up to"):
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


def stable_baselines3(python: str, env_id: str, seed: int, goal: float) -> dict:
    start = time.perf_counter()
    command = [python, str(HERE / "stable_baselines3_gym.py"), env_id, str(seed), str(goal)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    return found | dict(seconds=time.perf_counter() - start)


def bare(env_id: str, seconds: float = 5.0) -> float:
    """Steps/s of one worker's environments with random actions, in this process."""
    envs = appo_gym.make_envs(appo_gym.Args(env_id=env_id), appo_gym.Args.num_envs_per_worker)
    envs.reset(seed=1)
    actions, steps, start = [envs.action_space.sample() for _ in range(1000)], 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        envs.step(actions[steps // envs.num_envs % 1000])
        steps += envs.num_envs
    envs.close()
    return steps / passed


def parts(env_id: str, rounds: int = 300) -> dict[str, float]:
    """Microseconds a step (a sample) of each part: alone, in one thread, medians; and in a run."""
    torch.set_num_threads(1)
    args = appo_gym.resolve(appo_gym.Args(env_id=env_id, num_workers=2, device="cpu"))
    spaces, device = appo_gym.spaces_of(args), torch.device("cpu")
    agent = appo_gym.Agent(spaces, args)
    inference = appo_gym.Inference(args, spaces, agent, device)
    learner = appo_gym.Learner(args, agent, inference, device)
    worker = appo_gym.WorkerEnvs(args, 0, inference.arrays, seed=1)
    worker.reset(0)
    env = appo_gym.gym.make(env_id)
    env.reset(seed=1)
    count = args.num_batches_per_epoch * args.batch_size // args.rollout
    inference.filling = list(np.arange(len(inference.free_slots)).reshape(-1, inference.size))[: len(inference.t)]
    for name in ("logprobs", "values"):
        getattr(inference.rollouts, name).normal_()
    inference.rollouts.rewards[:] = 1.0
    times = {}

    def timed(name: str, samples: int, function) -> None:
        start = time.perf_counter()
        function()
        times.setdefault(name, []).append(1e6 * (time.perf_counter() - start) / samples)

    choices = [env.action_space.sample() for _ in range(worker.n)]

    def alone() -> None:
        for action in choices:
            if any(env.step(action)[2:4]):
                env.reset()

    for i in range(rounds):
        timed("environments alone, as gymnasium.make gives them", worker.n, alone)
        timed("SyncVectorEnv of these as named arrays", worker.n, lambda: worker.splits[0].step(inference.arrays.action[worker.rows[0]][:, 0]))
        timed("WorkerEnvs.step: that, and the mailbox", worker.n, lambda: worker.step(0))
        for groups in (1, 2):
            inference.t = [i % args.rollout] * len(inference.t)
            with torch.inference_mode():
                timed(f"inference, {groups * worker.n} rows at once", groups * worker.n, lambda: inference.act(list(range(groups))))
        if i % 10 == 0:
            learner.version = 1
            inference.rollouts.versions[:] = 0
            timed("learning, an iteration", count * args.rollout, lambda: learner.iterate(np.arange(count)))
    worker.close()
    result = {name: statistics.median(found) for name, found in times.items()} | {
        f"{name}, {how}": found
        for how, sync in (("in a run, in turn (--sync)", True), ("in a run, side by side", False))
        for name, found in in_a_run(env_id, sync).items()
    }
    return {name: round(found, 2) for name, found in result.items()}


def in_a_run(env_id: str, sync: bool) -> dict[str, float]:
    """Microseconds a sample, by the clock, of inference and of learning in a run of some seconds."""
    seconds, samples = Counter(), Counter()

    def timed(cls, method: str, name: str, count) -> None:
        function = getattr(cls, method)

        def call(self, batch):
            start = time.perf_counter()
            result = function(self, batch)
            seconds[name] += time.perf_counter() - start
            samples[name] += count(self, batch)
            return result

        setattr(cls, method, call)

    own = appo_gym.Inference.act, appo_gym.Learner.iterate
    timed(appo_gym.Inference, "act", "inference", lambda inference, groups: len(groups) * inference.size)
    timed(appo_gym.Learner, "iterate", "learning", lambda learner, slots: len(slots) * learner.args.rollout)
    with tempfile.TemporaryDirectory() as folder:
        args = appo_gym.Args(env_id=env_id, num_workers=2, device="cpu", sync=sync, learner_threads=1, inference_threads=1,
                             train_for_seconds=12, total_timesteps=10**9)  # fmt: skip
        appo_gym.train(args, Path(folder) / "run")
    appo_gym.Inference.act, appo_gym.Learner.iterate = own
    return {name: 1e6 * seconds[name] / samples[name] for name in seconds}


def main() -> None:
    options = tyro.cli(Options)
    result = dict(machine=machine(), rounds=options.rounds, envs={})
    for env_id in options.envs:
        runs = result["envs"][env_id] = {}
        if options.what == "parts":
            runs |= parts(env_id)
            print(env_id, runs, flush=True)
            continue
        for seed in range(1, options.rounds + 1):
            if options.what == "learning":
                runs.setdefault("ours", []).append(ours(env_id, seed, GOALS[env_id], 2_000_000))
                runs.setdefault("sb3", []).append(stable_baselines3(options.sb3_python, env_id, seed, GOALS[env_id]))
            else:
                runs.setdefault("ours", []).append(ours(env_id, seed, np.inf, 400_000)["steps_per_second"])
                runs.setdefault("sb3", []).append(stable_baselines3(options.sb3_python, env_id, seed, np.inf)["steps_per_second"])
                runs.setdefault("bare", []).append(bare(env_id))
            print(env_id, seed, {name: found[-1] for name, found in runs.items()}, flush=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
