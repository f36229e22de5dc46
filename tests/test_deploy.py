"""The deployment files are what the programs that read them expect, and what they start exists. `tests/compose` runs the compose file."""

from __future__ import annotations

import configparser
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from taskdb.config import ADDRESS_DEFAULT
from tests.support.commands import problems

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
#: The oldest release with sidecars that start before the others, and end after them.
KUBERNETES = "1.29"
#: The operator's resource leaves out what this release does not know (the oldest there is a schema of).
OPERATOR_KUBERNETES = "1.25"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def words(command: str | list[str]) -> list[str]:
    return shlex.split(command) if isinstance(command, str) else command


def option(command: str | list[str], name: str) -> str:
    said = words(command)
    return said[said.index(name) + 1]


# ------------------------------------------------------------------------------------------------------------ containers


def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_compose_file() -> None:
    services = compose()["services"]
    assert set(services) == {"taskdb", "scheduler", "worker-1", "worker-2"}
    for name, service in services.items():
        assert problems(words(service["command"])) == [], name
        assert service["restart"] == "unless-stopped"
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        assert service["healthcheck"]["test"][0] == "CMD"
        assert problems(service["healthcheck"]["test"][1:]) == []
    named = {volume.split(":")[0] for service in services.values() for volume in service["volumes"] if ":" in volume}
    assert named == set(compose()["volumes"])


def test_services_of_the_compose_file_reach_each_other() -> None:
    services = compose()["services"]
    url = option(services["scheduler"]["command"], "--taskdb-url")
    assert url == option(services["taskdb"]["command"], "--listen") == services["taskdb"]["environment"]["TASKDB_URL"]
    folder = str(Path(url.removeprefix("unix:")).parent)
    (shared,) = set(services["taskdb"]["volumes"]) & set(services["scheduler"]["volumes"])
    assert shared.endswith(f":{folder}")
    assert "tcp://scheduler:8786" in words(services["worker-1"]["command"])
    assert "scheduler_adapter.worker" in words(services["worker-1"]["command"])
    assert "ports" not in services["taskdb"]


def test_the_image_has_what_the_commands_need() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    for service in compose()["services"].values():
        for volume in service["volumes"]:
            assert volume.split(":")[-1] in dockerfile, "a volume takes over the owner of the image's folder"
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    for line in re.findall(r"^COPY (?!--from|\$)(.*)$", dockerfile, re.MULTILINE):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists()
            assert f"!{name.split('/')[0]}" in ignored


# ------------------------------------------------------------------------------------------------------------ Kubernetes


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "k8s" / name).read_text()))


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Specs of all pods, by what they are in."""
    for name in ("scheduler.yaml", "workers.yaml"):
        for manifest in manifests(name):
            if "template" in manifest["spec"]:
                yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]
    for part in ("scheduler", "worker"):
        yield f"DaskCluster {part}", manifests("daskcluster.yaml")[1]["spec"][part]["spec"]


def containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {container["name"]: container for container in (*pod.get("initContainers", []), *pod["containers"])}


@pytest.mark.parametrize("name", ["scheduler.yaml", "workers.yaml"])
def test_manifests_follow_their_schemas(name: str) -> None:
    for manifest in manifests(name):
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def as_pod(spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}


def test_the_operators_manifest_follows_its_schema() -> None:
    claim, cluster = manifests("daskcluster.yaml")
    kubernetes_validate.validate(claim, OPERATOR_KUBERNETES, strict=True)
    jsonschema.validate(cluster, yaml.safe_load((ROOT / "tests/support/daskcluster.yaml").read_text()))
    spec = cluster["spec"]
    for part in ("scheduler", "worker"):
        kubernetes_validate.validate(as_pod(spec[part]["spec"]), OPERATOR_KUBERNETES, strict=True)
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "service"}, "spec": spec["scheduler"]["service"]}
    kubernetes_validate.validate(service, OPERATOR_KUBERNETES, strict=True)
    assert service["spec"]["selector"]["dask.org/cluster-name"] == cluster["metadata"]["name"]
    (volume,) = (volume for volume in spec["scheduler"]["spec"]["volumes"] if volume["name"] == "data")
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_a_schema_refuses_what_it_does_not_know() -> None:
    """Else the checks above would say nothing; and the operator's resource would lose this without a word."""
    sidecar = dict(pods())["dask-scheduler"]
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolicy"):
        kubernetes_validate.validate(as_pod(sidecar), OPERATOR_KUBERNETES, strict=True)


