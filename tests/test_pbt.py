"""appo_pbt_doom.py: who plays where, what each policy learns from, exchanges, matches, and what a population survives."""

import contextlib
import importlib
import json
import multiprocessing.forkserver
import multiprocessing.reduction
import os
import queue
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from edited import REPORTS, ROOT, edited, load, replacing
from forked import python
from test_command_line import TAGS, scalars

import appo_doom
import appo_pbt_doom as appo
import evaluate

SCRIPT = ROOT / "appo_pbt_doom.py"
GAME = "    return DoomMatch(args.env_id, args.frameskip, args.cfg_path, args.scenario_dir)\n"
# Two agents. The observation says which game, agent, episode and step it is; the reward says which action was taken. In odd
# episodes player_1 leaves in the middle; every fourth step is inactive.
COUNTING = """
class Env:
    possible_agents, metadata = ["player_0", "player_1"], {}

    def observation_space(self, agent):
        return gym.spaces.Dict(obs=gym.spaces.Box(0, 255, (36, 36, 3), np.uint8), vector=gym.spaces.Box(-np.inf, np.inf, (5,), np.float32))

    def action_space(self, agent):
        return gym.spaces.MultiDiscrete((3, 4))

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.me, self.episode = seed % 60_000, -1
        self.episode, self.count, self.agents = self.episode + 1, 0, list(self.possible_agents)
        self.length = 2 + (self.me * 7 + self.episode * 13) % 9
        return {a: self.observation(a) for a in self.agents}, {a: dict(inactive=self.episode % 2 == 1) for a in self.agents}

    def observation(self, agent):
        leaves = agent == "player_1" and self.episode % 2
        end = (self.length + 1) // 2 if leaves else self.length
        vector = np.array([self.me, int(agent[-1]), self.episode, self.count, end], np.float32)
        return dict(obs=np.full((36, 36, 3), int(vector.sum()) % 256, np.uint8), vector=vector)

    def step(self, actions):
        assert sorted(actions) == self.agents
        self.count += 1
        playing = self.agents
        seen = {a: self.observation(a) for a in playing}
        over = {a: self.count == seen[a]["vector"][4] for a in playing}
        kind = self.episode % 3 == 0
        rewards = {a: 0.1 * actions[a][0] + actions[a][1] for a in playing}
        infos = {a: dict(inactive=self.count % 4 == 3, frags=self.count, raw_reward=2 * rewards[a]) for a in playing}
        self.agents = [a for a in playing if not over[a]]
        return seen, rewards, {a: over[a] and kind for a in playing}, {a: over[a] and not kind for a in playing}, infos

    def close(self):
        pass
"""


OWN = """

def make_env(args):
    return Env()
"""
HUNG = "hung (its stack is above; a map that is not in the WAD does that, too)"


def spaces(image: tuple, vector: int, heads: tuple):
    """Of one image, and a vector of that length beside it, or none."""
    box = appo.gym.spaces.Box
    numbers = dict(vector=box(-np.inf, np.inf, (vector,), np.float32)) if vector else {}
    return appo.Spaces(dict(obs=box(0, 255, image, np.uint8)) | numbers, heads)


