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
# appo_doom_multigpu.py $Id$
"""Asynchronous PPO with V-trace on ViZDoom: the whole pipeline of Sample Factory / IMPALA in one file.

    python appo_doom.py --env-id battle --num-workers 20
    python evaluate.py train_dir/NAME    # plays what the run of that name has learned
    torchrun --standalone --nproc-per-node 4 appo_doom_multigpu.py --env-id battle --num-workers 20    # 80 in all
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 appo_doom_multigpu.py [...]

On 2 cores of an AMD EPYC (Zen 5, bfloat16, no GPU) `--env-id basic` reaches a mean return of 75 in 40 seconds
(median of three seeds with default flags, 2026-11-22; benchmark/learning.sh basic).

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

A deliberate edit of appo_doom.py, for several GPUs or machines. What differs: each process of `torchrun`, a *rank*,
runs this file, with a GPU and actors of its own, and all take each optimiser step together: the very one that a single
process would take on the union of their batches. Summed over the ranks are what is averaged over samples
(`masked_mean`), the `moments` of the inputs, the gradients (`Learner.step`), the counts of an iteration
(`Learner.count`), and who leaves (`collect_together`). Rank 0 alone reports and saves; returns and times are its own.
All else is the same text.

Words: a *worker* is one actor process; it steps its environments in one or more *splits*. A *row* is one environment's
endless stream of experience; a *group* is the rows of one split of one worker, which ask for actions together. A *slot*
is room for one rollout (T steps of one row), a *batch* is B rollouts, from which the learner makes one optimiser step.
An *iteration* begins when the learner takes the slots of `num_batches_per_epoch` batches at once, passes `num_epochs`
times over them, and ends when it gives them back. A *step* is one decision of the agent, a *frame* one tick of the
engine (frames = steps x frameskip). Every policy that is published has a *version*, one higher than the last; the *lag*
of a sample is the learner's version minus the version that chose its action.

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
import gc
import importlib.metadata
import importlib.util
import json
import multiprocessing.dummy
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import queue
import random
import resource
import selectors
import shlex
import shutil
import signal
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
import torch.distributed as dist
import torch.distributed.nn  # imported after a group was made, it would keep the group, whose threads can crash the end
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
    """Under torchrun --num-workers, --batch-size and the threads are each rank's own, --total-timesteps the steps of
    all together; with --device auto or cuda each rank of a machine has the GPU of its number."""

    # --- run
    env_id: str = "basic"
    """basic, my_way_home, deadly_corridor, defend_the_center, defend_the_line, health_gathering,
    health_gathering_supreme, battle, battle2, or benchmark (battle without measurements and with 9 flat actions)"""
    cfg_path: Auto[str] = None  # a ViZDoom scenario .cfg of your own, trained on instead of `env_id`
    frameskip: int = 4  # engine ticks (frames) per step of the agent
    seed: int = 1  # of the network, of the action sampling and of the environments
    total_timesteps: int = 1_000_000  # stop after this many steps (frames / frameskip) of all sessions
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
    num_workers: Auto[int] = None
    """actor processes. Default: the cores this process may use. 0: one actor, a thread of this process, to debug
    (implies sync)"""
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


class UserError(Exception):
    """Something the user can fix; printed as one line, without a traceback."""


# === Environment ======================================================================================================

TICKS_PER_SECOND = 35
ENV_SHARED_MEMORY = 3 * 2**20  # bytes; an engine's file is 10 MiB but sparse: at 160x120 at most 2.8 MiB are used
SCREEN = (120, 160, 3)  # what the engine renders: height, width, RGB. Sample Factory's 160x120
IMAGE = (72, 128, 3)  # what the agent sees, nearest neighbour: 3 of every 5 rows, 4 of every 5 columns
# Read from every engine. USER2 is the number of kills in battle and battle2.
VARIABLES = ("SELECTED_WEAPON", "SELECTED_WEAPON_AMMO", "HEALTH", "USER2")
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
    shaping: str = ""  # what is added to the engine's reward: "", "gathering" or "battle"
    settings: dict = {}  # where they are not SETTINGS


TURN, WALK, STRAFE = ("TURN_LEFT", "TURN_RIGHT"), ("MOVE_FORWARD", "MOVE_BACKWARD"), ("MOVE_LEFT", "MOVE_RIGHT")
ARENA = dict(doom_skill=2, render_crosshair=True)
BATTLE = dict(buttons=(*WALK, "MOVE_RIGHT", "MOVE_LEFT", "ATTACK", "SPEED", "TURN_LEFT_RIGHT_DELTA"),
              heads=(3, 3, 2, 2, 11), measurements=True, shaping="battle", settings=ARENA)  # fmt: skip
GATHER = dict(buttons=TURN + WALK, heads=(5,), shaping="gathering",
              settings=dict(living_reward=0.01, render_hud=False, render_weapon=False))  # fmt: skip
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
}  # fmt: skip


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
    # If its parent died before the kernel was told to watch it, the engine is not started.
    script = f"""#!/bin/sh
trap '' INT TERM
mkdir -p {folder}/_vizdoom && cd {folder} || exit 1
exec setpriv --pdeathsig KILL sh -c '[ $PPID = {os.getpid()} ] && exec "$@"' - {engine} "$@"
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


