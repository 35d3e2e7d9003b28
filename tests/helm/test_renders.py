"""What the chart renders: valid for Kubernetes and the operators, safe, and what the application accepts."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from ray._private.services import determine_plasma_store_config
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from dashboards.build import ALERTS, PAGES, dashboards, rule_file
from dashboards.recordings import RECORDINGS
from serve_app.app import build_app
from serve_app.config.app_config import AppConfig
from serve_app.config.files import load_config
from serve_app.config.serve_file import ServeFile
from serve_app.telemetry.metric_names import METRICS
from tests.support import crds, kubernetes
from tests.support.chart import (
    EXAMPLE_NAMES,
    MINIMAL,
    MONITORING,
    example,
    merged,
    of_kind,
    one,
    pod_templates,
    ray_pods,
    serve_config,
    template,
)
from tests.support.loops import for_each
from tests.support.prometheus import promtool
from tools.chart import CHART, CHART_SCHEMA, run_helm, schema, versioned

pytestmark = pytest.mark.slow

WITH_CLAIMS_ON_DEVICES = ("1.37.0",)
SPREAD = merged(
    MINIMAL,
    {
        "vllm": {"enabled": True, "tensorParallelSize": 16}, "config": {"topology": "monolith"},
        "pools": {"monolith": {"numOfHosts": 2, "gpus": 8, "replicas": 3}},
    },
)  # fmt: skip
COMPONENT = "app_kubernetes_io_component"
CUSTOM = {"RayService", "PodMonitor", "PrometheusRule", "HTTPRoute"}
SMALL = {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"cpu": "10m", "memory": "16Mi"}}
OWN_CONTEXT = {
    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
}  # fmt: skip
EVERYTHING = merged(
    MINIMAL,
    {
        "commonLabels": {"team": "llm"}, "commonAnnotations": {"owner": "llm@example.com"},
        "image": {"digest": f"sha256:{'0' * 64}", "pullSecrets": ["registry", {"name": "mirror"}]},
        "config": {"dumps": {"folder": "/tmp/dumps"}, "limits": {"max_body_bytes": 41943040}},
        "worker": {
            "autoscaling": {"enabled": True}, "runtimeClassName": "nvidia", "priorityClassName": "serving",
            "schedulerName": "volcano", "nodeSelector": {"pool": "gpu"}, "affinity": {"nodeAffinity": {}},
            "podLabels": {"a": "b"}, "podAnnotations": {"c": "d"}, "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
            "envFrom": [{"secretRef": {"name": "proxy", "optional": True}}],
            "volumes": [{"name": "more", "emptyDir": {}}], "volumeMounts": [{"name": "more", "mountPath": "/more"}],
            "livenessProbe": {"tcpSocket": {"port": 8080}},
            "startupProbe": {"tcpSocket": {"port": 8080}, "failureThreshold": 100}, "ipcLock": True,
            "hostNetwork": True,
            "resources": {"requests": {"cpu": 2}, "limits": {"cpu": None, "rdma/hca": 1, "hugepages-2Mi": "512Mi"}},
        },
        "head": {
            "resources": {"requests": {"ephemeral-storage": "1Gi"}, "limits": {"ephemeral-storage": "20Gi"}},
            "envFrom": [{"configMapRef": {"name": "proxy"}, "prefix": "A_"}],
            "initContainers": [{"name": "before", "image": "i:1", "restartPolicy": "Always", "resources": SMALL}],
            "sidecars": [{"name": "beside", "image": "i:1", "securityContext": OWN_CONTEXT, "resources": SMALL}],
            "startupProbe": {"exec": {"command": ["ray", "health-check"]}}, "dnsPolicy": "None",
            "dnsConfig": {"nameservers": ["10.0.0.10"], "searches": ["svc"], "options": [{"name": "rotate"}]},
        },
        "ray": {
            "upgrade": {"strategy": "NewClusterWithIncrementalUpgrade", "gatewayClassName": "123"},
            "gcsFaultTolerance": {"enabled": True, "redisAddress": "rediss://redis:6380", "redisUsername": "1"},
        },
        "hub": {"token": "not-a-token"}, "admin": {"enabled": True}, "test": {"enabled": False},
        "networkPolicy": {"extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]},
        "watch": {
            "enabled": True, "url": "http://vllm:8000", "model": "org/other", "serverPods": [],
            "tolerance": {"configMap": "123", "key": "true"}, "replicaHeader": "X-Replica",
            "serviceAnnotations": {"a": "b"},
            "proxy": {"args": ["--max-queued", "9"], "podLabels": {"a": "b"}, "resources": {"limits": {"cpu": 2}}},
            "referee": {
                "gpus": 1, "runtimeClassName": "nvidia", "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
                "podAnnotations": {"c": "d"},
            },
        },
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}},
            'apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ include "truespec.fullname" . }}-text}\n',
        ],
    },
)  # fmt: skip

# GPUs by claims on devices instead of a device plugin's resource.
CLAIMED = merged(
    MINIMAL,
    {
        "worker": {
            "gpuResource": "", "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
            "resources": {"claims": [{"name": "gpu"}]},
        },
        "extraObjects": [
            {
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": {"name": "one-gpu"},
                "spec": {
                    "spec": {
                        "devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]},
                    },
                },
            },
        ],
    },
)  # fmt: skip

# What YAML takes for a number, a truth value or syntax where it is not quoted.
AWKWARD = merged(
    MINIMAL,
    {
        "nameOverride": "123", "fullnameOverride": "true", "image": {"pullSecrets": ["123", {"name": "456"}]},
        "worker": {"runtimeClassName": "123", "priorityClassName": "yes", "schedulerName": "on"},
        "ray": {
            "auth": {"existingSecret": "123"},
            "gcsFaultTolerance": {
                "enabled": True, "redisAddress": "redis://r:1", "passwordSecret": {"name": "123", "key": "true"},
            },
        },
        "hub": {"token": "123", "key": "true"}, "admin": {"enabled": True, "key": "123"},
        "apiKeys": {"existingSecret": "123", "key": "null", "smokeSecret": "123"},
        "modelCache": {"existingClaim": "123", "subPath": "1/2", "readOnly": True}, "serviceAccount": {"name": "123"},
        "ingress": {"enabled": True, "className": "123", "hosts": [{"host": "*.example.com", "path": "/a: b"}]},
        "networkPolicy": {"clients": [{"namespaceSelector": {}}]},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "123"}], "timeout": "1s"},
    },
)  # fmt: skip


@pytest.fixture
def rendered() -> dict[str, list[dict[str, Any]]]:
    options = [option for version in MONITORING for option in ("--api-versions", version)]
    made = {name: example(name, *options) for name in EXAMPLE_NAMES}
    awkward = template(AWKWARD, *options, "--namespace", "456", name="789")
    of_values = {"everything": EVERYTHING, "claimed": CLAIMED, "minimal": MINIMAL, "spread": SPREAD}
    return made | {name: template(values, *options) for name, values in of_values.items()} | {"awkward": awkward}


NAMES = [*EXAMPLE_NAMES, "everything", "claimed", "minimal", "spread", "awkward"]
each_render = for_each(NAMES)


def test_a_change_of_what_the_chart_installs_is_a_new_version(tmp_path: Path) -> None:
    chart = Path(shutil.copytree(CHART, tmp_path / "truespec"))

    def version_after(name: str, text: str) -> str:
        (chart / name).write_text((chart / name).read_text() + text)
        (chart / "Chart.yaml").write_text(versioned(chart))
        return str(yaml.safe_load((chart / "Chart.yaml").read_text())["version"])

    def set_version(version: str) -> None:
        text = (chart / "Chart.yaml").read_text()
        (chart / "Chart.yaml").write_text(re.sub(r"^version: \S+", f"version: {version}", text, flags=re.M))

    set_version("1.2.3-dev.4")
    assert version_after("README.md", "changed") == "1.2.3-dev.4"
    assert version_after("ci/cpu-demo-values.yaml", "\n# changed") == "1.2.3-dev.4"
    for number, name in enumerate(("templates/NOTES.txt", "values.yaml", "files/smoke.py"), 5):
        assert version_after(name, "\n# changed") == f"1.2.3-dev.{number}", name
    set_version("1.2.3")
    assert version_after("README.md", "changed") == "1.2.3", "a release changes nothing else"
    assert version_after("values.yaml", "\n# changed again") == "1.2.4-dev.1", "which comes after the release"


def test_lint_and_package(tmp_path: Path) -> None:
    for name in EXAMPLE_NAMES:
        run_helm("lint", "--strict", str(CHART), "-f", str(CHART / "ci" / f"{name}-values.yaml"))
    run_helm("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.glob("truespec-*.tgz")
    values = ("--set", "config.model.source=/models/tiny,image.repository=registry.example.com/truespec")
    listed = run_helm("template", "demo", str(package), *values)
    from_folder = run_helm("template", "demo", str(CHART), *values)
    assert listed == from_folder, "the package holds all that the folder does, dashboards included"


@each_render
def test_core_objects_and_pods_are_valid_kubernetes(name: str, rendered: Any) -> None:
    objects = rendered[name]
    core = [found for found in objects if found["kind"] not in CUSTOM]
    core += [kubernetes.pod(pod, component) for component, pod in pod_templates(objects).items()]
    service = one(objects, "RayService")["spec"].get("serveService")
    core += [{"apiVersion": "v1", "kind": "Service", **service}] if service is not None else []
    kubernetes.check(core, WITH_CLAIMS_ON_DEVICES if name == "claimed" else kubernetes.VERSIONS)


def test_custom_resources_fit_their_definitions(rendered: Any) -> None:
    custom = [found for objects in rendered.values() for found in objects if found["kind"] in CUSTOM]
    assert not [error for found in custom for error in crds.errors(found)]
    assert {found["kind"] for found in custom} == CUSTOM, "every custom resource of the chart was seen"


def test_the_values_schema_is_draft_07_and_closed() -> None:
    made = schema()
    Draft7Validator.check_schema(made)
    open_maps = {"global", "livenessProbe", "readinessProbe", "startupProbe", "requests", "limits"}
    open_maps |= {"podSelector", "namespaceSelector"}
    free_form = {"ipBlock", "nodeAffinity", "podAffinity", "podAntiAffinity", "items"}  # Kubernetes' own objects

    def check(node: Any, name: str) -> None:
        if isinstance(node, list):
            for part in node:
                check(part, name)
        elif isinstance(node, dict):
            if node.get("type") == "object" and name not in open_maps | free_form:
                assert "additionalProperties" in node, f"{name} takes any key"
            for key, part in node.items():
                check(part, name if key == "anyOf" else key)

    check(made, "values")


def test_every_value_is_in_the_schema_and_used() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    handwritten = yaml.safe_load(CHART_SCHEMA.read_text())
    assert values.keys() - {"config"} == handwritten["properties"].keys() - {"global"}
    worker = handwritten["definitions"]["worker"]["properties"].keys()
    assert values["worker"].keys() == worker
    assert values["head"].keys() == handwritten["properties"]["head"]["properties"].keys()
    templates = "".join(path.read_text() for path in (CHART / "templates").rglob("*.*"))
    for key in _leaves({name: part for name, part in values.items() if name != "config"}):
        assert re.search(rf"\b{key}\b", templates), f"no template uses {key}"


def _leaves(values: dict[str, Any]) -> set[str]:
    found = set()
    for key, value in values.items():
        found |= _leaves(value) if isinstance(value, dict) and value and "requests" not in value else {key}
    return found - {"grafana_dashboard", "grafana_folder", "prefill", "decode", "monolith"}


# -- what Ray Serve gets ------------------------------------------------------------------------------------------


@each_render
def test_the_serve_config_has_only_keys_that_ray_knows(name: str, rendered: Any) -> None:
    config = serve_config(rendered[name])
    ServeDeploySchema.model_validate(config)
    assert config.keys() <= ServeDeploySchema.model_fields.keys()
    for application in config["applications"]:
        assert application.keys() <= ServeApplicationSchema.model_fields.keys()
        for deployment in application["deployments"]:
            assert deployment.keys() <= DeploymentSchema.model_fields.keys()
            if "autoscaling_config" in deployment:
                AutoscalingConfig(**deployment["autoscaling_config"])


@each_render
def test_the_application_accepts_the_serve_config_and_builds(name: str, rendered: Any, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(one(rendered[name], "RayService")["spec"]["serveConfigV2"])
    application = load_config(file).application
    groups = one(rendered[name], "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    config = application.effective_args
    assert [group["groupName"] for group in groups] == sorted(config.pool_names)
    for group in groups:
        pool = config.pool(group["groupName"])
        assert pool.label_selector.items() <= group["labels"].items()
        assert str(int(pool.num_cpus)) == group["rayStartParams"]["num-cpus"]
        assert int(pool.num_gpus) == int(group["rayStartParams"]["num-gpus"]) * group.get("numOfHosts", 1)
        assert pool.most_replicas == group["maxReplicas"]
    build_app(application.args.model_dump(exclude_unset=True))


def test_the_vllm_example_gives_vllm_its_arguments(rendered: Any) -> None:
    args = serve_config(rendered["vllm"])["applications"][0]["args"]
    assert args["engine"] == {"kind": "vllm", "max_model_len": 32768, "max_num_seqs": 128}
    assert args["vllm"] == {"engine_args": {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.92}}
    assert args["pools"]["decode"]["num_gpus"] == 2
    (application,) = serve_config(template(merged(MINIMAL, {"vllm": {"enabled": True}})))["applications"]
    assert application["args"]["vllm"] == {"engine_args": {"tensor_parallel_size": 1}}, "and no share of the memory"


def test_a_replica_on_several_pods_has_their_gpus_and_its_ranks_are_placed_by_ray(rendered: Any) -> None:
    args = serve_config(rendered["spread"])["applications"][0]["args"]
    (group,) = one(rendered["spread"], "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (group["replicas"], group["numOfHosts"], group["rayStartParams"]["num-gpus"]) == (3, 2, "8")
    assert args["pools"]["monolith"]["num_gpus"] == 16
    assert args["vllm"]["engine_args"]["distributed_executor_backend"] == "ray"
    assert budgets(rendered["spread"]) == {"monolith": {"minAvailable": 4}}  # a pod that goes takes its replica along


def test_users_and_groups_may_be_left_to_the_platform() -> None:
    ids = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    for pod in pod_templates(template(merged(MINIMAL, {"podSecurity": ids}))).values():
        context = pod["spec"]["securityContext"]
        assert not ids.keys() & context.keys() and context["runAsNonRoot"]
    (pod, *_) = pod_templates(template(merged(MINIMAL, {"podSecurity": {"runAsUser": None}}))).values()
    context = pod["spec"]["securityContext"]
    assert "runAsUser" not in context and (context["runAsGroup"], context["fsGroup"]) == (1000, 1000)


def test_long_numbers_are_written_out(rendered: Any) -> None:
    long = 1_000_000
    values = {
        "worker": {"drainSeconds": long - 30, "terminationGracePeriodSeconds": long, "autoscaling": {"enabled": True}},
        "ray": {"autoscaler": {"idleTimeoutSeconds": long}, "upgrade": {"deletionDelaySeconds": long}},
        "test": {"timeoutSeconds": long},
        "podSecurity": {"runAsUser": long, "runAsGroup": long, "fsGroup": 4_000_000_000},
    }
    objects = template(merged(MINIMAL, values))
    spec = one(objects, "RayService")["spec"]
    assert spec["rayClusterDeletionDelaySeconds"] == long
    assert spec["rayClusterConfig"]["autoscalerOptions"]["idleTimeoutSeconds"] == long
    pods = {name: pod["spec"] for name, pod in pod_templates(objects).items()}
    assert (pods["test"]["activeDeadlineSeconds"], pods["test"]["containers"][0]["args"][1]) == (long, str(long))
    assert pods["decode"]["terminationGracePeriodSeconds"] == long
    assert pods["decode"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1] == str(long - 30)
    for pod in pods.values():
        ids = [pod["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")]
        assert ids == [long, long, 4_000_000_000] and all(isinstance(each, int) for each in ids)
    size = serve_config(rendered["everything"])["applications"][0]["args"]["limits"]["max_body_bytes"]
    assert size == 41943040 and isinstance(size, int)


def test_fractions_by_set_which_makes_texts_of_them_are_numbers_in_the_serve_config() -> None:
    fractions = {
        "vllm.gpuMemoryUtilization": "0.85",
        "worker.autoscaling.targetBacklogSeconds": "1.5",
        "worker.autoscaling.targetKvUsage": ".65",
        "worker.autoscaling.upscaleDelaySeconds": "0.5",
        "pools.prefill.autoscaling.targetOngoingRequests": "2.50",
        "pools.prefill.autoscaling.policy": "requests",
    }
    values = merged(MINIMAL, {"vllm": {"enabled": True}, "worker": {"autoscaling": {"enabled": True}}})
    objects = template(values, "--set", ",".join(f"{key}={value}" for key, value in fractions.items()))
    (application,) = serve_config(objects)["applications"]
    prefill, decode = (deployment["autoscaling_config"] for deployment in application["deployments"][::-1])
    assert application["args"]["vllm"]["engine_args"]["gpu_memory_utilization"] == 0.85
    assert (prefill["target_ongoing_requests"], prefill["upscale_delay_s"]) == (2.5, 0.5)
    assert decode["policy"]["policy_kwargs"]["targets"]["kv_usage"] == 0.65


@pytest.mark.parametrize(("topology", "pool"), [("disaggregated", "decode"), ("monolith", "monolith")])
def test_the_stream_router_runs_where_keys_and_token_are_mounted(topology: str, pool: str) -> None:
    values = {
        "config": {"topology": topology, "recovery": {"resume": True}},
        "admin": {"enabled": True},
        "apiKeys": {"existingSecret": "keys", "smokeSecret": "key"},
    }
    objects = template(merged(MINIMAL, values))
    config = ServeFile.model_validate(serve_config(objects)).applications[0].args
    assert config.router is not None and config.router.label_selector
    groups = one(objects, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    homes = [group for group in groups if config.router.label_selector.items() <= group["labels"].items()]
    assert [group["groupName"] for group in homes] == [pool]
    mounts = homes[0]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {"api-keys", "admin-token"} <= {mount["name"] for mount in mounts}
    assert "router" not in serve_config(template(MINIMAL))["applications"][0]["args"]["pools"]


def test_settings_of_the_application_change_no_pod() -> None:
    changed = {
        "config": {"engine": {"max_num_seqs": 49}, "drafter": {"num_draft_tokens": 9}, "replay": {"sample_rate": 0.5}}
    }
    assert ray_pods(template(MINIMAL)) == ray_pods(template(merged(MINIMAL, changed)))


def test_the_chart_repeats_the_applications_defaults() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["config"]
    defaults = AppConfig.model_validate({"model": {"source": "x"}})
    assert values["limits"]["request_timeout_s"] == defaults.limits.request_timeout_s
    assert (values["drafter"]["kind"], values["topology"]) == (defaults.drafter.kind, defaults.topology)


# -- pods ---------------------------------------------------------------------------------------------------------

OURS = {"ray-head", "ray-worker", "fetch-models", "smoke", "config-check", "proxy", "referee"}


@each_render
def test_pods_meet_the_restricted_security_standard(name: str, rendered: Any) -> None:
    for component, pod in pod_templates(rendered[name]).items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is (component == "head" and name in ("everything", "disaggregated"))
        workers = name == "everything" and component in ("prefill", "decode")
        assert spec.keys() & {"hostNetwork", "hostPID", "hostIPC"} == ({"hostNetwork"} if workers else set())
        volumes = {kind for volume in spec.get("volumes", ()) for kind in volume.keys() - {"name"}}
        tolerances = {"configMap"} if component == "watch-referee" else set()
        assert volumes <= {"emptyDir", "secret", "persistentVolumeClaim", "downwardAPI"} | tolerances
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            locks = name in ("everything", "vllm") and container["name"] == "ray-worker"  # ipcLock
            assert context["capabilities"] == {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if locks else {})
            assert context.get("runAsNonRoot", True) is not locks
            assert (context.get("runAsUser") == 0) is locks
            assert context["readOnlyRootFilesystem"] is True
            if container["name"] in OURS:
                taken_away = {"cpu"} if name == "everything" and container["name"] == "ray-worker" else set()
                assert container["resources"]["limits"].keys() >= {"cpu", "memory"} - taken_away


@each_render
def test_every_mount_has_its_volume_and_no_secret_is_in_the_environment(name: str, rendered: Any) -> None:
    for component, pod in pod_templates(rendered[name]).items():
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())}
        mounted = set()
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]:
            mounted |= {mount["name"] for mount in container.get("volumeMounts", ())}
            assert not [entry for entry in container.get("env", ()) if "valueFrom" in entry]
        assert mounted == volumes, component


@each_render
def test_rays_object_store_fits_into_the_shared_memory_of_its_pod(
    name: str, rendered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = one(rendered[name], "RayService")["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (shm,) = (volume for volume in group["template"]["spec"]["volumes"] if volume["name"] == "shm")
        size, unit = re.fullmatch(r"(\d+)([MG])i", shm["emptyDir"]["sizeLimit"]).groups()
        num_bytes = int(size) << {"M": 20, "G": 30}[unit]
        monkeypatch.setattr("ray._private.utils.get_shared_memory_bytes", lambda found=num_bytes: found)
        monkeypatch.setattr("ray._common.utils.get_system_memory", lambda: 1 << 40)
        asked = int(group["rayStartParams"]["object-store-memory"])
        assert determine_plasma_store_config(asked, "/tmp")[0] == "/dev/shm"
        assert 0.85 * num_bytes < asked < 0.95 * num_bytes


def test_the_root_file_system_can_be_made_writable_by_pool() -> None:
    def writable(values: dict[str, Any]) -> set[str]:
        fetching = {"modelCache": {"fetch": ["smollm2-135m"]}}
        pods = {name: pod["spec"] for name, pod in pod_templates(template(merged(MINIMAL, fetching, values))).items()}
        return {
            name
            for name, spec in pods.items()
            for container in [*spec["containers"], *spec.get("initContainers", ())]
            if not container["securityContext"]["readOnlyRootFilesystem"]
        }

    assert writable({"worker": {"readOnlyRootFilesystem": False}}) == {"decode", "prefill"}
    assert writable({"pools": {"decode": {"readOnlyRootFilesystem": False}}}) == {"decode"}
    assert writable({"head": {"readOnlyRootFilesystem": False}}) == {"head"}


def budgets(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Pool -> its disruption budget, without the selector."""
    budgets = of_kind(objects, "PodDisruptionBudget")
    found = [budget for budget in budgets if not budget["metadata"]["name"].endswith("-watch-proxy")]
    return {
        budget["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]: {
            key: value for key, value in budget["spec"].items() if key != "selector"
        }
        for budget in found
    }


