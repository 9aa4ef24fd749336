"""Networks whose forward pass is a function, and their dense Jacobians: the oracle of the tests in this folder."""

import torch
from torch import nn

import trysquare as ts


class Fn(nn.Module):
    """A network whose forward pass is ``function(self, x)``, with tensors as buffers."""

    def __init__(self, function, **tensors):
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x):
        return self.function(self, x)


def bound(function, shape=(3, 6, 6), **tensors):
    return ts.lipschitz_bound(Fn(function, **tensors), shape)


def jacobian_norm(model, x):
    """Norm of the dense Jacobian at one input, in float64."""
    model = model.double().eval()
    x = x.double().unsqueeze(0)
    jacobian = torch.autograd.functional.jacobian(model, x)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))


def seen(function, shape, points=5, **tensors):
    """Largest Jacobian norm of a function at random points."""
    model = Fn(function, **tensors)
    return max(jacobian_norm(model, 2 * torch.randn(shape)) for _ in range(points))
