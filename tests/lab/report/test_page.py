import base64
import io
import json
import os
import re
import stat
from dataclasses import replace

import pytest
import torch

from tests.lab.report.documents import Document
from tests.lab.report.runs import RECIPE
from trysquare.lab.cli import main
from trysquare.lab.data import ImageSet, load
from trysquare.lab.report import write_report
from trysquare.lab.report.page import _CONTENTS, data_uri, page, png, reason_not_to_show, recipe_images
from trysquare.lab.report.reading import Record, read_results
from trysquare.verify.attacks import AttackReport, Violation

HOSTILE = "</title></style><script>alert(1)</script>\"'<img src=x onerror=y>\x00\udc80"


@pytest.fixture(scope="module")
def whole(made_once):
    return read_results(made_once)


def document(run, images=None):
    return Document(page(run, images, "no images here"))


def test_the_page_has_all_parts_and_needs_nothing_else(run):
    path = write_report(run, load("digits", split="test"))
    assert path == run / "report.html"
    text = path.read_text(encoding="utf-8")
    found = Document(text)
    assert [given["id"] for given in found.of("section")] == list(_CONTENTS)
    assert [given["href"] for given in found.of("a")] == ["#meaning", *(f"#{key}" for key in _CONTENTS)]
    assert all(given["src"].startswith("data:image/png;base64,") for given in found.of("img"))
    assert not {"script", "link", "iframe", "object"} & set(found.elements)
    assert not re.search(r"url\(|@import|https?:", text)
    assert not any("absent" in given.get("class", "").split() for given in found.attributes)


def test_pictures_and_tables_are_told_to_those_who_do_not_see_them(whole):
    found = document(whole, load("digits", split="test"))
    ids = [given["id"] for given in found.attributes if "id" in given]
    assert len(ids) == len(set(ids))
    assert len(found.of("svg")) == 9
    assert all(set(given["aria-labelledby"].split()) <= set(ids) for given in found.of("svg"))
    assert all(given["alt"] for given in found.of("img"))
    assert all(given["scope"] in ("col", "row") for given in found.of("th"))
    assert found.elements.count("caption") == found.elements.count("table")


def test_the_numbers_are_those_of_the_files(whole):
    text = " ".join(document(whole).text)
    clean = int(whole.certificate.clean_accuracy * 1000 + 1e-9) / 10
    assert f"{clean:.1f}\xa0%" in text
    assert f"{whole.parameters:,}" in text
    for share in whole.attack.attacked:
        assert f"attacked {int(share * 1000 + 1e-9) / 10:.1f}\xa0%" in text
    assert text.count("36/255") >= 3


def test_what_is_absent_is_said_with_the_command_that_makes_it(whole):
    found = document(replace(whole, attack=None, audit=None, metrics=()))
    assert "trysquare attack '" in found.inside("curve")
    assert "trysquare audit '" in found.inside("layers")
    assert "no numbers to draw" in found.inside("training")
    assert "no images here" in found.inside("images")
    assert "not attacked" in " ".join(found.text)


def test_empty_the_data_is_taken_for_markup(whole):
    test = load("digits", split="test")
    named = ImageSet(test.images, test.labels, tuple(f"{i}{HOSTILE}" for i in range(10)), test.white)
    layers = [
        replace(layer, name=HOSTILE, type=HOSTILE, geometry=HOSTILE, verdict=HOSTILE, remark=HOSTILE)
        for layer in whole.audit.layers
    ]
    hostile = replace(
        whole,
        path=whole.path / HOSTILE.replace("/", "").replace("\x00", ""),
        recipe=HOSTILE,
        sections={"model": {"name": HOSTILE}, "data": {"name": HOSTILE}},
        versions={HOSTILE: HOSTILE, "nested": {"deep": [HOSTILE]}},
        audit=replace(whole.audit, layers=layers),
    )
    text = page(hostile, named, HOSTILE)
    text.encode()
    found = Document(text)
    assert "script" not in found.elements
    assert not any(key.startswith("on") for given in found.attributes for key in given)
    assert all(given["src"].startswith("data:") for given in found.of("img"))
    assert "<script>alert(1)</script>" in found.inside("provenance")


def test_an_attack_that_succeeded_is_told_at_the_top(whole):
    broken = replace(whole.attack, violations=(Violation(3, 0.5, 0.25, 1, 7),))
    found = document(replace(whole, attack=broken))
    assert "Do not trust this certificate." in found.text
    assert "label 1 became 7" in " ".join(found.text)
    assert "1 fell inside" in found.inside("curve")
    assert "the certificate wrongly claims" in " ".join(found.text)
    assert "Do not trust this certificate." not in document(whole).text


def test_an_attack_on_another_certificate_is_told(whole):
    attack = whole.attack
    other = AttackReport(attack.epsilons, (0.0,) * 4, attack.attacked, attack.clean, attack.samples, ())
    assert "The attack is not of this certificate." in document(replace(whole, attack=other)).text
    fewer = document(replace(whole, attack=replace(other, samples=10)))
    assert "The attack is not of this certificate." not in fewer.text
    assert "different sets" in fewer.inside("curve")


def test_certificates_without_pairs_and_without_measurements_say_so(whole):
    plain = replace(whole.certificate, pairwise=False, measured_samples=0, lipschitz=2.5)
    text = document(replace(whole, certificate=plain)).inside("meaning")
    assert "logits move by at most 2.5 times" in text
    assert "They were not measured" in text


@pytest.mark.parametrize("radius", [0.0, 1e9, torch.inf])
def test_radii_that_are_all_the_same(whole, radius):
    flat = replace(whole.certificate, radii=torch.full_like(whole.certificate.radii, radius), epsilons=(0.0,))
    document(replace(whole, certificate=flat, attack=None), load("digits", split="test"))


