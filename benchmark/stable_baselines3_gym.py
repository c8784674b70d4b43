"""Stable-Baselines3's PPO on a Gymnasium environment, for benchmark/gym_peers.py, until the mean of 100 episodes reaches a goal.

    python stable_baselines3_gym.py ENV_ID SEED GOAL    # prints a line of JSON: steps, seconds, reached, steps_per_second

Settings are those that rl-baselines3-zoo has for each environment (hyperparams/ppo.yml of 00128b5; LunarLander-v2's, DoorKey-5x5's for both of
MiniGrid), and the zoo's default of one process. Without a goal (inf) it trains for 100,000 steps.
"""

import json
import sys
import time

import gymnasium as gym
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

MINIGRID = dict(normalize=True, n_envs=8, steps=1e5, n_steps=128, batch_size=64, gae_lambda=0.95, n_epochs=10, learning_rate=2.5e-4)
ZOO = {
    "CartPole-v1": dict(n_envs=8, steps=1e5, n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=20,
                        learning_rate=lambda left: left * 1e-3, clip_range=lambda left: left * 0.2),
    "Acrobot-v1": dict(normalize=True, n_envs=16, steps=1e6, n_steps=256, gae_lambda=0.94, n_epochs=4),
    "LunarLander-v3": dict(n_envs=16, steps=1e6, n_steps=1024, batch_size=64, gae_lambda=0.98, gamma=0.999, n_epochs=4, ent_coef=0.01),
    "minigrid:MiniGrid-Empty-8x8-v0": MINIGRID,
    "minigrid:MiniGrid-DoorKey-5x5-v0": MINIGRID,
}  # fmt: skip


class Goal(BaseCallback):
    """Ends training when the mean return of the last 100 episodes reaches a goal."""

    def __init__(self, goal: float):
        super().__init__()
        self.goal, self.reached, self.started = goal, False, time.perf_counter()

    def _on_step(self) -> bool:
        episodes = self.model.ep_info_buffer  # of the last 100
        self.reached = len(episodes) == 100 and sum(episode["r"] for episode in episodes) / 100 >= self.goal
        return not self.reached


def make(env_id: str) -> gym.Env:
    env = gym.make(env_id)
    if env_id.startswith("minigrid:"):  # as appo_gym.py sees it: image and direction in one vector, not the text
        env = gym.wrappers.FilterObservation(env, ["image", "direction"])
        env = gym.wrappers.FlattenObservation(env)
    return env


if __name__ == "__main__":
    env_id, seed, goal = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    settings = dict(ZOO[env_id])
    steps, n_envs, normalize = int(settings.pop("steps")), settings.pop("n_envs"), settings.pop("normalize", False)
    envs = make_vec_env(lambda: make(env_id), n_envs=n_envs, seed=seed)
    if normalize:
        envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
    model = PPO("MlpPolicy", envs, device="cpu", seed=seed, **settings)
    callback = Goal(goal)
    model.learn(100_000 if goal == float("inf") else steps, callback=callback)
    seconds = time.perf_counter() - callback.started
    print(json.dumps(dict(steps=model.num_timesteps, seconds=seconds, reached=callback.reached, steps_per_second=model.num_timesteps / seconds)))
