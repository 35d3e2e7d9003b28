"""The Job that checks the configuration before an install or an upgrade: what it is given, and what it finds."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart import (
    EXAMPLE_NAMES,
    MINIMAL,
    Object,
    config_check_here,
    merged,
    of_kind,
    one,
    pod_templates,
    run_config_check,
    template,
)
from tools.chart import EXAMPLES

pytestmark = pytest.mark.slow

EXAMPLE_VALUES = {name: yaml.safe_load((EXAMPLES / f"{name}-values.yaml").read_text()) for name in EXAMPLE_NAMES}
VLLM = {"vllm": {"enabled": True}}


def config(**sections: Any) -> dict[str, Any]:
    return {"config": sections}


def check(values: dict[str, Any], folder: Path) -> tuple[int, str]:
    """Exit status and output of the Job's command."""
    return config_check_here(job(values), folder)


def job(values: dict[str, Any]) -> Object:
    return one(template(merged(MINIMAL, values)), "Job")


GOOD = EXAMPLE_VALUES | {
    "minimal": {},
    "odd texts": config(model={"source": "/models/tiny", "name": "$(HOME) $$ {{ }} 'a\"b\\n'\n# é"}),
    "another block size": config(engine={"block_size": 24, "kv_cache_tokens": 24 * 700}),
    "vllm chooses the cache": merged(VLLM, config(engine={"max_model_len": 32768}, vllm={"replays": "torch"})),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_configuration_passes_and_is_what_the_service_gets(name: str, tmp_path: Path) -> None:
    objects = template(merged(MINIMAL, GOOD[name]))
    status, output = config_check_here(one(objects, "Job"), tmp_path)
    assert status == 0, output
    assert (tmp_path / "serve.yaml").read_text() == one(objects, "RayService")["spec"]["serveConfigV2"].rstrip("\n")


BAD: dict[str, dict[str, Any]] = {
    "engine.kv_cache_tokens: must be a multiple of block_size (24)":
        config(engine={"block_size": 24, "kv_cache_tokens": 16384}),
    "drafter.model: is missing: kind eagle3 needs a folder": config(drafter={"kind": "eagle3"}),
    "pools.prefill.gpus: is above 0, but engine.device is cpu; set it to 0": config(engine={"device": "cpu"}),
    "engine.verifier: cannot be set for engine.kind vllm": merged(VLLM, config(engine={"verifier": "coupled"})),
    "engine.kv_cache_tokens: must hold at least one sequence of max_model_len (9000) tokens, got 8192":
        merged(VLLM, config(engine={"max_model_len": 9000, "kv_cache_tokens": 8192})),
    "access.open_metrics: is false, but there are no keys to open it": config(access={"open_metrics": False}),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD, ids=[message[:40] for message in BAD])
def test_a_bad_configuration_fails_with_field_and_fix(message: str, tmp_path: Path) -> None:
    status, output = check(BAD[message], tmp_path)
    assert status == 1
    named = message if message.startswith("pools.") else f"config.{message}"
    assert f"Error: {named}" in output or f"\n{named}" in output
    assert str(tmp_path) not in output and "applications[" not in output, "which the values do not have"


def test_every_fault_is_reported_at_once_by_the_command_in_its_own_process_too(tmp_path: Path) -> None:
    engine = {
        "device": "cpu",
        "logprobs_mode": "processed_logprobs",
        "max_model_len": 32768,
        "block_size": 24,
        "kv_cache_tokens": 16384,
    }
    status, output = check(config(engine=engine), tmp_path)
    fields = [line.removeprefix("Error: ").split(": ")[0] for line in output.splitlines()]
    assert status == 1
    assert fields == [
        "pools.prefill.gpus",
        "pools.decode.gpus",
        "config.replay.sample_rate",
        "config.engine.kv_cache_tokens",
    ]
    done = run_config_check(job(config(engine=engine)), tmp_path)
    assert (done.returncode, done.stdout + done.stderr) == (status, output)


def test_it_runs_before_anything_else_and_stays_only_if_it_failed() -> None:
    made = job({})
    hooks = {key: value for key, value in made["metadata"]["annotations"].items() if key.startswith("helm.sh/")}
    assert hooks["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert hooks["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
    assert made["spec"]["backoffLimit"] == 0 and made["spec"]["activeDeadlineSeconds"] > 0
    assert made["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_its_pod_needs_nothing_of_the_release_and_runs_where_the_head_does() -> None:
    placed = {
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "cpu-only", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    }
    head = placed | {"priorityClassName": "serving"}
    secrets = {"hub": {"token": "t"}, "admin": {"enabled": True}, "modelCache": {"fetch": ["smollm2-135m"]}}
    image = {"image": {"pullSecrets": ["registry"]}, "commonAnnotations": {"sidecar.istio.io/inject": "false"}}
    pods = pod_templates(template(merged(MINIMAL, {"head": head}, secrets, image)))
    assert placed.items() <= pods["test"]["spec"].items(), "and so does the smoke test"
    pod = pods["config-check"]
    assert head.items() <= pod["spec"].items()
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["metadata"]["annotations"].items() >= image["commonAnnotations"].items()
    assert "serviceAccountName" not in pod["spec"], "the release's own is made after it"
    assert [volume.keys() - {"name"} for volume in pod["spec"]["volumes"]] == [{"downwardAPI"}]
    (container,) = pod["spec"]["containers"]
    assert [entry.keys() for entry in container["env"]] == [{"name", "value"}]


def test_it_can_be_left_out() -> None:
    assert not of_kind(template(merged(MINIMAL, {"configCheck": {"enabled": False}})), "Job")
