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
# ]
# ///
# appo_gym.py $Id$
"""Asynchronous PPO with V-trace for Gymnasium environments of discrete actions: the whole pipeline of Sample Factory /
IMPALA in one file, and the base that the other files are edits of.

    python appo_gym.py --env-id CartPole-v1
    python appo_gym.py --env-id minigrid:MiniGrid-Empty-8x8-v0
    python appo_gym.py --env-id my_module:MyEnv-v0    # one of your own, which importing my_module registers
    python evaluate.py train_dir/NAME    # plays what the run of that name has learned

On 2 cores of an AMD EPYC (Zen 4, no GPU) CartPole-v1 is solved (a mean return of 475) after 68 to 82 thousand steps,
Acrobot-v1 (-100) after 57 to 80, LunarLander-v3 (200; pip install "gymnasium[box2d]") after 348 to 625: five seeds
each, 2026-11-29, benchmark/results/gym_learning.csv.

     actor process w = 0..W-1  (CPU only)              main process (owns the accelerator)
     +-------------------------------+      request       +------------------------------------------+
     | step its environments         | -----------------> | inference thread                         |
     | write obs, reward, ... into   |                    |   copy the rows of all waiting workers   |
     | its rows of the mailbox       | <----------------- |   into the rollouts, forward, sample,    |
     |                               |       reply        |   write actions into the mailbox         |
     +-------------------------------+                    +------------------------------------------+
                                                             | full blocks               ^ free blocks
                                                          +------------------------------------------+
                                                          | learner (main thread)                    |
                                                          |   V-trace, PPO steps on the same network |
                                                          |   that acts: version v+1, v+2, ...       |
                                                          +------------------------------------------+
     block:  FREE -> FILLING (by one worker) -> FULL -> LEARNING -> FREE     exactly one owner at any time

Where to edit: the environment and a wrapper in `make_envs` (one more part of an observation needs no other edit), a
metric in `OWN_SUMS`, the network and a mask of actions in `Agent`, a loss and what it needs in `appo_loss`; a reward of
your own in `Learner.update`, before the loss (`batch` is a copy); another optimiser or a second network in `Learner`,
and then in `save_checkpoint` and `load_checkpoint`. With --cuda-graphs the network and the loss keep to what `recorded`
asks.

Words: a *worker* is one actor process with its environments. A *row* is one environment's endless stream of experience;
a worker's rows ask for actions together. A *slot* is room for one rollout (T steps of one row), a *block* is the slots
of a worker's rows. In an *iteration* the learner takes as many blocks as there are workers, passes `num_epochs` times
over their rollouts in *batches* of about `batch_size` samples, each an optimiser step, and gives the blocks back. A
*step* is one decision of the agent. Every optimiser step makes a *version* of the policy; the *lag* of a sample is the
newest version minus the one that chose its action.

One rule about time, from which everything follows. Environments reset on the step AFTER an episode ends (Gymnasium's
NEXT_STEP): the step that ends an episode returns its last observation, the action chosen there is ignored, and the next
observation is the first of the next episode. So two flags say all there is to know:

    first[t]       obs[t] is the first of an episode: the recurrent state is zeroed before obs[t] enters it
    terminated[t]  action t ended the episode for good: the discount of step t is gamma * (1 - terminated[t])

and a transition t -> t+1 is valid iff not first[t+1]. An invalid one (the ignored action) cuts the V-trace trace and is
left out of every loss, mean and step count. A time limit needs no flag of its own: its last step bootstraps from the
value of the true last observation.
"""

import signal
import sys

if __name__ == "__main__":  # the imports take seconds: Ctrl-C ends them without a traceback
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

# === Args =============================================================================================================


class UserError(Exception):
    """Something the user can fix: its text is printed, without a traceback of ours."""


def num_cores() -> int:
    """Cores that this process may use. (A container's quota is not looked at.)"""
    return len(os.sched_getaffinity(0))


@dataclass
class Args:
    """Asynchronous PPO with V-trace for Gymnasium environments of discrete actions."""

    # --- run
    env_id: str = "CartPole-v1"
    """a Gymnasium environment by its name; for `module:name` the module, which registers it, is imported first"""
    seed: int = 1  # of the network, of the action sampling and of the environments
    total_timesteps: int = 1_000_000  # stop after this many steps
    device: str = "cpu"  # cpu, cuda, or cuda:1 (the second GPU): a GPU pays for images, not for two small layers
    cuda_graphs: bool = False
    """with CUDA: what chooses actions, and what computes gradients, is recorded for each size of a batch: then each is
    one launch"""
    experiment: str | None = None  # the run's folder below train_dir; an existing one is resumed. Default: a fresh one
    train_dir: str = "train_dir"  # where experiments are kept
    save_every_sec: float = 120.0  # seconds between checkpoints

    # --- sampling
    num_envs: int = 32  # environments, which the workers share out evenly; learning depends on these, not on workers
    num_workers: int | None = None
    """actor processes; None: the largest number that divides num_envs and is at most one a core, with CUDA two (one
    steps while the other waits for actions); 0 runs one as a thread, for debugging, and implies --sync"""
    sync: bool = False  # collect only while the learner waits: each iteration begins with lag 0, as in synchronous PPO

    # --- algorithm
    rollout: int = 32  # steps per rollout (T)
    batch_size: int = 256  # samples per optimiser step, about: a batch is of whole rollouts
    num_epochs: int = 4  # passes over an iteration's rollouts; with --sync pi/mu is 1 in the first optimiser step
    learning_rate: Annotated[float, tyro.conf.arg(aliases=["--lr"])] = 2e-3  # of Adam
    anneal_lr: bool = False  # the learning rate falls linearly with the steps, to 0 at total_timesteps
    gamma: float = 0.99  # discount per step
    vtrace_rho: float = 1.0  # V-trace's clip of the importance weight of a temporal difference (rho bar)
    vtrace_c: float = 1.0  # V-trace's clip of the trace (c bar)
    vtrace_lambda: float = 0.95  # decay of the trace, as in GAE; 1 is the V-trace of the paper
    clip_coef: float = 0.2  # PPO: the ratio is clipped to [1/(1+e), 1+e]
    ppo_clip_value: float = 0.2
    """PPO: how far the value may move from the one at acting time, in standard deviations of the targets"""
    vf_coef: float = 0.5  # coefficient of the value loss (the error is in standard deviations of the targets)
    ent_coef: float = 0.01  # coefficient of the entropy, which is rewarded
    max_grad_norm: float = 4.0  # gradients are scaled down to this norm; 0 turns it off
    rnn_type: Literal["gru", "none"] = "none"  # the recurrent core
    hidden_size: int = 256  # units of an image encoder's last layer and of the recurrent core
    vector_size: int = 64  # units of each of the two layers for vectors

    def __post_init__(self):
        self.typed = asdict(self)  # for cfg.json: each machine fills in the rest for itself
        self.cuda_graphs &= self.device.startswith("cuda")
        if self.num_workers is None:
            most = num_cores() * (1 if self.device == "cpu" else 2)
            self.num_workers = max(n for n in range(1, most + 1) if self.num_envs % n == 0)


# === Environment ======================================================================================================

# Names of numbers in the environment's `info` that are to be summed over each episode, and reported, too
OWN_SUMS = ()
# What is summed over each episode, and reported as the mean over the last 100: the reward, 1 a step, and these
EPISODE = ("episodic_return", "episodic_length", *OWN_SUMS)

