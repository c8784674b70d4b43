"""The CUDA branch of the files on a simulated device (simulated_cuda.py): what is used is there already and still, and the results are those of the
CPU branch. To show that a fault would be seen, the same is played with copies of the file from which one wait was taken out.

Every scenario is played in a process of its own, a child of `python test_simulated_cuda.py`, which has imported what takes long.
"""

import contextlib
import gc
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from edited import ROOT, edited, replacing

VARIANTS = ("appo_gym.py", "appo_doom.py", "appo_doom_multigpu.py")
MORE = ("appo_mujoco.py", "appo_atari_replay.py")  # with device code of their own; what they cost is not bounded
SEVERAL = "appo_pbt_doom.py"  # policies
IMAGE = (44, 44, 3)
WORKERS, ROWS, ROLLOUT = 4, 16, 4

GYM, DOOM = VARIANTS[:2]
STORE = "            self.store_obs(*self.store(complete))\n"
HAND_OVER = "            wait_for(self.device)  # the learner uses another stream, and must find these blocks written\n"
ACTIONS = "actions.cpu().numpy()  # waits for the device: the lock must be held until then"
VERSIONS = "            self.rollouts.versions[t, slots] = self.version\n"
RETURN = "        self.inference.learner_pipe.send(blocks)  # LEARNING -> FREE"
FULL = "                self.full.put(self.filling.pop(group))"
REQUESTS = "        self.requests = [group for group in self.requests if group not in ready]\n"
REPLIES = """        for group in ready:
            worker = group // self.args.worker_num_splits
            self.heard[worker] = time.monotonic()
            with contextlib.suppress(ConnectionError):  # the actor died; `receive` will notice
                self.pipes[worker].send(group)
"""
PUBLISHED = {
    GYM: "            self.inference.version += 1\n            wait_for(self.device)\n",
    DOOM: "            self.version = version\n            wait_for(self.device)\n",
}
LEARNER_LOCK = {GYM: "        with self.inference.lock:\n", DOOM: "        with self.lock:\n            for pairs"}
ACT_LOCK = "        with self.lock:\n            actions = "
FINITE = "        loss, grad_norm = checked.tolist()\n"


def without(text: str, part: str) -> tuple[str, str]:
    return text, text.replace(part, "")


# what is wrong -> the kind of report, or the RuntimeError, that it gives, and the edits that make it so, in the words of each file
MUTANTS = {
    "blocks are handed over before they are written": ("race", lambda file: [(HAND_OVER, "")]),
    "the actions are waited for behind the lock": ("race", lambda file: [
        ("            self.mailbox.action[rows] = " + ACTIONS + "\n" + VERSIONS, VERSIONS + "        self.mailbox.action[rows] = actions.cpu().numpy()\n")]),
    "a version is published before it is made": ("race", lambda file: [without(PUBLISHED[file], "            wait_for(self.device)\n")]),
    "there is no lock": ("race", lambda file: [
        ("        self.lock = threading.Lock()", "        self.lock = contextlib.nullcontext()")]),
    "inference acts without the lock": ("race", lambda file: [
        (ACT_LOCK, ACT_LOCK.replace("self.lock", "contextlib.nullcontext()"))]),
    "the learner publishes without the lock": ("race", lambda file: [
        (LEARNER_LOCK[file], LEARNER_LOCK[file].replace("self.inference.lock", "contextlib.nullcontext()").replace("self.lock", "contextlib.nullcontext()"))]),
    "threads start while the default stream still works": ("race", lambda file: [
        ("    wait_for(device)  # everything above used the default stream", "    # everything above used the default stream")]),
    "the learner gives blocks back before it copies them": ("race", lambda file: [
        ("        for epoch in range(args.num_epochs):\n", "        self.inference.learner_pipe.send(blocks)\n        for epoch in range(args.num_epochs):\n"),
        (RETURN, "        # LEARNING -> FREE")]),
    "a block is handed over before the last observation": ("race", lambda file: [
        (STORE, "            filling = dict(self.filling)\n"
                "            for group in complete:\n                self.full.put(self.filling[group])\n" + STORE),
        (FULL, "                self.filling.pop(group)")]),
    "a reply before the actions are there": ("unfinished", lambda file: [
        (ACTIONS, 'actions.to("cpu", non_blocking=True).numpy()')]),
    "a reply before the mailbox is read": ("mailbox", lambda file: [
        ("        if ready:\n", replies(file) + "        if ready:\n"),
        (REQUESTS + replies(file), REQUESTS)]),
    "a reply without its actions": ("mailbox", lambda file: [
        (ACTIONS, "self.mailbox.action[rows]")]),
    "the host reads device memory": (".numpy() is not supported", lambda file: [(ACTIONS, "actions.numpy()")]),
    "indices that stay on the host": ("Expected all tensors to be on the same device", lambda file: [
        ("        indices = indices.to(self.device, non_blocking=True)\n", "")]),
}  # fmt: skip


