"""What a run survives, and what it says when it does not. On real ViZDoom and EnvPool, as a user starts it.

The fixture `run` fails every one of these tests when a process or shared memory is left behind.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import marked
from edited import COUNTING, REPORTS, ROOT, edited, replacing, with_envs

import appo_doom

SMALL = ("--experiment", "e", "--num-workers", "2", "--num-envs-per-worker", "2", "--worker-num-splits", "1", "--rollout", "8",
         "--batch-size", "32", "--hidden-size", "32", "--device", "cpu", "--total-timesteps", "1000000")  # fmt: skip
IN_PROCESS = ("--experiment", "e", "--num-workers", "0", "--num-envs-per-worker", "2", "--rollout", "8", "--hidden-size", "32", "--device", "cpu",
              "--env-id", "battle")  # fmt: skip


def before_each(name: str, line: str) -> tuple[str, str]:
    """An edit: `line` is executed before each `step` or `reset` of an environment."""
    return replacing(f"""
of_the_file = DoomEnv.{name}


def {name}(self, *arguments, **options):
    {line}
    return of_the_file(self, *arguments, **options)


DoomEnv.{name} = {name}
""")


@pytest.fixture
def run(run, tmp_path_factory):
    """As in conftest.py, with a report every second instead of every five: less to wait for."""

    def start(*flags: str, script: Path = ROOT / "appo_doom.py", edits=(), **options):
        folder = tmp_path_factory.mktemp("copy")
        return run(*flags, script=edited(folder, f"edited_{script.stem}", REPORTS, *edits, source=script), **options)

    return start


@pytest.fixture(params=["appo_doom"])
def start(run, request):
    """Starts a file with the SMALL flags, `line` added to the `step` of its environments. The base, where a test does not ask for
    another: what the files share survives the same in all, and test_agreement.py sees to it that they share it."""

    def start(*flags: str, line: str = ""):
        edits = [before_each("step", line)] if line else []
        started = run(*SMALL, *flags, script=ROOT / f"{request.param}.py", edits=edits)
        started.games = 4 if request.param == "appo_doom" else 0  # engines
        return started

    return start


def checkpoints(run):
    return sorted((run.folder / "e" / "checkpoints").glob("checkpoint_*.pth"))


def steps(run) -> int:
    found = re.findall(r"step ([\d,]+):", run.text())
    return int(found[-1].replace(",", "")) if found else 0


def training(run):
    """Waits until actors and games are there and steps are learned from."""
    games = getattr(run, "games", 4)
    run.wait_for(lambda: len(run.actors()) == 2 and len(run.engines()) == games and steps(run) > 0, what="the first report")
    return run


def named(process: int) -> set[str]:
    """The files of games that are just being started by a process."""
    return set(re.findall(r"(/dev/shm/ViZDoom\w+)\n", Path(f"/proc/{process}/maps").read_text()))


def playing(run, games: int):
    """Waits until the main process itself has started that many games."""
    run.wait_for(lambda: len(run.engines()) == games and not named(run.process.pid), what="the games")
    return run


def goes_on(run, then: int) -> None:
    run.wait_for(lambda: steps(run) > then, 60, "more steps")


def stop(run, send=os.kill, number=signal.SIGINT) -> str:
    send(run.process.pid, number)
    assert run.wait(30) == 130
    return run.text()


def test_actor_killed(start):
    """By a crash in a library; and, as for want of memory, without a word."""
    r = training(start())
    if json.loads((r.folder / "e" / "cfg.json").read_text())["resolved"]["set_workers_cpu_affinity"]:
        assert {len(os.sched_getaffinity(process)) for process in r.actors() + r.engines()} == {1}, "each with its engines on one core"
    os.kill(r.actors()[0], signal.SIGSEGV)
    r.wait_for(lambda: re.search("actor [01] died of SIGSEGV; starting another", r.text()), 30, "its successor")
    assert re.search(r"Fatal Python error: Segmentation fault\n.*line \d+ in actor", r.text(), re.S), "where it was"
    r.wait_for(lambda: len(r.actors()) == 2 and len(r.engines()) == r.games, 30, "all engines again")
    goes_on(r, steps(r))
    os.kill(r.actors()[0], signal.SIGKILL)
    r.wait_for(lambda: re.search("actor [01] died of SIGKILL; starting another", r.text()), 30, "its successor")
    r.wait_for(lambda: len(r.actors()) == 2 and len(r.engines()) == r.games, 30, "all engines again")
    goes_on(r, steps(r))
    assert "2 actors replaced" in stop(r)


def test_engine_killed(run):
    """ViZDoom raises an exception; but once in some forty kills the engine died with the lock of the shared message queue
    in its hand, and ViZDoom waits for ever: then it is a hang."""
    r = training(run(*SMALL, "--actor-timeout", "20"))
    os.kill(r.engines()[0], signal.SIGKILL)
    r.wait_for(lambda: "starting another" in r.text(), 60, "its successor")
    assert re.search(r"actor [01] (died: .*ViZDoom.*|hung .*); starting another\n", r.text()), "what it died of"
    assert re.search(r"line \d+,? in (step|reset)", r.text()), "the actor's own traceback, or its stack"
    r.wait_for(lambda: len(r.engines()) == 4, 30, "four engines again")
    goes_on(r, steps(r))
    stop(r)


def assert_one_traceback(run, exception: str) -> None:
    """In one piece, in the log too, of all actors and their lives once."""
    for text in run.text(), (run.folder / "e" / "log.txt").read_text():
        assert re.search(rf"^([-\d]+ [:\d]+ )?actor [01]:\nTraceback \(most recent call last\):\n(  .*\n)+{exception}\n", text, re.M), text
        assert text.count("Traceback") == 1 and len(re.findall(f"^{exception}$", text, re.M)) == 1, text


def test_exception_in_step_ends_the_run_with_the_reason_last(start):
    r = start(line="if self.tics > 100: raise ValueError('no such monster')")
    assert r.wait(60) == 2
    assert re.search(r"^error: for the third time in a row, actor [01] died: ValueError: no such monster\n\Z", r.text(), re.M), r.text()
    assert_one_traceback(r, "ValueError: no such monster")
    assert 2 <= r.text().count("died: ValueError: no such monster; starting another\n") <= 4, "one actor's third death is the end"
    assert len(checkpoints(r)) >= 1


def test_exception_while_environments_start_ends_the_run_with_it(run):
    """Two workers die of it; it is shown once, and no other actor is started."""
    r = run(*SMALL, edits=[before_each("reset", "open(f'died_{os.getpid()}', 'w'); time.sleep(2); raise ValueError('no such monster')")])
    assert r.wait(60) == 2 and len(list(r.folder.glob("died_*"))) == 2
    assert re.search(r"^error: while its environments started, actor [01] died: ValueError: no such monster\n\Z", r.text(), re.M), r.text()
    assert_one_traceback(r, "ValueError: no such monster")


def test_exception_without_workers_ends_the_run_with_the_reason_last(run):
    r = run(*IN_PROCESS, edits=[before_each("reset", "raise ValueError('no such monster')")])
    assert r.wait(60) == 2
    assert re.search(r"^actor 0:\nTraceback .*\n(  .*\n)+ValueError: no such monster\n"
                     r"error: while its environments started, actor 0 died: ValueError: no such monster\n\Z", r.text(), re.M), r.text()  # fmt: skip


# Python's own sleep lets other threads run; a library that holds the interpreter's lock lets nobody look
HANGS = dict(python="time.sleep(1000)", library="ctypes.PyDLL(None).sleep(1000)")


@pytest.mark.parametrize("kind", HANGS)
def test_hang_in_step_is_reported_with_its_stack(run, kind, tmp_path):
    line = "        self.count += 1\n"
    hang = f"        if self.episode > 3 and not os.path.exists('hung'):\n            open('hung', 'w')\n            {HANGS[kind]}\n"
    assert COUNTING.count(line) == 1
    r = run(*SMALL, "--actor-timeout", "2", script=with_envs(tmp_path, "appo_hanging", COUNTING.replace(line, line + hang)))
    r.wait_for(lambda: re.search(r"actor [01] hung \(its stack is above.*\); starting another", r.text()), 60, "its successor")
    assert re.search(r'File ".*edited_.*.py", line \d+ in step', r.text().split("hung (its")[0]), "where it hung"
    goes_on(r, steps(r))
    stop(r)


HANGS_AT_START = dict(
    reset="""
