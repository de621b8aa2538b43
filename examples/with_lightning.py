"""Lightning's Trainer: `process_group_backend` names the backend; a run goes on from a checkpoint.

torchrun --nproc-per-node 3 examples/with_lightning.py
"""

import hashlib
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import pycollective.torch  # registers the backend

CHECKPOINT = "out/lightning.ckpt"


class Digits(lightning.LightningModule):
    """Classifies 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        hidden = torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128)
        self.layers = torch.nn.Sequential(*hidden, torch.nn.ReLU(), torch.nn.Linear(128, 10))
        self.right = MulticlassAccuracy(10, average="micro")  # counts on all ranks

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        return functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        """Log the accuracy and the loss."""
        scores = self.layers(batch[0])
        self.right(scores, batch[1])
        self.log("right", self.right)
        self.log("loss", functional.cross_entropy(scores, batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def fit(
    epochs: int, loaders: list[DataLoader[Any]], checkpoint: str | None = None
) -> tuple[lightning.Trainer, torch.Tensor]:
    """Train so many epochs, from the start or a checkpoint; return the trainer and the weights."""
    lightning.seed_everything(0, verbose=False)
    strategy = DDPStrategy(
        process_group_backend="pycollective", ddp_comm_hook=pycollective.torch.all_reduce_hook
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=strategy,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = Digits()
    trainer.fit(model, *loaders, ckpt_path=checkpoint)
    return trainer, torch.cat([each.detach().flatten() for each in model.parameters()])


def main() -> None:
    """Train on scikit-learn's digits for six epochs, and for three and three."""
    pixels, labels = load_digits(return_X_y=True)
    images, names = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    loaders = [
        DataLoader(TensorDataset(images[:1500], names[:1500]), batch_size=20, shuffle=True),
        DataLoader(TensorDataset(images[1500:], names[1500:]), batch_size=99),
    ]
    fit(3, loaders)[0].save_checkpoint(CHECKPOINT)
    _, resumed = fit(6, loaders, CHECKPOINT)
    trainer, weights = fit(6, loaders)
    assert dist.get_backend() == "pycollective"
    assert all(torch.equal(each, weights) for each in trainer.strategy.all_gather(resumed))
    losses = trainer.strategy.all_gather(trainer.callback_metrics["loss"]).tolist()
    assert losses == [losses[0]] * 3, losses  # the mean over all ranks
    right = trainer.callback_metrics["right"].item()
    assert right > 0.8, right
    if trainer.is_global_zero:
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
        print(f"{right:.1%} of the digits right; weights {digest} in one go and by a checkpoint")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
