"""lm-evaluation-harness: its own tasks over local data, compared with its `hf` model in float32."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import pytest
import requests
import torch
from lm_eval.tasks import TaskManager

HERE = Path(__file__).parent
WINDOW = 512  # the longest text of `prose` takes several
SYSTEM = "You are a helpful assistant."
NATS = 1e-3


@pytest.fixture(autouse=True, scope="module")
def local_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tasks name their files from the repository's root; what `datasets` makes of them goes to a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HERE.parents[1])
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="module")
def traffic(api: str, model: str) -> Iterator[None]:
    """Sampled answers that other clients stream meanwhile."""
    done = threading.Event()

    def ask(number: int) -> None:
        for turn in range(200):
            if done.is_set():
                return
            body = {
                "model": model,
                "prompt": f"Story {number}.{turn}: once upon a time",
                "max_tokens": 48,
                "temperature": 1.0,
                "stream": True,
            }
            with requests.post(f"{api}/completions", json=body, stream=True, timeout=120) as reply:
                reply.raise_for_status()
                for _ in reply.iter_lines():
                    pass

    askers = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for asker in askers:
        asker.start()
    yield
    done.set()
    for asker in askers:
        asker.join()


def evaluated(task: str, kind: str, **settings: Any) -> dict[str, Any]:
    """What lm-eval's evaluator says of a task."""
    arguments = settings.pop("arguments")
    return lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(include_path=str(HERE / "tasks"), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        **settings,
    )


@pytest.fixture(scope="module")
def reference(checkpoint: str) -> Any:
    """Evaluates by lm-eval's `hf` model."""
    torch.set_num_threads(2)

    def evaluate(task: str, *, max_length: int = WINDOW, **settings: Any) -> dict[str, Any]:
        arguments = {"pretrained": checkpoint, "dtype": "float32", "device": "cpu", "max_length": max_length}
        return evaluated(task, "hf", arguments=arguments, batch_size=1, **settings)

    return evaluate


@pytest.fixture(scope="module")
def served(api: str, model: str, checkpoint: str) -> Any:
    """Evaluates by `local-completions`, eight requests at once."""
    arguments = {
        "model": model,
        "base_url": f"{api}/completions",
        "tokenizer": checkpoint,
        "num_concurrent": 8,
        "max_length": WINDOW,
    }

    def evaluate(task: str, **changes: Any) -> dict[str, Any]:
        return evaluated(task, "local-completions", arguments={**arguments, **changes})

    return evaluate


def metrics(found: dict[str, Any], task: str) -> dict[str, float]:
    return {name: value for name, value in found["results"][task].items() if isinstance(value, float)}


def responses(found: dict[str, Any], task: str) -> list[Any]:
    """What the model said, document by document."""
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["resps"] for sample in samples]


@pytest.mark.usefixtures("traffic")
def test_multiple_choice(served: Any, reference: Any) -> None:
    """`local-completions`: log-likelihoods within 1e-3 nats of `hf`, and equal accuracy, under other traffic"""
    ours, theirs = served("facts"), reference("facts")
    pairs = 0
    for mine, other in zip(responses(ours, "facts"), responses(theirs, "facts"), strict=True):
        for ((logprob, greedy),), ((expected, expected_greedy),) in zip(mine, other, strict=True):
            assert float(logprob) == pytest.approx(float(expected), abs=NATS)
            assert greedy == expected_greedy
            pairs += 1
    assert pairs == 96
    assert metrics(ours, "facts") == metrics(theirs, "facts")
    assert ours["results"]["facts"]["acc,none"] > 0.5  # the model knows some of it


def test_batches_text_prompts_and_the_services_tokenizer(api: str, model: str, served: Any) -> None:
    """batches of prompts (`batch_size`), prompts as text, and the service's tokenizer, unless another one is given"""
    plain = responses(served("facts"), "facts")
    remote = {"model": model, "base_url": f"{api}/completions", "num_concurrent": 4, "max_length": WINDOW}
    for changed in (
        served("facts", batch_size=6),
        served("facts", tokenized_requests=False),
        evaluated("facts", "local-completions", arguments=remote),
    ):
        for mine, other in zip(responses(changed, "facts"), plain, strict=True):
            for ((logprob, greedy),), ((expected, expected_greedy),) in zip(mine, other, strict=True):
                assert float(logprob) == pytest.approx(float(expected), abs=NATS)
                assert greedy == expected_greedy


@pytest.mark.usefixtures("traffic")
def test_rolling(served: Any, reference: Any) -> None:
    """`loglikelihood_rolling` over several windows, within 1e-3 nats"""
    ours = served("prose")
    theirs = reference("prose", max_length=WINDOW - 2)  # of which lm-eval's API models keep two tokens free
    for mine, other in zip(responses(ours, "prose"), responses(theirs, "prose"), strict=True):
        assert float(mine[0][0]) == pytest.approx(float(other[0][0]), abs=NATS)
    assert metrics(ours, "prose") == pytest.approx(metrics(theirs, "prose"), rel=1e-5)


@pytest.mark.usefixtures("traffic")
def test_generate_until(served: Any, reference: Any, metric: Callable[[str], float]) -> None:
    """`generate_until`: the same texts as `hf`, made with drafts"""
    accepted = metric("truespec_accepted_tokens_total")
    ours, theirs = served("answers"), reference("answers")
    assert responses(ours, "answers") == responses(theirs, "answers")
    assert metrics(ours, "answers") == metrics(theirs, "answers")
    assert ours["results"]["answers"]["exact_match,named"] > 0.4
    assert metric("truespec_accepted_tokens_total") > accepted


@pytest.mark.usefixtures("traffic")
def test_chat(api: str, model: str, reference: Any) -> None:
    """`local-chat-completions` with the chat template: the same texts as `hf`"""
    asked = {"apply_chat_template": True, "system_instruction": SYSTEM}
    arguments = {"model": model, "base_url": f"{api}/chat/completions", "num_concurrent": 4}
    ours = evaluated("answers", "local-chat-completions", arguments=arguments, **asked)
    theirs = reference("answers", **asked)
    assert responses(ours, "answers") == responses(theirs, "answers")
    assert metrics(ours, "answers") == metrics(theirs, "answers")
