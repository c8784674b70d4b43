"""A small real environment is learned: the whole pipeline, asynchronous, with the default hyper-parameters."""

import re


def test_basic_is_learned(run):
    """`basic` starts at about -150; the default flags pass 0 within 80,000 steps (see benchmark/results/learning_basic.csv)."""
    r = run("--experiment", "e", "--env-id", "basic", "--num-workers", "2", "--device", "cpu", "--total-timesteps", "80000")

    def returns() -> list[float]:
        return [float(value) for value in re.findall(r"return (-?[\d.]+)", r.text())]

    r.wait_for(lambda: max(returns(), default=-200) > 0, 400, "a return of 0")
    assert returns()[0] < -50
