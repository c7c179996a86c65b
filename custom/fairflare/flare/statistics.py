"""FLARE's federated statistics about images: what a site counts, and the page that the server makes of it.

FLARE's StatisticsController asks, its StatisticsExecutor answers with :class:`ImageStatistics`, and its privacy
cleansers go over the answer. :func:`statistics_here` takes the same way in one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.statistics_spec import Bin, DataType, Feature, Histogram, HistogramType, Statistics
from nvflare.app_common.abstract.statistics_writer import StatisticsWriter
from nvflare.app_common.app_constant import StatisticsConstants
from nvflare.app_common.executors.statistics.statistics_task_handler import StatisticsTaskHandler
from nvflare.app_common.statistics.histogram_bins_cleanser import HistogramBinsCleanser
from nvflare.app_common.statistics.min_count_cleanser import MinCountCleanser
from nvflare.app_common.statistics.min_max_cleanser import AddNoiseToMinMax
from nvflare.app_common.statistics.numeric_stats import get_global_stats
from nvflare.app_common.workflows.statistics_controller import StatisticsController
from nvflare.fuel.utils import fobs

from fairflare.base.settings import Flag, PositiveInt, settings
from fairflare.core.statistics.site_figures import AXES, COUNTS, INTENSITY
from fairflare.data.decoded import DecodedVolumes
from fairflare.data.orientation import Orientation
from fairflare.data.reading import Reading
from fairflare.federation.site.gate import MIN_CASES
from fairflare.federation.site.site_file import SHELL_SETTINGS, SITE_FILE, read_site_file, setting
from fairflare.reporting.sites import statistics as figures
from fairflare.reporting.sites.page import write_statistics
from fairflare.tasks.images import Intensities
from fairflare.tasks.scores.site_statistics import Kind, SiteSums, measure

FOLDER = "fairflare"  # in the server's run directory
WRITER = "statistics_page"  # id of the component
DATASET = "images"  # FLARE's word for what features belong to
PHASES = (StatisticsConstants.STATS_1st_STATISTICS, StatisticsConstants.STATS_2nd_STATISTICS)
DECIMALS = 6  # FLARE rounds the ends of bins to it; 1 / 64 has as many
LEAST = 5  # cases


@settings
class ImageStatistics(Intensities, Statistics):
    """What a site tells of its images: the numbers and histograms of :mod:`fairflare.core.statistics.site_figures`.

    Args:
        task: ``"segmentation"`` or ``"classification"``; default: as the labels in the site's datalist are.
        min_cases: figures of fewer cases stay at the site; the site's own ``min_cases`` counts where it is larger.
        orientation: how files are read, as of a task; see `fairflare describe fed_avg`.
    """

    task: Kind | None = None
    min_cases: PositiveInt = LEAST
    orientation: Orientation = "canonical"

    def __post_init__(self) -> None:
        Statistics.__init__(self)
        super().__post_init__()
        self._sums: SiteSums | None = None
        self._site, self._own = "", dict[str, Any]()

    def reading(self, kept: DecodedVolumes | None = None) -> Reading:
        return Reading(self.orientation, self.intensity, self.window, kept)

    def initialize(self, fl_ctx: FLContext) -> None:
        """Reads the site's private file."""
        workspace = fl_ctx.get_engine().get_workspace()
        site = fl_ctx.get_identity_name()
        self.open(site, read_site_file(Path(workspace.get_file_path_in_site_config(SITE_FILE)), site))

    def open(self, site: str, own: Mapping[str, Any]) -> None:
        """Sets whose images are counted.

        Args:
            site: its name.
            own: its private settings.
        """
        self._site, self._own, self._sums = site, dict(own), None

    def finalize(self, fl_ctx: FLContext) -> None:
        """Forgets what was counted."""
        self._sums = None

    @property
    def sums(self) -> SiteSums:
        """What was counted, once for all questions."""
        if self._sums is None:
            least = max(self.min_cases, setting(self._site, self._own, MIN_CASES, 1, PositiveInt))
            own = {key: value for key, value in self._own.items() if key not in SHELL_SETTINGS}
            self._sums = measure(self._site, own, self.task or kind_of_labels(self._site, own), self.reading(), least)
        return self._sums

    def features(self) -> dict[str, list[Feature]]:
        """What is told; the rest is left out."""
        names = [*self.sums.counts(), *self.sums.bins()]
        return {DATASET: [Feature(name, DataType.INT) for name in names]}

    def count(self, dataset_name: str, feature_name: str) -> int:
        """A number, or of a histogram all its records."""
        if feature_name in AXES:
            return self.sums.bins()[feature_name][0]
        return self.sums.counts()[feature_name]

    def histogram(
        self, dataset_name: str, feature_name: str, num_of_bins: int, global_min_value: float, global_max_value: float
    ) -> Histogram:
        """Its bins that may be told; where they are is declared, whatever is asked for. Of a number: none."""
        _, told = self.sums.bins().get(feature_name, (0, {}))
        width = AXES[feature_name].width if feature_name in AXES else 0
        bins = [Bin(round(k * width, DECIMALS), round((k + 1) * width, DECIMALS), n) for k, n in told.items()]
        return Histogram(HistogramType.STANDARD, bins)


