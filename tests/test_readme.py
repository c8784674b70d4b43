"""What the README shows works as shown."""

import re
import subprocess
import sys

import pytest

from edited import ROOT, edited

README = (ROOT / "README.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.M | re.S)


def edits(diff: str) -> tuple[str, str]:
    body = diff.split("\n", 3)[3]
    return tuple("".join(line[1:] + "\n" for line in body.splitlines() if line.startswith(sign)) for sign in "-+")


def test_another_environment_and_network(run, tmp_path):
    script = edited(tmp_path, "cartpole", *map(edits, blocks("diff")))
    r = run("--experiment", "e", "--num-workers", "2", "--num-envs-per-worker", "2", "--rollout", "8", "--batch-size", "32", "--hidden-size", "32",
            "--device", "cpu", "--total-timesteps", "300", script=script)  # fmt: skip
    assert r.wait(90) == 0 and "0 actors restarted" in r.text()


def test_loading_a_policy(run, tmp_path):
    r = run("--experiment", "my_run", "--num-workers", "0", "--num-envs-per-worker", "2", "--hidden-size", "32", "--device", "cpu",
            "--total-timesteps", "130", "--train-dir", str(tmp_path / "train_dir"))  # fmt: skip
    assert r.wait(90) == 0
    code = blocks("python")[0]
    assert len(code.splitlines()) <= 6
    code += """
state, (obs, _) = torch.zeros(1, agent.state_size), env.reset(seed=0)
logits, values, state = agent(torch.from_numpy(obs)[None], torch.zeros(1, 1, 0), torch.ones(1, 1, dtype=torch.bool), state, [0])
assert logits.shape == (1, 1, 4) and agent.image_norm.count > 0
env.close()
"""
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, check=True, timeout=60
    )


def test_tables_are_those_of_the_raw_results():
    sys.path.insert(0, str(ROOT / "benchmark"))
    import plot

    assert README.count("<!-- table: ") == len(plot.TABLES)
    assert plot.with_tables(README) == README, "python benchmark/plot.py writes them"


@pytest.mark.parametrize("name", re.findall(r"`((?:appo_\w+\.py|dummy_\w+\.py|benchmark/[\w.]+))`", README))
def test_files_exist(name):
    assert (ROOT / name).exists()


def test_no_placeholders():
    assert not re.search(r"@@[A-Z]|TODO", README)
