"""`truespec train-drafter` as a job of a Ray cluster, submitted as the README says."""

import gc
import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.job_submission import JobStatus, JobSubmissionClient
from tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.ray]


@pytest.fixture
def client() -> Iterator[JobSubmissionClient]:
    context = ray.init(num_cpus=2, log_to_driver=False, logging_level="ERROR", include_dashboard=True)
    yield JobSubmissionClient(f"http://{context.dashboard_url}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray lets go of its processes before they have ended
        ray.shutdown()
        gc.collect()


def test_a_drafter_is_trained_by_a_job(client: JobSubmissionClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", tokenizer=True, num_hidden_layers=4)
    truespec, out = Path(sys.executable).with_name("truespec"), tmp_path / "out"
    job = client.submit_job(
        entrypoint=f"{truespec} train-drafter --model {model} --out {out} --kind mtp --conversations 40 --steps 4"
    )
    while not (status := client.get_job_status(job)).is_terminal():
        time.sleep(0.5)
    assert status == JobStatus.SUCCEEDED, client.get_job_logs(job)
    assert f"head in {out}" in client.get_job_logs(job).replace("\n", "")
    report = json.loads((out / "report.json").read_text())
    assert report["final"]["step"] == 4
    assert report["provenance"]["kind"] == "mtp"