NUMERIC_SPACES = (Box, Discrete, MultiDiscrete, MultiBinary)
IMAGE_SIDE = 36  # an image has two sides of at least this length: less is too little for `image_encoder`


def parts_of(space, observation, name="obs"):
    """Of each part of an observation: its name (`obs`, or in a Dict or Tuple obs/KEY), its space, and itself."""
    if isinstance(space, (Dict, Tuple)):
        for key, part in space.items() if isinstance(space, Dict) else enumerate(space):
            yield from parts_of(part, observation[key], f"{name}/{key}".replace(".", ":"))  # a module's name has no dot
    else:
        yield name, space, observation


def as_array(name, space, part):
    """A uint8 array with just two long sides is an image: it becomes [height, width, channels], wherever its sides
    stood; what other axes it has, such as a stack of frames, are channels. Other numbers become a float32 vector;
    `flatten` makes a choice one-hot."""
    if np.shape(part) != space.shape:
        raise ValueError(f"the observation's part {name} has shape {np.shape(part)}, but its space is {space}")
    if not isinstance(space, Box):
        return flatten(space, part).astype(np.float32)
    if space.dtype == np.uint8:
        sides = [axis for axis, length in enumerate(space.shape) if length >= IMAGE_SIDE]
        if len(sides) == 2:
            image = np.moveaxis(part, sides, (0, 1))
            return image.reshape(*image.shape[:2], -1)
    return np.asarray(part, np.float32).ravel()


def heads_of(space):
    """A tuple: the number of actions of each independent head; () for a space that is not of choices."""
    if isinstance(space, MultiBinary):
        return (2,) * flatdim(space)
    sizes = getattr(space, "nvec", getattr(space, "n", ()))  # of a MultiDiscrete, of a Discrete
    return tuple(np.ravel(sizes).astype(int).tolist())


class NamedArrays(gym.Wrapper):
    """An environment as the pipeline takes it: observations are a Dict of arrays, actions an array of one number for
    each head, from 0 on. Texts and graphs are left out of observations, with a warning."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.env_observation_space = env.observation_space  # kept: each time it is asked for, all wrappers are asked
        self.env_action_space = env.action_space
        spaces = {}
        for name, space, _ in parts_of(env.observation_space, env.observation_space):
            if not isinstance(space, NUMERIC_SPACES):
                gym.logger.warn(f"{name} is left out of the observation: {space}")
                continue
            array = as_array(name, space, np.zeros_like(space.low) if isinstance(space, Box) else space.sample())
            if array.ndim == 1 and array.size >= IMAGE_SIDE**2:
                gym.logger.warn(
                    f"{name} becomes {array.size} numbers: an image is uint8, with just two sides of 36 or more"
                )
            low, high = (0, 255) if array.dtype == np.uint8 else (-np.inf, np.inf)
            spaces[name] = Box(low, high, array.shape, array.dtype.type)
        self.observation_space = Dict(spaces)
        if heads := heads_of(env.action_space):
            self.action_space = MultiDiscrete(heads)

    def arrays(self, observation):
        parts = parts_of(self.env_observation_space, observation)
        return {name: as_array(name, space, part) for name, space, part in parts if isinstance(space, NUMERIC_SPACES)}

    def reset(self, **options):
        observation, _ = self.env.reset(**options)
        return self.arrays(observation), {}

    def step(self, action: np.ndarray):
        space = self.env_action_space
        action = action.reshape(space.shape).astype(space.dtype)[()]  # [()]: a number, where it is one
        action = action + getattr(space, "start", 0)
        observation, *outcome, info = self.env.step(action)
        reward, terminated, truncated = (np.asarray(value).item() for value in outcome)  # some are arrays of one number
        own_sums = {name: np.asarray(info[name]).item() for name in OWN_SUMS if name in info}
        return self.arrays(observation), reward, terminated, truncated, own_sums


def make_envs(args: Args, num_envs: int, **options) -> gym.vector.VectorEnv:
    """The environments of one worker; options are for gymnasium.make. Edit this function to wrap them (a wrapper of
    Gymnasium scales or clips rewards), or to train on something that Gymnasium does not know.

    What it returns must reset on the step after an episode's end (NEXT_STEP), take MultiDiscrete actions from 0 on, and
    give a Dict of images, uint8 [height, width, channels] of at least 36 x 36, and float32 vectors: one image or vector
    more is one key more, and no other edit. Actors cannot start processes of multiprocessing (AsyncVectorEnv)."""

    def make() -> gym.Env:
        return NamedArrays(gym.make(args.env_id, **options))

    mode = gym.vector.AutoresetMode.NEXT_STEP
    return gym.vector.SyncVectorEnv([make] * num_envs, copy=False, autoreset_mode=mode)


class Spaces(NamedTuple):
    """What the pipeline needs to know of the environments."""

    obs: dict[str, Box]  # the arrays that an observation consists of, by name
    heads: tuple[int, ...]  # number of actions of each independent head


def spaces_of(args: Args) -> Spaces:
    """The spaces of what `make_envs` returns. Raises UserError where the pipeline does not support them."""
    with contextlib.closing(make_envs(args, 1)) as envs:
        obs = envs.single_observation_space
        action = envs.single_action_space
        mode = envs.metadata.get("autoreset_mode")
    if mode != gym.vector.AutoresetMode.NEXT_STEP:
        raise UserError(f"make_envs must return environments with AutoresetMode.NEXT_STEP, not {mode}")
    if not (isinstance(obs, Dict) and obs and isinstance(action, MultiDiscrete)):
        raise UserError(
            f"unsupported spaces, {obs} and {action}: observations must have numbers, actions be Discrete, "
            "MultiDiscrete or MultiBinary (for a Box of actions: appo_mujoco.py)"
        )
    return Spaces(dict(obs), heads_of(action))


# === Agent ============================================================================================================


def moments(x):
    """x [N, ...] -> N, and the mean and the variance over N [...]"""
    mean = x.mean(0)
    return len(x), mean, (x - mean).square_().mean(0)  # x.var(0) of images takes far longer


class Normalizer(nn.Module):
    """Running mean and variance of every element of an input; clips to +-5, as Sample Factory 2 does."""

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
        """x [..., *shape], of which bool valid [...] count; merges two sets of statistics (Chan, Golub, LeVeque 1979).
        Raises FloatingPointError, and changes nothing, where statistics would not be finite."""
        n, mean, var = moments(x[valid] / self.unit)
        if n == 0:
            return
        weight = n / (self.count + n)
        var = self.var.lerp(var, weight) + (mean - self.mean).square() * (weight - weight.square())
        if not np.isfinite(var.sum().item()):
            raise FloatingPointError("an observation or a return is not finite, or its square is not")
        self.mean.lerp_(mean, weight)
        self.var.copy_(var)
        self.count.add_(n)
        self.std.copy_((var + 1e-5).sqrt())


def init_layer(layer, gain=2**0.5):
    """Orthogonal weights, biases 0."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class PopArt(Normalizer):
    """A value head in units of its own (van Hasselt et al. 2016; with V-trace Hessel et al. 2019). `linear` predicts
    (value - mean) / std, with the running mean and standard deviation of the V-trace targets. When these move, `linear`
    is rescaled so that no value changes."""

    def __init__(self, linear: nn.Linear):
        super().__init__((), 1.0)
        self.linear = linear
        self.count.fill_(1000)  # a prior of 1000 samples N(0, 1): the first returns hardly vary, their std is near 0

    def forward(self, x):
        """x [..., features] -> values in the reward's units [...]"""
        return self.linear(x).squeeze(-1) * self.std + self.mean

    @torch.no_grad()
    def update(self, targets, valid):
        """targets [...] in the reward's units, of which bool valid [...] count"""
        old_mean = self.mean.clone()
        old_std = self.std.clone()
        super().update(targets, valid)
        self.count.clamp_(max=100_000)  # from then on older samples fade, as returns grow
        self.linear.weight.mul_(old_std / self.std)
        self.linear.bias.copy_((old_std * self.linear.bias + old_mean - self.mean) / self.std)


