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
# appo_doom_multigpu.py $Id$
"""Asynchronous PPO with V-trace on several GPUs or machines: appo_doom.py under torchrun.

    torchrun --standalone --nproc-per-node 4 appo_doom_multigpu.py --env-id battle --num-workers 20    # 80 in all
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 appo_doom_multigpu.py [...]

This file is an edit of appo_doom.py, with which it shares all other text. Each process of `torchrun`, a *rank*, runs
this file with its own GPU and its own actors. All ranks take each optimizer step together: exactly the step that a
single process would take on the union of their batches. What differs:

- Means over samples (`masked_mean`), the `moments` of the inputs, the gradients (`Learner.differentiate`) and the steps
  of an iteration are computed from sums over the ranks.
- When one rank leaves, all leave (`together`).
- Only rank 0 reports and saves; the returns, lags and times that it reports are its own.
- With several ranks, --cuda-graphs records acting, but not the gradient computation.

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

Terms:

    worker       an actor process, which steps its environments in `worker_num_splits` splits
    row          the endless stream of experience of one environment
    group        the rows that request actions together: those of one split of a worker
    slot         room for one rollout, T steps of one row
    block        one slot for each row of a group
    iteration    the learner takes blocks for `num_batches_per_epoch` batches (at least one block), makes `num_epochs`
                 passes over their rollouts, and returns them
    batch        some of an iteration's rollouts, about `batch_size` samples, for one optimizer step
    step         one decision of the agent
    frame        one tic of the engine (frames = steps x frameskip)
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
import copy
import ctypes
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
import shutil
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

import envpool_assets
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported once a group exists, it would keep the group, whose threads can crash at exit
import torch.multiprocessing as mp
import torch.nn as nn
import tyro
import vizdoom
from gymnasium.spaces import Box, Dict, MultiDiscrete
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from tqdm import tqdm
from typeguard import TypeCheckError, check_type

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
    """Asynchronous PPO with V-trace on ViZDoom."""

    # Under torchrun, --num-workers and --batch-size are per rank, and --total-timesteps counts the steps of all ranks.
    # With --device cuda, rank i of a machine uses GPU i.
    # --- run
    env_id: str = "basic"
    """basic, my_way_home, deadly_corridor, defend_the_center, defend_the_line, health_gathering,
    health_gathering_supreme, battle, battle2, or benchmark (battle with 9 flat actions, no measurements, no shaping)"""
    cfg_path: str | None = None  # path of your own ViZDoom scenario (.cfg), used instead of `env_id`
    frameskip: int = 4  # engine tics (frames) per step of the agent
    reward_scale: float = 1.0  # factor of all rewards, in addition to the scenario's own scale
    reward_clip: float = 10.0  # clip of the scaled rewards, to +- this; inf: no clipping
    seed: int = 1  # seed of the network, the action sampling and the environments
    total_timesteps: int = 1_000_000  # stop after this many steps (frames / frameskip)
    train_for_seconds: float = np.inf  # seconds of training, from this session's first iteration on
    device: str | None = None  # cpu, cuda, or cuda:1 (the second GPU). Default: cuda if there is a GPU
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
    num_envs_per_worker: int = 16  # environments per worker
    worker_num_splits: int | None = None
    """number of parts into which a worker's environments are split: one is stepped while the others wait for actions.
    Default: 2 with CUDA if they can be halved, else 1, because on a CPU the network needs the idle core"""
    set_workers_cpu_affinity: bool = True
    """pin worker i and its engines to core i of this process; turn it off if several runs share the machine"""
    actor_timeout: float = 120.0
    """seconds that a start or step of a game may take before its actor counts as hung and is replaced; 0: no limit"""
    sync: bool = False  # alternate between collecting and learning, so that every iteration starts at lag 0

    # --- algorithm
    rollout: int = 32  # steps per rollout (T)
    batch_size: int = 1024  # approximate samples per optimizer step: batches consist of whole rollouts
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
            self.worker_num_splits = 2 if cuda and self.num_envs_per_worker % 2 == 0 else 1


# === Ranks ============================================================================================================


def join_ranks():
    """Under `torchrun`, joins the other ranks and takes this rank's share of the machine's cores."""
    if not dist.is_torchelastic_launched():
        return
    import ctypes  # not imported by every file that `carry.py --add` adds this to

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: the kernel sends it when the launcher is killed
    i = int(os.environ["LOCAL_RANK"])
    n = int(os.environ["LOCAL_WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    share = num_cores() // n  # the same for all ranks, because they wait for the slowest
    os.sched_setaffinity(0, cores[i * share : (i + 1) * share] or {cores[i % len(cores)]})
    store, rank, ranks = next(dist.rendezvous("env://"))
    if n == ranks:  # one machine: after a restart its store still has the dead ranks' addresses and NCCL's last error
        store.delete_key("exception_dump")
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(i % torch.cuda.device_count())  # otherwise every rank would also open the first GPU
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    if rank:
        sys.stdout = open(os.devnull, "w")  # rank 0 prints what all ranks would; log.txt has the lines of all


def rank_of_this() -> int:
    """Returns this process's rank, or 0 without `torchrun`."""
    return dist.get_rank() if dist.is_initialized() else 0


