import contextlib
import fcntl
import gc
import multiprocessing
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from edited import COUNTING, ROOT, load, with_envs
from forked import MARK, Forked, end_with_parent, new_mark

sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = ":".join(filter(None, [f"{ROOT}/tests/quick", os.environ.get("PYTHONPATH")]))
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as of what a shell script starts in the background: runs would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Actors that tests start in their own process are forked from one that has imported what takes long
multiprocessing.get_context("forkserver").set_forkserver_preload(["numpy", "torch", "gymnasium", "tyro", "tqdm", "appo_doom"])


def pytest_collection_finish():
    gc.freeze()  # what the imports have made stays: collections, which some tests ask for, need not look through it


def marked(mark: str) -> set[int]:
    """Processes with `mark` in their environment: what a run started, and all that they started."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(int(pid))
        except OSError:
            pass
    return found


def shared_memory(mark: str, engines: bool = True) -> set[str]:
    """Names in /dev/shm, but for the files of processes without `mark`: of tests that run beside this one. engines: ViZDoom's, too."""
    names = {name for name in os.listdir("/dev/shm") if name.startswith(("ViZDoom", "torch_") if engines else "torch_")}
    others = set(filter(str.isdigit, os.listdir("/proc"))) - set(map(str, marked(mark)))
    for pid in others if names else ():
        try:
            names -= set(re.findall("/dev/shm/(.*)", Path(f"/proc/{pid}/maps").read_text()))
        except OSError:
            pass
    return names


def left_behind(mark: str, before: set[str], engines: bool = True) -> tuple[set[int], set[str]]:
    """Processes, and shared memory that was not there `before`, once they are gone or half a minute has passed."""
    deadline = time.monotonic() + 30
    while (left := (marked(mark), shared_memory(mark, engines) - before)) != (set(), set()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


class Run:
    """`python appo_doom.py ...`, or another script, as a user starts it, in a terminal session of its own."""

    def __init__(self, folder: Path, *flags: str, env: dict | None = None, script: Path = ROOT / "appo_doom.py", launcher: tuple = (),
                 command: list | None = None, terminal: tuple[int, int] | None = None):  # fmt: skip
        """`command` is all that is typed after `python`. terminal: rows and columns of a pseudo terminal with `stty tostop`, which controls
        the session and is its input and output; else that is a file."""
        self.mark = new_mark()
        self.folder, self.output, self.terminal = folder, folder / f"{self.mark}.txt", None
        if terminal:
            self.terminal, own = os.openpty()
            os.set_blocking(self.terminal, False)
            fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", *terminal, 0, 0))
            settings = termios.tcgetattr(own)
            settings[3] |= termios.TOSTOP
            termios.tcsetattr(own, termios.TCSANOW, settings)
            self.output, self.read = Path(os.ttyname(own)), b""
        command = list(map(str, command or [*launcher, script, "--train-dir", folder, *flags]))
        self.has_engines = Path(script).is_dir() or "import vizdoom" in Path(script).read_text()  # else names of engines are of other tests
        environment = os.environ | {MARK: self.mark} | (env or {})
        if command[0].endswith(".py"):
            self.process = Forked(command, self.output, folder, environment)
        else:
            file = os.open(self.output, os.O_RDWR | os.O_CREAT | os.O_NOCTTY)

            def prepare():
                end_with_parent()
                if terminal:
                    fcntl.ioctl(1, termios.TIOCSCTTY, 0)

            self.process = subprocess.Popen([sys.executable, *command], stdin=file if terminal else None, stdout=file, stderr=file, cwd=folder,
                                            env=environment, start_new_session=True, preexec_fn=prepare)  # fmt: skip
            os.close(file)

    def text(self) -> str:
        if self.terminal is None:
            return self.output.read_text()
        with contextlib.suppress(BlockingIOError):  # no more yet
            while more := os.read(self.terminal, 65536):
                self.read += more
        return self.read.decode(errors="replace").replace("\r\n", "\n")

    def type(self, keys: str) -> None:
        os.write(self.terminal, keys.encode())

    def hang_up(self) -> None:
        self.text()
        os.close(self.terminal)
        self.terminal, self.output = None, self.folder / "nothing more"
        self.output.touch()

    def wait_for(self, condition, seconds: float = 60, what: str = "the condition"):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := condition():
                return value
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{self.text()}"
            time.sleep(0.1)
        raise AssertionError(f"{what} did not come within {seconds} s:\n{self.text()}")

    def wait(self, seconds: float = 60) -> int:
        deadline = time.monotonic() + seconds
        while self.terminal is not None and self.process.poll() is None and time.monotonic() < deadline:
            self.text()  # a terminal that nobody reads from holds its programs up
            time.sleep(0.1)
        try:
            return self.process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running after {seconds} s:\n{self.text()}") from None

    def actors(self) -> list[int]:
        """Process ids of the actors: children of the fork server, which is a child of the main process."""

        def parent(pid: int) -> int:
            return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])

        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                if parent(pid) != self.process.pid and parent(parent(pid)) == self.process.pid:
                    found.append(pid)
            except (OSError, IndexError):
                pass
        return sorted(found)

    def engines(self) -> list[int]:
        found = []
        for pid in marked(self.mark):
            try:
                if os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "vizdoom":
                    found.append(pid)
            except OSError:
                pass
        return found


@pytest.fixture(autouse=True)
def threads():
    """A run in this process sets PyTorch's number of threads, and results depend on it: each test begins with one."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def modules():
    """evaluate.py imports a file anew: actors that are started later look for the functions of the one that the tests have."""
    before = {name: module for name, module in sys.modules.items() if name.startswith("appo_")}
    yield
    sys.modules.update(before)


@pytest.fixture(scope="session")
def counting(tmp_path_factory):
    """appo_doom.py with the counting environment instead of Doom."""
    return load(with_envs(tmp_path_factory.mktemp("counting"), "appo_counting", COUNTING))


@pytest.fixture
def main(monkeypatch, capsys):
    """A file's `main` in this process, for what needs no process of its own: (module, flags) -> exit code, and what was printed."""

    def call(appo, *flags) -> tuple[int, str]:
        gc.collect()  # the log of a run before it, which it would hold
        monkeypatch.setattr(sys, "argv", [appo.__file__, *map(str, flags)])
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        capsys.readouterr()
        try:
            code = appo.main()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return code, "".join(capsys.readouterr())

    return call


@pytest.fixture
def run(tmp_path):
    """Starts runs; fails the test if one of them leaves a process or shared memory behind."""
    before, runs = set(os.listdir("/dev/shm")), []

    def start(*flags: str, **options) -> Run:
        runs.append(Run(tmp_path, *flags, **options))
        return runs[-1]

    yield start
    for started in runs:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()
    for started in runs:
        assert left_behind(started.mark, before, started.has_engines) == (set(), set())
