"""All that a machine with a GPU can tell, in one go: `benchmark/gpu.sh FOLDER` writes gpu.json and gpu.md there.

In this order, until the time is up; what is left then is named:

* `benchmark` (ViZDoom) and Breakout with two splits, beside the dummy sampler on the same cores: frames/s and the share of the ceiling;
* the other two variants, so that all four have trained (DeepMind Lab with the engine where Python finds it, else with the tests' stand-in,
  whose speed says nothing);
* one batch of inference and one iteration of the learner under PyTorch's profiler: launches, copies, waits, time of the GPU;
* one split, and float32, beside the first two.

A training's rates leave out its first two reports, about ten seconds. "Steps games" is frames/s as a share of the dummy sampler's: what
the actors do with their time. The GPU's use is what nvidia-smi says of its last two thirds: the share of time in which any kernel ran.
"""

import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
from collect import machine_and_engines  # noqa: E402

ENV_IDS = dict(doom="benchmark", atari="Breakout-v5", pbt_doom="benchmark", dmlab="rooms_collect_good_objects_train")


@dataclass
class Options:
    folder: tyro.conf.Positional[Path]  # for the results and the runs
    device: Literal["cuda", "cpu"] = "cuda"
    num_workers: int = len(os.sched_getaffinity(0))  # of each run
    num_envs_per_worker: int = 32  # of each run on Doom and Atari
    seconds: float = 26.0  # of training in each run; it reports every five
    minutes: float = 9.0  # until the end of all
    profile: Literal["doom", "atari"] | None = None  # only profile this one, and print the result


