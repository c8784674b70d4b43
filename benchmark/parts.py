"""Measures where the time of a file goes: each of its parts alone, on one core.

    python benchmark/parts.py --file doom --out benchmark/results/parts_doom.json    # or atari, dmlab
    python benchmark/parts.py --file pbt_doom --num-envs-per-worker 4 --out benchmark/results/parts_pbt_doom.json    # matches of two
    python benchmark/parts.py --file gym --out benchmark/results/gym_parts.json
    python benchmark/parts.py --file mujoco --out benchmark/results/mujoco_parts.json
    python benchmark/parts.py --file replay --out benchmark/results/replay_parts.json
    python benchmark/parts.py --file dmlab --env-id seekavoid_arena_01 --games 1 4 16 32 --out benchmark/results/games_dmlab.json

The parts that files have in common work on random numbers, in one thread and in turn; times are medians, per sample. gpu.py has the same
under PyTorch's profiler, for a GPU.

* `act`, or `inference`: one batch of inference
* `gather`: a batch for the learner is copied out of the rollouts
* `learn`: the optimiser step with that batch, of which `vtrace` is a part
* `iteration`, or `learning`: all that the learner does with the rollouts of an iteration

Doom, Atari and DeepMind Lab have three rates; shares are relative to `bare` in the same round:

* `bare`: one pinned process per worker only steps its games and prepares their images: `make_action`, the screen and the resize for Doom,
  `pool.step` and the four copies for Atari
* `dummy`: the loop of dummy_sampler.py over the same games in the same processes, ten steps of the one after ten of the other, timed by the
  clock, so that changes in the machine's speed affect both
* `random`: actors, mailbox, pipes, inference thread and rollouts with random actions, in alternation with these processes

With --games, only the dummy sampler's rate and the memory of a worker are measured, with each of these numbers of games.

Matches (pbt_doom) have only `bare` and `dummy`. There `bare` has a thread for each player, since engines wait for each other: `set_action`,
`advance_action` tic by tic, the screen and the resize. It has the variant's barrier before each tic, without which the engines hang after a
few hundred tics.

Gymnasium and MuJoCo (microseconds): `environments` steps the environments of make_envs in this process; `worker` also does everything else
that an actor does, and writes the actions. `act` and `iteration` are also timed, by the clock, in runs of three windows, in which the two
threads share the GIL.

Replay (milliseconds):

* `act`: without replay, with the logits stored (uniform), and with logits and features stored (elite)
* `gather` and `learn`: without and with replayed rollouts
* `choose`: all of `Learner.choose_replayed` at the beginning of a run, with six candidates for each replayed rollout
* `distances 96`: the distances of these candidates alone, for which the network sees every fourth state again

It takes a minute for Gymnasium, MuJoCo and replay, and some 6 on 2 cores for the others with their default windows. Nothing else may run
beside it.
"""

import ctypes
import importlib
import json
import multiprocessing
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.multiprocessing as mp
import tyro

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from collect import machine_and_engines  # noqa: E402

import dummy_sampler  # noqa: E402
import evaluate  # noqa: E402

ENVIRONMENTS = dict(gym=("CartPole-v1", "LunarLander-v3", "minigrid:MiniGrid-Empty-8x8-v0"), mujoco=("HalfCheetah-v5", "Ant-v5"))


@dataclass
class Options:
    out: Path
    """JSON file for the result"""
    file: Literal["doom", "atari", "dmlab", "pbt_doom", "gym", "mujoco", "replay"] = "doom"
    """the file to measure: appo_FILE.py, for replay appo_atari_replay.py"""
    env_id: tuple[str, ...] = ()
    """environment; several for gym and mujoco. Default: benchmark for doom, duel for pbt_doom, else the file's own"""
    num_workers: int = 2
    """processes with games, each pinned to a core"""
    num_envs_per_worker: int | None = None
    """games per process. Default: the file's own"""
    games: tuple[int, ...] = ()
    """measure only frames/s of the dummy sampler and memory of a worker, with each of these numbers of games per process"""
    seconds: float = 4.0
    """length in seconds of a window with games"""
    repeats: int = 10
    """number of windows of each kind, in alternation"""
    rounds: int = 60
    """how often each part is timed, in alternation"""
    device: str = "cpu"
    """device of the network"""


# ---- the parts of every file


