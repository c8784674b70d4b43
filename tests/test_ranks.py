"""Several processes under `torchrun`: the same steps as one, and what happens when one of them is lost."""

import copy
import importlib
import json
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
from test_command_line import scalars

SCRIPT = ROOT / "appo_doom_multigpu.py"


def without_conflicts(merged: str) -> str:
    """Of those of `carry.py` the edit's own side. They are all in the docstring."""
    code = merged.split('"""\n\nimport signal')[0].count("\n")
    assert all(line < code for line in carry.conflicts(merged))
    return re.sub(r"<{7}.*\n((?:.*\n)*?)\|{7}(?:.*\n)*?>{7}.*\n", r"\1", merged)


def with_ranks(name: str, folder: Path) -> Path:
    """A file with what appo_doom_multigpu.py adds to appo_doom.py, as `carry.py --add` makes it, without a conflict in code."""
    text, base, ranks = ((ROOT / f"{file}.py").read_text() for file in (name, "appo_doom", SCRIPT.stem))
    path = folder / f"{name}_multigpu.py"
    path.write_text(without_conflicts(carry.merge(text, base, ranks, (name, "appo_doom", SCRIPT.stem), "")))
    return path


def learner_of(appo, batch_size: int = 64):
    """Of eight environments with an image and numbers, or with numbers alone; nothing is replayed."""
    rows = "num_envs" if hasattr(appo.Args, "num_envs") else "num_envs_per_worker"
    args = appo.Args(num_workers=0, rollout=8, batch_size=batch_size, num_epochs=2, device="cpu", rnn_type="gru", hidden_size=16,
                     learning_rate=0.02, anneal_lr=True, total_timesteps=500, **{rows: 8})  # fmt: skip
    for flag, value in dict(precision="float32", replay_share=0.0).items():
        if hasattr(args, flag):
            setattr(args, flag, value)
    box = appo.gym.spaces.Box
    if hasattr(appo, "MujocoEnvs"):
        spaces = appo.Spaces(dict(obs=box(-np.inf, np.inf, (5,)), vector=box(-np.inf, np.inf, (4,))), 2)
    else:
        spaces = appo.Spaces(dict(obs=box(0, 255, (36, 36, 3), np.uint8), vector=box(-np.inf, np.inf, (4,))), (3, 4))
    torch.manual_seed(0)
    agent, device = appo.Agent(spaces, args), torch.device("cpu")
    inference = appo.Inference(args, spaces, agent, device)
    learner = appo.Learner(*([args, agent, inference] if hasattr(inference, "publish") else [args, inference]))
    learner.optimizer = torch.optim.SGD(agent.parameters(), 0.02)  # Adam makes large steps of rounding errors in tiny gradients
    return learner


def fill(r, seed: int) -> None:
    """All slots, with what might have been acted."""
    rng = np.random.default_rng(seed)
    r.obs["obs"].copy_(torch.from_numpy(rng.integers(0, 256, r.obs["obs"].shape, np.uint8)))
    r.obs["vector"].copy_(torch.from_numpy(rng.normal(0, 1, r.obs["vector"].shape)))
    for name in ("rnn_state", "values", "logits"):  # of which few files have all
        if hasattr(r, name):
            getattr(r, name).copy_(torch.from_numpy(rng.normal(0, 0.5, getattr(r, name).shape)))
    r.actions.copy_(torch.from_numpy(rng.integers(0, 3, r.actions.shape)))
    r.logprobs.copy_(torch.from_numpy(rng.uniform(-4, -1, r.logprobs.shape)))
    r.first[:] = rng.random(r.first.shape) < 0.15
    r.terminated[:] = rng.random(r.terminated.shape) < 0.1
    r.rewards[:] = rng.normal(1, 1, r.rewards.shape)


