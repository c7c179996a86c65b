"""Load Fed-MAS's frozen prior network at a site once per process, and cache its features of the site's images."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fairflare.base.checks import refuse
from fairflare.base.disk.files import lies_in, real_folders
from fairflare.core.priors import prior_distance
from fairflare.methods.base.training import SiteError, SiteRun, check_parts, refuse_at

if TYPE_CHECKING:
    from fairflare.base.task import PriorNetwork, Task


class Priors:
    """Store prior networks and their cached features in one process; one object may serve several sites.

    Args:
        kind: architecture of the prior network, see :meth:`fairflare.base.task.Task.load_prior`.
        checkpoint: file of the prior network, unless a site names its own; ``None`` for the packaged checkpoint.
        image_size: size to which images are resized for the prior; ``None`` if images keep their size.
    """

    def __init__(self, kind: str, checkpoint: str | None, image_size: int | None) -> None:
        self.kind, self.checkpoint, self.image_size = kind, checkpoint, image_size
        self._networks: dict[str | None, PriorNetwork] = {}
        self._caches: dict[str, FeatureCache] = {}

    def check_task(self, task: Task) -> None:
        """Raise ``ValueError`` if the task's network cannot learn from a prior network."""
        refuse({  # before the criterion is checked, as another criterion would not help
            "it needs a classifier with a projection head": task.has_classes is False,
            "its prior networks look at pictures, not at volumes; set lambda_f=0 and rf_source='supervised'": (
                getattr(task, "spatial_dims", 2) == 3
            ),
        })  # fmt: skip
        declared = getattr(task, "projector_dim", 0) is not None  # else a task may build a network of its own
        if not declared and getattr(task.build_model(), "projector", None) is None:
            raise ValueError("it needs a projection head next to the classifier; set projector_dim")

    def network(self, run: SiteRun, model: torch.nn.Module) -> PriorNetwork:
        """Return the prior network on the run's device; the site's own file may name its checkpoint.

        Raises:
            SiteError: the checkpoint cannot be used, or does not fit the model's projection head.
        """
        file = run.settings.get("prior", self.checkpoint)
        if file is not None and "prior" not in run.settings:
            check_may_read(run, file)
        if file is not None and (not isinstance(file, str) or not file):
            raise SiteError(
                f"site {run.site!r}: 'prior' in the site's fairflare.json must be a path, got {file!r}",
                public=f"site {run.site!r}: key 'prior' in the site file is not usable",
            )
        if file not in self._networks:
            try:
                self._networks[file] = run.task.load_prior(self.kind, file, self.image_size)
            except ValueError as error:
                held = f"its checkpoint of the prior network {self.kind!r} cannot be used (details in the site's log)"
                raise SiteError(
                    f"site {run.site!r}: {error}",
                    public=f"site {run.site!r}: {error if file is None else held}",
                ) from error
        network = self._networks[file].to(run.device)
        needed = (
            f"Fed-MAS needs a projection head next to the classifier; set projector_dim={network.width} of the "
            "classification task (a network of your own: embed(images), head(features) and a module projector with "
            f"{network.width} outputs)"
        )
        check_parts(run, model, ("embed", "head", "projector"), needed)
        layers = model.get_submodule("projector").modules()
        widths = [network.width, *(layer.out_features for layer in layers if isinstance(layer, torch.nn.Linear))]
        refuse_at(run.site, {
            f"the prior network {network.name!r} has {network.width} features, the projection head {widths[-1]}; set "
            f"projector_dim={network.width} of the task, or choose another prior_network": widths[-1] != network.width,
        })  # fmt: skip
        return network

    def open_site(self, run: SiteRun, model: torch.nn.Module, *, cached: bool) -> SitePrior:
        """Return the prior network, with cached features of the site's images if the data know the images' numbers."""
        network = self.network(run, model)
        if not cached or run.data.order("training") is None:
            return SitePrior(network)
        cache = self._caches.get(run.site)
        if cache is None or cache.fingerprint != network.fingerprint:
            cache = self._caches[run.site] = FeatureCache(run, network)
        return SitePrior(network, cache)


