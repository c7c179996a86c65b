"""Run the tests of fairflare where fairflare_lab cannot be imported: python -m tests.core_only [pytest's arguments]

The tests run in an environment of their own in a temporary folder. It has our package ``fairflare`` alone; all others
are those of the environment that runs this. Synthetic images come from ``core_images.py``. A file of tests that names
fairflare_lab is the lab's and is left out, and a test that turns out to need the lab is skipped, and counted.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
ROOMS = ("unit", "federation", "methods", "flare")
#: Files and tests that do not name fairflare_lab and are about it: its commands, its page, or its images by number.
OF_THE_LAB = """
methods/test_fair_groups.py methods/test_fair_lora.py federation/test_hidden_records.py
unit/test_cli.py::test_other_mistakes_are_one_line
unit/test_cli.py::test_show_finds_the_results unit/test_cli.py::test_a_report_of_two_runs_is_what_show_prints
unit/test_cli.py::test_prepare_hands_on_to_the_preparers
unit/test_cli.py::test_answers_without_tensors_import_none_of_the_large_packages
unit/test_as_json.py::test_mistakes_print_no_document unit/test_own_images.py::test_one_hospital_is_not_several
unit/test_own_images.py::test_made_up_images_of_a_paper_are_no_matter_where_sites_have_their_own
unit/test_site_statistics.py::test_the_command_writes_page_and_document
flare/test_statistics.py::test_who_is_left_out_is_on_the_page
federation/test_plan.py::test_every_site_has_its_share_and_a_test_of_its_own
federation/test_local.py::test_fed_avg federation/test_no_flare.py::test_a_run_without_flare
methods/test_training.py methods/test_crt.py::test_it_begins_from_the_seed_and_rows_of_absent_classes_stay
federation/test_evaluate.py::test_runs_of_one_seed_still_say_nothing_of_noise
methods/test_fed_mas.py::test_class_absent_and_class_of_one
methods/test_odd_networks.py::test_averages_of_parametrized_weights
methods/test_odd_networks.py::test_every_layer_has_a_score
federation/test_python_door.py::test_a_picture_of_the_sites
federation/test_python_door.py::test_a_comparison_holds_the_tables_of_the_terminal
"""
SOURCES = """
[fairflare.sources]
classes = core_images
prostate = core_images
"""


def main(arguments: list[str]) -> int:
    """Return the exit status of the tests."""
    with TemporaryDirectory(prefix="fairflare-core-") as folder:
        place = Path(folder)
        python = environment(place)
        lab = [
            path for path in (ROOT / "tests").rglob("test_*.py") if "fairflare_lab" in path.read_text(encoding="utf-8")
        ]
        left_out = [f"--ignore={path}" for path in lab] + [f"--deselect=tests/{test}" for test in OF_THE_LAB.split()]
        left_out += [f"--ignore=tests/{test}" for test in OF_THE_LAB.split() if "::" not in test]
        told = "import fairflare\ntry:\n    import fairflare_lab\nexcept ImportError:\n    print(fairflare.__file__)"
        where = subprocess.run([python, "-c", told], check=True, capture_output=True, text=True).stdout.strip()
        if not where.startswith(folder):
            raise SystemExit(f"the tests would not run without fairflare_lab: fairflare is {where or 'beside it'}")
        print(f"without fairflare_lab, {len(lab)} files of its tests left out")
        rooms = [] if any(word.startswith("tests/") for word in arguments) else [f"tests/{room}" for room in ROOMS]
        command = [python, "-m", "pytest", *left_out, *arguments, *rooms]
        return subprocess.run(command, cwd=ROOT).returncode


def environment(place: Path) -> Path:
    """Make an environment that has fairflare without the lab; return its Python."""
    code = place / "code"
    shutil.copytree(ROOT / "custom" / "fairflare", code / "fairflare", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "tests" / "core_images.py", code)
    venv.create(place / "env", symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place / "env")}))
    (packages / "a_ours.pth").write_text(f"{code}\n")
    (packages / "b_others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    ours = distribution("fairflare")
    info = packages / f"fairflare-{ours.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(ours.read_text("METADATA") or "")
    groups = re.split(r"\n(?=\[)", ours.read_text("entry_points.txt") or "")
    kept = [group for group in groups if "fairflare_lab" not in group]
    (info / "entry_points.txt").write_text("\n".join([*kept, SOURCES]))
    command = place / "env" / "bin" / "fairflare"
    command.write_text(f"#!{place}/env/bin/python\nfrom fairflare.cli import main\n\nmain()\n")
    command.chmod(0o755)
    return place / "env" / "bin" / "python"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
