# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "numpy==2.4.6",
#     "gymnasium==1.4.0",
#     "tyro==1.0.17",
#     "tensorboard==2.21.0",
#     "tqdm==4.70.1",
#     "envpool==1.2.5",
#     "imageio[ffmpeg]==2.38.1",
# ]
# ///
"""Asynchronous PPO with V-trace on Atari (EnvPool): the whole pipeline of Sample Factory / IMPALA in one file.

    python appo_atari.py --env-id Breakout-v5
    torchrun --standalone --nproc-per-node 4 appo_atari.py --env-id Breakout-v5    # four GPUs

On 2 cores of an AMD EPYC (Zen 3, no GPU) it reaches a mean return of 347 in Breakout at 6 million steps, and with
`--env-id Pong-v5` 18 after 1.8 million (one seed each, 2026-11-21 and 22; benchmark/learning_*.sh).

A deliberate edit of appo_doom.py. What differs: the games' flags and other defaults in `Args`, `AtariEnvs`, the
networks in `Agent`, and no engine processes to look after. All else is the same text.

     actor process w = 0..W-1  (CPU only)              main process (owns the accelerator)
     +-------------------------------+  request: group g  +------------------------------------------+
     | step the envs of split s      | -----------------> | inference thread                         |
     | write obs, reward, ... into   |                    |   copy the rows of all waiting groups    |
     | the mailbox rows of group g   | <----------------- |   into the rollouts, forward, sample,    |
     | (meanwhile the other split    |  reply: byte s     |   write actions into the mailbox         |
     |  waits for its actions)       |                    +------------------------------------------+
     +-------------------------------+                       | full slots                ^ free slots
                                                          +------------------------------------------+
                                                          | learner (main thread)                    |
                                                          |   take B slots, V-trace, PPO step,       |
                                                          |   publish weights as version v+1         |
                                                          +------------------------------------------+
     slot:  FREE -> FILLING (one row) -> FULL -> LEARNING -> FREE        exactly one owner at any time

Words: a *worker* is one actor process; it steps its environments in one or more *splits*. A *row* is one environment's
endless stream of experience; a *group* is the rows of one split of one worker, which ask for actions together. A *slot*
is room for one rollout (T steps of one row), a *batch* is B rollouts, an *iteration* is what the learner does with one.
A *step* is one decision of the agent, a *frame* one tick of the game (frames = steps x frameskip). Every policy that is
published has a *version*, one higher than the last; the *lag* of a sample is the learner's version minus the version
that chose its action.

One rule about time, from which everything follows. Environments reset on the step AFTER an episode ends (Gymnasium's
NEXT_STEP): the step that ends an episode returns its last observation, the action chosen there is ignored, and the next
observation is the first of the next episode. So two flags say all there is to know:

    first[t]       obs[t] is the first of an episode: the recurrent state is zeroed before obs[t] enters it
    terminated[t]  action t ended the episode for good: the discount of step t is gamma * (1 - terminated[t])

and a transition t -> t+1 is valid iff not first[t+1]. An invalid one (the ignored action; an actor that was restarted)
cuts the V-trace trace and is left out of every loss, mean and step count. A time limit needs no flag of its own: its
last step bootstraps from the value of the true last observation.
"""

import contextlib
import copy
import ctypes
import difflib
import faulthandler
import json
import math
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import queue
import random
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import envpool
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import tyro
from envpool.atari.registration import atari_game_list
from tqdm import tqdm


# ======================================================================================================================
# Args
# ======================================================================================================================


@dataclass
class Args:
    # --- run
    env_id: str = "Breakout-v5"  # one of EnvPool's 104 Atari games; a wrong name is answered with the nearest
    frameskip: int = 4  # game ticks (frames) per step of the agent; the image is the maximum of the last two
    episodic_life: bool = True  # a lost life ends an episode, but not the game: scores are of whole games
    noop_max: int = 30  # most no-ops of one frame that an episode begins with, one of them FIRE with `fire_reset`
    fire_reset: bool = True  # each episode of a game that has a FIRE button begins with it
    sticky_actions: float = 0.0  # probability that the game repeats its last action instead of taking the new one
    full_action_space: bool = False  # all 18 actions instead of the game's own
    machado: bool = False
    """what Machado et al. (2018) recommend, instead of the five flags above: whole games, sticky actions 0.25, all 18
    actions, no FIRE and only the one no-op that EnvPool always plays. (Their own frameskip is 5, and games end after 5
    minutes.)"""
    seed: int = 1  # of the network, of the action sampling and of the games
    total_timesteps: int = 10_000_000  # stop after this many steps (frames / frameskip) of all sessions and ranks
    train_for_seconds: float | None = None  # stop after this many seconds of learning in this session
    device: str = "auto"  # cpu, cuda or cuda:1; auto is cuda where there is one; under torchrun each rank has its own
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the encoder; auto is bfloat16 where the GPU or the CPU (AVX512-BF16, AMX) has instructions for it"""
    experiment: str | None = None  # the run's folder below train_dir; an existing one is resumed. Default: a fresh one
    train_dir: str = "train_dir"  # where experiments are kept
    save_every_sec: float = 120.0  # seconds between checkpoints
    keep_checkpoints: int = 2  # how many of the latest checkpoints are kept
    evaluate: bool = False  # play with a checkpoint of `experiment` instead of training
    eval_episodes: int = 100  # number of episodes to play
    eval_deterministic: bool = False  # play the likeliest action instead of a sampled one
    load_checkpoint_kind: Literal["latest", "best"] = "latest"  # which checkpoint to play with
    save_video: bool = False  # write the first minute of one game's episodes to <experiment>/video.mp4

    # --- sampling
    num_workers: int | None = None
    """actor processes (under torchrun: of each rank). Default: the cores this process may use. 0: games in this
    process, to debug (implies sync)"""
    num_envs_per_worker: int = 16  # games per worker
    worker_num_splits: int | None = None
    """parts that a worker's games are stepped in: it steps one while the others wait for actions. Default: 2 with CUDA
    and an even number of games, else 1 (without CUDA a worker that waits leaves its core to the network)"""
    set_workers_cpu_affinity: bool = True
    """pin worker i and its games to the i-th core of this process; off where a container's CPU quota is less than its
    cores. For several runs at once turn it off, or give each run cores of its own with taskset"""
    sync: bool = False  # collect only while the learner waits, so that each iteration begins with lag 0: the baseline
    actor_timeout: float = 120.0  # restart a worker when a step of its games, or the start of one, takes more seconds
    inference_threads: int | None = None  # CPU threads of inference (of each rank). Default: by the number of cores
    learner_threads: int | None = None  # CPU threads of the learner (of each rank). Default: by the number of cores

    # --- algorithm
    rollout: int = 32  # steps per rollout (T)
    batch_size: int | None = None
    """samples per optimiser step (under torchrun: from each rank), a multiple of rollout. Default: near rows * rollout
    / 4, from 256 to 8192; with sync rows * rollout"""
    num_epochs: int = 1  # passes over each batch; with sync PPO clips nothing in the first
    max_batches_ahead: int = 1  # batches collected ahead of the learner; more hides jitter and adds lag
    max_policy_lag: int = 100  # samples by a policy at least this many versions old are left out of the losses
    learning_rate: float = 2.5e-4  # of Adam
    gamma: float = 0.99  # discount per step
    vtrace_rho: float = 1.0  # V-trace's clip of the importance weight of a temporal difference (rho bar)
    vtrace_c: float = 1.0  # V-trace's clip of the trace (c bar)
    vtrace_lambda: float = 0.95  # decay of the trace, as in GAE; 1 is the V-trace of the paper
    clip_coef: float = 0.1  # PPO: the ratio is clipped to [1/(1+e), 1+e]
    ppo_clip_value: float = 0.1  # PPO: the value may move this far from the one at acting time
    vf_coef: float = 0.5  # coefficient of the value loss
    exploration_loss: Literal["entropy", "symmetric_kl"] = "entropy"
    """reward for entropy, or penalty for the symmetric KL divergence from the uniform policy"""
    ent_coef: float = 0.01  # coefficient of the exploration loss
    max_grad_norm: float = 0.5  # gradients are scaled down to this norm; 0 turns it off
    reward_scale: float = 1.0  # rewards are multiplied by this
    reward_clip: float = 1.0  # then clipped to +- this
    normalize_input: bool = True
    """normalise every pixel by its running mean and variance, so that a small ball stands out; off: pixels / 255"""
    encoder: Literal["nature", "impala"] = "nature"
    """the convolutions of Mnih et al. (2015), or the residual ones of Espeholt et al. (2018)"""
    rnn_type: Literal["gru", "lstm", "none"] = "none"  # the recurrent core
    hidden_size: int = 512  # units of the encoder's last layer and of the recurrent core


# The ranges of numeric flags; of those not named, 1 to infinity for whole numbers and 0.0 to infinity for others
LOWEST = dict(num_workers=0, seed=0, max_batches_ahead=0, reward_scale=-np.inf, actor_timeout=1.0)
HIGHEST = dict(gamma=1.0, vtrace_lambda=1.0, sticky_actions=1.0, seed=2**31 - 1, worker_num_splits=256)
BATCH_SHARE, SMALLEST_BATCH = 4, 256  # default batch: a rollout of every row / BATCH_SHARE, but at least this
# flags of one session, not of the experiment
SESSION = ("train_for_seconds", "evaluate", "eval_episodes", "eval_deterministic", "load_checkpoint_kind", "save_video")
# must be the checkpoint's; --evaluate may play another game with the same observations and actions
GAME, NETWORK = ("env_id", "full_action_space", "machado"), ("encoder", "rnn_type", "hidden_size", "normalize_input")


class UserError(Exception):
    """Something the user can fix; printed as one line, without a traceback."""


def cpu_quota() -> float:
    """How many cores' time this process may use of its container's (cgroup v2, else v1); infinity without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # no such file; "max" instead of a number
            quota, period = map(int, " ".join(Path("/sys/fs/cgroup", name).read_text() for name in names).split())
            if quota > 0:
                return quota / period / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return float("inf")


