"""The variants are edits of appo_doom.py: what they share stands in each of them word for word."""

import ast

import pytest

from edited import ROOT

# What each variant changes on purpose. A name that does not differ any more must be taken out of here.
DIFFERS = {
    "appo_atari.py": {
        "Args.env_id", "Args.frameskip", "Args.total_timesteps", "Args.batch_size", "Args.learning_rate",
        "Args.ppo_clip_value", "Args.exploration_loss", "Args.ent_coef", "Args.max_grad_norm", "Args.reward_scale",
        "Args.reward_clip", "Args.normalize_input", "Args.rnn_type", "HIGHEST", "BATCH_SHARE, SMALLEST_BATCH",
        "SESSION, FIXED", "ENGINE, TICKS_PER_SECOND", "ENV_SHARED_MEMORY", "make_envs", "init_layer", "Agent",
        "Agent.__init__", "Agent.encode",
    },
    "appo_atari_replay.py": {
        "LOWEST", "HIGHEST", "resolve", "Rollouts", "Rollouts.__init__", "slots_needed", "Agent", "Agent.__init__", "Agent.forward", "Batch.mask", "appo_loss",
        "Inference.__init__", "Inference.release", "Inference.act", "Learner.__init__", "Learner.collect", "Learner.gather", "Learner.batches",
        "Learner.iterate", "load_agent",
        "Reporter.update", "train",
    },
    "appo_dmlab.py": {
        "Args.env_id", "Args.total_timesteps", "Args.eval_episodes", "Args.actor_timeout", "Args.normalize_input",
        "Args.rnn_type", "Args.hidden_size", "SESSION, FIXED", "resolve", "ENGINE, TICKS_PER_SECOND",
        "ENV_SHARED_MEMORY", "IMAGE", "make_envs", "Mailbox.__init__", "Agent", "Agent.__init__", "Agent.encode",
        "Agent.forward", "appo_loss", "WorkerEnvs.__init__", "WorkerEnvs.reset", "WorkerEnvs.step",
        "Inference.__init__", "Inference.act", "Learner.load", "Learner.update", "save_checkpoint", "evaluate",
        "parse_args", "Reporter.__init__", "Reporter.update", "train", "main",
    },
    "appo_mujoco.py": {
        "Args.env_id", "Args.frameskip", "Args.total_timesteps", "Args.num_envs_per_worker", "Args.num_batches_per_epoch",
        "Args.num_epochs", "Args.learning_rate", "Args.anneal_lr", "Args.clip_coef", "Args.ppo_clip_value",
        "Args.ent_coef", "Args.reward_clip", "Args.normalize_input", "Args.hidden_size", "Args.batch_size",
        "BATCH_SHARE, SMALLEST_BATCH", "LOWEST", "HIGHEST", "SESSION, FIXED", "Args.save_video", "resolve",
        "ENV_SHARED_MEMORY", "make_envs", "spaces_of", "Mailbox.__init__", "Rollouts.__init__", "Normalizer",
        "Normalizer.__init__", "Normalizer.forward", "Normalizer.update", "Agent", "Agent.__init__", "Agent.encode",
        "Agent.forward", "Agent.update_normalizers", "sample_actions", "evaluate_actions", "Batch.actions",
        "appo_loss", "WorkerEnvs.step", "Inference.act", "Learner.gather", "Learner.update", "evaluate", "train",
    },
    "appo_pbt_doom.py": {
        "Args.env_id", "Args.total_timesteps", "Args.device", "Args.evaluate", "Args.eval_episodes",
        "Args.num_workers", "Args.inference_threads", "Args.learner_threads", "Args.batch_size", "Args.__post_init__",
        "LOWEST", "HIGHEST", "EVALUATION", "resolve", "on_signal", "Scenario.shaping", "SCENARIOS", "launcher",
        "DoomEnv", "DoomEnv: metadata", "DoomEnv.__init__", "DoomEnv.reset", "DoomEnv.step", "DoomEnv.render",
        "DoomEnv.close", "spaces_of", "Mailbox", "Mailbox.__init__", "Rollouts.__init__", "slots_needed",
        "check_shared_memory", "Normalizer.update", "Batch.mask", "appo_loss", "WorkerEnvs", "WorkerEnvs.__init__",
        "WorkerEnvs.reset", "WorkerEnvs.step", "WorkerEnvs.close", "actor", "actor_process", "Actors",
        "Actors.__init__", "Actors.wait", "Inference.__init__", "Inference.store", "sampling", "Learner.__init__",
        "Learner.collect", "Learner.gather", "Learner.iterate", "Learner.update", "load_agent", "evaluate",
        "parse_args", "Reporter", "Reporter.__init__", "Reporter.update", "learn", "train", "main",
    },
}  # fmt: skip
BASE = dict.fromkeys(DIFFERS, "appo_doom.py") | dict.fromkeys(("appo_atari_replay.py", "appo_mujoco.py"), "appo_atari.py")
# What the base has and a variant has not: names that begin with one of these.
WITHOUT = {
    "appo_atari.py": (
        "Args.cfg_path", "Args.__post_init__", "SCREEN", "IMAGE", "VARIABLES", "SETTINGS", "Scenario",
        "TURN, WALK, STRAFE", "ARENA", "BATTLE", "GATHER", "DEFEND", "SCENARIOS", "find_wad", "launcher",
        "unlink_shared_memory", "DoomEnv",
    ),
    "appo_atari_replay.py": (),
    "appo_dmlab.py": (
        "Args.cfg_path", "Args.__post_init__", "SCREEN", "VARIABLES", "SETTINGS", "Scenario", "TURN, WALK, STRAFE",
        "ARENA", "BATTLE", "GATHER", "DEFEND", "SCENARIOS", "find_wad", "launcher", "unlink_shared_memory", "DoomEnv",
    ),
    "appo_mujoco.py": (
        "Args.episodic_life", "Args.noop_max", "Args.fire_reset", "Args.sticky_actions", "Args.full_action_space", "Args.machado",
        "Args.precision", "Args.exploration_loss", "Args.encoder", "ENGINE, TICKS_PER_SECOND", "MACHADO", "AtariEnvs", "heads_of",
        "Spaces.heads", "Residual",
    ),
    "appo_pbt_doom.py": (
        "SESSION, FIXED", "join_ranks", "rank_of", "sum_over_ranks", "from_first_rank", "DoomEnv.setup",
        "DoomEnv.setup_own", "DoomEnv.observation", "DoomEnv.bonus", "make_envs", "WorkerEnvs.write", "heads_of",
        "Args.last_action_reward",
        "Actors: SHORT_LIFE", "Actors.start_all", "Actors.start", "Actors.in_thread", "Actors.replace", "Actors.stop",
        "Learner.sum_counts",
    ),
}  # fmt: skip
# The other way round.
ONLY = {
    "appo_atari_replay.py": (
        "Args.replay", "Args.elite_strategy", "Args.policy_cloning_coef", "Args.value_cloning_coef", "parts_of_iteration", "slots_kept",
        "check_rollout_memory", "Agent.hidden", "Batch.logits", "Batch.replayed", "kl_divergence", "choose", "Learner.add_replayed",
        "Learner.distances", "Learner.keep",
    ),
    "appo_atari.py": (
        "Args.episodic_life", "Args.noop_max", "Args.fire_reset", "Args.sticky_actions", "Args.full_action_space",
        "Args.machado", "Args.encoder", "MACHADO", "AtariEnvs", "Residual",
    ),
    "appo_dmlab.py": (
        "Args.extended_action_set", "Args.one_task_per_worker", "Args.dataset_path", "Args.level_cache",
        "Args.fill_level_cache", "Args.renderer", "Args.normalize_returns", "Args.encoder", "DISK_RESERVE",
        "WORDS, VOCABULARY", "Task", "TASKS", "OTHER_LEVELS", "SHORT_NAMES", "FORWARD, BACK, FIRE", "LEFT, RIGHT",
        "ACTIONS", "EXTENDED_ACTIONS", "task_of", "tasks_of", "task_numbers", "envs_memory", "shares_of_tasks",
        "human_normalized", "lab_module", "make_lab", "check_level", "cache_folder", "engines_folder", "words_of",
        "prepare_process", "LevelCache", "LabEnv", "MapEnv", "Residual", "PopArt", "Agent.read", "Reporter.scores",
        "fill_level_cache",
    ),
    "appo_mujoco.py": (
        "Args.kl_loss_coef", "Args.normalize_returns", "Args.adaptive_stddev", "Args.initial_stddev", "ENGINE", "TASKS", "spec_of",
        "MujocoEnvs", "drawn_envs", "Spaces.action", "PopArt", "kl_divergence", "Batch.gaussians",
    ),
    "appo_pbt_doom.py": (
        "Args.scenario_dir", "Args.opponents", "Args.eval_policies", "Args.num_policies", "Args.policy_settings",
        "Args.with_pbt", "Args.pbt_target_objective", "Args.pbt_start_mutation", "Args.pbt_period_env_steps",
        "Args.pbt_replace_fraction", "Args.pbt_replace_reward_gap", "Args.pbt_replace_reward_gap_absolute",
        "Args.pbt_mutation_rate", "Args.pbt_perturb_min", "Args.pbt_perturb_max", "Args.pbt_optimize_gamma",
        "SESSION, ENV", "FIXED", "EIGHT", "MATCH_VARIABLES", "MEASUREMENTS", "Scenario.turn", "Scenario.match",
        "Scenario.agents", "Scenario.bots", "Scenario.respawn", "Scenario.better", "MATCH", "WITHOUT_USE", "RULES",
        "WEIGHTS", "ITEMS", "SHAPING", "shaping_of", "MatchLost", "Player", "DoomEnv: (START_SECONDS, STEP_SECONDS)",
        "DoomEnv.observation_space", "DoomEnv.action_space", "DoomEnv.set_shaping", "DoomEnv.together",
        "DoomEnv.play", "DoomEnv.start_engines", "DoomEnv.score", "DoomEnv.kill", "make_env", "SCORES",
        "table_of_policies", "Batch.inactive", "Seat", "WorkerEnvs.begin", "WorkerEnvs.lost", "Workers",
        "Actors.drop", "Actors.connect", "Learner.become", "policy_folder", "OBJECTIVES", "Control", "train_policy",
        "policy_process", "TUNED", "default_genes", "starting_genes", "mutate", "Population", "wilson",
        "check_memory", "watch",
    ),
}  # fmt: skip


