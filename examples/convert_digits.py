"""A trained network of plain torch, converted with its weights and without; how near orthogonal kernels come to them.

python examples/convert_digits.py

Needs nothing but the package: the digits are part of it. Takes about a minute on two cores.
"""

import torch
from torch import Tensor, nn

import trysquare as ts

EPOCHS_PLAIN, EPOCHS_CONVERTED, BATCH, TEMPERATURE = 40, 10, 64, 10.0
FIRST_EPOCHS = 1


def network() -> nn.Module:
    """Return a small convolutional network, as people write them."""
    layers: list[nn.Module] = []
    for channels, (out, kernel_size, stride) in zip(
        (1, 32, 64, 64, 128), ((32, 3, 1), (64, 3, 2), (64, 3, 1), (128, 3, 2), (128, 1, 1)), strict=True
    ):
        conv = nn.Conv2d(channels, out, kernel_size, stride, padding=kernel_size // 2, bias=False)
        layers += [conv, nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def digits(split: str) -> tuple[Tensor, Tensor]:
    """Return all images of a split, between 0 and 1, and their labels."""
    images = ts.data.load("digits", split=split)
    return images.stack(torch.arange(len(images))).float() / images.white, images.labels


def train(model: nn.Module, epochs: int, temperature: float, optimizer: torch.optim.Optimizer) -> None:
    """Train with cross-entropy; logits of a 1-Lipschitz network are small, so they are scaled up."""
    images, labels = digits("train")
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(temperature * model(images[rows]), labels[rows]).backward()
            optimizer.step()
    model.eval()


def accuracy(model: nn.Module) -> float:
    """Return the accuracy on the test split."""
    images, labels = digits("test")
    with torch.no_grad():
        return float((model.eval()(images).argmax(1) == labels).float().mean())


def nearness(plain: nn.Module) -> None:
    """Print how near orthogonal kernels come to those of a network, each scaled to the norm of an orthogonal one."""
    print(f"{'kernel':>18}  {'start':>6}  {'project_':>8}  {'random starts':>13}")
    for module in plain.modules():
        if not isinstance(module, nn.Conv2d):
            continue
        layer = ts.OrthoConv2d(module.in_channels, module.out_channels, module.kernel_size, module.stride)
        made, weight = layer.parametrization, module.weight.detach().double()
        weight *= layer.weight.detach().double().norm() / weight.norm()
        start = float((made.build(*made.solve(weight)) - weight).norm() / weight.norm())
        layer.reset_parameters()
        found = layer.project_(weight)
        others = []
        for _ in range(5):
            layer.reset_parameters()
            present = [tensor.detach().double() for tensor in layer.free_tensors]
            others.append(ts.parametrizations.projection.descend(made.build, present, weight, steps=100)[1])
        print(f"{'x'.join(map(str, weight.shape)):>18}  {start:6.3f}  {found:8.3f}  {min(others):6.3f} best of 5")


def main() -> None:
    """Train, measure, convert, train on."""
    torch.manual_seed(0)
    plain = network()
    train(plain, EPOCHS_PLAIN, 1.0, torch.optim.AdamW(plain.parameters(), 2e-3, weight_decay=5e-2))
    print(f"plain: accuracy {accuracy(plain):.3f}")
    nearness(plain)
    for init in ("random", "pretrained"):
        torch.manual_seed(0)
        model = ts.from_torch(plain, (1, 8, 8), init=init)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        train(model, FIRST_EPOCHS, TEMPERATURE, optimizer)
        first = accuracy(model)
        train(model, EPOCHS_CONVERTED - FIRST_EPOCHS, TEMPERATURE, optimizer)
        certificate = ts.certify(model, [digits("test")], epsilons=(36 / 255, 72 / 255))
        print(
            f"\n{init}: accuracy {first:.3f} after {FIRST_EPOCHS} epoch, {accuracy(model):.3f} after {EPOCHS_CONVERTED}"
        )
        print(certificate)


if __name__ == "__main__":
    main()