def resolve(args: Args) -> Args:
    """A copy of `args` in which what depends on the machine (None, "auto") is filled in. Raises UserError."""
    args = copy.copy(args)
    for name, value in asdict(args).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            low, high = LOWEST.get(name, 1 if isinstance(value, int) else 0.0), HIGHEST.get(name, np.inf)
            if not low <= value <= high:
                raise UserError(f"--{name.replace('_', '-')} {value} is out of range: {low} to {high}")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device.startswith("cuda") and dist.is_torchelastic_launched():  # each rank of a machine has its own GPU
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    kind, _, index = args.device.partition(":")
    if args.device not in ("cpu", "cuda") and (kind != "cuda" or not index.isdecimal() or index != str(int(index))):
        raise UserError(f"--device {args.device} is no device for this; cpu, cuda or cuda:1")
    if kind == "cuda" and int(index or 0) >= (count := torch.cuda.device_count()):
        raise UserError(f"--device {args.device} is not there: torch {torch.__version__} sees {count} CUDA devices")
    cpu, in_mask, quota = kind == "cpu", len(os.sched_getaffinity(0)), cpu_quota()
    if args.precision == "auto":
        if cpu:
            capable = any(flag in Path("/proc/cpuinfo").read_text() for flag in ("avx512_bf16", "amx_bf16"))
        else:
            with torch.cuda.device(args.device):
                capable = torch.cuda.is_bf16_supported(including_emulation=False)
        args.precision = "bfloat16" if capable else "float32"
    n = max(1, int(min(in_mask, quota)))
    if quota < in_mask:  # this machine's other containers see the same cores, and would pin to them too
        args.set_workers_cpu_affinity = False
    args.num_workers = n if args.num_workers is None else args.num_workers
    args.sync |= args.num_workers == 0
    if args.num_workers == 0:
        args.worker_num_splits = 1
    elif args.worker_num_splits is None:
        args.worker_num_splits = 1 if cpu or args.num_envs_per_worker % 2 else 2
    # On a CPU learning costs two to three times inference; with --sync the two take turns and use every core.
    args.learner_threads = args.learner_threads or (1 if not cpu else n if args.sync else max(1, n // 2))
    args.inference_threads = args.inference_threads or (1 if not cpu else n if args.sync else max(1, n // 4))
    if args.num_envs_per_worker % args.worker_num_splits:
        raise UserError(f"--num-envs-per-worker {args.num_envs_per_worker} is not divisible by "
                        f"--worker-num-splits {args.worker_num_splits}")  # fmt: skip
    rows = max(1, args.num_workers) * args.num_envs_per_worker
    if args.batch_size is None:
        if args.sync:  # one rollout of every row
            args.batch_size = rows * args.rollout
        else:
            power = 2 ** round(np.log2(rows * args.rollout / BATCH_SHARE))
            args.batch_size = max(1, min(8192, max(SMALLEST_BATCH, power)) // args.rollout) * args.rollout
    if args.batch_size < args.rollout or args.batch_size % args.rollout:
        raise UserError(f"--batch-size {args.batch_size} is not a multiple of --rollout {args.rollout}")
    if args.sync and args.batch_size != rows * args.rollout:
        raise UserError(f"--sync needs one rollout of every row: --batch-size {args.batch_size} is not {rows} rows x "
                        f"{args.rollout} steps = {rows * args.rollout}")  # fmt: skip
    return args


ALL_REDUCE = SimpleNamespace(seconds=0.0)  # that the learner has waited for other ranks


def rank_of() -> tuple[int, int]:
    """This process's rank, and the number of ranks: 0 and 1 without `torchrun`."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """In place, and equal on all ranks to the bit. Without `torchrun` x as it is."""
    if dist.is_initialized():
        start = time.perf_counter()
        dist.all_reduce(x)
        ALL_REDUCE.seconds += time.perf_counter() - start
    return x


def gather_over_ranks(mine) -> list:
    """What every rank has, in their order; waits for the last."""
    everyone = [mine] * rank_of()[1]
    if dist.is_initialized():
        dist.all_gather_object(everyone, mine)
    return everyone


def from_first_rank(function):
    """What `function` returns on rank 0; only there it is called."""
    result = [function() if rank_of()[0] == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(result)
    return result[0]


# ======================================================================================================================
# Environment
# ======================================================================================================================

ENGINE, TICKS_PER_SECOND = "envpool", 60
GAME_SHARED_MEMORY = 0  # bytes of /dev/shm that a game takes


MACHADO = dict(episodic_life=False, noop_max=1, fire_reset=False, sticky_actions=0.25, full_action_space=True)


class AtariEnvs(gym.vector.VectorEnv):
    """EnvPool's Atari games with the usual preprocessing (Mnih et al. 2015): 84x84, grey, the last 4 images.
    Observation: uint8 [84, 84, 4], the newest last (as convolutions on a CPU want it, rearranged once for acting and
    learning; EnvPool's own is [4, 84, 84]). Rewards are the game's own score. A game ends after 108,000 frames, half
    an hour. The pool is made in `reset`, where it gets its seed; it resets on the step after an episode's end.

    `info["game_over"]`: the whole game ended. With `episodic_life` a lost life ends an episode, and the step after it,
    whose action is ignored too, continues the same game with the no-ops and FIRE; points scored there are not counted.
    Some games (RoadRunner) may end there, unreported by EnvPool: that step begins a new game, and has `game_over`.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP, "render_modes": ["rgb_array"]}

    def __init__(self, args: Args, num_envs: int):
        games = {"".join(map(str.capitalize, game.split("_"))) + "-v5" for game in atari_game_list}
        if args.env_id not in games:
            folded = {game.casefold(): game for game in games}
            near = difflib.get_close_matches(args.env_id.casefold(), folded, cutoff=0.3) or ["breakout-v5"]
            names = " or ".join(folded[name] for name in near)
            raise UserError(f"unknown --env-id {args.env_id}; did you mean {names}?")
        if args.machado:
            for name in MACHADO:
                if getattr(args, name) != getattr(Args, name):
                    raise UserError(f"--machado sets --{name.replace('_', '-')} itself; use one of the two")
            args = replace(args, **MACHADO)
        self.options = dict(
            env_type="gymnasium", num_envs=num_envs, num_threads=1, frame_skip=args.frameskip, noop_max=args.noop_max,
            episodic_life=args.episodic_life, use_fire_reset=args.fire_reset, full_action_space=args.full_action_space,
            repeat_action_probability=args.sticky_actions, max_episode_steps=108_000 // args.frameskip,
            render_mode="rgb_array",
        )  # fmt: skip
        self.env_id, self.num_envs, self.pool = args.env_id, num_envs, None
        spec = envpool.make_spec(args.env_id, full_action_space=args.full_action_space)
        self.single_observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        self.single_action_space = spec.gymnasium_action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.observation = np.zeros(self.observation_space.shape, np.uint8)

    def rearranged(self, images: np.ndarray) -> np.ndarray:
        """uint8 [num_envs, 4, 84, 84] -> [num_envs, 84, 84, 4], overwritten by the next call."""
        for i in range(4):  # four copies of 84x84: 12 us a game; NumPy's one copy of the transposed array takes 40
            self.observation[..., i] = images[:, i]
        return self.observation

    def reset(self, *, seed: int = 0, options: dict | None = None):
        self.close()
        self.pool = envpool.make(self.env_id, seed=seed, **self.options)
        observation, info = self.pool.reset()
        self.lost_life, self.lives = np.zeros(self.num_envs, bool), info["lives"].copy()
        return self.rearranged(observation), {}

    def step(self, actions):
        observation, reward, terminated, truncated, info = self.pool.step(actions)
        observation = self.rearranged(observation)
        game_over = terminated & (info["terminated"] > 0) | truncated
        new_game = self.lost_life & (info["lives"] > self.lives)
        self.lost_life, self.lives = terminated & ~game_over, info["lives"].copy()
        return observation, reward, terminated, truncated, {"game_over": game_over | new_game}

    def render(self) -> np.ndarray:
        """The first game's screen, uint8 [1, 210, 160, 3]."""
        return self.pool.render()

    def close(self, **kwargs) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None


def make_envs(args: Args, num_envs: int) -> gym.vector.VectorEnv:
    """The environments of one split of a worker. Edit this function to train on something else.

    What it returns must reset on the step after an episode's end (NEXT_STEP), show one uint8 image [height, width,
    channels], at least 36 x 36, alone or in a Dict as `obs` beside a float `vector` (concatenate several), and take
    Discrete or MultiDiscrete actions. No game is started before `reset`. In every step's `info` there may be
    `raw_reward`, a float that scores are sums of, and `game_over`, a bool: False where an episode ends and the game
    goes on, as after a lost life. Actors cannot start processes of multiprocessing (AsyncVectorEnv).
    """
    return AtariEnvs(args, num_envs)


class Spaces(NamedTuple):
    """What the pipeline needs to know of the environments."""

    image: tuple[int, ...]  # shape of the image: height, width, channels
    vector: int  # length of the vector beside it, 0 for none
    heads: tuple[int, ...]  # number of actions of each independent head


def split_observation(observation) -> tuple:
    """(image, vector or None) of an observation or of an observation space."""
    if isinstance(observation, (dict, gym.spaces.Dict)):
        return observation["obs"], observation["vector"]
    return observation, None


def spaces_of(args: Args) -> Spaces:
    """The spaces of what `make_envs` returns. Raises UserError where the pipeline does not support them."""
    with contextlib.closing(make_envs(args, 1)) as envs:  # starts no game
        observation, action = envs.single_observation_space, envs.single_action_space
        mode = envs.metadata.get("autoreset_mode")
    if mode != gym.vector.AutoresetMode.NEXT_STEP:
        raise UserError(f"make_envs must return environments with AutoresetMode.NEXT_STEP, not {mode}")
    try:
        image, vector = split_observation(observation)
        (width,) = vector.shape if vector else (0,)
        heads = tuple(int(n) for n in (action.nvec if isinstance(action, gym.spaces.MultiDiscrete) else (action.n,)))
        supported = image.dtype == np.uint8 and len(image.shape) == 3 and not np.any(action.start)
    except (AttributeError, KeyError, TypeError, ValueError):
        supported = False
    if not supported or isinstance(observation, gym.spaces.Dict) and len(observation) > 2:
        raise UserError(f"unsupported spaces, {observation} and {action}: one uint8 image, alone or in a Dict as `obs` "
                        "beside a `vector`, and Discrete or MultiDiscrete actions that start at 0")  # fmt: skip
    return Spaces(image.shape, width, heads)


# ======================================================================================================================
# Mailbox and rollouts
# ======================================================================================================================

class Mailbox:
    """The only memory that actors share with the main process. Row r = worker * num_envs_per_worker + environment.

    Between its request and its reply a group's rows belong to the inference thread, otherwise to its actor: no locks.
    """

    def __init__(self, spaces: Spaces, rows: int, workers: int):
        def shared(*shape, dtype):
            return torch.zeros(shape, dtype=dtype).share_memory_()

        # written by the actor, between a reply and its next request
        self.obs = shared(rows, *spaces.image, dtype=torch.uint8)  # the current observation
        self.vector = shared(rows, spaces.vector, dtype=torch.float32)  # and the vector beside it
        self.reward = shared(rows, dtype=torch.float32)  # of the action before it, after scale and clip
        self.terminated = shared(rows, dtype=torch.bool)  # that action ended the episode for good
        self.first = shared(rows, dtype=torch.bool)  # obs is the first of an episode
        # of the game that ended just now: sum of raw rewards, sum of `reward`, length in steps (0: none ended)
        self.episode = shared(rows, 3, dtype=torch.float32)
        # written by inference, between a request and its reply
        self.action = shared(rows, len(spaces.heads), dtype=torch.int64)  # what to do next
        # written by the actor at any time, zeroed when it is started: signs that it is not stuck
        self.started = shared(workers, dtype=torch.int64)  # games started so far
        self.requests = shared(workers, dtype=torch.int64)  # requests so far

    def numpy(self) -> SimpleNamespace:
        """The same memory as NumPy arrays: indexing is much cheaper than torch's."""
        return SimpleNamespace(**{name: tensor.numpy() for name, tensor in vars(self).items()})


class Rollouts:
    """Memory of the learning process alone, [time, slot, ...]: inference writes FILLING slots, the learner copies FULL.

    Observations, and what inference computes, stay on the device. Flags, rewards and versions stay on the host, where
    the learner finds resets and valid samples without asking the device. NaN marks what was never written.
    """

    def __init__(self, spaces: Spaces, T: int, slots: int, state_size: int, device: torch.device):
        # on the device; T + 1: with the observation that the last value is bootstrapped from
        self.obs = torch.zeros((T + 1, slots, *spaces.image), dtype=torch.uint8, device=device)
        self.vector = torch.zeros((T + 1, slots, spaces.vector), device=device)
        self.actions = torch.zeros((T, slots, len(spaces.heads)), dtype=torch.int64, device=device)
        self.logprobs = torch.full((T, slots), torch.nan, device=device)  # of the actions, by the acting policy (mu)
        self.values = torch.full((T, slots), torch.nan, device=device)  # by the acting policy, for value clipping only
        self.rnn_state = torch.zeros((slots, state_size), device=device)  # at obs[0], before `first[0]` zeroes it
        # on the host
        self.first = np.zeros((T + 1, slots), bool)
        self.rewards = np.full((T, slots), np.nan, np.float32)  # of actions[t]
        self.terminated = np.zeros((T, slots), bool)
        self.versions = np.zeros((T, slots), np.int64)  # of the policy that chose actions[t]


def slots_needed(args: Args) -> int:
    """A slot for every row to fill, and `max_batches_ahead` batches FULL. B + n rule out deadlock: when every group
    waits for its n slots and the learner for its B, none is FILLING and fewer than B are FULL, so at least n are free.
    With `sync` one slot for every row."""
    B, n = args.batch_size // args.rollout, args.num_envs_per_worker // args.worker_num_splits
    if args.sync:
        return B
    return max(args.num_workers * args.num_envs_per_worker, B + n) + args.max_batches_ahead * B


def mebibytes(memory: Mailbox | Rollouts) -> float:
    return sum(field.nbytes for field in vars(memory).values()) / 2**20


# ======================================================================================================================
# Agent
# ======================================================================================================================


class Normalizer(nn.Module):
    """Running mean and variance of every element of an input, in float32; clips to +-5, as Sample Factory 2 does."""

    def __init__(self, shape: tuple[int, ...], unit: float):
        super().__init__()
        self.unit = unit
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        # normalised = x * scale + shift, one multiply-add per element; until the first update that is x / unit
        self.register_buffer("scale", torch.full(shape, 1 / unit))
        self.register_buffer("shift", torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, device=x.device)
        # On a CPU in pieces that stay in the cache: 14 ms instead of 22 ms for 1056 images.
        chunk = 16 if x.device.type == "cpu" else len(x)
        for part, to in zip(x.split(chunk), out.split(chunk)):
            torch.addcmul(self.shift, to.copy_(part), self.scale, out=to).clamp_(-5, 5)
        return out

    @torch.no_grad()
    def update(self, x: torch.Tensor, valid: torch.Tensor) -> None:
        """x [N, *shape], of which bool valid [N] count; merges two sets of statistics (Chan, Golub and LeVeque 1979).
        Raises FloatingPointError, before anything is changed, for an input that is not finite."""
        x = x[valid].float() / self.unit  # boolean indexing waits for the device; so did the update just before
        n = int(sum_over_ranks(torch.tensor(len(x))))
        if n == 0:
            return
        mean = sum_over_ranks(x.sum(0) / n)
        var = sum_over_ranks((x - mean).square_().sum(0) / n)
        if not (mean + var).isfinite().all():  # infinities are clipped to +-5, so no loss would show them
            raise FloatingPointError("an observation is not finite")
        total = self.count + n
        delta = mean - self.mean
        self.var.copy_((self.var * self.count + var * n + delta**2 * (self.count * n / total)) / total)
        self.mean.add_(delta * (n / total))
        self.count.copy_(total)
        std = (self.var + 1e-5).sqrt()
        self.scale.copy_(1 / (self.unit * std))
        self.shift.copy_(-self.mean / std)


def init_layer(layer: nn.Module, gain: float = 2**0.5) -> nn.Module:
    """Orthogonal weights, biases 0."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.block = nn.Sequential(
            nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block(x)


class Agent(nn.Module):
    """`nature`: convolutions 32/8/4, 64/4/2, 64/3/1 (channels, kernel, stride; Mnih et al. 2015). `impala`: three
    stages of a convolution, a pool and two residual blocks with 16, 32, 32 channels (Espeholt et al. 2018, figure 3).
    Then a layer of `hidden_size`, joined by two layers of 128 for a vector, where there is one; a recurrent core, if
    asked for; value and logits. ReLU. Weights orthogonal with CleanRL's gains, `impala`'s convolutions as PyTorch's."""

    def __init__(self, spaces: Spaces, args: Args):
        super().__init__()
        self.heads, self.rnn_type, self.normalize = spaces.heads, args.rnn_type, args.normalize_input
        self.bfloat16 = args.precision == "bfloat16"
        height, width, channels = spaces.image
        self.image_norm = Normalizer(spaces.image, unit=255.0)
        if args.encoder == "nature":
            layers = [
                init_layer(nn.Conv2d(channels, 32, 8, 4)), nn.ReLU(inplace=True),
                init_layer(nn.Conv2d(32, 64, 4, 2)), nn.ReLU(inplace=True),
                init_layer(nn.Conv2d(64, 64, 3, 1)), nn.ReLU(inplace=True),
            ]  # fmt: skip
        else:
            layers, before = [], channels
            for now in (16, 32, 32):
                layers += [nn.Conv2d(before, now, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
                layers += [Residual(now), Residual(now)]
                before = now
            layers.append(nn.ReLU())
        self.conv = nn.Sequential(*layers)
        with torch.no_grad():
            conv_size = self.conv(torch.zeros(1, channels, height, width)).numel()
        self.fc = init_layer(nn.Linear(conv_size, args.hidden_size))
        core_input = args.hidden_size
        if spaces.vector:
            self.vector_norm = Normalizer((spaces.vector,), unit=1.0)
            self.vector_fc = nn.Sequential(
                init_layer(nn.Linear(spaces.vector, 128)), nn.ReLU(inplace=True),
                init_layer(nn.Linear(128, 128)), nn.ReLU(inplace=True),
            )  # fmt: skip
            core_input += 128
        self.state_size = {"gru": 1, "lstm": 2, "none": 0}[args.rnn_type] * args.hidden_size
        if args.rnn_type != "none":
            self.core = (nn.GRU if args.rnn_type == "gru" else nn.LSTM)(core_input, args.hidden_size)
        head_input = args.hidden_size if args.rnn_type != "none" else core_input
        self.critic = init_layer(nn.Linear(head_input, 1), gain=1.0)
        self.actor = init_layer(nn.Linear(head_input, sum(spaces.heads)), gain=0.01)
        self.to(memory_format=torch.channels_last)  # as images come: height, width, channel

    def encode(self, obs: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """obs uint8 [N, H, W, C], vector float32 [N, V] -> float32 [N, features]"""
        x = self.image_norm(obs).permute(0, 3, 1, 2)
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
            # flatten in the order of memory (height, width, channel): a view instead of a copy
            x = F.relu(self.fc(self.conv(x).permute(0, 2, 3, 1).flatten(1)), inplace=True)
        x = x.float()  # the core and the heads run in float32: the ratio pi/mu must be 1 at lag 0
        if vector.shape[-1]:
            x = torch.cat([x, self.vector_fc(self.vector_norm(vector) if self.normalize else vector)], dim=-1)
        return x

    def forward(self, obs, vector, first, state, restarts=(0,)):
        """obs uint8 [T, B, H, W, C], vector float32 [T, B, V], first bool [T, B], state float32 [B, state_size] before
        obs[0]; restarts: the times at which `first` is set in any row, in order, with 0. The recurrent core runs once
        for each stretch between them; where one begins, the state of the rows with `first` is zeroed.
        Returns logits [T, B, sum(heads)], values [T, B], state."""
        T, B = first.shape
        x = self.encode(obs.flatten(0, 1), vector.flatten(0, 1)).unflatten(0, (T, B))
        if self.rnn_type != "none":
            outputs = []
            lengths = [end - start for start, end in zip(restarts, [*restarts[1:], T])]
            for start, stretch in zip(restarts, x.split(lengths)):  # one call per stretch in which nothing restarts
                state = torch.where(first[start].unsqueeze(-1), 0.0, state)
                hidden = state.unsqueeze(0)
                if self.rnn_type == "lstm":
                    output, hidden = self.core(stretch, tuple(part.contiguous() for part in hidden.chunk(2, -1)))
                    hidden = torch.cat(hidden, -1)
                else:
                    output, hidden = self.core(stretch, hidden)
                state = hidden.squeeze(0)
                outputs.append(output)
            x = torch.cat(outputs)
        return self.actor(x), self.critic(x).squeeze(-1), state

    @torch.no_grad()
    def update_normalizers(self, obs: torch.Tensor, vector: torch.Tensor, valid: torch.Tensor) -> None:
        """obs [T, B, ...], vector [T, B, V], valid [T, B]"""
        if self.normalize:
            self.image_norm.update(obs[::4].flatten(0, 1), valid[::4].flatten())  # neighbours in time hardly differ
            if vector.shape[-1]:
                self.vector_norm.update(vector.flatten(0, 1), valid.flatten())


def sample_actions(logits: torch.Tensor, heads: tuple[int, ...], deterministic: bool = False):
    """logits [N, sum(heads)] -> actions int64 [N, heads], their joint log-probability [N]."""
    actions, logprob = [], 0.0
    for head in logits.split(heads, dim=-1):
        logp = head.log_softmax(-1)
        # argmax p/e with e ~ Exp(1) is a draw from p; unlike torch.multinomial it never makes the host wait.
        scores = logp if deterministic else logp.exp() / torch.empty_like(logp).exponential_()
        action = scores.argmax(-1, keepdim=True)
        actions.append(action)
        logprob = logprob + logp.gather(-1, action).squeeze(-1)
    return torch.cat(actions, -1), logprob


def evaluate_actions(logits: torch.Tensor, actions: torch.Tensor, heads: tuple[int, ...]):
    """logits [..., sum(heads)], actions [..., heads] -> joint log-probability, entropy and symmetric KL to the uniform
    policy, [...] each, summed over the independent heads."""
    logprob = entropy = symmetric_kl = 0.0
    for h, head in enumerate(logits.split(heads, dim=-1)):
        logp = head.log_softmax(-1)
        head_entropy = -(logp.exp() * logp).sum(-1)
        logprob = logprob + logp.gather(-1, actions[..., h : h + 1]).squeeze(-1)
        entropy = entropy + head_entropy
        # (KL(p|u) + KL(u|p)) / 2 with KL(p|u) = log n - H(p) and KL(u|p) = -log n - mean log p
        symmetric_kl = symmetric_kl + 0.5 * (-head_entropy - logp.mean(-1))
    return logprob, entropy, symmetric_kl


# ======================================================================================================================
# V-trace and the loss
# ======================================================================================================================


@torch.no_grad()
def vtrace(ratios, values, rewards, discounts, valid, rho_bar: float, c_bar: float, lam: float):
    """V-trace targets and advantages (Espeholt et al. 2018, IMPALA, section 4.1; lambda: their remark 2).

    ratios pi(a)/mu(a), rewards, discounts (gamma, or 0 where it terminated) float32 [T, B], valid bool [T, B]
    (False cuts the trace: vs = V there), values float32 [T+1, B] by the current network.
    Returns vs [T+1, B] (vs[T] = V[T]) and advantages [T, B].

        rho[t] = min(ratio[t], rho_bar), c[t] = lam min(ratio[t], c_bar), both 0 where not valid
        vs[t] = V[t] + rho[t] (r[t] + discount[t] V[t+1] - V[t]) + discount[t] c[t] (vs[t+1] - V[t+1])
        A[t]  = r[t] + discount[t] (lam vs[t+1] + (1 - lam) V[t+1]) - V[t]

    The advantage carries no rho: the PPO surrogate multiplies by the ratio itself. On-policy it is GAE(lam); with
    lam = 1 it is IMPALA's advantage.
    """
    rho = ratios.clamp(max=rho_bar) * valid
    c = lam * ratios.clamp(max=c_bar) * valid
    deltas = rho * (rewards + discounts * values[1:] - values[:-1])
    vs = values.clone()
    correction = torch.zeros_like(values[0])  # vs[t+1] - V[t+1]
    for t in reversed(range(len(rewards))):
        correction = deltas[t] + discounts[t] * c[t] * correction
        vs[t] += correction
    advantages = rewards + discounts * (lam * vs[1:] + (1 - lam) * values[1:]) - values[:-1]
    return vs, advantages


class Batch(NamedTuple):
    """B rollouts on the learner's device, [time, rollout, ...]; the last two fields are on the host."""

    obs: torch.Tensor  # uint8 [T+1, B, H, W, C]
    vector: torch.Tensor  # float32 [T+1, B, V]
    first: torch.Tensor  # bool [T+1, B]
    rnn_state: torch.Tensor  # float32 [B, state_size]
    actions: torch.Tensor  # int64 [T, B, heads]
    logprobs: torch.Tensor  # float32 [T, B]
    values: torch.Tensor  # float32 [T, B]
    rewards: torch.Tensor  # float32 [T, B]
    terminated: torch.Tensor  # bool [T, B]
    mask: torch.Tensor  # bool [T, B]: valid and younger than max_policy_lag: what the losses average over
    restarts: list[int]  # see Agent.forward
    size: int  # samples in mask, on the host


def appo_loss(args: Args, agent: Agent, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped losses with V-trace's targets over the samples in `batch.mask`. Loss and metrics, on the device."""
    logits, values, _ = agent(batch.obs, batch.vector, batch.first, batch.rnn_state, batch.restarts)
    logprobs, entropy, symmetric_kl = evaluate_actions(logits[:-1], batch.actions, agent.heads)
    log_ratio = logprobs - batch.logprobs
    ratio = log_ratio.clamp(math.log(0.05), math.log(20.0)).exp()  # Sample Factory's band; no gradient outside
    discounts = args.gamma * ~batch.terminated
    vs, advantages = vtrace(ratio.detach(), values.detach(), batch.rewards, discounts, ~batch.first[1:],
                            args.vtrace_rho, args.vtrace_c, args.vtrace_lambda)  # fmt: skip

    weight = batch.mask.float()
    n = sum_over_ranks(weight.sum())

    def mean(x: torch.Tensor) -> torch.Tensor:  # under torchrun this rank's share of the mean over all ranks' samples
        return (x * weight).sum() / n

    advantages = advantages - sum_over_ranks(mean(advantages))
    advantages = advantages / sum_over_ranks(mean(advantages.square())).sqrt().clamp(min=1e-7)
    clipped = ratio.clamp(1 / (1 + args.clip_coef), 1 + args.clip_coef)
    policy_loss = -mean(torch.min(ratio * advantages, clipped * advantages))

    target, old = vs[:-1], batch.values
    value_error = (values[:-1] - target).square()
    clipped_error = (old + (values[:-1] - old).clamp(-args.ppo_clip_value, args.ppo_clip_value) - target).square()
    value_loss = mean(torch.max(value_error, clipped_error))

    if args.exploration_loss == "entropy":
        exploration = -mean(entropy)
    else:  # not above 30: there it has no gradient
        exploration = mean(symmetric_kl) * (sum_over_ranks(mean(symmetric_kl.detach())) < 30.0)
    loss = policy_loss + args.vf_coef * value_loss + args.ent_coef * exploration

    with torch.no_grad():
        spread = (target - sum_over_ranks(mean(target))).square()
        metrics = {
            "losses/policy_loss": policy_loss.detach(),
            "losses/value_loss": value_loss.detach(),
            "losses/entropy": mean(entropy),
            "losses/approx_kl": mean(log_ratio.exp() - 1 - log_ratio),  # http://joschu.net/blog/kl-approx.html
            "losses/clipfrac": mean((ratio != clipped).float()),
            "losses/value": mean(values[:-1]),
            "vtrace/rho_mean": mean(ratio.clamp(max=args.vtrace_rho)),
            "vtrace/rho_clipfrac": mean((ratio > args.vtrace_rho).float()),
        }
        shares = torch.stack([*metrics.values(), mean(value_error), mean(spread)])
        *means, error, variance = sum_over_ranks(shares)
        metrics = dict(zip(metrics, means))
        metrics["losses/explained_variance"] = 1 - error / variance.clamp(min=1e-8)
    return loss, metrics


# ======================================================================================================================
# Actor
# ======================================================================================================================

REQUEST = struct.Struct("=ii")  # group, incarnation of its actor; writes this small are atomic
WAKE = -1  # "group" of a message that only wakes the inference thread: slots were freed, or the run ends


class Games:
    """The environments of one worker. `reset` and `step` write a split's rows of the mailbox; from then on the rows
    belong to the caller, until it has filled in the actions and calls `step` for that split again."""

    def __init__(self, args: Args, worker: int, mailbox: SimpleNamespace, seed: int):
        S = args.worker_num_splits
        n = args.num_envs_per_worker // S
        self.args, self.worker, self.mailbox, self.seed, self.n = args, worker, mailbox, seed, n
        random.seed(seed)  # for games that use these: forked actors would all have the same numbers
        np.random.seed(seed)
        self.splits = [make_envs(args, n) for _ in range(S)]
        starts = range(worker * args.num_envs_per_worker, (worker + 1) * args.num_envs_per_worker, n)
        self.rows = [slice(start, start + n) for start in starts]
        self.ended = np.zeros((S, n), bool)  # the last step ended an episode: the next one only resets
        self.totals = np.zeros((S, n, 3))  # of the games still running; columns as in Mailbox.episode

    def reset(self, split: int) -> None:
        """Starts the split's games."""
        r, envs, mailbox, seed = self.rows[split], self.splits[split], self.mailbox, self.seed + split * self.n
        # Where the vector class allows it, games are started one by one, so that each counts as progress. The reset of
        # the whole split afterwards costs little.
        for i, env in enumerate(getattr(envs, "envs", ())):
            env.reset(seed=seed + i)
            mailbox.started[self.worker] += 1
        observation, _ = envs.reset(seed=seed)
        mailbox.started[self.worker] = (split + 1) * self.n
        self.write(r, observation)
        mailbox.first[r], mailbox.terminated[r], mailbox.reward[r], mailbox.episode[r] = True, False, 0.0, 0.0

    def step(self, split: int) -> None:
        r, envs, mailbox, totals = self.rows[split], self.splits[split], self.mailbox, self.totals[split]
        first = self.ended[split].copy()
        action = mailbox.action[r].reshape(envs.action_space.shape).copy()  # the game may keep it
        observation, reward, terminated, truncated, info = envs.step(action)
        self.write(r, observation)
        raw_reward = info.get("raw_reward", reward)
        reward = np.clip(reward * self.args.reward_scale, -self.args.reward_clip, self.args.reward_clip)
        mailbox.reward[r], mailbox.terminated[r], mailbox.first[r] = reward, terminated, first
        self.ended[split] = terminated | truncated
        totals += np.stack([raw_reward, reward, np.ones(self.n)], axis=-1) * ~first[:, None]
        over = np.asarray(info.get("game_over", self.ended[split]), bool)  # not where a lost life ended it
        mailbox.episode[r] = totals * over[:, None]
        totals[over] = 0

    def write(self, r: slice, observation) -> None:
        image, vector = split_observation(observation)
        self.mailbox.obs[r] = image
        if vector is not None:
            self.mailbox.vector[r] = vector

    def close(self) -> None:
        for envs in self.splits:
            envs.close()


def game_seed(*entropy: int) -> int:
    """The seed of a worker's first game; game i has seed + i. Below 2**30, so that all of them fit 31 bits."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0]) >> 2


def actor(args: Args, worker: int, incarnation: int, core: int | None, seed: int, mailbox: Mailbox,
          request_pipe, reply_pipe, error_pipe) -> None:  # fmt: skip
    """Body of an actor process. All actors write to one request pipe. A byte from this actor's reply pipe is the number
    of a split whose actions are in the mailbox. The error pipe receives the traceback, as raw text."""
    os.setsid()  # a process group of our own, which can be ended even after we are dead
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:  # else the games would inherit our ends of pipes, and nobody would see them close
            with contextlib.suppress(OSError):
                os.set_inheritable(fd, False)
    watcher = threading.Thread(target=watch_parent, daemon=True)
    watcher.start()
    faulthandler.enable(file=error_pipe.fileno())  # the stack when a library crashes
    faulthandler.register(signal.SIGUSR1, file=error_pipe.fileno())  # the main process asks a hung actor where it hangs
    if core is not None:
        os.sched_setaffinity(0, {core})  # the games inherit it: engine and actor talk twice a tic, cheapest on one core
    os.nice(10)  # where cores are short, inference and learning come first: games without actions can only wait
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    try:
        numpy, S = mailbox.numpy(), args.worker_num_splits
        games = Games(args, worker, numpy, seed)

        def request(split: int) -> None:
            numpy.requests[worker] += 1
            os.write(request_pipe.fileno(), REQUEST.pack(worker * S + split, incarnation))
            # From here on the split's rows belong to inference, until a reply names it.

        for split in range(S):
            games.reset(split)
            request(split)
        while reply := os.read(reply_pipe.fileno(), 1):  # empty when the pipe is closed: the run is over
            games.step(reply[0])
            request(reply[0])
        games.close()
    except BaseException:
        with contextlib.suppress(OSError):
            os.write(error_pipe.fileno(), traceback.format_exc().encode()[-60_000:])
        watcher.join(1)  # if the main process is dead, which may be why we are here, this thread ends our games and us
        os._exit(1)  # without closing the games, which may hang: the main process ends our process group


# ======================================================================================================================
# Inference
# ======================================================================================================================


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Marks this point of the calling thread's CUDA stream. On a CPU nothing is ever under way."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_event(event: torch.cuda.Event | None) -> None:
    """Makes the calling thread's CUDA stream (not the thread) wait until the mark was passed."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def own_stream(device: torch.device, threads: int, priority: int = 0):
    """Sets a thread's number of CPU threads; returns a context with a CUDA stream of its own (priority -1 is high)."""
    torch.get_num_threads()  # else a thread's first operation takes over the number that another thread set last
    torch.set_num_threads(threads)
    if device.type == "cuda":
        return torch.cuda.stream(torch.cuda.Stream(device, priority))
    return contextlib.nullcontext()


class ActingPolicy:
    """Two copies of the policy: inference uses the current one, the learner overwrites the spare one, then they swap. A
    copy's lock lets one thread at a time launch work on it; on CUDA its event makes the next user's stream wait for
    that work. So inference never sees half an update."""

    def __init__(self, agent: Agent, device: torch.device):
        self.device, self.learned = device, list(agent.state_dict().values())  # updated in place
        self.current, self.spare = (self.frozen_copy(agent) for _ in range(2))

    def frozen_copy(self, agent: Agent) -> SimpleNamespace:
        frozen = copy.deepcopy(agent).requires_grad_(False).to(self.device)  # to() packs the core's weights for cuDNN
        tensors = list(frozen.state_dict().values())
        return SimpleNamespace(agent=frozen, tensors=tensors, version=0, lock=threading.Lock(), event=None)

    @contextlib.contextmanager
    def hold(self, policy: SimpleNamespace):
        with policy.lock:
            wait_event(policy.event)
            yield policy
            policy.event = record_event(self.device)

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """The learner's weights and statistics, as they are now, act from the next inference on."""
        with self.hold(self.spare) as spare:  # waits for the last inference that still used it
            torch._foreach_copy_(spare.tensors, self.learned)
            spare.version = version
        self.current, self.spare = spare, self.current


class Inference:
    """Serves the groups that wait for actions, all at once. Owns every row's recurrent state and FILLING slot, and has
    the memory and the queues between itself, the actors and the learner."""

    def __init__(self, args: Args, spaces: Spaces, agent: Agent, device: torch.device):
        self.args, self.device = args, device
        workers, slots = max(1, args.num_workers), slots_needed(args)
        rows, self.size = workers * args.num_envs_per_worker, args.num_envs_per_worker // args.worker_num_splits
        self.mailbox = Mailbox(spaces, rows, workers)
        self.numpy = self.mailbox.numpy()
        self.rollouts = Rollouts(spaces, args.rollout, slots, agent.state_size, device)
        self.acting = ActingPolicy(agent, device)
        self.request_reader, self.request_writer = mp.Pipe(duplex=False)  # all actors write to it
        self.full, self.free = queue.SimpleQueue(), queue.SimpleQueue()  # (slots, event) to the learner, and back
        self.free_slots = deque(range(slots))
        groups = rows // self.size
        self.t = [0] * groups  # steps so far in the group's FILLING slots, the same for all of its rows
        self.slots: list[np.ndarray | None] = [None] * groups  # None: handed over, and no new ones yet
        self.state = torch.zeros(rows, agent.state_size, device=device)
        self.obs = torch.zeros_like(self.mailbox.obs, device=device)  # the mailbox rows being served, on the device
        self.vector = torch.zeros_like(self.mailbox.vector, device=device)
        copied = [(self.mailbox.obs, self.obs, self.rollouts.obs),
                  (self.mailbox.vector, self.vector, self.rollouts.vector)]  # fmt: skip
        self.copied = [tensors for tensors in copied if tensors[0].numel()]
        if device.type == "cuda":  # pinned, so that copies to the device run beside the host
            for source, _, _ in self.copied:
                error = torch.cuda.cudart().cudaHostRegister(source.data_ptr(), source.nbytes, 0)
                torch.cuda.check_error(int(error))
        # The last finished ones, as in Mailbox.episode. Checkpoints keep them: the games that end first after a resume
        # are short ones, whose mean could pass for a best return.
        self.episodes: deque[list[float]] = deque(maxlen=100)
        self.served = self.batches = 0  # statistics: rows and batches served
        self.idle = self.held = 0.0  # seconds without requests, and with requests but without free slots
        self.stopping = False

    def release(self, slots: np.ndarray) -> None:
        """The learner gives slots back. They are FREE once the event, recorded after its last copy, has passed."""
        self.free.put((slots, record_event(self.device)))
        self.wake()

    def wake(self) -> None:
        if self.args.num_workers:  # else there is no thread to wake
            os.write(self.request_writer.fileno(), REQUEST.pack(WAKE, 0))

    def stop(self) -> None:
        self.stopping = True
        self.wake()

    def unpin(self) -> None:
        """Must come before the mailbox is freed: CUDA would take whatever lies there next for pinned memory."""
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # what has broken CUDA is the error to be shown, and raised already
                torch.cuda.synchronize(self.device)  # the last copies out of it may be under way
            for source, _, _ in self.copied:
                torch.cuda.cudart().cudaHostUnregister(source.data_ptr())

    def run(self, actors: "Actors") -> None:
        """Body of the inference thread. One read takes all waiting requests: the busier, the larger its batches."""
        try:
            with own_stream(self.device, self.args.inference_threads, priority=-1):
                waiting: list[tuple[int, int]] = []  # requests. Their groups' rows belong to this thread
                while not self.stopping:
                    start = time.perf_counter()
                    data = os.read(self.request_reader.fileno(), 1 << 16)
                    if waiting:
                        self.held += time.perf_counter() - start
                    else:
                        self.idle += time.perf_counter() - start
                    waiting += [request for request in REQUEST.iter_unpack(data) if request[0] != WAKE]
                    waiting = [request for request in waiting if actors.is_current(*request)]
                    served = set(self.serve([group for group, _ in waiting]))
                    actors.reply([request for request in waiting if request[0] in served])
                    waiting = [request for request in waiting if request[0] not in served]
        except BaseException as error:
            self.full.put(error)  # the learner raises it

    @torch.inference_mode()
    def serve(self, groups: list[int]) -> list[int]:
        """Hands over the rollouts that are complete, and writes actions for all groups that have slots or get new ones;
        returns those. The others are held: the caller tries them again when slots are free."""
        filled = [group for group in groups if self.t[group] == self.args.rollout]
        if filled:  # these rows are stored twice: here as obs[T] of the old slots, below as obs[0] of the new ones
            self.store(filled)
            event = record_event(self.device)
            for group in filled:
                self.full.put((self.slots[group], event))
                self.t[group], self.slots[group] = 0, None
        while not self.free.empty():
            slots, event = self.free.get()
            wait_event(event)  # the learner's copy out of these slots
            self.free_slots.extend(slots)
        for group in groups:
            if self.slots[group] is None and len(self.free_slots) >= self.size:
                self.slots[group] = np.array([self.free_slots.popleft() for _ in range(self.size)])
        ready = [group for group in groups if self.slots[group] is not None]
        if ready:
            self.act(ready)
        return ready

    def store(self, groups: list[int]):
        """Copies the mailbox rows of the groups to their times and slots. Returns their rows, times and
        slots on the host, and on the device, there with `first`."""
        n, numpy, rollouts = self.size, self.numpy, self.rollouts
        rows = np.concatenate([np.arange(group * n, group * n + n) for group in groups])
        t = np.repeat([self.t[group] for group in groups], n)
        slots = np.concatenate([self.slots[group] for group in groups])
        rollouts.first[t, slots] = first = numpy.first[rows]
        later = t > 0  # at t = 0 the reward belongs to the slot before, which has it
        t1, s1, r1 = t[later] - 1, slots[later], rows[later]
        rollouts.rewards[t1, s1], rollouts.terminated[t1, s1] = numpy.reward[r1], numpy.terminated[r1]
        index = torch.from_numpy(np.stack([rows, t, slots, first])).to(self.device, non_blocking=True)
        for source, staged, field in self.copied:
            for i, group in enumerate(groups):
                staged[i * n : i * n + n].copy_(source[group * n : group * n + n], non_blocking=True)
            if self.device.type == "cpu":  # through NumPy: 25 times faster for big rows
                field.numpy()[t, slots] = staged.numpy()[: len(rows)]
            else:
                field[index[1], index[2]] = staged[: len(rows)]
        return (rows, t, slots), index

    def act(self, groups: list[int]) -> None:
        (rows, t, slots), (d_rows, d_t, d_slots, d_first) = self.store(groups)
        n, rollouts = len(rows), self.rollouts
        with self.acting.hold(self.acting.current) as policy:
            state = self.state[d_rows]
            obs, vector = self.obs[None, :n], self.vector[None, :n]
            logits, values, self.state[d_rows] = policy.agent(obs, vector, d_first[None].bool(), state)
            actions, logprobs = sample_actions(logits[0], policy.agent.heads)
            rollouts.actions[d_t, d_slots] = actions
            rollouts.logprobs[d_t, d_slots], rollouts.values[d_t, d_slots] = logprobs, values[0]
            if (t == 0).any():
                rollouts.rnn_state[d_slots] = torch.where((d_t == 0).unsqueeze(-1), state, rollouts.rnn_state[d_slots])
            rollouts.versions[t, slots] = policy.version
        # Waits for the device, so also for its copies out of the mailbox: only now may the actors have their rows back.
        self.numpy.action[rows] = actions.cpu().numpy()
        self.episodes.extend(self.numpy.episode[rows[self.numpy.episode[rows, 2] > 0]].tolist())
        for group in groups:
            self.t[group] += 1
        self.served += n
        self.batches += 1


# ======================================================================================================================
# Learner
# ======================================================================================================================


class Learner:
    """Takes FULL slots, B at a time, and improves the policy."""

    def __init__(self, args: Args, agent: Agent, inference: Inference, device: torch.device):
        self.args, self.agent, self.inference, self.device = args, agent, inference, device
        self.optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-6, fused=True)
        self.version = 0  # of the policy published last
        self.global_step = 0  # valid transitions received
        self.skipped = 0  # batches without a single usable sample
        self.best_return = -float("inf")
        self.waited = 0.0  # seconds without full slots
        self.everyone: list[dict] = []  # what each rank said of itself in the last iteration
        self.meetings = 0  # of the ranks

    def load(self, checkpoint: dict) -> None:
        self.agent.load_state_dict(checkpoint["agent"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.optimizer.param_groups[0]["lr"] = self.args.learning_rate  # an override beats the checkpoint
        self.version, self.global_step = checkpoint["version"], checkpoint["global_step"]
        self.best_return = checkpoint["best_return"]
        self.inference.episodes.extend(checkpoint["episodes"])
        self.inference.acting.publish(self.version)

    def gather(self, slots: np.ndarray) -> tuple[Batch, np.ndarray]:
        """Copies B slots out of the rollouts. Returns them, and the lags of the valid samples, on the host."""
        r, d_slots = self.inference.rollouts, torch.from_numpy(slots).to(self.device, non_blocking=True)
        names = ("obs", "vector", "actions", "logprobs", "values")
        on_device = {name: getattr(r, name).index_select(1, d_slots) for name in names}
        first, lag = r.first[:, slots], self.version - r.versions[:, slots]
        valid = ~first[1:]
        restarts = [0] + [t for t in range(1, len(first)) if first[t].any()]
        mask = valid & (lag < self.args.max_policy_lag)
        host = dict(first=first, rewards=r.rewards[:, slots], terminated=r.terminated[:, slots], mask=mask)
        moved = {name: torch.from_numpy(array).to(self.device, non_blocking=True) for name, array in host.items()}
        rnn_state = r.rnn_state.index_select(0, d_slots)
        return Batch(**on_device, **moved, rnn_state=rnn_state, restarts=restarts, size=int(mask.sum())), lag[valid]

    def iterate(self, slots: np.ndarray, timed_out: bool = False) -> dict[str, float]:
        """Learns from B FULL slots, which are LEARNING until they are given back: as soon as they are copied, but with
        `sync` only after the new policy has been published. Returns metrics: none when another rank has left.

        Raises FloatingPointError before a non-finite update is made: the weights are still good.
        """
        args, metrics = self.args, {}
        batch, lags = self.gather(slots)
        if not args.sync:
            self.inference.release(slots)
        masked = np.count_nonzero(lags >= args.max_policy_lag)
        self.meet(usable=batch.size, lag_sum=lags.sum(), lag_max=lags.max(initial=0), masked=masked, valid=len(lags),
                  timed_out=timed_out)  # fmt: skip
        if self.total("left"):
            return {}
        usable, valid = self.total("usable"), self.total("valid")
        self.global_step += valid
        if usable == 0:  # a batch without a usable sample is no update
            self.skipped += 1
        else:
            if self.version or not args.normalize_input:  # the first samples only initialise the inputs' statistics
                metrics = self.update(batch)
            # New statistics change the policy too: they are published together with the last weights.
            self.agent.update_normalizers(batch.obs[:-1], batch.vector[:-1], ~batch.first[1:])
            self.publish()
        if args.sync:  # only now: the next samples are all of the newest version
            self.inference.release(slots)
        if valid:
            lag_max = max(rank["lag_max"] for rank in self.everyone)
            metrics |= {"lag/mean": self.total("lag_sum") / valid, "lag/max": lag_max}
            metrics |= {"lag/masked": self.total("masked") / valid}
        return metrics

    def update(self, batch: Batch) -> dict[str, float]:
        """One optimiser step for each epoch. All but the last are published here, the last by the caller."""
        for epoch in range(self.args.num_epochs):
            if epoch:
                self.publish()
            loss, metrics = appo_loss(self.args, self.agent, batch)
            self.optimizer.zero_grad()
            loss.backward()
            sum_over_ranks(loss.detach())  # in place: `loss` is the sum of the ranks' shares from here on
            for parameter in self.agent.parameters():
                sum_over_ranks(parameter.grad)
            grad_norm = nn.utils.clip_grad_norm_(self.agent.parameters(), self.args.max_grad_norm or torch.inf)
            if not torch.isfinite(loss + grad_norm):  # waits for the device: nothing broken is published or saved
                raise FloatingPointError(f"the loss ({loss.item()}) or its gradient is not finite")
            self.optimizer.step()
        metrics["losses/grad_norm"] = grad_norm
        metrics = dict(zip(metrics, torch.stack(list(metrics.values())).tolist()))
        return metrics | {"charts/learning_rate": self.optimizer.param_groups[0]["lr"]}

    def meet(self, **mine) -> None:
        """Waits for all ranks and tells them about this one: what the iteration needs, and what is reported."""
        i, start = self.inference, time.perf_counter()
        self.meetings += 1
        if dist.is_initialized() and self.meetings % 100 == 1:  # are they still equal, to the bit?
            mine["weights"] = sum(int(x.view(torch.int32).sum()) for x in self.agent.state_dict().values())
        mine |= dict(waited=self.waited, served=i.served, batches=i.batches, idle=i.idle, held=i.held,
                     all_reduce=ALL_REDUCE.seconds, episodes=list(i.episodes))  # fmt: skip
        self.everyone = gather_over_ranks(mine)
        ALL_REDUCE.seconds += time.perf_counter() - start
        for rank, theirs in enumerate(self.everyone):
            if theirs.get("weights") != self.everyone[0].get("weights"):
                raise UserError(f"the weights of rank {rank} are no longer those of rank 0")

    def total(self, name: str) -> float:
        """The sum of what the ranks said of themselves."""
        return sum(rank.get(name, 0) for rank in self.everyone)

    def publish(self) -> None:
        self.version += 1
        self.inference.acting.publish(self.version)


# ======================================================================================================================
# Checkpoints
# ======================================================================================================================


def save_checkpoint(path: Path, learner: Learner) -> None:
    """Tensors and plain values only. Written under another name first: a checkpoint is whole or absent."""
    path.parent.mkdir(exist_ok=True)
    content = dict(agent=learner.agent.state_dict(), optimizer=learner.optimizer.state_dict(), version=learner.version,
                   global_step=learner.global_step, best_return=learner.best_return,
                   episodes=list(learner.inference.episodes), args=asdict(learner.args))  # fmt: skip
    temporary = path.with_name("saving.tmp")
    with open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_latest(folder: Path, learner: Learner, keep: int) -> None:
    path = folder / f"checkpoint_{learner.version:09d}_{learner.global_step:012d}.pth"
    save_checkpoint(path, learner)
    others = sorted(set(folder.glob("checkpoint_*.pth")) - {path}, key=os.path.getmtime, reverse=True)
    for old in others[keep - 1 :]:
        old.unlink()


def load_checkpoint(folder: Path, kind: str, log) -> dict | None:
    """The newest (or best) checkpoint that can be read, on the CPU; None where there is none."""
    paths = sorted(folder.glob("checkpoint_*.pth" if kind == "latest" else "best.pth"), reverse=True)
    for path in paths:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            log(f"warning: {path} cannot be read ({error!r:.200}); trying the one before")
    if paths:  # a fresh start would in time delete them
        raise UserError(f"no checkpoint in {folder} can be read; move them away to start anew")
    return None


def saved_args(folder: Path) -> dict:
    """An experiment's Args as typed (before `resolve`), without the flags of one SESSION. Raises UserError."""
    if not (folder / "cfg.json").exists():
        raise UserError(f"there is no experiment in {folder}")
    saved = json.loads((folder / "cfg.json").read_text())["args"]
    return {field.name: saved[field.name] for field in fields(Args) if field.name in saved.keys() - set(SESSION)}


def load_agent(folder: Path | str, kind: str = "latest", **changes) -> tuple[Agent, Args, int]:
    """The trained policy in an experiment's folder, its Args (set for games in this process and updated by `changes`,
    such as device="cpu"), and the step it was saved at. kind: "latest" or "best". Raises UserError."""
    folder, here = Path(folder), dict(num_workers=0, worker_num_splits=None, batch_size=None)
    args = resolve(Args(**saved_args(folder) | changes | here))
    checkpoint = load_checkpoint(folder / "checkpoints", kind, print)
    if checkpoint is None:
        raise UserError(f"no {kind} checkpoint in {folder / 'checkpoints'}")
    agent = Agent(spaces_of(args), args).to(args.device)
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError:
        raise UserError(f"the network in {folder} does not fit {args.env_id}, or this version of the file") from None
    return agent, args, checkpoint["global_step"]


# ======================================================================================================================
# Evaluate
# ======================================================================================================================


@torch.inference_mode()
def evaluate(args: Args, folder: Path) -> list[float]:
    """Plays `eval_episodes` episodes with a checkpoint; prints and returns their raw returns."""
    if args.save_video:
        import imageio.v2 as imageio
    count = min(args.eval_episodes, 16)
    changes = asdict(args) | dict(num_envs_per_worker=count)
    agent, args, step = load_agent(folder, args.load_checkpoint_kind, **changes)
    spaces = spaces_of(args)
    check_shared_memory(spaces, count)
    device, mailbox = torch.device(args.device), Mailbox(spaces, count, 1)
    numpy, state = mailbox.numpy(), torch.zeros(count, agent.state_size, device=device)
    torch.manual_seed(args.seed)
    per_game = -(-args.eval_episodes // count)  # the same for each: taking the first to end would favour short ones
    returns, frames, games = [[] for _ in range(count)], [], Games(args, 0, numpy, args.seed)
    with tqdm(total=count * per_game, desc="episodes", disable=None) as bar:
        games.reset(0)
        while any(len(finished) < per_game for finished in returns):
            if args.save_video and len(returns[0]) < per_game and len(frames) < 60 * TICKS_PER_SECOND / args.frameskip:
                frames.append(np.array(games.splits[0].render()[0]))
            tensors = [part.to(device)[None] for part in (mailbox.obs, mailbox.vector, mailbox.first)]
            logits, _, state = agent(*tensors, state)
            numpy.action[:] = sample_actions(logits[0], agent.heads, args.eval_deterministic)[0].cpu().numpy()
            games.step(0)
            for i in np.flatnonzero(numpy.episode[:, 2]):
                if len(returns[i]) < per_game:
                    returns[i].append(float(numpy.episode[i, 0]))
                    bar.update()
    games.close()
    flat = [value for finished in returns for value in finished][: args.eval_episodes]
    how = "likeliest" if args.eval_deterministic else "sampled"
    print(f"{len(flat)} episodes, {how} actions, step {step:,}: return {np.mean(flat):.2f} +- {np.std(flat):.2f} "
          f"(standard deviation), from {min(flat):.2f} to {max(flat):.2f}")  # fmt: skip
    if args.save_video:
        fps = TICKS_PER_SECOND / args.frameskip
        with imageio.get_writer(folder / "video.mp4", fps=fps, macro_block_size=8) as video:
            for frame in frames:
                video.append_data(frame.repeat(4, 0).repeat(4, 1))
        print(f"wrote {folder / 'video.mp4'} ({len(frames)} frames)")
    return flat


# ======================================================================================================================
# Main
# ======================================================================================================================

def parse_args() -> tuple[Args, Path]:
    """Args as typed, and the run's folder. A resumed experiment's cfg.json is loaded; flags typed now override it."""
    args = tyro.cli(Args)
    for name in ("eval_episodes", "eval_deterministic", "load_checkpoint_kind", "save_video"):
        if getattr(args, name) != getattr(Args, name) and not args.evaluate:
            raise UserError(f"--{name.replace('_', '-')} is for --evaluate")
    if args.experiment is None and args.evaluate:
        raise UserError("--evaluate needs the name of an --experiment")
    if args.evaluate and dist.is_initialized():
        raise UserError("--evaluate is for one process, without torchrun")
    if args.experiment is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        raise UserError("torchrun --max-restarts goes on with a run by its name: give it an --experiment")
    experiment = args.experiment or f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{int(time.time())}"
    folder = Path(args.train_dir) / experiment
    if Path(os.path.abspath(args.train_dir)) not in Path(os.path.abspath(folder)).parents:
        raise UserError(f"--experiment {experiment} is not a folder below {args.train_dir}")
    if args.evaluate or (folder / "cfg.json").exists():
        saved = saved_args(folder)
        old = Args(**saved)
        args = tyro.cli(Args, default=old)
        overrides = {name: f"{name} {getattr(old, name)} -> {getattr(args, name)}" for name in saved
                     if getattr(args, name) != getattr(old, name)}  # fmt: skip
        fixed = NETWORK if args.evaluate else GAME + NETWORK
        if wrong := [overrides[name] for name in fixed if name in overrides]:
            raise UserError(f"{folder} holds another environment or network: {', '.join(wrong)}; rename --experiment")
        for text in overrides.values():
            print(f"override: {text}")
    args.experiment = experiment
    return args, folder


def join_ranks() -> None:
    """Under `torchrun` each of its processes ("ranks") is a copy of this pipeline, with its own actors and share of
    the cores. They take every step of the optimiser together: the step of one process that has all their samples."""
    if not dist.is_torchelastic_launched():
        return
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: when the launcher is killed, it stops us even so
    i, n = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // n  # the same for all: they wait for the slowest
    os.sched_setaffinity(0, cores[i * share : (i + 1) * share] or {cores[i % len(cores)]})
    store, rank, ranks = next(dist.rendezvous("env://"))
    # After a restart the launcher's store still has the addresses of the dead. So each attempt has a name of its own,
    # which rank 0 gives, and which holds when all have read it: a name given by a dead rank 0 never does.
    name = str(time.time_ns()) if rank == 0 else ""
    if rank == 0:
        store.set("attempt", name)
        store.wait([f"{name}/{other}" for other in range(1, ranks)])
        store.delete_key("exception_dump")  # with which NCCL told the dead to end: it would end us, too
        store.set("attempt", "")
        store.set(f"{name}/begin", "")
    while not (name and store.check([f"{name}/begin"])):
        time.sleep(0.1)
        name = store.get("attempt").decode() or name
        store.set(f"{name}/{rank}", "")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore(name, store), rank=rank, world_size=ranks)


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory: page faults of fresh activations cost 10 to 20 % of an update on a CPU."""
    for option, value in ((-1, 2**31 - 1), (-4, 0), (-8, 1)):  # M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX (malloc.h)
        ctypes.CDLL(None).mallopt(option, value)


def check_shared_memory(spaces: Spaces, rows: int) -> None:
    """Raises UserError when /dev/shm has no room for the mailbox and the games: later the kernel would kill the run."""
    rows *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of all ranks on this machine
    needed = rows * (int(np.prod(spaces.image)) + 4 * spaces.vector + 64 + GAME_SHARED_MEMORY)
    free = shutil.disk_usage("/dev/shm").free
    if needed > free:
        raise UserError(f"/dev/shm has {free / 2**20:.0f} MiB free, {needed / 2**20:.0f} MiB are needed: use fewer "
                        "games or a larger /dev/shm (docker run --shm-size=2g)")  # fmt: skip


def open_log(folder: Path):
    """The run's log.txt, which one run at a time may hold, where the file system has locks. Raises UserError."""
    import fcntl  # here, so that other systems get main's sentence and no ImportError

    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / "log.txt", "a", buffering=1)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another run is using {folder}") from None
    except OSError:
        print(f"warning: {folder} is on a file system without locks; a second run in it would not be noticed")
    return file


def watch_parent() -> None:
    """A daemon thread of every actor: when the main process dies, however it dies, nothing stays behind."""
    parent, pause = [mp.parent_process().sentinel], 0.0
    while not multiprocessing.connection.wait(parent, timeout=pause):
        # With autogroup scheduling nice only compares processes of one session. setsid made us a new one, so that is
        # niced too. From users other than root the kernel accepts this once per 100 ms, machine-wide: retry.
        try:
            Path("/proc/self/autogroup").write_text("10")
            pause = None
        except BlockingIOError:
            pause = random.uniform(0.1, 2.0)
        except OSError:  # no such scheduling
            pause = None
    end_group(os.getpgid(0))  # ourselves among it


def end_group(process_group: int) -> None:
    """Kills an actor, if still alive, and whatever it started."""
    with contextlib.suppress(OSError):
        os.killpg(process_group, signal.SIGKILL)


class Actors:
    """The actor processes: started, looked after by the learner's thread, and replaced when they die or hang.

    When an actor dies, its games and the last transition of each of its rows are lost: the row's next observation is a
    `first` one, which makes that transition invalid. Earlier steps in its FILLING slots are kept."""

    SHORT_LIFE = 1000  # requests. A worker whose actors die or hang sooner three times in a row ends the run

    def __init__(self, args: Args, mailbox: Mailbox, request_pipe, session: int, log):
        """Another `session` number gives the games other seeds."""
        self.args, self.mailbox, self.numpy, self.request_pipe = args, mailbox, mailbox.numpy(), request_pipe
        self.session, self.log, self.restarts, self.looked = session, log, 0, time.monotonic()
        self.context = mp.get_context("forkserver")  # fork is unsafe beside threads and CUDA; spawn costs 100 MB each
        self.lock = threading.Lock()  # a reply pipe is not written to while it is replaced
        # of each worker
        self.processes, self.reply_pipes, self.error_pipes = ([None] * args.num_workers for _ in range(3))
        self.incarnations, self.short_lives, self.replied = ([0] * args.num_workers for _ in range(3))
        self.progress = [0] * args.num_workers  # games started + requests + replies, at the last check
        self.seconds = [0.0] * args.num_workers  # how long it has been at work without any progress

    def start_all(self) -> None:
        self.context.set_forkserver_preload(["numpy", "torch", "gymnasium", "tyro", "tqdm", ENGINE])
        # Blocked signals are inherited: what a terminal or a batch system sends to all is for the main process alone,
        # from an actor's first moment on. One that comes meanwhile is ours when we unblock.
        multiprocessing.resource_tracker.ensure_running()  # its start would unblock the signals
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        multiprocessing.forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        for worker in range(self.args.num_workers):
            self.start(worker)

    def start(self, worker: int) -> None:
        args, incarnation, allowed = self.args, self.incarnations[worker], sorted(os.sched_getaffinity(0))
        core = allowed[worker % len(allowed)] if args.set_workers_cpu_affinity else None
        seed = game_seed(args.seed, self.session, worker, incarnation)
        self.numpy.started[worker] = self.numpy.requests[worker] = 0
        self.replied[worker], self.progress[worker], self.seconds[worker] = 0, 0, 0.0
        reply_pipe, self.reply_pipes[worker] = self.context.Pipe(duplex=False)
        self.error_pipes[worker], error_pipe = self.context.Pipe(duplex=False)
        arguments = (args, worker, incarnation, core, seed, self.mailbox, self.request_pipe, reply_pipe, error_pipe)
        process = self.context.Process(target=actor, name=f"actor {worker}", args=arguments, daemon=True)
        process.start()
        self.processes[worker] = process
        reply_pipe.close()
        error_pipe.close()
        self.looked = time.monotonic()  # the first start waits for the fork server's imports: no actor's time

    def is_current(self, group: int, incarnation: int) -> bool:
        """False for the requests of an actor that has been replaced."""
        return self.incarnations[group // self.args.worker_num_splits] == incarnation

    def reply(self, requests: list[tuple[int, int]]) -> None:
        """Gives the rows of the requests' groups back to their actors."""
        with self.lock:
            for group, incarnation in requests:
                worker, split = divmod(group, self.args.worker_num_splits)
                if self.is_current(group, incarnation):
                    with contextlib.suppress(OSError):  # a dead actor's pipe; `check` will see to it
                        os.write(self.reply_pipes[worker].fileno(), bytes([split]))
                    self.replied[worker] += 1

    def check(self) -> None:
        """The learner's thread calls this often; it looks after the actors once a second. Raises RuntimeError when one
        cannot be kept alive."""
        elapsed, S = time.monotonic() - self.looked, self.args.worker_num_splits
        if elapsed < 1.0:
            return
        self.looked += elapsed
        for worker, process in enumerate(self.processes):
            requests = int(self.numpy.requests[worker])
            progress = requests + int(self.numpy.started[worker]) + self.replied[worker]
            waits = requests - self.replied[worker] >= S  # for replies to all of its splits
            if waits or progress > self.progress[worker]:
                self.progress[worker], self.seconds[worker] = progress, 0.0
            else:
                self.seconds[worker] += min(elapsed, 10.0)  # not more: the whole container may have been paused
            if not process.is_alive():
                self.replace(worker, "died")
            elif self.seconds[worker] > self.args.actor_timeout:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGUSR1)  # it writes its stack to its error pipe
                self.error_pipes[worker].poll(5)  # for the first words, as long as a busy machine may take
                time.sleep(0.5)  # for the rest
                doing = "stepping" if requests >= S else "starting a game"
                self.replace(worker, f"made no progress for {self.args.actor_timeout:.0f} s while {doing}")

    def replace(self, worker: int, reason: str) -> None:
        process, error_pipe, last_words = self.processes[worker], self.error_pipes[worker], ""
        end_group(process.pid)
        process.kill()  # if it died or hung before it had a process group of its own
        process.join(5)
        while error_pipe.poll() and (text := os.read(error_pipe.fileno(), 65536)):
            last_words += text.decode(errors="replace")
        message = f"actor {worker} {reason} (exit code {process.exitcode})"
        self.restarts += 1
        short_life = self.numpy.requests[worker] < self.SHORT_LIFE
        self.short_lives[worker] = self.short_lives[worker] + 1 if short_life else 0
        if self.short_lives[worker] == 3:
            raise RuntimeError(f"{message}, for the third time\n{last_words.strip()}".strip())
        self.log(f"{message}; starting it again\n{last_words}".strip())
        error_pipe.close()
        with self.lock:
            self.incarnations[worker] += 1  # what is left of the old one's requests is dropped from here on
            self.reply_pipes[worker].close()
        self.start(worker)

    def wait_for_games(self, stop_signals: list[int]) -> None:
        """Returns when every game has been started or the user stops the run."""
        with tqdm(total=len(self.numpy.first), desc="starting games", disable=True if rank_of()[0] else None) as bar:
            while bar.n < bar.total and not stop_signals:
                self.check()
                time.sleep(0.1)
                bar.n = int(self.numpy.started.sum())
                bar.refresh()

    def stop(self, patience: float) -> None:
        """Ends all actors: by closing their pipes, and after `patience` seconds by force."""
        started = [worker for worker, process in enumerate(self.processes) if process]
        for worker in started:
            self.reply_pipes[worker].close()
        deadline = time.monotonic() + patience
        for worker in started:
            self.processes[worker].join(max(0.0, deadline - time.monotonic()))
        for worker in started:
            end_group(self.processes[worker].pid)
            self.processes[worker].kill()


@contextlib.contextmanager
def sampling(args: Args, inference: Inference, session: int, log, stop_signals: list[int]):
    """Context with actors, their games and the inference thread, all ended with it; yields the Actors. With
    --num-workers 0 there are none."""
    actors = Actors(args, inference.mailbox, inference.request_writer, session, log)
    thread = threading.Thread(target=inference.run, args=(actors,), name="inference", daemon=True)
    try:
        if args.num_workers:
            actors.start_all()
            actors.wait_for_games(stop_signals)
            thread.start()
        yield actors
    finally:
        if thread.is_alive():
            inference.stop()
            thread.join(10)
        actors.stop(patience=0.0 if isinstance(sys.exception(), KeyboardInterrupt) else 5.0)
        inference.unpin()


def from_actors(actors: Actors, learner: Learner, count: int, stop_signals: list[int]):
    """Generator: the slots of each iteration, oldest first, until the user stops the run."""
    slots, start = [], time.perf_counter()
    while not stop_signals:
        actors.check()
        with contextlib.suppress(queue.Empty):
            item = learner.inference.full.get(timeout=0.5)
            if isinstance(item, BaseException):
                raise item
            more, event = item
            wait_event(event)  # inference's writes to these slots
            slots.extend(more)
        while len(slots) >= count and not stop_signals:
            learner.waited += time.perf_counter() - start
            yield np.array(slots[:count])
            slots, start = slots[count:], time.perf_counter()


def in_process(args: Args, learner: Learner, stop_signals: list[int], session: int):
    """Like `from_actors`, for --num-workers 0. All happens in one thread and on one stream: no event to wait for."""
    inference, slots, start = learner.inference, [], time.perf_counter()
    games = Games(args, 0, inference.numpy, game_seed(args.seed, session, 0, 0))
    try:
        games.reset(0)
        while not stop_signals:
            if inference.serve([0]):
                begin = time.perf_counter()
                games.step(0)
                inference.idle += time.perf_counter() - begin
            else:  # every slot is full
                while not inference.full.empty():
                    slots.extend(inference.full.get()[0])
                full = time.perf_counter()
                learner.waited += full - start
                yield np.array(slots)
                slots, start = [], time.perf_counter()
                inference.held += start - full  # the learner's time
    finally:
        games.close()


def train(typed: Args, folder: Path) -> int:
    """`typed` are the args before `resolve`. Returns the exit code: 0, or 130 when the run was stopped by a signal."""
    import resource  # not on every system, and those get main's sentence

    from torch.utils.tensorboard import SummaryWriter  # slow to import, and only the main process writes

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each actor takes four of our file descriptors
    args, (rank, ranks) = resolve(typed), rank_of()
    if rank:
        args.seed = game_seed(args.seed, rank)  # games and random numbers of its own
    device = torch.device(args.device)
    if device.type == "cpu":
        keep_freed_memory()
    else:
        torch.cuda.set_device(device.index or 0)
        torch.backends.cudnn.allow_tf32 = False  # float32 means it: mu and pi must agree at lag 0
    torch.manual_seed(args.seed)
    spaces = spaces_of(args)
    T, B, W = args.rollout, args.batch_size // args.rollout, args.num_workers
    rows = max(1, W) * args.num_envs_per_worker
    check_shared_memory(spaces, rows)
    log_file, checkpoints = open(os.devnull, "w") if rank else open_log(folder), folder / "checkpoints"

    def log(text: str, show: bool = True) -> None:
        text = f"rank {rank}: {text}" if rank else text
        log_file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        if show:
            tqdm.write(text)

    announce = log if rank == 0 else lambda text: None  # what all ranks would say alike
    checkpoint = from_first_rank(lambda: load_checkpoint(checkpoints, "latest", log))
    if checkpoint and checkpoint["global_step"] >= args.total_timesteps:
        announce(f"{folder} has its {checkpoint['global_step']:,} steps already; raise --total-timesteps to go on")
        return 0
    agent = Agent(spaces, args)
    agent.load_state_dict(from_first_rank(agent.state_dict))
    agent.to(device)  # only now: what is sent from GPU 0 would arrive on GPU 0
    inference = Inference(args, spaces, agent, device)
    learner = Learner(args, agent, inference, device)
    if checkpoint:
        if rank:
            checkpoint["episodes"] = []  # they are rank 0's
        learner.load(checkpoint)
        announce(f"resuming {folder} at step {learner.global_step:,}")
        with contextlib.suppress(UserError):  # after a crash best.pth may be newer; a damaged one does not matter
            learner.best_return = (load_checkpoint(checkpoints, "best", log) or checkpoint)["best_return"]
        torch.manual_seed(args.seed + learner.version)
    session = learner.version  # a resumed run does not play the same games again

    software = {name: sys.modules[name].__version__ for name in ("torch", "numpy", "gymnasium", ENGINE)}
    # A resumed run starts from what was typed and resolves again: it may be on another machine.
    cfg = dict(args=asdict(typed), resolved=asdict(args), versions=software, command=sys.argv)
    writer = None
    if rank == 0:
        (folder / "cfg.tmp").write_text(json.dumps(cfg, indent=2))
        os.replace(folder / "cfg.tmp", folder / "cfg.json")
        writer = SummaryWriter(str(folder), flush_secs=10, purge_step=learner.global_step + 1)
        writer.add_text("args", json.dumps(asdict(args), indent=2))
    lag = 0.0 if args.sync else slots_needed(args) / B * args.num_epochs  # when the learner is the bottleneck
    for line in (
        f"{args.env_id}: {sum(p.numel() for p in agent.parameters()):,} parameters on {device},"
        f" encoder in {args.precision}, {args.learner_threads} + {args.inference_threads} threads to learn and act",
        f"{W} workers x {args.num_envs_per_worker} games in {args.worker_num_splits} splits; {args.batch_size} samples "
        f"({B} rollouts of {T} steps) per update; expected lag up to {lag:.1f} versions",
        f"{mebibytes(inference.mailbox):.1f} MiB of shared memory beside the games' own, "
        f"{mebibytes(inference.rollouts):.0f} MiB of rollouts in {slots_needed(args)} slots",
        f"up to {args.total_timesteps:,} steps = {args.total_timesteps * args.frameskip:,} frames; files in {folder}",
    ):
        announce(line)
    if ranks > 1:
        announce(f"{ranks} ranks like this: {ranks * rows:,} games, {ranks * args.batch_size:,} samples per update")

    stop_signals = []

    def on_signal(number, frame):
        stop_signals.append(number)
        if len(stop_signals) == 2 and not dist.is_initialized():  # a rank may be told twice: by the launcher, too
            raise KeyboardInterrupt  # at once, without a checkpoint

    if device.type == "cuda":
        torch.cuda.synchronize(device)  # all of the above ran on the default stream; the threads have their own
    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with sampling(args, inference, session, log, stop_signals) as actors:
            if W:
                source = from_actors(actors, learner, B, stop_signals)
            else:
                source = in_process(args, learner, stop_signals, session)
            reporter = Reporter(args, learner, writer, log)
            try:
                with own_stream(device, args.learner_threads), reporter.bar, contextlib.closing(source):
                    learn(args, checkpoints, learner, source, reporter)
            finally:
                for number in handlers:
                    signal.signal(number, signal.SIG_IGN)  # a signal during the clean-up would leave games behind
    finally:
        if writer:
            writer.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    stopped = learner.total("left") > 0  # here or on another rank
    announce(f"{'stopped' if stopped else 'done'}: {learner.global_step:,} steps, {learner.version:,} versions, "
             f"{learner.skipped} batches without a usable sample, {actors.restarts} actors restarted")  # fmt: skip
    return 130 if stopped and not dist.is_initialized() else 0  # else torchrun would start it again


class Reporter:
    """The progress bar, log.txt and TensorBoard, of rank 0 only. Every rate is over the window since the last report;
    `returns` are of the last 100 episodes of each rank at that time."""

    def __init__(self, args: Args, learner: Learner, writer, log):
        self.args, self.learner, self.writer, self.log = args, learner, writer, log
        self.bar = tqdm(total=args.total_timesteps, initial=learner.global_step, desc=args.env_id, unit=" steps",
                        unit_scale=True, dynamic_ncols=True, disable=True if rank_of()[0] else None)  # fmt: skip
        self.metrics, self.last, self.returns = {}, self.counters(), []

    def counters(self) -> dict[str, float]:
        """Sums so far, as means over the ranks; `waits`: the seconds that each rank has waited for the others."""
        names, ranks = ("waited", "served", "batches", "idle", "held"), self.learner.everyone
        found = {name: self.learner.total(name) / max(1, len(ranks)) for name in names}
        waits = np.array([rank["all_reduce"] for rank in ranks] or [0.0])
        return found | dict(time=time.monotonic(), step=self.learner.global_step, waits=waits)

    def update(self, metrics: dict[str, float]) -> bool:
        """Called after every iteration, with its metrics. Every five seconds it reports, and returns True."""
        self.metrics |= metrics
        now = self.counters()
        self.bar.n = now["step"]
        self.bar.update(0)
        if due := now["time"] - self.last["time"] >= 5:
            self.report(now["step"], {name: now[name] - self.last[name] for name in now})
            self.last = now
        return due

    def report(self, step: int, change: dict[str, float]) -> None:
        seconds = change["time"]
        fps = change["step"] * self.args.frameskip / seconds
        scalars = self.metrics | {
            "charts/SPS": change["step"] / seconds,
            "charts/FPS": fps,
            "stats/learner_wait": change["waited"] / seconds,  # shares of the time: the learner waits for full slots,
            "stats/inference_idle": change["idle"] / seconds,  # inference waits for requests,
            "stats/inference_held": change["held"] / seconds,  # or has requests and waits for free slots
            "stats/inference_batch": change["served"] / max(1, change["batches"]),  # rows served together
        }
        if len(waits := change["waits"]) > 1:
            scalars["stats/all_reduce"] = waits.mean() / seconds  # the learner waits for other ranks
        episodes = [episode for rank in self.learner.everyone for episode in rank["episodes"]]
        self.returns = [episode[0] for episode in episodes]
        if episodes:
            tags = ("charts/episodic_return", "charts/episodic_return_trained", "charts/episodic_length")
            scalars |= zip(tags, np.mean(episodes, axis=0))
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)
        if len(waits) > 1 and waits.mean() > max(change["held"], change["waited"]):
            bottleneck = f"rank {waits.argmin()}"  # the others wait for the one that waits least
        elif change["held"] >= change["waited"]:
            bottleneck = "learner"
        else:
            bottleneck = "games" if change["idle"] > 0.5 * (seconds - change["held"]) else "inference"
        score = f"return {np.mean(self.returns):.2f}, " if episodes else ""
        text = f"{fps:,.0f} frames/s, {score}lag {self.metrics.get('lag/mean', 0):.1f}, bottleneck: {bottleneck}"
        self.bar.set_postfix_str(text)
        self.log(f"step {step:,}: {text}", self.bar.disable)


def learn(args: Args, checkpoints: Path, learner: Learner, source, reporter: Reporter) -> None:
    """The learner's loop. It saves the last good weights however it ends, unless by a second signal. Only rank 0 saves
    and reports; any rank may end the loop, for all of them."""
    rank, ranks = rank_of()
    enough = 100 * ranks  # each rank's last 100 episodes
    started = saved = best_saved = time.monotonic()  # no best in the first 30 s: games that end first are short ones
    try:
        for slots in source:
            timed_out = args.train_for_seconds is not None and time.monotonic() - started >= args.train_for_seconds
            metrics = learner.iterate(slots, timed_out)
            now = time.monotonic()
            if rank == 0 and reporter.update(metrics) and len(reporter.returns) >= enough and now - best_saved >= 30:
                if (mean := float(np.mean(reporter.returns))) > learner.best_return:
                    learner.best_return, best_saved = mean, now
                    save_checkpoint(checkpoints / "best.pth", learner)
            if rank == 0 and now - saved >= args.save_every_sec:
                save_latest(checkpoints, learner, args.keep_checkpoints)
                saved = now
            if learner.global_step >= args.total_timesteps or learner.total("timed_out") or learner.total("left"):
                break
        else:  # a signal has ended the source, and other ranks may wait for this one
            learner.meet(left=1)
    finally:
        if rank == 0 and not isinstance(sys.exception(), KeyboardInterrupt):
            save_latest(checkpoints, learner, args.keep_checkpoints)


def main() -> int:
    try:
        if sys.platform != "linux":
            raise UserError(f"this needs Linux (process groups, /proc, /dev/shm); {sys.platform} has no such things")
        join_ranks()
        args, folder = from_first_rank(parse_args)
        if args.evaluate:
            evaluate(args, folder)
            return 0
        code = train(args, folder)
        if dist.is_initialized():
            dist.destroy_process_group()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped at once, without a checkpoint", file=sys.stderr)
        return 130
    except RuntimeError as error:
        if not (dist.is_initialized() and (isinstance(error, dist.DistError) or "gloo" in str(error))):
            raise
        print(f"rank {dist.get_rank()}: another rank has ended or cannot be reached: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
