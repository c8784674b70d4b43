# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "numpy==2.4.6",
#     "gymnasium==1.4.0",
#     "tyro==1.0.17",
#     "tensorboard==2.21.0",
#     "tqdm==4.70.1",
#     "typeguard==4.6.1",
#     "envpool==1.2.5",
# ]
# ///
# appo_mujoco.py $Id$
"""Asynchronous PPO with V-trace for continuous actions (MuJoCo, Gymnasium): the complete Sample Factory / IMPALA
pipeline in one file.

    python appo_mujoco.py --env-id HalfCheetah-v5
    python appo_mujoco.py --env-id my_module:MyRobot-v0    # your own, registered when my_module is imported
    python evaluate.py train_dir/NAME    # plays the trained policy

With --total-timesteps 1e6, on 2 cores without a GPU, two runs at a time, HalfCheetah-v5 took 1.2 to 1.6 minutes (Intel
Xeon), Walker2d-v5 4.4 to 4.7 and Hopper-v5 3.4 to 4.1 (AMD Zen 3). The final policies of five seeds had these median
returns without noise: 7,134, 3,782 and 2,968 (2026-11-30, benchmark/results/mujoco_played.txt).

This file is an edit of appo_gym.py. What differs:

- Tasks that EnvPool has are simulated by EnvPool (`MujocoEnvs`).
- Observations are vectors; images are refused.
- The policy is Gaussian (`sample_actions`, `log_prob`, `entropy_of`), and its actions are stored as sampled. For the
  environment, `to_bounds` maps [-1, 1] to the bounds of each dimension that has two, and clips.
- Each worker is pinned to one core if there are at least as many workers as cores (`run_actor`).
- The network has two towers of `hidden_size`, and an optional GRU across both.
- The action noise starts larger if many of the first steps terminate an episode (`Learner.iterate`).
- `Args` has other defaults: 64 environments, a longer horizon (`gamma`, `vtrace_lambda`, `rollout`), a decaying
  learning rate, no entropy bonus, a smaller gradient norm, wider clips of ratio and value, half as many optimizer steps
  per sample, and three times the steps.

     actor process w = 0..W-1  (CPU only)              main process (owns the accelerator)
     +-------------------------------+      request       +------------------------------------------+
     | step a group of environments, | -----------------> | inference thread                         |
     | write obs, reward, ... into   |                    |   copy the rows of all waiting groups    |
     | the group's mailbox rows      | <----------------- |   into the rollouts, forward, sample,    |
     |                               |       reply        |   write actions into the mailbox         |
     +-------------------------------+                    +------------------------------------------+
                                                             | full blocks               ^ free blocks
                                                          +------------------------------------------+
                                                          | learner (main thread)                    |
                                                          |   V-trace, PPO steps: each makes a new   |
                                                          |   version of the policy that acts        |
                                                          +------------------------------------------+
     block:  FREE -> FILLING (by one group) -> FULL -> LEARNING -> FREE      exactly one owner at any time

Where to edit:

    environment, wrappers        `make_envs` (a new vector in the observation needs no other change)
    metric of an episode         `EXTRA_METRICS`
    network                      `Agent`
    loss                         `appo_loss` (its docstring says how to add a field from acting time)
    intrinsic reward             `Learner.update`, before the loss: `batch` is a copy
    optimizer, second network    `Learner`, then `save_checkpoint` and `load_checkpoint`

With --cuda-graphs, the network and the loss must also meet the conditions in `recorded`.

Terms:

    worker       an actor process and its environments
    row          the endless stream of experience of one environment
    group        the rows that request actions together: those of a worker
    slot         room for one rollout, T steps of one row
    block        one slot for each row of a group
    iteration    the learner takes as many blocks as there are workers, makes `num_epochs` passes over their rollouts,
                 and returns them
    batch        some of an iteration's rollouts, about `batch_size` samples, for one optimizer step
    step         one decision of the agent
    version      the number of the policy, which every optimizer step increases
    lag          of a sample: the newest version minus the version that chose its action

One convention governs time. Environments reset on the step AFTER an episode ends (Gymnasium's NEXT_STEP): the step that
ends an episode returns its last observation, the action chosen there is ignored, and the next observation is the first
of the next episode. Two flags are therefore enough:

    first[t]       obs[t] is the first of an episode: the recurrent state is zeroed before obs[t] enters it
    terminated[t]  action t ended the episode for good: the discount of step t is gamma * (1 - terminated[t])

A transition t -> t+1 is valid iff not first[t+1]. An invalid one (the ignored action) cuts the trace and is excluded
from every loss, mean and step count. A time limit needs no flag of its own: its last step bootstraps from the value of
the true last observation.
"""

import signal
import sys

if __name__ == "__main__":  # until `handle_signals`, Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print("importing torch ...", file=sys.stderr)

import contextlib
import fcntl
import functools
import io
import json
import os
import queue
import random
import re
import selectors
import shlex
import threading
import time
import traceback
from collections import Counter, deque
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, NamedTuple, TypedDict, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import tyro
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple, flatdim, flatten
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from tqdm import tqdm
from typeguard import TypeCheckError, check_type

try:
    import envpool
except ImportError:  # needed only for EnvPool's tasks
    envpool = None

# === Args =============================================================================================================


class UserError(Exception):
    """An error that the user can fix. Its message is printed without a traceback."""


def num_cores() -> int:
    """Returns the number of cores that this process may use, ignoring a container's CPU quota."""
    return len(os.sched_getaffinity(0))


@dataclass
class Args:
    """Asynchronous PPO with V-trace for continuous actions (MuJoCo, Gymnasium)."""

    # --- run
    env_id: str = "HalfCheetah-v5"
    """name of an EnvPool task (Gymnasium's MuJoCo or dm_control), or of any Gymnasium environment with a Box of
    actions; `module:name` imports the module first, so that it can register its own"""
    seed: int = 1  # seed of the network, the action sampling and the environments
    total_timesteps: int = 3_000_000  # stop after this many steps
    device: str = "cpu"  # cpu, cuda, or cuda:1 (the second GPU): a GPU pays off for wide networks only
    cuda_graphs: bool = False
    """record acting and the gradient computation as CUDA graphs (one per batch size), which take one launch each;
    ignored on a CPU"""
    experiment: str | None = None  # the run's folder in train_dir, resumed if it exists. Default: a new one
    train_dir: str = "train_dir"  # folder of all experiments
    save_every_sec: float = 120.0  # seconds between checkpoints

    # --- sampling
    num_envs: int = 64  # total environments, split evenly among the workers
    num_workers: int | None = None
    """number of actor processes. Default: the largest divisor of num_envs that is at most the number of cores, or twice
    that with CUDA, where one worker steps while the other waits. 0: one actor thread, for debugging; implies --sync"""
    sync: bool = False  # alternate between collecting and learning, so that every iteration starts at lag 0

    # --- algorithm
    rollout: int = 128  # steps per rollout (T)
    batch_size: int = 512  # approximate samples per optimizer step: batches consist of whole rollouts
    num_epochs: int = 4  # passes over the rollouts of an iteration
    learning_rate: Annotated[float, tyro.conf.arg(aliases=["--lr"])] = 2e-3  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0 at total_timesteps
    gamma: float = 0.9925  # discount per step
    vtrace_rho: float = 1.0  # V-trace: upper bound of the importance weight of temporal differences (rho bar)
    vtrace_c: float = 1.0  # V-trace: upper bound of the trace coefficients (c bar)
    vtrace_lambda: float = 0.98  # decay of the trace, as in GAE; 1 gives the paper's V-trace
    clip_coef: float = 0.3  # PPO: the ratio is clipped to [1/(1+e), 1+e], not to [1-e, 1+e]
    ppo_clip_value: float = 1.0
    """PPO: clip range around the value at acting time, in standard deviations of the targets"""
    vf_coef: float = 0.5  # coefficient of the value loss, computed in standard deviations of the targets
    ent_coef: float = 0.0  # coefficient of the entropy bonus
    max_grad_norm: float = 0.5  # maximum gradient norm; 0: no clipping
    rnn_type: Literal["gru", "none"] = "none"  # type of the recurrent core
    hidden_size: int = 64  # units in each of the two layers of a tower; the recurrent core has twice as many
    initial_stddev: float | None = None
    """initial standard deviation of each action dimension; 1 is half of its range. Default: 0.5, raised to 1 before
    the first update if more than one step in 100 has terminated an episode"""

    def __post_init__(self):
        self.typed = asdict(self)  # saved in cfg.json, before defaults that depend on the machine are filled in
        self.cuda_graphs &= self.device.startswith("cuda")
        if self.num_workers is None:
            most = num_cores() * (1 if self.device == "cpu" else 2)
            self.num_workers = max(n for n in range(1, most + 1) if self.num_envs % n == 0)
        self.sync |= self.num_workers == 0


