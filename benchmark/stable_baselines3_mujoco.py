"""Stable-Baselines3's PPO with its defaults on eight MuJoCo environments, for benchmark/mujoco.sh.

    python stable_baselines3_mujoco.py FOLDER TASK SEED STEPS     # writes TensorBoard events, time/fps among them, to FOLDER
"""

import sys

from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

if __name__ == "__main__":
    folder, task, seed, steps = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    envs = VecNormalize(make_vec_env(task, n_envs=8, seed=seed, vec_env_cls=SubprocVecEnv))
    model = PPO("MlpPolicy", envs, device="cpu", seed=seed, tensorboard_log=folder)
    model.learn(steps)
    envs.close()
