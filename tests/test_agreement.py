"""The variants are edits of appo_gym.py: what they share stands in each of them word for word."""

import ast
import re

import carry
import pytest
from edited import ROOT

TEXTS = {name: (ROOT / name).read_text() for name in (carry.BASE, *carry.EDIT_OF)}


def test_files_differ_as_the_table_says():
    said, found = (ROOT / "tests/agreement.txt").read_text().splitlines(), carry.table(TEXTS).splitlines()
    rows = [f"- {row}" for row in said if row not in found] + [f"+ {row}" for row in found if row not in said]
    if said != found:
        pytest.fail("\n".join(("Files differ in other lines than tests/agreement.txt says:", *rows, (
            "Carry the change over (`python carry.py`). If the files are to differ, `python carry.py --table` writes the table anew."
        ))), pytrace=False)  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_first_reading_needs_nothing_of_the_second_part(name):
    """But for the two that an actor needs at its start, which belong to what the main process does."""
    tree, banner = ast.parse(TEXTS[name]), TEXTS[name].split("# A first reading ends here.")[0].count("\n") + 1
    later = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.lineno > banner:
            later |= {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.lineno > banner:
            later.add(node.name)
    first = [node for top in tree.body if top.lineno < banner for node in ast.walk(top) if isinstance(node, ast.Name)]
    needed = {node.id for node in first if isinstance(node.ctx, ast.Load)} & later
    assert {"main", "train", "SIGNALS"} <= later and needed == {"seed_generators"}


@pytest.mark.parametrize("name", TEXTS)
def test_a_copy_says_what_it_is_a_copy_of(name):
    """Below the script block; git writes the version into this line (see .gitattributes)."""
    assert [line[1] for line in carry.ID.finditer(TEXTS[name])] == [name]
    assert re.search(rf"\n# ///\n# {name} \$Id", TEXTS[name])
    assert "\nappo_*.py ident\n" in (ROOT / ".gitattributes").read_text()
