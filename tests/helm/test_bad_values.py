"""Values that contradict each other or the schema are refused, with a message that names them and says what to do."""

from typing import Any

import pytest

from tests.support.chart import MINIMAL, merged, pod_templates, template
from tools.chart import ChartError

pytestmark = pytest.mark.slow


def engine(**fields: Any) -> dict[str, Any]:
    return {"config": {"engine": fields}}


def drafter(**fields: Any) -> dict[str, Any]:
    return {"config": {"drafter": fields}}


AUTOSCALED = {"worker": {"autoscaling": {"enabled": True}}}
INCREMENTAL = {
    "ray": {"upgrade": {"strategy": "NewClusterWithIncrementalUpgrade", "gatewayClassName": "istio"}},
    "test": {"enabled": False},
}
VLLM = {"vllm": {"enabled": True}}


def monitor(**fields: Any) -> dict[str, Any]:
    return {"monitoring": {"podMonitor": {"enabled": True} | fields}}


def watching(**fields: Any) -> dict[str, Any]:
    return {"watch": {"enabled": True, "only": True, "url": "http://vllm.models:8000"} | fields}


def alert(name: str, **fields: Any) -> dict[str, Any]:
    return {"monitoring": {"prometheusRule": {"alerts": {name: fields}}}}


BAD: dict[str, dict[str, Any]] = {
    # Names
    "has 48 characters and KubeRay allows 47; set fullnameOverride to a shorter one": {"fullnameOverride": "a" * 48},
    'The name "My-Model" must begin with a letter and have only a-z': {"fullnameOverride": "My-Model"},
    "serviceAccount.name is empty; name one that exists, or set": {"serviceAccount": {"create": False}},
    "The label ray.io/cluster is the chart's or KubeRay's own": {"commonLabels": {"ray.io/cluster": "x"}},
    "commonLabels.team: Does not match pattern": {"commonLabels": {"team": "a b"}},
    # Alerts
    "monitoring.prometheusRule.alerts.TmeHigh is not an alert; docs/runbooks": alert("TmeHigh", enabled=False),
    "TruespecProxyDown has no threshold, so none can be set": alert("TruespecProxyDown", threshold=1),
    "alerts.TruespecProxyDown.for: Does not match pattern": alert("TruespecProxyDown", **{"for": "5 minutes"}),
    "podMonitor.scrapeTimeout is 1m and interval 15s; the Prometheus operator refuses": monitor(scrapeTimeout="1m"),
    "config.access.open_metrics is false, so Prometheus needs a key; set apiKeys.smokeSecret":
        {**monitor(), "config": {"access": {"open_metrics": False}}},
    # Types and keys
    "worker.cpus: Invalid type. Expected: integer, given: string": {"worker": {"cpus": "4"}},
    "modelCache.mountPath is //dev/./shm, where the pods have something": {"modelCache": {"mountPath": "//dev/./shm"}},
    # The application's own settings, from its models
    "config.engine.kind is vllm, but vllm.enabled is not set; set that instead": engine(kind="vllm"),
    "config.drafter.num_draft_tokens: Must be less than or equal to 64": drafter(num_draft_tokens=65),
    "config.model.source: String length must be greater than or equal to 1": {"config": {"model": {"source": ""}}},
    # Settings that the chart makes itself, or that need something of it
    "config.access.keys_file is the chart's to set; use apiKeys": {"config": {"access": {"keys_file": "/k"}}},
    "config.receipts.key_file is the chart's to set; use receipts": {"config": {"receipts": {"key_file": "/k"}}},
    "so `helm test` needs a key; set apiKeys.smokeSecret": {"apiKeys": {"existingSecret": "keys"}},
    "apiKeys.smokeSecret is set, but there are no keys": {"apiKeys": {"smokeSecret": "key"}},
    "config.admin.token_file is the chart's to set; use admin.enabled": {"config": {"admin": {"token_file": "/t"}}},
    "config.dumps.folder is /var/dumps, but only /tmp is writable": {"config": {"dumps": {"folder": "/var/dumps"}}},
    "config.model.source is smollm2-135m, a name of the catalogue that no pod fetches; add it to modelCache.fetch":
        {"config": {"model": {"source": "smollm2-135m"}}},
    # Pools
    "pools.monolith is set, but topology disaggregated has only decode and": {"pools": {"monolith": {"replicas": 3}}},
    "pools.prefill.gpus is 0.5, and a pod has whole GPUs only; set it to 1": {"pools": {"prefill": {"gpus": 0.5}}},
    "pools.prefill.gpus is 2, but the torch engine runs on one GPU": {"pools": {"prefill": {"gpus": 2}}},
    "pools.decode.autoscaling.minReplicas (5) is above maxReplicas (2); lower it or raise maxReplicas":
        {"pools": {"decode": {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 2}}}},
    "terminationGracePeriodSeconds (120) must be at least drainSeconds + 30 (630)": {"worker": {"drainSeconds": 600}},
    "modelCache.accessModes has no ReadWriteMany, but 2 worker pods mount the claim; use ReadWriteMany":
        {"modelCache": {"accessModes": ["ReadWriteOnce"]}},
    # Image
    "image.repository is truespec, which nodes would pull from docker.io/library, where it is not; push the image "
    "and name it as REGISTRY/truespec, or set image.pullPolicy to Never": {"image": {"repository": "truespec"}},
    # Devices and containers
    "pools.decode.numOfHosts is 2, but the torch engine runs in one pod": {"worker": {"numOfHosts": 2}},
    "pools.decode.numOfHosts is 2, but handoffs are copied through files of one pod":
        {"vllm": {"enabled": True, "tensorParallelSize": 2}, "worker": {"numOfHosts": 2}},
    "pools.monolith has 2 GPUs a replica (gpus times numOfHosts), and vLLM needs 1 (vllm.tensorParallelSize":
        {"vllm": {"enabled": True}, "config": {"topology": "monolith"}, "pools": {"monolith": {"numOfHosts": 2}}},
    "pools.decode.resources.limits has nvidia.com/gpu, of which Ray would not know; set gpus":
        {"worker": {"resources": {"limits": {"nvidia.com/gpu": 2}}}},
    "pools.decode.resources.claims names gpu, which resourceClaims does not have; add it there, or remove it":
        {"worker": {"resources": {"claims": [{"name": "gpu"}]}}},
    "pools.prefill.gpus is 1, but gpuResource is empty and resources.claims too, so the container has no GPU; set":
        {"pools": {"prefill": {"gpuResource": ""}}},
    "pools.decode.resources.requests has 1 of rdma/hca, which Kubernetes gives a container only where the limit":
        {"worker": {"resources": {"requests": {"rdma/hca": 1}}}},
    "pools.decode.resources.requests has 1Gi of hugepages-2Mi":
        {"worker": {"resources": {"requests": {"hugepages-2Mi": "1Gi"}, "limits": {"hugepages-2Mi": "2Gi"}}}},
    "pools.decode asks for 64Gi of memory, but its limit is 32Gi, so that Kubernetes would refuse its pods; raise":
        {"worker": {"resources": {"requests": {"memory": "64Gi"}}}},
    "pools.decode asks for 40G of memory, but its limit": {"worker": {"resources": {"requests": {"memory": "40G"}}}},
    "pools.decode.shmSize is 64Mi, and Ray's object store, nine tenths of it, needs": {"worker": {"shmSize": "64Mi"}},
    # Volumes of models
    "modelCache.readOnly is true, but the pods would mount an empty volume; name a claim that holds the models":
        {"modelCache": {"readOnly": True}},
    "modelCache.readOnly is true, so modelCache.fetch cannot put smollm2-135m there; remove it, and run `truespec":
        {"modelCache": {"readOnly": True, "existingClaim": "c", "fetch": ["smollm2-135m"]}},
    "modelCache.subPath is a, but there is no claim whose folder it would be; remove it, or set modelCache.enabled":
        {"modelCache": {"enabled": False, "subPath": "a"}},
    "config.model.source is ./my-model, a folder of your machine, which the pods do not have; give its path on a":
        {"config": {"model": {"source": "./my-model"}}},
    "head has a container named autoscaler, as another of the pod, the chart's or KubeRay's; give it another name":
        {"head": {"sidecars": [{"name": "autoscaler", "image": "i"}]}},
    # Names that KubeRay's CRD takes once
    "pools.decode.env has HF_HOME twice, or the chart sets it too; remove it (modelCache.mountPath moves caches":
        {"worker": {"env": [{"name": "HF_HOME", "value": "/x"}]}},
    "head.volumeMounts mounts dumps, which volumes does not have; add it there":
        {"head": {"volumeMounts": [{"name": "dumps", "mountPath": "/dumps"}]}},
    "nil pointer evaluating interface {}.there": {"extraObjects": ["{{ .Values.nothing.there }}"]},
    # vLLM
    "config.engine.kind is torch, but vllm.enabled is set; remove one of them": merged(VLLM, engine(kind="torch")),
    "config.vllm.engine_args.tensor_parallel_size is the chart's to set; use vllm.tensorParallelSize":
        merged(VLLM, {"config": {"vllm": {"engine_args": {"tensor_parallel_size": 2}}}}),
    "vllm.tensorParallelSize is 2, but the torch engine runs on one GPU": {"vllm": {"tensorParallelSize": 2}},
    # Ray and KubeRay
    "ray.auth.enabled needs Ray 2.52 and ray.version is 2.51.0": {"ray": {"version": "2.51.0"}},
    "ray.version is 2.59.0 and the application needs 2.60": {"ray": {"version": "2.59.0"}},
    "but ray.auth.enabled is false; enable it or": {"ray": {"auth": {"enabled": False, "existingSecret": "s"}}},
    "redisAddress is not set; give redis://host:port": {"ray": {"gcsFaultTolerance": {"enabled": True}}},
    "KubeRay would not use it: set enabled": {"ray": {"gcsFaultTolerance": {"redisAddress": "redis://r:6379"}}},
    "needs Ray's autoscaler; set autoscaling.enabled of a pool": INCREMENTAL,
    "gatewayClassName is not set": merged(AUTOSCALED, INCREMENTAL, {"ray": {"upgrade": {"gatewayClassName": ""}}}),
    "ray.upgrade.stepSizePercent (60) is above maxSurgePercent (50); lower it":
        merged(AUTOSCALED, INCREMENTAL, {"ray": {"upgrade": {"stepSizePercent": 60, "maxSurgePercent": 50}}}),
    "an incremental upgrade has one per cluster behind KubeRay's own gateway; disable them":
        merged(AUTOSCALED, INCREMENTAL, {"ingress": {"enabled": True, "hosts": [{"host": "h"}]}}),
    "no service of a fixed name for `helm test`; set it to false, or use NewCluster":
        merged(AUTOSCALED, INCREMENTAL, {"test": {"enabled": True}}),
    "service.type and service.annotations do nothing in an incremental upgrade":
        merged(AUTOSCALED, INCREMENTAL, {"service": {"type": "LoadBalancer"}}),
    "ray.gcsFaultTolerance.redisAddress has port 99999; give one from 1 to 65535":
        {"ray": {"gcsFaultTolerance": {"enabled": True, "redisAddress": "redis://r:99999"}}},
    "gatewayClassName is set, but strategy is NewCluster": {"ray": {"upgrade": {"gatewayClassName": "istio"}}},
    # Network, secrets
    "service.port 8265 is one of Ray's own ports; choose another, 8000 for example": {"service": {"port": 8265}},
    "ingress.hosts empty; add at least one host": {"ingress": {"enabled": True}},
    "httpRoute.parentRefs empty; name the gateway": {"httpRoute": {"enabled": True}},
    "ingress.enabled is true, but networkPolicy.clients names no controller or gateway that may reach the pods":
        {"ingress": {"enabled": True, "hosts": [{"host": "h"}]}},
    "service.type is LoadBalancer, but networkPolicy.clients has no ipBlock, so nobody outside the cluster gets in":
        {"service": {"type": "LoadBalancer"}, "networkPolicy": {"clients": [{"namespaceSelector": {}}]}},
    "service.loadBalancerClass is set, but service.type is ClusterIP; set it to LoadBalancer, or remove the class":
        {"service": {"loadBalancerClass": "a/b"}},
    "KubeRay could not deploy the application; give the operator's namespace": {"networkPolicy": {"operator": []}},
    "networkPolicy.allowHttps is false, so org/name cannot be fetched; allow it":
        {"networkPolicy": {"allowHttps": False}, "config": {"model": {"source": "org/name"}}},
    "hub.token and hub.existingSecret are both set; remove the token": {"hub": {"token": "t", "existingSecret": "s"}},
    "podDisruptionBudget.maxUnavailable": {"podDisruptionBudget": {"maxUnavailable": 0}},
    # A watch
    "watch.only is true, but watch.enabled is not; set it": watching(enabled=False),
    "watch.only is true and watch.url empty; give the URL": watching(url=""),
    "watch.url: Does not match pattern": watching(url="vllm:8000"),
    "watch.share: Must be less than or equal to 1": watching(share=1.5),
    "watch.port is 8101, which is the referee's; choose another": watching(port=8101),
    "watch.proxy: Additional property gpus is not allowed": watching(proxy={"gpus": 1}),
    "terminationGracePeriodSeconds (5) must be at least 20": watching(proxy={"terminationGracePeriodSeconds": 5}),
    "The label app.kubernetes.io/name is the chart's": watching(referee={"podLabels": {"app.kubernetes.io/name": "x"}}),
    "image.repository is truespec, which nodes would pull": watching() | {"image": {"repository": "truespec"}},
    "has 48 characters": watching() | {"fullnameOverride": "a" * 48},
    "the referee cannot fetch org/name": watching(model="org/name") | {"networkPolicy": {"allowHttps": False}},
    "the referee of watch mounts the claim beside the workers": {
        "watch": {"enabled": True},
        "modelCache": {"accessModes": ["ReadWriteOnce"]},
        "config": {"topology": "monolith"},
    },
    "watch.url is empty, but in an incremental upgrade": merged(AUTOSCALED, INCREMENTAL, {"watch": {"enabled": True}}),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD, ids=[message[:50] for message in BAD])
