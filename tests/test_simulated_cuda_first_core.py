"""As test_simulated_cuda.py, for the files that still have the first core, with events: what is used is there already and still, and the results are
those of the CPU branch. To show that a fault would be seen, the same is played with copies of the file from which one synchronisation was taken out.

Every scenario is played in a process of its own, a child of `python test_simulated_cuda_first_core.py`, which has imported what takes long.
"""

import contextlib
import gc
import importlib.util
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from edited import ROOT, edited, replacing

VARIANTS = ("appo_atari.py", "appo_atari_replay.py", "appo_dmlab.py", "appo_mujoco.py", "appo_pbt_doom.py")
IMAGE = (44, 44, 3)
SIZES = dict(num_workers=4, num_envs_per_worker=4, worker_num_splits=2, num_epochs=2, inference_threads=1, learner_threads=1)
GROUPS, ROWS = 8, 2  # of these sizes: groups, and rows in each

RELEASE = "        self.inference.release(slots)  # with `sync` only now are there free ones: to be filled by the newest version\n"
# Where the learner's host waits for the device. That it does so before it frees slots makes their event superfluous
NO_WAITS = [("if torch.isfinite(loss + grad_norm):", "if True:"),
            ("            if args.normalize_input:\n                self.update_statistics(slots, valid)\n", "")]  # fmt: skip
# what is wrong -> the kind of report, or the RuntimeError, that it gives, the edits that make it so, and in which file, if not in the base
MUTANTS = {
    "inference does not wait for the learner's copies out of free slots": ("race", [*NO_WAITS, (
        "slots, event = self.released.get()\n            wait_event(event)", "slots, event = self.released.get()\n")]),
    "the learner frees slots without an event": ("race", [*NO_WAITS, (
        "released.put((slots, record_event(self.device)))", "released.put((slots, None))")]),
    "the learner frees slots before it copies them": ("race", [
        ("            for i, batch in enumerate(batches):\n", "            self.inference.release(slots)\n            for i, batch in enumerate(batches):\n"),
        (RELEASE, "        pass\n")]),
    "the learner frees slots before it takes their statistics": ("race", [
        ("                self.update_statistics(", "                self.inference.release(slots)\n                self.update_statistics("),
        (RELEASE, "        pass\n")]),
    "the learner does not wait for what inference wrote": ("race", (
        "slots, event = item\n                wait_event(event)", "slots, event = item\n")),
    "inference hands over slots without an event": ("race", (
        "            event = record_event(self.device)\n", "            event = None\n")),
    "nobody waits for a policy": ("race", ("            wait_event(policy.event)\n", "")),
    "a policy is used without an event": ("race", ("policy.event = record_event(self.device)\n", "pass\n")),
    "threads start while the default stream still works": ("race", ("        torch.cuda.synchronize(device)", "        pass")),
    "a reply before the actions are there": ("unfinished", ("actions.cpu().numpy()", 'actions.to("cpu", non_blocking=True).numpy()')),
    "a reply before the mailbox was copied": ("mailbox", ("actions.cpu().numpy()", "torch.zeros(actions.shape, dtype=torch.int64).numpy()")),
    "a reply before the mailbox is read": ("mailbox", (
        "actors.reply(self.serve(actors.requests))", "waiting = actors.requests; actors.reply(waiting); self.serve(waiting)")),
    "the mailbox is unpinned before it was copied": ("unpinned", ("torch.cuda.synchronize(self.device)", "pass")),
    "every publish is a new copy": ("freed or race", (  # whichever is seen first ends it
        "self.current, self.spare = spare, self.current\n",
        "self.current, self.spare = self.frozen_copy(spare.agent), spare\n        self.current.event = record_event(self.device)\n")),
    "the host reads device memory": (".numpy() is not supported", ("actions.cpu().numpy()", "actions.numpy()")),
    "indices that stay on the host": ("Expected all tensors to be on the same device", (
        "torch.from_numpy(np.stack([rows, t, slots, first])).to(self.device, non_blocking=True)",
        "torch.from_numpy(np.stack([rows, t, slots, first]))")),
    "the learner frees old slots before it copies them": ("race", [
        ("            for i, batch in enumerate(batches):\n", "            self.keep(slots)\n            for i, batch in enumerate(batches):\n"),
        ("        self.keep(slots)  # with `sync`", "        pass  # with `sync`")], "appo_atari_replay.py"),
    "the learner frees old slots without an event": ("race", [*NO_WAITS, (
        "released.put((slots, record_event(self.device)))", "released.put((slots, None))")], "appo_atari_replay.py"),
}  # fmt: skip


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


