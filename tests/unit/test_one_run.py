"""Test that nothing which belongs to a run, or which a run imports, can start another run."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import subprocess
import sys
import threading
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from nvflare.client.cell.bootstrap import BOOTSTRAP_FILE_ENV_VAR
from nvflare.recipe.spec import ExecEnv
from typer.testing import CliRunner

from fairflare.base.machine import one_run
from fairflare.base.machine.one_run import BELONGS_TO, belonging_to, refuse_inside_run, refuse_main
from fairflare.base.plugins import load_object
from fairflare.base.settings import Part, settings
from fairflare.cli.commands import app
from fairflare.cli.run.simulate import simulate
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.plan.task_files import TaskFileError, load_task_class
from fairflare.federation.transports.local import run_local
from fairflare.flare.aggregator import FairAggregator
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_mrl import FedMRL
from fairflare.recipes import FairRecipe, FedAvgRecipe, ScriptRecipe, StatsRecipe
from tests.bundles import train_config, write_bundle

INSIDE = "must not start a run, since it belongs to one"


def of_main(cls: type) -> Any:
    """Return a class like ``cls`` that a script, or a notebook's cell, defines."""
    return settings(type("Mine", (cls,), {"__module__": "__main__", "__doc__": "Mine."}))


class NoPlace(ExecEnv):
    """Fail if a job arrives."""

    def deploy(self, job: Any) -> str:
        raise AssertionError("a job was started")

    get_job_status = abort_job = get_job_result = None  # type: ignore[assignment]


NoPlace.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def doors(folder: Path) -> dict[str, Any]:
    """Return everything that starts a run, by name."""
    recipe = FedAvgRecipe(sites=2)
    script = folder / "train.py"
    script.write_text("class Net: pass\n")
    scripted = ScriptRecipe("fed_avg", train_script=script, model="Net", sites=2)
    return {
        "in process": lambda: run_local(make_plan("fed_avg", sites=2), folder / "run"),
        "in processes": lambda: run_local(make_plan("fed_avg", sites=2), folder / "run", jobs=2),
        "simulator": lambda: simulate(recipe, folder / "s", 1, {}, folder / "log", None),  # type: ignore[arg-type]
        "recipe": lambda: recipe.run(NoPlace()),
        "execute": lambda: recipe.execute(NoPlace()),
        "script": lambda: scripted.run(NoPlace()),
        "statistics": lambda: StatsRecipe(sites=["a", "b"]).run(NoPlace()),
    }


def test_every_door_is_shut_inside_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for start in doors(tmp_path).values():
        with belonging_to("task file x.py"), pytest.raises(ValueError, match=f"^task file x.py {INSIDE}"):
            start()
    with belonging_to("task file x.py"):
        for command in ("run fed_avg --in-process", "run fed_avg", "compare fed_avg --seeds 1"):
            done = CliRunner().invoke(app, command.split())
            assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.stderr
            assert INSIDE in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]  # nothing was begun
    with pytest.raises(AssertionError, match="a job was started"):
        doors(tmp_path)["recipe"]()


def test_which_processes_belong_to_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_inside_run()
    assert BOOTSTRAP_FILE_ENV_VAR in inspect.getsource(one_run)
    flare = ["python", "-u", "-m", "nvflare.private.fed.app.client.worker_process"]
    for change in (
        lambda patch: patch.setenv(BOOTSTRAP_FILE_ENV_VAR, "x"),  # a script's own process, which FLARE starts
        lambda patch: patch.setattr(sys, "orig_argv", flare),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            with pytest.raises(ValueError, match=f"^a process of a run {INSIDE}"):
                refuse_inside_run()
    # A new process that executes its parent's script again ends with the sentence alone, without a traceback.
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(SystemExit, match=INSIDE):
        refuse_inside_run()


def test_a_mark_is_of_one_thread_and_of_new_processes() -> None:
    """Another thread may start a run while this one imports a file; programs that this one starts may not."""
    found: list[str] = []
    other = threading.Thread(target=lambda: found.append(str(refuse_inside_run())))
    program = [sys.executable, "-c", "from fairflare.base.machine.one_run import *; refuse_inside_run(); print('on')"]
    with belonging_to("a"), belonging_to("b"):
        other.start()
        other.join()
        inside = subprocess.run(program, capture_output=True, text=True, check=False)
        with pytest.raises(ValueError, match=r"^a must not"), belonging_to("a"):
            pass
    assert found == ["None"]
    assert inside.stdout == ""
    assert f"ValueError: b {INSIDE}" in inside.stderr
    assert os.environ[BELONGS_TO] == ""
    assert subprocess.run(program, capture_output=True, text=True, check=True).stdout == "on\n"


STARTS = {
    "run_local": "run_local(make_plan('fed_avg', sites=2), Path('run'))",
    "recipe": "FedAvgRecipe(sites=2).run(None)",
    "the file itself": "FairRecipe('fed_avg', task_file=__file__)",
    "compare": "Runner(None, Path('c'), {})",
}
IMPORTS = """
from pathlib import Path
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.recipes import FairRecipe, FedAvgRecipe
from fairflare.tasks.segmentation import SegmentationTask
from fairflare_lab.cli.compare.runs import Runner

class Task(SegmentationTask):
    'Mine.'

"""


@pytest.mark.parametrize("start", list(STARTS))
def test_a_task_file_cannot_start_a_run(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "task.py"
    file.write_text(IMPORTS + STARTS[start])
    for _ in range(2):
        with pytest.raises(TaskFileError, match=rf"task.py cannot be run: ValueError: .*{INSIDE}") as e:
            load_task_class(file)
        assert str(e.value).count("cannot be run") == 1
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"task.py"}
    # What the sentence says to do: a guard, or another file.
    file.write_text(f"{IMPORTS}if __name__ == '__main__':\n    {STARTS[start]}\n")
    assert load_task_class(file).__name__ == "Task"


def test_a_plugin_and_a_bundle_cannot_start_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "starting_plugin.py").write_text(IMPORTS + STARTS["run_local"])
    point = EntryPoint("mine", "starting_plugin", "fairflare.methods")
    with pytest.raises(ValueError, match=f"^plugin mine = starting_plugin {INSIDE}"):
        load_object(point)
    config = train_config()
    config["network_def"] = {"_target_": "starting_scripts.net.Net"}
    bundle = write_bundle(tmp_path / "b", config)
    (bundle / "starting_scripts").mkdir()
    (bundle / "starting_scripts" / "__init__.py").touch()
    (bundle / "starting_scripts" / "net.py").write_text(IMPORTS + STARTS["run_local"])
    with pytest.raises(ValueError, match=f"MONAI bundle .*b {INSIDE}"):
        make_plan("fed_avg", monai_bundle=bundle, sites=2)


