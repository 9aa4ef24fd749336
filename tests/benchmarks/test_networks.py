import pytest
import torch
from benchmarks.networks import VARIANTS, build, evaluation, exchange, images, train_step
from torch import nn

import trysquare as ts
from benchmarks import networks, peers

OURS = [name for name in VARIANTS if not name.startswith("orthogonium")]


@pytest.mark.parametrize("variant", OURS)
def test_convolutions_are_exchanged_and_nothing_else(variant):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        ts.MaxMin(),
        nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1)),
        nn.Flatten(),
        nn.Linear(32, 2),
    )
    before = [model[0], model[2][0]]
    changed = exchange(model, VARIANTS[variant].make)
    assert changed[0] is not before[0]
    assert changed[2][0] is not before[1]
    assert changed(torch.randn(2, 3, 4, 4)).shape == (2, 2)
    assert type(changed[4]) is nn.Linear
    assert isinstance(changed[1], ts.MaxMin)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in OURS])
@pytest.mark.parametrize(("channels", "size", "stride"), [((4, 4), 3, 1), ((4, 8), 3, 2), ((4, 4), 4, 2)])
def test_layers_of_the_peer_have_the_sizes_of_the_reference(variant, channels, size, stride):
    pytest.importorskip("orthogonium")
    pytest.importorskip("einops")
    x = torch.randn(1, channels[0], 8, 8)
    found, expected = (VARIANTS[name].make(*channels, size, stride, 1)(x) for name in (variant, "Conv2d"))
    assert found.shape == expected.shape


def test_linear_layers_are_exchanged_if_asked_for():
    model = exchange(nn.Sequential(nn.Linear(4, 3), ts.OrthoLinear(3, 2)), linear=ts.OrthoLinear)
    assert all(isinstance(layer, ts.OrthoLinear) for layer in model)


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (3, 1), (3, 2), (4, 2)])
def test_our_padding_changes_nothing(size, stride):
    ours, plain = (VARIANTS[name].make(4, 4, size, stride, 2) for name in (networks.PADDED, "Conv2d"))
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(ours(x), plain(x))
    assert plain.padding_mode == ("zeros" if size == 1 else "circular")


def test_the_reference_is_the_paper_network():
    with torch.device("meta"):
        model = build("resnet34", 224, "Conv2d")
        assert model(torch.empty(1, 3, 224, 224)).shape == (1, 1000)
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 30
    assert {layer.padding_mode for layer in convolutions} == {"circular"}
    assert [layer.out_channels for layer in convolutions if layer.stride == (2, 2)] == [64, 128, 256, 512]


def test_small_images_stay_large_in_resnet18():
    with torch.device("meta"):
        assert networks.resnet18(32).features[:-1](torch.empty(1, 3, 32, 32)).shape == (1, 512, 4, 4)


def test_step_trains_and_evaluation_does_not():
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 10))
    x, labels = images(2, 4)
    before = model[1].weight.clone()
    train_step(model, x, labels)()
    assert model.training
    assert not torch.equal(before, model[1].weight)
    evaluation(model, x)()
    assert not model.training


@pytest.fixture
def no_peers(monkeypatch):
    """Imports of the peer fail with the given error."""

    def fail(error):
        def refuse(name):
            raise error(name)

        monkeypatch.setattr(peers, "import_module", refuse)
        peers._problem.cache_clear()

    yield fail
    peers._problem.cache_clear()


def test_without_peers_the_benchmarks_say_what_is_missing(no_peers):
    no_peers(lambda name: ModuleNotFoundError(name, name=name))
    assert not peers.installed()
    assert [line.split(" (")[0] for line in peers.missing()] == [
        "orthogonium is not installed",
        "einops is not installed",
    ]
    assert all("pip install" in line for line in peers.missing())
    assert peers.that_run(["AOC", "orthogonium AOC"]) == ["AOC"]
    with pytest.raises(ValueError, match="orthogonium is not installed"):
        peers.that_run(["orthogonium AOC"])


def test_a_peer_that_breaks_at_its_import_is_as_good_as_missing(no_peers):
    no_peers(lambda name: RuntimeError("torchvision::nms does not exist"))
    assert not peers.installed()
    assert "orthogonium cannot be imported: torchvision::nms does not exist" in peers.missing()[0]


def test_layers_that_ask_for_an_accelerator_stay_where_they_are():
    with peers._NoAccelerator():
        assert torch.zeros(1, device="cuda").cuda().device.type == "cpu"


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 4, 3, 2, 1, padding_mode="circular"), nn.Linear(4, 4, bias=False)])
def test_layers_of_the_peer_become_plain_ones_with_the_same_weights(layer):
    theirs = type("Theirs", (type(layer),), {"__module__": "orthogonium.layers"})
    layer.__class__ = theirs
    model = nn.Sequential(ts.MaxMin(), nn.Sequential(layer))
    x = torch.randn(2, 4, 4, 4)
    expected = model(x)
    assert torch.equal(peers.with_plain_layers(model)(x), expected)
    assert type(model[1][0]) in (nn.Conv2d, nn.Linear)
    assert isinstance(model[0], ts.MaxMin)
