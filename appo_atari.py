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
# appo_atari.py $Id$
"""Asynchronous PPO with V-trace on Atari (EnvPool): the whole pipeline of Sample Factory / IMPALA in one file.

    python appo_atari.py --env-id Breakout-v5
    python evaluate.py train_dir/NAME    # plays what the run of that name has learned

As Machado et al. (2018) recommend, but for their frameskip of 5 and games of 5 minutes: --no-episodic-life
--sticky-actions 0.25 --full-action-space --no-fire-reset --noop-max 1 (EnvPool always plays one).

A deliberate edit of appo_doom.py. What differs:
- the games (`AtariEnvs`); where a lost life ends an episode, the game goes on: scores are of whole games;
- convolutions of Mnih et al. (2015) or of IMPALA, ReLU, CleanRL's initial gains, no recurrent core by default,
  no vectors beside the images;
- the entropy is rewarded, as in CleanRL, instead of the divergence from the uniform policy penalised; other defaults of
  batch, learning rate, clips and the gradient's norm, CleanRL's too; ten times the steps;
- there are no engines: no look at /dev/shm, no scenarios of one's own.

     actor process w = 0..W-1  (CPU only)              main process (owns the accelerator)
     +-------------------------------+  request: split s  +------------------------------------------+
     | step the environments of      | -----------------> | inference thread                         |
     | split s, write obs, reward    |                    |   copy the rows of all waiting groups    |
     | ... into its mailbox rows     | <----------------- |   into the rollouts, forward, sample,    |
     | (meanwhile the other split    |   reply: split s   |   write actions into the mailbox         |
     |  waits for its actions)       |                    +------------------------------------------+
     +-------------------------------+                       | full blocks               ^ free blocks
                                                          +------------------------------------------+
                                                          | learner (main thread)                    |
                                                          |   V-trace, PPO steps, each copied to the |
                                                          |   policy that acts: version v+1, v+2, ...|
                                                          +------------------------------------------+
     block:  FREE -> FILLING (by one group) -> FULL -> LEARNING -> FREE      exactly one owner at any time

Words: a *worker* is one actor process; it steps its environments in one or more *splits*. A *row* is one environment's
endless stream of experience; a *group* is the rows of one split of one worker, which ask for actions together. A *slot*
is room for one rollout (T steps of one row), a *block* is the slots of a group's rows. An *iteration* begins when the
learner takes the blocks for `num_batches_per_epoch` *batches* of about `batch_size` samples, one block at least, passes
`num_epochs` times over them, each batch an optimiser step, and ends when it gives them back. A *step* is one decision
of the agent, a *frame* one tick of the game (frames = steps x frameskip). Every optimiser step makes a *version* of the
policy; the *lag* of a sample is the newest version minus the one that chose its action.

One rule about time, from which everything follows. Environments reset on the step AFTER an episode ends (Gymnasium's
NEXT_STEP): the step that ends an episode returns its last observation, the action chosen there is ignored, and the next
observation is the first of the next episode. So two flags say all there is to know:

    first[t]       obs[t] is the first of an episode: the recurrent state is zeroed before obs[t] enters it
    terminated[t]  action t ended the episode for good: the discount of step t is gamma * (1 - terminated[t])

and a transition t -> t+1 is valid iff not first[t+1]. An invalid one (the ignored action; an actor that was replaced)
cuts the V-trace trace and is left out of every loss, mean and step count. A time limit needs no flag of its own: its
last step bootstraps from the value of the true last observation.
"""

import signal
import sys

if __name__ == "__main__":  # the imports take seconds: Ctrl-C ends them without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print("importing torch ...", file=sys.stderr)

import contextlib
import copy
import ctypes
import difflib
import faulthandler
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

import envpool
import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import tyro
from gymnasium.spaces import Box, Dict, MultiDiscrete
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from tqdm import tqdm
from typeguard import TypeCheckError, check_type

# === Args =============================================================================================================


class UserError(Exception):
    """Something the user can fix: its text is printed, without a traceback of ours."""