# === Environment ======================================================================================================

# Keys of `info`, EnvPool's or Gymnasium's, to sum over each episode and report
EXTRA_METRICS = ()
# Sums over each episode, reported as means over the last 100 episodes: rewards, steps, and these keys
EPISODE = ("episodic_return", "episodic_length", *EXTRA_METRICS)

NUMERIC_SPACES = (Box, Discrete, MultiDiscrete, MultiBinary)
SPECS = envpool.registration.registry.specs if envpool else {}
TASKS = {task for task, (module, *_) in SPECS.items() if module in ("envpool.mujoco.gym", "envpool.mujoco.dmc")}


def parts_of(space, observation, name="obs"):
    """Yields (name, space, value) for each leaf of an observation; leaves of a Dict or Tuple are named obs/KEY."""
    if isinstance(space, (Dict, Tuple)):
        for key, part in space.items() if isinstance(space, Dict) else enumerate(space):
            yield from parts_of(part, observation[key], f"{name}/{key}".replace(".", ":"))  # nn.ModuleDict forbids dots
    else:
        yield name, space, observation


def as_array(name, space, part):
    """Flattens a leaf to a float32 vector; discrete values become one-hot."""
    if np.shape(part) != space.shape:
        raise ValueError(f"the observation's part {name} has shape {np.shape(part)}, but its space is {space}")
    return flatten(space, part).astype(np.float32)


class NamedArrays(gym.Wrapper):
    """Converts observations to a flat Dict of vectors, and actions from one vector. Text and graph observations are
    dropped with a warning. Raises UserError for images."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.env_observation_space = env.observation_space  # cached: the property walks every wrapper
        self.env_action_space = env.action_space
        spaces = {}
        for name, space, _ in parts_of(env.observation_space, env.observation_space):
            if not isinstance(space, NUMERIC_SPACES):
                gym.logger.warn(f"{name} is left out of the observation: {space}")
                continue
            if sum(side >= 36 for side in space.shape) > 1:
                raise UserError(f"{name} is an image, {space}: this network sees vectors")
            spaces[name] = Box(-np.inf, np.inf, (flatdim(space),))
        self.observation_space = Dict(spaces)
        if isinstance(env.action_space, Box):
            box = env.action_space
            self.action_space = Box(box.low.ravel(), box.high.ravel(), dtype=box.dtype.type)

    def arrays(self, observation):
        parts = parts_of(self.env_observation_space, observation)
        return {name: as_array(name, space, part) for name, space, part in parts if isinstance(space, NUMERIC_SPACES)}

    def reset(self, **options):
        observation, _ = self.env.reset(**options)
        return self.arrays(observation), {}

    def step(self, action: np.ndarray):
        space = self.env_action_space
        observation, *outcome, info = self.env.step(action.reshape(space.shape).astype(space.dtype))
        reward, terminated, truncated = (np.asarray(value).item() for value in outcome)  # may be arrays of size 1
        extra_metrics = {name: np.asarray(info[name], float).item() for name in EXTRA_METRICS if name in info}
        return self.arrays(observation), reward, terminated, truncated, extra_metrics


class MujocoEnvs(gym.vector.VectorEnv):
    """EnvPool's MuJoCo tasks (Gymnasium's and dm_control's), with every leaf of an observation flattened to float32. An
    episode that reaches its time limit is truncated, not terminated, even if the robot falls at that very step. The
    pool is created in `reset`, which knows the seed. If a simulation becomes unstable, MuJoCo itself writes
    MUJOCO_LOG.TXT to the working directory."""

    metadata = dict(autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)

    def __init__(self, env_id: str, num_envs: int):
        spec = envpool.make_spec(env_id)
        self.env_id = env_id
        self.num_envs = num_envs
        self.pool = None
        self.parts = spec.gymnasium_observation_space
        parts = parts_of(self.parts, self.parts)
        boxes = {name: Box(-np.inf, np.inf, (flatdim(space),)) for name, space, _ in parts}
        self.single_observation_space = Dict(boxes)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.single_action_space = spec.gymnasium_action_space
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=0, options=None):
        self.close()
        # Contact forces: Gymnasium's humanoids observe them from version 4, EnvPool's by default from version 5
        forces = dict(post_constraint=True) if self.env_id in ("Humanoid-v4", "HumanoidStandup-v4") else {}
        options = dict(env_type="gymnasium", num_envs=self.num_envs, num_threads=1, seed=seed, **forces)
        self.pool = envpool.make(self.env_id, **options)
        return self.vectors(self.pool.reset()[0]), {}

    def step(self, actions):
        observation, *outcome = self.pool.step(actions)
        return self.vectors(observation), *outcome

    def vectors(self, observation):
        parts = parts_of(self.parts, observation)
        return {name: part.reshape(self.num_envs, -1).astype(np.float32) for name, _, part in parts}

    def close(self, **options):
        if self.pool:
            self.pool.close()
            self.pool = None


def make_envs(args: Args, num_envs: int, **options) -> gym.vector.VectorEnv:
    """Returns the environments of one worker, EnvPool's if it has the task. With options, which are passed to
    gymnasium.make, they are Gymnasium's, because EnvPool cannot render (and Gymnasium lacks dm_control's tasks, which
    therefore cannot be rendered). Edit this function to add wrappers (Gymnasium has some that scale or clip rewards) or
    to use environments from elsewhere.

    The result must reset on the step after an episode ends (NEXT_STEP), take a Box of vectors (see `to_bounds`) and
    return a Dict of float32 vectors. To add a vector, add a key; nothing else changes. Actors cannot start
    multiprocessing children (AsyncVectorEnv)."""
    if args.env_id in TASKS and not options:
        return MujocoEnvs(args.env_id, num_envs)
    if options:
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a display
        if args.env_id in TASKS - gym.registry.keys():
            raise UserError(f"--env-id {args.env_id}: EnvPool cannot render it, and Gymnasium does not have it")

    def make() -> gym.Env:
        return NamedArrays(gym.make(args.env_id, **options))

    return gym.vector.SyncVectorEnv([make] * num_envs, copy=False)  # NEXT_STEP is its default


NO_BOUND = np.float32(1e10)  # MuJoCo's mjMAXVAL, which dm_control uses for actuators without a limit


def to_bounds(action, space):
    """Maps the policy's actions [..., action_size] to a Box and returns a copy. In a dimension with two bounds below
    NO_BOUND in size, [-1, 1] becomes the range; other dimensions stay unchanged. All are clipped."""
    bounded = (space.low > -NO_BOUND) & (space.high < NO_BOUND)
    low = np.where(bounded, space.low, -1)
    high = np.where(bounded, space.high, 1)
    end = np.where(action < 0, low, high)
    size = np.abs(action)
    action = size * end + (1 - size) * (low / 2 + high / 2)  # exact at -1 and 1, and if the bounds are -1 and 1
    return np.clip(action, space.low, space.high)


class Spaces(NamedTuple):
    """Describes the environments to the pipeline."""

    obs: dict[str, Box]  # the arrays of an observation, by name
    action_size: int  # numbers of an action


def spaces_of(args: Args) -> Spaces:
    """Returns the spaces of the environments. Raises UserError if the pipeline does not support them."""
    with contextlib.closing(make_envs(args, 1)) as envs:
        obs = envs.single_observation_space
        action = envs.single_action_space
        mode = envs.metadata.get("autoreset_mode")
    if mode != gym.vector.AutoresetMode.NEXT_STEP:
        raise UserError(f"make_envs must return environments with AutoresetMode.NEXT_STEP, not {mode}")
    if not (isinstance(obs, Dict) and obs and isinstance(action, Box) and action.dtype.kind == "f"):
        raise UserError(
            f"unsupported spaces, {obs} and {action}: observations must have numbers, actions be a Box of floats "
            "(for choices: appo_gym.py)"
        )
    return Spaces(dict(obs), flatdim(action))


# === Agent ============================================================================================================


def moments(x):
    """Returns N, and the mean and variance [...] of x [N, ...] over its first axis."""
    mean = x.mean(0)
    return len(x), mean, (x - mean).square_().mean(0)  # much faster on images than x.var(0)


class Normalizer(nn.Module):
    """Normalises every element of an input by its running mean and variance, then clips to +-5, as in Sample Factory
    2."""

    def __init__(self, shape: tuple[int, ...], unit: float):
        super().__init__()
        self.unit = unit
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("std", torch.ones(shape))

    def forward(self, x):
        return (x / self.unit).sub_(self.mean).div_(self.std).clamp_(-5, 5)

    @torch.no_grad()
    def update(self, x, valid):
        """Merges in the statistics of x [..., *shape] where bool valid [...] is set (Chan, Golub, LeVeque 1979). Raises
        FloatingPointError, without changing anything, if the result would not be finite."""
        n, mean, var = moments(x[valid] / self.unit)
        if n == 0:
            return
        weight = n / (self.count + n)
        var = self.var.lerp(var, weight) + (mean - self.mean).square() * (weight - weight.square())
        if not np.isfinite(var.sum().item()):
            raise FloatingPointError("an observation or a return is not finite, or its square is not")
        self.mean.lerp_(mean, weight)
        self.var.copy_(var)
        self.count += n
        self.std.copy_((var + 1e-5).sqrt())


def init_layer(layer, gain=2**0.5):
    """Returns the layer with orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class PopArt(Normalizer):
    """A value head with normalised targets (PopArt: van Hasselt et al. 2016; with V-trace: Hessel et al. 2019).
    `linear` predicts (value - mean) / std, where mean and std are running statistics of the V-trace targets. When they
    change, `linear` is rescaled so that the predicted values stay the same."""

    def __init__(self, linear: nn.Linear):
        super().__init__((), 1.0)
        self.linear = linear
        self.count.fill_(1000)  # a prior of 1000 samples from N(0, 1), because early returns may hardly vary

    def forward(self, x):
        """Returns values [...] in the reward's units for x [..., features]."""
        return self.linear(x).squeeze(-1) * self.std + self.mean

    @torch.no_grad()
    def update(self, targets, valid):
        """Merges in targets [...], in the reward's units, where bool valid [...] is set."""
        old_mean = self.mean.clone()
        old_std = self.std.clone()
        super().update(targets, valid)
        self.count.clamp_(max=100_000)  # beyond that, older samples decay, because returns change
        self.linear.weight *= old_std / self.std
        self.linear.bias.copy_((old_std * self.linear.bias + old_mean - self.mean) / self.std)


