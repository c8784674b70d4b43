"""A counting environment through the real actors, mailbox, inference thread and rollouts: who wrote what, where and when."""

import queue
import random
import re
import threading
import time
from collections import defaultdict, deque

import gymnasium as gym
import numpy as np
import pytest
import torch
from edited import COUNTING, ROOT, load, with_envs

from dummy_sampler import RandomAgent

FILES = ("appo_gym", "appo_doom")


@pytest.fixture(scope="session", params=FILES)
def appo(request, tmp_path_factory):
    """A file with the counting environment."""
    return load(with_envs(tmp_path_factory.mktemp("pipeline"), f"pipeline_{request.param}", COUNTING, source=ROOT / f"{request.param}.py"))


def small(appo, **settings):
    """Args: two workers of four environments, in Doom in two splits."""
    common = dict(num_workers=2, rollout=5, hidden_size=32, rnn_type="gru", device="cpu", batch_size=20)
    if "num_envs" in appo.Args.__annotations__:
        return appo.Args(**common | dict(num_envs=8) | settings)
    return appo.Args(**common | dict(num_envs_per_worker=4, worker_num_splits=2, precision="float32") | settings)


class Pipeline:
    """Actors and the inference thread, with the test in the place of the learner."""

    def __init__(self, appo, tmp_path, **settings):
        torch.manual_seed(0)
        self.appo, self.args, self.folder = appo, small(appo, **settings), tmp_path
        spaces = appo.spaces_of(self.args)
        self.agent = appo.Agent(spaces, self.args)
        self.inference = appo.Inference(self.args, spaces, self.agent, torch.device("cpu"))
        self.inference.episodes = deque()  # all of them instead of the last 100
        self.full, self.rollouts, self.rows = self.inference.full, self.inference.rollouts, len(self.inference.mailbox.first)
        self.running = appo.running(self.inference, *([tmp_path] if hasattr(appo, "log") else []))

    def __enter__(self):
        self.running.__enter__()
        return self

    def __exit__(self, *error):
        self.running.__exit__(*error)
        assert not [thread for thread in threading.enumerate() if thread.name == "inference"]

    def log(self) -> str:
        return (self.folder / "log.txt").read_text() if (self.folder / "log.txt").exists() else ""

    def get(self) -> slice:
        """Waits for the next full block."""
        try:
            block = self.full.get(timeout=60)
        except queue.Empty:
            raise AssertionError(f"no full block within a minute; {self.log()}") from None
        if self.inference.error:
            raise self.inference.error
        return block

    def take(self) -> list[dict]:
        """Waits for the next full block; returns copies of its slots' content and gives it back."""
        block, content = self.get(), []
        for slot in range(block.start, block.stop):
            fields = {name: np.array(np.asarray(field)[:, slot]) for name, field in vars(self.rollouts).items() if name != "obs"}
            content.append(fields | {name: field[:, slot].numpy().copy() for name, field in self.rollouts.obs.items()})
        self.inference.learner_pipe.send([block])
        return content


def environments_of(rollouts: list[dict]) -> set[int]:
    """Those that wrote the last observations; a rollout that an actor's death cut may hold two."""
    return {int(environment) for rollout in rollouts for environment in rollout["vector"][:, 0]}


def check_rollout(rollout: dict, T: int) -> tuple[int, int, int]:
    """Checks a rollout alone. Returns (environment, valid steps, ends of episodes)."""
    counter = rollout["vector"].astype(int)
    me = counter[0, 0]
    assert (rollout["obs"][:, 0, 0, 0] == me % 256).all(), "image and vector are of the same environment"
    assert (rollout["obs"][:, 0, 0, 1] == counter[:, 1] % 256).all() and (rollout["obs"][:, 0, 0, 2] == counter[:, 2]).all()
    ends = 0
    for t in range(T):
        (_, episode, count, length), after = counter[t], counter[t + 1]
        assert rollout["first"][t] == (count == 0)
        if rollout["first"][t + 1]:
            assert count == length and tuple(after[:3]) == (me, episode + 1, 0), "only the ignored action follows a last observation"
        else:
            assert tuple(after[:3]) == (me, episode, count + 1)
            assert rollout["rewards"][t] == pytest.approx(0.1 * rollout["actions"][t, 0] + rollout["actions"][t, 1])
            assert rollout["terminated"][t] == (count + 1 == length and episode % 2 == 0)
            ends += count + 1 == length
    return me, int((~rollout["first"][1:]).sum()), ends


