"""What this machine can do at most: the parts of the pipeline measured alone, and the pipeline with random actions.

    python benchmark/parts.py --family doom --out benchmark/results/parts_doom.json     # 2 workers x 16 games
    python benchmark/parts.py --family pbt_doom --num-envs-per-worker 4 --out benchmark/results/parts_pbt_doom.json    # matches of two

`bare` is one pinned process per worker that does nothing but step its games and prepare their images: `make_action`, the screen and
the resize for Doom, `pool.step` and the four copies for Atari. `dummy` is the loop of dummy_sampler.py in the same processes, over the
same games: ten steps of the one, ten of the other, by the clock, so that the machine's moods meet both. `random` is actors, mailbox,
pipes, inference thread and rollouts with random actions, in alternation with these processes. Shares are of the `bare` in the same round.

Of matches (pbt_doom) only `bare` and `dummy` are measured. There `bare` is a thread for each player, since engines wait for each other:
`set_action`, `advance_action` tic by tic, the screen and the resize. It has the variant's barrier before each tic: without, the engines
hang after a few hundred tics.
"""

import ctypes
import importlib
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dummy_sampler  # noqa: E402


@dataclass
class Options:
    out: Path
    """JSON file for the results"""
    family: Literal["doom", "atari", "dmlab", "pbt_doom"] = "doom"
    """which variant"""
    env_id: str | None = None
    """environment; default: benchmark for doom, Breakout-v5 for atari, dmlab_benchmark for dmlab, duel for pbt_doom"""
    num_workers: int = 2
    """processes, each pinned to a core"""
    num_envs_per_worker: int = 16
    """games per process"""
    seconds: float = 8.0
    """length of a window"""
    repeats: int = 3
    """windows of each kind, in alternation"""


def doom_steps(envs, actions):
    """Only game, screen and image. Generator: yields how many games were really stepped. Which games have ended is kept where
    SyncVectorEnv keeps it, for whoever steps the games next: `valid_steps` begins with its own idea of it, which miscounts one step
    in 10,000, up as often as down."""
    buttons = np.eye(envs.envs[0].game.get_available_buttons_size() + 1)[:, 1:].tolist()
    while True:
        for action in actions:
            ended = envs._autoreset_envs
            valid = envs.num_envs - np.count_nonzero(ended)
            for i, env in enumerate(envs.envs):
                if ended[i]:
                    env.game.new_episode()
                    env.tics = 0
                else:
                    env.game.make_action(buttons[action[i]], env.frameskip)
                    env.tics += env.frameskip
                finished = env.game.is_episode_finished()
                ended[i] = finished or env.tics >= env.scenario.time_limit
                if not finished:
                    env.observation()
            yield valid


def atari_steps(envs, actions):
    ended, image = np.zeros(envs.num_envs, bool), np.zeros((envs.num_envs, 84, 84, 4), np.uint8)
    while True:
        for action in actions:
            valid = envs.num_envs - np.count_nonzero(ended)
            obs, _, terminated, truncated, _ = envs.pool.step(action)
            for i in range(4):
                image[..., i] = obs[:, i]
            ended = terminated | truncated
            yield valid


def lab_steps(envs, actions):
    """As `doom_steps`."""
    while True:
        for action in actions:
            ended = envs._autoreset_envs
            valid = envs.num_envs - np.count_nonzero(ended)
            for i, env in enumerate(envs.envs):
                if ended[i]:
                    env.reset()
                else:
                    env.lab.step(env.actions[action[i]], num_steps=env.args.frameskip)
                    env.frames += env.args.frameskip
                ended[i] = not env.lab.is_running()
                if not ended[i]:
                    env.lab.observations()
            yield valid


def match_steps(envs, actions):
    """As `doom_steps`. Which games have ended is kept where `Games` keeps it."""

    def play(player, action) -> bool:
        buttons = np.concatenate([press[a] for press, a in zip(player.presses, action)])
        player.game.make_action(buttons.tolist(), player.frameskip)
        player.tics += player.frameskip
        if not (finished := player.game.is_episode_finished()):
            player.observation()
        return finished

    n = len(envs.agents)
    while True:
        for action in actions:
            valid = 0
            for i, game in enumerate(envs.games):
                if envs.over[i]:
                    game.reset()
                    envs.over[i] = False
                    continue
                finished = game.together(play, action[i * n : i * n + n])
                valid += n
                envs.over[i] = any(finished) or game.players[0].tics >= game.scenario.time_limit
            yield valid


def bare_worker(family: str, args, core: int, counters, barrier) -> None:
    """Body of a process. counters: shared, float64 [2, 2], (valid steps, seconds) of the bare loop and of the dummy sampler's."""
    appo = importlib.import_module(f"appo_{family}")
    dummy_sampler.set_up_process(core)
    envs, counters = appo.make_envs(args, args.num_envs_per_worker), counters.numpy()
    envs.reset(seed=1000 * core)
    envs.action_space.seed(core)
    actions = [envs.action_space.sample() for _ in range(500)]
    bare_steps = {"doom": doom_steps, "atari": atari_steps, "dmlab": lab_steps, "pbt_doom": match_steps}[family]
    loops = bare_steps(envs, actions), dummy_sampler.valid_steps(envs, actions)
    barrier.wait()
    while True:
        for loop, counter in zip(loops, counters):
            start = time.perf_counter()
            valid = sum(next(loop) for _ in range(10))
            counter += valid, time.perf_counter() - start