def env_seed(*entropy: int) -> int:
    """Of a worker's first game: from the seed, the session, the worker and how many actors have died."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0]) >> 2


@pytest.fixture(scope="session")
def counting(tmp_path_factory):
    return load(edited(tmp_path_factory.mktemp("pbt"), "pbt_counting", replacing(COUNTING + OWN), source=SCRIPT))


@pytest.mark.parametrize("policies, games, agents", [(2, 4, 2), (3, 3, 2), (4, 2, 2), (2, 2, 4), (4, 8, 1), (1, 3, 2), (3, 6, 4)])
def test_every_policy_has_the_same_share_and_meets_the_others_as_often(policies, games, agents, monkeypatch):
    monkeypatch.setattr(appo, "seats_of", lambda args: agents)
    args = appo.Args(num_policies=policies, num_envs_per_worker=games, worker_num_splits=1, num_workers=30)
    table = appo.seat_policies(args, session=0)
    assert table.shape == (30, games, agents)
    for group in table:
        assert (np.bincount(group.ravel(), minlength=policies) == games * agents // policies).all()
    met = defaultdict(int)
    for game in table.reshape(-1, agents):
        for i in range(agents):
            for j in range(i):
                met[tuple(sorted((game[i], game[j])))] += 1
    if agents == 2 and games >= policies:  # else the shares decide
        assert len(met) == policies * (policies + 1) // 2
        assert max(met.values()) - min(met.values()) <= 0.1 * max(met.values()) + 1, met
    if policies > 1:
        assert (table != appo.seat_policies(args, session=1)).any() or agents == 1
        hosts = np.bincount(table[:, :, 0].ravel(), minlength=policies)
        assert hosts.min() > 0
    rows, share = appo.seat_rows(table, policies), games * agents // policies  # rows in a group
    assert sorted(rows.ravel()) == list(range(table.size))
    for group in range(len(table)):
        for policy in range(policies):
            first = (policy * len(table) + group) * share
            assert rows[group][table[group] == policy].tolist() == list(range(first, first + share)), "neighbours, in order"


class Pipeline:
    """Actors and the inference threads of all policies, with the test in the place of the learners."""

    def __init__(self, appo, **settings):
        torch.manual_seed(0)
        small = dict(num_policies=2, num_workers=2, num_envs_per_worker=4, worker_num_splits=2, rollout=5, batch_size=20, hidden_size=32,
                     inference_threads=1, device="cpu", precision="float32", reward_scale=0.5, reward_clip=1.2)  # fmt: skip
        self.appo, self.args, self.log = appo, appo.resolve(appo.Args(**small | settings)), []
        args, P = self.args, self.args.num_policies
        spaces, share = appo.spaces_of(args), appo.share_of(args)
        mailbox = appo.Mailbox(spaces, P * args.num_workers * share.num_envs_per_worker, 0)
        for field in appo.fields_of(mailbox):
            field.share_memory_()
        population = SimpleNamespace(session=0, reports=[{} for _ in range(P)])
        self.processes = appo.Processes(args, spaces, mailbox, population, self.log.append)
        self.processes.start_policy = lambda policy: None
        self.inferences, self.actors, self.threads = [], [], []
        for policy in range(P):
            pipe, link = appo.mp.Pipe()
            self.processes.policies.append(SimpleNamespace(is_alive=lambda: True))
            self.processes.pipes.append(pipe)
            inference = appo.Inference(share, spaces, appo.Agent(spaces, args), torch.device("cpu"), mailbox.part(policy, P))
            inference.episodes = deque()  # all of them
            self.inferences.append(inference)
            self.actors.append(appo.Actors(share, inference, link))
            self.threads.append(threading.Thread(target=inference.run, args=(self.actors[-1],), daemon=True))

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        self.processes.start_all()
        return self

    def __exit__(self, *error):
        for inference, thread in zip(self.inferences, self.threads):
            inference.stop()
            thread.join(10)
        for actors in self.actors:
            actors.stop()
        for process in self.processes.actors:
            process.join(5)
            process.kill()

    def full_slots(self, policy: int) -> np.ndarray:
        """A policy's next ones, if they come soon, else none."""
        self.processes.check()
        try:
            item = self.inferences[policy].full.get(timeout=0.05)
        except queue.Empty:
            return np.array([], int)
        if isinstance(item, BaseException):
            raise item
        return item[0]

    def take(self, policy: int) -> list[dict]:
        """Waits for a policy's next full slots; returns copies of their content and frees them."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if len(slots := self.full_slots(policy)):
                r = self.inferences[policy].rollouts
                kept = r.obs | {name: field for name, field in vars(r).items() if name not in ("obs", "rnn_state")}
                content = [{name: np.array(np.asarray(field)[:, slot]) for name, field in kept.items()} for slot in slots]
                self.inferences[policy].release(slots)
                return content
        raise AssertionError(f"no full slots within a minute; {self.log}")


def check_rollout(rollout: dict, T: int) -> tuple[tuple[int, int], int]:
    """Checks a rollout alone. Returns ((game, agent), valid steps)."""
    counter, valid = rollout["vector"].astype(int), 0
    me, agent = counter[0, :2]
    for t in range(T):
        (_, _, episode, count, end), after = counter[t], counter[t + 1]
        assert rollout["obs"][t, 0, 0, 0] == counter[t].sum() % 256, "image and vector are of the same agent"
        assert tuple(after[:2]) == (me, agent)
        expected = count % 4 == 3 and not rollout["first"][t] if count else episode % 2 == 1
        assert rollout["inactive"][t] == expected
        if rollout["first"][t + 1]:
            assert count == end, "only what follows a last observation is ignored"
            assert tuple(after[2:4]) in ((episode + 1, 0), (episode, count)), "the next episode, or waiting for it"
        else:
            valid += 1
            assert tuple(after[2:4]) == (episode, count + 1)
            reward = min(1.2, 0.5 * (0.1 * rollout["actions"][t, 0] + rollout["actions"][t, 1]))
            assert rollout["rewards"][t] == pytest.approx(reward)
            assert rollout["terminated"][t] == (count + 1 == end and episode % 3 == 0)
    return (me, agent), valid


def test_rollouts_of_two_policies_are_whole_ordered_and_unmixed(counting):
    with Pipeline(counting) as pipeline:
        args, found = pipeline.args, [defaultdict(list) for _ in range(2)]
        while min(min(map(len, rollouts.values()), default=0) for rollouts in found) < 8 or min(map(len, found)) < 8:
            for policy in range(2):
                for rollout in pipeline.take(policy):
                    found[policy][check_rollout(rollout, args.rollout)[0]].append(rollout)
    expected = [set(), set()]
    for group, games in enumerate(counting.seat_policies(args, session=0)):
        worker, split = divmod(group, 2)
        for i, game in enumerate(games):
            for agent, policy in enumerate(game):
                me = env_seed(args.seed, 0, worker, 0) + split * games.size + i
                expected[policy].add((me % 60_000, agent))
    assert [set(rollouts) for rollouts in found] == expected, "each policy has the agents that the table gives it"
    for rollouts in found:
        for row in rollouts.values():
            assert row[0]["first"][0]
            for one, two in zip(row, row[1:]):
                assert (one["vector"][-1] == two["vector"][0]).all() and one["first"][-1] == two["first"][0]
    assert any(rollout["inactive"].any() for rollout in rollouts[next(iter(rollouts))])
    for inference in pipeline.inferences:
        assert len(inference.episodes) > 20
        for raw, trained, length, *scores in inference.episodes:
            assert scores == [0, length, 0, 0, 0] and trained <= min(raw / 4, 1.2 * length) + 1e-3


class RandomAgent(torch.nn.Module):
    """Sees nothing."""

    heads, state_size, reduced = (2,), 0, ()

    def forward(self, obs, first, state):
        return torch.zeros(*first.shape, 2), torch.zeros(first.shape), state


def test_policies_do_not_wait_for_each_other_for_ever():
    """Any number of policies, groups, rows and batches; requests that come to each policy in another order; and learners that take an
    iteration now and then, at the latest when nothing else can move."""
    rng, device, space = random.Random(0), torch.device("cpu"), spaces((2, 2, 1), 0, (2,))
    for _ in range(60):
        P, workers, splits, n, T, ahead = (rng.randint(low, high) for low, high in ((2, 3), (1, 4), (1, 3), (1, 3), (1, 3), (0, 1)))
        rows, sync = workers * splits * n, rng.random() < 0.2  # of a policy
        B = rows if sync else rng.randint(1, 2 * rows)
        args = appo.resolve(appo.Args(num_policies=P, num_workers=workers, num_envs_per_worker=splits * n * P, worker_num_splits=splits, rollout=T,
                                      batch_size=B * T, max_batches_ahead=ahead, sync=sync, device="cpu", precision="float32"))  # fmt: skip
        share = appo.share_of(args)
        inferences = [appo.Inference(share, space, RandomAgent(), device, appo.Mailbox(space, rows, 0)) for _ in range(P)]
        groups, full, patience = range(workers * splits), [[] for _ in range(P)], rng.random()
        asked, coming = [list(groups) for _ in range(P)], [[] for _ in range(P)]  # coming: requests on their way

        def serve(policy: int, most: int) -> bool:
            rng.shuffle(coming[policy])
            asked[policy] += coming[policy][:most]
            del coming[policy][:most]
            served = inferences[policy].serve(asked[policy])
            asked[policy] = [group for group in asked[policy] if group not in served]
            while not inferences[policy].full.empty():
                full[policy].extend(inferences[policy].full.get()[0])
            return bool(served)

        for _ in range(15 * T * len(groups)):
            moved = sum(serve(policy, rng.randint(0, len(groups))) for policy in range(P))
            moved = moved or sum(serve(policy, len(groups)) for policy in range(P))
            ready = [policy for policy in range(P) if len(full[policy]) >= B]
            assert moved or ready, f"a deadlock: {args}"
            for policy in [policy for policy in ready if rng.random() > patience] or ([] if moved else ready[:1]):
                inferences[policy].released.put((np.array(full[policy][:B]), None))
                del full[policy][:B]
            waiting = {group for requests in asked + coming for group in requests}
            for requests in coming:
                requests.extend(set(groups) - waiting)  # these are stepped


def test_an_actor_that_dies_is_replaced_for_all_policies(counting):
    """Each of them gets a new pipe, several times."""
    with Pipeline(counting, num_workers=2, worker_num_splits=1, batch_size=10) as pipeline:
        for death in range(1, 3):
            for _ in range(3):
                pipeline.take(0), pipeline.take(1)
            before = [actors.pipes[0] for actors in pipeline.actors]
            os.kill(pipeline.processes.actors[0].pid, signal.SIGKILL)
            new, seen = env_seed(pipeline.args.seed, 0, 0, death) % 60_000, [set(), set()]
            mine = range(new, new + pipeline.args.num_envs_per_worker)
            while min(map(len, seen)) < 4:  # all of the successor's rows
                for policy in range(2):
                    for rollout in pipeline.take(policy):
                        if rollout["vector"][0, 0] == rollout["vector"][-1, 0]:  # not the one that the death has cut
                            row = check_rollout(rollout, pipeline.args.rollout)[0]
                            seen[policy] |= {row} if row[0] in mine else set()
            for actors, pipe in zip(pipeline.actors, before):
                assert actors.pipes[0] is not pipe and pipe.closed, "the old one"
    assert pipeline.processes.deaths == 2 and pipeline.log == ["actor 0 died of SIGKILL; starting another"] * 2


@pytest.fixture
def actors(monkeypatch):
    """A policy's, with no thread, and the main process's end of its pipe."""
    monkeypatch.setattr(appo.STOP, "asked_at", None)
    pipe, link = appo.mp.Pipe()
    inference = SimpleNamespace(bell=os.eventfd(0))
    actors = appo.Actors(appo.Args(num_workers=3, worker_num_splits=2), inference, link)
    yield actors, pipe
    for one in (pipe, link, *filter(None, actors.pipes)):
        one.close()
    os.close(inference.bell)


def new_actor(pipe, worker: int):
    """The actor's end of its pipe; the other has been handed over, but not taken yet."""
    mine, theirs = socket.socketpair()
    with theirs:
        pipe.send(worker)
        multiprocessing.reduction.send_handle(pipe, theirs.fileno(), None)
    return mine


@pytest.mark.parametrize("seen_first", ["death", "successor", "both"])
def test_the_pipe_of_a_new_actor_takes_the_place_of_the_old_ones(actors, seen_first):
    """Whichever is seen first, the end of the old one or the new one. What the dead one had asked for is dropped."""
    actors, main = actors
    pipes = [new_actor(main, worker) for worker in (2, 1)]
    actors.wait(), actors.wait()
    for pipe, split in zip(pipes, (1, 0)):
        appo.write_splits(pipe, bytes([split]))
        actors.wait()
    assert actors.requests == [5, 2], "group = worker x splits + split, in the order in which they came"
    old, other = pipes
    appo.write_splits(old, b"\0")
    if seen_first == "successor":
        new = new_actor(main, 2)
        actors.wait()
        old.close()
        actors.wait(0)
    else:
        old.close()
        if seen_first == "death":
            actors.wait(), actors.wait()
            assert actors.requests == [2] and actors.pipes[2] is None
        new = new_actor(main, 2)
        actors.wait()
    assert actors.requests == [2]
    appo.write_splits(new, b"\0")
    actors.wait()
    assert actors.requests == [2, 4]
    actors.reply([4, 2])
    assert (appo.read_splits(new), appo.read_splits(other), actors.requests) == (b"\0", b"\0", [])
    for _ in range(2):  # two more, one after the other, before the policy looks
        latest = new_actor(main, 2)
    actors.wait(), actors.wait()
    appo.write_splits(latest, b"\1")
    actors.wait()
    assert actors.requests == [5] and appo.read_splits(new) == b""
    main.close()
    actors.wait(0)
    assert appo.STOP.asked_at, "the end of the main process is that of the policy"
    appo.write_splits(other, b"\1")
    actors.wait()
    assert actors.requests == [5, 3], "and is seen once"


