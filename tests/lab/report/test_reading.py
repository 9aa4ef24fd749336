import json

import pytest

from trysquare.lab.report.reading import read_results, recipe_sections

DEEP = "[" * 100_000


def test_a_run_is_read(run):
    found = read_results(run)
    assert found.parameters > 1000
    assert found.setting("data", "name") == "digits"
    assert found.setting("data", "nothing") is None
    assert found.setting("nothing", "name") is None
    assert {record.kind for record in found.metrics} == {"train", "evaluation"}
    assert found.attack is not None
    assert found.audit.layers[0].spectrum
    assert found.command("attack").endswith("digits & <tiny>'")


@pytest.mark.parametrize(
    "name", ["recipe.yaml", "versions.json", "metrics.jsonl", "model.safetensors", "certificate.json"]
)
def test_a_missing_file_is_named_with_what_writes_it(run, name):
    (run / name).unlink()
    writer = "certify" if name == "certificate.json" else "train"
    with pytest.raises(ValueError, match=rf"{name}: expected this file, found none; trysquare {writer}"):
        read_results(run)


def test_what_may_be_absent(run):
    for name in ("attack.json", "audit.json"):
        (run / name).unlink()
    found = read_results(run)
    assert found.attack is None
    assert found.audit is None


def changed(name, **values):
    """A file with other values."""

    def change(run):
        content = json.loads((run / name).read_text()) | values
        (run / name).write_text(json.dumps(content))

    return change


def replaced(name, content):
    """A file with another content."""
    return lambda run: (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (replaced("recipe.yaml", "a: [1"), r"recipe.yaml: expected a recipe"),
        (replaced("recipe.yaml", "just text"), r"recipe.yaml: expected a recipe.*str where names"),
        (replaced("versions.json", "[1]"), r"versions.json: expected a JSON object"),
        (replaced("versions.json", b"\xff\xfe"), r"versions.json: expected a JSON object"),
        (replaced("versions.json", DEEP), r"versions.json: expected a JSON object"),
        (replaced("model.safetensors", b"PK nothing"), r"model.safetensors: expected a checkpoint"),
        (replaced("certificate.json", "{}"), r"certificate.json: expected a certificate"),
        (replaced("certificate.json", '{"radii": '), r"certificate.json: expected a certificate"),
        (changed("certificate.json", radii=[1.0]), r"certificate.json.*one length"),
        (changed("certificate.json", radii=[], labels=[], predictions=[]), r"certificate.json.*not empty"),
        (changed("certificate.json", radii=[-1.0], labels=[0], predictions=[0]), r"certificate.json.*negative"),
        (changed("certificate.json", epsilons=[]), r"certificate.json.*epsilons"),
        (changed("certificate.json", epsilons=["far"]), r"certificate.json: expected a certificate"),
        (changed("certificate.json", evaluation_error=None), r"certificate.json.*evaluation_error"),
        (changed("attack.json", attacked=[0.5]), r"attack.json.*differ in length"),
        (changed("attack.json", clean=97), r"attack.json.*from 0 to 1"),
        (changed("attack.json", epsilons=[float("nan")] * 4), r"attack.json.*finite radii"),
        (changed("attack.json", violations=[3]), r"attack.json: expected an attack report"),
        (changed("audit.json", bound=float("nan")), r"audit.json.*not a number"),
        (changed("audit.json", layers=[{"name": "x"}]), r"audit.json: expected an audit"),
        (replaced("metrics.jsonl", "nonsense\n"), r"metrics.jsonl: expected.*line 1"),
        (replaced("metrics.jsonl", '{"kind": "test", "step": 1}\n'), r"metrics.jsonl.*line 1: kind 'test'"),
        (replaced("metrics.jsonl", '{"kind": "train"}\n'), r"metrics.jsonl.*step None"),
        (replaced("metrics.jsonl", '{"kind": "train", "step": 1, "accuracy": 97}\n'), r"metrics.jsonl.*from 0 to 1"),
        (
            replaced("metrics.jsonl", '{"kind": "train", "step": 1, "certified": {"nan": 0.5}}\n'),
            r"metrics.jsonl.*finite radii",
        ),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_with_what_was_expected(run, damage, message):
    damage(run)
    with pytest.raises(ValueError, match=message):
        read_results(run)


def test_one_flipped_bit_of_the_model_is_named(run):
    path = run / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors: expected a checkpoint of a model"):
        read_results(run)


def test_there_must_be_a_directory(tmp_path):
    with pytest.raises(ValueError, match="nowhere: expected the directory of a run"):
        read_results(tmp_path / "nowhere")


def test_without_pyyaml_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(ImportError, match=r"trysquare\[train\]"):
        recipe_sections(run)


def metrics(run, *lines, end="\n"):
    (run / "metrics.jsonl").write_text("\n".join(json.dumps({"kind": "train", **line}) for line in lines) + end)
    return read_results(run).metrics


def test_steps_that_were_done_again_after_a_restart_count_once(run):
    found = metrics(run, *({"step": step, "loss": place} for place, step in enumerate([1, 2, 3, 4, 3, 4, 5])))
    assert [(record.step, record.values["loss"]) for record in found] == [(1, 0), (2, 1), (3, 4), (4, 5), (5, 6)]


def test_a_last_line_that_is_being_written_is_left_out(run):
    assert len(metrics(run, {"step": 1}, {"step": 2}, end='\n{"kind": "tr')) == 2


def test_numbers_that_are_none_or_not_finite_are_left_out(run):
    (record,) = metrics(run, {"step": 1, "loss": float("nan"), "lr": None, "epoch": True, "certified": {"0.1": None}})
    assert set(record.values) == {"step"}
    assert not record.certified
