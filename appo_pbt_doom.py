# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "numpy==2.4.6",
#     "gymnasium==1.4.0",
#     "tyro==1.0.17",
#     "tensorboard==2.21.0",
#     "tqdm==4.70.1",
#     "vizdoom==1.3.2",
#     "envpool-assets==0.3.0",
#     "imageio[ffmpeg]==2.38.1",
# ]
# ///
"""Asynchronous PPO with V-trace for several policies at once on ViZDoom: populations, bots, self-play and matches.

    python appo_pbt_doom.py --env-id duel --num-policies 4 --with-pbt --total-timesteps 20000000
    python appo_pbt_doom.py --experiment NAME --evaluate      # all policies against all

On 2 cores of an AMD EPYC (Zen 3, no GPU) two policies learned `duel` from each other in a small arena for 65 minutes.
Then one won all of 50 games against the game's bot, the other 35 and lost 10, and each won all 50 against itself of an
hour before (one seed, 2026-11-23; benchmark/self_play.sh).

A deliberate edit of appo_doom.py. What differs: the main process only starts and looks after the others, and holds the
exchanges of population-based training (`Population`, `watch`). Every policy has a process of its own, which does what
the diagram shows of the main process (`train_policy`). An actor's games have seats for several agents, and a table says
which policy plays in which seat (`table_of_policies`); a split is stepped when all policies have chosen their actions.
Games have PettingZoo's parallel API (`make_env`), Doom's matches among them (`DoomEnv`). An agent that waits for its
return to a match is *inactive*: its steps are in no loss, but cut no trace and no state. What is the same as in
appo_doom.py is the same text.

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

import concurrent.futures
import contextlib
import copy
import csv
import ctypes
import difflib
import faulthandler
import functools
import importlib.util
import json
import math
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import queue
import random
import re
import shlex
import shutil
import signal
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from dataclasses import asdict, dataclass, fields
from dataclasses import field as dataclass_field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import tyro
import vizdoom
from tqdm import tqdm


# ======================================================================================================================
# Args
# ======================================================================================================================


@dataclass
class Args:
    # --- run
    env_id: str = "basic"
    """matches: duel, deathmatch (4 agents and 4 bots); against bots: duel_bots, deathmatch_bots; alone: basic,
    my_way_home, deadly_corridor, defend_the_center, defend_the_line, health_gathering, health_gathering_supreme,
    battle, battle2, or benchmark (battle without measurements and with 9 flat actions)"""
    cfg_path: str | None = None  # a ViZDoom scenario .cfg of your own, trained on instead of `env_id`
    scenario_dir: str | None = None  # folder with Sample Factory's maps for the matches; else ViZDoom's cig.wad
    frameskip: int = 4  # game ticks (frames) per step of the agent
    seed: int = 1  # of the network, of the action sampling and of the games
    total_timesteps: int = 1_000_000
    """stop after this many steps (frames / frameskip) of each policy, as a mean over them, all sessions together"""
    train_for_seconds: float | None = None  # stop after this many seconds of learning in this session
    device: str = "auto"  # cpu, cuda or cuda:1; auto takes cuda where there is one
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the encoder; auto is bfloat16 where the GPU or the CPU (AVX512-BF16, AMX) has instructions for it"""
    experiment: str | None = None  # the run's folder below train_dir; an existing one is resumed. Default: a fresh one
    train_dir: str = "train_dir"  # where experiments are kept
    save_every_sec: float = 120.0  # seconds between checkpoints
    keep_checkpoints: int = 2  # how many of the latest checkpoints are kept
    evaluate: bool = False  # play with checkpoints instead of training: all against all, in a game of several agents
    opponents: list[str] = dataclass_field(default_factory=list)  # other experiments that take part
    eval_policies: list[int] = dataclass_field(default_factory=list)  # which policies of each take part. Default: all
    eval_episodes: int = 100  # number of episodes that each policy plays, or of games between each two
    eval_deterministic: bool = False  # play the likeliest action instead of a sampled one
    load_checkpoint_kind: Literal["latest", "best"] = "latest"  # which checkpoint to play with
    save_video: bool = False  # write the first minute of one game's episodes to <experiment>/video.mp4

    # --- sampling
    num_workers: int | None = None  # actor processes. Default: the cores this process may use
    num_envs_per_worker: int = 16  # games per worker
    worker_num_splits: int | None = None
    """parts that a worker's games are stepped in: it steps one while the others wait for actions. Default: 2 with CUDA
    and an even number of games, else 1 (without CUDA a worker that waits leaves its core to the network)"""
    set_workers_cpu_affinity: bool = True
    """pin worker i and its games to the i-th core of this process; off where a container's CPU quota is less than its
    cores. For several runs at once turn it off, or give each run cores of its own with taskset"""
    sync: bool = False  # collect only while the learner waits, so that each iteration begins with lag 0: the baseline
    actor_timeout: float = 120.0  # restart a worker when a step of its games, or the start of one, takes more seconds
    inference_threads: int | None = None  # CPU threads of inference. Default: by the number of cores
    learner_threads: int | None = None  # CPU threads of the learner. Default: by the number of cores

    # --- population
    num_policies: int = 4
    """policies that are trained side by side, each by a process of its own, in the same games; with several GPUs policy
    i has GPU i mod their number, unless --device names one"""
    policy_settings: list[str] = dataclass_field(default_factory=list)
    """where a policy differs from the flags below, at its start: "1:learning_rate=0.01" (policy 1)"""
    with_pbt: bool = False  # population-based training: mutate settings, replace the worst policies by the best
    pbt_target_objective: Literal["return", "kills", "frags", "wins"] | None = None
    """the mean of the last 100 episodes. Default: wins of a match between agents, frags against bots, else the
    return"""
    pbt_start_mutation: int = 5_000_000  # steps that the slowest policy makes before the first exchange
    pbt_period_env_steps: int = 1_250_000  # steps that the slowest policy makes between exchanges
    pbt_replace_fraction: float = 0.3  # share of the population that is best, and that is worst
    pbt_replace_reward_gap: float = 0.1  # replace only where the gap is a larger share of the larger objective
    pbt_replace_reward_gap_absolute: float = 1e-6  # and only where the gap itself is larger than this
    pbt_mutation_rate: float = 0.15  # chance of each number to change
    pbt_perturb_min: float = 1.05  # smallest factor by which a number is multiplied or divided; what is 0 stays 0
    pbt_perturb_max: float = 1.5  # largest factor of such a change
    pbt_optimize_gamma: bool = False  # mutate gamma too

    # --- algorithm
    rollout: int = 32  # steps per rollout (T)
    batch_size: int | None = None
    """samples per optimiser step, a multiple of rollout. Default: near rows * rollout / 2, from 1024 to 8192; with
    sync rows * rollout"""
    num_epochs: int = 1  # passes over each batch; with sync PPO clips nothing in the first
    max_batches_ahead: int = 1  # batches collected ahead of the learner; more hides jitter and adds lag
    max_policy_lag: int = 100  # samples by a policy at least this many versions old are left out of the losses
    learning_rate: float = 4e-4  # of Adam; Sample Factory's is 1e-4, which learns more slowly (benchmark/README.md)
    gamma: float = 0.99  # discount per step
    vtrace_rho: float = 1.0  # V-trace's clip of the importance weight of a temporal difference (rho bar)
    vtrace_c: float = 1.0  # V-trace's clip of the trace (c bar)
    vtrace_lambda: float = 0.95  # decay of the trace, as in GAE; 1 is the V-trace of the paper
    clip_coef: float = 0.1  # PPO: the ratio is clipped to [1/(1+e), 1+e]
    ppo_clip_value: float = 0.2  # PPO: the value may move this far from the one at acting time
    vf_coef: float = 0.5  # coefficient of the value loss
    exploration_loss: Literal["entropy", "symmetric_kl"] = "symmetric_kl"
    """reward for entropy, or penalty for the symmetric KL divergence from the uniform policy"""
    ent_coef: float = 0.001  # coefficient of the exploration loss
    max_grad_norm: float = 4.0  # gradients are scaled down to this norm; 0 turns it off
    reward_scale: float = 1.0  # rewards are multiplied by this (on top of the environment's own scale)
    reward_clip: float = 10.0  # then clipped to +- this
    normalize_input: bool = True  # every pixel and measurement, by its running mean and variance; off: pixels / 255
    rnn_type: Literal["gru", "lstm", "none"] = "gru"  # the recurrent core
    hidden_size: int = 512  # units of the encoder's last layer and of the recurrent core

    def __post_init__(self):
        if self.cfg_path:
            self.env_id = Path(self.cfg_path).stem
            if os.path.exists(self.cfg_path):  # else ViZDoom looks among its own scenarios
                self.cfg_path = os.path.abspath(self.cfg_path)
        if self.scenario_dir:  # engines are started in another folder
            self.scenario_dir = os.path.abspath(self.scenario_dir)


# The ranges of numeric flags; of those not named, 1 to infinity for whole numbers and 0.0 to infinity for others
LOWEST = dict(seed=0, max_batches_ahead=0, reward_scale=-np.inf, actor_timeout=1.0, pbt_perturb_min=1.0,
              pbt_perturb_max=1.0, keep_checkpoints=2)  # fmt: skip
HIGHEST = dict(gamma=1.0, vtrace_lambda=1.0, seed=2**31 - 1, pbt_replace_fraction=0.5, pbt_mutation_rate=1.0,
               num_policies=16, num_workers=234)
# keep_checkpoints: a donor that saves meanwhile must not delete what its copy reads.
# Of the last two: a process can be given 256 file descriptors. An actor needs 13 for each mailbox, a policy one for
# each actor.
BATCH_SHARE, SMALLEST_BATCH = 2, 1024  # default batch: a rollout of every row / BATCH_SHARE, but at least this
# flags of one session, not of the experiment
SESSION = ("train_for_seconds", "evaluate", "opponents", "eval_policies", "eval_episodes", "eval_deterministic",
           "load_checkpoint_kind", "save_video")  # fmt: skip
# must be the checkpoint's; --evaluate may play another game with the same observations and actions
GAME, NETWORK = (
    ("env_id", "cfg_path", "scenario_dir"),
    ("num_policies", "policy_settings", "rnn_type", "hidden_size", "normalize_input"),
)


class UserError(Exception):
    """Something the user can fix; printed as one line, without a traceback."""