def test_orders_are_for_the_learner_and_nothing_says_stop(actors):
    actors, main = actors
    for order in ((None, {}), (Path("donor"), dict(gamma=0.5))):
        main.send(order)
        actors.wait()
        assert actors.orders.get() == order and not appo.STOP.asked_at
    main.send(None)
    actors.wait()
    assert appo.STOP.asked_at and actors.orders.empty()
    actors.start_all()  # does not wait for actors that will not come


def test_an_actor_waits_for_all_its_policies_and_ends_with_any(counting, monkeypatch):
    args = counting.Args(num_workers=1, num_envs_per_worker=2, worker_num_splits=2, num_policies=2, actor_timeout=60.0)
    mailbox, requested = counting.Mailbox(counting.spaces_of(args), 4, 0), torch.zeros(1, dtype=torch.int64)
    one, two = pairs = [socket.socketpair() for _ in range(2)]
    rows = counting.seat_rows(np.array([[[0, 1]], [[1, 0]]]), 2)
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    monkeypatch.setattr(counting, "faulthandler", SimpleNamespace(enable=lambda: None, register=lambda *_, chain: None))  # pytest's stays
    arguments = (None, args, 0, 7, rows, mailbox, requested, [far for _, far in pairs])
    thread = threading.Thread(target=counting.actor, args=arguments)
    thread.start()
    try:
        for near, _ in pairs:
            found = b""
            while len(found) < 2:
                found += counting.read_splits(near)
            assert found == b"\0\1"
        for near, _ in (one, two):
            assert not near.setblocking(False)
            counting.write_splits(near, b"\1")
            if near is one[0]:
                time.sleep(0.3)
                assert requested.item() == 2, "the second policy has not answered"
        for near, _ in pairs:
            near.setblocking(True)
            assert counting.read_splits(near) == b"\1"
        assert requested.item() == 3
    finally:
        one[0].close()
        thread.join(10)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not thread.is_alive()


def test_a_hang_is_ended_and_waiting_is_none(counting, tmp_path, capfd):
    """Where it hung is on stderr. A policy that does not answer for longer makes no actor hang."""
    line = "        self.count += 1\n"
    hang = "        if self.count > 2 and os.path.exists('HANG'):\n            os.unlink('HANG'), time.sleep(99)\n".replace("HANG", str(tmp_path / "hang"))
    source = Path(counting.__file__)
    appo = load(edited(tmp_path, "pbt_hanging", (line, line + hang), source=source))
    multiprocessing.forkserver._forkserver._stop()  # actors write where it does; a new one writes to `capfd`
    with Pipeline(appo, actor_timeout=1.0, num_workers=1, worker_num_splits=1, batch_size=10) as pipeline:
        pipeline.take(0), pipeline.take(1)
        time.sleep(2.5)  # the slots are soon full, and nobody takes them
        assert pipeline.processes.deaths == 0 and pipeline.inferences[0].t
        (tmp_path / "hang").touch()
        while pipeline.processes.deaths == 0:
            pipeline.take(0), pipeline.take(1)
        for _ in range(3):
            pipeline.take(0), pipeline.take(1)
    assert pipeline.log == [f"actor 0 {HUNG}; starting another"]
    assert re.search(r'File ".*pbt_hanging.py", line \d+ in step', capfd.readouterr().err)


def test_inactive_steps_are_in_no_loss_and_do_not_cut_the_trace():
    args = appo.Args(hidden_size=32, precision="float32")
    torch.manual_seed(0)
    agent, T, B = appo.Agent(spaces((72, 128, 3), 3, (3, 4)), args), 4, 2
    inactive = torch.zeros(T, B, dtype=torch.bool)
    inactive[1] = True

    def loss(**changes):
        torch.manual_seed(1)
        obs = dict(obs=torch.randint(256, (T + 1, B, 72, 128, 3), dtype=torch.uint8), vector=torch.randn(T + 1, B, 3))
        fields = dict(obs=obs, first=torch.zeros(T + 1, B, dtype=torch.bool), rnn_state=torch.zeros(B, agent.state_size),
                      actions=torch.ones(T, B, 2, dtype=torch.int64), logprobs=torch.full((T, B), -2.5), values=torch.randn(T, B),
                      rewards=torch.randn(T, B), terminated=torch.zeros(T, B, dtype=torch.bool), inactive=inactive, mask=~inactive,
                      restarts=[0])  # fmt: skip
        for name, (t, value) in changes.items():
            fields[name][t] = value
        return appo.appo_loss(args, agent, appo.Batch(**fields))[0].item()

    assert loss() == loss(actions=(1, 0)) == loss(logprobs=(1, -9.0)), "what was done meanwhile does not matter"
    assert loss() != loss(rewards=(1, 5.0)), "what happened does"


@pytest.fixture
def population_of(tmp_path):
    def make(objectives, **settings):
        """A Population after 2,000 steps; and in the place of processes what they were asked, and what was logged."""
        args = appo.Args(num_policies=len(objectives), with_pbt=True, env_id="battle", pbt_start_mutation=1500, pbt_period_env_steps=1000,
                         pbt_target_objective="return", **settings)  # fmt: skip
        mailbox = appo.Mailbox(spaces((36, 36, 3), 0, (2,)), len(objectives), len(appo.shaping_of("battle", None)))
        population = appo.Population(args, tmp_path, mailbox)
        population.reports = [dict(step=2000, objective=objective) for objective in objectives]
        asked, lines = [], []
        return population, SimpleNamespace(asked=asked, lines=lines, log=lines.append, ask=lambda *order: asked.append(order))

    return make


WRITER = SimpleNamespace(add_scalar=lambda *arguments: None)


def kinds(processes) -> list[tuple[int, str]]:
    """Of the exchanges in the log: which policy, and what became of it."""
    found = [re.fullmatch(r"step [\d,]+: policy (\d) \(return [\d.-]+\) is (kept|mutated|replaced)( by .*)?", line) for line in processes.lines]
    return [(int(match[1]), match[2]) for match in found]


@pytest.mark.parametrize("objectives, replaced", [
    ([10.0, 1.0, 9.0, 2.0], {1, 3}),
    ([-10.0, -100.0, -9.0, -20.0], {1, 3}),  # the relative gap of negative objectives
    ([10.0, 9.5, 9.8, 9.9], set()),  # too close
    ([-10.0, -9.5, -9.8, -9.6], set()),
    ([1.0, 9.0, 10.0, 2.0], {0, 3}),  # policy 0 can be replaced
])  # fmt: skip
def test_the_worst_are_replaced_by_the_best(population_of, objectives, replaced):
    population, processes = population_of(objectives, pbt_mutation_rate=1.0)
    population.reports[2]["step"] = 1499
    population.exchange(processes, WRITER)
    assert not processes.lines, "all must have made their steps"
    population.reports[2]["step"] = 1999
    for _ in range(3):
        population.exchange(processes, WRITER)
    best, found = set(np.argsort(objectives)[2:]), dict(kinds(processes))
    assert [policy for policy, _ in kinds(processes)] == [0, 1, 2, 3], "each has its turn once in a period"
    assert {policy for policy, kind in found.items() if kind == "replaced"} == replaced
    assert all(found[policy] == "kept" for policy in best)
    changed = [(policy, donor) for policy, donor, settings in processes.asked if settings]
    for policy, donor in changed:
        assert policy not in best and (donor is not None) == (policy in replaced)
    saves = [policy for policy, _, settings in processes.asked if not settings]
    assert set(saves) <= best and len(saves) == len(replaced)
    likely = [population.genes[policy] for policy in best] if 0 in replaced else [population.defaults]
    assert population.genes[0] in likely, "policy 0 never mutates"
    for report in population.reports:
        report["step"] = 50_000
    for _ in range(3):
        population.exchange(processes, WRITER)
    assert len(processes.lines) == 8, "periods without an exchange are not made up for"
    for genes, row in zip(population.genes, population.mailbox.shaping):  # a row of each policy
        assert row.tolist() == [genes[name] for name in appo.shaping_of("battle", None)]
    assert json.loads((population.folder / "population.json").read_text())["genes"] == population.genes


