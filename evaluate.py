"""Plays a trained policy: measures its return, records a video, shows it in a window, or plays matches of several.

    python evaluate.py train_dir/my_run                 # 100 episodes; prints mean and spread of the return
    python evaluate.py train_dir/my_run --save-video --likeliest --best
    python evaluate.py train_dir/my_run --watch         # a window, at the game's own speed
    python evaluate.py train_dir/my_run --env-id battle2 --device cpu    # flags of the file that trained the run
    python evaluate.py train_dir/duel --opponents train_dir/early        # runs of appo_pbt_doom.py: all against all

The run's cfg.json names the file that trained it. The network and the environments come from the file of that name
beside evaluate.py or, failing that, in the current folder, so your own copies are played as well. A run's folder never
decides which code is executed: name any other file with --file, and an environment's module with --env-id, as in
training. From Python, call `load_agent`.
"""

import contextlib
import importlib.util
import itertools
import json
import math
import os
import shlex
import signal
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TypedDict, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import tyro
from tqdm import tqdm
from typeguard import TypeCheckError, check_type


@dataclass
class Options:
    """Plays a trained policy. All other flags are those of the file that trained it (`python FILE --help`); they
    override the values that the run was started with."""

    folder: tyro.conf.Positional[Path]  # the run, such as train_dir/my_run; put it before the training file's flags
    episodes: int | None = None
    """number of episodes. Default: 100; for DeepMind Lab 10 per task; for a population 100 per policy or per pair"""
    likeliest: bool = False  # play the likeliest action instead of a sampled one
    best: bool = False  # play the checkpoint with the best return instead of the latest one
    save_video: bool = False  # write the first minute of the first environment to video.mp4 in the run's folder
    watch: bool = False  # show one environment in a window, at the game's own speed; q, Escape or Ctrl-C ends it
    file: Path | None = None  # the file that trained the run. Default: beside evaluate.py, else in the current folder
    opponents: list[Path] = field(default_factory=list)  # other runs of appo_pbt_doom.py that take part
    policies: list[int] = field(default_factory=list)  # numbers of each run's policies that take part. Default: all

    def kind(self) -> str:
        return "best" if self.best else "latest"

    def __post_init__(self):
        self.interrupted = False

    @contextlib.contextmanager
    def until_interrupted(self):
        """Ends the context on Ctrl-C without an exception, so that the episodes played until then are reported (for
        DeepMind Lab, only completed tasks)."""
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True

    def actions(self) -> str:
        return ("likeliest" if self.likeliest else "sampled") + " actions"


MOST_STEPS = 200_000  # the longest episode that is waited for; Atari's end after 27,000 steps


class UserError(Exception):
    """An error that the user can fix, printed as one line without a traceback. Each training file has its own class."""


def read_cfg(folder: Path) -> tuple[str, dict]:
    """Returns the name of the file that trained the run in a folder, and the run's flags. Raises UserError."""
    path = folder / "cfg.json"
    if not path.exists():
        near = Path("train_dir", folder.name)
        hint = f"; did you mean {near}?" if (near / "cfg.json").exists() else ""
        raise UserError(f"there is no run in {folder}: it has no cfg.json{hint}")
    try:
        cfg = json.loads(path.read_text())
        return Path(cfg["file"]).name, cfg["args"] | {}
    except Exception as error:  # damaged content may raise any type
        raise UserError(f"{path} is damaged or is not a run's cfg.json ({error!r})") from None


def read_checkpoint(folder: Path, kind: str, policy: int) -> tuple[Path, dict, int]:
    """Returns the path, the weights and the step of the best checkpoint, or of the latest one that can be read. Raises
    UserError."""
    latest = [*folder.glob("latest.pth"), *sorted(folder.glob("checkpoints/checkpoint_*.pth"), reverse=True)]
    damaged = ""
    for path in folder.glob("checkpoints/best.pth") if kind == "best" else latest:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            content = content.get("policies", [content])[policy]
            found = path, content["agent"], int(content["global_step"])
        except Exception:  # a damaged file may raise any type
            damaged = damaged or f"{path} is damaged, or no checkpoint of a run"
            continue
        if damaged:
            print(f"warning: {damaged}; playing {path}")
        return found
    alone = " (some files keep the latest alone)" if kind == "best" else ""
    raise UserError(damaged or f"{folder} has no {kind} checkpoint{alone}")


