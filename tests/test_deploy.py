"""The deployment files parse, and what they start exists."""

from __future__ import annotations

import configparser
import importlib
import shlex
from pathlib import Path

import yaml

from taskdb.cli.serve import ADDRESS_DEFAULT
from tests.support.commands import problems

ROOT = Path(__file__).resolve().parents[1]


def words(command: str | list[str]) -> list[str]:
    return shlex.split(command) if isinstance(command, str) else command


def test_compose_file() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = compose["services"]
    assert set(services) == {"taskdb", "scheduler", "worker-1", "worker-2"}
    for name, service in services.items():
        assert problems(words(service["command"])) == [], name
        assert service["restart"] == "unless-stopped"
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        for other in service.get("depends_on", {}):
            assert "healthcheck" in services[other], f"{name} waits for the health of {other}"
    assert problems(services["taskdb"]["healthcheck"]["test"][1:]) == []
    volumes = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert volumes == set(compose["volumes"])


def test_services_reach_each_other_by_name() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    scheduler = words(services["scheduler"]["command"])
    host, port = scheduler[scheduler.index("--taskdb-url") + 1].split(":")
    listen = words(services["taskdb"]["command"])
    assert host in services
    assert listen[listen.index("--listen") + 1].endswith(":" + port)
    assert "tcp://scheduler:8786" in words(services["worker-1"]["command"])


def test_kubernetes_manifest() -> None:
    service, workload = yaml.safe_load_all((ROOT / "deploy/k8s/scheduler.yaml").read_text())
    assert service["kind"] == "Service"
    assert workload["spec"]["replicas"] == 1
    for container in workload["spec"]["template"]["spec"]["containers"]:
        assert problems(container["args"]) == []
        for probe in ("readinessProbe", "livenessProbe"):
            if "exec" in container.get(probe, {}):
                assert problems(container[probe]["exec"]["command"]) == []


def test_systemd_unit() -> None:
    unit = configparser.ConfigParser()
    unit.read(ROOT / "deploy/taskdb.service")
    command = shlex.split(unit["Service"]["ExecStart"])
    assert problems([Path(command[0]).name, *command[1:]]) == []


def test_dask_config_turns_on_three_preloads_that_exist() -> None:
    """`tests/e2e/test_preloads.py` starts processes with it."""
    config = yaml.safe_load((ROOT / "deploy/dask-taskdb.yaml").read_text())
    preloads = {part: said["preload"] for part, said in config["distributed"].items()}
    assert preloads == {"scheduler": ["scheduler_adapter"], "worker": ["scheduler_adapter.worker"], "client": ["scheduler_adapter.client"]}
    for (module,) in preloads.values():
        assert callable(importlib.import_module(module).dask_setup)
    defaults = yaml.safe_load((ROOT / "scheduler_adapter/taskdb.yaml").read_text())["taskdb"]
    assert {name: value for name, value in config["taskdb"].items() if defaults[name] != value} == {"url": ADDRESS_DEFAULT}
