"""Several processes under `torchrun`: the same steps as one, and what happens when one of them is lost."""

import importlib
import os
import re
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from conftest import Run, left_behind, marked
from edited import COUNTING, REPORTS, ROOT, edited, with_envs
from test_algorithm import make_agent, make_batch
from test_command_line import scalars

VARIANTS = ("appo_doom", "appo_atari", "appo_dmlab")


def columns(batch, rows: slice):
    """Those rollouts of a batch."""
    part = {name: x[:, rows] for name, x in batch._asdict().items() if isinstance(x, torch.Tensor) and name != "rnn_state"}
    restarts = [0] + [t for t in range(1, len(part["first"])) if part["first"][t].any()]
    return batch._replace(**part, rnn_state=batch.rnn_state[rows], restarts=restarts, size=int(part["mask"].sum()))


def learn(name: str, rows: slice):
    """Four iterations of a learner whose batches are `rows` of those of a single process. Returns weights, statistics and metrics."""
    appo = importlib.import_module(name)
    torch.manual_seed(0)
    args, agent = make_agent(appo, num_epochs=2)
    empty = SimpleNamespace(compiling=np.zeros(1), unsaved=np.zeros(1))
    inference = SimpleNamespace(acting=SimpleNamespace(publish=lambda version: None), release=lambda slots: None, episodes=[[rows.start]],
                                served=0, batches=0, idle=0.0, held=0.0, numpy=empty)  # fmt: skip
    learner = appo.Learner(args, agent, inference, torch.device("cpu"))
    learner.optimizer = torch.optim.SGD(agent.parameters(), 0.05)  # Adam makes large steps of rounding errors in tiny gradients
    for i in range(4):
        whole = make_batch(appo, agent, T=6, B=6, seed=i)
        if i == 2:
            whole.mask[:, 4:] = False  # the last rank has no usable sample
        batch = columns(whole, rows)
        valid = int((~batch.first[1:]).sum())
        learner.gather = lambda slots: (batch, np.arange(valid) + rows.start)
        metrics = learner.iterate(None, timed_out=rows.start == 4 and i == 3)
    return agent.state_dict(), metrics, [learner.global_step, learner.version, learner.skipped, learner.total("timed_out")]


def one_rank(rank: int, name: str, folder: str, parts: list[slice]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(parts))
    torch.save(learn(name, parts[rank]), f"{folder}/{rank}.pt")
    dist.barrier()


@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_take_the_step_of_one_process_with_all_samples(name, tmp_path):
    parts = [slice(0, 3), slice(3, 4), slice(4, 6)]
    mp.spawn(one_rank, (name, str(tmp_path), parts), nprocs=len(parts))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(len(parts))]
    weights, metrics, counts = learn(name, slice(0, 6))
    start = make_agent(importlib.import_module(name))[1].state_dict()
    assert max((weights[key] - start[key]).abs().max() for key in weights if key.endswith("weight")) > 1e-3
    for theirs, their_metrics, their_counts in ranks:
        assert all(torch.equal(theirs[key], ranks[0][0][key]) for key in weights), "equal on all ranks to the bit"
        torch.testing.assert_close(theirs, weights, rtol=1e-5, atol=1e-5)
        assert their_metrics == ranks[0][1] and their_counts[:3] == counts[:3] and their_counts[3] == 1
        for key in metrics.keys() - {"lag/mean", "lag/max"}:
            assert their_metrics[key] == pytest.approx(metrics[key], rel=1e-3, abs=1e-4), key


# ---- as a user starts it

TORCHRUN = ("-m", "torch.distributed.run")
TWO = (*TORCHRUN, "--standalone", "--nproc-per-node", "2")
SMALL = ("--experiment", "e", "--num-workers", "1", "--num-envs-per-worker", "4", "--rollout", "8", "--batch-size", "32", "--hidden-size",
         "32", "--device", "cpu", "--total-timesteps", "1000000")  # fmt: skip


