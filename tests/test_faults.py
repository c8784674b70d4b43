"""What a run survives, and what it says when it does not: how the base ends (appo_gym.py), and operations (appo_doom.py, on real ViZDoom).

The fixture `run` fails every one of these tests when a process or shared memory is left behind.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vizdoom
from conftest import marked, shared_memory
from edited import COUNTING, REPORTS, ROOT, edited, load, replacing, with_envs
from forked import new_mark, python

import appo_doom
import appo_gym

GYM = ("--experiment", "e", "--num-workers", "2", "--num-envs", "4", "--rollout", "8", "--batch-size", "16", "--device", "cpu",
       "--total-timesteps", "100000000")  # fmt: skip
DOOM = ("--experiment", "e", "--num-workers", "2", "--num-envs-per-worker", "2", "--worker-num-splits", "1", "--rollout", "8",
        "--batch-size", "32", "--hidden-size", "32", "--device", "cpu", "--total-timesteps", "1000000")  # fmt: skip
IN_PROCESS = ("--experiment", "e", "--num-workers", "0", "--num-envs-per-worker", "2", "--rollout", "8", "--hidden-size", "32", "--device", "cpu",
              "--env-id", "battle")  # fmt: skip

# A user's own module. Each environment may start a program for each episode; what its name says happens in its 60th step
ODD = """
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np


class Odd(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)
    program = None
    steps = 0

    def __init__(self, made="", happens="", programs=True):
        self.happens, self.programs = happens, programs
        exec(made)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.end_program()
        if self.programs:
            self.program = subprocess.Popen(["sleep", "1000"], close_fds=False)  # as os.system and C++ start one
            with open(Path(__file__).with_name("programs"), "a") as file:
                print(self.program.pid, file=file)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        self.steps += 1
        if self.steps == 60:
            exec(self.happens)
        return np.full(2, self.t, np.float32), 1.0, self.t == 11, False, {}

    def end_program(self):
        if self.program:
            self.program.send_signal(signal.SIGHUP if self.steps % 2 else signal.SIGTERM)
            self.program.wait(5)  # raises where it cannot be ended
            self.program = None

    def close(self):
        if multiprocessing.parent_process() is None:  # in an actor the last program is forgotten
            self.end_program()


KINDS = dict(
    Goes="",
    Raises="raise ValueError('no such monster')",
    Exits="sys.exit('no such monster')",
    Disconnects="raise ConnectionResetError('no such monster')",
    Ends="raise EOFError('no such monster')",
    Dies="os.kill(os.getpid(), signal.SIGKILL)",
    Hangs="open(Path(__file__).with_name('hung'), 'w'); time.sleep(60)",
)
for name, happens in KINDS.items():
    gym.register(f"{name}-v0", Odd, kwargs=dict(happens=happens))
gym.register("Bare-v0", Odd, kwargs=dict(programs=False))
gym.register("Wanders-v0", Odd, kwargs=dict(made="os.chdir('/')"))
"""
LOUD = """
import os
import signal

import odd

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: os._exit(7))
"""


@pytest.fixture(scope="session")
def odd(tmp_path_factory):
    """A folder on the path, here and in all actors, with ODD and LOUD as modules."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "odd.py").write_text(ODD)
    (folder / "loud.py").write_text(LOUD)
    sys.path.insert(0, str(folder))
    return folder


def assert_no_program_left(odd) -> None:
    def running() -> list[int]:
        found = []
        for pid in (odd / "programs").read_text().split():
            try:
                if "sleep" in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(int(pid))
            except OSError:
                pass
        return found

    deadline = time.monotonic() + 5
    while running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running() == []


def before_each(name: str, line: str) -> tuple[str, str]:
    """An edit: `line` is executed before each `step` or `reset` of a game."""
    return replacing(f"""
of_the_file = DoomEnv.{name}


def {name}(self, *arguments, **options):
    {line}
    return of_the_file(self, *arguments, **options)


DoomEnv.{name} = {name}
""")


