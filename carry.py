"""Carries the changes of a file into its edits, ours and yours: `git merge-file`, given the right three texts.

    python carry.py                                     # carries changes since HEAD from each base into its edits
    python carry.py --update ../mine/my_file.py         # writes my_file_updated.py, with our changes since your copy
    python carry.py --add appo_doom_multigpu.py my_file.py    # writes my_file_multigpu.py, with that file's changes

Your file is never changed. Its line `# appo_doom.py $Id$` names the file that it is a copy of; git writes the version
into this line on checkout (.gitattributes). Update before you add.

Lines that both sides changed are put between conflict marks: first the edit's lines, below ||||||| the lines that both
began with, below ======= the lines to be carried. A file whose base has conflicts is skipped: resolve them, and run
carry.py again. `--since COMMIT` starts from an older commit, or starts over. The exit code is 1 while there are
conflicts, and 2 if carry.py refuses.

A merge without conflicts may still be wrong. For example, appo_doom_multigpu.py broadcasts one network, `agent`, and
sums its gradients: every other network needs the same, and --add prints where.

When no conflicts are left, carry.py rewrites tests/agreement.txt: by how many lines each piece of our files differs
from its base.
"""

import argparse
import ast
import difflib
import json
import re
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
# The base of each edit; a base comes before its edits
BASE = "appo_gym.py"
EDIT_OF = {
    "appo_doom.py": BASE,
    "appo_mujoco.py": BASE,
    "appo_atari.py": "appo_doom.py",
    "appo_doom_multigpu.py": "appo_doom.py",
    "appo_atari_replay.py": "appo_atari.py",
    "appo_dmlab.py": "appo_doom.py",
    "appo_pbt_doom.py": "appo_doom.py",
}
# What must be done by hand after --add
NOTES = {
    "appo_doom_multigpu.py": "only `agent` is the same on all ranks. For every other network that you train: broadcast "
    "its state_dict() where `train` broadcasts the agent's, average its loss with `masked_mean`, and before its "
    "optimizer's step call `sum_over_ranks` with each gradient, as `Learner.update` does"
}
# The line that names the file and version that a text is a copy of; merges and comparisons ignore it
ID = re.compile(r"^# (\w+\.py) \$Id(?:: *(\w+))? *\$ *\n", re.MULTILINE)


