"""The same script in a federation: seven lines of train.py differ. For every method."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from fairflare import client

EPOCHS = 2


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(),
        )  # fmt: skip
        self.head = torch.nn.Linear(128, 2)
        self.projector = torch.nn.Linear(128, 96)  # beside the frozen network's 96 features

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(images))


def load_data(site: str) -> list[DataLoader]:
    """Make images, in place of yours: bright squares or none, in noise (stronger at site-2), in three splits."""
    generator = torch.Generator().manual_seed(sum(site.encode()))
    labels = torch.arange(96) % 2
    images = torch.rand(96, 1, 16, 16, generator=generator) * (0.9 if site == "site-2" else 0.5)
    images[labels == 1, :, 4:12, 4:12] += 0.1
    splits = zip(images.split([64, 16, 16]), labels.split([64, 16, 16]), strict=True)
    return [
        DataLoader(TensorDataset(*split), batch_size=16, shuffle=number == 0) for number, split in enumerate(splits)
    ]


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)
    return right / len(loader.dataset)


def main() -> None:
    train, validation, test = load_data(client.site_name())
    model, criterion = Net(), torch.nn.CrossEntropyLoss()
    site = client.Site(model, criterion, train, validation, test, metrics=evaluate, classes=2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in site.epochs(EPOCHS):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss = site.loss(images, labels)
            loss.backward()
            site.step(optimizer)
    print(f"validation {evaluate(model, validation):.3f}, test {evaluate(model, test):.3f}")


if __name__ == "__main__":
    main()
