"""What the chart renders to watch a server, beside the release's own service or alone, and the manifest without it."""

from typing import Any

import pytest
import yaml

from tests.support import kubernetes
from tests.support.chart import MINIMAL, MONITORING, Object, merged, of_kind, one, pod_templates, template
from tests.support.command_lines import fault
from tools.chart import CHART, ROOT

pytestmark = pytest.mark.slow

URL = "http://vllm.models:8000"
BESIDE = merged(MINIMAL, {"watch": {"enabled": True}})
ALONE = merged(MINIMAL, {"watch": {"enabled": True, "only": True, "url": URL}})
OF_THE_SERVICE = {"RayService", "Job"}
MANIFEST = ROOT / "deploy" / "configs" / "watch" / "beside-vllm.yaml"


def watching(**values: Any) -> dict[str, Any]:
    return merged(ALONE, {"watch": values})


def container(objects: list[Object], part: str) -> Object:
    (found,) = pod_templates(objects)[f"watch-{part}"]["spec"]["containers"]
    assert found["name"] == part
    return dict(found)


def option(objects: list[Object], part: str, name: str) -> str | None:
    command = container(objects, part)["command"]
    return str(command[command.index(name) + 1]) if name in command else None


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (each for each in of_kind(objects, kind) if each["metadata"]["name"] == name)
    return found


def targets(service: Object, objects: list[Object]) -> dict[str, int]:
    """Component -> port of the container that a service leads to."""
    (port,) = service["spec"]["ports"]
    return {
        component: each["containerPort"]
        for component, pod in pod_templates(objects).items()
        if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        for part in pod["spec"]["containers"]
        for each in part.get("ports", ())
        if each["name"] == port["targetPort"]
    }


@pytest.mark.parametrize("values", [BESIDE, ALONE, watching(replicaHeader="X-R")], ids=["beside", "alone", "options"])
def test_objects_are_valid_kubernetes_and_run_commands_of_ours(values: dict[str, Any]) -> None:
    objects = template(values)
    kubernetes.check([found for found in objects if found["kind"] != "RayService"])
    for part in ("proxy", "referee"):
        command = container(objects, part)["command"]
        assert command[:3] == ["truespec", "watch", part]
        assert fault(command[1:]) is None


def test_a_watch_alone_has_nothing_of_the_service() -> None:
    objects = template(ALONE, *(part for name in MONITORING for part in ("--api-versions", name)))
    assert not OF_THE_SERVICE & {found["kind"] for found in objects}
    assert {"Deployment", "Service", "NetworkPolicy", "PodMonitor", "PrometheusRule"} <= {
        found["kind"] for found in objects
    }
    assert pod_templates(objects).keys() == {"watch-proxy", "watch-referee", "test"}
    assert not of_kind(objects, "PersistentVolumeClaim"), "one pod reads the model"
    assert {found["kind"] for found in template(BESIDE)} >= OF_THE_SERVICE


def test_services_lead_to_their_pods_and_the_proxies_to_server_and_referee() -> None:
    objects = template(watching(port=9000))
    front, referee = (named(objects, "Service", f"demo-truespec-watch{suffix}") for suffix in ("", "-referee"))
    assert targets(front, objects) == {"watch-proxy": 9000}
    assert targets(referee, objects) == {"watch-referee": 8101}
    assert (front["spec"]["ports"][0]["port"], referee["spec"]["ports"][0]["port"]) == (9000, 8101)
    assert container(objects, "proxy")["command"][3] == URL
    assert option(objects, "proxy", "--port") == "9000"
    assert option(objects, "proxy", "--referee") == "http://demo-truespec-watch-referee:8101"
    for deployment in of_kind(objects, "Deployment"):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_releases_own_service_is_watched_where_no_url_is_given() -> None:
    objects = template(BESIDE)
    serving = one(objects, "RayService")["spec"]["serveService"]["metadata"]["name"]
    assert container(objects, "proxy")["command"][3] == f"http://{serving}:8000"
    assert option(objects, "referee", "--model") == "/models/tiny"
    assert option(template(watching(model="org/name")), "referee", "--model") == "org/name"


def test_settings_reach_the_commands() -> None:
    values = watching(share=0.02, dialect="sglang", engine="transformers", precision="fp8", replicaHeader="X-Replica")
    objects = template(merged(values, {"watch": {"referee": {"cpus": 7, "args": ["--dtype", "bfloat16"]}}}))
    assert option(objects, "proxy", "--share") == "0.02"
    assert option(objects, "proxy", "--dialect") == option(objects, "referee", "--dialect") == "sglang"
    assert option(objects, "proxy", "--replica-header") == "X-Replica"
    assert option(objects, "referee", "--engine") == "transformers"
    assert option(objects, "referee", "--precision") == "fp8"
    assert option(objects, "referee", "--threads") == "7"
    assert container(objects, "referee")["command"][-2:] == ["--dtype", "bfloat16"]
    assert container(objects, "referee")["resources"]["requests"]["cpu"] == "7"