def refuse(sentence: str) -> NoReturn:
    print(f"carry.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def git(*arguments: str, otherwise: str | None = None) -> str:
    """Returns git's output or, if it fails, `otherwise`; without `otherwise`, a failure ends the program."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, encoding="utf-8")
    if done.returncode != 0 and otherwise is None:
        refuse(f"git {' '.join(arguments)} failed: {' '.join(done.stderr.split())}")
    return done.stdout if done.returncode == 0 else otherwise


def conflicts(text: str) -> list[int]:
    """Returns the lines at which conflicts begin; if only parts of conflicts are left, the lines of their marks."""
    marks = {number: line for number, line in enumerate(text.splitlines(), 1) if re.match(r"(<{7}|\|{7}|>{7}) ", line)}
    return [number for number, line in marks.items() if line[0] == "<"] or list(marks)


def report(name: str, done: str, text: str) -> bool:
    """Prints what was done and where `text` has conflicts. Returns True if it has any."""
    lines = conflicts(text)
    print(f"{name}: {done}; conflicts: {len(lines)}" + (f", at line {', '.join(map(str, lines))}" if lines else ""))
    return bool(lines)


def merge(edit: str, old: str, new: str, labels: tuple[str, str, str], line: str) -> str:
    """Returns `edit` with the changes from `old` to `new`, and with `line`, which names what it is a copy of. labels:
    names of the three texts in conflict marks."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("edit", edit), ("old", old), ("new", new)):
            Path(folder, name).write_text(ID.sub("", text), encoding="utf-8")
        command = ["git", "merge-file", "-p", "--diff3", *(f"-L{label}" for label in labels), "edit", "old", "new"]
        done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8")
    if done.returncode > 127:  # up to 127 it is the number of conflicts
        refuse(f"git merge-file failed: {' '.join(done.stderr.split())}")
    place = re.search("^# ///\n", done.stdout, re.MULTILINE) or re.match("(#!.*\n)?", done.stdout)
    return done.stdout[: place.end()] + line + done.stdout[place.end() :]


def carry(since: str | None) -> bool:
    """Carries what changed in each base since a commit into its edits. Returns True if there are conflicts.

    Until the next commit, a note in git's folder keeps the text of the base that each file was brought up to, so that
    conflicts which were resolved do not come back. If a file had no conflicts and is the same as in HEAD, the carried
    changes were discarded, and so is its note. With `since`, everything is carried again."""
    head, note = git("rev-parse", "HEAD").strip(), ROOT / git("rev-parse", "--git-path", "carry.json").strip()
    carried = json.loads(note.read_text(encoding="utf-8")) if note.exists() and not since else {}
    if carried.get("head") != head:
        carried = {"head": head, "since": git("rev-parse", "--verify", f"{since or 'HEAD'}^{{commit}}").strip()}
    left = False
    for file, base in EDIT_OF.items():
        if not ((ROOT / file).exists() and (ROOT / base).exists()):
            continue
        text, new = ((ROOT / name).read_text(encoding="utf-8") for name in (file, base))
        had_conflicts, none = carried.setdefault("had conflicts", []), f"no new changes of {base}"
        if ID.sub("", text) == ID.sub("", git("show", f"HEAD:./{file}", otherwise="")):
            if file in had_conflicts:
                none += "; conflicts were resolved by keeping it as it is in HEAD (--since HEAD has them again)"
            else:
                carried.pop(file, None)
        if conflicts(new):
            print(f"{file}: left unchanged, because {base} has conflicts")
            left = True
        elif conflicts(text):
            left |= report(file, "left unchanged", text)
        else:
            old = carried.get(file, new)
            if file not in carried and git("ls-tree", carried["since"], file):  # new: an edit of today's base
                old = git("show", f"{carried['since']}:./{base}", otherwise=new)
            if changed := ID.sub("", old) != ID.sub("", new):
                line = ID.search(text)
                text = merge(text, old, new, (file, f"{base} before", f"{base} now"), line[0] if line else "")
                (ROOT / file).write_text(text, encoding="utf-8")
                had_conflicts += [file] if conflicts(text) else []
            carried[file] = new
            note.write_text(json.dumps(carried), encoding="utf-8")
            left |= report(file, f"changes of {base} carried" if changed else none, text)
    return left


def copied(path: Path, text: str, of: str | None) -> tuple[str, str]:
    """Returns the name of our file that `text` is a copy of, and the text of the version that was copied or, if git
    does not know it, of the most similar version."""
    line = ID.search(text)
    if not (line or of):
        refuse(f"{path} has no line `# appo_doom.py $Id$` that names the file it was copied from; add --of appo_doom.py")
    name = of or line[1]
    # In a fork, if .gitattributes has a pattern that matches the copy's name, git writes the copy's own version there
    if line and line[1] == name and line[2]:
        if git("log", "--all", "--format=%h", f"--find-object={line[2]}", "--", name, otherwise=""):
            return name, git("cat-file", "blob", line[2])
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        refuse(f"this shallow clone may not have the version of {name} that was copied: run git fetch --unshallow")
    commits = git("log", "--all", "--format=%h of %cs", "--", name).splitlines()
    if not commits:
        refuse(f"{name} is not in the history of this clone")

    def distance(old: str) -> int:
        theirs, ours = (Counter(ID.sub("", one).splitlines()) for one in (text, old))
        return (theirs - ours).total() + (ours - theirs).total()

    versions = {commit: git("show", f"{commit.split()[0]}:./{name}", otherwise="") for commit in commits}
    nearest = min(commits, key=lambda commit: distance(versions[commit]))
    print(f"{path}: nearest to {name} in commit {nearest}; {distance(versions[nearest])} lines differ")
    return name, versions[nearest]


def into_copy(path: Path, variant: str | None, of: str | None) -> bool:
    """Writes a file beside the user's, updated or with a variant's changes. Returns True if it has conflicts."""
    text = path.read_text(encoding="utf-8")
    if conflicts(text):
        refuse(f"{path} still has conflicts, the first at line {conflicts(text)[0]}")
    if not variant:
        name, old = copied(path, text, of)
        new, blob = git("show", f"HEAD:./{name}"), git("rev-parse", f"HEAD:./{name}").strip()
        added, line, labels = "updated", f"# {name} $Id: {blob} $\n", (f"{name} as it was copied", f"{name} now")
    elif variant not in EDIT_OF:
        refuse(f"{variant} is not one of {', '.join(EDIT_OF)}")
    else:
        name, base, line = variant, EDIT_OF[variant], ID.search(text)
        old, new = git("show", f"HEAD:./{base}"), git("show", f"HEAD:./{name}")
        line, labels = line[0] if line else "", (base, name)
        added = "_".join(word for word in name[:-3].split("_") if word not in base[:-3].split("_"))
    if (target := path.with_name(f"{path.stem}_{added}.py")).exists():
        refuse(f"{target} exists; rename or remove it first")
    merged = merge(text, old, new, (path.name, *labels), line)
    if ID.sub("", merged) == ID.sub("", text):
        print(f"{path}: nothing new in {name}")
        return False
    target.write_text(merged, encoding="utf-8")
    if variant in NOTES:
        print(f"{target}: {NOTES[variant]}")
    return report(str(target), f"changes of {name} carried", merged)


def pieces(text: str, name: str = "") -> dict[str, list[str]]:
    """Returns {piece: lines} of a file. A piece is a constant, function, method, field with its help, the rest of a
    class, the docstring, imports, the script block, another statement, or the comments between all these."""
    lines = ID.sub("\n", text).splitlines()
    owner = [line and "comments" for line in lines]

    def divide(body: list[ast.stmt], prefix: str, name: str) -> None:
        for node in body:
            is_class = isinstance(node, ast.ClassDef)
            if is_class or isinstance(node, ast.FunctionDef):
                name = prefix + node.name
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                name = prefix + re.split(" = |: ", ast.unparse(node))[0].strip("()")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                name = "imports"
            elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # that is help for `name`
                name = prefix + lines[node.lineno - 1].strip()
            its = slice(min(part.lineno for part in (node, *getattr(node, "decorator_list", []))) - 1, node.end_lineno)
            owner[its] = ["" if is_class and not line else name for line in lines[its]]
            if is_class:
                divide(node.body, f"{name}.", name)

    body = ast.parse("\n".join(lines), name).body
    owner[: body[0].lineno - 1] = [line and "script block" for line in lines[: body[0].lineno - 1]]
    divide(body, "", "docstring")
    return {name: [line for line, its in zip(lines, owner) if its == name] for name in dict.fromkeys(owner) if name}


def table(texts: dict[str, str]) -> str:
    """Returns the text of tests/agreement.txt; its first lines explain the columns. A class that only one of two files
    has is one row."""
    parts, rows = {file: pieces(texts[file], file) for file in (BASE, *EDIT_OF) if file in texts}, {}
    for index, file in enumerate(parts):
        base = base if (base := EDIT_OF.get(file)) in parts else file
        for piece in sorted(parts[file].keys() | parts[base].keys()):
            other = next((one for one in (base, *list(parts)[:index]) if piece in parts[one]), base)
            there, here = parts[other].get(piece, []), parts[file].get(piece, [])
            changes = list(difflib.unified_diff(there, here, n=0, lineterm=""))[2:]
            lost, gained = ([line for line in changes if line[0] == sign] for sign in "-+")
            checksum = f"{zlib.crc32(chr(10).join(lost).encode()) & 0xFFFF:04x}" if lost and here else "-"
            whole = piece.split(".")[0]
            name = piece if whole in parts[file] and whole in parts[other] else whole
            if changes:
                before = rows.get((file, other, name), (0, 0))
                rows[file, other, name] = before[0] + len(lost), before[1] + len(gained), checksum
    text = f"""# Written by `python carry.py`. Other: the base, or the first file with a piece that the base has not.
# -: lines that only the other has; +: lines that only the file has; sum: checksum of the former in a piece of both.
{"# file":23}{"other":23}   -    +  sum   piece
"""
    for (file, other, name), (lost, gained, checksum) in rows.items():
        text += f"{file:23}{other:23}{lost:4}{gained:5}  {checksum:5} {name}\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--since", metavar="COMMIT", help="carry all changes since COMMIT, even those carried before")
    what.add_argument("--table", action="store_true", help="carry nothing, only rewrite tests/agreement.txt")
    what.add_argument("--update", metavar="FILE", type=Path, help="write a copy of FILE with our later changes")
    what.add_argument("--add", nargs=2, metavar=("OURS", "FILE"), help="write a copy of FILE with the changes of OURS")
    parser.add_argument("--of", metavar="NAME", help="with --update: what FILE is a copy of, if no $Id line names it")
    args = parser.parse_args()
    try:
        if args.update or args.add:
            variant, file = args.add or (None, args.update)
            return int(into_copy(Path(file), variant, args.of))
        if not args.table and carry(args.since):
            return 1
        texts = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("appo_*.py")}
        (ROOT / "tests/agreement.txt").write_text(table(texts), encoding="utf-8")
        return 0
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        refuse(str(error))


if __name__ == "__main__":
    sys.exit(main())
