import resource

import pytest
import torch
from benchmarks.orthogonalizers import CONDITIONS, errors, with_condition
from benchmarks.training import Task, certificate, train

import trysquare as ts
from benchmarks import measure, methods

TASK = Task(None, batch=64, test_images=40)


def model():
    torch.manual_seed(0)
    return ts.models.build("tiny-digits", TASK.shape, mean=0.5)


def test_training_learns_until_its_time_is_over():
    network = model()
    run = train(network, TASK, 1.0)
    assert run["seconds"][-1] >= 1
    assert all(seconds < 1 for seconds in run["seconds"][:-1])
    assert len(run["losses"]) == len(run["seconds"]) == run["steps"]
    assert sum(run["losses"][-5:]) < sum(run["losses"][:5])
    found = certificate(network, TASK)
    assert found["test_images"] == 40
    assert 0.2 < found["accuracy"] <= 1
    assert found["certified"] == sorted(found["certified"], reverse=True)


def test_training_that_diverges_stops():
    network = model()
    with torch.no_grad():
        network.head.bias.fill_(float("nan"))
    with pytest.raises(ArithmeticError, match="the loss of step 1 is nan"):
        train(network, TASK, 3.0)


def test_condition_numbers_are_as_asked():
    for condition in (1.0, 100.0):
        values = torch.linalg.svdvals(with_condition(condition, 16).double())
        assert torch.allclose(values.max() / values.min(), torch.tensor(condition).double(), rtol=1e-4)


def test_errors_are_those_of_the_singular_values():
    doubled = errors(lambda matrix: 2 * ts.linalg.cholesky(matrix))
    assert doubled == pytest.approx([1.0] * len(CONDITIONS), abs=1e-5)
    assert len(errors(ts.linalg.cholesky)) == len(CONDITIONS)

    def refuse(matrix):
        raise ArithmeticError

    assert errors(refuse) == ["refuses"] * len(CONDITIONS)
    assert errors(lambda matrix: matrix / 0) == ["not finite"] * len(CONDITIONS)


def test_a_method_that_takes_too_much_memory_is_a_row_that_says_so(monkeypatch):
    def greedy(*shape):
        return torch.empty(8 * 10**9, dtype=torch.uint8)

    before = resource.getrlimit(resource.RLIMIT_DATA)
    monkeypatch.setattr(measure, "memory_gigabytes", lambda: 6.0 / 0.7)
    row = methods._trained("greedy", greedy, TASK, 1.0)
    assert row == {"error": "MemoryError: needs more than 6 GB of memory"}
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
