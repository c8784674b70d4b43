"""Starts `python script.py flags` without its two seconds of imports: forked from a process that has made them.

This file is both sides. The tests import `Forked`, which is a `subprocess.Popen` for them; `python forked.py` is the process that forks. Each fork
becomes what the interpreter would have made of the command: session, folder, environment, files, `__main__`, exit code.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

MARK = "APPO_TEST"  # the variable by which the processes of a test are found in /proc


def new_mark() -> str:
    """Its value; all are equally long, see `become`."""
    return f"{MARK}_{time.monotonic_ns():020}"


LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """In a child: if the tests are killed, what they have started is told to save and end, and does not train on for days."""
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Forked:
    def __init__(self, command: list[str], output: Path, folder: Path, environment: dict[str, str]):
        """command: the script and its flags."""
        output.touch()
        self.pid = ask(dict(argv=command, output=str(output), folder=str(folder), environment=environment))
        self.ended, self.returncode = os.pidfd_open(self.pid), None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self.ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            os.close(self.ended)
            self.returncode = ask(self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)  # until we have asked for its exit code nobody else gets its number

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def python(*command, folder: Path, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess:
    """`subprocess.run` of a script, with what it has printed on both streams in `stdout`."""
    mark = new_mark()
    output = folder / f"{mark}.txt"
    process = Forked([str(part) for part in command], output, folder, os.environ | {MARK: mark} | environment)
    try:
        return subprocess.CompletedProcess(command, process.wait(timeout), output.read_text())
    finally:
        if process.poll() is None:
            process.kill()


@functools.cache
def server() -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env=os.environ | {MARK: new_mark()})  # fmt: skip
    atexit.register(process.stdin.close)
    return process


def ask(request) -> int:
    print(json.dumps(request), file=server().stdin, flush=True)
    return int(server().stdout.readline())


# ---- the process that forks


def serve() -> dict:
    """Returns in each fork, with what it is to be."""
    for line in sys.stdin:
        if isinstance(request := json.loads(line), int):  # of one that has ended
            answer = os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])
        elif not (answer := os.fork()):
            return request
        print(answer, flush=True)
    sys.exit()


def become(argv: list[str], output: str, folder: str, environment: dict[str, str]) -> None:
    os.setsid()
    end_with_parent()
    # /proc/PID/environ shows the memory that this process began with: the mark goes there, too
    getenv = LIBC.getenv
    getenv.restype = ctypes.c_void_p
    ctypes.memmove(getenv(MARK.encode()), environment[MARK].encode(), len(new_mark()))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which a test run under nohup ignores
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY)
    os.dup2(os.open(output if output.startswith("/dev/pts/") else os.devnull, os.O_RDONLY), 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.closerange(3, 1000)
    sys.argv, sys.path[:1] = argv, [os.path.dirname(argv[0]), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__file__ = argv[0]
    exec(compile(Path(argv[0]).read_text(), argv[0], "exec"), vars(main))


if __name__ == "__main__":
    import envpool  # noqa: F401
    import gymnasium  # noqa: F401
    import torch._dynamo  # noqa: F401 imported by the first optimizer
    import torch.utils.tensorboard  # noqa: F401
    import tqdm  # noqa: F401
    import tyro  # noqa: F401
    import vizdoom  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a fork would have no other thread"
    gc.freeze()  # else the first collection in a fork copies all of that
    become(**serve())
