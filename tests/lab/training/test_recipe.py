import math

import pytest

import trysquare as ts
from trysquare.lab.training.recipe import convert, split_overrides


def test_every_recipe_resolves_and_reads_back_what_it_wrote(tmp_path):
    for name in ts.training.recipes():
        recipe = ts.training.read_recipe(name)
        assert recipe.name == name
        assert recipe.summary
        path = tmp_path / "recipe.yaml"
        path.write_text(recipe.to_yaml())
        assert ts.training.read_recipe(path) == recipe


@pytest.mark.parametrize(
    ("name", "loss", "lr", "batch", "epochs", "randaugment", "scale"),
    [
        ("cifar10-accurate", "cosine", 5e-3, 1024, 150, (6, 2), 0.25),
        ("cifar10-robust", "offset-cross-entropy", 1e-4, 1024, 3000, (6, 1), 0.5),
        ("imagenet-accurate", "cosine", 1e-2, 512, 90, (7, 2), 0.5),
        ("imagenet-robust", "offset-cross-entropy", 1e-3, 512, 300, None, 0.08),
    ],
)
def test_the_table_of_the_paper(name, loss, lr, batch, epochs, randaugment, scale):
    recipe = ts.training.read_recipe(name)
    assert recipe.model.name == name
    assert recipe.loss.name == loss
    if loss != "cosine":
        assert recipe.loss.options["margin"] == pytest.approx(1.5 * math.sqrt(2), rel=1e-15)
        assert recipe.loss.options["temperature"] == 0.125
    assert recipe.optimizer.name.startswith("schedule-free")
    assert recipe.optimizer.options["lr"] == lr
    assert (recipe.train.batch_size, recipe.train.epochs) == (batch, epochs)
    assert recipe.data.augment["random_resized_crop"] == {"scale": scale}
    magnitude = randaugment and {"magnitude": randaugment[0], "num_ops": randaugment[1]}
    assert recipe.data.augment.get("randaugment") == magnitude


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.epoch", 3, "unknown key of train 'epoch': did you mean 'epochs'"),
        ("trian.epochs", 3, "unknown section of a recipe 'trian': did you mean 'train'"),
        ("model.dense_widht", 3, "did you mean 'dense_width'"),
        ("model.name", "tiny-digit", "unknown model 'tiny-digit': did you mean 'tiny-digits'"),
        ("loss.name", "emmo", "did you mean 'emma'"),
        ("loss.marginn", 1.0, "did you mean 'margin'"),
        ("optimizer.name", "adamww", "did you mean 'adamw'"),
        ("optimizer.momentum", 0.9, "unknown key of optimizer 'schedule-free-adamw' 'momentum'"),
        ("data.name", "digit", "did you mean 'digits'"),
        ("data.augment.random_crob", {}, "did you mean 'random_crop'"),
        ("train.precision", "bfloat", "did you mean 'bfloat16'"),
        ("train.epochs", "many", "train.epochs='many' must be a whole number"),
        ("train.epochs", True, "train.epochs=True must be a whole number"),
        ("train.epochs", 0, "train.epochs=0 must be at least 1"),
        ("train.clip", "no", "must be a number or null"),
        ("train.clip", -1, "train.clip=-1.0 must be above 0 and finite, or null"),
        ("train.clip", 0.0, "train.clip=0.0 must be above 0"),
        ("train.radius_ramp", 2, "train.radius_ramp=2.0 must be above 0 and at most 1"),
        ("train.radius_start", -0.1, "train.radius_start=-0.1 must be at least 0 and finite"),
        ("train.seed", -1, "train.seed=-1 must be from 0 to 9223372036854775807"),
        ("train.seed", 2**63, "train.seed=9223372036854775808 must be from 0 to 9223372036854775807"),
        ("optimizer.lr", 0, "optimizer.lr=0.0 must be above 0 and at most 1000000"),
        ("optimizer.lr", -0.1, "optimizer.lr=-0.1 must be above 0 and at most 1000000"),
        ("optimizer.lr", "nan", "optimizer.lr=nan must be above 0 and at most 1000000"),
        ("optimizer.warmup_steps", -1, "optimizer.warmup_steps=-1 must be at least 0"),
        ("optimizer.weight_decay", -1, "optimizer.weight_decay=-1.0 must be at least 0"),
        ("optimizer.betas", [0.9, 1.0], "optimizer.betas=[0.9, 1.0]: each must be at least 0 and below 1"),
        ("optimizer.betas", [-0.1, 0.9], "optimizer.betas=[-0.1, 0.9]: each must be at least 0 and below 1"),
        ("evaluate.epsilons", [0.5, "inf"], "evaluate.epsilons=[0.5, inf]: each must be at least 0 and finite"),
        ("evaluate.epsilons", ["nan"], "evaluate.epsilons=[nan]: each must be at least 0 and finite"),
        ("evaluate.epsilons", [-0.5], "evaluate.epsilons=[-0.5]: each must be at least 0 and finite"),
        ("name", "../out", "name='../out' becomes that of a folder in runs/: leave slashes out"),
        ("name", "a\\b", "leave slashes out"),
        ("optimizer.betas", [0.9], "must be a list of 2 (each a number)"),
        ("optimizer.lr", [1], "must be a number"),
        ("evaluate.epsilons", [], "at least one"),
        ("evaluate.epsilons", 0.5, "must be a list (each a number)"),
        ("data.augment", 3, "must be a mapping of names"),
        ("model", 3, "model must be a mapping"),
        ("model.head.size", 3, "must be text"),
        ("train.epochs.more", 3, "epochs must be a mapping"),
        ("name", True, "name=True must be text"),
    ],
)
def test_wrong_recipes_are_told_what_is_wrong(key, value, message):
    with pytest.raises(ValueError, match=r".*") as caught:
        ts.training.read_recipe("digits", {key: value})
    assert message in str(caught.value)