of_the_file = DoomEnv.reset


def reset(self, **options):
    of_the_file(self, **options)
    time.sleep(1000)


DoomEnv.reset = reset
""",
    __init__="""
of_the_file = DoomEnv.__init__


def __init__(self, *arguments):
    of_the_file(self, *arguments)
    mp.parent_process() and time.sleep(1000)  # the main process makes one, too


DoomEnv.__init__ = __init__
""",
)


@pytest.mark.parametrize("place", HANGS_AT_START)
def test_hang_while_environments_start_is_reported_with_its_stack(run, place):
    r = run(*SMALL, "--num-envs-per-worker", "1", "--actor-timeout", "2", edits=[replacing(HANGS_AT_START[place])])
    assert r.wait(60) == 2 and "starting another" not in r.text()
    stack, sentence = re.fullmatch(r"(.*)\nerror: (.*)\n", r.text(), re.S).groups()
    assert re.match(r"while its environments started, actor [01] hung \(its stack is above.*\)$", sentence)
    where = rf'File ".*edited_.*.py", line \d+ in {place}'
    assert re.search(where, stack) and not re.search(where, (r.folder / "e" / "log.txt").read_text()), "where it hung, on stderr"


def test_engine_hangs_and_main_is_killed(run):
    """The worst case: an actor waits for ever inside a game, and nobody is left to notice but itself."""
    r = training(run(*SMALL, "--actor-timeout", "4"))
    for engine in r.engines():
        os.kill(engine, signal.SIGSTOP)
    time.sleep(1)
    r.process.kill()


def test_signal_once_saves(start):
    """To the whole group: as Ctrl-C in a terminal, but by `timeout` and batch systems; the fork server would die of it at once."""
    r = training(start())
    begin = time.monotonic()
    text = stop(r, os.killpg, signal.SIGTERM)
    assert "stopped: " in text and "0 actors replaced" in text and "Traceback" not in text
    assert time.monotonic() - begin < 10
    path = checkpoints(r)[-1]
    assert torch.load(path, weights_only=True)["global_step"] > 0 and not list(path.parent.glob("*.tmp"))


def test_the_same_signal_twice_at_once_saves(start):
    """`timeout -s INT`, launchers and some shells send it to the process and to its group, within milliseconds."""
    r = training(start())
    os.kill(r.process.pid, signal.SIGINT)
    time.sleep(0.02)
    os.killpg(r.process.pid, signal.SIGINT)
    assert r.wait(30) in (130, -signal.SIGINT), "the second one may find a process that is all but gone"
    assert "stopped: " in r.text() and "Traceback" not in r.text() and len(checkpoints(r)) == 1


def test_a_second_ctrl_c_later_ends_at_once(run):
    """Here while the clean-up takes long; nothing is left behind all the same."""
    slow = """
