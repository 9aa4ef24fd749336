"""Training by recipes: from YAML to the directory of a run.

>>> sorted(ts.training.recipes())[:3]
['cifar10-accurate', 'cifar10-cpu', 'cifar10-robust']
"""

from trysquare.training.distribution import first_to_fail, leads
from trysquare.training.library import read_recipe, recipes, split_overrides
from trysquare.training.loop import StoppedError, resume, train
from trysquare.training.optimizers import OPTIMIZERS
from trysquare.training.recipe import Recipe, resolve
from trysquare.training.results import ATTACKS, attack_run, audit_run, certify_run, export_run
from trysquare.training.run import Run, load_run

__all__ = [
    "ATTACKS",
    "OPTIMIZERS",
    "Recipe",
    "Run",
    "StoppedError",
    "attack_run",
    "audit_run",
    "certify_run",
    "export_run",
    "first_to_fail",
    "leads",
    "load_run",
    "read_recipe",
    "recipes",
    "resolve",
    "resume",
    "split_overrides",
    "train",
]
