"""Choosing on images that are held out of training."""

import json
import math

import pytest
import torch

import trysquare as ts
from tests.lab.training.small import arguments, recipe
from trysquare.lab.cli import main
from trysquare.lab.training import loop, sweep
from trysquare.lab.training.run import load_images

CHOICES = {"optimizer.lr": ["1e-9", "1e-2"], "loss.radius": [0.5, 1.0]}


def test_held_out_images_are_not_trained_with_and_not_test_images(tmp_path):
    chosen = recipe(**{"data.validation": 200, "train.epochs": 1})
    left, off, test = (load_images(chosen, split) for split in ("train", "validation", "test"))
    whole = load_images(recipe(), "train")
    assert (len(left), len(off), len(test)) == (1242, 200, 355)
    together = torch.cat([left.rows, off.rows]).sort().values
    assert torch.equal(together, torch.arange(len(whole)))
    shares = off.labels.bincount(minlength=10) / 200 - whole.labels.bincount() / len(whole)
    assert shares.abs().max() <= 1 / 200
    seeds = load_images(recipe(**{"data.validation": 200, "train.seed": 7}), "validation")
    assert torch.equal(seeds.rows, off.rows)

    run = ts.training.train(chosen, tmp_path / "run", quiet=True)
    _, evaluated = run.metrics()
    assert evaluated["split"] == "validation"
    images, labels = next(iter(run.batches("validation").epoch(0)))
    right = (run.model()(images).argmax(1) == labels).float().mean()
    assert evaluated["accuracy"] == pytest.approx(float(right), abs=1e-6)
    assert len(ts.training.certify_run(run).radii) == 355  # those of the test images


@pytest.mark.parametrize("count", [1442, 5000])
def test_some_images_must_be_left_to_train_with(count):
    with pytest.raises(ValueError, match="less than the 1442 training images"):
        load_images(recipe(**{"data.validation": count}), "train")
    with pytest.raises(ValueError, match="holds out no training images"):
        load_images(recipe(), "validation")


def few_epochs(monkeypatch):
    """Runs of 3 epochs in the last round, and 1 in the first."""
    monkeypatch.setattr(sweep, "_epochs_a_second", lambda recipe: 1.0)


def test_a_sweep_keeps_what_is_certified_best(tmp_path, monkeypatch, capsys):
    few_epochs(monkeypatch)
    made = ts.training.start_sweep(recipe(), CHOICES, 3.0, tmp_path / "s", radius=0.5)
    assert made.sizes == [4, 2]
    lines = list(made.run())
    assert len(lines) == 1 + 4 + 2
    assert [trial.values["optimizer.lr"] for trial in made.ranked] == ["1e-2", "1e-2", "1e-9", "1e-9"]
    assert [len(trial.rounds) for trial in made.ranked] == [2, 2, 1, 1]
    assert [trial.rounds[-1]["epochs"] for trial in made.ranked] == [3, 3, 1, 1]
    assert made.best().recipe.train.epochs == 3
    best = ts.training.read_recipe(tmp_path / "s" / "best.yaml")
    assert best.optimizer.options["lr"] == 0.01
    assert best.data.validation == 144
    certified = {line["certified"] for line in made.ranked[0].rounds}
    assert certified <= {line["certified"]["0.5"] for r in (1, 2) for line in evaluations(made, r)}

    again = ts.training.load_sweep(tmp_path / "s")
    monkeypatch.setattr(sweep, "train", None)  # nothing is trained twice
    assert list(again.run()) == lines
    assert str(again) == str(made)


def evaluations(made, place):
    run = ts.training.load_run(made.path / f"round-{place}" / str(made.ranked[0].number))
    return [line for line in run.metrics() if line["kind"] == "evaluation"]


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    few_epochs(monkeypatch)
    whole = ts.training.start_sweep(recipe(), CHOICES, 6.0, tmp_path / "whole", radius=0.5)
    list(whole.run())

    cut = ts.training.start_sweep(recipe(), CHOICES, 6.0, tmp_path / "cut", radius=0.5)
    step, taken = loop.Training.step, []

    def stopping(self, images, labels, stop):
        taken.append(1)
        return step(self, images, labels, len(taken) == 15)  # in the second epoch of the first run

    monkeypatch.setattr(loop.Training, "step", stopping)
    with pytest.raises(ts.training.StoppedError, match="sweep --resume"):
        list(cut.run())
    (tmp_path / "cut" / "round-1" / "2").mkdir()  # stopped before the first checkpoint
    (tmp_path / "cut" / "round-1" / "2" / "recipe.yaml").write_text("name: x\n")
    resumed = ts.training.load_sweep(tmp_path / "cut")
    list(resumed.run())

    def results(made):
        return [[{k: v for k, v in found.items() if k != "seconds"} for found in trial.rounds] for trial in made.trials]

    assert results(resumed) == results(whole)


