"""From a recipe to the things that it names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trysquare.lab.data import Images, Loader, load
from trysquare.lab.data.registry import check_images
from trysquare.lab.models import Classifier, build
from trysquare.lab.training.distribution import World
from trysquare.lab.training.recipe import MARGINS, Recipe
from trysquare.lab.training.step import OPTIMIZERS, Stepper, takes_head
from trysquare.naming import shown
from trysquare.nn.losses import Loss, make_loss, margin_for_radius
from trysquare.verify.certification import evaluating
from trysquare.verify.lipschitz import analyse


def load_images(recipe: Recipe, split: str) -> Images:
    """Images of the recipe's data set.

    Raises:
        ValueError: if a file is missing or damaged; files of images in folders are only listed.
    """
    return load(recipe.data.name, recipe.data.root, split, size=recipe.data.size)


def model_arguments(recipe: Recipe, images: Images) -> dict[str, Any]:
    """Arguments of ``ts.models.build`` for these images."""
    shape = tuple(images[0][0].shape)
    return {"name": recipe.model.name, "input_shape": shape, "classes": len(images.classes), **recipe.model.options}


def build_model(recipe: Recipe, images: Images) -> Classifier:
    """The model with the weights of the recipe's seed."""
    torch.manual_seed(recipe.train.seed)
    return build(**model_arguments(recipe, images))


def build_loss(recipe: Recipe, model: Classifier, input_shape: tuple[int, ...]) -> Loss:
    """The loss; a radius becomes the margin that certifies it, by the Lipschitz constant of the model at the start."""
    name, options = recipe.loss.name, dict(recipe.loss.options)

    def constant() -> float:
        with evaluating(model), torch.no_grad():
            rows = model.head.weight
            # Losses take the √2 of orthonormal rows for granted.
            apart = float(torch.cdist(rows, rows).max()) / math.sqrt(2) if len(rows) > 1 else 1.0
            return analyse(model, input_shape, compare=False).features_bound * apart

    if "lipschitz" in options and options["lipschitz"] is None:
        options["lipschitz"] = constant()
    if name in MARGINS:
        radius = options.pop("radius")
        if radius is not None:
            options[MARGINS[name]] = margin_for_radius(radius, constant())
    return make_loss(name, **options)


def check_loss(recipe: Recipe, loss: Loss, model: Classifier, classes: int) -> None:
    """Refuse a loss that does not take a logit for each class, before a run finds out at its first step.

    Raises:
        ValueError: if the loss refuses such logits, or is not finite for logits of 0.
    """
    head = {"head": model.head.weight} if takes_head(loss) else {}
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            logits, labels = torch.zeros(1, classes, device=device), torch.zeros(1, dtype=torch.int64, device=device)
            value = float(loss(logits, labels, **head))
    except ValueError as error:
        raise ValueError(f"loss {recipe.loss.name!r} does not take {classes} classes: {error}") from error
    if not math.isfinite(value):
        options = shown(dict(recipe.loss.options))
        raise ValueError(
            f"loss {recipe.loss.name!r} with {options} is {value} where all logits are 0: take numbers that are less "
            "extreme"
        )


def training_batches(recipe: Recipe, images: Images, world: World) -> Loader:
    """Batches of this process.

    Raises:
        ValueError: if the processes cannot share a batch equally, or there are not enough images for one.
    """
    if recipe.train.batch_size > len(images):
        raise ValueError(
            f"train.batch_size={recipe.train.batch_size} is more than the {len(images)} training images: "
            f"lower it to at most {len(images)}"
        )
    if recipe.train.batch_size % world.size:
        raise ValueError(
            f"train.batch_size={recipe.train.batch_size} must be a multiple of the number of processes, {world.size}"
        )
    return Loader(
        images,
        recipe.train.batch_size,
        recipe.data.augment,
        recipe.train.seed,
        shuffle=True,
        drop_last=True,
        rank=world.rank,
        world_size=world.size,
        workers=recipe.data.workers,
        device=world.device,
    )


def test_batches(recipe: Recipe, images: Images, world: World) -> Loader:
    """Batches of this process, in order and not augmented."""
    size = max(recipe.evaluate.batch_size, world.size)
    return Loader(
        images, size, rank=world.rank, world_size=world.size, workers=recipe.data.workers, device=world.device
    )


def build_stepper(recipe: Recipe, model: nn.Module, steps: int) -> Stepper:
    """The optimizer, for a training of so many steps."""
    return OPTIMIZERS[recipe.optimizer.name](model.parameters(), steps, **recipe.optimizer.options)


def radius_schedule(recipe: Recipe, loss: Loss, steps: int) -> Callable[[int], None]:
    """A function of the number of the step that sets the loss's radius or margin for it."""
    start = recipe.train.radius_start
    final = recipe.loss.options.get("radius")
    if start is None or not final:
        return lambda step: None
    attribute = MARGINS.get(recipe.loss.name, "radius")
    end, ramp = getattr(loss, attribute), max(1, math.ceil(recipe.train.radius_ramp * steps))

    def apply(step: int) -> None:
        radius = start + (final - start) * min(step / ramp, 1.0)
        setattr(loss, attribute, end * radius / final)

    return apply


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything that a run works with."""

    recipe: Recipe
    world: World
    model: Classifier
    loss: Loss
    train: Loader
    test: Loader
    stepper: Stepper
    steps: int
    input_shape: tuple[int, ...]
    arguments: dict[str, Any]


def build_setup(recipe: Recipe, world: World) -> Setup:
    """All of it; data on disk is checked on the way, by the first process for all.

    Raises:
        ValueError: if data is missing or damaged, or parts of the recipe do not fit it or each other.
    """
    images, test_images = load_images(recipe, "train"), load_images(recipe, "test")
    if world.leads:
        for split in (images, test_images):
            check_images(split)
    arguments = model_arguments(recipe, images)
    model = build_model(recipe, images).to(world.device)
    train = training_batches(recipe, images, world)
    steps = recipe.train.epochs * len(train)
    loss = build_loss(recipe, model, arguments["input_shape"])
    check_loss(recipe, loss, model, len(images.classes))
    return Setup(
        recipe, world, model, loss, train,
        test_batches(recipe, test_images, world), build_stepper(recipe, model, steps), steps,
        arguments["input_shape"], arguments,
    )  # fmt: skip
