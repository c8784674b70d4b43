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
#     "vizdoom==1.3.2",
#     "envpool-assets==0.3.0",
# ]
# ///
# appo_pbt_doom.py $Id$
"""Asynchronous PPO with V-trace for several policies on ViZDoom: populations, bots, self-play.

    python appo_pbt_doom.py --env-id duel --num-policies 4 --with-pbt --total-timesteps 20000000
    python appo_pbt_doom.py --env-id MODULE    # a PettingZoo game, such as pettingzoo.butterfly.cooperative_pong_v6
    python evaluate.py train_dir/NAME    # plays the trained policies, all against all

This file is an edit of appo_doom.py. What differs:

- Several policies train in one process. Each has an acting copy with rollouts (`PolicyInference`), a `Learner` and its
  own report. Rows, blocks, iterations and steps are counted per policy. A checkpoint contains all policies.
- With `--device cuda`, policy p uses GPU p modulo the number of GPUs. The learners of a device share one thread and
  take turns.
- Games have PettingZoo's parallel API (`make_game`). A Doom game, alone or as a match of several engines (`DoomMatch`),
  needs vizdoom, and its engines print nothing. A PettingZoo game may have any observations, rewards and actions that
  appo_gym.py supports (`arrays_of`); its large images are made smaller.
- `seat_rows` decides which policy plays in which seat.
- `DoomEnv` has the shaping and the scores of matches, and there is a third flag, `inactive`.
- The progress bar and the log show the objective.
- Population-based training (`Population`) also changes reward coefficients, and replaces a policy that diverges
  (`iterate_all`).

     actor process w = 0..W-1  (CPU only)              main process (owns the accelerators)
     +-------------------------------+      request       +------------------------------------------+
     | step a group of games, write  | -----------------> | inference thread                         |
     | obs, reward, ... of all       |                    |   for each policy: copy its rows of all  |
     | agents into the mailbox rows  |                    |   waiting groups into its rollouts,      |
     | of their policies             | <----------------- |   forward, sample, write actions into    |
     |                               |       reply        |   the mailbox                            |
     +-------------------------------+                    +------------------------------------------+
                                                             | full blocks               ^ free blocks
                                                          +------------------------------------------+
                                                          | a learner for each policy                |
                                                          |   V-trace, PPO steps: each makes a new   |
                                                          |   version of the policy that acts        |
                                                          | between iterations: exchanges            |
                                                          +------------------------------------------+
     block:  FREE -> FILLING (by one group) -> FULL -> LEARNING -> FREE      exactly one owner at any time

Terms:

    worker       an actor process, which steps its environments in `worker_num_splits` splits
    match        a game of several engines, one for each player
    row          the endless stream of experience of one agent
    group        the rows that request actions together: those of one split of a worker, equally many for each policy
    slot         room for one rollout, T steps of one row
    block        one slot for each row of a group, in the rollouts of all policies
    iteration    the learners take blocks for `num_batches_per_epoch` batches (at least one block); each makes
                 `num_epochs` passes over its rollouts; then the blocks are returned
    batch        some of an iteration's rollouts, about `batch_size` samples, for one optimizer step
    step         one decision of an agent
    frame        one tic of the engine (frames = steps x frameskip)
    version      the number of a policy, which every optimizer step of its learner increases
    lag          of a sample: the newest version minus the version that chose its action

One convention governs time. Environments reset on the step AFTER an episode ends (Gymnasium's NEXT_STEP): the step that
ends an episode returns its last observation, the action chosen there is ignored, and the next observation is the first
of the next episode. Three flags are therefore enough:

    first[t]       obs[t] is the first of an episode: the recurrent state is zeroed before obs[t] enters it
    terminated[t]  action t ended the episode for good: the discount of step t is gamma * (1 - terminated[t])
    inactive[t]    action t does nothing, because the agent waits for its return to a match: step t is excluded from the
                   losses and their metrics, the input statistics and the step count, but cuts neither the trace (where
                   its ratio is 1 and its reward counts) nor the recurrent state

A transition t -> t+1 is valid iff not first[t+1]. An invalid one (the ignored action) cuts the trace and is excluded
from every loss, mean and step count. A time limit needs no flag of its own: its last step bootstraps from the value of
the true last observation.
"""

import signal
import sys

if __name__ == "__main__":  # until `handle_signals`, Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print("importing torch ...", file=sys.stderr)

import concurrent.futures
import contextlib
import copy
import ctypes
import faulthandler
import fcntl
import functools
import importlib
import io
import json
import math
import os
import queue
import random
import re
import selectors
import shlex
import shutil
import socket
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
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

with contextlib.suppress(ImportError):  # PettingZoo games need neither
    import envpool_assets
    import vizdoom

# === Args =============================================================================================================


class UserError(Exception):
    """An error that the user can fix. Its message is printed without a traceback."""


def num_cores() -> int:
    """Returns the number of cores that this process may use, at most a container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # without a quota the file is missing, or says "max"
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores


@dataclass
class Args:
    """Asynchronous PPO with V-trace for several policies on ViZDoom."""

    # --- run
    env_id: str = "basic"
    """matches: duel, deathmatch (4 agents and 4 bots); against bots: duel_bots, deathmatch_bots; single-player: basic,
    my_way_home, deadly_corridor, defend_the_center, defend_the_line, health_gathering, health_gathering_supreme,
    battle, battle2, benchmark (battle without measurements and shaping, with 9 flat actions); or the module of a
    PettingZoo game, such as pettingzoo.butterfly.cooperative_pong_v6"""
    cfg_path: str | None = None  # path of your own ViZDoom scenario (.cfg), used instead of `env_id`
    match_wad: str | None = None  # file with the map of matches. Default: ViZDoom's cig.wad
    frameskip: int = 4  # engine tics (frames) per step of an agent; always 1 in PettingZoo
    reward_scale: float = 1.0  # factor of all rewards, in addition to the scenario's own scale
    reward_clip: float = 10.0  # clip of the scaled rewards, to +- this; inf: no clipping
    seed: int = 1  # seed of the network, the action sampling and the environments
    total_timesteps: int = 1_000_000  # stop when the policies average this many steps (frames / frameskip)
    train_for_seconds: float = np.inf  # seconds of training, from this session's first iteration on
    device: str | None = None
    """cpu, cuda (all GPUs), or cuda:1 (the second GPU). Default: cuda if there is a GPU"""
    cuda_graphs: bool = False
    """record acting and the gradient computation as CUDA graphs (one per batch size), which take one launch each;
    ignored on a CPU"""
    precision: Literal["float32", "bfloat16"] | None = None
    """number type of the encoder and, on a CPU, of the recurrent core. Default: bfloat16 if the device supports it"""
    experiment: str | None = None  # the run's folder in train_dir, resumed if it exists. Default: a new one
    train_dir: str = "train_dir"  # folder of all experiments
    save_every_sec: float = 120.0  # seconds between checkpoints
    keep_checkpoints: int = 2  # number of recent checkpoints to keep; 0: all

    # --- sampling
    num_workers: int | None = None
    """number of actor processes. Default: one per core. 0: one actor thread, for debugging; implies --sync"""
    num_envs_per_worker: int = 16  # games per worker
    worker_num_splits: int | None = None
    """number of parts into which a worker's environments are split: one is stepped while the others wait for actions.
    Default: 2 with CUDA if they can be halved, else 1, because on a CPU the network needs the idle core"""
    set_workers_cpu_affinity: bool = True
    """pin worker i and its engines to core i of this process; turn it off if several runs share the machine"""
    actor_timeout: float = 120.0
    """seconds that a start or step of a game may take before its actor counts as hung and is replaced; 0: no limit"""
    sync: bool = False  # alternate between collecting and learning, so that every iteration starts at lag 0

    # --- population
    num_policies: int = 2  # number of policies, all in the same games
    policy_settings: str = "{}"
    """initial values of a policy's TUNED flags or reward coefficients, as JSON: {"1": {"learning_rate": 0.01}} (for
    policy 1)"""
    with_pbt: bool = False  # population-based training: mutate settings, and replace the worst policies by the best
    pbt_target_objective: Literal["episodic_return", "kills", "frags", "win"] | None = None
    """objective, as the mean over the last 100 episodes. Default: win in a match between agents, frags against bots,
    otherwise the return"""
    pbt_start_mutation: int = 5_000_000  # steps of the slowest policy before the first exchange
    pbt_period_env_steps: int = 1_250_000  # steps of the slowest policy between exchanges
    pbt_replace_fraction: float = 0.3  # fraction of the population that counts as best, and as worst; at most half
    pbt_replace_reward_gap: float = 0.1  # least gap for a replacement, as a fraction of the larger objective
    pbt_mutation_rate: float = 0.15  # probability that a setting changes
    pbt_perturb_min: float = 1.05  # smallest factor by which a setting is multiplied or divided; 0 stays 0
    pbt_perturb_max: float = 1.5  # largest such factor

    # --- algorithm
    rollout: int = 32  # steps per rollout (T)
    batch_size: int = 1024  # approximate samples of a policy per optimizer step: batches consist of whole rollouts
    num_batches_per_epoch: int = 1  # approximate batches per iteration; --sync: one rollout of every row
    num_epochs: int = 1  # passes over the rollouts of an iteration
    max_batches_ahead: int = 1  # iterations collected ahead of the learner; more hide jitter but add lag
    max_policy_lag: int = 100  # samples this many versions old, or older, are excluded from the losses
    learning_rate: Annotated[float, tyro.conf.arg(aliases=["--lr"])] = 4e-4  # Adam's learning rate
    anneal_lr: bool = False  # decay the learning rate linearly to 0 at total_timesteps
    gamma: float = 0.99  # discount per step
    vtrace_rho: float = 1.0  # V-trace: upper bound of the importance weight of temporal differences (rho bar)
    vtrace_c: float = 1.0  # V-trace: upper bound of the trace coefficients (c bar)
    vtrace_lambda: float = 0.95  # decay of the trace, as in GAE; 1 gives the paper's V-trace
    clip_coef: float = 0.1  # PPO: the ratio is clipped to [1/(1+e), 1+e], not to [1-e, 1+e]
    ppo_clip_value: float = 0.2  # PPO: clip of the change of the value since acting time
    vf_coef: float = 0.5  # coefficient of the value loss
    ent_coef: float = 0.001  # coefficient of the penalty on the symmetric KL divergence from the uniform policy
    max_grad_norm: float = 4.0  # maximum gradient norm; 0: no clipping
    rnn_type: Literal["gru", "lstm", "none"] = "gru"  # type of the recurrent core
    hidden_size: int = 512  # units of the last layer of each image encoder, and of the recurrent core
    vector_size: int = 128  # units in each of the two layers for vectors

    def __post_init__(self):
        if self.cfg_path:
            self.env_id = Path(self.cfg_path).stem
            if os.path.exists(self.cfg_path):  # otherwise ViZDoom searches its own scenarios
                self.cfg_path = os.path.abspath(self.cfg_path)
        if self.match_wad:
            self.match_wad = os.path.abspath(self.match_wad)
        if not is_doom(self):
            self.frameskip = 1
        if self.pbt_target_objective is None:
            scenario = scenario_of(self)
            objective = "win" if scenario.agents > 1 else "frags" if scenario.match else "episodic_return"
            self.pbt_target_objective = objective
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        cuda = device.startswith("cuda")
        if self.precision is None:
            if cuda:
                capable = torch.cuda.is_bf16_supported(including_emulation=False)
            else:
                capable = "_bf16" in Path("/proc/cpuinfo").read_text()  # AVX512-BF16 or AMX
            self.precision = "bfloat16" if capable else "float32"
        self.typed = asdict(self)  # saved in cfg.json, before defaults that depend on the machine are filled in
        self.device = device
        self.cuda_graphs &= cuda
        if self.num_workers is None:
            self.num_workers = num_cores()
        self.sync |= self.num_workers == 0
        if self.worker_num_splits is None:
            self.worker_num_splits = 2 if cuda and self.num_envs_per_worker % (2 * self.num_policies) == 0 else 1

    @functools.cached_property
    def seats(self) -> int:
        """Number of agents in a game."""
        return len(make_game(self).possible_agents)


# === Environment ======================================================================================================

# Sums over each episode, reported as means over the last 100 episodes: the engine's own reward, steps, and these keys
# of an agent's `info`, which Doom adds at the end of an episode
EXTRA_METRICS = ("kills", "frags", "deaths", "place", "win")
EPISODE = ("episodic_return", "episodic_length", *EXTRA_METRICS)

NUMERIC_SPACES = (Box, Discrete, MultiDiscrete, MultiBinary)
IMAGE_SIDE = 36  # shortest side that `image_encoder` can take; a uint8 array with two such sides is an image

ENGINE_MEMORY = 3  # MiB of /dev/shm per engine; its file of 10 MiB is sparse: at 160x120 at most 2.8 are used
# The agent's image, height, width, RGB: 3 of every 5 rows and 4 of every 5 columns of the engine's screen
IMAGE = (72, 128, 3)
# Variables read from every engine; USER2 counts kills in battle and battle2. All but FRAGCOUNT are clipped below at 0
VARIABLES = ("SELECTED_WEAPON", "SELECTED_WEAPON_AMMO", "HEALTH", "USER2")
VARIABLES += ("ARMOR", "ATTACK_READY", "PLAYER_COUNT", "DEAD", "DEATHCOUNT", "HITCOUNT", "DAMAGECOUNT")
VARIABLES += (*(f"WEAPON{k}" for k in range(8)), *(f"AMMO{k}" for k in range(8)), "FRAGCOUNT")
# Default settings of the engine, by its own names
SETTINGS = dict(render_hud=True, render_decals=False, render_particles=False)


class Scenario(NamedTuple):
    """One of Sample Factory's Doom environments (its doom_utils.py and scenario files). Times are in tics, 1/35 s."""

    wad: str
    buttons: tuple[str, ...]  # in the engine's order
    heads: tuple[int, ...]  # a head of size n is a no-op and n-1 consecutive buttons, or n values of a *_DELTA button
    time_limit: float = 2100
    reward_scale: float = 1.0
    measurements: bool = False  # 23 numbers beside the image
    shaping: str = ""  # kind of bonus added to the engine's reward: "", "gathering" or a name in SHAPING
    settings: dict = {}  # engine settings that override SETTINGS; living_reward is per tic
    match: bool = False  # a deathmatch over the network, in which frags are the score
    agents: int = 1  # number of players that learn
    bots: int = 0  # number of players that the engine controls
    respawn: int = 0  # seconds from death to return


