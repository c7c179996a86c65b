"""Test that a hospital's site and server work without packages that only data tools or reports need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fairflare.base.machine.child import run_in_child
from fairflare.data.datalist import SPLITS, write_datalist

PACKAGE = Path(__file__).parents[2] / "custom"
TOOLS = ("fairflare.data.preparers", "fairflare_lab.phantoms", "matplotlib", "pydicom", "sklearn", "typer")
SIDES = (
    "flare.executor", "flare.controller", "flare.aggregator", "flare.persistor", "flare.export.job",
    "federation.transports.local", "tasks.segmentation", "tasks.classification", "tasks.bundle", "methods.fed_avg",
)  # fmt: skip
IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module("fairflare." + name)
"""
SITE = """
import json, sys
import torch
import fairflare.flare.executor
from fairflare.tasks.{module} import {task} as Task

task = Task(**json.loads(sys.argv[2]))
data = task.open_site("a", {{"data_root": sys.argv[1]}})
model = task.build_model()
for inputs, targets in data.batches("training", batch_size=2, shuffle_seed=1, augment=True):
    task.loss(model(inputs), targets).backward()
{more}
"""
# MONAI imports some of these where they are installed, and does without them where they are not.
WITHOUT = """
import sys

class Absent:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        absent = any(name == tool or name.startswith(tool + ".") for tool in TOOLS)
        return None if absent else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Absent, sys.meta_path)
"""


def python(program: str, *arguments: str) -> None:
    """Run a program where none of the data tools is installed."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.replace("TOOLS", repr(TOOLS)) + program, *arguments],
        capture_output=True, text=True, timeout=300,
        env={"PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def plain(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def own_images(root: Path, classes: bool, seed: int = 0) -> Path:
    (root / "images").mkdir(parents=True)
    splits: dict[str, list[dict[str, object]]] = {split: [] for split in SPLITS}
    for number, split in enumerate((*SPLITS, *SPLITS)):
        pixels = np.random.default_rng([number, seed]).integers(0, 255, (40, 40), np.uint8)
        Image.fromarray(pixels).save(root / f"images/{number}.png")
        Image.fromarray((pixels > 99).astype(np.uint8)).save(root / f"images/{number}_mask.png")
        label = number % 2 if classes else f"images/{number}_mask.png"
        splits[split].append({"image": f"images/{number}.png", "label": label})
    write_datalist(root / "datalist.json", splits, **({"class_names": ["x", "y"]} if classes else {}))
    return root


@pytest.mark.long
def test_both_sides_need_no_data_tools() -> None:
    python(IMPORTS, *SIDES)


@pytest.mark.long
def test_a_site_with_classes_of_its_own_needs_no_phantom(tmp_path: Path) -> None:
    """Check a job without synthetic data; scikit-learn's scores belong to the evaluation, which is not done."""
    settings = {
        "image_size": [33, 33], "features": [4, 4, 8, 8], "class_names": ["x", "y"], "num_classes": 2,
        "class_groups": {}, "allow_phantom": False,
    }  # fmt: skip
    program = SITE.format(module="classification", task="ClassificationTask", more="")
    python(program, str(own_images(tmp_path / "a", classes=True)), json.dumps(settings))


RUN = """
import json, sys
from pathlib import Path
from fairflare.federation.transports.local import run_local
from fairflare.federation.plan.plan import make_plan

sites = {"site-1": {"data_root": sys.argv[1]}, "site-2": {"data_root": sys.argv[2]}}
plan = make_plan("fed_avg", task="segmentation", sites=list(sites), num_rounds=1, settings=json.loads(sys.argv[4]))
results = run_local(plan, Path(sys.argv[3]), {"sites": sites}) / "results.json"
assert json.loads(results.read_text())["status"] == "completed"
"""


@pytest.mark.long
def test_a_run_on_own_pictures_needs_none(tmp_path: Path) -> None:
    """Check server and sites up to the results; only the page and the pictures are missing."""
    settings = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "local_epochs": 1}
    folders = [str(own_images(tmp_path / name, classes=False, seed=seed)) for seed, name in enumerate("ab")]
    python(RUN, *folders, str(tmp_path / "run"), json.dumps(settings))


@pytest.mark.long
def test_the_guard_notices_an_import() -> None:
    with pytest.raises(AssertionError, match="ModuleNotFoundError: No module named"):
        python(IMPORTS, "data.preparers")


def test_a_run_in_one_process_plans_without_flare() -> None:
    program = (
        "import sys\n"
        "import fairflare.cli.run.here\n"
        "from fairflare.federation.plan.plan import make_plan\n"
        "from fairflare.federation.plan.run_settings import usual_waits\n"
        "plan = make_plan('fed_lwr', sites=2, num_rounds=1, **usual_waits(phase_timeout=5.0))\n"
        "assert plan.method.name == 'fed_lwr' and plan.run.train_timeout == 5.0 and plan.run.min_sites == 2\n"
        "assert 'nvflare' not in sys.modules, 'FLARE was imported'\n"
    )
    plain(program)


@pytest.mark.long
def test_a_server_beside_its_sites_looks_for_names_in_the_network_elsewhere() -> None:
    """Check that the child process imports MONAI and `peft` (270 MB), and that its refusals are raised unchanged."""
    program = (
        "import sys\n"
        "from fairflare.federation.plan.plan import make_plan\n"
        "def made(**more):\n"
        "    vit = {'network': 'vit_mini', 'image_size': [32, 32], 'patch_size': 8, 'adapters': 'fair_lora', **more}\n"
        "    more = {'exchange': 'trainable', 'settings': vit, 'apart': True}\n"
        "    return make_plan('fed_avg', task='classification', sites=2, **more)\n"
        "if __name__ == '__main__':\n"
        "    made()\n"
        "    try:\n"
        "        made(**{'adapters.targets': 'lstm'})\n"
        "    except ValueError as error:\n"
        "        assert \"adapters.targets='lstm' is found in no name of the network's linear\" in str(error), error\n"
        "    else:\n"
        "        raise AssertionError('not refused')\n"
        "    assert not {'monai', 'peft', 'transformers'} & set(sys.modules)\n"
    )
    plain(program)


def test_work_of_a_child_is_done_in_another_process() -> None:
    assert run_in_child(os.getpid) != os.getpid()
    with pytest.raises(ValueError, match=r"^ZeroDivisionError: "):
        run_in_child(divmod, 1, 0)
    with pytest.raises(ValueError, match=r"ended before .*memory enough"):
        run_in_child(os._exit, 3)


@pytest.mark.long
def test_a_server_begins_without_what_only_the_results_need() -> None:
    """Check modules each of which would cost every server megabytes for the whole run."""
    heavy = ("scipy", "jinja2", "pandas", "matplotlib", "sklearn", "monai", "rich", "PIL", "fairflare_lab.page")
    program = (
        "import sys\nimport fairflare.flare.controller, fairflare.flare.persistor\n"
        f"found = sorted(set({heavy!r}) & set(sys.modules))\nassert not found, found\n"
    )
    plain(program)