def test_a_ramp_needs_a_radius():
    with pytest.raises(ValueError, match="radius_start needs a loss that has a radius"):
        ts.training.read_recipe("digits", {"loss.name": "cosine", "train.radius_start": 0.1})
    with pytest.raises(ValueError, match="radius_start needs a loss that has a radius"):
        ts.training.read_recipe("digits", {"loss.radius": None, "loss.margin": 1.0, "train.radius_start": 0.1})
    with pytest.raises(ValueError, match="radius_start needs a loss that has a radius above 0"):
        ts.training.read_recipe("digits", {"loss.radius": 0.0, "train.radius_start": 0.1})


def test_margin_and_radius_are_not_given_together():
    with pytest.raises(ValueError, match=r"loss.margin=5.0 and loss.radius=0.85 both set the margin: .* null"):
        ts.training.read_recipe("digits", {"loss.margin": 5.0})
    assert ts.training.read_recipe("digits", {"loss.margin": 5.0, "loss.radius": None}).loss.options["margin"] == 5.0


def test_another_name_starts_from_its_own_defaults():
    recipe = ts.training.read_recipe(
        "digits", {"optimizer.momentum": 0.5, "optimizer.name": "sgd", "loss.name": "emma"}
    )
    assert recipe.optimizer.options["momentum"] == 0.5
    assert recipe.optimizer.options["lr"] == 0.1
    assert recipe.loss.options["lipschitz"] is None


def test_files_that_are_not_recipes(tmp_path):
    path = tmp_path / "mine.yaml"
    for content, message in ((b"a: [", "is not YAML"), (b"\xff\xfe\x00", "is not YAML"), (b"- 1", "must be a mapping")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            ts.training.read_recipe(path)
    path.write_text("")
    assert ts.training.read_recipe(path).name == "mine"
    with pytest.raises(ValueError, match="did you mean 'digits'"):
        ts.training.read_recipe("digit")


def test_a_key_that_is_written_twice_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("train:\n  epochs: 3\n  seed: 1\n  epochs: 5\n")
    with pytest.raises(ValueError, match=r"mine.yaml: the key train.epochs is there twice, in lines 2 and 4"):
        ts.training.read_recipe(path)
    path.write_text("data: {augment: {flip: {}}}\ndata: {name: digits}\n")
    with pytest.raises(ValueError, match=r"the key data is there twice, in lines 1 and 2"):
        ts.training.read_recipe(path)
    path.write_text("data:\n  augment:\n    flip: &none {}\n    random_crop: {<<: *none, padding: 1}\n")
    assert ts.training.read_recipe(path).data.augment == {"flip": {}, "random_crop": {"padding": 1}}


@pytest.mark.parametrize("text", ["2024", "1.10", "007", "2024-01-01", "yes", "[a]"])
def test_text_stays_as_it_was_typed(text):
    _, overrides = split_overrides(["--data.root", text])
    assert ts.training.read_recipe("digits", overrides).data.root == text
    _, overrides = split_overrides([f"--data.name={text}"])
    assert overrides == {"data.name": text}
    assert split_overrides(["--data.root", "null", "--data.workers", "2"])[1] == {"data.root": None, "data.workers": 2}


def test_a_number_may_be_text():
    assert ts.training.resolve({"data": {"root": 2024}, "name": 3}).data.root == "2024"


def test_overrides_on_the_command_line():
    left, overrides = split_overrides(["train", "--loss.radius", "-1", "--out=a.b", "--optimizer.lr=1e-3", "x.yaml"])
    assert left == ["train", "--out=a.b", "x.yaml"]
    assert overrides == {"loss.radius": -1, "optimizer.lr": "1e-3"}
    assert ts.training.read_recipe("digits", {"optimizer.lr": "1e-3"}).optimizer.options["lr"] == 0.001
    with pytest.raises(ValueError, match="needs a value"):
        split_overrides(["--train.epochs"])
    with pytest.raises(ValueError, match=r"cannot be read: it is not YAML$"):
        split_overrides(["--train.epochs", "["])


def test_numbers_may_be_fractions():
    assert convert("36/255", float, "x") == 36 / 255
    with pytest.raises(ValueError, match="must be a number"):
        convert("1/0", float, "x")


def test_without_yaml_there_is_a_hint(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(ImportError, match=r"trysquare\[train\]"):
        ts.training.recipes()