def cpu_quota() -> float:
    """How many cores' time this process's container may use (cgroup v2, else v1); infinity without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # no such file; "max" instead of a number
            quota, period = map(int, " ".join(Path("/sys/fs/cgroup", name).read_text() for name in names).split())
            if quota > 0:
                return quota / period
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
    args.num_workers = min(n, HIGHEST["num_workers"]) if args.num_workers is None else args.num_workers
    if args.worker_num_splits is None:
        args.worker_num_splits = 1 if cpu or args.num_envs_per_worker % 2 else 2
    # On a CPU learning costs two to three times inference; with --sync the two take turns and use every core.
    n = max(1, n // args.num_policies)
    args.learner_threads = args.learner_threads or (1 if not cpu else n if args.sync else max(1, n // 2))
    args.inference_threads = args.inference_threads or (1 if not cpu else n if args.sync else max(1, n // 4))
    if args.num_envs_per_worker % args.worker_num_splits:
        raise UserError(f"--num-envs-per-worker {args.num_envs_per_worker} is not divisible by "
                        f"--worker-num-splits {args.worker_num_splits}")  # fmt: skip
    P, agents = args.num_policies, spaces_of(args)[1]
    if args.num_envs_per_worker // args.worker_num_splits * agents % P:
        raise UserError(f"{args.num_envs_per_worker // args.worker_num_splits} games in a split x {agents} agents are "
                        f"not divisible by --num-policies {P}")  # fmt: skip
    if P > 1 and args.max_batches_ahead == 0 and not args.sync:
        raise UserError("--max-batches-ahead 0 needs --num-policies 1: several could wait for each other for ever")
    if args.with_pbt and P == 1:
        raise UserError("--with-pbt needs more than one policy: --num-policies")
    if args.with_pbt and args.pbt_start_mutation >= args.total_timesteps:
        raise UserError(f"--with-pbt: the run ends after --total-timesteps {args.total_timesteps:,}, before the first "
                        f"exchange at --pbt-start-mutation {args.pbt_start_mutation:,}")  # fmt: skip
    scenario = not args.cfg_path and SCENARIOS.get(args.env_id) or Scenario("", (), ())
    if args.pbt_target_objective is None:
        args.pbt_target_objective = "wins" if scenario.agents > 1 else "frags" if scenario.match else "return"
    if scenario.wad and args.pbt_target_objective in (("kills",) if scenario.match else ("frags", "wins")):
        raise UserError(f"--pbt-target-objective {args.pbt_target_objective}: {args.env_id} has none")
    starting_genes(args)  # raises for wrong --policy-settings
    rows = args.num_workers * args.num_envs_per_worker * agents // P  # of a policy
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


# ======================================================================================================================
# Environment
# ======================================================================================================================

ENGINE, TICKS_PER_SECOND = "vizdoom", 35
GAME_SHARED_MEMORY = 3 * 2**20  # bytes; an engine's file is 10 MiB long but sparse: at 160x120 at most 2.8 MiB are used
SCREEN = (120, 160, 3)  # what the engine renders: height, width, RGB. Sample Factory's 160x120
IMAGE = (72, 128, 3)  # what the agent sees, nearest neighbour: 3 of every 5 rows, 4 of every 5 columns
# Read from every game. USER2 is the number of kills in battle and battle2.
VARIABLES = ("SELECTED_WEAPON", "SELECTED_WEAPON_AMMO", "HEALTH", "USER2")
# and from every match
EIGHT = range(8)
MATCH_VARIABLES = ("ARMOR", "ATTACK_READY", "PLAYER_NUMBER", "PLAYER_COUNT", "DEAD", "FRAGCOUNT", "DEATHCOUNT",
                   "HITCOUNT", "DAMAGECOUNT", *(f"WEAPON{k}" for k in EIGHT), *(f"AMMO{k}" for k in EIGHT),
                   *(f"PLAYER{k}_FRAGCOUNT" for k in range(1, 17)))  # fmt: skip
# The 23 measurements in Sample Factory's order: divided by the second number and at most the third. Missing ones are 0.
MEASUREMENTS = (("SELECTED_WEAPON", 1, np.inf), ("SELECTED_WEAPON_AMMO", 15, 5), ("HEALTH", 30, np.inf),
                ("ARMOR", 30, np.inf), ("USER2", 10, np.inf), ("ATTACK_READY", 1, np.inf), ("PLAYER_COUNT", 5, np.inf),
                *((f"WEAPON{k}", 1, np.inf) for k in EIGHT), *((f"AMMO{k}", 15, 5) for k in EIGHT))  # fmt: skip
# The engine's own settings, by its names; living_reward is per tic
SETTINGS = dict(living_reward=0.0, death_penalty=0.0, doom_skill=3, episode_start_time=1, render_hud=True,
                render_crosshair=False, render_weapon=True, render_decals=False, render_particles=False)  # fmt: skip


class Scenario(NamedTuple):
    """One of Sample Factory's Doom environments (its doom_utils.py and scenario files). Times are in tics, 1/35 s."""

    wad: str
    buttons: tuple[str, ...]  # in the engine's order
    heads: tuple[int, ...]  # one of size n is a no-op and n-1 consecutive buttons, or n values of a *_DELTA button
    time_limit: float = 2100
    reward_scale: float = 1.0
    measurements: bool = False  # 23 numbers beside the image
    shaping: str = ""  # what is added to the engine's reward: "", "gathering" or a name in SHAPING
    settings: dict = {}  # where they are not SETTINGS
    turn: float = 10.0  # degrees per tic, at most, of a *_DELTA button
    match: bool = False  # a deathmatch over the network: frags are the score
    agents: int = 1  # players that learn
    bots: int = 0  # players that the engine plays
    respawn: int = 0  # seconds from a death to the return
    better: str = ""  # Sample Factory's map for it, played where --scenario-dir has the file


TURN, WALK, STRAFE = ("TURN_LEFT", "TURN_RIGHT"), ("MOVE_FORWARD", "MOVE_BACKWARD"), ("MOVE_LEFT", "MOVE_RIGHT")
ARENA = dict(doom_skill=2, render_crosshair=True)
BATTLE = dict(buttons=(*WALK, "MOVE_RIGHT", "MOVE_LEFT", "ATTACK", "SPEED", "TURN_LEFT_RIGHT_DELTA"),
              heads=(3, 3, 2, 2, 11), measurements=True, shaping="battle", settings=ARENA)  # fmt: skip
GATHER = dict(buttons=TURN + WALK, heads=(5,), shaping="gathering",
              settings=dict(living_reward=0.01, render_hud=False, render_weapon=False))  # fmt: skip
MATCH = dict(buttons=(*WALK, "MOVE_RIGHT", "MOVE_LEFT", *(f"SELECT_WEAPON{k}" for k in range(1, 8)), "ATTACK", "SPEED",
                      "USE", "TURN_LEFT_RIGHT_DELTA"), heads=(3, 3, 8, 2, 2, 2, 21), turn=12.5, time_limit=4 * 60 * 35,
             measurements=True, match=True, settings=dict(render_crosshair=True))  # fmt: skip
WITHOUT_USE = MATCH | dict(buttons=tuple(name for name in MATCH["buttons"] if name != "USE"), heads=(3, 3, 8, 2, 2, 21))
DEFEND = dict(buttons=(*TURN, "ATTACK"), heads=(3, 2), settings=dict(death_penalty=1.0, episode_start_time=10))
SCENARIOS = {
    "basic": Scenario("basic.wad", (*STRAFE, "ATTACK"), (4,), time_limit=300, reward_scale=0.01,
                      settings=dict(living_reward=-1.0, doom_skill=5, episode_start_time=14)),
    "my_way_home": Scenario("my_way_home.wad", TURN + WALK, (3, 3), settings=dict(
                            living_reward=-1e-4, doom_skill=5, episode_start_time=10, render_hud=False)),
    "deadly_corridor": Scenario("deadly_corridor.wad", (*TURN, *WALK, *STRAFE, "ATTACK"), (3, 3, 3, 2),
                                reward_scale=0.01, settings=dict(death_penalty=100.0, doom_skill=5)),
    "defend_the_center": Scenario("defend_the_center.wad", **DEFEND),
    "defend_the_line": Scenario("defend_the_line.wad", time_limit=float("inf"), **DEFEND),
    "health_gathering": Scenario("health_gathering.wad", **GATHER),
    "health_gathering_supreme": Scenario("health_gathering_supreme.wad", **GATHER),  # vizdoom's map is not the paper's
    "battle": Scenario("D3_battle.wad", **BATTLE),
    "battle2": Scenario("D4_battle2.wad", **BATTLE),
    "benchmark": Scenario("D3_battle.wad", (*WALK, "MOVE_RIGHT", "MOVE_LEFT", "TURN_RIGHT", "TURN_LEFT", "ATTACK",
                          "SPEED"), (9,), settings=ARENA),
    "duel_bots": Scenario("cig.wad", bots=1, respawn=2, shaping="bots", better="ssl2.wad", **MATCH),
    "deathmatch_bots": Scenario("cig.wad", bots=7, shaping="bots", better="dwango5.wad", **WITHOUT_USE),
    "duel": Scenario("cig.wad", agents=2, respawn=2, shaping="match", better="ssl2.wad", **MATCH),
    "deathmatch": Scenario("cig.wad", agents=4, bots=4, respawn=2, shaping="match", better="freedm.wad", **MATCH),
}  # fmt: skip
RULES = ("forcerespawn", "noautoaim", "respawnprotect", "spawnfarthest", "nocrouch", "nojump", "nofreelook", "noexit")
# Sample Factory's reward shaping: of each variable, times its growth and times its fall
WEIGHTS = (1, 1, 1, 5, 5, 5, 10, 10)  # of weapons 0 to 7
ITEMS = {"HEALTH": (0.005, -0.003), "ARMOR": (0.005, -0.001),
         **{f"WEAPON{k}": (0.02 * w, -0.01 * w) for k, w in enumerate(WEIGHTS)},
         **{f"AMMO{k}": (2e-4 * w, -1e-4 * w) for k, w in enumerate(WEIGHTS)}}  # fmt: skip
SHAPING = {
    "battle": {"HEALTH": (0.005, -0.003)},
    "bots": {"FRAGCOUNT": (1.0, -1.5), "DEATHCOUNT": (-0.75, 0.75), "HITCOUNT": (0.01, -0.01),
             "DAMAGECOUNT": (0.003, -0.003), **ITEMS},
    "match": {"FRAGCOUNT": (1.0, -0.001), "DEATHCOUNT": (-1.0, 1.0), "HITCOUNT": (0.0, 0.0),
              "DAMAGECOUNT": (0.01, -0.01), **ITEMS, "HEALTH": (0.01, -0.01)},
}  # fmt: skip


def shaping_of(args) -> dict[str, float]:
    """The shaping coefficients of an environment, by name, as population-based training mutates them: "HEALTH+" for
    growth and "HEALTH-" for fall; "SELECTED3" for each step with weapon 3, loaded, in hand for five steps."""
    own = args.cfg_path or args.env_id not in SCENARIOS
    deltas = {} if own else SHAPING.get(SCENARIOS[args.env_id].shaping, {})
    result = {f"{name}{sign}": pair[i] for name, pair in deltas.items() for i, sign in enumerate("+-")}
    return result | ({f"SELECTED{k}": 2e-4 * w for k, w in enumerate(WEIGHTS)} if deltas else {})


def find_wad(name: str) -> str:
    """Path of a scenario file of the installed `vizdoom` or `envpool-assets` package. Raises UserError."""
    folders = [Path(vizdoom.scenarios_path)]
    if spec := importlib.util.find_spec("envpool_assets"):
        folders.append(Path(spec.origin).parent / "vizdoom" / "maps")
    for folder in folders:
        if (folder / name).is_file():
            return str(folder / name)
    raise UserError(f"scenario file {name} not found; it comes with: pip install vizdoom envpool-assets")


@functools.cache
def launcher() -> str:
    """Path of a shell script, kept in memory, that starts an engine: in the temporary folder, with the engine's own
    folder made beforehand (engines that make it at the same time crash), deaf to signals that a terminal or a batch
    system sends to all, and killed by the kernel when the thread that started it ends."""
    folder, engine = shlex.quote(tempfile.gettempdir()), shlex.quote(f"{Path(vizdoom.__file__).parent}/vizdoom")
    script = f"""#!/bin/sh
trap '' INT TERM
mkdir -p {folder}/_vizdoom && cd {folder} || exit 1
mortal="setpriv --pdeathsig KILL"  # from util-linux; if too old, a killed --evaluate leaves engines
$mortal true 2> /dev/null || mortal=
exec $mortal {engine} "$@" > /dev/null 2>&1  # in a match they tell of each other
"""
    unlink_orphans()  # of runs before this one
    file = os.memfd_create("vizdoom_launcher")
    os.write(file, script.encode())
    return f"/proc/{os.getpid()}/fd/{file}"


def unlink_game_files(pid: int | str = "self") -> None:
    """Unlinks the shared memory that a process's games have mapped, and no other run's."""
    with contextlib.suppress(OSError):
        lines = [line for line in open(f"/proc/{pid}/maps") if "/dev/shm/ViZDoom" in line and "(deleted)" not in line]
        for file in {line.split()[-1] for line in lines}:
            Path(file).unlink(missing_ok=True)


def unlink_orphans() -> None:
    """Unlinks shared memory left by games that died while they started. The kernel grants a write lease only on a file
    that nobody has open or mapped, in any container: files of living games are safe."""
    import fcntl  # here, so that other systems get main's sentence and no ImportError

    for path in Path("/dev/shm").glob("ViZDoom*"):
        with contextlib.suppress(OSError), open(path) as file:
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # who opens it meanwhile sends this; SIGIO would end us
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            path.unlink()


class GameLost(Exception):
    """A match whose engines ended or hang. It is started again, alone."""


