"""Copies of a script with small edits, as a user makes them. Actors import the copy under its own name."""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAIN = 'if __name__ == "__main__":\n'

# The observation says which environment it is from, which episode and which step; the reward says which action was taken.
COUNTING = """
class Env(gym.Env):
    observation_space = gym.spaces.Dict(obs=gym.spaces.Box(0, 255, (36, 36, 3), np.uint8),
                                        vector=gym.spaces.Box(-np.inf, np.inf, (4,), np.float32))
    action_space = gym.spaces.MultiDiscrete((3, 4))

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.me, self.episode = seed % 60_000, -1
        self.episode, self.count = self.episode + 1, 0
        self.length = 1 + (self.me * 7 + self.episode * 13) % 9
        return self.observation(), {}

    def observation(self):
        image = np.full((36, 36, 3), (17 * self.count + self.episode) % 256, np.uint8)
        image[0, 0] = self.me % 256, self.episode % 256, self.count
        return dict(obs=image, vector=np.array([self.me, self.episode, self.count, self.length], np.float32))

    def step(self, action):
        self.count += 1
        end, kind = self.count == self.length, self.episode % 2
        reward = 0.1 * action[0] + action[1]
        return self.observation(), reward, end and kind == 0, end and kind == 1, {"raw_reward": 2 * reward}
"""


def edited(folder: Path, name: str, *edits: tuple[str, str], source: Path = ROOT / "appo_doom.py") -> Path:
    """Writes folder/name.py: `source` with every (old, new) replaced; each old must be there exactly once."""
    text = source.read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{text.count(old)} times in {source}: {old}"
        text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def replacing(code: str) -> tuple[str, str]:
    """An edit: `code` follows all definitions of the file, and may put others in their place."""
    return MAIN, f"{code}\n\n{MAIN}"


REPORTS = replacing("Reporter.SECONDS = 0.3")  # a run has more reports than one in five seconds


def with_envs(folder: Path, name: str, envs: str, *edits: tuple[str, str], source: Path = ROOT / "appo_doom.py") -> Path:
    """`edited`, with games of the class Env, which the source text `envs` defines."""
    make = """
def make_envs(args, num_envs, **options):
    return gym.vector.SyncVectorEnv([Env] * num_envs, copy=False, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)
"""
    return edited(folder, name, replacing(envs + "\n" + make), *edits, source=source)


def load(path: Path):
    """Imports a copy so that actor processes, which get our sys.path, can import it too."""
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    return module
