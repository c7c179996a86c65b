"""A PyTorch Lightning script in a federation: a new Trainer in every round, since one is spent after max_epochs."""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from fairflare import client


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.ReLU())
        self.head = torch.nn.Linear(8, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


class Module(pl.LightningModule):
    def __init__(self, net: Net, site: client.Site) -> None:
        super().__init__()
        self.net, self.site = net, site

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self.site.loss(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def load_data(site: str) -> list[DataLoader]:
    """Your images; here: bright ones and dark ones, in noise. Training, validation, test."""
    generator = torch.Generator().manual_seed(sum(site.encode()))
    labels = torch.arange(48) % 2
    images = torch.rand(48, 1, 8, 8, generator=generator) + 0.5 * labels[:, None, None, None]
    splits = zip(images.split([32, 8, 8]), labels.split([32, 8, 8]), strict=True)
    return [DataLoader(TensorDataset(*split), batch_size=8) for split in splits]


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: DataLoader) -> float:
    return sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader) / len(loader.dataset)


def main() -> None:
    train, validation, test = load_data(client.site_name())
    net = Net()
    site = client.Site(net, torch.nn.CrossEntropyLoss(), train, validation, test, metrics=evaluate, classes=2)
    module = Module(net, site)
    while site.receive():
        trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
        trainer.fit(module, train)
        site.send()


if __name__ == "__main__":
    main()