def learn(appo, slots: list[int]) -> dict:
    """What comes of six iterations, each of two epochs of two steps, from `slots` of eight: all ranks together have each of them once."""
    learner = learner_of(appo, batch_size=len(slots) * 4)
    r, metrics, start = learner.inference.rollouts, [], copy.deepcopy(learner.agent.state_dict())

    def iterate(seed: int, without: list = (), cut: list = (), change=lambda: None) -> dict:
        """without: slots that are too old (in the base: all steps only reset); cut: whose steps only reset."""
        fill(r, seed)
        r.versions[:] = learner.inference.version - np.arange(64).reshape(8, 8) % 7
        if hasattr(learner.args, "max_policy_lag"):
            r.versions[:, list(without)] = learner.inference.version - learner.args.max_policy_lag
        else:
            r.first[1:, list(without)] = True
        r.first[1:, list(cut)] = True
        change()
        return learner.iterate([slice(slot, slot + 1) for slot in slots])

    def spoil(field, value: float) -> None:
        """In the last rank's last slot, where nothing ends; always, as statistics see every fourth step."""
        field[:, 7], r.first[:, 7] = value, False

    with mock.patch("torch.randperm", torch.arange):  # in the order of `slots`
        # In doom the first only initialises statistics. Then the last rank has no usable sample, nobody has one for the second step, nobody has one
        for seed, without in enumerate(([], [], [6, 7], [2, 3, 5, 7], list(range(8)))):
            metrics.append(iterate(seed, without))
        metrics.append(iterate(5, cut=[4, 5]))  # the second rank has none that is valid
        counts, weights = (learner.global_step, learner.inference.version), copy.deepcopy(learner.agent.state_dict())
        assert max((weights[key] - start[key]).abs().max() for key in weights if key.endswith("weight")) > 1e-3
        if "vector" in learner.agent.normalizers:  # else only images are seen, which are whole numbers
            with pytest.raises(FloatingPointError, match="an observation (or a return )?is not finite"):
                iterate(6, change=lambda: spoil(r.obs["vector"], torch.inf))
        with pytest.raises(FloatingPointError, match="the loss"):
            iterate(7, change=lambda: spoil(r.rewards, np.nan))
    assert all(x.isfinite().all() for x in learner.agent.state_dict().values())
    return dict(weights=weights, metrics=metrics, counts=counts)


def leave(appo) -> None:
    """The last rank ends the run, for all of them, by a wish or an error."""
    last = dist.get_rank() == dist.get_world_size() - 1
    for end in (None, KeyboardInterrupt(), appo.UserError()):
        learner = learner_of(appo)
        learner.inference.full.put(slice(0, 8))
        if end is None:
            assert learner.collect() == [slice(0, 8)]
        else:
            if last:
                learner.inference.end_with(end)
            with pytest.raises(type(end) if last else KeyboardInterrupt):
                learner.collect()
        assert learner.inference.waited["ranks"] > 0


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
    """And the process that they are compared with has the file without ranks."""
    parts = [[0, 1, 2, 3], [4, 5], [6, 7]]
    paths = {name: with_ranks(name, tmp_path) for name in ("appo_gym", "appo_mujoco", "appo_doom", "appo_atari", "appo_atari_replay")}
    assert carry.ID.sub("", paths["appo_doom"].read_text()) == carry.ID.sub("", SCRIPT.read_text())
    mp.get_context("forkserver").set_forkserver_preload(["torch", "gymnasium", "tyro", "pytest"])
    mp.start_processes(one_rank, (list(paths.values()), parts), nprocs=len(parts), start_method="forkserver")
    for name, path in paths.items():
        ranks = [torch.load(path.with_suffix(f".{rank}"), weights_only=False) for rank in range(len(parts))]
        compare(ranks, learn(importlib.import_module(name), [0, 1, 4, 6, 2, 3, 5, 7]), name)