def test_environments_of_different_actors_draw_different_numbers_and_may_keep_actions(tmp_path):
    vector = "np.array([self.me, self.episode, self.count, self.length], np.float32)"
    draws = COUNTING.replace(vector, "np.array([np.random.random(), random.random(), torch.rand(()), self.changed], np.float32)")
    draws = draws.replace("    def reset(", "    kept, changed = None, 0\n\n    def reset(", 1)
    keep = "        self.changed += self.kept is not None and tuple(self.kept) != self.was\n        self.kept, self.was = action, tuple(action)\n"
    draws = draws.replace("        self.count += 1\n", f"{keep}        self.count += 1\n")
    with Pipeline(load(with_envs(tmp_path, "appo_draws", draws, source=ROOT / "appo_gym.py")), tmp_path) as pipeline:
        rollouts = [rollout for _ in range(6) for rollout in pipeline.take()]
    vectors = np.concatenate([rollout["vector"][:-1] for rollout in rollouts])  # the last observation is the next rollout's first
    assert [len(np.unique(vectors[:, i])) for i in range(3)] == [len(vectors)] * 3, "also between the two actors"
    assert not vectors[:, 3].any(), "an action does not change after its step"


def test_rollouts_are_whole_ordered_and_unmixed(appo, tmp_path):
    with Pipeline(appo, tmp_path) as pipeline:
        by_environment = defaultdict(list)
        while min(map(len, by_environment.values()), default=0) < 12 or len(by_environment) < pipeline.rows:
            for rollout in pipeline.take():
                by_environment[check_rollout(rollout, pipeline.args.rollout)[0]].append(rollout)
    ends = 0
    for rollouts in by_environment.values():
        assert rollouts[0]["first"][0], "a row begins with the first observation of an episode"
        for one, two in zip(rollouts, rollouts[1:]):
            np.testing.assert_array_equal(one["obs"][-1], two["obs"][0], "row T of a rollout is row 0 of the next")
            assert one["first"][-1] == two["first"][0]
        ends += sum(check_rollout(rollout, 5)[2] for rollout in rollouts)
    assert ends > 50
    # What inference recorded is what the network computes from that row's own stream: state, value, log-probability.
    agent = pipeline.agent
    for rollouts in list(by_environment.values())[:3]:
        state = torch.zeros(1, agent.state_size)
        for rollout in rollouts:
            torch.testing.assert_close(torch.from_numpy(rollout["rnn_state"]), state, rtol=1e-4, atol=1e-4)
            for t in range(5):
                obs, vector, first = (torch.from_numpy(np.array(rollout[name][t]))[None, None] for name in ("obs", "vector", "first"))
                with torch.no_grad():
                    logits, value, state = agent(dict(obs=obs, vector=vector), first, state)
                logprob = appo.log_prob(appo.log_distributions(logits[0, 0], agent.heads), torch.from_numpy(rollout["actions"][t]))
                assert rollout["logprobs"][t] == pytest.approx(logprob.item(), abs=1e-4)
                if "values" in rollout:
                    assert rollout["values"][t] == pytest.approx(value.item(), abs=1e-4)


@pytest.mark.parametrize("limit", [0.0, np.inf])
def test_finished_episodes_are_counted_once(appo, tmp_path, limit):
    with Pipeline(appo, tmp_path, **dict(actor_timeout=limit) if hasattr(appo, "log") else {}) as pipeline:
        rollouts = []
        while len(rollouts) < 150:
            rollouts += pipeline.take()
        episodes = list(pipeline.inference.episodes)
    assert pipeline.log() == "", "neither is a limit"
    finished = sum(check_rollout(rollout, 5)[2] for rollout in rollouts)
    assert abs(len(episodes) - finished) <= 4 * pipeline.rows, "up to what is in rollouts that were not taken"
    assert {length for _, length in episodes} <= set(range(1, 10))
    double = 2 if hasattr(appo, "log") else 1  # Doom's score is of raw rewards, which are double here
    returns = [double * (0.1 * rollout["actions"][t, 0] + rollout["actions"][t, 1]) for rollout in rollouts for t in range(5)]
    assert all(0 <= score <= double * 3.2 * length + 1e-4 for score, length in episodes) and max(returns) > 0
    ones = [score for score, length in episodes if length == 1]
    assert set(np.round(ones, 4)) <= set(np.round(returns, 4)) and len(set(np.round(ones, 4))) > 3, "one action's reward, whole"