def image_encoder(space, hidden_size):
    """[N, channels, height, width] -> [N, hidden_size], with convolutions 32/8/4, 64/4/2, 128/3/2 (channels, kernel,
    stride) and a layer, ELU, as in Sample Factory's paper on Doom."""
    height, width, channels = space.shape
    conv = nn.Sequential(
        init_layer(nn.Conv2d(channels, 32, 8, 4)),
        nn.ELU(inplace=True),
        init_layer(nn.Conv2d(32, 64, 4, 2)),
        nn.ELU(inplace=True),
        init_layer(nn.Conv2d(64, 128, 3, 2)),
        nn.ELU(inplace=True),
        nn.Flatten(),
    )
    features = conv(torch.zeros(1, channels, height, width)).shape[1]
    return nn.Sequential(conv, init_layer(nn.Linear(features, hidden_size)), nn.ELU(inplace=True))


class Agent(nn.Module):
    """Convolutions for each image and two layers of `vector_size` (tanh) for all vectors, joined, then a recurrent
    core, if asked for, then value and logits. Weights orthogonal with CleanRL's gains.

    A network of your own takes (spaces, args), and has `heads` (of Spaces), `state_size` (floats of recurrent state for
    each row, 0 for none), `critic` (a PopArt), `normalizers` (which the learner updates) by name of the observation's
    part, and `forward`, which changes nothing. To forbid actions, give `masked_fill(obs["obs/NAME"] == 0, -torch.inf)`
    of the logits; each head must keep an action, at an episode's last observation, too. Flags of this network:
    rnn_type, hidden_size, vector_size."""

    def __init__(self, spaces: Spaces, args: Args):
        super().__init__()
        self.heads = spaces.heads
        self.normalizers = nn.ModuleDict()
        self.images = nn.ModuleDict()
        self.vectors = []
        numbers = 0
        features = 0
        for name, space in spaces.obs.items():
            if space.dtype == np.uint8:
                self.normalizers[name] = Normalizer(space.shape, unit=255.0)
                self.images[name] = image_encoder(space, args.hidden_size)
                features += args.hidden_size
            else:
                self.normalizers[name] = Normalizer(space.shape, unit=1.0)
                self.vectors.append(name)
                numbers += space.shape[0]
        if self.vectors:
            self.vector_fc = nn.Sequential(
                init_layer(nn.Linear(numbers, args.vector_size)),
                nn.Tanh(),
                init_layer(nn.Linear(args.vector_size, args.vector_size)),
                nn.Tanh(),
            )
            features += args.vector_size
        self.core = None
        self.state_size = 0
        if args.rnn_type == "gru":
            self.core = nn.GRUCell(features, args.hidden_size)
            self.state_size = features = args.hidden_size
        self.critic = PopArt(init_layer(nn.Linear(features, 1), gain=1.0))
        self.policy = init_layer(nn.Linear(features, sum(spaces.heads)), gain=0.01)
        self.to(memory_format=torch.channels_last)  # as images come: height, width, channel

    def encode(self, obs):
        """obs by name [N, ...], as in the space -> float32 [N, features]"""
        obs = {name: self.normalizers[name](x) for name, x in obs.items()}
        features = [encoder(obs[name].permute(0, 3, 1, 2)) for name, encoder in self.images.items()]
        if self.vectors:
            features.append(self.vector_fc(torch.cat([obs[name] for name in self.vectors], -1)))
        return torch.cat(features, -1)

    def forward(self, obs, first, state):
        """obs by name [T, B, ...], first bool [T, B], state float32 [B, state_size] before obs[0]; where `first` is
        set it is zeroed. Returns logits [T, B, sum(heads)], values [T, B], state."""
        T, B = first.shape
        x = self.encode({name: part.flatten(0, 1) for name, part in obs.items()}).unflatten(0, (T, B))
        if self.core is not None:
            outputs = []
            for features, begins in zip(x, first):
                state = torch.where(begins.unsqueeze(-1), 0.0, state)
                state = self.core(features, state)
                outputs.append(state)
            x = torch.stack(outputs)
        return self.policy(x), self.critic(x), state


def distributions(logits, heads):
    """logits [..., sum(heads)] -> of each independent head, the log-probabilities [..., n] of its n actions. One whose
    logit is -inf is never taken. (torch's Categorical takes eight times as long.)"""
    return [part.log_softmax(-1) for part in logits.split(heads, -1)]


def draw(choices):
    """Of log-probabilities [..., n] of each head: actions int64 [..., heads]. argmax p/e with e ~ Exp(1) is a draw from
    p. Unlike torch.multinomial it never makes the host wait for CUDA."""
    actions = [(choice.exp() / torch.empty_like(choice).exponential_()).argmax(-1) for choice in choices]
    return torch.stack(actions, -1)


def log_prob(choices, actions):
    """Of log-probabilities [..., n] of each head, and actions [..., heads]: their joint log-probability [...]."""
    chosen = [choice.gather(-1, action) for choice, action in zip(choices, actions.split(1, -1))]
    return torch.cat(chosen, -1).sum(-1)


def entropy_of(choice):
    """Log-probabilities [..., n] -> [...]. Of an action that is never taken, 0: not 0 * -inf."""
    return -(choice.exp() * choice.clamp(min=torch.finfo(choice.dtype).min)).sum(-1)


# === V-trace and the loss =============================================================================================


@torch.no_grad()
def vtrace(ratios, values, rewards, discounts, valid, rho_bar, c_bar, lam):
    """V-trace targets and advantages (Espeholt et al. 2018, IMPALA, section 4.1; lambda: their remark 2).

    ratios pi(a)/mu(a), rewards, discounts (gamma, or 0 where it terminated) float32 [T, B], valid of 0 and 1 [T, B]
    (0 cuts the trace: vs = V there), values float32 [T+1, B] by the current network.
    Returns vs [T+1, B] (vs[T] = V[T]) and advantages [T, B].

        rho[t] = min(ratio[t], rho_bar), c[t] = lam min(ratio[t], c_bar), both 0 where not valid
        vs[t] = V[t] + rho[t] (r[t] + discount[t] V[t+1] - V[t]) + discount[t] c[t] (vs[t+1] - V[t+1])
        A[t]  = r[t] + discount[t] (lam vs[t+1] + (1 - lam) V[t+1]) - V[t]

    The advantage carries no rho: the PPO surrogate multiplies by the ratio itself. On-policy it is GAE(lam); with
    lam = 1 it is IMPALA's advantage."""
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
    """x [..., T, B], mask [T, B] of 0 and 1 -> [...]: the mean over the samples that have a 1; 0 where none has."""
    return (x * mask).sum((-2, -1)) / mask.sum().clamp(min=1)