def tower(inputs, hidden_size):
    """Returns a network of two tanh layers from [..., inputs] to [..., hidden_size]."""
    return nn.Sequential(
        init_layer(nn.Linear(inputs, hidden_size)),
        nn.Tanh(),
        init_layer(nn.Linear(hidden_size, hidden_size)),
        nn.Tanh(),
    )


class Agent(nn.Module):
    """Has one tower for the actions and one for the value, with the gains of CleanRL's ppo_continuous_action, and an
    optional recurrent core over both. The policy is an independent Gaussian for each action dimension: the network
    gives its mean, and a parameter the logarithm of its standard deviation. Both together are called `gaussians`.

    A network of your own takes (spaces, args) and needs `state_size` (floats of recurrent state per row, 0 for none),
    `critic` (a PopArt), `normalizers` (by observation name; the learner updates them), `log_std` (which the learner may
    raise once, see initial_stddev) and a `forward` without side effects. The flags rnn_type, hidden_size and
    initial_stddev belong to this network."""

    def __init__(self, spaces: Spaces, args: Args):
        super().__init__()
        self.normalizers = nn.ModuleDict()
        inputs = 0
        for name, space in spaces.obs.items():
            self.normalizers[name] = Normalizer(space.shape, unit=1.0)
            inputs += space.shape[0]
        self.policy_tower = tower(inputs, args.hidden_size)
        self.value_tower = tower(inputs, args.hidden_size)
        self.core = None
        self.state_size = 0
        if args.rnn_type == "gru":
            self.state_size = 2 * args.hidden_size
            self.core = nn.GRUCell(self.state_size, self.state_size)
        self.critic = PopArt(init_layer(nn.Linear(args.hidden_size, 1), gain=1.0))
        self.policy = init_layer(nn.Linear(args.hidden_size, spaces.action_size), gain=0.01)
        self.log_std = nn.Parameter(torch.full((spaces.action_size,), np.log(args.initial_stddev or 0.5)))

    def encode(self, obs):
        """Returns the features of both towers [N, 2 * hidden_size] for obs by name [N, size]."""
        x = torch.cat([self.normalizers[name](x) for name, x in obs.items()], -1)
        return torch.cat([self.policy_tower(x), self.value_tower(x)], -1)

    def forward(self, obs, first, state):
        """Takes obs by name [T, B, ...], first bool [T, B] and the state float32 [B, state_size] before obs[0]. The
        state is zeroed wherever `first` is set. Returns gaussians [T, B, 2 * action_size], values [T, B] and the state
        after obs[T-1]."""
        T, B = first.shape
        x = self.encode({name: part.flatten(0, 1) for name, part in obs.items()}).unflatten(0, (T, B))
        if self.core is not None:
            outputs = []
            for features, begins in zip(x, first):
                state = self.core(features, state.masked_fill(begins.unsqueeze(-1), 0.0))
                outputs.append(state)
            x = torch.stack(outputs)
        for_policy, for_value = x.chunk(2, -1)
        mean = self.policy(for_policy)
        gaussians = torch.cat([mean, self.log_std.expand_as(mean)], -1)
        return gaussians, self.critic(for_value), state


def sample_actions(gaussians):
    """Samples actions [..., action_size] from gaussians [..., 2 * action_size]."""
    mean, log_std = gaussians.chunk(2, -1)
    return mean + log_std.exp() * torch.randn_like(mean)


def log_prob(gaussians, actions):
    """Returns the joint log-probability [...] of actions [..., action_size] under gaussians [..., 2 * action_size]."""
    mean, log_std = gaussians.chunk(2, -1)
    logprobs = -0.5 * ((actions - mean) / log_std.exp()).square() - log_std - 0.5 * np.log(2 * np.pi)
    return logprobs.sum(-1)