def rank_pids(r) -> list[int]:
    """Process ids of the ranks, the first one's first."""
    found = {}
    for pid in marked(r.mark):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        except OSError:
            continue
        if parent == r.process.pid:
            found[next(text for text in environment if text.startswith("RANK="))] = pid
    return [found[key] for key in sorted(found)]


def checkpoint(r) -> dict:
    return torch.load(max((r.folder / "e" / "checkpoints").glob("checkpoint_*")), weights_only=True)


def test_two_ranks_train_and_resume(run, tmp_path):
    """Both play games of their own; the slower one is named; what they have learned goes on in one process."""
    line = "        if seed is not None:\n"
    note = f"            open({str(tmp_path / 'seeds')!r}, 'a').write(os.environ['RANK'] + f' {{seed}}\\n')\n"
    slow = ("        self.count += 1\n", "        self.count += 1\n        __import__('time').sleep(0.02 * int(os.environ['RANK']))\n")
    script = with_envs(tmp_path, "appo_ranks", COUNTING.replace(*slow).replace(line, line + note), REPORTS)
    r = run(*SMALL, "--total-timesteps", "1500", script=script, launcher=TWO)
    assert r.wait(90) == 0, r.text()
    assert "2 ranks like this: 8 games, 64 samples per update" in r.text() and r.text().count("parameters on cpu") == 1
    assert r.text().count("done: ") == 1 and "bottleneck: rank 1" in r.text()
    seeds = [line.split() for line in (tmp_path / "seeds").read_text().splitlines()]
    first, second = ({seed for rank, seed in seeds if rank == which} for which in "01")
    assert len(first) == len(second) == 4 and not first & second
    found = scalars(tmp_path / "e")
    assert 0.2 < np.median([event.value for event in found["stats/all_reduce"]]) < 1
    assert 1500 <= checkpoint(r)["global_step"] < 1700

    again = run(*SMALL, "--total-timesteps", "2000", script=script, launcher=TWO)
    assert again.wait(90) == 0, again.text()
    assert again.text().count("resuming") == 1 and 2000 <= checkpoint(r)["global_step"] < 2200
    single = run(*SMALL, "--total-timesteps", "2300", "--num-workers", "2", script=script, env={"RANK": "0"})
    assert single.wait(60) == 0, single.text()
    assert "ranks like this" not in single.text() and checkpoint(r)["global_step"] >= 2300


@pytest.mark.parametrize("flags", [("--sync",), ("--num-workers", "0")])
def test_ranks_without_asynchrony(run, flags):
    r = run(*SMALL, *flags, "--total-timesteps", "600", launcher=TWO)
    assert r.wait(90) == 0, r.text()
    assert checkpoint(r)["version"] > 5 and "done: " in r.text()


@pytest.mark.parametrize(("launcher", "name", "flags", "sentence"), [
    ((), "appo_doom", ("--experiment", "e", "--evaluate"), "--evaluate is for one process, without torchrun"),
    (("--max-restarts", "1"), "appo_doom", (), "torchrun --max-restarts goes on with a run by its name: give it an --experiment"),
    ((), "appo_pbt_doom", (), "this is not for torchrun"),
])  # fmt: skip
def test_what_is_refused(run, launcher, name, flags, sentence):
    r = run(*flags, script=ROOT / f"{name}.py", launcher=(*TWO, *launcher))
    assert r.wait(60) == 1 and f"error: {sentence}" in r.text()


