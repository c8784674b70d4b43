"""Stable-Baselines3's PPO on a CPU:

    python stable_baselines3_ppo.py ENV_ID SEED [--folder FOLDER] [--steps N] [--epochs N] [--goal RETURN] [--play N]

ENV_ID and settings: a game of ALE (BreakoutNoFrameskip-v4) with those of CleanRL's ppo_atari_envpool.py; a MuJoCo task (HalfCheetah-v4)
with the defaults and eight environments; or one that ZOO has. FOLDER gets TensorBoard events, time/fps among them. With a goal it ends when
the mean return of 100 episodes reaches it. Prints a line of JSON: steps, seconds, reached, steps_per_second, and with --play the mean return
and standard deviation of N episodes played after training, without noise.

Installation into `python -m venv .venv-sb3`, for Atari, MuJoCo, and what ZOO has:

    .venv-sb3/bin/pip install torch==2.13.0 'stable-baselines3[extra]==2.9.2' ale-py==0.12.1
    .venv-sb3/bin/pip install torch==2.13.0 stable-baselines3==2.9.2 tensorboard mujoco imageio
    .venv-sb3/bin/pip install torch==2.13.0 stable-baselines3==2.9.2 box2d minigrid
"""

import argparse
import contextlib
import json
import time

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack, VecNormalize

with contextlib.suppress(ImportError):  # here, so that worker processes, which import this file, know its games too
    import ale_py

    gym.register_envs(ale_py)

MINIGRID = dict(normalize=True, n_envs=8, steps=1e5, n_steps=128, batch_size=64, gae_lambda=0.95, n_epochs=10, learning_rate=2.5e-4)
MUJOCO = dict(normalize=True, n_envs=1, steps=1e6, n_steps=512)
RELU = dict(log_std_init=-2, ortho_init=False, activation_fn=torch.nn.ReLU, net_arch=dict(pi=[256, 256], vf=[256, 256]))
# rl-baselines3-zoo's settings (hyperparams/ppo.yml of 00128b5; LunarLander-v2's, DoorKey-5x5's for both of MiniGrid, MuJoCo's version 3),
# and its one process
ZOO = {
    "CartPole-v1": dict(n_envs=8, steps=1e5, n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=20,
                        learning_rate=lambda left: left * 1e-3, clip_range=lambda left: left * 0.2),
    "Acrobot-v1": dict(normalize=True, n_envs=16, steps=1e6, n_steps=256, gae_lambda=0.94, n_epochs=4),
    "LunarLander-v3": dict(n_envs=16, steps=1e6, n_steps=1024, batch_size=64, gae_lambda=0.98, gamma=0.999, n_epochs=4, ent_coef=0.01),
    "minigrid:MiniGrid-Empty-8x8-v0": MINIGRID,
    "minigrid:MiniGrid-DoorKey-5x5-v0": MINIGRID,
    "HalfCheetah-v5": MUJOCO | dict(batch_size=64, gamma=0.98, learning_rate=2.0633e-05, ent_coef=0.000401762, clip_range=0.1, n_epochs=20,
                                    gae_lambda=0.92, max_grad_norm=0.8, vf_coef=0.58096, policy_kwargs=RELU),
    "Hopper-v5": MUJOCO | dict(batch_size=32, gamma=0.999, learning_rate=9.80828e-05, ent_coef=0.00229519, clip_range=0.2, n_epochs=5,
                               gae_lambda=0.99, max_grad_norm=0.7, vf_coef=0.835671, policy_kwargs=RELU),
    "Walker2d-v5": MUJOCO | dict(batch_size=32, gamma=0.99, learning_rate=5.05041e-05, ent_coef=0.000585045, clip_range=0.1, n_epochs=20,
                                 gae_lambda=0.95, max_grad_norm=1, vf_coef=0.871923),
}  # fmt: skip
CLEANRL_ATARI = dict(learning_rate=2.5e-4, n_steps=128, batch_size=256, n_epochs=4, clip_range=0.1, clip_range_vf=0.1, ent_coef=0.01)


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


def environments(env_id: str, seed: int, settings: dict):
    """Takes from the settings what is about environments."""
    if env_id in ZOO:
        envs = make_vec_env(lambda: make(env_id), n_envs=settings.pop("n_envs"), seed=seed)
        return VecNormalize(envs, gamma=settings.get("gamma", 0.99)) if settings.pop("normalize", False) else envs
    if "NoFrameskip" in env_id:
        return VecFrameStack(make_atari_env(env_id, n_envs=8, seed=seed, vec_env_cls=SubprocVecEnv), n_stack=4)
    return VecNormalize(make_vec_env(env_id, n_envs=8, seed=seed, vec_env_cls=SubprocVecEnv))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env_id")
    parser.add_argument("seed", type=int)
    for name, kind in dict(folder=str, steps=int, epochs=int, goal=float, play=int).items():
        parser.add_argument(f"--{name}", type=kind)
    options = parser.parse_args()
    settings = dict(ZOO.get(options.env_id, CLEANRL_ATARI if "NoFrameskip" in options.env_id else {}))
    steps = options.steps or int(settings["steps"])
    settings.pop("steps", None)
    if options.epochs:
        settings["n_epochs"] = options.epochs
    envs = environments(options.env_id, options.seed, settings)
    policy = "CnnPolicy" if "NoFrameskip" in options.env_id else "MlpPolicy"
    model = PPO(policy, envs, device="cpu", seed=options.seed, tensorboard_log=options.folder, **settings)
    callback = Goal(float("inf") if options.goal is None else options.goal)
    iteration = model.n_steps * envs.num_envs
    model.learn(steps, callback=callback, log_interval=max(1, 4096 // iteration))  # where iterations are short, not each is reported
    seconds, steps = time.perf_counter() - callback.started, model.num_timesteps
    found = dict(steps=steps, seconds=seconds, reached=callback.reached, steps_per_second=steps / seconds)
    if options.play:
        envs.training = envs.norm_reward = False  # of VecNormalize
        found["played"] = evaluate_policy(model, envs, options.play, deterministic=True)
    envs.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