def entropy_of(gaussians):
    """Returns the entropy [...] of gaussians [..., 2 * action_size]."""
    _, log_std = gaussians.chunk(2, -1)
    return (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum(-1)


# === V-trace and the loss =============================================================================================


@torch.no_grad()
def vtrace(ratios, values, rewards, discounts, valid, rho_bar, c_bar, lam):
    """Computes V-trace targets and advantages (Espeholt et al. 2018, IMPALA, section 4.1; lambda: their remark 2).

    Takes ratios pi(a)/mu(a), rewards and discounts (gamma, or 0 where the episode terminated), all float32 [T, B],
    valid [T, B] of 0 and 1 (0 cuts the trace: vs = V there), and values float32 [T+1, B] of the current network.
    Returns vs [T+1, B] (vs[T] = V[T]) and advantages [T, B].

        rho[t] = min(ratio[t], rho_bar), c[t] = lam min(ratio[t], c_bar), both 0 where not valid
        vs[t] = V[t] + rho[t] (r[t] + discount[t] V[t+1] - V[t]) + discount[t] c[t] (vs[t+1] - V[t+1])
        A[t]  = r[t] + discount[t] (lam vs[t+1] + (1 - lam) V[t+1]) - V[t]

    The advantage has no factor rho, because the PPO surrogate multiplies by the ratio itself. On-policy it equals
    GAE(lam); with lam = 1 it is IMPALA's advantage."""
    rho = ratios.clamp(max=rho_bar) * valid
    c = lam * ratios.clamp(max=c_bar) * valid
    deltas = rho * (rewards + discounts * values[1:] - values[:-1])
    decays = discounts * c
    corrections = [torch.zeros_like(values[-1])]  # vs[t] - V[t], the last t first
    for delta, decay in zip(deltas.flip(0), decays.flip(0)):
        corrections.append(torch.addcmul(delta, decay, corrections[-1]))
    vs = values + torch.stack(corrections).flip(0)
    next_values = lam * vs[1:] + (1 - lam) * values[1:]
    advantages = rewards + discounts * next_values - values[:-1]
    return vs, advantages


def masked_mean(x, mask):
    """Returns the mean [...] of x [..., T, B] over the samples where mask [T, B] is 1, or 0 if there are none."""
    return (x * mask).sum((-2, -1)) / mask.sum().clamp(min=1)


def appo_loss(args: Args, agent: Agent, batch: SimpleNamespace):
    """Computes PPO's clipped losses with V-trace targets over the valid samples of a batch, which has the fields of
    Rollouts [time, rollout, ...]. Returns the loss, the targets float32 [T, B] and metrics, all on the device.

    To add a loss, compute it per sample [T, B], average it with `mean` and add it to `loss`. If it needs a value from
    acting time, add a field to `Rollouts` and write it in `Inference.choose`. If that value comes from the
    environment's `info`, also pass it on in `NamedArrays.step`, add a field to `Mailbox`, write it in `WorkerEnvs.step`
    and copy it in `Inference.store` (at t - 1 if it is an outcome of the step, like the reward)."""
    valid = (~batch.first[1:]).float()
    gaussians, values, _ = agent(batch.obs, batch.first, batch.rnn_state[0])
    gaussians = gaussians[:-1]
    logprobs = log_prob(gaussians, batch.actions)
    entropy = entropy_of(gaussians)
    log_ratio = logprobs - batch.logprobs
    ratio = log_ratio.clamp(np.log(0.05), np.log(20.0)).exp()  # Sample Factory's band; no gradient outside
    discounts = args.gamma * ~batch.terminated
    vs, advantages = vtrace(
        ratio, values, batch.rewards, discounts, valid, args.vtrace_rho, args.vtrace_c, args.vtrace_lambda
    )
    targets = vs[:-1]
    values = values[:-1]

    mean = functools.partial(masked_mean, mask=valid)
    advantages = advantages - mean(advantages)
    advantages = advantages / mean(advantages.square()).sqrt().clamp(min=1e-7)
    clipped = ratio.clamp(1 / (1 + args.clip_coef), 1 + args.clip_coef)
    policy_losses = -torch.min(ratio * advantages, clipped * advantages)
    clip_range = args.ppo_clip_value * agent.critic.std
    clipped_values = batch.values + (values - batch.values).clamp(-clip_range, clip_range)
    value_losses = torch.max((values - targets).square(), (clipped_values - targets).square())
    value_losses = value_losses / agent.critic.std.square()
    loss = mean(policy_losses + args.vf_coef * value_losses - args.ent_coef * entropy)

    with torch.no_grad():
        variance = mean((targets - mean(targets)).square())
        per_sample = {
            "losses/policy_loss": policy_losses,
            "losses/value_loss": value_losses,
            "losses/entropy": entropy,
            "losses/approx_kl": log_ratio.exp() - 1 - log_ratio,  # http://joschu.net/blog/kl-approx.html
            "losses/clipfrac": (ratio != clipped).float(),
            "losses/explained_variance": 1 - (values - targets).square() / variance.clamp(min=1e-8),
            "vtrace/rho_mean": ratio.clamp(max=args.vtrace_rho),
            "vtrace/rho_clipfrac": (ratio > args.vtrace_rho).float(),
        }
        metrics = dict(zip(per_sample, mean(torch.stack(list(per_sample.values())))))
    return loss, targets, metrics


# === Mailbox and rollouts =============================================================================================


def rows_per_group(args: Args) -> int:
    """Raises UserError."""
    workers = max(1, args.num_workers)
    if args.num_envs % workers:
        raise UserError(f"--num-envs {args.num_envs} cannot be shared out evenly among --num-workers {workers}")
    return args.num_envs // workers


def slice_of(args: Args, i: int) -> slice:
    """Returns the rows of group i, or the slots of block i: a block has as many slots as a group has rows."""
    n = rows_per_group(args)
    return slice(i * n, i * n + n)


def num_blocks(args: Args) -> int:
    """Returns 2 W for W groups: W blocks can be LEARNING while every group fills another. There is no deadlock: while
    the learner waits, it holds at most W - 1 blocks and none is FULL, so every group fills one or finds a FREE one.
    With --sync there are W, so none is FREE until the learner returns them all; that is the only difference."""
    return max(1, args.num_workers) * (1 if args.sync else 2)


def zeros_for(spaces: Spaces, *shape):
    """Returns zero observations by name [*shape, ...]."""
    return {
        name: torch.zeros(*shape, *space.shape, dtype=getattr(torch, space.dtype.name))
        for name, space in spaces.obs.items()
    }


class Mailbox:
    """The only memory that actors share with the main process. The rows of a group are contiguous.

    Between request and reply, the rows of a group belong to the inference thread, otherwise to its actor, so they need
    no lock."""

    def __init__(self, spaces: Spaces, rows: int):
        # written by the actor, between a reply and its next request
        self.obs = zeros_for(spaces, rows)  # the current observation
        self.reward = torch.full((rows,), torch.nan)  # of the previous action; NaN until the environment has started
        self.terminated = torch.zeros(rows, dtype=torch.bool)  # the previous action ended the episode for good
        self.first = torch.zeros(rows, dtype=torch.bool)  # obs is the first of an episode
        self.episode = torch.zeros(rows, len(EPISODE))  # sums of the episode that just ended, else zeros
        # written by inference, between a request and its reply
        self.action = torch.zeros(rows, spaces.action_size)  # the next action, as sampled: see `to_bounds`

    def share(self) -> SimpleNamespace:
        """Moves the fields to shared memory and returns them as NumPy arrays, whose indexing is cheaper than
        torch's."""
        return SimpleNamespace(**tree_map(lambda field: field.share_memory_().numpy(), vars(self)))


class Rollouts:
    """The rollouts [time, slot, ...], private to the main process. Observations and the results of inference stay on
    the device. Flags, rewards and versions are host arrays, so that the learner can find valid samples without waiting
    for the device. `Learner.gather` copies every field. Rewards and the floats that `choose` writes start as NaN, so
    that reading an unwritten slot makes the loss NaN.

    The life of a block: FREE -> FILLING -> FULL in `Inference.serve`, -> LEARNING in `Learner.collect`, -> FREE in
    `Inference.receive`, to which `Learner.iterate` returns it."""

    def __init__(self, spaces: Spaces, T: int, slots: int, state_size: int, device: torch.device):
        with device:  # written by `Inference.store_obs` (obs), `serve` (rnn_state) and `choose` (the others)
            self.obs = zeros_for(spaces, T + 1, slots)  # T + 1: the last value bootstraps from obs[T]
            self.actions = torch.full((T, slots, spaces.action_size), torch.nan)
            self.logprobs = torch.full((T, slots), torch.nan)  # of the actions under the acting policy (mu)
            self.values = torch.full((T, slots), torch.nan)  # of the acting policy, for value clipping only
            self.rnn_state = torch.zeros((1, slots, state_size))  # before obs[0], not yet zeroed by first[0]
        # on the host, written by `Inference.store`, versions by `act`
        self.first = np.zeros((T + 1, slots), bool)
        self.rewards = np.full((T, slots), np.nan, np.float32)  # of actions[t]
        self.terminated = np.zeros((T, slots), bool)
        self.versions = np.zeros((T, slots), np.int64)  # of the policy that chose actions[t]


# === Actor ============================================================================================================


class WorkerEnvs:
    """The environments of one group. `reset` and `step` write its mailbox rows, which then belong to the caller until
    it has filled in the actions and calls `step` again."""

    def __init__(self, args: Args, group: int, mailbox: SimpleNamespace, seed: int):
        """Takes the mailbox's arrays. Environment i is seeded with seed + i; the seed is reduced modulo 2**30."""
        n = rows_per_group(args)
        self.mailbox = mailbox
        self.rows = slice_of(args, group)
        self.seed = seed % 2**30  # accepted by every engine
        self.envs = make_envs(args, n)
        self.done = np.zeros(n, bool)  # the last step ended an episode, so the next one only resets
        self.sums = np.zeros((n, len(EPISODE)))  # of the running episodes

    def reset(self):
        observation, _ = self.envs.reset(seed=self.seed)
        self.write(observation, reward=0.0, terminated=False, first=True, episode=0.0)

    def step(self):
        action = to_bounds(self.mailbox.action[self.rows], self.envs.single_action_space)
        observation, reward, terminated, truncated, info = self.envs.step(action)
        if not np.isfinite(reward).all():
            raise ValueError(f"a reward is not finite: {reward}")
        first = self.done
        self.done = terminated | truncated
        zeros = np.zeros(len(first))
        extra_metrics = [info.get(name, zeros) for name in EXTRA_METRICS]
        self.sums += np.stack([reward, zeros + 1, *extra_metrics], -1)
        self.sums[first] = 0  # reset-only steps do not count
        episode = np.where(self.done[:, None], self.sums, 0)  # not a product, because a sum may be NaN
        self.write(observation, reward=reward, terminated=terminated, first=first, episode=episode)

    def write(self, observation, **flags):
        for name, part in observation.items():
            self.mailbox.obs[name][self.rows] = part
        for name, value in flags.items():
            getattr(self.mailbox, name)[self.rows] = value


def answer(pipe):
    """Waits for a group's actions. Returns the number of the group, or None if the run has ended."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        return None


def run_actor(args: Args, worker: int, seed: int, mailbox: Mailbox, pipe):
    """Runs an actor. Protocol on its pipe: the number of a group = its rows are written, or its actions are ready;
    a str = an error; EOF = the other side is gone, however it ended."""
    if args.num_workers:  # otherwise this is a thread of the main process
        os.set_inheritable(pipe.fileno(), False)  # child processes of the environment would delay EOF
        # The kernel stops a background process group that uses its terminal, unless it ignores these signals
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (signal.SIGTTIN, signal.SIGTTOU):
            signal.signal(number, signal.SIG_IGN)
        os.setpgrp()  # Ctrl-C goes to the main process alone. (Not setsid: Linux applies `nice` within a session.)
        # Batch systems signal every process. A no-op handler, because children would inherit SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        os.nice(10)  # inference and learning go first: without them, actors only wait
        cores = sorted(os.sched_getaffinity(0))
        if args.num_workers >= len(cores):  # with fewer, other runs may share the machine and pin to the same cores
            os.sched_setaffinity(0, {cores[worker % len(cores)]})  # makes Ant a tenth faster
        seed_generators(seed)
        gym.logger.min_level = gym.logger.ERROR  # the main process has printed the warnings of `make_envs`
    try:
        worker_envs = WorkerEnvs(args, worker, mailbox.share(), seed)
        if not worker:  # one actor prints the warnings of `step`
            gym.logger.min_level = gym.logger.WARN
        with contextlib.closing(worker_envs.envs):
            worker_envs.reset()
            pipe.send(worker)
            while answer(pipe) is not None:
                worker_envs.step()
                pipe.send(worker)
    except BaseException:  # includes sys.exit() in an environment
        with contextlib.suppress(ConnectionError):  # the run has ended
            pipe.send(traceback.format_exc().strip())
    finally:
        pipe.close()
        if args.num_workers:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os.killpg(0, signal.SIGKILL)  # itself, and any children that the environment left


# === Inference ========================================================================================================


def wait_for(device):
    """Waits until the device has done everything in this thread's stream. (Returns at once on a CPU.)"""
    module = torch.get_device_module(device)
    event = module.Event()
    event.record(module.current_stream(device))
    event.synchronize()


def own_stream(device, priority=0):
    """Returns a context manager with a new stream. With priority -1 its kernels do not queue behind a backward
    pass."""
    module = torch.get_device_module(device)
    if device.index is not None:
        module.set_device(device)  # of this thread
    return module.stream(module.Stream(priority=priority))


RECORDING = threading.Lock()  # only one thread at a time may record, replay, or use the device's random numbers


class Operations(TorchDispatchMode):
    """Logs the operations on tensors and their numeric arguments."""

    noted = ""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        numbers = [x for x in tree_leaves((args, kwargs)) if isinstance(x, int | float)]
        self.noted += f"{operation} {numbers}"
        return operation(*args, **(kwargs or {}))


def recorded(function, device):
    """Returns the function as a CUDA graph: one launch instead of hundreds, each of which would wait for the GIL. There
    is one recording for each combination of input shapes. Inputs, which may be on the host, are copied to buffers
    allocated at recording time; outputs use the same memory each time, so the next call overwrites them.

    The function must not wait for the device, copy from the host or have data-dependent shapes. Apart from its
    inputs, it may only use tensors that are modified in place, and Python numbers that never change: the graph has
    their values baked in. To detect a change, calls 4, 8, 16, ... run eagerly, and their operations are compared.
    Raises UserError if the function cannot be recorded."""
    recordings = {}
    pool = torch.cuda.graph_pool_handle()  # shared by all recordings, which run one at a time
    problem = f"{function.__qualname__} cannot be recorded as a CUDA graph (use --no-cuda-graphs): "

    def call(*inputs):
        tensors = tree_leaves(inputs)
        recording = recordings.setdefault(tuple(x.shape for x in tensors), SimpleNamespace(calls=0))
        recording.calls += 1
        with RECORDING:
            if recording.calls == 1:  # warm-up: loads and selects kernels, allocates gradients
                return function(*inputs)
            if recording.calls == 2:
                recording.inputs = tree_map(lambda x: x.to(device, copy=True), inputs)
                recording.graph = torch.cuda.CUDAGraph()
                graph = torch.cuda.graph(recording.graph, pool, torch.cuda.current_stream(device), "thread_local")
                try:
                    with graph, Operations() as recording.operations:
                        recording.outputs = function(*recording.inputs)
                except RuntimeError as error:
                    raise UserError(f"{problem}{error.__context__ or error}") from None
            for buffer, x in zip(tree_leaves(recording.inputs), tensors):
                buffer.copy_(x, non_blocking=True)
            if recording.calls == 2 or recording.calls & recording.calls - 1:  # calls 4, 8, 16, ... are checked below
                recording.graph.replay()
                return recording.outputs
            with Operations() as operations:
                outputs = function(*recording.inputs)
            if operations.noted != recording.operations.noted:
                raise UserError(f"{problem}it uses a number that changes; pass that number as an input tensor")
            return outputs

    return call


SILENCE = 60  # seconds after which a worker that has not answered is reported


class Inference:
    """Serves all waiting groups at once. Owns the recurrent state and the FILLING slot of every row, and holds the
    memory, the pipes and the queue between itself, the actors and the learner.

    It acts with the learner's own network. Whoever acts with the network or changes it holds the lock until the device
    is done, so no action comes from half an update. The learner computes the loss and its gradient without the lock,
    because nobody else changes the network. Before a block changes hands, the host waits until the device has finished
    with it, so the two streams need no events."""

    def __init__(self, args: Args, spaces: Spaces, agent: Agent, device: torch.device):
        self.args = args
        self.spaces = spaces
        self.device = device
        self.agent = agent
        self.version = 0  # of the agent
        self.lock = threading.Lock()  # of the agent
        groups = max(1, args.num_workers)
        blocks = [slice_of(args, i) for i in range(num_blocks(args))]
        self.shared_mailbox = Mailbox(spaces, args.num_envs)
        self.mailbox = self.shared_mailbox.share()  # views of the same memory
        self.rollouts = Rollouts(spaces, args.rollout, blocks[-1].stop, agent.state_size, device)
        self.state = torch.zeros(args.num_envs, agent.state_size, device=device)
        self.filling = dict(enumerate(blocks[:groups]))  # by group; a group without one waits for a FREE block
        self.t = np.zeros(groups, int)  # steps in the FILLING block of each group
        self.free = deque(blocks[groups:])
        self.full = queue.SimpleQueue()  # blocks to the learner
        self.error = None  # the error, or KeyboardInterrupt, that ends the run
        self.returned, self.learner_pipe = mp.Pipe(duplex=False)  # free blocks; closing it ends the thread
        self.pipes = [None] * groups  # to the actors, set by `running`
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.returned, selectors.EVENT_READ)
        self.requests = []  # groups waiting for actions, oldest first; this thread owns their rows
        self.heard = np.full(groups, time.monotonic())  # time of the last reply to each worker
        self.episodes = deque(maxlen=100)  # the last finished episodes, see EPISODE
        self.counts = Counter()  # rows served, and forward passes
        self.waited = Counter()  # seconds that this thread and the learner waited, by cause
        if args.cuda_graphs:
            self.choose = recorded(self.choose, device)

    def run(self):
        """Runs in its own thread. The busier it is, the more groups wait, and the larger its batches become."""
        try:
            with torch.inference_mode(), own_stream(self.device, priority=-1):
                while not self.learner_pipe.closed:
                    self.serve()
                    waiting_for = "blocks" if self.requests else "requests"
                    start = time.perf_counter()
                    events = self.selector.select(timeout=1)
                    self.waited[waiting_for] += time.perf_counter() - start
                    for key, _ in events:
                        self.receive(key.fileobj)
                    self.notice_silence()
        except BaseException as error:
            self.end_with(error)

    def end_with(self, error):
        """Ends the run: `Learner.collect` raises the first error at its next call, even if FULL blocks wait."""
        self.error = self.error or error
        self.full.put(None)

    def next_full(self):
        """Waits for a FULL block and returns it. Until the first iteration, prints every 5 seconds how many
        environments have started."""
        while not self.waited["learner"]:
            with contextlib.suppress(queue.Empty):
                return self.full.get(timeout=5)
            started = np.isfinite(self.mailbox.reward)
            steps = self.counts["rows"]
            tqdm.write(f"{started.sum()} of {started.size} environments have started, {steps:,} steps collected")
        return self.full.get()

    def notice_silence(self):
        """Reports workers that have not answered for a minute."""
        for worker in np.flatnonzero(time.monotonic() - self.heard > SILENCE):
            if self.args.num_workers and worker not in self.requests:
                self.heard[worker] += SILENCE
                tqdm.write(f"worker {worker} has not answered for {SILENCE} s: its environments are slow or stuck")

    def receive(self, pipe):
        """Receives a group's request, or blocks from the learner: LEARNING -> FREE. Raises UserError if an actor's
        death ends the run."""
        if pipe is self.returned:
            with contextlib.suppress(EOFError):  # `learner_pipe` was closed
                self.free.extend(pipe.recv())
            return
        worker = self.pipes.index(pipe)
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            raise UserError(f"actor {worker} was killed, or crashed") from None
        if isinstance(message, str):
            raise UserError(f"actor {worker} raised an exception\n{message}")
        self.requests.append(message)

    def serve(self):
        """Hands complete blocks to the learner, then answers all groups that have a block or get a new one. The others
        keep waiting until a block is FREE."""
        complete = [group for group in self.requests if self.t[group] == self.args.rollout]
        if complete:  # their observations are stored twice: as obs[T] of this block, below as obs[0] of the next
            self.store_obs(*self.store(complete))
            wait_for(self.device)  # the learner uses another stream, and must find these blocks written
            for group in complete:
                self.full.put(self.filling.pop(group))  # FILLING -> FULL
                self.t[group] = 0
        for group in self.requests:
            if group not in self.filling and self.free:  # FREE -> FILLING
                self.filling[group] = self.free.popleft()
                self.rollouts.rnn_state[0, self.filling[group]] = self.state[slice_of(self.args, group)]
        ready = [group for group in self.requests if group in self.filling]
        if ready:
            self.act(ready)
        self.requests = [group for group in self.requests if group not in ready]
        for group in ready:
            self.heard[group] = time.monotonic()
            with contextlib.suppress(ConnectionError):  # the actor died; `receive` will notice
                self.pipes[group].send(group)

    def store(self, groups: list[int]):
        """Copies rewards and flags of the groups' mailbox rows to the rollouts. Returns the observations by name
        [1, N, ...], and int64 [4, N]: row, time, slot and `first` of each."""
        mailbox = self.mailbox
        rollouts = self.rollouts
        rows = np.r_[*(slice_of(self.args, group) for group in groups)]
        slots = np.r_[*(self.filling[group] for group in groups)]
        t = self.t[groups].repeat(rows_per_group(self.args))
        first = mailbox.first[rows]
        rollouts.first[t, slots] = first
        # At t = 0 these belong to the previous block, which has them already; row -1 is overwritten at t = T
        rollouts.rewards[t - 1, slots] = mailbox.reward[rows]
        rollouts.terminated[t - 1, slots] = mailbox.terminated[rows]
        obs = {name: torch.from_numpy(source[None, rows]) for name, source in mailbox.obs.items()}
        return obs, torch.from_numpy(np.stack([rows, t, slots, first]))

    def store_obs(self, obs, indices):
        """Copies the results of `store` to the device and the observations to the rollouts. Returns both, on the
        device."""
        indices = indices.to(self.device, non_blocking=True)
        obs = {name: part.to(self.device, non_blocking=True) for name, part in obs.items()}
        _, t, slots, _ = indices
        for name, field in self.rollouts.obs.items():
            if field.is_cpu:  # torch's indexing takes ten times as long there
                field.numpy()[t.numpy(), slots.numpy()] = obs[name].numpy()
            else:
                field[t, slots] = obs[name]
        return obs, indices

    def act(self, groups: list[int]):
        """Stores the rows of the groups and chooses their next actions."""
        obs, indices = self.store(groups)
        rows, t, slots, _ = indices.numpy()
        with self.lock:
            actions = self.choose(obs, indices)
            self.mailbox.action[rows] = actions.cpu().numpy()  # waits for the device: the lock must be held until then
            self.rollouts.versions[t, slots] = self.version
        self.t[groups] += 1
        episodes = self.mailbox.episode[rows]
        self.episodes.extend(episodes[episodes.any(axis=1)].tolist())
        self.counts["rows"] += len(rows)
        self.counts["forwards"] += 1

    def choose(self, obs, indices):
        """The device's part of `act`, with the results of `store`. Returns actions [N, action_size]."""
        rollouts = self.rollouts
        obs, (rows, t, slots, first) = self.store_obs(obs, indices)
        gaussians, values, self.state[rows] = self.agent(obs, first.bool()[None], self.state[rows])
        actions = sample_actions(gaussians[0])
        rollouts.actions[t, slots] = actions
        rollouts.logprobs[t, slots] = log_prob(gaussians[0], actions)
        rollouts.values[t, slots] = values[0]
        return actions


