"""Test a run on own images: one folder is one site, a line says how they are read, and patients may be unknown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.cli.data.own_images import (
    choose_image_settings,
    choose_run_settings,
    describe_reading,
    forbid_phantom,
    read_first_images,
)
from fairflare.cli.data.sites import file_in, run_sites
from fairflare.cli.run.folder import site_settings
from fairflare.data.datalist import DataError, load_datalist
from fairflare.data.patients import find_shared_groups, suggest_groups
from fairflare.data.preparers.__main__ import main as prepare
from fairflare.data.preparers.__main__ import say
from fairflare.data.preparers.listed import groups_by_site
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.federation.transports.shared_images import refuse_shared_images
from tests.tiny import run_document


def site(folder: Path, *, colour: bool = True, size: tuple[int, int] = (100, 130), patient: bool = False) -> Path:
    """Make images and masks of six people, two each, and a list whose splits have some of all people."""
    draw = np.random.default_rng([3, *folder.name.encode()])  # no two sites have the same images
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    entries: list[dict[str, Any]] = []
    for number in range(12):
        name = f"p{number // 2:02d}_{number % 2}.png"
        pixels = draw.integers(0, 255, (*size, 3), dtype=np.uint8)
        if not colour:
            pixels[:] = pixels[:, :, :1]  # grey in three channels
        Image.fromarray(pixels).save(folder / "images" / name)
        band = np.tri(*size, k=3 * number + 4) - np.tri(*size, k=3 * number - 4)  # with an inside: lines are noted
        Image.fromarray(band.astype(np.uint8)).save(folder / "masks" / name)
        entries.append({"image": f"images/{name}", "label": f"masks/{name}"})
    whose = [{**e, "patient": f"x{n}"} for n, e in enumerate(entries)] if patient else entries
    lists = {"training": whose[:8:2] + whose[1:6:2], "validation": whose[7:9], "test": whose[9:]}
    (folder / "datalist.json").write_text(json.dumps(lists))
    return folder


def fairflare(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "500"})
    return " ".join(result.output.split()) + f" [{result.exit_code}]"


# ------------------------------------------------------------------------------------------------ one folder


def test_the_folder_that_prepare_writes_may_be_given(tmp_path: Path) -> None:
    settings = {"sites": {name: {"data_root": str(site(tmp_path / name))} for name in "ab"}}
    (tmp_path / "fairflare.json").write_text(json.dumps(settings))
    assert site_settings(tmp_path, "", Path()) == settings
    with pytest.raises(ValueError, match=r"a/fairflare.json does not exist"):
        site_settings(tmp_path / "a", "", Path())


def test_class_numbers_given_to_a_segmentation_say_what_to_do(tmp_path: Path) -> None:
    folder = site(tmp_path / "a")
    entry = {"image": "images/p00_0.png", "label": 1}
    (folder / "datalist.json").write_text(json.dumps({split: [entry] for split in ("training", "validation", "test")}))
    with pytest.raises(DataError, match="a job with task=classification") as caught:
        load_datalist(str(folder), "datalist.json", site="a")
    assert caught.value.public.endswith("numbers of classes are for a job with task=classification")


def test_the_file_of_one_site_is_one_site_or_a_refusal() -> None:
    for chosen in ("default", 0, 3, ["a", "b"]):
        with pytest.raises(ValueError, match="it is the file of one site"):
            run_sites(chosen, {"data_root": "x"})  # type: ignore[arg-type]
    assert run_sites(1, {"data_root": "x"}) == 1
    assert run_sites(["a"], {"data_root": "x"}) == ["a"]
    lists = {"data_root": "x", "sites": {"a": {"datalist": "a.json"}, "b": {"datalist": "b.json"}}}
    assert run_sites("default", lists) == ["a", "b"]


def test_names_of_their_own_are_those_of_the_run_also_for_phantoms() -> None:
    assert run_sites("default", {"sites": {"site-2": {"min_cases": 5}}}) == 0
    local = {"sites": {"server": {}, "north": {"phantom": True, "min_cases": 5}, "site-2": {"phantom": True}}}
    assert run_sites("default", local) == ["north", "site-2"]
    assert run_sites(["north", "site-2", "south"], local) == ["north", "site-2", "south"]
    with pytest.raises(ValueError, match="the file's 'north' is not in --sites"):
        run_sites(2, local)


def test_some_of_the_files_sites_where_a_command_takes_them() -> None:
    local = {"sites": {"beta": {"data_root": "b"}, "delta": {"data_root": "d"}}}
    assert run_sites(["beta"], local, some=True) == ["beta"]
    with pytest.raises(ValueError, match="the file's 'delta' is not in --sites"):
        run_sites(["beta"], local)
    # A name that is given already is not meant.
    with pytest.raises(ValueError, match=r"sites: 'bet' is not in the file\. Leave"):
        run_sites(["beta", "bet"], local, some=True)


@pytest.mark.parametrize("command", [["run", "fed_avg", "--in-process"], ["compare", "fed_avg", "fed_lwr"]])
def test_one_hospital_is_not_several(command: list[str], tmp_path: Path) -> None:
    root = str(site(tmp_path / "A"))
    alone, twice = tmp_path / "alone.json", tmp_path / "twice.json"
    alone.write_text(json.dumps({"data_root": root}))
    twice.write_text(json.dumps({"sites": {"A": {"data_root": root}, "B": {"data_root": f"{root}/../A"}}}))
    where = ["--workspace" if command[0] == "run" else "--out", tmp_path / "out"]
    assert "it is the file of one site. Give every site's folder" in fairflare(*command, "--data", alone, *where)
    told = fairflare(*command, "--data", twice, *where)
    assert "sites 'A' and 'B' have" in told
    assert told.endswith("[2]")
    assert not (tmp_path / "out").exists()


def test_made_up_images_of_a_paper_are_no_matter_where_sites_have_their_own(tmp_path: Path) -> None:
    """Check a paper with four corrupted synthetic sites, where two sites have images of their own."""
    local = {"sites": {name: {"data_root": str(tmp_path / name)} for name in "ab"}}

    def make(more: dict[str, Any]) -> Any:
        return make_plan("fed_ism", sites=["a", "b"], small=False, settings=more)

    with pytest.raises(ValueError, match="corrupted_sites of phantom_sites=2"):
        make({})
    assert forbid_phantom(make, local) == {"allow_phantom": False}
    assert make({"allow_phantom": False}).sites == ["a", "b"]
    assert forbid_phantom(make, {"sites": {"a": {}, "b": {"data_root": "x"}}}) == {}, "one site would be made up"
    assert forbid_phantom(make, {}) == {}
    assert forbid_phantom(lambda more: make({"batch_size": 0, **more}), local) == {}, "it is told by the plan itself"
    assert forbid_phantom(lambda more: make({"corrupted_sites": 1, **more}), local) == {}, "nothing is wrong"


def test_the_run_itself_refuses_shared_images(tmp_path: Path) -> None:
    root = str(site(tmp_path / "A"))
    plan = make_plan("fed_avg", sites=["A", "B"], num_rounds=1)
    with pytest.raises(ValueError, match=r"'A' and 'B' have 9 image\(s\) in common"):
        run_local(plan, tmp_path / "run", {"data_root": root})


def test_a_copied_folder_is_refused_and_pictures_of_one_value_are_not(tmp_path: Path) -> None:
    """Check one hospital's data under two names, in two folders."""
    site(tmp_path / "A")
    shutil.copytree(tmp_path / "A", tmp_path / "B")
    local = {"sites": {name: {"data_root": str(tmp_path / name)} for name in "AB"}}
    with pytest.raises(ValueError, match=r"sites 'A' and 'B' have \d+ image"):
        refuse_shared_images(["A", "B"], local)
    listed = json.loads((tmp_path / "A" / "datalist.json").read_text())
    for image in {entry["image"] for split in ("training", "validation", "test") for entry in listed[split]}:
        for name in "AB":
            Image.fromarray(np.zeros((40, 40), np.uint8)).save(tmp_path / name / image)
    refuse_shared_images(["A", "B"], local)


