"""Test policies in kits that FLARE made without our builder, each by FLARE's own command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.cli.data import doctor
from fairflare.flare.export.provision import AUTHORIZATION, SitePolicyBuilder, job_classes

PROFILE = {
    "name": "study", "scheme": "grpc", "connection_security": "mtls",
    "server": {"host": "localhost", "fed_learn_port": 18002, "admin_port": 18003},
}  # fmt: skip
RUNTIMES: dict[str, dict[str, Any]] = {
    "docker": {"parent": {"docker_image": "fairflare"}},
    "k8s": {"namespace": "study", "parent": {"docker_image": "fairflare:0.2"}},
    "slurm": {"job_launcher": {"sandbox": "none", "python_path": "/opt/fairflare/bin/python"}},
}

LIST = {"bundle_classes": ["default"]}  # of a sealed bundle's classes


def nvflare(folder: Path, *arguments: str) -> None:
    """Run FLARE's own command as a user types it; ``HOME`` is the folder, where FLARE notes its requests."""
    command = [sys.executable, "-m", "nvflare.cli", *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def fairflare(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, " ".join(result.output.split())


def kit(folder: Path, *, site: bool = True) -> Path:
    """Make a kit as FLARE's packages leave it, with FLARE's own files alone."""
    local, startup = folder / "local", folder / "startup"
    local.mkdir(parents=True)
    startup.mkdir()
    default = {"class_allow_list": ["nvflare.own.Class"], "allow_log_streaming": True, "servers": [{}]}
    (local / "resources.json.default").write_text(json.dumps(default))
    role = {"any": "any"} if site else {}
    (local / "authorization.json.default").write_text(
        json.dumps({"permissions": {"project_admin": "any", "lead": role}})
    )
    if site:
        (startup / "fed_client.json").write_text(json.dumps({"client": {"fqsn": "hospital-a"}}))
    else:
        (startup / "fed_server.json").write_text(json.dumps({"servers": [{"admin_server": "server.example"}]}))
    return folder


def read(kit_: Path, name: str) -> dict[str, Any]:
    return json.loads((kit_ / "local" / name).read_text())


def test_policies_of_a_site(tmp_path):
    made = kit(tmp_path / "kit")
    (made / "local" / "fairflare.json").write_text('{"data_root": "/own", "min_cases": 12}')
    code, said = fairflare("policies", str(made))
    assert (code, said.startswith("hospital-a: ")) == (0, True)
    for name in ("resources.json", "resources.json.default"):
        resources = read(made, name)
        assert resources["class_allow_list"] == ["nvflare.own.Class", *job_classes()]
        assert resources["allow_log_streaming"] is False
    assert read(made, "authorization.json") == AUTHORIZATION
    assert read(made, "fairflare.json") == {"data_root": "/own", "min_cases": 12, **LIST}  # the site's word stays
    before = {path.name: path.read_text() for path in (made / "local").iterdir()}
    assert fairflare("policies", str(made))[0] == 0  # once more changes nothing
    assert {path.name: path.read_text() for path in (made / "local").iterdir()} == before


def test_policies_of_a_project_file(tmp_path):
    site, server = kit(tmp_path / "a"), kit(tmp_path / "s", site=False)
    arguments = {
        "allow_prefixes": ["own.package."],
        "heart_beat_timeout": 60,
        "site_settings": {"hospital-a": {"device": "cpu"}, "server.example": {"checkpoint_root": "/c"}},
    }
    project = tmp_path / "project.yml"
    entry = {"path": "fairflare.provision.SitePolicyBuilder", "args": arguments}
    project.write_text(yaml.safe_dump({"builders": [{"path": "other.Builder"}, entry]}))
    assert fairflare("policies", str(site), str(server), "--project", str(project))[0] == 0
    assert read(site, "fairflare.json") == {"min_cases": 5, "device": "cpu", **LIST}
    assert read(site, "resources.json")["class_allow_list"][-1] == "own.package."
    assert read(server, "fairflare.json") == {"checkpoint_root": "/c"}
    assert read(server, "resources.json")["servers"] == [{"heart_beat_timeout": 60}]
    assert "allow_log_streaming" in read(server, "resources.json")  # FLARE's own, untouched at a server


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda made: (made / "startup" / "fed_client.json").unlink(), "is no start-up kit of a server or site"),
        (
            lambda made: (made / "local" / "authorization.json").write_text('{"permissions": {}}'),
            "authorization.json differs from what the policies would write; remove it",
        ),
    ],
)
def test_what_is_refused(tmp_path, spoil, message):
    made = kit(tmp_path / "kit")
    spoil(made)
    before = sorted((made / "local").iterdir())
    code, said = fairflare("policies", str(made))
    assert code == 2
    assert message in said
    assert sorted((made / "local").iterdir()) == before


def test_a_file_that_is_no_project(tmp_path):
    project = tmp_path / "project.yml"
    project.write_text("builders: []")
    code, said = fairflare("policies", str(kit(tmp_path / "kit")), "--project", str(project))
    assert code == 2
    assert "is no project file with one fairflare.provision.SitePolicyBuilder" in said


def states(made: Path) -> dict[str, str]:
    return {found.what: found.state for found in doctor.start_up_kit(made)}