def build(appo, env_id: str, device: str, **flags):
    """Returns a learner with its inference, whose rollouts and mailbox are filled with random numbers."""
    args = appo.Args(env_id=env_id, device=device, **flags)
    torch.manual_seed(0)
    spaces, device = appo.spaces_of(args), torch.device(args.device)
    agent = appo.Agent(spaces, args).to(device)
    inference = appo.Inference(args, spaces, agent, device)
    # At version 0 the first iteration would only begin the inputs' statistics, so the version becomes 1
    learner = appo.Learner(args, *([] if inference.agent is agent else [agent]), inference)
    mailbox, inference.version, args.max_policy_lag = inference.shared_mailbox, 1, np.inf  # no limit: these rollouts only get older
    r = inference.rollouts
    for field in (*mailbox.obs.values(), *r.obs.values()):
        if field.dtype == torch.uint8:
            field.random_(0, 255)
        elif field.is_floating_point():
            field.normal_()
    for name in ("actions", "logits"):  # not every file has all of these
        if (field := getattr(r, name, None)) is not None and field.is_floating_point():
            field.normal_()
    r.logprobs.fill_(-1.4)
    r.rewards[:] = 0
    mailbox.reward.zero_()
    r.values.fill_(0.0)
    return learner


def rows_of_group(inference) -> int:
    return len(inference.state) // len(inference.t)


def acting(inference, groups: list[int] | None = None):
    """Returns a function that runs one batch of inference, with the rows of these groups or with all rows."""
    groups, n = groups or list(range(len(inference.t))), rows_of_group(inference)

    @torch.inference_mode()
    def act() -> None:
        for group in groups:
            slots = slice(group * n, group * n + n)
            inference.t[group], inference.filling[group] = 1, slots
        inference.act(groups)

    return act