def test_back_pressure(appo, tmp_path):
    """Without free blocks everything waits, nothing is lost, and it goes on when blocks come back."""
    with Pipeline(appo, tmp_path) as pipeline:
        blocks, deadline = appo.num_blocks(pipeline.args), time.monotonic() + 60
        while pipeline.full.qsize() < blocks:
            assert time.monotonic() < deadline, pipeline.log()
            time.sleep(0.1)
        time.sleep(0.5)  # all groups ask again, and are held
        owned = [pipeline.get() for _ in range(blocks)]
        assert sorted(slot for block in owned for slot in range(block.start, block.stop)) == list(range(blocks * owned[0].stop - owned[0].start * blocks))
        for block in owned:
            pipeline.full.put(block)
        assert sorted(pipeline.inference.requests) == list(range(len(pipeline.inference.t))), "every group waits"
        last = {}
        for _ in range(40):
            for rollout in pipeline.take():
                me, _, _ = check_rollout(rollout, 5)
                if me in last:
                    np.testing.assert_array_equal(last[me]["obs"][-1], rollout["obs"][0])
                last[me] = rollout
    assert len(last) == pipeline.rows and pipeline.inference.waited["blocks"] > 0.5


@pytest.mark.parametrize("name", FILES)
def test_blocks_are_enough_in_every_order(name):
    """Any number of workers, environments, splits, batches and epochs ahead; groups that come in the worst order, one at a time or all at
    once; and a learner that takes an iteration only when nothing else can move: there is always one to take."""
    appo = load(ROOT / f"{name}.py")
    rng, spaces = random.Random(0), appo.Spaces(dict(obs=gym.spaces.Box(0, 255, (2, 2, 1), np.uint8)), (2,))
    for _ in range(40):
        workers, splits, n, T, ahead, parts = (rng.randint(low, high) for low, high in ((1, 4), (1, 3), (1, 4), (1, 3), (0, 2), (1, 3)))
        sync, size = rng.random() < 0.3, rng.randint(1, 2 * workers * splits * n * T)
        if name == "appo_gym":
            args, groups, per_iteration = appo.Args(num_workers=workers, num_envs=workers * n, rollout=T, sync=sync, device="cpu"), workers, workers
        else:
            args = appo.Args(num_workers=workers, num_envs_per_worker=splits * n, worker_num_splits=splits, rollout=T, batch_size=size,
                             num_batches_per_epoch=parts, max_batches_ahead=ahead, sync=sync, device="cpu", precision="float32")  # fmt: skip
            groups, per_iteration = workers * splits, appo.blocks_per_iteration(args)
            assert not sync or per_iteration == groups
        inference = appo.Inference(args, spaces, RandomAgent(spaces.heads), torch.device("cpu"))
        order, greedy, waiting = list(range(groups)), rng.random() < 0.5, []
        inference.requests = list(order)

        def advance(group, inference=inference):
            """The group asks, alone; True: it got actions, and asks again."""
            inference.requests = [group]
            inference.serve()
            return not inference.requests

        inference.pipes = [type("Pipe", (), dict(send=lambda self, message: None))()] * workers
        for _ in range(6):
            rng.shuffle(order)
            moves = True
            while moves:  # greedy: one group as far as it comes, then the next
                moves = any(advance(group) for group in order) if greedy else any([advance(group) for group in order])
            while not inference.full.empty():
                waiting.append(inference.full.get())
            assert len(waiting) >= per_iteration, f"a deadlock: {args}"
            inference.free.extend(waiting[:per_iteration])
            waiting = waiting[per_iteration:]


def test_sync_is_one_rollout_of_every_row(appo, tmp_path):
    """From the first iteration on, though one worker is slower: nobody fills two blocks of one iteration."""
    with Pipeline(appo, tmp_path, sync=True) as pipeline:
        for _ in range(5):
            blocks = [pipeline.get() for _ in pipeline.inference.t]
            seen = [int(pipeline.rollouts.obs["vector"][0, slot, 0]) for block in blocks for slot in range(block.start, block.stop)]
            assert len(set(seen)) == pipeline.rows and pipeline.full.empty()
            pipeline.inference.learner_pipe.send(blocks)


