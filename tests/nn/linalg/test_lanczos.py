import torch

from trysquare.nn.linalg.lanczos import golub_kahan


def extremes(matrix, steps, tolerance=1e-12):
    return golub_kahan(lambda x: matrix @ x, lambda y: matrix.T @ y, matrix.shape[1], steps, tolerance)


def test_all_steps_give_the_extremes():
    for rows, columns in ((7, 7), (30, 12), (50, 49)):
        matrix = torch.randn(rows, columns, dtype=torch.float64)
        values = torch.linalg.svdvals(matrix)
        found = extremes(matrix, 1000)
        assert abs(found.largest - values[0]) < 1e-12
        assert abs(found.smallest - values[-1]) < 1e-11


def test_stated_tolerance_holds():
    matrix = torch.randn(300, 200, dtype=torch.float64)
    values = torch.linalg.svdvals(matrix)
    for steps in (5, 20, 60):
        found = extremes(matrix, steps)
        assert found.largest <= values[0] + 1e-12
        assert float((values - found.largest).abs().min()) <= found.largest_tolerance + 1e-12
        assert float((values - found.smallest).abs().min()) <= found.smallest_tolerance + 1e-12


def test_invariant_subspaces_and_zero():
    rows = torch.eye(20, 10, dtype=torch.float64)
    assert abs(extremes(rows, 10).smallest - 1) < 1e-12
    rows[3, 3] = 0
    assert extremes(rows, 10).smallest < 1e-12
    assert extremes(torch.zeros(5, 4, dtype=torch.float64), 4).largest == 0