def replies(file: str) -> str:
    if file == DOOM:
        return REPLIES
    return REPLIES.replace("            worker = group // self.args.worker_num_splits\n", "").replace("[worker]", "[group]")


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Plays a scenario below with the file at a path, and returns what came of it."""
    import torch

    if torch.__version__.partition("+")[0] != "2.13.0" or torch.backends.cuda.is_built():
        pytest.skip(f"the simulated device fits the insides of torch 2.13.0 for CPUs, this is {torch.__version__}")
    if not shutil.which("g++"):
        pytest.skip("no g++ to compile simulated_cuda_guard.cpp with")
    guard, home = tmp_path_factory.mktemp("guard") / "guard.so", Path(torch.__file__).parent
    subprocess.run(["g++", "-std=c++20", "-fPIC", "-shared", Path(__file__).with_name("simulated_cuda_guard.cpp"), "-o", guard, f"-I{home}/include",
                    f"-L{home}/lib", f"-Wl,-rpath,{home}/lib", "-lc10", "-ltorch_cpu"], check=True)  # fmt: skip
    with subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env=os.environ | dict(LD_PRELOAD=str(guard), OMP_NUM_THREADS="1")) as process:  # fmt: skip

        def ask(path: Path, scenario: str, *arguments) -> dict:
            print(json.dumps([str(path), scenario, *arguments]), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield ask


# How often, at most, in one call of a method the host waits for the device, and launches a kernel; what is not named never does. What a method's
# calls of other counted ones cost is theirs. A batch of actions costs one wait. An optimiser step waits for whether it is finite and for its version,
# and in the last epoch, here every second, for the number of valid samples and for whether their statistics are finite, of image, vector and, in the
# base, targets; in Doom also for the stretches between resets (two)
WAITS = dict(act=1, serve=1, gather=1, update=5.3)
LAUNCHES = dict(act=80, serve=8, gather=13, update=420, iterate=2)
DOOMS_WAITS = WAITS | dict(publish=1)
DOOMS_LAUNCHES = LAUNCHES | dict(update=480, publish=2)  # a launch for each type
MOST = {
    GYM: (WAITS, LAUNCHES, dict(update=2)),
    DOOM: (DOOMS_WAITS, DOOMS_LAUNCHES, dict(publish=12)),
    "appo_doom_multigpu.py": (DOOMS_WAITS, DOOMS_LAUNCHES, dict(publish=12)),
}
def assert_costs(variant: str, costs: dict) -> None:
    """Also how many kernels the learner does not know the end of when it takes the lock: what inference might have to wait for."""
    for what, most in zip(("synchronisations", "launches", "under way at the lock"), MOST[variant]):
        found = {name.split(":")[0]: n for name, n in costs.items() if name.endswith(what)}
        if what == "under way at the lock":
            del found["act"]
            assert found, "they are counted"
        assert {name: n for name, n in found.items() if n > most.get(name, 0)} == {}, costs
    assert costs["act: synchronisations"] == 1 and costs["update: launches"] > 100, "they are counted"


@pytest.mark.parametrize("variant, graphs", [*((variant, False) for variant in (*VARIANTS, *MORE, SEVERAL)),
                                             *((variant, True) for variant in (GYM, DOOM, SEVERAL))])  # fmt: skip
def test_order(play, variant, graphs):
    answer = play(ROOT / variant, "order", False, graphs)
    assert (answer["error"], answer["reports"]) == ("", [])
    if variant in MOST and not graphs:
        assert_costs(variant, answer["costs"])
    assert answer["steps"] >= 450 and (answer["deaths"] > 0) == (variant not in (GYM, "appo_mujoco.py"))


# In one call of a method that plays what was recorded, of all groups' rows with an image and a vector: launches, copies from and to the host among
# them, and waits. An update of the last epoch (`update`) also has the statistics of both parts and, in the base, of the targets
PLAYED = {
    GYM: dict(act=(5, 1), gather=(11, 1), update=(97, 8), middle=15),
    DOOM: dict(act=(5, 1), gather=(11, 1), update=(77, 5), middle=16, publish=(1, 1)),
}


@pytest.mark.parametrize("variant", PLAYED)
def test_what_one_call_costs(play, variant):
    eager, played = (play(ROOT / variant, "asked", graphs) for graphs in (False, True))
    assert (eager["error"], played["error"], eager["reports"], played["reports"]) == ("", "", [], [])
    for name, bound in PLAYED[variant].items():
        if name == "middle":
            assert 0 < played[name] <= bound and eager[name] > 300
        else:
            found = tuple(played[f"{name} {what}"] for what in ("launches", "synchronisations"))
            assert all(n <= most for n, most in zip(found, bound)), (name, found)
    assert eager["act launches"] > 50


STRAY = """
usual = {0}


