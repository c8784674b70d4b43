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
# ]
# ///
# appo_pbt_doom.py $Id$
"""Asynchronous PPO with V-trace for several policies at once on ViZDoom: populations, bots, self-play.

    python appo_pbt_doom.py --env-id duel --num-policies 4 --with-pbt --total-timesteps 20000000
    python evaluate.py train_dir/NAME    # plays what the run of that name has learned: all policies against all

On 2 cores of an AMD EPYC (Zen 3, no GPU) two policies learned `duel` from each other in a small arena for 65 minutes.
Then one won all of 50 matches against Doom's own bot, the other 35 and lost 10, and each won all 50 against itself of
an hour before (one seed, 2026-11-23; benchmark/self_play.sh).

     actor process w = 0..W-1  (CPU only)              policy process p = 0..P-1  (on an accelerator)
     +-------------------------------+  request: byte s   +------------------------------------------+
     | step the games of split s     | ------ to all ---> | inference thread                         |
     | write obs, reward, ... into   |  (a pipe to each)  |   copy the rows of all waiting groups    |
     | the mailbox rows of all its   | <---- from all --- |   into the rollouts, forward, sample,    |
     | agents; go on when every      |  reply: byte s     |   write actions into the mailbox         |
     | policy has replied            |                    +------------------------------------------+
     +-------------------------------+                       | full slots                ^ free slots
                    ^                                     +------------------------------------------+
                    | starts, replaces                    | learner (main thread)                    |
     +-------------------------------+  orders, pipes     |   take B slots, V-trace, PPO step,       |
     | main process: progress bar;   |  of new actors     |   publish weights as version v+1         |
     | exchanges of population-based | -----------------> +------------------------------------------+
     | training                      | <----------------- every 5 s: steps, speed, objective
     +-------------------------------+
     slot:  FREE -> FILLING (one row) -> FULL -> LEARNING -> FREE        exactly one owner at any time

Who ends with whom. With an engine its actor. An actor that dies or hangs is replaced, and every policy gets a pipe to
the new one. With a policy the run: the others save, and the actors end with their pipes. With the main process, however
it ends, the policies, which save, and the actors with them.

An exchange gives a policy the weights, input statistics, optimiser state, numbers (`TUNED`, shaping coefficients) and
last 100 episodes of another one. Its steps, its best.pth and the recurrent states of its rows stay its own.

An edit of appo_doom.py: what is the same is the same text. What differs: a policy has a process of its own
(`train_policy`); the main process starts and ends all others (`Processes`) and holds the exchanges (`Population`). A
game has *seats*, places for agents, and which policy plays in which seat does not change while the run lasts
(`seat_policies`). Games have PettingZoo's parallel API (`make_env`, `Games`). What others of these files have and this
one has not: `--num-workers 0` (debug in appo_doom.py), `torchrun` (policies spread over the GPUs of one machine), and
the last action as an input.

Words: a *worker* is one actor process; it steps its environments in one or more *splits*. A *game* is one environment;
a *match* is a game of several engines, one for each player. A *row* is one agent's endless stream of experience; a
*group* is one policy's rows in one split of one worker, which ask for actions together. A *slot* is room for one
rollout (T steps of one row), a *batch* is B rollouts, from which the learner makes one optimiser step. An *iteration*
begins when the learner takes the slots of `num_batches_per_epoch` batches at once, passes `num_epochs` times over them,
and ends when it gives them back. A *step* is one decision of the agent, a *frame* one tick of the engine (frames =
steps x frameskip). Every policy that is published has a *version*, one higher than the last (an exchange skips
`max_policy_lag`); the *lag* of a sample is the learner's version minus the version that chose its action.

One rule about time, from which everything follows. Environments reset on the step AFTER an episode ends (Gymnasium's
NEXT_STEP): the step that ends an episode returns its last observation, the action chosen there is ignored, and the next
observation is the first of the next episode. So three flags say all there is to know:

    first[t]       obs[t] is the first of an episode: the recurrent state is zeroed before obs[t] enters it
    terminated[t]  action t ended the episode for good: the discount of step t is gamma * (1 - terminated[t])
    inactive[t]    action t did nothing, as the agent waited for its return to a match: step t is left out of every
                   loss, its means and the count of steps, but cuts neither the trace nor the state

and a transition t -> t+1 is valid iff not first[t+1]. An invalid one (the ignored action; an actor that was replaced)
cuts the V-trace trace and is left out of every loss, mean and step count. A time limit needs no flag of its own: its
last step bootstraps from the value of the true last observation.
"""

import concurrent.futures
import contextlib
import copy
import ctypes
import difflib
import faulthandler
import fcntl
import functools
import gc
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.reduction
import multiprocessing.resource_tracker
import os
import queue
import random
import resource
import selectors
import shlex
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, NamedTuple, TypeVar

import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import tyro
import vizdoom
from tqdm import tqdm

# === Args =============================================================================================================


Value = TypeVar("Value")
Auto = Annotated[Value | None, tyro.conf.arg(help_behavior_hint="")]  # None: the field's help says what the default is


@dataclass
class Args:
    # --- run
    env_id: str = "basic"
    """matches: duel, deathmatch (4 agents and 4 bots); against bots: duel_bots, deathmatch_bots; alone: basic,
    my_way_home, deadly_corridor, defend_the_center, defend_the_line, health_gathering, health_gathering_supreme,
    battle, battle2, or benchmark (battle without measurements and with 9 flat actions)"""
    cfg_path: Auto[str] = None  # a ViZDoom scenario .cfg of your own, trained on instead of `env_id`
    scenario_dir: Auto[str] = None  # folder with Sample Factory's maps for the matches; else ViZDoom's cig.wad
    frameskip: int = 4  # engine ticks (frames) per step of the agent
    seed: int = 1  # of the network, of the action sampling and of the environments
    total_timesteps: int = 1_000_000
    """stop after this many steps (frames / frameskip) of each policy, as a mean over them, all sessions together"""
    train_for_seconds: Auto[float] = None  # stop after this many seconds of learning in this session
    device: str = "auto"  # cpu, cuda or cuda:1; auto is cuda where there is one
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the encoder, and on a CPU of the core; auto is bfloat16 where the GPU or the CPU (AVX512-BF16, AMX) has
    instructions for it"""
    experiment: Auto[str] = None  # the run's folder below train_dir; an existing one is resumed. Default: a fresh one
    train_dir: str = "train_dir"  # where experiments are kept
    save_every_sec: float = 120.0  # seconds between checkpoints
    keep_checkpoints: int = 2  # how many of the latest checkpoints are kept

    # --- sampling
    num_workers: Auto[int] = None  # actor processes. Default: the cores this process may use
    num_envs_per_worker: int = 16  # environments per worker
    worker_num_splits: Auto[int] = None
    """parts that a worker's environments are stepped in: it steps one while the others wait for actions. Default: 2
    with CUDA and an even number of environments, else 1 (on a CPU the network would use the core meanwhile)"""
    set_workers_cpu_affinity: bool = True
    """pin worker i and its engines to the i-th core of this process; off where a container's CPU quota is less than its
    cores. For several runs at once turn it off, or give each run cores of its own with taskset"""
    sync: bool = False  # collect only while the learner waits, so that each iteration begins with lag 0: the baseline
    actor_timeout: float = 120.0
    """seconds that a step of an actor's environments may take, and the start of each one; an actor that takes
    longer (as after Ctrl-Z) counts as hung, and another takes its place; 0: no limit"""
    inference_threads: Auto[int] = None  # CPU threads of inference. Default: by the number of cores
    learner_threads: Auto[int] = None  # CPU threads of the learner. Default: by the number of cores

    # --- population
    num_policies: int = 4
    """policies that are trained side by side, each by a process of its own, in the same environments; with several GPUs
    policy i has GPU i mod their number, unless --device names one"""
    policy_settings: str = "{}"
    """where policies differ from the flags below at their start, as JSON: {"1": {"learning_rate": 0.01}} (policy 1)"""
    with_pbt: bool = False  # population-based training: mutate settings, replace the worst policies by the best
    pbt_target_objective: Auto[Literal["return", "kills", "frags", "wins"]] = None
    """the mean of the last 100 episodes. Default: wins of a match between agents, frags against bots, else the
    return"""
    pbt_start_mutation: int = 5_000_000  # steps that the slowest policy makes before the first exchange
    pbt_period_env_steps: int = 1_250_000  # steps that the slowest policy makes between exchanges
    pbt_replace_fraction: float = 0.3  # share of the population that is best, and that is worst
    pbt_replace_reward_gap: float = 0.1  # replace by a policy that is better by a larger share of the larger objective
    pbt_mutation_rate: float = 0.15  # chance of each number to change
    pbt_perturb_min: float = 1.05  # smallest factor by which a number is multiplied or divided; what is 0 stays 0
    pbt_perturb_max: float = 1.5  # largest factor of such a change
    pbt_optimize_gamma: bool = False  # mutate gamma too

    # --- algorithm
    rollout: int = 32  # steps per rollout (T)
    batch_size: Auto[int] = None
    """samples per optimiser step, a multiple of rollout. Default: a power of 2 near rows * rollout / 2 /
    num_batches_per_epoch, from 1024 to 8192; with sync exactly rows * rollout / num_batches_per_epoch"""
    num_batches_per_epoch: int = 1
    """batches of an iteration (Sample Factory's name). Each epoch deals its rollouts out to them anew; each batch is an
    optimiser step"""
    num_epochs: int = 1  # passes over an iteration's rollouts; with --sync the ratio is 1 in its first optimiser step
    max_batches_ahead: int = 1  # iterations collected ahead of the learner; more hides jitter and adds lag
    max_policy_lag: int = 100  # samples by a policy at least this many versions old are left out of the losses
    learning_rate: float = 4e-4  # of Adam; Sample Factory's is 1e-4, which learns more slowly (benchmark/README.md)
    anneal_lr: bool = False  # the learning rate falls linearly with the steps, to 0 at total_timesteps
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


class UserError(Exception):
    """Something the user can fix; printed as one line, without a traceback."""


# === Environment ======================================================================================================

TICKS_PER_SECOND = 35
ENV_SHARED_MEMORY = 3 * 2**20  # bytes; an engine's file is 10 MiB but sparse: at 160x120 at most 2.8 MiB are used
SCREEN = (120, 160, 3)  # what the engine renders: height, width, RGB. Sample Factory's 160x120
IMAGE = (72, 128, 3)  # what the agent sees, nearest neighbour: 3 of every 5 rows, 4 of every 5 columns
# Read from every engine. USER2 is the number of kills in battle and battle2.
VARIABLES = ("SELECTED_WEAPON", "SELECTED_WEAPON_AMMO", "HEALTH", "USER2")
# and from every player of a match
MATCH_VARIABLES = ("ARMOR", "ATTACK_READY", "PLAYER_NUMBER", "PLAYER_COUNT", "DEAD", "FRAGCOUNT", "DEATHCOUNT",
                   "HITCOUNT", "DAMAGECOUNT", *(f"WEAPON{k}" for k in range(8)),
                   *(f"AMMO{k}" for k in range(8)))  # fmt: skip
# The engine's own settings, by its names; living_reward is per tic
SETTINGS = dict(living_reward=0.0, death_penalty=0.0, doom_skill=3, episode_start_time=1, render_hud=True,
                render_crosshair=False, render_weapon=True, render_decals=False, render_particles=False)  # fmt: skip


class Scenario(NamedTuple):
    """One of Sample Factory's Doom environments (its doom_utils.py and scenario files). Times are in tics, 1/35 s."""

    wad: str
    buttons: tuple[str, ...]  # in the engine's order
    heads: tuple[int, ...]  # a head of size n is a no-op and n-1 consecutive buttons, or n values of a *_DELTA button
    time_limit: float = 2100
    reward_scale: float = 1.0
    measurements: bool = False  # 23 numbers beside the image
    shaping: str = ""  # what is added to the engine's reward: "", "gathering" or a name in SHAPING
    settings: dict = {}  # where they are not SETTINGS
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
                      "USE", "TURN_LEFT_RIGHT_DELTA"), heads=(3, 3, 8, 2, 2, 2, 21), time_limit=4 * 60 * 35,
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
MOST = dict(DAMAGECOUNT=200.0, HITCOUNT=5.0)  # growth in a step, at most


def shaping_of(env_id: str, cfg_path: str | None) -> dict[str, float]:
    """The shaping coefficients of a scenario, by name, as population-based training mutates them: "HEALTH+" for growth
    and "HEALTH-" for fall; "SELECTED3" for each step with weapon 3, loaded, in hand for five steps."""
    own = cfg_path or env_id not in SCENARIOS
    deltas = {} if own else SHAPING.get(SCENARIOS[env_id].shaping, {})
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
    system sends to all, and killed by the kernel when the thread that started it ends. Raises UserError."""
    if not shutil.which("setpriv"):
        raise UserError("setpriv is missing, with which engines end when we do: install util-linux 2.33 or newer")
    folder, engine = shlex.quote(tempfile.gettempdir()), shlex.quote(f"{Path(vizdoom.__file__).parent}/vizdoom")
    # If its parent died before the kernel was told to watch it, the engine is not started. The engines of a match would
    # tell of each other on the terminal.
    script = f"""#!/bin/sh
