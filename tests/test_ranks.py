"""Several processes under `torchrun`: the same steps as one, and what happens when one of them is lost."""

import contextlib
import copy
import fcntl
import importlib
import os
import re
import signal
import socket
import sys
from pathlib import Path
from unittest import mock

import carry
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import Run, left_behind, marked
from edited import COUNTING, REPORTS, ROOT, edited, load, replacing, with_envs
from test_algorithm import make_agent, make_batch
from test_command_line import scalars

SCRIPT = ROOT / "appo_doom_multigpu.py"


def with_ranks(name: str, folder: Path) -> Path:
    """A file with what appo_doom_multigpu.py adds to appo_doom.py, as `carry.py --add` makes it, without a conflict."""
    text, base, ranks = ((ROOT / f"{file}.py").read_text() for file in (name, "appo_doom", SCRIPT.stem))
    merged = carry.merge(text, base, ranks, (name, "appo_doom", SCRIPT.stem), "")
    assert carry.conflicts(merged) == []
    path = folder / f"{name}_multigpu.py"
    path.write_text(merged)
    return path


def learn(appo, slots: list[int]) -> dict:
    """What comes of six iterations, each of two epochs of two steps, from `slots` of eight: all ranks together have each of them once."""
    args, agent = make_agent(appo, num_workers=0, num_envs_per_worker=8, rollout=8, num_epochs=2, num_batches_per_epoch=2, device="cpu",
                             normalize_input=True, learning_rate=0.02, anneal_lr=True, total_timesteps=500)  # fmt: skip
    args, device = appo.resolve(args), torch.device("cpu")
    learner = appo.Learner(args, agent, appo.Inference(args, agent.spaces, agent, device), device)
    learner.optimizer = torch.optim.SGD(agent.parameters(), 0.02)  # Adam makes large steps of rounding errors in tiny gradients
    r, metrics, start = learner.inference.rollouts, [], copy.deepcopy(agent.state_dict())
    learner.kept = np.arange(0)  # with replay, what is marked below is all that is replayed

    def iterate(seed: int, without: list, change=lambda: None) -> dict:
        batch = make_batch(appo, agent, T=8, B=8, seed=seed)
        for name, x in batch.obs.items():
            r.obs[name][:, :8] = x
        for name in (vars(r).keys() & batch._fields) - {"obs", "rnn_state"}:
            vars(r)[name][:, :8] = getattr(batch, name)
        r.rnn_state[:8] = batch.rnn_state
        lag = np.arange(64).reshape(8, 8)
        lag[:, without] = args.max_policy_lag
        r.versions[:, :8] = learner.version - lag
        if hasattr(r, "times_replayed"):
            r.times_replayed[:8] = [0, 1, 0, 0, 1, 0, 0, 0]
        change()
        return learner.iterate(np.array(slots))

    def spoil(field, value: float) -> None:
        """In the last rank's last slot, where nothing ends."""
        field[0, 7], r.first[:, 7] = value, False

    with mock.patch("torch.randperm", torch.arange):  # in the order of `slots`
        # The first only initialises statistics. Then the last rank has no usable sample, nobody has one for the second step, nobody has one
        for seed, without in enumerate(([], [], [6, 7], [2, 3, 5, 7], list(range(8)))):
            metrics.append(iterate(seed, without))
        metrics.append(iterate(5, [], lambda: r.first[1:, 4:6].fill(True)))  # the second rank has none that is valid
        counts, weights = (learner.global_step, learner.version, learner.skipped), copy.deepcopy(agent.state_dict())
        assert max((weights[key] - start[key]).abs().max() for key in weights if key.endswith("weight")) > 1e-3
        for name, space in agent.spaces.obs.items():
            if space.dtype.kind == "f":
                with pytest.raises(FloatingPointError, match="an observation is not finite"):
                    iterate(6, [], lambda: spoil(r.obs[name], torch.inf))
        with pytest.raises(FloatingPointError, match="the loss"):
            iterate(7, [4, 5], lambda: spoil(r.rewards, torch.nan))
    assert all(x.isfinite().all() for x in agent.state_dict().values())
    return dict(weights=weights, metrics=metrics, counts=counts)