def test_doctor_names_what_a_kit_of_others_leaves_open(tmp_path):
    made = kit(tmp_path / "kit")
    assert states(made) == {"allow list": "problem", "rights": "warning", "log streaming": "warning"}
    SitePolicyBuilder().lay(made)
    assert states(made) == {"allow list": "ok", "rights": "ok"}
    (made / "startup" / "fed_client.json").write_text('{"client": {"fqsn": "a"}, "require_signed_jobs": false}')
    assert states(made)["signed jobs"] == "warning"
    (made / "local" / "authorization.json").write_text('{"permissions": {"lead": {"byoc": "any"}}}')
    (found,) = (one for one in doctor.start_up_kit(made) if one.what == "rights")
    assert found.text.startswith("lead: byoc (authorization.json)")


def test_doctor_lists_the_volumes_that_a_site_keeps(tmp_path):
    made, own = kit(tmp_path / "kit"), tmp_path / "own"
    assert "decoded volumes" not in states(made)
    for folder, size in ((made / "fairflare_state/decoded/a", 3), (own, 1), (tmp_path / "state/decoded/a", 2)):
        folder.mkdir(parents=True)
        (folder / "1-2.npy").write_bytes(bytes(size * 10**8))

    def listed() -> list[str]:
        return [one.text for one in doctor.start_up_kit(made) if one.what == "decoded volumes"]

    (text,) = listed()
    assert text == (
        f"1 of patients, 0.3 GB, in {made / 'fairflare_state/decoded'}: remove it with the site's data, or volumes "
        "that left the data stay for up to 30 days"
    )
    (made / "local" / "fairflare.json").write_text(
        json.dumps({"state_root": str(tmp_path / "state"), "decoded_folder": str(own)})
    )
    assert [text.partition(":")[0] for text in listed()] == [
        f"1 of patients, 0.1 GB, in {own}",
        f"1 of patients, 0.2 GB, in {tmp_path / 'state/decoded'}",
    ]


@pytest.mark.parametrize(("site", "key"), [(True, "state_root"), (False, "checkpoint_root")])
def test_doctor_names_what_a_container_loses(tmp_path, site, key):
    made = kit(tmp_path / "kit", site=site)
    default = made / "local" / "resources.json.default"
    default.write_text(json.dumps({**json.loads(default.read_text()), "components": [{"id": "k8s_launcher"}]}))
    assert states(made)[key] == "warning"
    (made / "local" / "fairflare.json").write_text(json.dumps({key: "/data/study/kept"}))
    assert key not in states(made)


@pytest.mark.long
def test_a_site_that_brings_its_own_key(tmp_path):
    """Run ``nvflare cert`` and ``nvflare package``, then ours; the key never leaves the site's folder."""
    (tmp_path / "profile.yml").write_text(yaml.safe_dump(PROFILE))
    site = {"name": "study", "participants": [{"name": "hospital-a", "type": "client", "org": "hospital_a"}]}
    (tmp_path / "hospital-a.yml").write_text(yaml.safe_dump(site))
    nvflare(tmp_path, "cert", "init", "--profile", "profile.yml", "-o", "ca")
    nvflare(tmp_path, "cert", "request", "-p", "hospital-a.yml")
    nvflare(tmp_path, "cert", "approve", "-c", "ca", "--profile", "profile.yml", "hospital-a/hospital-a.request.zip")
    authority = json.loads((tmp_path / "ca" / "ca.json").read_text())
    (fingerprint,) = (value for value in authority.values() if str(value).startswith("SHA256:"))
    signed = "hospital-a/hospital-a.signed.zip"
    nvflare(tmp_path, "package", signed, "--fingerprint", fingerprint, "--request-dir", "hospital-a", "-w", "kits")
    made = tmp_path / "kits" / "study" / "prod_00" / "hospital-a"
    assert (made / "startup" / "client.key").read_bytes() == (tmp_path / "hospital-a" / "hospital-a.key").read_bytes()
    before = states(made)
    assert before["rights"] == before["log streaming"] == "warning"
    assert fairflare("policies", str(made))[0] == 0
    assert set(states(made).values()) == {"ok"}
    assert read(made, "fairflare.json") == {"min_cases": 5, **LIST}


@pytest.mark.long
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_policies_stay_in_a_kit_for_another_runtime(tmp_path, runtime):
    """Check that policies are in the defaults too, as ``nvflare deploy prepare`` removes ``resources.json``."""
    project = yaml.safe_load((Path(__file__).parents[2] / "poc" / "project.yml").read_text())
    (tmp_path / "project.yml").write_text(yaml.safe_dump(project))
    nvflare(tmp_path, "provision", "-p", "project.yml", "-w", "kits")
    (tmp_path / "runtime.yaml").write_text(yaml.safe_dump({"runtime": runtime, **RUNTIMES[runtime]}))
    made = tmp_path / "kits" / "fairflare_demo" / "prod_00" / "hospital-a"
    nvflare(tmp_path, "deploy", "prepare", str(made), "--config", "runtime.yaml", "--output", "ready")
    ready = tmp_path / "ready"
    assert not (ready / "local" / "resources.json").exists()
    wanting = {name for name, state in states(ready).items() if state != "ok"}
    assert wanting == (set() if runtime == "slurm" else {"state_root"})  # Slurm's jobs work in the kit itself
    resources = read(ready, "resources.json.default")
    assert resources["allow_log_streaming"] is False
    assert f"{runtime}_launcher" in {component["id"] for component in resources["components"]}
    assert read(ready, "fairflare.json")["min_cases"] == 5
    assert read(ready, "authorization.json") == AUTHORIZATION
