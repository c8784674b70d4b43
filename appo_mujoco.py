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
"""Asynchronous PPO with V-trace for continuous actions (MuJoCo, on EnvPool): the whole pipeline of Sample Factory and
IMPALA in one file.

    python appo_mujoco.py --env-id HalfCheetah-v5
    torchrun --standalone --nproc-per-node 4 appo_mujoco.py --env-id Ant-v5    # four processes

On 2 cores of an AMD EPYC (Zen 5, no GPU) three million steps of HalfCheetah-v4 take 3.4 minutes, and the mean return is
then 1,932; of Ant-v4 7.8 minutes, and it is 5,441 (three seeds each, 2026-11-26; benchmark/mujoco.sh learning).

A deliberate edit of appo_atari.py. What differs: `MujocoEnvs` and `drawn_envs`, a small `Agent` whose policy is a
Gaussian (`sample_actions`, `evaluate_actions`, `kl_divergence`), a penalty for leaving the policy that acted, values in
units of their own (`PopArt`), no bfloat16, other defaults in `Args`, and what these need. All else is the same text.

     actor process w = 0..W-1  (CPU only)              main process (owns the accelerator)
     +-------------------------------+  request: byte s   +------------------------------------------+
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
is room for one rollout (T steps of one row), a *batch* is B rollouts, from which the learner makes one optimiser step.
An *iteration* is what it does with the slots that it takes at once, those of `num_batches_per_epoch` batches. A *step*
is one decision of the agent, a *frame* one tick of the engine (frames = steps x frameskip). Every policy that is
published has a *version*, one higher than the last; the *lag* of a sample is the learner's version minus the version
that chose its action.

One rule about time, from which everything follows. Environments reset on the step AFTER an episode ends (Gymnasium's
NEXT_STEP): the step that ends an episode returns its last observation, the action chosen there is ignored, and the next
observation is the first of the next episode. So two flags say all there is to know:

    first[t]       obs[t] is the first of an episode: the recurrent state is zeroed before obs[t] enters it
    terminated[t]  action t ended the episode for good: the discount of step t is gamma * (1 - terminated[t])

and a transition t -> t+1 is valid iff not first[t+1]. An invalid one (the ignored action; an actor that was replaced)
cuts the V-trace trace and is left out of every loss, mean and step count. A time limit needs no flag of its own: its
last step bootstraps from the value of the true last observation.
"""

import contextlib
import copy
import ctypes
import difflib
import faulthandler
import fcntl
import functools
import json
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import queue
import random
import resource
import select
import selectors
import shutil
import signal
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, fields
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
import tyro
from tqdm import tqdm

# === Args =============================================================================================================


@dataclass
class Args:
    # --- run
    env_id: str = "HalfCheetah-v5"  # of Gymnasium's MuJoCo or of dm_control; a wrong name is answered with the nearest
    frameskip: int | None = None  # ticks of the physics (frames) per step of the agent. Default: the task's own
    seed: int = 1  # of the network, of the action sampling and of the environments
    total_timesteps: int = 3_000_000  # stop after this many steps (frames / frameskip) of all sessions and ranks
    train_for_seconds: float | None = None  # stop after this many seconds of learning in this session
    device: str = "auto"  # cpu, cuda or cuda:1; auto is cuda where there is one; under torchrun each rank has its own
    experiment: str | None = None  # the run's folder below train_dir; an existing one is resumed. Default: a fresh one
    train_dir: str = "train_dir"  # where experiments are kept
    save_every_sec: float = 120.0  # seconds between checkpoints
    keep_checkpoints: int = 2  # how many of the latest checkpoints are kept
    evaluate: bool = False  # play with a checkpoint of `experiment` instead of training
    eval_episodes: int = 100  # number of episodes to play
    eval_deterministic: bool = False  # play the likeliest action instead of a sampled one
    load_checkpoint_kind: Literal["latest", "best"] = "latest"  # which checkpoint to play with
    save_video: bool = False
    """write an episode to <experiment>/video.mp4. Gymnasium draws it (pip install mujoco): its own tasks, v4 and v5"""

    # --- sampling
    num_workers: int | None = None
    """actor processes (under torchrun: of each rank). Default: the cores this process may use. 0: one actor, a thread
    of this process, to debug (implies sync)"""
    num_envs_per_worker: int = 32  # environments per worker
    worker_num_splits: int | None = None
    """parts that a worker's environments are stepped in: it steps one while the others wait for actions. Default: 2
    with CUDA and an even number of environments, else 1 (on a CPU the network uses the core of who waits)"""
    set_workers_cpu_affinity: bool = True
    """pin worker i and its engines to the i-th core of this process; off where a container's CPU quota is less than its
    cores. For several runs at once turn it off, or give each run cores of its own with taskset"""
    sync: bool = False  # collect only while the learner waits, so that each iteration begins with lag 0: the baseline
    actor_timeout: float = 120.0
    """seconds after which a step of an actor's environments, or the start of one, counts as hung (Ctrl-Z, too)"""
    inference_threads: int | None = None  # CPU threads of inference (of each rank). Default: by the number of cores
    learner_threads: int | None = None  # CPU threads of the learner (of each rank). Default: by the number of cores

    # --- algorithm
    rollout: int = 32  # steps per rollout (T)
    batch_size: int | None = None
    """samples per optimiser step (under torchrun: from each rank), a multiple of rollout. Default: near
    rows * rollout / 4 / num_batches_per_epoch, from 512 to 8192; with sync an epoch's are rows * rollout together"""
    num_batches_per_epoch: int = 4
    """batches that an iteration collects; each epoch deals their rollouts out anew, with an optimiser step for each"""
    num_epochs: int = 4  # passes over what was collected; with --sync the ratio is 1 in the first step: no clipping
    max_batches_ahead: int = 1  # iterations collected ahead of the learner; more hides jitter and adds lag
    max_policy_lag: int = 100  # samples by a policy at least this many versions old are left out of the losses
    learning_rate: float = 2e-3  # of Adam
    anneal_lr: bool = True  # the learning rate falls linearly with the steps, to 0 at total_timesteps
    gamma: float = 0.99  # discount per step
    vtrace_rho: float = 1.0  # V-trace's clip of the importance weight of a temporal difference (rho bar)
    vtrace_c: float = 1.0  # V-trace's clip of the trace (c bar)
    vtrace_lambda: float = 0.95  # decay of the trace, as in GAE; 1 is the V-trace of the paper
    clip_coef: float = 0.2  # PPO: the ratio is clipped to [1/(1+e), 1+e]
    ppo_clip_value: float = 1.0
    """PPO: the value may move this far from the one at acting time, in standard deviations of the targets; in units of
    the reward without normalize_returns"""
    kl_loss_coef: float = 0.1  # of KL(pi, mu), which keeps the policy near the one that acted (Sample Factory's)
    vf_coef: float = 0.5  # coefficient of the value loss
    ent_coef: float = 0.0  # coefficient of the entropy, which is rewarded
    max_grad_norm: float = 0.5  # gradients are scaled down to this norm; 0 turns it off
    reward_scale: float = 1.0  # rewards are multiplied by this
    reward_clip: float = np.inf  # then clipped to +- this
    normalize_input: bool = True  # normalise every number of the observation by its running mean and variance
    normalize_returns: bool = True
    """values and their loss in units of their own (PopArt); if a resumed run turns it off, it keeps the last units"""
    adaptive_stddev: bool = False  # the network computes the actions' deviations, too; off: parameters of their own
    initial_stddev: float = 1.0  # of the actions of a fresh run, before anything is learned
    last_action_reward: bool = False  # the network also sees the last action and reward; zeros as an episode begins
    rnn_type: Literal["gru", "lstm", "none"] = "none"  # the recurrent core
    hidden_size: int = 64  # units of each layer and of the recurrent core


# The ranges of numeric flags; of those not named, 1 to infinity for whole numbers and 0.0 to infinity for others
LOWEST = dict(num_workers=0, seed=0, max_batches_ahead=0, reward_scale=-np.inf, actor_timeout=1.0, initial_stddev=1e-4)
HIGHEST = dict(gamma=1.0, vtrace_lambda=1.0, seed=2**31 - 1, worker_num_splits=256)
BATCH_SHARE, SMALLEST_BATCH = 4, 512  # default batch: a rollout of every row / BATCH_SHARE, but at least this
# Flags of one session, not of the experiment; and what a resumed run may not change
EVALUATION = ("eval_episodes", "eval_deterministic", "load_checkpoint_kind", "save_video")
SESSION, FIXED = ("train_for_seconds", "evaluate", *EVALUATION), ("env_id",)