def test_a_tolerance_is_mounted_where_the_referee_reads_it() -> None:
    objects = template(watching(tolerance={"configMap": "measured", "key": "gpu.json"}))
    spec = pod_templates(objects)["watch-referee"]["spec"]
    (volume,) = (each for each in spec["volumes"] if "configMap" in each)
    (mount,) = (each for each in spec["containers"][0]["volumeMounts"] if each["name"] == volume["name"])
    (item,) = volume["configMap"]["items"]
    assert (volume["configMap"]["name"], item["key"]) == ("measured", "gpu.json")
    assert option(objects, "referee", "--tolerance") == f"{mount['mountPath']}/{item['path']}"
    assert option(objects, "referee", "--precision") is None, "the two contradict each other"


def test_models_are_where_the_other_pods_have_them() -> None:
    objects = template(merged(BESIDE, {"hub": {"existingSecret": "token"}}))
    pods = pod_templates(objects)
    worker, referee = (pods[name]["spec"] for name in ("decode", "watch-referee"))
    for name in ("models", "hub-token"):
        mine, theirs = ([each for each in spec["volumes"] if each["name"] == name] for spec in (referee, worker))
        assert mine == theirs and mine
        mine, theirs = (
            [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == name]
            for spec in (referee, worker)
        )
        assert mine == theirs and mine
    variables = {each["name"]: each["value"] for each in referee["containers"][0]["env"]}
    assert variables["TRUESPEC_CACHE"] == "/models" and variables["HF_TOKEN_PATH"] == "/etc/truespec/hub/token"
    assert {each["name"] for each in pods["watch-proxy"]["spec"]["volumes"]} == {"tmp"}, (
        "no secret where traffic passes"
    )


def test_probes_ask_each_part_for_its_own_health() -> None:
    objects = template(ALONE)
    for part, path in (("proxy", "/.truespec/health"), ("referee", "/health")):
        found = container(objects, part)
        ports = {port["name"] for port in found["ports"]}
        probes = [found[name] for name in ("readinessProbe", "livenessProbe")]
        probes += [found["startupProbe"]] if part == "referee" else []
        for probe in probes:
            assert probe["httpGet"]["path"] == path and probe["httpGet"]["port"] in ports
    loads = container(objects, "referee")["startupProbe"]
    assert loads["failureThreshold"] * loads["periodSeconds"] >= 1800, "a large model takes long"


def test_streams_outlive_a_rolling_update_and_evidence_is_in_one_place() -> None:
    objects = template(watching(proxy={"replicas": 3}))
    proxy, referee = (named(objects, "Deployment", f"demo-truespec-watch-{part}") for part in ("proxy", "referee"))
    assert proxy["spec"]["replicas"] == 3
    assert proxy["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert proxy["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 600
    assert (referee["spec"]["replicas"], referee["spec"]["strategy"]) == (1, {"type": "Recreate"})
    budget = named(objects, "PodDisruptionBudget", "demo-truespec-watch-proxy")
    labels = proxy["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert not of_kind(template(watching(proxy={"replicas": 1})), "PodDisruptionBudget")


def test_prometheus_finds_the_referee_and_may_read_it() -> None:
    objects = template(ALONE, "--api-versions", MONITORING[0])
    monitor = one(objects, "PodMonitor")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    referee = pod_templates(objects)["watch-referee"]
    assert monitor["selector"]["matchLabels"].items() <= referee["metadata"]["labels"].items()
    assert {"name": endpoint["port"], "containerPort": 8101} in container(objects, "referee")["ports"]
    assert endpoint["port"] not in {port["name"] for port in container(objects, "proxy")["ports"]}


def ports_opened(objects: list[Object], direction: str) -> set[int]:
    rules = one(objects, "NetworkPolicy")["spec"][direction]
    return {port["port"] for rule in rules for port in rule.get("ports", ())}


def test_the_network_policy_lets_in_clients_and_prometheus_and_out_to_the_server() -> None:
    alone, beside = template(ALONE), template(BESIDE)
    assert ports_opened(alone, "ingress") == {8100, 8101}
    assert ports_opened(beside, "ingress") == {8000, 8080, 8265, 8100, 8101}
    peers = [peer for rule in one(alone, "NetworkPolicy")["spec"]["egress"] for peer in rule.get("to", ())]
    assert {"podSelector": {}} in peers
    elsewhere = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "models"}}}]
    rules = one(template(watching(serverPods=elsewhere)), "NetworkPolicy")["spec"]["egress"]
    assert {"to": elsewhere} in rules
    assert {"to": [{"podSelector": {}}]} not in rules