def make_envs(args: Args, num_envs: int) -> gym.vector.VectorEnv:
    """The environments of one split of a worker. Edit this function to train on something else.

    What it returns must reset on the step after an episode's end (NEXT_STEP), start nothing before `reset`, and take
    Discrete or MultiDiscrete actions. `Agent` sees uint8 images [height, width, channels], at least 36 x 36, and float
    vectors: one alone, or several in a Dict. In every step's `info` there may be `raw_reward`, a float that scores
    are sums of; `game_over`, a bool: False where an episode ends and the game goes on, as after a lost life; and what
    else EPISODE names. Actors cannot start processes of multiprocessing (AsyncVectorEnv). ENV_SHARED_MEMORY is 0 for
    environments without engines.
    """
    envs = [lambda: DoomEnv(args.env_id, args.frameskip, args.cfg_path)] * num_envs
    return gym.vector.SyncVectorEnv(envs, copy=False, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)


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


# === Mailbox and rollouts =============================================================================================


# What is summed over each episode, and reported as the mean over the last 100: the environment's own reward, the
# reward as it is trained on, and 1 a step. A name of your own, added here, is summed over the environment's info[name].
EPISODE = ("episodic_return", "episodic_return_trained", "episodic_length")


def room_for(spaces: Spaces, *shape: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Observations of zeros, by name [*shape, ...]: fractions are float32, whole numbers as in the space."""
    room = {}
    for name, space in spaces.obs.items():
        dtype = torch.float32 if space.dtype.kind == "f" else getattr(torch, space.dtype.name)
        room[name] = torch.zeros((*shape, *space.shape), dtype=dtype, device=device)
    return room


class Mailbox:
    """The only memory that actors share with the main process. Row r = worker * num_envs_per_worker + environment.

    Between its request and its reply a group's rows belong to the inference thread, otherwise to its actor: no locks.
    """

    def __init__(self, spaces: Spaces, rows: int):
        # written by the actor, between a reply and its next request
        self.obs = room_for(spaces, rows)  # the current observation
        self.reward = torch.zeros(rows)  # of the action before it, after scale and clip
        self.terminated = torch.zeros(rows, dtype=torch.bool)  # that action ended the episode for good
        self.first = torch.zeros(rows, dtype=torch.bool)  # obs is the first of an episode
        self.episode = torch.zeros(rows, len(EPISODE))  # of the episode that ended just now (a length of 0: none did)
        # written by inference, between a request and its reply
        self.action = torch.zeros(rows, len(spaces.heads), dtype=torch.int64)  # what to do next

    def arrays(self) -> SimpleNamespace:
        """The same memory as NumPy arrays, whose indexing is much cheaper than torch's."""
        arrays = {name: field.numpy() for name, field in vars(self).items() if name != "obs"}
        return SimpleNamespace(obs={name: part.numpy() for name, part in self.obs.items()}, **arrays)


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
        self.versions = np.zeros((T, slots), np.int64)  # of the policy that chose actions[t]


def slots_needed(args: Args) -> int:
    """With `sync` the slots of one iteration, one for every row: none is FREE before the update has been published.
    That is all that `sync` is; what else it changes are defaults and checks in `resolve`.

    Without it a slot for every row to fill, one iteration LEARNING, and `max_batches_ahead` FULL. These are never too
    few: when all groups wait for slots and the learner for an iteration, none is FILLING or LEARNING and less than an
    iteration is FULL, so there is a FREE slot for every row."""
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
    """x [N, ...] -> N of all ranks, and the mean and the variance over them [...]. (sum_over_ranks: below.)"""
    n = int(sum_over_ranks(torch.tensor(len(x))))
    mean = sum_over_ranks(x.sum(0)) / n
    return n, mean, sum_over_ranks((x - mean).square_().sum(0)) / n


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
    mask: torch.Tensor  # bool [T, B]: valid and younger than max_policy_lag: what the losses average over
    restarts: list[int]  # see Agent.forward; on the host


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """x [..., T, B], mask [T, B] of 0 and 1 -> [...]: the mean over the samples that have a 1 (NaN: none has) of all
    ranks, equal on all to the bit. Its gradient is this rank's share: `Learner.step` adds up the shares."""
    own = torch.cat([(x * mask).sum((-2, -1)).flatten(), mask.sum().view(1)])
    total = sum_over_ranks(own.detach().clone())
    share = own[:-1] / total[-1]
    return (total[:-1] / total[-1] + (share - share.detach())).view(x.shape[:-2])


def appo_loss(args: Args, agent: Agent, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped losses with V-trace's targets over the samples in `batch.mask`. Loss and metrics, on the device.

    A loss of your own goes here: of each sample [T, B], averaged by `mean`, added to `loss`. What it needs of the time
    of acting is one more field of `Rollouts` and `Batch`, written in `Inference.act` and copied in `Learner.gather`."""
    logits, values, _ = agent(batch.obs, batch.first, batch.rnn_state, batch.restarts)
    logprobs, entropy, symmetric_kl = evaluate_actions(logits[:-1], batch.actions, agent.heads)
    log_ratio = logprobs - batch.logprobs
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

    def __init__(self, args: Args, worker: int, mailbox: SimpleNamespace, seed: int):
        """mailbox: its arrays."""
        random.seed(seed)  # else forked actors would all draw the same numbers from these generators
        np.random.seed(seed)
        torch.manual_seed(seed)
        S = args.worker_num_splits
        n = args.num_envs_per_worker // S
        self.args, self.mailbox, self.seed, self.n = args, mailbox, seed, n
        self.splits = [make_envs(args, n) for _ in range(S)]
        starts = range(worker * args.num_envs_per_worker, (worker + 1) * args.num_envs_per_worker, n)
        self.rows = [slice(start, start + n) for start in starts]
        self.ended = np.zeros((S, n), bool)  # the last step ended an episode: the next one only resets
        self.totals = np.zeros((S, n, len(EPISODE)))  # of the episodes under way

    def reset(self, split: int) -> None:
        """Starts the split's environments."""
        r, mailbox = self.rows[split], self.mailbox
        self.write(r, self.splits[split].reset(seed=self.seed + split * self.n)[0])
        mailbox.first[r], mailbox.terminated[r], mailbox.reward[r], mailbox.episode[r] = True, False, 0.0, 0.0

    def step(self, split: int) -> None:
        r, envs, mailbox, totals = self.rows[split], self.splits[split], self.mailbox, self.totals[split]
        first = self.ended[split].copy()
        action = mailbox.action[r].reshape(envs.action_space.shape).copy()  # the environment may keep it
        observation, reward, terminated, truncated, info = envs.step(action)
        self.write(r, observation)
        raw_reward = info.get("raw_reward", reward)
        if raw_reward.dtype.kind != "f":  # Gymnasium gives all environments' values the type of the first
            raise TypeError(f"raw_reward must be a float, not {raw_reward.dtype}")
        if not np.isfinite(reward).all():
            raise ValueError(f"a reward is not finite: {reward}")
        reward = np.clip(reward * self.args.reward_scale, -self.args.reward_clip, self.args.reward_clip)
        mailbox.reward[r], mailbox.terminated[r], mailbox.first[r] = reward, terminated, first
        self.ended[split] = terminated | truncated
        own = [info.get(name, np.zeros(self.n)) for name in EPISODE[3:]]
        totals += np.stack([raw_reward, reward, np.ones(self.n), *own], axis=-1) * ~first[:, None]
        over = np.asarray(info.get("game_over", self.ended[split]), bool)  # not where a lost life ended it
        mailbox.episode[r] = totals * over[:, None]
        totals[over] = 0

    def write(self, r: slice, observation) -> None:
        for name, part in by_name(observation).items():
            self.mailbox.obs[name][r] = part

    def close(self) -> None:
        for envs in self.splits:
            envs.close()


DIED = b"\xff"  # instead of a split's number: the traceback of a dying actor follows


def read_splits(pipe) -> bytes:
    """Waits for bytes on one end of an actor's pipe, each the number of a split; none when the other end is closed."""
    try:
        return os.read(pipe.fileno(), 4096)
    except ConnectionResetError:  # closed with a byte of ours unread
        return b""


def write_splits(pipe, splits: bytes) -> None:
    with contextlib.suppress(OSError):  # the other end is closed, as the next read will say
        os.write(pipe.fileno(), splits)


def actor(core: int | None, args: Args, worker: int, seed: int, mailbox: Mailbox, pipe) -> None:
    """An actor. A byte that it writes to its pipe says that the rows of that split are written. A byte that it reads
    says that the split's actions are written. The end of the pipe is the end of the run, or of the main process. If it
    dies of an exception, it sends the traceback. Where a library crashed, or hung until the timer ran out, it writes to
    stderr."""
    seconds = 0.0  # no timer
    if args.num_workers:  # else it is a thread of the main process, which may be in a debugger
        if args.actor_timeout:
            seconds = args.actor_timeout + worker / 10  # actors that hang together: one stack after another
        faulthandler.enable()
        faulthandler.register(signal.SIGALRM, chain=True)  # chain: after that the signal kills, as always
        os.set_inheritable(pipe.fileno(), False)  # a program that an environment starts would keep it open
        if core is not None:
            os.sched_setaffinity(0, {core})  # engines inherit it: both talk twice a tic, cheapest on one core
        os.nice(10)  # where cores are short, inference and learning come first: actors without actions only wait
        torch.set_num_threads(1)
    timer = functools.partial(signal.setitimer, signal.ITIMER_REAL)
    with contextlib.closing(pipe):
        try:
            timer(seconds * args.num_envs_per_worker)
            envs = WorkerEnvs(args, worker, mailbox.arrays(), seed)
            for split in range(args.worker_num_splits):
                timer(seconds * envs.n)
                envs.reset(split)
                timer(0)
                write_splits(pipe, bytes([split]))  # from here on its rows belong to inference, until a reply names it
            while splits := read_splits(pipe):
                for split in splits:
                    timer(seconds)
                    envs.step(split)
                    timer(0)  # waiting for actions is no hang
                    write_splits(pipe, bytes([split]))
            timer(seconds)
            envs.close()
        except BaseException:  # sys.exit() in an environment, too
            write_splits(pipe, DIED + traceback.format_exc().encode(errors="replace"))
            sys.exit(1)


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

    def __init__(self, args: Args, spaces: Spaces, agent: Agent, device: torch.device):
        self.args, self.device = args, device
        rows, slots = max(1, args.num_workers) * args.num_envs_per_worker, slots_needed(args)
        self.size = args.num_envs_per_worker // args.worker_num_splits  # rows in a group
        self.mailbox = Mailbox(spaces, rows)
        for field in fields_of(self.mailbox):
            field.share_memory_()
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
        self.deadline = np.inf  # when the time is up

    def load(self, checkpoint: dict) -> None:
        """Loads all but the weights, which the agent has already."""
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.version, self.global_step = checkpoint["version"], checkpoint["global_step"]
        self.best_return = checkpoint["best_return"]
        self.inference.episodes.extend(episode for episode in checkpoint["episodes"] if len(episode) == len(EPISODE))
        self.inference.acting.publish(self.version)

    def collect(self) -> np.ndarray | None:
        """Waits for the slots of an iteration: FULL -> LEARNING. None when the time is up or the user stops the run
        (STOP is below, beside what a signal does). Raises what has ended the inference thread."""
        start, args = time.perf_counter(), self.args
        count = args.num_batches_per_epoch * args.batch_size // args.rollout
        while not STOP.asked_at and time.monotonic() < self.deadline:
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
        valid = ~rollouts.first[1:, slots]
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
        """lags of an iteration's valid samples -> of all ranks how many, how many too old, the sum; own longest."""
        too_old = np.count_nonzero(lags >= self.args.max_policy_lag)
        sums = sum_over_ranks(torch.tensor([len(lags), too_old, int(lags.sum())])).tolist()
        return *sums, int(lags.max(initial=0))

    def gather(self, slots: np.ndarray, version: int) -> Batch:
        """Copies slots out of the rollouts. version: the learner's when it took the slots; lags are counted from it."""
        r, d_slots = self.inference.rollouts, torch.from_numpy(slots).to(self.device, non_blocking=True)
        obs = {name: field.index_select(1, d_slots) for name, field in r.obs.items()}
        on_device = {name: getattr(r, name).index_select(1, d_slots) for name in ("actions", "logprobs", "values")}
        rnn_state = r.rnn_state.index_select(0, d_slots)
        first, lag = r.first[:, slots], version - r.versions[:, slots]
        restarts = [0, *(np.flatnonzero(first[1:].any(1)) + 1).tolist()]  # here without asking the device
        mask = ~first[1:] & (lag < self.args.max_policy_lag)
        host = dict(first=first, rewards=r.rewards[:, slots], terminated=r.terminated[:, slots], mask=mask)
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
        for parameter in self.parameters:
            sum_over_ranks(parameter.grad)
        grad_norm = nn.utils.clip_grad_norm_(self.parameters, self.args.max_grad_norm or torch.inf, foreach=True)
        if torch.isfinite(loss + grad_norm):  # waits for the device: nothing broken is published or saved
            self.optimizer.step()
            return grad_norm
        if sum_over_ranks(mask.sum()):
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


# === Ranks ============================================================================================================


def join_ranks() -> None:
    """Under `torchrun`: meets the other ranks, and takes this one's share of the machine's cores."""
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


def collect_together(learner: Learner) -> np.ndarray | None:
    """`Learner.collect`; None, too, where another rank leaves. An error of this rank ends the others in good order."""
    slots = None
    try:
        slots = learner.collect()
    finally:
        start = time.perf_counter()
        leaving = sum_over_ranks(torch.tensor(int(slots is None)))
        learner.inference.counts["ranks"] += time.perf_counter() - start
    return None if leaving else slots


def follow(args: Args, learner: Learner) -> None:
    """What `learn` is on rank 0, on the others: they leave reports and checkpoints to it."""
    while learner.global_step < args.total_timesteps and (slots := collect_together(learner)) is not None:
        learner.iterate(slots)


# === Actors and signals ===============================================================================================


def start_forkserver() -> None:
    """Starts the process that actors are forked from. It imports its modules beside this one, which saves a second."""
    mp.get_context("forkserver").set_forkserver_preload(["numpy", "torch", "gymnasium", "tyro", "tqdm", "vizdoom"])
    # Blocked signals are inherited: what a terminal or a batch system sends to all is for the main process alone, from
    # an actor's first moment on. A signal that comes meanwhile is ours when we unblock.
    multiprocessing.resource_tracker.ensure_running()  # now, because its start unblocks the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


class Actors:
    """The actors: started, listened to, and replaced when they die. One thread at a time owns all of this: the main
    thread while the environments start, then the inference thread, and the main thread again when they are to stop.

    When an actor dies, its environments and the last transition of each of its rows are lost: the row's next
    observation is a `first` one, which makes that transition invalid. Earlier steps in its FILLING slots are kept."""

    SHORT_LIFE = 1000  # requests. A worker whose actors die sooner three times in a row ends the run

    def __init__(self, args: Args, inference: "Inference", session: int, log):
        """Another `session` number gives the environments other seeds."""
        self.args, self.inference, self.session, self.log = args, inference, session, log
        self.context = mp.get_context("forkserver")  # fork is unsafe beside threads and CUDA; spawn costs 100 MB each
        self.selector, self.started, self.deaths = selectors.DefaultSelector(), False, 0
        self.traceback = b""  # the last one shown
        self.selector.register(inference.bell, selectors.EVENT_READ)
        self.requests: list[int] = []  # groups that wait for actions, the oldest first: their rows are inference's
        # of each worker: its actor, our end of its pipe, how often this actor has asked, how many died early in a row
        self.workers = max(1, args.num_workers)
        self.actors, self.pipes = [None] * self.workers, [None] * self.workers
        self.requested, self.short_lives = [0] * self.workers, [0] * self.workers

    def start_all(self) -> None:
        """Returns when every environment has been started, or the user stops the run. Raises UserError."""
        for worker in range(self.workers):
            self.start(worker)
        total, n = len(self.inference.mailbox.first), self.inference.size
        with tqdm(total=total, desc="starting environments", disable=True if rank_of()[0] else None) as bar:
            while len(self.requests) * n < total and not STOP.asked_at:
                self.wait(0.5)
                bar.update(len(self.requests) * n - bar.n)
        self.started = True

    def start(self, worker: int) -> None:
        args, allowed = self.args, sorted(os.sched_getaffinity(0))
        core = allowed[worker % len(allowed)] if args.set_workers_cpu_affinity else None
        # The seed of its first environment; environment i gets seed + i. Below 2**30, so that all fit 31 bits.
        entropy = np.random.SeedSequence((args.seed, self.session, worker, self.deaths))
        seed = int(entropy.generate_state(1)[0]) >> 2
        self.requested[worker] = 0
        self.pipes[worker], pipe = self.context.Pipe()
        self.selector.register(self.pipes[worker], selectors.EVENT_READ, worker)
        process = self.context.Process if args.num_workers else multiprocessing.dummy.Process  # dummy: a thread
        started = process(target=actor, args=(core, args, worker, seed, self.inference.mailbox, pipe))
        started.daemon = True
        started.start()
        self.actors[worker] = started
        # On return nothing refers to `pipe` here, so it is closed: the actor's copy is the only one, and ends with it.

    def wait(self, timeout: float | None = None) -> None:
        """Waits for requests, for slots that become free (the bell), or for the end. Raises UserError."""
        S = self.args.worker_num_splits
        for key, _ in self.selector.select(timeout):
            worker = key.data
            if worker is None:
                os.eventfd_read(self.inference.bell)
                continue
            data = read_splits(key.fileobj)
            splits, died, text = data.partition(DIED)
            self.requests += [worker * S + split for split in splits]
            self.requested[worker] += len(splits)
            if died or not data:
                self.replace(worker, text)

    def reply(self, groups: list[int]) -> None:
        """Gives the groups' rows back to their actors."""
        self.requests = [group for group in self.requests if group not in groups]
        for group in groups:
            worker, split = divmod(group, self.args.worker_num_splits)
            write_splits(self.pipes[worker], bytes([split]))

    def replace(self, worker: int, text: bytes) -> None:
        """The actor has ended, and with its pipe all that it had asked for. text: how its traceback begins, if it sent
        one. Raises UserError where another actor is not to be tried."""
        pipe, process = self.pipes[worker], self.actors[worker]
        self.requests = [group for group in self.requests if group // self.args.worker_num_splits != worker]
        self.selector.unregister(pipe)
        while rest := read_splits(pipe):
            text += rest
        pipe.close()
        process.join(5)
        if self.args.num_workers and process.is_alive():  # it has closed its pipe, but lives
            process.kill()
            process.join(5)
        if text:
            lines = text.decode(errors="replace").rstrip()
            how = "died: " + lines.splitlines()[-1]
            if text != self.traceback:  # actors that die of the same do not repeat it
                self.traceback = text
                self.log(f"actor {worker}:\n{lines}")
        elif process.exitcode == -signal.SIGALRM:
            how = "hung (its stack is above; a map that is not in the WAD does that, too)"
        elif (process.exitcode or 0) < 0:
            how = f"died of {signal.Signals(-process.exitcode).name}"
        else:
            how = f"ended (exit code {process.exitcode})"
        if not self.started:  # the user's to mend; another actor would end in the same way
            raise UserError(f"while its environments started, actor {worker} {how}")
        if not self.args.num_workers:  # a thread is not replaced
            raise UserError(f"actor {worker} {how}")
        self.deaths += 1
        self.short_lives[worker] = self.short_lives[worker] + 1 if self.requested[worker] < self.SHORT_LIFE else 0
        if self.short_lives[worker] == 3:
            raise UserError(f"for the third time in a row, actor {worker} {how}")
        self.log(f"actor {worker} {how}; starting another")
        self.start(worker)

    def stop(self) -> None:
        """Ends all actors: by closing their pipes, and after five seconds by force. A thread is waited for: Python
        cannot end beside one that is in an engine."""
        deadline = time.monotonic() + 5
        for pipe in filter(None, self.pipes):
            pipe.close()
        for process in filter(None, self.actors):
            process.join(max(0.0, deadline - time.monotonic()) if self.args.num_workers else None)
            if self.args.num_workers:
                process.kill()


STOP = SimpleNamespace(asked_at=None, writing=False)  # time of the first signal; a checkpoint is being written


def on_signal(number: int, frame) -> None:
    """What Ctrl-C (SIGINT) and SIGTERM do to a run. The first one asks: whoever waits for environments or slots looks
    at it twice a second, `learn` saves what is new, `sampling` ends the actors, and `train` returns 130. One that
    comes more than a second later ends this process at once, and with it actors and engines. A sooner one is
    taken for the first one, sent twice by a launcher; while a checkpoint is being written any is ignored."""
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


# === Main =============================================================================================================


# The ranges of numeric flags; what is not named here is free
AT_LEAST = {
    0: ("seed", "train_for_seconds", "save_every_sec", "num_workers", "actor_timeout", "max_batches_ahead", "gamma",
        "learning_rate", "vtrace_rho", "vtrace_c", "vtrace_lambda", "clip_coef", "ppo_clip_value", "vf_coef",
        "ent_coef", "max_grad_norm", "reward_clip"),
    1: ("frameskip", "total_timesteps", "keep_checkpoints", "num_envs_per_worker", "worker_num_splits", "rollout",
        "inference_threads", "learner_threads", "batch_size", "num_batches_per_epoch", "num_epochs", "max_policy_lag",
        "hidden_size"),
}  # fmt: skip
# A split is one byte, 255 says DIED; appo_loss bounds the ratio by 20 before V-trace does; no timer can be infinite
AT_MOST = dict(seed=2**31 - 1, worker_num_splits=255, vtrace_rho=20, vtrace_c=20, actor_timeout=10**6, gamma=1,
               vtrace_lambda=1)  # fmt: skip
BATCH_SHARE, SMALLEST_BATCH = 2, 1024  # default batch: rows * rollout / BATCH_SHARE samples, at least SMALLEST_BATCH
# Flags of one session, not of the experiment; and what a resumed run may not change
SESSION, FIXED = ("train_for_seconds",), ("env_id", "cfg_path")


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
    if args.device.startswith("cuda") and dist.is_torchelastic_launched():  # each rank of a machine has its own GPU
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
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
    learner_share, inference_share = (1, 1) if args.sync else (2, 4)
    args.learner_threads = args.learner_threads or (max(1, n // learner_share) if cpu else 1)
    args.inference_threads = args.inference_threads or (max(1, n // inference_share) if cpu else 1)
    if args.num_envs_per_worker % args.worker_num_splits:
        raise UserError(f"--num-envs-per-worker {args.num_envs_per_worker} is not divisible by "
                        f"--worker-num-splits {args.worker_num_splits}")  # fmt: skip
    rows = max(1, args.num_workers) * args.num_envs_per_worker
    batches = args.num_batches_per_epoch
    if args.batch_size is None and args.sync:  # one rollout of every row
        args.batch_size = max(1, rows // batches) * args.rollout
    elif args.batch_size is None:
        power = 2 ** round(np.log2(rows * args.rollout / BATCH_SHARE / batches))
        args.batch_size = max(1, min(8192, max(SMALLEST_BATCH, power)) // args.rollout) * args.rollout
    if args.batch_size % args.rollout:
        raise UserError(f"--batch-size {args.batch_size} is not a multiple of --rollout {args.rollout}")
    if args.sync and batches * args.batch_size != rows * args.rollout:
        raise UserError(f"--sync (which --num-workers 0 implies) needs one rollout of every row: {batches} batches of "
                        f"{args.batch_size} samples are not {rows} rows x {args.rollout} steps; --batch-size None "
                        "finds the size, if --num-batches-per-epoch divides the rows")  # fmt: skip
    return args


def check_memory(args: Args, spaces: Spaces, state_size: int) -> None:
    """Raises UserError where mailbox, engines or rollouts have no room: else CUDA, or the kernel, would end the run."""
    device, rows = torch.device(args.device), max(1, args.num_workers) * args.num_envs_per_worker
    shared = rows * (mebibytes(Mailbox(spaces, 1)) + ENV_SHARED_MEMORY / 2**20)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # ranks on this machine
    shared *= here
    slots = slots_needed(args) + args.batch_size // args.rollout  # and a batch that is gathered from them
    private = slots * mebibytes(Rollouts(spaces, args.rollout, 1, state_size, torch.device("cpu")))
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] / 2**20
    else:
        free = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) / 2**10
        with contextlib.suppress(OSError, ValueError):  # no limit of this container: no such file, or "max"
            free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()) / 2**20)
        free /= here
    if shared > (room := shutil.disk_usage("/dev/shm").free / 2**20):
        raise UserError(f"/dev/shm has {room:,.0f} MiB free, {shared:,.0f} MiB are needed: use fewer environments or a "
                        "larger /dev/shm (docker run --shm-size=2g)")  # fmt: skip
    if private > 0.8 * free:
        raise UserError(f"{slots:,} slots of rollouts need {private:,.0f} MiB of {free:,.0f} that are free, a fifth of "
                        "which must remain: use a smaller --batch-size or fewer environments")  # fmt: skip


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
                raise UserError(f"{folder} holds another environment, of {made_by}: {name} {before} -> {now}; "
                                "rename --experiment")  # fmt: skip
            print(f"override: {name} {before} -> {now}")
    if args.experiment is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        raise UserError("torchrun --max-restarts can only go on with a run that has a name: give it an --experiment")
    args.experiment = experiment
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


class Reporter:
    """The progress bar, log.txt and TensorBoard. Every rate is over the window since the last report."""

    SECONDS = 5  # between two reports

    def __init__(self, args: Args, learner: Learner, folder: Path, log):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only the main process writes

        self.args, self.learner, self.inference, self.log = args, learner, learner.inference, log
        self.writer = SummaryWriter(str(folder), flush_secs=10, purge_step=learner.global_step + 1)
        self.writer.add_text("args", json.dumps(asdict(args), indent=2))
        self.bar = tqdm(total=args.total_timesteps, initial=learner.global_step, desc=args.env_id[:8],
                        dynamic_ncols=True, bar_format="{desc} {percentage:.0f}%{bar}{remaining}{postfix}",
                        disable=None)  # fmt: skip
        self.metrics, self.last = {}, self.now()

    def now(self) -> Counter:
        counts = dict(time=time.monotonic(), step=self.learner.global_step, version=self.learner.version)
        return Counter(self.inference.counts, **counts)

    def update(self, metrics: dict[str, float]) -> float:
        """Called after every iteration, with its metrics. Every `SECONDS` it reports, and returns the mean return of
        the last 100 episodes; otherwise, and before there are so many, -inf."""
        self.metrics |= metrics
        step = self.learner.global_step
        self.bar.update(step - self.bar.n)
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
            "stats/all_reduce": change["ranks"] / seconds,  # or for the other ranks,
            "stats/inference_idle": change["idle"] / seconds,  # inference waits for requests,
            "stats/inference_blocked": change["blocked"] / seconds,  # or has requests and waits for free slots
            "stats/inference_batch": change["rows"] / max(1, change["forwards"]),  # rows served together
        }
        if episodes := list(self.inference.episodes):
            scalars |= zip((f"charts/{name}" for name in EPISODE), np.mean(episodes, axis=0).tolist())
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)
        if change["ranks"] > max(change["blocked"], change["waited"]):
            bottleneck = "another rank"
        elif change["blocked"] >= change["waited"]:
            bottleneck = "learner"
        elif change["idle"] > 0.5 * (seconds - change["blocked"]):
            bottleneck = "environments"
        else:
            bottleneck = "inference"
        mean = scalars.get("charts/episodic_return")
        score = f"return {mean:.2f}, " if episodes else ""
        text = f"{score}{fps:,.0f} frames/s, bottleneck: {bottleneck}, lag {self.metrics.get('lag/mean', 0):.1f}"
        self.bar.set_postfix_str(text)
        self.log(f"step {step:,}: {text}", self.bar.disable)
        if not change["version"]:
            self.log(f"warning: no update in {seconds:.0f} s: no sample could be used (lag/masked: --max-policy-lag)")
        return mean if len(episodes) >= 100 else -np.inf


def learn(args: Args, checkpoints: Path, learner: Learner, reporter: Reporter) -> None:
    """The learner's loop. Saves what was learned, at the end and before an error that leaves the weights good;
    not after an error that nobody foresaw."""
    saved, now = learner.version, time.monotonic()  # saved: the version of the last checkpoint
    learner.deadline = np.inf if args.train_for_seconds is None else now + args.train_for_seconds
    saved_at = best_at = now  # no best in the first 30 s: episodes that end first are short ones
    good = True  # the weights
    try:
        while learner.global_step < args.total_timesteps and (slots := collect_together(learner)) is not None:
            metrics = learner.iterate(slots)
            now = time.monotonic()
            if (score := reporter.update(metrics)) > learner.best_return and now - best_at >= 30:
                learner.best_return, best_at = score, now
                save_checkpoint(checkpoints / "best.pth", learner)
            if now - saved_at >= args.save_every_sec:
                save_latest(checkpoints, learner, args.keep_checkpoints)
                saved, saved_at = learner.version, now
    except BaseException as error:
        good = isinstance(error, (FloatingPointError, UserError))
        raise
    finally:
        reporter.bar.close()
        if good and learner.version > saved:  # else there is nothing new
            save_latest(checkpoints, learner, args.keep_checkpoints)
        reporter.writer.close()


def train(typed: Args, folder: Path) -> int:
    """`typed` are the args before `resolve`. Returns the exit code: 0, or 130 when the run was stopped by a signal."""
    rank, ranks = rank_of()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each actor takes some of our file descriptors
    args = resolve(typed)
    device = torch.device(args.device)
    if device.type == "cpu":
        # glibc keeps freed memory: page faults of fresh activations cost 10 to 20 % of an update on a CPU
        for option, value in ((-1, 2**31 - 1), (-4, 0), (-8, 1)):  # M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX
            ctypes.CDLL(None).mallopt(option, value)
    else:
        torch.cuda.set_device(device.index or 0)
        torch.backends.cudnn.allow_tf32 = False  # float32 means it: mu and pi must agree at lag 0
    torch.manual_seed(args.seed)
    spaces = spaces_of(args)
    agent = Agent(spaces, args).to(device)
    for x in agent.state_dict().values() if ranks > 1 else ():  # other machines may compute other first weights
        dist.broadcast(x, 0)
    if rank:  # environments and random numbers of its own
        args.seed = int(np.random.SeedSequence((args.seed, rank)).generate_state(1)[0]) >> 2
    check_memory(args, spaces, agent.state_size)
    log_file, checkpoints = open(os.devnull, "w"), folder / "checkpoints"  # nothing was written before
    if args.num_workers:
        start_forkserver()

    def log(text: str, show: bool = rank == 0) -> None:
        log_file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        if show:
            tqdm.write(text)

    def begin() -> dict | None:
        nonlocal log_file
        log_file = open_log(folder)
        return load_checkpoint(checkpoints, "latest", log)

    checkpoint = from_first_rank(begin)  # the others have neither log nor checkpoints
    if checkpoint and checkpoint["global_step"] >= args.total_timesteps:
        log(f"{folder} has its {checkpoint['global_step']:,} steps already; raise --total-timesteps to go on")
        return 0
    inference = Inference(args, spaces, agent, device)
    learner = Learner(args, agent, inference, device)
    if checkpoint:
        load_weights(agent, checkpoint, folder, args)
        learner.load(checkpoint)
        with contextlib.suppress(UserError):  # after a crash best.pth may be newer; a damaged one does not matter
            learner.best_return = (load_checkpoint(checkpoints, "best", log) or checkpoint)["best_return"]
    torch.manual_seed(args.seed + learner.version)
    say = (lambda text: log(f"rank {rank}: {text}", True)) if rank else log
    actors = Actors(args, inference, session=learner.version, log=say)  # a resumed run has other episodes
    # A resumed run starts from what was typed and resolves again, as it may be on another machine; but for the batch,
    # which decides what is learned, and with `sync` the workers, which decide the batch.
    kept = dict(batch_size=args.batch_size) | (dict(num_workers=args.num_workers) if args.sync else {})
    packages = {found.name: found.version for found in importlib.metadata.distributions()}
    cfg = dict(file=os.path.abspath(__file__), command=sys.argv, args=asdict(typed) | kept, resolved=asdict(args),
               packages=packages)  # fmt: skip
    if rank == 0:
        (folder / "cfg.tmp").write_text(json.dumps(cfg, indent=2))
        os.replace(folder / "cfg.tmp", folder / "cfg.json")
    B, steps = args.batch_size // args.rollout, args.total_timesteps
    # When the learner is the bottleneck, all slots but those LEARNING are ahead of a new one
    expected_lag = 0.0 if args.sync else (slots_needed(args) / B - args.num_batches_per_epoch) * args.num_epochs
    if checkpoint:
        log(f"resuming {folder} at step {learner.global_step:,}; learning rate {learner.learning_rate():.3g}")
    for line in (
        f"{args.env_id}: {sum(p.numel() for p in agent.parameters()):,} parameters on {device},"
        f" encoder in {args.precision}, {args.learner_threads} + {args.inference_threads} threads to learn and act",
        f"{args.num_workers} workers x {args.num_envs_per_worker} environments in {args.worker_num_splits} splits;"
        f" {args.num_batches_per_epoch * args.batch_size:,} samples an iteration, {args.batch_size:,}"
        f" ({B} rollouts of {args.rollout} steps) an optimiser step; expected lag up to {expected_lag:.1f} versions",
        f"{mebibytes(inference.mailbox):.1f} MiB of shared memory beside the engines' own,"
        f" {mebibytes(inference.rollouts):.0f} MiB of rollouts in {slots_needed(args)} slots",
        f"up to {steps:,} steps = {steps * args.frameskip:,} frames; files in {folder}",
    ):
        log(line)
    if ranks > 1:
        log(f"{ranks} ranks like this: {ranks * args.batch_size:,} samples an optimiser step")
    if expected_lag >= args.max_policy_lag:
        log(f"warning: samples with a lag of {args.max_policy_lag} (--max-policy-lag) are not learned from; a larger "
            "--batch-size has less lag")  # fmt: skip
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # all of the above ran on the default stream; the threads have their own
    with sampling(inference, actors), own_stream(device, args.learner_threads):
        if rank:
            follow(args, learner)
        else:
            learn(args, checkpoints, learner, Reporter(args, learner, folder, log))
    log(f"{'stopped' if STOP.asked_at else 'done'}: {learner.global_step:,} steps, {learner.version:,} versions, "
        f"{learner.skipped} batches without a usable sample, {actors.deaths} actors replaced")  # fmt: skip
    return 130 if STOP.asked_at and not dist.is_initialized() else 0  # else torchrun would start it again


def main() -> int:
    try:
        if sys.platform != "linux":
            raise UserError(f"this needs Linux (/proc, /dev/shm, eventfd); {sys.platform} has no such things")
        join_ranks()
        args, folder = from_first_rank(parse_args)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
        return train(args, folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"error: {error}; what was learned before is saved", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the run has begun: there is nothing to save
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    code = main()
    if code == 0 and dist.is_initialized():  # all have left together
        dist.destroy_process_group()
    gc.freeze()  # else Python, before it ends, searches all that the imports made for cycles: 0.8 s
    sys.exit(code)
