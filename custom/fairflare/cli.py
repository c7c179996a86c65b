"""``fairflare``: list the methods, run one in FLARE's simulator, export one as a job folder, show results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from rich.progress import Progress

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Fair federated learning for medical images on NVIDIA FLARE.",
)
console = Console()
errors = Console(stderr=True)

Method = Annotated[str, typer.Argument(help="A name that `fairflare list` prints.")]
Rounds = Annotated[
    int | None, typer.Option("--rounds", "-r", min=1, help="Communication rounds; default: the method's quick job.")
]
Sites = Annotated[
    str, typer.Option("--sites", "-s", help="Number of sites, or names separated by commas; 0: the method's quick job.")
]
Kind = Annotated[
    str | None, typer.Option("--task", help="segmentation or classification; default: what the paper learns.")
]
Paper = Annotated[bool, typer.Option("--paper", help="The paper's settings, not those of a quick job.")]
MinSites = Annotated[int, typer.Option(min=1, help="Usable results that a round needs.")]
Seed = Annotated[int, typer.Option(help="Of the initial model and of all training.")]
Experiment = Annotated[str, typer.Option(help="Id under which a stopped run can be continued.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="KEY=VALUE (JSON or text) of the method or the task; may be repeated."),
]
TaskFile = Annotated[Path | None, typer.Option(help="Python file with a class Task: your own network and data.")]
Timeout = Annotated[float, typer.Option(help="Seconds a phase may take.")]
Grace = Annotated[float, typer.Option(help="Seconds for late sites once enough answered; 0: the whole timeout.")]


@app.command("list")
def list_methods() -> None:
    """The methods, with what they do and where they come from."""
    from fairflare.methods import all_methods

    table = Table("job", "method", "what it does", "source", box=None, pad_edge=False)
    for method in all_methods().values():
        table.add_row(method.name, method.title, method.summary, method.source)
    console.print(table)


@app.command()
def run(
    method: Method,
    rounds: Rounds = None,
    sites: Sites = "0",
    task: Kind = None,
    paper: Paper = False,
    min_sites: MinSites = 2,
    seed: Seed = 0,
    experiment: Experiment = "",
    settings: Settings = None,
    task_file: TaskFile = None,
    timeout: Timeout = 3600.0,
    grace: Grace = 0.0,
    workspace: Annotated[
        Path | None, typer.Option("--workspace", "-w", help="Where the run is kept; default: runs/<method>.")
    ] = None,
    site_file: Annotated[
        Path | None, typer.Option("--data", "-d", help="A local/fairflare.json that says where each site's data are.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", min=1, help="Simulator workers; default: one per site.")
    ] = None,
    keep_local_models: Annotated[bool, typer.Option(help="Keep every round's local models.")] = False,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="One process instead of FLARE's simulator: the same results, sooner.")
    ] = False,
) -> None:
    """Runs a method in FLARE's simulator and prints the fairness table. Exit code 1 when the run failed."""
    from fairflare.recipes import FairRecipe

    workspace = (workspace or Path("runs") / method).absolute()
    with _user_errors():
        recipe = FairRecipe(
            method,
            task=task,
            small=not paper,
            num_rounds=rounds,
            sites=parse_sites(sites),
            min_sites=min_sites,
            seed=seed,
            experiment=experiment,
            phase_timeout=timeout,
            straggler_grace=grace,
            keep_local_models=keep_local_models,
            settings=parse_settings(settings or []),
            task_file=task_file,
        )
        local = _site_settings(site_file, experiment, workspace)
    if in_process:
        raise typer.Exit(_run_here(recipe, workspace, local))
    names = recipe.site_names or []
    code = simulate(recipe, workspace, names, threads or len(names), local)
    raise typer.Exit(_report(workspace, code))


