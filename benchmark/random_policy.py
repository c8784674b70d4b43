"""The mean raw return of uniformly random actions, in every environment of which CSV files of benchmark/seeds.py have runs:

    python benchmark/random_policy.py OUT.csv IN.csv...

Games, frameskip and end of episodes are those of the variant that the runs' command names. Every one of 16 games plays the same number of
episodes, so that short ones do not count more than they should; 112 in all.
"""

import csv
import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from dummy_sampler import machine  # noqa: E402
from evaluate import Games  # noqa: E402

GAMES, EPISODES = 16, 7


def random_returns(appo, env_id: str) -> np.ndarray:
    """[GAMES * EPISODES]"""
    count = dict(num_envs=GAMES) if hasattr(appo.Args, "num_envs") else dict(num_envs_per_worker=GAMES, worker_num_splits=1)
    args = appo.Args(env_id=env_id, device="cpu", num_workers=1, **count)
    games = Games(appo, args, GAMES, draws=False)
    actions = games.worker.envs.action_space
    actions.seed(1)
    returns = [[] for _ in range(GAMES)]
    try:
        games.worker.reset()
        while min(map(len, returns)) < EPISODES:
            games.step(actions.sample().reshape(GAMES, -1))
            for episodes, episode in zip(returns, games.arrays.episode):
                if episode[games.length] and len(episodes) < EPISODES:
                    episodes.append(float(episode[0]))
    finally:
        games.close()
    return np.ravel(returns)


def main(out: tyro.conf.Positional[Path], runs: tyro.conf.Positional[list[Path]]) -> None:
    rows = [["env_id", "episodes", "return", "standard_error"]]
    for path in runs:
        text = path.read_text()
        appo = importlib.import_module(re.search(r"(appo_\w+)\.py", text)[1])
        for env_id in dict.fromkeys(re.findall(r"^env-id=([^,\s]+)", text, re.M)):
            returns = random_returns(appo, env_id)
            rows.append([env_id, len(returns), round(returns.mean(), 3), round(returns.std(ddof=1) / len(returns) ** 0.5, 3)])
            print(*rows[-1], flush=True)
    with open(out, "w", newline="") as file:
        file.write(f"# {json.dumps(machine())}\n")
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    tyro.cli(main)