def pieces(path) -> dict[str, str]:
    """Source of every constant, function, method and field of a file, by name; a field with its help, beside or below it."""
    lines = path.read_text().splitlines()

    def source(node) -> str:
        decorators = [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
        return "\n".join(lines[min([node.lineno, *decorators]) - 1 : node.end_lineno])

    result = {}
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.Assign):
            result[", ".join(ast.unparse(target).strip("()") for target in node.targets)] = source(node)
        elif isinstance(node, ast.FunctionDef):
            result[node.name] = source(node)
        elif isinstance(node, ast.ClassDef):
            head = [ast.unparse(part) for part in (*node.decorator_list, *node.bases)]
            result[node.name] = f"{head} {ast.get_docstring(node)}"
            for child, after in zip(node.body, [*node.body[1:], None]):
                if isinstance(child, ast.FunctionDef):
                    result[f"{node.name}.{child.name}"] = source(child)
                elif isinstance(child, ast.Assign):
                    result[f"{node.name}: {ast.unparse(child.targets[0])}"] = source(child)
                elif isinstance(child, ast.AnnAssign):
                    text_after = source(after) if isinstance(after, ast.Expr) else ""
                    result[f"{node.name}.{child.target.id}"] = f"{source(child)}\n{text_after}"
    return result


@pytest.mark.parametrize("name", sorted(DIFFERS))
def test_shared_text_is_the_same(name):
    base, variant = pieces(ROOT / BASE[name]), pieces(ROOT / name)
    shared = base.keys() & variant.keys()
    assert [piece for piece in base.keys() - shared if not piece.startswith(WITHOUT[name])] == [], "missing in the variant"
    assert [piece for piece in variant.keys() - shared if not piece.startswith(ONLY[name])] == [], f"missing in {BASE[name]}"
    differing = {piece for piece in shared if base[piece] != variant[piece]}
    assert differing - DIFFERS[name] == set(), f"these differ from {BASE[name]}; carry the change over, or list them here"
    assert DIFFERS[name] - differing == set(), "these do not differ any more, or are not in both files"


@pytest.mark.parametrize("name", sorted(DIFFERS))
def test_what_the_docstrings_define_is_the_same(name):
    """The diagram, the words and the rule about time; and how a file is run."""
    base, variant = ((ROOT / file).read_text() for file in (BASE[name], name))
    variant = variant.replace("LEARNING -> KEPT -> FREE     ", "LEARNING -> FREE        ")  # appo_atari_replay.py's own
    for begin, end in (("     actor process w = 0..W-1", '\n"""\n'), ('if __name__ == "__main__":', "EOF")):
        one, two = ((text[text.index(begin) :] + "EOF").split(end)[0] for text in (base, variant))
        assert one == two