def {0}(*arguments):
    result = usual(*arguments)
    {1}
    return result
"""


@pytest.mark.parametrize("edit", [
    replacing(STRAY.format("sample_actions", "result.sum().item()")),
    replacing(STRAY.format("appo_loss", "result[0].isnan().any().item()")),
    replacing(STRAY.format("appo_loss", "[result[0] + 1 for _ in range(100)]")),
])  # fmt: skip
def test_what_costs_more_is_found(play, tmp_path, edit):
    """A host that waits once more, while it acts or learns; a hundred more kernels."""
    answer = play(edited(tmp_path, "appo_stray", edit, source=ROOT / GYM), "order", False, False)
    assert (answer["error"], answer["reports"]) == ("", [])
    with pytest.raises(AssertionError):
        assert_costs(GYM, answer["costs"])


@pytest.mark.parametrize("variant", VARIANTS[:2])
def test_without_the_check_of_the_loss_inference_waits_for_a_backward_pass(play, tmp_path, variant):
    """What is in order without it, because the learner waits for its version, too."""
    edit = (FINITE, "        loss = grad_norm = 1.0\n")
    answer = play(edited(tmp_path, "appo_unchecked", edit, source=ROOT / variant), "order", False, False)
    assert (answer["error"], answer["reports"]) == ("", [])
    learner = "publish" if variant == DOOM else "update"
    assert answer["costs"][f"{learner}: under way at the lock"] > 50
    with pytest.raises(AssertionError):
        assert_costs(variant, answer["costs"])


NETWORKS = [(GYM, "gru", 3, (3, 2)), (GYM, "none", 3, (4,)), (DOOM, "gru", 0, (9,)), (DOOM, "lstm", 23, (3, 3, 2)),
            (VARIANTS[2], "gru", 3, (3, 2)), (MORE[0], "gru", 3, ()), (MORE[1], "gru", 3, (3, 2))]  # fmt: skip


@pytest.mark.parametrize("variant, rnn, vector, heads, graphs", [*((*NETWORKS[i], False) for i in (0, 3)), *((*network, True) for network in NETWORKS)])
def test_agreement(play, variant, rnn, vector, heads, graphs):
    answer = play(ROOT / variant, "agreement", rnn, vector, heads, graphs)
    assert (answer["error"], answer["reports"]) == ("", [])
    assert answer["updates"] >= 3


ALSO_WITH_GRAPHS = ("blocks are handed over before they are written", "the actions are waited for behind the lock", "there is no lock",
                    "a version is published before it is made")  # fmt: skip


@pytest.mark.parametrize("variant, mutant, graphs", [*((variant, mutant, False) for mutant in MUTANTS for variant in VARIANTS[:2]),
                                                     *((GYM, mutant, True) for mutant in ALSO_WITH_GRAPHS)])  # fmt: skip
def test_a_missing_wait_is_found(play, tmp_path, mutant, variant, graphs):
    kind, edits = MUTANTS[mutant]
    mutated = edited(tmp_path, "appo_mutant", *edits(variant), source=ROOT / variant)
    for _ in range(3):  # a race is met where one of two threads is quick, on a busy machine not every time
        answer = play(mutated, "order", True, graphs)
        if kind in {kind for kind, *_ in answer["reports"]} or f"RuntimeError: {kind}" in answer["error"]:
            return
    raise AssertionError(answer)


LOSS_IS = {
    GYM: "        loss, targets, metrics = appo_loss(self.args, self.agent, SimpleNamespace(**batch))\n",
    DOOM: "        loss, metrics = appo_loss(self.args, self.agent, SimpleNamespace(**batch))\n",
}
LAGS = "        batch.lags = self.version - batch.versions\n"
OBS = "        obs, (rows, t, slots, first) = self.store_obs(obs, indices)\n"
CAPTURING = "cannot be recorded as a CUDA graph (use --no-cuda-graphs): CUDA error: operation not permitted when stream is capturing"
CHANGES = "cannot be recorded as a CUDA graph (use --no-cuda-graphs): it uses a number that changes"
WRONG = ("not close", "not finite", "freed")
# What is wrong with what is recorded -> the scenario, what reports or the error say of it, and the edits
UNRECORDABLE = {
    "a number of the host's that changes": ("agreement", CHANGES, lambda file: [
        (LOSS_IS[file], LOSS_IS[file] + "        loss = loss * (1 + self.inference.version)\n")]),
    "lags of the host's": ("agreement", CHANGES, lambda file: [
        (LAGS, ""), (LOSS_IS[file], '        batch["lags"] = self.version - batch["versions"]\n' + LOSS_IS[file])]),
    "inputs that are not copied": ("agreement", WRONG, lambda file: [
        ("                buffer.copy_(x, non_blocking=True)\n", "                pass\n")]),
    "inputs that are copied elsewhere": ("agreement", WRONG, lambda file: [
        ("zip(tree_leaves(recording.inputs), tensors)", "zip(map(torch.clone, tree_leaves(recording.inputs)), tensors)")]),
    "results that are kept": ("agreement", WRONG, lambda file: [
        ("                metrics = self.update(", "                metrics = locals().get('metrics') or self.update("),
        ("self.gather(batch), last_epoch=epoch == args.num_epochs - 1)\n",
         "self.gather(batch), last_epoch=epoch == args.num_epochs - 1)\n                self.update(self.gather(batch), last_epoch=False)\n")]),
    "gradients of another recording": ("agreement", WRONG, lambda file: [
        ("zero_grad(set_to_none=not self.args.cuda_graphs)", "zero_grad()")]),
    "gradients that add up": ("agreement", WRONG, lambda file: [
        ("        self.optimizer.zero_grad(", "        torch.cuda.is_current_stream_capturing() or self.optimizer.zero_grad(")]),
    "statistics that are not changed in place": ("agreement", WRONG, lambda file: [
        ("        self.std.copy_((var + 1e-5).sqrt())\n", "        self.std = (var + 1e-5).sqrt()\n") if file == GYM else
        ("        self.scale.copy_(1 / (self.unit * std))\n", "        self.scale = 1 / (self.unit * std)\n")]),
    "a wait": ("agreement", CAPTURING, lambda file: [(OBS, OBS + "        t.max().item()\n")]),
    "a wait in the loss": ("agreement", CAPTURING, lambda file: [
        ("    discounts = args.gamma * ~batch.terminated\n", "    discounts = args.gamma * ~batch.terminated\n    assert ratio.isfinite().all()\n")]),
    "a mask as an index": ("agreement", CAPTURING, lambda file: [
        (OBS, OBS + "        self.state[rows[first.bool()]] = 0.0\n")]),
    "a copy from the host": ("agreement", CAPTURING, lambda file: [
        (OBS, OBS + "        first = torch.from_numpy(self.mailbox.first[: len(rows)]).to(self.device, non_blocking=True)\n")]),
    "random numbers while the other thread records": ("order", "graph", lambda file: [
        ("RECORDING = threading.Lock()", "RECORDING = contextlib.nullcontext()")]),
    "errors of the other thread's": ("order", "graph", lambda file: [(', "thread_local")', ")")]),
    "the core asks where episodes begin": ("agreement", CAPTURING, lambda file: [
        ("if len(first) > 1 and not self.recorded:", "if len(first) > 1:")]),
}  # fmt: skip
ONLY_DOOM = ("lags of the host's", "the core asks where episodes begin")


@pytest.mark.parametrize("mutant", UNRECORDABLE)
def test_what_cannot_be_recorded_is_found(play, tmp_path, mutant):
    variant = DOOM if mutant in ONLY_DOOM else GYM
    scenario, signs, edits = UNRECORDABLE[mutant]
    mutated = edited(tmp_path, "appo_mutant", *edits(variant), source=ROOT / variant)
    for _ in range(3):
        answer = play(mutated, scenario, *((True, True, 32) if scenario == "order" else ("gru", 3, (3, 2), True)))
        kinds = {kind for kind, *_ in answer["reports"]}
        if any(sign in kinds or sign in answer["error"] for sign in ([signs] if isinstance(signs, str) else signs)):
            return
    raise AssertionError(answer)


# --- what follows is for the process with the simulated device


def actor_class(appo, mortal: bool):
    import simulated_cuda as cuda

    class Actor(threading.Thread):
        """In the place of an actor's process. Random numbers come in the place of games."""

        all = []
        exitcode = -signal.SIGKILL
        stopping = False  # what is asked for is answered, but nothing more is asked for

        def __init__(self, target, args, daemon):
            super().__init__(daemon=daemon)
            self.args, self.worker, *self.their_rows, seed, self.mailbox, pipe = args
            self.arrays, self.rng = self.mailbox.share(), np.random.default_rng([seed, len(self.all)])
            splits = getattr(self.args, "worker_num_splits", 1)
            self.groups = range(self.worker * splits, self.worker * splits + splits)
            self.idle = False
            self.pipe, pipe.other.sending = pipe.duplicate(), self.replied
            self.all.append(self)
            for group in self.groups:
                self.let_go(group)

        @property
        def pid(self):
            raise ProcessLookupError  # there is no process to be killed

        def kill(self) -> None:
            pass

        def rows(self, group) -> list[slice]:
            """Of each policy."""
            if self.their_rows:
                return [slice(own[0], own[-1] + 1) for own in np.sort(self.their_rows[0][group - self.groups[0]]).reshape(self.args.num_policies, -1)]
            return [appo.slice_of(self.args, group)]

        def let_go(self, group) -> None:
            """From now on the rows are the actor's. A loss with one of these numbers in it ends the run."""
            for rows in self.rows(group):
                for name, part in self.mailbox.obs.items():
                    cuda.give_away(part[rows])
                    self.arrays.obs[name][rows] = np.nan if part.is_floating_point() else 0
                self.arrays.reward[rows] = np.nan

        def replied(self, group) -> None:
            """In the inference thread, before a reply is sent."""
            if any((self.arrays.action[rows] == -1).any() for rows in self.rows(group)):
                cuda.report("mailbox", "a reply without actions")
            self.let_go(group)

        def ask(self, group) -> None:
            for rows in self.rows(group):
                write_rows(self.arrays, rows, self.rng)
                self.arrays.action[rows] = -1
                for part in self.mailbox.obs.values():
                    cuda.take_back(part[rows])
            self.pipe.send(group)

        def run(self) -> None:
            try:
                for group in self.groups:
                    self.ask(group)
                answers = 0
                while True:
                    group = self.pipe.recv()
                    answers += 1
                    self.idle = self.stopping and answers >= len(self.groups)
                    if self.stopping:
                        continue
                    if mortal and self.rng.random() < 0.03:
                        return
                    self.ask(group)
            except (EOFError, OSError):
                pass
            finally:
                self.pipe.close()

    return Actor