def find_file(folder: Path, file: Path | None) -> Path:
    """Returns the path of the file that trained the run in a folder, and prints it. Raises UserError."""
    name, _ = read_cfg(folder)
    for path in [file] if file else [Path(__file__).parent / name, Path(name)]:
        if path.is_file() and (file or folder.resolve() not in path.resolve().parents):  # a run's folder is data
            print(f"by {path.resolve()}")
            return path.resolve()
    raise UserError(f"{file or name}, which trained the run, was not found: give its path with --file")


def load(path: Path):
    """Imports a file under its own name, with its folder first on the import path. Returns the module."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_code_named(saved, typed) -> None:
    """Raises UserError if code that would be run (a module, a script of a DeepMind Lab level, a scenario) is named by
    the saved cfg.json alone. typed: names of the flags that the user gave."""
    scenario = getattr(saved, "cfg_path", None)
    name = "cfg_path" if scenario else "env_id"
    if (scenario or ":" in saved.env_id or "." in saved.env_id) and name not in typed:
        flag = f"--{name.replace('_', '-')} {shlex.quote(scenario or saved.env_id)}"
        raise UserError(f"type {flag} again (load_agent: {name}), because it names code to run")


def load_agent(
    folder: Path | str, device: str = "cpu", kind: str = "latest", file: Path | str | None = None, policy: int = 0, **changes
):
    """Loads a trained policy. Returns (module, agent, args, step): the imported file that trained it; its network; its
    Args, set for environments in this process, with `changes` (such as num_envs) applied; the step at which it was
    saved. kind: "latest" or "best"; policy: its number in a population. Raises UserError.

    If a training runs on the same CPU, call torch.set_num_threads(1) first: a forward pass of one row took 25 ms with
    one thread, and 839 ms with two."""
    folder = Path(folder)
    module = load(find_file(folder, file and Path(file)))
    saved = args_of(module, folder)
    check_code_named(saved, changes)
    return module, *agent_of(module, folder, kind, policy, **asdict(saved) | dict(device=device) | changes)


def args_of(module, folder: Path):
    """Returns the Args of a run. Raises UserError."""
    _, saved = read_cfg(folder)
    if differing := saved.keys() ^ {field.name for field in fields(module.Args)}:
        raise UserError(f"{folder} is of another version of {module.__name__}.py; flags that differ: {', '.join(sorted(differing))}")
    try:
        check_type(saved, TypedDict("flags", get_type_hints(module.Args)))
    except TypeCheckError as error:
        raise UserError(f"{folder / 'cfg.json'} is damaged: {str(error).splitlines()[0]}") from None
    return module.Args(**saved)


def agent_of(module, folder: Path, kind: str, policy: int = 0, **flags):
    """Returns the network of a checkpoint, its Args and its step. flags: all values of Args. Raises UserError."""
    alone = dict(num_workers=0, worker_num_splits=1, num_policies=1, policy_settings="{}", with_pbt=False)
    args = module.Args(**flags | {name: value for name, value in alone.items() if name in flags})
    path, weights, step = read_checkpoint(folder, kind, policy)
    agent = module.Agent(module.spaces_of(args), args)
    try:
        agent.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]  # PyTorch's text has many lines
        unfit = f"the network in {path} does not fit {args.env_id}, these flags or this file"
        raise UserError(f"{unfit}: {reason}") from None
    return agent.to(args.device), args, step


class Drawing:
    """Draws one environment, once per step: into a video, a window, or both; without these options it does nothing."""

    VIDEO_SECONDS, WINDOW = 60, (1280, 720)  # limits: seconds; width and height, exceeded only by larger pictures

    def __init__(self, options: Options, name: str, metadata: dict, draw):
        """Opens the video and the window that the options ask for. metadata: of the environment, which has been reset;
        draw(): returns its picture, uint8 [height, width, 3], or [height, width] if grey. Raises UserError."""
        self.name, self.draw, self.fps = name, draw, metadata.get("render_fps") or 30
        self.video = self.window = self.last = self.bar = None
        self.frames = 0
        if not options.save_video and not options.watch:
            return
        if not isinstance(self.fps, int | float):
            raise UserError(f"{name} has render_fps {self.fps!r}, which is not a number")
        height, width, _ = self.picture().shape
        if options.save_video:
            import imageio.v2 as imageio

            self.path = options.folder / "video.mp4"
            larger = ["-vf", "scale=4*iw:4*ih:flags=neighbor"] if height < 256 else []
            self.video = imageio.get_writer(self.path, fps=self.fps, macro_block_size=2, output_params=larger)
            total = int(self.VIDEO_SECONDS * self.fps)  # it may go on after the last episode asked for
            self.bar = tqdm(total=total, desc="video", unit=" frames", disable=None, leave=False)
        if options.watch:
            os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
            os.environ.setdefault("SDL_VIDEODRIVER", "x11,wayland")  # else SDL may choose one that shows nothing
            import pygame

            larger = max(1, min(self.WINDOW[0] // width, self.WINDOW[1] // height))
            try:
                pygame.display.init()
                self.window = pygame.display.set_mode((larger * width, larger * height))
            except pygame.error as error:
                raise UserError(f"--watch cannot open a window: {error}") from None
            self.pygame, self.clock = pygame, pygame.time.Clock()

    def picture(self) -> np.ndarray:
        """Returns a picture of the environment as it is now, uint8 [height, width, 3]. Raises UserError."""
        try:
            picture, problem = self.draw(), 'its render() returns no picture; was it made with render_mode="rgb_array"?'
        except Exception as error:  # the environment's code may raise any type
            picture, problem = None, repr(error)
        if getattr(picture, "ndim", 0) == 2:
            picture = np.stack([picture] * 3, -1)
        if getattr(picture, "ndim", 0) != 3:
            raise UserError(f"{self.name} cannot be rendered: {problem}")
        picture = np.broadcast_to(picture, (*picture.shape[:2], 3))
        if self.last is not None and picture.shape != self.last.shape:
            raise UserError(f"{self.name} renders frames of different sizes, {self.last.shape[:2]} and {picture.shape[:2]}")
        self.last = picture
        return picture

    def recording(self) -> bool:
        return self.video is not None and self.frames < self.VIDEO_SECONDS * self.fps

    def step(self, score: float, ended: bool) -> bool:
        """Draws the environment as it is now and, if there is a window, waits until the next step is due. score: the
        return so far; ended: the episode has terminated, so there may be nothing to draw, and the window shows the last
        picture again. Returns False if the window was closed."""
        record = self.recording() and not ended
        if not record and self.window is None:
            return True
        picture = self.last if ended else self.picture()
        if record:
            # Ctrl-C in the middle of a frame would spoil the video
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
            self.video.append_data(picture)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
            self.frames += 1
            self.bar.update()
        if self.window is None:
            return True
        pygame = self.pygame
        image = pygame.surfarray.make_surface(picture.swapaxes(0, 1))  # pygame's first axis is the column
        self.window.blit(pygame.transform.scale(image, self.window.get_size()), (0, 0))
        pygame.display.set_caption(f"{self.name}: return {score:.2f}")
        pygame.display.flip()
        self.clock.tick(self.fps)
        pressed = {event.key for event in pygame.event.get(pygame.KEYDOWN)}
        return not pressed & {pygame.K_q, pygame.K_ESCAPE} and not pygame.event.get(pygame.QUIT)

    def close(self) -> None:
        if self.video is not None:
            self.bar.close()
            self.video.close()
            print(f"wrote {self.path} ({self.frames} frames)")
        if self.window is not None:
            self.pygame.display.quit()


def drawn_envs(module, args, count: int):
    """Returns `count` environments that can draw themselves. Raises UserError."""
    try:
        return module.make_envs(args, count, render_mode="rgb_array")
    except TypeError as error:
        if "render_mode" not in str(error):
            raise
        raise UserError(f"{args.env_id} cannot be rendered: it takes no render_mode") from None


class Games:
    """The environments of one worker, and its mailbox."""

    def __init__(self, module, args, count: int, draws: bool):
        self.mailbox = module.Mailbox(module.spaces_of(args), count)
        self.arrays = self.mailbox.share()
        self.worker = module.WorkerEnvs(args, 0, self.arrays, args.seed)
        self.length = module.EPISODE.index("episodic_length")
        if draws:
            self.worker.envs.close()
            self.worker.envs = drawn_envs(module, args, count)

    def step(self, action: np.ndarray) -> None:
        self.arrays.action[self.worker.rows] = action
        self.worker.step()

    def close(self) -> None:
        self.worker.envs.close()


def unfinished(steps: int, sums) -> str:
    """Returns the message if no episode has ended. sums: [row][i], of the episodes under way, see EPISODE."""
    return f"no episode has ended in {steps:,.0f} steps; the return of the first one so far: {sums[0][0]:.2f}"


def choose(module, agent, outputs: torch.Tensor, likeliest: bool) -> torch.Tensor:
    """Returns actions for N rows. outputs: logits [N, sum(heads)], or means and widths [N, 2 * numbers]."""
    if not hasattr(module, "log_distributions"):  # Gaussian actions
        return outputs.chunk(2, dim=-1)[0] if likeliest else module.sample_actions(outputs)
    choices = module.log_distributions(outputs, agent.heads)
    return torch.stack([choice.argmax(-1) for choice in choices], -1) if likeliest else module.sample_actions(choices)


@torch.inference_mode()
def play(module, agent, args, options: Options, name: str) -> list[float]:
    """Plays `options.episodes` episodes in the environments of one worker and draws the first environment; to fill the
    minute of a video, it may play more. Returns the raw returns: fewer after Ctrl-C, or if the window was closed or an
    episode does not end."""
    count, device = getattr(args, "num_envs", None) or args.num_envs_per_worker, torch.device(args.device)
    per_env = -(-options.episodes // count)  # equal shares: taking the first to end would favour short episodes
    torch.manual_seed(args.seed % 2**30)  # as in training
    state = torch.zeros(count, agent.state_size, device=device)
    returns = [[] for _ in range(count)]
    lengths = np.zeros(count)  # steps of the episodes under way
    with contextlib.ExitStack() as stack:
        stack.enter_context(options.until_interrupted())
        games = stack.enter_context(contextlib.closing(Games(module, args, count, options.save_video or options.watch)))
        arrays, rows, envs = games.arrays, games.worker.rows, games.worker.envs
        games.worker.reset()
        # Only the first environment is rendered, if the vector class allows it
        draw = envs.envs[0].render if hasattr(envs, "envs") else lambda: envs.render()[0]
        drawing = stack.enter_context(contextlib.closing(Drawing(options, name, envs.metadata, draw)))
        bar = stack.enter_context(tqdm(total=options.episodes, desc=name, unit=" episodes", disable=None, leave=False, miniters=0))
        played = 0  # episodes of the first environment
        while any(len(finished) < per_env for finished in returns) or drawing.recording() and played < options.episodes:
            if not drawing.step(games.worker.sums[0, 0], arrays.terminated[rows][0]):
                break
            if lengths.max() > MOST_STEPS:
                print(f"an episode of {name} did not end within {MOST_STEPS:,} steps; it and all later ones are left out")
                break
            obs = {key: part[rows].to(device)[None] for key, part in games.mailbox.obs.items()}
            outputs, _, state = agent(obs, games.mailbox.first[rows].to(device)[None], state)
            games.step(choose(module, agent, outputs[0], options.likeliest).cpu().numpy())
            lengths += 1
            bar.update(0)
            for i in np.flatnonzero(arrays.episode[rows, games.length]):
                lengths[i] = 0
                played += i == 0
                if len(returns[i]) < per_env:
                    returns[i].append(float(arrays.episode[rows][i, 0]))
                    bar.update(bar.n < bar.total)
        else:
            drawing.step(games.worker.sums[0, 0], arrays.terminated[rows][0])  # the last picture
    if lengths.any() and not any(returns):
        print(unfinished(lengths.max(), games.worker.sums))
    return [value for finished in returns for value in finished][: options.episodes]


def evaluate_policy(module, args, options: Options) -> list[float]:
    """Plays episodes with a checkpoint. Returns their raw returns, and prints their mean and spread."""
    count = 1 if options.watch else min(options.episodes, 16)
    flag = "num_envs" if hasattr(args, "num_envs") else "num_envs_per_worker"
    agent, args, step = agent_of(module, options.folder, options.kind(), **asdict(args) | {flag: count})
    returns = play(module, agent, args, options, args.env_id)
    if returns:
        print(f"{len(returns)} episodes, {options.actions()}, step {step:,}:\n"
              f"return {np.mean(returns):.2f} +- {np.std(returns):.2f} (standard deviation), "
              f"from {min(returns):.2f} to {max(returns):.2f}")  # fmt: skip
    return returns


def main() -> int:
    sys.path.append(os.getcwd())  # for the user's own modules that --env-id names
    torch.set_num_threads(1)  # two would wait for each other while a training uses the cores
    try:
        options, flags = tyro.cli(Options, return_unknown_args=True)
        if options.episodes is not None and options.episodes < 1:
            raise UserError(f"--episodes {options.episodes} is out of range: at least 1")
        if options.watch and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"))):
            raise UserError("--watch needs a display (DISPLAY and WAYLAND_DISPLAY are not set); "
                            "--save-video works without one")  # fmt: skip
        module = load(find_file(options.folder, options.file))
        saved = args_of(module, options.folder)
        check_code_named(saved, {flag[2:].split("=")[0].replace("-", "_") for flag in flags if flag.startswith("--")})
        args = tyro.cli(module.Args, args=flags, default=saved)
        if args.device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"--device {args.device}: PyTorch sees no GPU; use --device cpu")
        for name in (f.name for f in fields(args) if getattr(args, f.name) != getattr(saved, f.name)):
            print(f"override: {name} {getattr(saved, name)} -> {getattr(args, name)}")
        several, tasks = hasattr(module, "Population"), hasattr(module, "tasks_of")
        if (options.opponents or options.policies) and not several:
            raise UserError("--opponents and --policies are for runs of appo_pbt_doom.py")
        options.episodes = options.episodes or (10 if tasks else 100)
        (evaluate_population if several else evaluate_tasks if tasks else evaluate_policy)(module, args, options)
        if options.interrupted:
            raise KeyboardInterrupt
        return 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        expected = isinstance(error, gym.error.Error | ModuleNotFoundError)  # as in training: no such environment
        if not expected and type(error).__name__ != "UserError":  # our class or the imported file's
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


# === appo_dmlab.py: one task after the other ==========================================================================


def evaluate_tasks(module, args, options: Options) -> list[float]:
    """Plays episodes of each task, on its test level if it has one. Prints each task's mean raw return and its
    human-normalised score (random actions are 0 %, people 100 %). Returns the means."""
    maps = args.level_cache or str(options.folder.parent / "level_cache")
    args = replace(args, test_levels=True, experiment=None, level_cache=maps)
    trained = args_of(module, options.folder).env_id
    chosen = module.tasks_of(args)
    module.check_levels(args)  # only of the tasks to play: the data sets of others need not be here
    # Environments per task. A closed engine leaks 5 descriptors: with more engines, thirty tasks would need too many.
    count = 1 if options.watch else min(options.episodes, 16 if len(chosen) == 1 else 4)
    changes = dict(num_envs_per_worker=count, env_id=trained)
    agent, args, step = agent_of(module, options.folder, options.kind(), **asdict(args) | changes)
    tasks = module.tasks_of(args)
    if unknown := [task for task in chosen if task not in tasks]:
        raise UserError(f"{options.folder} was trained on {trained}, not on {', '.join(unknown)}")
    print(f"{options.episodes} episodes per task, {options.actions()}, step {step:,}: mean return +- standard deviation")
    means, scores = [], []
    for task in chosen:
        with tempfile.TemporaryDirectory() as engines:  # apart from the engines of a running training
            # The task's number becomes 0, but only the critic reads it
            returns = play(module, agent, replace(args, env_id=task, train_dir=engines), options, task)
        if len(returns) < options.episodes:  # the window was closed, or Ctrl-C was typed
            break
        means.append(float(np.mean(returns)))
        known = module.task_of(args, task)
        text = f"{known.test or task:40} {means[-1]:8.2f} +- {np.std(returns):6.2f}"
        if task in module.TASKS:
            scores.append(100 * (means[-1] - known.random) / (known.human - known.random))
            text += f"   {scores[-1]:6.1f} % of the human score"
        print(text)
        options.save_video = False  # the video shows only the first task
    with contextlib.suppress(OSError):  # removes it only if it is empty
        os.rmdir(maps)
    if len(scores) == len(chosen) > 1:
        capped = np.mean(np.minimum(scores, 100))
        print(f"mean over tasks: {np.mean(scores):.1f} % of the human score; with tasks capped at 100 %: {capped:.1f} %")
    return means


# === appo_pbt_doom.py: several policies ===============================================================================

kept = []  # games, until the process ends: freeing them while their engines start would crash it


def evaluate_population(module, args, options: Options) -> dict[tuple[str, ...], list[int]]:
    """Plays the policies of one or several runs and prints their results. In a game for one agent every policy plays
    `options.episodes` episodes; in a game for several each pair of policies plays as many matches, half of them with
    exchanged seats. Returns {pair: [wins, losses, ties]}: decided by frags (by the return, if the game has none) or,
    against bots, by who is first."""
    names, networks, frameskips = [], [], set()
    folders = [Path(os.path.abspath(folder)) for folder in (options.folder, *options.opponents)]
    for folder in folders:
        name = os.path.relpath(folder, os.path.commonpath([other.parent for other in folders]))
        saved = args_of(module, folder)
        for policy in options.policies or range(saved.num_policies):
            if policy not in range(saved.num_policies):
                raise UserError(f"--policies {policy}: {folder} has policies 0 to {saved.num_policies - 1}")
            changes = asdict(args)
            if folder != folders[0]:  # another run keeps its own flags, except these
                same = ("device", "seed", "precision", "env_id", "cfg_path", "match_wad")
                changes = asdict(saved) | {key: changes[key] for key in same}
            network, used, _ = agent_of(module, folder, options.kind(), policy, **changes)
            names.append(f"{name}/{policy}" if options.opponents else f"{policy}")
            networks.append(network)
            frameskips.add(used.frameskip)
    if len(frameskips) > 1:
        raise UserError(f"--opponents: these were trained with different frameskips: {frameskips}")
    if options.watch:
        networks = networks[: min(used.seats, 2)]
    table, per_env = lineups(len(networks), used.seats, options)
    try:
        played = play_games(module, used, options, names, networks, table, per_env)
    except (KeyboardInterrupt, UserError, module.UserError):
        raise
    except BaseException:  # such as an engine's death, after which the other players' may wait forever
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    return print_results(module.EPISODE, names, table, played)


@torch.inference_mode()
def play_games(module, args, options: Options, names: list[str], networks: list, table: np.ndarray, per_env: int) -> list:
    """Plays the matches of a table. Returns [environment][match][seat] -> sums of that seat's episode, see EPISODE."""
    seats = table.shape[1]
    # The shaping coefficients in the mailbox stay 0, so rewards are not shaped and scores are raw
    mailbox = module.Mailbox(module.spaces_of(args), table.size, len(module.shaping_of(args)))
    arrays, device = mailbox.share(), torch.device(args.device)
    rows = [np.flatnonzero(table == policy) for policy in range(len(networks))]  # of each policy
    states = [torch.zeros(len(own), network.state_size, device=device) for own, network in zip(rows, networks)]
    played, ended = [[] for _ in table], [{} for _ in table]  # [environment] -> episodes of its seats
    drawn = dict(render_mode="rgb_array") if options.save_video or options.watch else {}
    worker = module.WorkerEnvs(args, np.arange(table.size), arrays, args.seed, **drawn)
    kept.append(worker)
    worker.reset()
    first = worker.games[0]
    title = f"{args.env_id}, policy {' against '.join(names[policy] for policy in table[0])}"
    metadata, render = getattr(first, "metadata", {}), getattr(first, "render", None)
    with (
        options.until_interrupted(),
        contextlib.closing(Drawing(options, title, metadata, render)) as drawing,
        tqdm(total=per_env * len(table), desc="episodes", disable=None, leave=False, miniters=0) as bar,
    ):
        shown = steps = 0  # matches of the first environment; steps of each
        while min(map(len, played)) < per_env or drawing.recording() and shown < options.episodes:
            if not drawing.step(worker.sums[0][0], not first.agents):
                break
            for policy, (own, network) in enumerate(zip(rows, networks)):
                obs = {name: part[own].to(device)[None] for name, part in mailbox.obs.items()}
                logits, _, states[policy] = network(obs, mailbox.first[own].to(device)[None], states[policy])
                arrays.action[own] = choose(module, network, logits[0], options.likeliest).cpu().numpy()
            worker.step()
            steps += 1
            bar.update(0)
            for row in np.flatnonzero(arrays.episode[:, 1]):  # a length: an episode has ended
                ended[row // seats][row % seats] = arrays.episode[row].tolist()
            for e, episodes in enumerate(ended):
                if len(episodes) == seats:
                    shown += e == 0
                    if len(played[e]) < per_env:  # equal shares, as in `play`
                        played[e].append([episodes[seat] for seat in range(seats)])
                        bar.update()
                    ended[e] = {}
    if steps and not any(played):
        print(unfinished(steps, worker.sums))
    worker.close()
    return played


def lineups(policies: int, seats: int, options: Options) -> tuple[np.ndarray, int]:
    """Returns which policy plays in each [environment, seat], and the number of episodes that each environment plays.
    Two policies in a game of four have [[0, 1, 0, 1], [1, 0, 1, 0]]: each of them plays in each seat."""
    if seats == 1:
        pairs, table = policies, [[policy] for policy in range(policies)]
    else:
        table, against = [], list(itertools.combinations(range(policies), 2)) or [(0, 0)]  # (0, 0): against itself
        for one, two in against:
            table += [([one, two] * seats)[:seats], ([two, one] * seats)[:seats]]
        pairs = len(against)
    if options.watch:
        return np.array(table[:1]), options.episodes
    # Several copies of the table make larger batches. All line-ups must be played equally often.
    turns = len(table) // pairs
    copies = [n for n in range(1, 16 // len(table) + 1) if options.episodes % (turns * n) == 0]
    table = np.tile(table, (max(copies, default=1), 1))
    return table, -(-options.episodes * pairs // len(table))


def print_results(sums: tuple[str, ...], names: list[str], table: np.ndarray, played: list) -> dict:
    """Prints the mean returns of each policy and the results of each pair; returns the latter. played:
    [environment][match][seat] -> `sums` of that seat's episode, raw return and length first."""
    results, episodes_of = {}, [[] for _ in names]
    place, win, frags = (sums.index(name) for name in ("place", "win", "frags"))
    for sitting, matches in zip(table, played):
        sides = sorted(set(sitting))
        pair = tuple(names[side] for side in sides)
        for episodes in matches:
            for policy, episode in zip(sitting, episodes):
                episodes_of[policy].append(episode)
            if len(sitting) == 1 and episodes[0][place]:
                key, ahead = (*pair, "bots"), episodes[0][win] or 1 - episodes[0][place]  # 0: tied for first
            elif len(sides) == 2:
                score = frags if episodes[0][place] else 0  # the return, if this is no Doom match
                one, two = (sum(episode[score] for episode, seat in zip(episodes, sitting) if seat == side)
                            for side in sides)  # fmt: skip
                key, ahead = pair, one - two
            else:
                continue
            results.setdefault(key, [0, 0, 0])[0 if ahead > 0 else 1 if ahead < 0 else 2] += 1
    for name, episodes in zip(names, episodes_of):
        if episodes:
            mean, std = np.mean(episodes, 0), np.std(episodes, 0)
            text = "".join(f", {score} {value:.2f}" for score, value in zip(sums[2:], mean[2:]) if value)
            print(f"policy {name}: {len(episodes)} episodes, return {mean[0]:.2f} +- {std[0]:.2f} (standard deviation)"
                  f"{text}")  # fmt: skip
    for (one, two), (wins, losses, ties) in results.items():
        print(f"{one} against {two}: {wins} wins, {losses} losses, {ties} ties; "
              f"{wilson(wins, wins + losses)} of the decided")  # fmt: skip
    return results


def wilson(wins: int, matches: int) -> str:
    """Returns the share of wins and its 95 % interval (Wilson 1927), as text."""
    if matches == 0:
        return "none"
    p, z2, n = wins / matches, 1.96**2, matches
    middle, width = p + z2 / (2 * n), math.sqrt(z2 * (p * (1 - p) + z2 / (4 * n)) / n)
    low, high = ((middle + sign * width) / (1 + z2 / n) for sign in (-1, 1))
    return f"{p:.0%} ({low:.0%} to {high:.0%})"


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)  # treated as Ctrl-C
    for number in (signal.SIGTTIN, signal.SIGTTOU):  # otherwise the kernel would stop us in a terminal's background
        signal.signal(number, signal.SIG_IGN)
    code = main()
    sys.stdout.flush()
    if code == 130:
        os._exit(130)  # threads of an interrupted match may wait forever for their engines
    sys.exit(code)