def appo_loss(args: Args, agent: Agent, batch: SimpleNamespace):
    """PPO's clipped losses with V-trace's targets over the valid samples of a batch, which has the fields of Rollouts,
    [time, rollout, ...]. Returns the loss, the targets float32 [T, B], and metrics, on the device.

    A loss of your own goes here: of each sample [T, B], averaged by `mean`, added to `loss`. What it needs to know of
    the moment of acting is one more field of `Rollouts`, written in `Inference.choose`. If it is in the environment's
    `info`, it is also let through in `NamedArrays.step`, a field of `Mailbox`, written in `WorkerEnvs.step` and copied
    in `Inference.store` (what tells of a step's outcome at t - 1, as the reward). What it may not do with CUDA graphs
    is said in `recorded`."""
    valid = (~batch.first[1:]).float()
    logits, values, _ = agent(batch.obs, batch.first, batch.rnn_state[0])
    choices = distributions(logits[:-1], agent.heads)
    logprobs = log_prob(choices, batch.actions)
    entropy = sum(map(entropy_of, choices))
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
    reach = args.ppo_clip_value * agent.critic.std
    near = batch.values + (values - batch.values).clamp(-reach, reach)
    value_losses = torch.max((values - targets).square(), (near - targets).square()) / agent.critic.std.square()
    loss = mean(policy_losses + args.vf_coef * value_losses - args.ent_coef * entropy)

    with torch.no_grad():
        variance = mean((targets - mean(targets)).square())
        samples = {
            "losses/policy_loss": policy_losses,
            "losses/value_loss": value_losses,
            "losses/entropy": entropy,
            "losses/approx_kl": log_ratio.exp() - 1 - log_ratio,  # http://joschu.net/blog/kl-approx.html
            "losses/clipfrac": (ratio != clipped).float(),
            "losses/explained_variance": 1 - (values - targets).square() / variance.clamp(min=1e-8),
            "vtrace/rho_mean": ratio.clamp(max=args.vtrace_rho),
            "vtrace/rho_clipfrac": (ratio > args.vtrace_rho).float(),
        }
        metrics = dict(zip(samples, mean(torch.stack(list(samples.values())))))
    return loss, targets, metrics


# === Mailbox and rollouts =============================================================================================


def rows_per_worker(args: Args) -> int:
    """Raises UserError."""
    workers = max(1, args.num_workers)
    if args.num_envs % workers:
        raise UserError(f"--num-envs {args.num_envs} cannot be shared out evenly among --num-workers {workers}")
    return args.num_envs // workers


def slice_of(args: Args, i: int) -> slice:
    """The rows of worker i, or the slots of block i: a block has as many slots as a worker has rows."""
    n = rows_per_worker(args)
    return slice(i * n, i * n + n)


def num_blocks(args: Args) -> int:
    """Two for each of W workers: W may be LEARNING while every worker fills another. No deadlock: a learner that
    waits holds at most W - 1 of them, and none is FULL: every worker fills one, or finds a FREE one. --sync has one for
    each worker: none is FREE until the iteration's last step is made. That is all that --sync is."""
    sync = args.sync or args.num_workers == 0
    return max(1, args.num_workers) * (1 if sync else 2)


def zeros_for(spaces: Spaces, *shape, device="cpu"):
    """Observations of zeros, by name [*shape, ...]"""
    return {
        name: torch.zeros(*shape, *space.shape, dtype=getattr(torch, space.dtype.name), device=device)
        for name, space in spaces.obs.items()
    }


def of_each(function, fields):
    """The same dict, with function(field) in the place of each field, also in the dicts in it."""
    if isinstance(fields, dict):
        return {name: of_each(function, field) for name, field in fields.items()}
    return function(fields)


class Mailbox:
    """The only memory that actors share with the main process. The rows of a worker lie together.

    Between request and reply a worker's rows belong to the inference thread, otherwise to its actor: no locks."""

    def __init__(self, spaces: Spaces, rows: int):
        # written by the actor, between a reply and its next request
        self.obs = zeros_for(spaces, rows)  # the current observation
        self.reward = torch.full((rows,), torch.nan)  # of the action before it; NaN until the environment has started
        self.terminated = torch.zeros(rows, dtype=torch.bool)  # the action before it ended the episode for good
        self.first = torch.zeros(rows, dtype=torch.bool)  # obs is the first of an episode
        self.episode = torch.zeros(rows, len(EPISODE))  # of the episode that ended just now; zeros: none did
        # written by inference, between a request and its reply
        self.action = torch.zeros(rows, len(spaces.heads), dtype=torch.int64)  # what to do next

    def numpy(self) -> SimpleNamespace:
        """The same memory, now shared, as NumPy arrays, whose indexing is much cheaper than torch's."""
        return SimpleNamespace(**of_each(lambda field: field.share_memory_().numpy(), vars(self)))


class Rollouts:
    """Memory of the main process alone, [time, slot, ...]. Observations, and what inference computes, stay on the
    device. Flags, rewards and versions are arrays of the host, where the learner finds valid samples without asking the
    device. `Learner.gather` copies every field, of either kind. Rewards and log-probabilities start as NaN: were a slot
    read before it is written, the loss would say so.

    A block of slots is FILLING from when its worker gets it until the rollouts are complete, then FULL (both in
    `Inference.serve`). `Learner.collect` makes it LEARNING, `Learner.iterate` gives it back, and `Inference.receive`
    makes it FREE."""

    def __init__(self, spaces: Spaces, T: int, slots: int, state_size: int, device: torch.device):
        # on the device; T + 1: with the observation that the last value is bootstrapped from
        self.obs = zeros_for(spaces, T + 1, slots, device=device)
        self.actions = torch.zeros((T, slots, len(spaces.heads)), dtype=torch.int64, device=device)
        self.logprobs = torch.full((T, slots), torch.nan, device=device)  # of the actions, by the acting policy (mu)
        self.values = torch.full((T, slots), torch.nan, device=device)  # by the acting policy, for value clipping only
        self.rnn_state = torch.zeros((1, slots, state_size), device=device)  # at obs[0], before `first[0]` zeroes it
        # on the host
        self.first = np.zeros((T + 1, slots), bool)
        self.rewards = np.full((T, slots), np.nan, np.float32)  # of actions[t]
        self.terminated = np.zeros((T, slots), bool)
        self.versions = np.zeros((T, slots), np.int64)  # of the policy that chose actions[t]


# === Actor ============================================================================================================


