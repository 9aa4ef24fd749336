"""Run the examples in docstrings and in the README as tests."""

import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.parsers.rest import DocTestParser
from torch import nn

import trysquare as ts


def _names(namespace):
    namespace.update({name: getattr(ts, name) for name in ts.__all__}, torch=torch, nn=nn, ts=ts)
    torch.manual_seed(0)


# Sybil matches with Path.match, where ** is no more than *: a pattern for each depth.
pytest_collect_file = (
    Sybil(parsers=[PythonCodeBlockParser()], patterns=["README.md", "docs/*.md"], setup=_names)
    + Sybil(parsers=[DocTestParser()], patterns=["src/*/*.py", "src/*/*/*.py", "src/*/*/*/*.py"], setup=_names)
).pytest()