def bare(options: Options, appo, args) -> list[float]:
    """Frames/s of the bare loops and of the dummy sampler's."""
    context, cores = mp.get_context("forkserver"), sorted(os.sched_getaffinity(0))
    counters = torch.zeros(args.num_workers, 2, 2, dtype=torch.float64).share_memory_()
    barrier = context.Barrier(args.num_workers + 1)
    workers = []
    try:
        for counter, core in zip(counters, cores * args.num_workers):
            workers.append(context.Process(target=bare_worker, args=(options.family, args, core, counter, barrier), daemon=True))
            workers[-1].start()
        barrier.wait(timeout=120)  # raises when a worker has died
        time.sleep(2)
        before = counters.clone()
        time.sleep(2 * options.seconds)
        steps, seconds = (counters - before).unbind(-1)
        return (args.frameskip * steps / seconds).sum(0).tolist()
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def network(appo, args) -> dict[str, float]:
    """Milliseconds per sample on one thread: acting at several batch sizes, and learning."""
    spaces, device, args.batch_size = appo.spaces_of(args), torch.device("cpu"), 1024
    for option, value in ((-1, 2**31 - 1), (-4, 0), (-8, 1)):  # glibc keeps freed memory, as in `train`
        ctypes.CDLL(None).mallopt(option, value)
    torch.set_num_threads(1)
    agent = appo.Agent(spaces, args)
    inference = appo.Inference(args, spaces, agent, device)
    rollouts = inference.rollouts
    rollouts.obs["obs"].random_(0, 255)
    for field, value in ((rollouts.logprobs, -2.2), (rollouts.values, 0.0)):
        field.fill_(value)
    rollouts.rewards[:] = 0
    learner = appo.Learner(args, agent, inference, device)
    result = {}

    def median(repeats: int, function) -> float:
        times = []
        for _ in range(repeats + 3):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return 1000 * statistics.median(times[3:])

    with torch.inference_mode():
        for n in (8, 16, 32, 64):
            inputs = (
                {name: part[:1, :n].contiguous() for name, part in rollouts.obs.items()},
                torch.zeros(1, n, dtype=torch.bool),
                torch.zeros(n, agent.state_size),
            )
            result[f"inference, batch {n}"] = median(30, lambda: agent(*inputs, [0])) / n
    result["learning, batch 1024"] = median(8, lambda: learner.iterate(np.random.permutation(rollouts.first.shape[1])[:32])) / 1024
    return result


def main() -> None:
    options = tyro.cli(Options)
    sampling = dummy_sampler.Options(family=options.family, env_id=options.env_id, num_workers=options.num_workers,
                                     num_envs_per_worker=options.num_envs_per_worker, window=options.seconds, windows=1,
                                     warm_up=2.0)  # fmt: skip
    appo, args = dummy_sampler.variant(sampling)
    if options.family != "pbt_doom" and not isinstance(appo.make_envs(args, 1).single_action_space, gym.spaces.Discrete):
        sys.exit(f"error: {args.env_id} has several heads of actions; the bare loop presses one button at a time")
    result = dict(machine=dummy_sampler.machine(), command=dummy_sampler.command(), env_id=args.env_id, workers=args.num_workers,
                  envs_per_worker=args.num_envs_per_worker)
    rates, matches = dict(bare=[], dummy=[], random=[]), options.family == "pbt_doom"
    for _ in range(options.repeats):
        for kind, rate in zip(rates, bare(options, appo, args)):
            rates[kind].append(round(rate))
        if not matches:
            rates["random"].append(dummy_sampler.pipeline(sampling, appo, args, null=False)["frames_per_second"])
    shares = {kind: [round(b / a, 3) for a, b in zip(rates["bare"], rates[kind])] for kind in ("dummy", "random")}
    result["frames_per_second"], result["shares"] = rates, shares
    if matches:
        print(json.dumps(result, indent=2))
        options.out.write_text(json.dumps(result, indent=2) + "\n")
        return
    times = {name: round(value, 3) for name, value in network(appo, args).items()}
    result["milliseconds_per_sample"] = times
    result["simulation_milliseconds"] = round(1000 * args.num_workers * args.frameskip / statistics.median(rates["bare"]), 3)
    total = result["simulation_milliseconds"] + times["inference, batch 16"] + times["learning, batch 1024"]
    result["estimate_frames_per_second"] = round(len(os.sched_getaffinity(0)) * args.frameskip * 1000 / total)
    print(json.dumps(result, indent=2))
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