TURN = ("TURN_LEFT", "TURN_RIGHT")
WALK = ("MOVE_FORWARD", "MOVE_BACKWARD")
STRAFE = ("MOVE_LEFT", "MOVE_RIGHT")
ARENA = dict(doom_skill=2, render_crosshair=True)
BATTLE = dict(
    buttons=(*WALK, "MOVE_RIGHT", "MOVE_LEFT", "ATTACK", "SPEED", "TURN_LEFT_RIGHT_DELTA"),
    heads=(3, 3, 2, 2, 11),
    measurements=True,
    shaping="battle",
    settings=ARENA,
)
GATHER = dict(
    buttons=TURN + WALK,
    heads=(5,),
    shaping="gathering",
    settings=dict(living_reward=0.01, render_hud=False, render_weapon=False),
)
FIGHT = (*WALK, "MOVE_RIGHT", "MOVE_LEFT", *(f"SELECT_WEAPON{k}" for k in range(1, 8)), "ATTACK", "SPEED")
MATCH = dict(
    buttons=(*FIGHT, "USE", "TURN_LEFT_RIGHT_DELTA"),
    heads=(3, 3, 8, 2, 2, 2, 21),
    time_limit=4 * 60 * 35,
    measurements=True,
    match=True,
    settings=dict(render_crosshair=True),
)
WITHOUT_USE = dict(buttons=(*FIGHT, "TURN_LEFT_RIGHT_DELTA"), heads=(3, 3, 8, 2, 2, 21))
DEFEND = dict(buttons=(*TURN, "ATTACK"), heads=(3, 2), settings=dict(death_penalty=1.0, episode_start_time=10))
SCENARIOS = {
    "basic": Scenario(
        "basic.wad",
        (*STRAFE, "ATTACK"),
        heads=(4,),
        time_limit=300,
        reward_scale=0.01,
        settings=dict(living_reward=-1.0, doom_skill=5, episode_start_time=14),
    ),
    "my_way_home": Scenario(
        "my_way_home.wad",
        TURN + WALK,
        heads=(3, 3),
        settings=dict(living_reward=-1e-4, doom_skill=5, episode_start_time=10, render_hud=False),
    ),
    "deadly_corridor": Scenario(
        "deadly_corridor.wad",
        (*TURN, *WALK, *STRAFE, "ATTACK"),
        heads=(3, 3, 3, 2),
        reward_scale=0.01,
        settings=dict(death_penalty=100.0, doom_skill=5),
    ),
    "defend_the_center": Scenario("defend_the_center.wad", **DEFEND),
    "defend_the_line": Scenario("defend_the_line.wad", time_limit=np.inf, **DEFEND),
    "health_gathering": Scenario("health_gathering.wad", **GATHER),
    "health_gathering_supreme": Scenario("health_gathering_supreme.wad", **GATHER),  # vizdoom's map is not the paper's
    "battle": Scenario("D3_battle.wad", **BATTLE),
    "battle2": Scenario("D4_battle2.wad", **BATTLE),
    "benchmark": Scenario(
        "D3_battle.wad",
        (*WALK, "MOVE_RIGHT", "MOVE_LEFT", "TURN_RIGHT", "TURN_LEFT", "ATTACK", "SPEED"),
        heads=(9,),
        settings=ARENA,
    ),
    "duel_bots": Scenario("cig.wad", bots=1, respawn=2, shaping="bots", **MATCH),
    "deathmatch_bots": Scenario("cig.wad", bots=7, shaping="bots", **MATCH | WITHOUT_USE),
    "duel": Scenario("cig.wad", agents=2, respawn=2, shaping="match", **MATCH),
    "deathmatch": Scenario("cig.wad", agents=4, bots=4, respawn=2, shaping="match", **MATCH),
}
RULES = "+sv_forcerespawn 1 +sv_noautoaim 1 +sv_respawnprotect 1 +sv_spawnfarthest 1"
RULES += " +sv_nocrouch 1 +sv_nojump 1 +sv_nofreelook 1 +sv_noexit 1"
# Sample Factory's reward shaping: coefficients of a variable's increase (+) and decrease (-), and the reward of each
# step with a loaded weapon that has been in hand for five steps
WEIGHTS = (1, 1, 1, 5, 5, 5, 10, 10)  # of weapons 0 to 7
SELECTED = {f"SELECTED{k}": 2e-4 * w for k, w in enumerate(WEIGHTS)}
HEALTH = {"HEALTH+": 0.005, "HEALTH-": -0.003}
ITEMS = HEALTH | SELECTED | {"ARMOR+": 0.005, "ARMOR-": -0.001}
for k, w in enumerate(WEIGHTS):
    ITEMS |= {f"WEAPON{k}+": 0.02 * w, f"WEAPON{k}-": -0.01 * w}
    ITEMS |= {f"AMMO{k}+": 2e-4 * w, f"AMMO{k}-": -1e-4 * w}
BOTS = {"FRAGCOUNT+": 1.0, "FRAGCOUNT-": -1.5, "DEATHCOUNT+": -0.75, "DEATHCOUNT-": 0.75}
BOTS |= {"HITCOUNT+": 0.01, "HITCOUNT-": -0.01, "DAMAGECOUNT+": 0.003, "DAMAGECOUNT-": -0.003}
AGENTS = {"FRAGCOUNT+": 1.0, "FRAGCOUNT-": -0.001, "DEATHCOUNT+": -1.0, "DEATHCOUNT-": 1.0}
AGENTS |= {"DAMAGECOUNT+": 0.01, "DAMAGECOUNT-": -0.01, "HEALTH+": 0.01, "HEALTH-": -0.01}
SHAPING = dict(battle=HEALTH | SELECTED, bots=ITEMS | BOTS, match=ITEMS | AGENTS)
MOST = dict(DAMAGECOUNT=200.0, HITCOUNT=5.0)  # largest increase that counts in a step


def scenario_of(args: Args) -> Scenario:
    """Returns the scenario, or an empty one for a user's own scenario and for a game other than Doom."""
    return SCENARIOS.get("" if args.cfg_path else args.env_id, Scenario("", (), ()))


def shaping_of(args: Args) -> dict[str, float]:
    """Returns the reward coefficients of a scenario, by name."""
    return SHAPING.get(scenario_of(args).shaping, {})


@functools.cache
def launcher():
    """Returns the path of an in-memory shell script that starts an engine in the temporary folder. The script creates
    the engine's folder first (engines that create it at the same time crash), ignores the signals of batch systems, and
    lets the kernel kill the engine when the thread that started it ends. Raises UserError."""
    if not shutil.which("setpriv"):
        raise UserError("setpriv, which ends an engine with its actor, is missing: install util-linux 2.33")
    folder = shlex.quote(tempfile.gettempdir())
    engine = shlex.quote(f"{Path(vizdoom.__file__).parent}/vizdoom")
    # Does not start the engine if its parent died before the kernel was told to watch it. Discards output, because the
    # engines of a match would report each other on the terminal.
    script = f"""#!/bin/sh
trap '' INT TERM
mkdir -p {folder}/_vizdoom && cd {folder} || exit 1
exec setpriv --pdeathsig KILL sh -c '[ $PPID = {os.getpid()} ] && exec "$@"' - {engine} "$@" > /dev/null 2>&1
"""
    file = os.memfd_create("vizdoom_launcher")
    os.write(file, script.encode())
    return f"/proc/{os.getpid()}/fd/{file}"


def engine_ids(process="self"):
    """Returns the ids of a process's engines: the suffixes of their files in /dev/shm."""
    return set(re.findall(r"/dev/shm/ViZDoom\w+(\w{10})", Path(f"/proc/{process}/maps").read_text()))


def unlink_shared_memory(engines):
    """Unlinks the shared memory of these engines, which have opened it already or never will, so that it disappears
    with them however they end. Files of at most 3 MiB each remain only if, while engines start, their actor dies by
    itself or their match fails to start."""
    for engine in engines:
        for path in Path("/dev/shm").glob(f"ViZDoom*{engine}"):
            path.unlink(missing_ok=True)


