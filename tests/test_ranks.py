"""Several processes under `torchrun`: the same steps as one, and what happens when one of them is lost."""

import copy
import fcntl
import importlib
import os
import re
import signal
import socket
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import Run, left_behind, marked
from edited import COUNTING, REPORTS, ROOT, edited, with_envs
from test_algorithm import learner_of, make_agent, make_batch
from test_command_line import scalars

VARIANTS = ("appo_doom", "appo_atari", "appo_atari_replay", "appo_dmlab", "appo_mujoco")


def columns(batch, rows: slice):
    """Those rollouts of a batch."""
    part = {name: x[:, rows] for name, x in batch._asdict().items() if isinstance(x, torch.Tensor) and name != "rnn_state"}
    obs = {name: x[:, rows] for name, x in batch.obs.items()}
    restarts = [0] + [t for t in range(1, len(part["first"])) if part["first"][t].any()]
    return batch._replace(**part, obs=obs, rnn_state=batch.rnn_state[rows], restarts=restarts)


def learn(name: str, rows: slice) -> dict:
    """A learner whose batches are `rows` of those of a single process. What came of it."""
    appo = importlib.import_module(name)
    torch.manual_seed(0)
    args, agent = make_agent(appo, num_epochs=2, learning_rate=0.05)
    learner = learner_of(appo, args, agent)
    learner.optimizer = torch.optim.SGD(agent.parameters(), 0.05)  # Adam makes large steps of rounding errors in tiny gradients
    old, seen, start = args.max_policy_lag, [], copy.deepcopy(agent.state_dict())

    def iterate(i: int, spoil=lambda whole: None):
        whole, lag = make_batch(appo, agent, T=6, B=6, seed=i), np.arange(36).reshape(6, 6)
        spoil(whole)
        if "replayed" in whole._fields:  # every second rollout
            whole.replayed[:, 1::2] = True
        if i == 2:
            lag[:, 4:] = old  # the last rank has no usable sample
        if i == 3:
            lag[:] = old  # nobody has
        batch = columns(whole._replace(mask=whole.mask & torch.from_numpy(lag < old)), rows)
        learner.gather = lambda slots: (batch, lag[:, rows][~batch.first[1:].numpy()])
        return learner.iterate(np.arange(1))

    for i in range(5):
        seen.append(iterate(i))
    counts, weights = (learner.global_step, learner.version, learner.skipped), copy.deepcopy(agent.state_dict())
    assert max((weights[key] - start[key]).abs().max() for key in weights if key.endswith("weight")) > 1e-3
    if fractions := [key for key, space in agent.spaces.obs.items() if space.dtype.kind == "f"]:
        with pytest.raises(FloatingPointError, match="an observation is not finite"):  # the last rank's
            iterate(5, lambda whole: whole.obs[fractions[0]][2, 5].fill_(torch.inf))
    with pytest.raises(FloatingPointError, match="the loss"):
        iterate(6, lambda whole: whole.rewards[2, 5].fill_(torch.nan))
    assert all(torch.equal(weights[key], x) for key, x in agent.state_dict().items())
    if dist.is_initialized() and rows.start == 4:  # the last rank ends the run, for all of them
        learner.sum_counts(leaving=1)
    elif dist.is_initialized():
        assert iterate(7) is None and learner.inference.counts["ranks"] > 0
    return dict(weights=weights, metrics=seen, counts=counts)


def one_rank(rank: int, function, name: str, folder: str, parts: list[slice]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(parts))
    torch.save(function(name, parts[rank]), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_take_the_step_of_one_process_with_all_samples(name, tmp_path):
    parts = [slice(0, 3), slice(3, 4), slice(4, 6)]
    mp.spawn(one_rank, (learn, name, str(tmp_path), parts), nprocs=len(parts))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(len(parts))]
    one = learn(name, slice(0, 6))
    assert one["counts"][2] == 1 and [len(metrics) > 3 for metrics in one["metrics"]] == [False, True, True, False, True]
    for rank in ranks:
        assert all(torch.equal(x, ranks[0]["weights"][key]) for key, x in rank["weights"].items()), "equal on all ranks to the bit, statistics too"
        torch.testing.assert_close(rank["weights"], one["weights"], rtol=1e-5, atol=1e-5)
        assert rank["counts"] == one["counts"]
        for theirs, metrics in zip(rank["metrics"], one["metrics"]):
            assert theirs.keys() == metrics.keys()
            for key in metrics.keys() - {"lag/max"}:  # which is each rank's own
                assert theirs[key] == pytest.approx(metrics[key], rel=1e-3, abs=1e-4), key
    assert max(rank["metrics"][4]["lag/max"] for rank in ranks) == one["metrics"][4]["lag/max"]