def num_cores() -> int:
    """Cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # a container without a quota: no such file, or "max"
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores


@dataclass
class Args:
    """Asynchronous PPO with V-trace on Atari (EnvPool)."""

    # --- run
    env_id: str = "Breakout-v5"  # one of EnvPool's 104 Atari games
    frameskip: int = 4  # game ticks (frames) per step of the agent; the image is the maximum of the last two
    episodic_life: bool = True  # a lost life ends an episode, but not the game: scores are of whole games
    noop_max: int = 30  # an episode begins with 1 to so many no-op frames; with `fire_reset` the last of them is FIRE
    fire_reset: bool = True  # each episode of a game that has a FIRE button begins with it
    sticky_actions: float = 0.0  # probability that the game repeats its last action instead of taking the new one
    full_action_space: bool = False  # all 18 actions instead of the game's own
    reward_scale: float = 1.0  # rewards are multiplied by this
    reward_clip: float = 1.0  # then clipped to +- this; inf: not at all
    seed: int = 1  # of the network, of the action sampling and of the environments
    total_timesteps: int = 10_000_000  # stop after this many steps (frames / frameskip)
    train_for_seconds: float = np.inf  # stop so many seconds after this session's first iteration
    device: str | None = None  # cpu, cuda, or cuda:1 (the second GPU). Default: cuda where there is a GPU
    cuda_graphs: bool = False
    """with CUDA: what chooses actions, and what computes gradients, is recorded for each size of a batch: then each is
    one launch"""
    precision: Literal["float32", "bfloat16"] | None = None
    """of the encoder, and on a CPU of the core; None is bfloat16 where the device has instructions for it"""
    experiment: str | None = None  # the run's folder below train_dir; an existing one is resumed. Default: a fresh one
    train_dir: str = "train_dir"  # where experiments are kept
    save_every_sec: float = 120.0  # seconds between checkpoints
    keep_checkpoints: int = 2  # how many of the latest checkpoints are kept; 0: all

    # --- sampling
    num_workers: int | None = None
    """actor processes; None: one a core; 0 runs one as a thread, for debugging, and implies --sync"""
    num_envs_per_worker: int = 16  # environments per worker
    worker_num_splits: int | None = None
    """parts that a worker's environments are stepped in: it steps one while the others wait for actions; None: 2 with
    CUDA, else 1 (on a CPU the network would use the core meanwhile)"""
    set_workers_cpu_affinity: bool = True
    """pin worker i to the i-th core of this process; turn it off for several runs at once"""
    actor_timeout: float = 120.0
    """seconds that one call of a game, its start or a step, may take; an actor that takes longer counts as hung, and
    another takes its place; 0: no limit"""
    sync: bool = False  # collect only while the learner waits: each iteration begins with lag 0, as in synchronous PPO

    # --- algorithm
    rollout: int = 32  # steps per rollout (T)
    batch_size: int = 256  # samples per optimiser step, about: a batch is of whole rollouts
    num_batches_per_epoch: int = 1  # batches in an iteration, about; with --sync an iteration is one rollout a row
    num_epochs: int = 1  # passes over an iteration's rollouts; with --sync pi/mu is 1 in the first optimiser step
    max_batches_ahead: int = 1  # iterations collected ahead of the learner; more hides jitter and adds lag
    max_policy_lag: int = 100  # samples by a policy at least this many versions old are left out of the losses
    learning_rate: Annotated[float, tyro.conf.arg(aliases=["--lr"])] = 2.5e-4  # of Adam
    anneal_lr: bool = False  # the learning rate falls linearly with the steps, to 0 at total_timesteps
    gamma: float = 0.99  # discount per step
    vtrace_rho: float = 1.0  # V-trace's clip of the importance weight of a temporal difference (rho bar)
    vtrace_c: float = 1.0  # V-trace's clip of the trace (c bar)
    vtrace_lambda: float = 0.95  # decay of the trace, as in GAE; 1 is the V-trace of the paper
    clip_coef: float = 0.1  # PPO: the ratio is clipped to [1/(1+e), 1+e]
    ppo_clip_value: float = 0.1  # PPO: the value may move this far from the one at acting time
    vf_coef: float = 0.5  # coefficient of the value loss
    ent_coef: float = 0.01  # coefficient of the entropy, which is rewarded
    max_grad_norm: float = 0.5  # gradients are scaled down to this norm; 0 turns it off
    encoder: Literal["nature", "impala"] = "nature"
    """the convolutions of Mnih et al. (2015), or the residual ones of Espeholt et al. (2018)"""
    rnn_type: Literal["gru", "lstm", "none"] = "none"  # the recurrent core
    hidden_size: int = 512  # units of an image encoder's last layer and of the recurrent core

    def __post_init__(self):
        """Fills in what depends on other flags."""
        self.env_id = self.env_id.rpartition("/")[2]  # Gymnasium's names, such as ALE/Pong-v5
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        cuda = device.startswith("cuda")
        if self.precision is None:
            if cuda:
                capable = torch.cuda.is_bf16_supported(including_emulation=False)
            else:
                capable = "_bf16" in Path("/proc/cpuinfo").read_text()  # AVX512-BF16 or AMX
            self.precision = "bfloat16" if capable else "float32"
        self.typed = asdict(self)  # for cfg.json: each machine fills in the rest for itself
        self.device = device
        self.cuda_graphs &= cuda
        if self.num_workers is None:
            self.num_workers = num_cores()
        if self.worker_num_splits is None:
            self.worker_num_splits = 2 if cuda else 1


# === Environment ======================================================================================================

# What is summed over each game, and reported as the mean over the last 100: the game's own reward, 1 a step, and
# numbers in the environment's `info`, whose names are added here
OWN_SUMS = ()
EPISODE = ("episodic_return", "episodic_length", *OWN_SUMS)


class AtariEnvs(gym.vector.VectorEnv):
    """EnvPool's Atari games with the usual preprocessing (Mnih et al. 2015): 84x84, grey, the last 4 images.
    Observation: `obs`, uint8 [84, 84, 4], the newest last: rearranged once, for acting and learning, as convolutions on
    a CPU want it (EnvPool has [4, 84, 84]). A game ends after 108,000 frames, half an hour. The pool is made in
    `reset`, where it gets its seed; it resets on the step after an episode's end. Raises UserError.

    `info["raw_reward"]` is the game's own, before scale and clip: scores are sums of it. `info["game_over"]`: the whole
    game ended. With `episodic_life` a lost life ends an episode, and the step after it, whose action is ignored too,
    continues the same game with the no-ops and FIRE; points scored there are not counted. Some games (RoadRunner) may
    end during these no-ops, which EnvPool does not report: that step begins a new game, and has `game_over`."""

    def __init__(self, args: Args, num_envs: int):
        self.metadata = dict(
            autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP,
            render_fps=60 / args.frameskip,
        )
        specs = envpool.registration.registry.specs
        games = [name for name, (module, *_) in specs.items() if module == "envpool.atari" and name.endswith("-v5")]
        if args.env_id not in games:
            near = difflib.get_close_matches(args.env_id, games) or ["Breakout-v5"]
            raise UserError(f"unknown --env-id {args.env_id}; did you mean {' or '.join(near)}?")
        self.args = args
        self.num_envs = num_envs
        self.options = dict(
            env_type="gymnasium",
            num_envs=num_envs,
            num_threads=1,
            frame_skip=args.frameskip,
            noop_max=args.noop_max,
            episodic_life=args.episodic_life,
            use_fire_reset=args.fire_reset,
            full_action_space=args.full_action_space,
            repeat_action_probability=args.sticky_actions,
            max_episode_steps=108_000 // args.frameskip,
            render_mode="rgb_array",
        )
        self.pool = None
        spec = envpool.make_spec(args.env_id, full_action_space=args.full_action_space)
        self.single_observation_space = Dict(obs=Box(0, 255, (84, 84, 4), np.uint8))
        self.single_action_space = MultiDiscrete([spec.gymnasium_action_space.n])
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.images = np.zeros((num_envs, 84, 84, 4), np.uint8)

    def rearranged(self, images: np.ndarray):
        """uint8 [num_envs, 4, 84, 84] -> [num_envs, 84, 84, 4], overwritten by the next call."""
        for i in range(4):  # four copies of 84x84: 12 us a game; NumPy's one copy of the transposed array takes 40
            self.images[..., i] = images[:, i]
        return dict(obs=self.images)

    def reset(self, *, seed=0, options=None):
        self.close()
        self.pool = envpool.make(self.args.env_id, seed=seed, **self.options)
        images, info = self.pool.reset()
        self.lost_life = np.zeros(self.num_envs, bool)
        self.lives = info["lives"].copy()
        return self.rearranged(images), {}

    def step(self, actions):
        images, raw_reward, terminated, truncated, info = self.pool.step(actions[:, 0])
        game_over = terminated & (info["terminated"] > 0) | truncated
        new_game = self.lost_life & (info["lives"] > self.lives)
        self.lost_life = terminated & ~game_over
        self.lives = info["lives"].copy()
        reward = np.clip(raw_reward * self.args.reward_scale, -self.args.reward_clip, self.args.reward_clip)
        info = dict(raw_reward=raw_reward, game_over=game_over | new_game)
        return self.rearranged(images), reward, terminated, truncated, info

    def render(self):
        """The first game's screen, uint8 [1, 210, 160, 3]."""
        return self.pool.render()

    def close(self, **options):
        if self.pool:
            self.pool.close()
            self.pool = None