def compare(ranks: list[dict], one: dict, name: str) -> None:
    """pytest shows the name where they differ."""
    assert one["counts"][1] == 24 and 200 < one["counts"][0] < 384
    assert one["metrics"][1]["charts/learning_rate"] > one["metrics"][5]["charts/learning_rate"] > 0
    for rank in ranks:
        assert all(torch.equal(x, ranks[0]["weights"][key]) for key, x in rank["weights"].items()), "to the bit, statistics, too"
        torch.testing.assert_close(rank["weights"], one["weights"], rtol=1e-5, atol=5e-5)
        assert rank["counts"] == one["counts"]
        for theirs, metrics in zip(rank["metrics"], one["metrics"], strict=True):
            assert theirs.keys() == metrics.keys()
            for key in metrics:
                if not key.startswith("lag/"):  # which are each rank's own
                    assert float(theirs[key]) == pytest.approx(float(metrics[key]), rel=1e-3, abs=1e-4), key
    assert max(rank["metrics"][5]["lag/max"] for rank in ranks) == one["metrics"][5]["lag/max"]


# ---- as a user starts it

TORCHRUN = ("-m", "torch.distributed.run")
TWO = (*TORCHRUN, "--standalone", "--nproc-per-node", "2")
SMALL = ("--experiment", "e", "--num-workers", "1", "--num-envs-per-worker", "4", "--rollout", "8", "--batch-size", "32", "--hidden-size",
         "32", "--device", "cpu", "--precision", "float32", "--total-timesteps", "1000000")  # fmt: skip


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


def children(process: int) -> list[int]:
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) == process:
                found.append(pid)
        except OSError:
            pass
    return found


def checkpoint(r) -> dict:
    return torch.load(max((r.folder / "e" / "checkpoints").glob("checkpoint_*")), weights_only=True)


def test_ranks_merge_onto_deepmind_lab(tmp_path):
    """Though each rank's start would remove the engines' folders of the others: not something that the README offers."""
    compile(with_ranks("appo_dmlab", tmp_path).read_text(), "appo_dmlab_multigpu.py", "exec")


def test_two_ranks_train_and_one_goes_on(run, tmp_path):
    """Both have environments of their own; that one is slower is said; what they have learned goes on in one process."""
    line = "        if seed is not None:\n"
    note = f"            open({str(tmp_path / 'seeds')!r}, 'a').write(os.environ['RANK'] + f' {{seed}}\\n')\n"
    slow = ("        self.count += 1\n", "        self.count += 1\n        __import__('time').sleep(0.02 * int(os.environ['RANK']))\n")
    script = with_envs(tmp_path, "appo_ranks", COUNTING.replace(*slow).replace(line, line + note), REPORTS, source=SCRIPT)
    r = run(*SMALL, "--total-timesteps", "500", script=script, launcher=TWO)
    assert r.wait(90) == 0, r.text()
    assert r.text().count("done: ") == r.text().count("basic: 1 workers on 1 cores, 4 environments") == 1
    cfg = json.loads((tmp_path / "e" / "cfg.json").read_text())
    assert cfg["file"] == str(script) and cfg["args"]["seed"] == 1, "the first rank's own"
    seeds = [line.split() for line in (tmp_path / "seeds").read_text().splitlines()]
    first, second = ({seed for rank, seed in seeds if rank == which} for which in "01")
    assert len(first) == len(second) == 4 and not first & second
    found = scalars(tmp_path / "e")
    assert 0.2 < np.median([event.value for event in found["stats/ranks_wait"]]) < 1
    assert 500 <= checkpoint(r)["global_step"] < 700 and len(list((tmp_path / "e").glob("events*"))) == 1

    single = run(*SMALL, "--total-timesteps", "900", "--num-workers", "2", script=script, env={"RANK": "0"})
    assert single.wait(60) == 0, single.text()
    assert single.text().count("resuming") == 1 and checkpoint(r)["global_step"] >= 900


