"""Compute statistics about the sites' images by FLARE's federated statistics, and write a page about them.

FLARE's StatisticsController asks the sites, its StatisticsExecutor answers with :class:`ImageStatistics`, and its
privacy cleansers check the answer. :func:`statistics_here` runs the same parts in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_constant import ReturnCode
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

from fairflare.base.checks import list_names, printable, refuse
from fairflare.base.settings import Flag, PositiveInt, settings
from fairflare.core.statistics.site_figures import AXES, COUNTS, INTENSITY
from fairflare.data.datalist import labels_in
from fairflare.data.decoded import DecodedVolumes
from fairflare.data.orientation import Orientation
from fairflare.data.reading import Reading
from fairflare.federation.site.gate import MIN_CASES
from fairflare.federation.site.replies import name_site_in_reason, reasons
from fairflare.federation.site.site_file import SHELL_SETTINGS, SITE_FILE, read_site_file, setting
from fairflare.methods.base.reports import shorten_value
from fairflare.methods.base.site_run import SiteError
from fairflare.privacy.policy import PRIVACY
from fairflare.reporting.sites import statistics as figures
from fairflare.tasks.images import Intensities
from fairflare.tasks.scores.site_statistics import Kind, SiteSums, measure

FOLDER = "fairflare"  # folder of the page in the server's run directory
WRITER = "statistics_page"  # id of the component that writes the page
DATASET = "images"  # name of the data set, in FLARE's sense, that all features belong to
PHASES = (StatisticsConstants.STATS_1st_STATISTICS, StatisticsConstants.STATS_2nd_STATISTICS)
DECIMALS = 6  # decimals to which FLARE rounds the ends of bins; 1 / 64 has six
LEAST = 5  # smallest number of cases behind a figure, by default
MOST_RECORDS = 10**15  # largest number of pixels that a site may report


@settings
class ImageStatistics(Intensities, Statistics):
    """Report a site's numbers and histograms of images, as :mod:`fairflare.core.statistics.site_figures` defines them.

    Args:
        task: ``"segmentation"`` or ``"classification"``; default: found from the labels in the site's datalist.
        min_cases: figures of fewer cases stay at the site; the larger of this and the site's own ``min_cases`` holds.
        orientation: the setting of a task of this name; see `fairflare describe fed_avg`.
    """

    task: Kind | None = None
    min_cases: PositiveInt = LEAST
    orientation: Orientation = "canonical"

    def __post_init__(self) -> None:
        Statistics.__init__(self)
        super().__post_init__()
        self.open("", {})

    def reading(self, decoded: DecodedVolumes | None = None) -> Reading:
        return Reading(self.orientation, self.intensity, self.window, decoded)

    def initialize(self, fl_ctx: FLContext) -> None:
        """Read the site's private file; FLARE calls this at the start."""
        workspace = fl_ctx.get_engine().get_workspace()
        site = fl_ctx.get_identity_name()
        self.open(site, read_site_file(Path(workspace.get_file_path_in_site_config(SITE_FILE)), site))

    def open(self, site: str, own: Mapping[str, Any]) -> None:
        """Set the site whose images are counted.

        Args:
            site: name of the site.
            own: content of the site's private file.
        """
        self._site, self._own = site, dict(own)
        self.__dict__.pop("sums", None)

    @cached_property
    def sums(self) -> SiteSums:
        """Return the site's counts, which are computed once and reused for every question of FLARE."""
        if PRIVACY in self._own:
            raise SiteError(
                f"site {self._site!r}: sums over its images are not counted under its {PRIVACY!r}, so it sends none"
            )
        least = max(self.min_cases, setting(self._site, self._own, MIN_CASES, 1, PositiveInt))
        settings = {key: value for key, value in self._own.items() if key not in SHELL_SETTINGS}
        return measure(self._site, settings, self.task or kind_of_labels(settings), self.reading(), least)

    def features(self) -> dict[str, list[Feature]]:
        """Return the names of the figures that may leave the site, as FLARE's features; other figures are left out."""
        return {DATASET: [Feature(name, DataType.INT) for name in [*self.sums.counts(), *self.sums.bins()]]}

    def count(self, dataset_name: str, feature_name: str) -> int:
        """Return the site's value of a figure; for a histogram, the number of its records."""
        return self.sums.bins()[feature_name][0] if feature_name in AXES else self.sums.counts()[feature_name]

    def histogram(
        self, dataset_name: str, feature_name: str, num_of_bins: int, global_min_value: float, global_max_value: float
    ) -> Histogram:
        """Return the bins of a histogram that may leave the site; for a figure that is a single number, return none.

        The ends of bins are those declared in ``AXES``, whatever number of bins and range FLARE requests.
        """
        _, counts = self.sums.bins().get(feature_name, (0, {}))
        width = AXES[feature_name].width if feature_name in AXES else 0
        return Histogram(
            HistogramType.STANDARD,
            [Bin(round(k * width, DECIMALS), round((k + 1) * width, DECIMALS), n) for k, n in counts.items()],
        )