@pytest.fixture
def start(run, tmp_path_factory, odd):
    """Starts a file, appo_doom.py with the DOOM flags or the base with the GYM ones, with three reports a second: less to wait for."""

    def start(*flags: str, script: Path = ROOT / "appo_doom.py", edits=(), **options):
        script = edited(tmp_path_factory.mktemp("copy"), f"edited_{script.stem}", REPORTS, *edits, source=script)
        env = {"PYTHONPATH": f"{odd}:{os.environ['PYTHONPATH']}"}
        return run(*(GYM if script.stem == "edited_appo_gym" else DOOM), *flags, script=script, env=env | options.pop("env", {}), **options)

    return start


@pytest.fixture
def gym(start):
    """Starts the base, and waits until it learns."""

    def gym(env_id: str, *flags: str, **options):
        started = start("--env-id", env_id, *flags, script=ROOT / "appo_gym.py", **options)
        goes_on(started, 0)
        return started

    return gym


def steps(run) -> int:
    found = re.findall(r"step ([\d,]+):", run.text())
    return int(found[-1].replace(",", "")) if found else 0


def goes_on(run, then: int | None = None) -> None:
    then = steps(run) if then is None else then
    run.wait_for(lambda: steps(run) > then, 60, "more steps")


def latest(folder: Path) -> dict:
    """The checkpoint of a run; no update was cut in two, and no file is half written."""
    (path,) = [*folder.glob("latest.pth"), *sorted(folder.glob("checkpoints/checkpoint_*.pth"))[-1:]]
    content = torch.load(path, weights_only=True)
    optimizer_steps = {int(moments["step"]) for moments in content["optimizer"]["state"].values()} or {0}
    first = 1 if path.parent.name == "checkpoints" else 0  # in Doom the first one only initialises the inputs' statistics
    assert optimizer_steps == {content["version"] - first} and content["global_step"] > 0
    assert not list(folder.rglob("*.tmp"))
    return content


def stop(run, send=os.kill, number=signal.SIGINT) -> str:
    send(run.process.pid, number)
    assert run.wait(30) == 130
    text = run.text()
    assert re.search(r"^stopped: (0 steps|[\d,]+ steps, .*\nplay: python evaluate.py /)", text, re.M) and "Traceback" not in text, text
    return text


# ---- how the base ends


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind, exception", [("Raises", "ValueError"), ("Exits", "SystemExit"), ("Disconnects", "ConnectionResetError"),
                                             ("Ends", "EOFError")])  # fmt: skip
def test_an_exception_ends_the_run_with_its_traceback_last(main, odd, tmp_path, kind, exception, workers):
    """Whatever it is. The run saves; programs end with the environment that started them."""
    code, text = main(appo_gym, "--train-dir", tmp_path, *GYM, "--env-id", f"odd:{kind}-v0", "--num-workers", workers)
    assert code == 2 and text.count("Traceback") == 1, text
    pattern = rf"\nerror: actor [01] raised an exception\nTraceback .*\n(  .*\n)+{exception}: no such monster\n\Z"
    assert re.search(pattern, text), text
    latest(tmp_path / "e")
    assert_no_program_left(odd)


def test_a_normal_end_leaves_no_program(main, odd, tmp_path):
    """Nor while it lasts: the environment can end what it has started."""
    code, text = main(appo_gym, "--train-dir", tmp_path, *GYM, "--env-id", "odd:Goes-v0", "--total-timesteps", 300)
    assert code == 0 and "\ndone: " in text
    assert_no_program_left(odd)


def test_an_actor_that_kills_itself_ends_the_run(main, odd, tmp_path):
    code, text = main(appo_gym, "--train-dir", tmp_path, *GYM, "--env-id", "odd:Dies-v0")
    assert code == 2 and re.search(r"\nerror: actor [01] was killed, or crashed\n\Z", text), text
    latest(tmp_path / "e")
    assert_no_program_left(odd)