def order(appo, until_report: bool, graphs: bool, rollout: int = ROLLOUT) -> dict:
    """The real `train`, with its two threads."""
    import simulated_cuda as cuda

    Actor = actor_class(appo, hasattr(appo, "SHORT_LIFE"))
    cuda.install(appo, Actor)

    class Rollouts(appo.Rollouts):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            for field in cuda.leaves(list(vars(self).values())):
                if isinstance(field, cuda.CudaTensor):
                    cuda.divide(field)

    collects = appo.Learner if hasattr(appo.Learner, "collect") else appo
    init, collect, close = appo.Inference.__init__, collects.collect, appo.Reporter.close

    def divided(self, *arguments):
        init(self, *arguments)
        if hasattr(self, "features"):  # as fields of Rollouts
            cuda.divide(self.features)

    def collect_until_report(self):
        if until_report and cuda.reports:
            raise KeyboardInterrupt
        return collect(self)

    def close_when_quiet(self):
        """So the last that inference has done is to act."""
        Actor.stopping, deadline = True, time.monotonic() + 2
        while time.monotonic() < deadline and not all(actor.idle for actor in Actor.all if actor.is_alive()):
            time.sleep(0.01)
        close(self)

    appo.Rollouts, collects.collect, appo.Reporter.close = Rollouts, collect_until_report, close_when_quiet
    if hasattr(appo, "PolicyInference"):  # those of one device learn in turn, here in this thread
        appo.concurrent = SimpleNamespace(futures=SimpleNamespace(ThreadPoolExecutor=Now))
    appo.Inference.__init__ = divided
    appo.spaces_of = lambda args: make_spaces(appo, 3, (3, 2))
    appo.handle_signals = lambda inference: None
    for cls, name in ((appo.Inference, "serve"), (appo.Inference, "act"), (appo.Learner, "iterate"), (appo.Learner, "gather"),
                      (appo.Learner, "update"), (appo.Inference, "publish")):  # fmt: skip
        if hasattr(cls, name):
            cuda.count(cls, name)
    if hasattr(appo, "SHORT_LIFE"):
        appo.SHORT_LIFE = 0  # no death ends the run
    # One batch an iteration: the first is of all blocks, also the one that was FULL last. Later the lock has told the learner what was written meanwhile
    args = sized(appo, 1 if until_report else 2, device="cuda", precision="bfloat16", rnn_type="gru", total_timesteps=300, cuda_graphs=graphs,
                 rollout=rollout)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, cuda.Device():
        args.train_dir, args.experiment = folder, "it"
        appo.train(args, Path(folder, "it"))
        deaths = len(Actor.all) - WORKERS
        steps = args.total_timesteps
        if not until_report:  # resumed, and with blocks that are free only after the last step
            Actor.all, Actor.stopping = [], False
            appo.train(replace(args, total_timesteps=450, sync=True), Path(folder, "it"))
            content = appo.read_checkpoint(Path(folder, "it"))
            steps = np.mean([own["global_step"] for own in content.get("policies", [content])])
    return dict(deaths=deaths, steps=steps)