@app.command()
def export(
    method: Method,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder that the job folder is put into.")],
    rounds: Rounds = None,
    sites: Annotated[str, typer.Option("--sites", "-s", help="Number, names, or 'all' connected sites.")] = "all",
    task: Kind = None,
    paper: Paper = False,
    min_sites: MinSites = 2,
    seed: Seed = 0,
    experiment: Experiment = "",
    settings: Settings = None,
    task_file: TaskFile = None,
    timeout: Timeout = 3600.0,
    grace: Grace = 0.0,
    preinstalled: Annotated[
        bool, typer.Option("--preinstalled", help="No custom code: sites have the package and allow 'fairflare.'.")
    ] = False,
    bundle: Annotated[bool, typer.Option("--bundle", help="Carry the whole package in the job.")] = False,
) -> None:
    """Writes a method as a FLARE job folder."""
    from fairflare.recipes import FairRecipe

    with _user_errors():
        if preinstalled and bundle:
            raise ValueError("--preinstalled and --bundle exclude each other")
        recipe = FairRecipe(
            method,
            task=task,
            small=not paper,
            num_rounds=rounds,
            sites=None if sites == "all" else parse_sites(sites),
            min_sites=min_sites,
            seed=seed,
            experiment=experiment,
            phase_timeout=timeout,
            straggler_grace=grace,
            settings=parse_settings(settings or []),
            task_file=task_file,
            packaging="preinstalled" if preinstalled else "bundle" if bundle else "task_file",
        )
        recipe.export(str(out))
    console.print(f"job folder: {out / method}", soft_wrap=True)


@app.command()
def show(
    runs: Annotated[list[Path], typer.Argument(help="Run folders or results.json files.")],
) -> None:
    """The fairness table of a run; of several runs a comparison by method."""
    from fairflare.reporting.results import read_results
    from fairflare.reporting.table import compare, rich_table

    with _user_errors():
        found = [read_results(_results_path(path)) for path in runs]
    if len(found) == 1:
        console.print(rich_table(found[0]))
    else:
        print(compare(found))


# ------------------------------------------------------------------------------------------------ pieces


def parse_sites(text: str) -> int | list[str]:
    """``"4"`` -> 4; ``"a,b"`` -> ``["a", "b"]``."""
    return int(text) if text.isdigit() else [name.strip() for name in text.split(",") if name.strip()]


def parse_settings(items: list[str]) -> dict[str, Any]:
    """``["clip_max=0.99"]`` -> ``{"clip_max": 0.99}``; values are JSON where they parse, else text.

    Raises:
        ValueError: no ``=``, or a key twice.
    """
    found: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ValueError(f"--set wants KEY=VALUE, got {item!r}")
        if key in found:
            raise ValueError(f"--set gives {key!r} twice")
        try:
            found[key] = json.loads(text)
        except json.JSONDecodeError:
            found[key] = text
    return found


def _run_here(recipe: Any, workspace: Path, local: dict[str, Any]) -> int:
    """Runs a recipe in this process; FLARE's and our log go into the file where the simulator's would be."""
    import logging

    from fairflare.flare.in_process import run_in_process

    workspace.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(workspace.with_name(workspace.name + ".log"), mode="w", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        run_in_process(recipe, workspace, local)
        return _report(workspace, 0)
    except RuntimeError:
        return _report(workspace, 1)
    finally:
        root.removeHandler(handler)
        handler.close()


def simulate(recipe: Any, workspace: Path, names: list[str], threads: int, local: dict[str, Any]) -> int:
    """Runs a recipe in FLARE's simulator, in a process group of its own, and shows its progress.

    Returns:
        The simulator's exit code.
    """
    folder = workspace / "local"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fairflare.json").write_text(json.dumps(local, indent=2) + "\n", encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="fairflare-job-") as job_root:
        recipe.export(job_root)
        command = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator"]
        command += [str(Path(job_root) / recipe.name), "-w", str(workspace)]
        command += ["-c", ",".join(names), "-n", str(len(names)), "-t", str(threads)]
        log_path = workspace.with_name(workspace.name + ".log")
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                _follow(process, workspace, names, recipe.name)
            except BaseException:
                _stop(process)
                raise
        return process.returncode


def _stop(process: subprocess.Popen[bytes]) -> None:
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, kind)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                continue
    try:
        os.killpg(process.pid, signal.SIGKILL)  # workers that outlived the simulator
    except ProcessLookupError:
        return