def test_an_actor_that_is_killed_ends_the_run(gym):
    r = gym("odd:Goes-v0")
    os.kill(r.actors()[0], signal.SIGSEGV)
    assert r.wait(30) == 2 and re.search(r"\nerror: actor [01] was killed, or crashed\n\Z", r.text()) and "Traceback" not in r.text(), r.text()
    latest(r.folder / "e")


def test_ctrl_c_in_a_terminal(gym):
    """It goes to the whole group. The module has signal handlers of its own; the environment changes the folder, and a relative
    --train-dir is where the user was all the same."""
    r = gym("loud:Wanders-v0", "--train-dir", "there")
    goes_on(r)
    stop(r, os.killpg)
    latest(r.folder / "there" / "e")
    assert {path.name for path in r.folder.iterdir()} == {"there", r.output.name}


def test_sigterm_to_every_process_of_a_job(gym):
    """As batch systems send it; the environments' programs, which they end anyway, among them."""
    r = gym("odd:Goes-v0")
    begin = time.monotonic()

    def to_all(main, number):
        for pid in sorted(marked(r.mark)):
            with contextlib.suppress(ProcessLookupError):  # the first ones have ended the others
                os.kill(pid, number)

    stop(r, to_all, signal.SIGTERM)
    assert time.monotonic() - begin < 10
    latest(r.folder / "e")


def test_ctrl_c_where_an_environment_hangs(start, odd):
    """The only way to end that, in the base. It hangs after seven rollouts, perhaps before the first report."""
    r = start("--env-id", "odd:Hangs-v0", script=ROOT / "appo_gym.py")
    r.wait_for((odd / "hung").exists, what="the hang")
    stop(r)
    latest(r.folder / "e")


def test_main_killed(gym):
    gym("odd:Goes-v0").process.kill()  # the fixture looks for what is left


def test_ctrl_c_while_main_imports(run):
    r = run(*GYM, script=ROOT / "appo_gym.py", launcher=("-u",))
    r.wait_for(lambda: "libtorch" in Path(f"/proc/{r.process.pid}/maps").read_text(), what="the import of PyTorch")
    os.killpg(r.process.pid, signal.SIGINT)
    assert r.wait(30) == -signal.SIGINT and r.text() == "importing torch ...\n"


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_ctrl_c_while_actors_import(start, seconds):
    """The fork server and what it starts are in the terminal's foreground group until an actor has made its own."""
    r = start(script=ROOT / "appo_gym.py")
    r.wait_for(lambda: len(marked(r.mark)) > 1, what="the first process beside main")
    r.wait_for(lambda: "libtorch" in "".join(Path(f"/proc/{pid}/maps").read_text() for pid in marked(r.mark) - {r.process.pid}), what="imports")
    time.sleep(seconds)
    text = stop(r, os.killpg)
    assert (r.folder / "e" / "latest.pth").exists() != ("stopped: 0 steps" in text), "none of a network that has learned nothing"


def test_ctrl_c_while_engines_start(start):
    """More of them than start in the five seconds after which actors are killed. The fixture sees whether their shared memory is left."""
    r = start("--num-envs-per-worker", "64")
    r.wait_for(lambda: len(r.engines()) > 2, what="the first games")
    assert "stopped: 0 steps" in stop(r)


def test_a_signal_does_not_cut_an_update_in_two(main, tmp_path, monkeypatch):
    """Here it comes after Adam's step, and before the new version."""
    update, calls = appo_gym.PopArt.update, []

    def interrupted(self, targets, valid):
        calls.append(0)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        update(self, targets, valid)

    monkeypatch.setattr(appo_gym.PopArt, "update", interrupted)
    code, text = main(appo_gym, "--train-dir", tmp_path, *GYM, "--num-workers", 0)
    assert code == 130 and "\nstopped: " in text and "Traceback" not in text
    content = latest(tmp_path / "e")
    assert content["version"] % 8 == 0, "whole iterations of two batches and four epochs"


