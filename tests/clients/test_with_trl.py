"""TRL's `VLLMClient` and vLLM's client of weight updates, compared with a float32 forward pass by `transformers`."""

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL on versions of vLLM that it does not know yet
    from trl.generation.vllm_client import VLLMClient

NATS = 1e-3
TEXTS = ["Water is made of", "The quick brown fox", "Once upon a time"]


@pytest.fixture(scope="module")
def client(base_url: str) -> VLLMClient:
    return VLLMClient(base_url=base_url, connection_timeout=60)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: str) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def reference(checkpoint: str) -> Any:
    """The served checkpoint in transformers."""
    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def logprobs_of(reference: Any) -> Callable[[list[int]], torch.Tensor]:
    """Log-probabilities of every token behind each prefix of a sequence, by transformers."""

    @torch.no_grad()
    def compute(token_ids: list[int]) -> torch.Tensor:
        return reference(torch.tensor([token_ids])).logits[0].log_softmax(-1)

    return compute


def compared(found: dict[str, Any], prompts: list[list[int]], logprobs_of: Callable[[list[int]], torch.Tensor]) -> int:
    """Checks every token's logprobs of an answer to each prompt, and returns how many there were."""
    tokens = 0
    for prompt, completion, logprobs, ids in zip(
        prompts, found["completion_ids"], found["logprobs"], found["logprob_token_ids"], strict=True
    ):
        expected = logprobs_of(prompt + completion)
        assert len(logprobs) == len(completion)
        for place, (token, values, tops) in enumerate(zip(completion, logprobs, ids, strict=True)):
            row = expected[len(prompt) - 1 + place]
            assert token in tops
            assert values == pytest.approx(row[tops].tolist(), abs=NATS)
            tokens += 1
    return tokens


def test_generate_from_token_ids(client: VLLMClient, tokenizer: Any, logprobs_of: Any) -> None:
    """`generate` from batches of token ids, with `n`; logprobs within 1e-3 nats of `transformers`"""
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    found = client.generate(prompts, n=4, max_tokens=24, temperature=1.0)
    assert found["prompt_ids"] == prompts
    assert len(found["completion_ids"]) == 12
    assert len({tuple(one) for one in found["completion_ids"][:4]}) > 1  # sampled
    assert compared(found, [prompt for prompt in prompts for _ in range(4)], logprobs_of) > 100


def test_generate_from_text(client: VLLMClient, tokenizer: Any, logprobs_of: Any) -> None:
    """`generate` from text, with the top logprobs, and without any"""
    found = client.generate(TEXTS, max_tokens=8, temperature=1.0, logprobs=3)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert found["prompt_ids"] == prompts
    compared(found, prompts, logprobs_of)
    for completion, logprobs, ids in zip(
        found["completion_ids"], found["logprobs"], found["logprob_token_ids"], strict=True
    ):
        for token, values, tops in zip(completion, logprobs, ids, strict=True):
            assert values == sorted(values, reverse=True)
            assert len(tops) == (3 if token in tops[:3] else 4)
    assert client.generate(TEXTS, max_tokens=4, logprobs=None)["logprobs"] is None


def test_sampling_parameters(client: VLLMClient, tokenizer: Any) -> None:
    """`top_k`, `min_p`, `repetition_penalty`, seeds, and `structured_outputs_regex`"""
    greedy = client.generate(TEXTS, max_tokens=8, temperature=0.0)["completion_ids"]
    assert client.generate(TEXTS, max_tokens=8, temperature=3.0, top_k=1)["completion_ids"] == greedy
    assert client.generate(TEXTS, max_tokens=8, temperature=3.0, min_p=1.0)["completion_ids"] == greedy
    assert client.generate(TEXTS, max_tokens=24, temperature=0.0, repetition_penalty=2.0)["completion_ids"] != greedy
    seeded = [client.generate(TEXTS, max_tokens=8, generation_kwargs={"seed": 5})["completion_ids"] for _ in range(2)]
    assert seeded[0] == seeded[1]
    numbers = client.generate(TEXTS, max_tokens=8, structured_outputs_regex="[0-9]{3}")["completion_ids"]
    assert all(re.fullmatch("[0-9]{3}", tokenizer.decode(one, skip_special_tokens=True)) for one in numbers)


