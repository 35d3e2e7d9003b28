"""Helm itself upgrades and rolls the chart back, against a stand-in for the API server."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import MINIMAL, config_check_here, merged, objects_of, of_kind
from tests.support.fake_api_server import FakeApiServer, running_api_server
from tools.chart import CHART, ChartError, run_helm

pytestmark = pytest.mark.slow

CLAIM = "demo-truespec-models"
BRIEF = merged(MINIMAL, {"monitoring": {"dashboards": {"enabled": False}}})  # which are long
BASE = merged(BRIEF, {"configCheck": {"enabled": False}})
WITH_CLAIM = merged(BASE, {"modelCache": {"size": "100Gi", "storageClassName": "fast"}})
SHARED = merged(BASE, {"modelCache": {"existingClaim": "shared-models", "size": "5Gi"}})
NO_CLAIM = merged(BASE, {"modelCache": {"enabled": False, "accessModes": ["ReadWriteOnce"]}})


@dataclass(frozen=True)
class Cluster:
    """Helm with the stand-in."""

    api: FakeApiServer
    helm: Callable[..., str]
    chart: Path

    def upgrade(self, values: dict[str, Any], *options: str, chart: Path | None = None) -> None:
        options = ("--install", "--disable-openapi-validation", "-f", "-", *options)
        self.helm("upgrade", "demo", str(chart or self.chart), *options, stdin=json.dumps(values))

    def service(self) -> dict[str, Any]:
        """What the RayService asks for."""
        service = self.api.named("rayservices", "demo-truespec")
        assert service is not None
        return service["spec"]

    def claims_in_manifest(self) -> list[dict[str, Any]]:
        objects = objects_of(self.helm("get", "manifest", "demo"))
        return [claim["spec"] for claim in of_kind(objects, "PersistentVolumeClaim")]

    def mounted_claim(self) -> str | None:
        """The claim of the decode pods; None where they have none."""
        volumes = self.service()["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["volumes"]
        models = next(volume for volume in volumes if volume["name"] == "models")
        return models.get("persistentVolumeClaim", {}).get("claimName")


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart without dashboards and examples: helm packs the whole of it into every revision."""
    brief = Path(shutil.copytree(CHART, tmp_path_factory.mktemp("chart") / "truespec"))
    shutil.rmtree(brief / "ci")
    for dashboard in (brief / "dashboards").glob("*.json"):
        dashboard.unlink()
    return brief


@pytest.fixture
def cluster(tmp_path: Path, chart: Path) -> Iterator[Cluster]:
    with running_api_server(tmp_path) as (api, kubeconfig):

        def helm(*arguments: str, **options: Any) -> str:
            return run_helm(*arguments, "--namespace", "demo", "--kubeconfig", str(kubeconfig), **options)

        yield Cluster(api, helm, chart)


@pytest.mark.parametrize("without", [SHARED, NO_CLAIM], ids=["another claim", "no claim"])
def test_a_rollback_finds_the_claim_that_a_later_revision_did_not_use(cluster: Cluster, without: Any) -> None:
    cluster.upgrade(WITH_CLAIM)
    cluster.upgrade(without)
    assert cluster.api.named("persistentvolumeclaims", CLAIM), "the models are kept"
    assert cluster.mounted_claim() != CLAIM
    cluster.upgrade(without)  # however many revisions there are
    cluster.helm("rollback", "demo", "1")
    assert cluster.mounted_claim() == CLAIM
    cluster.helm("rollback", "demo", "2")
    assert cluster.mounted_claim() != CLAIM


def test_a_ray_service_that_was_deleted_is_made_again_by_an_upgrade(cluster: Cluster) -> None:
    cluster.upgrade(BASE)  # KubeRay gave up on it: InitializingTimeout
    before = cluster.service()
    cluster.api.objects = {path: found for path, found in cluster.api.objects.items() if "/rayservices/" not in path}
    cluster.upgrade({"ray": {"initializingTimeoutSeconds": 7200}}, "--reuse-values")
    assert cluster.service() == before