def learning(appo, learner, samples: int) -> dict:
    """Returns {name: (samples, function)} for `gather`, `learn` and `vtrace`."""
    slots = np.arange(samples // learner.args.rollout)
    batch = learner.gather(slots)
    ones = torch.ones_like(batch.rewards)
    values = torch.zeros(len(ones) + 1, ones.shape[1], device=ones.device)
    return {
        f"gather {samples}": (samples, lambda: learner.gather(slots)),
        f"learn {samples}": (samples, lambda: learner.update(batch, last_epoch=True)),
        f"vtrace {samples}": (samples, lambda: appo.vtrace(ones, values, ones, ones, ones, 1.0, 1.0, 0.95)),
    }


def iteration(appo, learner) -> tuple:
    """Returns (samples, function). The function does all that the learner does with the rollouts of an iteration."""
    args, inference = learner.args, learner.inference
    blocks = [appo.slice_of(args, i) for i in range(appo.num_blocks(args))]
    count = appo.blocks_per_iteration(args) if hasattr(appo, "blocks_per_iteration") else len(inference.pipes)

    def iterate() -> None:
        learner.iterate(random.sample(blocks, count))
        inference.returned.recv()  # nobody else does, and the pipe would fill up

    return count * rows_of_group(inference) * args.rollout, iterate


def timed(parts: dict, options: Options, unit: float = 1e6) -> dict[str, float]:
    """Returns {name: median time per sample} over rounds that do each part once. parts: {name: (samples, function)}; unit: 1e6 for
    microseconds, 1000 for milliseconds."""
    times = {name: [] for name in parts}
    for _ in range(options.rounds):
        for name, (samples, function) in parts.items():
            start = time.perf_counter()
            function()
            if options.device != "cpu":
                torch.cuda.synchronize()
            times[name].append(unit * (time.perf_counter() - start) / samples)
    return {name: statistics.median(values[options.rounds // 6 :]) for name, values in times.items()}


# ---- games in processes of their own: Doom, Atari, DeepMind Lab


def doom_steps(envs, actions):
    """Steps the games forever, with nothing but game, screen and image. Yields, for each step, the number of games that did not just reset.
    Which games have ended is stored where SyncVectorEnv stores it, for the loop that steps them next. But `valid_steps` keeps its own
    record, and so miscounts one step in 10,000, up as often as down."""
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
                    env.game.make_action(buttons[action[i, 0]], env.args.frameskip)
                    env.tics += env.args.frameskip
                finished = env.game.is_episode_finished()
                ended[i] = finished or env.tics >= env.scenario.time_limit
                if not finished:
                    env.observation()
            yield valid


def atari_steps(envs, actions):
    """Steps the games of EnvPool as `doom_steps` does those of Doom."""
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
    """Steps the games of DeepMind Lab as `doom_steps` does those of Doom."""
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
    """Steps matches as `doom_steps` does games. Which of them are over is stored where `WorkerEnvs` finds it."""

    def play(player, action) -> bool:
        buttons = np.concatenate([press[a] for press, a in zip(player.presses, action)])
        player.make_action(buttons.tolist())
        player.tics += player.args.frameskip
        if not (finished := player.game.is_episode_finished()):
            player.observation()
        return finished

    n = envs.worker.args.seats
    while True:
        for action in actions:
            valid = 0
            for i, game in enumerate(envs.worker.games):
                if not game.agents:
                    game.reset()
                    continue
                finished = game.together(play, action[i * n : i * n + n])
                valid += n
                if any(finished) or game.players[0].tics >= game.scenario.time_limit:
                    game.agents = []
            yield valid


def bare_worker(file: str, args, core: int, counters, barrier) -> None:
    """Steps games forever, in the bare loop and the dummy sampler's in turn: the body of a process. counters: shared, float64 [2, 2],
    (valid steps, seconds) of the two loops."""
    appo = importlib.import_module(f"appo_{file}")
    dummy_sampler.set_up_process(core)
    envs, counters = dummy_sampler.envs_of(appo, args, args.num_envs_per_worker), counters.numpy()
    with dummy_sampler.starting:
        envs.reset(seed=1000 * core)
    envs.action_space.seed(core)
    actions = [envs.action_space.sample() for _ in range(500)]
    bare_steps = dict(doom=doom_steps, atari=atari_steps, dmlab=lab_steps, pbt_doom=match_steps)[file]
    loops = bare_steps(envs, actions), dummy_sampler.valid_steps(envs, actions)
    barrier.wait()
    while True:
        for loop, counter in zip(loops, counters):
            start = time.perf_counter()
            valid = sum(next(loop) for _ in range(10))
            counter += valid, time.perf_counter() - start


def bare(options: Options, args) -> list[float]:
    """Returns the frames/s of the bare loops and of the dummy sampler's."""
    context, cores = mp.get_context("forkserver"), sorted(os.sched_getaffinity(0))
    counters = torch.zeros(args.num_workers, 2, 2, dtype=torch.float64).share_memory_()
    barrier = context.Barrier(args.num_workers + 1)
    workers = []
    try:
        for counter, core in zip(counters, cores * args.num_workers):
            workers.append(context.Process(target=bare_worker, args=(options.file, args, core, counter, barrier), daemon=True))
            workers[-1].start()
        barrier.wait(timeout=120)  # raises if a worker has died
        time.sleep(min(2, options.seconds))
        before = counters.clone()
        time.sleep(2 * options.seconds)
        steps, seconds = (counters - before).unbind(-1)
        return (args.frameskip * steps / seconds).sum(0).tolist()
    finally:
        dummy_sampler.end(importlib.import_module(f"appo_{options.file}"), workers)


def with_games(options: Options, appo, args, sampling) -> dict:
    """Measures games in processes of their own and, except for matches, the parts of inference and learner."""
    if options.file != "pbt_doom" and len(appo.spaces_of(args).heads) > 1:
        sys.exit(f"error: {args.env_id} has several action heads; the bare loop presses one button at a time")
    rates, matches = dict(bare=[], dummy=[], random=[]), options.file == "pbt_doom"
    for _ in range(options.repeats):
        for kind, rate in zip(rates, bare(options, args)):
            rates[kind].append(round(rate))
        if not matches:
            rates["random"].append(dummy_sampler.pipeline(sampling, appo, args, null=False)["frames_per_second"])
    shares = {kind: [round(b / a, 3) for a, b in zip(rates["bare"], rates[kind])] for kind in ("dummy", "random")}
    result = dict(frames_per_second=rates, shares=shares)
    if matches:
        return result
    parts = {}
    for n in (8, 16, 32, 64):
        one = build(appo, args.env_id, options.device, num_workers=1, num_envs_per_worker=n, batch_size=1024)
        parts[f"inference, batch {n}"] = n, acting(one.inference)
        if n == 16:  # with 16 games an iteration is one batch
            learner = one
    for name, part in learning(appo, learner, 1024).items():
        parts[name.replace(" ", ", batch ")] = part
    parts["learning, batch 1024"] = iteration(appo, learner)
    times = {name: round(value, 5) for name, value in timed(parts, options, unit=1000).items()}
    simulation = round(1000 * args.num_workers * args.frameskip / statistics.median(rates["bare"]), 3)
    total = simulation + times["inference, batch 16"] + times["learning, batch 1024"]
    together = round(len(os.sched_getaffinity(0)) * args.frameskip * 1000 / total)
    return result | dict(milliseconds_per_sample=times, simulation_milliseconds=simulation, estimate_frames_per_second=together)


def numbers_of_games(options: Options, appo, args, sampling) -> list[dict]:
    """Runs the dummy sampler with each number of games. Returns its results, with the resident memory of its largest worker."""
    results = []
    for games in options.games:
        most, over = [0], threading.Event()

        def watch(most=most, over=over) -> None:
            while not over.wait(0.5):
                for worker in multiprocessing.active_children():
                    status = Path(f"/proc/{worker.pid}/status")
                    resident = re.search(r"VmRSS:\s+(\d+)", status.read_text()) if status.exists() else None
                    most[0] = max(most[0], int(resident[1]) // 1024 if resident else 0)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            results.append(dummy_sampler.ceiling(sampling, appo, args, games))
        finally:
            over.set()
            thread.join()
        results[-1]["resident_mib_of_a_worker"] = most[0]
    return results


# ---- environments in this process: Gymnasium, MuJoCo


def small_environments(options: Options, appo, env_id: str) -> dict[str, float]:
    """Returns the microseconds per sample of each part."""
    n = options.num_envs_per_worker
    learner = build(appo, env_id, options.device, num_workers=2, **of_each_worker(appo, n))
    inference = learner.inference
    games = evaluate.Games(appo, learner.args, n, draws=False)
    games.worker.reset()
    envs = games.worker.envs
    envs.action_space.seed(1)
    actions = [envs.action_space.sample() for _ in range(100)]
    parts = {
        "environments": (n, lambda: envs.step(actions[np.random.randint(100)])),
        "worker": (n, lambda: games.step(actions[np.random.randint(100)].reshape(n, -1))),
        f"act, {n} rows": (n, acting(inference, [0])),
        f"act, {2 * n} rows": (2 * n, acting(inference, [0, 1])),
        **learning(appo, learner, learner.args.batch_size),
        "iteration": iteration(appo, learner),
    }
    result = timed(parts, options)
    games.close()
    for how, sync in (("in turn (--sync)", True), ("side by side", False)):
        found = in_a_run(options, appo, env_id, sync)
        result |= {f"{name}, in a run, {how}": microseconds for name, microseconds in found.items()}
    return {name: round(microseconds, 2) for name, microseconds in result.items()}


def of_each_worker(appo, games: int) -> dict:
    """Returns the flag that gives each of two workers this number of games."""
    return dict(num_envs=2 * games) if hasattr(appo.Args, "num_envs") else dict(num_envs_per_worker=games)


def in_a_run(options: Options, appo, env_id: str, sync: bool) -> dict[str, float]:
    """Trains for three windows. Returns the microseconds per sample, by the clock, of inference and of the learner's iterations."""
    seconds, samples, starts = Counter(), Counter(), []
    by_itself = hasattr(appo.Args, "train_for_seconds")  # it ends the run after so many seconds
    flags = of_each_worker(appo, options.num_envs_per_worker)
    if by_itself:
        flags |= dict(train_for_seconds=3 * options.seconds)

    def watched(cls, method: str, name: str, count) -> None:
        function = getattr(cls, method)

        def call(self, batch):
            start = time.perf_counter()
            result = function(self, batch)
            seconds[name] += time.perf_counter() - start
            samples[name] += count(self, batch)
            if name == "iteration" and not by_itself:
                starts.append(start)
                if start - starts[0] > 3 * options.seconds:
                    self.inference.end_with(KeyboardInterrupt())
            return result

        setattr(cls, method, call)

    handler, own = signal.getsignal(signal.SIGINT), (appo.Inference.act, appo.Learner.iterate)
    watched(appo.Inference, "act", "act", lambda inference, groups: len(groups) * rows_of_group(inference))
    watched(appo.Learner, "iterate", "iteration", lambda learner, taken: len(np.r_[*taken]) * learner.args.rollout)
    with tempfile.TemporaryDirectory() as folder:
        args = appo.Args(env_id=env_id, num_workers=2, device=options.device, sync=sync, total_timesteps=10**9, **flags)
        appo.train(args, Path(folder) / "run")
    appo.Inference.act, appo.Learner.iterate = own
    signal.signal(signal.SIGINT, handler)
    torch.set_num_threads(1)
    return {name: 1e6 * seconds[name] / samples[name] for name in seconds}


# ---- replay


def replay_parts(options: Options, appo) -> dict:
    """Returns milliseconds, with the defaults of a run on two cores: 32 games, and iterations of 16 fresh and 16 replayed rollouts."""
    learners = {}
    for name, flags in dict(none=dict(replay_share=0.0), uniform={}, elite=dict(replay="elite")).items():
        learners[name] = build(appo, "Breakout-v5", options.device, num_workers=2, replay_rollouts=200, **flags)
        learners[name].num_filled = len(learners[name].kept)
    none, elite = learners["none"], learners["elite"]
    args, replayed = elite.args, appo.replayed_per_iteration(elite.args)
    slots = np.r_[*(appo.slice_of(args, i) for i in range(appo.blocks_per_iteration(args)))]
    both = np.concatenate([slots, elite.choose_replayed(slots[-1])[0]])
    candidates = np.random.permutation(np.r_[*elite.kept])[: round(replayed * args.replay_candidates)]
    in_batches = np.array_split(candidates, len(candidates) * args.rollout // args.batch_size)  # each as large as a batch
    batches = none.gather(slots), elite.gather(both)
    parts = {
        "act": acting(none.inference),
        "act, logits stored": acting(learners["uniform"].inference),
        "act, logits and features stored": acting(elite.inference),
        "choose": lambda: elite.choose_replayed(slots[-1]),
        f"distances {len(candidates)}": lambda: [elite.distances(batch, slots[-1]) for batch in in_batches],
        "gather": lambda: none.gather(slots),
        "learn": lambda: none.update(batches[0], last_epoch=False),
        "gather with what is replayed": lambda: elite.gather(both),
        "learn with what is replayed": lambda: elite.update(batches[1], last_epoch=False),
    }
    times = timed({name: (1, function) for name, function in parts.items()}, options, unit=1000)
    milliseconds = {name: round(value, 2) for name, value in times.items()}
    return dict(fresh=len(slots), replayed=replayed, precision=elite.args.precision, milliseconds=milliseconds)


def main() -> None:
    options = tyro.cli(Options)
    appo = importlib.import_module("appo_atari_replay" if options.file == "replay" else f"appo_{options.file}")
    own = appo.Args.num_envs // 2 if hasattr(appo.Args, "num_envs") else appo.Args.num_envs_per_worker
    options.num_envs_per_worker = options.num_envs_per_worker or own
    for option, value in ((-1, 2**31 - 1), (-4, 0), (-8, 1)):  # glibc keeps freed memory, as in `train`
        ctypes.CDLL(None).mallopt(option, value)
    torch.set_num_threads(1)  # the default of each thread on two cores
    result = dict(machine=machine_and_engines(), command=dummy_sampler.command())
    if options.file in ENVIRONMENTS:
        env_ids = options.env_id or ENVIRONMENTS[options.file]
        result["envs"] = {env_id: small_environments(options, appo, env_id) for env_id in env_ids}
    elif options.file == "replay":
        result |= replay_parts(options, appo)
    else:
        sampling = dummy_sampler.Options(family=options.file, env_id=options.env_id[0] if options.env_id else None, warm_up=min(2.0, options.seconds),
                                         num_workers=options.num_workers, num_envs_per_worker=options.num_envs_per_worker,
                                         window=options.seconds, windows=5 if options.games else 1)  # fmt: skip
        _, args = dummy_sampler.variant(sampling)
        result |= dict(env_id=args.env_id, workers=args.num_workers, envs_per_worker=args.num_envs_per_worker)
        if options.games:
            result["results"] = numbers_of_games(options, appo, args, sampling)
        else:
            result |= with_games(options, appo, args, sampling)
    print(json.dumps(result, indent=2))
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