class SiteStatistics(StatisticsController):
    """Collect the sites' statistics as FLARE's controller, and check every value of an answer before using it.

    FLARE's own controller ends the job at the first answer that it cannot read or add. Here a site with a wrong or
    failed answer is left out and named, and the figures of the other sites are used.
    """

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Ask the sites both questions, then write the page about sites with two usable answers; FLARE calls this."""
        self.reset()
        for phase in PHASES:
            self.statistics_task_flow(abort_signal, fl_ctx, phase)
            if abort_signal.triggered:
                return
        try:
            document = self.collect()
        except ValueError as error:
            self.system_panic(str(error), fl_ctx)
            return
        page = fl_ctx.get_engine().get_component(self.writer_id)
        page.left_out = dict(self.left_out)
        page.save(document, overwrite_existing=True, fl_ctx=fl_ctx)

    def reset(self) -> None:
        """Forget all answers of the sites, as before the server's first request for statistics."""
        self.left_out: dict[str, str] = {}
        self._counts: dict[str, dict[str, int]] = {}
        self._measured: dict[str, figures.Measured] = {}  # figures of the sites that answered both questions
        self.client_statistics: dict[str, Any] = {}
        self.global_statistics: dict[str, Any] = {}

    def results_cb(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Check and store a site's answer; FLARE calls this for each answer."""
        site, phase = client_task.client.name, client_task.task.props[StatisticsConstants.STATISTICS_TASK_KEY]
        result, client_task.result = client_task.result, None
        try:
            if (code := result.get_return_code()) != ReturnCode.OK:
                raise ValueError(f"its task failed ({code!s:.40}); the site's log says why")
            self.take(site, phase, fobs.loads(from_shareable(result).data[phase]))
        except Exception as error:  # a site may send any value, and FLARE's decoder may raise any error
            reason = str(error) if type(error) is ValueError else f"its answer cannot be read ({type(error).__name__})"
            self.left_out.setdefault(site, name_site_in_reason(site, printable(reason)))
            self.log_warning(fl_ctx, f"left out: {self.left_out[site]}")

    def take(self, site: str, phase: str, answer: Any) -> None:
        """Check every value of a site's answer to a question, and store the answer.

        Args:
            site: name of the site.
            phase: the question, one of ``PHASES``.
            answer: the decoded answer.

        Raises:
            ValueError: a figure is not declared, or is out of range.
        """
        if phase == StatisticsConstants.STATS_1st_STATISTICS:
            counts = _read_features(answer, StatisticsConstants.STATS_COUNT)
            self._counts[site] = {name: _whole(name, count) for name, count in counts.items()}
            # FLARE asks only for histograms of features whose smallest and largest value it knows.
            for statistic, end in (("min", 0), ("max", 1)):
                self.client_statistics.setdefault(statistic, {})[site] = {DATASET: dict.fromkeys(counts, end)}
            return
        records = self._counts[site]
        axes = {axis: figures.Histogram(records=records[axis], bins=[]) for axis in AXES if axis in records}
        for name, histogram in _read_features(answer, StatisticsConstants.STATS_HISTOGRAM).items():
            bins = [
                figures.Bin(low=float(interval[0]), high=float(interval[1]), count=_whole(name, interval[2]))
                for interval in histogram.bins
            ]
            if name not in records or (bins and name not in axes):
                raise ValueError(f"{name} has a histogram's bins but not its number of records")
            if name in axes:
                axes[name].bins = bins
        measured = {name: count for name, count in records.items() if name not in AXES}, axes
        figures.check(site, *measured)
        self._measured[site] = measured

    def collect(self) -> dict[str, figures.Measured]:
        """Return the figures of the sites that answered both questions (for counts, for histograms) with usable values.

        Raises:
            ValueError: there is no such site; the message gives the reason for each site.
        """
        for site in {*self._counts} - {*self._measured}:
            self.left_out.setdefault(site, f"site {site!r}: no answer to the second question")
        good = {site: measured for site, measured in self._measured.items() if site not in self.left_out}
        if not good:
            raise ValueError(f"no site sent usable figures: {reasons(self.left_out.items()) or 'none answered'}")
        return good


def _read_features(answer: Any, statistic: str) -> Mapping[str, Any]:
    """Return a statistic of each feature from a site's answer.

    Raises:
        ValueError: the answer has another form, or features that are not declared.
    """
    by_data_set = answer.get(statistic, {}) if isinstance(answer, Mapping) else None
    if (
        not isinstance(by_data_set, Mapping)
        or not {*by_data_set} <= {DATASET}
        or not isinstance(by_feature := by_data_set.get(DATASET, {}), Mapping)
    ):
        raise ValueError(f"{statistic} must be numbers of {DATASET!r} by name")
    if unknown := sorted(map(str, {*by_feature} - {*AXES, *COUNTS})):
        raise ValueError(f"it sent figures that are not declared: {list_names(unknown)}")
    return by_feature


def _whole(name: str, value: Any) -> int:
    refuse({
        f"{name} must be a whole number from 0 to {MOST_RECORDS:g}, got {shorten_value(value)}":
            type(value) is not int or not 0 <= value <= MOST_RECORDS,
    })  # fmt: skip
    return int(value)


@settings
class StatisticsPage(StatisticsWriter):
    """Write the sites' statistics as ``stats.json`` and ``stats.html`` into the run's ``fairflare``.

    Args:
        intensities: what 0 and 1 of the intensities are, in words.
        class_names: names of the classes, in the order of the classes.
    """

    intensities: str = ""
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        StatisticsWriter.__init__(self)
        self.left_out: dict[str, str] = {}

    def save(self, data: dict[str, figures.Measured], overwrite_existing: Flag, fl_ctx: FLContext) -> None:
        """Write the statistics of all sites' images to files; :class:`SiteStatistics` calls this."""
        document = figures.document_of(data, self.intensities, self.class_names, self.left_out)
        run = Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id()))
        for line in figures.write_statistics(document, run / FOLDER):
            self.log_info(fl_ctx, line)