def test_what_ends_the_first_rank_ends_the_others_in_silence(run):
    """Before it knows its flags, in each attempt."""
    r = run("--device", "cpu", script=SCRIPT, launcher=(*TWO, "--max-restarts", "1"))
    assert r.wait(60) == 1, r.text()
    sentence = "error: torchrun --max-restarts needs --experiment, the name of the run to resume"
    assert r.text().count(sentence) == 2, r.text()
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
    (("--rollout", "0"), 2, "error: --rollout 0 is out of range: at least 1\n"),
    (("--device", "gpu"), 2, "error: --device gpu: "),
])  # fmt: skip
def test_only_the_first_rank_speaks(tmp_path, flags, code, sentence):
    mp.get_context("forkserver").set_forkserver_preload(["torch", "gymnasium", "tyro", "pytest"])
    mp.start_processes(end_early, (tmp_path, flags, code), nprocs=2, start_method="forkserver")
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert sentence in first and second == ""


@pytest.fixture
def start(run, tmp_path):
    def start(*flags: str, launcher: tuple = TWO, edits=(), what: str = "frames/s"):
        script = edited(tmp_path, f"appo_ranks_{len(list(tmp_path.iterdir()))}", REPORTS, *edits, source=SCRIPT)
        r = run(*SMALL, *flags, script=script, launcher=launcher)
        r.wait_for(lambda: what in r.text(), 150, what)
        return r

    return start


def test_an_actor_that_is_killed_and_a_signal_to_one_rank(start):
    """Another actor takes the place of the one; all leave together after the other. Rank 0's own file log.txt has what the others say."""
    r = start()
    log = r.folder / "e" / "log.txt"
    last = rank_pids(r)[1]
    (server,) = (pid for pid in children(last) if len(children(pid)) == 1)
    (actor,) = children(server)
    os.kill(actor, signal.SIGKILL)
    r.wait_for(lambda: "actor 0: died (exit code -9); starting another" in log.read_text(), 60, "the next actor")
    lines = log.read_text().count("frames/s")
    r.wait_for(lambda: log.read_text().count("frames/s") > lines + 1, 60, "reports")
    os.kill(last, signal.SIGINT)
    assert r.wait(60) == 0, r.text()
    assert r.text().count("stopped: ") == 1 and log.read_text().count("stopped: ") == 2 and checkpoint(r)["version"] > 0
    assert "starting another" not in r.text() and len(list((r.folder / "e" / "checkpoints").glob("checkpoint_*"))) == 1


def test_clocks_that_differ(start):
    """The last rank's time is over first, after some steps: that of all is."""
    clock = """
of_the_file = Learner.iterate


def iterate(self, blocks):
    if rank_of_this() and self.inference.version > 5:
        time.monotonic = lambda: 1e9
    return of_the_file(self, blocks)


Learner.iterate = iterate
"""
    r = start("--train-for-seconds", "600", edits=[replacing(clock)], what="a new run in")
    assert r.wait(60) == 0, r.text()
    assert r.text().count("stopped: ") == 1 and checkpoint(r)["version"] >= 6


def test_a_signal_to_the_launcher_stops_all_ranks_and_nothing_starts_again(start):
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
    text = r.text()
    assert re.search(r"error: actor 0: Traceback (.*\n)+?ValueError: no such monster\n", text)
    assert text.count("stopped: ") == 1 and checkpoint(r)["version"] > 0


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
    step = max(int(path.stem.split("_")[1]) for path in saved.glob("checkpoint_*"))
    runs[0].wait_for(lambda: max(int(path.stem.split("_")[1]) for path in saved.glob("checkpoint_*")) > step, 60, "a step")
    os.kill(rank_pids(runs[0])[0], signal.SIGINT)
    assert [r.wait(60) for r in runs] == [0, 0], runs[0].text() + runs[1].text()


def test_two_machines(tmp_path):
    """They share no folder."""
    runs = two_machines(tmp_path, "--total-timesteps", "300")
    assert [r.wait(90) for r in runs] == [0, 0], runs[0].text() + runs[1].text()
    assert sum(r.text().count("done: ") for r in runs) == 1
    assert sorted(len(list((tmp_path / str(i)).glob("e/checkpoints/*"))) for i in range(2)) == [0, 1]