def make_envs(args: Args, num_envs: int, **options) -> gym.vector.VectorEnv:
    """The environments of one split of a worker; options are not needed. Edit this function to train on something else.

    What it returns must reset on the step after an episode's end (NEXT_STEP), start nothing before `reset`, take
    MultiDiscrete actions from 0 on, and give a Dict of images, uint8 [height, width, channels] of at least 36 x 36: one
    image more is one key more, and no other edit. Scores are sums of `raw_reward` in every step's `info`, where it is
    given, else of rewards; `game_over` there says where they end, if not with each episode. Actors cannot start
    processes of multiprocessing (AsyncVectorEnv)."""
    return AtariEnvs(args, num_envs)


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
    if not isinstance(obs, Dict) or not isinstance(action, MultiDiscrete):
        raise UserError(f"unsupported spaces, {obs} and {action}: they must be a Dict and MultiDiscrete")
    return Spaces(dict(obs), tuple(action.nvec.tolist()))


# === Agent ============================================================================================================


def moments(x):
    """x [N, ...] -> N, and the mean and the variance over N [...]"""
    mean = x.mean(0)
    return len(x), mean, (x - mean).square_().mean(0)  # x.var(0) of images takes far longer


class Normalizer(nn.Module):
    """Running mean and variance of every element of an input; clips to +-5, as Sample Factory 2 does."""

    def __init__(self, shape: tuple[int, ...], unit: float, dtype=torch.float32):
        """dtype: of what `forward` returns; in the encoder's own type an image need not be cast again."""
        super().__init__()
        self.unit = unit
        self.dtype = dtype
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        # normalised = x * scale + shift, one multiply-add for each element; until the first update that is x / unit
        self.register_buffer("scale", torch.full(shape, 1 / unit))
        self.register_buffer("shift", torch.zeros(shape))

    def forward(self, x):
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        pieces = 16 if x.device.type == "cpu" else len(x)  # on a CPU in pieces that stay in the cache
        for part, to in zip(x.split(pieces), out.split(pieces)):
            to.copy_(torch.addcmul(self.shift, part.float(), self.scale).clamp_(-5, 5))
        return out

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
            raise FloatingPointError("an observation is not finite, or its square is not")
        self.mean.lerp_(mean, weight)
        self.var.copy_(var)
        self.count.add_(n)
        std = (var + 1e-5).sqrt()
        self.scale.copy_(1 / (self.unit * std))
        self.shift.copy_(-self.mean / std)


def init_layer(layer, gain=2**0.5):
    """Orthogonal weights, biases 0."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class FlattenInMemory(nn.Flatten):
    """[N, channels, height, width] in channels_last memory -> [N, features]: a view, where nn.Flatten copies."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1))


class Residual(nn.Module):
    """Two convolutions, added to what came in (Espeholt et al. 2018, figure 3)."""

    def __init__(self, channels: int):
        super().__init__()
        self.block = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x):
        return x + self.block(x)


def nature_convolutions(channels):
    """Channels, kernel, stride: 32/8/4, 64/4/2, 64/3/1 (Mnih et al. 2015)."""
    return nn.Sequential(
        init_layer(nn.Conv2d(channels, 32, 8, 4)),
        nn.ReLU(inplace=True),
        init_layer(nn.Conv2d(32, 64, 4, 2)),
        nn.ReLU(inplace=True),
        init_layer(nn.Conv2d(64, 64, 3, 1)),
        nn.ReLU(inplace=True),
    )


def impala_convolutions(channels):
    """Three stages of a convolution, a pool and two residual blocks with 16, 32, 32 channels (Espeholt et al. 2018,
    figure 3). Weights as PyTorch's."""
    layers = []
    for to in (16, 32, 32):
        layers += [nn.Conv2d(channels, to, 3, padding=1), nn.MaxPool2d(3, 2, padding=1), Residual(to), Residual(to)]
        channels = to
    return nn.Sequential(*layers, nn.ReLU())


def image_encoder(space, args: Args):
    """[N, channels, height, width] -> [N, hidden_size]: `encoder`'s convolutions and a layer, ReLU."""
    height, width, channels = space.shape
    convolutions = dict(nature=nature_convolutions, impala=impala_convolutions)[args.encoder](channels)
    conv = nn.Sequential(convolutions, FlattenInMemory())
    features = conv(torch.zeros(1, channels, height, width)).shape[1]
    return nn.Sequential(conv, init_layer(nn.Linear(features, args.hidden_size)), nn.ReLU(inplace=True))