class DoomEnv(gym.Env):
    """One player, alone or in a match. Observations are the image `obs`, uint8 [72, 128, 3], and in some scenarios
    `vector`, float32 [23] measurements. `info["raw_reward"]` is the engine's reward before shaping, scale and clip, or
    in a match the change of frags; scores are its sums. In a match, `info["inactive"]` is True while the player waits
    for its return. At the end of an episode, `info` has the `scores`. `shaping` holds the reward coefficients."""

    def __init__(self, args: Args, render_mode=None):
        self.args = args
        self.render_mode = render_mode
        self.shaping = shaping_of(args)
        self.barrier = None  # of the players of a match
        self.now = {}  # the engine's variables, by name
        self.metadata = dict(render_modes=["rgb_array"], render_fps=35 / args.frameskip)
        if "vizdoom" not in globals():
            raise UserError("Doom needs: pip install vizdoom envpool-assets")
        self.game = vizdoom.DoomGame()
        if args.cfg_path:
            self.setup_own(args.cfg_path)
        else:
            self.setup(args.env_id)
        self.game.set_vizdoom_path(launcher())
        self.game.set_episode_timeout(0)  # we count the time, because after its own limit the engine has no state
        self.game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        self.game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        self.game.set_mode(vizdoom.Mode.PLAYER)
        self.game.set_window_visible(False)
        self.game.set_doom_config_path(os.devnull)  # otherwise every engine writes a _vizdoom.ini
        self.game.set_available_game_variables([getattr(vizdoom.GameVariable, name) for name in VARIABLES])
        # presses[h][a] are the button values for action a of head h; the heads' buttons follow one another
        self.presses = []
        buttons = self.game.get_available_buttons()
        for n in self.scenario.heads:
            if vizdoom.is_delta_button(buttons[0]):
                press = np.linspace(-10, 10, n)[:, None]  # degrees per tic, as in Sample Factory's battle
            else:
                press = np.eye(n, n - 1, -1)
            self.presses.append(press)
            buttons = buttons[press.shape[1] :]
        if self.scenario.match:
            self.presses[-1] *= 1.25  # turns of up to 12.5 degrees per tic, as in Sample Factory
        spaces = dict(obs=Box(0, 255, IMAGE, np.uint8))
        if self.scenario.measurements:
            spaces["vector"] = Box(-np.inf, np.inf, (23,), np.float32)
        self.observation_space = Dict(spaces)
        self.action_space = MultiDiscrete(self.scenario.heads)

    def setup(self, env_id):
        if env_id not in SCENARIOS:
            raise UserError(f"unknown --env-id {env_id}; there are {', '.join(SCENARIOS)}, and PettingZoo's modules")
        self.scenario = SCENARIOS[env_id]
        wads = envpool_assets.asset_path() / "vizdoom" / "maps"  # vizdoom's maps, and Sample Factory's battles
        wad = wads / (self.scenario.match and self.args.match_wad or self.scenario.wad)  # --match-wad is absolute
        if not wad.exists():
            raise UserError(f"there is no {wad}")
        self.game.set_doom_scenario_path(str(wad))
        self.game.set_doom_map("map01")
        self.game.set_available_buttons([getattr(vizdoom.Button, name) for name in self.scenario.buttons])
        for name, value in (SETTINGS | self.scenario.settings).items():
            getattr(self.game, f"set_{name}")(value)

    def setup_own(self, cfg_path):
        """Loads a user's scenario. Its buttons form one head (no-op or one button); each delta button is a head of 11
        values."""
        try:
            understood = self.game.load_config(cfg_path)
        except Exception as error:
            raise UserError(f"--cfg-path {cfg_path}: {error}") from None
        if not understood:  # the engine printed why, and would ignore that line
            raise UserError(f"--cfg-path {cfg_path}: ViZDoom ignored a line; see its warning above")
        if variables := self.game.get_available_game_variables():
            names = ", ".join(variable.name for variable in variables)
            gym.logger.warn(f"{cfg_path}: these variables are not observed: {names}")
        buttons = sorted(self.game.get_available_buttons(), key=vizdoom.is_delta_button)
        if not buttons:
            raise UserError(f"--cfg-path {cfg_path} has no available_buttons")
        self.game.set_available_buttons(buttons)
        deltas = sum(map(vizdoom.is_delta_button, buttons))
        binary = len(buttons) - deltas
        heads = (binary + 1,) * (binary > 0) + (11,) * deltas
        self.scenario = Scenario("", (), heads, time_limit=self.game.get_episode_timeout() or np.inf)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.game.set_seed(seed)
        if self.game.is_running():
            self.game.new_episode()
        else:
            try:
                self.game.init()
            except vizdoom.FileDoesNotExistException as error:
                raise UserError(f"{self.args.cfg_path}: {error}") from None
            finally:
                unlink_shared_memory(engine_ids())
        self.tics = 0
        self.weapons = deque(maxlen=5)
        observation = self.observation()
        self.deaths = self.now["DEATHCOUNT"]  # the engine keeps counting
        info = {}
        if self.scenario.match:
            info = {"inactive": self.now["DEAD"] > 0}
            self.now["DEAD"] = 1.0  # the episode may begin before the first life
        return observation, info

    def observation(self):
        """Returns a new observation; after the end of a game, the previous one again, which no loss uses."""
        self.before = self.now
        if state := self.game.get_state():
            self.screen = state.screen_buffer
            self.variables = state.game_variables
            self.variables[:-1] = self.variables[:-1].clip(min=0)
            self.now = dict(zip(VARIABLES, self.variables.tolist()))
        # the rows and columns that nearest-neighbour scaling picks, as in Sample Factory
        image = self.screen.reshape(24, 5, 32, 15)[:, [0, 1, 3], :, :12].reshape(IMAGE)
        if not self.scenario.measurements:
            return dict(obs=image)
        weapon, ammo, health, kills, armor, ready, players = self.variables[:7]
        vector = np.zeros(23, np.float32)  # Sample Factory's layout
        vector[[0, 1, 2, 4, 6]] = round(weapon), min(5.0, ammo / 15), health / 30, kills / 10, 1 / 5
        if self.scenario.match:
            vector[[3, 5, 6]] = armor / 30, ready, players / 5
            vector[7:15] = self.variables[-17:-9]
            vector[15:] = (self.variables[-9:-1] / 15).clip(max=5)
        return dict(obs=image, vector=vector)

    def make_action(self, buttons):
        """Presses the buttons for `frameskip` tics and returns the engine's reward. A match advances tic by tic,
        because engines that are asked for several tics occasionally wait for each other forever."""
        if not self.barrier:
            return self.game.make_action(buttons, self.args.frameskip)
        self.game.set_action(buttons)
        for tics in reversed(range(self.args.frameskip)):
            self.barrier.wait()
            self.game.advance_action(1, not tics)
        return 0.0  # the engine has no reward for a match; the shaping includes frags

    def step(self, action: np.ndarray):
        buttons = np.concatenate([press[a] for press, a in zip(self.presses, action)])
        raw_reward = self.make_action(buttons.tolist())
        self.tics += self.args.frameskip
        terminated = self.game.is_episode_finished()
        truncated = not terminated and self.tics >= self.scenario.time_limit
        observation = self.observation()
        bonus = 0.0 if terminated else self.bonus(self.before, self.now)
        reward = (raw_reward + bonus) * self.scenario.reward_scale
        info = {"raw_reward": raw_reward}
        if self.scenario.match:
            info["raw_reward"] = self.now["FRAGCOUNT"] - self.before["FRAGCOUNT"]
            info["inactive"] = self.now["DEAD"] > 0
        if terminated or truncated:
            info |= self.scores()
        return observation, reward, terminated, truncated, info

    def bonus(self, before, now):
        """Returns Sample Factory's reward shaping, with coefficients that can change."""
        if self.scenario.shaping == "gathering":
            return float(now["HEALTH"] > before["HEALTH"])
        if not self.shaping:
            return 0.0
        weapon = int(now["SELECTED_WEAPON"])
        self.weapons.append(weapon)
        names = now
        if not now["DEAD"] and (before["DEAD"] or now["DEATHCOUNT"] > before["DEATHCOUNT"]):
            names = ("FRAGCOUNT", "DEATHCOUNT")  # in a new life, perhaps begun within the step, the others start afresh
        bonus = 0.0
        for name in names:
            change = min(now[name] - before[name], MOST.get(name, np.inf))
            bonus += abs(change) * self.shaping.get(f"{name}+" if change > 0 else f"{name}-", 0.0)
        if now["SELECTED_WEAPON_AMMO"] > 0 and self.weapons.count(weapon) == 5:
            bonus += self.shaping[f"SELECTED{min(weapon, 7)}"]  # Sample Factory always reads weapon 7 here
        return bonus

    def scores(self):
        """Returns the scores of the episode that ends: `kills`, and in a match `frags`, `deaths`, `place` (1: nobody
        has more frags) and `win` (1 for the sole first place, otherwise 0)."""
        kills = self.now["USER2"]
        if not self.scenario.match:
            return dict(kills=kills)
        leads = []  # of every player over this one, including itself
        mine = self.now["FRAGCOUNT"]
        for k in range(int(self.now["PLAYER_COUNT"])):
            variable = getattr(vizdoom.GameVariable, f"PLAYER{k + 1}_FRAGCOUNT")
            leads.append(self.game.get_game_variable(variable) - mine)
        deaths = self.now["DEATHCOUNT"] - self.deaths
        place = 1 + sum(lead > 0 for lead in leads)
        win = float(sum(lead >= 0 for lead in leads) == 1)
        return dict(kills=kills, frags=mine, deaths=deaths, place=place, win=win)

    def render(self):
        """Returns the engine's screen, uint8 [120, 160, 3]."""
        return self.screen

    def close(self):
        self.game.close()


class DoomMatch:
    """A Doom game with PettingZoo's parallel API, for one player or for a match of several, whose engines communicate
    over the loopback interface. Observations and `info` are those of `DoomEnv`."""

    def __init__(self, args: Args, **options):
        self.scenario = scenario_of(args)
        self.possible_agents = [f"player_{i}" for i in range(self.scenario.agents)]
        self.players = [DoomEnv(args, **options) for _ in self.possible_agents]
        self.metadata = self.players[0].metadata
        self.barrier = threading.Barrier(len(self.players))

    def observation_space(self, agent):
        return self.players[0].observation_space

    def action_space(self, agent):
        return self.players[0].action_space

    def together(self, function, *arguments):
        """Calls function(player, argument...) for every player, each in its own thread, and returns the results. Raises
        the first exception without waiting for the other players, whose engines may wait for the failed one forever.
        This process then ends, as it does after Ctrl-C, and its engines with it (with --num-workers 0, after a second
        Ctrl-C)."""
        if len(self.players) == 1:
            return [function(self.players[0], *(values[0] for values in arguments))]
        futures = [self.pool.submit(function, *values) for values in zip(self.players, *arguments)]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            self.barrier.abort()
            raise
        return [future.result() for future in futures]

    def start(self, seed):
        """Starts the engines of a match, which communicate over a UDP port. Occupies the TCP port of the same number,
        so that no other match takes it. Joining engines get their own ports, from 32768 on."""
        self.port = socket.socket()
        while not (port := self.port.getsockname()[1]):
            with contextlib.suppress(OSError):  # the port is taken
                self.port.bind(("127.0.0.1", random.randrange(10_000, 32_768)))
        n = len(self.players)
        self.pool = concurrent.futures.ThreadPoolExecutor(n)  # kept: an engine ends with the thread that started it
        host = f"-host {n} -port {port} -deathmatch +viz_respawn_delay {self.scenario.respawn} {RULES}"
        for i, player in enumerate(self.players):
            player.game.add_game_args(f"-join 127.0.0.1:{port}" if i else host)
            player.game.add_game_args(f"+viz_connect_timeout 10 +name agent{i} +colorset 0")
            player.barrier = self.barrier if n > 1 else None
            if seed is not None:
                player.game.set_seed(seed)
        try:
            self.together(lambda player: player.game.init())
        finally:
            unlink_shared_memory(engine_ids())  # only now have all engines of the match opened it

    def reset(self, seed=None, options=None):
        """Takes options["shaping"], the reward coefficients of each agent by name, as in `shaping_of`."""
        if self.scenario.match and not self.players[0].game.is_running():
            self.start(seed)
        observations, infos = zip(*self.together(functools.partial(DoomEnv.reset, seed=seed)))
        if self.scenario.bots:
            for command in ("removebots", *["addbot"] * self.scenario.bots):
                self.players[0].game.send_game_command(command)
        self.agents = self.possible_agents
        for agent, player in zip(self.agents, self.players):
            if options:
                player.shaping = options["shaping"][agent]
        return dict(zip(self.agents, observations)), dict(zip(self.agents, infos))

    def step(self, actions):
        results = zip(*self.together(DoomEnv.step, [actions[agent] for agent in self.agents]))
        observations, rewards, terminated, truncated, infos = (dict(zip(self.agents, values)) for values in results)
        over = terminated["player_0"]  # for all players, like the time limit
        terminated = dict.fromkeys(self.agents, over)
        if over or truncated["player_0"]:
            self.agents = []
        return observations, rewards, terminated, truncated, infos

    def render(self):
        """Returns the engines' screens side by side, uint8 [120, 160 x players, 3]."""
        return np.concatenate([player.render() for player in self.players], axis=1)

    def close(self):
        if not self.barrier.broken:
            for player in self.players:
                player.close()


def parts_of(space, observation, name="obs"):
    """Yields (name, space, value) for each leaf of an observation; leaves of a Dict or Tuple are named obs/KEY."""
    if isinstance(space, (Dict, Tuple)):
        for key, part in space.items() if isinstance(space, Dict) else enumerate(space):
            yield from parts_of(part, observation[key], f"{name}/{key}".replace(".", ":"))  # nn.ModuleDict forbids dots
    else:
        yield name, space, observation


def as_array(name, space, part):
    """Returns a leaf as an image, uint8 [height, width, channels], or as a float32 vector. A uint8 array with exactly
    two long sides is an image, whatever the axis order; all its other axes become channels. Discrete values become
    one-hot. Raises ValueError if the shape is not that of the space."""
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
    """Returns the number of actions of each independent head, or () if the actions are not discrete."""
    if isinstance(space, MultiBinary):
        return (2,) * flatdim(space)
    sizes = getattr(space, "nvec", getattr(space, "n", ()))  # MultiDiscrete, Discrete
    return tuple(np.ravel(sizes).tolist())


def smaller(array):
    """Returns evenly spaced rows and columns of an image, at most 128 of each, or a vector unchanged."""
    if array.ndim == 1:
        return array
    rows, columns = (math.ceil(n / 128) for n in array.shape[:2])
    return array[::rows, ::columns]


def arrays_of(space, observation):
    """Yields (name, array) for each numeric leaf of an observation. If `observation` is the space itself, yields
    placeholders, and warns about every leaf that is left out."""
    for name, own, part in parts_of(space, observation):
        if isinstance(own, NUMERIC_SPACES):
            if part is own:
                part = np.zeros_like(own.low) if isinstance(own, Box) else own.sample()
            yield name, smaller(as_array(name, own, part))
        elif part is own:
            gym.logger.warn(f"{name} is left out of the observation: {own}")


def is_doom(args: Args) -> bool:
    return bool(args.cfg_path) or "." not in args.env_id


