"""Networks of the paper and small ones, by name: one family a file.

``MODELS`` maps names to builders. Adding a model is a function that returns its layers, and one line of ``MODELS``.
"""

from __future__ import annotations

from collections.abc import Sequence

from trysquare.lab.models.classifier import Builder, Classifier
from trysquare.lab.models.counting import count_parameters
from trysquare.lab.models.depthwise import cifar10_accurate, imagenet
from trysquare.lab.models.lipnext import lipnext
from trysquare.lab.models.liresnet import liresnet
from trysquare.lab.models.mlp import aol_mlp
from trysquare.lab.models.resnet import resnet34
from trysquare.lab.models.stacks import bcop_small, cifar10_robust, tiny
from trysquare.naming import pick, shown

__all__ = ["MODELS", "Builder", "Classifier", "build", "count_parameters"]

MODELS: dict[str, Builder] = {
    "cifar10-accurate": Builder(cifar10_accurate, "the paper's CIFAR-10 network for accuracy: 16 residual blocks"),
    "cifar10-robust": Builder(cifar10_robust, "the paper's CIFAR-10 network for certificates: 20 layers, no pooling"),
    "imagenet-accurate": Builder(imagenet, "the paper's ImageNet network for accuracy: four stages of residual blocks"),
    "imagenet-robust": Builder(
        imagenet,
        "the paper's ImageNet network for certificates: L2 pooling, circular padding, larger kernels",
        kernel_size=5,
        padding_mode="circular",
        pooling="l2",
    ),
    "bcop-small": Builder(bcop_small, "the network of Li et al. (2019) that the paper's appendix repeats"),
    "liresnet-aoc": Builder(liresnet, "the paper's robust*: LiResNet of orthogonal layers", head="unit-norm"),
    "liresnet": Builder(
        liresnet,
        "LiResNet of linear residual convolutions",
        head="unit-norm",
        conv="aol",
        strided_conv="aoc",
        residual=True,
        factor=1.0,
        dense_layers=8,
    ),
    "bronet": Builder(
        liresnet,
        "BRONet: LiResNet of block reflectors",
        head="unit-norm",
        conv="bro",
        strided_conv="aoc",
        centering="batch",
        factor=1.0,
        dense_layers=8,
    ),
    "lipnext": Builder(lipnext, "LipNeXt: orthogonal matrices and shifts, no larger kernels", head="unit-norm"),
    "aol-mlp": Builder(aol_mlp, "the linear layers with AOL of Prach et al., from the identity on"),
    "resnet34": Builder(resnet34, "the ResNet-34 of the paper's measurements of cost, for any kind of convolution"),
    "tiny-digits": Builder(tiny, "for 8 x 8 digits, in seconds"),
    "tiny-mnist": Builder(
        tiny, "for 28 x 28 images, on a few processor cores", widths=(16, 64), dense_width=256, dense_layers=2
    ),
    "tiny-cifar": Builder(
        tiny, "for 32 x 32 images, on a few processor cores", widths=(16, 64, 256), dense_width=256, dense_layers=2
    ),
}


def build(name: str, input_shape: Sequence[int] = (3, 32, 32), classes: int = 10, **options: object) -> Classifier:
    """Return a model by name, for images of any size and any number of classes.

    Images whose size is not a multiple of the model's total stride get zeros around them, which is an isometry. Use
    ``torch.device`` as a context, or ``.to()``, for another device or dtype.

    Args:
        name: one of ``MODELS``.
        input_shape: channels, height and width of an image.
        classes: number of logits. There may be more than the model has features: an orthogonal head then has
            orthonormal columns, and stays 1-Lipschitz.
        options: those of ``MODELS[name].options``, explained by ``MODELS[name].body``. Every model has ``mean`` and
            ``std``, numbers for ``InputScaling`` in front (none by default), and ``head``: ``"orthogonal"``,
            ``"unit-norm"`` or ``"plain"``.

    Raises:
        ValueError: if there is no such model or option; it names the nearest one.

    >>> model = ts.models.build("tiny-digits", (1, 8, 8), mean=0.3, std=0.5)
    >>> model(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    >>> round(ts.lipschitz_bound(model, (1, 8, 8)), 4)
    2.0
    """
    if not isinstance(name, str):
        raise ValueError(f"name={shown(name)} must be the name of a model: one of {', '.join(MODELS)}")
    return pick(MODELS, name, "model")(input_shape, classes, **options)