def test_bad_values_are_refused_with_the_fix(message: str) -> None:
    with pytest.raises(ChartError) as refused:
        template(merged(MINIMAL, BAD[message]))
    assert message in str(refused.value)


@pytest.mark.parametrize("where", [{"commonLabels": None}, {"ray": {"autoscaler": {"resources": None}}}], ids=str)
def test_a_map_that_is_one_value_may_be_taken_away(where: dict[str, Any]) -> None:
    taken_away = {"test": {"resources": None}, "configCheck": {"resources": None}}
    pods = pod_templates(template(merged(MINIMAL, AUTOSCALED, taken_away, where)))
    for component in ("test", "config-check"):
        assert pods[component]["spec"]["containers"][0]["resources"] == {}


def test_what_the_bad_values_change_is_fine_otherwise() -> None:
    shipped_head = drafter(kind="eagle3", model="smollm2-135m-eagle3")
    needs_no_network = merged(shipped_head, {"networkPolicy": {"allowHttps": False}})
    pulls_nothing = {"image": {"repository": "truespec", "pullPolicy": "Never"}}
    for values in ({}, AUTOSCALED, VLLM, merged(AUTOSCALED, INCREMENTAL), needs_no_network, pulls_nothing):
        assert template(merged(MINIMAL, values))
    controller = {"podSelector": {"matchLabels": {"app": "nginx"}}}
    outside = {"ipBlock": {"cidr": "10.0.0.0/8"}}
    for way, clients in (
        ({"ingress": {"enabled": True, "hosts": [{"host": "h"}]}}, [controller]),
        ({"ingress": {"enabled": True, "hosts": [{"host": "h"}]}}, [{"podSelector": {}}, {"namespaceSelector": {}}]),
        ({"service": {"type": "NodePort"}}, [outside]),
    ):
        assert template(merged(MINIMAL, way, {"networkPolicy": {"clients": clients}}))
        assert template(merged(MINIMAL, way, {"networkPolicy": {"enabled": False}}))