@pytest.mark.parametrize(("name", "pod"), list(pods()), ids=[name.replace(" ", "-") for name, _ in pods()])
def test_pods_start_what_exists_and_mount_what_is_there(name: str, pod: dict[str, Any]) -> None:
    volumes = {volume["name"] for volume in pod["volumes"]} | ({"data"} if name == "dask-scheduler" else set())
    for container in containers(pod).values():
        assert problems(container["args"]) == []
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        ports = {port["name"] for port in container.get("ports", [])}
        for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
            if probe in container:
                asked = container[probe]
                assert problems(asked["exec"]["command"]) == [] if "exec" in asked else asked["httpGet"]["port"] in ports


@pytest.mark.parametrize("name", ["dask-scheduler", "DaskCluster scheduler"])
def test_scheduler_and_sidecar_share_a_socket(name: str) -> None:
    by_name = containers(dict(pods())[name])
    daemon, scheduler = by_name["taskdb"], by_name["scheduler"]
    url = option(daemon["args"], "--listen")
    assert url == option(scheduler["args"], "--taskdb-url") == daemon["env"][0]["value"]
    folder = str(Path(url.removeprefix("unix:")).parent)
    (there,) = (mount for mount in daemon["volumeMounts"] if mount["mountPath"] == folder)
    assert there in scheduler["volumeMounts"]


def test_one_scheduler_owns_the_store() -> None:
    service, workload = manifests("scheduler.yaml")
    assert workload["spec"]["replicas"] == 1
    (workers,) = manifests("workers.yaml")
    (worker,) = workers["spec"]["template"]["spec"]["containers"]
    assert f"tcp://{service['metadata']['name']}:8786" in worker["args"]


# --------------------------------------------------------------------------------------------------------------- systemd


def read(unit: Path) -> configparser.ConfigParser:
    # Some settings may stand twice.
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    return parser


def test_units_start_what_exists() -> None:
    commands = {unit.stem: shlex.split(read(unit)["Service"]["ExecStart"]) for unit in UNITS}
    assert set(commands) == {"taskdb", "dask-scheduler", "dask-worker"}
    for command in commands.values():
        assert problems([Path(command[0]).name, *command[1:]]) == []
    assert option(commands["dask-scheduler"], "--taskdb-url") == option(commands["taskdb"], "--listen")


def test_a_unit_that_was_killed_is_started_again() -> None:
    for unit in UNITS:
        assert read(unit)["Service"]["Restart"] in ("on-failure", "always")
        assert read(unit)["Service"]["User"] == "dask", "the socket is for one user"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not there")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        # What is started has to be there.
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/dask-taskdb/bin/", f"{Path(sys.executable).parent}/"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / unit.name) for unit in UNITS)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    # It ends with 0 over what it ignores, so what it says counts; of units of the system, too, but those are not ours.
    assert [line for line in done.stderr.splitlines() if str(tmp_path) in line] == []
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------------------------------- Dask's configuration


def test_dask_config_turns_on_three_preloads_that_exist() -> None:
    """`tests/e2e/test_preloads.py` starts processes with it."""
    config = yaml.safe_load((DEPLOY / "dask-taskdb.yaml").read_text())
    preloads = {part: said["preload"] for part, said in config["distributed"].items()}
    assert preloads == {"scheduler": ["scheduler_adapter"], "worker": ["scheduler_adapter.worker"], "client": ["scheduler_adapter.client"]}
    for (module,) in preloads.values():
        assert callable(importlib.import_module(module).dask_setup)
    defaults = yaml.safe_load((ROOT / "scheduler_adapter/taskdb.yaml").read_text())["taskdb"]
    assert {name: value for name, value in config["taskdb"].items() if defaults[name] != value} == {"url": ADDRESS_DEFAULT}


def test_the_readme_names_every_file() -> None:
    text = (DEPLOY / "README.md").read_text()
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.name != "README.md":
            assert f"`{path.relative_to(DEPLOY)}`" in text, path