def test_an_exchange_that_is_interrupted_is_made_again(population_of):
    """What is saved then is what the policies have."""
    population, processes = population_of([10.0, 1.0, 9.0, 2.0], pbt_mutation_rate=1.0)
    before = [dict(genes) for genes in population.genes]

    def ask(*order):
        processes.asked.append(order)
        if len(processes.asked) == 2:
            raise appo.UserError("policy 1 died")

    processes.ask = ask
    with pytest.raises(appo.UserError, match="policy 1 died"):
        population.exchange(processes, WRITER)
    (donor, *save), (policy, folder, settings) = processes.asked
    assert save == [None, {}] and policy == 1 and folder == population.folder / f"policy_0{donor}" / "checkpoints" and settings
    assert (population.genes, population.exchanged, kinds(processes)) == (before, 0, [(0, "kept")])


def test_a_scenario_file_with_the_name_of_a_match_is_none():
    args = appo.resolve(appo.Args(cfg_path="deathmatch.cfg", num_policies=2, device="cpu"))
    assert args.env_id == "deathmatch" and args.pbt_target_objective == "return" and appo.shaping_of(args.env_id, args.cfg_path) == {}


def test_mutation_follows_its_rates():
    rng, args = random.Random(0), appo.Args(pbt_mutation_rate=0.15, pbt_optimize_gamma=True)
    defaults = dict(learning_rate=1e-4, gamma=0.99, max_grad_norm=0.0)
    results = [appo.mutate(args, defaults | dict(learning_rate=2e-4), defaults, rng) for _ in range(20_000)]
    factors = np.array([result["learning_rate"] / 2e-4 for result in results])
    changed = factors != 1
    assert changed.mean() == pytest.approx(0.15, abs=0.01)
    reset = np.isclose(factors, 0.5)
    assert reset.sum() / changed.sum() == pytest.approx(0.05, abs=0.01)
    sizes = np.maximum(factors, 1 / factors)[changed & ~reset]
    assert sizes.min() >= 1.05 and sizes.max() <= 1.5 and (factors[changed & ~reset] > 1).mean() == pytest.approx(0.5, abs=0.05)
    distances = np.array([(1 - result["gamma"]) / 0.01 for result in results])
    assert 0.8 < distances.min() < 0.9 and 1.1 < distances.max() <= 1.2 + 1e-6
    assert all(result["max_grad_norm"] == 0 for result in results)
    args.pbt_optimize_gamma = False
    assert all(appo.mutate(args, defaults, defaults, rng)["gamma"] == 0.99 for _ in range(100))


def test_policies_begin_with_their_own_settings():
    settings = '{"1": {"HEALTH-": -0.01, "gamma": 0.9}, "0": {"learning_rate": 0.5}}'
    genes = appo.starting_genes(appo.Args(env_id="battle", num_policies=2, policy_settings=settings))
    defaults = appo.default_genes(appo.Args(env_id="battle"))
    assert genes == [defaults | dict(learning_rate=0.5), defaults | {"HEALTH-": -0.01, "gamma": 0.9}]


def processes_of(log, **settings):
    """Processes that have not been started."""
    args = appo.Args(**dict(num_workers=1, num_envs_per_worker=12, worker_num_splits=1, device="cpu") | settings)
    mailbox, population = SimpleNamespace(part=lambda policy, policies: None), SimpleNamespace(session=0, folder=Path("."))
    return appo.Processes(args, None, mailbox, population, log.append)


def dead_actor(code: int, requested: int, **settings):
    """A worker whose actor has ended. Its log has also the workers that were started."""
    log = []
    processes = processes_of(log, **settings)
    processes.actors[0], processes.requested[0] = SimpleNamespace(is_alive=bool, exitcode=code), requested
    processes.started, processes.start = True, log.append
    return processes, log


@pytest.mark.parametrize("code, how", [(1, "ended (exit code 1)"), (-signal.SIGSEGV, "died of SIGSEGV"), (-signal.SIGALRM, HUNG)])
def test_an_actor_that_ends_while_environments_start_ends_the_run(code, how):
    processes, log = dead_actor(code, 0)
    processes.started = False
    with pytest.raises(appo.UserError, match=re.escape(f"while its environments started, actor 0 {how}")):
        processes.check()
    assert log == []


@pytest.mark.parametrize("sync", [False, True])
def test_an_actor_that_dies_ends_a_population_with_sync(sync):
    """Else its rows have one step more for some policies than for others, which wait for each other then."""
    processes, log = dead_actor(1, 2000, sync=sync)
    with pytest.raises(appo.UserError, match="with --sync several policies end with it") if sync else contextlib.nullcontext():
        processes.check()
    assert log == ([] if sync else ["actor 0 ended (exit code 1); starting another", 0])


def test_a_worker_that_cannot_be_kept_alive_ends_the_run():
    processes, log = dead_actor(-signal.SIGALRM, 999)
    processes.check(), processes.check()
    processes.requested[0] = 1000
    processes.check()
    processes.requested[0] = 999
    processes.check(), processes.check()
    assert processes.deaths == 5 == log.count(f"actor 0 {HUNG}; starting another")
    with pytest.raises(appo.UserError, match=re.escape(f"for the third time in a row, actor 0 {HUNG}")):
        processes.check()


@pytest.mark.parametrize("env_id, logits", [("duel_bots", 41), ("deathmatch_bots", 39), ("duel", 41), ("deathmatch", 41)])
def test_the_heads_of_a_match_are_sample_factorys(env_id, logits):
    player = appo.Player(env_id, 4)
    buttons = [button.name for button in player.game.get_available_buttons()]
    assert sum(player.scenario.heads) == logits and ("USE" in buttons) == (logits == 41)
    assert sum(press.shape[1] for press in player.presses) == len(buttons), "every button belongs to one head, in order"
    assert buttons[-1] == "TURN_LEFT_RIGHT_DELTA" and player.presses[-1].shape == (21, 1) and player.presses[-1].max() == 12.5
    assert (player.presses[-1][10] == 0).all()


@pytest.mark.parametrize("env_id", ["basic", "battle", "health_gathering", "defend_the_center"])
def test_a_game_of_one_player_is_that_of_the_base_file(env_id):
    base, env = appo_doom.DoomEnv(appo_doom.Args(env_id=env_id, reward_clip=np.inf)), appo.DoomMatch(env_id, 4)
    try:
        seen, _ = base.reset(seed=3)
        first, _ = env.reset(seed=3)
        base.action_space.seed(0)
        steps, bonus = [(seen, first["player_0"])], 0.0
        for _ in range(150):
            action = base.action_space.sample()
            seen, reward, terminated, truncated, info = base.step(action)
            results = [result["player_0"] for result in env.step({"player_0": action})]
            assert results[1:4] == [pytest.approx(reward, abs=1e-9), terminated, truncated] and results[4]["raw_reward"] == info["raw_reward"]
            bonus += abs(reward - info["raw_reward"] * base.scenario.reward_scale)
            steps.append((seen, results[0]))
            if terminated or truncated:
                assert env.agents == []
                steps.append((base.reset()[0], env.reset()[0]["player_0"]))
        for one, two in steps:
            two = appo.by_name(two)
            assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)
        assert (bonus > 0) == (env_id in ("battle", "health_gathering")), "shaping was seen, where there is some"
    finally:
        base.close()
        env.close()


SMALL = ("--experiment", "e", "--num-policies", "2", "--num-workers", "2", "--num-envs-per-worker", "4", "--rollout", "8", "--batch-size", "32",
         "--hidden-size", "32", "--device", "cpu", "--total-timesteps", "1000000", "--learner-threads", "1")  # fmt: skip


@pytest.fixture
def start(run, tmp_path):
    def start(*flags: str, edits=()):
        return run(*SMALL, *flags, script=edited(tmp_path, "pbt_edited", REPORTS, *edits, source=SCRIPT))

    return start


def steps(r) -> int:
    found = re.findall(r"step ([\d,]+): .*frames/s", r.text())
    return int(found[-1].replace(",", "")) if found else 0


def exchanges(r) -> list[tuple[str, str, str]]:
    """In the order in which they were made: policy, objective, what became of it."""
    return re.findall(r"step [\d,]+: policy (\d) \(return ([\d.-]+)\) is (kept|mutated|replaced by policy \d)", r.text())


def goes_on(r) -> None:
    before = steps(r)
    r.wait_for(lambda: steps(r) > before + 100, 90, "more steps")


def stop(r, send=os.kill, number=signal.SIGINT) -> str:
    send(r.process.pid, number)
    assert r.wait(40) == 130, r.text()
    return r.text()