stop = Inference.stop


def slow(self):
    stop(self)
    print("cleaning", flush=True)
    time.sleep(60)


Inference.stop = slow
"""
    r = training(run(*SMALL, edits=[replacing(slow)]))
    os.kill(r.process.pid, signal.SIGINT)
    r.wait_for(lambda: "cleaning" in r.text(), 30, "the end")
    time.sleep(1.1)
    os.kill(r.process.pid, signal.SIGINT)
    assert r.wait(20) == 130 and "stopped at once" in r.text() and checkpoints(r)


def test_no_signal_interrupts_a_checkpoint(run):
    slow = """
save = torch.save


def slow(*arguments):
    print("saving", flush=True)
    time.sleep(3)
    save(*arguments)


torch.save = slow
"""
    r = training(run(*SMALL, edits=[replacing(slow)]))
    os.kill(r.process.pid, signal.SIGINT)
    r.wait_for(lambda: "saving" in r.text(), 30, "the checkpoint")
    time.sleep(1.5)
    os.kill(r.process.pid, signal.SIGINT)
    assert r.wait(20) == 130 and "stopped: " in r.text() and "Traceback" not in r.text()
    (path,) = (r.folder / "e" / "checkpoints").iterdir()
    assert torch.load(path, weights_only=True)["global_step"] > 0


def test_ctrl_c_while_environments_start(start):
    r = start()
    r.wait_for(lambda: len(r.actors()) == 2, what="two actors")
    stop(r)


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_ctrl_c_in_a_terminal_while_actors_import(run, seconds):
    """The fork server and what it starts are in the terminal's foreground group until an actor has made its own."""
    r = run(*SMALL)
    r.wait_for(lambda: len(marked(r.mark)) > 1, what="the first process beside main")
    time.sleep(seconds)
    os.killpg(r.process.pid, signal.SIGINT)
    assert r.wait(30) == 130
    assert "stopped: " in r.text() and "Traceback" not in r.text()
    assert bool(checkpoints(r)) != (", 0 versions," in r.text()), "none of a network that has learned nothing"


def test_ctrl_c_while_the_fork_server_starts_is_kept(monkeypatch):
    """The fork server must not get it, and the main process must not lose it."""
    got, blocked = [], []

    def ensure_running():
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # a library's thread of this process must not take it
        blocked.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))

    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", ensure_running)
    handler = signal.signal(signal.SIGINT, lambda number, frame: got.append(number))
    try:
        appo_doom.start_forkserver()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert blocked == [True] and got == [signal.SIGINT]


