"""Keep the import path of the provisioning builder that users' ``project.yml`` files name."""

from fairflare.flare.export.provision import AUTHORIZATION, SitePolicyBuilder, job_classes

__all__ = ["AUTHORIZATION", "SitePolicyBuilder", "job_classes"]