class Player:
    """One engine: what one player sees and does."""

    def __init__(self, env_id: str, cfg_path: str | None, scenario_dir: str | None):
        self.game = vizdoom.DoomGame()
        if cfg_path:
            self.setup_own(cfg_path)
        else:
            self.setup(env_id, scenario_dir)
        self.game.set_vizdoom_path(launcher())
        self.game.set_episode_timeout(0)  # after its own time limit the engine has no state, so the limit is ours
        self.game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        self.game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        self.game.set_mode(vizdoom.Mode.PLAYER)
        self.game.set_window_visible(False)
        self.game.set_doom_config_path(os.devnull)  # else every engine writes a _vizdoom.ini where it is started
        names = VARIABLES + MATCH_VARIABLES * self.scenario.match
        self.game.set_available_game_variables([getattr(vizdoom.GameVariable, name) for name in names])
        # presses[h][a] is what value a of head h does to the buttons; an action's buttons are the sum over its heads
        self.presses, column, buttons = [], 0, self.game.get_available_buttons()
        self.buttons: dict[bytes, list[float]] = {}  # of the actions seen so far
        for n in self.scenario.heads:
            press = np.zeros((n, len(buttons)))
            if buttons[column].name.endswith("_DELTA"):
                press[:, column] = np.linspace(-self.scenario.turn, self.scenario.turn, n)
                column += 1
            else:
                press[1:, column : column + n - 1] = np.eye(n - 1)
                column += n - 1
            self.presses.append(press)
        self.screen = np.zeros(SCREEN, np.uint8)
        # Of the variables, with one that is 0 for those that this game lacks
        self.column = {name: names.index(name) if name in names else len(names) for name in VARIABLES + MATCH_VARIABLES}
        self.variables, self.floor = np.zeros(len(names) + 1), np.zeros(len(names) + 1)
        self.floor[[i for name, i in self.column.items() if "FRAGCOUNT" in name]] = -np.inf  # suicides count -1
        self.measured = [self.column[name] for name, *_ in MEASUREMENTS]
        self.divisors, self.highest = np.array([numbers for _, *numbers in MEASUREMENTS], np.float32).T
        self.set_shaping({})

    def setup(self, env_id: str, scenario_dir: str | None) -> None:
        if env_id not in SCENARIOS:
            near = difflib.get_close_matches(env_id, SCENARIOS, cutoff=0.3) or list(SCENARIOS)
            raise UserError(f"unknown --env-id {env_id}; did you mean {' or '.join(near)}?")
        self.scenario = SCENARIOS[env_id]
        if scenario_dir and self.scenario.better:
            path = Path(scenario_dir, self.scenario.better)
            if not path.is_file():
                raise UserError(f"--scenario-dir {scenario_dir} has no {path.name}")
            # FreeDM is a whole game, not a map for one
            is_game = path.name == "freedm.wad"
            (self.game.set_doom_game_path if is_game else self.game.set_doom_scenario_path)(str(path))
        else:
            self.game.set_doom_scenario_path(find_wad(self.scenario.wad))
        self.game.set_doom_map("map01")
        self.game.set_available_buttons([getattr(vizdoom.Button, name) for name in self.scenario.buttons])
        for name, value in (SETTINGS | self.scenario.settings).items():
            getattr(self.game, f"set_{name}")(value)

    def setup_own(self, cfg_path: str) -> None:
        """A user's scenario: its buttons are one head (no-op or one of them), a delta button is a head of 11 values."""
        try:
            self.game.load_config(cfg_path)
        except Exception as error:
            raise UserError(f"--cfg-path {cfg_path}: {error}") from None
        buttons = sorted(self.game.get_available_buttons(), key=lambda button: button.name.endswith("_DELTA"))
        self.game.set_available_buttons(buttons)
        binary = sum(not button.name.endswith("_DELTA") for button in buttons)
        heads = ((binary + 1,) if binary else ()) + (11,) * (len(buttons) - binary)
        if not heads:
            raise UserError(f"--cfg-path {cfg_path} names no available_buttons")
        self.scenario = Scenario("", (), heads, time_limit=self.game.get_episode_timeout() or float("inf"))

    def set_shaping(self, coefficients: dict[str, float]) -> None:
        """What the reward is shaped with from now on; names as in `shaping_of`."""
        names = sorted({name[:-1] for name in coefficients if name[-1] in "+-"})
        self.shaped = [self.column[name] for name in names]
        self.most = np.array([{"DAMAGECOUNT": 200.0, "HITCOUNT": 5.0}.get(name, np.inf) for name in names])
        self.growth, self.fall = (np.array([coefficients[name + sign] for name in names]) for sign in "+-")
        self.selected = [coefficients.get(f"SELECTED{k}", 0.0) for k in EIGHT]

    def begin(self) -> None:
        """Reads the first state of an episode."""
        self.weapons, self.dead = deque(maxlen=5), self.scenario.match  # a match may begin before the first life does
        self.read_state()
        self.deaths = self.variables[self.column["DEATHCOUNT"]]  # the engine counts on from episode to episode

    def read_state(self) -> None:
        state = self.game.get_state()
        self.screen = state.screen_buffer
        self.variables[:-1] = np.maximum(state.game_variables, self.floor[:-1])

    def press(self, action) -> list[float]:
        """What an action does to the engine's buttons."""
        key = np.asarray(action).tobytes()
        if key not in self.buttons:
            self.buttons[key] = sum(press[a] for press, a in zip(self.presses, np.atleast_1d(action))).tolist()
        return self.buttons[key]

    def observation(self):
        """A fresh observation of the current screen."""
        image = np.empty(IMAGE, np.uint8)
        blocks, rows = image.reshape(24, 3, 32, 12), self.screen.reshape(24, 5, 32, 15)
        for i, row in enumerate((0, 1, 3)):  # the rows and columns that nearest neighbour picks for 5 -> 3 and 5 -> 4
            blocks[:, i] = rows[:, row, :, :12]
        if not self.scenario.measurements:
            return image
        vector = np.minimum(self.variables[self.measured] / self.divisors, self.highest, dtype=np.float32)
        vector[6] = max(vector[6], 1 / 5)  # alone in the game
        return dict(obs=image, vector=vector)

    def bonus(self, before: np.ndarray, was_dead: bool) -> float:
        """Sample Factory's reward shaping, of the change from the variables `before`."""
        now, column = self.variables, self.column
        if self.scenario.shaping == "gathering":
            return float(now[column["HEALTH"]] > before[column["HEALTH"]])
        weapon = int(now[column["SELECTED_WEAPON"]])
        self.weapons.append(weapon)
        if not self.scenario.shaping or was_dead and not self.dead:  # a new life has other numbers
            return 0.0
        change = np.minimum(now[self.shaped] - before[self.shaped], self.most)
        bonus = float(np.where(change > 0, change * self.growth, -change * self.fall).sum())
        if now[column["SELECTED_WEAPON_AMMO"]] > 0 and self.weapons.count(weapon) == 5:
            bonus += self.selected[min(weapon, 7)]  # Sample Factory always reads weapon 7 here
        return bonus