@dataclass
class SitePrior:
    """Store Fed-MAS's frozen prior network while a site performs one task of the server.

    Args:
        network: the prior network.
        cache: cached features of the prior network for the site's training images; ``None`` to compute them for each
            batch.
    """

    network: PriorNetwork
    cache: FeatureCache | None = None

    def distances(
        self,
        run: SiteRun,
        model: torch.nn.Module,
        features: torch.Tensor,
        inputs: torch.Tensor,
        *,
        changed: bool = False,
    ) -> torch.Tensor:
        """Return the distances (n,) between the model's projected features and the prior network's, for a batch.

        Cached features of the prior network belong to the unaugmented images, so they are not used for ``changed``
        (augmented) inputs.
        """
        known = (
            self.cache.features[run.batch].to(run.device)
            if self.cache is not None and run.batch is not None and not changed
            else self.network(inputs)
        )
        run_head: Any = getattr(model, "project", model.projector)  # a method ``project`` is used in its place
        return prior_distance(run_head(features), known)

    def look(self, run: SiteRun, inputs: torch.Tensor) -> None:
        """Add to the cache, if there is one, the prior network's features of those images in a batch that it lacks.

        Args:
            run: the server's task that this site performs; ``run.batch`` has the numbers of the images.
            inputs: the images, without augmentation.
        """
        if self.cache is not None and run.batch is not None:
            self.cache.update(run, self.network, run.batch, inputs)


class FeatureCache:
    """Cache the prior network's features of a site's training images, each with a checksum of its image.

    The features are kept in memory and, because the next round may run in another process, in the site's state folder.
    The features of an image whose checksum differs (the data folder was changed) are computed again.
    """

    def __init__(self, run: SiteRun, network: PriorNetwork) -> None:
        self.fingerprint = network.fingerprint
        count = run.data.num_samples("training")
        self.checks = torch.full((count,), -1, dtype=torch.int64)
        self.features = torch.zeros(count, network.width)
        self.computed = 0  # number of images whose features the prior computed
        self._changed = False
        stored = run.store.load_before("prior_features", run.current_round)
        if stored is not None and stored["fingerprint"] == self.fingerprint and len(stored["checks"]) == count:
            self.checks, self.features = stored["checks"], stored["features"]

    def update(self, run: SiteRun, network: PriorNetwork, numbers: list[int], inputs: torch.Tensor) -> None:
        """Compute the prior network's features of those given images (unaugmented) that are not in the cache yet."""
        checks = torch.tensor([zlib.crc32(image.contiguous().numpy().tobytes()) for image in inputs])
        chosen = torch.tensor(numbers)
        new = self.checks[chosen] != checks
        if not bool(new.any()):
            return
        features = network(inputs[new].to(run.device)).float().cpu()
        refuse_at(
            run.site, {"the prior network gives features that are not finite": not bool(torch.isfinite(features).all())}
        )
        self.checks[chosen[new]] = checks[new]
        self.features[chosen[new]] = torch.nn.functional.normalize(features, dim=1)
        self.computed += len(features)
        self._changed = True

    def save(self, run: SiteRun) -> None:
        """Write the cached features of the prior network to the site's state folder if any are new."""
        if self._changed:
            run.store.save("prior_features", run.current_round, {
                "fingerprint": self.fingerprint, "checks": self.checks, "features": self.features,
            })  # fmt: skip
            self._changed = False


def check_may_read(run: SiteRun, file: str) -> None:
    """Refuse a file that a job names if it lies outside of the site's data folders.

    Raises:
        SiteError: the file, after following links, lies outside of these folders.
    """
    root, more = run.settings.get("data_root"), run.settings.get("linked_roots", [])
    # Each character of a string would count as a folder.
    refuse_at(run.site, {"setting 'linked_roots' must be a list of folders": not isinstance(more, list)})
    if not lies_in(Path(file).expanduser(), real_folders([*([root] if root else []), *more])):
        raise SiteError(
            f"site {run.site!r}: the job's checkpoint of the prior network, {file!r}, lies outside data_root and "
            "linked_roots of this site; name it with 'prior' in the site's fairflare.json if it may be read",
            public=f"site {run.site!r}: it does not let a job name the checkpoint of the prior network; name the file "
            "with 'prior' in the site's fairflare.json",
        )