def test_a_common_test_set_and_own_lists_are_meant(tmp_path: Path) -> None:
    root = site(tmp_path / "A")
    lists = json.loads((root / "datalist.json").read_text())
    halves = [
        {**lists, "training": lists["training"][:3], "validation": lists["validation"][:1]},
        {**lists, "training": lists["training"][3:], "validation": lists["validation"][1:]},
    ]
    for name, own in zip("ab", halves, strict=True):
        (root / f"{name}.json").write_text(json.dumps(own))
    local = {"data_root": str(root), "sites": {name: {"datalist": f"{name}.json"} for name in "ab"}}
    refuse_shared_images(["a", "b"], local)
    halves[1]["training"] = lists["training"][2:]  # one image in both
    (root / "b.json").write_text(json.dumps(halves[1]))
    with pytest.raises(ValueError, match="sites 'a' and 'b' have 1 image"):
        refuse_shared_images(["a", "b"], local)
    halves[1]["training"], halves[1]["test"] = lists["training"][3:], [lists["training"][0]]
    (root / "b.json").write_text(json.dumps(halves[1]))
    with pytest.raises(ValueError, match="1 image"):  # one's training is the other's test
        refuse_shared_images(["a", "b"], local)


# ------------------------------------------------------------------------------------------------ how they are read