def test_all_right_and_all_wrong(whole):
    right = replace(whole.certificate, predictions=whole.certificate.labels)
    wrong = replace(whole.certificate, predictions=9 - whole.certificate.labels)
    images = load("digits", split="test")
    assert "No answer is wrong." in document(replace(whole, certificate=right), images).text
    assert document(replace(whole, certificate=wrong), images).text.count("No answer is right.") == 2


def test_of_many_classes_the_ends_are_shown(whole):
    labels, radii = torch.arange(1000).repeat_interleave(5), torch.arange(5000).double() / 5000
    many = replace(whole.certificate, labels=labels, predictions=labels, radii=radii)
    found = document(replace(whole, certificate=many, attack=None))
    text = found.inside("classes")
    assert "Of 1000 classes" in text
    assert {"class 0", "class 11", "class 988", "class 999"} <= set(found.text)
    assert "class 12 " not in text


def test_thousands_of_images_are_not_drawn_one_by_one(whole):
    labels = torch.arange(10).repeat_interleave(400)
    many = replace(whole.certificate, labels=labels, predictions=labels, radii=torch.rand(4000).double())
    found = document(replace(whole, certificate=many, attack=None))
    assert "dots sample" in {given.get("class") for given in document(whole).attributes}
    assert "dots sample" not in {given.get("class") for given in found.attributes}


def test_large_networks_show_extremes_where_spectra_were_not_computed(whole):
    layers = [replace(layer, spectrum=None) for layer in whole.audit.layers]
    layers[0] = replace(layers[0], smallest=None, remark="too large")
    found = document(replace(whole, audit=replace(whole.audit, layers=layers)))
    text = found.inside("layers")
    assert "alone: the whole spectrum was not computed" in text
    assert "too large" in text
    assert "up to 1" in text


def test_networks_without_linear_layers_have_no_spectrum(whole):
    layers = [replace(layer, smallest=None, largest=None, spectrum=None) for layer in whole.audit.layers]
    found = document(replace(whole, audit=replace(whole.audit, layers=layers)))
    assert "no linear layer" in found.inside("layers")


def test_layers_that_are_not_orthogonal_show_their_range(whole):
    layers = [replace(layer, smallest=0.5, largest=3.0, spectrum=[3.0, 1.0, 0.5]) for layer in whole.audit.layers]
    assert "0.5 to 3" in document(replace(whole, audit=replace(whole.audit, layers=layers))).inside("layers")


def test_long_runs_are_thinned_and_one_line_is_enough(whole):
    long = tuple(Record("train", 100.0 * i, {"loss": 1e9 / (i + 1)}, {}) for i in range(20_001))
    text = page(replace(whole, metrics=long), None, "")
    assert "2M" in text
    assert len(text) < 200_000
    document(replace(whole, metrics=(Record("evaluation", 1.0, {"loss": 1e300}, {0.1: 0.5}),)))


def test_an_interrupted_write_leaves_the_old_report(run, monkeypatch):
    (run / "report.html").write_text("old")
    before = sorted(os.listdir(run))

    def full(source, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_report(run)
    assert (run / "report.html").read_text() == "old"
    assert sorted(os.listdir(run)) == before


def test_the_report_can_be_read_by_others(run):
    assert stat.S_IMODE(write_report(str(run)).stat().st_mode) == 0o644


def test_the_same_run_gives_the_same_page(whole):
    assert page(whole, None, "") == page(whole, None, "")


def test_from_the_command_line(run, capsys):
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert "Test image" in (run / "report.html").read_text()
    (run / "certificate.json").write_text("{")
    assert main(["report", str(run)]) == 1
    assert "certificate.json: expected a certificate" in capsys.readouterr().err
    json.loads((run / "audit.json").read_text())


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_a_picture_comes_back_as_it_was(channels, mode):
    image = torch.randint(256, (channels, 5, 7), dtype=torch.uint8)
    image_reader = pytest.importorskip("PIL.Image")
    read = image_reader.open(io.BytesIO(png(image)))
    assert read.mode == mode
    pixels = torch.tensor(list(read.tobytes()), dtype=torch.uint8).view(5, 7, channels)
    assert torch.equal(pixels.permute(2, 0, 1), image)


def test_white_is_white():
    uri = data_uri(torch.tensor([[[0, 8, 16]]], dtype=torch.uint8), white=16)
    image_reader = pytest.importorskip("PIL.Image")
    read = image_reader.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    assert list(read.tobytes()) == [0, 128, 255]


def test_images_must_be_those_of_the_certificate(made_once):
    certificate = read_results(made_once).certificate
    test = load("digits", split="test")
    assert reason_not_to_show(test, certificate) is None
    assert "labels differ from image" in reason_not_to_show(load("digits", split="train"), certificate)
    few = ImageSet(test.images[:3], test.labels[:3], test.classes)
    assert "the data has 3" in reason_not_to_show(few, certificate)
    two_channels = type(certificate)(**{**vars(certificate), "input_shape": (2, 8, 8)})
    assert "(2, 8, 8)" in reason_not_to_show(test, two_channels)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (RECIPE, ""),
        (RECIPE.replace("root: null", "size: 32"), ""),
        ("data: 3", "does not name a data set"),
        (RECIPE.replace("digits", "digitz"), "did you mean 'digits'"),
        (RECIPE.replace("digits", "mnist"), "give the folder"),
        (RECIPE.replace("digits", "mnist").replace("null", "[1]"), "could not be read"),
    ],
)
def test_the_recipe_names_the_images(tmp_path, recipe, why):
    (tmp_path / "recipe.yaml").write_text(recipe)
    images, told = recipe_images(tmp_path)
    assert (images is None) == bool(why)
    assert why in told
