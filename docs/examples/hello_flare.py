"""A trainer as FLARE's first examples have it: a small network, FLARE's Client API, and no word of FairFlare."""

import nvflare.client as flare
import torch
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 1


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 6, 5)
        self.pool = torch.nn.MaxPool2d(2, 2)
        self.fc1 = torch.nn.Linear(6 * 6 * 6, 24)
        self.fc2 = torch.nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.conv(x))).flatten(1)
        return self.fc2(torch.relu(self.fc1(x)))


def load_data(site: str) -> list[DataLoader]:
    """Training, validation and test; here one bright quarter of four, dimmer at site-2."""
    generator = torch.Generator().manual_seed(sum(site.encode()))
    labels = torch.arange(128) % 4
    images = 0.6 * torch.rand(128, 3, 16, 16, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = 8 * (label // 2), 8 * (label % 2)
        image[:, row : row + 8, column : column + 8] += 0.1 if site == "site-2" else 0.4
    parts = zip(images.split([80, 24, 24]), labels.split([80, 24, 24]), strict=True)
    return [DataLoader(TensorDataset(*part), batch_size=8) for part in parts]


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)
    return right / len(loader.dataset)


def main() -> None:
    flare.init()
    train, validation, test = load_data(flare.get_site_name())
    model, criterion = Net(), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    while flare.is_running():
        received = flare.receive()
        model.load_state_dict(received.params)
        metrics = {"accuracy": evaluate(model, validation)}
        model.train()
        for _ in range(EPOCHS):
            for images, labels in train:
                optimizer.zero_grad()
                loss = criterion(model(images), labels)
                loss.backward()
                optimizer.step()
        meta = {"NUM_STEPS_CURRENT_ROUND": EPOCHS * len(train)}
        flare.send(flare.FLModel(params=model.cpu().state_dict(), metrics=metrics, meta=meta))
    print(f"test {evaluate(model, test):.3f}")


if __name__ == "__main__":
    main()