def test_ingress_and_route_lead_to_the_proxies_of_a_watch_alone() -> None:
    ways = {
        "ingress": {"enabled": True, "hosts": [{"host": "llm.example.com"}]},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
        "networkPolicy": {"clients": [{"namespaceSelector": {}}]},
    }
    for values, name, port in ((ALONE, "demo-truespec-watch", 8100), (BESIDE, "demo-truespec-serve-svc", 8000)):
        objects = template(merged(values, ways))
        (rule,) = one(objects, "Ingress")["spec"]["rules"]
        (path,) = rule["http"]["paths"]
        assert path["backend"]["service"] == {"name": name, "port": {"number": port}}
        (rule,) = one(objects, "HTTPRoute")["spec"]["rules"]
        assert rule["backendRefs"] == [{"name": name, "port": port}]


def test_one_claim_that_one_node_mounts_is_enough_for_a_watch_alone() -> None:
    objects = template(merged(ALONE, {"modelCache": {"enabled": True, "accessModes": ["ReadWriteOnce"]}}))
    assert one(objects, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteOnce"]
    for cache, claim in (({"enabled": True}, "demo-truespec-models"), ({"existingClaim": "mine"}, "mine"), ({}, None)):
        volumes = pod_templates(template(merged(ALONE, {"modelCache": cache})))["watch-referee"]["spec"]["volumes"]
        (models,) = (volume for volume in volumes if volume["name"] == "models")
        assert models.get("persistentVolumeClaim", {}).get("claimName") == claim


def test_the_test_of_a_watch_alone_asks_its_parts_from_where_proxies_may_run() -> None:
    placed = {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "c", "operator": "Exists"}]}
    objects = template(merged(watching(port=9000, proxy=placed), {"apiKeys": {"existingSecret": "k"}}))
    spec = pod_templates(objects)["test"]["spec"]
    assert placed.items() <= spec.items()
    (container,) = spec["containers"]
    assert container["args"][:2] == [
        f"http://demo-truespec-watch{end}" for end in (".demo.svc:9000", "-referee.demo.svc:8101")
    ]
    assert "volumes" not in spec, "it asks for no answer, and needs no key"
    assert "Pod" not in {found["kind"] for found in template(merged(ALONE, {"test": {"enabled": False}}))}


# -- without the chart ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest() -> list[Object]:
    return list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))


def deployed(manifest: list[Object]) -> dict[str, tuple[Object, Object]]:
    """The pod template and the container of each part."""
    pods = [found["spec"]["template"] for found in of_kind(manifest, "Deployment")]
    return {part["name"]: (pod, part) for pod in pods for part in pod["spec"]["containers"]}


def test_the_manifest_takes_the_traffic_and_passes_it_on(manifest: list[Object]) -> None:
    kubernetes.check(manifest)
    found = deployed(manifest)
    assert found.keys() == {"proxy", "referee"}
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind(manifest, "Service")}
    labels = {name: pod["metadata"]["labels"].items() for name, (pod, _) in found.items()}
    led = {
        name: {part for part, has in labels.items() if service["selector"].items() <= has}
        for name, service in services.items()
    }
    assert led == {"vllm": {"proxy"}, "vllm-server": set(), "vllm-watch-referee": {"referee"}}, "none asks itself"
    for name, part in (("vllm", "proxy"), ("vllm-watch-referee", "referee")):
        assert services[name]["ports"][0]["targetPort"] in {port["name"] for port in found[part][1]["ports"]}
    command = found["proxy"][1]["command"]
    urls = [f"http://{name}:{services[name]['ports'][0]['port']}" for name in ("vllm-server", "vllm-watch-referee")]
    assert [command[3], command[command.index("--referee") + 1]] == urls
    for name, (_, part) in found.items():
        assert part["command"][:3] == ["truespec", "watch", name] and fault(part["command"][1:]) is None
    assert "-l part=watch" in MANIFEST.read_text(encoding="utf-8")
    last = [each["metadata"]["name"] for each in manifest if each["metadata"].get("labels") != {"part": "watch"}]
    assert last == ["vllm"], "which takes the traffic over once the proxies are there"


def test_the_manifests_pods_are_restricted_and_probed(manifest: list[Object]) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    for name, (pod, part) in deployed(manifest).items():
        kubernetes.assert_restricted(pod)
        assert part["image"] == f"truespec:{chart['appVersion']}-cpu"
        path = {"proxy": "/.truespec/health", "referee": "/health"}[name]
        assert {part[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")} == {path}