def test_shared_memory_of_all_ranks_of_a_machine(monkeypatch):
    appo = importlib.import_module("appo_doom")
    spaces = appo.spaces_of(appo.Args(device="cpu"))
    appo.check_shared_memory(spaces, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    with pytest.raises(appo.UserError, match="are needed"):
        appo.check_shared_memory(spaces, 1)


@pytest.fixture
def start(run, tmp_path):
    def start(*flags: str, launcher: tuple = TWO, edits=(), what: str = "frames/s"):
        script = edited(tmp_path, f"appo_ranks_{len(list(tmp_path.iterdir()))}", REPORTS, *edits)
        r = run(*SMALL, *flags, script=script, launcher=launcher)
        r.wait_for(lambda: what in r.text(), 150, what)
        return r

    return start


@pytest.mark.parametrize("who", ["the launcher", "a rank"])
def test_a_signal_stops_all_ranks_and_nothing_starts_again(start, who):
    r = start(launcher=(*TWO, "--max-restarts", "1"))
    os.kill(r.process.pid if who == "the launcher" else rank_pids(r)[1], signal.SIGINT)
    assert (r.wait(30) == 0) == (who == "a rank")
    assert "resuming" not in r.text()
    assert r.text().count("stopped: ") == 1 and checkpoint(r)["version"] > 0


def test_the_end_of_the_launcher_stops_all_ranks(start):
    r = start()
    r.process.kill()
    r.process.wait()
    assert left_behind(r.mark, set(os.listdir("/dev/shm"))) == (set(), set()) and r.text().count("stopped: ") == 1
    assert checkpoint(r)["version"] > 0


def test_a_killed_rank_ends_all_and_torchrun_starts_them_again(start):
    """Also when it is lost before the ranks have found each other, and the next one does not find the dead."""
    join = '    name = str(time.time_ns()) if rank == 0 else ""\n'
    count = 'os.environ["TORCHELASTIC_RESTART_COUNT"]'
    lost = f"    if rank == 1 and {count} == '0':\n        time.sleep(2)\n        os._exit(7)\n"
    late = f"    if rank == 0 and {count} == '1':\n        time.sleep(4)\n"
    r = start(launcher=(*TWO, "--max-restarts", "2"), edits=[(join, lost + late + join)])
    before = rank_pids(r)
    shares, cores = [os.sched_getaffinity(pid) for pid in before], os.sched_getaffinity(0)
    assert {len(share) for share in shares} == {max(1, len(cores) // 2)} and set.union(*shares) <= cores
    assert len(cores) == 1 or not set.intersection(*shares), "cores of their own"
    os.kill(before[1], signal.SIGKILL)
    r.wait_for(lambda: "resuming" in r.text() and r.text().split("resuming")[1].count("frames/s") > 0, 60, "the restart")
    assert "rank 0: another rank has ended or cannot be reached" in r.text()
    after = rank_pids(r)
    assert not set(before) & set(after)
    os.kill(after[0], signal.SIGKILL)
    assert r.wait(30) == 1
    assert re.search(r"rank +: 0 .*\n +exitcode +: -9", r.text().split("Root Cause")[1]), "the reason is last"


def test_a_loss_that_is_not_finite_on_one_rank_ends_all(run, tmp_path):
    line = "        return self.observation(), reward, terminated"
    broken = (line, f"        reward = float('nan') if self.tics > 200 and os.environ['RANK'] == '1' else reward\n{line}")
    r = run(*SMALL, script=edited(tmp_path, "appo_broken", REPORTS, broken), launcher=TWO)
    assert r.wait(60) == 1
    assert r.text().count("FloatingPointError: the loss (nan)") in (1, 2)  # torchrun may end the other before it has said so
    assert all(torch.isfinite(tensor).all() for tensor in checkpoint(r)["agent"].values()) and checkpoint(r)["version"] > 0


def test_two_machines(tmp_path):
    """Two launchers, over the loopback, that share no folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    runs = []
    for i in range(2):
        (tmp_path / str(i)).mkdir()
        launcher = (*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                    f"127.0.0.1:{port}", "--rdzv-id", "test", "--local-addr", "127.0.0.1")  # fmt: skip
        runs.append(Run(tmp_path / str(i), *SMALL, "--total-timesteps", "1500", launcher=launcher))
    assert [r.wait(90) for r in runs] == [0, 0], runs[0].text() + runs[1].text()
    assert sum(r.text().count("2 ranks like this") for r in runs) == 1
    assert sorted(len(list((tmp_path / str(i)).glob("e/checkpoints/*"))) for i in range(2)) == [0, 1]
