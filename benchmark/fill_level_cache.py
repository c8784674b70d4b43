"""Compiles maps of DeepMind Lab into a level cache, so that runs of appo_dmlab.py with new maps do not wait for them.

    python benchmark/fill_level_cache.py                                    # 3 maps for each task of DMLab-30 that has any
    python benchmark/fill_level_cache.py --env-id explore_goal_locations_large --maps 100 --num-workers 20

A map takes 3 to 25 seconds. A map on which the engine fails, crashes or hangs is left out; then the exit code is 1. Ctrl-C or SIGTERM
stops it all, and what has been compiled stays. Levels that compile maps within an episode cannot be filled.
"""

import multiprocessing.connection
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import torch.multiprocessing as mp
import tyro
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import appo_dmlab as appo  # noqa: E402
from dummy_sampler import set_up_process  # noqa: E402

LONGEST = 600  # seconds that a map may take


@dataclass
class Options:
    env_id: str = "dmlab_30"  # levels, as of appo_dmlab.py
    maps: int = 3  # of each level that generates maps, as far as they are not there: those of a run with the same --num-maps
    num_workers: int | None = None  # processes. Default: the cores that this process may use
    train_dir: str = "train_dir"  # the cache is level_cache below it
    level_cache: str | None = None  # the cache, where it is another folder


def compile_maps(args: appo.Args, work: list[tuple[int, int]], taken, done) -> None:
    """Body of a process: takes the next (task, seed) of the work until none is left. taken, done: counters, shared."""
    set_up_process(None)
    env = None
    while True:
        with taken.get_lock():
            i, taken.value = taken.value, taken.value + 1
        if i >= len(work):
            return
        task, seed = work[i]
        signal.alarm(LONGEST)  # ends the process
        if env is None or env.number != task:
            if env is not None:
                env.close()
            env = appo.LabEnv(args, task)
            env.start(0)
        try:
            with appo.engine_errors(env.name):
                env.lab.reset(seed=seed)
        except appo.UserError as error:
            print(f"map {seed} is skipped: {error}", file=sys.stderr)
            env.close()
            env = None
            continue
        finally:
            signal.alarm(0)
        with done.get_lock():
            done.value += 1


def fill(args: appo.Args, work: list[tuple[int, int]]) -> int:
    """Compiles the maps of all (task, seed) in args.num_workers processes. Returns how many the engine has."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "torch", "gymnasium", "tyro", "tqdm", "deepmind_lab"])
    taken, done, processes = context.Value("i"), context.Value("i"), []

    def start() -> None:
        processes.append(context.Process(target=compile_maps, args=(args, work, taken, done)))
        processes[-1].start()

    try:
        for _ in range(args.num_workers):
            start()
        with tqdm(total=len(work), desc="compiling maps", unit=" maps", disable=None) as bar:
            while processes:
                multiprocessing.connection.wait([process.sentinel for process in processes], timeout=0.5)
                bar.update(done.value - bar.n)
                for process in [process for process in processes if process.exitcode is not None]:
                    processes.remove(process)
                    if process.exitcode:
                        tqdm.write(f"a process died (exit code {process.exitcode}), so its map is skipped; starting another")
                        start()
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(appo.engines_folder(args).parent, ignore_errors=True)
    return done.value


def main() -> int:
    options = tyro.cli(Options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.maps < 1 or options.num_workers is not None and options.num_workers < 1:
            raise appo.UserError("--maps and --num-workers must be at least 1")
        workers = options.num_workers or appo.num_cores()
        args = appo.Args(env_id=options.env_id, device="cpu", num_workers=workers, train_dir=options.train_dir, level_cache=options.level_cache,
                         episode_seconds=60.0, experiment=f"fill_{os.getpid()}")  # fmt: skip
        levels = [level for level in appo.tasks_of(args) if appo.task_of(args, level).generated]
        if not levels:
            raise appo.UserError(f"--env-id {options.env_id} generates no maps")
        args.env_id = ",".join(levels)
        appo.check_levels(args)
        work = [(task, seed) for task in range(len(levels)) for seed in range(options.maps)]
        done = fill(args, work)
        print(f"{done} of {len(work)} maps are in the cache; train with --num-maps {options.maps}")
        return int(done < len(work))
    except appo.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