class Agent(nn.Module):
    """Convolutions for each image, then a recurrent core, if asked for, then value and logits. What is no image is
    stored, but not seen. Weights orthogonal with CleanRL's gains, but for IMPALA's convolutions.

    A network of your own has these two arguments, `heads` (of Spaces), `state_size` (floats of recurrent state for each
    row; 0 for none), `normalizers` by name, `reduced` (modules whose weights act in bfloat16), and `forward`, which
    changes nothing. To forbid actions, give `masked_fill(obs["NAME"] == 0, -torch.inf)` of the logits; each head must
    keep an action, at an episode's last observation, too. Flags of this network: precision, encoder, rnn_type,
    hidden_size."""

    def __init__(self, spaces: Spaces, args: Args):
        super().__init__()
        self.heads = spaces.heads
        self.normalizers = nn.ModuleDict()
        self.images = nn.ModuleDict()
        for name, space in spaces.obs.items():
            if space.dtype == np.uint8:
                self.normalizers[name] = Normalizer(space.shape, unit=255.0, dtype=getattr(torch, args.precision))
                self.images[name] = image_encoder(space, args)
        features = len(self.images) * args.hidden_size
        self.core = None
        self.state_size = 0
        if args.rnn_type != "none":
            core = nn.GRU if args.rnn_type == "gru" else nn.LSTM
            self.core = core(features, args.hidden_size)
            features = args.hidden_size
            self.state_size = features * (1 if args.rnn_type == "gru" else 2)
        self.critic = init_layer(nn.Linear(features, 1), gain=1.0)
        self.policy = init_layer(nn.Linear(features, sum(spaces.heads)), gain=0.01)
        self.recorded = False  # see `recur`
        # What computes in bfloat16, by autocast, in learning and acting alike: pi/mu must be 1 at lag 0. Not the core
        # on CUDA, where autocast takes float16 for recurrent layers.
        self.reduced = []
        if args.precision == "bfloat16":
            self.reduced.append(self.images)
            if self.core is not None and args.device == "cpu":
                self.reduced.append(self.core)
        self.to(memory_format=torch.channels_last)  # as images come: height, width, channel

    def autocast(self, module):
        """Context in which one of the `reduced` modules computes in bfloat16, and any other as usual."""
        return torch.autocast(self.policy.weight.device.type, torch.bfloat16, enabled=module in self.reduced)

    def encode(self, obs):
        """obs by name [N, ...], as in the space -> float32 [N, features]"""
        with self.autocast(self.images):
            features = [
                encoder(self.normalizers[name](obs[name]).permute(0, 3, 1, 2)) for name, encoder in self.images.items()
            ]
        return torch.cat(features, -1).float()

    def forward(self, obs, first, state):
        """obs by name [T, B, ...], first bool [T, B], state float32 [B, state_size] before obs[0]; where `first` is
        set it is zeroed. Returns logits [T, B, sum(heads)], values [T, B], state."""
        T, B = first.shape
        x = self.encode({name: part.flatten(0, 1) for name, part in obs.items()}).unflatten(0, (T, B))
        if self.core is not None:
            with self.autocast(self.core):
                x, state = self.recur(x, first, state)
        return self.policy(x), self.critic(x).squeeze(-1), state

    def recur(self, x, first, state):
        """x [T, B, features] -> the core's outputs float32 [T, B, hidden_size], state. One call of the core for each
        stretch of time in which no row has `first`: many steps in one call are much faster than one at a time. Where
        calls are `recorded`, one for each step: it makes no difference there."""
        starts = range(len(first))
        if len(first) > 1 and not self.recorded:  # waits for the device
            starts = [0, *(first[1:].any(1).nonzero().flatten() + 1).tolist()]
        outputs = []
        for start, stretch in zip(starts, x.split(np.diff([*starts, len(x)]).tolist())):
            state = torch.where(first[start].unsqueeze(-1), 0.0, state).unsqueeze(0)
            if isinstance(self.core, nn.LSTM):
                output, parts = self.core(stretch, tuple(part.contiguous() for part in state.chunk(2, -1)))
                state = torch.cat(parts, -1)
            else:
                output, state = self.core(stretch, state)
            state = state.squeeze(0).float()
            outputs.append(output)
        return torch.cat(outputs).float(), state


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
    """PPO's clipped losses with V-trace's targets over the valid samples of a batch that are young enough. It has the
    fields of Rollouts, [time, rollout, ...], and `lags`, int64 [T, B]. Returns the loss and metrics, on the device.

    A loss of your own goes here: of each sample [T, B], averaged by `mean`, added to `loss`. What it needs to know of
    the moment of acting is one more field of `Rollouts`, written in `Inference.choose`. If it is in the environment's
    `info`, it is also a field of `Mailbox`, written in `WorkerEnvs.step` and copied in `Inference.store` (what tells of
    a step's outcome at t - 1, as the reward)."""
    valid = (~batch.first[1:]).float()
    used = valid * (batch.lags < args.max_policy_lag)
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

    mean = functools.partial(masked_mean, mask=used)
    advantages = advantages - mean(advantages)
    advantages = advantages / mean(advantages.square()).sqrt().clamp(min=1e-7)
    clipped = ratio.clamp(1 / (1 + args.clip_coef), 1 + args.clip_coef)
    policy_losses = -torch.min(ratio * advantages, clipped * advantages)
    near = batch.values + (values - batch.values).clamp(-args.ppo_clip_value, args.ppo_clip_value)
    value_losses = torch.max((values - targets).square(), (near - targets).square())
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
    return loss, metrics


# === Mailbox and rollouts =============================================================================================


def num_rows(args: Args) -> int:
    return max(1, args.num_workers) * args.num_envs_per_worker


def rows_per_group(args: Args) -> int:
    """Raises UserError."""
    splits = args.worker_num_splits
    if args.num_envs_per_worker % splits:
        raise UserError(
            f"--num-envs-per-worker {args.num_envs_per_worker} is not divisible by --worker-num-splits {splits}"
        )
    return args.num_envs_per_worker // splits


def slice_of(args: Args, i: int) -> slice:
    """The rows of group i, or the slots of block i: a block has as many slots as a group has rows."""
    n = rows_per_group(args)
    return slice(i * n, i * n + n)


def take_turns(args: Args) -> bool:
    """Whether collecting and learning do."""
    return args.sync or args.num_workers == 0


def blocks_per_iteration(args: Args) -> int:
    if take_turns(args):
        return num_rows(args) // rows_per_group(args)
    samples = args.num_batches_per_epoch * args.batch_size
    return max(1, round(samples / (rows_per_group(args) * args.rollout)))


