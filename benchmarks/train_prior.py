"""Train the small prior network that the package ships, without labels: SimCLR on synthetic images.

Sources: classification phantoms (in the file that is shipped: the scenes of 0.2.0), phantoms like MRI of the prostate
(there: of 0.3.0), and "dead leaves" (random overlapping shapes, Baradad et al., NeurIPS 2021), as many of each; the
phantoms' classes in equal parts, otherwise labels play no role. The endoscopy phantom is left out on purpose: Fed-MAS
is tried on it, and the paper's prior has not seen its data either (``--endoscopy`` puts it in, to see what that is
worth). No patients' data, no licence of others. The same seed, versions and machine give the same file. ``--check``
compares an existing file with random weights by linear probes on phantoms of other seeds.

    python benchmarks/train_prior.py [--out FILE] [--images 1000] [--steps 700] [--seed 0] [--endoscopy]
    python benchmarks/train_prior.py --check [--out FILE]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from fairflare.tasks.networks import IMAGENET_MEAN, IMAGENET_STD
from fairflare.tasks.priors import EMBEDDED_FILE, FrozenPrior, build_encoder, load_prior
from fairflare_lab.phantoms import PELVIS, PHANTOMS

SIZE, CROP = 64, 48  # pixels drawn, pixels seen
SEED_OFFSET = 7_000_000  # far from the seeds of phantoms that federations learn
TEMPERATURE = 0.2


def dead_leaves(rng: np.random.Generator, size: int = SIZE) -> np.ndarray:
    """Draw (size, size, 3) uint8: discs, boxes and ellipses of random colour and grain, radii by a power law."""
    y, x = np.mgrid[:size, :size].astype(np.float32)
    image = np.broadcast_to(rng.uniform(0, 255, 3).astype(np.float32), (size, size, 3)).copy()
    base, spread = rng.uniform(30, 225, 3), rng.uniform(10, 110)  # a palette for each image
    for _ in range(int(rng.integers(20, 120))):
        radius = min(2.0 / np.sqrt(rng.uniform(0.0015, 1)), size / 2)
        u, v = x - rng.uniform(0, size), y - rng.uniform(0, size)
        angle, stretch = rng.uniform(0, np.pi), rng.uniform(0.4, 1.0)
        a, b = u * np.cos(angle) + v * np.sin(angle), (v * np.cos(angle) - u * np.sin(angle)) / stretch
        inside = np.maximum(abs(a), abs(b)) < radius if rng.random() < 0.3 else a * a + b * b < radius * radius
        colour = base + spread * rng.standard_normal(3)
        image[inside] = colour
        if rng.random() < 0.4:  # stripes or grain
            wave = (
                np.sin(a[inside] * rng.uniform(0.3, 2.5)) if rng.random() < 0.5 else rng.standard_normal(inside.sum())
            )
            image[inside] += rng.uniform(5, 40) * wave[:, None]
    return image.clip(0, 255).astype(np.uint8)


def phantom_images(name: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (n, size, size, 3) uint8 with every class and attribute in turn, and the classes."""
    kind = PHANTOMS[name]
    labels = np.arange(count) % len(kind.class_names)
    attributes: tuple[str | None, ...] = kind.attributes or (None,)
    images = [
        kind.draw(
            int(label), np.random.default_rng([seed, i]), SIZE, attributes[i // len(kind.class_names) % len(attributes)]
        )
        for i, label in enumerate(labels)
    ]
    return np.stack(images), labels


def training_images(count: int, seed: int, endoscopy: bool) -> torch.Tensor:
    """Return (n, 3, size, size) uint8 of all sources, ``count`` of each."""
    parts = [phantom_images(name, count, SEED_OFFSET + seed)[0] for name in ("dermoscopy", "fundus")]
    if endoscopy:
        parts.append(phantom_images("endoscopy", count, SEED_OFFSET + seed)[0])
    slices: list[np.ndarray] = []
    for number in range(1, 13):  # twelve scanners
        drawn = PELVIS.patients(f"site-{number}", size=(SIZE, SIZE, 4), seed=SEED_OFFSET + seed, cases=3.0)
        slices += [patient.image[0].T[:, None] for patient in drawn["training"]]
    grey = np.concatenate(slices)
    chosen = np.random.default_rng(seed).permutation(len(grey))[:count]
    parts.append(np.repeat(grey[chosen].transpose(0, 2, 3, 1), 3, axis=3))
    parts.append(np.stack([dead_leaves(np.random.default_rng([SEED_OFFSET + seed, i])) for i in range(count)]))
    return torch.from_numpy(np.concatenate(parts)).permute(0, 3, 1, 2).contiguous()


def view(images: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Return a random view of a batch (n, 3, size, size) in [0, 1]: crop, turn, colour, grey, blur, noise."""
    n = len(images)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(n, generator=g) * (high - low) + low

    scale, angle = uniform(0.35, 1.0).sqrt(), uniform(-np.pi, np.pi)
    angle = torch.where(torch.rand(n, generator=g) < 0.5, torch.zeros(n), angle)
    flip = torch.where(torch.rand(n, generator=g) < 0.5, -1.0, 1.0)
    cos, sin = scale * angle.cos(), scale * angle.sin()
    room = 1 - scale
    rows = [cos * flip, -sin, uniform(-1, 1) * room, sin * flip, cos, uniform(-1, 1) * room]
    grid = functional.affine_grid(torch.stack(rows, 1).view(n, 2, 3), [n, 3, CROP, CROP], align_corners=False)
    seen = functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False)

    def column(values: torch.Tensor) -> torch.Tensor:
        return values.view(n, -1, 1, 1)

    luminance = seen.mean(1, keepdim=True)
    seen = luminance + (seen - luminance) * column(uniform(0.5, 1.5))  # saturation
    centre = seen.mean((1, 2, 3), keepdim=True)
    seen = (centre + (seen - centre) * column(uniform(0.6, 1.4))) * column(uniform(0.7, 1.3))
    seen = seen * (torch.rand(n, 3, generator=g) * 0.2 + 0.9).view(n, 3, 1, 1)  # white balance
    seen = torch.where(column(torch.rand(n, generator=g) < 0.2), luminance.expand_as(seen), seen)
    blurred = functional.avg_pool2d(seen, 3, stride=1, padding=1, count_include_pad=False)
    seen = torch.where(column(torch.rand(n, generator=g) < 0.3), blurred, seen)
    noise = torch.randn(seen.shape, generator=g) * column(uniform(0, 0.05))
    return (seen + noise).clamp(0, 1)


def contrast(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute SimCLR's loss (NT-Xent): each view finds the other view of its image among all views."""
    z = functional.normalize(torch.cat([first, second]))
    similar = z @ z.T / TEMPERATURE
    similar.fill_diagonal_(-torch.inf)
    n = len(first)
    return functional.cross_entropy(similar, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


def train(count: int, steps: int, batch: int, seed: int, endoscopy: bool) -> nn.Module:
    started = time.perf_counter()
    images = training_images(count, seed, endoscopy)
    print(f"{len(images)} images in {time.perf_counter() - started:.0f} s", flush=True)
    torch.manual_seed(seed)
    prior, width = build_encoder("embedded")
    encoder = prior.get_submodule("body")
    head = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 64))
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=2e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    g = torch.Generator().manual_seed(seed)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    total = 0.0
    for step in range(1, steps + 1):
        chosen = images[torch.randperm(len(images), generator=g)[:batch]].float().div_(255)
        views = [(view(chosen, g) - mean) / std for _ in range(2)]
        z = head(encoder(torch.cat(views)))
        loss = contrast(z[:batch], z[batch:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        total += float(loss.detach())
        if step % 100 == 0:
            print(f"step {step}: loss {total / 100:.3f}, {time.perf_counter() - started:.0f} s", flush=True)
            total = 0.0
    return centred(prior, images)


def centred(prior: nn.Module, images: torch.Tensor) -> nn.Module:
    """Return the network with weights in their stored half precision, and mean and deviation of its features."""
    for tensor in prior.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.half())
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    prior.eval()
    features = []
    with torch.no_grad():
        for part in images.split(200):
            seen = functional.interpolate(part.float().div_(255), (CROP, CROP), mode="bilinear", antialias=True)
            features.append(prior.get_submodule("body")((seen - mean) / std).double())
    everything = torch.cat(features)
    norm = prior.get_submodule("norm")
    norm.running_mean.copy_(everything.mean(0))
    norm.running_var.copy_(everything.var(0))
    return prior


def probe(network: FrozenPrior, name: str, count: int = 1200, seed: int = 900) -> float:
    """Return balanced accuracy of a linear classifier on the frozen features, on another half of a phantom."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.preprocessing import StandardScaler

    images, labels = phantom_images(name, count, seed)
    inputs = torch.from_numpy(images).permute(0, 3, 1, 2).float().div_(255)
    inputs = functional.interpolate(inputs, (CROP, CROP), mode="bilinear", antialias=True)
    features = torch.cat([network(part) for part in inputs.split(200)]).numpy()
    half = count // 2
    scaler = StandardScaler().fit(features[:half])
    model = LogisticRegression(max_iter=500, C=0.1).fit(scaler.transform(features[:half]), labels[:half])
    return float(balanced_accuracy_score(labels[half:], model.predict(scaler.transform(features[half:]))))


def check(path: Path) -> None:
    trained = load_prior("embedded", path)
    torch.manual_seed(0)
    chance = FrozenPrior(build_encoder("embedded")[0].eval(), "random", trained.width)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB, fingerprint {trained.fingerprint}")
    print(f"{'linear probe':<14}  {'classes':>7}  {'random':>6}  {'trained':>7}")
    for name in ("dermoscopy", "fundus", "endoscopy"):
        classes = len(PHANTOMS[name].class_names)
        print(f"{name:<14}  {classes:>7}  {probe(chance, name):>6.3f}  {probe(trained, name):>7.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="train the packaged prior network without labels")
    parser.add_argument("--out", type=Path, default=EMBEDDED_FILE)
    parser.add_argument("--images", type=int, default=1000, help="of each source")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--endoscopy", action="store_true", help="also train on the endoscopy phantom")
    parser.add_argument("--check", action="store_true", help="only probe an existing file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.check:
        encoder = train(args.images, args.steps, args.batch, args.seed, args.endoscopy)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        state = encoder.state_dict()
        half = {
            n: t.half() if n.startswith("body.") else t
            for n, t in state.items()
            if not n.endswith("num_batches_tracked")
        }
        save_file(half, args.out)
        args.out.chmod(0o644)  # readable, as the package ships the file
    check(args.out)


if __name__ == "__main__":
    main()
