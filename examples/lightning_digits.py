"""Train, checkpoint, reload and certify a network with Lightning.

pip install 'trysquare[frameworks]'
python examples/lightning_digits.py
"""

import tempfile
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trysquare as ts
from convert_digits import accuracy, digits


class Classifier(lightning.LightningModule):
    """What Lightning wants to know of a network; nothing in it is special to orthogonal layers but the groups."""

    def __init__(self, lr: float = 5e-3, weight_decay: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.weight_decay = lr, weight_decay
        self.net = nn.Sequential(
            ts.OrthoConv2d(1, 32, 3, stride=2), ts.MaxMin(), nn.Flatten(), ts.OrthoLinear(512, 64), ts.MaxMin(),
            ts.OrthoLinear(64, 10),
        )  # fmt: skip
        self.loss = ts.losses.OffsetCrossEntropy(margin=ts.margin_for_radius(0.3), temperature=0.1)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        return self.net(images)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss of a batch."""
        loss = self.loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Decay is for plain weights; here there are none."""
        return torch.optim.AdamW(ts.parameter_groups(self, lr=self.lr, weight_decay=self.weight_decay))


def main() -> None:
    """Train for some epochs, then certify what comes back from the checkpoint."""
    lightning.seed_everything(0, verbose=False)
    data = DataLoader(TensorDataset(*digits("train")), batch_size=64, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=10, accelerator="cpu", default_root_dir=folder, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        )  # fmt: skip
        trainer.fit(Classifier(), data)
        path = Path(folder) / "last.ckpt"
        trainer.save_checkpoint(path)
        model = Classifier.load_from_checkpoint(path).net.eval()
    certificate = ts.certify(model, digits("test"), epsilons=[0.1])
    print(f"accuracy {accuracy(model):.3f}, certified at 0.1: {certificate.certified_accuracy(0.1):.3f}")


if __name__ == "__main__":
    main()