@pytest.mark.parametrize(
    ("colour", "size", "read", "words"),
    [
        (True, (480, 640), {"image_size": [96, 96], "in_channels": 3}, "640x480 RGB images are read as 96x96 RGB"),
        (False, (70, 90), {"image_size": [64, 64], "in_channels": 1}, "90x70 grey images are read as 64x64 grey"),
        (False, (20, 30), {"image_size": [32, 32], "in_channels": 1}, "30x20 grey images are read as 32x32 grey"),
    ],
)
def test_channels_and_size_come_from_the_images(
    colour: bool, size: tuple[int, int], read: dict[str, Any], words: str, tmp_path: Path
) -> None:
    local = {"sites": {"A": {"data_root": str(site(tmp_path / "A", colour=colour, size=size))}}}
    plan = make_plan("fed_avg", sites=["A"], min_sites=1)
    images = read_first_images(plan, local)
    assert choose_image_settings(plan, images) == read
    adapted = make_plan("fed_avg", sites=["A"], min_sites=1, settings=read)
    told = describe_reading(adapted, images, trial=True)
    assert told.startswith(f"{words}; 3 rounds: a trial; --paper")
    assert describe_reading(adapted, images, trial=False) == f"{words}; 3 rounds"
    assert read_first_images(plan, {}) == []


def test_networks_that_need_larger_images(tmp_path: Path) -> None:
    dense = make_plan(
        "fed_avg", task="classification", sites=2, settings={"network": "densenet121", "image_size": [64, 64]}
    )
    image = np.zeros((20, 20, 1), np.float32)
    assert choose_image_settings(dense, [image])["image_size"] == [64, 64]
    given = make_plan("fed_avg", sites=2, settings={"initial_weights": "x.pt"})
    assert choose_image_settings(given, [image]) == {"image_size": [32, 32]}  # a checkpoint has its own channels


def test_a_run_says_it_and_what_is_given_stays(tmp_path: Path) -> None:
    local = tmp_path / "data.json"
    local.write_text(json.dumps({"sites": {name: {"data_root": str(site(tmp_path / name))} for name in "AB"}}))
    common = ["run", "fed_avg", "--in-process", "--data", local, "--rounds", 1, "--set", "features=[4,4,4,4,4,4]"]
    told = fairflare(*common, "--workspace", tmp_path / "w", "--set", "image_size=[32,32]")
    assert "130x100 RGB images are read as 32x32 RGB; 1 round check:" in told
    info = run_document(tmp_path / "w/server/simulate_job/fairflare/results.json")["info"]
    assert info["config"]["task"]["args"]["image_size"] == [32, 32]
    assert info["config"]["task"]["args"]["in_channels"] == 3


