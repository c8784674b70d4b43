"""A program as it is started at a prompt: with a terminal that it controls, and `stty tostop`, which stops what writes from the background."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from conftest import marked
from forked import MARK, new_mark


class Typed:
    """A context: at its end nothing lives on."""

    def __init__(self, folder: Path, *command, **environment: str):
        """command: the script and its flags."""
        self.mark, self.seen = new_mark(), b""
        words = [sys.executable, *map(str, command)]
        environment = os.environ | {MARK: self.mark, "COLUMNS": "100"} | environment
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(folder)
                subprocess.run(["stty", "tostop", "rows", "30", "cols", "100"], check=True)
                os.execve(sys.executable, words, environment)
            finally:
                os._exit(1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.terminal)
        for pid in marked(self.mark):
            with contextlib.suppress(OSError):  # it has ended
                os.kill(pid, signal.SIGKILL)

    def read(self, seconds: float) -> bool:
        """Returns False when the terminal has been left."""
        if select.select([self.terminal], [], [], seconds)[0]:
            try:
                self.seen += os.read(self.terminal, 65536)
            except OSError:
                return False
        return True

    def text(self) -> str:
        return self.seen.decode(errors="replace")

    def wait_for(self, condition, what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.read(0.1) and time.monotonic() < deadline, f"{what} did not come:\n{self.text()}"

    def type(self, keys: str) -> None:
        os.write(self.terminal, keys.encode())

    def wait(self, seconds: float = 60) -> int:
        """Returns the exit code."""
        deadline = time.monotonic() + seconds
        while self.read(0.1):
            assert time.monotonic() < deadline, f"still running after {seconds} s:\n{self.text()}"
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