# === Learner ==========================================================================================================


class Learner:
    """Takes the FULL blocks of one iteration at a time and improves the policy."""

    def __init__(self, args: Args, inference: Inference):
        self.args = args
        self.spaces = inference.spaces  # for a second network, such as one for a curiosity reward
        self.inference = inference
        self.agent = inference.agent
        self.device = inference.device
        self.optimizer = torch.optim.Adam(self.agent.parameters(), args.learning_rate, eps=1e-6, fused=True)
        if args.cuda_graphs:
            self.differentiate = recorded(self.differentiate, self.device)
        self.global_step = 0  # number of valid transitions learned from

    def collect(self) -> list[slice]:
        """Waits for the blocks of an iteration: FULL -> LEARNING. Raises the error of the inference thread, or
        KeyboardInterrupt after a signal."""
        start = time.perf_counter()
        blocks = []
        for _ in self.inference.pipes:  # as many as there are workers; a fast worker may contribute several
            blocks.append(self.inference.next_full())
            if self.inference.error:
                raise self.inference.error
        self.inference.waited["learner"] += time.perf_counter() - start
        return blocks

    def iterate(self, blocks: list[slice]):
        """Learns from the blocks of an iteration, which stay LEARNING until the iteration's last optimizer step.
        Returns the metrics of that step."""
        args = self.args
        rollouts = self.inference.rollouts
        slots = np.r_[*blocks]
        valid = ~rollouts.first[1:, slots]
        # Where agents fall within tens of steps, much noise costs little; in a long episode it may ruin the rest. Both
        # numbers: benchmark/HISTORY.md, MuJoCo
        if args.initial_stddev is None and self.inference.version == 0:
            terminated = torch.from_numpy(rollouts.terminated[:, slots])
            if masked_mean(terminated, torch.from_numpy(valid)) > 1 / 100:
                with self.inference.lock:
                    nn.init.zeros_(self.agent.log_std)
                    wait_for(self.device)
        lags = (self.inference.version - rollouts.versions[:, slots])[valid]
        learning_rate = args.learning_rate
        if args.anneal_lr:
            learning_rate *= 1 - self.global_step / args.total_timesteps
        self.optimizer.param_groups[0]["lr"] = learning_rate
        num_batches = np.clip(round(len(slots) * args.rollout / args.batch_size), 1, len(slots))
        for epoch in range(args.num_epochs):
            shuffled = slots[torch.randperm(len(slots)).numpy()]
            for batch in np.array_split(shuffled, num_batches):
                metrics = self.update(self.gather(batch), last_epoch=epoch == args.num_epochs - 1)
        self.global_step += len(lags)
        metrics = dict(zip(metrics, torch.stack(list(metrics.values()))))  # a copy: a recording overwrites its outputs
        self.inference.learner_pipe.send(blocks)  # LEARNING -> FREE: the last `wait_for` covered all reads
        return metrics | {
            "charts/learning_rate": learning_rate,
            "lag/mean": lags.sum() / max(1, len(lags)),
            "lag/max": lags.max(initial=0),
        }

    def gather(self, slots: np.ndarray) -> SimpleNamespace:
        """Returns a batch: copies of these slots of all fields of Rollouts, on the device."""
        d_slots = torch.from_numpy(slots).to(self.device)

        def take(field):
            if isinstance(field, np.ndarray):
                return torch.from_numpy(field[:, slots]).to(self.device, non_blocking=True)
            return field.index_select(1, d_slots)

        return SimpleNamespace(**tree_map(take, vars(self.inference.rollouts)))

    def differentiate(self, batch: dict):
        """The device's part of `update` before the optimizer step: the loss and its clipped gradient. Returns the
        targets, the metrics, and a tensor of the loss and the gradient norm."""
        loss, targets, metrics = appo_loss(self.args, self.agent, SimpleNamespace(**batch))
        self.optimizer.zero_grad(set_to_none=not self.args.cuda_graphs)  # a recording accumulates in place
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.agent.parameters(), self.args.max_grad_norm or torch.inf)
        return targets, metrics | {"losses/grad_norm": grad_norm}, torch.stack([loss.detach(), grad_norm])

    def update(self, batch: SimpleNamespace, last_epoch: bool):
        """Takes one optimizer step, a new version. Returns metrics. Raises FloatingPointError if loss or gradient is
        not finite."""
        targets, metrics, checked = self.differentiate(vars(batch))
        loss, grad_norm = checked.tolist()
        # This check waits for the device, so nothing broken is published or saved, and inference never waits at the
        # lock for a backward pass.
        if not np.isfinite(loss + grad_norm):
            raise FloatingPointError(
                f"the loss ({loss}) or its gradient is not finite: check observations and rewards, "
                "or try a lower --learning-rate or --max-grad-norm"
            )
        valid = ~batch.first[1:]
        start = int(torch.randint(min(4, len(valid)), ()))  # every fourth step is enough: neighbours hardly differ
        with self.inference.lock:
            if last_epoch:  # count each rollout once
                for name, normalizer in self.agent.normalizers.items():
                    normalizer.update(batch.obs[name][start:-1:4], valid[start::4])
            self.optimizer.step()
            if last_epoch:
                self.agent.critic.update(targets, valid)
            self.inference.version += 1
            wait_for(self.device)
        return metrics