def sum_over_ranks(x):
    """Sums x over the ranks in place and returns it, identical on all ranks to the bit. Without `torchrun`, x is
    unchanged."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def on_first_rank(function):
    """Decorator: on all ranks but rank 0, the function does nothing."""
    return lambda *arguments: None if rank_of_this() else function(*arguments)


def from_first_rank(function):
    """Decorator: only rank 0 calls the function, and all ranks return its result. If it raises, the other ranks exit
    silently."""

    def call(*arguments):
        if not dist.is_initialized():
            return function(*arguments)
        result = [None]
        try:
            if dist.get_rank() == 0:
                result = [(function(*arguments),)]
        finally:
            dist.broadcast_object_list(result)
            if not result[0]:
                dist.destroy_process_group()  # its threads could crash at exit
        return result[0][0] if result[0] else sys.exit(0)

    return call


def someone_leaves(this_rank: bool) -> bool:
    """Returns True if any rank leaves. Every rank calls this before each iteration, and once more when its loop has
    ended."""
    return bool(sum_over_ranks(torch.tensor(float(this_rank))))


def together(collect):
    """Decorator of `Learner.collect`: raises KeyboardInterrupt if another rank leaves, so that all leave together."""

    def call(learner):
        blocks = None
        try:
            blocks = collect(learner)
        finally:
            start = time.perf_counter()
            leaving = someone_leaves(blocks is None)
            learner.inference.waited["ranks"] += time.perf_counter() - start
        if leaving:
            raise KeyboardInterrupt
        return blocks

    return call


# === Environment ======================================================================================================

# Keys of `info` to sum over each episode and report
EXTRA_METRICS = ()
# Sums over an episode, reported as means over the last 100: raw rewards, steps, these keys
EPISODE = ("episodic_return", "episodic_length", *EXTRA_METRICS)

ENGINE_MEMORY = 3  # MiB of /dev/shm per engine; its file of 10 MiB is sparse: at 160x120 at most 2.8 are used
# The agent's image, height, width, RGB: 3 of every 5 rows and 4 of every 5 columns of the engine's screen
IMAGE = (72, 128, 3)
# Variables read from every engine; USER2 counts kills in battle and battle2
VARIABLES = ("SELECTED_WEAPON", "SELECTED_WEAPON_AMMO", "HEALTH", "USER2")
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
    shaping: str = ""  # kind of bonus added to the engine's reward: "", "gathering" or "battle"
    settings: dict = {}  # engine settings that override SETTINGS; living_reward is per tic


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
}


@functools.cache
def launcher():
    """Returns the path of an in-memory shell script that starts an engine in the temporary folder. The script creates
    the engine's folder first (engines that create it at the same time crash), ignores the signals of batch systems, and
    lets the kernel kill the engine when the thread that started it ends. Raises UserError."""
    if not shutil.which("setpriv"):
        raise UserError("setpriv, which ends an engine with its actor, is missing: install util-linux 2.33")
    folder = shlex.quote(tempfile.gettempdir())
    engine = shlex.quote(f"{Path(vizdoom.__file__).parent}/vizdoom")
    # Does not start the engine if its parent died before the kernel was told to watch it.
    script = f"""#!/bin/sh
trap '' INT TERM
mkdir -p {folder}/_vizdoom && cd {folder} || exit 1
exec setpriv --pdeathsig KILL sh -c '[ $PPID = {os.getpid()} ] && exec "$@"' - {engine} "$@"
"""
    file = os.memfd_create("vizdoom_launcher")
    os.write(file, script.encode())
    return f"/proc/{os.getpid()}/fd/{file}"


def engine_ids(process="self"):
    """Returns the ids of a process's engines: the suffixes of their files in /dev/shm."""
    return set(re.findall(r"/dev/shm/ViZDoom\w+(\w{10})", Path(f"/proc/{process}/maps").read_text()))


def unlink_shared_memory(engines):
    """Unlinks the shared memory of these engines, which have opened it already or never will, so that it disappears
    with them however they end. A file of at most 3 MiB remains only if an actor dies while one of its engines
    starts."""
    for engine in engines:
        for path in Path("/dev/shm").glob(f"ViZDoom*{engine}"):
            path.unlink(missing_ok=True)


