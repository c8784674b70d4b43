"""Measures the ceiling: steps the environments of a file with random actions, pinned as in training, without a learner.

    python dummy_sampler.py --family doom --env-id benchmark --num-workers 20
    python dummy_sampler.py --family atari --env-id Breakout-v5 --sweep     # the best number of environments per worker
    python dummy_sampler.py --family doom --null                            # the throughput of the pipeline alone

The first two commands step the environments that the file's `make_envs` returns (in appo_pbt_doom.py, its `WorkerEnvs`)
as an actor does, without inference, and count the frames of valid steps. `--null` does the opposite: it runs the file's
own actors, mailbox, pipes and inference thread with environments that cost nothing and a policy that draws actions at
random, and counts rows and groups, for 2 to 72 workers.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import json
import multiprocessing.connection
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import tyro
from tqdm import tqdm

SWEEP = (1, 2, 4, 8, 16, 32, 64)  # environments per worker
NULL_WORKERS = (2, 4, 8, 16, 32, 64, 72)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENGINES = dict(doom="vizdoom", atari="envpool", dmlab="deepmind_lab", mujoco="envpool", pbt_doom="vizdoom")  # packages


@dataclass
class Options:
    family: Literal["doom", "atari", "dmlab", "mujoco", "pbt_doom"] = "doom"
    """the file whose environments are stepped: appo_FAMILY.py"""
    env_id: str | None = None
    """environment to step. Default: benchmark for doom, duel for pbt_doom, else the file's own default"""
    num_workers: int | None = None
    """number of processes. Default: the number of cores that this process may use; with --null 2 to 72"""
    num_envs_per_worker: int = 16
    """environments per process"""
    set_workers_cpu_affinity: bool = True
    """pin each process and its engines to one core"""
    window: float = 5.0
    """length in seconds of a window, over which a rate is taken"""
    windows: int = 5
    """number of windows; the median and the range of their rates are reported"""
    warm_up: float = 3.0
    """seconds before the first window"""
    sweep: bool = False
    """measure 1 to 64 environments per worker and report the best"""
    null: bool = False
    """measure mailbox, pipes and inference thread alone, with environments that cost nothing"""
    out: Path | None = None
    """JSON file for the results. Default: none is written"""


def variant(options: Options):
    """Returns the module of the family and its Args. Exits with a message if the options are wrong."""
    for name in ("num_workers", "num_envs_per_worker", "windows"):
        value = getattr(options, name)
        if value is not None and value < 1:
            sys.exit(f"error: --{name.replace('_', '-')} {value} is out of range: at least 1")
    if options.null and options.sweep:
        sys.exit("error: --null measures 2 to 72 workers; it cannot be combined with --sweep")
    if options.null and options.family in ("mujoco", "pbt_doom"):
        sys.exit("error: --null is for one policy with discrete actions: --family doom, atari or dmlab")
    if options.out and not options.out.parent.is_dir():
        sys.exit(f"error: no such folder: {options.out.parent}")
    appo = importlib.import_module(f"appo_{options.family}")
    env_id = options.env_id or dict(doom="benchmark", pbt_doom="duel").get(options.family, appo.Args.env_id)
    workers = options.num_workers or len(os.sched_getaffinity(0))
    per_worker = options.num_envs_per_worker
    of_all = dict(num_envs=workers * per_worker) if hasattr(appo.Args, "num_envs") else dict(num_envs_per_worker=per_worker)
    of_all |= dict(num_policies=1) if options.family == "pbt_doom" else {}
    if hasattr(appo.Args, "set_workers_cpu_affinity"):
        of_all |= dict(set_workers_cpu_affinity=options.set_workers_cpu_affinity)
    args = appo.Args(env_id=env_id, device="cpu", num_workers=workers, **of_all)
    try:
        appo.spaces_of(args)  # raises if there is no such environment; starts no game
        if options.family == "dmlab":
            appo.check_levels(args)
    except appo.UserError as error:
        sys.exit(f"error: {error}")
    return appo, args


def frameskip_of(args) -> int:
    """Returns the frames per step: 1 for appo_mujoco.py, which counts only steps."""
    return getattr(args, "frameskip", 1)


starting = threading.Lock()  # held while engines start: if killed then, they leave files in /dev/shm


