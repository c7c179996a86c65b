"""A hospital's own training script (FLARE's Client API) that takes part in FedISM+: two lines are FairFlare's."""

import nvflare.client as flare
import torch

from fairflare import client

BATCH, EPOCHS, ROUNDS = 16, 2, 2


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(128, 2),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def load_data(site: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make images, in place of yours: bright squares or none, in noise that is stronger at site-2."""
    generator = torch.Generator().manual_seed(sum(site.encode()))
    labels = torch.arange(64) % 2
    images = torch.randn(64, 1, 16, 16, generator=generator) * (1.5 if site == "site-2" else 0.5)
    images[labels == 1, :, 4:12, 4:12] += 1
    return list(zip(images.split(BATCH), labels.split(BATCH), strict=True))


def main() -> None:
    flare.init()
    batches = load_data(flare.get_site_name())
    model = Net()
    while flare.is_running():
        received = flare.receive()
        model.load_state_dict({k: torch.as_tensor(v) for k, v in received.params.items()})
        rho = client.search_distance(received.current_round, received.total_rounds or ROUNDS, rho_max=0.1, tau=0.5)
        losses = torch.nn.CrossEntropyLoss(reduction="none")
        report = client.sharpness_report(model, losses, batches, rho)  # FairFlare, 1 of 2

        model.train()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(EPOCHS):
            for images, labels in batches:
                optimizer.zero_grad()
                losses(model(images), labels).mean().backward()
                optimizer.step()

        answer = flare.FLModel(params=model.state_dict())
        flare.send(client.with_report(answer, report, num_samples=64))  # FairFlare, 2 of 2


if __name__ == "__main__":
    main()
