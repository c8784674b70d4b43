"""carry.py in small repositories: what it carries, where it stops, which files it leaves alone."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import carry
import pytest
import torch
from edited import ROOT
from test_ranks import TWO, without_conflicts

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")

DOOM = '''# /// script
# dependencies = ["numpy"]
# ///
# appo_doom.py $Id$
"""Trains in Doom."""

import os
import sys

# === Settings


class Args:
    """Flags."""

    rate: float = 1.0
    """of learning"""
    games: int = 3
    """that are played"""
    steps: int = 4


def games(args):
    return [args.games] * 2


def unlike(args):
    first = args.rate
    second = 2 * first
    third = 3 * second
    return third


# === Learning


def learn(args):
    before = os.getpid()
    for step in range(args.steps):
        before += step
    return before


def main():
    print(learn(Args()))
    print(sys.argv)


if __name__ == "__main__":
    main()
'''


def change(text: str, *edits: tuple[str, str]) -> str:
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


ATARI = change(DOOM, ("appo_doom.py", "appo_atari.py"), ("in Doom", "in Atari"), ("games: int = 3", "games: int = 30"))
REPLAY = change(ATARI, ("appo_atari.py", "appo_atari_replay.py"), ("print(sys.argv)", "print(len(sys.argv))"))
STEPS, ONE_STEP = ("before += step", "before += 2 * step"), ("steps: int = 4", "steps: int = 1")  # in no edit's own lines
RATE = ("rate: float = 1.0", "rate: float = 0.5")
GAMES = ("games: int = 3\n", "games: int = 5\n")  # where Atari has another number
MULTIGPU = ("import sys\n", "import sys\n\nimport ranks\n")


class Repository:
    """A clone of a small repository of ours, and a user's folder beside it."""

    def __init__(self, folder: Path):
        self.folder, self.users = folder / "ours", folder / "theirs"
        (self.folder / "tests").mkdir(parents=True)
        self.users.mkdir()
        shutil.copy(ROOT / "carry.py", self.folder)
        shutil.copy(ROOT / ".gitattributes", self.folder)
        self.git("init", "-q")
        self.write(**{"appo_doom": DOOM, "appo_atari": ATARI, "appo_atari_replay": REPLAY})
        self.commit()

    def git(self, *arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=self.folder, check=True, capture_output=True, text=True).stdout.strip()

    def write(self, **texts: str) -> None:
        for name, text in texts.items():
            (self.folder / f"{name}.py").write_text(text)

    def read(self, name: str) -> str:
        return carry.ID.sub(rf"# {name}.py $Id$\n", (self.folder / f"{name}.py").read_text())

    def commit(self, **texts: str) -> None:
        """As a clone has it: git checks the files out, and writes versions into them."""
        self.write(**texts)
        self.git("add", ".")
        self.git("commit", "-q", "-m", "change")
        for path in self.folder.glob("appo_*.py"):
            path.unlink()
        self.git("checkout", ".")

    def carry(self, *flags: str, code: int = 0) -> str:
        done = subprocess.run([sys.executable, "carry.py", *map(str, flags)], cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        if code == 2:  # one sentence
            assert done.stderr.count("\n") == 1 and done.stdout == ""
        return done.stdout + done.stderr

    def table(self) -> str:
        return carry.table({path.name: path.read_text() for path in self.folder.glob("appo_*.py")})

    def version(self, name: str) -> str:
        return self.git("rev-parse", f"HEAD:{name}.py")


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Repository:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"CONFIG_GLOBAL": "/dev/null", "CONFIG_NOSYSTEM": "1", "AUTHOR_NAME": "A", "AUTHOR_EMAIL": "a@b.c",
                        "COMMITTER_NAME": "A", "COMMITTER_EMAIL": "a@b.c"}.items():  # fmt: skip
        monkeypatch.setenv(f"GIT_{name}", value)
    return Repository(tmp_path)


def test_a_change_goes_into_edits_and_their_edits(repository):
    repository.write(appo_doom=change(DOOM, STEPS), appo_atari=change(ATARI, RATE))  # Atari's own edit goes on, too
    repository.carry()
    assert repository.read("appo_atari") == change(ATARI, STEPS, RATE)
    assert repository.read("appo_atari_replay") == change(REPLAY, STEPS, RATE)
    assert (repository.folder / "tests/agreement.txt").read_text() == repository.table()
    repository.write(appo_doom=change(DOOM, STEPS, ONE_STEP), appo_atari=change(ATARI, STEPS, RATE, ONE_STEP))
    for _ in range(2):  # a change that was made in both already, and nothing
        repository.carry()
        assert repository.read("appo_atari") == change(ATARI, STEPS, RATE, ONE_STEP)
        assert repository.read("appo_atari_replay") == change(REPLAY, STEPS, RATE, ONE_STEP)