@each_render
def test_a_disruption_budget_needs_no_scale_subresource_and_lets_a_pod_of_each_pool_go(
    name: str, rendered: Any
) -> None:
    groups = one(rendered[name], "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    fewest = {group["groupName"]: group["minReplicas"] for group in groups}
    hosts = {group["groupName"]: group.get("numOfHosts", 1) for group in groups}
    for pool, budget in budgets(rendered[name]).items():
        assert budget.keys() == {"minAvailable"}
        assert isinstance(budget["minAvailable"], int)
        assert 0 < budget["minAvailable"] < fewest[pool] * hosts[pool]
    assert budgets(rendered[name]).keys() == {pool for pool, pods in fewest.items() if pods > 1}


@pytest.mark.parametrize(("allowed", "pods", "kept"), [(1, 4, 3), (4, 4, None), ("30%", 4, 2), ("100%", 4, None)])
def test_a_budget_keeps_the_pods_that_may_not_be_evicted(allowed: int | str, pods: int, kept: int | None) -> None:
    # Kubernetes rounds a share of pods that may be unavailable up.
    expected = {"minAvailable": kept} if kept else None
    scaled = {"autoscaling": {"enabled": True, "minReplicas": pods, "maxReplicas": 50}}
    values = {"pools": {"prefill": {"replicas": pods}, "decode": scaled}}
    made = budgets(template(merged(MINIMAL, values, {"podDisruptionBudget": {"maxUnavailable": allowed}})))
    assert (made.get("prefill"), made.get("decode")) == (expected, expected)
    assert not budgets(template(merged(MINIMAL, values, {"podDisruptionBudget": {"enabled": False}})))


def test_the_head_is_left_where_it_is_by_autoscalers_and_by_drains_if_asked() -> None:
    keeping = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}

    def annotations(**head: Any) -> dict[str, Any]:
        pods = ray_pods(template(merged(MINIMAL, {"head": head})))
        assert "annotations" not in pods["decode"]["metadata"]
        return pods["head"]["metadata"].get("annotations", {})

    assert annotations() == keeping
    assert annotations(safeToEvict=True) == {}
    changed = {"karpenter.sh/do-not-disrupt": "false"}
    assert annotations(podAnnotations=changed) == keeping | changed
    assert "head" not in budgets(template(MINIMAL))
    budget = budgets(template(merged(MINIMAL, {"podDisruptionBudget": {"head": True}})))
    assert budget == {"head": {"minAvailable": 1}}