def test_an_atomic_upgrade_that_fails_goes_back_to_the_claim(cluster: Cluster) -> None:
    cluster.upgrade(WITH_CLAIM)
    cluster.api.refusals = 1
    with pytest.raises(ChartError, match="has been rolled back due to atomic being set"):
        cluster.upgrade(SHARED, "--atomic", "--timeout", "60s")
    assert cluster.mounted_claim() == CLAIM
    assert "status: deployed" in cluster.helm("status", "demo", "-o", "yaml")


def test_a_claim_that_is_carried_along_is_left_as_it_is(cluster: Cluster) -> None:
    cluster.upgrade(WITH_CLAIM)
    cluster.upgrade(NO_CLAIM)  # whose size and access mode the API server would refuse
    (spec,) = cluster.claims_in_manifest()
    assert spec["accessModes"] == ["ReadWriteMany"]
    assert (spec["storageClassName"], spec["resources"]["requests"]) == ("fast", {"storage": "100Gi"})
    cluster.upgrade(merged(WITH_CLAIM, {"modelCache": {"size": "300Gi"}}))
    assert cluster.claims_in_manifest()[0]["resources"]["requests"] == {"storage": "300Gi"}


def test_a_claim_that_was_deleted_is_not_made_again_and_comes_back_with_a_rollback(cluster: Cluster) -> None:
    cluster.upgrade(WITH_CLAIM)
    cluster.upgrade(SHARED)
    for path in [path for path in cluster.api.objects if path.endswith(CLAIM)]:
        del cluster.api.objects[path]
    cluster.upgrade(SHARED)
    assert cluster.api.named("persistentvolumeclaims", CLAIM) is None
    cluster.helm("rollback", "demo", "1")
    assert cluster.api.named("persistentvolumeclaims", CLAIM)


def test_a_claim_that_never_held_anything_holds_up_no_upgrade(cluster: Cluster) -> None:
    cluster.api.claim_phase = "Pending"  # a cluster without ReadWriteMany
    cluster.upgrade(WITH_CLAIM)
    cluster.upgrade(NO_CLAIM, "--wait", "--timeout", "60s")
    assert cluster.claims_in_manifest() == []


def test_a_claim_of_the_same_name_that_is_not_the_releases_is_left_alone(cluster: Cluster) -> None:
    foreign = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM, "labels": {}}}
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    cluster.api.answer("POST", "/api/v1/namespaces/demo/persistentvolumeclaims", {}, foreign | {"spec": spec})
    cluster.upgrade(merged(BASE, {"modelCache": {"existingClaim": CLAIM}}))
    assert cluster.claims_in_manifest() == []
    assert cluster.mounted_claim() == CLAIM


def test_a_claim_outlives_its_release_and_the_next_one_takes_it_over(cluster: Cluster) -> None:
    cluster.upgrade(WITH_CLAIM)
    cluster.helm("uninstall", "demo")
    assert [path.rsplit("/", 1)[-1] for path in cluster.api.objects] == [CLAIM]
    cluster.upgrade(SHARED)
    assert len(cluster.claims_in_manifest()) == 1
    cluster.upgrade(WITH_CLAIM)
    assert cluster.mounted_claim() == CLAIM


def test_a_bad_configuration_fails_before_anything_of_the_service_changes(cluster: Cluster, tmp_path: Path) -> None:
    ran = []

    def run(job: dict[str, Any]) -> bool:
        ran.append(config_check_here(job, tmp_path))
        return ran[-1][0] == 0

    cluster.api.run_job = run
    bad = merged(BRIEF, {"config": {"engine": {"block_size": 24, "kv_cache_tokens": 16384}}, "worker": {"replicas": 3}})
    with pytest.raises(ChartError, match=r"failed pre-install: [^$]*job demo-truespec-config-check failed"):
        cluster.upgrade(bad)
    names = [path.rsplit("/", 1)[-1] for path in cluster.api.objects if "/secrets/" not in path]
    assert names == ["demo-truespec-config-check"], "the Job stays, for its log"
    assert "engine.kv_cache_tokens: must be a multiple of block_size (24)" in ran[-1][1]

    cluster.upgrade(BRIEF)
    service = cluster.service()
    assert ran[-1][0] == 0
    assert cluster.api.named("jobs", "demo-truespec-config-check") is None
    with pytest.raises(ChartError, match=r"pre-upgrade hooks failed: [^$]*job demo-truespec-config-check failed"):
        cluster.upgrade(bad)
    assert cluster.service() == service
