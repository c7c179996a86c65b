"""Offer :mod:`fairflare.flare.client_api` to training scripts under the name ``fairflare.client``."""

from fairflare.flare.client_api import Site, search_distance, sharpness_report, site_name, with_report

__all__ = ["Site", "search_distance", "sharpness_report", "site_name", "with_report"]