def end_with_parent() -> None:
    """Ends this process when its parent has ended. The body of a thread."""
    multiprocessing.parent_process().join()
    starting.acquire(timeout=120)
    os._exit(1)  # engines end with the threads that started them


def set_up_process(core: int | None) -> None:
    """Prepares this process for stepping environments: pins it to a core, moves it into its own process group, and
    makes it end with the main process."""
    os.setpgrp()  # so that Ctrl-C reaches only the main process
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # a no-op handler: engines would inherit SIG_IGN
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGTTIN, signal.SIGTTOU):  # otherwise the kernel stops the group: engines touch the terminal
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    if core is not None:
        os.sched_setaffinity(0, {core})


class Matches:
    """The games of appo_pbt_doom.py and their mailbox, with the part of VectorEnv's interface that is used here."""

    def __init__(self, appo, args, count: int):
        spaces = appo.spaces_of(args)
        self.num_envs = count * args.seats  # agents
        self.mailbox = appo.Mailbox(spaces, self.num_envs, len(appo.shaping_of(args))).share()
        self.worker = appo.WorkerEnvs(args, np.arange(self.num_envs), self.mailbox, args.seed)
        self.action_space = gym.vector.utils.batch_space(gym.spaces.MultiDiscrete(spaces.heads), self.num_envs)

    def reset(self, *, seed: int, options=None):
        self.worker.seed = seed
        self.worker.reset()

    def step(self, actions):
        self.mailbox.action[:] = actions
        self.worker.step()
        ended = np.array(list(self.worker.ended.values()))
        return {}, self.mailbox.reward, ended, np.zeros_like(ended), {}


def envs_of(appo, args, count: int):
    """Returns the environments of one worker."""
    return Matches(appo, args, count) if hasattr(appo, "make_game") else appo.make_envs(args, count)


def sample(family: str, args, count: int, worker: int, core: int | None, steps, reset, barrier) -> None:
    """Steps `count` environments forever: the body of a worker process. steps, reset: shared tensors [workers], for the
    worker's valid steps and the seconds that its reset took."""
    appo = importlib.import_module(f"appo_{family}")
    set_up_process(core)
    envs, steps, reset = envs_of(appo, args, count), steps.numpy(), reset.numpy()
    start = time.perf_counter()
    with starting:
        envs.reset(seed=1000 * worker, options=dict(first_row=worker * count))  # decides which task a game plays
    reset[worker] = time.perf_counter() - start
    envs.action_space.seed(worker)
    actions = [envs.action_space.sample() for _ in range(256)]  # drawn once: drawing is not part of the simulator
    barrier.wait()
    for valid in valid_steps(envs, actions):
        steps[worker] += valid


def valid_steps(envs: gym.vector.VectorEnv | Matches, actions: list):
    """Steps the environments forever. Yields, for each step, the number of environments that did not just reset."""
    ended = np.zeros(envs.num_envs, bool)
    while True:
        for action in actions:
            valid = envs.num_envs - np.count_nonzero(ended)  # the others only reset
            _, _, terminated, truncated, _ = envs.step(action)
            ended = terminated | truncated
            yield valid


def rates(counter, windows: int, seconds: float, text: str, check) -> list[float]:
    """Returns counts per second, one for each window of `seconds`. text: label of the progress bar; check: called after
    each window, raises if something has gone wrong."""
    result = []
    with tqdm(total=windows, desc=text, unit=" windows", disable=None) as bar:
        before, start = counter(), time.perf_counter()
        for _ in range(windows):
            time.sleep(seconds)
            now, end = counter(), time.perf_counter()
            check()
            result.append((now - before) / (end - start))
            before, start = now, end
            bar.set_postfix_str(f"{result[-1]:,.0f} per second")
            bar.update()
    return result


@contextlib.contextmanager
def ignored_signals():
    """Ignores signals within the context; programs that are started there ignore them permanently."""
    usual = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def end(appo, processes: list) -> None:
    """Kills processes and removes their engines' files in /dev/shm."""
    with ignored_signals():  # a second signal would leave some running
        for process in processes:
            if process.pid:  # it has started
                getattr(appo, "kill", mp.Process.kill)(process)
                process.join()