@pytest.mark.parametrize("appo, flags", [(appo_gym, GYM), (appo_doom, DOOM)], ids=["gym", "doom"])
def test_a_full_disk_is_a_sentence(main, tmp_path, appo, flags, counting):
    """And the checkpoint before it is kept."""
    appo = counting if appo is appo_doom else appo
    flags = ("--train-dir", tmp_path, *flags, "--num-workers", 0)
    assert main(appo, *flags, "--total-timesteps", 300)[0] == 0
    before = latest(tmp_path / "e")
    (folder,) = {path.parent for path in tmp_path.rglob("*.pth")}
    (folder / "saving.tmp").symlink_to("/dev/full")
    code, text = main(appo, *flags, "--total-timesteps", 1000)
    assert code == 2 and text.endswith("\nerror: [Errno 28] No space left on device\n") and "Traceback" not in text, text
    (folder / "saving.tmp").unlink()
    assert latest(tmp_path / "e")["version"] == before["version"]


def test_a_folder_that_cannot_be_made_is_a_sentence(main, tmp_path):
    (tmp_path / "file").touch()
    code, text = main(appo_gym, "--train-dir", tmp_path / "file", *GYM)
    assert code == 2 and re.fullmatch(r"error: .*Not a directory: .*/file/e'\n", text), text


def test_who_reads_the_output_goes(tmp_path, odd):
    flags = " ".join(map(str, ("--train-dir", tmp_path, *GYM, "--num-workers", 0, "--total-timesteps", 1000)))
    result = subprocess.run(f"{sys.executable} {ROOT / 'appo_gym.py'} {flags} | head -2", shell=True, capture_output=True, text=True, timeout=60)
    assert re.fullmatch(r"CartPole-v1: 0 workers on \d+ cores, 4 environments\na new run in .*\n", result.stdout), result
    assert "error: [Errno 32] Broken pipe\n" in result.stderr and "Traceback" not in result.stderr, result
    latest(tmp_path / "e")


def test_runs_of_a_second_have_folders_of_their_own(tmp_path):
    names = replacing("time.time = lambda: 1e9\n\n\ndef main():\n    print(parse_args()[1])\n")
    script = edited(tmp_path, "appo_names", names, source=ROOT / "appo_gym.py")
    found = [python(script, folder=tmp_path).stdout for _ in range(2)]
    assert found[0] != found[1]
    for name in found:
        assert re.search(rf"^{tmp_path}/train_dir/CartPole-v1__appo_names__1__1000000000_\d+\n\Z", name, re.M), name


@pytest.mark.parametrize("script", ["appo_gym", "appo_doom"])
def test_a_second_run_in_the_same_folder_is_refused(start, script):
    """Whatever has become of the first: the kernel gives the folder back."""
    script = ROOT / f"{script}.py"
    first = start(script=script)
    goes_on(first, 0)
    cfg = (first.folder / "e" / "cfg.json").read_bytes()
    second = start("--seed", "5", script=script)
    assert second.wait(60) == 2
    assert second.text().endswith(f"error: another run is using {first.folder}/e: stop it, or choose another --experiment\n")
    assert (first.folder / "e" / "cfg.json").read_bytes() == cfg
    assert script.stem == "appo_gym" or "another run" not in (first.folder / "e" / "log.txt").read_text()
    first.process.kill()
    first.wait(10)
    third = start(script=script)
    goes_on(third, 0)
    stop(third)


@pytest.mark.parametrize("script", ["appo_gym", "appo_doom"])
def test_a_daemon_without_streams(run, tmp_path, script):
    """Both closed: it trains, saves, and leaves no process."""
    flags = GYM if script == "appo_gym" else DOOM
    command = f"{sys.executable} {ROOT / script}.py --train-dir {tmp_path} {' '.join(flags)} --total-timesteps 300 >&- 2>&-"
    r = run(command=["-c", f"import os; os.execvp('sh', ['sh', '-c', {command!r}])"])
    assert r.wait(60) == 0
    assert latest(tmp_path / "e")["global_step"] >= 300