class DoomEnv(gym.Env):
    """One single-player game. Observations are the image `obs`, uint8 [72, 128, 3], and in some scenarios `vector`,
    float32 [23] measurements. `info["raw_reward"]` is the engine's reward before shaping, scale and clip; scores are
    its sums."""

    def __init__(self, args: Args, render_mode=None):
        self.args = args
        self.render_mode = render_mode
        self.metadata = dict(render_modes=["rgb_array"], render_fps=35 / args.frameskip)
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
        spaces = dict(obs=Box(0, 255, IMAGE, np.uint8))
        if self.scenario.measurements:
            spaces["vector"] = Box(-np.inf, np.inf, (23,), np.float32)
        self.observation_space = Dict(spaces)
        self.action_space = MultiDiscrete(self.scenario.heads)

    def setup(self, env_id):
        if env_id not in SCENARIOS:
            raise UserError(f"unknown --env-id {env_id}; there are {', '.join(SCENARIOS)}")
        self.scenario = SCENARIOS[env_id]
        wads = envpool_assets.asset_path() / "vizdoom" / "maps"  # vizdoom's maps, and Sample Factory's battles
        self.game.set_doom_scenario_path(str(wads / self.scenario.wad))
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
        return self.observation(), {}

    def observation(self):
        """Returns a new observation; after the end of a game, the previous one again, which no loss uses."""
        if state := self.game.get_state():
            self.screen = state.screen_buffer
            self.variables = state.game_variables.clip(min=0)
        # the rows and columns that nearest-neighbour scaling picks, as in Sample Factory
        image = self.screen.reshape(24, 5, 32, 15)[:, [0, 1, 3], :, :12].reshape(IMAGE)
        if not self.scenario.measurements:
            return dict(obs=image)
        weapon, ammo, health, kills = self.variables
        vector = np.zeros(23, np.float32)  # Sample Factory's layout; entries for matches stay 0
        vector[[0, 1, 2, 4, 6]] = round(weapon), min(5.0, ammo / 15), health / 30, kills / 10, 1 / 5
        return dict(obs=image, vector=vector)

    def step(self, action: np.ndarray):
        buttons = np.concatenate([press[a] for press, a in zip(self.presses, action)])
        raw_reward = self.game.make_action(buttons.tolist(), self.args.frameskip)
        self.tics += self.args.frameskip
        terminated = self.game.is_episode_finished()
        truncated = not terminated and self.tics >= self.scenario.time_limit
        before = self.variables
        observation = self.observation()
        bonus = 0.0 if terminated else self.bonus(before, self.variables)
        reward = (raw_reward + bonus) * self.scenario.reward_scale * self.args.reward_scale
        reward = np.clip(reward, -self.args.reward_clip, self.args.reward_clip)
        return observation, reward, terminated, truncated, {"raw_reward": raw_reward}

    def bonus(self, before, now):
        """Returns Sample Factory's shaping bonus (REWARD_SHAPING_BATTLE, gathering wrapper), without terms that are
        always 0 in single-player games."""
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

    def render(self):
        """Returns the engine's screen, uint8 [120, 160, 3]."""
        return self.screen

    def close(self):
        self.game.close()


def make_envs(args: Args, num_envs: int, **options) -> gym.vector.VectorEnv:
    """Returns the environments of one split of a worker; options are passed to DoomEnv. Edit this function to use other
    environments.

    The result must reset on the step after an episode ends (NEXT_STEP), start nothing before `reset`, take
    MultiDiscrete actions that start at 0, and return a Dict of images, uint8 [height, width, channels] of at least 36 x
    36, and vectors. To add an image or a vector, add a key; nothing else changes. Scores are sums of `raw_reward` in
    the `info` of every step, or of rewards if it is missing. Actors cannot start multiprocessing children
    (AsyncVectorEnv)."""
    return gym.vector.SyncVectorEnv([lambda: DoomEnv(args, **options)] * num_envs, copy=False)  # by default NEXT_STEP


class Spaces(NamedTuple):
    """Describes the environments to the pipeline."""

    obs: dict[str, Box]  # the arrays of an observation, by name
    heads: tuple[int, ...]  # number of actions of each independent head