trap '' INT TERM
mkdir -p {folder}/_vizdoom && cd {folder} || exit 1
exec setpriv --pdeathsig KILL sh -c '[ $PPID = {os.getpid()} ] && exec "$@"' - {engine} "$@" > /dev/null 2>&1
"""
    file = os.memfd_create("vizdoom_launcher")
    os.write(file, script.encode())
    return f"/proc/{os.getpid()}/fd/{file}"


def unlink_shared_memory() -> None:
    """The shared memory of our engines, once they have opened it: without a name it goes with them, however they
    end. Only an engine that dies while it starts, alone or with its actor, leaves its file behind, 3 MiB at most."""
    for line in open("/proc/self/maps"):
        if "/dev/shm/ViZDoom" in line and "(deleted)" not in line:
            Path(line.split()[-1]).unlink(missing_ok=True)


class DoomEnv(gym.Env):
    """One single-player game. Observation: the image, uint8 [72, 128, 3], alone or in a Dict as `obs` beside `vector`,
    float32 [23] measurements. `info["raw_reward"]` is the engine's own reward, before shaping and scale: scores are
    sums of it."""

    def __init__(self, env_id: str, frameskip: int, cfg_path: str | None = None):
        self.game, self.frameskip = vizdoom.DoomGame(), frameskip
        self.metadata = dict(render_modes=["rgb_array"], render_fps=TICKS_PER_SECOND / frameskip)
        if cfg_path:
            self.setup_own(cfg_path)
        else:
            self.setup(env_id)
        self.game.set_vizdoom_path(launcher())
        self.game.set_episode_timeout(0)  # after its own time limit the engine has no state, so the limit is ours
        self.game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        self.game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        self.game.set_mode(vizdoom.Mode.PLAYER)
        self.game.set_window_visible(False)
        self.game.set_doom_config_path(os.devnull)  # else every engine writes a _vizdoom.ini where it is started
        self.game.set_available_game_variables([getattr(vizdoom.GameVariable, name) for name in VARIABLES])
        # presses[h][a] is what value a of head h does to its buttons, which follow the buttons of the head before
        self.presses, buttons = [], self.game.get_available_buttons()
        for n in self.scenario.heads:
            delta = buttons[0].name.endswith("_DELTA")  # degrees per tic, as in Sample Factory's battle
            self.presses.append(np.linspace(-10, 10, n)[:, None] if delta else np.eye(n, n - 1, -1))
            buttons = buttons[self.presses[-1].shape[1] :]
        self.observation_space = gym.spaces.Box(0, 255, IMAGE, np.uint8)
        if self.scenario.measurements:
            vector = gym.spaces.Box(-np.inf, np.inf, (23,), np.float32)
            self.observation_space = gym.spaces.Dict(obs=self.observation_space, vector=vector)
        heads = self.scenario.heads
        self.action_space = gym.spaces.MultiDiscrete(heads) if len(heads) > 1 else gym.spaces.Discrete(heads[0])

    def setup(self, env_id: str) -> None:
        if env_id not in SCENARIOS:
            near = difflib.get_close_matches(env_id, SCENARIOS, cutoff=0.3) or list(SCENARIOS)
            raise UserError(f"unknown --env-id {env_id}; did you mean {' or '.join(near)}?")
        self.scenario = SCENARIOS[env_id]
        self.game.set_doom_scenario_path(find_wad(self.scenario.wad))
        self.game.set_doom_map("map01")
        self.game.set_available_buttons([getattr(vizdoom.Button, name) for name in self.scenario.buttons])
        for name, value in (SETTINGS | self.scenario.settings).items():
            getattr(self.game, f"set_{name}")(value)

    def setup_own(self, cfg_path: str) -> None:
        """A user's scenario: its buttons are one head (no-op or a button), a delta button is a head of 11 values."""
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

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        if seed is not None:
            self.game.set_seed(seed)
        if self.game.is_running():
            self.game.new_episode()
        else:
            try:
                self.game.init()
            finally:
                unlink_shared_memory()
        self.tics, self.weapons = 0, deque(maxlen=5)
        return self.observation(), {}

    def observation(self):
        """A fresh observation of the engine's state. After the game's end there is none: black; no loss uses it."""
        state = self.game.get_state()
        self.screen = state.screen_buffer if state else np.zeros(SCREEN, np.uint8)
        self.variables = state.game_variables.clip(min=0) if state else self.variables
        image = np.empty(IMAGE, np.uint8)
        blocks, rows = image.reshape(24, 3, 32, 12), self.screen.reshape(24, 5, 32, 15)
        for i, row in enumerate((0, 1, 3)):  # the rows and columns that nearest neighbour picks for 5 -> 3 and 5 -> 4
            blocks[:, i] = rows[:, row, :, :12]
        if not self.scenario.measurements:
            return image
        weapon, ammo, health, kills = self.variables[: len(VARIABLES)]
        vector = np.zeros(23, np.float32)  # Sample Factory's layout; what single-player games lack stays 0
        vector[[0, 1, 2, 4, 6]] = round(weapon), min(5.0, ammo / 15), health / 30, kills / 10, 1 / 5
        return dict(obs=image, vector=vector)

    def step(self, action):
        buttons = np.concatenate([press[a] for press, a in zip(self.presses, np.atleast_1d(action))])
        raw_reward = self.game.make_action(buttons.tolist(), self.frameskip)
        self.tics += self.frameskip
        terminated, before = self.game.is_episode_finished(), self.variables
        observation = self.observation()
        bonus = 0.0 if terminated else self.bonus(before, self.variables)
        reward = (raw_reward + bonus) * self.scenario.reward_scale
        truncated = not terminated and self.tics >= self.scenario.time_limit
        return observation, reward, terminated, truncated, {"raw_reward": raw_reward}

    def bonus(self, before: np.ndarray, now: np.ndarray) -> float:
        """Sample Factory's reward shaping (REWARD_SHAPING_BATTLE, gathering wrapper) as far as it can fire here."""
        if not self.scenario.shaping:
            return 0.0
        healed = now[2] - before[2]
        if self.scenario.shaping == "gathering":
            return float(healed > 0)
        bonus = healed * (0.005 if healed > 0 else 0.003)
        weapon = int(now[0])
        self.weapons.append(weapon)
        if now[1] > 0 and self.weapons.count(weapon) == 5:
            bonus += 0.0002 * (1, 1, 1, 5, 5, 5, 10, 10)[min(weapon, 7)]  # Sample Factory always reads weapon 7 here
        return bonus

    def render(self) -> np.ndarray:
        """The engine's screen, uint8 [120, 160, 3]."""
        return self.screen

    def close(self) -> None:
        self.game.close()


class Player(DoomEnv):
    """One engine: what one player sees and does, alone or in a match. `shaping`: the coefficients of its reward."""

    def __init__(self, env_id: str, frameskip: int, cfg_path: str | None = None, scenario_dir: str | None = None):
        self.scenario_dir, self.shaping = scenario_dir, shaping_of(env_id, cfg_path)
        self.before, self.now = {}, {}  # the engine's variables of the last two observations
        super().__init__(env_id, frameskip, cfg_path)
        if self.scenario.match:
            names = [getattr(vizdoom.GameVariable, name) for name in (*VARIABLES, *MATCH_VARIABLES)]
            self.game.set_available_game_variables(names)
            self.presses[-1] *= 1.25  # turns by up to 12.5 degrees a tic, as in Sample Factory

    def setup(self, env_id: str) -> None:
        super().setup(env_id)
        if self.scenario_dir and self.scenario.better:
            path = Path(self.scenario_dir, self.scenario.better)
            if not path.is_file():
                raise UserError(f"--scenario-dir {self.scenario_dir} has no {path.name}")
            whole = path.name == "freedm.wad"  # a game of its own, not a map for one
            self.game.set_doom_scenario_path("" if whole else str(path))
            self.game.set_doom_game_path(str(path) if whole else "")

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        if not self.scenario.match:
            return super().reset(seed=seed)
        self.tics, self.weapons = 0, deque(maxlen=5)  # the episode has begun, for all players at once
        observation, self.deaths = self.observation(), self.now["DEATHCOUNT"]  # the engine goes on counting
        self.now["DEAD"] = 1.0  # a match may begin before the first life does
        return observation, {}

    def observation(self):
        observation, self.before = super().observation(), self.now
        if self.game.is_episode_finished():  # the engine has no state any more
            return observation
        self.now = now = dict(zip((*VARIABLES, *MATCH_VARIABLES), self.variables.tolist()))
        if not self.scenario.match:
            return observation
        now["FRAGCOUNT"] = self.game.get_game_variable(vizdoom.GameVariable.FRAGCOUNT)  # suicides make it negative
        vector = observation["vector"]
        vector[[3, 5, 6]] = now["ARMOR"] / 30, now["ATTACK_READY"], now["PLAYER_COUNT"] / 5
        vector[7:15] = [now[f"WEAPON{k}"] for k in range(8)]
        vector[15:] = [min(5.0, now[f"AMMO{k}"] / 15) for k in range(8)]
        return observation

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        if self.scenario.match:
            info = dict(raw_reward=self.now["FRAGCOUNT"] - self.before["FRAGCOUNT"], inactive=self.now["DEAD"] > 0)
        return observation, reward, terminated, truncated, info

    def bonus(self, before: np.ndarray, now: np.ndarray) -> float:
        """Sample Factory's reward shaping, with coefficients that can change."""
        if not self.shaping:
            return super().bonus(before, now)
        before, now, bonus = self.before, self.now, 0.0
        weapon = int(now["SELECTED_WEAPON"])
        self.weapons.append(weapon)
        if before.get("DEAD") and not now["DEAD"]:  # a new life has other numbers
            return 0.0
        for name in SHAPING[self.scenario.shaping]:
            change = min(now[name] - before[name], MOST.get(name, np.inf))
            bonus += change * self.shaping[f"{name}+"] if change > 0 else -change * self.shaping[f"{name}-"]
        if now["SELECTED_WEAPON_AMMO"] > 0 and self.weapons.count(weapon) == 5:
            bonus += self.shaping[f"SELECTED{min(weapon, 7)}"]  # Sample Factory always reads weapon 7 here
        return bonus

    def score(self) -> dict[str, float]:
        """Of the episode that ends."""
        scores = dict(kills=self.now["USER2"])
        if self.scenario.match:
            me, count = int(self.now["PLAYER_NUMBER"]), int(self.now["PLAYER_COUNT"])
            names = [f"PLAYER{k + 1}_FRAGCOUNT" for k in range(count)]
            frags = [self.game.get_game_variable(getattr(vizdoom.GameVariable, name)) for name in names]
            mine, others = frags[me], frags[:me] + frags[me + 1 :]
            scores |= dict(frags=mine, deaths=self.now["DEATHCOUNT"] - self.deaths)
            scores |= dict(place=1 + sum(n > mine for n in others), win=float(all(n < mine for n in others)))
        return scores


class InStep:
    """The engine of a player among several, all of whom are stepped at once, each in its thread, tic by tic: engines
    that are asked for several tics wait for each other for ever now and then."""

    def __init__(self, game: vizdoom.DoomGame, barrier: threading.Barrier):
        self.game, self.barrier = game, barrier

    def __getattr__(self, name: str):
        return getattr(self.game, name)

    def make_action(self, buttons: list[float], tics: int) -> float:
        self.game.set_action(buttons)
        for tic in range(tics):
            self.barrier.wait()
            self.game.advance_action(1, tic == tics - 1)
        return 0.0  # the engine has no reward for a match: frags are in the shaping


class DoomMatch:
    """Doom with PettingZoo's parallel API: for one player, or a match of several, whose engines talk over the loopback.
    An observation is the image, uint8 [72, 128, 3], alone or in a Dict as `obs` beside `vector`, float32 [23]
    measurements.

    In an agent's info: `raw_reward`, the engine's own reward before shaping and scale, in a match the change of frags;
    `inactive` while it waits for its return after a death; at the end `kills`, and in a match `frags`, `deaths`,
    `place` (1: nobody has more frags) and `win` (1 if first and alone in that, else 0)."""

    def __init__(self, env_id: str, frameskip: int, cfg_path: str | None = None, scenario_dir: str | None = None):
        self.new_player = functools.partial(Player, env_id, frameskip, cfg_path, scenario_dir)
        self.players, self.running = [self.new_player()], False
        self.scenario, self.metadata = self.players[0].scenario, self.players[0].metadata
        self.possible_agents, self.agents = [f"player_{i}" for i in range(self.scenario.agents)], []

    def observation_space(self, agent: str) -> gym.Space:
        return self.players[0].observation_space

    def action_space(self, agent: str) -> gym.Space:
        return self.players[0].action_space

    def together(self, function, *arguments) -> list:
        """Calls function(player, argument...) for all players, each in a thread, and returns the results. What one
        raises is raised without waiting for the others: their engines may wait for its engine for ever."""
        if len(self.players) == 1:
            return [function(self.players[0], *(values[0] for values in arguments))]
        futures = [self.pool.submit(function, *values) for values in zip(self.players, *arguments)]
        for future in concurrent.futures.as_completed(futures):
            future.result()
        return [future.result() for future in futures]

    def start(self, seed: int | None) -> None:
        """Starts the engines of a match."""
        for _ in range(3):
            self.players = [self.new_player() for _ in self.possible_agents]
            # These threads stay, since an engine ends with the thread that starts it
            self.pool = concurrent.futures.ThreadPoolExecutor(len(self.players))
            if len(self.players) > 1:
                barrier = threading.Barrier(len(self.players))
                for player in self.players:
                    player.game = InStep(player.game, barrier)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]  # free just now; if another takes it first, the start fails: again
            rules = " ".join(f"+sv_{rule} 1" for rule in RULES)
            host = f"-host {len(self.players)} -port {port} -deathmatch {rules}"
            host += f" +viz_respawn_delay {self.scenario.respawn}"
            for i, player in enumerate(self.players):
                player.game.add_game_args(f"-join 127.0.0.1:{port}" if i else host)
                player.game.add_game_args(f"+viz_connect_timeout 10 +name agent{i} +colorset 0")
                if seed is not None:
                    player.game.set_seed(seed)
            futures = [self.pool.submit(player.game.init) for player in self.players]
            errors = [error for future in futures if (error := future.exception())]
            unlink_shared_memory()  # only now, when all engines of the match have opened it
            if not errors:
                self.running = True
                return
        raise errors[0]

    def reset(self, seed: int | None = None, options: dict | None = None):
        """options["shaping"]: the coefficients of each agent, by the names of `shaping_of`."""
        if self.running:
            self.together(lambda player: player.game.new_episode())
        elif self.scenario.match:
            self.start(seed)
        if self.scenario.bots:
            for command in ["removebots"] + ["addbot"] * self.scenario.bots:
                self.players[0].game.send_game_command(command)
        self.agents = list(self.possible_agents)
        for agent, player in zip(self.agents, self.players):
            player.shaping = (options or {}).get("shaping", {}).get(agent, player.shaping)
        observations = [observation for observation, _ in self.together(lambda player: player.reset(seed=seed))]
        return dict(zip(self.agents, observations)), {agent: {} for agent in self.agents}

    def step(self, actions: dict):
        playing = self.agents
        results = zip(*self.together(Player.step, [actions[agent] for agent in playing]))
        observations, rewards, terminated, truncated, infos = (dict(zip(playing, values)) for values in results)
        over = terminated[playing[0]]  # for all of them, as is the time limit
        if over or truncated[playing[0]]:
            self.agents = []
            for agent, player in zip(playing, self.players):
                infos[agent] |= player.score()
        return observations, rewards, dict.fromkeys(playing, over), truncated, infos

    def render(self) -> np.ndarray:
        """The engines' screens side by side, uint8 [120, 160 x players, 3]."""
        return np.concatenate([player.render() for player in self.players], axis=1)

    def close(self) -> None:
        for player in self.players:
            player.close()