def test_a_worker_that_hangs_is_named(start, odd):
    """While it does, and at the end: else the others would do all the work, and nobody would know."""
    once = "if not Path(__file__).with_name('hung').exists(): " + "open(Path(__file__).with_name('hung'), 'w'); time.sleep(60)"
    (odd / "once.py").write_text((odd / "odd.py").read_text().replace("Hangs=", f"Once={once!r}, Hangs=").replace('f"{name}-v0"', 'f"{name}-v1"'))
    for path in odd.glob("hung"):
        path.unlink()
    flags = ("--env-id", "once:Once-v1", "--total-timesteps", "30000")
    r = start(*flags, script=ROOT / "appo_gym.py", edits=[("SILENCE = 60  #", "SILENCE = 3  #")])
    r.wait_for(lambda: (odd / "hung").exists(), 40, "the hang")

    r.wait_for(lambda: re.search("^worker [01] has not answered for 3 s: its environments are slow or stuck$", r.text(), re.M), 30, "the name")
    goes_on(r)
    stop(r)
    assert re.search(r"^worker [01] did not end within 5 s: its environments are slow or stuck$", r.text(), re.M), r.text()


# ---- operations


def test_an_actor_that_is_stopped_is_replaced(start):
    """A stopped process has no timer of its own."""
    r = training(start("--actor-timeout", "12"))
    os.kill(r.actors()[0], signal.SIGSTOP)
    r.wait_for(lambda: re.search(r"^actor [01]: no answer for \d+ s \(--actor-timeout\); starting another$", r.text(), re.M), 60, "another")
    assert "most recent call first" in r.text(), "where it was stopped"
    goes_on(r)
    stop(r)


def test_the_time_is_for_one_game(start, tmp_path_factory):
    """Four games of a second a step are no hang at a limit of 3."""
    line = "        self.count += 1\n"
    script = with_envs(tmp_path_factory.mktemp("slow"), "appo_slow_games", COUNTING.replace(line, line + "        time.sleep(1)\n"))
    r = start("--actor-timeout", "3", "--num-envs-per-worker", "4", "--rollout", "2", script=script)
    goes_on(r, 0)
    stop(r)
    assert "no answer" not in r.text()


def training(run, games: int = 4):
    """Waits until actors and games are there, all of them have asked for actions, and steps are learned from."""
    run.wait_for(lambda: len(run.actors()) == 2 and len(run.engines()) == games and not any(map(named, run.actors())), what="the games")
    goes_on(run)
    goes_on(run)
    return run


def named(process: int) -> set[str]:
    """The files of games that are just being started by a process."""
    try:
        return set(re.findall(r"(/dev/shm/ViZDoom\w+)\n", Path(f"/proc/{process}/maps").read_text()))
    except OSError:  # it has just ended
        return set()


