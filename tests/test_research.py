"""Edits that a researcher makes in a copy of one file: in how few places, and whether they train."""

import signal

import numpy as np
import pytest
import torch
from edited import COUNTING, ROOT, load, with_envs

FILES = {"appo_gym": dict(num_envs=4), "appo_atari": dict(num_envs_per_worker=4, precision="float32", seed=2)}  # with 1 most of 16 ReLUs are dead
LOGPROBS = "            self.logprobs = torch.full((T, slots), torch.nan)  # of the actions under the acting policy (mu)\n"
ACTED = "        rollouts.logprobs[t, slots] = log_prob(log_dists, actions)\n"
POLICY = "        self.policy = init_layer(nn.Linear(features, sum(spaces.heads)), gain=0.01)\n"
DISCOUNTS = "    discounts = args.gamma * ~batch.terminated\n"
LOSS = "    loss = mean(policy_losses + args.vf_coef * value_losses - args.ent_coef * entropy)\n"
# A term of the loss that needs something of the time of acting: here, that the policy's entropy stays what it was
FIELD = [
    (LOGPROBS, LOGPROBS + "            self.entropy = torch.full((T, slots), torch.nan)\n"),
    (ACTED, ACTED + "        rollouts.entropy[t, slots] = sum(map(entropy_of, log_dists))\n"),
    (LOSS, LOSS + "    loss = loss + 0.1 * mean((entropy - batch.entropy).square())\n"),
]
# Random network distillation (Burda et al. 2018): a reward for what a second network cannot predict of a first, which is never trained
RND = [
    (POLICY, POLICY + """        self.target = image_encoder(spaces.obs["obs"], {0}).requires_grad_(False)
        self.predictor = image_encoder(spaces.obs["obs"], {0})
"""),
    ("    def encode(self, obs):\n", '''    def novelty(self, obs):
        """obs by name [T, B, ...] -> [T, B]"""
        x = self.normalizers["obs"](obs["obs"].flatten(0, 1)).permute(0, 3, 1, 2).float()
        error = (self.predictor(x) - self.target(x)).square().mean(-1)
        return error.unflatten(0, obs["obs"].shape[:2])

    def encode(self, obs):
'''),
    (DISCOUNTS, DISCOUNTS + "    novelty = agent.novelty(batch.obs)[1:]\n    batch.rewards = batch.rewards + 0.1 * novelty.detach()\n"),
    (LOSS, LOSS + "    loss = loss + mean(novelty)\n"),
]  # fmt: skip


@pytest.fixture(params=FILES)
def trained(request, tmp_path, monkeypatch):
    """Trains a copy with the edits and the counting environment; returns it, its learner, and its first and last losses."""
    name = request.param

    def trained(edits):
        of_size = "args.hidden_size" if name == "appo_gym" else "args"
        edits = [(old, new.replace("{0}", of_size)) for old, new in edits]
        appo = load(with_envs(tmp_path, f"research_{name}_{len(edits)}", COUNTING, *edits, source=ROOT / f"{name}.py"))
        losses, learners, loss_of, init = [], [], appo.appo_loss, appo.Learner.__init__
        monkeypatch.setattr(appo, "appo_loss", lambda *given: losses.append(loss_of(*given)) or losses[-1])
        monkeypatch.setattr(appo.Learner, "__init__", lambda self, *given: learners.append(self) or init(self, *given))
        args = appo.Args(num_workers=0, rollout=8, batch_size=32, hidden_size=16, total_timesteps=2000, learning_rate=1e-3, device="cpu",
                         train_dir=str(tmp_path), experiment="e", **FILES[name])  # fmt: skip
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            assert appo.train(args, tmp_path / "e") == 0
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        assert all(loss.isfinite() for loss, *_ in losses) and len(losses) > 50
        return appo, learners[0]

    return trained


def test_a_loss_with_a_field_of_ones_own(trained):
    assert len(FIELD) <= 4
    appo, learner = trained(FIELD)
    written = learner.inference.rollouts.entropy
    assert written.isfinite().all() and written.max() <= np.log(3) + np.log(4) + 1e-5 and written.min() > 0


def test_a_reward_of_ones_own_with_a_network_that_is_not_trained(trained):
    assert len(RND) <= 4
    appo, learner = trained(RND)
    agent, untrained = learner.agent, appo.Agent(appo.spaces_of(learner.args), learner.args)
    obs = {name: field[:2, :4] for name, field in learner.inference.rollouts.obs.items()}
    with torch.no_grad():
        now = agent.novelty(obs).mean()
        agent.predictor.load_state_dict(untrained.predictor.state_dict())
        assert now < 0.3 * agent.novelty(obs).mean(), "what was seen is predicted"
    assert not any(weight.requires_grad or weight.grad is not None for weight in agent.target.parameters())
    acting = learner.inference.agent.target.state_dict()
    assert all(torch.equal(x, acting[name]) for name, x in agent.target.state_dict().items())