@from_first_rank
def spaces_of(args: Args) -> Spaces:
    """Returns the spaces of the environments. Raises UserError if the pipeline does not support them."""
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
    """Returns N summed over the ranks, and the mean and variance [...] of x [N, ...] over the first axis on all
    ranks."""
    n = int(sum_over_ranks(torch.tensor(len(x))))
    mean = sum_over_ranks(x.sum(0)) / n
    return n, mean, sum_over_ranks((x - mean).square_().sum(0)) / n


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
    `forward` without side effects. To mask actions, return `logits.masked_fill(obs["NAME"] == 0, -torch.inf)`; every
    head must keep at least one action, even at the last observation of an episode. The flags precision, rnn_type,
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
    """Returns the mean [...] of x [..., T, B] over the samples of all ranks where mask [T, B] is 1, or 0 if there are
    none. Its value is identical on all ranks to the bit. Its gradient is this rank's share; `Learner.differentiate`
    sums the shares."""
    own = torch.cat([(x * mask).sum((-2, -1)).flatten(), mask.sum().view(1)])
    total = sum_over_ranks(own.detach().clone())
    count = total[-1].clamp(min=1)
    share = own[:-1] / count
    return (total[:-1] / count + (share - share.detach())).view(x.shape[:-2])


def appo_loss(args: Args, agent: Agent, batch: SimpleNamespace):
    """Computes PPO's clipped losses with V-trace targets over the valid samples of a batch that are not too old. The
    batch has the fields of Rollouts [time, rollout, ...] and `lags`, int64 [T, B]. Returns the loss and metrics, on the
    device.

    To add a loss, compute it per sample [T, B], average it with `mean` and add it to `loss`. If it needs a value from
    acting time, add a field to `Rollouts` and write it in `Inference.choose`. If that value comes from the
    environment's `info`, also add a field to `Mailbox`, write it in `WorkerEnvs.step` and copy it in `Inference.store`
    (at t - 1 if it is an outcome of the step, like the reward)."""
    valid = (~batch.first[1:]).float()
    used = valid * (batch.lags < args.max_policy_lag)
    logits, values, _ = agent(batch.obs, batch.first, batch.rnn_state[0])
    log_dists = log_distributions(logits[:-1], agent.heads)
    logprobs = log_prob(log_dists, batch.actions)
    entropy = sum(map(entropy_of, log_dists))
    divergence = sum(map(symmetric_kl, log_dists))
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
    """Returns the rows of group i, or the slots of block i: a block has as many slots as a group has rows."""
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
        # written by the actor before it calls a game and by inference at each message; read at any time
        self.heard = torch.full((rows,), time.monotonic(), dtype=torch.float64)  # the last sign of life
        # written by inference, between a request and its reply
        self.action = torch.zeros(rows, len(spaces.heads), dtype=torch.int64)  # the next action

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
            self.actions = torch.zeros((T, slots, len(spaces.heads)), dtype=torch.int64)
            self.logprobs = torch.full((T, slots), torch.nan)  # of the actions under the acting policy (mu)
            self.values = torch.full((T, slots), torch.nan)  # of the acting policy, for value clipping only
            self.rnn_state = torch.zeros((1, slots, state_size))  # before obs[0], not yet zeroed by first[0]
        # on the host, written by `Inference.store`, versions by `act`
        self.first = np.zeros((T + 1, slots), bool)
        self.rewards = np.full((T, slots), np.nan, np.float32)  # of actions[t]
        self.terminated = np.zeros((T, slots), bool)
        self.versions = np.zeros((T, slots), np.int64)  # of the policy that chose actions[t]


# === Actor ============================================================================================================


class Watched(gym.Wrapper):
    """Records in the mailbox when each call of a game begins, so that inference can tell a hung actor from a busy
    one."""

    def __init__(self, env: gym.Env, heard: np.ndarray):
        """heard: float64 [1], the mailbox entry of its row"""
        super().__init__(env)
        self.heard = heard

    def reset(self, **options):
        self.heard[:] = time.monotonic()
        return self.env.reset(**options)

    def step(self, action):
        self.heard[:] = time.monotonic()
        return self.env.step(action)


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
        for i, env in enumerate(getattr(self.envs, "envs", ())):
            self.envs.envs[i] = Watched(env, mailbox.heard[self.rows][i : i + 1])
        self.done = np.zeros(n, bool)  # the last step ended an episode, so the next one only resets
        self.sums = np.zeros((n, len(EPISODE)))  # of the running episodes

    def reset(self):
        observation, _ = self.envs.reset(seed=self.seed)
        self.write(observation, reward=0.0, terminated=False, first=True, episode=0.0)

    def step(self):
        action = self.mailbox.action[self.rows].copy()  # the environment may keep a reference
        observation, reward, terminated, truncated, info = self.envs.step(action)
        if not np.isfinite(reward).all():
            raise ValueError(f"a reward is not finite: {reward}")
        first = self.done
        self.done = terminated | truncated
        zeros = np.zeros(len(first))
        extra_metrics = [info.get(name, zeros) for name in EXTRA_METRICS]
        self.sums += np.stack([info.get("raw_reward", reward), zeros + 1, *extra_metrics], -1)
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
            for group in range(worker * args.worker_num_splits, (worker + 1) * args.worker_num_splits):
                groups[group] = WorkerEnvs(args, group, mailbox.share(), seed + group * rows_per_group(args))
                stack.callback(groups[group].envs.close)
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