class Games(gym.vector.VectorEnv):
    """Games with PettingZoo's parallel API as one vector environment: the agents of the first game, then those of the
    second, and so on. An agent that leaves before the others is truncated step by step until they end, too; these
    steps are invalid."""

    metadata = dict(autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)

    def __init__(self, games: list, shaped: list[str]):
        """shaped: names of the shaping coefficients."""
        self.games, self.agents, self.shaped = games, games[0].possible_agents, shaped
        spaces = {(str(games[0].observation_space(agent)), str(games[0].action_space(agent))) for agent in self.agents}
        if len(spaces) > 1:
            raise UserError(f"unsupported: agents with different spaces, {spaces}")
        self.num_envs = len(games) * len(self.agents)
        self.single_observation_space = games[0].observation_space(self.agents[0])
        self.single_action_space = games[0].action_space(self.agents[0])
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, self.num_envs)
        self.observation = by_name(gym.vector.utils.create_empty_array(self.single_observation_space, self.num_envs))
        self.shaping = np.zeros((self.num_envs, 0))  # coefficients of each agent, which WorkerEnvs keeps up to date

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        self.over = [True] * len(self.games)
        observation, *_, info = self.step(None, seed)
        return observation, info

    def step(self, actions: np.ndarray, seed: int | None = None):
        """A game that is over begins anew, and its actions are ignored."""
        n = self.num_envs
        rewards, terminated, truncated = np.zeros(n), np.zeros(n, bool), np.zeros(n, bool)
        info = {name: np.zeros(n) for name in ("raw_reward", "inactive", *SCORES)}
        for g, game in enumerate(self.games):
            index = dict(zip(self.agents, range(g * len(self.agents), n)))
            if self.over[g]:
                shaping = {agent: dict(zip(self.shaped, self.shaping[i].tolist())) for agent, i in index.items()}
                observations, infos = game.reset(seed=None if seed is None else seed + g, options=dict(shaping=shaping))
                results = {}, {}, {}
            else:
                observations, *results, infos = game.step({agent: actions[index[agent]] for agent in game.agents})
            self.over[g] = not game.agents
            for agent, i in index.items():
                if agent not in observations:
                    truncated[i] = True
                    continue
                for name, part in by_name(observations[agent]).items():
                    self.observation[name][i] = part
                rewards[i], terminated[i], truncated[i] = (result.get(agent, 0) for result in results)
                own = infos.get(agent, {})
                info["raw_reward"][i] = own.get("raw_reward", rewards[i])
                info["inactive"][i] = own.get("inactive", False)
                if terminated[i] or truncated[i]:
                    for name in SCORES:
                        info[name][i] = own.get(name, 0.0)
        return self.observation, rewards, terminated, truncated, info

    def close_extras(self, **kwargs) -> None:
        for game in self.games:
            game.close()


def make_env(args: Args):
    """One game. Edit this function to train on something else.

    What it returns has PettingZoo's parallel API: `possible_agents`, `observation_space`, `action_space`, `reset` and
    `step` with dicts, `agents`, `render`, `close`. It must start nothing before `reset`. All agents have the same
    spaces, with Discrete or MultiDiscrete actions. `Agent` sees uint8 images [height, width, channels], at least
    36 x 36, and float vectors: one alone, or several in a Dict. In an agent's info there may be `raw_reward`, a float
    that scores are sums of; `inactive`, True where its action does nothing; and at the end the SCORES. `reset` has the
    shaping coefficients of each agent, if there are any, in its options. What needs no room in /dev/shm has
    ENV_SHARED_MEMORY 0.
    """
    return DoomMatch(args.env_id, args.frameskip, args.cfg_path, args.scenario_dir)


def make_envs(args: Args, num_envs: int) -> gym.vector.VectorEnv:
    """The games of one split of a worker."""
    games = [make_env(args) for _ in range(num_envs)]
    return Games(games, list(shaping_of(args.env_id, args.cfg_path)))


class Spaces(NamedTuple):
    """What the pipeline needs to know of the environments."""

    obs: dict[str, gym.spaces.Box]  # the arrays that an observation consists of, by name
    heads: tuple[int, ...]  # number of actions of each independent head


def by_name(observation) -> dict:
    """An observation, or its space, as a dict: what is no dict becomes {"obs": it}."""
    return dict(observation) if isinstance(observation, (dict, gym.spaces.Dict)) else dict(obs=observation)


def spaces_of(args: Args) -> Spaces:
    """The spaces of what `make_envs` returns. Raises UserError where the pipeline does not support them."""
    with contextlib.closing(make_envs(args, 1)) as envs:  # starts no engine
        obs, action = by_name(envs.single_observation_space), envs.single_action_space
        mode = envs.metadata.get("autoreset_mode")
    if isinstance(envs, gym.vector.AsyncVectorEnv):
        raise UserError("make_envs must not return an AsyncVectorEnv: actors cannot start processes")
    if mode != gym.vector.AutoresetMode.NEXT_STEP:
        raise UserError(f"make_envs must return environments with AutoresetMode.NEXT_STEP, not {mode}")
    if isinstance(action, gym.spaces.Discrete) and action.start == 0:
        heads = (int(action.n),)
    elif isinstance(action, gym.spaces.MultiDiscrete) and action.nvec.ndim == 1 and not action.start.any():
        heads = tuple(action.nvec.tolist())
    else:
        heads = ()
    if not heads or not obs or not all(isinstance(space, gym.spaces.Box) for space in obs.values()):
        raise UserError(f"unsupported spaces, {obs} and {action}: observations are a Box or a Dict of them, actions "
                        "Discrete or MultiDiscrete of one dimension, from 0 on")  # fmt: skip
    return Spaces(obs, heads)


def seats_of(args: Args) -> int:
    """How many agents play in a game."""
    with contextlib.closing(make_env(args)) as game:  # starts no engine
        return len(game.possible_agents)


# === Mailbox and rollouts =============================================================================================


# What is summed over each episode, and reported as the mean over the last 100: the environment's own reward, the
# reward as it is trained on, and 1 a step; and what an agent's info says at the end, where it does.
SCORES = ("kills", "frags", "deaths", "place", "win")
EPISODE = ("episodic_return", "episodic_return_trained", "episodic_length", *SCORES)


