"""Count the processes where a run's own code asks for a run: each form ends soon, with one sentence or a result.

Each form is bounded: a chain of processes is cut off, by their ids, long before it could harm the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from .poc_tools import MARK, end_processes, processes

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MOST = 16  # number of processes at which a form is cut off; a run in the simulator has six
SENTENCE = "must not start a run, since it belongs to one"
OF_MAIN = "is a class of the main script or notebook"

HEAD = """
from pathlib import Path
import subprocess, sys, torch
from nvflare.recipe import SimEnv
from fairflare import client
from fairflare.base.settings import settings
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg
from fairflare.recipes import FairRecipe, ScriptRecipe
from fairflare.tasks.classification import ClassificationTask

TINY = {"task": "classification", "sites": 2, "num_rounds": 1}
SMALL = {"image_size": [33, 33], "features": [4, 4, 8, 8], "max_pool": False, "phantom_samples": 40}
simulator = SimEnv(num_clients=2, workspace_root="runs")

@settings
class Mine(FedAvg):
    "Mine."

@settings
class Own(LocalTraining):
    "Mine."

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

class Task(ClassificationTask):
    "Mine."

"""
RULE = HEAD + "FairRecipe(rule=Mine(), settings=SMALL, **TINY).run(simulator)\n"
JOBS = (
    HEAD + "plan = make_plan('fed_avg', settings=SMALL, **TINY)\nprint('DONE', run_local(plan, Path('runs'), jobs=2))\n"
)
OWN = HEAD + (
    "plan = make_plan('fed_avg', training=Own(local_epochs=1), settings=SMALL, **TINY)\n"
    "print('DONE', run_local(plan, Path('runs'), jobs=2))\n"
)
SCRIPT = HEAD + (
    "if __name__ == '__main__':\n"
    "    script = {'train_script': __file__, 'model': 'Net', 'sites': 2, 'num_rounds': 1}\n"
    "    ScriptRecipe('fed_avg', launch_external_process=OWN, command=sys.executable, **script).run(simulator)\n"
)
PROGRAM = HEAD + (
    "command = [sys.executable, '-m', 'fairflare.cli', 'run', 'fed_avg', '--task-file', __file__, '--in-process']\n"
    "subprocess.run(command)\n"
)
RUN = ["-m", "fairflare.cli", "run", "fed_avg", "--sites", "2", "--rounds", "1", "--task-file", "mine.py"]
RUN += [
    f"--set={name}" for name in ("image_size=[33,33]", "features=[4,4,8,8]", "max_pool=false", "phantom_samples=40")
]
#: The code, the command after the interpreter's name, its exit code, a text that it prints, and its most processes.
FORMS = {
    "a rule in a script": (RULE, ["mine.py"], 1, OF_MAIN, 1),
    "a rule from standard input": (RULE, ["-"], 1, OF_MAIN, 1),
    "a rule in a notebook": (RULE, ["-c", RULE], 1, OF_MAIN, 1),
    "a rule in a module": (RULE, ["-c", "import mine_again"], 1, SENTENCE, 6),
    "jobs in a script": (JOBS, ["mine.py"], 0, "DONE", 4),
    "a class of a script in jobs": (OWN, ["mine.py"], 1, SENTENCE, 4),
    "a class of standard input in jobs": (OWN, ["-"], 1, "write it into a file of its own", 2),
    "a task file": (RULE.replace("rule=Mine()", "'fed_avg', task_file=__file__"), RUN, 2, SENTENCE, 1),
    "a task file that starts a program": (PROGRAM, [*RUN, "--in-process", "--jobs=2"], 0, SENTENCE, 8),
    "an own script": (SCRIPT.replace("OWN", "False"), ["mine.py"], 1, SENTENCE, 8),
    "an own script in its own process": (SCRIPT.replace("OWN", "True"), ["mine.py"], 1, SENTENCE, 10),
}  # fmt: skip


@pytest.mark.parametrize("form", list(FORMS))
def test_no_form_starts_a_chain(form: str, tmp_path: Path) -> None:
    code, command, exit_code, text, most = FORMS[form]
    for name in ("mine.py", "mine_again.py"):
        (tmp_path / name).write_text(code)
    mark = uuid.uuid4().hex
    env = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
    output, seen, began = tmp_path / "output", dict[int, str](), time.monotonic()
    with output.open("wb") as out, (tmp_path / "mine.py").open("rb") as given:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=tmp_path, env=env, stdin=given, stdout=out, stderr=out
        )
        try:
            while process.poll() is None and len(seen) <= MOST and time.monotonic() - began < 480:
                seen |= processes(mark)
                time.sleep(0.1)
        finally:
            end_processes(mark)
            process.wait()
    printed = output.read_text(errors="replace")
    # Python's own helper process, and programs such as matplotlib's `fc-list`, are no processes of a run.
    started = {pid: line for pid, line in seen.items() if "python" in line.split()[0] and "tracker" not in line}
    assert len(started) <= most, "\n".join(started.values())
    assert process.returncode == exit_code, printed[-3000:]
    assert text in printed
