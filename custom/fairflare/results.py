"""From a FLARE ``Run`` to our results: ``print(results.table(results.of(run)))``."""

from fairflare.flare.export.environments import of
from fairflare.reporting.results import read_results as read
from fairflare.reporting.table import fairness_table as table

__all__ = ["of", "read", "table"]