# A first reading ends here.


# === Run ==============================================================================================================

# How a run ends
# 1. The cause:
#    - the last step: the loop in `train` ends;
#    - Ctrl-C, SIGTERM, SIGHUP: `handler` -> `Inference.end_with` -> `Learner.collect` raises KeyboardInterrupt (a
#      second signal more than a second later exits at once; the actors see EOF, as after kill -9);
#    - an actor dies, or an environment raises: `Inference.receive` gets EOF, or the traceback that `run_actor` sends,
#      and raises UserError -> `Inference.run` -> `end_with` -> `collect` raises it;
#    - any other error in the inference thread: `run` -> `end_with` -> `collect` raises it;
#    - an error in the learner: it propagates.
# 2. `train` saves and reports. Leaving `running` ends the inference thread and closes the pipes.
# 3. In each actor `answer` returns None; `run_actor` closes the environments and kills its process group.

SIGNALS = [signal.SIGINT, signal.SIGTERM]
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
    SIGNALS.append(signal.SIGHUP)
AT_LEAST = dict(num_workers=0, seed=0, initial_stddev=1e-3)  # otherwise 1 for integers, 0 for floats
FIXED = ("env_id", "rnn_type", "hidden_size")  # a resumed run must have the same


def check(args: Args):
    """Raises UserError."""
    for name, value in asdict(args).items():
        least = AT_LEAST.get(name, int(type(value) is int))
        if isinstance(value, int | float) and not value >= least:  # also rejects NaN
            raise UserError(f"--{name.replace('_', '-')} {value} is out of range: at least {least}")
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:  # the message has several lines
        raise UserError(f"--device {args.device}: {str(error).splitlines()[0]}") from None