class UserError(Exception):
    """Something the user can fix; printed as one line, without a traceback."""


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
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:  # not a device, not there, or not for this build of PyTorch
        raise UserError(f"--device {args.device}: {str(error).splitlines()[0]}") from None
    cpu, cores, quota = torch.device(args.device).type == "cpu", len(os.sched_getaffinity(0)), np.inf
    with contextlib.suppress(OSError, ValueError):  # no limit of this container: no such file, or "max" for a number
        quota = np.divide(*map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split()))
        quota /= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    n = max(1, int(min(cores, quota)))
    if quota < cores:  # this machine's other containers see the same cores, and would pin to them too
        args.set_workers_cpu_affinity = False
    args.num_workers = n if args.num_workers is None else args.num_workers
    if args.num_workers == 0:
        args.sync, args.worker_num_splits = True, 1
    elif args.worker_num_splits is None:
        args.worker_num_splits = 1 if cpu or args.num_envs_per_worker % 2 else 2
    # On a CPU learning costs two to three times inference; with --sync the two take turns and use every core.
    args.learner_threads = args.learner_threads or (1 if not cpu else n if args.sync else max(1, n // 2))
    args.inference_threads = args.inference_threads or (1 if not cpu else n if args.sync else max(1, n // 4))
    if args.num_envs_per_worker % args.worker_num_splits:
        raise UserError(f"--num-envs-per-worker {args.num_envs_per_worker} is not divisible by "
                        f"--worker-num-splits {args.worker_num_splits}")  # fmt: skip
    args.frameskip = args.frameskip or (spec_of(args).config.frame_skip if args.env_id in TASKS else 1)
    rows = max(1, args.num_workers) * args.num_envs_per_worker
    batches = args.num_batches_per_epoch
    if args.batch_size is None and args.sync:  # one rollout of every row
        args.batch_size = rows // batches * args.rollout
    elif args.batch_size is None:
        power = 2 ** round(np.log2(rows * args.rollout / BATCH_SHARE / batches))
        args.batch_size = max(1, min(8192, max(SMALLEST_BATCH, power)) // args.rollout) * args.rollout
    if args.batch_size % args.rollout:
        raise UserError(f"--batch-size {args.batch_size} is not a multiple of --rollout {args.rollout}")
    if args.sync and batches * args.batch_size != rows * args.rollout:
        raise UserError(f"--sync needs one rollout of every row: --batch-size {args.batch_size} x {batches} batches is "
                        f"not {rows} rows x {args.rollout} steps = {rows * args.rollout}")  # fmt: skip
    return args


STOP = SimpleNamespace(asked_at=None, writing=False)  # time of the first signal; a checkpoint is being written


def on_signal(number: int, frame) -> None:
    """What Ctrl-C (SIGINT) and SIGTERM do to a run. The first one asks: whoever waits for environments or slots looks
    at it twice a second, `learn` saves what is new, `sampling` ends the actors, and `train` returns 130. One that
    comes more than a second later ends this process at once, and with it actors and engines; sooner it is the same one,
    sent twice by a launcher, and while a checkpoint is being written it is ignored."""
    STOP.asked_at = STOP.asked_at or time.monotonic()
    if time.monotonic() - STOP.asked_at > 1.0 and not STOP.writing:
        os.write(2, b"\nstopped at once\n")
        os._exit(130)


# Under `torchrun` each of its processes ("ranks") runs this whole pipeline, with actors of its own, and all of them
# take every step of the optimiser together: the step that one process would take on the union of their batches. For
# that, each rank divides its sums by the number of samples of all ranks; then the sum over the ranks is the mean over
# the union. Summed are the advantages and their squares and the metrics (appo_loss), the loss and the gradients
# (Learner.update), the statistics of inputs and values (Normalizer, PopArt), and the counts of an iteration
# (Learner.sum_counts). Without `torchrun` the functions below do nothing.


def join_ranks() -> None:
    """Meets the other ranks, and takes this one's share of the machine's cores."""
    if not dist.is_torchelastic_launched():
        return
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: the kernel stops us when the launcher is killed
    i, n = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // n  # the same for all: they wait for the slowest
    os.sched_setaffinity(0, cores[i * share : (i + 1) * share] or {cores[i % len(cores)]})
    store, rank, ranks = next(dist.rendezvous("env://"))
    if n == ranks:  # one machine: after a restart its store still has the addresses of the dead, and NCCL's last error
        store.delete_key("exception_dump")
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def rank_of() -> tuple[int, int]:
    """This process's rank, and the number of ranks: 0 and 1 without `torchrun`."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """In place, and equal on all ranks to the bit. Without `torchrun` x as it is."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def from_first_rank(function):
    """What `function` returns on rank 0, where alone it is called. If it raises there, the others end in silence."""
    if not dist.is_initialized():
        return function()
    result = [None]
    try:
        if dist.get_rank() == 0:
            result = [(function(),)]
    finally:
        dist.broadcast_object_list(result)
        if not result[0]:
            dist.destroy_process_group()  # its threads could turn this end into a crash
    return result[0][0] if result[0] else sys.exit(0)


# === Environment ======================================================================================================

ENGINE = "envpool"
ENV_SHARED_MEMORY = 0  # bytes of /dev/shm that an environment takes: its engine is in the actor
TASKS = {task for task, (module, *_) in envpool.registration.registry.specs.items()
         if module in ("envpool.mujoco.gym", "envpool.mujoco.dmc")}  # fmt: skip


def spec_of(args: Args):
    """EnvPool's description of the task. Raises UserError where it has none of that name."""
    if args.env_id not in TASKS:
        folded = {task.casefold(): task for task in TASKS}
        near = difflib.get_close_matches(args.env_id.casefold(), folded, cutoff=0.3) or ["halfcheetah-v5"]
        raise UserError(f"unknown --env-id {args.env_id}; did you mean {' or '.join(folded[name] for name in near)}?")
    return envpool.make_spec(args.env_id)


class MujocoEnvs(gym.vector.VectorEnv):
    """EnvPool's MuJoCo: the tasks of Gymnasium and of dm_control as they are, except that every part of an observation
    is flattened, and float32. Where a time limit ends an episode it is truncated, not terminated, even if the robot
    falls at that very step. The pool is made in `reset`, where it gets its seed; it resets on the step after an
    episode's end.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, args: Args, num_envs: int):
        spec = spec_of(args)
        self.args, self.num_envs, self.pool = args, num_envs, None
        self.single_observation_space = gym.spaces.Dict({
            name: gym.spaces.Box(-np.inf, np.inf, (int(np.prod(part.shape)),), np.float32)
            for name, part in by_name(spec.gymnasium_observation_space).items()
        })  # fmt: skip
        self.single_action_space = spec.gymnasium_action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int = 0, options: dict | None = None):
        self.close()
        # Contact forces: Gymnasium's humanoids have them from version 4 on, EnvPool's by default from version 5 on
        forces = dict(post_constraint=True) if self.args.env_id in ("Humanoid-v4", "HumanoidStandup-v4") else {}
        self.pool = envpool.make(self.args.env_id, env_type="gymnasium", num_envs=self.num_envs, num_threads=1,
                                 seed=seed, frame_skip=self.args.frameskip, **forces)  # fmt: skip
        return self.vectors(self.pool.reset()[0]), {}

    def step(self, actions):
        observation, reward, terminated, truncated, _ = self.pool.step(actions)
        return self.vectors(observation), reward, terminated, truncated, {}

    def vectors(self, observation) -> dict[str, np.ndarray]:
        return {name: part.reshape(self.num_envs, -1).astype(np.float32) for name, part in by_name(observation).items()}

    def close(self, **kwargs) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None


def drawn_envs(args: Args, num_envs: int) -> gym.vector.VectorEnv:
    """The same task in Gymnasium, to be drawn: EnvPool may end the process when it is asked to. Raises UserError."""
    os.environ.setdefault("MUJOCO_GL", "egl")  # without a screen
    own = {} if args.frameskip == spec_of(args).config.frame_skip else dict(frame_skip=args.frameskip)
    make = functools.partial(gym.make, args.env_id, render_mode="rgb_array", **own)
    try:
        envs = gym.vector.SyncVectorEnv([make] * num_envs, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)
        envs.envs[0].reset()
        envs.envs[0].render()  # fails without OpenGL
        return envs
    except Exception as error:  # of many types; the task or the package may be missing, too
        raise UserError(f"Gymnasium cannot draw {args.env_id} ({error}); it draws its own tasks of versions 4 and 5, "
                        "with OpenGL and what `pip install mujoco` brings") from None  # fmt: skip


def make_envs(args: Args, num_envs: int) -> gym.vector.VectorEnv:
    """The environments of one split of a worker. Edit this function to train on something else.

    What it returns must reset on the step after an episode's end (NEXT_STEP), start nothing before `reset`, and take a
    Box of actions, which arrive clipped to it. `Agent` sees float vectors, one alone or several in a Dict. In every
    step's `info` there may be `raw_reward`, a float that scores are sums of. Actors cannot start processes of
    multiprocessing (AsyncVectorEnv).
    """
    return drawn_envs(args, num_envs) if args.save_video else MujocoEnvs(args, num_envs)


class Spaces(NamedTuple):
    """What the pipeline needs to know of the environments."""

    obs: dict[str, gym.spaces.Box]  # the arrays that an observation consists of, by name
    action: gym.spaces.Box  # [numbers of an action]


def by_name(observation) -> dict:
    """An observation, or the space of one, as a dict: one that is no dict becomes {"obs": it}."""
    return dict(observation) if isinstance(observation, (dict, gym.spaces.Dict)) else dict(obs=observation)


def spaces_of(args: Args) -> Spaces:
    """The spaces of what `make_envs` returns. Raises UserError where the pipeline does not support them."""
    with contextlib.closing(make_envs(args, 1)) as envs:  # starts no engine
        obs, action = by_name(envs.single_observation_space), envs.single_action_space
        mode = envs.metadata.get("autoreset_mode")
    if mode != gym.vector.AutoresetMode.NEXT_STEP:
        raise UserError(f"make_envs must return environments with AutoresetMode.NEXT_STEP, not {mode}")
    floats = [isinstance(space, gym.spaces.Box) and space.dtype.kind == "f" for space in (*obs.values(), action)]
    if not all(floats) or len(action.shape) != 1:
        raise UserError(f"unsupported spaces, {obs} and {action}: observations are a Box of floats or a Dict of them, "
                        "actions a Box of floats with one dimension")  # fmt: skip
    if args.last_action_reward:  # WorkerEnvs writes it: the clipped action, the reward as it is trained on
        obs["last_action_reward"] = gym.spaces.Box(-np.inf, np.inf, (len(action.low) + 1,), np.float32)
    return Spaces(obs, action)


# === Mailbox and rollouts =============================================================================================


def tensors(spaces: Spaces, *shape: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Room for observations, by name [*shape, ...]: fractions are float32, whole numbers as in the space."""
    kinds = {name: "float32" if space.dtype.kind == "f" else space.dtype.name for name, space in spaces.obs.items()}
    return {name: torch.zeros((*shape, *space.shape), dtype=getattr(torch, kinds[name]), device=device)
            for name, space in spaces.obs.items()}  # fmt: skip


class Mailbox:
    """The only memory that actors share with the main process. Row r = worker * num_envs_per_worker + environment.

    Between its request and its reply a group's rows belong to the inference thread, otherwise to its actor: no locks.
    """

    def __init__(self, spaces: Spaces, rows: int):
        # written by the actor, between a reply and its next request
        self.obs = tensors(spaces, rows)  # the current observation
        self.reward = torch.zeros(rows)  # of the action before it, after scale and clip
        self.terminated = torch.zeros(rows, dtype=torch.bool)  # that action ended the episode for good
        self.first = torch.zeros(rows, dtype=torch.bool)  # obs is the first of an episode
        # of the episode that ended just now: sum of raw rewards, sum of `reward`, length in steps (0: none ended)
        self.episode = torch.zeros(rows, 3)
        # written by inference, between a request and its reply
        self.action = torch.zeros(rows, *spaces.action.shape)  # what to do next, as sampled; WorkerEnvs clips it
        for field in fields_of(self):
            field.share_memory_()

    def numpy(self) -> SimpleNamespace:
        """The same memory as NumPy arrays: indexing is much cheaper than torch's."""
        arrays = {name: field.numpy() for name, field in vars(self).items() if name != "obs"}
        return SimpleNamespace(obs={name: part.numpy() for name, part in self.obs.items()}, **arrays)


class Rollouts:
    """Memory of the learning process alone, [time, slot, ...]. Observations, and what inference computes, stay on the
    device. Flags, rewards and versions stay on the host, where the learner finds resets and valid samples without
    asking the device. They start as NaN: where a slot was read before it was written, the loss would not be finite.

    A slot is FILLING from when its row takes it until its rollout is complete, then FULL (both in `Inference.serve`).
    `Learner.collect` makes it LEARNING, `Inference.release` FREE.
    """

    def __init__(self, spaces: Spaces, T: int, slots: int, state_size: int, device: torch.device):
        # on the device; T + 1: with the observation that the last value is bootstrapped from
        self.obs = tensors(spaces, T + 1, slots, device=device)
        self.actions = torch.full((T, slots, *spaces.action.shape), torch.nan, device=device)
        self.gaussians = torch.full((T, slots, 2 * len(spaces.action.low)), torch.nan, device=device)  # mu, see `Agent`
        self.logprobs = torch.full((T, slots), torch.nan, device=device)  # of the actions, by the acting policy (mu)
        self.values = torch.full((T, slots), torch.nan, device=device)  # by the acting policy, for value clipping only
        self.rnn_state = torch.zeros((slots, state_size), device=device)  # at obs[0], before `first[0]` zeroes it
        # on the host
        self.first = np.zeros((T + 1, slots), bool)
        self.rewards = np.full((T, slots), np.nan, np.float32)  # of actions[t]
        self.terminated = np.zeros((T, slots), bool)
        self.versions = np.zeros((T, slots), np.int64)  # of the policy that chose actions[t]


def slots_needed(args: Args) -> int:
    """A slot for every row to fill, and `max_batches_ahead` iterations FULL, of `count` rollouts each. count + n rule
    out deadlock: when every group waits for its n slots and the learner for its count, none is FILLING and fewer than
    count are FULL, so at least n are free.

    What `sync` is: as many slots as one iteration, one for every row, which `Learner.iterate` gives back only after the
    update. What else it changes are defaults and checks in `resolve`."""
    count = args.num_batches_per_epoch * args.batch_size // args.rollout
    n = args.num_envs_per_worker // args.worker_num_splits
    if args.sync:
        return count
    return max(args.num_workers * args.num_envs_per_worker, count + n) + args.max_batches_ahead * count


def fields_of(memory: Mailbox | Rollouts) -> list:
    """All its tensors and arrays."""
    return [*memory.obs.values(), *(field for name, field in vars(memory).items() if name != "obs")]


def mebibytes(memory: Mailbox | Rollouts) -> float:
    return sum(field.nbytes for field in fields_of(memory)) / 2**20


def check_shared_memory(spaces: Spaces, rows: int) -> None:
    """Raises UserError when /dev/shm has no room for the mailbox and the engines: later the kernel would kill the
    run."""
    rows *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of all ranks on this machine
    needed = rows * (sum(part.nbytes for part in tensors(spaces, 1).values()) + 64 + ENV_SHARED_MEMORY)
    free = shutil.disk_usage("/dev/shm").free
    if needed > free:
        raise UserError(f"/dev/shm has {free / 2**20:.0f} MiB free, {needed / 2**20:.0f} MiB are needed: use fewer "
                        "environments or a larger /dev/shm (docker run --shm-size=2g)")  # fmt: skip


# === Agent ============================================================================================================


class Normalizer(nn.Module):
    """Running mean and variance of every element of an input; clips to +-5, as Sample Factory 2 does."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        # normalised = x * scale + shift, one multiply-add per element; until the first update that is x
        self.register_buffer("scale", torch.ones(shape))
        self.register_buffer("shift", torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.shift, x, self.scale).clamp_(-5, 5)

    @torch.no_grad()
    def update(self, x: torch.Tensor, valid: torch.Tensor) -> None:
        """x [N, *shape], finite, of which bool valid [N] count; merges two sets of statistics (Chan, Golub and LeVeque
        1979)."""
        x = x[valid]  # waits for the device, as `Learner.update` has just done
        n = int(sum_over_ranks(torch.tensor(len(x))))
        if n == 0:
            return
        mean = sum_over_ranks(x.sum(0) / n)
        var = sum_over_ranks((x - mean).square_().sum(0) / n)
        total = self.count + n
        delta = mean - self.mean
        self.var.copy_((self.var * self.count + var * n + delta**2 * (self.count * n / total)) / total)
        self.mean.add_(delta * (n / total))
        self.count.copy_(total)
        std = (self.var + 1e-5).sqrt()
        self.scale.copy_(1 / std)
        self.shift.copy_(-self.mean / std)


def init_layer(layer: nn.Module, gain: float = 2**0.5) -> nn.Module:
    """Orthogonal weights, biases 0."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class PopArt(nn.Module):
    """A value head in units of its own (van Hasselt et al. 2016; with V-trace Hessel et al. 2019). `linear` predicts
    (value - mean) / std, with the running mean and standard deviation of the V-trace targets. When these move, `linear`
    is rescaled so that no value changes."""

    START = 1_000  # as if so many samples of mean 0 and deviation 1 came first: the real first ones are much alike
    MEMORY = 100_000  # samples that the statistics remember: then older ones fade, as returns grow

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear
        for name, value in dict(count=self.START, mean=0, var=1, std=1).items():
            self.register_buffer(name, torch.tensor(float(value)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., features] -> values in the reward's units [...]"""
        return self.linear(x).squeeze(-1) * self.std + self.mean

    @torch.no_grad()
    def update(self, targets: torch.Tensor, mask: torch.Tensor) -> None:
        """targets [...] in the reward's units, of which bool mask [...] count; merges two sets of statistics as
        Normalizer.update does."""
        n = sum_over_ranks(mask.sum())
        mean = sum_over_ranks((targets * mask).sum() / n.clamp(min=1))
        var = sum_over_ranks(((targets - mean).square() * mask).sum() / n.clamp(min=1))
        total = self.count + n
        share, delta = n / total, mean - self.mean
        self.var.copy_((1 - share) * self.var + share * var + share * (1 - share) * delta.square())
        old_mean, old_std = self.mean.clone(), self.std.clone()
        self.mean.add_(share * delta)
        self.std.copy_(self.var.sqrt().clamp(min=0.01))
        self.linear.weight.mul_(old_std / self.std)
        self.linear.bias.copy_((old_std * self.linear.bias + old_mean - self.mean) / self.std)
        self.count.copy_(total.clamp(max=self.MEMORY))


class Agent(nn.Module):
    """Two towers of two tanh layers of `hidden_size`, one for the actions and one for the value, with CleanRL's gains
    (ppo_continuous_action); a recurrent core over both, if asked for. The policy is a Gaussian for each number of an
    action, independent of the others: its mean comes from the network, its deviation is a parameter or, with
    `adaptive_stddev`, from the network, too. Means and logarithms of deviations together are `gaussians`.

    Every vector of the observation is an input; for images or texts edit `__init__` and `encode`. A network of your own
    has these two arguments, `state_size` (floats of recurrent state for each row; 0 for none), `critic` (a PopArt),
    `forward` and `update_normalizers`; each parameter has a gradient, buffers are updated in place, and nothing depends
    on `train()`. The flags of this one: normalize_input, last_action_reward, adaptive_stddev, initial_stddev, rnn_type,
    hidden_size.
    """

    def __init__(self, spaces: Spaces, args: Args):
        """Raises UserError for observations that it cannot see."""
        super().__init__()
        if any(len(space.shape) != 1 for space in spaces.obs.values()):
            raise UserError(f"this network sees vectors, not {spaces.obs}")
        self.rnn_type = args.rnn_type
        self.normalizers = nn.ModuleDict({
            name: Normalizer(space.shape) for name, space in spaces.obs.items() if args.normalize_input
        })  # fmt: skip
        inputs, hidden = sum(space.shape[0] for space in spaces.obs.values()), args.hidden_size
        self.acting, self.valuing = (
            nn.Sequential(init_layer(nn.Linear(inputs, hidden)), nn.Tanh(),
                          init_layer(nn.Linear(hidden, hidden)), nn.Tanh())
            for _ in range(2)
        )  # fmt: skip
        self.state_size = {"gru": 1, "lstm": 2, "none": 0}[args.rnn_type] * hidden
        if args.rnn_type != "none":
            self.core = (nn.GRU if args.rnn_type == "gru" else nn.LSTM)(2 * hidden, hidden)
        self.critic = PopArt(init_layer(nn.Linear(hidden, 1), gain=1.0))
        n, log_std = len(spaces.action.low), np.log(args.initial_stddev)
        self.actor = init_layer(nn.Linear(hidden, 2 * n if args.adaptive_stddev else n), gain=0.01)
        self.log_std = None if args.adaptive_stddev else nn.Parameter(torch.full((n,), log_std))
        if args.adaptive_stddev:
            nn.init.constant_(self.actor.bias[n:], log_std)

    def encode(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        """obs by name [N, ...], as in the space -> float32 [N, features of both towers]"""
        x = torch.cat([self.normalizers[name](x) if name in self.normalizers else x for name, x in obs.items()], dim=-1)
        return torch.cat([self.acting(x), self.valuing(x)], dim=-1)

    def forward(self, obs, first, state, restarts=None):
        """obs by name [T, B, ...], first bool [T, B], state float32 [B, state_size] before obs[0]; restarts: 0 and the
        times at which `first` is set in any row, in order (None: they are looked for). The recurrent core runs once for
        each stretch between them; where one begins, the state of the rows with `first` is zeroed.
        Returns gaussians [T, B, 2 * numbers of an action], values [T, B], state."""
        T, B = first.shape
        x = self.encode({name: part.flatten(0, 1) for name, part in obs.items()}).unflatten(0, (T, B))
        if restarts is None:
            restarts = [0] + [t for t in range(1, T) if first[t].any()]
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
        acting, valuing = x.chunk(2, -1) if self.rnn_type == "none" else (x, x)
        gaussians = self.actor(acting)
        if self.log_std is not None:
            gaussians = torch.cat([gaussians, self.log_std.expand_as(gaussians)], -1)
        return gaussians, self.critic(valuing), state

    def update_normalizers(self, obs: dict[str, torch.Tensor], valid: torch.Tensor) -> None:
        """obs by name [T or T+1, B, ...], valid bool [T, B]"""
        for name, normalizer in self.normalizers.items():  # of every fourth step: neighbours in time hardly differ
            normalizer.update(obs[name][: len(valid) : 4].flatten(0, 1), valid[::4].flatten())


def sample_actions(gaussians: torch.Tensor, deterministic: bool = False):
    """gaussians [..., 2 * numbers] -> actions float32 [..., numbers], their joint log-probability [...]."""
    mean, log_std = gaussians.chunk(2, dim=-1)
    actions = mean if deterministic else mean + log_std.exp() * torch.randn_like(mean)
    return actions, evaluate_actions(gaussians, actions)[0]


def evaluate_actions(gaussians: torch.Tensor, actions: torch.Tensor):
    """gaussians [..., 2 * numbers], actions [..., numbers] -> joint log-probability and entropy [...]."""
    mean, log_std = gaussians.chunk(2, dim=-1)
    logprob = -0.5 * ((actions - mean) / log_std.exp()).square() - log_std - 0.5 * np.log(2 * np.pi)
    return logprob.sum(-1), (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum(-1)


def kl_divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p, q) of two policies by their gaussians [..., 2 * numbers] -> [...]."""
    (mean_p, log_std_p), (mean_q, log_std_q) = p.chunk(2, dim=-1), q.chunk(2, dim=-1)
    difference = log_std_q - log_std_p
    return (difference + 0.5 * ((-2 * difference).exp() + ((mean_p - mean_q) / log_std_q.exp()).square() - 1)).sum(-1)


# === V-trace and the loss =============================================================================================


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
    trace = discounts * c
    corrections = rho * (rewards + discounts * values[1:] - values[:-1])
    for t in reversed(range(len(rewards) - 1)):
        corrections[t].addcmul_(trace[t], corrections[t + 1])  # in place: from here on it is vs[t] - V[t]
    vs = torch.cat([values[:-1] + corrections, values[-1:]])
    advantages = rewards + discounts * (lam * vs[1:] + (1 - lam) * values[1:]) - values[:-1]
    return vs, advantages


class Batch(NamedTuple):
    """Rollouts on the learner's device, [time, rollout, ...]: B of one optimiser step, or all of an iteration."""

    obs: dict[str, torch.Tensor]  # by name [T+1, B, ...]
    first: torch.Tensor  # bool [T+1, B]
    rnn_state: torch.Tensor  # float32 [B, state_size]
    actions: torch.Tensor  # float32 [T, B, numbers of an action]
    gaussians: torch.Tensor  # float32 [T, B, 2 * numbers], of the policy that acted
    logprobs: torch.Tensor  # float32 [T, B]
    values: torch.Tensor  # float32 [T, B]
    rewards: torch.Tensor  # float32 [T, B]
    terminated: torch.Tensor  # bool [T, B]
    mask: torch.Tensor  # bool [T, B]: valid and younger than max_policy_lag: what the losses average over
    restarts: list[int]  # see Agent.forward; on the host


def appo_loss(args: Args, agent: Agent, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped losses with V-trace's targets over the samples in `batch.mask`. Returns the loss, the targets
    float32 [T, B], and metrics, on the device."""
    gaussians, values, _ = agent(batch.obs, batch.first, batch.rnn_state, batch.restarts)
    logprobs, entropy = evaluate_actions(gaussians[:-1], batch.actions)
    log_ratio = logprobs - batch.logprobs
    ratio = log_ratio.clamp(np.log(0.05), np.log(20.0)).exp()  # Sample Factory's band; no gradient outside
    discounts = args.gamma * ~batch.terminated
    vs, advantages = vtrace(ratio.detach(), values.detach(), batch.rewards, discounts, ~batch.first[1:],
                            args.vtrace_rho, args.vtrace_c, args.vtrace_lambda)  # fmt: skip

    weight = batch.mask.float()
    n = sum_over_ranks(weight.sum())

    def mean(x: torch.Tensor) -> torch.Tensor:  # [..., T, B]; under torchrun this rank's share of all ranks' mean
        return (x * weight).sum((-2, -1)) / n

    advantages = advantages - sum_over_ranks(mean(advantages))
    advantages = advantages / sum_over_ranks(mean(advantages.square())).sqrt().clamp(min=1e-7)
    clipped = ratio.clamp(1 / (1 + args.clip_coef), 1 + args.clip_coef)
    policy_losses = -torch.min(ratio * advantages, clipped * advantages)

    target, old, unit = vs[:-1], batch.values, agent.critic.std
    value_error, reach = (values[:-1] - target).square(), args.ppo_clip_value * unit
    clipped_error = (old + (values[:-1] - old).clamp(-reach, reach) - target).square()
    value_losses = torch.max(value_error, clipped_error) / unit.square()

    kl = kl_divergence(gaussians[:-1], batch.gaussians)
    loss = mean(policy_losses + args.vf_coef * value_losses - args.ent_coef * entropy + args.kl_loss_coef * kl)

    with torch.no_grad():
        spread = (target - sum_over_ranks(mean(target))).square()
        samples = {
            "losses/policy_loss": policy_losses,
            "losses/value_loss": value_losses,
            "losses/entropy": entropy,
            "losses/kl": kl,
            "losses/approx_kl": log_ratio.exp() - 1 - log_ratio,  # http://joschu.net/blog/kl-approx.html
            "losses/clipfrac": (ratio != clipped).float(),
            "losses/value": values[:-1],
            "vtrace/rho_mean": ratio.clamp(max=args.vtrace_rho),
            "vtrace/rho_clipfrac": (ratio > args.vtrace_rho).float(),
        }
        stacked = torch.stack([*samples.values(), value_error, spread])
        *means, error, variance = sum_over_ranks(mean(stacked))
        metrics = dict(zip(samples, means))
        metrics["losses/explained_variance"] = 1 - error / variance.clamp(min=1e-8)
    return loss, target, metrics


# === Actor ============================================================================================================


class WorkerEnvs:
    """The environments of one worker. `reset` and `step` write a split's rows of the mailbox; from then on the rows
    belong to the caller, until it has filled in the actions and calls `step` for that split again."""

    def __init__(self, args: Args, worker: int, mailbox: SimpleNamespace, seed: int, before_start=lambda: None):
        """mailbox: its arrays; before_start: called before each environment is started, which may take seconds."""
        random.seed(seed)  # for environments that draw from these: forked actors would all have the same numbers
        np.random.seed(seed)
        torch.manual_seed(seed)
        S = args.worker_num_splits
        n = args.num_envs_per_worker // S
        self.args, self.mailbox, self.seed, self.n, self.before_start = args, mailbox, seed, n, before_start
        self.splits = [make_envs(args, n) for _ in range(S)]
        starts = range(worker * args.num_envs_per_worker, (worker + 1) * args.num_envs_per_worker, n)
        self.rows = [slice(start, start + n) for start in starts]
        self.ended = np.zeros((S, n), bool)  # the last step ended an episode: the next one only resets
        self.totals = np.zeros((S, n, 3))  # of the episodes under way; columns as in Mailbox.episode

    def reset(self, split: int) -> None:
        """Starts the split's environments."""
        r, envs, mailbox, seed = self.rows[split], self.splits[split], self.mailbox, self.seed + split * self.n
        # Where the vector class allows it, one by one. The reset of the whole split afterwards costs little.
        for i, env in enumerate(getattr(envs, "envs", ())):
            self.before_start()
            env.reset(seed=seed + i)
        self.before_start()
        self.write(r, envs.reset(seed=seed)[0])
        mailbox.first[r], mailbox.terminated[r], mailbox.reward[r], mailbox.episode[r] = True, False, 0.0, 0.0
        if self.args.last_action_reward:
            mailbox.obs["last_action_reward"][r] = 0.0

    def step(self, split: int) -> None:
        r, envs, mailbox, totals = self.rows[split], self.splits[split], self.mailbox, self.totals[split]
        first = self.ended[split].copy()
        action = np.clip(mailbox.action[r], envs.action_space.low, envs.action_space.high)
        observation, reward, terminated, truncated, info = envs.step(action)
        self.write(r, observation)
        raw_reward = info.get("raw_reward", reward)
        reward = np.clip(reward * self.args.reward_scale, -self.args.reward_clip, self.args.reward_clip)
        mailbox.reward[r], mailbox.terminated[r], mailbox.first[r] = reward, terminated, first
        if self.args.last_action_reward:
            mailbox.obs["last_action_reward"][r] = np.column_stack([action, reward]) * ~first[:, None]
        self.ended[split] = terminated | truncated
        totals += np.stack([raw_reward, reward, np.ones(self.n)], axis=-1) * ~first[:, None]
        mailbox.episode[r] = totals * self.ended[split][:, None]
        totals[self.ended[split]] = 0

    def write(self, r: slice, observation) -> None:
        for name, part in by_name(observation).items():
            self.mailbox.obs[name][r] = part

    def close(self) -> None:
        for envs in self.splits:
            envs.close()


def env_seed(*entropy: int) -> int:
    """The seed of a worker's first environment; environment i has seed + i. Below 2**30, so that all fit 31 bits."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0]) >> 2


def read_splits(pipe) -> bytes:
    """Waits for bytes on one end of an actor's pipe, each the number of a split; none when the other end is closed."""
    try:
        return os.read(pipe.fileno(), 256)
    except ConnectionResetError:  # closed with a byte of ours unread
        return b""


def write_split(pipe, split: int) -> None:
    with contextlib.suppress(OSError):  # the other end is closed, as the next read will say
        os.write(pipe.fileno(), bytes([split]))


def actor(args: Args, worker: int, seed: int, mailbox: Mailbox, pipe) -> None:
    """What an actor does. A byte that it writes to its pipe says that the rows of that split are written. A byte that
    it reads says that the actions of that split are. The end of the pipe is the end of the run, or of the main process.
    """
    # The kernel ends a process whose timer runs out. With --num-workers 0 there is none: you may be in a debugger.
    seconds, hangup = args.actor_timeout if args.num_workers else 0.0, select.poll()
    timer = functools.partial(signal.setitimer, signal.ITIMER_REAL)
    hangup.register(pipe, 0)  # for no other event than that the other end is closed

    def before_start() -> None:
        timer(seconds)
        if hangup.poll(0):
            sys.exit()

    before_start()
    envs = WorkerEnvs(args, worker, mailbox.numpy(), seed, before_start)
    for split in range(args.worker_num_splits):
        envs.reset(split)
        timer(0)
        write_split(pipe, split)  # from here on its rows belong to inference, until a reply names it
    while splits := read_splits(pipe):
        for split in splits:
            timer(seconds)
            envs.step(split)
            timer(0)  # waiting for actions is no hang
            write_split(pipe, split)
    timer(seconds)
    envs.close()


def actor_process(core: int | None, args: Args, worker: int, seed: int, mailbox: Mailbox, pipe) -> None:
    """Body of an actor process. What it dies of is on stderr: an exception, a crash in a library, or, if the timer runs
    out, where it was, even if a library holds the interpreter's lock."""
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, chain=True)  # chain: then the signal does what it always does, and kills
    os.set_inheritable(pipe.fileno(), False)  # a program that an environment starts would keep it open
    if core is not None:
        os.sched_setaffinity(0, {core})  # engines inherit it: engine and actor talk twice a tic, cheapest on one core
    os.nice(10)  # where cores are short, inference and learning come first: actors without actions can only wait
    torch.set_num_threads(1)
    actor(args, worker, seed, mailbox, pipe)


class Actors:
    """The actors: started, listened to, and replaced when they die. One thread at a time owns all of this: the main
    thread while the environments start, then the inference thread.

    When an actor dies, its environments and the last transition of each of its rows are lost: the row's next
    observation is a `first` one, which makes that transition invalid. Earlier steps in its FILLING slots are kept."""

    SHORT_LIFE = 1000  # requests. A worker whose actors die sooner three times in a row ends the run

    def __init__(self, args: Args, inference: "Inference", session: int, log):
        """Another `session` number gives the environments other seeds."""
        self.args, self.inference, self.session, self.log = args, inference, session, log
        self.context = mp.get_context("forkserver")  # fork is unsafe beside threads and CUDA; spawn costs 100 MB each
        self.selector, self.deaths = selectors.DefaultSelector(), 0
        self.selector.register(inference.bell, selectors.EVENT_READ)
        self.requests: list[int] = []  # groups that wait for actions, the oldest first: their rows are inference's
        # of each worker: its actor, our end of its pipe, requests of this one, short lives in a row
        self.workers = max(1, args.num_workers)
        self.actors, self.pipes = [None] * self.workers, [None] * self.workers
        self.served, self.short_lives = [0] * self.workers, [0] * self.workers

    def start_all(self) -> None:
        """Returns when every environment has been started, or the user stops the run. Raises UserError."""
        self.context.set_forkserver_preload(["numpy", "torch", "gymnasium", "tyro", "tqdm", ENGINE])
        # Blocked signals are inherited: what a terminal or a batch system sends to all is for the main process alone,
        # from an actor's first moment on. One that comes meanwhile is ours when we unblock.
        multiprocessing.resource_tracker.ensure_running()  # now, because its start unblocks the signals
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        multiprocessing.forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        for worker in range(self.workers):
            self.start(worker)
        total, n = len(self.inference.mailbox.first), self.inference.size
        with tqdm(total=total, desc="starting environments", disable=True if rank_of()[0] else None) as bar:
            while len(self.requests) * n < total and not STOP.asked_at:
                self.wait(0.5)
                bar.update(len(self.requests) * n - bar.n)

    def start(self, worker: int) -> None:
        args, allowed = self.args, sorted(os.sched_getaffinity(0))
        core = allowed[worker % len(allowed)] if args.set_workers_cpu_affinity else None
        seed = env_seed(args.seed, self.session, worker, self.deaths)
        self.served[worker] = 0
        self.pipes[worker], pipe = self.context.Pipe()
        self.selector.register(self.pipes[worker], selectors.EVENT_READ, worker)
        arguments, named = (args, worker, seed, self.inference.mailbox, pipe), dict(name=f"actor {worker}", daemon=True)
        if args.num_workers:
            started = self.context.Process(target=actor_process, args=(core, *arguments), **named)
        else:
            started = threading.Thread(target=self.in_thread, args=arguments, **named)
        started.start()
        self.actors[worker] = started
        # On return nothing refers to `pipe` here, so it is closed: the actor's copy is the only one, and ends with it.

    def in_thread(self, *arguments) -> None:
        self.error = RuntimeError("the actor has ended")  # by sys.exit
        try:
            actor(*arguments)
        except Exception as error:
            self.error = error
        finally:
            arguments[-1].close()  # its end of the pipe

    def wait(self, timeout: float | None = None) -> None:
        """Waits for requests, for slots that become free (the bell), or for the end. Raises UserError."""
        S = self.args.worker_num_splits
        for key, _ in self.selector.select(timeout):
            worker = key.data
            if worker is None:
                os.eventfd_read(self.inference.bell)
            elif splits := read_splits(key.fileobj):
                self.requests += [worker * S + split for split in splits]
                self.served[worker] += len(splits)
            else:
                self.replace(worker)

    def reply(self, groups: list[int]) -> None:
        """Gives the groups' rows back to their actors."""
        served = set(groups)
        self.requests = [group for group in self.requests if group not in served]
        for group in groups:
            worker, split = divmod(group, self.args.worker_num_splits)
            write_split(self.pipes[worker], split)

    def replace(self, worker: int) -> None:
        """The actor has ended, and with its pipe all that it had asked for."""
        self.requests = [group for group in self.requests if group // self.args.worker_num_splits != worker]
        self.selector.unregister(self.pipes[worker])
        self.pipes[worker].close()
        if not self.args.num_workers:  # a thread is not replaced
            raise self.error
        self.actors[worker].join(5)
        self.actors[worker].kill()  # if it has closed its pipe, but lives
        self.actors[worker].join(5)
        how = f"died (exit code {self.actors[worker].exitcode})"
        if self.actors[worker].exitcode == -signal.SIGALRM:
            how = f"hung for {self.args.actor_timeout:.0f} s (its stack is above)"
        self.deaths += 1
        self.short_lives[worker] = self.short_lives[worker] + 1 if self.served[worker] < self.SHORT_LIFE else 0
        if self.short_lives[worker] == 3:
            raise UserError(f"actor {worker} {how}, for the third time in a row")
        self.log(f"actor {worker} {how}; starting another")
        self.start(worker)

    def stop(self) -> None:
        """Ends all actors: by closing their pipes, and after five seconds by force."""
        deadline = time.monotonic() + 5
        for pipe in filter(None, self.pipes):
            pipe.close()
        for process in filter(None, self.actors):
            process.join(max(0.0, deadline - time.monotonic()))
            if self.args.num_workers:
                process.kill()


# === Inference ========================================================================================================


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
    def use(self, policy: SimpleNamespace):
        with policy.lock:
            wait_event(policy.event)
            yield policy
            policy.event = record_event(self.device)

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """The learner's weights and statistics, as they are now, act from the next inference on."""
        with self.use(self.spare) as spare:  # waits for the last inference that still used it
            torch._foreach_copy_(spare.tensors, self.learned)
            spare.version = version
        self.current, self.spare = spare, self.current


class Inference:
    """Serves the groups that wait for actions, all at once. Owns every row's recurrent state and FILLING slot, and has
    the memory and the queues between itself, the actors and the learner."""

    def __init__(self, args: Args, spaces: Spaces, agent: Agent, device: torch.device):
        self.args, self.device = args, device
        rows, slots = max(1, args.num_workers) * args.num_envs_per_worker, slots_needed(args)
        self.size = args.num_envs_per_worker // args.worker_num_splits  # rows in a group
        self.mailbox = Mailbox(spaces, rows)
        self.numpy = self.mailbox.numpy()
        self.rollouts = Rollouts(spaces, args.rollout, slots, agent.state_size, device)
        self.acting = ActingPolicy(agent, device)
        self.full, self.free = queue.SimpleQueue(), queue.SimpleQueue()  # (slots, event) to the learner, and back
        self.bell = os.eventfd(0)  # wakes this thread when slots are free, or the run ends
        self.free_slots = deque(range(slots))
        groups = rows // self.size
        self.t = [0] * groups  # steps so far in the group's FILLING slots, the same for all of its rows
        self.slots: list[np.ndarray | None] = [None] * groups  # None: handed over, and no new ones yet
        self.state = torch.zeros(rows, agent.state_size, device=device)
        self.obs = tensors(spaces, rows, device=device)  # the mailbox rows being served, on the device
        if device.type == "cuda":  # pinned, so that copies to the device run beside the host
            for source in self.mailbox.obs.values():
                error = torch.cuda.cudart().cudaHostRegister(source.data_ptr(), source.nbytes, 0)
                torch.cuda.check_error(int(error))
        # The last finished ones, as in Mailbox.episode. Checkpoints keep them: the episodes that end first after a
        # resume are short ones, whose mean could pass for a best return.
        self.episodes: deque[list[float]] = deque(maxlen=100)
        self.counts = Counter()  # rows and batches served; seconds waited, by the learner too
        self.stopping = False

    def release(self, slots: np.ndarray) -> None:
        """The learner gives slots back: LEARNING -> FREE, once the event, recorded after its last copy, has passed."""
        self.free.put((slots, record_event(self.device)))
        os.eventfd_write(self.bell, 1)

    def stop(self) -> None:
        self.stopping = True
        os.eventfd_write(self.bell, 1)

    def unpin(self) -> None:
        """Must come before the mailbox is freed: CUDA would take whatever lies there next for pinned memory."""
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # what has broken CUDA is the error to be shown, and raised already
                torch.cuda.synchronize(self.device)  # the last copies out of it may be under way
            for source in self.mailbox.obs.values():
                torch.cuda.cudart().cudaHostUnregister(source.data_ptr())

    def run(self, actors: Actors) -> None:
        """Body of the inference thread. It serves all that wait: the busier it is, the larger its batches."""
        try:
            with own_stream(self.device, self.args.inference_threads, priority=-1):
                while not self.stopping:
                    actors.reply(self.serve(actors.requests))
                    start, why = time.perf_counter(), "blocked" if actors.requests else "idle"
                    actors.wait()
                    self.counts[why] += time.perf_counter() - start
        except BaseException as error:
            self.full.put(error)  # the learner raises it

    @torch.inference_mode()
    def serve(self, groups: list[int]) -> list[int]:
        """Hands over the rollouts that are complete, and writes actions for all groups that have slots or get new ones;
        returns those. The others wait: the caller tries them again when slots are free."""
        filled = [group for group in groups if self.t[group] == self.args.rollout]
        if filled:  # these rows are stored twice: here as obs[T] of the old slots, below as obs[0] of the new ones
            self.store(filled)
            event = record_event(self.device)
            for group in filled:
                self.full.put((self.slots[group], event))  # FILLING -> FULL
                self.t[group], self.slots[group] = 0, None
        while not self.free.empty():
            slots, event = self.free.get()
            wait_event(event)  # the learner's copy out of these slots
            self.free_slots.extend(slots)
        for group in groups:
            if self.slots[group] is None and len(self.free_slots) >= self.size:  # FREE -> FILLING
                self.slots[group] = np.array([self.free_slots.popleft() for _ in range(self.size)])
        ready = [group for group in groups if self.slots[group] is not None]
        if ready:
            self.act(ready)
        return ready

    def store(self, groups: list[int]):
        """Copies the mailbox rows of the groups to their times and slots. Returns their rows, times and slots on the
        host, and on the device, there with `first`."""
        n, numpy, rollouts = self.size, self.numpy, self.rollouts
        rows = np.concatenate([np.arange(group * n, group * n + n) for group in groups])
        t = np.repeat([self.t[group] for group in groups], n)
        slots = np.concatenate([self.slots[group] for group in groups])
        rollouts.first[t, slots] = first = numpy.first[rows]
        later = t > 0  # at t = 0 the reward belongs to the slot before, which has it
        t1, s1, r1 = t[later] - 1, slots[later], rows[later]
        rollouts.rewards[t1, s1], rollouts.terminated[t1, s1] = numpy.reward[r1], numpy.terminated[r1]
        index = torch.from_numpy(np.stack([rows, t, slots, first])).to(self.device, non_blocking=True)
        for name, source in self.mailbox.obs.items():
            staged, field = self.obs[name], rollouts.obs[name]
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
        with self.acting.use(self.acting.current) as policy:
            state, obs = self.state[d_rows], {name: staged[None, :n] for name, staged in self.obs.items()}
            gaussians, values, self.state[d_rows] = policy.agent(obs, d_first[None].bool(), state)
            actions, logprobs = sample_actions(gaussians[0])
            rollouts.actions[d_t, d_slots], rollouts.gaussians[d_t, d_slots] = actions, gaussians[0]
            rollouts.logprobs[d_t, d_slots], rollouts.values[d_t, d_slots] = logprobs, values[0]
            if (t == 0).any():
                rollouts.rnn_state[d_slots] = torch.where((d_t == 0).unsqueeze(-1), state, rollouts.rnn_state[d_slots])
            rollouts.versions[t, slots] = policy.version
        # Waits for the device, so also for its copies out of the mailbox: only now may the actors have their rows back.
        self.numpy.action[rows] = actions.cpu().numpy()
        self.episodes.extend(self.numpy.episode[rows[self.numpy.episode[rows, 2] > 0]].tolist())
        for group in groups:
            self.t[group] += 1
        self.counts["served"] += n
        self.counts["batches"] += 1


@contextlib.contextmanager
def sampling(inference: Inference, actors: Actors):
    """Context with actors, their environments and the inference thread, all ended with it."""
    thread = threading.Thread(target=inference.run, args=(actors,), name="inference", daemon=True)
    try:
        actors.start_all()
        thread.start()
        yield
    finally:
        inference.stop()
        if thread.is_alive():
            thread.join(10)
        actors.stop()
        inference.unpin()


# === Learner ==========================================================================================================


class Learner:
    """Takes FULL slots, those of an iteration at a time, and improves the policy."""

    def __init__(self, args: Args, agent: Agent, inference: Inference, device: torch.device):
        self.args, self.agent, self.inference, self.device = args, agent, inference, device
        self.optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-6, fused=True)
        self.slots: list[int] = []  # FULL ones, the oldest first
        self.version = 0  # of the policy published last
        self.global_step = 0  # valid transitions received
        self.skipped = 0  # iterations, or steps of one, without a single usable sample
        self.best_return = -float("inf")
        self.deadline = np.inf  # when the time is up

    def load(self, checkpoint: dict) -> None:
        """All but the weights, which the agent has already."""
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.version, self.global_step = checkpoint["version"], checkpoint["global_step"]
        self.best_return = checkpoint["best_return"]
        self.inference.episodes.extend(checkpoint["episodes"])
        self.inference.acting.publish(self.version)

    def collect(self) -> np.ndarray | None:
        """Waits for the slots of an iteration: FULL -> LEARNING. None when the time is up or the user stops the run.
        Raises what has ended the inference thread."""
        start, args = time.perf_counter(), self.args
        count = args.num_batches_per_epoch * args.batch_size // args.rollout
        while not STOP.asked_at and time.monotonic() < self.deadline:
            if len(self.slots) >= count:
                self.inference.counts["waited"] += time.perf_counter() - start
                slots, self.slots = self.slots[:count], self.slots[count:]
                return np.array(slots)
            with contextlib.suppress(queue.Empty):
                item = self.inference.full.get(timeout=0.5)
                if isinstance(item, BaseException):
                    raise item
                slots, event = item
                wait_event(event)  # inference's writes to these slots
                self.slots.extend(slots)
        return None

    def gather(self, slots: np.ndarray) -> tuple[Batch, np.ndarray]:
        """Copies slots out of the rollouts. Returns them, and the lags of the valid samples, on the host."""
        r, d_slots = self.inference.rollouts, torch.from_numpy(slots).to(self.device, non_blocking=True)
        obs = {name: field.index_select(1, d_slots) for name, field in r.obs.items()}
        names = ("actions", "gaussians", "logprobs", "values")
        on_device = {name: getattr(r, name).index_select(1, d_slots) for name in names}
        first, lag = r.first[:, slots], self.version - r.versions[:, slots]
        valid = ~first[1:]
        restarts = [0] + [t for t in range(1, len(first)) if first[t].any()]
        mask = valid & (lag < self.args.max_policy_lag)
        host = dict(first=first, rewards=r.rewards[:, slots], terminated=r.terminated[:, slots], mask=mask)
        moved = {name: torch.from_numpy(array).to(self.device, non_blocking=True) for name, array in host.items()}
        rnn_state = r.rnn_state.index_select(0, d_slots)
        return Batch(obs=obs, **on_device, **moved, rnn_state=rnn_state, restarts=restarts), lag[valid]

    def batches(self, iteration: Batch):
        """Yields the batch of each optimiser step. Every epoch deals out the iteration's rollouts anew; where there is
        one batch, it is all of them."""
        for _ in range(self.args.num_epochs):
            if self.args.num_batches_per_epoch == 1:
                yield iteration
                continue
            order = torch.randperm(iteration.mask.shape[1]).to(self.device)
            for index in order.chunk(self.args.num_batches_per_epoch):
                obs = {name: x.index_select(1, index) for name, x in iteration.obs.items()}
                others = {name: x.index_select(0 if name == "rnn_state" else 1, index)
                          for name, x in iteration._asdict().items() if torch.is_tensor(x)}  # fmt: skip
                restart = others["first"].any(1).tolist()  # waits for the device; the step before has done so, too
                yield Batch(obs=obs, **others, restarts=[t for t in range(len(restart)) if t == 0 or restart[t]])

    def learning_rate(self) -> float:
        """Of the next iteration."""
        left = max(0.0, 1 - self.global_step / self.args.total_timesteps) if self.args.anneal_lr else 1.0
        return self.args.learning_rate * left

    def iterate(self, slots: np.ndarray) -> dict[str, float] | None:
        """Learns from slots, which are LEARNING until they are given back: as soon as they are copied, but with `sync`
        only after the new policy has been published. Returns metrics, or None when another rank has left. Raises
        FloatingPointError before a non-finite update is made: weights and statistics are still good."""
        args, metrics = self.args, {}
        iteration, lags = self.gather(slots)
        if not args.sync:
            self.inference.release(slots)
        # Infinities are clipped to +-5, so no loss would show them. Squares, because the statistics are made of them.
        finite = all(bool(x.square().isfinite().all()) for x in iteration.obs.values() if x.is_floating_point())
        too_old = np.count_nonzero(lags >= args.max_policy_lag)
        valid, too_old, lag, broken, leaving = self.sum_counts(len(lags), too_old, lags.sum(), not finite)
        if leaving:
            return None
        if broken:
            raise FloatingPointError("an observation is not finite")
        self.optimizer.param_groups[0]["lr"] = self.learning_rate()
        self.global_step += int(valid)
        if valid == too_old:  # an iteration without a usable sample is no update
            self.skipped += 1
        else:
            if self.version or not args.normalize_input:  # the first samples only initialise the inputs' statistics
                metrics = self.update(iteration)
            # New statistics change the policy too: they are published together with the last weights.
            self.agent.update_normalizers(iteration.obs, ~iteration.first[1:])
            self.publish()
        if args.sync:  # only now: the next samples are all of the newest version
            self.inference.release(slots)
        if valid:
            metrics |= {"lag/mean": lag / valid, "lag/max": lags.max(initial=0), "lag/masked": too_old / valid}
        return metrics

    def sum_counts(self, valid=0, too_old=0, lag=0, broken=0, leaving=0) -> list[float]:
        """The sums over all ranks, which this waits for. leaving: this rank ends the run, for all of them."""
        start = time.perf_counter()
        sums = sum_over_ranks(torch.tensor([valid, too_old, lag, broken, leaving], dtype=torch.float64)).tolist()
        self.inference.counts["ranks"] += time.perf_counter() - start
        return sums

    def update(self, iteration: Batch) -> dict[str, float]:
        """The optimiser steps of an iteration; returns the last one's metrics. Publishes the weights after each but the
        last: that is for the caller."""
        metrics = {}
        for i, batch in enumerate(self.batches(iteration)):
            if i:
                self.publish()
            loss, target, of_batch = appo_loss(self.args, self.agent, batch)
            self.optimizer.zero_grad()
            loss.backward()
            sum_over_ranks(loss.detach())  # in place: `loss` becomes that of the union, as the gradients do
            for parameter in self.agent.parameters():
                sum_over_ranks(parameter.grad)
            grad_norm = nn.utils.clip_grad_norm_(self.agent.parameters(), self.args.max_grad_norm or torch.inf)
            if not torch.isfinite(loss + grad_norm):  # waits for the device: nothing broken is published or saved
                if not sum_over_ranks(batch.mask.sum()):  # 0/0: a step without a usable sample is none
                    self.skipped += 1
                    continue
                raise FloatingPointError(f"the loss ({loss.item()}) or its gradient is not finite")
            self.optimizer.step()
            metrics = of_batch | {"losses/grad_norm": grad_norm}
            last_epoch = i >= (self.args.num_epochs - 1) * self.args.num_batches_per_epoch
            if self.args.normalize_returns and last_epoch:  # every sample counts once
                self.agent.critic.update(target, batch.mask)
        metrics = dict(zip(metrics, torch.stack(list(metrics.values())).tolist()))
        return metrics | {"charts/learning_rate": self.optimizer.param_groups[0]["lr"]}

    def publish(self) -> None:
        self.version += 1
        self.inference.acting.publish(self.version)


# === Checkpoints ======================================================================================================


def save_checkpoint(path: Path, learner: Learner) -> None:
    """Tensors and plain values only. Written under another name first: a checkpoint is whole or absent."""
    path.parent.mkdir(exist_ok=True)
    content = dict(agent=learner.agent.state_dict(), optimizer=learner.optimizer.state_dict(), version=learner.version,
                   global_step=learner.global_step, best_return=learner.best_return,
                   episodes=list(learner.inference.episodes), args=asdict(learner.args))  # fmt: skip
    temporary, STOP.writing = path.with_name("saving.tmp"), True
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        STOP.writing = False


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


def load_weights(agent: Agent, checkpoint: dict, folder: Path, args: Args) -> None:
    """Raises UserError where they do not fit."""
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError:
        raise UserError(f"the network in {folder} does not fit {args.env_id}, these flags or this file") from None


def saved_args(folder: Path) -> dict:
    """An experiment's Args as typed (before `resolve`), without the flags of one SESSION. Raises UserError."""
    if not (folder / "cfg.json").exists():
        raise UserError(f"there is no experiment in {folder}")
    saved = json.loads((folder / "cfg.json").read_text())["args"]
    return {field.name: saved[field.name] for field in fields(Args) if field.name in saved.keys() - set(SESSION)}


def load_agent(folder: Path | str, kind: str = "latest", **changes) -> tuple[Agent, Args, int]:
    """The trained policy in an experiment's folder, its Args (set for environments in this process and updated by
    `changes`, such as device="cpu"), and the step it was saved at. kind: "latest" or "best". Raises UserError."""
    in_process = dict(num_workers=0, worker_num_splits=None, batch_size=None, num_batches_per_epoch=1)
    folder = Path(folder)
    args = resolve(Args(**saved_args(folder) | changes | in_process))
    checkpoint = load_checkpoint(folder / "checkpoints", kind, print)
    if checkpoint is None:
        raise UserError(f"no {kind} checkpoint in {folder / 'checkpoints'}")
    agent = Agent(spaces_of(args), args).to(args.device)
    load_weights(agent, checkpoint, folder, args)
    return agent, args, checkpoint["global_step"]


# === Evaluate =========================================================================================================


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
    device, mailbox = torch.device(args.device), Mailbox(spaces, count)
    numpy, state = mailbox.numpy(), torch.zeros(count, agent.state_size, device=device)
    per_env = -(-args.eval_episodes // count)  # the same for each: taking the first to end would favour short ones
    returns, frames = [[] for _ in range(count)], []
    bar = tqdm(total=count * per_env, desc="episodes", disable=None)
    with bar, contextlib.closing(WorkerEnvs(args, 0, numpy, args.seed)) as envs:
        envs.reset(0)
        while any(len(finished) < per_env for finished in returns):
            if args.save_video and not returns[0]:
                frames.append(np.array(envs.splits[0].envs[0].render()))
            obs = {name: part.to(device)[None] for name, part in mailbox.obs.items()}
            gaussians, _, state = agent(obs, mailbox.first.to(device)[None], state)
            numpy.action[:] = sample_actions(gaussians[0], args.eval_deterministic)[0].cpu().numpy()
            envs.step(0)
            for i in np.flatnonzero(numpy.episode[:, 2]):
                if len(returns[i]) < per_env:
                    returns[i].append(float(numpy.episode[i, 0]))
                    bar.update()
    flat = [value for finished in returns for value in finished][: args.eval_episodes]
    kind = "likeliest" if args.eval_deterministic else "sampled"
    kind += " actions, in Gymnasium" if args.save_video else " actions"
    print(f"{len(flat)} episodes, {kind}, step {step:,}: return {np.mean(flat):.2f} +- {np.std(flat):.2f} "
          f"(standard deviation), from {min(flat):.2f} to {max(flat):.2f}")  # fmt: skip
    if args.save_video:
        imageio.mimwrite(folder / "video.mp4", frames, fps=envs.splits[0].metadata["render_fps"])
        print(f"wrote {folder / 'video.mp4'} ({len(frames)} frames)")
    return flat


# === Main =============================================================================================================


def parse_args() -> tuple[Args, Path]:
    """Args as typed, and the run's folder. For an experiment that exists its saved flags hold, except for those typed
    now. Raises UserError."""
    args = tyro.cli(Args)
    for name in EVALUATION:
        if getattr(args, name) != getattr(Args, name) and not args.evaluate:
            raise UserError(f"--{name.replace('_', '-')} is for --evaluate")
    if args.evaluate and (args.experiment is None or dist.is_initialized()):
        raise UserError("--evaluate needs the name of an --experiment, and is for one process, without torchrun")
    if args.experiment is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        raise UserError("torchrun --max-restarts can only go on with a run that has a name: give it an --experiment")
    experiment = args.experiment or f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{int(time.time())}"
    folder = Path(args.train_dir) / experiment
    if Path(os.path.abspath(args.train_dir)) not in Path(os.path.abspath(folder)).parents:
        raise UserError(f"--experiment {experiment} is not a folder below {args.train_dir}")
    if args.evaluate or (folder / "cfg.json").exists():
        saved = asdict(Args(**saved_args(folder)))
        args = tyro.cli(Args, default=Args(**saved))
        for name in (name for name in saved.keys() - set(SESSION) if getattr(args, name) != saved[name]):
            change = f"{name} {saved[name]} -> {getattr(args, name)}"
            if name in FIXED and not args.evaluate:
                raise UserError(f"{folder} holds another environment: {change}; rename --experiment")
            print(f"override: {change}")
    args.experiment = experiment
    if not args.evaluate:
        spaces_of(resolve(args))  # raises what would be raised later too, but then on every rank
    return args, folder


def open_log(folder: Path):
    """The run's log.txt, which one run at a time may hold, where the file system has locks. Raises UserError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / "log.txt", "a", buffering=1)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another run is using {folder}") from None
    except OSError:
        print(f"warning: {folder} is on a file system without locks; a second run in it would not be noticed")
    return file


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory: page faults of fresh activations cost 10 to 20 % of an update on a CPU."""
    for option, value in ((-1, 2**31 - 1), (-4, 0), (-8, 1)):  # M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX (malloc.h)
        ctypes.CDLL(None).mallopt(option, value)


class Reporter:
    """The progress bar, log.txt and TensorBoard, on rank 0 alone: returns and times are its own, steps those of all
    ranks. Every rate is over the window since the last report."""

    def __init__(self, args: Args, learner: Learner, folder: Path, log):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only the main process writes

        self.args, self.learner, self.inference, self.log = args, learner, learner.inference, log
        self.writer = SummaryWriter(str(folder), flush_secs=10, purge_step=learner.global_step + 1)
        self.writer.add_text("args", json.dumps(asdict(args), indent=2))
        self.bar = tqdm(total=args.total_timesteps, initial=learner.global_step, desc=args.env_id, unit=" steps",
                        unit_scale=True, dynamic_ncols=True, disable=None)  # fmt: skip
        self.metrics, self.last = {}, Counter(time=time.monotonic(), step=learner.global_step)

    def update(self, metrics: dict[str, float]) -> float:
        """Called after every iteration, with its metrics. Every five seconds it reports, and returns the mean return of
        the last 100 episodes; otherwise, and before there are so many, -inf."""
        self.metrics |= metrics
        step = self.learner.global_step
        self.bar.update(step - self.bar.n)
        now = Counter(self.inference.counts, time=time.monotonic(), step=step)
        change = now - self.last
        if (seconds := change["time"]) < 5:
            return -np.inf
        self.last = now
        fps = change["step"] * self.args.frameskip / seconds
        scalars = self.metrics | {
            "charts/SPS": change["step"] / seconds,
            "charts/FPS": fps,
            "stats/learner_wait": change["waited"] / seconds,  # shares of the time: the learner waits for full slots,
            "stats/inference_idle": change["idle"] / seconds,  # inference waits for requests,
            "stats/inference_blocked": change["blocked"] / seconds,  # or has requests and waits for free slots
            "stats/inference_batch": change["served"] / max(1, change["batches"]),  # rows served together
        }
        if dist.is_initialized():
            scalars["stats/all_reduce"] = change["ranks"] / seconds  # the learner waits for other ranks
        if episodes := list(self.inference.episodes):
            tags = ("charts/episodic_return", "charts/episodic_return_trained", "charts/episodic_length")
            scalars |= zip(tags, np.mean(episodes, axis=0).tolist())
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)
        if change["ranks"] > max(change["blocked"], change["waited"]):
            bottleneck = "another rank"
        elif change["blocked"] >= change["waited"]:
            bottleneck = "learner"
        else:
            bottleneck = "environments" if change["idle"] > 0.5 * (seconds - change["blocked"]) else "inference"
        mean = scalars.get("charts/episodic_return")
        score = f"return {mean:.2f}, " if episodes else ""
        text = f"{fps:,.0f} frames/s, {score}lag {self.metrics.get('lag/mean', 0):.1f}, bottleneck: {bottleneck}"
        self.bar.set_postfix_str(text)
        self.log(f"step {step:,}: {text}", self.bar.disable)
        return mean if len(episodes) >= 100 else -np.inf


def learn(args: Args, checkpoints: Path, learner: Learner, reporter: Reporter | None) -> None:
    """The learner's loop. Rank 0 has the reporter and saves; any rank may end the loop, for all of them. What it has
    learned is saved at the end, and before an error that leaves the weights good; not after one that nobody foresaw."""
    saved, now = learner.version, time.monotonic()  # saved: the version of the last checkpoint
    learner.deadline = np.inf if args.train_for_seconds is None else now + args.train_for_seconds
    saved_at = best_at = now  # no best in the first 30 s: episodes that end first are short ones
    try:
        while learner.global_step < args.total_timesteps:
            if (slots := learner.collect()) is None:
                learner.sum_counts(leaving=1)
                break
            if (metrics := learner.iterate(slots)) is None:
                break
            now = time.monotonic()
            if reporter and (score := reporter.update(metrics)) > learner.best_return and now - best_at >= 30:
                learner.best_return, best_at = score, now
                save_checkpoint(checkpoints / "best.pth", learner)
            if reporter and now - saved_at >= args.save_every_sec:
                save_latest(checkpoints, learner, args.keep_checkpoints)
                saved, saved_at = learner.version, now
    finally:
        if isinstance(sys.exception(), UserError):  # only this rank has it: an actor that cannot be kept alive
            learner.sum_counts(leaving=1)
        foreseen = sys.exception() is None or isinstance(sys.exception(), (FloatingPointError, UserError))
        if reporter:
            reporter.bar.close()
            if foreseen and learner.version > saved:  # else there is nothing new
                save_latest(checkpoints, learner, args.keep_checkpoints)
            reporter.writer.close()


def train(typed: Args, folder: Path) -> int:
    """`typed` are the args before `resolve`. Returns the exit code: 0, or 130 when the run was stopped by a signal."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each actor takes some of our file descriptors
    args, (rank, ranks) = resolve(typed), rank_of()
    device = torch.device(args.device)
    if device.type == "cpu":
        keep_freed_memory()
    else:
        torch.cuda.set_device(device.index or 0)
        torch.backends.cudnn.allow_tf32 = False  # float32 means it: mu and pi must agree at lag 0
    spaces = spaces_of(args)
    T, B, W = args.rollout, args.batch_size // args.rollout, args.num_workers
    rows = max(1, W) * args.num_envs_per_worker
    check_shared_memory(spaces, rows)
    log_file, checkpoints = None, folder / "checkpoints"

    def log(text: str, show: bool = True) -> None:
        text = f"rank {rank}: {text}" if rank else text
        if log_file:
            log_file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        if show:
            tqdm.write(text)

    def begin() -> dict | None:
        """On rank 0 alone: the others have neither log nor checkpoints."""
        nonlocal log_file
        log_file = open_log(folder)
        return load_checkpoint(checkpoints, "latest", log)

    checkpoint = from_first_rank(begin)
    if checkpoint and checkpoint["global_step"] >= args.total_timesteps:
        if rank == 0:
            log(f"{folder} has its {checkpoint['global_step']:,} steps already; raise --total-timesteps to go on")
        return 0
    torch.manual_seed(args.seed)
    agent = Agent(spaces, args).to(device)
    for x in agent.state_dict().values() if ranks > 1 else ():  # other machines may compute other first weights
        dist.broadcast(x, 0)
    inference = Inference(args, spaces, agent, device)
    learner = Learner(args, agent, inference, device)
    if checkpoint:
        load_weights(agent, checkpoint, folder, args)
        learner.load(checkpoint)
        with contextlib.suppress(UserError):  # after a crash best.pth may be newer; a damaged one does not matter
            learner.best_return = (load_checkpoint(checkpoints, "best", log) or checkpoint)["best_return"]
    if rank:
        args.seed = env_seed(args.seed, rank)  # environments and random numbers of its own
    torch.manual_seed(args.seed + learner.version)
    actors = Actors(args, inference, session=learner.version, log=log)  # a resumed run has other episodes
    if rank == 0:
        software = {name: sys.modules[name].__version__ for name in ("torch", "numpy", "gymnasium", ENGINE)}
        # A resumed run starts from what was typed and resolves again: it may be on another machine.
        cfg = dict(args=asdict(typed), resolved=asdict(args), versions=software, command=sys.argv)
        (folder / "cfg.tmp").write_text(json.dumps(cfg, indent=2))
        os.replace(folder / "cfg.tmp", folder / "cfg.json")
        lag = 0.0 if args.sync else slots_needed(args) / B * args.num_epochs  # when the learner is the bottleneck
        if checkpoint:
            log(f"resuming {folder} at step {learner.global_step:,}; learning rate {learner.learning_rate():.3g}")
        steps = args.total_timesteps
        for line in (
            f"{args.env_id}: {sum(p.numel() for p in agent.parameters()):,} parameters on {device},"
            f" {args.learner_threads} + {args.inference_threads} threads to learn and act",
            f"{W} workers x {args.num_envs_per_worker} environments in {args.worker_num_splits} splits;"
            f" {args.num_batches_per_epoch * args.batch_size:,} samples an iteration, {args.batch_size:,}"
            f" ({B} rollouts of {T} steps) an optimiser step; expected lag up to {lag:.1f} versions",
            f"{mebibytes(inference.mailbox):.1f} MiB of shared memory beside the engines' own, "
            f"{mebibytes(inference.rollouts):.0f} MiB of rollouts in {slots_needed(args)} slots",
            f"up to {steps:,} steps = {steps * args.frameskip:,} frames; files in {folder}",
            f"{ranks} ranks like this: {ranks * rows} environments,"
            f" {ranks * args.batch_size:,} samples an optimiser step",
        )[: 5 if ranks > 1 else 4]:
            log(line)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # all of the above ran on the default stream; the threads have their own
    with sampling(inference, actors), own_stream(device, args.learner_threads):
        learn(args, checkpoints, learner, None if rank else Reporter(args, learner, folder, log))
    if rank == 0:
        log(f"{'stopped' if STOP.asked_at else 'done'}: {learner.global_step:,} steps, {learner.version:,} versions, "
            f"{learner.skipped} batches without a usable sample, {actors.deaths} actors replaced")  # fmt: skip
    return 130 if STOP.asked_at and ranks == 1 else 0  # else torchrun would start it again


def main() -> int:
    try:
        if sys.platform != "linux":
            raise UserError(f"this needs Linux (/proc, /dev/shm, eventfd); {sys.platform} has no such things")
        join_ranks()
        args, folder = from_first_rank(parse_args)
        if args.evaluate:
            evaluate(args, folder)
            return 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
        code = train(args, folder)
        if dist.is_initialized():
            dist.destroy_process_group()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # in an evaluation, or before the run has begun: there is nothing to save
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