def test_an_actor_or_an_engine_that_is_killed_is_replaced(start):
    """By a crash in a library; as for want of memory, without a word; and a game, of which ViZDoom tells by an exception. (But once in
    some forty kills the engine died with the lock of the shared message queue in its hand: then it is a hang.)"""
    r = training(start("--actor-timeout", "20"))
    if len(os.sched_getaffinity(0)) == appo_doom.num_cores():
        assert {len(os.sched_getaffinity(process)) for process in r.actors() + r.engines()} == {1}, "each with its engines on one core"
    first, second = r.actors()
    os.kill(first, signal.SIGSEGV)
    os.kill(second, signal.SIGKILL)
    for code in (-signal.SIGSEGV, -signal.SIGKILL):
        r.wait_for(lambda: re.search(rf"^actor [01]: died \(exit code {code:d}\); starting another\n", r.text(), re.M), 30, "its successor")
    text = training(r).text()
    os.kill(r.engines()[0], signal.SIGKILL)
    r.wait_for(lambda: r.text().count("starting another") == 3, 60, "its successor")
    told = r.text()[len(text) :]
    assert re.search(r"^(.*ViZDoom.*|actor [01]: no answer for 20 s .*); starting another\n", told, re.M), "what it died of"
    assert re.search(r"line \d+,? in (step|reset)", told), "the actor's own traceback, or its stack"
    r.wait_for(lambda: len(r.engines()) == 4, 30, "four engines again")
    goes_on(r)
    # `timeout -s INT`, launchers and some shells send it to the process and to its group, within milliseconds
    os.kill(r.process.pid, signal.SIGINT)
    time.sleep(0.02)
    os.killpg(r.process.pid, signal.SIGINT)
    assert r.wait(30) in (130, -signal.SIGINT), "the second one may find a process that is all but gone"
    latest(r.folder / "e")
    log = (r.folder / "e" / "log.txt").read_text()
    for line in (r"actor [01]: died \(exit code -9\); starting another", r"step [\d,]+: .*limit: \w+, lag \d+", r"stopped: [\d,]+ steps, .*"):
        assert re.search(rf"^[-\d]{{10}} [:\d]{{8}} {line}$", log, re.M) and re.search(rf"^{line}$", r.text(), re.M), log


@pytest.fixture(scope="session")
def failing(tmp_path_factory):
    """appo_doom.py with counting environments that fail in `step` or in `reset`."""
    found = {}
    fails = "raise ValueError('no such monster')\n"
    for name, line in dict(step="        self.count += 1\n", reset="        if seed is not None:\n").items():
        assert COUNTING.count(line) == 1
        envs = COUNTING.replace(line, f"        {'if self.episode > 8: ' if name == 'step' else ''}{fails}{line}")
        found[name] = load(with_envs(tmp_path_factory.mktemp(name), f"appo_failing_{name}", envs))
    return found


def test_the_third_early_death_in_a_row_ends_the_run(main, tmp_path, failing):
    code, text = main(failing["step"], "--train-dir", tmp_path, *DOOM)
    assert code == 2 and re.search(r"\nerror: actor ([01]): Traceback .*\n(  .*\n)+ValueError: no such monster\n\Z", text), text
    worker = re.search(r"^error: actor ([01])", text, re.M)[1]
    deaths = {w: len(re.findall(rf"^actor {w}: Traceback .*\n(?:  .*\n)+ValueError: no such monster; starting another\n", text, re.M)) for w in "01"}
    assert deaths.pop(worker) == 2 and max(deaths.values()) <= 2, text
    assert re.search(r"error: actor [01]: Traceback", (tmp_path / "e" / "log.txt").read_text())
    latest(tmp_path / "e")


def test_a_long_life_forgives_deaths(main, tmp_path, failing, monkeypatch):
    """Were each of them long enough there would be no end: four deaths and more of a worker."""
    monkeypatch.setattr(failing["step"], "SHORT_LIFE", 10)
    code, text = main(failing["step"], "--train-dir", tmp_path, *DOOM, "--num-workers", 1, "--total-timesteps", 400)
    assert code == 0 and text.count("ValueError: no such monster; starting another\n") >= 4, text


def test_a_death_before_the_first_request_ends_the_run(main, tmp_path, failing):
    code, text = main(failing["reset"], "--train-dir", tmp_path, *DOOM)
    assert code == 2 and "starting another" not in text
    assert re.search(r"\nerror: actor [01]: Traceback .*\n(  .*\n)+ValueError: no such monster\n\Z", text) and text.count("Traceback") == 1, text
    assert not list(tmp_path.rglob("*.pth"))


