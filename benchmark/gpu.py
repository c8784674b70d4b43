"""Profiles and times training on a machine with a GPU, in at most nine minutes: writes gpu.json, gpu.md and log.txt into FOLDER.

    python benchmark/gpu.py FOLDER
    python benchmark/gpu.py FOLDER --device cpu --num-workers 2 --num-envs-per-worker 8    # tries it without a GPU

If nothing can be installed from the network there, a folder with the wheels of the missing packages is enough:

    python -m pip install --no-index --no-deps --target SITE WHEELS/*.whl && PYTHONPATH=SITE python benchmark/gpu.py FOLDER

The parts run in this order until the time is up; those that are left out are listed:

* profiles of Doom, CartPole, HalfCheetah and Breakout: one batch of inference and one iteration of the learner under PyTorch's profiler,
  with and without CUDA graphs: launches, copies, waits, GPU time, and how much the results with and without graphs differ;
* runs on `benchmark` (ViZDoom) and Breakout with two splits, and on CartPole and HalfCheetah with their defaults, each with and without
  graphs; for the first two also the dummy sampler on the same cores: frames/s and the share of the ceiling;
* runs with two policies, on DeepMind Lab (with the engine if Python finds it, else with the tests' stand-in, whose speed says nothing), and
  with elite replay;
* runs in float32 instead of bfloat16, and with one split instead of two.

A run's figures are taken between its third report, some 15 s after the start of training, and its last. "Steps games" is frames/s
divided by the dummy sampler's: the share of time in which actors step games. "GPU busy" is the share of time in which a kernel was running,
according to nvidia-smi. If a part fails, the results say so, and the rest goes on.
"""

import contextlib
import datetime
import importlib
import importlib.util
import json
import math
import os
import random
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

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
import parts  # noqa: E402
from collect import machine_and_engines, used_args  # noqa: E402

ENV_IDS = dict(gym="CartPole-v1", mujoco="HalfCheetah-v5", doom="benchmark", atari="Breakout-v5", atari_replay="Breakout-v5", pbt_doom="benchmark",
               dmlab="rooms_collect_good_objects_train")  # fmt: skip
LAB = importlib.util.find_spec("deepmind_lab") is not None


@dataclass
class Options:
    folder: tyro.conf.Positional[Path]  # folder for the results
    device: Literal["cuda", "cpu"] = "cuda"  # device of the networks; cpu only tries the script
    num_workers: int | None = None  # workers of each run. Default: the number of cores that this process may use
    num_envs_per_worker: int = 32  # environments per worker of each run on Doom and Atari
    seconds: float = 21.0  # seconds of training in each run; a run reports every five
    minutes: float = 9.0  # minutes for all parts together
    profile: Literal["gym", "mujoco", "doom", "atari"] | None = None  # only profile this file, and print the result


def sizes(options: Options, family: str) -> dict:
    """Returns the flags for the numbers of workers and environments: none for gym and mujoco, which keep their defaults."""
    if family in ("gym", "mujoco"):
        return {}
    return dict(num_workers=options.num_workers, num_envs_per_worker=options.num_envs_per_worker)