def make_game(args: Args, **options):
    """Returns one game. Edit this function to train on something else.

    The game must have PettingZoo's parallel API and start nothing before `reset`:

    - The spaces of its agents may differ only in their bounds. Observations become images and vectors (`as_array`),
      named `obs`, or obs/KEY in a Dict. Actions are Discrete, MultiDiscrete or MultiBinary.
    - The `info` of an agent may have `raw_reward`, whose sums are the scores, `inactive`, which is True if the agent's
      next action does nothing, and the keys in `EXTRA_METRICS`.
    - `reset` receives options["shaping"], the reward coefficients of each agent, if the scenario has any.
    - `agents` is empty when the game is over."""
    if is_doom(args):
        return DoomMatch(args, **options)
    try:
        parallel_env = importlib.import_module(args.env_id).parallel_env
    except (ImportError, AttributeError) as error:
        raise UserError(f"--env-id {args.env_id}: {error}") from None
    game = parallel_env(**options)
    if not hasattr(game, "possible_agents"):
        game.reset()
        game.possible_agents = list(game.agents)
    return game


class Spaces(NamedTuple):
    """Describes the environments to the pipeline."""

    obs: dict[str, Box]  # the arrays of an observation, by name
    heads: tuple[int, ...]  # number of actions of each independent head


def spaces_of(args: Args) -> Spaces:
    """Returns the spaces shared by all agents of a game. Raises UserError if the pipeline does not support them."""
    with contextlib.closing(make_game(args)) as game:
        spaces = [(game.observation_space(agent), game.action_space(agent)) for agent in game.possible_agents]
    found = []
    for space, action in spaces:
        # ignores the bounds
        obs = {name: Box(0, 255, array.shape, array.dtype.type) for name, array in arrays_of(space, space)}
        found.append(Spaces(obs, heads_of(action)))
    if found.count(found[0]) < len(found) or not all(found[0]):
        raise UserError(
            f"unsupported spaces, {spaces}: agents' spaces may differ in bounds only, observations must have numbers, "
            "and actions be Discrete, MultiDiscrete or MultiBinary"
        )
    return found[0]


# === Agent ============================================================================================================


def moments(x):
    """Returns N, and the mean and variance [...] of x [N, ...] over its first axis."""
    mean = x.mean(0)
    return len(x), mean, (x - mean).square_().mean(0)  # much faster on images than x.var(0)


class Normalizer(nn.Module):
    """Normalises every element of an input by its running mean and variance, then clips to +-5, as in Sample Factory
    2."""

    def __init__(self, shape: tuple[int, ...], unit: float, dtype=torch.float32):
        """dtype: of the result of `forward`; with the encoder's, images need no second cast."""
        super().__init__()
        self.unit = unit
        self.dtype = dtype
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        # normalised = x * scale + shift, one multiply-add per element; equal to x / unit until the first update
        self.register_buffer("scale", torch.full(shape, 1 / unit))
        self.register_buffer("shift", torch.zeros(shape))

    def forward(self, x):
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        pieces = 16 if x.device.type == "cpu" else len(x)  # on a CPU, pieces that fit into the cache
        for part, to in zip(x.split(pieces), out.split(pieces)):
            to.copy_(torch.addcmul(self.shift, part.float(), self.scale).clamp_(-5, 5))
        return out

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
            raise FloatingPointError("an observation is not finite, or its square is not")
        self.mean.lerp_(mean, weight)
        self.var.copy_(var)
        self.count += n
        std = (var + 1e-5).sqrt()
        self.scale.copy_(1 / (self.unit * std))
        self.shift.copy_(-self.mean / std)


def init_layer(layer):
    """Returns the layer with orthogonal weights of gain 1 and zero biases, as in Sample Factory, including the
    heads."""
    nn.init.orthogonal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class FlattenInMemory(nn.Flatten):
    """Flattens [N, channels, height, width] in channels_last memory to [N, features] as a view; nn.Flatten would
    copy."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1))


def image_encoder(space, hidden_size):
    """Returns a network from [N, channels, height, width] to [N, hidden_size]: convolutions 32/8/4, 64/4/2, 128/3/2
    (channels, kernel, stride) and a linear layer, all with ELU, as for Doom in Sample Factory's paper."""
    height, width, channels = space.shape
    elu = nn.ELU(inplace=True)
    conv = nn.Sequential(
        init_layer(nn.Conv2d(channels, 32, 8, 4)),
        elu,
        init_layer(nn.Conv2d(32, 64, 4, 2)),
        elu,
        init_layer(nn.Conv2d(64, 128, 3, 2)),
        elu,
        FlattenInMemory(),
    )
    features = conv(torch.zeros(1, channels, height, width)).shape[1]
    return nn.Sequential(conv, init_layer(nn.Linear(features, hidden_size)), elu)


class Agent(nn.Module):
    """Concatenates the features of a convolutional encoder for each image and of two ELU layers for all vectors; an
    optional recurrent core, a value head and a policy head follow.

    A network of your own takes (spaces, args) and needs `heads` (from Spaces), `state_size` (floats of recurrent state
    per row, 0 for none), `normalizers` (by observation name), `reduced` (modules whose weights act in bfloat16) and a
    `forward` without side effects. To mask actions, return `logits.masked_fill(obs["obs/NAME"] == 0, -torch.inf)`;
    every head must keep at least one action, even at the last observation of an episode. The flags precision, rnn_type,
    hidden_size and vector_size belong to this network."""

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
                self.normalizers[name] = Normalizer(space.shape, unit=255.0, dtype=getattr(torch, args.precision))
                self.images[name] = image_encoder(space, args.hidden_size)
                features += args.hidden_size
            else:
                self.normalizers[name] = Normalizer(space.shape, unit=1.0)
                self.vectors.append(name)
                numbers += space.shape[0]
        if self.vectors:
            self.vector_fc = nn.Sequential(
                init_layer(nn.Linear(numbers, args.vector_size)),
                nn.ELU(inplace=True),
                init_layer(nn.Linear(args.vector_size, args.vector_size)),
                nn.ELU(inplace=True),
            )
            features += args.vector_size
        self.core = None
        self.state_size = 0
        if args.rnn_type != "none":
            core = nn.GRU if args.rnn_type == "gru" else nn.LSTM
            self.core = core(features, args.hidden_size)
            features = args.hidden_size
            self.state_size = features * (1 if args.rnn_type == "gru" else 2)
        self.critic = init_layer(nn.Linear(features, 1))
        self.policy = init_layer(nn.Linear(features, sum(spaces.heads)))
        self.recorded = False  # see `recur`
        # Modules that autocast runs in bfloat16, in learning and acting alike, because pi/mu must be 1 at lag 0. Not
        # the core on CUDA, where autocast would use float16.
        self.reduced = []
        if args.precision == "bfloat16":
            self.reduced.append(self.images)
            if self.core is not None and args.device == "cpu":
                self.reduced.append(self.core)
        self.to(memory_format=torch.channels_last)  # the layout of the images: height, width, channels

    def autocast(self, module):
        """Returns a context in which a module computes in bfloat16 if it is one of `reduced`."""
        return torch.autocast(self.policy.weight.device.type, torch.bfloat16, enabled=module in self.reduced)

    def encode(self, obs):
        """Returns features float32 [N, features] for obs by name [N, ...], as in the space."""
        obs = {name: self.normalizers[name](x) for name, x in obs.items()}
        with self.autocast(self.images):
            features = [encoder(obs[name].permute(0, 3, 1, 2)).float() for name, encoder in self.images.items()]
        if self.vectors:
            features.append(self.vector_fc(torch.cat([obs[name] for name in self.vectors], -1)))
        return torch.cat(features, -1)

    def forward(self, obs, first, state):
        """Takes obs by name [T, B, ...], first bool [T, B] and the state float32 [B, state_size] before obs[0]. The
        state is zeroed wherever `first` is set. Returns logits [T, B, sum(heads)], values [T, B] and the state after
        obs[T-1]."""
        T, B = first.shape
        x = self.encode({name: part.flatten(0, 1) for name, part in obs.items()}).unflatten(0, (T, B))
        if self.core is not None:
            with self.autocast(self.core):
                x, state = self.recur(x, first, state)
        return self.policy(x), self.critic(x).squeeze(-1), state

    def recur(self, x, first, state):
        """Runs the core on x [T, B, features]. Returns its outputs float32 [T, B, hidden_size] and the state. Splits
        time wherever any row has `first` and makes one call per part, because long calls are much faster than steps; if
        `recorded`, it makes one call per step, which is as fast there."""
        starts = list(range(len(first)))
        if len(first) > 1 and not self.recorded:  # waits for the device
            starts = [0, *(first[1:].any(1).nonzero().flatten() + 1).tolist()]
        outputs = []
        for start, stretch in zip(starts, x.tensor_split(starts[1:])):
            state = state.masked_fill(first[start].unsqueeze(-1), 0.0).unsqueeze(0)
            if isinstance(self.core, nn.LSTM):
                output, parts = self.core(stretch, tuple(part.contiguous() for part in state.chunk(2, -1)))
                state = torch.cat(parts, -1)
            else:
                output, state = self.core(stretch, state)
            state = state.squeeze(0).float()
            outputs.append(output)
        return torch.cat(outputs).float(), state


def log_distributions(logits, heads):
    """Splits logits [..., sum(heads)] and returns the log-probabilities [..., n] of each independent head's n actions.
    An action with logit -inf is never sampled. (torch's Categorical takes eight times as long.)"""
    return [part.log_softmax(-1) for part in logits.split(heads, -1)]


def sample_actions(log_dists):
    """Samples actions int64 [..., heads] from each head's log-probabilities [..., n]: the argmax of p/e with e ~ Exp(1)
    is distributed as p, and unlike torch.multinomial it never makes the host wait for CUDA."""
    actions = [(log_dist.exp() / torch.empty_like(log_dist).exponential_()).argmax(-1) for log_dist in log_dists]
    return torch.stack(actions, -1)


def log_prob(log_dists, actions):
    """Returns the joint log-probability [...] of actions [..., heads] under each head's log-probabilities [..., n]."""
    chosen = [log_dist.gather(-1, action) for log_dist, action in zip(log_dists, actions.split(1, -1))]
    return torch.cat(chosen, -1).sum(-1)


def entropy_of(log_dist):
    """Returns the entropy [...] of log-probabilities [..., n]. The clamp makes a masked action's 0 * -inf 0."""
    return -(log_dist.exp() * log_dist.clamp(min=-1e30)).sum(-1)


def symmetric_kl(log_dist):
    """Returns (KL(p|u) + KL(u|p)) / 2 [...] of log-probabilities [..., n], with u uniform over the allowed actions:
    KL(p|u) = log n - H(p), KL(u|p) = -log n - mean log p."""
    possible = log_dist > -torch.inf
    mean_logprob = torch.where(possible, log_dist, 0.0).sum(-1) / possible.sum(-1)
    return -(entropy_of(log_dist) + mean_logprob) / 2


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
    """Computes PPO's clipped losses with V-trace targets over the valid samples of a batch that are not too old. The
    batch has the fields of Rollouts [time, rollout, ...] and `lags`, int64 [T, B]. Returns the loss and metrics, on the
    device.

    To add a loss, compute it per sample [T, B], average it with `mean` and add it to `loss`. If it needs a value from
    acting time, add a field to `Rollouts` and write it in `PolicyInference.choose`. If that value comes from an agent's
    `info`, also add a field to `Mailbox`, write it in `WorkerEnvs.write` and copy it in `PolicyInference.store` (at t -
    1 if it is an outcome of the step, like the reward)."""
    valid = (~batch.first[1:]).float()
    used = valid * ~batch.inactive[:-1] * (batch.lags < args.max_policy_lag)
    logits, values, _ = agent(batch.obs, batch.first, batch.rnn_state[0])
    log_dists = log_distributions(logits[:-1], agent.heads)
    logprobs = log_prob(log_dists, batch.actions)
    entropy = sum(map(entropy_of, log_dists))
    divergence = sum(map(symmetric_kl, log_dists))
    log_ratio = (logprobs - batch.logprobs) * ~batch.inactive[:-1]  # 0 for an action that did nothing
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
    clipped_values = batch.values + (values - batch.values).clamp(-args.ppo_clip_value, args.ppo_clip_value)
    value_losses = torch.max((values - targets).square(), (clipped_values - targets).square())
    loss = mean(policy_losses + args.vf_coef * value_losses + args.ent_coef * divergence.clamp(max=30))

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
    return loss, metrics


# === Mailbox and rollouts =============================================================================================


def num_rows(args: Args) -> int:
    """Returns the number of rows of each policy."""
    return max(1, args.num_workers) * args.worker_num_splits * rows_per_group(args)