def test_a_file_waits_until_the_conflicts_of_its_base_are_resolved(repository):
    repository.write(appo_doom=change(DOOM, STEPS, GAMES))
    output = repository.carry(code=1)
    text = repository.read("appo_atari")
    line = int(re.search(r"appo_atari.py: .* conflicts: 1, at line (\d+)\n", output)[1])
    assert text.splitlines()[line - 1 : line + 6] == [
        "<<<<<<< appo_atari.py", "    games: int = 30", "||||||| appo_doom.py before", "    games: int = 3", "=======",
        "    games: int = 5", ">>>>>>> appo_doom.py now",
    ]  # fmt: skip
    assert "appo_atari_replay.py: left unchanged" in output and repository.read("appo_atari_replay") == REPLAY
    assert not (repository.folder / "tests/agreement.txt").exists()
    assert f"(appo_atari.py, line {line})" in repository.carry("--table", code=2)
    repository.carry(code=1)
    assert repository.read("appo_atari") == text and repository.read("appo_atari_replay") == REPLAY

    repository.write(appo_atari=change(ATARI, STEPS))  # resolved: 30 stays
    repository.carry()
    assert repository.read("appo_atari") == change(ATARI, STEPS)
    assert repository.read("appo_atari_replay") == change(REPLAY, STEPS)
    assert (repository.folder / "tests/agreement.txt").read_text() == repository.table()
    assert "appo_atari.py: changes of appo_doom.py carried; conflicts: 1" in repository.carry("--since", "HEAD", code=1)


def test_changes_since_an_older_commit(repository):
    repository.commit(appo_doom=change(DOOM, STEPS))
    repository.carry()
    assert repository.read("appo_atari") == ATARI
    repository.carry("--since", "HEAD~1")
    assert repository.read("appo_atari_replay") == change(REPLAY, STEPS)
    assert "nonsense" in repository.carry("--since", "nonsense", code=2)


def test_text_that_moves_from_the_base_to_a_new_file_stays_there(repository):
    multigpu = change(DOOM, ("appo_doom.py", "appo_doom_multigpu.py"))
    smaller = change(DOOM, ("        before += step\n", "        pass\n"))
    repository.write(appo_doom=smaller, appo_doom_multigpu=multigpu)
    repository.carry()
    assert repository.read("appo_doom_multigpu") == multigpu and "pass" in repository.read("appo_atari_replay")
    repository.write(appo_doom=change(smaller, RATE))
    repository.carry()
    assert repository.read("appo_doom_multigpu") == change(multigpu, RATE)


def test_update_of_a_users_file(repository):
    copied = repository.version("appo_doom")
    mine = repository.users / "mine.py"
    mine.write_text(change((repository.folder / "appo_doom.py").read_text(), ("games: int = 3", "games: int = 7")))
    before = mine.read_text()
    assert f"# appo_doom.py $Id: {copied} $\n" in before
    repository.commit(appo_doom=change(DOOM, STEPS))
    repository.commit(appo_doom=change(DOOM, STEPS, GAMES))
    output = repository.carry("--update", mine, code=1)
    updated = repository.users / "mine_updated.py"
    text = updated.read_text()
    assert mine.read_text() == before and f"{updated}: changes of appo_doom.py carried; conflicts: 1, at line 18" in output
    assert text.splitlines()[17:19] == ["<<<<<<< mine.py", "    games: int = 7"] and STEPS[1] in text
    assert f"# ///\n# appo_doom.py $Id: {repository.version('appo_doom')} $\n" in text
    assert "exists" in repository.carry("--update", mine, code=2)
    assert "conflicts" in repository.carry("--update", updated, code=2)

    text = re.sub(r"<{7}.*\n(.*\n)\|{7}(.*\n)*?>{7}.*\n", r"\1", text)  # theirs
    mine.write_text(text)
    updated.unlink()
    repository.commit(appo_doom=change(DOOM, STEPS, GAMES, ONE_STEP))
    repository.carry("--update", mine)
    assert carry.ID.sub("", updated.read_text()) == carry.ID.sub("", change(text, ONE_STEP))
    assert mine.read_text() == text


def test_a_users_copy_in_a_fork(repository):
    """Git has written its own version where the copied one was: what the user changed is not lost."""
    mine = change(DOOM, RATE)
    repository.commit(appo_mine=mine)
    assert f"# appo_doom.py $Id: {repository.version('appo_mine')} $\n" in (repository.folder / "appo_mine.py").read_text()
    repository.commit(appo_doom=change(DOOM, STEPS))
    assert "nearest to appo_doom.py" in repository.carry("--update", "appo_mine.py")
    assert repository.read("appo_mine_updated").split("$Id$")[1] == change(mine, STEPS).split("$Id$")[1]