class WorkerEnvs:
    """The environments of one worker. `reset` and `step` write its rows of the mailbox; from then on the rows belong to
    the caller, until it has filled in the actions and calls `step` again."""

    def __init__(self, args: Args, worker: int, mailbox: SimpleNamespace, seed: int):
        """mailbox: its arrays. Environment i is seeded with seed + i, modulo 2**30."""
        n = rows_per_worker(args)
        self.mailbox = mailbox
        self.rows = slice_of(args, worker)
        self.seed = seed % 2**30  # what every engine takes
        self.envs = make_envs(args, n)
        self.over = np.zeros(n, bool)  # the last step ended an episode: the next one only resets
        self.sums = np.zeros((n, len(EPISODE)))  # of the episodes under way

    def reset(self):
        observation, _ = self.envs.reset(seed=self.seed)
        self.write(observation, reward=0.0, terminated=False, first=True, episode=0.0)

    def step(self):
        action = self.mailbox.action[self.rows].copy()  # the environment may keep it
        observation, reward, terminated, truncated, info = self.envs.step(action)
        if not np.isfinite(reward).all():
            raise ValueError(f"a reward is not finite: {reward}")
        first = self.over
        self.over = terminated | truncated
        zeros = np.zeros(len(first))
        own_sums = [info.get(name, zeros) for name in OWN_SUMS]
        self.sums += np.stack([reward, zeros + 1, *own_sums], -1)
        self.sums[first] = 0  # what only resets does not count
        episode = np.where(self.over[:, None], self.sums, 0)  # not a product: a sum may be NaN
        self.write(observation, reward=reward, terminated=terminated, first=first, episode=episode)

    def write(self, observation, **flags):
        for name, part in observation.items():
            self.mailbox.obs[name][self.rows] = part
        for name, value in flags.items():
            getattr(self.mailbox, name)[self.rows] = value


def ask(pipe) -> bool:
    """Tells inference that an actor's rows are written, and waits until their actions are. False: the run has ended."""
    try:
        pipe.send(None)
        pipe.recv()
        return True
    except (EOFError, ConnectionError):
        return False


def run_actor(args: Args, worker: int, seed: int, mailbox: Mailbox, pipe):
    """Body of an actor. It sends None when its rows are written, and receives None when their actions are. A string is
    a traceback. The end of the pipe is the end of the other side, however it died."""
    if args.num_workers:  # else it is a thread of the main process
        os.set_inheritable(pipe.fileno(), False)  # programs that environments start would hide its end
        # A background process group that touches its terminal is stopped, unless it ignores these signals
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (signal.SIGTTIN, signal.SIGTTOU):
            signal.signal(number, signal.SIG_IGN)
        os.setpgrp()  # Ctrl-C is for the main process. (Not setsid: Linux counts `nice` only within a session.)
        # A job's SIGTERM comes to all. SIG_IGN would be inherited by programs that environments start
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        os.nice(10)  # where cores are short, inference and learning come first: actors without actions only wait
        seed_generators(seed)
        gym.logger.min_level = gym.logger.ERROR  # the main process has shown the warnings of `make_envs`
    try:
        worker_envs = WorkerEnvs(args, worker, mailbox.numpy(), seed)
        if not worker:  # one of them shows those of the steps
            gym.logger.min_level = gym.logger.WARN
        with contextlib.closing(worker_envs.envs):
            worker_envs.reset()
            while ask(pipe):
                worker_envs.step()
    except BaseException:  # sys.exit() in an environment, too
        with contextlib.suppress(ConnectionError):  # the run has ended
            pipe.send(traceback.format_exc().strip())
    finally:
        pipe.close()
        if args.num_workers:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os.killpg(0, signal.SIGKILL)  # itself, and the programs that environments have started and not ended


# === Inference ========================================================================================================


def wait_for(device):
    """Waits until all that this thread has asked of the device, in its stream, is done. (On a CPU it always is.)"""
    module = torch.get_device_module(device)
    event = module.Event()
    event.record(module.current_stream(device))
    event.synchronize()


def own_stream(device, priority=0):
    """A context with a stream of this thread's own. Priority -1 is high: not to queue behind a backward pass."""
    module = torch.get_device_module(device)
    if device.index is not None:
        module.set_device(device)  # of this thread
    return module.stream(module.Stream(priority=priority))


RECORDING = threading.Lock()  # PyTorch can record, play, or draw random numbers on the device, in one thread at a time