def room_for(spaces: Spaces, *shape: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Observations of zeros, by name [*shape, ...]: fractions are float32, whole numbers as in the space."""
    room = {}
    for name, space in spaces.obs.items():
        dtype = torch.float32 if space.dtype.kind == "f" else getattr(torch, space.dtype.name)
        room[name] = torch.zeros((*shape, *space.shape), dtype=dtype, device=device)
    return room


# Who plays where, for example in one split of two games for two agents, with two policies: four rows, two of each.
#
#     [[0, 1],   seat_policies: policy 0 plays in the first seat of the first game, and in the second seat of the other
#      [1, 0]]
#
#     [[0, 2],   seat_rows: policy 0 has the rows 0 and 1, policy 1 has the rows 2 and 3
#      [3, 1]]
#
# With two such splits policy 0 has the rows 0 and 1 in the first and 2 and 3 in the second, policy 1 has 4 to 7. So all
# rows of a policy are neighbours, and within them the rows of a group.


def seat_policies(args: Args, session: int) -> np.ndarray:
    """[split of all workers, game, seat] -> the policy that plays there for the whole session. Each has the same number
    of seats in every split, and pairs of policies, a policy with itself included, meet in equally many games as far as
    that allows. Another session (a resumed run) has other pairs."""
    S, P, seats = args.worker_num_splits, args.num_policies, seats_of(args)
    games = args.num_envs_per_worker // S
    rng = np.random.default_rng((args.seed, session))
    met = np.zeros((P, P))  # how often each policy has sat down in a game with each other one, and with itself
    table = np.zeros((args.num_workers * S, games, seats), int)
    for split in table:
        left = np.full(P, games * seats // P)  # seats of this split that each policy has still to take
        for game in split:
            for seat in range(seats):
                sitting = game[:seat]
                # the policy that has met the sitting ones least; if even, the one with most seats left; else chance
                candidates = [(met[p, sitting].sum(), -left[p], rng.random(), p) for p in range(P) if left[p]]
                policy = min(candidates)[-1]
                for other in sitting:
                    met[policy, other] += 1
                    if other != policy:
                        met[other, policy] += 1
                game[seat] = policy
                left[policy] -= 1
            rng.shuffle(game)  # no policy is always the host
    return table


def seat_rows(table: np.ndarray, policies: int) -> np.ndarray:
    """[split of all workers, game, seat] -> the row in the mailbox, from the policy."""
    rows, n = np.zeros_like(table), table.size // policies  # n: rows of each policy
    for policy in range(policies):
        rows[table == policy] = range(policy * n, policy * n + n)  # in the table's order: split by split
    return rows


class Mailbox:
    """What actors share with the policies, each of which has the part with its own rows.

    Between its request and its reply a group's rows belong to the inference thread, otherwise to its actor: no locks.
    """

    def __init__(self, spaces: Spaces, rows: int, shaping: int):
        # written by the actor, between a reply and its next request
        self.obs = room_for(spaces, rows)  # the current observation
        self.reward = torch.zeros(rows)  # of the action before it, after scale and clip
        self.terminated = torch.zeros(rows, dtype=torch.bool)  # that action ended the episode for good
        self.first = torch.zeros(rows, dtype=torch.bool)  # obs is the first of an episode
        self.inactive = torch.zeros(rows, dtype=torch.bool)  # the action at obs does nothing: it waits for its return
        self.episode = torch.zeros(rows, len(EPISODE))  # of the episode that ended just now (a length of 0: none did)
        # written by inference, between a request and its reply
        self.action = torch.zeros(rows, len(spaces.heads), dtype=torch.int64)  # what to do next
        # written by the main process, read when an episode begins
        self.shaping = torch.zeros(rows, shaping, dtype=torch.float64)  # coefficients of the policy

    def arrays(self) -> SimpleNamespace:
        """The same memory as NumPy arrays, whose indexing is much cheaper than torch's."""
        arrays = {name: field.numpy() for name, field in vars(self).items() if name != "obs"}
        return SimpleNamespace(obs={name: part.numpy() for name, part in self.obs.items()}, **arrays)

    def part(self, policy: int, policies: int) -> "Mailbox":
        """A policy's rows: the same memory."""
        part, n = copy.copy(self), len(self.first) // policies
        part.obs = {name: field[policy * n : policy * n + n] for name, field in self.obs.items()}
        for name in vars(self).keys() - {"obs"}:
            setattr(part, name, getattr(self, name)[policy * n : policy * n + n])
        return part


class Rollouts:
    """Memory of the learning process alone, [time, slot, ...]. Observations, and what inference computes, stay on the
    device. Flags, rewards and versions stay on the host, where the learner finds resets and valid samples without
    asking the device. Rewards, values and log-probabilities start as NaN: were a slot read before it is written, the
    loss would say so.

    A slot is FILLING from when its row takes it until its rollout is complete, then FULL (both in `Inference.serve`).
    `Learner.collect` makes it LEARNING, `Learner.iterate` releases it, and `Inference.serve` finds it FREE.
    """

    def __init__(self, spaces: Spaces, T: int, slots: int, state_size: int, device: torch.device):
        # on the device; T + 1: with the observation that the last value is bootstrapped from
        self.obs = room_for(spaces, T + 1, slots, device=device)
        self.actions = torch.zeros((T, slots, len(spaces.heads)), dtype=torch.int64, device=device)
        self.logprobs = torch.full((T, slots), torch.nan, device=device)  # of the actions, by the acting policy (mu)
        self.values = torch.full((T, slots), torch.nan, device=device)  # by the acting policy, for value clipping only
        self.rnn_state = torch.zeros((slots, state_size), device=device)  # at obs[0], before `first[0]` zeroes it
        # on the host
        self.first = np.zeros((T + 1, slots), bool)
        self.rewards = np.full((T, slots), np.nan, np.float32)  # of actions[t]
        self.terminated = np.zeros((T, slots), bool)
        self.inactive = np.zeros((T, slots), bool)  # actions[t] does nothing
        self.versions = np.zeros((T, slots), np.int64)  # of the policy that chose actions[t]


def slots_needed(args: Args) -> int:
    """With `sync` the slots of one iteration, one for every row: none is FREE before the update has been published.
    That is all that `sync` is; what else it changes are defaults and checks in `resolve`.

    Without it a slot for every row to fill, one iteration LEARNING, and `max_batches_ahead` FULL. These are never too
    few: when all groups wait for slots and the learner for an iteration, none is FILLING or LEARNING and less than an
    iteration is FULL, so there is a FREE slot for every row. Of one group that waits the same is true, whatever other
    policies do, as only the other groups' slots are FILLING."""
    iteration = args.num_batches_per_epoch * args.batch_size // args.rollout
    if args.sync:
        return iteration
    return args.num_workers * args.num_envs_per_worker + (1 + args.max_batches_ahead) * iteration


def fields_of(memory: Mailbox | Rollouts) -> list:
    """All tensors and arrays of the memory."""
    return [*memory.obs.values(), *(field for name, field in vars(memory).items() if name != "obs")]


def mebibytes(memory: Mailbox | Rollouts) -> float:
    return sum(field.nbytes for field in fields_of(memory)) / 2**20


# === Agent ============================================================================================================


def moments(x: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """x [N, ...] -> N, and the mean and the variance over N [...]."""
    n = len(x)
    mean = x.sum(0) / n
    return n, mean, (x - mean).square_().sum(0) / n


class Normalizer(nn.Module):
    """Running mean and variance of every element of an input, in float32; clips to +-5, as Sample Factory 2 does."""

    def __init__(self, shape: tuple[int, ...], unit: float, dtype: torch.dtype = torch.float32):
        """dtype: of a normalised image; in the encoder's own type it need not be cast again. Floats stay float32."""
        super().__init__()
        self.unit, self.dtype = unit, dtype
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        # normalised = x * scale + shift, one multiply-add per element; until the first update that is x / unit
        self.register_buffer("scale", torch.full(shape, 1 / unit))
        self.register_buffer("shift", torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype.is_floating_point:
            return torch.addcmul(self.shift, x, self.scale).clamp_(-5, 5)
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        # On a CPU in pieces that stay in the cache: 14 ms instead of 22 ms for 1056 images.
        chunk = 16 if x.device.type == "cpu" else len(x)
        for part, to in zip(x.split(chunk), out.split(chunk)):
            part = part.float()
            to.copy_(torch.addcmul(self.shift, part, self.scale, out=part).clamp_(-5, 5))
        return out

    @torch.no_grad()
    def update(self, x: torch.Tensor, valid: torch.Tensor) -> None:
        """x [N, *shape], of which bool valid [N] count; merges two sets of statistics (Chan, Golub and LeVeque 1979).
        Raises FloatingPointError, and changes nothing, where statistics would not be finite."""
        n, mean, var = moments(x[valid].float() / self.unit)  # waits for the device, as `Learner.step` has just done
        if n == 0:
            return
        total = self.count + n
        delta = mean - self.mean
        var = (self.var * self.count + var * n + delta**2 * (self.count * n / total)) / total
        if not var.isfinite().all():
            raise FloatingPointError("an observation is not finite, or its square is not")
        self.mean.add_(delta * (n / total))
        self.var.copy_(var)
        self.count.copy_(total)
        std = (self.var + 1e-5).sqrt()
        self.scale.copy_(1 / (self.unit * std))
        self.shift.copy_(-self.mean / std)


def init_layer(layer: nn.Module) -> nn.Module:
    """Orthogonal weights with gain 1, biases 0: Sample Factory's initialisation, of the heads too."""
    nn.init.orthogonal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class ImageEncoder(nn.Module):
    """Convolutions 32/8/4, 64/4/2, 128/3/2 (channels, kernel, stride) and a layer of `hidden_size`, ELU: as in the
    Sample Factory paper."""

    def __init__(self, space: gym.spaces.Box, args: Args):
        super().__init__()
        height, width, channels = space.shape
        self.conv = nn.Sequential(
            init_layer(nn.Conv2d(channels, 32, 8, 4)), nn.ELU(inplace=True),
            init_layer(nn.Conv2d(32, 64, 4, 2)), nn.ELU(inplace=True),
            init_layer(nn.Conv2d(64, 128, 3, 2)), nn.ELU(inplace=True),
        )  # fmt: skip
        with torch.no_grad():
            size = self.conv(torch.zeros(1, channels, height, width)).numel()
        self.fc = init_layer(nn.Linear(size, args.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, height, width, channels] -> [N, hidden_size]"""
        x = self.conv(x.permute(0, 3, 1, 2))
        # flatten in the order of memory (height, width, channel): a view instead of a copy
        return F.elu(self.fc(x.permute(0, 2, 3, 1).flatten(1)), inplace=True)


class Agent(nn.Module):
    """An `ImageEncoder` for each image and two layers of 128 for all vectors, joined, then a recurrent core, then value
    and logits.

    All images and vectors that the environment's space and observation have are inputs. A network of your own has these
    two arguments, `heads` (of Spaces), `state_size` (floats of recurrent state for each row; 0 for none), `reduced`
    (modules whose weights act in bfloat16), `forward` and `update_normalizers`; each parameter has a gradient, buffers
    are updated in place, and nothing depends on `train()`. Flags of this network: normalize_input, rnn_type,
    hidden_size, precision.

    To forbid actions, set their logits to -inf in `forward`, by a mask among the observations (`obs[NAME] == 0`). Each
    head must keep one action, also at an episode's last observation.
    """

    def __init__(self, spaces: Spaces, args: Args):
        """Raises UserError for observations that it cannot see."""
        super().__init__()
        self.heads, self.rnn_type = spaces.heads, args.rnn_type
        self.normalizers, self.images, self.vectors = nn.ModuleDict(), nn.ModuleDict(), []
        vector_size = 0
        for name, space in spaces.obs.items():
            image = space.dtype == np.uint8
            if image and len(space.shape) == 3 and min(space.shape[:2]) >= 36:
                self.images[name] = ImageEncoder(space, args)
            elif not image and len(space.shape) == 1:
                self.vectors.append(name)
                vector_size += space.shape[0]
            else:
                raise UserError("this network sees images, uint8 [height, width, channels] of at least 36 x 36, and "
                                f"vectors of other types; not {name}: {space}")  # fmt: skip
            if image or args.normalize_input:
                dtype = torch.bfloat16 if image and args.precision == "bfloat16" else torch.float32
                self.normalizers[name] = Normalizer(space.shape, 255.0 if image else 1.0, dtype)
        core_input = len(self.images) * args.hidden_size
        if self.vectors:
            self.vector_fc = nn.Sequential(
                init_layer(nn.Linear(vector_size, 128)), nn.ELU(inplace=True),
                init_layer(nn.Linear(128, 128)), nn.ELU(inplace=True),
            )  # fmt: skip
            core_input += 128
        self.state_size = {"gru": 1, "lstm": 2, "none": 0}[args.rnn_type] * args.hidden_size
        if args.rnn_type != "none":
            self.core = (nn.GRU if args.rnn_type == "gru" else nn.LSTM)(core_input, args.hidden_size)
        head_input = args.hidden_size if args.rnn_type != "none" else core_input
        self.critic = init_layer(nn.Linear(head_input, 1))
        self.actor = init_layer(nn.Linear(head_input, sum(spaces.heads)))
        # What computes in bfloat16, by autocast, in learning and acting alike: pi/mu must be 1 at lag 0. Not the core
        # on CUDA, where autocast takes float16 for recurrent layers.
        self.reduced = []
        if args.precision == "bfloat16":
            self.reduced.append(self.images)
            if args.rnn_type != "none" and not args.device.startswith("cuda"):
                self.reduced.append(self.core)
        self.to(memory_format=torch.channels_last)  # as images come: height, width, channel

    def autocast(self, module: nn.Module):
        """Context in which one of the `reduced` modules computes in bfloat16, and any other as usual."""
        return torch.autocast(self.actor.weight.device.type, torch.bfloat16, enabled=module in self.reduced)

    def encode(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        """obs by name [N, ...], as in the space -> float32 [N, features]"""
        obs = {name: self.normalizers[name](x) if name in self.normalizers else x for name, x in obs.items()}
        with self.autocast(self.images):
            features = [encoder(obs[name]).float() for name, encoder in self.images.items()]
        if self.vectors:
            features.append(self.vector_fc(torch.cat([obs[name].float() for name in self.vectors], dim=-1)))
        return torch.cat(features, dim=-1)

    def forward(self, obs, first, state, restarts=None):
        """obs by name [T, B, ...], first bool [T, B], state float32 [B, state_size] before obs[0]; restarts: 0 and the
        times at which `first` is set in any row, in order (None: they are looked for). The recurrent core runs once for
        each stretch between them; where one begins, the state of the rows with `first` is zeroed.
        Returns logits [T, B, sum(heads)], values [T, B], state."""
        T, B = first.shape
        x = self.encode({name: part.flatten(0, 1) for name, part in obs.items()}).unflatten(0, (T, B))
        if restarts is None:
            restarts = [0] + [t for t in range(1, T) if first[t].any()]
        if self.rnn_type != "none":
            outputs = []
            lengths = [end - start for start, end in zip(restarts, [*restarts[1:], T])]
            with self.autocast(self.core):
                for start, stretch in zip(restarts, x.split(lengths)):  # one call per stretch in which nothing restarts
                    state = torch.where(first[start].unsqueeze(-1), 0.0, state)
                    hidden = state.unsqueeze(0)
                    if self.rnn_type == "lstm":
                        output, hidden = self.core(stretch, tuple(part.contiguous() for part in hidden.chunk(2, -1)))
                        hidden = torch.cat(hidden, -1)
                    else:
                        output, hidden = self.core(stretch, hidden)
                    state = hidden.squeeze(0).float()
                    outputs.append(output)
            x = torch.cat(outputs).float()
        return self.actor(x), self.critic(x).squeeze(-1), state

    def update_normalizers(self, obs: dict[str, torch.Tensor], valid: torch.Tensor) -> None:
        """obs by name [N, ...], of which bool valid [N] count"""
        for name, normalizer in self.normalizers.items():
            normalizer.update(obs[name], valid)


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
    policy, [...] each, summed over the independent heads. An action whose logit is -inf is left out."""
    logprob = entropy = symmetric_kl = 0.0
    for h, head in enumerate(logits.split(heads, dim=-1)):
        logp = head.log_softmax(-1)
        logprob = logprob + logp.gather(-1, actions[..., h : h + 1]).squeeze(-1)
        possible = head > -torch.inf
        probability, logp = logp.exp(), torch.where(possible, logp, 0.0)
        head_entropy = -(probability * logp).sum(-1)
        entropy = entropy + head_entropy
        # (KL(p|u) + KL(u|p)) / 2 with KL(p|u) = log n - H(p) and KL(u|p) = -log n - mean log p
        symmetric_kl = symmetric_kl + 0.5 * (-head_entropy - logp.sum(-1) / possible.sum(-1))
    return logprob, entropy, symmetric_kl


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
    steps, traces = corrections.unbind(), trace.unbind()  # views: indexing tensors in the loop costs more than its sums
    for t in reversed(range(len(steps) - 1)):
        steps[t].addcmul_(traces[t], steps[t + 1])  # in place: from here on it is vs[t] - V[t]
    vs = torch.cat([values[:-1] + corrections, values[-1:]])
    advantages = rewards + discounts * (lam * vs[1:] + (1 - lam) * values[1:]) - values[:-1]
    return vs, advantages


class Batch(NamedTuple):
    """The rollouts of one optimiser step, on the learner's device, [time, rollout, ...]."""

    obs: dict[str, torch.Tensor]  # by name [T+1, B, ...]
    first: torch.Tensor  # bool [T+1, B]
    rnn_state: torch.Tensor  # float32 [B, state_size]
    actions: torch.Tensor  # int64 [T, B, heads]
    logprobs: torch.Tensor  # float32 [T, B]
    values: torch.Tensor  # float32 [T, B]
    rewards: torch.Tensor  # float32 [T, B]
    terminated: torch.Tensor  # bool [T, B]
    inactive: torch.Tensor  # bool [T, B]
    mask: torch.Tensor  # bool [T, B]: valid, active, younger than max_policy_lag: what the losses average over
    restarts: list[int]  # see Agent.forward; on the host


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """x [..., T, B], mask [T, B] of 0 and 1 -> [...]: the mean over the samples that have a 1 (NaN: none has)."""
    return (x * mask).sum((-2, -1)) / mask.sum()


def appo_loss(args: Args, agent: Agent, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped losses with V-trace's targets over the samples in `batch.mask`. Loss and metrics, on the device.

    A loss of your own goes here: of each sample [T, B], averaged by `mean`, added to `loss`. What it needs of the time
    of acting is one more field of `Rollouts` and `Batch`, written in `Inference.act` and copied in `Learner.gather`."""
    logits, values, _ = agent(batch.obs, batch.first, batch.rnn_state, batch.restarts)
    logprobs, entropy, symmetric_kl = evaluate_actions(logits[:-1], batch.actions, agent.heads)
    log_ratio = logprobs - batch.logprobs
    log_ratio = torch.where(batch.inactive, 0.0, log_ratio)  # an action that does nothing is as good as on-policy
    ratio = log_ratio.clamp(np.log(0.05), np.log(20.0)).exp()  # Sample Factory's band; no gradient outside
    discounts = args.gamma * ~batch.terminated
    vs, advantages = vtrace(ratio.detach(), values.detach(), batch.rewards, discounts, ~batch.first[1:],
                            args.vtrace_rho, args.vtrace_c, args.vtrace_lambda)  # fmt: skip

    mean = functools.partial(masked_mean, mask=batch.mask.float())  # converted once: bool x float is slow
    advantages = advantages - mean(advantages)
    advantages = advantages / mean(advantages.square()).sqrt().clamp(min=1e-7)
    clipped = ratio.clamp(1 / (1 + args.clip_coef), 1 + args.clip_coef)
    policy_losses = -torch.min(ratio * advantages, clipped * advantages)

    target, old = vs[:-1], batch.values
    value_error = (values[:-1] - target).square()
    clipped_error = (old + (values[:-1] - old).clamp(-args.ppo_clip_value, args.ppo_clip_value) - target).square()
    value_losses = torch.max(value_error, clipped_error)

    if args.exploration_loss == "entropy":
        exploration = -entropy
    else:  # off while its mean is above 30, as in Sample Factory
        exploration = symmetric_kl * (mean(symmetric_kl.detach()) < 30.0)
    loss = mean(policy_losses + args.vf_coef * value_losses + args.ent_coef * exploration)

    with torch.no_grad():
        spread = (target - mean(target)).square()
        samples = {
            "losses/policy_loss": policy_losses,
            "losses/value_loss": value_losses,
            "losses/entropy": entropy,
            "losses/approx_kl": log_ratio.exp() - 1 - log_ratio,  # http://joschu.net/blog/kl-approx.html
            "losses/old_approx_kl": -log_ratio,  # CleanRL's name for the plain estimate
            "losses/clipfrac": (ratio != clipped).float(),
            "losses/value": values[:-1],
            "vtrace/rho_mean": ratio.clamp(max=args.vtrace_rho),
            "vtrace/rho_clipfrac": (ratio > args.vtrace_rho).float(),
        }
        stacked = torch.stack([*samples.values(), value_error, spread])
        *means, error, variance = mean(stacked)
        metrics = dict(zip(samples, means))
        metrics["losses/explained_variance"] = 1 - error / variance.clamp(min=1e-8)
    return loss, metrics


# === Actor ============================================================================================================


class WorkerEnvs:
    """The environments of one worker. `reset` and `step` write a split's rows of the mailbox; from then on the rows
    belong to the caller, until it has filled in the actions and calls `step` for that split again."""

    def __init__(self, args: Args, rows: np.ndarray, mailbox: SimpleNamespace, seed: int):
        """rows: [split, game, seat] -> the row in the mailbox; mailbox: its arrays."""
        random.seed(seed)  # else forked actors would all draw the same numbers from these generators
        np.random.seed(seed)
        torch.manual_seed(seed)
        S, games, seats = rows.shape
        n = games * seats
        self.args, self.mailbox, self.seed, self.n = args, mailbox, seed, n
        self.splits = [make_envs(args, games) for _ in range(S)]
        self.rows = rows.reshape(S, n)
        self.ended = np.zeros((S, n), bool)  # the last step ended an episode: the next one only resets
        self.totals = np.zeros((S, n, len(EPISODE)))  # of the episodes under way

    def reset(self, split: int) -> None:
        """Starts the split's environments."""
        r, mailbox = self.rows[split], self.mailbox
        self.splits[split].shaping = mailbox.shaping[r]
        observation, info = self.splits[split].reset(seed=self.seed + split * self.n)
        self.write(r, observation)
        mailbox.inactive[r] = info.get("inactive", False)
        mailbox.first[r], mailbox.terminated[r], mailbox.reward[r], mailbox.episode[r] = True, False, 0.0, 0.0

    def step(self, split: int) -> None:
        r, envs, mailbox, totals = self.rows[split], self.splits[split], self.mailbox, self.totals[split]
        first = self.ended[split].copy()
        action = mailbox.action[r].reshape(envs.action_space.shape).copy()  # the environment may keep it
        envs.shaping = mailbox.shaping[r]
        observation, reward, terminated, truncated, info = envs.step(action)
        self.write(r, observation)
        raw_reward = info.get("raw_reward", reward)
        if raw_reward.dtype.kind != "f":  # Gymnasium gives all environments' values the type of the first
            raise TypeError(f"raw_reward must be a float, not {raw_reward.dtype}")
        if not np.isfinite(reward).all():
            raise ValueError(f"a reward is not finite: {reward}")
        reward = np.clip(reward * self.args.reward_scale, -self.args.reward_clip, self.args.reward_clip)
        mailbox.reward[r], mailbox.terminated[r], mailbox.first[r] = reward, terminated, first
        mailbox.inactive[r] = info.get("inactive", False)
        self.ended[split] = terminated | truncated
        own = [info.get(name, np.zeros(self.n)) for name in EPISODE[3:]]
        totals += np.stack([raw_reward, reward, np.ones(self.n), *own], axis=-1) * ~first[:, None]
        over = np.asarray(info.get("game_over", self.ended[split]), bool)  # not where a lost life ended it
        mailbox.episode[r] = totals * over[:, None]
        totals[over] = 0

    def write(self, r: np.ndarray, observation) -> None:
        for name, part in by_name(observation).items():
            self.mailbox.obs[name][r] = part

    def close(self) -> None:
        for envs in self.splits:
            envs.close()


def read_splits(pipe) -> bytes:
    """Waits for bytes on one end of an actor's pipe, each the number of a split; none when the other end is closed."""
    try:
        return os.read(pipe.fileno(), 4096)
    except ConnectionResetError:  # closed with a byte of ours unread
        return b""


def write_splits(pipe, splits: bytes) -> None:
    with contextlib.suppress(OSError):  # the other end is closed, as the next read will say
        os.write(pipe.fileno(), splits)


def actor(core: int | None, args: Args, worker: int, seed: int, rows: np.ndarray, mailbox: Mailbox,
          requested: torch.Tensor, pipes: list) -> None:  # fmt: skip
    """An actor. It has a pipe to each policy. A byte that it writes there says that the policy's rows of that split are
    written. A byte that it reads says that their actions are. The end of any pipe is the end of the run, or of that
    policy. What it dies of is on stderr: an exception, a crash in a library, or, if it hung until the timer ran out,
    where it was."""
    seconds = 0.0  # no timer
    if args.actor_timeout:
        seconds = args.actor_timeout + worker / 10  # actors that hang together: one stack after another
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, chain=True)  # chain: after that the signal kills, as always
    for pipe in pipes:
        os.set_inheritable(pipe.fileno(), False)  # a program that an environment starts would keep it open
    if core is not None:
        os.sched_setaffinity(0, {core})  # engines inherit it: both talk twice a tic, cheapest on one core
    os.nice(10)  # where cores are short, inference and learning come first: actors without actions only wait
    torch.set_num_threads(1)
    timer = functools.partial(signal.setitimer, signal.ITIMER_REAL)
    missing = Counter()  # of each split: how many policies have still to reply

    def request(split: int) -> None:  # from here on its rows belong to inference, until all replies name it
        missing[split] = len(pipes)
        requested[worker] += 1
        for pipe in pipes:
            write_splits(pipe, bytes([split]))

    try:
        timer(seconds * args.num_envs_per_worker)
        envs = WorkerEnvs(args, rows, mailbox.arrays(), seed)
        for split in range(args.worker_num_splits):
            timer(seconds * envs.n)
            envs.reset(split)
            timer(0)
            request(split)
        while True:
            replies = [read_splits(pipe) for pipe in multiprocessing.connection.wait(pipes)]
            if b"" in replies:  # the end of a pipe
                break
            for split in b"".join(replies):
                missing[split] -= 1
                if missing[split] == 0:
                    timer(seconds)
                    envs.step(split)
                    timer(0)  # waiting for actions is no hang
                    request(split)
        timer(seconds)
        envs.close()
    except BaseException:  # sys.exit() in an environment, too
        os.write(2, f"actor {worker}:\n{traceback.format_exc()}".encode())  # in one piece: not mixed with another's
        os._exit(1)  # Python would wait for all threads, and a match's may wait for ever for the engine that ended


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
        self.device, self.learned = device, [*agent.parameters(), *agent.buffers()]  # updated in place
        self.current, self.spare = self.frozen_copy(agent), self.frozen_copy(agent)

    def frozen_copy(self, agent: Agent) -> SimpleNamespace:
        frozen = copy.deepcopy(agent).requires_grad_(False)
        for module in frozen.reduced:  # else autocast would cast the weights at each inference
            module.bfloat16()
        frozen.to(self.device)  # packs the core's weights for cuDNN
        tensors = [*frozen.parameters(), *frozen.buffers()]
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

    def __init__(self, args: Args, spaces: Spaces, agent: Agent, device: torch.device, mailbox: Mailbox):
        self.args, self.device = args, device
        rows, slots = max(1, args.num_workers) * args.num_envs_per_worker, slots_needed(args)
        self.size = args.num_envs_per_worker // args.worker_num_splits  # rows in a group
        self.mailbox = mailbox
        self.arrays = self.mailbox.arrays()
        self.rollouts = Rollouts(spaces, args.rollout, slots, agent.state_size, device)
        self.acting = ActingPolicy(agent, device)
        self.full, self.released = queue.SimpleQueue(), queue.SimpleQueue()  # (slots, event): to the learner, and back
        self.bell = os.eventfd(0)  # wakes this thread when slots are free, or the run ends
        self.free_slots = deque(range(slots))
        groups = rows // self.size
        self.t = [0] * groups  # steps so far in the group's FILLING slots, the same for all of its rows
        self.filling: list[np.ndarray | None] = [None] * groups  # its slots; None: handed over, and no new ones yet
        self.state = torch.zeros(rows, agent.state_size, device=device)
        self.staged = room_for(spaces, rows, device=device)  # observations of the rows being served
        if device.type == "cuda":  # pinned, so that copies to the device run beside the host
            for source in self.mailbox.obs.values():
                error = torch.cuda.cudart().cudaHostRegister(source.data_ptr(), source.nbytes, 0)
                torch.cuda.check_error(int(error))
        # The last finished episodes, see EPISODE. Checkpoints keep them: the episodes that end first after a resume are
        # short ones, whose mean could pass for a best return.
        self.episodes: deque[list[float]] = deque(maxlen=100)
        self.counts = Counter()  # rows served, and in how many forward passes; seconds waited, by the learner too
        self.stopping = False

    def release(self, slots: np.ndarray) -> None:
        """The learner gives slots back: LEARNING -> FREE, once the event, recorded after its last copy, has passed."""
        self.released.put((slots, record_event(self.device)))
        os.eventfd_write(self.bell, 1)

    def stop(self) -> None:
        self.stopping = True
        os.eventfd_write(self.bell, 1)

    def unpin(self) -> None:
        """Must come before the mailbox is freed: CUDA would take whatever lies there next for pinned memory."""
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # the error that broke CUDA has been raised, and is shown
                torch.cuda.synchronize(self.device)  # the last copies out of it may be under way
            for source in self.mailbox.obs.values():
                torch.cuda.cudart().cudaHostUnregister(source.data_ptr())

    def run(self, actors: "Actors") -> None:
        """Body of the inference thread. It serves all that wait: the busier it is, the larger its batches. `actors`
        (below the first reading) has the pipes: `requests` are the groups that wait, `reply` gives them their rows
        back, `wait` waits for the next requests, or for the bell."""
        try:
            with own_stream(self.device, self.args.inference_threads, priority=-1):
                while not self.stopping:
                    actors.reply(self.serve(actors.requests))
                    why = "blocked" if actors.requests else "idle"
                    start = time.perf_counter()
                    actors.wait()
                    self.counts[why] += time.perf_counter() - start
        except BaseException as error:
            self.full.put(error)  # the learner raises it

    @torch.inference_mode()
    def serve(self, groups: list[int]) -> list[int]:
        """Hands over the rollouts that are complete, and writes actions for all groups that have slots or get new ones;
        returns these groups. The others wait: the caller tries them again when slots are free."""
        filled = [group for group in groups if self.t[group] == self.args.rollout]
        if filled:  # these rows are stored twice: here as obs[T] of the old slots, below as obs[0] of the new ones
            self.store(filled)
            event = record_event(self.device)
            for group in filled:
                self.full.put((self.filling[group], event))  # FILLING -> FULL
                self.t[group], self.filling[group] = 0, None
        while not self.released.empty():
            slots, event = self.released.get()
            wait_event(event)  # the learner's copy out of these slots
            self.free_slots.extend(slots)
        for group in groups:
            if self.filling[group] is None and len(self.free_slots) >= self.size:  # FREE -> FILLING
                self.filling[group] = np.array([self.free_slots.popleft() for _ in range(self.size)])
        ready = [group for group in groups if self.filling[group] is not None]
        if ready:
            self.act(ready)
        return ready

    def store(self, groups: list[int]):
        """Copies the mailbox rows of the groups to their times and slots. Returns their rows, times and slots on the
        host, and on the device, there with `first`."""
        n, arrays, rollouts = self.size, self.arrays, self.rollouts
        rows = np.concatenate([np.arange(group * n, group * n + n) for group in groups])
        t = np.repeat([self.t[group] for group in groups], n)
        slots = np.concatenate([self.filling[group] for group in groups])
        first = arrays.first[rows]
        rollouts.first[t, slots] = first
        later = t > 0  # at t = 0 reward and flag belong to the slot before, where they are already
        before = (t[later] - 1, slots[later])  # index of the action that they followed
        rollouts.rewards[before] = arrays.reward[rows[later]]
        rollouts.terminated[before] = arrays.terminated[rows[later]]
        index = torch.from_numpy(np.stack([rows, t, slots, first])).to(self.device, non_blocking=True)
        for name, source in self.mailbox.obs.items():
            staged, field = self.staged[name], rollouts.obs[name]
            for i, group in enumerate(groups):
                staged[i * n : i * n + n].copy_(source[group * n : group * n + n], non_blocking=True)
            if self.device.type == "cpu":  # through NumPy: 25 times faster for big rows
                field.numpy()[t, slots] = staged.numpy()[: len(rows)]
            else:
                field[index[1], index[2]] = staged[: len(rows)]
        return (rows, t, slots), index.unbind()

    def act(self, groups: list[int]) -> None:
        (rows, t, slots), (d_rows, d_t, d_slots, d_first) = self.store(groups)
        n, rollouts = len(rows), self.rollouts
        with self.acting.use(self.acting.current) as policy:
            obs = {name: staged[None, :n] for name, staged in self.staged.items()}
            before = self.state[d_rows]
            logits, values, self.state[d_rows] = policy.agent(obs, d_first[None].bool(), before)
            actions, logprobs = sample_actions(logits[0], policy.agent.heads)
            rollouts.actions[d_t, d_slots] = actions
            rollouts.logprobs[d_t, d_slots] = logprobs
            rollouts.values[d_t, d_slots] = values[0]
            begun = np.flatnonzero(t == 0)
            if len(begun):
                d_begun = torch.from_numpy(begun).to(self.device, non_blocking=True)
                rollouts.rnn_state[d_slots[d_begun]] = before[d_begun]
            rollouts.versions[t, slots] = policy.version
            rollouts.inactive[t, slots] = self.arrays.inactive[rows]
        # Waits for the device, so also for its copies out of the mailbox: only now may the actors have their rows back.
        self.arrays.action[rows] = actions.cpu().numpy()
        ended = rows[self.arrays.episode[rows, EPISODE.index("episodic_length")] > 0]
        self.episodes.extend(self.arrays.episode[ended].tolist())
        for group in groups:
            self.t[group] += 1
        self.counts["rows"] += n
        self.counts["forwards"] += 1


# === Learner ==========================================================================================================


class Learner:
    """Takes the FULL slots of one iteration at a time, and improves the policy."""

    def __init__(self, args: Args, agent: Agent, inference: Inference, device: torch.device):
        self.args, self.agent, self.inference, self.device = args, agent, inference, device
        self.parameters = list(agent.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, args.learning_rate, eps=1e-6, fused=True)
        self.full_slots: list[int] = []  # the oldest first
        self.version = 0  # of the policy published last
        self.global_step = 0  # valid transitions received
        self.skipped = 0  # iterations, or steps of one, without a single usable sample
        self.best_return = -float("inf")

    def load(self, checkpoint: dict) -> None:
        """Loads all but the weights, which the agent has already."""
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.version, self.global_step = checkpoint["version"], checkpoint["global_step"]
        self.best_return = checkpoint["best_return"]
        self.inference.episodes.extend(episode for episode in checkpoint["episodes"] if len(episode) == len(EPISODE))
        self.inference.acting.publish(self.version)

    def become(self, donor: dict) -> None:
        """Goes on with another policy's weights. What was sampled before is too old to be learned from. The rows'
        recurrent states stay, until their episodes end."""
        self.agent.load_state_dict(donor["agent"])
        self.optimizer.load_state_dict(donor["optimizer"])
        self.version += self.args.max_policy_lag - 1
        self.inference.episodes.clear()
        self.inference.episodes.extend(donor["episodes"])  # the returns that these weights have reached
        self.publish()

    def collect(self) -> np.ndarray | None:
        """Waits for the slots of an iteration: FULL -> LEARNING. None when the main process says stop, or is dead (STOP
        is below, beside what a signal does). Raises what has ended the inference thread."""
        start, args = time.perf_counter(), self.args
        count = args.num_batches_per_epoch * args.batch_size // args.rollout
        while not STOP.asked_at:
            if len(self.full_slots) >= count:
                self.inference.counts["waited"] += time.perf_counter() - start
                slots, self.full_slots = self.full_slots[:count], self.full_slots[count:]
                return np.array(slots)
            with contextlib.suppress(queue.Empty):
                item = self.inference.full.get(timeout=0.5)
                if isinstance(item, BaseException):
                    raise item
                slots, event = item
                wait_event(event)  # inference's writes to these slots
                self.full_slots.extend(slots)
        return None

    def learning_rate(self) -> float:
        """The learning rate of the next iteration."""
        left = max(0.0, 1 - self.global_step / self.args.total_timesteps) if self.args.anneal_lr else 1.0
        return self.args.learning_rate * left

    def iterate(self, slots: np.ndarray) -> dict[str, float]:
        """Learns from the slots of an iteration, and publishes each policy that it makes. The slots stay LEARNING until
        the last policy is published. Returns the metrics of the last step that had samples. Raises FloatingPointError
        before a non-finite update is made: the weights are still good."""
        args, rollouts, version = self.args, self.inference.rollouts, self.version
        metrics = {}
        valid = ~rollouts.first[1:, slots] & ~rollouts.inactive[:, slots]
        steps, too_old, lag_sum, longest = self.count((version - rollouts.versions[:, slots])[valid])
        self.optimizer.param_groups[0]["lr"] = self.learning_rate()
        self.global_step += steps
        if too_old == steps:  # an iteration without a usable sample is no update
            self.skipped += 1
        else:
            batches = []  # slots of each optimiser step
            if version or not args.normalize_input:  # the first iteration only initialises the inputs' statistics
                for _ in range(args.num_epochs):
                    dealt = slots[torch.randperm(len(slots)).numpy()]
                    batches += np.split(dealt, args.num_batches_per_epoch)
            for i, batch in enumerate(batches):
                if i > 0:
                    self.publish()
                metrics = self.update(self.gather(batch, version)) or metrics
            # New statistics change the policy too: they are published together with the last weights.
            if args.normalize_input:
                self.update_statistics(slots, valid)
            self.publish()
        self.inference.release(slots)  # with `sync` only now are there free ones: to be filled by the newest version
        if metrics:
            metrics = dict(zip(metrics, torch.stack(list(metrics.values())).tolist()))
            metrics["charts/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        if steps:
            metrics |= {"lag/mean": lag_sum / steps, "lag/max": longest, "lag/masked": too_old / steps}
        return metrics

    def count(self, lags: np.ndarray) -> tuple[int, int, int, int]:
        """lags of an iteration's valid samples -> how many, how many too old to be used; the sum and the longest."""
        too_old = np.count_nonzero(lags >= self.args.max_policy_lag)
        return len(lags), too_old, int(lags.sum()), int(lags.max(initial=0))

    def gather(self, slots: np.ndarray, version: int) -> Batch:
        """Copies slots out of the rollouts. version: the learner's when it took the slots; lags are counted from it."""
        r, d_slots = self.inference.rollouts, torch.from_numpy(slots).to(self.device, non_blocking=True)
        obs = {name: field.index_select(1, d_slots) for name, field in r.obs.items()}
        on_device = {name: getattr(r, name).index_select(1, d_slots) for name in ("actions", "logprobs", "values")}
        rnn_state = r.rnn_state.index_select(0, d_slots)
        first, lag = r.first[:, slots], version - r.versions[:, slots]
        restarts = [0, *(np.flatnonzero(first[1:].any(1)) + 1).tolist()]  # here without asking the device
        inactive = r.inactive[:, slots]
        mask = ~first[1:] & ~inactive & (lag < self.args.max_policy_lag)
        host = dict(first=first, rewards=r.rewards[:, slots], terminated=r.terminated[:, slots], mask=mask)
        host["inactive"] = inactive
        moved = {name: torch.from_numpy(array).to(self.device, non_blocking=True) for name, array in host.items()}
        return Batch(obs=obs, **on_device, **moved, rnn_state=rnn_state, restarts=restarts)

    def update(self, batch: Batch) -> dict[str, torch.Tensor]:
        """One optimiser step. Returns its metrics; none where no sample could be used."""
        loss, metrics = appo_loss(self.args, self.agent, batch)
        grad_norm = self.step(loss, batch.mask)
        return {} if grad_norm is None else metrics | {"losses/grad_norm": grad_norm}

    def step(self, loss: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """Descends the loss. Returns the norm of its gradient; None, and no step, where the mask of its samples was
        empty (0/0). Raises FloatingPointError."""
        self.optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.parameters, self.args.max_grad_norm or torch.inf, foreach=True)
        if torch.isfinite(loss + grad_norm):  # waits for the device: nothing broken is published or saved
            self.optimizer.step()
            return grad_norm
        if mask.any():
            raise FloatingPointError(f"the loss ({loss.item()}) or its gradient is not finite: check observations, or "
                                     "try a lower --learning-rate or --max-grad-norm")  # fmt: skip
        self.skipped += 1
        return None

    def update_statistics(self, slots: np.ndarray, valid: np.ndarray) -> None:
        """The inputs' statistics, from a random quarter of the iteration's steps: neighbours hardly differ."""
        times = torch.randperm(len(valid))[: max(1, len(valid) // 4)].tolist()
        d_slots = torch.from_numpy(slots).to(self.device)
        rollouts = self.inference.rollouts.obs.items()
        obs = {name: torch.cat([field[t].index_select(0, d_slots) for t in times]) for name, field in rollouts}
        self.agent.update_normalizers(obs, torch.from_numpy(valid[times].flatten()).to(self.device))

    def publish(self) -> None:
        self.version += 1
        self.inference.acting.publish(self.version)


# A first reading ends here. What follows starts a run, keeps it alive and tidy, and reports what it does.


# === Actors and signals ===============================================================================================


def start_forkserver() -> None:
    """Starts the process that actors and policies are forked from. It imports its modules beside this one, which saves
    a second."""
    mp.get_context("forkserver").set_forkserver_preload(["numpy", "torch", "gymnasium", "tyro", "tqdm", "vizdoom"])
    # Blocked signals are inherited: what a terminal or a batch system sends to all is for the main process alone, from
    # an actor's first moment on. A signal that comes meanwhile is ours when we unblock.
    multiprocessing.resource_tracker.ensure_running()  # now, because its start unblocks the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


class Actors:
    """The actors as a policy knows them: a pipe to each. They come through `link`, the pipe to the main process, and so
    do orders. One thread at a time owns all of this: the main thread while the environments start, then the inference
    thread, and the main thread again when they are to stop."""

    def __init__(self, args: Args, inference: "Inference", link):
        self.args, self.inference, self.link = args, inference, link
        self.selector = selectors.DefaultSelector()
        self.selector.register(inference.bell, selectors.EVENT_READ)
        self.selector.register(link, selectors.EVENT_READ)
        self.requests: list[int] = []  # groups that wait for actions, the oldest first: their rows are inference's
        self.pipes = [None] * args.num_workers  # None: its actor is dead, and the next one's is not here yet
        self.orders = queue.SimpleQueue()  # for the learner

    def start_all(self) -> None:
        """Returns when all groups have asked, or the run is to stop. With `sync` there is one slot for each row: none
        is given away before."""
        while len(self.requests) < self.args.num_workers * self.args.worker_num_splits and not STOP.asked_at:
            self.wait(0.5)

    def wait(self, timeout: float | None = None) -> None:
        """Waits for requests, for slots that become free (the bell), or for the main process."""
        S, told = self.args.worker_num_splits, False
        for key, _ in self.selector.select(timeout):
            worker = key.data
            if key.fileobj is self.link:
                told = True
            elif worker is None:
                os.eventfd_read(self.inference.bell)
            elif splits := read_splits(key.fileobj):
                self.requests += [worker * S + split for split in splits]
            else:
                self.drop(worker)
        if told:  # only now: a new actor may take the place of one that was among the others
            self.hear()

    def hear(self) -> None:
        """What the main process says (`Processes`): the number of a worker, whose new actor's pipe follows; an order
        for the learner; or None, to stop. The end of the main process is that, too."""
        try:
            message = self.link.recv()
            file = multiprocessing.reduction.recv_handle(self.link) if isinstance(message, int) else None
        except (EOFError, OSError):
            message = None
        if message is None:
            STOP.asked_at = time.monotonic()
            self.selector.unregister(self.link)
        elif isinstance(message, int):
            self.drop(message)  # the end of the one before it may not have been seen yet
            self.pipes[message] = multiprocessing.connection.Connection(file)
            self.selector.register(self.pipes[message], selectors.EVENT_READ, message)
        else:
            self.orders.put(message)

    def reply(self, groups: list[int]) -> None:
        """Gives the groups' rows back to their actors."""
        self.requests = [group for group in self.requests if group not in groups]
        for group in groups:
            worker, split = divmod(group, self.args.worker_num_splits)
            write_splits(self.pipes[worker], bytes([split]))

    def drop(self, worker: int) -> None:
        """The actor has ended, and with its pipe all that it had asked for."""
        self.requests = [group for group in self.requests if group // self.args.worker_num_splits != worker]
        if self.pipes[worker]:
            self.selector.unregister(self.pipes[worker])
            self.pipes[worker].close()
            self.pipes[worker] = None

    def stop(self) -> None:
        """Ends all actors: by closing their pipes."""
        for pipe in filter(None, self.pipes):
            pipe.close()


class Processes:
    """All other processes, which the main process starts, hears of and ends: one for each policy, and the actors.

    A policy that dies ends the run. An actor that dies is replaced: its environments and the last transition of each of
    its rows are lost, for all policies. The row's next observation is a `first` one, which makes that transition
    invalid. Earlier steps in its FILLING slots are kept."""

    SHORT_LIFE = 1000  # requests. A worker whose actors die sooner three times in a row ends the run

    def __init__(self, args: Args, spaces: Spaces, mailbox: Mailbox, population: "Population", log):
        self.args, self.spaces, self.mailbox, self.population, self.log = args, spaces, mailbox, population, log
        self.rows = seat_rows(seat_policies(args, population.session), args.num_policies)
        self.context = mp.get_context("forkserver")  # fork is unsafe beside threads and CUDA; spawn costs 100 MB each
        self.policies, self.pipes = [], []  # of each policy: its process, and our end of the pipe to it
        # of each worker: its actor, how many died early in a row, how often this actor has asked
        self.actors, self.short_lives = [None] * args.num_workers, [0] * args.num_workers
        self.requested = torch.zeros(args.num_workers, dtype=torch.int64).share_memory_()
        self.started, self.deaths = False, 0

    def start_all(self) -> None:
        """Returns when every environment has been started, or the user stops the run. Raises UserError."""
        for policy in range(self.args.num_policies):
            self.start_policy(policy)
        for worker in range(self.args.num_workers):
            self.start(worker)
        splits, games, _ = self.rows.shape
        with tqdm(total=splits * games, desc="starting environments", disable=None) as bar:
            started = 0
            while started < splits and not STOP.asked_at:
                self.check()
                time.sleep(0.1)
                started = int(self.requested.clamp(max=self.args.worker_num_splits).sum())
                bar.update(started * games - bar.n)
        self.started = True

    def start_policy(self, policy: int) -> None:
        args = share_of(self.args)
        if args.device == "cuda":
            args.device = f"cuda:{policy % torch.cuda.device_count()}"
        for name in TUNED:
            setattr(args, name, self.population.genes[policy][name])
        ours, theirs = self.context.Pipe()
        folder, mailbox = policy_folder(self.population.folder, policy), self.mailbox.part(policy, args.num_policies)
        arguments = (args, policy, folder, self.spaces, mailbox, theirs)
        started = self.context.Process(target=policy_process, name=f"policy {policy}", args=arguments, daemon=True)
        started.start()
        self.policies.append(started)
        self.pipes.append(ours)

    def start(self, worker: int) -> None:
        args, S, allowed = self.args, self.args.worker_num_splits, sorted(os.sched_getaffinity(0))
        core = allowed[worker % len(allowed)] if args.set_workers_cpu_affinity else None
        # The seed of its first environment; environment i gets seed + i. Below 2**30, so that all fit 31 bits.
        entropy = np.random.SeedSequence((args.seed, self.population.session, worker, self.deaths))
        seed = int(entropy.generate_state(1)[0]) >> 2
        self.requested[worker] = 0
        pairs = [self.context.Pipe() for _ in self.policies]  # the actor's end, the policy's
        rows, pipes = self.rows[worker * S : worker * S + S], [pipe for pipe, _ in pairs]
        arguments = (core, args, worker, seed, rows, self.mailbox, self.requested, pipes)
        started = self.context.Process(target=actor, name=f"actor {worker}", args=arguments, daemon=True)
        started.start()
        self.actors[worker] = started
        for to_policy, (_, pipe) in zip(self.pipes, pairs):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is dead, as `check` will say
                to_policy.send(worker)
                multiprocessing.reduction.send_handle(to_policy, pipe.fileno(), None)
        # As soon as we return, either end of a pipe is open in one process alone: its end is that process's.

    def check(self) -> None:
        """The main process calls this often. It looks at the policies first: when one ends, all actors do. Raises
        UserError."""
        for policy, process in enumerate(self.policies):
            alive = process.is_alive()
            self.read(policy)  # its last words, too
            if not alive and "error" in self.population.reports[policy]:
                raise UserError(f"policy {policy}: {self.population.reports[policy]['error']}")
            if not alive:
                raise UserError(f"policy {policy} died (exit code {process.exitcode}); to go on, give the same command "
                                f"with --experiment {self.args.experiment}")  # fmt: skip
        for worker, process in enumerate(self.actors):
            if not process.is_alive():
                self.replace(worker)

    def read(self, policy: int) -> None:
        """What the policy reports."""
        with contextlib.suppress(EOFError, OSError):  # it has ended
            while self.pipes[policy].poll():
                report = self.pipes[policy].recv()
                if text := report.pop("log", None):
                    self.log(f"policy {policy}: {text}")
                self.population.reports[policy] |= report

    def ask(self, policy: int, donor: Path | None, settings: dict[str, float]) -> None:
        """Waits until the policy has obeyed (below). Raises UserError."""
        report = self.population.reports[policy]
        report["answered"] = False
        with contextlib.suppress(OSError):  # it has died, as `check` will say
            self.pipes[policy].send((donor, settings))
        while not report["answered"]:
            self.check()
            multiprocessing.connection.wait([self.pipes[policy]], timeout=0.5)

    def replace(self, worker: int) -> None:
        """The actor has ended. Raises UserError where another actor is not to be tried."""
        process = self.actors[worker]
        if process.exitcode == 0 and multiprocessing.connection.wait([p.sentinel for p in self.policies], timeout=5):
            return  # it has ended with the pipe of a policy that was about to end, as `check` will say
        if process.exitcode == -signal.SIGALRM:
            how = "hung (its stack is above; a map that is not in the WAD does that, too)"
        elif (process.exitcode or 0) < 0:
            how = f"died of {signal.Signals(-process.exitcode).name}"
        else:
            how = f"ended (exit code {process.exitcode})"
        if not self.started:  # the user's to mend; another actor would end in the same way
            raise UserError(f"while its environments started, actor {worker} {how}")
        # Some policies may have served its last request, and some not: they would wait for each other
        if self.args.sync and self.args.num_policies > 1:
            raise UserError(f"actor {worker} {how}; with --sync several policies end with it")
        self.deaths += 1
        self.short_lives[worker] = self.short_lives[worker] + 1 if self.requested[worker] < self.SHORT_LIFE else 0
        if self.short_lives[worker] == 3:
            raise UserError(f"for the third time in a row, actor {worker} {how}")
        self.log(f"actor {worker} {how}; starting another")
        self.start(worker)

    def stop(self) -> None:
        """Every policy that lives saves and ends, and with the policies' pipes the actors; after a while by force."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + 60  # they end an iteration first
        for policy, process in enumerate(self.policies):
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                self.log(f"policy {policy} did not end, and was killed")
                process.kill()
            self.read(policy)  # its last step
        deadline = time.monotonic() + 5
        for process in filter(None, self.actors):
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()


STOP = SimpleNamespace(asked_at=None, writing=False)  # time of the first signal; policies are being ended, and save


def on_signal(number: int, frame) -> None:
    """What Ctrl-C (SIGINT) and SIGTERM do to a run. The first one asks: `watch` looks at it often, every policy saves
    what is new and ends, the actors with them, and `train` returns 130. One that comes more than a second later ends
    this process at once; the policies, which see that, save and end even so. A sooner one is taken for the
    first one, sent twice by a launcher; while the policies save any is ignored."""
    STOP.asked_at = STOP.asked_at or time.monotonic()
    if time.monotonic() - STOP.asked_at > 1.0 and not STOP.writing:
        os.write(2, b"\nstopped at once\n")
        os._exit(130)


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


# === Checkpoints ======================================================================================================


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
            log(f"warning: {path} cannot be read ({error!r:.200})")
    if paths:  # a fresh start would in time delete them
        raise UserError(f"no checkpoint in {folder} can be read; move them away to start anew")
    return None


def load_weights(agent: Agent, checkpoint: dict, folder: Path, args: Args) -> None:
    """Raises UserError where the weights do not fit."""
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


def policy_folder(folder: Path, policy: int) -> Path:
    return folder / f"policy_{policy:02d}"


def load_agent(folder: Path | str, policy: int = 0, kind: str = "latest", **changes) -> tuple[Agent, Args, int]:
    """A trained policy in an experiment's folder, its Args (set for environments in this process and updated by
    `changes`, such as device="cpu"), and the step it was saved at. kind: "latest" or "best". Raises UserError."""
    in_process = dict(num_workers=1, worker_num_splits=1, batch_size=None, num_batches_per_epoch=1, num_policies=1,
                      policy_settings="{}", with_pbt=False)  # fmt: skip
    folder = Path(folder)
    args = resolve(Args(**saved_args(folder) | changes | in_process))
    folder = policy_folder(folder, policy)
    checkpoint = load_checkpoint(folder / "checkpoints", kind, print)
    if checkpoint is None:
        raise UserError(f"no {kind} checkpoint in {folder / 'checkpoints'}")
    agent = Agent(spaces_of(args), args).to(args.device)
    load_weights(agent, checkpoint, folder, args)
    return agent, args, checkpoint["global_step"]


# === Population =======================================================================================================

# of population-based training: name in --pbt-target-objective -> metric
OBJECTIVES = dict(kills="charts/kills", frags="charts/frags", wins="charts/win") | {"return": "charts/episodic_return"}
TUNED = ("learning_rate", "ent_coef", "vf_coef", "max_grad_norm", "clip_coef", "ppo_clip_value", "gamma")


def default_genes(args: Args) -> dict[str, float]:
    """The numbers in which policies may differ: of Args by their names (Sample Factory's), and shaping coefficients."""
    return {name: getattr(args, name) for name in TUNED} | shaping_of(args.env_id, args.cfg_path)


def starting_genes(args: Args) -> list[dict[str, float]]:
    """The genes of each policy. With `with_pbt` all policies but the first start mutated. Raises UserError."""
    defaults, rng = default_genes(args), random.Random(args.seed)
    genes = [dict(defaults) for _ in range(args.num_policies)]
    if args.with_pbt:
        genes[1:] = [mutate(args, one, defaults, rng) for one in genes[1:]]
    try:
        settings = {int(policy): dict(own) for policy, own in json.loads(args.policy_settings).items()}
    except (ValueError, TypeError, AttributeError):
        raise UserError(f'--policy-settings {args.policy_settings} is not like {{"1": {{"vf_coef": 0.2}}}}') from None
    for policy, own in settings.items():
        for name, value in own.items():
            high = AT_MOST.get(name, np.inf)
            if policy not in range(args.num_policies) or name not in defaults:
                raise UserError(f"--policy-settings: there is no {name} of policy {policy}; policies 0 to "
                                f"{args.num_policies - 1} may differ in {', '.join(defaults)}")  # fmt: skip
            if not isinstance(value, int | float) or name in TUNED and not 0 <= value <= high:
                raise UserError(f"--policy-settings: {name} {value} is out of range: 0 to {high}")
            genes[policy][name] = value
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
    """Population-based training (Jaderberg et al. 2017; Sample Factory's rules): each policy's numbers (its *genes*),
    what it has reported last, and the exchanges. What a resumed run needs is in population.json."""

    def __init__(self, args: Args, folder: Path, mailbox: Mailbox):
        self.args, self.folder, self.mailbox = args, folder, mailbox
        self.genes, self.defaults = starting_genes(args), default_genes(args)
        self.session, self.exchanged, steps = 0, 0, [0] * args.num_policies  # exchanged: at which step
        if (path := folder / "population.json").exists():
            saved = json.loads(path.read_text())
            self.session, self.exchanged, steps = saved["session"] + 1, saved["exchanged"], saved["steps"]
            for genes, before in zip(self.genes, saved["genes"]):
                for name, value in self.defaults.items():  # a flag that was typed anew is for all policies
                    genes[name] = before[name] if saved["defaults"].get(name) == value else value
        self.reports = [dict(step=step, objective=None) for step in steps]
        self.rng = random.Random(f"{args.seed} {self.session}")
        for policy in range(args.num_policies):
            self.write_shaping(policy)

    def save(self) -> None:
        path = self.folder / "population.tmp"
        content = {name: getattr(self, name) for name in ("session", "exchanged", "defaults", "genes")}
        content["steps"] = [report["step"] for report in self.reports]
        path.write_text(json.dumps(content, indent=2))
        os.replace(path, self.folder / "population.json")

    def step(self) -> float:
        """Mean over the policies."""
        return statistics.mean(report["step"] for report in self.reports)

    def write_shaping(self, policy: int) -> None:
        """Every agent of the policy reads it when its next episode begins."""
        values = [self.genes[policy][name] for name in shaping_of(self.args.env_id, self.args.cfg_path)]
        self.mailbox.part(policy, self.args.num_policies).shaping[:] = torch.tensor(values, dtype=torch.float64)

    def write(self, writer, policy: int, **more: float) -> None:
        """To TensorBoard: the genes of a policy from now on, and more numbers."""
        for name, value in (self.genes[policy] | more).items():
            writer.add_scalar(f"pbt/{name}/{policy}", value, self.reports[policy]["step"])

    def exchange(self, processes: Processes, writer) -> None:
        """When all policies have made enough steps since the last exchange: the best go on as they are; each of the
        worst becomes a mutated copy of one of the best, if the gap is large enough; all others are mutated. Policy 0
        can be replaced, but never mutates."""
        args, objectives = self.args, [report["objective"] for report in self.reports]
        made = min(report["step"] for report in self.reports)
        if None in objectives or made < max(args.pbt_start_mutation, self.exchanged + args.pbt_period_env_steps):
            return
        order = sorted(range(args.num_policies), key=lambda policy: objectives[policy], reverse=True)
        k = min(math.ceil(args.pbt_replace_fraction * len(order)), len(order) // 2)
        best, worst = order[:k], order[len(order) - k :]
        for policy in range(args.num_policies):
            if STOP.asked_at:
                return
            donor, mine = policy, objectives[policy]  # donor: of its weights and genes
            if policy in worst:
                better = self.rng.choice(best)
                gap, size = objectives[better] - mine, max(abs(objectives[better]), abs(mine))
                if gap > args.pbt_replace_reward_gap * size:
                    donor = better
            genes = self.genes[donor]
            if policy not in best and policy != 0:
                genes = mutate(args, genes, self.defaults, self.rng)
            kind = "kept" if genes == self.genes[policy] else "mutated"
            place = None
            if donor != policy:
                kind = f"replaced by policy {donor} ({objectives[donor]:.2f})"
                processes.ask(donor, None, {})  # it saves
                place = policy_folder(self.folder, donor) / "checkpoints"
            if kind != "kept":
                processes.ask(policy, place, {name: genes[name] for name in TUNED})
                self.genes[policy] = dict(genes)  # not before: what is saved when the run ends here must be true
                self.write_shaping(policy)
            self.save()
            self.write(writer, policy, weights_of=donor, objective=mine)
            step, name = self.reports[policy]["step"], args.pbt_target_objective
            processes.log(f"step {step:,}: policy {policy} ({name} {mine:.2f}) is {kind}")
        self.exchanged = made
        self.save()


# === Main =============================================================================================================


# The ranges of numeric flags; what is not named here is free
AT_LEAST = {
    0: ("seed", "train_for_seconds", "save_every_sec", "actor_timeout", "max_batches_ahead", "gamma",
        "learning_rate", "vtrace_rho", "vtrace_c", "vtrace_lambda", "clip_coef", "ppo_clip_value", "vf_coef",
        "ent_coef", "max_grad_norm", "reward_clip", "pbt_replace_fraction", "pbt_replace_reward_gap",
        "pbt_mutation_rate"),
    1: ("frameskip", "total_timesteps", "num_workers", "num_envs_per_worker", "worker_num_splits", "rollout",
        "inference_threads", "learner_threads", "batch_size", "num_batches_per_epoch", "num_epochs", "max_policy_lag",
        "hidden_size", "num_policies", "pbt_start_mutation", "pbt_period_env_steps", "pbt_perturb_min",
        "pbt_perturb_max"),
    2: ("keep_checkpoints",),  # a donor that saves meanwhile must not delete what its copy reads
}  # fmt: skip
# A split is one byte; appo_loss bounds the ratio by 20 before V-trace does; no timer can be infinite;
# a process can be given 256 file descriptors, and an actor needs one for each policy
AT_MOST = dict(seed=2**31 - 1, worker_num_splits=255, vtrace_rho=20, vtrace_c=20, actor_timeout=10**6, gamma=1,
               vtrace_lambda=1, num_policies=200, pbt_replace_fraction=0.5, pbt_mutation_rate=1)  # fmt: skip
BATCH_SHARE, SMALLEST_BATCH = 2, 1024  # default batch: rows * rollout / BATCH_SHARE samples, at least SMALLEST_BATCH
# Flags of one session, not of the experiment; and what a resumed run may not change
SESSION, ENV = ("train_for_seconds",), ("env_id", "cfg_path", "scenario_dir")
FIXED = (*ENV, "num_policies", "policy_settings", "rnn_type", "hidden_size", "normalize_input")


def resolve(args: Args) -> Args:
    """A copy of `args` in which what depends on the machine (None, "auto") is filled in. Raises UserError."""
    args = copy.copy(args)
    for low, names in AT_LEAST.items():
        for name in names:
            value, high = getattr(args, name), AT_MOST.get(name, np.inf)
            if value is not None and not low <= value <= high:
                raise UserError(f"--{name.replace('_', '-')} {value} is out of range: {low} to {high}")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:  # not a device, not there, or not for this build of PyTorch
        raise UserError(f"--device {args.device}: {str(error).splitlines()[0]}") from None
    cpu = torch.device(args.device).type == "cpu"
    if args.precision == "auto":
        if cpu:
            capable = any(flag in Path("/proc/cpuinfo").read_text() for flag in ("avx512_bf16", "amx_bf16"))
        else:
            with torch.cuda.device(args.device):
                capable = torch.cuda.is_bf16_supported(including_emulation=False)
        args.precision = "bfloat16" if capable else "float32"
    cores, quota = len(os.sched_getaffinity(0)), np.inf
    with contextlib.suppress(OSError, ValueError):  # no limit of this container: no such file, or "max" for a number
        quota = np.divide(*map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split()))
    n = max(1, int(min(cores, quota)))
    if quota < cores:  # this machine's other containers see the same cores, and would pin to them too
        args.set_workers_cpu_affinity = False
    args.num_workers = n if args.num_workers is None else args.num_workers
    if args.worker_num_splits is None:
        args.worker_num_splits = 1 if cpu or args.num_envs_per_worker % 2 else 2
    # On a CPU learning costs two to three times inference; with --sync the two take turns and use every core.
    n = max(1, n // args.num_policies)
    learner_share, inference_share = (1, 1) if args.sync else (2, 4)
    args.learner_threads = args.learner_threads or (max(1, n // learner_share) if cpu else 1)
    args.inference_threads = args.inference_threads or (max(1, n // inference_share) if cpu else 1)
    if args.num_envs_per_worker % args.worker_num_splits:
        raise UserError(f"--num-envs-per-worker {args.num_envs_per_worker} is not divisible by "
                        f"--worker-num-splits {args.worker_num_splits}")  # fmt: skip
    P, seats = args.num_policies, seats_of(args)
    if args.num_envs_per_worker // args.worker_num_splits * seats % P:
        raise UserError(f"{args.num_envs_per_worker // args.worker_num_splits} environments in a split x {seats} "
                        f"agents are not divisible by --num-policies {P}")  # fmt: skip
    if args.with_pbt and P == 1:
        raise UserError("--with-pbt needs more than one policy: --num-policies")
    if args.with_pbt and args.pbt_start_mutation >= args.total_timesteps:
        raise UserError(f"--with-pbt: the run ends after --total-timesteps {args.total_timesteps:,}, before the first "
                        f"exchange at --pbt-start-mutation {args.pbt_start_mutation:,}")  # fmt: skip
    scenario = Scenario("", (), ()) if args.cfg_path else SCENARIOS.get(args.env_id, Scenario("", (), ()))
    if args.pbt_target_objective is None:
        args.pbt_target_objective = "wins" if scenario.agents > 1 else "frags" if scenario.match else "return"
    if scenario.wad and args.pbt_target_objective in (("kills",) if scenario.match else ("frags", "wins")):
        raise UserError(f"--pbt-target-objective {args.pbt_target_objective}: {args.env_id} has none")
    starting_genes(args)  # raises for wrong --policy-settings: before cfg.json is written
    rows = args.num_workers * args.num_envs_per_worker * seats // P  # of each policy
    batches = args.num_batches_per_epoch
    if args.batch_size is None and args.sync:  # one rollout of every row
        args.batch_size = max(1, rows // batches) * args.rollout
    elif args.batch_size is None:
        power = 2 ** round(np.log2(rows * args.rollout / BATCH_SHARE / batches))
        args.batch_size = max(1, min(8192, max(SMALLEST_BATCH, power)) // args.rollout) * args.rollout
    if args.batch_size % args.rollout:
        raise UserError(f"--batch-size {args.batch_size} is not a multiple of --rollout {args.rollout}")
    if args.sync and batches * args.batch_size != rows * args.rollout:
        raise UserError(f"--sync needs one rollout of every row: {batches} batches of "
                        f"{args.batch_size} samples are not {rows} rows x {args.rollout} steps; --batch-size None "
                        "finds the size, if --num-batches-per-epoch divides the rows")  # fmt: skip
    return args


def share_of(args: Args) -> Args:
    """Args as a policy sees them: as if each of its rows were an environment of its own."""
    args = copy.copy(args)
    args.num_envs_per_worker = args.num_envs_per_worker * seats_of(args) // args.num_policies
    return args


def check_memory(args: Args, spaces: Spaces, state_size: int) -> None:
    """Raises UserError where mailbox, engines or rollouts have no room: else CUDA, or the kernel, would end the run.
    args: the share of one policy"""
    device, rows = torch.device(args.device), max(1, args.num_workers) * args.num_envs_per_worker
    shared = args.num_policies * rows * (mebibytes(Mailbox(spaces, 1, 0)) + ENV_SHARED_MEMORY / 2**20)
    slots = slots_needed(args) + args.batch_size // args.rollout  # and a batch that is gathered from them
    private = slots * mebibytes(Rollouts(spaces, args.rollout, 1, state_size, torch.device("cpu")))
    policies = args.num_policies
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] / 2**20
        if args.device == "cuda":  # see Processes.start_policy
            policies = -(-policies // torch.cuda.device_count())
    else:
        free = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) / 2**10
        with contextlib.suppress(OSError, ValueError):  # no limit of this container: no such file, or "max"
            free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()) / 2**20)
    if shared > (room := shutil.disk_usage("/dev/shm").free / 2**20):
        raise UserError(f"/dev/shm has {room:,.0f} MiB free, {shared:,.0f} MiB are needed: use fewer environments or a "
                        "larger /dev/shm (docker run --shm-size=2g)")  # fmt: skip
    private = policies * (private + 512)  # a process of its own, the network, its copies
    if private > 0.8 * free:
        raise UserError(f"{policies} policies with {slots:,} slots of rollouts each need {private:,.0f} MiB of "
                        f"{free:,.0f} that are free, a fifth of which must remain: use fewer policies, a smaller "
                        "--batch-size or fewer environments")  # fmt: skip


def parse_args() -> tuple[Args, Path]:
    """Args as typed, and the run's folder. An existing experiment keeps its saved flags, except for flags typed
    now. Raises UserError."""
    args = tyro.cli(Args)
    fresh = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{int(time.time())}_{os.getpid()}"
    experiment = args.experiment or fresh
    folder = Path(args.train_dir) / experiment
    if Path(os.path.abspath(args.train_dir)) not in Path(os.path.abspath(folder)).parents:
        raise UserError(f"--experiment {experiment} is not a folder below {args.train_dir}")
    if (folder / "cfg.json").exists():
        saved, file = saved_args(folder), Path(__file__).name
        args = tyro.cli(Args, default=Args(**saved))
        made_by = Path(json.loads((folder / "cfg.json").read_text()).get("file", file)).name
        changes = {"file": (made_by, file)} if made_by != file else {}
        for name, value in asdict(args).items():
            if name not in SESSION and value != saved.get(name, "none"):
                changes[name] = saved.get(name, "none"), value
        for name, (before, now) in changes.items():
            if name in FIXED:
                raise UserError(f"{folder} holds another run, of {made_by}: {name} {before} -> {now}; "
                                "rename --experiment")  # fmt: skip
            print(f"override: {name} {before} -> {now}")
    args.experiment = experiment
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


class Reporter:
    """A policy's TensorBoard, and its reports. Every rate is over the window since the last report."""

    SECONDS = 5  # between two reports

    def __init__(self, args: Args, learner: Learner, folder: Path, link):
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self.args, self.learner, self.inference, self.link = args, learner, learner.inference, link
        self.writer = SummaryWriter(str(folder), flush_secs=10, purge_step=learner.global_step + 1)
        self.writer.add_text("args", json.dumps(asdict(args), indent=2))
        self.metrics, self.last = {}, self.now()

    def now(self) -> Counter:
        counts = dict(time=time.monotonic(), step=self.learner.global_step, version=self.learner.version)
        return Counter(self.inference.counts, **counts)

    def update(self, metrics: dict[str, float]) -> float:
        """Called after every iteration, with its metrics. Every `SECONDS` it reports, and returns the objective, a
        mean of the last 100 episodes; otherwise, and before there are so many, -inf."""
        self.metrics |= metrics
        step = self.learner.global_step
        now = self.now()
        change = now - self.last
        if (seconds := change["time"]) < self.SECONDS:
            return -np.inf
        self.last = now
        fps = change["step"] * self.args.frameskip / seconds
        scalars = self.metrics | {
            "charts/SPS": change["step"] / seconds,
            "charts/FPS": fps,
            "stats/learner_wait": change["waited"] / seconds,  # shares of the time: the learner waits for full slots,
            "stats/inference_idle": change["idle"] / seconds,  # inference waits for requests,
            "stats/inference_blocked": change["blocked"] / seconds,  # or has requests and waits for free slots
            "stats/inference_batch": change["rows"] / max(1, change["forwards"]),  # rows served together
        }
        if episodes := list(self.inference.episodes):
            scalars |= zip((f"charts/{name}" for name in EPISODE), np.mean(episodes, axis=0).tolist())
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)
        if change["blocked"] >= change["waited"]:
            bottleneck = "learner"
        elif change["idle"] > 0.5 * (seconds - change["blocked"]):
            bottleneck = "environments"
        else:
            bottleneck = "inference"
        objective = scalars.get(OBJECTIVES[self.args.pbt_target_objective])
        score = f"return {scalars['charts/episodic_return']:.2f}, " if episodes else ""
        text = f"{score}{fps:,.0f} frames/s, bottleneck: {bottleneck}, lag {self.metrics.get('lag/mean', 0):.1f}"
        tell(self.link, step=step, objective=objective, text=text)
        if not change["version"]:
            text = f"warning: no update in {seconds:.0f} s: no sample could be used (lag/masked: --max-policy-lag)"
            tell(self.link, log=text)
        return objective if len(episodes) >= 100 else -np.inf


def learn(args: Args, checkpoints: Path, learner: Learner, reporter: Reporter, orders: queue.SimpleQueue) -> None:
    """The learner's loop. Saves what was learned, at the end and before an error that leaves the weights good;
    not after an error that nobody foresaw."""
    saved, now = learner.version, time.monotonic()  # saved: the version of the last checkpoint
    saved_at = best_at = now  # no best in the first 30 s: episodes that end first are short ones
    good = True  # the weights
    try:
        while (slots := learner.collect()) is not None:
            metrics = learner.iterate(slots)
            now = time.monotonic()
            if (score := reporter.update(metrics)) > learner.best_return and now - best_at >= 30:
                learner.best_return, best_at = score, now
                save_checkpoint(checkpoints / "best.pth", learner)
            if now - saved_at >= args.save_every_sec:
                save_latest(checkpoints, learner, args.keep_checkpoints)
                saved, saved_at = learner.version, now
            while not orders.empty():
                obey(learner, checkpoints, reporter.link, *orders.get())
    except BaseException as error:
        good = isinstance(error, (FloatingPointError, UserError))
        raise
    finally:
        if good and learner.version > saved:  # else there is nothing new
            save_latest(checkpoints, learner, args.keep_checkpoints)
        reporter.writer.close()


def tell(link, **report) -> None:
    with contextlib.suppress(OSError):  # the main process is dead, as `Actors.hear` will find
        link.send(report)


def obey(learner: Learner, checkpoints: Path, link, donor: Path | None, settings: dict[str, float]) -> None:
    """An exchange makes a policy go on with the weights of another one, if `donor` names its checkpoints,
    and with these numbers of Args; and to save, in any case."""
    if donor is not None:
        learner.become(load_checkpoint(donor, "latest", lambda text: tell(link, log=text)))
    for name, value in settings.items():
        setattr(learner.args, name, value)
    save_latest(checkpoints, learner, learner.args.keep_checkpoints)
    tell(link, answered=True)


def train_policy(args: Args, policy: int, folder: Path, spaces: Spaces, mailbox: Mailbox, link) -> None:
    """One policy's inference thread and learner, as in the main process of appo_doom.py. Ends when the main process
    says stop, or is dead. link: the pipe to it."""
    device, checkpoints = torch.device(args.device), folder / "checkpoints"
    if device.type == "cpu":
        # glibc keeps freed memory: page faults of fresh activations cost 10 to 20 % of an update on a CPU
        for option, value in ((-1, 2**31 - 1), (-4, 0), (-8, 1)):  # M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX
            ctypes.CDLL(None).mallopt(option, value)
    else:
        torch.cuda.set_device(device.index or 0)
        torch.backends.cudnn.allow_tf32 = False  # float32 means it: mu and pi must agree at lag 0
    torch.manual_seed(args.seed + policy)
    agent = Agent(spaces, args).to(device)
    inference = Inference(args, spaces, agent, device, mailbox)
    learner = Learner(args, agent, inference, device)

    def log(text: str) -> None:
        tell(link, log=text)

    if checkpoint := load_checkpoint(checkpoints, "latest", log):
        load_weights(agent, checkpoint, folder, args)
        learner.load(checkpoint)
        with contextlib.suppress(UserError):  # after a crash best.pth may be newer; a damaged one does not matter
            learner.best_return = (load_checkpoint(checkpoints, "best", log) or checkpoint)["best_return"]
        torch.manual_seed(args.seed + policy + learner.version)
        log(f"resuming at step {learner.global_step:,}; learning rate {learner.learning_rate():.3g}")
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # all of the above ran on the default stream; the threads have their own
    actors = Actors(args, inference, link)
    with sampling(inference, actors), own_stream(device, args.learner_threads):
        learn(args, checkpoints, learner, Reporter(args, learner, folder, link), actors.orders)
    tell(link, step=learner.global_step)


def policy_process(args: Args, policy: int, folder: Path, spaces: Spaces, mailbox: Mailbox, link) -> None:
    """Body of a policy's process. What it dies of, the main process tells or, if nobody foresaw it, is on stderr."""
    faulthandler.enable()
    try:
        with open_log(folder):  # until it has saved: after a second Ctrl-C the next run may come sooner
            train_policy(args, policy, folder, spaces, mailbox, link)
    except UserError as error:
        tell(link, error=str(error))
        sys.exit(2)
    except FloatingPointError as error:
        tell(link, error=f"{error}; what was learned before is saved")
        sys.exit(1)


def watch(args: Args, population: Population, processes: Processes, writer, log) -> None:
    """The main process's loop: looks after all others, shows what policies report, and holds the exchanges."""
    started, total = time.monotonic(), args.total_timesteps
    with tqdm(total=total, initial=int(population.step()), desc=args.env_id[:8], dynamic_ncols=True,
              bar_format="{desc} {percentage:.0f}%{bar}{remaining}{postfix}", disable=None) as bar:  # fmt: skip
        while not STOP.asked_at and population.step() < total:
            if args.train_for_seconds is not None and time.monotonic() - started >= args.train_for_seconds:
                break
            multiprocessing.connection.wait(processes.pipes, timeout=0.5)
            processes.check()
            if args.with_pbt:
                population.exchange(processes, writer)
            bar.update(int(population.step()) - bar.n)
            for policy, report in enumerate(population.reports):
                if text := report.pop("text", None):
                    bar.set_postfix_str(f"policy {policy}: {text}")
                    log(f"policy {policy}, step {report['step']:,}: {text}", bar.disable)


def train(typed: Args, folder: Path) -> int:
    """`typed` are the args before `resolve`. Returns the exit code: 0, or 130 when the run was stopped by a signal."""
    from torch.utils.tensorboard import SummaryWriter  # slow to import

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # also of the policies: a pipe to each actor
    args = resolve(typed)
    spaces, share = spaces_of(args), share_of(args)
    rows = args.num_workers * share.num_envs_per_worker  # of each policy
    with torch.device("meta"):
        agent = Agent(spaces, args)
    check_memory(share, spaces, agent.state_size)
    log_file = open_log(folder)  # nothing was written before
    start_forkserver()

    def log(text: str, show: bool = True) -> None:
        log_file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        if show:
            tqdm.write(text)

    mailbox = Mailbox(spaces, args.num_policies * rows, len(shaping_of(args.env_id, args.cfg_path)))
    for field in fields_of(mailbox):
        field.share_memory_()
    population = Population(args, folder, mailbox)
    if (step := population.step()) >= args.total_timesteps:
        log(f"{folder} has its {step:,.0f} steps already; raise --total-timesteps to go on")
        return 0
    # A resumed run starts from what was typed and resolves again, as it may be on another machine; but for the batch,
    # which decides what is learned, and with `sync` the workers, which decide the batch.
    kept = dict(batch_size=args.batch_size) | (dict(num_workers=args.num_workers) if args.sync else {})
    packages = {found.name: found.version for found in importlib.metadata.distributions()}
    cfg = dict(file=os.path.abspath(__file__), command=sys.argv, args=asdict(typed) | kept, resolved=asdict(args),
               packages=packages)  # fmt: skip
    (folder / "cfg.tmp").write_text(json.dumps(cfg, indent=2))
    os.replace(folder / "cfg.tmp", folder / "cfg.json")
    population.save()
    B, steps = args.batch_size // args.rollout, args.total_timesteps
    # When the learner is the bottleneck, all slots but those LEARNING are ahead of a new one
    expected_lag = 0.0 if args.sync else (slots_needed(share) / B - args.num_batches_per_epoch) * args.num_epochs
    for line in (
        f"{args.env_id}: {args.num_policies} policies of {sum(p.numel() for p in agent.parameters()):,} parameters on"
        f" {args.device}, encoder in {args.precision}, {args.learner_threads} + {args.inference_threads} threads to"
        " learn and act",
        f"{args.num_workers} workers x {args.num_envs_per_worker} environments of {seats_of(args)} agents in"
        f" {args.worker_num_splits} splits; each policy has {rows} rows,"
        f" {args.num_batches_per_epoch * args.batch_size:,} samples an iteration, {args.batch_size:,}"
        f" ({B} rollouts of {args.rollout} steps) an optimiser step; expected lag up to {expected_lag:.1f} versions",
        f"{mebibytes(mailbox):.1f} MiB of shared memory beside the engines' own,"
        f" {slots_needed(share)} slots of rollouts for each policy",
        f"up to {steps:,} steps of each policy = {steps * args.frameskip:,} frames; files in {folder}",
    ):
        log(line)
    if expected_lag >= args.max_policy_lag:
        log(f"warning: samples with a lag of {args.max_policy_lag} (--max-policy-lag) are not learned from; a larger "
            "--batch-size has less lag")  # fmt: skip
    writer = SummaryWriter(str(folder), flush_secs=10)
    writer.add_text("args", json.dumps(asdict(args), indent=2))
    for policy in range(args.num_policies):
        population.write(writer, policy, weights_of=policy)
    processes = Processes(args, spaces, mailbox, population, log)
    try:
        processes.start_all()
        watch(args, population, processes, writer, log)
    finally:
        STOP.writing = True  # the policies are: from here on a second signal changes nothing
        processes.stop()
        population.save()
        writer.close()
    made = ", ".join(f"{report['step']:,}" for report in population.reports)
    log(f"{'stopped' if STOP.asked_at else 'done'}: {made} steps, {processes.deaths} actors replaced")
    return 130 if STOP.asked_at else 0


def main() -> int:
    try:
        if sys.platform != "linux":
            raise UserError(f"this needs Linux (/proc, /dev/shm, eventfd); {sys.platform} has no such things")
        args, folder = parse_args()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
        return train(args, folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the run has begun: there is nothing to save
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    code = main()
    gc.freeze()  # else Python, before it ends, searches all that the imports made for cycles: 0.8 s
    sys.exit(code)