def played(folder: Path, *flags: str, code: int = 0) -> str:
    """What evaluate.py says of a run."""
    file = json.loads((folder / "cfg.json").read_text())["file"]
    done = python(ROOT / "evaluate.py", folder, "--file", file, *flags, folder=folder.parent)
    assert done.returncode == code, done.stdout
    return done.stdout


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def children(r, name: str) -> list[int]:
    """Actors or policies: of these processes of the fork server only actors have engines."""
    with_engines = {parent(engine) for engine in r.engines()}
    return [pid for pid in r.actors() if (name == "actor") == (pid in with_engines)]


def newest(folder: Path) -> dict:
    return torch.load(sorted((folder / "checkpoints").glob("checkpoint_*"))[-1], weights_only=True)


def test_a_population_trains_exchanges_stops_and_goes_on(start, tmp_path):
    flags = ("--env-id", "battle", "--with-pbt", "--pbt-start-mutation", "300", "--pbt-period-env-steps", "300", "--pbt-mutation-rate", "1",
             "--pbt-replace-reward-gap", "0", "--policy-settings", '{"1": {"learning_rate": 0.01}}')  # fmt: skip
    r = start(*flags)
    r.wait_for(lambda: len(exchanges(r)) >= 4, 120, "exchanges")
    text = stop(r)
    assert re.search(r"policy [01], step [\d,]+: (return [\d.-]+, )?[\d,]+ frames/s, bottleneck: (environments|learner|inference), lag [\d.]+\n",
                     text)  # fmt: skip
    saved = json.loads((tmp_path / "e" / "population.json").read_text())
    more = {f"charts/{name}" for name in ("kills", "frags", "deaths", "place", "win")}
    assert set(scalars(tmp_path / "e" / "policy_00")) == TAGS | more
    readme = (ROOT / "benchmark" / "METRICS.md").read_text()
    assert all(f"`{tag}`" in readme for tag in more)
    written = scalars(tmp_path / "e")
    assert set(written) == {f"pbt/{name}/{index}" for name in [*saved["genes"][0], "objective", "weights_of"] for index in range(2)}
    assert len(written["pbt/objective/0"]) + len(written["pbt/objective/1"]) == len(exchanges(r))
    for index in range(2):
        last = {name: written[f"pbt/{name}/{index}"][-1].value for name in saved["genes"][index]}
        assert last == pytest.approx(saved["genes"][index]) and last["HEALTH+"] > 0
    assert len(written["pbt/gamma/0"]) == len(written["pbt/objective/0"]) + 1, "the first one is of the start"
    policies = [tmp_path / "e" / f"policy_{index:02d}" for index in range(2)]
    before = [newest(folder)["global_step"] for folder in policies]
    r = start("--vf-coef", "0.25")
    goes_on(r)
    text = stop(r, os.killpg, signal.SIGTERM)  # as `timeout` and batch systems send it: to all
    assert "override: vf_coef 0.5 -> 0.25" in text and "0 actors replaced" in text
    assert all(f"policy {index}: resuming at step {step:,}; learning rate " in text for index, step in enumerate(before))
    again = json.loads((tmp_path / "e" / "population.json").read_text())
    assert again["session"] == saved["session"] + 1
    assert all(newest(folder)["global_step"] > step for folder, step in zip(policies, before))
    assert again["steps"] == [newest(folder)["global_step"] for folder in policies]
    r = start("--total-timesteps", "301")
    assert r.wait(30) == 0 and "steps already; raise --total-timesteps to go on" in r.text()
    assert len(re.findall(r"policy [01]: 5 episodes, return -?[\d.]+ .*, kills [\d.]+", played(tmp_path / "e", "--episodes", "5"))) == 2
    for folder, genes in zip(policies, again["genes"]):
        assert newest(folder)["args"]["learning_rate"] == pytest.approx(genes["learning_rate"])


# One agent. Which third of the image is bright says which of three actions is rewarded, 20 times an episode.
BRIGHT = """
class Env:
    possible_agents, metadata = ["player_0"], {}

    def observation_space(self, agent):
        return gym.spaces.Box(0, 255, (36, 36, 3), np.uint8)

    def action_space(self, agent):
        return gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.random = random.Random(seed)
        self.count, self.agents = 0, list(self.possible_agents)
        return self.observations(), {"player_0": {}}

    def observations(self):
        self.bright, image = self.random.randrange(3), np.zeros((36, 36, 3), np.uint8)
        image[:, 12 * self.bright : 12 * self.bright + 12] = 255
        return {"player_0": image}

    def step(self, actions):
        self.count += 1
        reward, over = float(actions["player_0"] == self.bright), self.count == 20
        self.agents = [] if over else self.agents
        return self.observations(), {"player_0": reward}, {"player_0": False}, {"player_0": over}, {"player_0": {}}

    def close(self):
        pass
"""


def test_a_population_mends_what_ruinous_learning_rates_spoil(start, tmp_path):
    """Three of four policies begin with rates that learn nothing. In the end all of them play as well as the fourth: at each exchange
    the worst becomes a copy of the best."""
    rates = '{"1": {"learning_rate": 1e-8}, "2": {"learning_rate": 1e-8}, "3": {"learning_rate": 0.5}}'
    r = start("--num-policies", "4", "--num-envs-per-worker", "8", "--frameskip", "1", "--gamma", "0", "--rnn-type", "none", "--learning-rate",
              "0.002", "--with-pbt", "--pbt-start-mutation", "2000", "--pbt-period-env-steps", "1000", "--pbt-replace-fraction", "0.25",
              "--policy-settings", rates, edits=[replacing(BRIGHT + OWN)])  # fmt: skip

    def returns() -> list[float]:
        """The last one of each policy."""
        return [float(value) for value in dict(re.findall(r"policy (\d), step [\d,]+: return ([\d.-]+)", r.text())).values()]

    r.wait_for(lambda: len(returns()) == 4 and min(returns()) > 17, 150, "four good policies")
    stop(r)
    first = {policy: float(objective) for policy, objective, _ in exchanges(r)[:4]}
    assert first.pop("0") > 15 and max(first.values()) < 12, first
    assert {"1", "2", "3"} <= {policy for policy, _, kind in exchanges(r) if kind.startswith("replaced")}
    last = [genes["learning_rate"] for genes in json.loads((tmp_path / "e" / "population.json").read_text())["genes"]]
    assert min(last) > 1e-4 and max(last) < 0.02, "no ruinous rate is left"


def new_learner(counting):
    """Whose first four slots hold finite numbers."""
    args = counting.resolve(counting.Args(num_policies=1, num_workers=1, num_envs_per_worker=2, rollout=5, hidden_size=32, device="cpu",
                                          precision="float32", batch_size=20, max_policy_lag=7))  # fmt: skip
    args, spaces, device = counting.share_of(args), counting.spaces_of(args), torch.device("cpu")
    agent, mailbox = counting.Agent(spaces, args), counting.Mailbox(spaces, 4, 0)
    learner = counting.Learner(args, agent, counting.Inference(args, spaces, agent, device, mailbox), device)
    r = learner.inference.rollouts
    for field in (r.rewards, r.logprobs, r.values):
        field[:, :4] = 0.0
    return learner


def test_inactive_steps_are_no_samples(counting, monkeypatch):
    learner = new_learner(counting)
    r = learner.inference.rollouts
    r.inactive[2, 0] = r.first[4, 2] = True
    expected = torch.ones(5, 4, dtype=torch.bool)
    expected[2, 0] = expected[3, 2] = False
    assert torch.equal(learner.gather(np.arange(4), learner.version).mask, expected)
    monkeypatch.setattr(torch, "randperm", lambda n: torch.arange(n).roll(-2))  # the statistics are of step 2
    metrics = learner.iterate(np.arange(4))
    assert learner.global_step == expected.sum() == 18 and metrics["lag/masked"] == 0
    assert {normalizer.count.item() for normalizer in learner.agent.normalizers.values()} == {3}


def test_a_policy_obeys(counting, tmp_path):
    learner, donor = new_learner(counting), new_learner(counting)
    for parameter in donor.agent.parameters():
        parameter.grad = torch.ones_like(parameter)
    donor.optimizer.step()
    counting.save_latest(tmp_path / "donor", donor, 2)
    reports = []
    link = SimpleNamespace(send=reports.append)
    counting.obey(learner, tmp_path / "own", link, tmp_path / "donor", dict(learning_rate=0.03, gamma=0.5))
    assert reports == [dict(answered=True)]
    assert (learner.args.learning_rate, learner.args.gamma, learner.learning_rate()) == (0.03, 0.5, 0.03)
    for one, two in zip(learner.agent.parameters(), donor.agent.parameters()):
        assert torch.equal(one, two) and torch.equal(learner.optimizer.state[one]["exp_avg"], donor.optimizer.state[two]["exp_avg"])
    (path,) = (tmp_path / "own").glob("checkpoint_*")
    saved = torch.load(path, weights_only=True)
    assert (saved["version"], saved["args"]["gamma"]) == (learner.version, 0.5)
    link, other = counting.mp.Pipe()
    other.close()
    counting.tell(link, step=1)  # the main process is dead