FAILS_IN_STEP = """
        if self.episode > 8 and not os.path.exists("failed"):
            open("failed", "w")
            open("fails", "w")
            raise ValueError("in step")
"""
FAILS_IN_RESET = """
        if seed is not None and os.path.exists("fails"):
            os.remove("fails")
            raise ValueError("in reset")
"""


def test_a_successor_that_fails_before_its_first_request_is_replaced(start, tmp_path_factory):
    step, reset = "        self.count += 1\n", "        if seed is not None:\n"
    assert COUNTING.count(step) == COUNTING.count(reset) == 1
    envs = COUNTING.replace(step, step + FAILS_IN_STEP).replace(reset, FAILS_IN_RESET + reset)
    r = start(script=with_envs(tmp_path_factory.mktemp("succeeds"), "appo_succeeds", envs))
    r.wait_for(lambda: "ValueError: in reset; starting another" in r.text(), 60, "the second successor")
    assert "ValueError: in step; starting another" in r.text()
    goes_on(r)
    os.kill(r.process.pid, signal.SIGINT)
    assert r.wait(30) == 130


# Python's own sleep lets other threads run; a library that holds the interpreter's lock lets nobody look
HANGS = """
        if self.episode > 3 and not os.path.exists("python"):
            open("python", "w")
            time.sleep(1000)
        if self.episode > 6 and not os.path.exists("library"):
            open("library", "w")
            ctypes.PyDLL(None).sleep(1000)
"""


def test_a_hang_in_step_is_reported_with_its_stack(start, tmp_path_factory):
    line = "        self.count += 1\n"
    assert COUNTING.count(line) == 1
    script = with_envs(tmp_path_factory.mktemp("hanging"), "appo_hanging", COUNTING.replace(line, line + HANGS))
    r = start("--actor-timeout", "3", script=script)
    own = script.read_text().partition("class Env(gym.Env):")[0].count("\n")  # what one prints may stand within the stack of the other

    def stacks() -> set[str]:
        return {line for line in re.findall(r'hanging.py", line (\d+) in step', r.text()) if int(line) > own}

    r.wait_for(lambda: len(stacks()) == 2, 60, "where they hang")
    r.wait_for(lambda: len(re.findall(r"no answer for 3 s \(--actor-timeout\); starting another", r.text())) >= 2, 60, "two successors")
    goes_on(r)
    stop(r)
    assert (r.folder / "python").exists() and (r.folder / "library").exists()


def test_a_hang_while_environments_start_ends_the_run(start):
    r = start("--num-envs-per-worker", "1", "--actor-timeout", "2", edits=[before_each("reset", "time.sleep(1000)")])
    assert r.wait(60) == 2 and "starting another" not in r.text()
    assert re.search(r'File ".*edited_.*.py", line \d+ in reset\n', r.text()), "where it hung"
    assert re.search(r"\nerror: actor [01]: no answer for \d+ s \(--actor-timeout\)\n\Z", r.text()), r.text()


def test_an_engine_hangs_and_main_is_killed(start):
    """The worst case: an actor waits for ever inside a game, and nobody is left to notice but itself."""
    r = training(start("--actor-timeout", "10"))
    for engine in r.engines():
        os.kill(engine, signal.SIGSTOP)
    time.sleep(1)
    r.process.kill()


def test_a_second_ctrl_c_later_ends_at_once(start):
    """Here while a checkpoint takes long. The one before it is whole, and nothing is left behind."""
    slow = """
save = torch.save


def slow(*arguments):
    if threading.main_thread() is threading.current_thread() and arguments[0]["global_step"] > 300:
        print("saving", flush=True)
        time.sleep(60)
    save(*arguments)


torch.save = slow
"""
    r = start("--save-every-sec", "0", edits=[replacing(slow)])
    r.wait_for(lambda: "saving" in r.text(), 60, "the checkpoint")
    os.kill(r.process.pid, signal.SIGINT)
    time.sleep(1.2)
    assert r.process.poll() is None
    os.kill(r.process.pid, signal.SIGINT)
    assert r.wait(20) == 130 and "stopped: " not in r.text() and "Traceback" not in r.text()
    latest(r.folder / "e")