def num_blocks(args: Args) -> int:
    """One for each group to fill, while those of one iteration are LEARNING and of `max_batches_ahead` FULL. No
    deadlock: while the learner waits, fewer than an iteration's are FULL, so every group fills one or finds a FREE one.
    --sync has one for each group, and all are an iteration's: none is FREE until the iteration's last step is made.
    That is all that --sync is."""
    groups = num_rows(args) // rows_per_group(args)
    return groups + (0 if take_turns(args) else blocks_per_iteration(args) * (1 + args.max_batches_ahead))


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
    """The only memory that actors share with the main process. The rows of a group lie together.

    Between request and reply a group's rows belong to the inference thread, otherwise to its actor: no locks."""

    def __init__(self, spaces: Spaces, rows: int):
        # written by the actor, between a reply and its next request
        self.obs = zeros_for(spaces, rows)  # the current observation
        self.reward = torch.full((rows,), torch.nan)  # of the action before it; NaN until the environment has started
        self.terminated = torch.zeros(rows, dtype=torch.bool)  # the action before it ended the episode for good
        self.first = torch.zeros(rows, dtype=torch.bool)  # obs is the first of an episode
        self.episode = torch.zeros(rows, len(EPISODE))  # of the game that ended just now; zeros: none did
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

    A block of slots is FILLING from when its group gets it until the rollouts are complete, then FULL (both in
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
    """The environments of one split of a worker. `reset` and `step` write the group's rows of the mailbox; from then on
    the rows belong to the caller, until it has filled in the actions and calls `step` again."""

    def __init__(self, args: Args, group: int, mailbox: SimpleNamespace, seed: int):
        """mailbox: its arrays. Environment i is seeded with seed + i, modulo 2**30."""
        n = rows_per_group(args)
        self.mailbox = mailbox
        self.rows = slice_of(args, group)
        self.seed = seed % 2**30  # what every engine takes
        self.envs = make_envs(args, n)
        self.over = np.zeros(n, bool)  # the last step ended an episode: the next one only resets
        self.sums = np.zeros((n, len(EPISODE)))  # of the games under way

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
        sums = np.stack([info.get("raw_reward", reward), zeros + 1, *own_sums], -1)
        self.sums += np.where(first[:, None], 0, sums)  # what only resets does not count
        game_over = info.get("game_over", self.over)
        episode = np.where(game_over[:, None], self.sums, 0)  # not a product: a sum may be NaN
        self.sums[game_over] = 0
        self.write(observation, reward=reward, terminated=terminated, first=first, episode=episode)

    def write(self, observation, **flags):
        for name, part in observation.items():
            self.mailbox.obs[name][self.rows] = part
        for name, value in flags.items():
            getattr(self.mailbox, name)[self.rows] = value


def answer(pipe):
    """Waits until the actions of one of an actor's splits are written: its number. None: the run has ended."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        return None


def run_actor(args: Args, worker: int, seed: int, mailbox: Mailbox, pipe):
    """Body of an actor. It sends the number of a split when its rows are written, and receives one when the actions
    are. A string says what went wrong. The end of the pipe is the end of the other side, however it died."""
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
        if args.set_workers_cpu_affinity:
            cores = sorted(os.sched_getaffinity(0))
            if len(cores) == num_cores():  # else there is a quota, and other containers would pin to the same cores
                os.sched_setaffinity(0, {cores[worker % len(cores)]})
        os.nice(10)  # where cores are short, inference and learning come first: actors without actions only wait
        seed_generators(seed)
        gym.logger.min_level = gym.logger.ERROR  # the main process has shown the warnings of `make_envs`
        faulthandler.register(signal.SIGALRM, chain=True)  # shows where it hangs, and ends it
    # Inference notices a hang, but where the main process is dead only the kernel does
    timer = functools.partial(signal.setitimer, signal.ITIMER_REAL)
    limit = args.actor_timeout * args.num_envs_per_worker * bool(args.num_workers)
    try:
        with contextlib.ExitStack() as stack:
            timer(limit)
            splits = []
            for split in range(args.worker_num_splits):
                group = worker * args.worker_num_splits + split
                splits.append(WorkerEnvs(args, group, mailbox.numpy(), seed + split * rows_per_group(args)))
                stack.callback(splits[split].envs.close)
                splits[split].reset()
                pipe.send(split)
            if not worker:  # one of them shows those of the steps
                gym.logger.min_level = gym.logger.WARN
            timer(0)
            while (split := answer(pipe)) is not None:
                timer(limit)
                splits[split].step()
                timer(0)
                pipe.send(split)
            timer(limit)
    except BaseException as error:  # sys.exit() in an environment, too
        text = str(error) if isinstance(error, UserError) else traceback.format_exc().strip()
        with contextlib.suppress(ConnectionError):  # the run has ended
            pipe.send(text)
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


class Inference:
    """Serves the groups that wait for actions, all at once. Owns every row's recurrent state and FILLING slot, and has
    the memory, the pipes and the queue between itself, the actors and the learner.

    It acts with a copy of the learner's network. Acting with it and overwriting it both hold the lock until the device
    is done: no action comes from half an update. Before a block changes hands, the host waits until the device has done
    what it was asked to do with it: there are no events between the two streams.

    Where an actor dies, another takes its place. Its environments and the last transition of each of its rows are lost:
    the row's next observation is a `first` one, which makes that transition invalid."""

    def __init__(self, args: Args, spaces: Spaces, agent: Agent, device: torch.device):
        self.args = args
        self.spaces = spaces
        self.device = device
        self.agent = copy.deepcopy(agent).requires_grad_(False)
        for module in self.agent.reduced:  # else autocast would cast the weights at each inference
            module.bfloat16()
        self.agent.to(device)  # packs the core's weights for cuDNN
        mine = [*self.agent.parameters(), *self.agent.buffers()]
        learned = [*agent.parameters(), *agent.buffers()]  # updated in place
        self.copies = {x.dtype: ([], []) for x in mine}  # by type: a launch for each
        for x, y in zip(mine, learned):
            self.copies[x.dtype][0].append(x)
            self.copies[x.dtype][1].append(y)
        self.version = 0  # of the agent
        self.lock = threading.Lock()  # of the agent
        workers = max(1, args.num_workers)
        groups = workers * args.worker_num_splits
        blocks = [slice_of(args, i) for i in range(num_blocks(args))]
        self.shared_mailbox = Mailbox(spaces, num_rows(args))
        self.mailbox = self.shared_mailbox.numpy()  # the same memory
        self.rollouts = Rollouts(spaces, args.rollout, blocks[-1].stop, agent.state_size, device)
        self.state = torch.zeros(num_rows(args), agent.state_size, device=device)
        self.filling = dict(enumerate(blocks[:groups]))  # by group; without an entry it waits for a FREE block
        self.t = np.zeros(groups, int)  # steps so far in the group's FILLING block
        self.free = deque(blocks[groups:])
        self.full = queue.SimpleQueue()  # blocks to the learner
        self.end = None  # what ends the run: an error, or KeyboardInterrupt
        self.returned, self.learner_end = mp.Pipe(duplex=False)  # blocks back from it; closed, it ends the thread
        self.pipes, self.actor_ends = map(list, zip(*[mp.Pipe() for _ in range(workers)]))
        self.selector = selectors.DefaultSelector()
        for pipe in (self.returned, *self.pipes):
            self.selector.register(pipe, selectors.EVENT_READ)
        self.asked = Counter()  # requests of each worker's actor
        self.replace = None  # replace(worker, pipe, text), which `running` sets: another actor for one that has ended
        self.requests = []  # groups that wait for actions, the oldest first: their rows are this thread's
        self.heard = np.full(workers, time.monotonic())  # when a worker last sent a request, or was answered
        self.actors = {}  # by worker: its process, which `running` starts
        self.episodes = deque(maxlen=100)  # the last finished ones, see EPISODE
        self.counts = Counter()  # rows served, and in how many forward passes; seconds waited, by the learner too
        if args.cuda_graphs:
            self.choose = recorded(self.choose, device)

    @torch.no_grad()
    def publish(self, version: int):
        """The learner's weights and statistics, as they are now, act from the next inference on."""
        with self.lock:
            for copied, learned in self.copies.values():
                torch._foreach_copy_(copied, learned)
            self.version = version
            wait_for(self.device)

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
        """Ends the actors that have owed a request for `actor_timeout`: they hang, or somebody has stopped them. Their
        stacks go to stderr, and `receive` finds their pipes closed."""
        limit = self.args.actor_timeout or np.inf
        splits = self.args.worker_num_splits
        for worker in np.flatnonzero(time.monotonic() - self.heard > limit):
            waiting = [group // splits for group in self.requests].count(worker)
            unread = self.pipes[worker].poll()  # of an actor that answered while this process was stopped
            if worker in self.actors and self.args.num_workers and waiting < splits and not unread:
                self.heard[worker] = time.monotonic()
                with contextlib.suppress(OSError):  # it has ended
                    for number in (signal.SIGALRM, signal.SIGCONT):
                        os.kill(self.actors[worker].pid, number)
                return  # one at a time: else their stacks are mixed

    def receive(self, pipe):
        """Takes a group's request, or blocks from the learner: LEARNING -> FREE. Raises UserError."""
        if pipe is self.returned:
            with contextlib.suppress(EOFError):  # `learner_end` was closed
                self.free.extend(pipe.recv())
            return
        worker = self.pipes.index(pipe)
        self.heard[worker] = time.monotonic()
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            message = ""  # it was killed, or crashed
        if isinstance(message, int):
            self.requests.append(worker * self.args.worker_num_splits + message)
            self.asked[worker] += 1
            return
        self.selector.unregister(pipe)
        pipe.close()
        self.requests = [group for group in self.requests if group // self.args.worker_num_splits != worker]
        self.pipes[worker], actor_end = mp.Pipe()
        self.selector.register(self.pipes[worker], selectors.EVENT_READ)
        self.replace(worker, actor_end, message)

    def serve(self):
        """Hands over the blocks that are complete, and answers all groups that have a block or get a new one. The
        others go on waiting, until a block is free."""
        complete = [group for group in self.requests if self.t[group] == self.args.rollout]
        if complete:  # their rows are stored twice: here as obs[T] of the old block, below as obs[0] of the new one
            self.store_obs(*self.store(complete))
            wait_for(self.device)  # the learner, whose stream is another, finds these blocks written
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
            worker, split = divmod(group, self.args.worker_num_splits)
            self.heard[worker] = time.monotonic()
            with contextlib.suppress(ConnectionError):  # it has died, as `receive` will find
                self.pipes[worker].send(split)

    def store(self, groups: list[int]):
        """Copies the mailbox rows of the groups to their times and slots, but for the observations. Returns these, by
        name [1, N, ...], and int64 [4, N]: rows, times, slots, `first`."""
        mailbox = self.mailbox
        rollouts = self.rollouts
        rows = np.r_[*(slice_of(self.args, group) for group in groups)]
        slots = np.r_[*(self.filling[group] for group in groups)]
        t = self.t[groups].repeat(rows_per_group(self.args))
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

    def act(self, groups: list[int]):
        """Stores the rows of the groups, and chooses their next actions."""
        obs, places = self.store(groups)
        rows, t, slots, _ = places.numpy()
        with self.lock:
            actions = self.choose(obs, places)
            self.mailbox.action[rows] = actions.cpu().numpy()  # waits: the lock is held until the network has been used
            self.rollouts.versions[t, slots] = self.version
        self.t[groups] += 1
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

    def __init__(self, args: Args, agent: Agent, inference: Inference):
        self.args = args
        self.spaces = inference.spaces  # for a network of your own, such as that of a curiosity reward
        self.inference = inference
        self.agent = agent
        self.device = inference.device
        self.optimizer = torch.optim.Adam(self.agent.parameters(), args.learning_rate, eps=1e-6, fused=True)
        if args.cuda_graphs:
            self.differentiate = recorded(self.differentiate, self.device)
            self.agent.recorded = True
        self.global_step = 0  # valid transitions received, those that are too old included
        self.version = 0  # of the policy, when the iteration under way began
        self.best_return = -np.inf  # of best.pth

    def collect(self) -> list[slice]:
        """Waits for the blocks of an iteration: FULL -> LEARNING. Raises what ends the run: an error of the inference
        thread, or KeyboardInterrupt for a signal."""
        start = time.perf_counter()
        blocks = []
        for _ in range(blocks_per_iteration(self.args)):
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
        self.version = self.inference.version
        lags = (self.version - rollouts.versions[:, slots])[valid]
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
            "lag/masked": (lags >= args.max_policy_lag).sum() / max(1, len(lags)),
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
        Returns the metrics, and the loss and the gradients' norm in one tensor."""
        loss, metrics = appo_loss(self.args, self.agent, SimpleNamespace(**batch))
        self.optimizer.zero_grad(set_to_none=not self.args.cuda_graphs)  # what is recorded adds to them where they are
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.agent.parameters(), self.args.max_grad_norm or torch.inf)
        return metrics | {"losses/grad_norm": grad_norm}, torch.stack([loss.detach(), grad_norm])

    def update(self, batch: SimpleNamespace, last_epoch: bool):
        """One optimiser step: a new version. Returns its metrics. Raises FloatingPointError if it is not finite."""
        batch.lags = self.version - batch.versions
        metrics, checked = self.differentiate(vars(batch))
        loss, grad_norm = checked.tolist()
        # This check waits for the device: so nothing broken is published or saved, and inference does not wait at the
        # lock for a backward pass.
        if not np.isfinite(loss + grad_norm):
            raise FloatingPointError(
                f"the loss ({loss}) or its gradient is not finite: check observations and rewards, "
                "or try a lower --learning-rate or --max-grad-norm"
            )
        begun = self.inference.version > 0  # the first batch only initialises the inputs' statistics
        if last_epoch or not begun:  # each rollout once, with several epochs the first batch's twice
            valid = ~batch.first[1:]
            start = int(torch.randint(min(4, len(valid)), ()))  # of every fourth step: neighbours hardly differ
            for name, normalizer in self.agent.normalizers.items():
                normalizer.update(batch.obs[name][start:-1:4], valid[start::4])
        if begun and grad_norm:  # it is 0 where no sample could be used
            self.optimizer.step()
        self.inference.publish(self.inference.version + 1)
        return metrics


# A first reading ends here.


# === Run ==============================================================================================================

# How a run ends: `train` saves and reports; leaving `running` stops the inference thread and closes the pipes, at which
# the actors end. What leads there is
# - the last step: the loop is over;
# - Ctrl-C, SIGTERM or SIGHUP: the handler calls `Inference.end_with`, and `collect` raises KeyboardInterrupt (a second
#   signal a second later ends the process at once; the actors find their pipes closed, as after kill -9);
# - an actor that dies again and again, or an error in the inference thread: in the same way;
# - an error in the learner: as it is.

SIGNALS = [signal.SIGINT, signal.SIGTERM]
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
    SIGNALS.append(signal.SIGHUP)
# All other whole numbers are at least 1, and the rest 0
AT_LEAST = dict(num_workers=0, seed=0, max_batches_ahead=0, keep_checkpoints=0, reward_clip=1e-3)
# Requests; an actor that dies after fewer died early: three of a worker in a row end the run, and before a new run's
# first update one that has made none
SHORT_LIFE = 1000
FIXED = ("env_id", "full_action_space", "encoder", "rnn_type", "hidden_size")  # a resumed run has the same


def check(args: Args):
    """Raises UserError."""
    for name, value in asdict(args).items():
        least = AT_LEAST.get(name, int(type(value) is int))
        if isinstance(value, int | float) and not value >= least:  # neither is NaN
            raise UserError(f"--{name.replace('_', '-')} {value} is out of range: at least {least}")
    if not 0 <= args.sticky_actions <= 1:
        raise UserError(f"--sticky-actions {args.sticky_actions} is out of range: it is a probability")
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
    are ignored, and inherits that, as does an actor until it is in a process group of its own."""
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
        forkserver.set_forkserver_preload(["numpy", "torch", "gymnasium", "tyro", "tqdm", "envpool"])
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


def log(folder: Path, text, show=True):
    with open(folder / "log.txt", "a") as file:
        for line in text.splitlines():
            print(time.strftime("%Y-%m-%d %H:%M:%S"), line, file=file)
    if show:
        with contextlib.suppress(OSError):  # the terminal is closed, or nobody reads: the file goes on
            tqdm.write(text)  # beside the bar
            sys.stdout.flush()


def kill(actor):
    """An actor's process, and the programs that its environments have started."""
    actor.kill()
    with contextlib.suppress(OSError):  # there is none
        os.killpg(actor.pid, signal.SIGKILL)


@contextlib.contextmanager
def running(inference: Inference, folder: Path):
    """Context with the inference thread, and the actors with their environments, whose seeds depend on the version: a
    resumed run, or another actor, has other episodes."""
    args = inference.args
    thread = threading.Thread(target=inference.run, name="inference", daemon=True)
    # fork is unsafe beside threads and CUDA; spawn costs 100 MB for each actor
    process_or_thread = mp.get_context("forkserver").Process if args.num_workers else threading.Thread
    actors = inference.actors
    early_deaths = Counter()  # of each worker's actors, in a row

    def start(worker, pipe):
        life = inference.version + early_deaths[worker]
        seed = random.Random(f"{args.seed} {life} {worker}").getrandbits(30)
        arguments = (args, worker, seed, inference.shared_mailbox, pipe)
        actor = process_or_thread(target=run_actor, args=arguments, daemon=True)
        try:
            actor.start()
        except EOFError:  # the fork server could not fork, and has ended
            raise UserError(f"actor {worker} cannot be started: too many processes (ulimit -u)?") from None
        inference.heard[worker] = time.monotonic()
        actors[worker] = actor
        if args.num_workers:
            pipe.close()  # the actor's copy is the only one, and ends with it

    def replace(worker, pipe, text):
        """In the inference thread. text: what the actor has told of its end, if it could. Raises UserError."""
        asked = inference.asked.pop(worker, 0)
        if args.num_workers:
            kill(actors[worker])
            actors[worker].join()
            code = actors[worker].exitcode
            hung = f"no answer for {args.actor_timeout:g} s (--actor-timeout)"
            text = text or (hung if code == -signal.SIGALRM else f"died (exit code {code})")
            if code == -signal.SIGSEGV and not asked:
                text += " while its engines started: is the scenario for several players?"
        early_deaths[worker] += 1
        if asked >= SHORT_LIFE:
            early_deaths[worker] = 0
        if not (asked or inference.version) or not args.num_workers or early_deaths[worker] == 3:
            raise UserError(f"actor {worker}: {text}")
        log(folder, f"actor {worker}: {text}; starting another")
        start(worker, pipe)

    inference.replace = replace
    try:
        thread.start()
        for worker, pipe in enumerate(inference.actor_ends):
            start(worker, pipe)
        yield
    finally:
        inference.learner_end.close()
        thread.join(10)
        for pipe in inference.pipes:
            pipe.close()
        deadline = time.monotonic() + 5
        for actor in actors.values():
            actor.join(max(0.0, deadline - time.monotonic()))
            if args.num_workers:
                kill(actor)


def save_checkpoint(folder: Path, learner: Learner):
    """The latest one, also as best.pth where the mean return of the last 100 games is the best so far. Tensors and
    plain values only. Written under another name first: a checkpoint is whole or absent."""
    folder = folder / "checkpoints"
    folder.mkdir(exist_ok=True)
    names = [f"checkpoint_{learner.global_step:012d}.pth"]
    returns = [episode[0] for episode in learner.inference.episodes.copy()]
    best_return = learner.best_return
    if len(returns) == 100 and np.mean(returns) > best_return:
        best_return = float(np.mean(returns))
        names.insert(0, "best.pth")  # before the checkpoint, which has its return
    content = dict(
        agent=learner.agent.state_dict(),
        optimizer=learner.optimizer.state_dict(),
        version=learner.inference.version,
        global_step=learner.global_step,
        best_return=best_return,
    )
    buffer = io.BytesIO()  # a full disk is then an OSError
    torch.save(content, buffer)
    for name in names:
        (folder / "saving.tmp").write_bytes(buffer.getbuffer())
        os.replace(folder / "saving.tmp", folder / name)
    learner.best_return = best_return  # only now: writing may fail
    # By when they were written: a damaged one that was passed over may have more steps
    for old in sorted(folder.glob("checkpoint_*.pth"), key=os.path.getmtime)[: -learner.args.keep_checkpoints]:
        old.unlink()


def read_checkpoint(folder: Path):
    """The latest one that can be read. None: there is none. Raises UserError."""
    folder = folder / "checkpoints"
    paths = sorted(folder.glob("checkpoint_*.pth"), reverse=True)
    for path in paths:
        with contextlib.suppress(Exception):
            return torch.load(path, map_location="cpu", weights_only=True)
        print(f"warning: {path} cannot be read")
    if paths:  # a fresh start would in time delete them
        raise UserError(f"no checkpoint in {folder} can be read: move them away to start anew")


def load_checkpoint(folder: Path, learner: Learner):
    """Raises UserError where there is none that can be read, or it is of another network."""
    content = read_checkpoint(folder)
    if content is None:
        return
    try:
        learner.agent.load_state_dict(content["agent"])
        learner.optimizer.load_state_dict(content["optimizer"])
        learner.inference.publish(content["version"])
        learner.global_step = content["global_step"]
        learner.best_return = content["best_return"]
    except Exception as error:  # of any type, and of many lines
        what = " ".join(str(error).split()).split(". ")[0]
        raise UserError(f"the latest checkpoint in {folder} is of another network, or damaged: {what}") from None


class Reporter:
    """The progress bar, log.txt and TensorBoard. Every rate is over the time since the last report."""

    SECONDS = 5  # between two reports

    def __init__(self, args: Args, learner: Learner, folder: Path):
        """To be made before the inference thread starts: its waits are shares of the time from here on."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only the main process writes

        self.folder = folder
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
        self.score = "no game is over"
        self.first = self.last = Counter(seconds=time.monotonic(), steps=learner.global_step)

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
        fps = sps * self.learner.args.frameskip
        scalars = self.metrics | {
            "charts/SPS": sps,
            "charts/FPS": fps,
            "stats/learner_wait": change["learner"] / seconds,  # shares of the time: the learner waits for full blocks,
            "stats/inference_idle": change["requests"] / seconds,  # inference waits for requests,
            "stats/inference_blocked": change["blocks"] / seconds,  # or has requests and waits for free blocks
            "stats/inference_batch": change["rows"] / max(1, change["forwards"]),  # rows served together
        }
        if episodes := self.learner.inference.episodes.copy():
            scalars |= zip((f"charts/{name}" for name in EPISODE), np.mean(episodes, axis=0).tolist())
            self.score = f"return {scalars['charts/episodic_return']:.2f}"
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, self.learner.global_step)
        total = now - self.first  # of the session: it does not change with every report
        if total["blocks"] >= total["learner"]:
            limit = "learner"
        elif total["requests"] > total["seconds"] / 2:
            limit = "environments"
        else:
            limit = "inference"
        text = f"{self.score}, {fps:,.0f} frames/s, limit: {limit}, lag {self.metrics['lag/mean']:.0f}"
        self.bar.set_postfix_str(text)
        log(self.folder, f"step {self.learner.global_step:,}: {text}", show=self.bar.disable)

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
    for option, value in {-1: 2**31 - 1, -4: 0, -8: 1}.items():  # M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX
        ctypes.CDLL(None).mallopt(option, value)  # keeps freed memory: a third off an update on images on a CPU
    spaces = spaces_of(args)
    agent = Agent(spaces, args).to(device)
    inference = Inference(args, spaces, agent, device)
    learner = Learner(args, agent, inference)
    lock(folder)
    load_checkpoint(folder, learner)
    if learner.global_step >= args.total_timesteps:
        print("Already complete: raise --total-timesteps to continue.")
        return 0
    place = f"resuming {folder} at step {learner.global_step:,}" if learner.global_step else f"a new run in {folder}"
    workers = f"{args.num_workers} workers on {num_cores()} cores"
    log(folder, f"{args.env_id}: {workers}, {num_rows(args)} environments\n{place}")
    wait_for(device)  # the above ran in the default stream; learner and inference have their own
    (folder / "cfg.tmp").write_text(json.dumps(dict(file=__file__, args=args.typed), indent=2))
    os.replace(folder / "cfg.tmp", folder / "cfg.json")
    handle_signals(inference)
    reporter = Reporter(args, learner, folder)
    code = 0
    deadline = np.inf
    with running(inference, folder), own_stream(device):
        saved_at = time.monotonic()
        try:
            while learner.global_step < args.total_timesteps and time.monotonic() < deadline:
                reporter.update(learner.iterate(learner.collect()))
                deadline = min(deadline, time.monotonic() + args.train_for_seconds)  # from the first iteration on
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
    log(folder, f"{'stopped' if code else 'done'}: {learner.global_step:,} steps, {reporter.score}")
    if learner.global_step:
        place = shlex.quote(str(folder))
        log(folder, f"play: python evaluate.py {place}\ncurves: tensorboard --logdir {place}")
    log(folder, f"continue: the same command with --experiment {shlex.quote(args.experiment)}")
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
    folder = None
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as a daemon's
            setattr(sys, name, open(os.devnull, "w"))
            os.set_inheritable(getattr(sys, name).fileno(), True)
    try:
        args, folder = parse_args()
        return train(args, folder)
    except (UserError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if folder:
            with contextlib.suppress(OSError):
                log(folder, f"error: {error}", show=False)
        return 2


if __name__ == "__main__":
    sys.exit(main())