def learn_in_parts(name: str, rows: slice, order=range(4)) -> dict:
    """Two iterations of two epochs with two steps each, from `rows` of a single process's eight rollouts, dealt out in `order`. In the
    first one the last rank has no usable sample for the second step of an epoch; in the second one nobody has."""
    appo = importlib.import_module(name)
    args, agent = make_agent(appo, num_epochs=2, num_batches_per_epoch=2, normalize_input=False, learning_rate=0.05,
                             anneal_lr=True, total_timesteps=100)  # fmt: skip
    learner, metrics = learner_of(appo, args, agent), []
    learner.optimizer = torch.optim.SGD(agent.parameters(), 0.05)
    for i, without in enumerate(([6, 7], [2, 3, 6, 7])):
        whole = make_batch(appo, agent, B=8, seed=i)
        whole.mask[:, without] = False
        part = columns(whole, rows)
        learner.gather = lambda slots: (part, np.zeros(int((~part.first[1:]).sum())))
        with mock.patch("torch.randperm", lambda n: torch.tensor(order)):
            metrics.append(learner.iterate(np.arange(1)))
    return dict(weights=agent.state_dict(), metrics=metrics, counts=(learner.global_step, learner.version, learner.skipped))


@pytest.mark.parametrize("name", ["appo_doom", "appo_mujoco"])
def test_the_parts_of_an_iteration_are_the_unions_of_the_ranks_parts(name, tmp_path):
    mp.spawn(one_rank, (learn_in_parts, name, str(tmp_path), [slice(0, 4), slice(4, 8)]), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    one = learn_in_parts(name, slice(0, 8), [0, 1, 4, 5, 2, 3, 6, 7])
    assert one["counts"][1:] == (8, 2) and one["metrics"][0]["charts/learning_rate"] > one["metrics"][1]["charts/learning_rate"]
    for rank in ranks:
        assert all(torch.equal(x, ranks[0]["weights"][key]) for key, x in rank["weights"].items())
        torch.testing.assert_close(rank["weights"], one["weights"], rtol=1e-5, atol=1e-5)
        assert rank["counts"] == one["counts"]
        for theirs, metrics in zip(rank["metrics"], one["metrics"]):
            assert theirs == pytest.approx(metrics, rel=1e-3, abs=1e-4)


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
    """Both have environments of their own; that one is slower is said; what they have learned goes on in one process."""
    line = "        if seed is not None:\n"
    note = f"            open({str(tmp_path / 'seeds')!r}, 'a').write(os.environ['RANK'] + f' {{seed}}\\n')\n"
    slow = ("        self.count += 1\n", "        self.count += 1\n        __import__('time').sleep(0.02 * int(os.environ['RANK']))\n")
    script = with_envs(tmp_path, "appo_ranks", COUNTING.replace(*slow).replace(line, line + note), REPORTS)
    r = run(*SMALL, "--total-timesteps", "1500", script=script, launcher=TWO)
    assert r.wait(90) == 0, r.text()
    assert "2 ranks like this: 8 environments, 64 samples an optimiser step" in r.text() and r.text().count("parameters on cpu") == 1
    assert r.text().count("done: ") == 1 and "bottleneck: another rank" in r.text()
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
    ((), "appo_doom", ("--experiment", "e", "--evaluate"), "error: --evaluate needs the name of an --experiment, and is for one process, without torchrun"),
    (("--max-restarts", "1"), "appo_doom", (), "error: torchrun --max-restarts can only go on with a run that has a name: give it an --experiment"),
    ((), "appo_doom", ("--env-idd", "basic"), "Unrecognized options: --env-idd"),
    ((), "appo_doom", ("--help",), "appo_doom.py [-h] [OPTIONS]"),
    ((), "appo_doom", ("--experiment", "used", "--device", "cpu"), "error: another run is using "),
    ((), "appo_doom", ("--device", "gpu"), "error: --device gpu: Expected one of cpu, cuda, "),
    ((), "appo_pbt_doom", (), "error: this is not for torchrun"),
])  # fmt: skip
def test_what_ends_the_first_rank_ends_the_others_in_silence(run, tmp_path, launcher, name, flags, sentence):
    (tmp_path / "used").mkdir()
    with open(tmp_path / "used" / "log.txt", "w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        r = run(*flags, script=ROOT / f"{name}.py", launcher=(*TWO, *launcher))
        assert r.wait(60) == (flags != ("--help",)), r.text()
    if name != "appo_pbt_doom":  # there each process says it
        assert r.text().count(sentence) == 1 + len(launcher) // 2, r.text()  # once in every attempt
    assert sentence in r.text() and f"{name}.py\", line" not in r.text(), "no traceback of ours"


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
    assert len(re.findall("(stopped|done): ", r.text())) == 1 and checkpoint(r)["version"] > 0


def test_the_end_of_the_launcher_stops_all_ranks(start):
    r = start()
    r.process.kill()
    r.process.wait()
    assert left_behind(r.mark, set(os.listdir("/dev/shm"))) == (set(), set()) and r.text().count("stopped: ") == 1
    assert checkpoint(r)["version"] > 0


def test_a_killed_rank_ends_all_and_torchrun_starts_them_again(start):
    """Each rank twice; once before the ranks have found each other, and the next one does not find the dead."""
    meet = '    store, rank, ranks = next(dist.rendezvous("env://"))\n'
    count = 'os.environ["TORCHELASTIC_RESTART_COUNT"]'
    lost = f"    if os.environ['RANK'] == '1' and {count} == '0':\n        time.sleep(2)\n        os._exit(7)\n"
    late = f"    if os.environ['RANK'] == '0' and {count} == '1':\n        time.sleep(4)\n"
    r = start("--save-every-sec", "0.5", launcher=(*TWO, "--max-restarts", "4"), edits=[(meet, lost + late + meet)])
    for i, rank in enumerate((1, 0, 0)):
        before, step = rank_pids(r), checkpoint(r)["global_step"] if i else 0
        shares, cores = [os.sched_getaffinity(pid) for pid in before], os.sched_getaffinity(0)
        assert {len(share) for share in shares} == {max(1, len(cores) // 2)} and set.union(*shares) <= cores
        assert len(cores) == 1 or not set.intersection(*shares), "cores of their own"
        r.wait_for(lambda: list((r.folder / "e" / "checkpoints").glob("checkpoint_*")), 30, "a checkpoint")
        os.kill(before[rank], signal.SIGKILL)
        r.wait_for(lambda: r.text().count("resuming") > i and r.text().rpartition("resuming")[2].count("frames/s") > 0, 60, "the restart")
        assert not set(before) & set(rank_pids(r)) and checkpoint(r)["global_step"] > step
    os.kill(rank_pids(r)[1], signal.SIGKILL)
    assert r.wait(30) == 1
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9", r.text().split("Root Cause")[1]), "the reason is last"


def test_a_loss_that_is_not_finite_on_one_rank_ends_all(run, tmp_path):
    line = "        return observation, reward, terminated"
    broken = (line, f"        reward = float('nan') if self.tics > 200 and os.environ['RANK'] == '1' else reward\n{line}")
    r = run(*SMALL, script=edited(tmp_path, "appo_broken", REPORTS, broken), launcher=TWO)
    assert r.wait(60) == 1
    assert r.text().count("FloatingPointError: the loss (nan)") in (1, 2)  # torchrun may end the other before it has said so
    assert all(torch.isfinite(tensor).all() for tensor in checkpoint(r)["agent"].values()) and checkpoint(r)["version"] > 0


def test_an_actor_that_one_rank_cannot_keep_alive_ends_all_with_a_checkpoint(run, tmp_path):
    line = "        return observation, reward, terminated"
    broken = (line, f"        if self.tics > 200 and os.environ['RANK'] == '1': raise ValueError('no such monster')\n{line}")
    r = run(*SMALL, script=edited(tmp_path, "appo_broken", REPORTS, broken), launcher=TWO)
    assert r.wait(60) == 1
    assert "error: actor 0 died (exit code 1), for the third time in a row" in r.text() and checkpoint(r)["version"] > 0


def two_machines(tmp_path, *flags: str, folders=("0", "1"), restarts: int = 0) -> list[Run]:
    """Two launchers, over the loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    runs = []
    for folder in folders:
        (tmp_path / folder).mkdir(exist_ok=True)
        launcher = (*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                    f"127.0.0.1:{port}", "--rdzv-id", "test", "--local-addr", "127.0.0.1", "--max-restarts", str(restarts))  # fmt: skip
        runs.append(Run(tmp_path / folder, *SMALL, *flags, launcher=launcher, env=dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")))
    return runs


def test_a_rank_killed_on_one_of_two_machines(tmp_path):
    """As benchmark/README.md says. The other machine's launcher does not count this as a restart."""
    runs = two_machines(tmp_path, "--save-every-sec", "0.5", folders=("0", "0"), restarts=1)
    saved = tmp_path / "0" / "e" / "checkpoints"
    runs[0].wait_for(lambda: list(saved.glob("checkpoint_*")), 60, "a checkpoint")
    (rank,) = rank_pids(runs[1])
    os.kill(rank, signal.SIGKILL)
    runs[0].wait_for(lambda: any("resuming" in r.text() for r in runs), 60, "the restart")
    step = max(int(path.stem.split("_")[2]) for path in saved.glob("checkpoint_*"))
    runs[0].wait_for(lambda: max(int(path.stem.split("_")[2]) for path in saved.glob("checkpoint_*")) > step, 60, "a step")
    os.kill(rank_pids(runs[0])[0], signal.SIGINT)
    assert [r.wait(60) for r in runs] == [0, 0], runs[0].text() + runs[1].text()


def test_two_machines(tmp_path):
    """They share no folder."""
    runs = two_machines(tmp_path, "--total-timesteps", "1500")
    assert [r.wait(90) for r in runs] == [0, 0], runs[0].text() + runs[1].text()
    assert sum(r.text().count("2 ranks like this") for r in runs) == 1
    assert sorted(len(list((tmp_path / str(i)).glob("e/checkpoints/*"))) for i in range(2)) == [0, 1]