def leave(appo) -> None:
    """The last rank ends the run, for all of them, by a wish or an error."""
    last = dist.get_rank() == dist.get_world_size() - 1
    for its in (["slots"], [None], appo.UserError):
        learner = mock.Mock(**{"collect.side_effect": its if last else ["slots"], "inference.counts": {"ranks": 0.0}})
        with pytest.raises(appo.UserError) if last and its == appo.UserError else contextlib.nullcontext():
            assert appo.collect_together(learner) == ("slots" if its == ["slots"] else None)
        assert learner.inference.counts["ranks"] > 0


def one_rank(rank: int, paths: list[Path], parts: list[list[int]]) -> None:
    torch.set_num_threads(1)
    load(paths[0])  # as a run, which joins the others later
    dist.init_process_group("gloo", init_method=f"file://{paths[0].parent}/meet", rank=rank, world_size=len(parts))
    for path in paths:
        appo = load(path)
        torch.save(learn(appo, parts[rank]), path.with_suffix(f".{rank}"))
        leave(appo)
    dist.barrier()
    dist.destroy_process_group()
    threads = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
    assert not [name for name in threads if "gloo" in name], "beside its threads the end of Python may crash"


def test_ranks_take_the_step_of_one_process_with_all_samples(tmp_path):
    """And the process that they are compared with has the file without ranks. All that appo_atari.py has is in appo_atari_replay.py."""
    parts = [[0, 1, 2, 3], [4, 5], [6, 7]]
    paths = {name: with_ranks(name, tmp_path) for name in ("appo_gym", "appo_doom", "appo_atari_replay", "appo_dmlab", "appo_mujoco")}
    mp.get_context("forkserver").set_forkserver_preload(["torch", "gymnasium", "tyro", "pytest"])
    mp.start_processes(one_rank, (list(paths.values()), parts), nprocs=len(parts), start_method="forkserver")
    for name, path in paths.items():
        ranks = [torch.load(path.with_suffix(f".{rank}"), weights_only=False) for rank in range(len(parts))]
        compare(ranks, learn(importlib.import_module(name), [0, 1, 4, 6, 2, 3, 5, 7]), name)


def compare(ranks: list[dict], one: dict, name: str) -> None:
    """pytest shows the name where they differ."""
    assert one["counts"][1:] == (17, 3) and [len(metrics) > 4 for metrics in one["metrics"]] == [False, True, True, True, False, True]
    assert one["metrics"][1]["charts/learning_rate"] > one["metrics"][5]["charts/learning_rate"] > 0
    for rank in ranks:
        assert all(torch.equal(x, ranks[0]["weights"][key]) for key, x in rank["weights"].items()), "to the bit, statistics, too"
        torch.testing.assert_close(rank["weights"], one["weights"], rtol=1e-5, atol=5e-5)
        assert rank["counts"] == one["counts"]
        for theirs, metrics in zip(rank["metrics"], one["metrics"]):
            assert theirs.keys() == metrics.keys()
            for key in metrics.keys() - {"lag/max"}:  # which is each rank's own
                assert theirs[key] == pytest.approx(metrics[key], rel=1e-3, abs=1e-4), key
    assert max(rank["metrics"][5]["lag/max"] for rank in ranks) == one["metrics"][5]["lag/max"]


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


def test_two_ranks_train_and_one_goes_on(run, tmp_path):
    """Both have environments of their own; that one is slower is said; what they have learned goes on in one process."""
    line = "        if seed is not None:\n"
    note = f"            open({str(tmp_path / 'seeds')!r}, 'a').write(os.environ['RANK'] + f' {{seed}}\\n')\n"
    slow = ("        self.count += 1\n", "        self.count += 1\n        __import__('time').sleep(0.02 * int(os.environ['RANK']))\n")
    script = with_envs(tmp_path, "appo_ranks", COUNTING.replace(*slow).replace(line, line + note), REPORTS, source=SCRIPT)
    r = run(*SMALL, "--total-timesteps", "500", script=script, launcher=TWO)
    assert r.wait(90) == 0, r.text()
    assert "2 ranks like this: 64 samples an optimiser step" in r.text() and r.text().count("parameters on cpu") == 1
    assert r.text().count("done: ") == 1 and "bottleneck: another rank" in r.text()
    seeds = [line.split() for line in (tmp_path / "seeds").read_text().splitlines()]
    first, second = ({seed for rank, seed in seeds if rank == which} for which in "01")
    assert len(first) == len(second) == 4 and not first & second
    found = scalars(tmp_path / "e")
    assert 0.2 < np.median([event.value for event in found["stats/all_reduce"]]) < 1
    assert 500 <= checkpoint(r)["global_step"] < 700

    single = run(*SMALL, "--total-timesteps", "900", "--num-workers", "2", script=script, env={"RANK": "0"})
    assert single.wait(60) == 0, single.text()
    assert single.text().count("resuming") == 1 and "ranks like this" not in single.text() and checkpoint(r)["global_step"] >= 900