# ------------------------------------------------------------------------------------------------ patients


def test_names_that_look_like_patients() -> None:
    expression, groups = suggest_groups([f"s/p{n:02d}_{k}.png" for n in range(4) for k in range(2)]) or ("", {})
    assert groups["s/p03_1.png"] == "p03"
    assert groups_by_site(expression, ["A"]) == {"A": expression}  # a valid --group
    eyes = suggest_groups([f"{n}_{eye}.jpeg" for n in range(5) for eye in ("left", "right")])
    assert eyes is not None
    assert eyes[1]["3_right.jpeg"] == "3"
    folders = suggest_groups([f"x/{who}/{k}.png" for who in ("ann", "bob", "eve") for k in "ab"])
    assert folders is not None
    assert folders[1]["x/eve/b.png"] == "eve"
    assert suggest_groups([f"image_{n}.png" for n in range(30)]) is None  # one group is none
    assert suggest_groups([f"{n:03d}.png" for n in range(30)]) is None
    assert suggest_groups([f"a{n}_0.png" for n in range(30)]) is None  # one image each
    assert suggest_groups([f"{kind}_{n}.png" for kind in ("cat", "dog") for n in range(30)]) is None


def test_groups_on_both_sides() -> None:
    lists = {"training": ["p1_0", "p1_1", "p2_0", "p3_0", "p3_1"], "test": ["p2_1", "p4_0", "p4_1"]}
    found = find_shared_groups(lists)
    assert found is not None
    assert found[1:] == (["p2"], 4)
    assert find_shared_groups({"training": ["p1_0", "p1_1", "p2_0", "p2_1"], "test": ["p3_0", "p3_1"]}) is None


def test_check_data_tells_of_likely_patients_in_training_and_test(tmp_path: Path) -> None:
    told = fairflare("check-data", site(tmp_path / "A"))
    assert "no 'patient' is named, and by the names of files images of 2 of 6 groups (p03, p04)" in told
    assert "2 note(s) [0]" in told
    assert "no 'patient'" not in fairflare("check-data", site(tmp_path / "B", patient=True))


def test_the_site_file_lies_in_a_folder_or_beside_its_manifest(tmp_path: Path) -> None:
    wanted = tmp_path / "fairflare.json"
    assert [file_in(path) for path in (tmp_path, tmp_path / "manifest.json", wanted)] == [wanted] * 3
    assert file_in(tmp_path / "other.json") == tmp_path / "other.json"


def prepared(tmp_path: Path, capsys: Any, *more: str) -> str:
    sources: list[str] = []
    for name in "AB":
        sources += ["--site", name, str(tmp_path / name / "images"), str(tmp_path / name / "masks")]
    code = prepare(["folders", *sources, "--out", str(tmp_path / "out"), "--overwrite", *more])
    assert code == 0
    return str(capsys.readouterr().out)


