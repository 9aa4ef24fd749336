"""Train, save, reload and certify a network with the Trainer of Hugging Face.

pip install 'trysquare[frameworks]'
python examples/huggingface_digits.py
"""

import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

import trysquare as ts
from convert_digits import accuracy, digits


class DigitsConfig(PretrainedConfig):
    """Arguments of the network."""

    model_type = "orthogonal-digits"

    def __init__(self, channels: int = 32, **options: object) -> None:
        super().__init__(**options)
        self.channels = channels


class Classifier(PreTrainedModel):
    """A network as the Trainer wants it: it returns the loss and the logits."""

    config_class = DigitsConfig

    def __init__(self, config: DigitsConfig) -> None:
        super().__init__(config)
        self.net = nn.Sequential(
            ts.OrthoConv2d(1, config.channels, 3, stride=2), ts.MaxMin(), nn.Flatten(),
            ts.OrthoLinear(16 * config.channels, 64), ts.MaxMin(), ts.OrthoLinear(64, 10),
        )  # fmt: skip
        self.loss = ts.losses.OffsetCrossEntropy(margin=ts.margin_for_radius(0.3), temperature=0.1)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Let layers draw their own numbers: what is written into a weight that is built is an error."""
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return logits, and the loss if there are labels."""
        logits = self.net(images)
        return {"logits": logits} if labels is None else {"loss": self.loss(logits, labels), "logits": logits}


class Digits(Dataset[dict[str, Tensor]]):
    """Images and labels by name."""

    def __init__(self) -> None:
        self.images, self.labels = digits("train")

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one image and its label."""
        return {"images": self.images[index], "labels": self.labels[index]}


def main() -> None:
    """Train for some epochs, then certify what comes back from the files."""
    torch.manual_seed(0)
    model = Classifier(DigitsConfig())
    # The Trainer would let all free tensors decay that are not called "bias": give it an optimizer.
    optimizer = torch.optim.AdamW(ts.parameter_groups(model, lr=5e-3, weight_decay=1e-2))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=10, per_device_train_batch_size=64, report_to=[], disable_tqdm=True, use_cpu=True,
            save_strategy="no", logging_strategy="no",
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=Digits(), optimizers=(optimizer, None)).train()
        model.save_pretrained(folder)
        net = Classifier.from_pretrained(folder).net.eval()
    certificate = ts.certify(net, digits("test"), epsilons=[0.1])
    print(f"accuracy {accuracy(net):.3f}, certified at 0.1: {certificate.certified_accuracy(0.1):.3f}")


if __name__ == "__main__":
    main()