def gpu_use() -> subprocess.Popen | None:
    with contextlib.suppress(OSError):
        command = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", "-lms", "500"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def train(options: Options, name: str, family: str, flags: dict, limit: float) -> dict:
    """A run's rate, lag, and what its threads do. Raises RuntimeError, ValueError or subprocess.TimeoutExpired."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = dict(env_id=ENV_IDS[family], num_workers=options.num_workers, num_envs_per_worker=options.num_envs_per_worker,
                 device=options.device, train_for_seconds=options.seconds, total_timesteps=10**9, train_dir=options.folder,
                 experiment=name) | flags  # fmt: skip
    command = [sys.executable, ROOT / f"appo_{family}.py"]
    for flag, value in flags.items():
        command += [f"--{flag.replace('_', '-')}", str(value)]
    environment, stand_in = dict(os.environ), ROOT / "tests" / "stand_in"
    if family == "dmlab" and importlib.util.find_spec("deepmind_lab") is None:
        environment["PYTHONPATH"] = f"{stand_in}:{environment.get('PYTHONPATH', '')}"
    smi = gpu_use() if options.device == "cuda" else None
    output, start = options.folder / f"{name}.txt", time.monotonic()
    try:
        with open(output, "w") as file:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=limit).returncode
    finally:
        if smi:
            smi.terminate()
            samples = [tuple(map(float, line.split(","))) for line in smi.communicate()[0].splitlines()]
    text = output.read_text()
    if code or "done: " not in text:
        raise RuntimeError("\n".join([f"exit code {code}", *text.splitlines()[-5:]]))
    seconds, found, fps = time.monotonic() - start, {}, 0.0
    folders = sorted((options.folder / name).glob("policy_*")) or [options.folder / name]
    for folder in folders:  # of a population the rates are added up, the rest is the last policy's
        events = EventAccumulator(str(folder)).Reload()
        steps = events.Scalars("charts/SPS")[2:]
        if len(steps) < 2:
            raise ValueError(f"only {len(steps) + 2} reports: --seconds {options.seconds:g} is too short for a rate")
        fps += 4 * (steps[-1].step - steps[0].step) / (steps[-1].wall_time - steps[0].wall_time)
        found = {tag: statistics.mean(event.value for event in events.Scalars(tag)[2:]) for tag in events.Tags()["scalars"]}
    if not all(math.isfinite(value) for value in found.values()):
        raise ValueError(f"not finite: {found}")
    resolved = json.loads((options.folder / name / "cfg.json").read_text())["resolved"]
    result = dict(frames_per_second=round(fps), lag=round(found["lag/mean"], 2), seconds_in_all=round(seconds, 1),
                  learner_learns=round(1 - found["stats/learner_wait"], 3),
                  inference_waits_for_games=round(found["stats/inference_idle"], 3),
                  inference_waits_for_slots=round(found["stats/inference_blocked"], 3),
                  rows_in_an_inference_batch=round(found["stats/inference_batch"], 1))  # fmt: skip
    result |= {key: resolved[key] for key in ("precision", "worker_num_splits", "batch_size", "num_envs_per_worker")}
    if smi and samples[len(samples) // 3 :]:
        use, memory = np.mean(samples[len(samples) // 3 :], axis=0)
        result |= dict(gpu_busy=round(use / 100, 2), gpu_memory_gib=round(memory / 1024, 1))
    return result


def ceiling(options: Options, family: str, limit: float) -> dict:
    out = options.folder / f"ceiling_{family}.json"
    command = [sys.executable, ROOT / "dummy_sampler.py", "--family", family, "--num-workers", str(options.num_workers),
               "--num-envs-per-worker", str(options.num_envs_per_worker), "--window", "3", "--windows", "3", "--out", out]  # fmt: skip
    with open(out.with_suffix(".txt"), "w") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=True, timeout=limit)
    return dict(frames_per_second=json.loads(out.read_text())["results"][0]["frames_per_second"])


def profile(options: Options, family: str) -> dict:
    """One batch of inference with the rows of one split of all workers, and one iteration of the learner, over random numbers: what the
    host asks of the GPU for them, and how long both take. Everything else stands still meanwhile."""
    appo = importlib.import_module(f"appo_{family}")
    args = appo.resolve(appo.Args(env_id=ENV_IDS[family], device=options.device, num_workers=options.num_workers,
                                  num_envs_per_worker=options.num_envs_per_worker))  # fmt: skip
    device, spaces = torch.device(args.device), appo.spaces_of(args)
    agent = appo.Agent(spaces, args).to(device)
    inference = appo.Inference(args, spaces, agent, device)
    learner, r = appo.Learner(args, agent, inference, device), inference.rollouts
    for images in (inference.mailbox.obs["obs"], r.obs["obs"]):
        images.random_(0, 255)
    r.logprobs.fill_(-2.2), r.values.fill_(0.0)
    r.rewards[:] = 0
    groups = list(range(0, args.num_workers * args.worker_num_splits, args.worker_num_splits))
    B, slots = args.num_batches_per_epoch * args.batch_size // args.rollout, r.first.shape[1]

    def learn() -> None:
        learner.iterate(np.random.permutation(slots)[:B])
        while not inference.free.empty():  # it owns them all here
            inference.free.get()

    def act() -> None:
        for group in groups:
            inference.t[group] = 1
            inference.slots[group] = np.arange(group * inference.size, (group + 1) * inference.size)
        inference.serve(groups)

    def measure(function) -> dict:
        activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
        for _ in range(5):
            function()
        times = []
        for _ in range(10):
            start = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - start))
        with torch.profiler.profile(activities=activities) as prof:
            function()
        counts, device_us = Counter(), 0.0
        for event in prof.events():
            counts[event.name] += 1
            if event.device_type == torch.autograd.DeviceType.CUDA:
                device_us += event.time_range.elapsed_us()

        def calls(pattern: str) -> int:
            return sum(n for name, n in counts.items() if re.fullmatch(pattern, name))

        return dict(milliseconds=round(statistics.median(times), 2), gpu_milliseconds=round(device_us / 1000, 2),
                    launches=calls(r"cu(da)?LaunchKernel\w*"), copies_and_fills=calls(r"cu(da)?Mem(cpy|set)\w*"),
                    waits=calls(r"cu(da)?(Stream|Event|Device|Ctx)Synchronize"), operators=calls(r"aten::.*"))  # fmt: skip

    streams = [appo.own_stream(device, args.inference_threads, -1), appo.own_stream(device, args.learner_threads)]
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        torch.cuda.synchronize()
    result = {}
    for key, function, stream in zip(("inference", "learner"), (act, learn), streams):
        with stream:
            result[key] = measure(function)
    result["inference"]["samples"], result["learner"]["samples"] = len(groups) * inference.size, B * args.rollout
    return result | dict(precision=args.precision)


def table(results: dict) -> str:
    lines = ["| run | frames/s | steps games | lag | learner learns | inference waits: games, slots | rows a batch | GPU busy | memory |"]
    lines.append("|---" * 9 + "|")
    for name, r in results.items():
        if "lag" in r:
            shares = f"{r['inference_waits_for_games']:.0%}, {r['inference_waits_for_slots']:.0%}"
            top = results.get(f"ceiling_{name.split()[0]}", {}).get("frames_per_second")
            gpu = f"{r['gpu_busy']:.0%} | {r['gpu_memory_gib']} GiB" if "gpu_busy" in r else "|"
            of = f"{r['frames_per_second'] / top:.0%}" if top and "stand-in" not in name else ""
            lines.append(f"| {name} ({r['precision']}, batch {r['batch_size']:,}) | {r['frames_per_second']:,} | {of} | {r['lag']} | "
                         f"{r['learner_learns']:.0%} | {shares} | {r['rows_in_an_inference_batch']} | {gpu} |")  # fmt: skip
        elif name.startswith("ceiling"):
            lines.append(f"| dummy sampler, {name.split('_')[1]} | {r['frames_per_second']:,} |  |  |  |  |  |  |  |")
    lines += ["", "| profiled | samples | ms | ms of the GPU | launches | copies and fills | waits | operators |", "|---" * 8 + "|"]
    for name, r in results.items():
        for part in ("inference", "learner") if name.startswith("profile") and "inference" in r else ():
            p = r[part]
            numbers = [p["samples"], *(p[key] for key in ("milliseconds", "gpu_milliseconds", "launches", "copies_and_fills", "waits", "operators"))]
            lines.append(f"| {name.split()[1]}, {part} | {' | '.join(f'{number:,}' for number in numbers)} |")
    failed = [f"* {name}: {r['failed']}" for name, r in results.items() if "failed" in r]
    return "\n".join([*lines, *(["", "Failed, or left out:", "", *failed] if failed else [])]) + "\n"


def main() -> int:
    options = tyro.cli(Options)
    if options.profile:
        print(json.dumps(profile(options, options.profile)))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: PyTorch sees no GPU here; --device cpu tries this without")
    options.folder.mkdir(exist_ok=True)
    end, results = time.monotonic() + 60 * options.minutes - 10, {}

    def profiled(family: str, limit: float) -> dict:
        flags = ["--num-workers", str(options.num_workers), "--num-envs-per-worker", str(options.num_envs_per_worker)]
        command = [sys.executable, __file__, str(options.folder), "--profile", family, "--device", options.device, *flags]
        run = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        if run.returncode:
            raise RuntimeError(run.stderr[-500:])
        return json.loads(run.stdout.splitlines()[-1])

    real = importlib.util.find_spec("deepmind_lab") is not None
    lab = dict(num_envs_per_worker=4, level_cache=options.folder / "cache")
    two, one = dict(worker_num_splits=2), dict(worker_num_splits=1)
    plan = {
        "doom": lambda left: train(options, "doom", "doom", two, left),
        "ceiling_doom": lambda left: ceiling(options, "doom", left),
        "atari": lambda left: train(options, "atari", "atari", two, left),
        "ceiling_atari": lambda left: ceiling(options, "atari", left),
        "profile doom": lambda left: profiled("doom", left),
        "profile atari": lambda left: profiled("atari", left),
        "pbt_doom, two policies": lambda left: train(options, "pbt_doom", "pbt_doom", two | dict(num_policies=2), left),
        "dmlab" if real else "dmlab, stand-in": lambda left: train(options, "dmlab", "dmlab", lab, left),
        "doom one split": lambda left: train(options, "doom_one", "doom", one, left),
        "atari one split": lambda left: train(options, "atari_one", "atari", one, left),
        "doom float32": lambda left: train(options, "doom_float32", "doom", two | dict(precision="float32"), left),
        "atari float32": lambda left: train(options, "atari_float32", "atari", two | dict(precision="float32"), left),
    }
    for name, step in plan.items():
        left, start = end - time.monotonic(), time.monotonic()
        try:
            if left < options.seconds + 10:
                raise ValueError("no time left")
            results[name] = step(left)
        except (RuntimeError, ValueError, KeyError, OSError, subprocess.SubprocessError) as error:
            results[name] = dict(failed=str(error)[-400:])
        print(f"{time.monotonic() - start:4.0f} s  {name}: {json.dumps(results[name])}", flush=True)
        machine = machine_and_engines() | dict(workers=options.num_workers, games=options.num_envs_per_worker, device=options.device)
        text = json.dumps(dict(machine=machine, results=results), indent=2)
        (options.folder / "gpu.json").write_text(text + "\n")
        (options.folder / "gpu.md").write_text(table(results))
    print(table(results))
    return 1 if any("failed" in result for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