def test_prepare_says_that_patients_are_unknown_and_takes_a_group_of_each_site(tmp_path: Path, capsys: Any) -> None:
    for name in "AB":
        site(tmp_path / name)
    told = prepared(tmp_path, capsys)
    assert "NOTE: no patients are known at A, B: split by image: every file counts as a patient of its own" in told
    assert "--group finds patients in names of files" in told
    say(tmp_path / "out")  # as a command without --group does
    assert "in test.\n" in (plain := str(capsys.readouterr().out))
    assert "--group" not in plain
    again = prepared(tmp_path, capsys, "--group", "A=([^/]+)[-_ ]\\d+[^/]*$", "--group", r"B=^p(\d+)")
    assert "NOTE" not in again
    for name, first in (("A", "p00"), ("B", "00")):
        lists = json.loads((tmp_path / "out" / name / "datalist.json").read_text())
        where = {e["patient"]: set() for own in lists.values() if isinstance(own, list) for e in own}
        assert first in where
        for split in ("training", "validation", "test"):
            for entry in lists[split]:
                where[entry["patient"]].add(split)
        assert all(len(splits) == 1 for splits in where.values())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["(a)", "(b)"], "two expressions without a site"),
        (["A=(a)", "A=(b)"], "two expressions of site 'A'"),
        (["A=a"], "that is the patient, got 'a'"),
        ({"C": "(a)"}, "there is no site 'C'"),
        (["("], "must be a regular expression"),
    ],
)
def test_groups_that_cannot_be_meant(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        groups_by_site(given, ["A", "B"])


def test_groups_of_some_sites_and_of_all_others() -> None:
    assert groups_by_site(["A=(x)", "(y)"], "ABC") == {"A": "(x)", "B": "(y)", "C": "(y)"}
    assert groups_by_site("id=(x)", ["A"]) == {"A": "id=(x)"}
    assert groups_by_site(None, ["A"]) == {"A": None}


# ------------------------------------------------------------------------------------------------ a mistake in a file


def test_a_mistake_in_the_data_file_is_named_with_key_and_file(tmp_path: Path) -> None:
    settings = {"sites": {name: {"data_root": str(site(tmp_path / name))} for name in "ab"}}
    file = tmp_path / "fairflare.json"
    file.write_text(json.dumps({**settings, "data_rot": "x", "min_cases": 2}))
    command = ["run", "fed_avg", "--in-process", "--workspace", tmp_path / "w", "--data"]
    told = fairflare(*command, file)
    assert f"--data {file}: unknown key 'data_rot' in the site's fairflare.json; did you mean 'data_root' or " in told
    assert "(of a, b)" in told
    assert told.count("data_rot'") == 1
    assert told.endswith("[2]")
    told = fairflare(*command, tmp_path / "a/datalist.json")
    assert f"{tmp_path / 'a/datalist.json'} is a datalist, the list of one site; give the fairflare.json" in told
    assert told.endswith("[2]")


def test_a_block_of_a_site_that_the_run_lacks_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Look at settings of sites with phantoms, whose number is known only with the plan."""
    file = tmp_path / "fairflare.json"
    file.write_text(json.dumps({"sites": {"server": {}, "site-1": {}, "site-9": {"phantom_cases": 2.0}}}))
    plan = make_plan("fed_avg", sites=8)
    local = json.loads(file.read_text())
    same: Any = {"quick": False, "trial": False}
    assert choose_run_settings(plan, local, file, {}, **same) == {}
    told = "".join(capsys.readouterr().err.split())
    assert f"NOTE:nothingreadstheblockofsite-9in{file}:therunhasthesitessite-1,site-2,site-3," in told
    assert choose_run_settings(plan, local, file, {}, some=True, **same) == {}  # evaluate tests some of the sites
    assert choose_run_settings(make_plan("fed_avg", sites=9), local, file, {}, **same) == {}
    assert "NOTE" not in capsys.readouterr().err


def test_sites_that_are_out_for_one_reason_are_one_line() -> None:
    import io

    from rich.console import Console

    from fairflare.cli.run.view import RunView
    from fairflare.federation.site.replies import reasons

    out = io.StringIO()
    told = {"current_round": 0, "num_rounds": 2, "phase": "check", "seconds": 1.5, "ok": False}
    with RunView(Console(file=out, width=200)) as view:
        for name, why in (("a", "no list {x}"), ("b", "no list {x}"), ("c", "no image")):
            view.event("site", {**told, "site": name, "reason": f"site {name!r}: {why}"})
    assert out.getvalue().splitlines() == ["check: a, b left out: no list {x}", "check: c left out: no image"]
    left = [("b", "site 'b': x"), ("a", "site 'a': x"), ("c", "y"), ("d", "site 'd' has z")]
    assert reasons(left) == "sites 'a', 'b': x; c: y; site 'd' has z"