@settings
class StatisticsPage(StatisticsWriter):
    """Writes ``stats.json``, ``stats.csv`` and ``stats.html`` into the folder ``fairflare`` of the run.

    Args:
        intensities: what 0 and 1 of the intensities are, in words.
        class_names: in the order of the classes.
    """

    intensities: str = ""
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        StatisticsWriter.__init__(self)

    def save(self, data: dict[str, Any], overwrite_existing: Flag, fl_ctx: FLContext) -> None:
        """Called by FLARE's controller with what all sites told."""
        document = document_of(data, self.intensities, self.class_names)
        run = Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id()))
        page = write_statistics(document, run / FOLDER)
        for sentence in document.sentences:
            self.log_info(fl_ctx, sentence)
        self.log_info(fl_ctx, f"page: {page}")


def kind_of_labels(site: str, own: Mapping[str, Any]) -> Kind:
    """Classes where the datalist has a number as a label, else masks; what is wrong with the list is said later."""
    try:
        content = json.loads((Path(own["data_root"]) / own.get("datalist", "datalist.json")).read_bytes())
        entries = [entry for split in content.values() if isinstance(split, list) for entry in split]
        numbers = [type(entry.get("label")) is int for entry in entries if isinstance(entry, Mapping)]
        return "classification" if any(numbers) else "segmentation"
    except (KeyError, TypeError, AttributeError, OSError, ValueError):
        return "segmentation"


def configs() -> dict[str, Any]:
    """What FLARE's controller asks for. With a range it never asks a site for its smallest and largest value."""
    ends = {"bins": AXES[INTENSITY].bins, "range": [0, 1]}
    # By name: `nvflare job submit` cannot read a job with FLARE's "*" for all features.
    return {"count": {}, "histogram": {name: dict(ends) for name in (*AXES, *COUNTS)}}


def cleansers(least: int) -> dict[str, Any]:
    """FLARE's privacy cleansers by id: behind what a site leaves out by cases, they look at numbers of records."""
    return {
        "min_count": MinCountCleanser(min_count=least),
        "histogram_bins": HistogramBinsCleanser(max_bins_percent=100),
        "min_max_noise": AddNoiseToMinMax(min_noise_level=0.1, max_noise_level=0.3),
    }


def document_of(
    data: Mapping[str, Any], intensities: str = "", class_names: tuple[str, ...] = ()
) -> figures.StatsDocument:
    """The document of what FLARE's controller gathered: ``{feature: {statistic: {site: {dataset: value}}}}``.

    Raises:
        ValueError: a value that is not declared, or out of range (names the site).
    """
    measured: dict[str, tuple[dict[str, int], dict[str, figures.Histogram]]] = {}
    for feature, statistics in data.items():
        counts, histograms = statistics.get("count", {}), statistics.get("histogram", {})
        for site, by_dataset in counts.items():
            if site == StatisticsConstants.GLOBAL:
                continue
            own_counts, own_histograms = measured.setdefault(site, ({}, {}))
            number = int(by_dataset[DATASET])
            if feature not in AXES:
                own_counts[feature] = number
                continue
            told = histograms.get(site, {}).get(DATASET, [])
            bins = [figures.Bin(low=of[0], high=of[1], count=int(of[2])) for of in told]
            own_histograms[feature] = figures.Histogram(records=number, bins=bins)
    return figures.document_of(measured, intensities, class_names)


def statistics_here(
    sites: Mapping[str, Mapping[str, Any]],
    generator: ImageStatistics,
    class_names: tuple[str, ...] = (),
    done: Callable[[str], None] = lambda site: None,
) -> figures.StatsDocument:
    """The statistics of site folders on this machine: FLARE's controller, handler and cleansers, without messages.

    Args:
        sites: the settings of each, as in its ``fairflare.json``.
        generator: how files are read.
        class_names: in the order of the classes.
        done: is told which site was read.

    Raises:
        ValueError: the data of a site cannot be used (names it).
    """
    controller = StatisticsController(configs(), WRITER, min_clients=len(sites), precision=DECIMALS)
    handler = StatisticsTaskHandler(WRITER, precision=DECIMALS)
    at = {site: copy(generator) for site in sites}
    for site, own in sites.items():
        at[site].open(site, own)
    for phase in PHASES:
        question = controller._prepare_inputs(phase)
        for site in sites:
            handler.stats_generator = at[site]
            answer = handler.execute_task(StatisticsConstants.FED_STATS_TASK, question, FLContext(), Signal())
            told = fobs.loads(answer[phase])
            for cleanser in cleansers(generator.min_cases).values():
                told, _ = cleanser.apply(told, site)
            for name, values in told.items():
                controller.client_statistics.setdefault(name, {})[site] = values
            done(site)
        controller.global_statistics = get_global_stats(
            controller.global_statistics, controller.client_statistics, phase, controller.statistic_configs, DECIMALS
        )
    return document_of(controller._combine_all_statistics(), generator.intensities, class_names)