# How often, at most, the host waits for the device in one call of a method, and launches a kernel; what is not named never does. Acting
# waits for the actions that it replies with; an optimiser step for whether it is finite, and PopArt for the number of usable samples, in
# some files in the last epoch alone; the statistics of an image and of a vector for the number of valid samples and whether they are finite
WAITS = dict(act=1, update=1, update_normalizers=4)
LAUNCHES = dict(act=80, serve=8, gather=15, update=400, publish=1, update_normalizers=90)
MORE_WAITS = {"appo_mujoco.py": 0.5, "appo_dmlab.py": 1}  # in `update`
MORE_LAUNCHES = {"appo_atari_replay.py": 110, "appo_dmlab.py": 40}


def assert_costs(variant: str, costs: dict) -> None:
    for what, most, more in (("synchronisations", WAITS, MORE_WAITS), ("launches", LAUNCHES, MORE_LAUNCHES)):
        found = {name.split(":")[0]: n for name, n in costs.items() if name.endswith(what)}
        most = most | dict(update=most["update"] + more.get(variant, 0))
        assert {name: n for name, n in found.items() if n > most.get(name, 0)} == {}, costs
    assert costs["act: synchronisations"] == 1 and costs["update: launches"] > 100, "they are counted"


# The text that synchronises is the same in all files, see test_agreement.py
@pytest.mark.parametrize("variant, ahead", [(VARIANTS[0], 0), *((variant, 1) for variant in VARIANTS)])
def test_order(play, variant, ahead):
    answer = play(ROOT / variant, "order", ahead, False)
    assert (answer["error"], answer["reports"]) == ("", [])
    assert_costs(variant, answer["costs"])


STRAY = """
usual = {0}


def {0}(*arguments):
    result = usual(*arguments)
    {1}
    return result
"""


@pytest.mark.parametrize("name, line", [
    ("sample_actions", "result[1].sum().item()"),
    ("evaluate_actions", "result[0].isnan().any().item()"),
    ("evaluate_actions", "[x + 1 for x in result for _ in range(100)]"),
])  # fmt: skip
def test_what_costs_more_is_found(play, tmp_path, name, line):
    """A host that waits once more, while it acts or learns; a hundred more kernels."""
    answer = play(edited(tmp_path, "appo_stray", replacing(STRAY.format(name, line)), source=ROOT / VARIANTS[0]), "order", 0, True)
    assert (answer["error"], answer["reports"]) == ("", [])
    with pytest.raises(AssertionError):
        assert_costs(VARIANTS[0], answer["costs"])


NETWORKS = [("gru", 0, (9,), 1), ("lstm", 23, (3, 3, 2), 2), ("none", 3, (4,), 2)]


# The base with each of them, the others, whose text is the same, with one
@pytest.mark.parametrize("variant, rnn, vector, heads, batches", [
    *((VARIANTS[0], *network) for network in NETWORKS),
    *((variant, *NETWORKS[i % 3]) for i, variant in enumerate(VARIANTS[1:])),
])  # fmt: skip
def test_agreement(play, variant, rnn, vector, heads, batches):
    answer = play(ROOT / variant, "agreement", rnn, vector, heads, batches)
    assert (answer["error"], answer["reports"]) == ("", [])
    assert answer["updates"] >= 3


def test_without_its_waits_the_learner_frees_slots_by_an_event(play, tmp_path):
    """The mutants below are not found for another reason."""
    answer = play(edited(tmp_path, "appo_waitless", *NO_WAITS, source=ROOT / VARIANTS[0]), "order", 0, True)
    assert (answer["error"], answer["reports"]) == ("", [])


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_missing_synchronisation_is_found(play, tmp_path, mutant):
    kind, edits, *file = MUTANTS[mutant]
    edits = edits if isinstance(edits, list) else [edits]
    answer = play(edited(tmp_path, "appo_mutant", *edits, source=ROOT / (file or VARIANTS)[0]), "order", 0, True)
    found = {kind for kind, *_ in answer["reports"]}
    assert found & set(kind.split(" or ")) or f"RuntimeError: {kind}" in answer["error"], answer


# --- what follows is for the process with the simulated device