def run(options: Options, limit: float, *command, interrupt_after: float | None = None) -> str:
    """Runs a command and returns what it prints. interrupt_after: seconds until it gets SIGINT; limit: seconds from then, or from its
    start, until it is killed. Raises RuntimeError or subprocess.TimeoutExpired. No process that it has started survives."""
    environment = dict(os.environ)
    if not LAB:
        environment["PYTHONPATH"] = f"{ROOT / 'tests' / 'stand_in'}:{environment.get('PYTHONPATH', '')}"
    with open(options.folder / "log.txt", "a+") as log:
        print("\n$", *command, file=log, flush=True)
        begin = log.tell()
        process = subprocess.Popen([sys.executable, *map(str, command)], stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            if interrupt_after:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(interrupt_after)
                process.send_signal(signal.SIGINT)
            code = process.wait(limit) % 130
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        log.seek(begin)
        text = log.read()
    if code:
        raise RuntimeError("\n".join([f"exit code {code}", *text.splitlines()[-5:]]))
    return text


@contextlib.contextmanager
def gpu_use():
    """Yields a list that at the end has the samples of nvidia-smi: (seconds since the epoch, share of time busy, MiB used)."""
    samples, process = [], None
    with contextlib.suppress(OSError):
        command = ["nvidia-smi", "--query-gpu=timestamp,utilization.gpu,memory.used", "--format=csv,noheader,nounits", "-lms", "500"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield samples
    finally:
        if process:
            process.terminate()
            for stamp, busy, used in re.findall(r"^(\d{4}/.*?), ([\d.]+), ([\d.]+)\n", process.communicate()[0], re.M):
                moment = datetime.datetime.strptime(stamp, "%Y/%m/%d %H:%M:%S.%f")
                samples.append((moment.timestamp(), float(busy) / 100, float(used)))


def train(options: Options, limit: float, family: str, **flags) -> dict:
    """Trains, and returns the run's rate, its lag and how its threads spend their time. Raises ValueError if the run has too few reports,
    and what `run` raises."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as place:
        flags = dict(env_id=ENV_IDS[family], device=options.device, total_timesteps=10**9, train_dir=place, experiment="run",
                     **sizes(options, family)) | flags  # fmt: skip
        graphs = ["--cuda-graphs"] * flags.pop("graphs", False)
        interrupt_after = options.seconds + 10  # including its start
        if family not in ("gym", "mujoco"):
            flags, interrupt_after = dict(train_for_seconds=options.seconds) | flags, None
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        with gpu_use() as samples:
            run(options, limit, ROOT / f"appo_{family}.py", *words, *graphs, interrupt_after=interrupt_after)
        folder, found, sps = Path(place) / "run", {}, 0.0
        for policy in sorted(folder.glob("policy_*")) or [folder]:  # rates of a population are added up; the rest is the last policy's
            events = EventAccumulator(str(policy)).Reload()
            tags = events.Tags()["scalars"]
            steps = events.Scalars("charts/SPS")[2:] if tags else []
            if len(steps) < 2:
                raise ValueError(f"fewer than four reports: --seconds {options.seconds:g} is too short for a rate")
            begin, end = steps[0].wall_time, steps[-1].wall_time
            sps += (steps[-1].step - steps[0].step) / (end - begin)
            values = {tag: [event.value for event in events.Scalars(tag)[2:]] for tag in tags}
            found = {tag: statistics.mean(numbers) for tag, numbers in values.items() if numbers}
        used = used_args(folder)
    if not all(math.isfinite(value) for value in found.values()):
        raise ValueError(f"not finite: {found}")
    result = dict(frames_per_second=round(used.get("frameskip", 1) * sps), lag=round(found["lag/mean"], 2),
                  learner_learns=round(1 - found["stats/learner_wait"], 3),
                  inference_waits_for_games=round(found["stats/inference_idle"], 3),
                  inference_waits_for_slots=round(found["stats/inference_blocked"], 3),
                  rows_in_an_inference_batch=round(found["stats/inference_batch"], 1))  # fmt: skip
    result |= {key: used.get(key) for key in ("worker_num_splits", "batch_size", "num_envs_per_worker")}
    result["precision"] = used.get("precision", "float32")
    if window := [sample[1:] for sample in samples if begin <= sample[0] <= end]:
        busy, used = np.mean(window, axis=0)
        result |= dict(gpu_busy=round(busy, 2), gpu_memory_gib=round(used / 1024, 1))
    return result


def ceiling(options: Options, limit: float, family: str) -> dict:
    """Returns the dummy sampler's frames per second."""
    with tempfile.TemporaryDirectory() as place:
        run(options, limit, ROOT / "dummy_sampler.py", "--family", family, "--num-workers", options.num_workers, "--num-envs-per-worker",
            options.num_envs_per_worker, "--window", 3, "--windows", 3, "--out", f"{place}/rate.json")  # fmt: skip
        return dict(frames_per_second=json.loads(Path(place, "rate.json").read_text())["results"][0]["frames_per_second"])


def profiled(options: Options, limit: float, family: str) -> dict:
    """Returns the result of `profile`, from a process of its own."""
    text = run(options, limit, __file__, options.folder, "--profile", family, "--device", options.device, "--num-workers",
               options.num_workers, "--num-envs-per-worker", options.num_envs_per_worker)  # fmt: skip
    return json.loads(next(line for line in reversed(text.splitlines()) if line.startswith("{")))


def profile(options: Options, family: str) -> dict:
    """Profiles one batch of inference (the rows of one split of all workers) and one iteration of the learner, on random numbers and with
    nothing else running. Returns for each of the two, without and with graphs, the times of host and GPU and the numbers of launches,
    copies and waits. Also returns the largest difference that graphs make to the values, and to the learner's losses, in three calls on the
    same numbers, relative to the largest of them."""
    appo = importlib.import_module(f"appo_{family}")
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device.index or 0)

    def built(graphs: bool) -> tuple:
        learner = parts.build(appo, ENV_IDS[family], options.device, cuda_graphs=graphs, **sizes(options, family))
        args, inference, first = learner.args, learner.inference, learner.inference.rollouts.first
        first[:] = np.random.default_rng(0).random(first.shape) < 1 / 300  # a recurrent core is called again where an episode begins
        splits = getattr(args, "worker_num_splits", 1)
        groups = list(range(0, args.num_workers * splits, splits))
        return learner, groups, parts.acting(inference, groups), *parts.iteration(appo, learner)

    def results(learner, act, learn) -> list:
        """Returns the values and the losses of one call of each."""
        random.seed(0)
        torch.manual_seed(0)
        metrics, iterate = {}, learner.iterate
        learner.iterate = lambda blocks: metrics.update(iterate(blocks))
        with streams[0]:
            act()
        synchronize()
        with streams[1]:
            learn()
        synchronize()
        learner.iterate = iterate
        return [learner.inference.rollouts.values[1].cpu().numpy(), np.array([float(metrics[name]) for name in sorted(metrics) if "loss" in name])]

    def synchronize() -> None:
        if cuda:
            torch.cuda.synchronize()

    def measure(function) -> dict:
        times = []
        for i in range(15):
            start = time.perf_counter()
            function()
            synchronize()
            times.append(1000 * (time.perf_counter() - start))
        activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
        with torch.profiler.profile(activities=activities) as prof:
            function()
        counts, busy = Counter(event.name for event in prof.events()), 0.0
        for event in prof.events():
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
                busy += event.time_range.elapsed_us() / 1000

        def calls(pattern: str) -> int:
            return sum(n for name, n in counts.items() if re.fullmatch(pattern, name))

        return dict(milliseconds=round(statistics.median(times[5:]), 2), gpu_milliseconds=round(busy, 2),
                    launches=calls(r"cu(da)?LaunchKernel\w*"), copies_and_fills=calls(r"cu(da)?Mem(cpy|set)\w*"),
                    waits=calls(r"cu(da)?(Stream|Event)Synchronize"), operators=calls(r"aten::.*"))  # fmt: skip

    streams = [appo.own_stream(device, -1), appo.own_stream(device)]
    synchronize()
    result, found = dict(precision=getattr(appo.Args(device=options.device), "precision", "float32")), []
    for graphs in (False, True):
        learner, groups, act, samples, learn = built(graphs)
        synchronize()
        found.append([results(learner, act, learn) for _ in range(3)])
        rows = len(groups) * parts.rows_of_group(learner.inference)
        for key, function, count, stream in (("inference", act, rows, streams[0]), ("learner", learn, samples, streams[1])):
            with stream:
                result[key + ", graphs" * graphs] = measure(function) | dict(samples=count)
    for i, name in enumerate(("values", "metrics")):
        result[f"{name} differ by"] = max(float(np.abs(x[i] - y[i]).max() / np.abs(x[i]).max()) for x, y in zip(*found))
    return result


def table(results: dict) -> str:
    """Returns the results as Markdown."""
    lines = ["| run | frames/s | steps games | lag | learner learns | inference waits: games, slots | rows a batch | GPU busy | memory |"]
    lines.append("|---" * 9 + "|")
    for name, r in results.items():
        if "lag" in r:
            waits = f"{r['inference_waits_for_games']:.0%}, {r['inference_waits_for_slots']:.0%}"
            top = results.get(f"ceiling {re.split('[ ,]', name)[0]}", {}).get("frames_per_second")
            share = f"{r['frames_per_second'] / top:.0%}" if top else ""
            gpu = f"{r['gpu_busy']:.0%} | {r['gpu_memory_gib']} GiB" if "gpu_busy" in r else "|"
            lines.append(f"| {name} ({r['precision']}, batch {r['batch_size']:,}) | {r['frames_per_second']:,} | {share} | {r['lag']} | "
                         f"{r['learner_learns']:.0%} | {waits} | {r['rows_in_an_inference_batch']} | {gpu} |")  # fmt: skip
        elif name.startswith("ceiling") and "failed" not in r:
            lines.append(f"| dummy sampler, {name.split()[1]} | {r['frames_per_second']:,} |" + " |" * 7)
    columns = ("samples", "milliseconds", "gpu_milliseconds", "launches", "copies_and_fills", "waits", "operators")
    lines += ["", "| profiled | samples | ms | ms of the GPU | launches | copies and fills | waits | operators |", "|---" * 8 + "|"]
    for name, r in results.items():
        for part in [part for part in r if "milliseconds" in (r[part] if isinstance(r[part], dict) else ())]:
            lines.append(f"| {name.split()[1]}, {part} | {' | '.join(f'{r[part][key]:,}' for key in columns)} |")
    for name, r in results.items():
        if "values differ by" in r:
            lines += ["", f"{name.split()[1]}: graphs change values by {r['values differ by']:.1e}, metrics by {r['metrics differ by']:.1e}."]
    failed = [f"* {name}: {r['failed']}" for name, r in results.items() if "failed" in r]
    return "\n".join([*lines, *(["", "Failed or left out:", "", *failed] if failed else [])]) + "\n"


def main() -> int:
    options = tyro.cli(Options)
    if options.profile:
        print(json.dumps(profile(options, options.profile)))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: PyTorch sees no GPU; --device cpu tries the script without one")
    options.folder.mkdir(parents=True, exist_ok=True)
    end, results = time.monotonic() + 60 * options.minutes - 10, {}
    if options.num_workers is None:
        options.num_workers = importlib.import_module("appo_doom").num_cores()
    about = dict(device=options.device, workers=options.num_workers, seconds=options.seconds)
    machine = machine_and_engines() | about  # this takes half a GiB of the GPU's memory
    two, one, float32 = dict(worker_num_splits=2), dict(worker_num_splits=1), dict(worker_num_splits=2, precision="float32")
    lab = "dmlab" if LAB else "dmlab (stand-in engine)"
    graphs = dict(graphs=True)
    plan = {
        **{f"profile {family}": (profiled, family, {}) for family in ("doom", "gym", "mujoco", "atari")},
        "doom": (train, "doom", two), "doom, graphs": (train, "doom", two | graphs), "ceiling doom": (ceiling, "doom", {}),
        "gym": (train, "gym", {}), "gym, graphs": (train, "gym", graphs),
        "atari": (train, "atari", two), "atari, graphs": (train, "atari", two | graphs), "ceiling atari": (ceiling, "atari", {}),
        "mujoco": (train, "mujoco", {}), "mujoco, graphs": (train, "mujoco", graphs),
        "pbt_doom, two policies": (train, "pbt_doom", two | dict(num_policies=2, num_envs_per_worker=8)),
        lab: (train, "dmlab", dict(num_envs_per_worker=4)),
        "atari_replay, elite": (train, "atari_replay", two | dict(replay="elite")),
        "doom in float32": (train, "doom", float32), "atari in float32": (train, "atari", float32),
        "doom with one split": (train, "doom", one), "atari with one split": (train, "atari", one),
    }  # fmt: skip
    for name, (function, family, flags) in plan.items():
        left, start = end - time.monotonic(), time.monotonic()
        try:
            if left < options.seconds + 10:
                raise TimeoutError("no time left")
            results[name] = function(options, min(left, options.seconds + 100), family, **flags)
        except Exception as error:
            results[name] = dict(failed=f"{type(error).__name__}: {error}"[:500])
        results[name]["seconds"] = round(time.monotonic() - start)
        print(f"{results[name]['seconds']:4d} s  {name}: {json.dumps(results[name])}", flush=True)
        (options.folder / "gpu.json").write_text(json.dumps(dict(machine=machine, results=results), indent=2) + "\n")
        (options.folder / "gpu.md").write_text(table(results))
    print(table(results))
    failed = [name for name, result in results.items() if "failed" in result]
    if failed:
        print(f"{len(failed)} of {len(results)} parts failed or were left out: {', '.join(failed)}; the others are in {options.folder}/gpu.md")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
