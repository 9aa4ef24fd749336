import shutil

import pytest

from tests.lab.report.runs import make_run


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """A finished run; not to be changed."""
    return make_run(tmp_path_factory.mktemp("runs") / "digits & <tiny>")


@pytest.fixture
def run(made_once, tmp_path):
    """A copy of it."""
    return shutil.copytree(made_once, tmp_path / made_once.name)