def seed_generators(seed: int):
    """Seeds the global generators. In an actor only its environments may use them; unseeded, they would draw the same
    numbers in every actor."""
    seed %= 2**32  # the range that NumPy accepts
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def handle_signals(inference: Inference):
    """Turns signals into a message to the learner, so that no update is interrupted. The fork server starts while
    signals are ignored and inherits that, as does an actor until it has its own process group. Called after
    `spaces_of`, because an environment's module may set handlers of its own."""
    times = []

    def handler(*_):
        times.append(time.monotonic())
        if times[-1] - times[0] > 1:  # launchers and shells may send the first signal twice
            os._exit(130)
        inference.end_with(KeyboardInterrupt())

    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if inference.args.num_workers:
        os.environ["OMP_NUM_THREADS"] = "1"  # for actors: otherwise a NumPy product takes all cores
        forkserver.set_forkserver_preload(["numpy", "torch", "gymnasium", "tyro", "tqdm", "envpool"])
        forkserver.ensure_running()
    for number in SIGNALS:
        signal.signal(number, handler)


def lock(folder: Path):
    """Locks the folder for as long as this process lives. Raises UserError if another run uses it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)  # never closed, because closing releases the lock
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another run is using {folder}: stop it, or choose another --experiment") from None
    except OSError:  # the file system does not support locks
        pass


@contextlib.contextmanager
def running(inference: Inference):
    """Runs the inference thread and the actors. Their seeds depend on the version, so that a resumed run sees other
    episodes."""
    args = inference.args
    thread = threading.Thread(target=inference.run, name="inference", daemon=True)
    # fork is unsafe with threads and CUDA; spawn costs 100 MB per actor
    process_or_thread = mp.get_context("forkserver").Process if args.num_workers else threading.Thread
    actors = {}

    def start(worker):
        inference.pipes[worker], pipe = mp.Pipe()
        inference.selector.register(inference.pipes[worker], selectors.EVENT_READ)
        seed = random.Random(f"{args.seed} {inference.version} {worker}").getrandbits(30)
        arguments = (args, worker, seed, inference.shared_mailbox, pipe)
        actor = process_or_thread(target=run_actor, args=arguments, daemon=True)
        actor.start()
        actors[worker] = actor
        if args.num_workers:
            pipe.close()  # now only the actor has it: EOF when it dies

    try:
        for worker in range(len(inference.pipes)):
            start(worker)
        thread.start()
        yield
    finally:
        inference.learner_pipe.close()
        if thread.is_alive():
            thread.join(10)
        for pipe in filter(None, inference.pipes):
            pipe.close()
        deadline = time.monotonic() + 5
        for worker, actor in actors.items():
            actor.join(max(0.0, deadline - time.monotonic()))
            if actor.is_alive():
                print(f"worker {worker} did not end within 5 s: its environments are slow or stuck")
            if args.num_workers:
                actor.kill()
                with contextlib.suppress(OSError):  # it no longer exists
                    os.killpg(actor.pid, signal.SIGKILL)  # children of a killed actor's environments


def save_checkpoint(folder: Path, learner: Learner):
    """Writes latest.pth: tensors and plain values, under a temporary name first, so that it is complete or absent."""
    content = dict(
        agent=learner.agent.state_dict(),
        optimizer=learner.optimizer.state_dict(),
        version=learner.inference.version,
        global_step=learner.global_step,
    )
    buffer = io.BytesIO()  # torch.save hides OSError (a full disk)
    torch.save(content, buffer)
    (folder / "saving.tmp").write_bytes(buffer.getbuffer())
    os.replace(folder / "saving.tmp", folder / "latest.pth")


def read_checkpoint(folder: Path):
    """Returns the content of the checkpoint, or None if there is none."""
    path = folder / "latest.pth"
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def load_checkpoint(folder: Path, learner: Learner):
    """Restores the learner. Raises UserError if the checkpoint is damaged or belongs to another network."""
    try:
        content = read_checkpoint(folder)
        if content is None:
            return
        learner.agent.load_state_dict(content["agent"])
        learner.optimizer.load_state_dict(content["optimizer"])
        learner.inference.version = content["version"]
        learner.global_step = content["global_step"]
    except Exception as error:  # of any type, often with many lines
        what = " ".join(str(error).split()).split(". ")[0]
        raise UserError(
            f"{folder}/latest.pth is damaged or belongs to another network; move it away to start over ({what})"
        ) from None


class Reporter:
    """Updates the progress bar and TensorBoard. Rates are averages since the last report."""

    SECONDS = 5  # between two reports

    def __init__(self, args: Args, learner: Learner, folder: Path):
        """Create it before the inference thread starts: waiting times count from here on."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only needed here

        sizeless = sys.stderr.isatty() and 0 in os.get_terminal_size(sys.stderr.fileno())  # tqdm would draw nothing
        self.learner = learner
        self.writer = SummaryWriter(str(folder), flush_secs=10, purge_step=learner.global_step + 1)
        self.writer.add_text("args", json.dumps(asdict(args), indent=2))
        self.bar = tqdm(
            total=args.total_timesteps,
            initial=learner.global_step,
            dynamic_ncols=True,
            disable=sizeless or not args.num_workers or None,  # off in a debugger; None: off without a terminal
            smoothing=0,
            bar_format="{percentage:.0f}% {bar} {remaining}{postfix}",
        )
        self.score = "no episode has ended"
        self.last = Counter(seconds=time.monotonic(), steps=learner.global_step)

    def update(self, metrics):
        """Called with the metrics of every iteration. Reports every `SECONDS`."""
        self.metrics = metrics
        self.bar.update(min(self.learner.global_step, self.bar.total) - self.bar.n)
        if time.monotonic() - self.last["seconds"] >= self.SECONDS:
            self.report()

    def report(self):
        inference = self.learner.inference
        counts = {**inference.counts, **inference.waited}  # copied at once: the inference thread may add keys
        now = Counter(counts, seconds=time.monotonic(), steps=self.learner.global_step)
        change = now - self.last
        self.last = now
        seconds = change["seconds"]
        sps = change["steps"] / seconds
        waits = change["learner"] / seconds
        scalars = self.metrics | {
            "charts/SPS": sps,
            "stats/learner_wait": waits,  # fraction of the time: the learner had no FULL block
            "stats/inference_idle": change["requests"] / seconds,  # inference had no requests
            "stats/inference_blocked": change["blocks"] / seconds,  # it had requests but no FREE block
            "stats/inference_batch": change["rows"] / max(1, change["forwards"]),  # rows served together
        }
        if episodes := inference.episodes.copy():
            scalars |= zip((f"charts/{name}" for name in EPISODE), np.mean(episodes, axis=0))
            self.score = f"return {scalars['charts/episodic_return']:.2f}"
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, self.learner.global_step)
        text = f"{self.score}, {sps:,.0f} steps/s, learner waits {waits:.0%}, lag {self.metrics['lag/mean']:.1f}"
        self.bar.set_postfix_str(text)
        if self.bar.disable:  # no terminal, or a debugger
            print(f"step {self.learner.global_step:,}: {text}", flush=True)

    def close(self):
        """Makes a last report."""
        if self.learner.global_step > self.last["steps"]:
            self.report()
        self.bar.close()
        self.writer.close()