class Now:
    """In the place of a ThreadPoolExecutor."""

    def __init__(self, threads: int, initializer, initargs: tuple):
        self.stays = initializer, initializer(*initargs)

    def submit(self, function, *arguments):
        result = function(*arguments)
        return SimpleNamespace(result=lambda: result, exception=lambda: None)


def make_spaces(appo, vector: int, heads: tuple[int, ...]):
    """An image, and a vector of that length or none."""
    Box = appo.gym.spaces.Box
    obs = dict(obs=Box(0, 255, IMAGE, np.uint8))
    if vector:
        obs["vector"] = Box(-np.inf, np.inf, (vector,), np.float32)
    if hasattr(appo, "MujocoEnvs"):
        return appo.Spaces(dict(vector=obs["vector"]), 2)
    return appo.Spaces(obs, tuple(heads))


def sized(appo, batches: int, **settings):
    """An iteration is of as many samples as all rows have in one rollout."""
    if not hasattr(appo.Args, "cuda_graphs"):
        del settings["cuda_graphs"]
    rollout = settings.setdefault("rollout", ROLLOUT)
    settings |= dict(num_workers=WORKERS, batch_size=ROWS * rollout // batches, num_epochs=2, hidden_size=16)
    if hasattr(appo.Args, "replay_share"):
        settings |= dict(batch_size=2 * settings["batch_size"], replay="elite", replay_rollouts=2 * ROWS)
    if hasattr(appo.Args, "worker_num_splits"):
        return appo.Args(num_envs_per_worker=ROWS // WORKERS, worker_num_splits=2, num_batches_per_epoch=batches, **settings)
    del settings["precision"]
    return appo.Args(num_envs=ROWS, **settings)


def built(appo, device: str, spaces, **settings):
    """Inference and learner, without threads, and how many blocks an iteration takes."""
    import torch

    torch.manual_seed(0)
    args = sized(appo, device=device, precision="float32", **settings)
    args.replay = "uniform"  # which are nearest is a matter of rounding
    agent = appo.Agent(spaces, args).to(device)
    inference = appo.Inference(args, spaces, agent, torch.device(device))
    own_copy = hasattr(inference, "publish")
    learner = appo.Learner(args, *([agent] if own_copy else []), inference)
    appo.wait_for(inference.device)
    return inference, learner, appo.blocks_per_iteration(args) if own_copy else WORKERS


def asked(appo, graphs: bool) -> dict:
    """What the host asks of the device in one call, of two groups with an image and a vector, and of a batch, for the seventh time."""
    import simulated_cuda as cuda
    import torch

    cuda.install(appo, None)
    for cls, name in ((appo.Inference, "act"), (appo.Learner, "gather"), (appo.Learner, "update"), (appo.Inference, "publish")):
        if hasattr(cls, name):
            cuda.count(cls, name)
    rng = np.random.default_rng(0)
    with cuda.Device():
        inference, learner, _ = built(appo, "cuda", make_spaces(appo, 3, (3, 2)), batches=2, rnn_type="gru", cuda_graphs=graphs)
        inference.version = 1  # the first update of all makes no step
        with appo.own_stream(inference.device):
            for i in range(7):
                slots = np.arange(appo.slice_of(learner.args, 1).stop)
                for t in range(ROLLOUT + 1):
                    for one in (0, 1):
                        write_rows(inference.mailbox, appo.slice_of(learner.args, one), rng)
                        inference.t[one], inference.filling[one] = t, appo.slice_of(learner.args, one)
                    with torch.inference_mode():
                        inference.act([0, 1]) if t < ROLLOUT else inference.store_obs(*inference.store([0, 1]))
                    if i < 6 or t < ROLLOUT - 1:
                        cuda.counts.clear()
                learner.update(learner.gather(slots), last_epoch=i != 5)
                if i == 5:
                    middle = cuda.counts["update", "launches"]
        return dict(middle=middle, **{f"{phase} {what}": n for (phase, what), n in cuda.counts.items() if what != "calls"})


def agreement(appo, rnn: str, vector: int, heads: list[int], graphs: bool) -> dict:
    """Inference and learner in one thread, with the same mailbox and seed on the CPU and on the device. With graphs batches are of two sizes."""
    import simulated_cuda as cuda
    import torch

    cuda.install(appo, None)

    def run(kind: str) -> dict:
        torch.manual_seed(0)
        rng, device = np.random.default_rng(0), torch.device(kind)
        spaces = make_spaces(appo, vector, heads)
        args = sized(appo, 3 if graphs else 2, device=kind, precision="float32", rnn_type=rnn, cuda_graphs=graphs)
        if graphs:
            args.max_policy_lag = 3  # so that it matters when a version was
        args.replay = "uniform"  # which are nearest is a matter of rounding
        agent = appo.Agent(spaces, args).to(device)
        inference = appo.Inference(args, spaces, agent, device)
        own_copy = hasattr(inference, "publish")
        learner = appo.Learner(args, *([agent] if own_copy else []), inference)
        learner.optimizer.param_groups[0]["eps"] = 0.1  # with Adam's usual one, rounding decides the step of a weight whose gradient is about 0
        appo.wait_for(device)
        inference.pipes = [SimpleNamespace(send=lambda group: None)] * len(inference.pipes)
        units = len(inference.t)  # workers or groups
        count = appo.blocks_per_iteration(args) if own_copy else WORKERS
        actions, metrics = [], []
        with appo.own_stream(device):
            for _ in range(60):
                asking = rng.choice(units, rng.integers(1, units + 1), replace=False).tolist()
                for one in asking:
                    if one not in inference.requests:
                        write_rows(inference.mailbox, appo.slice_of(args, one), rng)
                        inference.requests.append(one)
                with torch.inference_mode():
                    inference.serve()
                actions.append(inference.mailbox.action.copy())
                if inference.full.qsize() >= count:
                    metrics.append({name: float(value) for name, value in learner.iterate(learner.collect()).items()})
                    inference.receive(inference.returned)
            result = dict(actions=actions, metrics=metrics, rollouts=vars(inference.rollouts), weights=agent.state_dict(),
                          acting=inference.agent.state_dict())  # fmt: skip
            return torch.utils._pytree.tree_map(lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else torch.as_tensor(x), result)

    one = run("cpu")
    with cuda.Device():
        two = run("cuda")
    torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-5, equal_nan=True)
    return dict(updates=len(one["metrics"]))


def write_rows(arrays, rows: slice, rng: np.random.Generator) -> None:
    """What games might write into the mailbox."""
    for part in arrays.obs.values():
        shape = part[rows].shape
        part[rows] = rng.integers(0, 256, shape) if part.dtype == np.uint8 else rng.normal(size=shape)
    arrays.reward[rows] = rng.normal(size=len(arrays.reward[rows]))
    arrays.first[rows], arrays.terminated[rows] = rng.random((2, len(arrays.reward[rows]))) < 0.1


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(path: str, scenario: str, *arguments) -> dict:
    import simulated_cuda as cuda

    appo, result = load(Path(path)), dict(error="")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            result |= dict(order=order, agreement=agreement, asked=asked)[scenario](appo, *arguments)
    except BaseException:
        result["error"] = traceback.format_exc()
    gc.collect()
    calls = {phase: n for (phase, what), n in cuda.counts.items() if what == "calls"}
    costs = {
        f"{phase}: {what}": round(n / calls[phase], 3) for (phase, what), n in cuda.counts.items() if phase in calls and what != "calls"
    }
    return result | dict(reports=list(cuda.reports), costs=costs)


def main() -> None:
    import simulated_cuda  # noqa: F401 before the project
    import torch.utils.tensorboard  # noqa: F401

    for variant in (*VARIANTS, *MORE, SEVERAL):
        load(ROOT / variant)
    gc.freeze()
    for line in sys.stdin:
        if os.fork() == 0:
            signal.alarm(300)
            print(json.dumps(answer(*json.loads(line))), flush=True)
            os._exit(0)
        if status := os.wait()[1]:
            print(json.dumps(dict(error=f"ended with status {status}", reports=[])), flush=True)


if __name__ == "__main__":
    main()