def test_every_seat_is_shaped_as_its_policy_says(monkeypatch):
    """When an episode begins."""
    told = []

    class Match:
        possible_agents, close = ["player_0", "player_1"], lambda self: None

        def observation_space(self, agent):
            return appo.gym.spaces.Box(0, 255, (2, 2, 1), np.uint8)

        def action_space(self, agent):
            return appo.gym.spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            told.append({agent: coefficients["HEALTH-"] for agent, coefficients in options["shaping"].items()})
            self.agents = list(self.possible_agents)
            return dict.fromkeys(self.agents, np.zeros((2, 2, 1), np.uint8)), {}

        def step(self, actions):
            self.agents = []
            return *(dict.fromkeys(actions, value) for value in (np.zeros((2, 2, 1), np.uint8), 0.0, True, False)), {}

    monkeypatch.setattr(appo, "make_env", lambda args: Match())
    args = appo.Args(env_id="battle", num_workers=1)
    mailbox = appo.Mailbox(spaces((2, 2, 1), 0, (2,)), 2, len(appo.shaping_of("battle", None))).arrays()
    mailbox.shaping[0], mailbox.shaping[1] = 1, 2
    envs = appo.WorkerEnvs(args, appo.seat_rows(np.array([[[1, 0]]]), 2), mailbox, 0)
    envs.reset(0)
    mailbox.shaping[1] = 3
    envs.step(0)
    assert told == [dict(player_0=2, player_1=1)], "not before the next episode"
    envs.step(0)
    assert told[1:] == [dict(player_0=3, player_1=1)]


def test_a_reward_that_is_not_finite_is_an_error(counting):
    args = counting.Args(num_workers=1)
    mailbox = counting.Mailbox(counting.spaces_of(args), 2, 0).arrays()
    envs = counting.WorkerEnvs(args, counting.seat_rows(np.array([[[0, 1]]]), 2), mailbox, 0)
    envs.reset(0)
    env = envs.splits[0].games[0]
    seen, rewards, *others = env.step({agent: (0, 0) for agent in env.agents})
    env.step = lambda actions: (seen, rewards | dict(player_1=np.nan), *others)
    with pytest.raises(ValueError, match=r"a reward is not finite: \[.*nan\]"):
        envs.step(0)


def test_what_a_match_says_of_a_player():
    """Reward, raw reward and whether it is inactive; and scores. In the place of the engine are its variables."""
    env, now = appo.DoomMatch("duel_bots", 4), dict(HEALTH=100, PLAYER_NUMBER=1, PLAYER_COUNT=3, DEATHCOUNT=2)
    (player,) = env.players

    def state():
        numbers = np.array([now.get(name, 0.0) for name in (*appo.VARIABLES, *appo.MATCH_VARIABLES)])
        return SimpleNamespace(screen_buffer=np.zeros(appo.SCREEN, np.uint8), game_variables=numbers)

    def step(**changes):
        now.update(changes)
        observation, reward, _, _, info = player.step(np.array([0, 0, 0, 0, 0, 0, 10]))
        return (reward, info["raw_reward"], bool(info["inactive"])), observation["vector"]

    player.game = SimpleNamespace(get_state=state, is_episode_finished=lambda: False, make_action=lambda buttons, tics: 0.25,
                                  get_game_variable=lambda variable: float(now.get(variable.name, 0)))  # fmt: skip
    player.reset()
    for changes, expected in (
        (dict(HEALTH=90), (0.25, 0, False)),  # the first life
        (dict(FRAGCOUNT=1, HEALTH=70), (0.25 + 1 - 0.06, 1, False)),
        (dict(DAMAGECOUNT=500, HITCOUNT=9), (0.25 + 0.6 + 0.05, 0, False)),
        (dict(DEAD=1, DEATHCOUNT=3, HEALTH=0), (0.25 - 0.75 - 0.21, 0, True)),
        (dict(DEAD=0, HEALTH=100), (0.25, 0, False)),  # a new life has other numbers
        (dict(FRAGCOUNT=-1), (0.25 - 3, -2, False)),
    ):
        assert step(**changes)[0] == pytest.approx(expected), changes
    vector = step(ARMOR=60, WEAPON2=1, AMMO3=150, PLAYER1_FRAGCOUNT=5, PLAYER2_FRAGCOUNT=7, PLAYER3_FRAGCOUNT=7)[1]
    assert vector[[3, 6, 9, 18]] == pytest.approx([2, 0.6, 1, 5])
    assert player.score() == dict(kills=0, frags=7, deaths=1, place=1, win=0)
    step(PLAYER3_FRAGCOUNT=6)
    assert player.score() == dict(kills=0, frags=7, deaths=1, place=1, win=1)
    step(PLAYER2_FRAGCOUNT=-2)
    assert player.score() == dict(kills=0, frags=-2, deaths=1, place=3, win=0)


@pytest.mark.parametrize("agents, score, expected", [
    (2, lambda seat, action, seed: dict(frags=action, raw_reward=-float(action), place=1), {("0", "1"): [0, 6, 0]}),  # policy 1 acts 1
    (2, lambda seat, action, seed: dict(frags=seat, place=1), {("0", "1"): [3, 3, 0]}),  # each sits as often in each place
    (2, lambda seat, action, seed: dict(frags=2, place=1), {("0", "1"): [0, 0, 6]}),
    (2, lambda seat, action, seed: dict(raw_reward=float(action)), {("0", "1"): [0, 6, 0]}),  # without frags by return
    (1, lambda seat, action, seed: dict(place=1 + (seed % 3 == 0), win=seed % 3 == 1), {(i, "bots"): [2, 2, 2] for i in "01"}),
])  # fmt: skip
def test_who_has_won(agents, score, expected, monkeypatch):
    class Game:
        possible_agents, close = [f"player_{i}" for i in range(agents)], lambda self: None

        def observation_space(self, agent):
            return appo.gym.spaces.Box(0, 255, (36, 36, 3), np.uint8)

        def action_space(self, agent):
            return appo.gym.spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            self.seed, self.agents = seed, list(self.possible_agents)
            return dict.fromkeys(self.agents, np.zeros((36, 36, 3), np.uint8)), {}

        def step(self, actions):
            self.agents = []
            infos = {agent: score(seat, int(action), self.seed) for seat, (agent, action) in enumerate(actions.items())}
            images, *others = (dict.fromkeys(actions, value) for value in (np.zeros((36, 36, 3), np.uint8), 0.0, True, False))
            return images, *others, infos

    def policy(action: int):
        def play(obs, first, state):
            return 100.0 * torch.eye(2)[action].expand(1, first.shape[1], 2), None, state

        play.heads, play.state_size = (2,), 0
        return play

    monkeypatch.setattr(appo, "make_env", lambda args: Game())
    used = appo.resolve(appo.Args(num_workers=1, num_policies=1, device="cpu", precision="float32"))
    monkeypatch.setattr(appo, "load_agent", lambda place, index, kind, **changes: (policy(index), used, 0))
    options = evaluate.Options(folder=Path("train_dir/e"), policies=[0, 1], episodes=6, likeliest=True)
    assert evaluate.evaluate_population(appo, appo.Args(), options) == expected


def test_wilson():
    assert [evaluate.wilson(8, 10), evaluate.wilson(50, 50), evaluate.wilson(0, 0)] == ["80% (49% to 94%)", "100% (93% to 100%)", "none"]


@pytest.mark.parametrize("limit", [dict(total_timesteps=7), dict(train_for_seconds=0.0)])
def test_a_population_ends(limit):
    looks = iter(range(3)).__next__  # else StopIteration
    population = SimpleNamespace(step=lambda: 7.0, reports=[])
    appo.watch(appo.Args(**limit), population, SimpleNamespace(pipes=[], check=looks), None, lambda *text: None)


@pytest.mark.parametrize("env_id, default", [("duel", "wins"), ("deathmatch", "wins"), ("duel_bots", "frags"), ("battle", "return")])
def test_default_objective(env_id, default):
    assert appo.resolve(appo.Args(env_id=env_id, num_policies=2, device="cpu")).pbt_target_objective == default