class Operations(TorchDispatchMode):
    """Notes the operations on tensors, and the numbers that they are given."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        numbers = [x for x in tree_leaves((args, kwargs)) if isinstance(x, int | float)]
        self.noted.append(f"{operation} {numbers}")
        return operation(*args, **(kwargs or {}))


def recorded(function, device):
    """The same function of tensors, as one CUDA graph in the place of hundreds of launches, each of which waits for its
    turn at Python's lock. There is a recording for each shape of the inputs. They are copied to where they were when it
    was made, from the host's memory, too; outputs are in the same memory each time: the next call changes them.

    The function may not wait for the device, copy from the host, or make shapes that depend on values, and what it uses
    beside its inputs may change only in place: a number of the host's is the same for ever. To notice one that changes,
    the fourth, eighth, 16th ... call runs as it is. Raises UserError."""
    recordings = {}
    pool = torch.cuda.graph_pool_handle()  # memory that they use in turn
    problem = f"{function.__qualname__} cannot be a CUDA graph (--no-cuda-graphs): "

    def call(*inputs):
        tensors = tree_leaves(inputs)
        recording = recordings.setdefault(tuple(x.shape for x in tensors), SimpleNamespace(calls=0))
        recording.calls += 1
        with RECORDING:
            if recording.calls == 1:  # loads and chooses kernels, and makes the memory of gradients
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
            for place, x in zip(tree_leaves(recording.inputs), tensors):
                place.copy_(x, non_blocking=True)
            if recording.calls == 2 or recording.calls & recording.calls - 1:  # no power of two
                recording.graph.replay()
                return recording.outputs
            with Operations() as operations:
                outputs = function(*recording.inputs)
            if operations.noted != recording.operations.noted:
                raise UserError(f"{problem}a number that it uses changes, and is no tensor among its inputs")
            return outputs

    return call


SILENCE = 60  # seconds without a message, after which a worker that owes one is named


class Inference:
    """Serves the workers that wait for actions, all at once. Owns every row's recurrent state and FILLING slot, and has
    the memory, the pipes and the queue between itself, the actors and the learner.

    It acts with the learner's own network. Acting with it and changing it both hold the lock until the device is done:
    no action comes from half an update. The learner computes loss and gradient without the lock: nobody else changes
    the network. Before a block changes hands, the host waits until the device has done what it was asked to do with it:
    there are no events between the two streams."""

    def __init__(self, args: Args, spaces: Spaces, agent: Agent, device: torch.device):
        self.args = args
        self.spaces = spaces
        self.device = device
        self.agent = agent
        self.version = 0  # of the agent
        self.lock = threading.Lock()  # of the agent
        workers = max(1, args.num_workers)
        blocks = [slice_of(args, i) for i in range(num_blocks(args))]
        self.shared_mailbox = Mailbox(spaces, args.num_envs)
        self.mailbox = self.shared_mailbox.numpy()  # the same memory
        self.rollouts = Rollouts(spaces, args.rollout, blocks[-1].stop, agent.state_size, device)
        self.state = torch.zeros(args.num_envs, agent.state_size, device=device)
        self.filling = dict(enumerate(blocks[:workers]))  # by worker; without an entry it waits for a FREE block
        self.t = np.zeros(workers, int)  # steps so far in the worker's FILLING block
        self.free = deque(blocks[workers:])
        self.full = queue.SimpleQueue()  # blocks to the learner
        self.end = None  # what ends the run: an error, or KeyboardInterrupt
        self.returned, self.learner_end = mp.Pipe(duplex=False)  # blocks back from it; closed, it ends the thread
        self.pipes, self.actor_ends = zip(*[mp.Pipe() for _ in range(workers)])
        self.selector = selectors.DefaultSelector()
        for pipe in (self.returned, *self.pipes):
            self.selector.register(pipe, selectors.EVENT_READ)
        self.requests = []  # workers that wait for actions, the oldest first: their rows are this thread's
        self.heard = np.full(workers, time.monotonic())  # when a worker last sent a request, or was answered
        self.episodes = deque(maxlen=100)  # the last finished ones, see EPISODE
        self.counts = Counter()  # rows served, and in how many forward passes; seconds waited, by the learner too
        if args.cuda_graphs:
            self.choose = recorded(self.choose, device)

    def run(self):
        """Body of the inference thread. It serves all that wait: the busier it is, the larger its batches."""
        try:
            with torch.inference_mode(), own_stream(self.device, priority=-1):
                while not self.learner_end.closed:
                    self.serve()
                    waiting_for = "blocks" if self.requests else "requests"
                    start = time.perf_counter()
                    events = self.selector.select(timeout=1)
                    self.counts[waiting_for] += time.perf_counter() - start
                    for key, _ in events:
                        self.receive(key.fileobj)
                    self.notice_silence()
        except BaseException as error:
            self.end_with(error)

    def end_with(self, error):
        """The learner raises the first when it next takes blocks, whatever else is FULL."""
        self.end = self.end or error
        self.full.put(None)

    def next_full(self):
        """Waits for a block, for the learner. Until the first iteration, reports every 5 seconds how many environments
        have started."""
        while not self.counts["learner"]:
            with contextlib.suppress(queue.Empty):
                return self.full.get(timeout=5)
            started = np.isfinite(self.mailbox.reward)
            steps = self.counts["rows"]
            tqdm.write(f"{started.sum()} of {started.size} environments have started, {steps:,} steps collected")
        return self.full.get()

    def notice_silence(self):
        """Names the workers that have not answered for a minute: their environments are slow, or hang."""
        for worker in np.flatnonzero(time.monotonic() - self.heard > SILENCE):
            if self.args.num_workers and worker not in self.requests:
                self.heard[worker] += SILENCE
                tqdm.write(f"worker {worker} has not answered for {SILENCE} s: its environments are slow, or hang")

    def receive(self, pipe):
        """Takes a worker's request, or blocks from the learner: LEARNING -> FREE. Raises UserError."""
        if pipe is self.returned:
            with contextlib.suppress(EOFError):  # `learner_end` was closed
                self.free.extend(pipe.recv())
            return
        worker = self.pipes.index(pipe)
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            raise UserError(f"actor {worker} was killed, or crashed") from None
        if message is not None:
            raise UserError(f"actor {worker} raised an exception\n{message}")
        self.requests.append(worker)
        self.heard[worker] = time.monotonic()

    def serve(self):
        """Hands over the blocks that are complete, and answers all workers that have a block or get a new one. The
        others go on waiting, until a block is free."""
        complete = [worker for worker in self.requests if self.t[worker] == self.args.rollout]
        if complete:  # their rows are stored twice: here as obs[T] of the old block, below as obs[0] of the new one
            self.store_obs(*self.store(complete))
            wait_for(self.device)  # the learner, whose stream is another, finds these blocks written
            for worker in complete:
                self.full.put(self.filling.pop(worker))  # FILLING -> FULL
                self.t[worker] = 0
        for worker in self.requests:
            if worker not in self.filling and self.free:  # FREE -> FILLING
                self.filling[worker] = self.free.popleft()
                self.rollouts.rnn_state[0, self.filling[worker]] = self.state[slice_of(self.args, worker)]
        ready = [worker for worker in self.requests if worker in self.filling]
        if ready:
            self.act(ready)
        self.requests = [worker for worker in self.requests if worker not in ready]
        for worker in ready:
            self.heard[worker] = time.monotonic()
            with contextlib.suppress(ConnectionError):  # it has died, as `receive` will find
                self.pipes[worker].send(None)

    def store(self, workers: list[int]):
        """Copies the mailbox rows of the workers to their times and slots, but for the observations. Returns these, by
        name [1, N, ...], and int64 [4, N]: rows, times, slots, `first`."""
        mailbox = self.mailbox
        rollouts = self.rollouts
        rows = np.r_[*(slice_of(self.args, worker) for worker in workers)]
        slots = np.r_[*(self.filling[worker] for worker in workers)]
        t = self.t[workers].repeat(rows_per_worker(self.args))
        first = mailbox.first[rows]
        rollouts.first[t, slots] = first
        # At t = 0 they belong to the block before, which has them; what is written here, at -1, is written anew at T
        rollouts.rewards[t - 1, slots] = mailbox.reward[rows]
        rollouts.terminated[t - 1, slots] = mailbox.terminated[rows]
        obs = {name: torch.from_numpy(source[None, rows]) for name, source in mailbox.obs.items()}
        return obs, torch.from_numpy(np.stack([rows, t, slots, first]))

    def store_obs(self, obs, places):
        """What `store` returns: the observations to their times and slots. Returns both, on the device."""
        places = places.to(self.device, non_blocking=True)
        obs = {name: part.to(self.device, non_blocking=True) for name, part in obs.items()}
        _, t, slots, _ = places
        for name, field in self.rollouts.obs.items():
            if field.is_cpu:  # PyTorch's own indexing takes ten times as long there
                field.numpy()[t.numpy(), slots.numpy()] = obs[name].numpy()
            else:
                field[t, slots] = obs[name]
        return obs, places

    def act(self, workers: list[int]):
        """Stores the rows of the workers, and chooses their next actions."""
        obs, places = self.store(workers)
        rows, t, slots, _ = places.numpy()
        with self.lock:
            actions = self.choose(obs, places)
            self.mailbox.action[rows] = actions.cpu().numpy()  # waits: the lock is held until the network has been used
            self.rollouts.versions[t, slots] = self.version
        self.t[workers] += 1
        ended = rows[self.mailbox.episode[rows].any(axis=1)]
        self.episodes.extend(self.mailbox.episode[ended].tolist())
        self.counts["rows"] += len(rows)
        self.counts["forwards"] += 1

    def choose(self, obs, places):
        """What the device does in `act`, with what `store` returns. Returns actions [N, heads]."""
        rollouts = self.rollouts
        obs, (rows, t, slots, first) = self.store_obs(obs, places)
        logits, values, self.state[rows] = self.agent(obs, first.bool()[None], self.state[rows])
        choices = distributions(logits[0], self.agent.heads)
        actions = draw(choices)
        rollouts.actions[t, slots] = actions
        rollouts.logprobs[t, slots] = log_prob(choices, actions)
        rollouts.values[t, slots] = values[0]
        return actions


# === Learner ==========================================================================================================