@pytest.mark.parametrize("line", ["# appo_doom.py $Id$\n", f"# appo_doom.py $Id: {'7' * 40} $\n", ""])
def test_without_a_version_the_nearest_is_taken(repository, line):
    second = change(DOOM, STEPS)
    repository.commit(appo_doom=second)
    repository.commit(appo_doom=change(second, ONE_STEP))
    repository.commit(appo_doom=change(second, ONE_STEP, GAMES))
    mine = repository.users / "mine.py"
    mine.write_text(change(second, ("# appo_doom.py $Id$\n", line), RATE, ("return third", "return third + 1")))
    if not line:
        assert "--of appo_doom.py" in repository.carry("--update", mine, code=2)
    commit = repository.git("rev-parse", "--short", "HEAD~2")
    output = repository.carry("--update", mine, *(["--of", "appo_doom.py"] if not line else []))
    assert f"nearest to appo_doom.py in commit {commit}" in output
    expected = change(second, ONE_STEP, GAMES, RATE, ("return third", "return third + 1"))
    expected = expected.replace("$Id$", f"$Id: {repository.version('appo_doom')} $")
    assert (repository.users / "mine_updated.py").read_text() == expected


def test_a_variant_is_added_to_a_users_file_and_to_another_of_ours(repository):
    repository.commit(appo_doom_multigpu=change(DOOM, ("appo_doom.py", "appo_doom_multigpu.py"), MULTIGPU, STEPS))
    mine = repository.users / "mine.py"
    mine.write_text(change(DOOM, RATE))
    output = repository.carry("--add", "appo_doom_multigpu.py", mine)
    assert "only `agent` is the same on all ranks. For every other network" in output and "sum_over_ranks" in output
    assert (repository.users / "mine_multigpu.py").read_text() == change(DOOM, RATE, MULTIGPU, STEPS)
    assert mine.read_text() == change(DOOM, RATE)
    repository.carry("--add", "appo_doom_multigpu.py", "appo_atari.py")
    assert carry.ID.sub("", repository.read("appo_atari_multigpu")) == carry.ID.sub("", change(ATARI, MULTIGPU, STEPS))
    assert "agent" not in repository.carry("--add", "appo_atari_replay.py", mine)
    assert "len(sys.argv)" in (repository.users / "mine_replay.py").read_text()
    assert "exists" in repository.carry("--add", "appo_atari_replay.py", mine, code=2)
    assert "appo_gym.py is not one of" in repository.carry("--add", "appo_gym.py", mine, code=2)
    assert "missing.py" in repository.carry("--add", "appo_atari.py", "missing.py", code=2)