def _follow(process: subprocess.Popen[bytes], workspace: Path, names: list[str], name: str) -> None:
    """A progress bar per site, from the events that the controller writes, until the process ends."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    events = workspace / "server" / "simulate_job" / "fairflare" / "progress.jsonl"
    started = time.time()
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(24),
        TextColumn("{task.completed:>3.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=False) as progress:
        bars = {site: progress.add_task(site, total=1, note="") for site in names}
        whole = progress.add_task(name, total=1, note="starting")
        position = 0
        while True:
            ended = process.poll() is not None
            if events.exists() and events.stat().st_mtime >= started - 1:
                with events.open(encoding="utf-8") as f:
                    f.seek(position)
                    for line in f:
                        if not line.endswith("\n"):
                            break
                        position += len(line.encode())
                        _show(json.loads(line), progress, bars, whole)
            if ended:
                return
            time.sleep(0.2)


def _show(event: dict[str, Any], progress: Progress, bars: dict[str, Any], whole: Any) -> None:
    if event.get("kind") == "phase":
        for site in event["sites"]:
            if site in bars:
                progress.update(
                    bars[site],
                    total=event["num_rounds"] + 1,
                    completed=event["current_round"],
                    note=f"{event['phase']} ...",
                )
        progress.update(whole, total=event["num_rounds"], completed=event["current_round"], note=event["phase"])
    elif event.get("kind") == "site" and event["site"] in bars:
        if event["ok"]:
            values = event.get("metrics") or {}
            score = next((f"{k} {v:.3f}" for k, v in values.items() if k not in ("loss", "answered")), "")
            note = f"{event['phase']} {score} ({event['seconds']:.1f} s)"
        else:
            note = f"[red]left out:[/red] {event['reason'][:70]}"
        step = {"validate": 1}.get(event["phase"], 0)
        progress.update(bars[event["site"]], note=note, completed=event["current_round"] + step)
    elif event.get("kind") == "round_done":
        progress.update(whole, completed=event["current_round"] + 1)


def _report(workspace: Path, code: int) -> int:
    """Prints the table, or why there is none; the exit code."""
    from fairflare.reporting.results import read_results
    from fairflare.reporting.table import rich_table

    log = workspace.with_name(workspace.name + ".log")
    try:
        results = read_results(_results_path(workspace))
    except (OSError, ValueError):
        errors.print(f"[red]failed[/red]: FLARE ended with code {code} before the first round")
        for line in _last_errors(log):
            errors.print(line, markup=False, highlight=False, soft_wrap=True)
        errors.print(f"log: {log}", soft_wrap=True)
        return 1
    if results["status"] != "completed" or code != 0:
        errors.print(f"[red]failed[/red]: {results.get('reason') or f'FLARE ended with code {code}'}", soft_wrap=True)
        errors.print(f"log: {log}", soft_wrap=True)
        return 1
    console.print(rich_table(results))
    console.print(f"results: {_results_path(workspace)}", soft_wrap=True)
    return 0


def _last_errors(log: Path, count: int = 5) -> list[str]:
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    marked = [line for line in lines if any(word in line for word in ("ERROR", "Error", "CRITICAL"))]
    return (marked or lines)[-count:]


def _results_path(path: Path) -> Path:
    if path.is_file():
        return path
    candidates = [path / "results.json", path / "fairflare" / "results.json"]
    candidates += [path / "server" / "simulate_job" / "fairflare" / "results.json"]
    candidates += [path / "workspace" / "fairflare" / "results.json"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ValueError(f"no results.json in {path}")


def _site_settings(site_file: Path | None, experiment: str, workspace: Path) -> dict[str, Any]:
    """The simulator's local/fairflare.json: the user's, plus folders that outlive the run's workspace."""
    local: dict[str, Any] = {}
    if site_file is not None:
        try:
            local = json.loads(site_file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as e:
            raise ValueError(f"--data {site_file}: {e}") from e
        if not isinstance(local, dict):
            raise ValueError(f"--data {site_file}: must hold a JSON object")
    if experiment:
        state = workspace.with_name(workspace.name + ".state")
        local.setdefault("state_root", str(state / "sites"))
        local.setdefault("checkpoint_root", str(state / "server"))
    return local


@contextmanager
def _user_errors() -> Iterator[None]:
    """A mistake of the user is one red line, not a traceback."""
    try:
        yield
    except (ValueError, TypeError) as e:
        errors.print(f"[red]error[/red]: {e}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from e


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