class Inference:
    """Serves all waiting groups at once. Owns the recurrent state and the FILLING slot of every row, and holds the
    memory, the pipes and the queue between itself, the actors and the learner.

    It acts with a copy of the learner's network. Whoever acts with the copy or overwrites it holds the lock until the
    device is done, so no action comes from half an update. Before a block changes hands, the host waits until the
    device has finished with it, so the two streams need no events.

    When an actor dies, another replaces it. Its environments and the last transition of each of its rows are lost: the
    next observation of each row is a `first` one, which makes that transition invalid."""

    def __init__(self, args: Args, spaces: Spaces, agent: Agent, device: torch.device):
        self.args = args
        self.spaces = spaces
        self.device = device
        self.agent = copy.deepcopy(agent).requires_grad_(False)
        for module in self.agent.reduced:  # otherwise autocast would cast the weights at each inference
            module.bfloat16()
        self.agent.to(device)  # packs the core's weights for cuDNN
        mine = [*self.agent.parameters(), *self.agent.buffers()]
        learned = [*agent.parameters(), *agent.buffers()]  # updated in place
        self.copies = defaultdict(list)  # by type: a launch for each
        for pair in zip(mine, learned):
            self.copies[pair[0].dtype].append(pair)
        self.version = 0  # of the agent
        self.lock = threading.Lock()  # of the agent
        workers = max(1, args.num_workers)
        groups = workers * args.worker_num_splits
        blocks = [slice_of(args, i) for i in range(num_blocks(args))]
        self.shared_mailbox = Mailbox(spaces, num_rows(args))
        self.mailbox = self.shared_mailbox.share()  # views of the same memory
        self.rollouts = Rollouts(spaces, args.rollout, blocks[-1].stop, agent.state_size, device)
        self.state = torch.zeros(num_rows(args), agent.state_size, device=device)
        self.filling = dict(enumerate(blocks[:groups]))  # by group; a group without one waits for a FREE block
        self.t = np.zeros(groups, int)  # steps in the FILLING block of each group
        self.free = deque(blocks[groups:])
        self.full = queue.SimpleQueue()  # blocks to the learner
        self.error = None  # the error, or KeyboardInterrupt, that ends the run
        self.returned, self.learner_pipe = mp.Pipe(duplex=False)  # free blocks; closing it ends the thread
        self.pipes = [None] * workers  # to the actors, set by `running`
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.returned, selectors.EVENT_READ)
        self.asked = Counter()  # number of requests of each worker's actor
        self.replace = None  # replace(worker, text): starts another actor; set by `running`
        self.requests = []  # groups waiting for actions, oldest first; this thread owns their rows
        self.heard = self.mailbox.heard.reshape(workers, -1)  # views of the mailbox, by worker
        self.actors = {}  # process of each worker, set by `running`
        self.episodes = deque(maxlen=100)  # the last finished episodes, see EPISODE
        self.counts = Counter()  # rows served, and forward passes
        self.waited = Counter()  # seconds that this thread and the learner waited, by cause
        if args.cuda_graphs:
            self.choose = recorded(self.choose, device)

    @torch.no_grad()
    def publish(self, version: int):
        """Copies the learner's weights and statistics to the acting network."""
        with self.lock:
            for pairs in self.copies.values():
                torch._foreach_copy_(*zip(*pairs))
            self.version = version
            wait_for(self.device)

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
        """Ends an actor that owes a request but has not called a game for `actor_timeout`: it hangs, or was stopped.
        Its stack goes to stderr, and `receive` sees EOF."""
        limit = self.args.actor_timeout or np.inf
        splits = self.args.worker_num_splits
        for worker in np.flatnonzero(time.monotonic() - self.heard.max(1) > limit):
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
        """Receives a group's request, or blocks from the learner: LEARNING -> FREE. Raises UserError if an actor's
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
            worker = group // self.args.worker_num_splits
            self.heard[worker] = time.monotonic()
            with contextlib.suppress(ConnectionError):  # the actor died; `receive` will notice
                self.pipes[worker].send(group)

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
        """The device's part of `act`, with the results of `store`. Returns actions [N, heads]."""
        rollouts = self.rollouts
        obs, (rows, t, slots, first) = self.store_obs(obs, indices)
        logits, values, self.state[rows] = self.agent(obs, first.bool()[None], self.state[rows])
        log_dists = log_distributions(logits[0], self.agent.heads)
        actions = sample_actions(log_dists)
        rollouts.actions[t, slots] = actions
        rollouts.logprobs[t, slots] = log_prob(log_dists, actions)
        rollouts.values[t, slots] = values[0]
        return actions