def rows_per_group(args: Args) -> int:
    """Returns the number of rows of each policy. Raises UserError."""
    splits = args.worker_num_splits
    if args.num_envs_per_worker % splits:
        raise UserError(
            f"--num-envs-per-worker {args.num_envs_per_worker} is not divisible by --worker-num-splits {splits}"
        )
    games = args.num_envs_per_worker // splits
    if games % args.num_policies:
        raise UserError(f"{games} games in a split are not divisible by --num-policies {args.num_policies}")
    return games * args.seats // args.num_policies


def slice_of(args: Args, i: int) -> slice:
    """Returns a policy's rows of group i, or its slots of block i: a block has as many slots as a group has rows."""
    n = rows_per_group(args)
    return slice(i * n, i * n + n)


def blocks_per_iteration(args: Args) -> int:
    if args.sync:
        return num_rows(args) // rows_per_group(args)
    samples = args.num_batches_per_epoch * args.batch_size
    return max(1, round(samples / (rows_per_group(args) * args.rollout)))


def num_blocks(args: Args) -> int:
    """Returns one block for each group to fill, plus those of one iteration LEARNING and of `max_batches_ahead` FULL.
    There is no deadlock: while the learner waits, it holds too few blocks and none is FULL, so every group fills
    one or finds a FREE one. With --sync there is one for each group and all belong to an iteration, so none is FREE
    before its last step: nothing else differs."""
    groups = num_rows(args) // rows_per_group(args)
    return groups + (0 if args.sync else blocks_per_iteration(args) * (1 + args.max_batches_ahead))


def zeros_for(spaces: Spaces, *shape):
    """Returns zero observations by name [*shape, ...]."""
    return {
        name: torch.zeros(*shape, *space.shape, dtype=getattr(torch, space.dtype.name))
        for name, space in spaces.obs.items()
    }


class Mailbox:
    """The only memory that actors share with the main process. The rows of a policy are contiguous, and among them the
    rows of a group.

    Between request and reply, the rows of a group belong to the inference thread, otherwise to its actor, so they need
    no lock. Only `shaping` is written at any time: an episode that begins meanwhile may mix old and new
    coefficients."""

    def __init__(self, spaces: Spaces, rows: int, coefficients: int):
        # written by the actor, between a reply and its next request
        self.obs = zeros_for(spaces, rows)  # the current observation
        self.reward = torch.full((rows,), torch.nan)  # of the previous action; NaN until the environment has started
        self.terminated = torch.zeros(rows, dtype=torch.bool)  # the previous action ended the episode for good
        self.first = torch.zeros(rows, dtype=torch.bool)  # obs is the first of an episode
        self.inactive = torch.zeros(rows, dtype=torch.bool)  # the next action does nothing
        self.episode = torch.zeros(rows, len(EPISODE))  # sums of the episode that just ended, else zeros
        # written by the actor before it calls a game and by inference at each message; read at any time
        self.heard = torch.full((rows,), time.monotonic(), dtype=torch.float64)  # the last sign of life
        # written by inference, between a request and its reply
        self.action = torch.zeros(rows, len(spaces.heads), dtype=torch.int64)  # the next action
        # written by `Population.give`, read by the actor when an episode begins
        self.shaping = torch.zeros(rows, coefficients, dtype=torch.float64)  # of its policy, see `shaping_of`

    def share(self, rows=slice(None)) -> SimpleNamespace:
        """Moves the fields to shared memory and returns these rows as NumPy arrays, whose indexing is cheaper than
        torch's. Raises UserError if /dev/shm is full."""
        try:
            return SimpleNamespace(**tree_map(lambda field: field.share_memory_().numpy()[rows], vars(self)))
        except RuntimeError as error:
            raise UserError(f"{error}: use fewer games or a larger /dev/shm (docker run --shm-size=2g)") from None


class Rollouts:
    """A policy's rollouts [time, slot, ...], private to the main process. Observations and the results of inference
    stay on the device. Flags, rewards and versions are host arrays, so that the learner can find valid samples without
    waiting for the device. `Learner.gather` copies every field. Rewards and log-probabilities start as NaN, so that
    reading an unwritten slot makes the loss NaN.

    The life of a block, which has slots of all policies: FREE -> FILLING -> FULL in `Inference.serve`, -> LEARNING in
    `collect`, -> FREE in `train`, which returns it, and `Inference.receive`."""

    def __init__(self, spaces: Spaces, T: int, slots: int, state_size: int, device: torch.device):
        with device:  # written by `Inference.serve` (rnn_state), PolicyInference's `store_obs` (obs) and `choose`
            self.obs = zeros_for(spaces, T + 1, slots)  # T + 1: the last value bootstraps from obs[T]
            self.actions = torch.zeros((T, slots, len(spaces.heads)), dtype=torch.int64)
            self.logprobs = torch.full((T, slots), torch.nan)  # of the actions under the acting policy (mu)
            self.values = torch.full((T, slots), torch.nan)  # of the acting policy, for value clipping only
            self.rnn_state = torch.zeros((1, slots, state_size))  # before obs[0], not yet zeroed by first[0]
        # on the host, written by `store`, versions by `act`
        self.first = np.zeros((T + 1, slots), bool)
        self.rewards = np.full((T, slots), np.nan, np.float32)  # of actions[t]
        self.terminated = np.zeros((T, slots), bool)
        self.inactive = np.zeros((T + 1, slots), bool)  # actions[t] does nothing
        self.versions = np.zeros((T, slots), np.int64)  # of the policy that chose actions[t]