def test_actor_killed_while_its_environments_start_ends_the_run(run):
    """All that may be left is the name of the file of an engine that was killed while it started."""
    r = run(*SMALL, "--num-workers", "1", "--num-envs-per-worker", "8")
    (actor,) = r.wait_for(r.actors, what="the actor")
    files = r.wait_for(lambda: named(actor), what="engines that start")
    os.kill(actor, signal.SIGKILL)
    assert r.wait(30) == 2 and r.text().endswith("\nerror: while its environments started, actor 0 died of SIGKILL\n")
    for path in files:
        Path(path).unlink(missing_ok=True)


def test_main_killed_while_environments_start(run):
    """Seen when those of a split have started: here eight, a second each."""
    r = run(*SMALL, "--num-envs-per-worker", "8", edits=[before_each("reset", "time.sleep(1)")])
    r.wait_for(lambda: len(r.engines()) >= 3, what="the first engines")
    r.process.kill()  # the fixture looks for what is left


def test_first_start_on_a_fresh_machine(run):
    """Eight actors start their first game in the same moment, and nobody has made the engine's folder yet."""
    with tempfile.TemporaryDirectory() as fresh:
        r = run(*SMALL, "--num-workers", "8", "--num-envs-per-worker", "1", "--total-timesteps", "100", env={"TMPDIR": fresh})
        assert r.wait(90) == 0 and "0 actors replaced" in r.text()
        assert os.path.isdir(f"{fresh}/_vizdoom")
    assert not list(r.folder.rglob("_vizdoom*"))


def test_main_killed_with_the_games_in_it(run):
    playing(run(*IN_PROCESS), 2).process.kill()


def test_signal_to_all_with_the_games_in_the_main_process(run):
    """It saves, as with actors. The train_dir is where the user is, which the games do not change, nor litter."""
    r = playing(run(*IN_PROCESS, "--train-dir", "there"), 2)
    folder = r.folder / "there" / "e"
    goes_on(r, 0)
    os.killpg(r.process.pid, signal.SIGINT)
    assert r.wait(30) == 130
    assert "Traceback" not in r.text() and "stopped: " in r.text()
    (path,) = (folder / "checkpoints").iterdir()
    assert torch.load(path, weights_only=True)["global_step"] > 0
    assert len(list(folder.glob("events*"))) == 1
    assert {path.name for path in r.folder.iterdir()} == {"there", r.output.name}


@pytest.mark.parametrize("start", ["appo_atari"], indirect=True)  # the base in test_engine_hangs_and_main_is_killed
def test_main_killed(start):
    training(start()).process.kill()  # the fixture looks for what is left


CHILD = """
class Env(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 255, (36, 36, 3), np.uint8), gym.spaces.Discrete(2)
    child = None

    def reset(self, *, seed=None, options=None):
        if self.child is None:
            import subprocess
            self.child = subprocess.Popen(["sleep", "1000"])
        return np.zeros((36, 36, 3), np.uint8), {}

    def step(self, action):
        time.sleep(0.1)
        return np.zeros((36, 36, 3), np.uint8), 0.0, False, False, {}

    def close(self):
        self.child and self.child.kill()
"""


def test_main_killed_while_actors_step(run, tmp_path):
    """They then fail to write their requests, but do not end before they have closed their environments."""
    slow = ("        self.child and self.child.kill()", "        time.sleep(0.5)\n        self.child and self.child.kill()")
    r = run(*SMALL, script=with_envs(tmp_path, "appo_child", CHILD.replace(*slow)))
    goes_on(r, 0)
    r.process.kill()


def test_more_files_than_the_soft_limit(run):
    """Each actor needs some in the main process, and the usual limit is 1,024."""
    limit = "resource.setrlimit(resource.RLIMIT_NOFILE, (18, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))"
    r = run(*SMALL, edits=[replacing(f'if __name__ == "__main__":  # and not in the actors\n    {limit}\n')])
    goes_on(r, 0)
    assert len(os.listdir(f"/proc/{r.process.pid}/fd")) > 18
    stop(r)


def test_dev_shm_too_small(tmp_path):
    command = (
        f"mount -t tmpfs -o size=2m tmpfs /dev/shm && exec {sys.executable} {ROOT / 'appo_doom.py'} --train-dir {tmp_path} --num-workers 2"
    )
    result = subprocess.run(["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, timeout=60)
    if "unshare" in result.stderr or "mount:" in result.stderr:
        pytest.skip(f"needs the right to mount: {result.stderr.strip()}")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert re.search(r"error: /dev/shm has 2 MiB free, \d+ MiB are needed", result.stderr)