def add_ranks(mine: Path, code: int) -> Path:
    """`carry.py --add appo_doom_multigpu.py mine`, of this very repository. Returns the file that it writes."""
    done = subprocess.run([sys.executable, ROOT / "carry.py", "--add", "appo_doom_multigpu.py", mine], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return mine.with_name(f"{mine.stem}_multigpu.py")


def test_ranks_are_added_to_the_base_and_it_trains(run, tmp_path):
    """Only docstrings have conflicts. Both ranks take all steps: each saves none but the first."""
    shutil.copy(ROOT / "appo_gym.py", tmp_path)
    merged = add_ranks(tmp_path / "appo_gym.py", 1)
    merged.write_text(without_conflicts(merged.read_text()))
    flags = ("--experiment", "e", "--num-workers", "1", "--num-envs", "4", "--rollout", "8", "--batch-size", "32", "--device", "cpu")
    r = run(*flags, "--total-timesteps", "300", script=merged, launcher=TWO)
    assert r.wait(90) == 0, r.text()
    assert r.text().count("CartPole-v1: 1 workers on ") == r.text().count("done: ") == 1
    content = torch.load(tmp_path / "e" / "latest.pth", weights_only=True)
    assert 300 <= content["global_step"] < 364 and 20 <= content["version"] <= 32, "64 steps of both in four versions"
    assert len(list((tmp_path / "e").glob("events*"))) == 1


def test_ranks_are_added_to_a_users_copy(tmp_path):
    """Of appo_doom.py, changed in a few places: without a conflict, and it is what the same changes make of appo_doom_multigpu.py."""
    changes = [("    anneal_lr: bool = False", "    my_coefficient: float = 0.1  # of my loss\n    anneal_lr: bool = True"),
               ("    loss = mean(policy_losses + ", "    loss = mean(args.my_coefficient * values + policy_losses + "),
               ("EXTRA_METRICS = ()", 'EXTRA_METRICS = ("kills",)')]  # fmt: skip
    mine = tmp_path / "mine.py"
    mine.write_text(change((ROOT / "appo_doom.py").read_text(), *changes))
    added = add_ranks(mine, 0).read_text()
    assert carry.ID.sub("", added) == carry.ID.sub("", change((ROOT / "appo_doom_multigpu.py").read_text(), *changes))


TEXTS = {"appo_doom.py": DOOM, "appo_atari.py": ATARI, "appo_atari_replay.py": REPLAY}


@pytest.mark.parametrize("edit", [
    ("        before += step\n", "        before += step + 1\n"),  # in a function that is shared
    ("    second = 2 * first\n    third = 3 * second\n", "    third = 3 * second\n    second = 2 * first\n"),
    ('    """of learning"""\n', '    """of Adam"""\n'),
    ("# === Learning\n", "# === The learner\n"),
    ("import os\n", "import os\nimport re\n"),
    ('["numpy"]', '["torch"]'),
    ("    main()\n", "    print(1)\n"),
    ("def games(args):\n    return [args.games] * 2\n", "def games(args):\n\n    return [args.games] * 2\n"),
])  # fmt: skip
def test_one_line_that_drifts_is_a_row(edit):
    table = carry.table(TEXTS)
    assert len(table.splitlines()) == 3 + 3  # Atari's docstring and games, the replay's main
    for name, text in TEXTS.items():
        assert carry.table(TEXTS | {name: change(text, edit)}) != table


def test_the_table_compares_what_variants_share_with_one_another():
    extra = "\n\nclass Extra:\n    def one(self):\n        return 1\n\n    def two(self):\n        return 2\n"
    texts = TEXTS | {"appo_atari.py": ATARI + extra, "appo_pbt_doom.py": DOOM + change(extra, ("return 2", "return 3"))}
    rows = [row.split() for row in carry.table(texts).splitlines()]
    assert rows[-1][:4] + rows[-1][5:] == ["appo_pbt_doom.py", "appo_atari.py", "1", "1", "Extra.two"]
    assert len([row for row in rows if row[0] == "appo_pbt_doom.py"]) == 1
    for row in (["appo_atari.py", "appo_doom.py", "0", "5"], ["appo_atari_replay.py", "appo_atari.py", "5", "0"]):
        assert [*row, "-", "Extra"] in rows, "one row: the other has no such class"


def test_the_table_does_not_count_names_and_versions():
    assert carry.table(TEXTS | {"appo_atari.py": ATARI.replace("$Id$", "$Id: 0123abcd $")}) == carry.table(TEXTS)


def test_a_line_that_drifts_in_functions_that_differ_anyway():
    """Of the real files: a line of either that the other has is cut out."""
    files = ("appo_gym.py", "appo_doom.py")
    texts = {name: (ROOT / name).read_text() for name in files}
    table, (base, variant) = carry.table(texts), (carry.pieces(texts[name]) for name in files)
    both = [line for piece, lines in base.items() if variant.get(piece, lines) != lines for line in lines if line in variant[piece]]
    once = [f"\n{line}\n" for line in both if all(text.count(f"\n{line}\n") == 1 for text in texts.values()) and line.startswith("  ")]
    assert len(once) > 20
    for line in once[:: len(once) // 6]:
        for name, text in texts.items():
            try:
                assert carry.table(texts | {name: change(text, (line, "\n"))}) != table, line
            except SyntaxError:
                pass


def test_a_carried_change_that_was_thrown_away_is_carried_again(repository):
    repository.write(appo_doom=change(DOOM, STEPS))
    assert repository.carry().count("changes of") == 2
    repository.git("checkout", "appo_atari.py")
    assert "appo_atari.py: changes of appo_doom.py carried" in repository.carry()
    repository.git("checkout", "appo_atari.py", "appo_doom.py")
    repository.carry()
    assert repository.read("appo_atari") == ATARI


def test_a_conflict_may_be_resolved_by_keeping_the_edits_own_line(repository):
    """The usual one: another default in the base, where the edit has its own. It does not come back, and the files below go on."""
    repository.write(appo_doom=change(DOOM, GAMES))
    assert "conflicts: 1" in repository.carry(code=1)
    repository.git("checkout", "appo_atari.py")
    output = repository.carry()
    assert "appo_atari.py: no new changes of appo_doom.py; conflicts were resolved by keeping it" in output and "conflicts: 1" not in output
    assert repository.read("appo_atari") == ATARI and (repository.folder / "tests/agreement.txt").exists()
    repository.write(appo_doom=change(DOOM, GAMES, STEPS))
    assert "appo_atari.py: changes of appo_doom.py carried; conflicts: 0" in repository.carry()
    assert repository.read("appo_atari") == change(ATARI, STEPS)
    assert "conflicts: 1" in repository.carry("--since", "HEAD", code=1)


def test_nothing_new_is_no_update(repository):
    copy = repository.users / "mine.py"
    copy.write_text((repository.folder / "appo_doom.py").read_text().replace("steps: int = 4", "steps: int = 9"))
    assert repository.carry("--update", copy) == f"{copy}: nothing new in appo_doom.py\n"
    assert not (repository.users / "mine_updated.py").exists()