def seat_rows(args: Args, session: int) -> np.ndarray:
    """Returns the mailbox row of each agent [worker, split, agent of its games]. The row determines the agent's policy
    for the whole session.

    In P consecutive games, each of the P policies takes every seat once. The policies take seat 0 in order, and every
    other seat in that order shifted by a number that changes every P games. If the number of two-player games is a
    multiple of P x P, every policy meets every policy, itself included, equally often; with fewer games, some never
    meet. Another session (a resumed run) has other pairs; an actor that replaces another has the same."""
    P = args.num_policies
    games = max(1, args.num_workers) * args.num_envs_per_worker
    rng = np.random.default_rng((args.seed, session))
    all_shifts = np.r_[0, 1 + rng.permutation(P - 1)]  # 0 for seat 0, so with few games nobody plays only itself
    shifts = rng.permuted(np.resize(all_shifts, (args.seats, games // P)), axis=1)
    shifts[0] = 0
    policies = (np.arange(P)[:, None] + shifts.T[:, None]).ravel() % P  # of each agent, game by game
    rows = policies.argsort(kind="stable").argsort()  # those of policy 0 come first
    return rows.reshape(-1, args.worker_num_splits, rows_per_group(args) * P)


# === Actor ============================================================================================================


class WorkerEnvs:
    """The games of one split of a worker. `reset` and `step` write the group's mailbox rows, which then belong to the
    caller until it has filled in the actions and calls `step` again. If an agent leaves before the others, that step
    ends its episode. Its steps from then until the game restarts are invalid, as are the steps of an agent that has not
    joined yet."""

    def __init__(self, args: Args, rows: np.ndarray, mailbox: SimpleNamespace, seed: int, **options):
        """Takes the rows of the first game's agents, then of the second's, and so on, and the mailbox's arrays. Game i
        is seeded with seed + i; the seed is reduced modulo 2**30. Options are passed to `make_game`."""
        self.args = args
        self.mailbox = mailbox
        self.rows = rows.reshape(-1, args.seats).tolist()
        self.seed = seed % 2**30  # accepted by every engine
        self.games = [make_game(args, **options) for _ in self.rows]
        self.sums = {row: np.zeros(len(EPISODE)) for row in rows.tolist()}  # of the running episodes

    def reset(self):
        self.ended = dict.fromkeys(self.sums, True)  # by row: the last step ended an episode, the next is invalid
        self.step(self.seed)

    def step(self, seed=None):
        """Steps all games. A game that is over is reset, and its actions are ignored. With a seed, all are reset."""
        names = shaping_of(self.args)
        for i, (game, rows) in enumerate(zip(self.games, self.rows)):
            row_of = dict(zip(game.possible_agents, rows))
            self.mailbox.heard[rows] = time.monotonic()  # each call may take `actor_timeout`
            if seed is not None or not game.agents:
                shaping = {agent: dict(zip(names, self.mailbox.shaping[row].tolist())) for agent, row in row_of.items()}
                seed_of_game = None if seed is None else seed + i
                observations, infos = game.reset(seed=seed_of_game, options=dict(shaping=shaping))
                results = {}, {}, {}  # no rewards, no flags
            else:
                actions = {agent: self.action(game.action_space(agent), row_of[agent]) for agent in game.agents}
                observations, *results, infos = game.step(actions)
            for agent, row in row_of.items():
                # may be arrays of size 1
                reward, terminated, truncated = (np.asarray(result.get(agent, 0)).item() for result in results)
                ends = terminated or truncated or agent not in observations or not game.agents
                arrays = ()
                if agent in observations:
                    arrays = arrays_of(game.observation_space(agent), observations[agent])
                self.write(row, arrays, reward, terminated, ends, infos.get(agent, {}))

    def action(self, space, row):
        # a copy, because the game may keep a reference
        return self.mailbox.action[row].reshape(space.shape).astype(space.dtype) + getattr(space, "start", 0)

    def write(self, row, arrays, reward, terminated, ends, info):
        if not math.isfinite(reward):
            raise ValueError(f"a reward is not finite: {reward}")
        args = self.args
        mailbox = self.mailbox
        for name, array in arrays:
            to = mailbox.obs[name]
            if array.dtype != to.dtype:
                raise ValueError(f"the observation's part {name} has type {array.dtype}, but its space {to.dtype}")
            to[row] = array
        scores = info | dict(episodic_return=info.get("raw_reward", reward), episodic_length=1)
        sums = self.sums[row]
        sums += [np.asarray(scores.get(name, 0)).item() for name in EPISODE]
        if self.ended[row]:
            sums[:] = 0  # reset-only steps do not count
        mailbox.reward[row] = min(max(reward * args.reward_scale, -args.reward_clip), args.reward_clip)
        mailbox.terminated[row] = terminated
        mailbox.first[row] = self.ended[row]
        mailbox.inactive[row] = info.get("inactive", False)
        mailbox.episode[row] = sums if ends else 0
        self.ended[row] = ends

    def close(self):
        for game in self.games:
            game.close()


def answer(pipe):
    """Waits for a group's actions. Returns the number of the group, or None if the run has ended."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        return None


def run_actor(args: Args, worker: int, rows: np.ndarray, seed: int, mailbox: Mailbox, pipe):
    """Runs an actor. Takes the rows of each of its groups. Protocol on its pipe: the number of a group = its rows are
    written, or its actions are ready; a str = an error; EOF = the other side is gone, however it ended."""
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
        if args.set_workers_cpu_affinity:
            cores = sorted(os.sched_getaffinity(0))
            if len(cores) == num_cores():  # with a quota, other containers would pin to the same cores
                os.sched_setaffinity(0, {cores[worker % len(cores)]})  # engines inherit it: they talk twice per tic
        os.nice(10)  # inference and learning go first: without them, actors only wait
        seed_generators(seed)
        gym.logger.min_level = gym.logger.ERROR  # the main process has printed the warnings of `make_envs`
        faulthandler.register(signal.SIGALRM, chain=True)  # prints the stack, then dies
    # Inference notices a hang; this coarse timer is for a hang after the main process died
    timer = functools.partial(signal.setitimer, signal.ITIMER_REAL)
    limit = min(1e6, args.actor_timeout * args.num_envs_per_worker) * bool(args.num_workers)
    try:
        with contextlib.ExitStack() as stack:
            timer(limit)
            groups = {}
            for group, own in enumerate(rows, worker * args.worker_num_splits):
                groups[group] = WorkerEnvs(args, own, mailbox.share(), seed + group * len(own))
                stack.callback(groups[group].close)
                groups[group].reset()
                pipe.send(group)
            if not worker:  # one actor prints the warnings of `step`
                gym.logger.min_level = gym.logger.WARN
            timer(0)
            while (group := answer(pipe)) is not None:
                timer(limit)
                groups[group].step()
                timer(0)
                pipe.send(group)
            timer(limit)
    except BaseException as error:  # includes sys.exit() in an environment
        text = str(error) if isinstance(error, UserError) else traceback.format_exc().strip()
        with contextlib.suppress(ConnectionError):  # the run has ended
            pipe.send(text)
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


class PolicyInference:
    """Acts for one policy, and holds the recurrent states, the rollouts and the last episodes of its rows.

    It acts with a copy of the learner's network. Whoever acts with the copy or overwrites it holds the lock until the
    device is done, so no action comes from half an update."""

    def __init__(self, inference: "Inference", spaces: Spaces, agent: Agent, number: int):
        """Takes the `Inference` that it belongs to, whose `filling` and `t` it only reads."""
        self.args = args = inference.args
        self.device = next(agent.parameters()).device
        n = num_rows(args)
        self.mailbox = inference.shared_mailbox.share(slice(number * n, number * n + n))
        self.filling = inference.filling
        self.t = inference.t
        self.agent = copy.deepcopy(agent).requires_grad_(False)
        for module in self.agent.reduced:  # otherwise autocast would cast the weights at each inference
            module.bfloat16()
        self.agent.to(self.device)  # packs the core's weights for cuDNN
        mine = [*self.agent.parameters(), *self.agent.buffers()]
        learned = [*agent.parameters(), *agent.buffers()]  # updated in place
        self.copies = defaultdict(list)  # by type: a launch for each
        for pair in zip(mine, learned):
            self.copies[pair[0].dtype].append(pair)
        self.version = 0  # of the agent
        self.lock = threading.Lock()  # of the agent
        slots = num_blocks(args) * rows_per_group(args)
        self.rollouts = Rollouts(spaces, args.rollout, slots, agent.state_size, self.device)
        self.state = torch.zeros(num_rows(args), agent.state_size, device=self.device)
        self.episodes = deque(maxlen=100)  # the last finished episodes, see EPISODE; a donor's after `become`
        if args.cuda_graphs:
            self.choose = recorded(self.choose, self.device)

    @torch.no_grad()
    def publish(self, version: int):
        """Copies the learner's weights and statistics to the acting network."""
        with self.lock:
            for pairs in self.copies.values():
                torch._foreach_copy_(*zip(*pairs))
            self.version = version
            wait_for(self.device)

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
        rollouts.inactive[t, slots] = mailbox.inactive[rows]
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
        episodes = self.mailbox.episode[rows]
        self.episodes.extend(episodes[episodes.any(axis=1)].tolist())

    def choose(self, obs, indices):
        """The device's part of `act`, with the results of `store`. Returns actions [N, heads]."""
        rollouts = self.rollouts
        obs, (rows, t, slots, first) = self.store_obs(obs, indices)
        state = self.state[rows].nan_to_num_()  # not finite if its network failed, see `iterate_all`
        logits, values, self.state[rows] = self.agent(obs, first.bool()[None], state)
        log_dists = log_distributions(logits[0], self.agent.heads)
        actions = sample_actions(log_dists)
        rollouts.actions[t, slots] = actions
        rollouts.logprobs[t, slots] = log_prob(log_dists, actions)
        rollouts.values[t, slots] = values[0]
        return actions


class Inference:
    """Serves all waiting groups at once. Owns the FILLING block of every group, and holds the memory, the pipes and the
    queue between itself, the actors and the learners. Before a block changes hands, the host waits until the devices
    have finished with it, so the streams need no events.

    When an actor dies, another replaces it. Its environments and the last transition of each of its rows are lost: the
    next observation of each row is a `first` one, which makes that transition invalid."""

    def __init__(self, args: Args, spaces: Spaces, agents: list[Agent]):
        self.args = args
        workers = max(1, args.num_workers)
        groups = workers * args.worker_num_splits
        blocks = [slice_of(args, i) for i in range(num_blocks(args))]
        self.filling = dict(enumerate(blocks[:groups]))  # by group; a group without one waits for a FREE block
        self.t = np.zeros(groups, int)  # steps in the FILLING block of each group
        self.free = deque(blocks[groups:])
        self.shared_mailbox = Mailbox(spaces, len(agents) * num_rows(args), len(shaping_of(args)))
        self.mailbox = self.shared_mailbox.share()  # views of the same memory
        self.policies = [PolicyInference(self, spaces, agent, i) for i, agent in enumerate(agents)]
        self.full = queue.SimpleQueue()  # blocks to the learners
        self.error = None  # the error, or KeyboardInterrupt, that ends the run
        self.returned, self.learner_pipe = mp.Pipe(duplex=False)  # free blocks; closing it ends the thread
        self.pipes = [None] * workers  # to the actors, set by `running`
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.returned, selectors.EVENT_READ)
        self.asked = Counter()  # number of requests of each worker's actor
        self.replace = None  # replace(worker, text): starts another actor; set by `running`
        self.requests = []  # groups waiting for actions, oldest first; this thread owns their rows
        # views of the mailbox [worker, policy, row]; the rows of a policy are contiguous
        self.heard = self.mailbox.heard.reshape(len(agents), workers, -1).swapaxes(0, 1)
        self.actors = {}  # process of each worker, set by `running`
        self.counts = Counter()  # rows served, and forward passes
        self.waited = Counter()  # seconds that this thread and the learner waited, by cause

    def run(self):
        """Runs in its own thread. The busier it is, the more groups wait, and the larger its batches become."""
        try:
            with torch.inference_mode(), contextlib.ExitStack() as stack:
                for device in {policy.device for policy in self.policies}:
                    stack.enter_context(own_stream(device, priority=-1))
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
        """Ends the run: the next `collect` raises the first error, even if FULL blocks wait."""
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
            tqdm.write(f"{started.sum()} of {started.size} agents have started, {steps:,} steps per policy")
        return self.full.get()

    def notice_silence(self):
        """Ends an actor that owes a request but has not called a game for `actor_timeout`: it hangs, or was stopped.
        Its stack goes to stderr, and `receive` sees EOF."""
        limit = self.args.actor_timeout or np.inf
        splits = self.args.worker_num_splits
        for worker in np.flatnonzero(time.monotonic() - self.heard.max((1, 2)) > limit):
            waiting = [group // splits for group in self.requests].count(worker)
            unread = self.pipes[worker].poll()  # the actor answered while this process was stopped
            if self.args.num_workers and waiting < splits and not unread:
                self.heard[worker] = time.monotonic()
                pid = self.actors[worker].pid
                with contextlib.suppress(OSError):  # it no longer exists
                    unlink_shared_memory(engine_ids(pid))  # of engines that were starting
                    os.kill(pid, signal.SIGALRM)
                    os.kill(pid, signal.SIGCONT)
                return  # one at a time, so that stacks do not interleave

    def receive(self, pipe):
        """Receives a group's request, or blocks from the learners: LEARNING -> FREE. Raises UserError if an actor's
        death ends the run."""
        if pipe is self.returned:
            with contextlib.suppress(EOFError):  # `learner_pipe` was closed
                self.free.extend(pipe.recv())
            return
        worker = self.pipes.index(pipe)
        self.heard[worker] = time.monotonic()
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            message = ""  # it was killed, or crashed
        if isinstance(message, int):
            self.requests.append(message)
            self.asked[worker] += 1
            return
        self.selector.unregister(pipe)
        pipe.close()
        self.requests = [group for group in self.requests if group // self.args.worker_num_splits != worker]
        self.replace(worker, message)

    def serve(self):
        """Hands complete blocks to the learner, then answers all groups that have a block or get a new one. The others
        keep waiting until a block is FREE."""
        complete = [group for group in self.requests if self.t[group] == self.args.rollout]
        if complete:  # their observations are stored twice: as obs[T] of this block, below as obs[0] of the next
            for policy in self.policies:
                policy.store_obs(*policy.store(complete))
                wait_for(policy.device)  # its learner uses another stream, and must find these blocks written
            for group in complete:
                self.full.put(self.filling.pop(group))  # FILLING -> FULL
                self.t[group] = 0
        for group in self.requests:
            if group not in self.filling and self.free:  # FREE -> FILLING
                self.filling[group] = self.free.popleft()
                for policy in self.policies:
                    policy.rollouts.rnn_state[0, self.filling[group]] = policy.state[slice_of(self.args, group)]
        ready = [group for group in self.requests if group in self.filling]
        if ready:
            for policy in self.policies:
                policy.act(ready)
            self.t[ready] += 1
            self.counts["rows"] += len(ready) * rows_per_group(self.args)
            self.counts["forwards"] += 1
        self.requests = [group for group in self.requests if group not in ready]
        for group in ready:
            worker = group // self.args.worker_num_splits
            self.heard[worker] = time.monotonic()
            with contextlib.suppress(ConnectionError):  # the actor died; `receive` will notice
                self.pipes[worker].send(group)


# === Learner ==========================================================================================================

# A policy's *genes*, which a population mutates, are its values of these flags and its reward coefficients
TUNED = ("learning_rate", "ent_coef", "vf_coef", "max_grad_norm", "clip_coef", "ppo_clip_value")


def collect(inference: Inference) -> list[slice]:
    """Waits for the blocks of an iteration of all policies: FULL -> LEARNING. Raises the error of the inference thread,
    or KeyboardInterrupt after a signal."""
    start = time.perf_counter()
    blocks = []
    for _ in range(blocks_per_iteration(inference.args)):
        blocks.append(inference.next_full())
        if inference.error:
            raise inference.error
    inference.waited["learner"] += time.perf_counter() - start
    return blocks


class Learner:
    """Takes one policy's slots in the blocks of one iteration at a time and improves the policy."""

    def __init__(self, args: Args, number: int, agent: Agent, inference: PolicyInference):
        self.args = copy.copy(args)  # with its own values of the flags in TUNED
        self.number = number
        self.agent = agent
        self.inference = inference
        self.device = inference.device
        self.optimizer = torch.optim.Adam(self.agent.parameters(), args.learning_rate, eps=1e-6, fused=True)
        self.global_step = 0  # number of valid transitions received, including those that are too old
        self.version = 0  # of the policy at the start of the current iteration

    def iterate(self, blocks: list[slice]):
        """Learns from the policy's slots in the blocks of an iteration, which stay LEARNING until all policies have
        made their last optimizer step. Returns the metrics of this policy's last step."""
        args = self.args
        rollouts = self.inference.rollouts
        slots = np.r_[*blocks]
        valid = ~rollouts.first[1:, slots] & ~rollouts.inactive[:-1, slots]
        self.version = self.inference.version
        lags = (self.version - rollouts.versions[:, slots])[valid]
        learning_rate = args.learning_rate
        if args.anneal_lr:
            learning_rate *= max(0.0, 1 - self.global_step / args.total_timesteps)
        self.optimizer.param_groups[0]["lr"] = learning_rate
        num_batches = np.clip(round(len(slots) * args.rollout / args.batch_size), 1, len(slots))
        for epoch in range(args.num_epochs):
            shuffled = slots[torch.randperm(len(slots)).numpy()]
            for batch in np.array_split(shuffled, num_batches):
                metrics = self.update(self.gather(batch), last_epoch=epoch == args.num_epochs - 1)
        self.global_step += len(lags)
        # Numbers: a recording overwrites its outputs, and the main thread does not wait for this thread's stream
        metrics = dict(zip(metrics, torch.stack(list(metrics.values())).tolist()))
        return metrics | {
            "charts/learning_rate": learning_rate,
            "lag/mean": lags.sum() / max(1, len(lags)),
            "lag/max": lags.max(initial=0),
            "lag/masked": (lags >= args.max_policy_lag).sum() / max(1, len(lags)),
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
        metrics, and a tensor of the loss and the gradient norm."""
        loss, metrics = appo_loss(self.args, self.agent, SimpleNamespace(**batch))
        self.optimizer.zero_grad(set_to_none=not self.args.cuda_graphs)  # a recording accumulates in place
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.agent.parameters(), self.args.max_grad_norm or torch.inf)
        return metrics | {"losses/grad_norm": grad_norm}, torch.stack([loss.detach(), grad_norm])

    def update(self, batch: SimpleNamespace, last_epoch: bool):
        """Takes one optimizer step, a new version. Returns metrics. Raises FloatingPointError if loss or gradient is
        not finite."""
        batch.lags = self.version - batch.versions
        for field in (batch.logprobs, batch.values):  # unused if too old, and not finite if a network failed
            field.masked_fill_(batch.lags >= self.args.max_policy_lag, 0.0)
        batch.rnn_state.nan_to_num_()  # as in `PolicyInference.choose`
        metrics, checked = self.differentiate(vars(batch))
        loss, grad_norm = checked.tolist()
        # This check waits for the device, so nothing broken is published or saved, and inference never waits at the
        # lock for a backward pass.
        if not np.isfinite(loss + grad_norm):
            raise FloatingPointError(
                f"the loss ({loss}) or its gradient is not finite: check observations and rewards, "
                "or try a lower --learning-rate or --max-grad-norm"
            )
        begun = self.inference.version > 0  # the first batch only initialises the input statistics
        if last_epoch or not begun:  # count each rollout once (with epochs, the first batch's twice)
            valid = ~batch.first[1:] & ~batch.inactive[:-1]
            start = int(torch.randint(min(4, len(valid)), ()))  # every fourth step is enough: neighbours hardly differ
            for name, normalizer in self.agent.normalizers.items():
                normalizer.update(batch.obs[name][start:-1:4], valid[start::4])
        if begun and grad_norm:  # 0 if no sample could be used
            self.optimizer.step()
        self.inference.publish(self.inference.version + 1)
        return metrics

    def become(self, donor: "Learner"):
        """Continues with another policy's weights. The version increases by `max_policy_lag`, so that earlier samples
        are too old to learn from (`lag/mean` jumps once). The recurrent states of its rows stay until their episodes
        end."""
        self.agent.load_state_dict(donor.agent.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(donor.optimizer.state_dict()))
        self.inference.episodes.extend(donor.inference.episodes.copy())  # the results of these weights
        self.inference.publish(self.inference.version + self.args.max_policy_lag)


# === Population =======================================================================================================


class Population:
    """Population-based training (Jaderberg et al. 2017) with Sample Factory's rules."""

    def __init__(self, args: Args, learners: list[Learner]):
        self.args = args
        self.learners = learners
        self.exchanged = 0  # the step count of the slowest policy at the last exchange
        self.told = False  # has printed that an exchange waits for episodes
        self.failed: list[Learner] = []  # in the last iteration
        self.best_objective = -np.inf  # of best.pth
        self.defaults = {name: getattr(args, name) for name in TUNED} | shaping_of(args)
        settings = settings_of(args)
        for learner in learners:
            genes = self.mutated(self.defaults) if args.with_pbt and learner.number else self.defaults
            self.give(learner, genes | settings.get(learner.number, {}))

    def give(self, learner: Learner, genes: dict[str, float]):
        learner.genes = genes
        for name in TUNED:
            setattr(learner.args, name, genes[name])
        shaping = [genes[name] for name in shaping_of(self.args)]
        learner.inference.mailbox.shaping[:] = shaping  # actors read it when an episode begins
        if self.args.cuda_graphs:
            learner.agent.recorded = True
            vars(learner).pop("differentiate", None)  # the recording has the old values baked in
            learner.differentiate = recorded(learner.differentiate, learner.device)

    def mutated(self, genes: dict[str, float]) -> dict[str, float]:
        """Returns genes mutated as in Sample Factory: with probability `pbt_mutation_rate`, a gene is multiplied or
        divided by a random factor, or one time in 20 reset to its default."""
        args = self.args
        genes = dict(genes)
        for name, value in genes.items():
            if random.random() < args.pbt_mutation_rate:
                factor = random.uniform(args.pbt_perturb_min, args.pbt_perturb_max)
                genes[name] = random.choice((value * factor, value / factor))
                if random.random() < 0.05:
                    genes[name] = self.defaults[name]
        return genes

    def objective(self, learner: Learner) -> float:
        """Returns the mean objective of its last episodes, at most 100, or -inf if none has ended."""
        column = EPISODE.index(self.args.pbt_target_objective)
        return float(np.mean([episode[column] for episode in learner.inference.episodes.copy()] or -np.inf))

    def replace(self, learner: Learner, donor: Learner):
        """Makes a policy a mutated copy of the donor, or an exact one if it is policy 0, which never mutates."""
        learner.become(donor)
        self.give(learner, self.mutated(donor.genes) if learner.number else donor.genes)

    def exchange(self) -> list[str]:
        """Called between iterations. Waits until all policies have made enough steps since the last exchange and have
        100 episodes of this session, their own or a donor's. Then the best policies continue unchanged, each of the
        worst becomes a mutated copy of one of the best if the gap is large enough, and all others except policy 0 are
        mutated. Returns one line for each policy, or none while it waits."""
        args = self.args
        learners = self.learners
        step = min(learner.global_step for learner in learners)
        if step < max(args.pbt_start_mutation, self.exchanged + args.pbt_period_env_steps):
            return []
        ended = [len(learner.inference.episodes) for learner in learners]
        if min(ended) < 100:
            if not self.told:
                tqdm.write(f"the exchange of policies waits until each has 100 episodes; they have {ended}")
            self.told = True
            return []
        self.exchanged = step
        random.seed(f"{args.seed} {step}")  # so that a resumed run draws other numbers
        objectives = {learner: self.objective(learner) for learner in learners}
        order = sorted(learners, key=objectives.get, reverse=True)
        k = math.ceil(min(args.pbt_replace_fraction * len(order), len(order) // 2))
        best = order[:k]
        worst = order[len(order) - k :]
        lines = []
        for learner in learners:
            mine = objectives[learner]
            donor = random.choice(best) if learner in worst else learner
            its = objectives[donor]
            kind = "kept"
            if learner in worst and its - mine > args.pbt_replace_reward_gap * max(abs(its), abs(mine)):
                self.replace(learner, donor)
                kind = f"replaced by policy {donor.number} ({its:.2f})"
            elif learner.number and learner not in best:
                self.give(learner, self.mutated(learner.genes))
                kind = "mutated"
            lines.append(f"policy {learner.number} ({args.pbt_target_objective} {mine:.2f}) is {kind}")
        return lines


def settings_of(args: Args) -> dict[int, dict[str, float]]:
    """Returns --policy-settings by policy. Raises UserError if they are not valid."""
    names = {*TUNED, *shaping_of(args)}
    try:
        settings = {int(policy): own for policy, own in json.loads(args.policy_settings).items()}
        for policy, own in settings.items():
            numbers = [math.isfinite(value) and (value >= 0 or name not in TUNED) for name, value in own.items()]
            if policy not in range(args.num_policies) or not names.issuperset(own) or not all(numbers):
                raise ValueError
        return settings
    except (ValueError, TypeError, AttributeError):
        raise UserError(
            f'--policy-settings {args.policy_settings} is not like {{"1": {{"vf_coef": 0.2}}}}, for policies below '
            f"{args.num_policies} and {', '.join(sorted(names))}"
        ) from None


# A first reading ends here.


# === Run ==============================================================================================================

# How a run ends
# 1. The cause:
#    - the last step: the loop in `train` ends;
#    - Ctrl-C, SIGTERM, SIGHUP: `handler` -> `Inference.end_with` -> `collect` raises KeyboardInterrupt. A second signal
#      more than a second later exits at once; the actors see EOF, as after kill -9;
#    - an actor keeps dying, or a game keeps raising: `replace` (below) raises UserError -> `Inference.run` ->
#      `end_with` -> `collect` raises it;
#    - any other error in the inference thread: `run` -> `end_with` -> `collect` raises it;
#    - an error in a learner: it propagates.
# 2. `train` saves and reports. Leaving `running` ends the inference thread and closes the pipes.
# 3. In each actor `answer` returns None; `run_actor` closes the games and kills its process group.
#
# How an actor is replaced
# 1. It crashes or raises: its pipe ends, or has the error that `run_actor` sends. It hangs or is stopped:
#    `Inference.notice_silence` kills it, and its pipe ends.
# 2. `Inference.receive` closes the pipe, drops the worker's requests and calls `replace`.
# 3. `replace`, in `running`, ends what is left of the old actor, logs, and starts another, or raises UserError.

SIGNALS = [signal.SIGINT, signal.SIGTERM]
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
    SIGNALS.append(signal.SIGHUP)
# Minimum values of flags; by default 1 for integers and 0 for floats
AT_LEAST = dict(
    num_workers=0, seed=0, max_batches_ahead=0, keep_checkpoints=0, reward_clip=1e-3,
    pbt_start_mutation=0, pbt_period_env_steps=0, pbt_replace_reward_gap=-np.inf, pbt_perturb_min=1, pbt_perturb_max=1,
)  # fmt: skip
# An actor that dies after fewer requests died early. Three early deaths of a worker in a row end the run, as does one
# death without any request before the first update of a new run
SHORT_LIFE = 1000
FIXED = (
    "env_id",
    "cfg_path",
    "match_wad",
    "num_policies",
    "policy_settings",
    "rnn_type",
    "hidden_size",
    "vector_size",
)  # a resumed run must have the same


def check(args: Args):
    """Raises UserError."""
    for name, value in asdict(args).items():
        least = AT_LEAST.get(name, int(type(value) is int))
        if isinstance(value, int | float) and not value >= least:  # also rejects NaN
            raise UserError(f"--{name.replace('_', '-')} {value} is out of range: at least {least}")
    if args.with_pbt and (args.num_policies == 1 or args.pbt_start_mutation >= args.total_timesteps):
        raise UserError("--with-pbt needs several policies, and --total-timesteps above --pbt-start-mutation")
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:  # the message has several lines
        raise UserError(f"--device {args.device}: {str(error).splitlines()[0]}") from None
    needed = args.num_policies * num_rows(args) * ENGINE_MEMORY * is_doom(args)
    free = shutil.disk_usage("/dev/shm").free >> 20
    if needed > free:  # the kernel would kill the run with SIGBUS
        raise UserError(
            f"/dev/shm has {free:,} MiB free, {needed:,} are needed: use fewer environments or a larger /dev/shm "
            "(docker run --shm-size=2g)"
        )


def seed_generators(seed: int):
    """Seeds the global generators. In an actor only its environments may use them; unseeded, they would draw the same
    numbers in every actor."""
    seed %= 2**32  # the range that NumPy accepts
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def handle_signals(inference: Inference):
    """Turns signals into a message to `collect`, so that no update is interrupted. The fork server starts while signals
    are ignored and inherits that, as does an actor until it has its own process group."""
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
        forkserver.set_forkserver_preload(["numpy", "torch", "gymnasium", "tyro", "tqdm", "vizdoom"])
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


def log(folder: Path, text, show=True):
    with open(folder / "log.txt", "a") as file:
        for line in text.splitlines():
            print(time.strftime("%Y-%m-%d %H:%M:%S"), line, file=file)
    if show:
        with contextlib.suppress(OSError):  # the terminal is closed, or the pipe has no reader; keep writing the file
            tqdm.write(text)  # without garbling the bar
            sys.stdout.flush()


def kill(actor):
    """Kills an actor and the child processes of its environments."""
    engines = ()
    with contextlib.suppress(OSError):  # it no longer exists
        engines = engine_ids(actor.pid)
    actor.kill()
    with contextlib.suppress(OSError):  # it no longer exists
        os.killpg(actor.pid, signal.SIGKILL)
    unlink_shared_memory(engines)  # of engines that were starting


@contextlib.contextmanager
def running(inference: Inference, folder: Path):
    """Runs the inference thread and the actors. Their seeds depend on the version, so that a resumed run, or a new
    actor, sees other episodes. A resumed run also has other seats."""
    args = inference.args
    rows = seat_rows(args, inference.policies[0].version)
    thread = threading.Thread(target=inference.run, name="inference", daemon=True)
    # fork is unsafe with threads and CUDA; spawn costs 100 MB per actor
    process_or_thread = mp.get_context("forkserver").Process if args.num_workers else threading.Thread
    actors = inference.actors
    early_deaths = Counter()  # consecutive early deaths of each worker's actors

    def start(worker):
        inference.pipes[worker], pipe = mp.Pipe()
        inference.selector.register(inference.pipes[worker], selectors.EVENT_READ)
        life = inference.policies[0].version + early_deaths[worker]
        seed = random.Random(f"{args.seed} {life} {worker}").getrandbits(30)
        arguments = (args, worker, rows[worker], seed, inference.shared_mailbox, pipe)
        actor = process_or_thread(target=run_actor, args=arguments, daemon=True)
        try:
            actor.start()
        except EOFError:  # the fork server could not fork and exited
            raise UserError(f"actor {worker} cannot be started: too many processes (ulimit -u)?") from None
        inference.heard[worker] = time.monotonic()
        actors[worker] = actor
        if args.num_workers:
            pipe.close()  # now only the actor has it: EOF when it dies

    def replace(worker, text):
        """Called by the inference thread. text: the actor's own error message, if it could send one. Raises
        UserError."""
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
        if not (asked or inference.policies[0].version) or not args.num_workers or early_deaths[worker] == 3:
            raise UserError(f"actor {worker}: {text}")
        log(folder, f"actor {worker}: {text}; starting another")
        start(worker)

    inference.replace = replace
    try:
        for worker in range(len(inference.pipes)):
            start(worker)
        thread.start()
        yield
    finally:
        if error := sys.exception():
            with contextlib.suppress(OSError):  # a full disk
                log(folder, f"error: {error}", show=False)
        inference.learner_pipe.close()
        if thread.is_alive():
            thread.join(10)
        for pipe in filter(None, inference.pipes):
            pipe.close()
        deadline = time.monotonic() + 5
        for actor in actors.values():
            actor.join(max(0.0, deadline - time.monotonic()))
            if args.num_workers:
                kill(actor)


def save_checkpoint(folder: Path, population: Population):
    """Writes a checkpoint of all policies, and best.pth if their objective is the best so far: that of the best policy,
    or the mean of all if they play each other, because one policy's win is then another's loss. A file has tensors and
    plain values, and is written under a temporary name first, so that it is complete or absent."""
    folder = folder / "checkpoints"
    folder.mkdir(exist_ok=True)
    args = population.args
    learners = population.learners
    names = [f"checkpoint_{mean_step(learners):012d}.pth"]
    best_objective = population.best_objective
    if all(len(learner.inference.episodes) == 100 for learner in learners):
        objective = (max if args.seats == 1 else np.mean)([population.objective(learner) for learner in learners])
        if objective > best_objective:
            best_objective = float(objective)
            names.insert(0, "best.pth")  # first, because the checkpoint records this objective
    policies = []
    for learner in learners:
        own = dict(agent=learner.agent.state_dict(), optimizer=learner.optimizer.state_dict(), genes=learner.genes)
        policies.append(own | dict(version=learner.inference.version, global_step=learner.global_step))
    content = dict(
        policies=policies,
        exchanged=population.exchanged,
        defaults=population.defaults,
        best_objective=best_objective,
    )
    buffer = io.BytesIO()  # torch.save hides OSError (a full disk)
    torch.save(content, buffer)
    for name in names:
        (folder / "saving.tmp").write_bytes(buffer.getbuffer())
        os.replace(folder / "saving.tmp", folder / name)
    population.best_objective = best_objective  # only after writing succeeded
    # Ordered by time of writing, because a damaged file that was skipped may have more steps
    for old in sorted(folder.glob("checkpoint_*.pth"), key=os.path.getmtime)[: -args.keep_checkpoints]:
        old.unlink()


def read_checkpoint(folder: Path):
    """Returns the latest readable checkpoint, or None if there is none. Raises UserError if none can be read."""
    folder = folder / "checkpoints"
    paths = sorted(folder.glob("checkpoint_*.pth"), reverse=True)
    for path in paths:
        with contextlib.suppress(Exception):
            return torch.load(path, map_location="cpu", weights_only=True)
        print(f"warning: {path} cannot be read")
    if paths:  # a new run would eventually delete them
        raise UserError(f"no checkpoint in {folder} can be read: move them away to start over")


def load_checkpoint(folder: Path, population: Population):
    """Restores all policies. Raises UserError if no checkpoint can be read, or if it belongs to other networks."""
    content = read_checkpoint(folder)
    if content is None:
        return
    try:
        for learner, saved in zip(population.learners, content["policies"]):
            learner.agent.load_state_dict(saved["agent"])
            learner.optimizer.load_state_dict(saved["optimizer"])
            learner.inference.publish(saved["version"])
            learner.global_step = saved["global_step"]
            typed = population.defaults.items() - content["defaults"].items()  # flags typed now apply to all policies
            population.give(learner, saved["genes"] | dict(typed))
        population.exchanged = content["exchanged"]
        population.best_objective = content["best_objective"]
    except Exception as error:  # of any type, often with many lines
        what = " ".join(str(error).split()).split(". ")[0]
        raise UserError(f"the latest checkpoint in {folder} belongs to another network or is damaged: {what}") from None


class Reporter:
    """Updates the progress bar, log.txt and TensorBoard, which has a folder for each policy. Rates are averages since
    the last report."""

    SECONDS = 5  # between two reports

    def __init__(self, population: Population, inference: Inference, folder: Path):
        """Create it before the inference thread starts: waiting times count from here on."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only needed here

        self.folder = folder
        self.args = args = population.args
        sizeless = sys.stderr.isatty() and 0 in os.get_terminal_size(sys.stderr.fileno())  # tqdm would draw nothing
        self.learners = population.learners
        self.inference = inference
        self.writers = []
        for learner in self.learners:
            place = str(folder / f"policy_{learner.number:02d}")
            self.writers.append(SummaryWriter(place, flush_secs=10, purge_step=learner.global_step + 1))
            self.writers[-1].add_text("args", json.dumps(asdict(learner.args), indent=2))
        self.bar = tqdm(
            total=self.args.total_timesteps,
            initial=mean_step(self.learners),
            dynamic_ncols=True,
            disable=sizeless or not args.num_workers or None,  # off in a debugger; None: off without a terminal
            smoothing=0,
            bar_format="{percentage:.0f}% {bar} {remaining}{postfix}",
        )
        self.metrics = []  # of each policy's last iteration
        self.score = "no episode has ended"
        self.first = self.last = self.now()

    def now(self):
        steps = {learner: learner.global_step for learner in self.learners}
        return Counter({**self.inference.counts, **self.inference.waited, **steps}, seconds=time.monotonic())

    def update(self, metrics, lines):
        """Called after every iteration, with the metrics of each policy and the lines of an exchange. Reports every
        `SECONDS`."""
        if lines or not self.metrics:  # the first time, and when an exchange may have changed them
            for learner, writer in zip(self.learners, self.writers):
                for name, value in learner.genes.items():
                    writer.add_scalar(f"pbt/{name}", value, learner.global_step)
        self.metrics = metrics
        for line in lines:
            log(self.folder, f"step {mean_step(self.learners):,}: {line}")
        self.bar.update(min(mean_step(self.learners), self.bar.total) - self.bar.n)
        if time.monotonic() - self.last["seconds"] >= self.SECONDS:
            self.report()

    def report(self):
        now = self.now()
        change = now - self.last
        self.last = now
        seconds = change["seconds"]
        fps = 0
        scores = []
        for learner, writer, metrics in zip(self.learners, self.writers, self.metrics):
            sps = change[learner] / seconds
            fps += sps * self.args.frameskip
            scalars = metrics | {
                "charts/SPS": sps,
                "charts/FPS": sps * self.args.frameskip,
                "stats/learner_wait": change["learner"] / seconds,  # fraction of the time: learners had no FULL block
                "stats/inference_idle": change["requests"] / seconds,  # inference had no requests
                "stats/inference_blocked": change["blocks"] / seconds,  # it had requests but no FREE block
                "stats/inference_batch": change["rows"] / max(1, change["forwards"]),  # rows served together
            }
            if episodes := learner.inference.episodes.copy():
                scalars |= zip((f"charts/{name}" for name in EPISODE), np.mean(episodes, axis=0))
            scores.append(f"{scalars.get(f'charts/{self.args.pbt_target_objective}', np.nan):.2f}")
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, learner.global_step)
        if scores != ["nan"] * len(scores):
            self.score = f"{self.args.pbt_target_objective.removeprefix('episodic_')} {', '.join(scores)}"
        total = now - self.first  # over the whole session, so that it does not flicker
        if total["blocks"] >= total["learner"]:
            limit = "learner"
        elif total["requests"] > total["seconds"] / 2:
            limit = "environments"
        else:
            limit = "inference"
        lag = np.mean([metrics["lag/mean"] for metrics in self.metrics])
        text = f"{self.score}, {fps:,.0f} frames/s, limit: {limit}, lag {lag:.0f}"
        self.bar.set_postfix_str(text)
        log(self.folder, f"step {mean_step(self.learners):,}: {text}", show=self.bar.disable)

    def close(self):
        """Makes a last report."""
        if self.metrics and any(learner.global_step > self.last[learner] for learner in self.learners):
            self.report()
        self.bar.close()
        for writer in self.writers:
            writer.close()


def mean_step(learners: list[Learner]) -> int:
    return sum(learner.global_step for learner in learners) // len(learners)


def iterate_all(population: Population, blocks: list[slice], threads: dict, folder: Path):
    """Runs an iteration of every policy, in parallel on different devices and in turn on the same device, which has one
    thread. Waits until no thread is learning, then returns the metrics of each policy, or raises the error of one. In
    population-based training, however, a policy whose update is not finite is replaced by the best of the others and
    takes its metrics. If it fails again in the next iteration, the weights are not the cause: the error is raised."""
    learners = population.learners
    futures = [threads[learner.device].submit(learner.iterate, blocks) for learner in learners]
    errors = [future.exception() for future in futures]  # waits for all
    failed = [learner for learner in learners if isinstance(errors[learner.number], FloatingPointError)]
    healthy = [learner for learner in learners if learner not in failed]
    for learner in failed:
        if population.args.with_pbt and healthy and learner not in population.failed:
            best = max(healthy, key=population.objective)
            population.replace(learner, best)
            futures[learner.number] = futures[best.number]
            log(folder, f"policy {learner.number} is replaced by policy {best.number}: {errors[learner.number]}")
    population.failed = failed
    return [future.result() for future in futures]


def train(args: Args, folder: Path) -> int:
    """Trains, and returns the exit code: 0, or 130 if a signal stopped the run."""
    check(args)
    torch.backends.cudnn.allow_tf32 = False  # no TF32: mu and pi must agree at lag 0
    torch.set_num_threads(max(1, num_cores() // 2))  # each for the learners and for inference
    seed_generators(args.seed)
    for option, value in {-1: 2**31 - 1, -4: 0, -8: 1}.items():  # M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX
        ctypes.CDLL(None).mallopt(option, value)  # keep freed memory: saves a third of an update on images on a CPU
    spaces = spaces_of(args)
    agents = []
    for policy in range(args.num_policies):
        device = f"cuda:{policy % torch.cuda.device_count()}" if args.device == "cuda" else args.device
        agents.append(Agent(spaces, args).to(device))
    inference = Inference(args, spaces, agents)
    learners = [Learner(args, i, agent, policy) for i, (agent, policy) in enumerate(zip(agents, inference.policies))]
    population = Population(args, learners)
    lock(folder)
    load_checkpoint(folder, population)
    step = mean_step(learners)
    if step >= args.total_timesteps:
        print("Already complete: raise --total-timesteps to continue.")
        return 0
    place = f"resuming {folder} at step {step:,}" if step else f"a new run in {folder}"
    workers = f"{args.num_workers} workers on {num_cores()} cores"
    games = f"{workers}, {args.num_envs_per_worker} games each, {args.seats} agents a game"
    log(folder, f"{args.env_id}: {args.num_policies} policies, {games}\n{place}")
    for learner in learners:
        wait_for(learner.device)  # everything above used the default stream; learners use their own
    (folder / "cfg.tmp").write_text(json.dumps(dict(file=__file__, args=args.typed), indent=2))
    os.replace(folder / "cfg.tmp", folder / "cfg.json")
    handle_signals(inference)
    reporter = Reporter(population, inference, folder)
    code = 0
    deadline = np.inf
    threads = {}
    for device in {learner.device for learner in learners}:
        threads[device] = concurrent.futures.ThreadPoolExecutor(
            1, initializer=contextlib.ExitStack().enter_context, initargs=(own_stream(device),)
        )
    with running(inference, folder):
        saved_at = time.monotonic()
        try:
            while mean_step(learners) < args.total_timesteps and time.monotonic() < deadline:
                blocks = collect(inference)
                metrics = iterate_all(population, blocks, threads, folder)
                lines = population.exchange() if args.with_pbt else []  # no thread is learning now
                inference.learner_pipe.send(blocks)  # LEARNING -> FREE: the last `wait_for` covered all reads
                reporter.update(metrics, lines)
                deadline = min(deadline, time.monotonic() + args.train_for_seconds)  # counts from the first iteration
                if time.monotonic() - saved_at >= args.save_every_sec:
                    save_checkpoint(folder, population)
                    saved_at = time.monotonic()
        except KeyboardInterrupt:
            code = 130
        finally:
            # Skip if nothing was learned, or if the last step may have corrupted the weights
            if mean_step(learners) and not isinstance(sys.exception(), FloatingPointError):
                save_checkpoint(folder, population)
            reporter.close()
    log(folder, f"{'stopped' if code else 'done'}: {mean_step(learners):,} steps, {reporter.score}")
    if mean_step(learners):
        place = shlex.quote(str(folder))
        game = f"--cfg-path {shlex.quote(args.cfg_path)}" if args.cfg_path else f"--env-id {shlex.quote(args.env_id)}"
        log(folder, f"play: python evaluate.py {place} {game}\ncurves: tensorboard --logdir {place}")
    more = " and a larger --total-timesteps" if mean_step(learners) >= args.total_timesteps else ""
    log(folder, f"continue: the same command with --experiment {shlex.quote(args.experiment)}{more}")
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
        if saved.cfg_path and args.cfg_path != saved.cfg_path:  # a run's folder must not decide which code runs
            raise UserError(f"type --cfg-path {saved.cfg_path} again: a scenario contains code")
        if not is_doom(saved) and args.env_id != saved.env_id:
            raise UserError(f"type --env-id {saved.env_id} again: it is a module")
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
    except (UserError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