# === Learner ==========================================================================================================


class Learner:
    """Takes the FULL blocks of one iteration at a time and improves the policy."""

    def __init__(self, args: Args, agent: Agent, inference: Inference):
        self.args = args
        self.spaces = inference.spaces  # for a second network, such as one for a curiosity reward
        self.inference = inference
        self.agent = agent
        self.device = inference.device
        self.optimizer = torch.optim.Adam(self.agent.parameters(), args.learning_rate, eps=1e-6, fused=True)
        if args.cuda_graphs and not dist.is_initialized():  # communication between ranks cannot be recorded
            self.differentiate = recorded(self.differentiate, self.device)
            self.agent.recorded = True
        self.global_step = 0  # number of valid transitions received, including those that are too old
        self.version = 0  # of the policy at the start of the current iteration
        self.best_return = -np.inf  # of best.pth

    @together
    def collect(self) -> list[slice]:
        """Waits for the blocks of an iteration: FULL -> LEARNING. Raises the error of the inference thread, or
        KeyboardInterrupt after a signal."""
        start = time.perf_counter()
        blocks = []
        for _ in range(blocks_per_iteration(self.args)):
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
        self.version = self.inference.version
        lags = (self.version - rollouts.versions[:, slots])[valid]
        learning_rate = args.learning_rate
        if args.anneal_lr:
            learning_rate *= 1 - self.global_step / args.total_timesteps
        self.optimizer.param_groups[0]["lr"] = learning_rate
        num_batches = np.clip(round(len(slots) * args.rollout / args.batch_size), 1, len(slots))
        for epoch in range(args.num_epochs):
            shuffled = slots[torch.randperm(len(slots)).numpy()]
            for batch in np.array_split(shuffled, num_batches):
                metrics = self.update(self.gather(batch), last_epoch=epoch == args.num_epochs - 1)
        self.global_step += int(sum_over_ranks(torch.tensor(len(lags))))
        metrics = dict(zip(metrics, torch.stack(list(metrics.values()))))  # a copy: a recording overwrites its outputs
        self.inference.learner_pipe.send(blocks)  # LEARNING -> FREE: the last `wait_for` covered all reads
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
        for parameter in self.agent.parameters():
            if parameter.grad is not None:
                sum_over_ranks(parameter.grad)
        grad_norm = nn.utils.clip_grad_norm_(self.agent.parameters(), self.args.max_grad_norm or torch.inf)
        return metrics | {"losses/grad_norm": grad_norm}, torch.stack([loss.detach(), grad_norm])

    def update(self, batch: SimpleNamespace, last_epoch: bool):
        """Takes one optimizer step, a new version. Returns metrics. Raises FloatingPointError if loss or gradient is
        not finite."""
        batch.lags = self.version - batch.versions
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
            valid = ~batch.first[1:]
            start = int(torch.randint(min(4, len(valid)), ()))  # every fourth step is enough: neighbours hardly differ
            for name, normalizer in self.agent.normalizers.items():
                normalizer.update(batch.obs[name][start:-1:4], valid[start::4])
        if begun and grad_norm:  # 0 if no sample could be used
            self.optimizer.step()
        self.inference.publish(self.inference.version + 1)
        return metrics


# A first reading ends here.


# === Run ==============================================================================================================

# How a run ends
# 1. The cause:
#    - the last step: the loop in `train` ends;
#    - Ctrl-C, SIGTERM, SIGHUP: `handler` -> `Inference.end_with` -> `Learner.collect` raises KeyboardInterrupt (a
#      second signal more than a second later exits at once; the actors see EOF, as after kill -9);
#    - an actor keeps dying, or an environment keeps raising: `replace` (below) raises UserError -> `Inference.run` ->
#      `end_with` -> `collect` raises it;
#    - any other error in the inference thread: `run` -> `end_with` -> `collect` raises it;
#    - an error in the learner: it propagates.
# 2. `train` saves and reports. Leaving `running` ends the inference thread and closes the pipes.
# 3. In each actor `answer` returns None; `run_actor` closes the environments and kills its process group.
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
AT_LEAST = dict(num_workers=0, seed=0, max_batches_ahead=0, keep_checkpoints=0, reward_clip=1e-3)
# An actor that dies after fewer requests died early. Three early deaths of a worker in a row end the run, as does one
# death without any request before the first update of a new run
SHORT_LIFE = 1000
FIXED = ("env_id", "cfg_path", "rnn_type", "hidden_size", "vector_size")  # a resumed run must have the same


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
    needed = num_rows(args) * ENGINE_MEMORY
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
        forkserver.set_forkserver_preload(["numpy", "torch", "gymnasium", "tyro", "tqdm", "vizdoom"])
        forkserver.ensure_running()
    for number in SIGNALS:
        signal.signal(number, handler)