@pytest.mark.parametrize("name, flags", [("appo_atari_replay", ("--replay-rollouts", "20", "--sync", "--batch-size", "64")),
                                         ("appo_dmlab", ("--encoder", "convnet")), ("appo_mujoco", ("--num-workers", "0"))])  # fmt: skip
def test_the_others_train_with_ranks(run, tmp_path, name, flags):
    """With and without asynchrony. DeepMind Lab has a stand-in. (appo_atari_replay.py has all of appo_atari.py.)"""
    r = run(*SMALL, *flags, "--num-batches-per-epoch", "1", "--total-timesteps", "300", script=with_ranks(name, tmp_path), launcher=TWO,
            env=dict(PYTHONPATH=f"{ROOT}/tests/stand_in:{os.environ['PYTHONPATH']}"))  # fmt: skip
    assert r.wait(90) == 0, r.text()
    assert checkpoint(r)["version"] > 3 and r.text().count("done: ") == 1 and "2 ranks like this" in r.text()


@pytest.mark.parametrize("launcher, flags, sentence", [
    (("--max-restarts", "1"), (), "error: torchrun --max-restarts can only go on with a run that has a name: give it an --experiment"),
    ((), ("--experiment", "used", "--device", "cpu"), "error: another run is using "),
])  # fmt: skip
def test_what_ends_the_first_rank_ends_the_others_in_silence(run, tmp_path, launcher, flags, sentence):
    """Before it knows its flags, in each attempt; and after that."""
    (tmp_path / "used").mkdir()
    with open(tmp_path / "used" / "log.txt", "w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        r = run(*flags, script=SCRIPT, launcher=(*TWO, *launcher))
        assert r.wait(60) == 1, r.text()
    assert r.text().count(sentence) == 1 + len(launcher) // 2, r.text()  # once in every attempt
    assert f'{SCRIPT.name}", line' not in r.text(), "no traceback of ours"


def end_early(rank: int, folder: Path, flags: tuple, code: int) -> None:
    """A rank whose first one has nothing to do, or cannot: `main` returns, or ends the process, in all of them."""
    appo = importlib.import_module(SCRIPT.stem)
    sys.argv, sys.stderr = ["appo", "--train-dir", str(folder), *flags], open(folder / f"{rank}.txt", "w")
    sys.stdout = sys.stderr
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        ended = appo.main()
    except SystemExit as end:
        ended = end.code
    assert ended == (0 if rank else code)


@pytest.mark.parametrize("flags, code, sentence", [
    (("--env-idd", "basic"), 2, "Unrecognized options: --env-idd"),
    (("--help",), 0, "[-h] [OPTIONS]"),
    (("--rollout", "0"), 2, "error: --rollout 0 is out of range"),
])  # fmt: skip
def test_only_the_first_rank_speaks(tmp_path, flags, code, sentence):
    mp.get_context("forkserver").set_forkserver_preload(["torch", "gymnasium", "tyro", "pytest"])
    mp.start_processes(end_early, (tmp_path, flags, code), nprocs=2, start_method="forkserver")
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert sentence in first and second == ""


def test_memory_of_all_ranks_of_a_machine(monkeypatch):
    appo = importlib.import_module(SCRIPT.stem)
    args = appo.resolve(appo.Args(device="cpu"))
    appo.check_memory(args, appo.spaces_of(args), 512)
    for ranks, sentence in ((1_000_000, "/dev/shm has .* are needed"), (1_000, "slots of rollouts need .* that are free")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        if ranks == 1_000:
            monkeypatch.setattr(appo, "ENV_SHARED_MEMORY", -100_000)
        with pytest.raises(appo.UserError, match=sentence):
            appo.check_memory(args, appo.spaces_of(args), 512)


@pytest.fixture
def start(run, tmp_path):
    def start(*flags: str, launcher: tuple = TWO, edits=(), what: str = "frames/s"):
        script = edited(tmp_path, f"appo_ranks_{len(list(tmp_path.iterdir()))}", REPORTS, *edits, source=SCRIPT)
        r = run(*SMALL, *flags, script=script, launcher=launcher)
        r.wait_for(lambda: what in r.text(), 150, what)
        return r

    return start


def test_a_signal_to_the_launcher_stops_all_ranks_and_nothing_starts_again(start):
    """One to a rank: see the end of test_a_rank_killed_on_one_of_two_machines."""
    r = start(launcher=(*TWO, "--max-restarts", "1"))
    os.kill(r.process.pid, signal.SIGINT)
    assert r.wait(30) != 0 and "resuming" not in r.text()
    assert len(re.findall("(stopped|done): ", r.text())) == 1 and checkpoint(r)["version"] > 0


def test_the_end_of_the_launcher_stops_all_ranks(start):
    r = start()
    r.process.kill()
    r.process.wait()
    assert left_behind(r.mark, set(os.listdir("/dev/shm"))) == (set(), set()) and r.text().count("stopped: ") == 1
    assert checkpoint(r)["version"] > 0


def test_a_killed_rank_ends_all_and_torchrun_starts_them_again(start):
    """Each rank; once before the ranks have found each other, and the next one does not find the dead."""
    lost_and_late = """
join = join_ranks


def join_ranks():
    rank, attempt = (os.environ[name] for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    if (rank, attempt) == ("1", "0"):
        time.sleep(2)
        os._exit(7)
    if (rank, attempt) == ("0", "1"):
        time.sleep(4)
    join()
"""
    r = start("--save-every-sec", "0.5", launcher=(*TWO, "--max-restarts", "2"), edits=[replacing(lost_and_late)])
    before, cores = rank_pids(r), os.sched_getaffinity(0)
    shares = [os.sched_getaffinity(pid) for pid in before]
    assert {len(share) for share in shares} == {max(1, len(cores) // 2)} and set.union(*shares) <= cores
    assert len(cores) == 1 or not set.intersection(*shares), "cores of their own"
    r.wait_for(lambda: list((r.folder / "e" / "checkpoints").glob("checkpoint_*")), 30, "a checkpoint")
    step = checkpoint(r)["global_step"]
    os.kill(before[0], signal.SIGKILL)
    r.wait_for(lambda: "resuming" in r.text() and checkpoint(r)["global_step"] > step, 60, "the restart")
    assert not set(before) & set(rank_pids(r))
    os.kill(rank_pids(r)[1], signal.SIGKILL)
    assert r.wait(30) == 1
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9", r.text().split("Root Cause")[1]), "the reason is last"


def test_an_actor_that_one_rank_cannot_keep_alive_ends_all_with_a_checkpoint(run, tmp_path):
    line = "        self.count += 1\n"
    broken = f"{line}        if self.episode > 20 and os.environ['RANK'] == '1':\n            raise ValueError('no such monster')\n"
    script = with_envs(tmp_path, "appo_broken", COUNTING.replace(line, broken), REPORTS, source=SCRIPT)
    r = run(*SMALL, script=script, launcher=TWO)
    assert r.wait(60) == 1
    assert "error: for the third time in a row, actor 0 died: ValueError: no such monster" in r.text() and checkpoint(r)["version"] > 0


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
        runs.append(
            Run(tmp_path / folder, *SMALL, *flags, script=SCRIPT, launcher=launcher, env=dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))
        )
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
    runs = two_machines(tmp_path, "--total-timesteps", "300")
    assert [r.wait(90) for r in runs] == [0, 0], runs[0].text() + runs[1].text()
    assert sum(r.text().count("2 ranks like this") for r in runs) == 1
    assert sorted(len(list((tmp_path / str(i)).glob("e/checkpoints/*"))) for i in range(2)) == [0, 1]