def test_a_killed_actor_breaks_one_transition_and_no_more(tmp_path_factory, tmp_path):
    appo = load(with_envs(tmp_path_factory.mktemp("killed"), "pipeline_killed", COUNTING))
    rollouts = []
    with Pipeline(appo, tmp_path, worker_num_splits=1) as pipeline:
        while len(environments_of(rollouts)) < pipeline.rows:  # one that dies before it has asked ends the run
            rollouts += pipeline.take()
        pipeline.inference.version = 7  # as the learner would have had it by then
        torch.multiprocessing.active_children()[0].kill()
        while len(environments_of(rollouts)) < pipeline.rows + 4:  # the new actor plays others than the one before
            rollouts += pipeline.take()
        for _ in range(8):
            rollouts += pipeline.take()
    assert re.fullmatch(r"\S+ \S+ actor [01]: died \(exit code -9\); starting another\n", pipeline.log())
    broken = 0
    for rollout in rollouts:
        counter = rollout["vector"].astype(int)
        for t in range(5):
            same = counter[t + 1, 0] == counter[t, 0] and counter[t + 1, 1] == counter[t, 1]
            if not same:
                assert rollout["first"][t + 1], "whatever does not follow is invalid"
                broken += counter[t, 2] < counter[t, 3]
            elif not rollout["first"][t + 1]:
                assert counter[t + 1, 2] == counter[t, 2] + 1
                assert rollout["rewards"][t] == pytest.approx(0.1 * rollout["actions"][t, 0] + rollout["actions"][t, 1])
    assert broken <= 4, "one transition for each environment of the worker"
    assert len(environments_of(rollouts)) == pipeline.rows + 4


def test_sync_survives_an_actor_killed_between_its_splits(tmp_path):
    """One split is then a step ahead of the other, and at the end of its rollout waits until the other is there too."""
    line = "        if seed is not None:\n"
    slow = COUNTING.replace(line, f"{line}            time.sleep(0.05)\n")
    appo = load(with_envs(tmp_path, "appo_slow_reset", slow, ("SHORT_LIFE = 1000", "SHORT_LIFE = 0")))  # killed more often than it would put up with
    with Pipeline(appo, tmp_path, sync=True) as pipeline:

        def iteration():
            pipeline.inference.learner_pipe.send([pipeline.get() for _ in pipeline.inference.t])

        for _ in range(3):
            iteration()
            deaths = pipeline.log().count("starting another")
            for actor in torch.multiprocessing.active_children()[:1]:
                actor.kill()
            deadline = time.monotonic() + 60
            while pipeline.log().count("starting another") == deaths:
                assert time.monotonic() < deadline, pipeline.log()
                time.sleep(0.01)
            for _ in range(4):
                iteration()
    assert pipeline.log().count("starting another") == 3


SLOW = """
class Env(gym.Env):
    observation_space = gym.spaces.Dict(obs=gym.spaces.Box(0, 255, (36, 36, 3), np.uint8))
    action_space = gym.spaces.MultiDiscrete((2,))
    started = False

    def reset(self, *, seed=None, options=None):
        if not self.started:
            time.sleep(1)
        self.started = True
        return dict(obs=np.zeros((36, 36, 3), np.uint8)), {}

    def step(self, action):
        return dict(obs=np.zeros((36, 36, 3), np.uint8)), 0.0, False, False, {}
"""


def test_environments_that_start_slowly_are_no_hang(tmp_path):
    """Four seconds together, but each of them less than --actor-timeout."""
    appo = load(with_envs(tmp_path, "appo_slow", SLOW))
    with Pipeline(appo, tmp_path, num_workers=1, worker_num_splits=1, actor_timeout=2.0) as pipeline:
        pipeline.get()
    assert pipeline.log() == ""


@pytest.mark.parametrize("name", FILES)
def test_an_actor_in_this_process_that_ends_says_why(tmp_path, name):
    """Whatever its end is. When it dies in a step the learner learns of it."""
    line = "        self.count += 1\n"
    envs = COUNTING.replace(line, f"{line}        self.count < 2 or sys.exit('of its own')\n")
    appo = load(with_envs(tmp_path, f"appo_exit_{name}", envs, source=ROOT / f"{name}.py"))
    with Pipeline(appo, tmp_path, num_workers=0) as pipeline:
        with pytest.raises(appo.UserError, match=r"^actor 0[: ](.*\n)+SystemExit: of its own$"):
            while True:
                pipeline.get()
