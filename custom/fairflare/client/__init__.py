"""The import path of training scripts: ``from fairflare import client``; see :mod:`fairflare.flare.client_api`."""

from fairflare.flare.client_api import Site, search_distance, sharpness_report, site_name, with_report

__all__ = ["Site", "search_distance", "sharpness_report", "site_name", "with_report"]
