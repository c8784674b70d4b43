"""PufferLib 3.0.0's trainer on Breakout on a CPU: 32 games, rollouts of 32, batches of 1,024, one epoch, Nature CNN, Adam.

    python benchmark/peers/pufferlib_atari.py FOLDER SECONDS MODE THREADS

The games are those of appo_atari.py (EnvPool, lives as episodes), as a native environment of PufferLib. MODE: `async`, two workers of 16
games, and the network acts for one while the other steps (PufferLib's default); `serial`, both in the main process; `native`, one pool of
32 there, with two of EnvPool's threads. THREADS: of PyTorch in the main process. Writes rate.json into FOLDER: frames/s after the first 20
s. What its trainer does differently: advantages are GAE without a bootstrap at the end of a rollout, losses are weighted by priority,
acting and learning alternate.

Installation, with its trainer but without its own games, whose build downloads a graphics library:

    python -m venv .venv-puffer; PATH=$PWD/.venv-puffer/bin:/usr/bin:/bin   # a CUDA compiler on the PATH would be used
    pip install torch==2.13.0 'numpy<2' 'Cython>=3' setuptools wheel pybind11
    pip download --no-deps --no-build-isolation --no-binary pufferlib --no-clean pufferlib==3.0.0
        # fails, but leaves the source unpacked in pip's temporary folder. In its setup.py `c_extension_paths = []` must stand
        # beside `c_extensions = []`. Then, in that folder:
    NO_OCEAN=1 pip install --no-build-isolation --no-deps .
    pip install torch==2.13.0 'numpy<2' 'gym<=0.23' 'gymnasium<=0.29.1' 'pettingzoo<=1.24.1' 'shimmy[gym-v21]' psutil pynvml rich \\
        rich_argparse imageio pyro-ppl heavyball envpool==1.2.5
"""

import contextlib
import functools
import json
import os
import sys
import time
from pathlib import Path

folder, seconds, mode, threads = Path(sys.argv[1]).resolve(), float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
sys.argv = sys.argv[:1]  # PufferLib reads the command line, too
os.chdir(folder)  # into which PufferLib puts a link, and checkpoints

import envpool  # noqa: E402
import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import pufferlib  # noqa: E402
import pufferlib.pufferl  # noqa: E402
import pufferlib.vector  # noqa: E402
import torch  # noqa: E402
import torch.nn as nn  # noqa: E402

GAMES, WORKERS, ROLLOUT = 32, 2, 32


class Pool(pufferlib.PufferEnv):
    """Several games, made at the first reset."""

    def __init__(self, games: int, threads: int = 1, buf=None, seed: int = 0):
        self.num_agents, self.threads = games, threads
        self.single_observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        self.single_action_space = gym.spaces.Discrete(4)
        super().__init__(buf)

    def reset(self, seed: int = 0):
        self.pool = envpool.make("Breakout-v5", env_type="gymnasium", num_envs=self.num_agents, num_threads=self.threads, seed=int(seed),
                                 episodic_life=True, use_fire_reset=True)  # fmt: skip
        self.observations[:] = self.pool.reset()[0]
        return self.observations, []

    def step(self, actions):
        results = self.pool.step(np.array(actions, np.int32).ravel())
        self.observations[:], self.rewards[:], self.terminals[:], self.truncations[:], _ = results  # the trainer clips rewards itself
        return self.observations, self.rewards, self.terminals, self.truncations, []

    def close(self) -> None:
        pass


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(),
                                  nn.Flatten(), nn.Linear(3136, 512), nn.ReLU())  # fmt: skip
        self.action, self.value = nn.Linear(512, 4), nn.Linear(512, 1)

    def forward(self, images, state=None):
        hidden = self.body(images.float() / 255)
        return self.action(hidden), self.value(hidden)

    forward_eval = forward


def main() -> None:
    torch.set_num_threads(threads)
    config = pufferlib.pufferl.load_config("default")["train"]
    config |= dict(
        env="breakout", device="cpu", data_dir=str(folder), total_timesteps=10**9, batch_size=GAMES * ROLLOUT, bptt_horizon=ROLLOUT,
        minibatch_size=GAMES * ROLLOUT, update_epochs=1, optimizer="adam", learning_rate=2.5e-4, adam_beta1=0.9, adam_eps=1e-5,
        gae_lambda=0.95, gamma=0.99, clip_coef=0.1, ent_coef=0.01, vf_coef=0.5, max_grad_norm=0.5,
    )  # fmt: skip
    half = functools.partial(Pool, GAMES // WORKERS)
    if mode == "native":
        games = Pool(GAMES, threads=2)
    elif mode == "serial":
        games = pufferlib.vector.make(half, backend=pufferlib.vector.Serial, num_envs=WORKERS)
    else:
        games = pufferlib.vector.make(half, backend=pufferlib.vector.Multiprocessing, num_envs=WORKERS, num_workers=WORKERS, batch_size=1)
    trainer, start, first = pufferlib.pufferl.PuffeRL(config, games, Policy()), time.perf_counter(), None
    try:
        while (now := time.perf_counter()) - start < seconds:
            if first is None and now - start > 20:
                first = now, trainer.global_step
            trainer.evaluate()
            trainer.train()
        rate = 4 * (trainer.global_step - first[1]) / (now - first[0])
    finally:
        trainer.close()
    (folder / "rate.json").write_text(json.dumps(dict(frames_per_second=round(rate), window_seconds=round(now - first[0]))))


if __name__ == "__main__":
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):  # its table
        main()