class DoomEnv:
    """A game of Doom with PettingZoo's parallel API: of one player, or a match of several, whose engines talk over the
    loopback. An observation is the image, uint8 [72, 128, 3], alone or in a Dict as `obs` beside `vector`, float32 [23]
    measurements.

    In an agent's info: `raw_reward`, the engine's own reward before shaping and scale, in a match the change of frags;
    `inactive` while it waits for its return after a death; at the end `kills`, and in a match `frags`, `deaths`,
    `place` (1: nobody has more frags) and `win` (1 if first and alone in that, else 0)."""

    metadata = {"name": "doom", "render_modes": ["rgb_array"]}
    START_SECONDS, STEP_SECONDS = 30.0, 20.0  # a match that takes longer to start, or to step, is lost

    def __init__(self, env_id: str, frameskip: int, cfg_path: str | None = None, scenario_dir: str | None = None):
        self.arguments, self.frameskip, self.running = (env_id, cfg_path, scenario_dir), frameskip, False
        self.players = [Player(*self.arguments)]
        self.scenario = self.players[0].scenario
        self.players += [Player(*self.arguments) for _ in range(self.scenario.agents - 1)]
        self.possible_agents, self.agents = [f"player_{i}" for i in range(self.scenario.agents)], []

    def observation_space(self, agent: str) -> gym.Space:
        image = gym.spaces.Box(0, 255, IMAGE, np.uint8)
        vector = gym.spaces.Box(-np.inf, np.inf, (23,), np.float32)
        return gym.spaces.Dict(obs=image, vector=vector) if self.scenario.measurements else image

    def action_space(self, agent: str) -> gym.Space:
        heads = self.scenario.heads
        return gym.spaces.MultiDiscrete(heads) if len(heads) > 1 else gym.spaces.Discrete(heads[0])

    def set_shaping(self, agent: str, coefficients: dict[str, float]) -> None:
        self.players[self.possible_agents.index(agent)].set_shaping(coefficients)

    def together(self, function, seconds: float, *arguments) -> list:
        """Calls function(player, argument...) for all players and returns the results. An engine of a match waits for
        the others, so each needs a thread. Raises GameLost."""
        if not self.scenario.match:
            return [function(*(values[0] for values in (self.players, *arguments)))]
        futures = [self.pool.submit(function, *values) for values in zip(self.players, *arguments)]
        done, late = concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_EXCEPTION)
        for error in filter(None, (future.exception() for future in done)):
            if type(error).__module__ == vizdoom.ViZDoomErrorException.__module__:
                raise GameLost(repr(error))
            if not isinstance(error, threading.BrokenBarrierError):
                raise error  # not the engine's
        if late or any(future.exception() for future in done):
            raise GameLost(f"a player took more than {seconds:.0f} s")
        return [future.result() for future in futures]

    def play(self, player: Player, action) -> tuple:
        """One player's part of a step. Returns observation, reward and info."""
        buttons, raw_reward = player.press(action), 0.0
        if len(self.players) == 1:
            raw_reward = player.game.make_action(buttons, self.frameskip)
        else:
            player.game.set_action(buttons)
            for tic in range(self.frameskip):
                # Engines that are asked for several tics at once wait for each other for ever now and then.
                self.barrier.wait()
                player.game.advance_action(1, tic == self.frameskip - 1)
        if player.game.is_episode_finished():
            player.screen = np.zeros(SCREEN, np.uint8)  # the engine has no state any more; no loss uses this
            reward = raw_reward
        else:
            before, was_dead = player.variables.copy(), player.dead
            player.read_state()
            player.dead = player.variables[player.column["DEAD"]] > 0
            reward = raw_reward + player.bonus(before, was_dead)
            if self.scenario.match:
                frags = player.column["FRAGCOUNT"]
                raw_reward = player.variables[frags] - before[frags]
        info = dict(raw_reward=raw_reward, inactive=player.dead)
        return player.observation(), reward * self.scenario.reward_scale, info

    def start_engines(self) -> None:
        if self.scenario.match:
            self.barrier = threading.Barrier(len(self.players), timeout=self.STEP_SECONDS)
            self.pool = concurrent.futures.ThreadPoolExecutor(len(self.players))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]  # free just now; if another takes it first, the start fails: again
            rules = " ".join(f"+sv_{rule} 1" for rule in RULES)
            host = f"-host {len(self.players)} -port {self.port} -deathmatch {rules}"
            host += f" +viz_respawn_delay {self.scenario.respawn}"
            for i, player in enumerate(self.players):
                player.game.add_game_args(f"-join 127.0.0.1:{self.port}" if i else host)
                player.game.add_game_args(f"+viz_connect_timeout 10 +name agent{i} +colorset 0")
        self.together(lambda player: player.game.init(), self.START_SECONDS)
        # Both sides of all games have the files open. Without names they go with the processes, however those end.
        unlink_game_files()
        self.running = True

    def reset(self, seed: int | None = None, options: dict | None = None):
        if seed is not None:
            for player in self.players:
                player.game.set_seed(seed)
        if self.running:
            self.together(lambda player: player.game.new_episode(), self.START_SECONDS)
        else:
            self.start_engines()
        if self.scenario.bots:
            for command in ["removebots"] + ["addbot"] * self.scenario.bots:
                self.players[0].game.send_game_command(command)
        self.tics, self.agents = 0, list(self.possible_agents)
        self.together(Player.begin, self.START_SECONDS)
        return {a: p.observation() for a, p in zip(self.agents, self.players)}, {a: {} for a in self.agents}

    def step(self, actions: dict):
        playing = self.agents
        results = self.together(self.play, self.STEP_SECONDS, [actions[agent] for agent in playing])
        observations, rewards, infos = (dict(zip(playing, values)) for values in zip(*results))
        self.tics += self.frameskip
        over = self.players[0].game.is_episode_finished()
        truncated = not over and self.tics >= self.scenario.time_limit
        if over or truncated:
            self.agents = []
            for agent, player in zip(playing, self.players):
                infos[agent] |= self.score(player)
        return observations, rewards, dict.fromkeys(playing, over), dict.fromkeys(playing, truncated), infos

    def score(self, player: Player) -> dict[str, float]:
        values, column = player.variables, player.column
        result = dict(kills=values[column["USER2"]])
        if self.scenario.match:
            me, count = int(values[column["PLAYER_NUMBER"]]), int(values[column["PLAYER_COUNT"]])
            frags = [values[column[f"PLAYER{k + 1}_FRAGCOUNT"]] for k in range(count)]
            others, deaths = frags[:me] + frags[me + 1 :], values[column["DEATHCOUNT"]] - player.deaths
            place, win = 1 + sum(frag > frags[me] for frag in others), float(all(frag < frags[me] for frag in others))
            result |= dict(frags=frags[me], deaths=deaths, place=place, win=win)
        return result

    def render(self) -> np.ndarray:
        """The engines' screens side by side, uint8 [120, 160 x players, 3]."""
        return np.concatenate([player.screen for player in self.players], axis=1)

    def close(self) -> None:
        for player in self.players:
            player.game.close()

    def kill(self) -> None:
        """Ends a lost match's engines by force, which are found by their port; what waits for them fails then. While
        they start, however, ViZDoom 1.3 crashes with them: the actor dies, and the main process starts it again."""
        ours = {str(self.port), f"127.0.0.1:{self.port}"}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                words = set(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
                if ours & words and os.getpgid(pid) == os.getpgid(0):
                    unlink_game_files(pid)
                    os.kill(pid, signal.SIGKILL)
        self.barrier.abort()
        self.pool.shutdown(wait=False)
        self.players, self.running = [Player(*self.arguments) for _ in self.players], False


def make_env(args: Args):
    """One game. Edit this function to train on something else.

    What it returns has PettingZoo's parallel API: `possible_agents`, `observation_space`, `action_space`, `reset` and
    `step` with dicts, `agents`, `render`, `close`. All agents have the same spaces: one uint8 image [height, width,
    channels], at least 36 x 36, alone or in a Dict as `obs` beside a float `vector`, and Discrete or MultiDiscrete
    actions. No game is started before `reset`. In an agent's info there may be `raw_reward`, a float that scores are
    sums of; `inactive`, True where its action does nothing; and at the end the SCORES. If `shaping_of` names
    coefficients, it has `set_shaping`.
    """
    return DoomEnv(args.env_id, args.frameskip, args.cfg_path, args.scenario_dir)


SCORES = ("kills", "frags", "deaths", "place", "win")  # of an episode, where the game has them


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


def spaces_of(args: Args) -> tuple[Spaces, int]:
    """The spaces of what `make_env` returns, and its number of agents. Raises UserError where the pipeline does not
    support them."""
    with contextlib.closing(make_env(args)) as env:  # starts no game
        agents = env.possible_agents
        spaces = {(str(env.observation_space(agent)), str(env.action_space(agent))) for agent in agents}
        observation, action = env.observation_space(agents[0]), env.action_space(agents[0])
    if len(spaces) > 1:
        raise UserError(f"unsupported: agents with different spaces, {spaces}")
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
    return Spaces(image.shape, width, heads), len(agents)


# ======================================================================================================================
# Mailbox and rollouts
# ======================================================================================================================

def table_of_policies(args: Args, agents: int, session: int) -> np.ndarray:
    """[group, game, agent] -> the policy that plays there for the whole session. Each has the same number of agents in
    every split, and pairs of policies, a policy with itself included, meet in equally many games as far as that allows.
    Another session (a resumed run) has other pairs."""
    S, P = args.worker_num_splits, args.num_policies
    games = args.num_envs_per_worker // S
    rng, met = np.random.default_rng((args.seed, session)), np.zeros((P, P))
    table = np.zeros((args.num_workers * S, games, agents), int)
    for group in table:
        left = np.full(P, games * agents // P)
        for game in group:
            for seat in range(agents):
                # the policy that has met those at the table least; if even, the one with most agents left; else chance
                cost = [met[p, game[:seat]].sum() if left[p] else np.inf for p in range(P)]
                game[seat] = policy = min(range(P), key=lambda p: (cost[p], -left[p], rng.random()))
                left[policy] -= 1
                for other in game[:seat]:
                    met[policy, other] += 1
                    met[other, policy] += policy != other
            rng.shuffle(game)  # no policy is always the host
    return table


class Mailbox:
    """The only memory that actors share with a policy's process and with the main process; every policy has one.

    A group is the rows of one policy in one split of one worker; they are neighbours. Between its request and its reply
    they belong to the policy's inference thread, otherwise to the actor: no locks.
    """

    def __init__(self, spaces: Spaces, rows: int, workers: int, groups: int, shaping: int):
        def shared(*shape, dtype):
            return torch.zeros(shape, dtype=dtype).share_memory_()

        # written by the actor, between a reply and its next request
        self.obs = shared(rows, *spaces.image, dtype=torch.uint8)  # the current observation
        self.vector = shared(rows, spaces.vector, dtype=torch.float32)  # and the vector beside it
        self.reward = shared(rows, dtype=torch.float32)  # of the action before it, after scale and clip
        self.terminated = shared(rows, dtype=torch.bool)  # that action ended the episode for good
        self.first = shared(rows, dtype=torch.bool)  # obs is the first of an episode
        self.inactive = shared(rows, dtype=torch.bool)  # the action at obs does nothing: the agent waits for its return
        # of the game that ended just now: sum of raw rewards, sum of `reward`, length in steps (0: none ended), SCORES
        self.episode = shared(rows, 3 + len(SCORES), dtype=torch.float32)
        # written by inference, between a request and its reply
        self.action = shared(rows, len(spaces.heads), dtype=torch.int64)  # what to do next
        self.replies = shared(groups, dtype=torch.int64)  # the last request answered, zeroed when the actor is started
        # written by the actor at any time, zeroed when it is started: signs that it is not stuck
        self.started = shared(workers, dtype=torch.int64)  # games started so far
        self.requests = shared(groups, dtype=torch.int64)  # requests so far
        # written by the main process
        self.incarnation = shared(workers, dtype=torch.int64)  # of the actor: requests of those before it are dropped
        self.shaping = shared(shaping, dtype=torch.float64)  # coefficients of the policy, read when an episode begins

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
        self.inactive = np.zeros((T + 1, slots), bool)  # actions[t] does nothing
        self.versions = np.zeros((T, slots), np.int64)  # of the policy that chose actions[t]


def slots_needed(args: Args, rows: int) -> int:
    """Room for the slots being filled and for those waiting for the learner, and enough to rule out deadlock: if all
    groups waited for slots and the learner for its batch, none would be FILLING and at most B - 1 FULL, so that of
    B + n slots at least the n that one group takes would be free. While rows wait for other policies, slots are half
    filled: the batch ahead makes up for these. With `sync` there is one slot for every row."""
    B, n = args.batch_size // args.rollout, rows // (args.num_workers * args.worker_num_splits)
    if args.sync:
        return B
    return max(rows, B + n) + args.max_batches_ahead * B


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
        n = len(x)
        if n == 0:
            return
        mean = x.mean(0)
        var = (x - mean).square_().mean(0)
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


def init_layer(layer: nn.Module) -> nn.Module:
    """Orthogonal weights with gain 1, biases 0: Sample Factory's initialisation, of the heads too."""
    nn.init.orthogonal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """The network of the Sample Factory paper: convolutions 32/8/4, 64/4/2, 128/3/2 (channels, kernel, stride), a layer
    of `hidden_size`, joined by two layers of 128 for the vector, then a recurrent core, then value and logits. ELU."""

    def __init__(self, spaces: Spaces, args: Args):
        super().__init__()
        self.heads, self.rnn_type, self.normalize = spaces.heads, args.rnn_type, args.normalize_input
        self.bfloat16 = args.precision == "bfloat16"
        height, width, channels = spaces.image
        self.image_norm = Normalizer(spaces.image, unit=255.0)
        self.conv = nn.Sequential(
            init_layer(nn.Conv2d(channels, 32, 8, 4)), nn.ELU(inplace=True),
            init_layer(nn.Conv2d(32, 64, 4, 2)), nn.ELU(inplace=True),
            init_layer(nn.Conv2d(64, 128, 3, 2)), nn.ELU(inplace=True),
        )  # fmt: skip
        with torch.no_grad():
            conv_size = self.conv(torch.zeros(1, channels, height, width)).numel()
        self.fc = init_layer(nn.Linear(conv_size, args.hidden_size))
        core_input = args.hidden_size
        if spaces.vector:
            self.vector_norm = Normalizer((spaces.vector,), unit=1.0)
            self.vector_fc = nn.Sequential(
                init_layer(nn.Linear(spaces.vector, 128)), nn.ELU(inplace=True),
                init_layer(nn.Linear(128, 128)), nn.ELU(inplace=True),
            )  # fmt: skip
            core_input += 128
        self.state_size = {"gru": 1, "lstm": 2, "none": 0}[args.rnn_type] * args.hidden_size
        if args.rnn_type != "none":
            self.core = (nn.GRU if args.rnn_type == "gru" else nn.LSTM)(core_input, args.hidden_size)
        head_input = args.hidden_size if args.rnn_type != "none" else core_input
        self.critic = init_layer(nn.Linear(head_input, 1))
        self.actor = init_layer(nn.Linear(head_input, sum(spaces.heads)))
        self.to(memory_format=torch.channels_last)  # as images come: height, width, channel

    def encode(self, obs: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """obs uint8 [N, H, W, C], vector float32 [N, V] -> float32 [N, features]"""
        x = self.image_norm(obs).permute(0, 3, 1, 2)
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
            # flatten in the order of memory (height, width, channel): a view instead of a copy
            x = F.elu(self.fc(self.conv(x).permute(0, 2, 3, 1).flatten(1)), inplace=True)
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
    inactive: torch.Tensor  # bool [T, B]
    mask: torch.Tensor  # bool [T, B]: valid, active, younger than max_policy_lag: what the losses average over
    restarts: list[int]  # see Agent.forward
    size: int  # samples in mask, on the host


def appo_loss(args: Args, agent: Agent, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped losses with V-trace's targets over the samples in `batch.mask`. Loss and metrics, on the device."""
    logits, values, _ = agent(batch.obs, batch.vector, batch.first, batch.rnn_state, batch.restarts)
    logprobs, entropy, symmetric_kl = evaluate_actions(logits[:-1], batch.actions, agent.heads)
    log_ratio = logprobs - batch.logprobs
    log_ratio = torch.where(batch.inactive, 0.0, log_ratio)  # an action that does nothing is as good as on-policy
    ratio = log_ratio.clamp(math.log(0.05), math.log(20.0)).exp()  # Sample Factory's band; no gradient outside
    discounts = args.gamma * ~batch.terminated
    vs, advantages = vtrace(ratio.detach(), values.detach(), batch.rewards, discounts, ~batch.first[1:],
                            args.vtrace_rho, args.vtrace_c, args.vtrace_lambda)  # fmt: skip

    weight = batch.mask.float()
    n = weight.sum()

    def mean(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).sum() / n

    advantages = advantages - mean(advantages)
    advantages = advantages / mean(advantages.square()).sqrt().clamp(min=1e-7)
    clipped = ratio.clamp(1 / (1 + args.clip_coef), 1 + args.clip_coef)
    policy_loss = -mean(torch.min(ratio * advantages, clipped * advantages))

    target, old = vs[:-1], batch.values
    value_error = (values[:-1] - target).square()
    clipped_error = (old + (values[:-1] - old).clamp(-args.ppo_clip_value, args.ppo_clip_value) - target).square()
    value_loss = mean(torch.max(value_error, clipped_error))

    exploration = -mean(entropy) if args.exploration_loss == "entropy" else mean(symmetric_kl).clamp(max=30.0)
    loss = policy_loss + args.vf_coef * value_loss + args.ent_coef * exploration

    with torch.no_grad():
        spread = (target - mean(target)).square()
        metrics = {
            "losses/policy_loss": policy_loss.detach(),
            "losses/value_loss": value_loss.detach(),
            "losses/entropy": mean(entropy),
            "losses/approx_kl": mean(log_ratio.exp() - 1 - log_ratio),  # http://joschu.net/blog/kl-approx.html
            "losses/clipfrac": mean((ratio != clipped).float()),
            "losses/explained_variance": 1 - mean(value_error) / mean(spread).clamp(min=1e-8),
            "losses/value": mean(values[:-1]),
            "vtrace/rho_mean": mean(ratio.clamp(max=args.vtrace_rho)),
            "vtrace/rho_clipfrac": mean((ratio > args.vtrace_rho).float()),
        }
    return loss, metrics


# ======================================================================================================================
# Actor
# ======================================================================================================================

REQUEST = struct.Struct("=ii")  # group, incarnation of its actor; writes this small are atomic
REPLY = struct.Struct("=ii")  # split, incarnation
WAKE = -1  # "group" of a message that only wakes the inference thread: slots were freed, or the run ends


class Seat:
    """The row of one agent of a game, and the totals of its episode so far."""

    def __init__(self, mailbox: SimpleNamespace, row: int, action_space: gym.Space):
        self.mailbox, self.row, self.shape, self.totals = mailbox, row, action_space.shape, np.zeros(3)

    def write(self, observation, reward=0.0, terminated=False, first=False, inactive=False, episode=0.0) -> None:
        mailbox, r = self.mailbox, self.row
        if observation is not None:
            image, vector = split_observation(observation)
            mailbox.obs[r] = image
            if vector is not None:
                mailbox.vector[r] = vector
        mailbox.reward[r], mailbox.terminated[r], mailbox.first[r] = reward, terminated, first
        mailbox.inactive[r], mailbox.episode[r] = inactive, episode

    def action(self):
        return self.mailbox.action[self.row].reshape(self.shape).copy()  # the game may keep it


class Games:
    """The environments of one worker. `reset` and `step` write a split's rows of the mailboxes; from then on the rows
    belong to the policies, until all of them have filled in the actions."""

    def __init__(self, args: Args, worker: int, table: np.ndarray, mailboxes: list[SimpleNamespace], seed: int, log):
        """table [split, game, agent]: the policy that plays there; log: a function that a line can be given to."""
        self.args, self.worker, self.mailboxes, self.seed, self.log = args, worker, mailboxes, seed, log
        random.seed(seed)  # for games that use these: forked actors would all have the same numbers
        np.random.seed(seed)
        self.names = list(shaping_of(args))
        free = [iter(range(worker * rows // args.num_workers, rows)) for rows in (len(m.first) for m in mailboxes)]
        self.splits = [[(make_env(args), {}) for _ in split] for split in table]
        for policies, (env, seats) in zip(table.reshape(-1, table.shape[-1]), sum(self.splits, [])):
            for policy, agent in zip(policies, env.possible_agents):
                seats[agent] = Seat(mailboxes[policy], next(free[policy]), env.action_space(agent))

    def reset(self, split: int) -> None:
        """Starts the split's games."""
        for i, (env, seats) in enumerate(self.splits[split]):
            self.begin(env, seats, self.seed + split * len(self.splits[split]) + i)
            self.mailboxes[0].started[self.worker] += 1

    def begin(self, env, seats: dict, seed: int | None = None) -> None:
        """The next episode of a game; a lost match is started anew."""
        for attempt in range(3):
            for agent, seat in seats.items():
                if self.names:
                    env.set_shaping(agent, dict(zip(self.names, seat.mailbox.shaping.tolist())))
            try:
                observations, infos = env.reset(seed=seed)
                break
            except GameLost as error:
                self.log(f"a match of actor {self.worker} is started again: {error}")
                env.kill()
                if attempt == 2:
                    raise
        for agent, seat in seats.items():
            seat.totals[:] = 0
            seat.write(observations[agent], first=True, inactive=infos.get(agent, {}).get("inactive", False))

    def step(self, split: int) -> None:
        for env, seats in self.splits[split]:
            if not env.agents:  # the step before ended the game: these actions are ignored
                self.begin(env, seats)
                continue
            try:
                results = env.step({agent: seats[agent].action() for agent in env.agents})
            except GameLost as error:
                self.log(f"a match of actor {self.worker} is started again: {error}")
                env.kill()
                self.begin(env, seats)
                continue
            observations, rewards, terminated, truncated, infos = results
            for agent, seat in seats.items():
                if agent not in observations:  # it left before the game's end; `first` makes these steps invalid
                    seat.write(None, first=True)
                    continue
                info = infos[agent]
                reward = np.clip(rewards[agent] * self.args.reward_scale, -self.args.reward_clip, self.args.reward_clip)
                seat.totals += info.get("raw_reward", rewards[agent]), reward, 1
                ended = terminated[agent] or truncated[agent]
                episode = [*seat.totals, *(info.get(name, 0.0) for name in SCORES)] if ended else 0.0
                seat.write(observations[agent], reward, terminated[agent], False, info.get("inactive", False), episode)

    def close(self) -> None:
        for games in self.splits:
            for env, _ in games:
                env.close()


def game_seed(*entropy: int) -> int:
    """The seed of a worker's first game; game i has seed + i. Below 2**30, so that all of them fit 31 bits."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0]) >> 2


def actor(args: Args, worker: int, incarnation: int, core: int | None, seed: int, table: np.ndarray,
          mailboxes: list[Mailbox], request_pipes: list, reply_pipe, error_pipe) -> None:  # fmt: skip
    """Body of an actor process. All actors write to a policy's request pipe. What comes from this actor's reply pipe is
    the number of a split for which one policy's actions are in its mailbox. The error pipe receives lines for the
    log, as raw text."""
    faulthandler.enable(file=error_pipe.fileno())  # the stack when a library crashes
    faulthandler.register(signal.SIGUSR1, file=error_pipe.fileno())  # the main process asks a hung actor where it hangs
    if core is not None:
        os.sched_setaffinity(0, {core})  # the games inherit it: engine and actor talk twice a tic, cheapest on one core
    os.nice(10)  # where cores are short, inference and learning come first: games without actions can only wait
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    numpys, S, P = [mailbox.numpy() for mailbox in mailboxes], args.worker_num_splits, args.num_policies
    missing = [P] * S  # policies whose actions a split still waits for

    def log(text: str) -> None:
        os.write(error_pipe.fileno(), f"{text}\n".encode())

    def request(split: int) -> None:
        missing[split] = P
        for numpy, pipe in zip(numpys, request_pipes):
            numpy.requests[worker * S + split] += 1
            os.write(pipe.fileno(), REQUEST.pack(worker * S + split, incarnation))
        # From here on the split's rows belong to inference, until every policy's reply names it.

    games = Games(args, worker, table, numpys, seed, log)
    for split in range(S):
        games.reset(split)
        request(split)
    while reply := os.read(reply_pipe.fileno(), REPLY.size):  # empty when the pipe is closed: the run is over
        split, to = REPLY.unpack(reply)
        missing[split] -= to == incarnation  # else it is for the actor before this one
        if not missing[split]:
            games.step(split)
            request(split)
    games.close()


def process_body(error_pipe, niced: bool, body, *arguments) -> None:
    """What every process but the main one runs: `body`, in a process group that can be ended even after the process is
    dead. The error pipe receives the traceback, as raw text."""
    os.setsid()
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:  # else the games would inherit our ends of pipes, and nobody would see them close
            with contextlib.suppress(OSError):
                os.set_inheritable(fd, False)
    watcher = threading.Thread(target=watch_parent, args=(niced,), daemon=True)
    watcher.start()
    try:
        body(*arguments)
    except BaseException:
        with contextlib.suppress(OSError):
            os.write(error_pipe.fileno(), traceback.format_exc().encode()[-60_000:])
        watcher.join(1)  # if the main process is dead, which may be why we are here, this thread ends our games and us
        os._exit(1)  # without closing the games, which may hang: the main process ends our process group


class Replies:
    """A policy's way back to the actors."""

    def __init__(self, args: Args, mailbox: Mailbox, pipes: list):
        self.S, self.numpy, self.pipes = args.worker_num_splits, mailbox.numpy(), pipes

    def is_current(self, group: int, incarnation: int) -> bool:
        """False for the requests of an actor that has been replaced."""
        return self.numpy.incarnation[group // self.S] == incarnation

    def reply(self, requests: list[tuple[int, int]]) -> None:
        """Gives the rows of the requests' groups back to their actors."""
        for group, incarnation in requests:
            worker, split = divmod(group, self.S)
            self.numpy.replies[group] = self.numpy.requests[group]
            os.write(self.pipes[worker].fileno(), REPLY.pack(split, incarnation))


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

    def __init__(self, args: Args, spaces: Spaces, agent: Agent, device: torch.device, mailbox: Mailbox, request_pipe):
        self.args, self.device = args, device
        self.mailbox, self.numpy, rows = mailbox, mailbox.numpy(), len(mailbox.obs)
        slots, self.size = slots_needed(args, rows), rows // len(mailbox.requests)
        self.rollouts = Rollouts(spaces, args.rollout, slots, agent.state_size, device)
        self.acting = ActingPolicy(agent, device)
        self.request_reader, self.request_writer = request_pipe  # all actors write to it
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

    def run(self, actors: Replies) -> None:
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
        rollouts.inactive[t, slots] = numpy.inactive[rows]
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

    def load(self, checkpoint: dict) -> None:
        self.agent.load_state_dict(checkpoint["agent"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.optimizer.param_groups[0]["lr"] = self.args.learning_rate  # an override beats the checkpoint
        self.version, self.global_step = checkpoint["version"], checkpoint["global_step"]
        self.best_return = checkpoint["best_return"]
        self.inference.episodes.extend(checkpoint["episodes"])
        self.inference.acting.publish(self.version)

    def become(self, donor: dict) -> None:
        """Goes on with another policy's weights. What was sampled before is too old to be learned from. The rows'
        recurrent states stay, until their episodes end."""
        self.agent.load_state_dict(donor["agent"])
        self.optimizer.load_state_dict(donor["optimizer"])
        self.version += self.args.max_policy_lag - 1
        self.inference.episodes.clear()
        self.inference.episodes.extend(donor["episodes"])  # they are what these weights have reached
        self.publish()

    def gather(self, slots: np.ndarray) -> tuple[Batch, np.ndarray]:
        """Copies B slots out of the rollouts. Returns them, and the lags of the valid, active samples, on the host."""
        r, d_slots = self.inference.rollouts, torch.from_numpy(slots).to(self.device, non_blocking=True)
        names = ("obs", "vector", "actions", "logprobs", "values")
        on_device = {name: getattr(r, name).index_select(1, d_slots) for name in names}
        first, lag = r.first[:, slots], self.version - r.versions[:, slots]
        valid = ~first[1:]
        restarts = [0] + [t for t in range(1, len(first)) if first[t].any()]
        inactive = r.inactive[:-1, slots]
        mask = valid & ~inactive & (lag < self.args.max_policy_lag)
        host = dict(first=first, rewards=r.rewards[:, slots], terminated=r.terminated[:, slots], inactive=inactive,
                    mask=mask)  # fmt: skip
        moved = {name: torch.from_numpy(array).to(self.device, non_blocking=True) for name, array in host.items()}
        rnn_state = r.rnn_state.index_select(0, d_slots)
        batch = Batch(**on_device, **moved, rnn_state=rnn_state, restarts=restarts, size=int(mask.sum()))
        return batch, lag[valid & ~inactive]

    def iterate(self, slots: np.ndarray) -> dict[str, float]:
        """Learns from B FULL slots, which are LEARNING until they are given back: as soon as they are copied, but with
        `sync` only after the new policy has been published. Returns metrics.

        Raises FloatingPointError before a non-finite update is made: the weights are still good.
        """
        args, metrics = self.args, {}
        batch, lags = self.gather(slots)
        if not args.sync:
            self.inference.release(slots)
        self.global_step += len(lags)
        if batch.size == 0:  # a batch without a usable sample is no update
            self.skipped += 1
        else:
            if self.version or not args.normalize_input:  # the first samples only initialise the inputs' statistics
                metrics = self.update(batch)
            # New statistics change the policy too: they are published together with the last weights.
            self.agent.update_normalizers(batch.obs[:-1], batch.vector[:-1], ~batch.first[1:] & ~batch.inactive)
            self.publish()
        if args.sync:  # only now: the next samples are all of the newest version
            self.inference.release(slots)
        if len(lags):
            masked = (lags >= args.max_policy_lag).mean()
            metrics |= {"lag/mean": lags.mean(), "lag/max": lags.max(), "lag/masked": masked}
        return metrics

    def update(self, batch: Batch) -> dict[str, float]:
        """One optimiser step for each epoch. All but the last are published here, the last by the caller."""
        for epoch in range(self.args.num_epochs):
            if epoch:
                self.publish()
            loss, metrics = appo_loss(self.args, self.agent, batch)
            self.optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(self.agent.parameters(), self.args.max_grad_norm or torch.inf)
            if not torch.isfinite(loss + grad_norm):  # waits for the device: nothing broken is published or saved
                raise FloatingPointError(f"the loss ({loss.item()}) or its gradient is not finite")
            self.optimizer.step()
        metrics["losses/grad_norm"] = grad_norm
        metrics = dict(zip(metrics, torch.stack(list(metrics.values())).tolist()))
        return metrics | {"charts/learning_rate": self.optimizer.param_groups[0]["lr"]}

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


def policy_folder(folder: Path, policy: int) -> Path:
    return folder / f"policy_{policy:02d}"


def saved_args(folder: Path) -> dict:
    """An experiment's Args as typed (before `resolve`), without the flags of one SESSION. Raises UserError."""
    if not (folder / "cfg.json").exists():
        raise UserError(f"there is no experiment in {folder}")
    saved = json.loads((folder / "cfg.json").read_text())["args"]
    return {field.name: saved[field.name] for field in fields(Args) if field.name in saved.keys() - set(SESSION)}


def load_agent(folder: Path | str, policy: int = 0, kind: str = "latest", **changes) -> tuple[Agent, Args, int]:
    """A trained policy in an experiment's folder, its Args (set for games in this process and updated by `changes`,
    such as device="cpu"), and the step it was saved at. kind: "latest" or "best". Raises UserError."""
    folder, here = Path(folder), dict(num_workers=1, num_policies=1, worker_num_splits=1, batch_size=None,
                                      policy_settings=[], with_pbt=False)  # fmt: skip
    args = resolve(Args(**saved_args(folder) | changes | here))
    folder = policy_folder(folder, policy)
    checkpoint = load_checkpoint(folder / "checkpoints", kind, print)
    if checkpoint is None:
        raise UserError(f"no {kind} checkpoint in {folder / 'checkpoints'}")
    agent = Agent(spaces_of(args)[0], args).to(args.device)
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError:
        raise UserError(f"the network in {folder} does not fit {args.env_id}, or this version of the file") from None
    return agent, args, checkpoint["global_step"]


# ======================================================================================================================
# Population
# ======================================================================================================================


# of population-based training: name in --pbt-target-objective -> metric
OBJECTIVES = dict(kills="charts/kills", frags="charts/frags", wins="charts/win") | {"return": "charts/episodic_return"}


class Reporter:
    """A policy's TensorBoard and its reports to the main process. Every rate is over the window since the last report;
    `returns` are of the last 100 episodes at that time."""

    def __init__(self, args: Args, learner: Learner, writer, control):
        self.args, self.learner, self.inference, self.writer = args, learner, learner.inference, writer
        self.control = control
        self.metrics, self.last, self.returns = {}, self.counters(), []

    def counters(self) -> dict[str, float]:
        i, learner = self.inference, self.learner
        return dict(time=time.monotonic(), step=learner.global_step, waited=learner.waited, served=i.served,
                    batches=i.batches, idle=i.idle, held=i.held)  # fmt: skip

    def update(self, metrics: dict[str, float]) -> bool:
        """Called after every iteration, with its metrics. Every five seconds it reports, and returns True."""
        self.metrics |= metrics
        now = self.counters()
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
        episodes = list(self.inference.episodes)
        self.returns = [episode[0] for episode in episodes]
        if episodes:
            tags = ("episodic_return", "episodic_return_trained", "episodic_length", *SCORES)
            scalars |= zip((f"charts/{tag}" for tag in tags), np.mean(episodes, axis=0))
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)
        if change["held"] >= change["waited"]:
            bottleneck = "learner"
        else:
            bottleneck = "games" if change["idle"] > 0.5 * (seconds - change["held"]) else "inference"
        objective = scalars.get(OBJECTIVES[self.args.pbt_target_objective])
        lag = self.metrics.get("lag/mean", 0)
        self.control.send(dict(step=step, fps=fps, lag=lag, bottleneck=bottleneck, objective=objective))


class Control:
    """Takes the main process's orders to a policy."""

    def __init__(self, pipe, learner: Learner, checkpoints: Path, stop_signals: list):
        self.pipe, self.learner, self.checkpoints, self.stop_signals = pipe, learner, checkpoints, stop_signals

    def check(self) -> None:
        """The learner's thread calls this often: obeys the main process."""
        learner = self.learner
        while self.pipe.poll():
            order, content = self.pipe.recv()
            if order == "stop":
                self.stop_signals.append(order)
                continue
            if order == "become":  # with the donor's folder or None, and numbers for Args
                donor, genes = content
                if donor is not None:
                    learner.become(load_checkpoint(donor, "latest", lambda text: self.pipe.send(dict(log=text))))
                for name, value in genes.items():
                    setattr(learner.args, name, value)
                learner.optimizer.param_groups[0]["lr"] = learner.args.learning_rate
            save_latest(self.checkpoints, learner, learner.args.keep_checkpoints)  # "save" is only this
            self.pipe.send(dict(answered=True))


def from_actors(control: Control, learner: Learner, count: int, stop_signals: list[int]):
    """Generator: the slots of each iteration, oldest first, until the main process says stop."""
    slots, start = [], time.perf_counter()
    while not stop_signals:
        control.check()
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


def learn(args: Args, checkpoints: Path, learner: Learner, source, reporter: Reporter) -> None:
    """The learner's loop. It saves the last good weights however it ends, unless it is killed."""
    saved = best_saved = time.monotonic()  # no best in the first 30 s: games that end first are short ones
    try:
        for slots in source:
            metrics = learner.iterate(slots)
            now = time.monotonic()
            if reporter.update(metrics) and len(reporter.returns) == 100 and now - best_saved >= 30:
                if (mean := float(np.mean(reporter.returns))) > learner.best_return:
                    learner.best_return, best_saved = mean, now
                    save_checkpoint(checkpoints / "best.pth", learner)
            if now - saved >= args.save_every_sec:
                save_latest(checkpoints, learner, args.keep_checkpoints)
                saved = now
    finally:
        save_latest(checkpoints, learner, args.keep_checkpoints)


def train_policy(args: Args, index: int, folder: Path, spaces: Spaces, mailbox: Mailbox, request_pipe,
                 reply_pipes: list, control) -> None:  # fmt: skip
    """One policy's inference thread and learner, as in the main process of appo_doom.py."""
    from torch.utils.tensorboard import SummaryWriter

    device, checkpoints = torch.device(args.device), folder / "checkpoints"
    if device.type == "cpu":
        keep_freed_memory()
    else:
        torch.cuda.set_device(device.index or 0)
        torch.backends.cudnn.allow_tf32 = False  # float32 means it: mu and pi must agree at lag 0
    torch.manual_seed(args.seed + index)
    folder.mkdir(exist_ok=True)
    agent = Agent(spaces, args).to(device)
    inference = Inference(args, spaces, agent, device, mailbox, request_pipe)
    learner = Learner(args, agent, inference, device)

    def log(text: str) -> None:
        control.send(dict(log=text))

    if checkpoint := load_checkpoint(checkpoints, "latest", log):
        learner.load(checkpoint)
        with contextlib.suppress(UserError):  # after a crash best.pth may be newer; a damaged one does not matter
            learner.best_return = (load_checkpoint(checkpoints, "best", log) or checkpoint)["best_return"]
        torch.manual_seed(args.seed + index + learner.version)
        log(f"resuming at step {learner.global_step:,}")
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # all of the above ran on the default stream; the threads have their own
    writer = SummaryWriter(str(folder), flush_secs=10, purge_step=learner.global_step + 1)
    stop_signals = []
    thread = threading.Thread(target=inference.run, args=(Replies(args, mailbox, reply_pipes),), daemon=True)
    orders = Control(control, learner, checkpoints, stop_signals)
    source = from_actors(orders, learner, args.batch_size // args.rollout, stop_signals)
    thread.start()
    try:
        with own_stream(device, args.learner_threads), contextlib.closing(source):
            learn(args, checkpoints, learner, source, Reporter(args, learner, writer, control))
    finally:
        writer.close()
        inference.stop()
        thread.join(10)
        inference.unpin()
    control.send(dict(step=learner.global_step))


TUNED = ("learning_rate", "ent_coef", "vf_coef", "max_grad_norm", "clip_coef", "ppo_clip_value", "gamma")


def default_genes(args: Args) -> dict[str, float]:
    """The numbers in which policies may differ: of Args by their names (Sample Factory's), and shaping coefficients."""
    return {name: getattr(args, name) for name in TUNED} | shaping_of(args)


def starting_genes(args: Args) -> list[dict[str, float]]:
    """Those of each policy. With `with_pbt` all policies but the first start mutated. Raises UserError."""
    numbers, rng = default_genes(args), random.Random(args.seed)
    genes = [dict(numbers) for _ in range(args.num_policies)]
    if args.with_pbt:
        genes[1:] = [mutate(args, one, numbers, rng) for one in genes[1:]]
    for text in args.policy_settings:
        try:
            index, name, value = re.fullmatch(r"(\d+):([^=]+)=(.+)", text).groups()
            one, value = genes[int(index)], float(value)
            name = name if name in numbers else name.replace("-", "_")
        except (AttributeError, ValueError, IndexError):
            raise UserError(f"--policy-settings {text}: not a policy, a name, a number as in 1:vf_coef=0.2") from None
        if name not in numbers:
            near = difflib.get_close_matches(name, numbers, cutoff=0.3) or list(numbers)
            raise UserError(f"--policy-settings {text}: {name} cannot differ; did you mean {' or '.join(near)}?")
        low, high = LOWEST.get(name, 0.0), HIGHEST.get(name, np.inf)
        if hasattr(args, name) and not low <= value <= high:
            raise UserError(f"--policy-settings {text} is out of range: {low} to {high}")
        one[name] = value
    return genes


def mutate(args: Args, genes: dict[str, float], defaults: dict[str, float], rng: random.Random) -> dict[str, float]:
    """Sample Factory's mutation: with probability `pbt_mutation_rate` a number is multiplied or divided by a random
    factor, or one time in 20 reset to its default. Of gamma it is the distance from 1, by 1.01 to 1.2."""
    result = dict(genes)
    for name, value in genes.items():
        if rng.random() >= args.pbt_mutation_rate or name == "gamma" and not args.pbt_optimize_gamma:
            continue
        low, high = (1.01, 1.2) if name == "gamma" else (args.pbt_perturb_min, args.pbt_perturb_max)
        factor = rng.uniform(low, high) ** rng.choice((-1, 1))
        if value != defaults[name] and rng.random() < 0.05:
            result[name] = defaults[name]
        else:
            result[name] = 1 - (1 - value) * factor if name == "gamma" else value * factor
    return result


class Population:
    """The policies' processes, and population-based training (Jaderberg et al. 2017; Sample Factory's rules)."""

    def __init__(self, args: Args, folder: Path, spaces: Spaces, rows: int, log):
        """rows: of one policy"""
        self.args, self.folder, self.log, self.context = args, folder, log, mp.get_context("forkserver")
        W, S = args.num_workers, args.worker_num_splits
        self.genes, self.defaults = starting_genes(args), default_genes(args)
        self.session, self.exchanged, steps = 0, 0, [0] * args.num_policies  # exchanged: at which step
        if (path := folder / "population.json").exists():
            saved = json.loads(path.read_text())
            self.session, self.exchanged, steps = saved["session"] + 1, saved["exchanged"], saved["steps"]
            for genes, before in zip(self.genes, saved["genes"]):
                for name, value in self.defaults.items():  # a flag that was typed anew is for all policies
                    genes[name] = before[name] if saved["defaults"].get(name) == value else value
        self.mailboxes = [Mailbox(spaces, rows, W, W * S, len(shaping_of(args))) for _ in self.genes]
        self.request_pipes = [self.context.Pipe(duplex=False) for _ in self.genes]
        self.reports = [dict(step=step, fps=0.0, lag=0.0, bottleneck="", objective=None) for step in steps]
        self.processes, self.controls, self.error_pipes = [], [], []
        self.rng, self.spaces = random.Random(f"{args.seed} {self.session}"), spaces
        for index in range(args.num_policies):
            self.write_shaping(index)

    def save(self) -> None:
        path = self.folder / "population.tmp"
        content = {name: getattr(self, name) for name in ("session", "exchanged", "defaults", "genes")}
        content["steps"] = [report["step"] for report in self.reports]
        path.write_text(json.dumps(content, indent=2))
        os.replace(path, self.folder / "population.json")

    def step(self) -> float:
        """Mean over the policies."""
        return statistics.mean(report["step"] for report in self.reports)

    def write_shaping(self, index: int) -> None:
        """Every agent of the policy reads it when its next episode begins."""
        values = [self.genes[index][name] for name in shaping_of(self.args)]
        self.mailboxes[index].shaping[:] = torch.tensor(values, dtype=torch.float64)

    def settings(self, genes: dict[str, float]) -> dict[str, float]:
        """Those that are in Args."""
        return {name: value for name, value in genes.items() if hasattr(self.args, name)}

    def start(self, reply_pipes: list) -> None:
        """reply_pipes: of the actors"""
        count = torch.cuda.device_count() if self.args.device == "cuda" else 0
        for index in range(self.args.num_policies):
            args = copy.copy(self.args)
            args.device = f"cuda:{index % count}" if count else args.device
            for name, value in self.settings(self.genes[index]).items():
                setattr(args, name, value)
            control, far_control = self.context.Pipe()
            error_pipe, far_error_pipe = self.context.Pipe(duplex=False)
            arguments = (args, index, policy_folder(self.folder, index), self.spaces, self.mailboxes[index],
                         self.request_pipes[index], [writer for _, writer in reply_pipes], far_control)  # fmt: skip
            # Not niced: where cores are short, inference and learning come before the games.
            arguments = (far_error_pipe, False, train_policy, *arguments)
            process = self.context.Process(target=process_body, name=f"policy {index}", args=arguments, daemon=True)
            process.start()
            far_control.close()
            far_error_pipe.close()
            self.processes.append(process)
            self.controls.append(control)
            self.error_pipes.append(error_pipe)

    def read(self, index: int) -> None:
        with contextlib.suppress(EOFError, ConnectionError):  # the policy has ended
            while self.controls[index].poll():
                self.reports[index] |= self.controls[index].recv()
                if text := self.reports[index].pop("log", None):
                    self.log(f"policy {index}: {text}")

    def check(self) -> None:
        """Reads what the policies report. Raises RuntimeError when one has died."""
        for index, process in enumerate(self.processes):
            self.read(index)
            if not process.is_alive():
                text = last_words(self.error_pipes[index])
                raise RuntimeError(f"policy {index} died (exit code {process.exitcode})\n{text}".strip())

    def ask(self, index: int, order: str, content, check) -> None:
        """Waits until a policy has done it; calls `check` meanwhile. Raises RuntimeError when it dies."""
        self.reports[index]["answered"] = False
        with contextlib.suppress(OSError):  # it has died, as `check` will say
            self.controls[index].send((order, content))
        while not self.reports[index]["answered"]:
            check()
            self.check()
            multiprocessing.connection.wait([self.controls[index]], timeout=0.5)

    def exchange(self, check, writer) -> None:
        """When all policies have made enough steps since the last exchange: the best go on as they are, the worst
        become mutated copies of one of the best if the gap is large enough, the others are mutated. Policy 0 can be
        replaced, but never mutates."""
        args, objectives = self.args, [report["objective"] for report in self.reports]
        made = min(report["step"] for report in self.reports)
        if None in objectives or made < max(args.pbt_start_mutation, self.exchanged + args.pbt_period_env_steps):
            return
        P = args.num_policies
        order = sorted(range(P), key=lambda index: objectives[index], reverse=True)
        k = min(math.ceil(args.pbt_replace_fraction * P), P // 2)
        for index in range(P):
            step, before, donor = self.reports[index]["step"], self.genes[index], index  # donor: of its weights
            if index in order[P - k :]:
                best = self.rng.choice(order[:k])
                gap, size = objectives[best] - objectives[index], max(abs(objectives[best]), abs(objectives[index]))
                if gap > max(args.pbt_replace_reward_gap_absolute, args.pbt_replace_reward_gap * size):
                    donor = best
            genes, place = dict(self.genes[donor]), None
            if index not in order[:k] and index:
                genes = mutate(args, genes, self.defaults, self.rng)
            kind = "replaced" if donor != index else "kept" if genes == before else "mutated"
            if donor != index:
                self.ask(donor, "save", None, check)
                place = policy_folder(self.folder, donor) / "checkpoints"
            if kind != "kept":
                self.ask(index, "become", (place, self.settings(genes)), check)
                self.genes[index] = genes  # not before: what is saved when the run ends here must be true
                self.write_shaping(index)
            self.save()
            text = f"step {step:,}: policy {index} ({args.pbt_target_objective} {objectives[index]:.2f}) is {kind}"
            if donor != index:
                text += f" by policy {donor} ({objectives[donor]:.2f})"
            changed = [name for name in genes if genes[name] != before[name]]
            self.log(text + "".join(f", {name} {before[name]:.4g} -> {genes[name]:.4g}" for name in changed))
            for name, value in (genes | dict(objective=objectives[index], weights_of=donor)).items():
                writer.add_scalar(f"pbt/{name}/{index}", value, step)
            self.write_row([step, index, kind, donor, objectives[index], *genes.values()])
        self.exchanged = made
        self.save()

    def write_rows(self, kind: str) -> None:
        """Where the policies are when a session begins or ends."""
        for index, report in enumerate(self.reports):
            self.write_row([report["step"], index, kind, index, report["objective"], *self.genes[index].values()])

    def write_row(self, row: list) -> None:
        with open(self.folder / "pbt.csv", "a", newline="") as file:
            rows = csv.writer(file)
            if file.tell() == 0:  # new
                rows.writerow(["step", "policy", "kind", "weights_of", "objective", *self.genes[0]])
            rows.writerow(row)

    def stop(self, patience: float) -> None:
        """Every policy that lives saves and ends; after `patience` seconds by force."""
        for control in self.controls:
            with contextlib.suppress(OSError):
                control.send(("stop", None))
        deadline = time.monotonic() + patience
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for index, process in enumerate(self.processes):
            if process.is_alive():
                self.log(f"policy {index} was ended by force, and has not saved")
                process.kill()
            self.read(index)  # its last step


# ======================================================================================================================
# Evaluate
# ======================================================================================================================


@torch.inference_mode()
def evaluate(args: Args, folder: Path) -> dict[tuple[str, str], list[int]]:
    """Plays with checkpoints. In a game of one agent every policy plays `eval_episodes` episodes; in a match each two
    policies play as many games, half of them with their places exchanged. Prints a table. Returns wins, losses and ties
    of each pair, by frags (by return, in a game without), or against bots, by who is first."""
    if args.save_video:
        import imageio.v2 as imageio
    names, agents, frameskips = [], [], set()
    for experiment in (args.experiment, *args.opponents):
        place = Path(args.train_dir) / experiment
        for policy in args.eval_policies or range(Args(**saved_args(place)).num_policies):
            changes = asdict(args)
            if place != folder:  # of another experiment its own, but for these
                changes = {name: changes[name] for name in ("device", "seed", "precision", *GAME)}
            agent, used, _ = load_agent(place, policy, args.load_checkpoint_kind, **changes)
            frameskips.add(used.frameskip)
            names.append(f"{experiment}/{policy}" if args.opponents else f"{policy}")
            agents.append(agent)
    if len(frameskips) > 1:
        raise UserError(f"--opponents: these were trained with different frameskips: {frameskips}")
    spaces, seats = spaces_of(used)
    C, frames = len(agents), []
    device = torch.device(used.device)
    if seats == 1:
        table = np.tile(np.arange(C), min(args.eval_episodes, 16))[:, None]
    else:
        pairs = [(i, j) for i in range(C) for j in range(i + 1, C)] or [(0, 0)]
        table = np.array([[pair[(seat + turn) % 2] for seat in range(seats)] for pair in pairs for turn in range(2)])
        # Several matches of each pair at once make larger batches. Each of them must play the same number of games.
        copies = [n for n in range(2, 16 // len(table) + 1) if args.eval_episodes % (2 * n) == 0]
        table = np.tile(table, (max(copies, default=1), 1))
    rows = np.bincount(table.ravel(), minlength=C)
    check_shared_memory(spaces, int(rows.sum()))
    mailboxes = [Mailbox(spaces, count, 1, 1, len(shaping_of(used))) for count in rows]  # unshaped: scores are raw
    games = Games(used, 0, table[None], [mailbox.numpy() for mailbox in mailboxes], used.seed, print)
    states = [torch.zeros(count, agent.state_size, device=device) for count, agent in zip(rows, agents)]
    torch.manual_seed(args.seed)
    per_game = -(-args.eval_episodes * (len(pairs) if seats > 1 else C) // len(table))
    played, ended = [[] for _ in table], [{} for _ in table]  # [game] -> episodes of its agents
    with tqdm(total=per_game * len(table), desc="episodes", disable=None) as bar:
        games.reset(0)
        while min(map(len, played)) < per_game:
            if args.save_video and len(played[0]) < per_game and len(frames) < 60 * TICKS_PER_SECOND / used.frameskip:
                frames.append(np.array(games.splits[0][0][0].render()))
            for c, (agent, mailbox) in enumerate(zip(agents, mailboxes)):
                tensors = [part.to(device)[None] for part in (mailbox.obs, mailbox.vector, mailbox.first)]
                logits, _, states[c] = agent(*tensors, states[c])
                actions = sample_actions(logits[0], agent.heads, args.eval_deterministic)[0]
                mailbox.action[:] = actions.cpu()
            games.step(0)
            for g, (env, sitting) in enumerate(games.splits[0]):
                for i, seat in enumerate(sitting.values()):
                    if seat.mailbox.episode[seat.row, 2]:
                        ended[g][i] = seat.mailbox.episode[seat.row].tolist()
                if len(ended[g]) == seats:
                    if len(played[g]) < per_game:  # the same for each: taking the first to end would favour short ones
                        played[g].append([ended[g][i] for i in range(seats)])
                        bar.update()
                    ended[g] = {}
    games.close()
    results, episodes_of = {}, [[] for _ in agents]
    place, win, frags = (3 + SCORES.index(name) for name in ("place", "win", "frags"))
    for sitting, matches in zip(table, played):
        for episodes in matches[: args.eval_episodes - len(episodes_of[sitting[0]])] if seats == 1 else matches:
            for policy, episode in zip(sitting, episodes):
                episodes_of[policy].append(episode)
            sides = sorted(set(sitting))
            pair = tuple(names[side] for side in sides)
            if seats == 1 and episodes[0][place]:
                pair = (*pair, "bots")
                ahead = episodes[0][win] or 1 - episodes[0][place]  # 0: first, but not alone
            elif len(sides) == 2:
                score = frags if episodes[0][place] else 0  # in a game that is no match of Doom the return
                one, two = (sum(episode[score] for episode, seat in zip(episodes, sitting) if seat == side)
                            for side in sides)  # fmt: skip
                ahead = one - two
            else:
                continue
            results.setdefault(pair, [0, 0, 0])[0 if ahead > 0 else 1 if ahead < 0 else 2] += 1
    for name, episodes in zip(names, episodes_of):
        mean, std = np.mean(episodes, 0), np.std(episodes, 0)
        scores = "".join(f", {score} {value:.2f}" for score, value in zip(SCORES, mean[3:]) if value)
        print(f"policy {name}: {len(episodes)} episodes, return {mean[0]:.2f} +- {std[0]:.2f} (standard deviation)"
              f"{scores}")  # fmt: skip
    for (one, two), (wins, losses, ties) in results.items():
        print(f"{one} against {two}: {wins} wins, {losses} losses, {ties} ties; "
              f"{wilson(wins, wins + losses)} of the decided")  # fmt: skip
    if args.save_video:
        fps = TICKS_PER_SECOND / used.frameskip
        with imageio.get_writer(folder / "video.mp4", fps=fps, macro_block_size=8) as video:
            for frame in frames:
                video.append_data(frame.repeat(4, 0).repeat(4, 1))
        print(f"wrote {folder / 'video.mp4'} ({len(frames)} frames)")
    return results


def wilson(wins: int, games: int) -> str:
    """A share with its 95 % interval (Wilson 1927)."""
    if games == 0:
        return "none"
    p, z2 = wins / games, 1.96**2
    middle, width = p + z2 / (2 * games), math.sqrt(z2 * (p * (1 - p) + z2 / (4 * games)) / games)
    low, high = ((middle + sign * width) / (1 + z2 / games) for sign in (-1, 1))
    return f"{p:.0%} ({low:.0%} to {high:.0%})"


# ======================================================================================================================
# Main
# ======================================================================================================================

def parse_args() -> tuple[Args, Path]:
    """Args as typed, and the run's folder. A resumed experiment's cfg.json is loaded; flags typed now override it."""
    args = tyro.cli(Args)
    for name in SESSION[2:]:  # what only evaluation uses
        if getattr(args, name) != getattr(Args(), name) and not args.evaluate:
            raise UserError(f"--{name.replace('_', '-')} is for --evaluate")
    if args.experiment is None and args.evaluate:
        raise UserError("--evaluate needs the name of an --experiment")
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


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory: page faults of fresh activations cost 10 to 20 % of an update on a CPU."""
    for option, value in ((-1, 2**31 - 1), (-4, 0), (-8, 1)):  # M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX (malloc.h)
        ctypes.CDLL(None).mallopt(option, value)


def check_shared_memory(spaces: Spaces, rows: int) -> None:
    """Raises UserError when /dev/shm has no room for the mailbox and the games: later the kernel would kill the run."""
    needed = rows * (int(np.prod(spaces.image)) + 4 * spaces.vector + 64 + GAME_SHARED_MEMORY)
    free = shutil.disk_usage("/dev/shm").free
    if needed > free:
        raise UserError(f"/dev/shm has {free / 2**20:.0f} MiB free, {needed / 2**20:.0f} MiB are needed: use fewer "
                        "games or a larger /dev/shm (docker run --shm-size=2g)")  # fmt: skip


def check_memory(args: Args, spaces: Spaces, rows: int) -> None:
    """Raises UserError when the policies do not fit into memory. rows: of a policy"""
    free = int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    step = int(np.prod(spaces.image)) + 4 * spaces.vector
    rollouts = slots_needed(args, rows) * (args.rollout + 1) * step if args.device == "cpu" else 0
    needed = args.num_policies * (rollouts + 2**29)  # 512 MiB: a process of its own, the network, its copies
    if needed > free:
        raise UserError(f"{free / 2**30:.1f} GiB of memory are free, {args.num_policies} policies need "
                        f"{needed / 2**30:.1f} GiB: use fewer policies or fewer games")  # fmt: skip


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


def watch_parent(niced: bool = True) -> None:
    """A daemon thread of every other process: when the main process dies, however it dies, nothing stays behind."""
    parent, pause = [mp.parent_process().sentinel], 0.0 if niced else None
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
    """Kills an actor, if still alive, and its games, and unlinks the games' shared memory, which has names at first."""
    unlink_orphans()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == process_group:
                unlink_game_files(pid)
    with contextlib.suppress(OSError):
        os.killpg(process_group, signal.SIGKILL)


def last_words(error_pipe) -> str:
    text = b""
    while error_pipe.poll() and (more := os.read(error_pipe.fileno(), 65536)):
        text += more
    return text.decode(errors="replace").strip()


class Actors:
    """The actor processes: started, looked after by the main process, and replaced when they die or hang.

    When an actor dies, its games and the last transition of each of its rows are lost, for all policies: the row's next
    observation is a `first` one, which makes that transition invalid. Earlier steps in its FILLING slots are kept."""

    SHORT_LIFE = 1000  # requests. A worker whose actors die or hang sooner three times in a row ends the run

    def __init__(self, args: Args, table: np.ndarray, mailboxes: list[Mailbox], request_pipes: list, session: int, log):
        """Another `session` number gives the games other seeds."""
        self.args, self.table, self.mailboxes, self.request_pipes = args, table, mailboxes, request_pipes
        self.numpys, self.games = [mailbox.numpy() for mailbox in mailboxes], table.shape[0] * table.shape[1]
        self.session, self.log, self.restarts, self.looked = session, log, 0, time.monotonic()
        self.context = mp.get_context("forkserver")  # fork is unsafe beside threads and CUDA; spawn costs 100 MB each
        # of each worker. All policies write to an actor's reply pipe, so it outlives the actor
        self.reply_pipes = [self.context.Pipe(duplex=False) for _ in range(args.num_workers)]
        self.processes, self.error_pipes = ([None] * args.num_workers for _ in range(2))
        self.incarnations, self.short_lives = ([0] * args.num_workers for _ in range(2))
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

    def groups(self, worker: int) -> slice:
        S = self.args.worker_num_splits
        return slice(worker * S, worker * S + S)

    def start(self, worker: int) -> None:
        args, incarnation, allowed = self.args, self.incarnations[worker], sorted(os.sched_getaffinity(0))
        core = allowed[worker % len(allowed)] if args.set_workers_cpu_affinity else None
        seed, groups = game_seed(args.seed, self.session, worker, incarnation), self.groups(worker)
        for numpy in self.numpys:
            numpy.incarnation[worker] = incarnation
            numpy.started[worker] = numpy.requests[groups] = numpy.replies[groups] = 0
        self.progress[worker], self.seconds[worker] = 0, 0.0
        self.error_pipes[worker], error_pipe = self.context.Pipe(duplex=False)
        arguments = (args, worker, incarnation, core, seed, self.table[groups], self.mailboxes, self.request_pipes,
                     self.reply_pipes[worker][0], error_pipe)  # fmt: skip
        arguments = (error_pipe, True, actor, *arguments)
        process = self.context.Process(target=process_body, name=f"actor {worker}", args=arguments, daemon=True)
        process.start()
        self.processes[worker] = process
        error_pipe.close()
        self.looked = time.monotonic()  # the first start waits for the fork server's imports: no actor's time

    def check(self) -> None:
        """The main process calls this often; it looks after the actors once a second. Raises RuntimeError when one
        cannot be kept alive."""
        elapsed = time.monotonic() - self.looked
        if elapsed < 1.0:
            return
        self.looked += elapsed
        for worker, process in enumerate(self.processes):
            groups = self.groups(worker)
            requests, replies = (np.stack([getattr(numpy, name)[groups] for numpy in self.numpys])
                                 for name in ("requests", "replies"))  # fmt: skip
            progress = requests.sum() + replies.sum() + self.numpys[0].started[worker]
            waits = (requests > replies).any(0).all()  # every split waits for a policy
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
                doing = "stepping" if requests.all() else "starting a game"
                self.replace(worker, f"made no progress for {self.args.actor_timeout:.0f} s while {doing}")
            elif text := last_words(self.error_pipes[worker]):
                self.log(text)

    def replace(self, worker: int, reason: str) -> None:
        process, error_pipe = self.processes[worker], self.error_pipes[worker]
        end_group(process.pid)
        process.kill()  # if it died or hung before it had a process group of its own
        process.join(5)
        text = last_words(error_pipe)
        message = f"actor {worker} {reason} (exit code {process.exitcode})"
        if self.args.sync and len(self.numpys) > 1:  # some policies may have served its last request, and some not
            raise RuntimeError(f"{message}; with --sync a population ends with it\n{text}".strip())
        self.restarts += 1
        short_life = self.numpys[0].requests[self.groups(worker)].sum() < self.SHORT_LIFE
        self.short_lives[worker] = self.short_lives[worker] + 1 if short_life else 0
        if self.short_lives[worker] == 3:
            raise RuntimeError(f"{message}, for the third time\n{text}".strip())
        self.log(f"{message}; starting it again\n{text}".strip())
        error_pipe.close()
        self.incarnations[worker] += 1  # what is left of the old one's requests and replies is dropped from here on
        self.start(worker)

    def wait_for_games(self, check, stop_signals: list[int]) -> None:
        """Returns when every game has been started or the user stops the run; calls `check` meanwhile."""
        with tqdm(total=self.games, desc="starting games", disable=None) as bar:
            while bar.n < bar.total and not stop_signals:
                self.check()
                check()
                time.sleep(0.1)
                bar.n = int(self.numpys[0].started.sum())
                bar.refresh()

    def stop(self, patience: float) -> None:
        """Ends all actors: by closing their pipes (the policies have ended), and after `patience` seconds by force."""
        started = [process for process in self.processes if process]
        for reader, writer in self.reply_pipes:
            writer.close()
        deadline = time.monotonic() + patience
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in started:
            end_group(process.pid)
            process.kill()


def train(typed: Args, folder: Path) -> int:
    """`typed` are the args before `resolve`. Returns the exit code: 0, or 130 when the run was stopped by a signal."""
    import resource  # not on every system, and those get main's sentence

    from torch.utils.tensorboard import SummaryWriter  # slow to import

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # actors and policies share many pipes
    args = resolve(typed)
    spaces, agents = spaces_of(args)
    P, W, B = args.num_policies, args.num_workers, args.batch_size // args.rollout
    rows = W * args.num_envs_per_worker * agents // P  # of a policy
    check_shared_memory(spaces, rows * P)
    check_memory(args, spaces, rows)
    log_file = open_log(folder)

    def log(text: str, show: bool = True) -> None:
        log_file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        if show:
            tqdm.write(text)

    with torch.device("meta"):
        parameters = sum(p.numel() for p in Agent(spaces, args).parameters())
    population = Population(args, folder, spaces, rows, log)
    if (step := population.step()) >= args.total_timesteps:
        log(f"{folder} has its {step:,.0f} steps already; raise --total-timesteps to go on")
        return 0
    table = table_of_policies(args, agents, population.session)
    software = {name: sys.modules[name].__version__ for name in ("torch", "numpy", "gymnasium", ENGINE)}
    # A resumed run starts from what was typed and resolves again: it may be on another machine.
    cfg = dict(args=asdict(typed), resolved=asdict(args), versions=software, command=sys.argv)
    (folder / "cfg.tmp").write_text(json.dumps(cfg, indent=2))
    os.replace(folder / "cfg.tmp", folder / "cfg.json")
    population.save()
    lag = 0.0 if args.sync else slots_needed(args, rows) / B * args.num_epochs  # when the learner is the bottleneck
    for line in (
        f"{args.env_id}: {P} policies of {parameters:,} parameters on {args.device}, encoder in {args.precision},"
        f" {args.learner_threads} + {args.inference_threads} threads to learn and act",
        f"{W} workers x {args.num_envs_per_worker} games of {agents} agents in {args.worker_num_splits} splits;"
        f" each policy has {rows} rows",
        f"{args.batch_size} samples ({B} rollouts of {args.rollout} steps) per update; expected lag up to {lag:.1f}"
        " versions",
        f"{sum(map(mebibytes, population.mailboxes)):.1f} MiB of shared memory beside the games' own;"
        f" {slots_needed(args, rows)} slots for the rollouts of each policy",
        f"up to {args.total_timesteps:,} steps of each policy = {args.total_timesteps * args.frameskip:,} frames",
        f"files in {folder}",
    ):
        log(line)
    for index, genes in enumerate(population.genes):
        log(f"policy {index}: {', '.join(f'{name} {value:.4g}' for name, value in population.settings(genes).items())}")
    stop_signals = []

    def on_signal(number, frame):
        stop_signals.append(number)
        if len(stop_signals) == 2:
            raise KeyboardInterrupt  # at once, without checkpoints

    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    request_pipes = [writer for _, writer in population.request_pipes]
    actors = Actors(args, table, population.mailboxes, request_pipes, population.session, log)
    writer = SummaryWriter(str(folder), flush_secs=10)
    writer.add_text("args", json.dumps(asdict(args), indent=2))
    try:
        actors.start_all()
        population.start(actors.reply_pipes)
        population.write_rows("began")
        actors.wait_for_games(population.check, stop_signals)
        watch(args, population, actors, writer, log, stop_signals)
    finally:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)  # a signal during the clean-up would leave games behind
        population.stop(patience=0.0 if isinstance(sys.exception(), KeyboardInterrupt) else 30.0)
        actors.stop(patience=0.0 if isinstance(sys.exception(), KeyboardInterrupt) else 5.0)
        population.save()
        population.write_rows("ended")
        writer.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    steps = ", ".join(f"{report['step']:,}" for report in population.reports)
    log(f"{'stopped' if stop_signals else 'done'}: {steps} steps, {actors.restarts} actors restarted")
    return 130 if stop_signals else 0


def watch(args: Args, population: Population, actors: Actors, writer, log, stop_signals: list[int]) -> None:
    """The main process's loop: looks after actors and policies, shows how they do, and holds the exchanges."""
    started = shown = time.monotonic()
    total, made = args.total_timesteps, int(population.step())
    with tqdm(total=total, initial=made, desc=args.env_id, unit=" steps", unit_scale=True, dynamic_ncols=True,
              disable=None) as bar:  # fmt: skip
        while not stop_signals:
            multiprocessing.connection.wait(population.controls, timeout=0.5)
            actors.check()
            population.check()
            if args.with_pbt:
                population.exchange(actors.check, writer)
            reports, now, step = population.reports, time.monotonic(), population.step()
            bar.n = int(step)
            bar.update(0)
            if now - shown >= 5 and all(report["bottleneck"] for report in reports):  # all have reported
                shown = now
                known = [report["objective"] for report in reports if report["objective"] is not None]
                text = f"{sum(report['fps'] for report in reports):,.0f} frames/s, "
                if known:
                    text += f"{args.pbt_target_objective} {max(known):.2f} best, {min(known):.2f} worst, "
                    text += f"{statistics.pstdev(known):.2f} deviation, "
                text += f"lag {statistics.mean(report['lag'] for report in reports):.1f}, bottleneck: "
                kinds = [report["bottleneck"] for report in reports]  # "games" too where another policy is waited for
                text += "learner" if "learner" in kinds else statistics.mode(kinds)
                bar.set_postfix_str(text)
                log(f"step {step:,.0f}: {text}", bar.disable)
            if step >= total or args.train_for_seconds is not None and now - started >= args.train_for_seconds:
                break


def main() -> int:
    try:
        if sys.platform != "linux":
            raise UserError(f"this needs Linux (process groups, /proc, /dev/shm); {sys.platform} has no such things")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise UserError("this is not for torchrun: it spreads its policies over the GPUs of one machine by itself")
        args, folder = parse_args()
        if args.evaluate:
            evaluate(args, folder)
            return 0
        return train(args, folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped at once, without a checkpoint", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
