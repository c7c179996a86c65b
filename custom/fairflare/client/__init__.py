"""The import path of training scripts: ``from fairflare import client``; see :mod:`fairflare.flare.client_api`."""

from fairflare.flare.client_api import search_distance, sharpness_report, with_report

__all__ = ["search_distance", "sharpness_report", "with_report"]