class Learner:
    """Takes the FULL blocks of one iteration at a time, and improves the policy."""

    def __init__(self, args: Args, inference: Inference):
        self.args = args
        self.spaces = inference.spaces  # for a network of your own, such as that of a curiosity reward
        self.inference = inference
        self.agent = inference.agent
        self.device = inference.device
        self.optimizer = torch.optim.Adam(self.agent.parameters(), args.learning_rate, eps=1e-6, fused=True)
        if args.cuda_graphs:
            self.differentiate = recorded(self.differentiate, self.device)
        self.global_step = 0  # valid transitions learned from

    def collect(self) -> list[slice]:
        """Waits for the blocks of an iteration: FULL -> LEARNING. Raises what ends the run: an error of the inference
        thread, or KeyboardInterrupt for a signal."""
        start = time.perf_counter()
        blocks = []
        for _ in self.inference.pipes:  # as many as there are workers; a fast one may come twice
            blocks.append(self.inference.next_full())
            if self.inference.end:
                raise self.inference.end
        self.inference.counts["learner"] += time.perf_counter() - start
        return blocks

    def iterate(self, blocks: list[slice]):
        """Learns from the blocks of an iteration. They stay LEARNING until its last optimiser step is made. Returns the
        metrics of that step."""
        args = self.args
        rollouts = self.inference.rollouts
        slots = np.r_[*blocks]
        valid = ~rollouts.first[1:, slots]
        lags = (self.inference.version - rollouts.versions[:, slots])[valid]
        learning_rate = args.learning_rate
        if args.anneal_lr:
            learning_rate *= 1 - self.global_step / args.total_timesteps
        self.optimizer.param_groups[0]["lr"] = learning_rate
        num_batches = np.clip(round(len(slots) * args.rollout / args.batch_size), 1, len(slots))
        for epoch in range(args.num_epochs):
            dealt = slots[torch.randperm(len(slots)).numpy()]
            for batch in np.array_split(dealt, num_batches):
                metrics = self.update(self.gather(batch), last_epoch=epoch == args.num_epochs - 1)
        self.global_step += len(lags)
        metrics = dict(zip(metrics, torch.stack(list(metrics.values())).tolist()))
        self.inference.learner_end.send(blocks)  # LEARNING -> FREE: the last `wait_for` covered their copies
        return metrics | {
            "charts/learning_rate": learning_rate,
            "lag/mean": lags.sum() / max(1, len(lags)),
            "lag/max": lags.max(initial=0),
        }

    def gather(self, slots: np.ndarray) -> SimpleNamespace:
        """A batch: copies of these slots of all fields of Rollouts, on the device."""
        d_slots = torch.from_numpy(slots).to(self.device)

        def take(field):
            if isinstance(field, np.ndarray):
                return torch.from_numpy(field[:, slots]).to(self.device, non_blocking=True)
            return field.index_select(1, d_slots)

        return SimpleNamespace(**of_each(take, vars(self.inference.rollouts)))

    def differentiate(self, batch: dict):
        """What the device does in `update` before the optimiser's step: `appo_loss`, and its gradients, clipped.
        Returns the targets, metrics, and the loss and the gradients' norm in one tensor."""
        loss, targets, metrics = appo_loss(self.args, self.agent, SimpleNamespace(**batch))
        self.optimizer.zero_grad(set_to_none=not self.args.cuda_graphs)  # what is recorded adds to them where they are
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.agent.parameters(), self.args.max_grad_norm or torch.inf)
        return targets, metrics | {"losses/grad_norm": grad_norm}, torch.stack([loss.detach(), grad_norm])

    def update(self, batch: SimpleNamespace, last_epoch: bool):
        """One optimiser step: a new version. Returns its metrics. Raises FloatingPointError if it is not finite."""
        targets, metrics, checked = self.differentiate(vars(batch))
        loss, grad_norm = checked.tolist()
        # This check waits for the device: so nothing broken is published or saved, and inference does not wait at the
        # lock for a backward pass.
        if not np.isfinite(loss + grad_norm):
            raise FloatingPointError(
                f"the loss ({loss}) or its gradient is not finite: check observations and rewards, "
                "or try a lower --learning-rate or --max-grad-norm"
            )
        valid = ~batch.first[1:]
        start = int(torch.randint(min(4, len(valid)), ()))  # statistics of every fourth step: neighbours hardly differ
        with self.inference.lock:
            if last_epoch:  # each rollout once
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

# How a run ends: `train` saves and reports; leaving `running` stops the inference thread and closes the pipes, at which
# the actors end. What leads there is
# - the last step: the loop is over;
# - Ctrl-C, SIGTERM or SIGHUP: the handler calls `Inference.end_with`, and `collect` raises KeyboardInterrupt (a second
#   signal a second later ends the process at once; the actors find their pipes closed, as after kill -9);
# - an actor's death or an exception in its environments, or an error in the inference thread: in the same way;
# - an error in the learner: as it is.

SIGNALS = [signal.SIGINT, signal.SIGTERM]
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
    SIGNALS.append(signal.SIGHUP)
AT_LEAST = dict(num_workers=0, seed=0)  # all other whole numbers 1, and the rest 0
FIXED = ("env_id", "rnn_type", "hidden_size", "vector_size")  # a resumed run has the same


def check(args: Args):
    """Raises UserError."""
    for name, value in asdict(args).items():
        least = AT_LEAST.get(name, int(type(value) is int))
        if isinstance(value, int | float) and not value >= least:  # neither is NaN
            raise UserError(f"--{name.replace('_', '-')} {value} is out of range: at least {least}")
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:  # of several lines
        raise UserError(f"--device {args.device}: {str(error).splitlines()[0]}") from None


def seed_generators(seed: int):
    """The generators of network and sampling; in an actor those that its environments may draw from, which would
    otherwise give the same numbers in all actors."""
    seed %= 2**32  # what NumPy takes
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def handle_signals(inference: Inference):
    """A signal is a message to the learner, so that no update is cut in two. The fork server is started while signals
    are ignored, and inherits that, as does an actor until it is in a process group of its own. Called when an
    environment's module has been imported, which may have set handlers of its own."""
    times = []

    def handler(*_):
        times.append(time.monotonic())
        if times[-1] - times[0] > 1:  # a launcher or a shell may send the first one twice
            os._exit(130)
        inference.end_with(KeyboardInterrupt())

    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if inference.args.num_workers:
        os.environ["OMP_NUM_THREADS"] = "1"  # of actors: else a product of NumPy's takes all cores
        forkserver.set_forkserver_preload(["numpy", "torch", "gymnasium", "tyro", "tqdm"])
        forkserver.ensure_running()
    for number in SIGNALS:
        signal.signal(number, handler)


