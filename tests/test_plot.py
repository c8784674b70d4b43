"""benchmark/plot.py and collect.py: the documents hold what the raw results say, and every raw result is used."""

import datetime
import json
import re
import sys

import numpy as np
import pytest
from edited import ROOT
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(ROOT / "benchmark"))
import collect  # noqa: E402
import plot  # noqa: E402

TEXTS = {document.name: document.read_text() for document in plot.DOCUMENTS}
ALL = "".join(path.read_text() for path in (*(ROOT / "benchmark").glob("*.md"), ROOT / "README.md"))
MARKS = re.findall(r"<!-- table: (\w+) -->", "".join(TEXTS.values()))


@pytest.mark.parametrize("name", TEXTS)
def test_tables_are_those_of_the_raw_results(name):
    assert plot.with_tables(TEXTS[name]) == TEXTS[name], "python benchmark/plot.py writes them"
    assert TEXTS[name].count("<!-- table: ") == TEXTS[name].count("<!-- end -->")


def test_every_table_stands_once():
    assert sorted(MARKS) == sorted(plot.TABLES)


def test_every_result_is_shown_or_named():
    """By plot.toml or a function of plot.py, in a link or in the text; and every figure that is shown is one that it draws."""
    source = "".join((ROOT / "benchmark" / f"plot.{suffix}").read_text() for suffix in ("py", "toml"))
    files = {path.name for path in plot.RESULTS.iterdir()}
    assert [name for name in sorted(files) if f'"{name}"' not in source and f"results/{name}" not in ALL] == []
    assert set(re.findall(r"results/(\w+\.\w+)", ALL)) <= files
    assert {name for name in files if name.endswith(".png")} == set(plot.FIGURES)
    assert [name for name in plot.FIGURES if f"(results/{name})" not in ALL] == []


def test_both_layouts_of_curves(tmp_path):
    (tmp_path / "seeds.csv").write_text('setting,seed,seconds,step,return\n# {"run": "x"}\n,1,5,100,0.5\nsync,2,6,200,0.75\n')
    (tmp_path / "runs.csv").write_text(
        '# {"cpu": "x"}\nrun,seconds,step,return\nsf-4e-4_1,5,100,0.5\nsf-4e-4_1,6,200,1.5\nours_2,5,100,2\n'
    )
    of_seeds, of_runs = plot.read_curves(tmp_path / "seeds.csv"), plot.read_curves(tmp_path / "runs.csv")
    assert {setting: list(seeds) for setting, seeds in of_seeds.items()} == {"": ["1"], "sync": ["2"]}
    assert {setting: list(seeds) for setting, seeds in of_runs.items()} == {"sf-4e-4": ["1"], "ours": ["2"]}
    np.testing.assert_array_equal(of_seeds["sync"]["2"], [[6, 200, 0.75]])
    np.testing.assert_array_equal(of_runs["sf-4e-4"]["1"], [[5, 100, 0.5], [6, 200, 1.5]])


def test_when_a_goal_was_reached():
    points = {"1": np.array([[30, 1000, 0], [60, 2_000_000, 5]]), "2": np.array([[30, 1000, 5], [60, 2000, 0]]), "3": np.array([[9, 9, 0]])}
    assert plot.when(plot.reached(points, 5)) == ["1k, 2.0M, -", "30, 60, - s"]
    assert plot.when([(300, 5000), (90, 4000)]) == ["4k, 5k", "1.5, 5.0 min"]
    assert plot.when([(0, 5000)]) == ["5k"], "what was published has no time"


def test_a_folder_of_seeds_and_a_population_are_drawn(tmp_path, monkeypatch, capsys):
    rows = [f"env-id={game},{seed},{i},{i},{i}" for game in "ab" for seed in "12" for i in range(3)]
    (tmp_path / "curves.csv").write_text("\n".join(["setting,seed,seconds,step,return", *rows]))
    (tmp_path / "mine.csv").write_text("step,policy,weights_of,objective,gamma\n0,0,0,,0.9\n0,1,1,,0.8\n5,0,0,2,0.9\n5,1,0,1,0.9\n")
    for argument, image in ((tmp_path, "curves.png"), (tmp_path / "mine.csv", "mine.png")):
        monkeypatch.setattr(sys, "argv", ["plot.py", str(argument)])
        plot.main()
        assert plot.plt.imread(tmp_path / image).std() > 0.05, "it is not empty"
        assert capsys.readouterr().out == f"wrote {tmp_path / image}\n"