def kind_of_labels(settings: Mapping[str, Any]) -> Kind:
    """Return ``"classification"`` if a label in the site's datalist is a number or a list, else ``"segmentation"``.

    Errors in the datalist are ignored here; they are reported when the images are read.
    """
    return "classification" if any(type(label) in (int, list) for label in labels_in(settings)[0]) else "segmentation"


def configs() -> dict[str, Any]:
    """Return the statistics that FLARE's controller requests.

    As each histogram has a range here, FLARE never asks a site for its smallest and largest value.
    """
    # Features are listed by name, since `nvflare job submit` cannot read a job with FLARE's "*" for all features.
    return {
        "count": {},
        "histogram": {name: {"bins": AXES[INTENSITY].bins, "range": [0, 1]} for name in (*AXES, *COUNTS)},
    }


def cleansers(least: int) -> dict[str, Any]:
    """Return FLARE's privacy cleansers by id.

    The cleansers check numbers of records, after the site has left out figures with too few cases.
    """
    return {
        "min_count": MinCountCleanser(min_count=least),
        "histogram_bins": HistogramBinsCleanser(max_bins_percent=100),
        "min_max_noise": AddNoiseToMinMax(min_noise_level=0.1, max_noise_level=0.3),
    }


def statistics_here(
    sites: Mapping[str, Mapping[str, Any]],
    generator: ImageStatistics,
    class_names: tuple[str, ...] = (),
) -> figures.StatsDocument:
    """Compute statistics of sites whose folders are on this machine, by FLARE's controller without messages.

    Args:
        sites: settings of each site, as in its ``fairflare.json``.
        generator: settings for reading files and for what may leave a site.
        class_names: names of the classes, in their order.

    Raises:
        ValueError: the data of a site cannot be used; the message names the site.
    """
    controller = SiteStatistics(configs(), WRITER, precision=DECIMALS)
    controller.reset()
    handler = StatisticsTaskHandler(WRITER, precision=DECIMALS)
    generators = {site: copy(generator) for site in sites}
    for site, in_file in sites.items():
        generators[site].open(site, in_file)
    for phase in PHASES:
        question = controller._prepare_inputs(phase)
        for site in sites:
            handler.stats_generator = generators[site]
            answers = fobs.loads(
                handler.execute_task(StatisticsConstants.FED_STATS_TASK, question, FLContext(), Signal())[phase]
            )
            for cleanser in cleansers(generator.min_cases).values():
                answers, _ = cleanser.apply(answers, site)
            controller.take(site, phase, answers)
        controller.global_statistics = get_global_stats(
            controller.global_statistics, controller.client_statistics, phase, controller.statistic_configs, DECIMALS
        )
    return figures.document_of(controller.collect(), generator.intensities, class_names)