def ceiling(options: Options, appo, args, count: int) -> dict:
    """Steps all environments, `count` per process, with random actions. Returns frames/s, reset and start times."""
    context, cores = mp.get_context("forkserver"), sorted(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = "1"  # in the workers, as in training
    context.set_forkserver_preload(["numpy", "torch", "gymnasium", "tyro", "tqdm", ENGINES[options.family]])
    with ignored_signals():  # inherited by processes until they set their handlers
        forkserver.ensure_running()
    steps = torch.zeros(args.num_workers, dtype=torch.int64).share_memory_()
    reset = torch.zeros(args.num_workers, dtype=torch.float64).share_memory_()
    barrier, start = context.Barrier(args.num_workers + 1), time.perf_counter()
    processes = []

    def check() -> None:
        if multiprocessing.connection.wait([process.sentinel for process in processes], timeout=0):
            raise SystemExit("error: a worker died; its traceback is above")

    try:
        for worker in range(args.num_workers):
            core = cores[worker % len(cores)] if options.set_workers_cpu_affinity else None
            arguments = (options.family, args, count, worker, core, steps, reset, barrier)
            processes.append(context.Process(target=sample, args=arguments, daemon=True))
            processes[-1].start()
        with tqdm(total=args.num_workers, desc="starting", unit=" workers", disable=None) as bar:
            while barrier.n_waiting < args.num_workers:
                check()
                time.sleep(0.1)
                bar.n = barrier.n_waiting
                bar.refresh()
        barrier.wait()
        started = time.perf_counter() - start
        time.sleep(options.warm_up)
        text = f"{args.num_workers} x {count}"
        found = rates(lambda: int(steps.sum()) * frameskip_of(args), options.windows, options.window, text, check)
    finally:
        end(appo, processes)
        if options.family == "dmlab":
            shutil.rmtree(importlib.import_module("appo_dmlab").engines_folder(args), ignore_errors=True)
    return dict(workers=args.num_workers, envs_per_worker=count,
                frames_per_second=round(statistics.median(found)), windows=[round(rate) for rate in found],
                reset_seconds=round(float(reset.max()), 2), start_seconds=round(started, 2))  # fmt: skip


class NullEnvs(gym.vector.VectorEnv):
    """Environments that cost nothing: the observation is always the same, and no episode ends."""

    def __init__(self, num_envs: int, obs: dict[str, gym.spaces.Box]):
        self.action_space = gym.vector.utils.batch_space(gym.spaces.Discrete(4), num_envs)
        self.observation = {name: np.zeros((num_envs, *space.shape), space.dtype) for name, space in obs.items()}
        self.reward, self.never = np.zeros(num_envs), np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        return self.observation, {}

    def step(self, actions):
        return self.observation, self.reward, self.never, self.never, {}


def null_actor(family: str, obs: dict[str, gym.spaces.Box], *arguments) -> None:
    """Runs the file's own actor with environments that cost nothing."""
    appo = importlib.import_module(f"appo_{family}")
    appo.make_envs = lambda args, num_envs: NullEnvs(num_envs, obs)
    appo.run_actor(*arguments)


class RandomAgent(nn.Module):
    """Replaces the network: all actions are equally likely, every value is 0."""

    state_size, reduced = 0, ()

    def __init__(self, heads: tuple[int, ...]):
        super().__init__()
        self.heads = heads

    def forward(self, obs, first, state):
        return torch.zeros(*first.shape, sum(self.heads)), torch.zeros(first.shape), state


def pipeline(options: Options, appo, args, null: bool) -> dict:
    """Runs actors, mailbox, pipes, inference thread and rollouts with random actions and without a learner. Returns
    rows and frames per second and the microseconds per group. null: use environments that cost nothing."""
    spaces, usual = appo.spaces_of(args), appo.run_actor
    if null:
        spaces = appo.Spaces(spaces.obs, (4,))
        appo.run_actor = functools.partial(null_actor, options.family, spaces.obs)
    torch.set_num_threads(1)
    args.batch_size = args.num_workers * args.num_envs_per_worker * args.rollout  # slots: enough that nobody waits
    inference, errors = appo.Inference(args, spaces, RandomAgent(spaces.heads), torch.device("cpu")), []
    received = np.zeros(2, int)  # steps, valid steps

    def learner() -> None:  # learns nothing: gives each full block back at once
        while (block := inference.full.get()) is not None:
            valid = ~inference.rollouts.first[1:, block]
            received[:] += valid.size, np.count_nonzero(valid)
            inference.learner_pipe.send([block])
        errors.append(inference.error)

    def check() -> None:
        if errors and errors[0]:
            raise errors[0]

    thread = threading.Thread(target=learner)
    thread.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            with appo.running(inference, Path(folder)):
                while not received[0]:
                    time.sleep(0.1)
                    check()
                time.sleep(options.warm_up)
                before = inference.counts["rows"], inference.counts["forwards"]
                text = f"{args.num_workers} workers"
                found = rates(lambda: inference.counts["rows"], options.windows, options.window, text, check)
                now = inference.counts["rows"], inference.counts["forwards"]
                rows, forwards = np.subtract(now, before)
                steps, valid = received  # since the start: a short window may see no full block
                inference.full.put(None)
                thread.join()
    finally:
        inference.full.put(None)
        thread.join()
        appo.run_actor = usual
    middle, size = statistics.median(found), args.num_envs_per_worker // args.worker_num_splits
    return dict(workers=args.num_workers, envs_per_worker=args.num_envs_per_worker, rows_per_second=round(middle),
                frames_per_second=round(middle * valid / steps * args.frameskip),
                windows=[round(rate) for rate in found],
                microseconds_per_group=round(1e6 * size / middle, 1),
                rows_per_batch=round(rows / forwards, 1))  # fmt: skip


def command() -> str:
    """Returns the command as it was typed, without the path of this checkout."""
    return "python " + shlex.join(word.replace(f"{Path(__file__).resolve().parent}/", "") for word in sys.argv)


def machine() -> dict[str, str | int]:
    """Returns what is needed to compare results: hardware, versions, date and, in a checkout, the commit."""

    def git(*command: str) -> str:
        try:
            run = subprocess.run(["git", *command], capture_output=True, text=True, cwd=Path(__file__).parent)
            return run.stdout.strip()
        except OSError:  # git is not installed
            return ""

    # A virtual processor's name says little, so its family and model are added
    cpu = dict(re.findall(r"(model name|cpu family|model)\s*: (.*)", Path("/proc/cpuinfo").read_text()))
    packages = {name: importlib.import_module(name).__version__ for name in ("torch", "numpy", "gymnasium")}
    dirty = "-dirty" if git("status", "--porcelain", "--", ".", ":!benchmark/results") else ""
    return dict(cpu="{model name}, family {cpu family}, model {model}".format_map(cpu) if len(cpu) == 3 else platform.processor(),
                cores=len(os.sched_getaffinity(0)),
                isa=torch.backends.cpu.get_cpu_capability(),
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
                python=platform.python_version(), **packages,
                commit=git("rev-parse", "--short", "HEAD") + dirty, date=time.strftime("%Y-%m-%d"))  # fmt: skip


def write(options: Options, args, results: list[dict]) -> None:
    """Writes the results so far to --out. Called after each result, since a sweep may be interrupted."""
    if not options.out:
        return
    engine = ENGINES[options.family]
    try:
        version = importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:  # built from source, not installed by pip
        version = "unknown"
    content = dict(machine=machine() | {engine: version}, command=command(), env_id=args.env_id,
                   frameskip=frameskip_of(args), results=results)  # fmt: skip
    options.out.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    options = tyro.cli(Options)
    appo, args = variant(options)
    results = []
    if options.null:
        for workers in NULL_WORKERS if options.num_workers is None else (options.num_workers,):
            args.num_workers = workers
            results.append(pipeline(options, appo, args, null=True))
            write(options, args, results)
            found = results[-1]
            print(f"{found['workers']} workers x {found['envs_per_worker']} rows: {found['rows_per_second']:,} rows/s, "
                  f"{found['microseconds_per_group']} us per group, {found['rows_per_batch']} rows per batch", flush=True)  # fmt: skip
    else:
        for envs in SWEEP if options.sweep else (options.num_envs_per_worker,):
            results.append(ceiling(options, appo, args, envs))
            write(options, args, results)
            found = results[-1]
            print(f"{found['workers']} workers x {found['envs_per_worker']} {args.env_id}: "
                  f"{found['frames_per_second']:,} frames/s ({min(found['windows']):,} to {max(found['windows']):,} in "
                  f"{options.windows} windows), reset in {found['reset_seconds']} s", flush=True)  # fmt: skip
        best = max(results, key=lambda result: result["frames_per_second"])
        if options.sweep:
            print(f"best: {best['envs_per_worker']} environments per worker, {best['frames_per_second']:,} frames/s")


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)  # treated as Ctrl-C
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
