"""Stable-Baselines3's PPO on Atari with the settings of CleanRL's ppo_atari_envpool.py, for benchmark/peers.sh.

    python stable_baselines3_atari.py FOLDER SEED STEPS EPOCHS     # writes TensorBoard events, time/fps among them, to FOLDER
"""

import sys

import ale_py
import gymnasium
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack

gymnasium.register_envs(ale_py)

if __name__ == "__main__":
    folder, seed, steps, epochs = sys.argv[1], *map(int, sys.argv[2:])
    games = make_atari_env("BreakoutNoFrameskip-v4", n_envs=8, seed=seed, vec_env_cls=SubprocVecEnv)
    model = PPO("CnnPolicy", VecFrameStack(games, n_stack=4), learning_rate=2.5e-4, n_steps=128, batch_size=256, n_epochs=epochs,
                clip_range=0.1, clip_range_vf=0.1, ent_coef=0.01, vf_coef=0.5, max_grad_norm=0.5, device="cpu", seed=seed,
                tensorboard_log=folder)  # fmt: skip
    model.learn(steps)
    games.close()