def test_runs_that_fail_are_last(tmp_path, monkeypatch):
    few_epochs(monkeypatch)
    step = loop.Training.step

    def failing(self, *given):
        if self.recipe.optimizer.options["lr"] == 0.5:
            raise FloatingPointError("nan")
        return step(self, *given)

    monkeypatch.setattr(loop.Training, "step", failing)
    made = ts.training.start_sweep(recipe(), {"optimizer.lr": [0.5, 0.01]}, 1.0, tmp_path / "s")
    assert sum("failed" in line for line in made.run()) == 1
    assert made.ranked[0].values == {"optimizer.lr": 0.01}
    failed = ts.training.start_sweep(recipe(), {"optimizer.lr": [0.5]}, 1.0, tmp_path / "f")
    with pytest.raises(ValueError, match="every run of the last round failed"):
        list(failed.run())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({}, "0 combinations"),
        ({"optimizer.lr": []}, "0 combinations"),
        ({"optimizer.lr": list(range(1, 2000))}, "at most 1000"),
        ({"optimizer.lrr": [1]}, "did you mean 'lr'"),
        ({"optimizer.lr": [0.1, -1]}, "above 0"),
        ({"train.epochs": [1, 2]}, "follows from the budget"),
        ({"model.widths": [[16], [16] * 500]}, "at most 64 stages"),
    ],
)
def test_choices_that_do_not_fit_are_refused_at_once(tmp_path, choices, message):
    with pytest.raises(ValueError, match=message):
        ts.training.start_sweep(recipe(), choices, 1.0, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_damaged_sweeps(tmp_path):
    with pytest.raises(ValueError, match="not the directory of a sweep"):
        ts.training.load_sweep(tmp_path)
    made = ts.training.start_sweep(recipe(), {"optimizer.lr": [0.01]}, 1.0, tmp_path / "s")
    content = json.loads((made.path / "sweep.json").read_text())
    for change in ({"trials": [{"x": 1}]}, {"budget": "x"}, {"recipe": {"train": {"epochs": -1}}}):
        (made.path / "sweep.json").write_text(json.dumps({**content, **change}))
        with pytest.raises(ValueError, match="damaged"):
            ts.training.load_sweep(made.path)
    with pytest.raises(ValueError, match="is not empty"):
        ts.training.start_sweep(recipe(), {"optimizer.lr": [0.01]}, 1.0, tmp_path / "s")


WRONG = {
    "a folder elsewhere": {"number": "../../victim"}, "a folder from the root": {"number": "/"},
    "another number": {"number": 2}, "no whole number": {"number": 1.0}, "a truth value": {"number": True},
    "a speed of text": {"speed": "x"}, "an infinite speed": {"speed": math.inf}, "a negative speed": {"speed": -1},
    "a list of values": {"values": [1]}, "a wild value": {"values": {"train.epochs": 10**30}},
    "text for rounds": {"rounds": "x"}, "an empty round": {"rounds": [{}]},
    "no epochs": {"rounds": [{"epochs": 0, "accuracy": 0.5, "certified": 0.5, "seconds": 1}]},
    "not a number": {"rounds": [{"epochs": 1, "accuracy": math.nan, "certified": 0.5, "seconds": 1}]},
}  # fmt: skip
WHOLE = {
    "no combination": {"trials": []}, "a budget without end": {"budget": 1e308}, "no budget": {"budget": math.nan},
    "another radius": {"radius": 77.0}, "a list": [1],
}  # fmt: skip


@pytest.mark.parametrize("name", [*WRONG, *WHOLE, "many", "twice the same"])
def test_sweeps_of_strangers_are_checked_before_anything_is_trained(name, tmp_path, capsys):
    made = ts.training.start_sweep(recipe(), {"optimizer.lr": [0.01]}, 1.0, tmp_path / "s")
    content = json.loads((made.path / "sweep.json").read_text())
    (trial,) = content["trials"]
    several = {"many": [{**trial, "number": number} for number in range(1, 1002)], "twice the same": [trial, trial]}
    trials = several.get(name, [{**trial, **WRONG.get(name, {})}])
    whole = WHOLE.get(name, {"trials": trials})
    (made.path / "sweep.json").write_text(json.dumps(whole if isinstance(whole, list) else {**content, **whole}))
    assert main(["sweep", "--resume", str(made.path)]) == 1
    shown = capsys.readouterr()
    assert "is damaged" in shown.err
    assert shown.err.count("\n") == 1
    assert [path.name for path in made.path.iterdir()] == ["sweep.json"]


@pytest.mark.parametrize("name", ["round-1", "round-1/1", "best.yaml", "sweep.png", "sweep.json"])
def test_a_sweep_writes_and_deletes_nothing_through_links(name, tmp_path, monkeypatch, capsys):
    few_epochs(monkeypatch)
    made = ts.training.start_sweep(recipe(), {"optimizer.lr": [0.01]}, 1.0, tmp_path / "s")
    elsewhere, link = tmp_path / "elsewhere", made.path / name
    kept = elsewhere / "1" / "kept"
    kept.parent.mkdir(parents=True)
    kept.write_bytes((made.path / "sweep.json").read_bytes())
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to({"round-1": elsewhere, "round-1/1": kept.parent}.get(name, kept))
    before = kept.read_bytes()
    assert main(["sweep", "--resume", str(made.path)]) == 1
    assert "by a symbolic link" in capsys.readouterr().err
    assert kept.read_bytes() == before
    assert [path.name for path in kept.parent.iterdir()] == ["kept"]


def test_one_process_at_a_time_goes_on_with_a_sweep(tmp_path, monkeypatch):
    few_epochs(monkeypatch)
    made = ts.training.start_sweep(recipe(), {"optimizer.lr": [0.01]}, 1.0, tmp_path / "s")
    lines = made.run()
    next(lines)
    with pytest.raises(ValueError, match="another process"):
        next(ts.training.load_sweep(made.path).run())
    lines.close()
    assert len(list(ts.training.load_sweep(made.path).run())) == 2


def test_values_cannot_steer_a_terminal():
    assert sweep.Trial(1, {"data.root": "\x1b[31m", "optimizer.lr": "1e-3"}).name == (
        'data.root="\\u001b[31m" optimizer.lr=1e-3'
    )


def test_the_command(tmp_path, capsys):
    folder = tmp_path / "s"
    command = ["sweep", "digits", *arguments(), "--set", "optimizer.lr=1e-3,1e-2", "--budget", "0.5s", "--out"]
    assert main([*command, str(folder)]) == 0
    shown = capsys.readouterr()
    assert "2 x 0:00" in shown.err
    assert f"trysquare certify {folder / 'round-1'}" in shown.out
    assert (folder / "sweep.png").stat().st_size > 1000
    assert main(["sweep", "--resume", str(folder)]) == 0
    assert capsys.readouterr().out == shown.out
    assert main(["sweep", "digits"]) == 1
    assert "--set optimizer.lr=1e-3,3e-3 --budget 5m" in capsys.readouterr().err
    assert main(["sweep", "digits", "--resume", str(folder)]) == 1
    capsys.readouterr()
    for wrong in ("optimizer.lr", "optimizer.lr=", "=1", "optimizer.lr=["):
        assert main(["sweep", "digits", "--budget", "1m", "--set", wrong]) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_the_rate_is_raised_until_accuracy_stops_growing(monkeypatch, capsys):
    tried = []

    def after(recipe, lr, steps):
        tried.append(lr)
        accuracy = {0.001: 0.3, 0.002: 0.5, 0.004: 0.4, 0.008: 0.6, 0.016: 0.6, 0.032: 0.5, 0.064: 0.9}[round(lr, 6)]
        return ts.training.Rate(lr, loop.Evaluation(1.0, accuracy, {}))

    monkeypatch.setattr(sweep, "_after", after)
    rates = list(ts.training.find_lr(recipe(), start=0.001))
    assert len(tried) == 6
    assert ts.training.best_rate(rates).lr == 0.008


def test_find_lr_on_digits(capsys):
    command = ["find-lr", "digits", *arguments(), "--steps", "20", "--start", "1e-4", "--factor", "30"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("take --optimizer.lr ")
    assert float(lines[-1].split()[-1]) > 1e-4
    assert main([*command[:-2], "--factor", "1"]) == 1
    assert "above 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "numbers",
    [
        {"steps": 10**30},
        {"steps": 0},
        {"start": math.inf},
        {"start": math.nan},
        {"factor": 1e300},
        {"factor": math.nan},
    ],
    ids=str,
)
def test_rates_without_bounds_are_refused_at_once(numbers):
    with pytest.raises(ValueError, match=next(iter(numbers))):
        ts.training.find_lr(recipe(), **numbers)


def test_the_search_ends_at_the_largest_rate_of_a_recipe(monkeypatch):
    better = (loop.Evaluation(1.0, accuracy, {}) for accuracy in (0.1, 0.2, 0.3))
    monkeypatch.setattr(sweep, "_after", lambda recipe, lr, steps: ts.training.Rate(lr, next(better)))
    assert [rate.lr for rate in ts.training.find_lr(recipe(), start=1.0, factor=1e6)] == [1.0, 1e6]


def test_a_rate_that_explodes_ends_the_search(monkeypatch):
    def explode(self, *given):
        raise FloatingPointError(self._kept())

    monkeypatch.setattr(loop.Training, "step", explode)
    rates = list(ts.training.find_lr(recipe(), steps=2))
    assert [rate.found for rate in rates] == [None]
    with pytest.raises(ValueError, match="start lower"):
        ts.training.best_rate(rates)