def test_chat(client: VLLMClient, tokenizer: Any, logprobs_of: Any) -> None:
    """`chat` with `n` and tools"""
    talks = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}] for text in TEXTS[:2]]
    found = client.chat(talks, n=2, max_tokens=12)
    prompts = [tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False) for talk in talks]
    assert found["prompt_ids"] == prompts
    assert compared(found, [prompt for prompt in prompts for _ in range(2)], logprobs_of) > 20

    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: which one.
        """
        return city

    (with_tools,) = client.chat(talks[:1], max_tokens=4, tools=[weather])["prompt_ids"]
    assert '"weather"' in tokenizer.decode(with_tools)


def test_sequence_logprobs(client: VLLMClient, tokenizer: Any, logprobs_of: Any) -> None:
    """`get_sequence_logprobs` of a teacher: the top 8 and the actual tokens, within 1e-3 nats, in chunks"""
    sequences = [tokenizer(text + ", and so it goes on and on.")["input_ids"] for text in TEXTS]
    lengths = [2, 3, 4]
    for chunk_size in (0, 2):
        found = client.get_sequence_logprobs(sequences, lengths, top_logprobs=8, chunk_size=chunk_size)
        for number, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            expected = logprobs_of(sequence)[length - 1 : -1]
            values, ids = torch.tensor(found["logprobs"][number]), torch.tensor(found["logprob_token_ids"][number])
            assert values.shape == (len(sequence) - length, 8)
            torch.testing.assert_close(values, expected.topk(8).values, atol=NATS, rtol=0)
            torch.testing.assert_close(values, expected.gather(-1, ids), atol=NATS, rtol=0)
            chosen = torch.tensor(sequence[length:])[:, None]
            actual = torch.tensor(found["actual_logprobs"][number])
            torch.testing.assert_close(actual, expected.gather(-1, chosen), atol=NATS, rtol=0)


def test_server(client: VLLMClient) -> None:
    """`get_server_info`, `get_world_size` and `reset_prefix_cache`; on a CPU, NCCL is refused by TRL itself"""
    assert client.get_server_info()["weight_transfer_config"] is not None
    assert client.get_world_size() == 2  # a prefill and a decode replica
    client.reset_prefix_cache()
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        client.init_communicator(device="cpu")


def test_new_weights(
    base_url: str, client: VLLMClient, tokenizer: Any, reference: Any, logprobs_of: Any, checkpoint: str, tmp_path: Path
) -> None:
    """new weights from a folder, by vLLM's own `HTTPVLLMWeightSyncClient`, while requests run"""
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    kept = {name: value.clone() for name, value in reference.state_dict().items()}
    updates = HTTPVLLMWeightSyncClient(base_url)

    def put(folder: str, version: str) -> None:
        updates.init_weight_transfer_engine({"backend": "folder"})
        updates.start_weight_update()
        updates.update_weights({"path": folder})
        updates.finish_weight_update(version)

    torch.manual_seed(0)
    with torch.no_grad():
        for value in reference.parameters():
            value.add_(torch.randn_like(value) * 0.02 * value.std())
    reference.save_pretrained(tmp_path)
    try:
        with ThreadPoolExecutor() as pool:
            running = pool.submit(client.generate, prompts, n=4, max_tokens=64)
            put(str(tmp_path), "step-1")
            assert len(running.result()["completion_ids"]) == 12
        assert compared(client.generate(prompts, max_tokens=24), prompts, logprobs_of) > 30
    finally:
        put(checkpoint, "step-2")
        reference.load_state_dict(kept)
    assert compared(client.generate(prompts, max_tokens=24), prompts, logprobs_of) > 30


def test_the_grpo_example(base_url: str, checkpoint: str, tmp_path: Path) -> None:
    """`GRPOTrainer` with rollouts from the service and its weights after every step (`examples/grpo_trl.py`)"""
    example = Path(__file__).parents[2] / "examples" / "grpo_trl.py"
    options = ["--url", base_url, "--model", checkpoint, "--out", str(tmp_path), "--steps", "2", "--prompts", "2"]
    options += ["--generations", "4", "--learning-rate", "1e-4"]
    done = subprocess.run([sys.executable, example, *options], check=False, capture_output=True, text=True, timeout=500)
    try:
        assert done.returncode == 0, done.stderr[-3000:]
        figures = json.loads((tmp_path / "figures.json").read_text())
        assert len(figures["rewards"]) == len(figures["steps"]) == 2
        # The second rollouts come from the weights that the first step made; those before it would give another TME.
        assert all(step["tme"] < 1.001 and step["acceptance"] > 0 for step in figures["steps"])
        version = requests.get(f"{base_url}/weight_info", timeout=60).json()["weight_version"]
        assert version.startswith("grpo-") and version.endswith("-step-2")
        assert (tmp_path / "grpo.png").stat().st_size > 10_000
    finally:
        updates = HTTPVLLMWeightSyncClient(base_url)
        updates.start_weight_update()
        updates.update_weights({"path": checkpoint})
        updates.finish_weight_update("configured")
