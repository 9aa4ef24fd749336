import base64
import io

import pytest
import torch

from tests.lab.report.runs import RECIPE
from trysquare.lab.data import ImageSet, load
from trysquare.lab.report.pictures import data_uri, png, reason_not_to_show, recipe_images
from trysquare.lab.report.reading import read_run

Image = pytest.importorskip("PIL.Image")


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_a_picture_comes_back_as_it_was(channels, mode):
    image = torch.randint(256, (channels, 5, 7), dtype=torch.uint8)
    read = Image.open(io.BytesIO(png(image)))
    assert read.mode == mode
    pixels = torch.tensor(list(read.tobytes()), dtype=torch.uint8).view(5, 7, channels)
    assert torch.equal(pixels.permute(2, 0, 1), image)


def test_white_is_white():
    uri = data_uri(torch.tensor([[[0, 8, 16]]], dtype=torch.uint8), white=16)
    read = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    assert list(read.tobytes()) == [0, 128, 255]


def test_images_must_be_those_of_the_certificate(made_once):
    certificate = read_run(made_once).certificate
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
