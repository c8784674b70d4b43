"""CartPole without its two velocities, so that one observation does not say what to do next.

    PYTHONPATH=benchmark python appo_gym.py --env-id masked_cartpole:MaskedCartPole-v1 --rnn-type gru
"""

import gymnasium as gym


def make(**options) -> gym.Env:
    env = gym.make("CartPole-v1", **options)
    low, high = env.observation_space.low[[0, 2]], env.observation_space.high[[0, 2]]
    return gym.wrappers.TransformObservation(env, lambda numbers: numbers[[0, 2]], gym.spaces.Box(low, high))


gym.register("MaskedCartPole-v1", make)
