"""Where the time of appo_mujoco.py goes: each part alone, microseconds for a sample (a step of one environment):

    python benchmark/mujoco_parts.py --out benchmark/results/mujoco_parts.json

`pool.step` is EnvPool's, with one thread; `WorkerEnvs.step` is that and all else that an actor does for a step. `act` is one batch of
inference, `gather` copies a batch for the learner out of the rollouts, `learn` is the optimiser step with it, and `vtrace` its part in that:
one thread each, all with so many environments or samples. Medians of rounds in which each is done once. `act` and `learn` with (both) run in
two threads at the same time, without actors, as the inference thread and the learner do; of these two the CPU time is given, too. Machine:
takes half a minute; nothing else may run beside it.
"""

import json
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from collect import machine_and_engines  # noqa: E402

import appo_mujoco as appo  # noqa: E402

ENVIRONMENTS, BATCHES = (8, 16, 32, 64, 128), (256, 512, 1024, 2048)
BOTH = 32, 512  # environments and samples of the two threads; the defaults


@dataclass
class Options:
    out: Path  # JSON file for the result
    tasks: tuple[str, ...] = ("HalfCheetah-v5", "Ant-v5")
    rounds: int = 60
    device: str = "cpu"


def together(inference, learner, batch, seconds: float = 5.0) -> dict[str, float]:
    """Acts and learns in two threads at once: microseconds of each a sample, by the clock and of a core."""
    over, found = threading.Event(), {}

    def act() -> None:
        inference.t[0] = 1
        inference.act([0])

    def repeat(name: str, samples: int, function) -> None:
        torch.get_num_threads()  # else the first operation takes over the number that another thread set last
        torch.set_num_threads(1)
        with torch.inference_mode(name == "act"):
            n, wall, cpu = 0, time.perf_counter(), time.thread_time()
            while not over.is_set():
                function()
                n += samples
            wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        found[f"{name} (both) {samples}"], found[f"{name} (both), CPU time {samples}"] = 1e6 * wall / n, 1e6 * cpu / n

    threads = [threading.Thread(target=repeat, args=("act", inference.size, act)),
               threading.Thread(target=repeat, args=("learn", BOTH[1], lambda: learner.update(batch, True)))]  # fmt: skip
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    over.set()
    for thread in threads:
        thread.join()
    return dict(sorted(found.items()))


def main() -> None:
    options, times = tyro.cli(Options), {}

    def timed(name: str, samples: int, function, *arguments):
        start = time.perf_counter()
        result = function(*arguments)
        if options.device != "cpu":
            torch.cuda.synchronize()
        times.setdefault(f"{name} {samples}", []).append(1e6 * (time.perf_counter() - start) / samples)
        return result

    torch.set_num_threads(1)  # as each thread has by default on two cores
    for task in options.tasks:
        parts = []
        for n in ENVIRONMENTS:
            args = appo.resolve(appo.Args(env_id=task, device=options.device, num_workers=1, num_envs_per_worker=n))
            torch.manual_seed(0)
            spaces, device = appo.spaces_of(args), torch.device(args.device)
            agent = appo.Agent(spaces, args).to(device)
            inference = appo.Inference(args, spaces, agent, device)
            envs = appo.WorkerEnvs(args, 0, inference.arrays, seed=1)
            for split in range(args.worker_num_splits):
                envs.reset(split)
            parts.append((n, inference, envs))
        learners = []
        for samples in BATCHES:
            args = appo.resolve(appo.Args(env_id=task, device=options.device, num_workers=1, batch_size=samples, num_batches_per_epoch=1,
                                          num_epochs=1))  # fmt: skip
            agent = appo.Agent(spaces, args).to(device)
            learner = appo.Learner(args, agent, appo.Inference(args, spaces, agent, device), device)
            r = learner.inference.rollouts
            for field in (*r.obs.values(), r.actions, r.gaussians, r.logprobs, r.values):
                field.normal_()
            r.rewards[:] = 0
            learner.version = 1
            learners.append((samples, learner))
        for _ in range(options.rounds):
            for n, inference, envs in parts:
                groups = list(range(len(inference.t)))
                with torch.inference_mode():
                    for group in groups:
                        inference.t[group] = 1
                        inference.filling[group] = np.arange(group * inference.size, (group + 1) * inference.size)
                    timed(f"{task}: act", n, inference.act, groups)
                timed(f"{task}: WorkerEnvs.step", n, lambda: [envs.step(split) for split in groups])
                actions = [inference.arrays.action[envs.rows[split]] for split in groups]
                timed(f"{task}: pool.step", n, lambda: [envs.splits[split].pool.step(actions[split]) for split in groups])
            for samples, learner in learners:
                batch = timed(f"{task}: gather", samples, learner.gather, np.arange(samples // learner.args.rollout), learner.version)
                timed(f"{task}: learn", samples, learner.update, batch, True)
                ones = torch.ones_like(batch.rewards)
                values = torch.zeros(len(ones) + 1, ones.shape[1], device=device)
                timed(f"{task}: vtrace", samples, appo.vtrace, ones, values, ones, ones, batch.mask, 1.0, 1.0, 0.95)
        inference = next(inference for n, inference, _ in parts if n == BOTH[0])
        learner = next(learner for samples, learner in learners if samples == BOTH[1])
        batch = learner.gather(np.arange(BOTH[1] // learner.args.rollout), learner.version)
        times |= {f"{task}: {name}": [value] for name, value in together(inference, learner, batch).items()}
        for _, _, envs in parts:
            envs.close()
    result = dict(machine=machine_and_engines(),
                  microseconds={name: round(statistics.median(values[10:] or values), 2) for name, values in times.items()})  # fmt: skip
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["microseconds"], indent=2))


if __name__ == "__main__":
    main()
