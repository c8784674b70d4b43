"""The variants are edits of appo_doom.py: what they share stands in each of them word for word."""

import ast

import pytest

from edited import ROOT

# What each variant changes on purpose. A name that does not differ any more must be taken out of here.
DIFFERS = {
    "appo_atari.py": {
        "ENGINE, TICKS_PER_SECOND", "GAME_SHARED_MEMORY", "BATCH_SHARE, SMALLEST_BATCH", "GAME, NETWORK", "HIGHEST",
        "make_envs", "init_layer", "Agent", "Agent.__init__", "Agent.encode", "end_group",
        "Args.env_id", "Args.frameskip", "Args.total_timesteps", "Args.learning_rate", "Args.ppo_clip_value",
        "Args.exploration_loss", "Args.ent_coef", "Args.max_grad_norm", "Args.reward_scale", "Args.reward_clip",
        "Args.normalize_input", "Args.batch_size", "Args.rnn_type",
    },
    "appo_dmlab.py": {
        "ENGINE, TICKS_PER_SECOND", "GAME_SHARED_MEMORY", "IMAGE", "GAME, NETWORK", "SESSION", "resolve", "make_envs", "Mailbox.__init__",
        "Agent", "Agent.__init__", "Agent.encode", "Agent.forward", "Agent.update_normalizers", "appo_loss", "Games.__init__", "Games.reset",
        "Games.step", "spaces_of", "parse_args", "Reporter", "end_group", "Inference.__init__", "Inference.act", "Learner.load",
        "Learner.update", "Learner.meet",
        "save_checkpoint", "evaluate", "Reporter.__init__", "Reporter.counters", "Reporter.report", "learn", "train", "main", "Args.env_id",
        "Args.eval_episodes", "Args.total_timesteps", "Args.normalize_input", "Args.rnn_type", "Args.hidden_size", "Args.actor_timeout",
    },
    "appo_pbt_doom.py": {
        "Args.env_id", "Args.eval_episodes", "Args.evaluate", "Args.num_workers", "Args.total_timesteps", "LOWEST", "HIGHEST", "resolve",
        "Args.__post_init__", "SCENARIOS", "Scenario.shaping", "launcher", "DoomEnv", "DoomEnv: metadata", "DoomEnv.__init__", "DoomEnv.close",
        "DoomEnv.render", "DoomEnv.reset", "DoomEnv.step", "spaces_of",
        "Mailbox", "Mailbox.__init__", "Rollouts.__init__", "slots_needed", "Batch.mask", "appo_loss",
        "Games", "Games.__init__", "Games.close", "Games.reset", "Games.step", "actor", "watch_parent",
        "Actors", "Actors.__init__", "Actors.check", "Actors.replace", "Actors.start", "Actors.stop", "Actors.wait_for_games",
        "Inference.__init__", "Inference.run", "Inference.store", "Inference.wake", "Learner.gather", "Learner.iterate",
        "load_agent", "evaluate", "SESSION", "GAME, NETWORK", "Reporter", "Reporter.__init__", "Reporter.report", "Reporter.update", "from_actors",
        "learn", "train",
        # it has no ranks
        "Args.batch_size", "Args.device", "Args.inference_threads", "Args.learner_threads", "cpu_quota", "Normalizer.update", "Learner.__init__",
        "Learner.update", "Reporter.counters", "parse_args", "check_shared_memory", "main",
    },
}  # fmt: skip
# What appo_doom.py has and a variant has not: names that begin with one of these.
WITHOUT = {
    "appo_atari.py": ("SCREEN", "IMAGE", "VARIABLES", "SETTINGS", "Scenario", "TURN", "ARENA", "BATTLE", "GATHER", "DEFEND", "SCENARIOS",
                      "find_wad", "launcher", "unlink_game_files", "unlink_orphans", "DoomEnv", "Args.cfg_path", "Args.__post_init__"),
    "appo_dmlab.py": ("SCREEN", "VARIABLES", "SETTINGS", "Scenario", "TURN", "ARENA", "BATTLE", "GATHER", "DEFEND", "SCENARIOS",
                      "find_wad", "launcher", "unlink_game_files", "unlink_orphans", "DoomEnv", "Args.cfg_path", "Args.__post_init__"),
    "appo_pbt_doom.py": ("Actors.is_current", "Actors.reply", "DoomEnv.bonus", "DoomEnv.observation", "DoomEnv.read_state", "DoomEnv.setup",
                         "Games.write", "in_process", "make_envs", "sampling", "join_ranks", "rank_of", "sum_over_ranks", "ALL_REDUCE",
                         "gather_over_ranks", "from_first_rank", "Learner.meet", "Learner.total"),
}  # fmt: skip
# The other way round.
ONLY = {
    "appo_pbt_doom.py": (
        "Args.eval_policies", "Args.num_policies", "Args.opponents", "Args.pbt_", "Args.policy_settings", "Args.scenario_dir", "Args.with_pbt",
        "EIGHT", "MATCH", "RULES", "MEASUREMENTS", "OBJECTIVES", "ITEMS", "WEIGHTS", "SHAPING", "SCORES", "shaping_of", "Scenario.", "Player",
        "GameLost", "DoomEnv", "make_env", "WITHOUT_USE", "table_of_policies", "Batch.inactive", "REPLY", "Seat", "Games.begin",
        "process_body", "last_words", "Actors.groups", "Replies", "Learner.become", "Control", "TUNED", "mutate", "starting_genes",
        "default_genes", "Population", "policy_folder", "train_policy", "wilson", "watch", "check_memory",
    ),
    "appo_dmlab.py": (
        "WORDS, VOCABULARY", "DISK_RESERVE", "Task", "TASKS", "OTHER_LEVELS", "SHORT_NAMES", "FORWARD", "LEFT", "ACTIONS",
        "EXTENDED_ACTIONS", "task_of", "tasks_of", "task_numbers", "games_memory", "shares_of_tasks", "human_normalized", "lab_module",
        "make_lab", "check_level", "cache_folder", "prepare_engines", "prepare_process", "words_of", "LevelCache", "LabEnv", "Residual",
        "PopArt", "Agent.read", "Games.count", "Reporter.s", "Reporter.text", "fill_level_cache", "compile_maps",
        "Args.extended_action_set", "Args.one_task_per_worker", "Args.dataset_path", "Args.level_cache", "Args.fill_level_cache",
        "Args.renderer", "Args.normalize_returns", "Args.encoder",
    ),
    "appo_atari.py": ("MACHADO", "AtariEnvs", "Residual", "Args.episodic_life", "Args.noop_max", "Args.fire_reset", "Args.sticky_actions",
                      "Args.full_action_space", "Args.machado", "Args.encoder"),
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
    base, variant = pieces(ROOT / "appo_doom.py"), pieces(ROOT / name)
    shared = base.keys() & variant.keys()
    assert [piece for piece in base.keys() - shared if not piece.startswith(WITHOUT[name])] == [], "missing in the variant"
    assert [piece for piece in variant.keys() - shared if not piece.startswith(ONLY[name])] == [], "missing in appo_doom.py"
    differing = {piece for piece in shared if base[piece] != variant[piece]}
    assert differing - DIFFERS[name] == set(), "these differ from appo_doom.py; carry the change over, or list them here"
    assert DIFFERS[name] - differing == set(), "these do not differ any more, or are not in both files"


@pytest.mark.parametrize("name", sorted(DIFFERS))
def test_what_the_docstrings_define_is_the_same(name):
    """The diagram, the words and the rule about time; and how a file is run."""
    base, variant = ((ROOT / file).read_text() for file in ("appo_doom.py", name))
    for begin, end in (("     actor process w = 0..W-1", '\n"""\n'), ('if __name__ == "__main__":', "EOF")):
        one, two = ((text[text.index(begin) :] + "EOF").split(end)[0] for text in (base, variant))
        assert one == two
