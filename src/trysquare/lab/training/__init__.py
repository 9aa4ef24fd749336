"""Training by recipes: from YAML to the directory of a run.

>>> [name for name in sorted(ts.training.recipes()) if "digits" in name]
['digits']
"""

from trysquare.lab.training.distribution import first_to_fail, is_main_process
from trysquare.lab.training.loop import StoppedError, resume, train
from trysquare.lab.training.recipe import Recipe, read_recipe, recipes, resolve, split_overrides
from trysquare.lab.training.run import ATTACKS, Run, attack_run, audit_run, certify_run, export_run, load_run
from trysquare.lab.training.step import OPTIMIZERS
from trysquare.lab.training.sweep import Rate, Sweep, best_rate, find_lr, load_sweep, start_sweep

__all__ = [
    "ATTACKS",
    "OPTIMIZERS",
    "Rate",
    "Recipe",
    "Run",
    "StoppedError",
    "Sweep",
    "attack_run",
    "audit_run",
    "best_rate",
    "certify_run",
    "export_run",
    "find_lr",
    "first_to_fail",
    "is_main_process",
    "load_run",
    "load_sweep",
    "read_recipe",
    "recipes",
    "resolve",
    "resume",
    "split_overrides",
    "start_sweep",
    "train",
]