def test_a_class_of_the_main_script_is_no_part_of_a_job() -> None:
    """Refuse it as rule, training, a part of them, filter, and in FLARE's own recipe; accept it in one process."""
    rule, training = of_main(FedAvg), of_main(LocalTraining)
    part = of_main(type(FedMRL().weighting))
    refusal = "^Mine is a class .*: write Mine into"
    for given in ({"rule": rule()}, {"training": training()}, {"rule": FedMRL(weighting=part())}):
        with pytest.raises(ValueError, match=refusal):
            FairRecipe(**{"method": None if "rule" in given else "fed_avg", **given}, sites=2)
    with pytest.raises(ValueError, match=refusal):
        FairAggregator(rule=rule())
    own_filter = type("Mine", (Part,), {"__module__": "__main__"})()
    with pytest.raises(ValueError, match=refusal):
        FedAvgRecipe(sites=2).add_client_output_filter(own_filter, tasks=["train"])
    assert make_plan(rule=rule(), training=training(), sites=2).method.title == "Mine"
    refuse_main(FedAvg())


WORK = "import os\nfrom fairflare.base.machine.child import run_in_child\n"
SCRIPTS = {
    # a script without a guard: executed once, though its work is done in another process
    "work of a module": "print(run_in_child(os.getpid) != os.getpid())",
    # its own function: the script itself does the work
    "work of its own": "def mine():\n    return os.getpid()\nprint(run_in_child(mine) == os.getpid())",
}


@pytest.mark.parametrize("form", ["script", "standard input", "notebook"])
@pytest.mark.parametrize("work", list(SCRIPTS))
def test_a_new_process_does_not_execute_the_main_script(work: str, form: str, tmp_path: Path) -> None:
    code = WORK + SCRIPTS[work]
    (tmp_path / "main.py").write_text(code)
    arguments = {"script": ["main.py"], "standard input": ["-"], "notebook": ["-c", code]}[form]
    done = subprocess.run(
        [sys.executable, *arguments], input=code, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_process_of_flare_has_processes_of_its_own_but_no_chain_of_them(tmp_path: Path) -> None:
    """Check that a site with ``isolate`` starts one, and that a module which it imports cannot start the next."""
    program = "import os\nfrom fairflare.base.machine.child import run_in_child\n"
    program += "print(run_in_child(os.getpid) != os.getpid())\n"
    (tmp_path / "module.py").write_text(program + "def work():\n    return 1\n")
    env = {**os.environ, BELONGS_TO: "a process of FLARE"}
    main = "from fairflare.base.machine.child import run_in_child; import module; print(run_in_child(module.work))"
    done = subprocess.run(
        [sys.executable, "-c", main], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "True\n"
    assert done.returncode == 1
    assert f"ValueError: a process of a run {INSIDE}" in done.stderr


OWN = """
from fairflare.base.machine.one_run import starting_process
class Mine:
    pass
with starting_process(Mine()):
    print("started")
"""


def test_a_class_of_a_script_that_is_a_file_can_be_sent(tmp_path: Path) -> None:
    """Send it as Python does: the new process executes the script; a notebook's class cannot be sent, and says so."""
    (tmp_path / "main.py").write_text(OWN)
    for arguments, works in ((["main.py"], True), (["-"], False), (["-c", OWN], False)):
        done = subprocess.run(
            [sys.executable, *arguments], input=OWN, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.stdout == "started\n") is works, done.stderr
        assert works or "write it into a file of its own and import it from there, or run in one process" in done.stderr
