"""Copies of a script with small edits, as a user makes them. Actors import the copy under its own name."""

import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def edited(folder: Path, name: str, *edits: tuple[str, str], source: Path = ROOT / "appo_doom.py") -> Path:
    """Writes folder/name.py: `source` with every (old, new) replaced; each old must be there exactly once."""
    text = source.read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{text.count(old)} times in {source}: {old}"
        text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def with_envs(folder: Path, name: str, envs: str, *edits: tuple[str, str]) -> Path:
    """`edited`, with the body of make_envs replaced by the source text `envs`, which defines a class Env."""
    text = (ROOT / "appo_doom.py").read_text()
    body = re.search(r"    return SerialEnvs\(.*\n", text).group(0)
    new = "    return gym.vector.SyncVectorEnv([Env] * num_envs, copy=False, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)\n"
    return edited(folder, name, (body, new), ("\ndef make_envs(", f"\n{envs}\n\ndef make_envs("), *edits)


def load(path: Path):
    """Imports a copy so that actor processes, which get our sys.path, can import it too."""
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    return module
