"""Define a FLARE Recipe for statistics of the sites' images, which show how different sites are before a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare import FilterType
from nvflare.app_common.app_constant import StatisticsConstants
from nvflare.app_common.executors.statistics.statistics_executor import StatisticsExecutor
from nvflare.app_common.filters.statistics_privacy_filter import StatisticsPrivacyFilter
from nvflare.job_config.fed_job_config import FedJobConfig

from fairflare.base.checks import SERVER, choice, site_names
from fairflare.flare.export.job import Job, JobRecipe, carry_package
from fairflare.flare.statistics import (
    DECIMALS,
    WRITER,
    ImageStatistics,
    SiteStatistics,
    StatisticsPage,
    cleansers,
    configs,
)

PACKAGINGS = ("preinstalled", "bundle")
GENERATOR = "image_statistics"


class StatsRecipe(JobRecipe):
    """Define the statistics of ``fairflare stats`` as a FLARE job, with FLARE's controller and privacy cleansers.

    Args:
        name: name of the job.
        sites: names of the sites, or ``None`` for every connected site.
        packaging: ``"preinstalled"``: no custom code, sites have the package and its classes in their allow list;
            ``"bundle"``: the job carries the package (for the simulator, and for sites that permit custom code).
        class_names: names of the classes for the page, in their order.
        settings: settings of :class:`fairflare.flare.statistics.ImageStatistics`.

    Raises:
        ValueError: the packaging or a setting is unknown, or a value is out of range.
    """

    def __init__(
        self,
        name: str = "stats",
        *,
        sites: Sequence[str] | None = None,
        packaging: str = "preinstalled",
        class_names: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        choice("packaging", packaging, PACKAGINGS)
        generator = ImageStatistics(**settings)
        deployed = None if sites is None else {"deploy_map": {"app": [SERVER, *site_names(sites)]}}
        kind = _WithPackage if packaging == "bundle" else FedJobConfig
        job = Job(kind(name, 1 if sites is None else len(sites), meta_props=deployed))
        job.to_server(SiteStatistics(configs(), WRITER, precision=DECIMALS, enable_pre_run_task=False), id="statistics")
        job.to_server(StatisticsPage(intensities=generator.intensities, class_names=tuple(class_names)), id=WRITER)
        job.to_clients(generator, id=GENERATOR)
        job.to_clients(
            StatisticsExecutor(GENERATOR, precision=DECIMALS),
            tasks=[StatisticsConstants.FED_STATS_PRE_RUN, StatisticsConstants.FED_STATS_TASK],
        )
        for component, cleanser in cleansers(generator.min_cases).items():
            job.to_clients(cleanser, id=component)
        job.to_clients(
            StatisticsPrivacyFilter(result_cleanser_ids=list(cleansers(generator.min_cases))),
            filter_type=FilterType.TASK_RESULT,
            tasks=[StatisticsConstants.FED_STATS_TASK],
        )
        super().__init__(job)


class _WithPackage(FedJobConfig):
    """Write a job's configuration, and copy the whole package into the job."""

    def generate_job_config(self, job_root: str) -> None:
        super().generate_job_config(job_root)
        carry_package(Path(job_root) / self.job_name / "app" / "custom")
