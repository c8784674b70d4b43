"""What replay adds to the work of each thread, alone and over random numbers, milliseconds:

    python benchmark/replay_parts.py --out benchmark/results/replay_parts.json

Both threads have the defaults of a run on two cores: 32 games, and iterations of 4 fresh and 4 replayed rollouts of 32 steps. `act` is one
batch of inference with all games: without replay, with the logits stored (uniform), and with the features, too (elite). `gather` copies an
iteration out of the rollouts, without what is replayed and with it; `learn` is the optimiser step. `choose` is all of
`Learner.choose_replayed` at the beginning of a run, with six candidates for each one that is replayed: `distances 24` is what these cost,
whose every fourth state the network sees again. Medians of rounds in which each is done once. Machine: takes a minute; nothing else may
run beside it.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from collect import machine_and_engines  # noqa: E402

import appo_atari_replay as appo  # noqa: E402


@dataclass
class Options:
    out: Path  # JSON file for the result
    rounds: int = 60
    device: str = "cpu"


def learner_of(options: Options, **flags):
    args = appo.resolve(appo.Args(env_id="Breakout-v5", device=options.device, num_workers=2, **flags))
    torch.manual_seed(0)
    spaces, device = appo.spaces_of(args), torch.device(args.device)
    agent = appo.Agent(spaces, args).to(device)
    learner = appo.Learner(args, agent, appo.Inference(args, spaces, agent, device), device)
    r = learner.inference.rollouts
    for images in (learner.inference.mailbox.obs["obs"], r.obs["obs"]):
        images.random_(0, 255)
    for field, value in ((r.logprobs, -1.4), (r.values, 0.0), (r.logits, 0.0), (r.features, 0.0)):
        field.fill_(value)
    r.rewards[:] = 0
    r.learned_at[learner.kept] = 0
    return learner


def main() -> None:
    options, times = tyro.cli(Options), {}
    none, uniform, elite = (learner_of(options, **flags) for flags in (dict(replay_share=0.0), dict(), dict(replay="elite")))
    fresh, replayed = appo.parts_of_iteration(elite.args)

    def timed(name: str, function, *arguments):
        start = time.perf_counter()
        result = function(*arguments)
        if options.device != "cpu":
            torch.cuda.synchronize()
        times.setdefault(name, []).append(1000 * (time.perf_counter() - start))
        return result

    def act(learner) -> None:
        inference = learner.inference
        groups = range(len(inference.t))
        for group in groups:
            inference.t[group], inference.filling[group] = 1, np.arange(group * inference.size, (group + 1) * inference.size)
        inference.act(groups)

    torch.set_num_threads(1)  # as each thread has by default on two cores
    for _ in range(options.rounds):
        for name, learner in (("act", none), ("act, logits stored", uniform), ("act, logits and features stored", elite)):
            with torch.inference_mode():
                timed(name, act, learner)
        slots = np.random.permutation(appo.slots_needed(elite.args))[:fresh]
        chosen = timed("choose", elite.choose_replayed, slots[-1])
        candidates = np.random.permutation(elite.kept)[: round(replayed * elite.args.replay_candidates)]
        parts = np.split(candidates, len(candidates) // (fresh + replayed))  # as large as a batch
        timed(f"distances {len(candidates)}", lambda: [elite.distances(part, slots[-1]) for part in parts])
        for name, learner, both in (("", none, slots), (" with what is replayed", elite, np.concatenate([slots, chosen]))):
            batch = timed(f"gather{name}", learner.gather, both, 0)
            timed(f"learn{name}", learner.update, batch)
    result = dict(machine=machine_and_engines(), fresh=fresh, replayed=replayed, precision=elite.args.precision,
                  milliseconds={name: round(statistics.median(values[10:]), 2) for name, values in times.items()})  # fmt: skip
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["milliseconds"], indent=2))


if __name__ == "__main__":
    main()
