"""The import path that ``project.yml`` files name, which lie outside this repository: it has to stay."""

from fairflare.flare.export.provision import AUTHORIZATION, SitePolicyBuilder, job_classes

__all__ = ["AUTHORIZATION", "SitePolicyBuilder", "job_classes"]