def lock(folder: Path):
    """Locks the folder for as long as this process lives. Raises UserError if another run uses it."""
    if rank_of_this():
        return  # rank 0 holds the lock
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
    actor, sees other episodes."""
    args = inference.args
    thread = threading.Thread(target=inference.run, name="inference", daemon=True)
    # fork is unsafe with threads and CUDA; spawn costs 100 MB per actor
    process_or_thread = mp.get_context("forkserver").Process if args.num_workers else threading.Thread
    actors = inference.actors
    early_deaths = Counter()  # consecutive early deaths of each worker's actors

    def start(worker):
        inference.pipes[worker], pipe = mp.Pipe()
        inference.selector.register(inference.pipes[worker], selectors.EVENT_READ)
        life = inference.version + early_deaths[worker]
        seed = random.Random(f"{args.seed} {life} {worker}").getrandbits(30)
        arguments = (args, worker, seed, inference.shared_mailbox, pipe)
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
        if not (asked or inference.version) or not args.num_workers or early_deaths[worker] == 3:
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


@on_first_rank
def save_checkpoint(folder: Path, learner: Learner):
    """Writes a checkpoint, and best.pth if the mean return of the last 100 episodes is the best so far: tensors and
    plain values, under a temporary name first, so that a file is complete or absent."""
    folder = folder / "checkpoints"
    folder.mkdir(exist_ok=True)
    names = [f"checkpoint_{learner.global_step:012d}.pth"]
    returns = [episode[0] for episode in learner.inference.episodes.copy()]
    best_return = learner.best_return
    if len(returns) == 100 and np.mean(returns) > best_return:
        best_return = float(np.mean(returns))
        names.insert(0, "best.pth")  # first, because the checkpoint records this return
    content = dict(
        agent=learner.agent.state_dict(),
        optimizer=learner.optimizer.state_dict(),
        version=learner.inference.version,
        global_step=learner.global_step,
        best_return=best_return,
    )
    buffer = io.BytesIO()  # torch.save hides OSError (a full disk)
    torch.save(content, buffer)
    for name in names:
        (folder / "saving.tmp").write_bytes(buffer.getbuffer())
        os.replace(folder / "saving.tmp", folder / name)
    learner.best_return = best_return  # only after writing succeeded
    # Ordered by time of writing, because a damaged file that was skipped may have more steps
    for old in sorted(folder.glob("checkpoint_*.pth"), key=os.path.getmtime)[: -learner.args.keep_checkpoints]:
        old.unlink()


@from_first_rank
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


def load_checkpoint(folder: Path, learner: Learner):
    """Restores the learner. Raises UserError if no checkpoint can be read, or if it belongs to another network."""
    content = read_checkpoint(folder)
    if content is None:
        return
    try:
        learner.agent.load_state_dict(content["agent"])
        learner.optimizer.load_state_dict(content["optimizer"])
        learner.inference.publish(content["version"])
        learner.global_step = content["global_step"]
        learner.best_return = content["best_return"]
    except Exception as error:  # of any type, often with many lines
        what = " ".join(str(error).split()).split(". ")[0]
        raise UserError(f"the latest checkpoint in {folder} belongs to another network or is damaged: {what}") from None


class Reporter:
    """Updates the progress bar, log.txt and TensorBoard. Rates are averages since the last report."""

    SECONDS = 5  # between two reports

    def __init__(self, args: Args, learner: Learner, folder: Path):
        """Create it before the inference thread starts: waiting times count from here on."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only needed here

        self.folder = folder
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
        self.first = self.last = Counter(seconds=time.monotonic(), steps=learner.global_step)

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
        fps = sps * self.learner.args.frameskip
        scalars = self.metrics | {
            "charts/SPS": sps,
            "charts/FPS": fps,
            "stats/learner_wait": waits,  # fraction of the time: the learner had no FULL block
            "stats/inference_idle": change["requests"] / seconds,  # inference had no requests
            "stats/inference_blocked": change["blocks"] / seconds,  # it had requests but no FREE block
            "stats/inference_batch": change["rows"] / max(1, change["forwards"]),  # rows served together
            "stats/ranks_wait": change["ranks"] / seconds,  # the learner waits for other ranks' blocks
        }
        if episodes := inference.episodes.copy():
            scalars |= zip((f"charts/{name}" for name in EPISODE), np.mean(episodes, axis=0))
            self.score = f"return {scalars['charts/episodic_return']:.2f}"
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, self.learner.global_step)
        total = now - self.first  # over the whole session, so that it does not flicker
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
        """Makes a last report."""
        if self.learner.global_step > self.last["steps"]:
            self.report()
        self.bar.close()
        self.writer.close()