def sample_factory(folder, seconds: int, frames_per_second: int) -> None:
    """What its log says."""
    (folder / "sf").mkdir(parents=True)
    (folder / "sf" / "config.json").write_text(json.dumps(dict(env="doom_basic", env_frameskip=4)))
    lines = []
    for i in range(0, seconds, 5):
        for text in (f"Total num frames: {i * frames_per_second}. Throughput", f"Avg episode reward: [(0, '{i / 100}')]"):
            lines.append(f"[2026-01-01 00:00:{i:02d},000][1] {text}\n")
    (folder / "out.txt").write_text("".join(lines))


def ours(folder, seconds: int, steps_per_second: int) -> None:
    (folder / "cfg.json").parent.mkdir(parents=True)
    (folder / "cfg.json").write_text('{"resolved": {"device": "cpu", "precision": "float32", "batch_size": 32}}')
    (folder / "log.txt").write_text(f"{datetime.datetime.fromtimestamp(0)} begin\na new run in x\n")
    with SummaryWriter(str(folder)) as writer:
        for i in range(5, seconds, 5):
            writer.add_scalar("charts/SPS", 1, i * steps_per_second, walltime=i)
            writer.add_scalar("charts/episodic_return", i, i * steps_per_second, walltime=i)


def test_settings_that_were_derived_are_those_of_tensorboard(tmp_path):
    """cfg.json has what was typed."""
    (tmp_path / "cfg.json").write_text('{"args": {"device": null, "precision": null, "batch_size": 32, "cfg_path": null}}')
    with SummaryWriter(str(tmp_path / "policy_00")) as writer:
        writer.add_text("args", '{"device": "cuda", "precision": "bfloat16", "batch_size": 64}')
    assert collect.used_args(tmp_path) == dict(device="cuda", precision="bfloat16", batch_size=32, cfg_path=None)


def test_rates_and_curves_are_collected(tmp_path, monkeypatch):
    ours(tmp_path / "doom_ours_1", 60, 250)
    sample_factory(tmp_path / "doom_sf_1", 60, 500)
    (tmp_path / "doom_bare_1").mkdir()
    (tmp_path / "doom_bare_1" / "rate.json").write_text('{"frameskip": 4, "results": [{"frames_per_second": 4000}]}')

    def run(kind: str, out: str) -> None:
        folders = [str(tmp_path / f"doom_{system}_1") for system in ("ours", "sf", "bare")]
        monkeypatch.setattr(sys, "argv", ["collect.py", kind, str(tmp_path / out), *folders[: 3 if kind in ("rates", "steps") else 2]])
        collect.main()

    for kind, share in (("rates", 1), ("steps", 4)):
        run(kind, f"{kind}.json")
        result = json.loads((tmp_path / f"{kind}.json").read_text())
        assert result["medians"] == {"doom_ours": 1000 / share, "doom_sf": 500 / share, "doom_bare": 4000 / share}
        assert result["ratios"] == {"doom_sf": 2, "doom_bare": 0.25} and "date" in result["machine"]
        assert plot.rates(tmp_path / f"{kind}.json")["doom_sf"] == [500 / share]
    run("curves", "curves.csv")
    curves = plot.read_curves(tmp_path / "curves.csv")
    np.testing.assert_array_equal(curves["doom_ours"]["1"][-1], [55, 13750, 55])
    np.testing.assert_allclose(curves["doom_sf"]["1"][-1], [55, 55 * 500 / 4, 55])
    with pytest.raises(SystemExit, match="curve is unknown: use curves, rates"):
        run("curve", "x")
