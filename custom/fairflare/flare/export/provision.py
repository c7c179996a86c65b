"""Define a builder for ``nvflare provision`` that writes the policies which FairFlare's jobs and hospitals need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.lighter.ctx import ProvisionContext
from nvflare.lighter.entity import Project
from nvflare.lighter.spec import Builder
from pydantic import Field

from fairflare.base.checks import refuse
from fairflare.base.settings import Flag, Positive, settings

EVERY_SITE = "*"
PREFIX = "fairflare."
RESOURCES = ("resources.json", "resources.json.default")  # FLARE reads the first of these files that exists
# Default content of a private file: ``min_cases``, and the list of classes that a sealed bundle may use.
SITE_FILE: dict[str, Any] = {"min_cases": 5, "bundle_classes": ["default"]}
# Default rights of each role at a site; a project file may define others. No role may bring code or open a shell. The
# right to read a job's log is in none of FLARE's categories, so it is named.
AUTHORIZATION: dict[str, Any] = {
    "format_version": "1.0",
    "permissions": {
        "project_admin": {
            "submit_job": "any", "clone_job": "any", "manage_job": "any", "download_job": "any", "view": "any",
            "operate": "any", "shell_commands": "none", "byoc": "none", "get_job_log": "any",
        },
        "org_admin": {
            "submit_job": "none", "clone_job": "none", "manage_job": "o:submitter", "download_job": "none",
            "view": "any", "operate": "o:site", "shell_commands": "none", "byoc": "none",
        },
        "lead": {
            "submit_job": "any", "clone_job": "n:submitter", "manage_job": "n:submitter",
            "download_job": "n:submitter", "view": "any", "operate": "o:site", "shell_commands": "none",
            "byoc": "none", "get_job_log": "n:submitter",
        },
        "member": {"view": "any"},
    },
}  # fmt: skip


@settings
class SitePolicyBuilder(Builder):
    """Write the folder ``local`` of the server and of every site in ``nvflare provision``, before the SignatureBuilder.

    ``resources.json`` allows the classes of FairFlare's jobs, and keeps sites from sending their logs to the server.
    ``resources.json.default`` has the same content: ``nvflare deploy prepare`` uses that file and removes the other.
    ``authorization.json`` permits no custom code and no shell. ``privacy.json`` is written as given. ``fairflare.json``
    is written as given, with a ``min_cases`` of 5 at every site. :meth:`lay` writes the same files into a kit that was
    made without this builder.

    Args:
        allow_prefixes: entries for the class allow list, full class paths or package prefixes that end in a dot;
            ``"fairflare."`` stands for :func:`job_classes`: as a prefix it would admit every function of the package.
        authorization: content of ``authorization.json``; default: :data:`AUTHORIZATION`.
        privacy: content of every site's ``privacy.json``; ``None`` if none is written.
        site_settings: content of ``fairflare.json`` by site; ``"*"`` holds what every site gets, the server's name
            what the server gets.
        log_streaming: sites stream their job logs to the server (FLARE's default; texts of exceptions go along).
        heart_beat_timeout: seconds without a sign of life after which the server takes a site for dead; ``None``:
            FLARE's 600.
        storage_root: folder at the server for FLARE's job store and snapshots; ``None`` for FLARE's under ``/tmp``.

    Raises:
        ValueError: an argument has an unusable form; the message names the argument.
    """

    allow_prefixes: list[str] = Field(default_factory=lambda: ["fairflare."])
    authorization: dict[str, Any] | None = None
    privacy: dict[str, Any] | None = None
    site_settings: dict[str, Any] | None = None
    log_streaming: Flag = False
    heart_beat_timeout: Positive | None = None
    storage_root: str | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self._policy = AUTHORIZATION if self.authorization is None else self.authorization
        self._of_site = self.site_settings or {}
        refuse({
            f"allow_prefixes must list class paths or prefixes that end in a dot, got {self.allow_prefixes!r}":
                not all("." in prefix for prefix in self.allow_prefixes),
            f"authorization must hold a dict 'permissions', got {self._policy!r:.80}":
                not isinstance(self._policy.get("permissions"), dict),
            f"privacy must hold a list 'scopes', got {self.privacy!r:.80}":
                self.privacy is not None and not isinstance(self.privacy.get("scopes"), list),
            **{
                f"site_settings of {name!r} must be a mapping, got {block!r}": not isinstance(block, dict)
                for name, block in self._of_site.items()
            },
        })  # fmt: skip

    def build(self, project: Project, ctx: ProvisionContext) -> None:
        """Write the policy files of every participant; FLARE's provisioning calls this.

        Raises:
            ValueError: the project has no server, or ``site_settings`` names a site that the project does not have.
            RuntimeError: the kits do not exist yet, because the builder stands too early in the project file.
        """
        server, clients = project.get_server(), list(project.get_clients())
        if server is None:
            raise ValueError("SitePolicyBuilder: the project has no server")
        known = {EVERY_SITE, server.name, *(client.name for client in clients)}
        if unknown := sorted(set(self._of_site) - known):
            raise ValueError(
                f"SitePolicyBuilder: site_settings for {', '.join(map(repr, unknown))}, which the project does not "
                f"have; it has {', '.join(sorted(known - {EVERY_SITE}))}"
            )
        self._build_server(server.name, Path(ctx.get_local_dir(server)))
        for client in clients:
            self._build_site(client.name, Path(ctx.get_local_dir(client)))

    def lay(self, kit: Path) -> str:
        """Write the policy files into a start-up kit that was made without this builder, as by ``nvflare package``.

        Existing entries of the site's ``fairflare.json`` are kept.

        Args:
            kit: folder of the kit.

        Returns:
            The name of the server or site.

        Raises:
            ValueError: the folder is no kit of a server or site, or has other rights or filters already.
        """
        local, startup = kit / "local", kit / "startup"
        refuse({
            f"{local / file} differs from what the policies would write; remove it to have theirs":
                content is not None and (local / file).is_file() and _read(local / file) != content
            for file, content in (("authorization.json", self._policy), ("privacy.json", self.privacy))
        })  # fmt: skip
        if (startup / "fed_server.json").is_file():
            (entry, *_) = _read(startup / "fed_server.json")["servers"]
            name = str(entry.get("identity") or entry["admin_server"])
            self._build_server(name, local)
        elif (startup / "fed_client.json").is_file():
            name = str(_read(startup / "fed_client.json")["client"]["fqsn"])
            self._build_site(name, local)
        else:
            raise ValueError(
                f"{kit} is no start-up kit of a server or site: it has no startup/fed_server.json or fed_client.json"
            )
        return name

    def _build_server(self, name: str, local: Path) -> None:
        resources = self._resources(name, local)
        if (seconds := self.heart_beat_timeout) is not None:
            for entry in resources["servers"]:
                entry["heart_beat_timeout"] = int(seconds) if seconds.is_integer() else seconds
        if self.storage_root is not None:
            root = Path(self.storage_root)
            resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(root / "snapshots")
            (manager,) = (c for c in resources["components"] if c["id"] == "job_manager")
            manager["args"]["uri_root"] = str(root / "jobs")
        self._write_policies(local, resources)
        if name in self._of_site:
            _write(local / "fairflare.json", {**self._of_site[name], **_read(local / "fairflare.json")})

    def _build_site(self, name: str, local: Path) -> None:
        resources = self._resources(name, local)
        resources["allow_log_streaming"] = self.log_streaming
        self._write_policies(local, resources)
        if self.privacy is not None:
            _write(local / "privacy.json", self.privacy)
        _write(local / "fairflare.json", {
            **SITE_FILE, **self._of_site.get(EVERY_SITE, {}), **self._of_site.get(name, {}),
            **_read(local / "fairflare.json"),
        })  # fmt: skip

    def _write_policies(self, local: Path, resources: Mapping[str, Any]) -> None:
        for name in RESOURCES:
            _write(local / name, resources)
        _write(local / "authorization.json", self._policy)

    def _resources(self, name: str, local: Path) -> dict[str, Any]:
        resources = next((content for file in RESOURCES if (content := _read(local / file))), None)
        if resources is None:
            raise RuntimeError(
                f"SitePolicyBuilder: the kit of {name!r} has no local/resources.json.default yet; list this builder "
                "after StaticFileBuilder"
            )
        listed = resources.setdefault("class_allow_list", [])
        for prefix in self.allow_prefixes:
            listed += [path for path in (job_classes() if prefix == PREFIX else [prefix]) if path not in listed]
        return resources


def job_classes() -> list[str]:
    """Return the sorted paths of the classes that jobs without custom code name, for a site's class allow list.

    Among them are the paths that job folders of the previous version name. The prefix ``"fairflare."`` alone would be
    unsafe: FLARE calls any class or function that a job names under an allowed prefix, with the job's arguments, and
    some functions of the package read or import files, as they are meant for a user's own machine.
    """
    from fairflare.base.settings import field_names, parts_of
    from fairflare.federation.plan.task_files import TASKS_BY_KIND, load_task_class
    from fairflare.flare.aggregator import FairAggregator
    from fairflare.flare.controller import RoundsController
    from fairflare.flare.evaluation import EvaluationController, PlanController
    from fairflare.flare.executor import SiteExecutor
    from fairflare.flare.persistor import RunModels
    from fairflare.flare.statistics import ImageStatistics, SiteStatistics, StatisticsPage
    from fairflare.flare.tracking import TensorBoard
    from fairflare.methods.base.catalog import all_methods
    from fairflare.methods.base.training import LocalTraining
    from fairflare.tasks.bundle import MonaiBundleTask
    from fairflare.tasks.scripts import ScriptTask

    open_: list[type] = [
        RoundsController, SiteExecutor, RunModels, TensorBoard, FairAggregator, ScriptTask, LocalTraining,
        MonaiBundleTask, ImageStatistics, SiteStatistics, StatisticsPage, EvaluationController, PlanController,
        *(load_task_class(file).__mro__[1] for file in TASKS_BY_KIND.values()),
        *(half for method in all_methods().values() for half in (method.rule, method.training)),
    ]  # fmt: skip
    classes = set[str]()
    while open_:
        cls = open_.pop()
        path = f"{cls.__module__}.{cls.__qualname__}"
        if path not in classes and path.startswith(PREFIX):
            classes.add(path)
            open_ += [part for name in field_names(cls) for part in parts_of(cls, name).values()]
    return sorted(classes)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; an empty dict if the file does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