@pytest.mark.parametrize("objective, mean", [("return", 2), ("kills", 6), ("frags", 7), ("wins", 4)])
def test_the_objective_is_the_mean_of_its_column(tmp_path, objective, mean):
    sent, episodes = [], [[1, 2, 3, 4, 5, 6, 7, 8], [3, 2, 3, 8, 9, 6, 7, 0]]
    learner = SimpleNamespace(inference=SimpleNamespace(episodes=episodes, counts=Counter()), global_step=9, version=1)
    reporter = appo.Reporter(appo.Args(pbt_target_objective=objective), learner, tmp_path, SimpleNamespace(send=sent.append))
    reporter.last["time"] -= 5
    learner.version = 2
    assert reporter.update({}) == -np.inf and [(report["objective"], report["step"]) for report in sent] == [(mean, 9)]
    episodes *= 50
    reporter.last["time"] -= 5
    assert reporter.update({}) == mean, "chooses best.pth, when there are enough episodes"
    assert sent[2]["log"].startswith("warning: no update in 5 s")


def test_what_a_resumed_population_keeps(tmp_path):
    def population(**settings):
        args = appo.resolve(appo.Args(env_id="battle", num_policies=2, num_workers=1, num_envs_per_worker=2, device="cpu",
                                      policy_settings='{"1": {"gamma": 0.9}}', **settings))  # fmt: skip
        return appo.Population(args, tmp_path, appo.Mailbox(spaces((36, 36, 3), 0, (2,)), 2, len(appo.shaping_of("battle", None))))

    one = population()
    one.genes[0]["HEALTH+"], one.genes[1]["learning_rate"], one.exchanged, one.reports[1]["step"] = 0.5, 0.01, 700, 900
    one.save()
    two = population(vf_coef=0.25)  # typed anew: for all policies
    assert two.genes == [genes | dict(vf_coef=0.25) for genes in one.genes]
    assert (two.session, two.exchanged, two.step()) == (1, 700, 450)
    for genes, row in zip(two.genes, two.mailbox.shaping):  # each has one
        assert row.tolist() == pytest.approx([genes[name] for name in appo.shaping_of("battle", None)])


def test_nobody_is_among_the_best_and_the_worst(population_of):
    population, processes = population_of([3.0, 2.0, 1.0], pbt_mutation_rate=1.0, pbt_replace_fraction=0.5)
    population.exchange(processes, WRITER)
    assert kinds(processes) == [(0, "kept"), (1, "mutated"), (2, "replaced")]


def test_all_but_the_first_policy_begin_mutated():
    args = appo.Args(env_id="battle", num_policies=3, with_pbt=True, pbt_mutation_rate=1.0, policy_settings='{"2": {"learning_rate": 0.01}}')
    defaults, (first, second, third) = appo.default_genes(args), appo.starting_genes(args)
    assert first == defaults and third["learning_rate"] == 0.01 and second != third
    assert {name for name in defaults if second[name] == defaults[name]} <= {"gamma"}


def test_sizes_are_of_one_policy():
    settings = dict(env_id="duel", num_policies=4, num_workers=20, device="cpu")  # 160 rows each
    assert [appo.resolve(appo.Args(**settings, sync=sync)).batch_size for sync in (False, True)] == [2048, 160 * 32]


def test_settings_of_one_players_games_are_the_base_files():
    for env_id, scenario in appo_doom.SCENARIOS.items():
        assert appo.SCENARIOS[env_id][: len(scenario)] == scenario


def test_policies_are_dealt_to_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    processes, started = processes_of([], num_policies=3, device="cuda"), []
    processes.population.genes = [appo.default_genes(processes.args) | dict(learning_rate=rate) for rate in (0.1, 0.5, 0.2)]
    process = SimpleNamespace(start=lambda: None)
    processes.context = SimpleNamespace(Pipe=appo.mp.Pipe, Process=lambda target, name, args, daemon: started.append(args[0]) or process)
    for policy in range(3):
        processes.start_policy(policy)
    assert [(args.device, args.learning_rate) for args in started] == [("cuda:0", 0.1), ("cuda:1", 0.5), ("cuda:0", 0.2)]


def test_what_was_sampled_before_a_replacement_is_not_learned_from(counting):
    learner, other = new_learner(counting), new_learner(counting)
    agents = [learner.agent, other.agent]
    donor = dict(agent=other.agent.state_dict(), optimizer=other.optimizer.state_dict(), episodes=[[1.0] * 7])
    learner.version = 3
    learner.inference.rollouts.versions[:, :4] = 3
    assert learner.gather(np.arange(4), learner.version).mask.sum() == 20
    learner.become(donor)
    assert learner.gather(np.arange(4), learner.version).mask.sum() == 0
    assert all(torch.equal(one, two) for one, two in zip(agents[0].state_dict().values(), agents[1].state_dict().values()))
    acting = learner.inference.acting.current
    assert acting.version == learner.version and torch.equal(acting.agent.actor.weight, agents[1].actor.weight)
    assert list(learner.inference.episodes) == [[1.0] * 7]


def sentence(index: int | str, code: int) -> str:
    return rf"error: policy {index} died \(exit code {code}\); to go on, give the same command with --experiment e"


def in_the_second(lines: str) -> tuple[str, str]:
    """An edit: what happens in the second policy after its twentieth loss was computed."""
    return replacing(f"""
policy_of_the_file, loss_of = train_policy, appo_loss


def train_policy(args, policy, *arguments):
    args.left = 20 if policy == 1 else np.inf
    policy_of_the_file(args, policy, *arguments)


def appo_loss(args, *arguments):
    result, args.left = loss_of(args, *arguments), args.left - 1
    if args.left > 0:
        return result
    {lines}
""")


def test_a_policy_that_dies_ends_the_run_with_one_sentence(start, tmp_path):
    """The second policy's loss is not finite after a while; the other saves, and so does the second, which has good weights."""
    r = start(edits=[in_the_second("loss, *others = result\n    return loss * torch.nan, *others")])
    assert r.wait(90) == 2
    last = r.text().strip().splitlines()[-1]
    assert re.fullmatch(r"error: policy 1: the loss \(nan\) .* is not finite.*; what was learned before is saved", last), r.text()[-2000:]
    assert "Traceback" not in r.text() and "starting another" not in r.text(), "actors end with the policy's pipes"
    assert all(newest(tmp_path / "e" / f"policy_0{index}")["version"] > 1 for index in range(2))


def test_what_nobody_foresaw_saves_nothing_of_that_policy(start, tmp_path):
    r = start(edits=[in_the_second("raise IndexError('a mistake')")])
    assert r.wait(90) == 2 and "IndexError: a mistake" in r.text()
    assert (tmp_path / "e" / "policy_00" / "checkpoints").exists() and not (tmp_path / "e" / "policy_01" / "checkpoints").exists()


def test_a_user_error_of_a_policy_is_the_runs(start, tmp_path):
    (tmp_path / "e" / "policy_01" / "checkpoints").mkdir(parents=True)
    (tmp_path / "e" / "policy_01" / "checkpoints" / "checkpoint_000000001_000000000001.pth").write_bytes(b"damaged")
    r = start()
    assert r.wait(60) == 2 and "Traceback" not in r.text()
    assert re.fullmatch(r"error: policy 1: no checkpoint in .* can be read; move them away to start anew", r.text().splitlines()[-1])


def test_what_is_killed_one_after_the_other(start, tmp_path):
    """An actor and an engine cost an actor, which is replaced. Without a policy the run ends: the other saves. Without the main process
    both save. The fixture `run` looks for what stays behind."""
    r = start("--env-id", "basic")
    r.wait_for(lambda: playing(r) == 8 and steps(r) > 0, 60, "the games")
    policies = children(r, "policy")
    assert len(policies) == 2
    for victims, how in ((lambda: children(r, "actor"), "died of SIGKILL"), (r.engines, r"ended \(exit code 1\)")):
        victim, *_ = victims()
        os.kill(victim, signal.SIGKILL)
        r.wait_for(lambda how=how: re.search(rf"actor [01] {how}; starting another", r.text()), 30, "the new actor")
        r.wait_for(lambda victim=victim: playing(r) == 8 and victim not in r.engines(), 30, "its games")
        goes_on(r)
    before = len(r.text())
    os.kill(policies[0], signal.SIGKILL)
    assert r.wait(60) == 2 and re.fullmatch(sentence("[01]", -9), r.text().splitlines()[-1])
    assert "Traceback" not in r.text()[before:] and len(list((tmp_path / "e").glob("policy_0?/checkpoints"))) == 1
    r = start()
    r.wait_for(lambda: re.search(r"policy [01]: resuming at step", r.text()) and len(r.engines()) == 8 and steps(r) > 0, 60, "the rest of it")
    before = set((tmp_path / "e").glob("policy_0?/checkpoints/checkpoint_*.pth"))
    os.kill(r.process.pid, signal.SIGKILL)
    r.wait()
    deadline = time.monotonic() + 20
    while len(set((tmp_path / "e").glob("policy_0?/checkpoints/checkpoint_*.pth")) - before) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_signal_that_is_sent_twice_is_one(start, tmp_path):
    r = start()
    r.wait_for(lambda: steps(r) > 0, 60, "steps")
    os.kill(r.process.pid, signal.SIGINT)
    text = stop(r)
    assert "stopped: " in text and "stopped at once" not in text
    assert all(newest(tmp_path / "e" / f"policy_0{index}")["version"] > 1 for index in range(2))