class Silence:
    """The reporter of all ranks but rank 0, which reports nothing."""

    score = "rank 0 reports the returns"

    def update(self, metrics):
        pass

    def close(self):
        pass


def train(args: Args, folder: Path) -> int:
    """Trains, and returns the exit code: 0, or 130 if a signal stopped the run."""
    check(args)
    device = torch.device(args.device)
    if device.type == "cuda" and dist.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
    torch.backends.cudnn.allow_tf32 = False  # no TF32: mu and pi must agree at lag 0
    torch.set_num_threads(max(1, num_cores() // 2))  # half for the learner, half for inference
    seed_generators(args.seed)
    for option, value in {-1: 2**31 - 1, -4: 0, -8: 1}.items():  # M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX
        ctypes.CDLL(None).mallopt(option, value)  # keep freed memory: saves a third of an update on images on a CPU
    spaces = spaces_of(args)
    agent = Agent(spaces, args).to(device)
    rank = rank_of_this()
    if rank:  # its own environments and random numbers
        args.seed = int(np.random.SeedSequence((args.seed, rank)).generate_state(1)[0]) >> 2
        seed_generators(args.seed)
    if dist.is_initialized():  # initial weights may differ between machines
        for x in agent.state_dict().values():
            dist.broadcast(x, 0)
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
    wait_for(device)  # everything above used the default stream; learner and inference use their own
    if rank == 0:
        (folder / "cfg.tmp").write_text(json.dumps(dict(file=__file__, args=args.typed), indent=2))
        os.replace(folder / "cfg.tmp", folder / "cfg.json")
    handle_signals(inference)
    reporter = Silence() if rank else Reporter(args, learner, folder)
    code = 0
    deadline = np.inf
    with running(inference, folder), own_stream(device):
        saved_at = time.monotonic()
        try:
            while learner.global_step < args.total_timesteps and time.monotonic() < deadline:
                reporter.update(learner.iterate(learner.collect()))
                deadline = min(deadline, time.monotonic() + args.train_for_seconds)  # counts from the first iteration
                if time.monotonic() - saved_at >= args.save_every_sec:
                    save_checkpoint(folder, learner)
                    saved_at = time.monotonic()
            someone_leaves(True)
        except KeyboardInterrupt:
            code = 130
        finally:
            # Skip if nothing was learned, or if the last step may have corrupted the weights
            if learner.global_step and not isinstance(sys.exception(), FloatingPointError):
                save_checkpoint(folder, learner)
            reporter.close()
    log(folder, f"{'stopped' if code else 'done'}: {learner.global_step:,} steps, {reporter.score}")
    if learner.global_step:
        place = shlex.quote(str(folder))
        scenario = f" --cfg-path {shlex.quote(args.cfg_path)}" if args.cfg_path else ""
        log(folder, f"play: python evaluate.py {place}{scenario}\ncurves: tensorboard --logdir {place}")
    more = " and a larger --total-timesteps" if learner.global_step >= args.total_timesteps else ""
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


@from_first_rank
def parse_args() -> tuple[Args, Path]:
    """Returns the flags and the run's folder. Raises UserError."""
    # Write 1e6 as 1000000, which int() accepts
    words = [f"{float(w):.0f}" if re.fullmatch(r"\d+(\.\d)?e[1-9]", w) else w for w in sys.argv[1:]]
    args = tyro.cli(Args, args=words)
    if args.experiment is None:
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
            raise UserError(
                "torchrun --max-restarts needs --experiment, the name of the run to resume"
            )
        name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{int(time.time())}_{os.getpid()}"
        args.experiment = args.typed["experiment"] = re.sub("[/:]", "-", name)
    if "/" in args.experiment or not args.experiment.strip("."):
        raise UserError(f"--experiment {args.experiment!r} is not the name of a folder in {args.train_dir}")
    folder = Path(args.train_dir, args.experiment).absolute()  # an environment may change the working directory
    if (folder / "cfg.json").exists():  # keep its flags, except those typed now
        saved = saved_args(folder)
        if saved.cfg_path and args.cfg_path != saved.cfg_path:  # a run's folder must not decide which code runs
            raise UserError(f"type --cfg-path {saved.cfg_path} again: a scenario contains code")
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
        join_ranks()
        args, folder = parse_args()
        from_first_rank(check)(args)  # otherwise `train` would raise its error on every rank
        return train(args, folder)
    except (UserError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    code = main()
    if code in (0, 130) and dist.is_initialized():  # all have left together
        dist.destroy_process_group()
        code = 0  # otherwise torchrun would restart it
    sys.exit(code)
