"""What this machine can do at most: the parts of the pipeline measured alone, and the pipeline with random actions.

    python benchmark/parts.py --out benchmark/results/parts.json            # 2 workers x 16 games of `benchmark`
    python benchmark/parts.py --sweep --out benchmark/results/sweep.json    # 4 to 64 games per worker

`bare` is one pinned process per worker that calls make_action on its games in turn, reads the screen and resizes it: nothing else.
`random` is the same games through actors, mailbox, pipes and inference thread, with a policy that draws at random. Both are
measured in alternation, over windows after all games have started.
"""

import json
import os
import queue
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import appo_doom as appo  # noqa: E402
from collect import machine  # noqa: E402


@dataclass
class Options:
    out: Path
    """JSON file for the results"""
    env_id: str = "benchmark"
    """environment"""
    num_workers: int = 2
    """processes, each pinned to a core"""
    num_envs_per_worker: int = 16
    """games per process"""
    seconds: float = 8.0
    """length of a window"""
    repeats: int = 3
    """windows of each kind, in alternation"""
    sweep: bool = False
    """bare and random for 4 to 64 games per worker, instead of the parts"""


def bare_worker(env_id: str, games: int, core: int, counter, barrier) -> None:
    os.setsid()  # a process group of its own, to be ended with its games
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    envs = [appo.DoomEnv(env_id, 4) for _ in range(games)]
    rng = np.random.default_rng(core)
    buttons = np.eye(envs[0].game.get_available_buttons_size() + 1)[:, 1:].tolist()
    actions = rng.integers(len(buttons), size=(500, games))
    for i, env in enumerate(envs):
        env.reset(seed=i)
    barrier.wait()
    step = 0
    while True:
        for i, env in enumerate(envs):
            if env.game.is_episode_finished():
                env.game.new_episode()
            else:
                env.game.make_action(buttons[actions[step % 500, i]], 4)
            if not env.game.is_episode_finished():
                env.read_state()
                env.observation()
        step += 1
        counter[0] += games


def bare(options: Options, games: int) -> float:
    """Frames/s."""
    context, cores = mp.get_context("forkserver"), appo.cores()
    counters = [torch.zeros(1, dtype=torch.int64).share_memory_() for _ in range(options.num_workers)]
    barrier = context.Barrier(options.num_workers + 1)
    workers = [
        context.Process(
            target=bare_worker, args=(options.env_id, games, cores[w % len(cores)], counters[w], barrier), daemon=True
        )
        for w in range(options.num_workers)
    ]
    for worker in workers:
        worker.start()
    barrier.wait()
    time.sleep(2)
    before, start = sum(int(counter) for counter in counters), time.perf_counter()
    time.sleep(options.seconds)
    rate = 4 * (sum(int(counter) for counter in counters) - before) / (time.perf_counter() - start)
    for worker in workers:
        appo.end_group(worker.pid)
        worker.join()
    return rate


class RandomAgent(nn.Module):
    state_size = 0

    def __init__(self, heads):
        super().__init__()
        self.heads = heads

    def forward(self, obs, vector, first, state, restarts):
        return torch.zeros(*first.shape, sum(self.heads)), torch.zeros(first.shape), state


def random_pipeline(options: Options, games: int) -> float:
    """Frames/s."""
    workers = options.num_workers
    args = appo.Args(env_id=options.env_id, device="cpu", num_workers=workers, num_envs_per_worker=games)
    args = appo.resolve(args)
    envs = appo.make_envs(args, 1)
    spaces = appo.spaces_of(envs)
    envs.close()
    rows, device = args.num_workers * games, torch.device("cpu")
    acting = appo.ActingPolicy(RandomAgent(spaces.heads), 0, device)
    rollouts, mailbox = (
        appo.Rollouts(spaces, args.rollout, 3 * rows, 0, device),
        appo.Mailbox(spaces, rows, args.num_workers),
    )
    full, free = queue.SimpleQueue(), queue.SimpleQueue()
    free.put((np.arange(3 * rows), None))
    inference = appo.Inference(args, mailbox, rollouts, acting, device, full, free)
    actors = appo.Actors(args, mailbox, lambda text, show=True: print(text), full.put)
    actors.start_all()
    thread = threading.Thread(target=inference.run, args=(actors,))
    thread.start()

    def learner() -> None:
        while (item := full.get()) is not None:
            free.put(item)
            actors.wake()

    eater = threading.Thread(target=learner)
    eater.start()
    while (mailbox.numpy().progress < 8).any():
        time.sleep(0.1)
    time.sleep(2)
    before, start = inference.steps, time.perf_counter()
    time.sleep(options.seconds)
    rate = 4 * (inference.steps - before) / (time.perf_counter() - start)
    inference.stopping = True
    actors.wake()
    thread.join()
    full.put(None)
    eater.join()
    actors.stop()
    return rate


def network(options: Options) -> dict[str, float]:
    """Milliseconds per sample on one thread: acting at several batch sizes, and learning."""
    args = appo.resolve(appo.Args(env_id=options.env_id, device="cpu", num_workers=2, batch_size=1024))
    envs = appo.make_envs(args, 1)
    spaces, device = appo.spaces_of(envs), torch.device("cpu")
    envs.close()
    appo.keep_freed_memory()
    torch.set_num_threads(1)
    agent = appo.Agent(spaces, args)
    rollouts = appo.Rollouts(spaces, 32, 64, agent.state_size, device)
    rollouts.obs.random_(0, 255)
    for field, value in ((rollouts.logprobs, -2.2), (rollouts.values, 0.0)):
        field.fill_(value)
    rollouts.rewards[:] = 0
    acting = appo.ActingPolicy(agent, 0, device)
    learner = appo.Learner(args, agent, rollouts, acting, device, lambda slots, event: None)
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
                rollouts.obs[:1, :n].contiguous(),
                rollouts.vector[:1, :n],
                torch.zeros(1, n, dtype=torch.bool),
                torch.zeros(n, agent.state_size),
            )
            result[f"inference, batch {n}"] = median(30, lambda: agent(*inputs, [0])) / n
    result["learning, batch 1024"] = median(8, lambda: learner.iterate(np.random.permutation(64)[:32])) / 1024
    return result


def main() -> None:
    options = tyro.cli(Options)
    result = dict(machine=machine(), command=" ".join(sys.argv), env_id=options.env_id, workers=options.num_workers)
    games = (4, 8, 16, 32, 64) if options.sweep else (options.num_envs_per_worker,)
    result["frames_per_second"] = {}
    for n in games:
        rates = dict(bare=[], random=[])
        for _ in range(options.repeats):
            rates["bare"].append(round(bare(options, n)))
            rates["random"].append(round(random_pipeline(options, n)))
        middle = {name: statistics.median(values) for name, values in rates.items()}
        share = statistics.median([b / a for a, b in zip(rates["bare"], rates["random"])])
        result["frames_per_second"][n] = middle | dict(share=round(share, 3), runs=rates)
        print(f"{n} games per worker: {middle}, random / bare = {share:.3f}", flush=True)
    if not options.sweep:
        result["milliseconds_per_sample"] = {name: round(value, 3) for name, value in network(options).items()}
        times = result["milliseconds_per_sample"]
        simulate = 1000 * options.num_workers * 4 / result["frames_per_second"][games[0]]["bare"]
        total = simulate + times["inference, batch 16"] + times["learning, batch 1024"]
        result["bound_frames_per_second"] = round(len(appo.cores()) * 4 * 1000 / total)
        print(
            f"{times}\nsimulation {simulate:.3f} ms; bound of {len(appo.cores())} cores: {result['bound_frames_per_second']} frames/s"
        )
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