def lock(folder: Path):
    """Makes the folder this process's own until it ends, however it does. Raises UserError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)  # never closed: that would release it
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another run is using {folder}: stop it, or choose another --experiment") from None
    except OSError:  # this file system has no locks
        pass


@contextlib.contextmanager
def running(inference: Inference):
    """Context with the inference thread, and the actors with their environments, whose seeds depend on the version: a
    resumed run has other episodes."""
    args = inference.args
    thread = threading.Thread(target=inference.run, name="inference", daemon=True)
    # fork is unsafe beside threads and CUDA; spawn costs 100 MB for each actor
    process_or_thread = mp.get_context("forkserver").Process if args.num_workers else threading.Thread
    actors = []
    try:
        thread.start()
        for worker, pipe in enumerate(inference.actor_ends):
            seed = random.Random(f"{args.seed} {inference.version} {worker}").getrandbits(30)
            arguments = (args, worker, seed, inference.shared_mailbox, pipe)
            actor = process_or_thread(target=run_actor, args=arguments, daemon=True)
            actor.start()
            actors.append(actor)
            if args.num_workers:
                pipe.close()  # the actor's copy is the only one, and ends with it
        yield
    finally:
        inference.learner_end.close()
        thread.join(10)
        for pipe in inference.pipes:
            pipe.close()
        deadline = time.monotonic() + 5
        for worker, actor in enumerate(actors):
            actor.join(max(0.0, deadline - time.monotonic()))
            if actor.is_alive():
                print(f"worker {worker} has not ended within 5 s: its environments are slow, or hang")
            if args.num_workers:
                actor.kill()
                with contextlib.suppress(OSError):  # there is none
                    os.killpg(actor.pid, signal.SIGKILL)  # the programs that environments of a killed actor had started


def save_checkpoint(folder: Path, learner: Learner):
    """Tensors and plain values only. Written under another name first: a checkpoint is whole or absent."""
    content = dict(
        agent=learner.agent.state_dict(),
        optimizer=learner.optimizer.state_dict(),
        version=learner.inference.version,
        global_step=learner.global_step,
    )
    buffer = io.BytesIO()  # a full disk is then an OSError
    torch.save(content, buffer)
    (folder / "saving.tmp").write_bytes(buffer.getbuffer())
    os.replace(folder / "saving.tmp", folder / "latest.pth")


def read_checkpoint(folder: Path):
    """Returns None where there is none."""
    path = folder / "latest.pth"
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def load_checkpoint(folder: Path, learner: Learner):
    """Raises UserError where it is damaged, or of another network."""
    try:
        content = read_checkpoint(folder)
        if content is None:
            return
        learner.agent.load_state_dict(content["agent"])
        learner.optimizer.load_state_dict(content["optimizer"])
        learner.inference.version = content["version"]
        learner.global_step = content["global_step"]
    except Exception as error:  # of any type, and of many lines
        what = " ".join(str(error).split()).split(". ")[0]
        raise UserError(
            f"{folder}/latest.pth is damaged, or of another network; move it away to start anew ({what})"
        ) from None


class Reporter:
    """The progress bar and TensorBoard. Every rate is over the time since the last report."""

    SECONDS = 5  # between two reports

    def __init__(self, args: Args, learner: Learner, folder: Path):
        """To be made before the inference thread starts: its waits are shares of the time from here on."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only the main process writes

        sizeless = sys.stderr.isatty() and 0 in os.get_terminal_size(sys.stderr.fileno())  # tqdm would show nothing
        self.learner = learner
        self.writer = SummaryWriter(str(folder), flush_secs=10, purge_step=learner.global_step + 1)
        self.writer.add_text("args", json.dumps(asdict(args), indent=2))
        self.bar = tqdm(
            total=args.total_timesteps,
            initial=learner.global_step,
            dynamic_ncols=True,
            disable=sizeless or not args.num_workers or None,  # it would hide a debugger; None: without a terminal
            smoothing=0,
            bar_format="{percentage:.0f}% {bar} {remaining}{postfix}",
        )
        self.metrics = {}  # of the last iteration
        self.score = "no episode has ended"
        self.last = Counter(seconds=time.monotonic(), steps=learner.global_step)

    def update(self, metrics):
        """Called after every iteration, with its metrics. Reports every `SECONDS`."""
        self.metrics = metrics
        self.bar.update(min(self.learner.global_step, self.bar.total) - self.bar.n)
        if time.monotonic() - self.last["seconds"] >= self.SECONDS:
            self.report()

    def report(self):
        now = Counter(self.learner.inference.counts, seconds=time.monotonic(), steps=self.learner.global_step)
        change = now - self.last
        self.last = now
        seconds = change["seconds"]
        sps = change["steps"] / seconds
        waits = change["learner"] / seconds
        scalars = self.metrics | {
            "charts/SPS": sps,
            "stats/learner_wait": waits,  # shares of the time: the learner waits for full blocks,
            "stats/inference_idle": change["requests"] / seconds,  # inference waits for requests,
            "stats/inference_blocked": change["blocks"] / seconds,  # or has requests and waits for free blocks
            "stats/inference_batch": change["rows"] / max(1, change["forwards"]),  # rows served together
        }
        if episodes := self.learner.inference.episodes.copy():
            scalars |= zip((f"charts/{name}" for name in EPISODE), np.mean(episodes, axis=0).tolist())
            self.score = f"return {scalars['charts/episodic_return']:.2f}"
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, self.learner.global_step)
        text = f"{self.score}, {sps:,.0f} steps/s, learner waits {waits:.0%}, lag {self.metrics['lag/mean']:.1f}"
        self.bar.set_postfix_str(text)
        if self.bar.disable:  # no terminal, or a debugger
            print(f"step {self.learner.global_step:,}: {text}", flush=True)

    def close(self):
        """Reports what came since the last report."""
        if self.learner.global_step > self.last["steps"]:
            self.report()
        self.bar.close()
        self.writer.close()


def train(args: Args, folder: Path) -> int:
    """Returns the exit code: 0, or 130 when a signal stopped the run."""
    check(args)
    device = torch.device(args.device)
    torch.backends.cudnn.allow_tf32 = False  # float32 means it: mu and pi must agree at lag 0
    torch.set_num_threads(max(1, num_cores() // 2))  # for learner and inference each
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
    wait_for(device)  # the above ran in the default stream; learner and inference have their own
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
            # else nothing was learned, or the last step may have spoiled the weights
            if learner.global_step and not isinstance(sys.exception(), FloatingPointError):
                save_checkpoint(folder, learner)
            reporter.close()
    print(f"{'stopped' if code else 'done'}: {learner.global_step:,} steps, {reporter.score}")
    if learner.global_step:
        place = shlex.quote(str(folder))
        print(f"play: python evaluate.py {place} --env-id {shlex.quote(args.env_id)}")
        print(f"curves: tensorboard --logdir {place}")
    print(f"continue: the same command with --experiment {shlex.quote(args.experiment)}")
    return code


def saved_args(folder: Path) -> Args:
    """Returns those of an experiment that is to be resumed. Raises UserError."""
    path = folder / "cfg.json"
    try:
        cfg = json.loads(path.read_text())
        check_type(cfg["args"], TypedDict("flags", get_type_hints(Args)))
        if Path(cfg["file"]).name != Path(__file__).name:
            raise UserError(f"{folder} is a run of another file: {cfg['file']}")
        return Args(**cfg["args"])
    except (ValueError, LookupError, TypeError, TypeCheckError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is damaged, or of another version of this file: {reason}") from None


def parse_args() -> tuple[Args, Path]:
    """Args, and the run's folder. Raises UserError."""
    sys.path.append(os.getcwd())  # where a module of one's own may be that --env-id names
    # 1e6 as 1000000, which int() takes
    words = [f"{float(w):.0f}" if re.fullmatch(r"\d+(\.\d)?e[1-9]", w) else w for w in sys.argv[1:]]
    args = tyro.cli(Args, args=words)
    if args.experiment is None:
        name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{int(time.time())}_{os.getpid()}"
        args.experiment = args.typed["experiment"] = re.sub("[/:]", "-", name)
    if "/" in args.experiment or not args.experiment.strip("."):
        raise UserError(f"--experiment {args.experiment!r} is not the name of a folder in {args.train_dir}")
    folder = Path(args.train_dir, args.experiment).absolute()  # an environment may change the working directory
    if (folder / "cfg.json").exists():  # it keeps its flags, except for those typed now
        saved = saved_args(folder)
        if ":" in saved.env_id and args.env_id != saved.env_id:  # a run's folder never names code to be run
            raise UserError(f"type --env-id {saved.env_id} again: it imports a module")
        saved.typed |= dict(train_dir=args.train_dir, experiment=args.experiment)  # where it is now
        vars(saved).update(saved.typed)  # else tyro would take for typed what was filled in
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
        if getattr(sys, name) is None:  # closed, as a daemon's
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
