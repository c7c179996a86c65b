"""Test kits that ``nvflare provision`` makes with our builder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from nvflare.lighter.prov_utils import prepare_builders, prepare_packager
from nvflare.lighter.provision import prepare_project
from nvflare.lighter.provisioner import Provisioner

from fairflare import provision as import_path
from fairflare.flare.export.provision import AUTHORIZATION, SitePolicyBuilder, job_classes

ROOT = Path(__file__).parents[2]

LIST = {"bundle_classes": ["default"]}  # of a sealed bundle's classes


def provision(tmp_path: Path, **changes: Any) -> Path:
    """Return the kits of the walk-through's project with other arguments of the builder."""
    project = yaml.safe_load((ROOT / "poc" / "project.yml").read_text())
    (builder,) = (b for b in project["builders"] if b["path"] == "fairflare.provision.SitePolicyBuilder")
    builder["args"].update(changes)
    provisioner = Provisioner(str(tmp_path), prepare_builders(project), prepare_packager(project))
    # FLARE reports an exception of a builder here, and removes the half-made kits.
    errors = provisioner.provision(prepare_project(project)).get_errors()
    if errors:
        raise RuntimeError("; ".join(errors))
    return tmp_path / "fairflare_demo" / "prod_00"


def local(kits: Path, name: str, file: str) -> dict[str, Any]:
    return json.loads((kits / name / "local" / file).read_text())


def test_kits_of_the_walk_through(tmp_path):
    kits = provision(
        tmp_path,
        site_settings={
            "*": {"isolate": True, "device": "cpu"},
            "hospital-a": {"device": "cuda:1", "data_root": "/own/cases", "min_cases": 10},
            "localhost": {"checkpoint_root": "/checkpoints"},
        },
    )
    for name in ("localhost", "hospital-a", "hospital-b", "hospital-c"):
        resources = local(kits, name, "resources.json")
        # FLARE's own list stays as it is, or its stock components would be refused.
        listed = resources["class_allow_list"]
        assert listed[-len(job_classes()) :] == job_classes()
        assert "nvflare.app_common.np.np_trainer.NPTrainer" in listed
        # `nvflare deploy prepare` goes by the default.
        assert local(kits, name, "resources.json.default") == resources
        policy = local(kits, name, "authorization.json")
        assert policy == AUTHORIZATION
        assert {role.get("byoc", "none") for role in policy["permissions"].values()} == {"none"}
        if name != "localhost":
            assert resources["allow_log_streaming"] is False
            assert local(kits, name, "privacy.json")["default_scope"] == "research"
    assert local(kits, "hospital-a", "fairflare.json") == {
        "isolate": True,
        "device": "cuda:1",
        "data_root": "/own/cases",
        "min_cases": 10,
        **LIST,
    }
    assert local(kits, "hospital-b", "fairflare.json") == {"isolate": True, "device": "cpu", "min_cases": 5, **LIST}
    assert local(kits, "localhost", "fairflare.json") == {"checkpoint_root": "/checkpoints"}
    server = local(kits, "localhost", "resources.json")
    assert repr([entry["heart_beat_timeout"] for entry in server["servers"]]) == "[60]"  # no 60.0
    assert "/tmp/nvflare" not in json.dumps(server)
    # No path of one hospital is in another hospital's kit or in the server's.
    for name in ("localhost", "hospital-b", "hospital-c"):
        assert not any("/own/cases" in f.read_text() for f in (kits / name / "local").iterdir())


def test_a_certificate_is_renewed_as_the_security_page_says(tmp_path):
    """Check that provisioning again keeps every certificate, unless the state lacks the site's entry."""

    def certificate(kits: Path, name: str) -> x509.Certificate:
        file = "rootCA.pem" if name == "authority" else "client.crt"
        site = "hospital-b" if name == "authority" else name
        return x509.load_pem_x509_certificate((kits / site / "startup" / file).read_bytes())

    first = provision(tmp_path)
    provision(tmp_path)
    state = tmp_path / "fairflare_demo" / "state" / "cert.json"
    entries = json.loads(state.read_text())
    del entries["hospital-a"]
    state.write_text(json.dumps(entries))
    provision(tmp_path)
    again, renewed = (first.with_name(f"prod_0{number}") for number in (1, 2))
    for name in ("hospital-a", "hospital-b", "authority"):
        assert certificate(again, name) == certificate(first, name)
    assert certificate(renewed, "hospital-a").serial_number != certificate(first, "hospital-a").serial_number
    assert certificate(renewed, "hospital-b") == certificate(first, "hospital-b")
    certificate(renewed, "hospital-a").verify_directly_issued_by(certificate(first, "authority"))


def test_existing_project_files_find_the_builder():
    assert import_path.SitePolicyBuilder is SitePolicyBuilder
    assert import_path.AUTHORIZATION is AUTHORIZATION


def test_what_is_not_asked_for_is_not_written(tmp_path):
    kits = provision(
        tmp_path, privacy=None, site_settings=None, heart_beat_timeout=None, storage_root=None, log_streaming=True
    )
    assert not (kits / "hospital-a" / "local" / "privacy.json").exists()
    assert local(kits, "hospital-a", "fairflare.json") == {"min_cases": 5, **LIST}  # the privacy floor
    assert local(kits, "hospital-a", "resources.json")["allow_log_streaming"] is True
    server = local(kits, "localhost", "resources.json")
    assert [entry["heart_beat_timeout"] for entry in server["servers"]] == [600]
    (manager,) = (c for c in server["components"] if c["id"] == "job_manager")
    assert manager["args"]["uri_root"].startswith("/tmp/nvflare")


def test_settings_for_an_unknown_site(tmp_path):
    with pytest.raises(RuntimeError, match=r"'hospital-x', .*; it has hospital-a,"):
        provision(tmp_path, site_settings={"hospital-x": {}})
    assert not (tmp_path / "fairflare_demo" / "prod_00").exists()


def test_too_early_in_the_project_file(tmp_path):
    project = yaml.safe_load((ROOT / "poc" / "project.yml").read_text())
    builders = [project["builders"][0], *(b for b in project["builders"] if "fairflare" in b["path"])]
    provisioner = Provisioner(str(tmp_path), prepare_builders({**project, "builders": builders}), None)
    (error,) = provisioner.provision(prepare_project(project)).get_errors()
    assert "list this builder after StaticFileBuilder" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"allow_prefixes": "fairflare."}, "^allow_prefixes.* got 'fairflare.'$"),
        ({"allow_prefixes": ["fairflare"]}, r"allow_prefixes must .*got \['fairflare'\]"),
        ({"authorization": {"byoc": "none"}}, "authorization must hold .*'permissions'"),
        ({"privacy": {"default_scope": "x"}}, "privacy must hold a list 'scopes'"),
        ({"site_settings": {"hospital-a": "/data"}}, "'hospital-a' must be .*got '/data'"),
        ({"heart_beat_timeout": 0}, "heart_beat_timeout must be a number > 0"),
        ({"log_streaming": "no"}, "^log_streaming.* got 'no'$"),
        ({"storage": "/x"}, "has no setting 'storage'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        SitePolicyBuilder(**arguments)