def order(appo, ahead: int, until_report: bool) -> None:
    """The real `train`, with its two threads. Random numbers come in the place of games."""
    import simulated_cuda as cuda

    class Actors:
        """In their place. A group that has got its actions may have stepped whenever inference looks, and asks for more."""

        deaths = 0

        def __init__(self, args, inference, *_, **__):
            self.inference, self.arrays = inference, inference.mailbox.arrays()
            self.requests, self.playing, self.rng = [], set(), np.random.default_rng(0)
            self.orders = queue.SimpleQueue()  # of a main process, where there are several policies

        def start_all(self) -> None:
            self.reply(list(range(GROUPS)))

        def reply(self, groups: list[int]) -> None:
            self.requests = [group for group in self.requests if group not in groups]
            for group in groups:
                rows = slice(group * ROWS, group * ROWS + ROWS)
                for part in self.inference.mailbox.obs.values():
                    cuda.give_away(part[rows])
                self.arrays.reward[rows] = np.nan  # a loss with one of these in it ends the run
                if "vector" in self.arrays.obs:
                    self.arrays.obs["vector"][rows] = np.nan
                self.playing.add(group)

        def wait(self, timeout=None) -> None:
            if until_report and cuda.reports:
                appo.STOP.asked_at = 1.0
            if select.select([self.inference.bell], [], [], 0 if self.playing else 60)[0]:
                os.eventfd_read(self.inference.bell)
            blocked = set(self.requests)
            for group in sorted(self.playing):
                if self.rng.random() < 0.7:
                    rows = slice(group * ROWS, group * ROWS + ROWS)
                    for part in self.inference.mailbox.obs.values():
                        cuda.take_back(part[rows])
                    write_rows(appo, self.arrays, rows, self.rng)
                    self.playing.remove(group)
                    self.requests.append(group)
            # Of an actor that has died meanwhile nothing is served. (What is blocked may be under a copy: it ends long before another has started.)
            for worker in np.flatnonzero(self.rng.random(SIZES["num_workers"]) < 0.1):
                self.deaths += 1
                self.reply([group for group in self.requests if group // SIZES["worker_num_splits"] == worker and group not in blocked])

        def stop(self) -> None:
            pass

    class Rollouts(appo.Rollouts):
        def __init__(self, spaces, T, slots, *more):
            super().__init__(spaces, T, slots, *more)
            for field in appo.fields_of(self):
                if isinstance(field, cuda.CudaTensor):  # `check_memory` makes others
                    cuda.divide(field, 0 if field is self.rnn_state else 1)

    update, stop_inference = appo.Learner.update, appo.Inference.stop

    def slow_update(self, *arguments):
        """While it lasts inference fills all slots that there are, so the next ones are written as soon as they are free."""
        time.sleep(0.03)
        return update(self, *arguments)

    def stop(self) -> None:
        """At its last step inference has handed over slots and got no new ones: nobody has waited for the last copies out of the mailbox."""
        deadline = time.monotonic() + 5
        while any(slots is not None for slots in self.filling) and time.monotonic() < deadline and not cuda.reports:
            time.sleep(0.01)
        stop_inference(self)

    iterate = appo.Learner.iterate

    def last_iterate(self, *arguments):
        """Of several policies the main process counts the steps, and says stop."""
        metrics = iterate(self, *arguments)
        if self.global_step >= self.args.total_timesteps:
            appo.STOP.asked_at = 1.0
        return metrics

    spaces = make_spaces(appo, 3, (3, 2))
    appo.Actors, appo.Rollouts, appo.Inference.stop = Actors, Rollouts, stop
    if until_report:
        appo.Learner.update = slow_update
    appo.spaces_of = lambda args: spaces
    for cls, name in ((appo.Inference, "serve"), (appo.Inference, "act"), (appo.Learner, "gather"), (appo.Learner, "update"),
                      (appo.Agent, "update_normalizers"), (appo.Learner, "publish")):  # fmt: skip
        cuda.count(cls, name)
    args = sized(appo, device="cuda", precision="bfloat16", rnn_type="gru", rollout=4, batch_size=64, hidden_size=16,
                 max_batches_ahead=ahead, total_timesteps=300)  # fmt: skip

    def train(args, folder: Path) -> None:
        if not hasattr(appo, "train_policy"):
            if hasattr(appo, "lab_module"):
                appo.lab_module()  # imports it, before the device is simulated
            appo.train(args, folder)
            return
        appo.STOP.asked_at, appo.Learner.iterate = None, last_iterate
        link = SimpleNamespace(send=lambda report: None)  # the pipe to the main process
        appo.train_policy(appo.resolve(args), 0, folder, spaces, appo.Mailbox(spaces, GROUPS * ROWS, 0), link)

    with tempfile.TemporaryDirectory() as folder, cuda.Device():
        train(args, Path(folder))
        if not until_report:  # resumed, and with the slots freed after the update
            other = dict(replay="attentive", total_timesteps=700) if hasattr(appo, "slots_kept") else {}
            train(replace(args, **dict(total_timesteps=400, sync=True, batch_size=None) | other), Path(folder))
    assert not cuda.pinned


def make_spaces(appo, vector: int, heads: tuple[int, ...]):
    """An image, and a vector of that length or none; in other files what their networks see."""
    Box = appo.gym.spaces.Box
    if hasattr(appo, "MujocoEnvs"):
        return appo.Spaces(dict(vector=Box(-np.inf, np.inf, (7,), np.float32)), Box(-1.0, 1.0, (len(heads),), np.float32))
    obs = dict(obs=Box(0, 255, IMAGE, np.uint8))
    if hasattr(appo, "LabEnv"):
        obs |= dict(words=Box(0, 999, (appo.WORDS,), np.int64), task=Box(0, 0, (), np.int64))
    elif vector:
        obs["vector"] = Box(-np.inf, np.inf, (vector,), np.float32)
    return appo.Spaces(obs, heads)


def sized(appo, **settings):
    own = dict(num_policies=1) if hasattr(appo, "train_policy") else dict(encoder="convnet") if hasattr(appo, "LabEnv") else {}
    if hasattr(appo, "slots_kept"):
        own = dict(replay="elite", replay_rollouts=20)
    if not hasattr(appo.Args, "precision"):
        del settings["precision"]
    return appo.Args(**SIZES, **settings, **own)


def agreement(appo, rnn: str, vector: int, heads: list[int], batches: int) -> dict:
    """Inference and learner in one thread, with the same mailbox and seed on the CPU and on the device."""
    import simulated_cuda as cuda
    import torch

    def run(kind: str) -> dict:
        torch.manual_seed(0)
        rng, device = np.random.default_rng(0), torch.device(kind)
        spaces = make_spaces(appo, vector, tuple(heads))
        args = appo.resolve(sized(appo, device=kind, precision="float32", rnn_type=rnn, rollout=8, hidden_size=32, batch_size=128 // batches,
                                  num_batches_per_epoch=batches))  # fmt: skip
        agent = appo.Agent(spaces, args).to(device)
        mailbox = [appo.Mailbox(spaces, GROUPS * ROWS, 0)] if hasattr(appo, "train_policy") else []
        inference = appo.Inference(args, spaces, agent, device, *mailbox)
        learner = appo.Learner(args, agent, inference, device)
        if kind == "cuda":
            torch.cuda.synchronize()
        actions, metrics, full, waiting = [], [], [], set()
        count = appo.parts_of_iteration(args)[0] if hasattr(appo, "slots_kept") else 16
        with appo.own_stream(device, threads=1):
            for _ in range(60):
                for group in set(rng.choice(GROUPS, rng.integers(1, GROUPS + 1), replace=False).tolist()) - waiting:
                    write_rows(appo, inference.arrays, slice(group * ROWS, group * ROWS + ROWS), rng)
                    waiting.add(group)
                waiting -= set(inference.serve(sorted(waiting)))
                actions.append(inference.arrays.action.copy())
                while not inference.full.empty():
                    full.extend(inference.full.get()[0])
                if len(full) >= count:
                    metrics.append(learner.iterate(np.array(full[:count])))
                    full = full[count:]
            result = dict(actions=actions, metrics=metrics, rollouts=vars(inference.rollouts), weights=agent.state_dict(),
                          acting=inference.acting.current.agent.state_dict())  # fmt: skip
            return torch.utils._pytree.tree_map(lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else torch.as_tensor(x), result)

    one = run("cpu")
    with cuda.Device():
        two = run("cuda")
    torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-6, equal_nan=True)
    return dict(updates=len(one["metrics"]))


def write_rows(appo, arrays, rows: slice, rng: np.random.Generator) -> None:
    """What games might write into the mailbox."""
    below = dict(obs=256, words=1000, task=1)
    for name, part in arrays.obs.items():
        shape = part[rows].shape
        part[rows] = rng.integers(0, below[name], shape) if name in below else rng.normal(size=shape)
    arrays.reward[rows] = rng.normal(size=ROWS)
    arrays.first[rows], arrays.terminated[rows] = rng.random((2, ROWS)) < 0.1
    if hasattr(arrays, "inactive"):
        arrays.inactive[rows] = rng.random(ROWS) < 0.1


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(path: str, scenario: str, *arguments) -> dict:
    import simulated_cuda as cuda

    appo, result = load(Path(path)), dict(error="")
    cuda.install(appo)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            result |= dict(order=order, agreement=agreement)[scenario](appo, *arguments) or {}
    except BaseException:
        result["error"] = traceback.format_exc()
    gc.collect()
    calls = {phase: n for (phase, what), n in cuda.counts.items() if what == "calls"}
    costs = {
        f"{phase}: {what}": round(n / calls[phase], 1) for (phase, what), n in cuda.counts.items() if phase in calls and what != "calls"
    }
    return result | dict(reports=list(cuda.reports), costs=costs)


def main() -> None:
    import simulated_cuda  # noqa: F401 before the project
    import torch.utils.tensorboard  # noqa: F401

    sys.path.append(str(ROOT / "tests" / "stand_in"))  # for appo_dmlab.py
    for variant in VARIANTS:
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