def test_pods_on_the_nodes_network_find_services_by_name() -> None:
    pods = ray_pods(template(merged(MINIMAL, {"pools": {"decode": {"hostNetwork": True}}})))
    decode, prefill = (pods[name]["spec"] for name in ("decode", "prefill"))
    assert (decode["hostNetwork"], decode["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert not {"hostNetwork", "dnsPolicy"} & (prefill.keys() | pods["head"]["spec"].keys())
    own = {"hostNetwork": True, "dnsPolicy": "Default"}
    assert ray_pods(template(merged(MINIMAL, {"worker": own})))["decode"]["spec"]["dnsPolicy"] == "Default"


def test_a_read_only_volume_is_mounted_so_and_nothing_is_written_to_it() -> None:
    cache = {"existingClaim": "shared", "subPath": "team/models", "readOnly": True}
    values = {"modelCache": cache, "config": {"model": {"source": "smollm2-135m"}}}  # which is on it
    objects = template(merged(MINIMAL, values, {"watch": {"enabled": True}}))
    pods = pod_templates(objects)
    for name in ("decode", "prefill", "watch-referee"):
        (container,), volumes = pods[name]["spec"]["containers"], pods[name]["spec"]["volumes"]
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == "models")
        assert mount == {"name": "models", "mountPath": "/models", "subPath": "team/models", "readOnly": True}
        (volume,) = (each for each in volumes if each["name"] == "models")
        assert volume["persistentVolumeClaim"] == {"claimName": "shared", "readOnly": True}
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert (variables["TRUESPEC_CACHE"], variables["HF_HOME"]) == ("/models", "/tmp/huggingface")
        assert "TRITON_CACHE_DIR" not in variables, "in HOME, which is /tmp"
    (container,) = ray_pods(template(MINIMAL))["decode"]["spec"]["containers"]
    assert {"name": "TRITON_CACHE_DIR", "value": "/models/triton"} in container["env"]


def test_the_container_that_fetches_has_the_resources_of_the_values() -> None:
    def resources(**cache: Any) -> Any:
        pods = ray_pods(template(merged(MINIMAL, {"modelCache": {"fetch": ["smollm2-135m"], **cache}})))
        return pods["decode"]["spec"]["initContainers"][0]["resources"]

    more = resources(fetchResources={"requests": {"ephemeral-storage": "1Gi"}, "limits": {"memory": "4Gi"}})
    assert more["requests"] == {"cpu": "1", "memory": "2Gi", "ephemeral-storage": "1Gi"}
    assert more["limits"] == {"cpu": "1", "memory": "4Gi"}
    assert resources(fetchResources={"requests": None, "limits": None}) == {}


def test_labels_that_change_with_a_release_are_not_on_pods(rendered: Any) -> None:
    for name, objects in rendered.items():
        for component, pod in pod_templates(objects).items():
            if component != "test":
                assert not pod["metadata"]["labels"].keys() & {"helm.sh/chart", "app.kubernetes.io/version"}, name


def test_selectors_find_the_pods_they_mean(rendered: Any) -> None:
    objects = rendered["disaggregated"]
    labels = {name: pod["metadata"]["labels"].items() for name, pod in pod_templates(objects).items()}
    for budget in of_kind(objects, "PodDisruptionBudget"):
        found = {name for name, has in labels.items() if budget["spec"]["selector"]["matchLabels"].items() <= has}
        assert found == {budget["metadata"]["name"].removeprefix("demo-truespec-")}
    for selector in (
        one(objects, "PodMonitor")["spec"]["selector"]["matchLabels"],
        one(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert all(selector.items() <= has for has in labels.values())


def test_a_pool_overrides_what_all_workers_have(rendered: Any) -> None:
    pods = pod_templates(rendered["disaggregated"])
    assert "topologySpreadConstraints" in pods["decode"]["spec"]
    assert "topologySpreadConstraints" not in pods["prefill"]["spec"]
    assert pods["prefill"]["spec"]["priorityClassName"] == "serving"
    own = template(merged(MINIMAL, {"pools": {"decode": {"env": [{"name": "A", "value": "1"}], "memory": "99Gi"}}}))
    decode, prefill = (pod_templates(own)[name]["spec"]["containers"][0] for name in ("decode", "prefill"))
    assert {"name": "A", "value": "1"} in decode["env"] and {"name": "A", "value": "1"} not in prefill["env"]
    assert (decode["resources"]["limits"]["memory"], prefill["resources"]["limits"]["memory"]) == ("99Gi", "32Gi")


def ray_container(pod: dict[str, Any]) -> dict[str, Any]:
    """Ray's: the one that KubeRay completes."""
    return pod["spec"]["containers"][0]


def test_resources_of_the_values_lie_over_those_that_follow_from_the_others(rendered: Any) -> None:
    resources = ray_container(ray_pods(rendered["everything"])["decode"])["resources"]
    devices = {"nvidia.com/gpu": "1", "memory": "32Gi"}
    assert resources["requests"] == {"cpu": "2", **devices}
    assert resources["limits"] == {"rdma/hca": "1", "hugepages-2Mi": "512Mi", **devices}, "no limit of the CPU"
    of_one_pool = {
        "worker": {"resources": {"limits": {"rdma/hca": 1}}},
        "pools": {"prefill": {"resources": {"limits": {"rdma/hca": 2, "ephemeral-storage": "9Gi"}}}},
    }
    pods = ray_pods(template(merged(MINIMAL, of_one_pool)))
    limits = {name: ray_container(pod)["resources"]["limits"] for name, pod in pods.items()}
    assert (limits["decode"]["rdma/hca"], limits["prefill"]["rdma/hca"]) == ("1", "2")
    assert limits["prefill"]["ephemeral-storage"] == "9Gi" and "rdma/hca" not in limits["head"]


def test_gpus_of_a_claim_are_known_to_ray_and_asked_of_no_device_plugin(rendered: Any) -> None:
    (group, *_) = one(rendered["claimed"], "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    resources = ray_container(group["template"])["resources"]
    assert group["rayStartParams"]["num-gpus"] == "1"
    assert resources["claims"] == [{"name": "gpu"}]
    assert resources["limits"].keys() == resources["requests"].keys() == {"cpu", "memory"}
    assert group["template"]["spec"]["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    assert one(rendered["claimed"], "ResourceClaimTemplate")["metadata"]["name"] == "one-gpu"
    claims = {name for name, pod in ray_pods(rendered["claimed"]).items() if "resourceClaims" in pod["spec"]}
    assert claims == {"decode", "prefill"}


def test_rays_container_stays_first_and_the_users_containers_run_before_the_charts_own() -> None:
    own = {"initContainers": [{"name": "a", "image": "i"}], "sidecars": [{"name": "b", "image": "i"}]}
    values = {"worker": own, "head": own, "modelCache": {"fetch": ["smollm2-135m"]}}
    for name, pod in ray_pods(template(merged(MINIMAL, values))).items():
        containers, first = ([c["name"] for c in pod["spec"][key]] for key in ("containers", "initContainers"))
        assert containers == ["ray-head" if name == "head" else "ray-worker", "b"]
        assert first == (["a"] if name == "head" else ["a", "fetch-models"])


def test_a_container_of_the_values_is_as_it_was_given_but_for_a_missing_security_context(rendered: Any) -> None:
    spec = ray_pods(rendered["everything"])["head"]["spec"]
    (before,), (_, beside) = spec["initContainers"], spec["containers"]
    assert (before["name"], before["image"], before["restartPolicy"]) == ("before", "i:1", "Always")
    assert before["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert beside == {"name": "beside", "image": "i:1", "securityContext": OWN_CONTEXT, "resources": SMALL}


# -- secrets, network, monitoring ---------------------------------------------------------------------------------


def test_secrets_are_made_or_taken_and_mounted_as_files(rendered: Any) -> None:
    made = {secret["metadata"]["name"]: secret for secret in of_kind(rendered["everything"], "Secret")}
    assert made.keys() == {"demo-truespec-hub", "demo-truespec-admin"}
    assert made["demo-truespec-hub"]["stringData"] == {"token": "not-a-token"}
    again = {secret["metadata"]["name"]: secret for secret in of_kind(template(EVERYTHING), "Secret")}
    assert made["demo-truespec-admin"]["data"] != again["demo-truespec-admin"]["data"], "the admin token is random"
    taken = rendered["one-gpu"]
    assert not of_kind(taken, "Secret")
    (pod,) = (pod for name, pod in pod_templates(taken).items() if name == "monolith")
    secrets = {v["name"]: v["secret"]["secretName"] for v in pod["spec"]["volumes"] if "secret" in v}
    assert secrets == {"hub-token": "hub-token", "admin-token": "truespec-admin"}
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    args = serve_config(taken)["applications"][0]["args"]
    assert args["admin"]["token_file"] == f"{mounts['admin-token']}/token"
    assert "access" not in args, "anybody may use it without keys"
    environment = {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]}
    assert environment["HF_TOKEN_PATH"] == f"{mounts['hub-token']}/token"


@pytest.mark.parametrize(
    ("volume", "section", "setting", "secret_name"),
    [
        ("api-keys", "access", "keys_file", "truespec-keys"),
        ("receipt-key", "receipts", "key_file", "truespec-receipts"),
    ],
)
def test_keys_are_mounted_where_answers_are_made(
    volume: str, section: str, setting: str, secret_name: str, rendered: Any
) -> None:
    objects = rendered["disaggregated"]
    file = serve_config(objects)["applications"][0]["args"][section][setting]
    for name, pod in ray_pods(objects).items():
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in ray_container(pod)["volumeMounts"]}
        assert (volume in volumes) == (volume in mounts) == (name != "head")
        if name != "head":
            secret = volumes[volume]["secret"]
            assert secret["secretName"] == secret_name
            assert file == f"{mounts[volume]}/{secret['items'][0]['path']}"
    (smoke,) = pod_templates(objects)["test"]["spec"]["containers"]
    (mount,) = smoke["volumeMounts"]
    assert smoke["args"][-1] == f"{mount['mountPath']}/key"


def test_the_network_policy_opens_what_is_needed_and_no_more(rendered: Any) -> None:
    policy = one(rendered["minimal"], "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    opened = {port["port"] for rule in policy["ingress"] for port in rule.get("ports", ())}
    assert opened == {8000, 8080, 8265}
    assert all(rule.get("from") for rule in policy["ingress"])
    out = {port["port"] for rule in policy["egress"] for port in rule.get("ports", ())}
    assert out == {53, 443}
    with_all = one(rendered["everything"], "NetworkPolicy")["spec"]["egress"]
    assert {port["port"] for rule in with_all for port in rule.get("ports", ())} == {53, 443, 6443, 6380}
    closed = template(merged(MINIMAL, {"networkPolicy": {"enabled": False}}))
    assert not of_kind(closed, "NetworkPolicy")


def selects(selector: dict[str, Any] | None, labels: dict[str, str]) -> bool:
    """Whether a label selector takes these labels; without one nothing is asked. It knows `matchLabels` only."""
    assert not selector or selector.keys() == {"matchLabels"}
    return not selector or selector["matchLabels"].items() <= labels.items()


def admits(objects: list[dict[str, Any]], namespace: str, labels: dict[str, str], port: int) -> bool:
    """Whether the release's pods take a connection from a pod of another namespace, by the network policy."""
    for rule in one(objects, "NetworkPolicy")["spec"]["ingress"]:
        ports = {entry["port"] for entry in rule.get("ports", ())}
        for peer in rule["from"]:
            named = "namespaceSelector" in peer and selects(
                peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace}
            )
            if named and selects(peer.get("podSelector"), labels) and (not ports or port in ports):
                return True
    return False


@for_each(EXAMPLE_NAMES)
def test_the_network_policy_of_an_example_admits_what_it_is_reached_through(name: str, rendered: Any) -> None:
    controllers = {"nginx": ("ingress-nginx", {"app.kubernetes.io/name": "ingress-nginx"})}
    objects = rendered[name]
    (port,) = one(objects, "RayService")["spec"]["serveService"]["spec"]["ports"]
    containers = [pod["spec"]["containers"][0] for pod in pod_templates(objects).values()]
    targets = [p for container in containers for p in container.get("ports", ()) if p["name"] == port["targetPort"]]
    assert {target["containerPort"] for target in targets} == {port["port"]}
    for ingress in of_kind(objects, "Ingress"):
        assert admits(objects, *controllers[ingress["spec"]["ingressClassName"]], port["port"])
    for route in of_kind(objects, "HTTPRoute"):
        assert all(admits(objects, parent["namespace"], {}, port["port"]) for parent in route["spec"]["parentRefs"])
    assert all(admits(objects, "anywhere", {"app.kubernetes.io/name": "prometheus"}, at) for at in (8080, port["port"]))
    assert admits(objects, "anywhere", {"app.kubernetes.io/name": "kuberay-operator"}, 8265)
    assert not admits(objects, "anywhere", {"app.kubernetes.io/name": "prometheus"}, 8265)
    assert not admits(objects, "anywhere", {}, port["port"])


def test_monitoring_objects_follow_what_the_cluster_knows() -> None:
    assert not {"PodMonitor", "PrometheusRule"} & {found["kind"] for found in template(MINIMAL)}
    forced = template(merged(MINIMAL, {"monitoring": {"podMonitor": {"enabled": True}}}))
    assert one(forced, "PodMonitor")
    off = merged(MINIMAL, {"monitoring": {"podMonitor": {"enabled": False}}})
    assert not of_kind(template(off, "--api-versions", MONITORING[0]), "PodMonitor")


def test_the_sums_of_the_application_are_scraped_once_under_labels_that_outlive_the_pod(rendered: Any) -> None:
    """Each pod of a cluster would answer the same, and rules would add the answers up."""
    objects = rendered["disaggregated"]
    agents, application = one(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert "relabelings" not in agents and application["path"] == "/metrics"
    keep, instance, drop = application["relabelings"]
    assert (keep["action"], keep["sourceLabels"]) == ("keep", ["__meta_kubernetes_pod_label_" + COMPONENT])
    found = {
        name
        for name, pod in pod_templates(objects).items()
        if re.fullmatch(keep["regex"], pod["metadata"]["labels"].get("app.kubernetes.io/component", ""))
        and any(port["name"] == application["port"] for port in pod["spec"]["containers"][0].get("ports", ()))
    }
    assert found == {"head"}
    assert instance == {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"], "targetLabel": "instance"}
    assert drop == {"action": "labeldrop", "regex": "pod"}
    assert application["authorization"] == {"credentials": {"name": "truespec-smoke-key", "key": "key"}}


def test_the_monitor_keeps_what_rules_panels_and_runbooks_read_and_nothing_else(rendered: Any) -> None:
    keep, drop = one(rendered["cpu-demo"], "PodMonitor")["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
    assert re.fullmatch(drop["regex"], "SessionName") and not re.fullmatch(drop["regex"], "pool")
    exprs = [query.expr for page in PAGES for panel in page.panels for query in panel.queries]
    exprs += [text for alert in ALERTS for text in (alert.expr, *alert.commands)]
    exprs += RECORDINGS.values()
    asked = set(re.findall(r"\bray_[a-z_]+", " ".join(exprs)))
    assert all(re.fullmatch(keep["regex"], name) for name in asked | METRICS.keys())
    (names,) = re.findall(r"ray_serve_\((.*)\)$", keep["regex"])
    assert {f"ray_serve_{name}" for name in names.split("|")} == asked
    assert (keep["action"], keep["sourceLabels"]) == ("keep", ["__name__"])


def test_dashboards_and_rules_are_the_generated_ones(rendered: Any) -> None:
    maps = of_kind(rendered["cpu-demo"], "ConfigMap")
    pages = [json.loads(text) for found in maps for text in found["data"].values()]
    assert {page["uid"]: page for page in pages} == {page["uid"]: page for page in dashboards()}
    assert all(found["metadata"]["labels"]["grafana_dashboard"] == "1" for found in maps)
    rule = one(template(merged(MINIMAL, {"monitoring": {"prometheusRule": {"enabled": True}}})), "PrometheusRule")
    assert rule["spec"] == rule_file()


def test_each_release_is_a_job_of_its_own_and_has_rules_of_its_own(tmp_path: Path) -> None:
    values = merged(MINIMAL, {"monitoring": {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}})
    for name in ("blue", "green"):
        objects = template(values, name=name)
        label = one(objects, "PodMonitor")["spec"]["jobLabel"]
        assert {pod["metadata"]["labels"][label] for pod in pod_templates(objects).values()} == {name}
        spec = one(objects, "PrometheusRule")["spec"]
        exprs = [rule["expr"] for group in spec["groups"] for rule in group["rules"]]
        assert all(expr.count("truespec_") == expr.count(f'{{job="{name}",namespace="demo"') for expr in exprs)
        assert not [expr for expr in exprs if "$threshold" in expr or "$minimum" in expr]
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    promtool("check", "rules", *map(str, sorted(tmp_path.glob("*.yaml"))))


def alerts(**rule: Any) -> dict[str, Any]:
    """The alerts of a release with these values of its rule, by name."""
    values = merged(MINIMAL, {"monitoring": {"prometheusRule": {"enabled": True, **rule}}})
    groups = one(template(values), "PrometheusRule")["spec"]["groups"]
    return {found["alert"]: found for found in groups[-1]["rules"]}


def test_values_change_single_alerts() -> None:
    found, before = (
        alerts(
            alertLabels={"team": "serving", "tier": "1"},
            runbookUrl="https://docs.example/runbooks",
            alerts={
                "TruespecTmeHigh": {"threshold": 1.1, "minimum": "2000", "for": "10m", "labels": {"team": "rl"}},
                "TruespecKvCacheFull": {"severity": "critical"},
                "TruespecNoTraffic": {"enabled": False},
            },
        ),
        alerts(),
    )
    assert before.keys() - found.keys() == {"TruespecNoTraffic"}
    high = found["TruespecTmeHigh"]
    assert high["expr"] == before["TruespecTmeHigh"]["expr"].replace("1.05", "1.1").replace("500", "2000")
    assert high["for"] == "10m"
    assert high["labels"] == {"severity": "critical", "team": "rl", "tier": "1"}
    assert high["annotations"]["runbook_url"] == "https://docs.example/runbooks#truespectmehigh"
    assert found["TruespecKvCacheFull"]["labels"]["severity"] == "critical"
    assert found["TruespecKvCacheFull"]["expr"] == before["TruespecKvCacheFull"]["expr"]


def test_notes_say_how_to_reach_it(tmp_path: Path) -> None:
    # Without a cluster helm shows no notes, so a copy of the chart has them as an object.
    chart = shutil.copytree(CHART, tmp_path / "truespec")
    notes = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "notes.yaml").write_text(
        '{{- define "notes" }}' + notes + '{{ end }}\nkind: Notes\ntext: {{ include "notes" . | quote }}\n'
    )

    def shown(values: dict[str, Any]) -> str:
        options = ("-f", "-", "-n", "demo", "-s", "templates/notes.yaml")
        return yaml.safe_load(run_helm("template", "demo", str(chart), *options, stdin=json.dumps(values)))["text"]

    keyed = shown(yaml.safe_load((CHART / "ci" / "disaggregated-values.yaml").read_text()))
    assert "\n  curl -H 'authorization: Bearer KEY' http" in keyed and "in the secret truespec-keys." in keyed
    everything = shown(EVERYTHING)
    assert "test demo" not in everything, "an incremental upgrade has no service for the test"
    assert "The admin token is in the secret demo-truespec-admin." in everything
    assert "service/demo-truespec-watch-referee 8101" in everything
    assert "Pool decode uses its nodes' network" in everything and "runs as root with IPC_LOCK" in everything
    minimal = shown(MINIMAL)
    assert "\n  helm -n demo test demo\n" in minimal and "\n  curl http" in minimal and "watch" not in minimal
    assert "get pvc demo-truespec-models" in minimal, "block storage never binds a claim of many writers"
    assert "bound" not in shown(merged(MINIMAL, {"modelCache": {"existingClaim": "mine"}}))
    watching = shown(merged(MINIMAL, {"watch": {"enabled": True, "only": True, "url": "http://vllm:8000"}}))
    assert "http://demo-truespec-watch.demo.svc:8100/v1" in watching
    assert "RayService" not in watching and "\n  helm -n demo test demo\n" in watching
    wildcard = {"ingress": {"enabled": True, "hosts": [{"host": "*.example.com"}]}, "networkPolicy": {"enabled": False}}
    assert "curl http://NAME.example.com/v1/models" in shown(merged(MINIMAL, wildcard))