def test_an_actor_killed_while_its_environments_start_ends_the_run(start):
    """All that may be left is the name of the file of an engine that was killed while it started."""
    r = start("--num-workers", "1", "--num-envs-per-worker", "8")
    (actor,) = r.wait_for(r.actors, what="the actor")
    r.wait_for(lambda: named(actor), what="engines that start")
    os.kill(actor, signal.SIGSTOP)
    files = named(actor)
    os.kill(actor, signal.SIGKILL)
    assert r.wait(30) == 2 and r.text().endswith("\nerror: actor 0: died (exit code -9)\n"), r.text()
    for path in files:
        Path(path).unlink(missing_ok=True)


def test_main_killed_while_environments_start(start):
    """Seen when those of a split have started: here eight, a second each."""
    r = start("--num-envs-per-worker", "8", edits=[before_each("reset", "time.sleep(1)")])
    r.wait_for(lambda: len(r.engines()) >= 3, what="the first engines")
    r.process.kill()  # the fixture looks for what is left


def test_the_first_start_on_a_fresh_machine(start):
    """Eight actors start their first game in the same moment, and nobody has made the engine's folder yet."""
    with tempfile.TemporaryDirectory() as fresh:
        r = start("--num-workers", "8", "--num-envs-per-worker", "1", "--total-timesteps", "100", env={"TMPDIR": fresh})
        assert r.wait(90) == 0 and "starting another" not in r.text()
        assert os.path.isdir(f"{fresh}/_vizdoom")
    assert not list(r.folder.rglob("_vizdoom*"))


@pytest.mark.parametrize("killed", [False, True])
def test_the_games_in_the_main_process(start, killed):
    """They end with it, however it ends; Ctrl-C saves, as with actors."""
    r = start(*IN_PROCESS, "--train-dir", "there")
    r.wait_for(lambda: len(r.engines()) == 2 and not named(r.process.pid), what="the games")
    if killed:
        return r.process.kill()
    goes_on(r, 0)
    stop(r, os.killpg)
    latest(r.folder / "there" / "e")
    assert {path.name for path in r.folder.iterdir()} == {"there", r.output.name}, "nothing is littered"


@pytest.mark.parametrize("name", ["cig.cfg", "multi_duel.cfg", "own.cfg"])
def test_a_scenario_that_cannot_be_played_is_a_sentence(main, tmp_path, name):
    """It is for several players, or its WAD is missing. The names of the memory of an engine that crashed while it started are left."""
    before = set(os.listdir("/dev/shm"))
    path = Path(vizdoom.scenarios_path, name)
    if name == "own.cfg":
        path = tmp_path / name
        path.write_text("doom_scenario_path = nowhere.wad\navailable_buttons = { ATTACK }\n")
    code, text = main(appo_doom, "--train-dir", tmp_path, *DOOM, "--cfg-path", path, "--num-workers", 1, "--num-envs-per-worker", 1)
    for left in shared_memory(new_mark()) - before:  # nobody has it: the test of a run beside this one would take it for its own
        Path("/dev/shm", left).unlink(missing_ok=True)
    reason = ".*nowhere.wad.*" if name == "own.cfg" else r"died \(exit code -11\) while its engines started: is the scenario for several players\?"
    assert code == 2 and re.search(rf"\nerror: actor 0: {reason}\n\Z", text) and "Traceback" not in text, text


def test_dev_shm_too_small(main, tmp_path, monkeypatch):
    monkeypatch.setattr(appo_doom.shutil, "disk_usage", lambda path: SimpleNamespace(free=11 << 20))
    code, text = main(appo_doom, "--train-dir", tmp_path, *DOOM)
    assert code == 2 and text.startswith("error: /dev/shm has 11 MiB free, 12 are needed: "), text