def train(args: Args, folder: Path) -> int:
    """Trains, and returns the exit code: 0, or 130 if a signal stopped the run."""
    check(args)
    device = torch.device(args.device)
    torch.backends.cudnn.allow_tf32 = False  # no TF32: mu and pi must agree at lag 0
    torch.set_num_threads(max(1, num_cores() // 2))  # half for the learner, half for inference
    seed_generators(args.seed)
    spaces = spaces_of(args)
    agent = Agent(spaces, args).to(device)
    inference = Inference(args, spaces, agent, device)
    learner = Learner(args, inference)
    lock(folder)
    load_checkpoint(folder, learner)
    if learner.global_step >= args.total_timesteps:
        print("Already complete: raise --total-timesteps to continue.")
        return 0
    place = f"resuming {folder} at step {learner.global_step:,}" if learner.global_step else f"a new run in {folder}"
    cores = num_cores()
    print(f"{args.env_id}: {args.num_workers} workers on {cores} cores, {args.num_envs} environments")
    print(place, flush=True)
    if args.typed["num_workers"] is None and args.num_workers < cores:
        print(f"for a worker on each core: --num-envs {max(1, round(args.num_envs / cores)) * cores}")
    wait_for(device)  # everything above used the default stream; learner and inference use their own
    (folder / "cfg.tmp").write_text(json.dumps(dict(file=__file__, args=args.typed), indent=2))
    os.replace(folder / "cfg.tmp", folder / "cfg.json")
    handle_signals(inference)
    reporter = Reporter(args, learner, folder)
    code = 0
    with running(inference), own_stream(device):
        saved_at = time.monotonic()
        try:
            while learner.global_step < args.total_timesteps:
                reporter.update(learner.iterate(learner.collect()))
                if time.monotonic() - saved_at >= args.save_every_sec:
                    save_checkpoint(folder, learner)
                    saved_at = time.monotonic()
        except KeyboardInterrupt:
            code = 130
        finally:
            # Skip if nothing was learned, or if the last step may have corrupted the weights
            if learner.global_step and not isinstance(sys.exception(), FloatingPointError):
                save_checkpoint(folder, learner)
            reporter.close()
    print(f"{'stopped' if code else 'done'}: {learner.global_step:,} steps, {reporter.score}")
    if learner.global_step:
        place = shlex.quote(str(folder))
        print(f"play: python evaluate.py {place} --env-id {shlex.quote(args.env_id)}")
        print(f"curves: tensorboard --logdir {place}")
    more = " and a larger --total-timesteps" if learner.global_step >= args.total_timesteps else ""
    print(f"continue: the same command with --experiment {shlex.quote(args.experiment)}{more}")
    return code


def saved_args(folder: Path) -> Args:
    """Returns the flags of the experiment to resume. Raises UserError if cfg.json is not valid."""
    path = folder / "cfg.json"
    try:
        cfg = json.loads(path.read_text())
        check_type(cfg["args"], TypedDict("flags", get_type_hints(Args)))
        if Path(cfg["file"]).name != Path(__file__).name:
            raise UserError(f"{folder} is a run of another file: {cfg['file']}")
        return Args(**cfg["args"])
    except (ValueError, LookupError, TypeError, TypeCheckError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is damaged or was written by another version of this file: {reason}") from None


def parse_args() -> tuple[Args, Path]:
    """Returns the flags and the run's folder. Raises UserError."""
    sys.path.append(os.getcwd())  # so that --env-id can name a module here
    # Write 1e6 as 1000000, which int() accepts
    words = [f"{float(w):.0f}" if re.fullmatch(r"\d+(\.\d)?e[1-9]", w) else w for w in sys.argv[1:]]
    args = tyro.cli(Args, args=words)
    if args.experiment is None:
        name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{int(time.time())}_{os.getpid()}"
        args.experiment = args.typed["experiment"] = re.sub("[/:]", "-", name)
    if "/" in args.experiment or not args.experiment.strip("."):
        raise UserError(f"--experiment {args.experiment!r} is not the name of a folder in {args.train_dir}")
    folder = Path(args.train_dir, args.experiment).absolute()  # an environment may change the working directory
    if (folder / "cfg.json").exists():  # keep its flags, except those typed now
        saved = saved_args(folder)
        if ":" in saved.env_id and args.env_id != saved.env_id:  # a run's folder must not decide which code runs
            raise UserError(f"type --env-id {saved.env_id} again: it imports a module")
        saved.typed |= dict(train_dir=args.train_dir, experiment=args.experiment)  # its present location
        vars(saved).update(saved.typed)  # otherwise tyro would treat derived values as typed
        args = tyro.cli(Args, args=words, default=saved)
        for name, before in saved.typed.items():
            now = args.typed[name]
            if now != before:
                if name in FIXED:
                    raise UserError(f"{folder} was made with {name} {before}, not {now}: choose another --experiment")
                print(f"override: {name} {before} -> {now}")
    elif next(folder.rglob("*.pth"), None):
        raise UserError(f"{folder} has a checkpoint, but no cfg.json: choose another --experiment")
    return args, folder


def main() -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as in a daemon
            setattr(sys, name, open(os.devnull, "w"))
            os.set_inheritable(getattr(sys, name).fileno(), True)
    try:
        args, folder = parse_args()
        return train(args, folder)
    except (UserError, FloatingPointError, OSError, gym.error.Error, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