def test_a_stop_before_the_first_update_saves_nothing(start, tmp_path):
    r = start("--batch-size", "32000", "--learner-threads", "1")
    r.wait_for(lambda: len(r.engines()) == 8, 60, "the games")
    time.sleep(1)
    stop(r)
    assert not list((tmp_path / "e").glob("policy_0?/checkpoints"))


def test_all_end_when_the_main_process_is_killed_while_games_start(start):
    r = start("--env-id", "basic")
    r.wait_for(lambda: r.engines(), 60, "the first game")
    os.kill(r.process.pid, signal.SIGKILL)  # the fixture `run` looks for what stays behind
    r.wait()


MATCH = ("--env-id", "duel", "--num-envs-per-worker", "2")


def playing(r) -> int:
    """Number of engines whose games have started: their shared memory has lost its name."""
    def started(engine: int) -> bool:
        try:
            return bool(re.search(r"/dev/shm/ViZDoom.*\(deleted\)", Path(f"/proc/{engine}/maps").read_text()))
        except OSError:  # it has just ended
            return False

    return sum(map(started, r.engines()))


def test_a_match_with_a_dead_or_hanging_player_costs_an_actor_and_ends_with_main(start):
    """The other players' engines wait for it."""
    r = start(*MATCH, "--num-envs-per-worker", "1", "--actor-timeout", "6")
    r.wait_for(lambda: playing(r) == 4 and steps(r) > 0, 90, "the games")
    # One that was killed with the message queue's lock in its hand hangs, too
    for number, how in ((signal.SIGKILL, r"(ended \(exit code 1\)|hung .*)"), (signal.SIGSTOP, "hung .*")):
        victim, before = r.engines()[0], len(r.text())
        os.kill(victim, number)
        r.wait_for(lambda: re.search(rf"actor \d {how}; starting another", r.text()[before:]), 60, "the new actor")
        r.wait_for(lambda: victim not in r.engines() and playing(r) == 4, 60, "all engines again")
        goes_on(r)
    os.kill(r.process.pid, signal.SIGKILL)  # the fixture `run` looks for what stays behind
    r.wait()


def short_duels(seconds: int) -> tuple[str, str]:
    changed = "{name: SCENARIOS[name]._replace(time_limit=35 * %d) for name in ('duel', 'duel_bots')}" % seconds
    return replacing(f"SCENARIOS.update({changed})")


def test_matches_between_checkpoints(start, tmp_path):
    r = start(*MATCH, "--total-timesteps", "300", edits=[short_duels(5)])
    assert r.wait(120) == 0 and re.search(r"done: [\d,]+, [\d,]+ steps, 0 actors replaced", r.text()), r.text()
    text = played(tmp_path / "e", "--episodes", "4", "--save-video")
    found = re.search(r"0 against 1: (\d+) wins, (\d+) losses, (\d+) ties; (none|\d+% \(\d+% to \d+%\)) of the decided", text)
    assert found and sum(map(int, found.groups()[:3])) == 4
    assert len(re.findall(r"policy [01]: 4 episodes, return", text)) == 2
    assert (tmp_path / "e" / "video.mp4").stat().st_size > 1000
    shutil.copytree(tmp_path / "e", tmp_path / "other" / "e")
    edited(tmp_path, "pbt_edited", short_duels(1), source=SCRIPT)
    text = played(tmp_path / "e", "--episodes", "2", "--opponents", str(tmp_path / "other" / "e"), "--policies", "1")
    assert re.search(r"e/1 against other/e/1: \d wins, \d losses, \d ties", text), text
    text = played(tmp_path / "e", "--episodes", "2", "--env-id", "duel_bots")
    assert len(re.findall(r"[01] against bots: \d wins, \d losses, \d ties", text)) == 2, text
    cfg = json.loads((tmp_path / "other" / "e" / "cfg.json").read_text())
    cfg["args"]["frameskip"] = 2
    (tmp_path / "other" / "e" / "cfg.json").write_text(json.dumps(cfg))
    text = played(tmp_path / "e", "--opponents", str(tmp_path / "other" / "e"), code=2)
    assert "were trained with different frameskips" in text


def test_the_arena_of_the_benchmarks(tmp_path, monkeypatch):
    """A match starts there, and neither pistol (50 shots at first) nor shotgun (8) runs out of ammunition: the engine would change weapons."""
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    importlib.import_module("arena").main(tmp_path)
    env = appo.DoomMatch("duel", 4, None, str(tmp_path))

    def play(steps: int, *heads: int) -> float:
        """Steps of player 0, while the other waits. Returns the weapon in hand."""
        for _ in range(steps):
            env.step(dict(player_0=np.array(heads), player_1=np.array([0, 0, 0, 0, 0, 0, 10])))
        return env.players[0].now["SELECTED_WEAPON"]

    try:
        env.reset(seed=1)
        assert play(300, 0, 0, 0, 1, 0, 0, 10) == 2, "the pistol, after 34 seconds of firing"
        assert play(10, 1, 0, 3, 0, 0, 0, 10) == 3, "a shotgun lies where a player starts"
        assert play(200, 0, 0, 0, 1, 0, 0, 10) == 3
    finally:
        env.close()


def test_a_game_of_pettingzoo(start, tmp_path, monkeypatch):
    """The README's edit: a cooperative Pong of the Butterfly family, of two agents."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    readme = (ROOT / "README.md").read_text()
    lines = re.search(r"```diff\n-    return DoomMatch\(.*\n((?:\+.*\n)+)```", readme).group(1)
    game = "".join(line[1:] + "\n" for line in lines.splitlines())
    r = start("--env-id", "pong", "--frameskip", "1", "--num-envs-per-worker", "2", "--worker-num-splits", "1", edits=[(GAME, game)])
    r.wait_for(lambda: re.search(r"step [\d,]+: return -?[\d.]+, ", r.text()) and steps(r) > 100, 90, "returns")
    assert "2 workers x 2 environments of 2 agents" in stop(r)


@pytest.mark.parametrize("flags, answer", [
    ("--with-pbt --num-policies 1", "--with-pbt needs more than one policy"),
    ("--with-pbt --total-timesteps 5000000", "before the first exchange at --pbt-start-mutation 5,000,000"),
    ("--num-policies 3", "are not divisible by --num-policies 3"),
    ('--policy-settings {"1":{"learning_rat":1}}', "there is no learning_rat of policy 1; policies 0 to 1 may differ in learning_rate, "),
    ('--policy-settings {"5":{"learning_rate":1}}', "there is no learning_rate of policy 5"),
    ('--policy-settings {"1":{"gamma":2}}', "gamma 2 is out of range: 0 to 1"),
    ('--policy-settings {"1":{"gamma":"high"}}', "gamma high is out of range: 0 to 1"),
    ("--policy-settings 1:gamma=0.9", 'is not like {"1": {"vf_coef": 0.2}}'),
    ("--num-workers 0", "--num-workers 0 is out of range"),
    ("--num-policies 201 --num-envs-per-worker 201", "--num-policies 201 is out of range: 1 to 200"),
    ("--keep-checkpoints 1", "--keep-checkpoints 1 is out of range: 2 to inf"),
    ("--max-batches-ahead 9999999", "that are free, a fifth of which must remain"),
    ("--pbt-target-objective frags", "--pbt-target-objective frags: basic has none"),
    ("--env-id dule", "did you mean duel"),
    ("--env-id duel --scenario-dir .", " has no ssl2.wad"),
])  # fmt: skip
def test_wrong_combinations_are_refused_with_a_sentence(flags, answer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["appo_pbt_doom.py", "--train-dir", str(tmp_path), *SMALL, *flags.split()])
    assert appo.main() == 2
    assert re.fullmatch(rf"error: .*{re.escape(answer)}.*", capsys.readouterr().err.strip())
    assert not list(tmp_path.rglob("*.json"))
