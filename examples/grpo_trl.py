"""GRPO with TRL on SmolLM2-135M: answers come from truespec's pools with speculation, new weights go there every step.

    truespec serve examples/grpo.yaml                # in one terminal
    python examples/grpo_trl.py                      # in another, in an environment with trl, vllm and matplotlib

The task is checkable: answer a small sum with the number and nothing else. What is truespec's here is a URL: rollouts
go through TRL's own `VLLMClient`, and weights by the routes of vLLM's server, as a folder that both sides read.
`rollout_func` is TRL's hook for that: its server mode sends weights over NCCL only, which needs a GPU.

It prints, step by step: reward; TME, the mean of e^|d| over the difference d of rollout and trainer logprobs (1 is
exact); the share of drafts accepted, which shows whether the head still fits the policy; and at the end tokens a second
with and without speculation. It leaves a plot.
"""

import argparse
import json
import random
import re
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import requests
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

SAMPLED = {"temperature": 1.0, "logprobs": 0}


class Rollouts:
    """TRL's `rollout_func`: answers from the service, each prompt sent once for all of its answers."""

    def __init__(self, client: VLLMClient, num_generations: int, max_tokens: int) -> None:
        self.client = client
        self.num_generations = num_generations
        self.max_tokens = max_tokens
        self.history: list[dict[str, float]] = []

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Token ids and logprobs of answers to prompts, which TRL repeats for each answer it wants."""
        unique = prompts[:: self.num_generations]
        ids = encode(trainer.processing_class, unique)
        before, began = acceptance_counts(self.client.base_url), time.monotonic()
        out = self.client.generate(ids, n=self.num_generations, max_tokens=self.max_tokens, **SAMPLED)
        took = time.monotonic() - began
        after = acceptance_counts(self.client.base_url)
        prompt_ids = [prompt for prompt in out["prompt_ids"] for _ in range(self.num_generations)]
        logprobs = [[step[0] for step in answer] for answer in out["logprobs"]]
        drafted, accepted = (now - earlier for now, earlier in zip(after, before, strict=True))
        few = slice(self.num_generations)  # the answers to one prompt: to compare costs a forward pass
        self.history.append(
            {
                "tme": tme(trainer.model, prompt_ids[few], out["completion_ids"][few], logprobs[few]),
                "acceptance": accepted / drafted if drafted else 0.0,
                "tokens_per_s": sum(map(len, out["completion_ids"])) / took,
            }
        )
        return {"prompt_ids": prompt_ids, "completion_ids": out["completion_ids"], "logprobs": logprobs}


class PushWeights(TrainerCallback):
    """Sends the policy to the service after every step: all replicas serve it before the next rollouts, or none."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.run = f"grpo-{int(time.time())}"  # versions are never used twice
        self.seconds: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Start from the same weights, whatever the service serves by now."""
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Save the checkpoint where every replica can read it, and have it served."""
        began, folder = time.monotonic(), self.folder / f"step-{state.global_step}"
        model.save_pretrained(folder)
        for path, body in (
            ("start_weight_update", {}),
            ("update_weights", {"update_info": {"path": str(folder.resolve())}}),
            ("finish_weight_update", {"weight_version": f"{self.run}-{folder.name}"}),
        ):
            reply = requests.post(f"{self.url}/{path}", json=body, timeout=600)
            if not reply.ok:
                raise RuntimeError(f"/{path} answered {reply.status_code}: {reply.text}")
        # Replicas that start later read the newest folder; the one before is no longer needed.
        shutil.rmtree(self.folder / f"step-{state.global_step - 1}", ignore_errors=True)
        self.seconds.append(time.monotonic() - began)


class Report(TrainerCallback):
    """Prints one line a step, and keeps the rewards."""

    def __init__(self, rollouts: Rollouts, pushes: PushWeights) -> None:
        self.rollouts, self.pushes = rollouts, pushes
        self.rewards: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **others: Any) -> None:
        """A step is over."""
        if logs is None or "reward" not in logs:
            return
        self.rewards.append(logs["reward"])
        last = self.rollouts.history[-1]
        print(
            f"step {state.global_step:3}  reward {logs['reward']:.3f}  TME {last['tme']:.5f}  "
            f"accepted {last['acceptance']:.0%}  {last['tokens_per_s']:.0f} tokens/s  "
            f"push {self.pushes.seconds[-1]:.1f} s",
            flush=True,
        )


def encode(tokenizer: Any, conversations: list[Any]) -> list[list[int]]:
    """Token ids of conversations in the model's chat template, up to where the answer begins."""
    encoded: Any = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    ids: list[list[int]] = encoded["input_ids"]
    return ids


@torch.no_grad()
def tme(model: Any, prompts: list[list[int]], answers: list[list[int]], logprobs: list[list[float]]) -> float:
    """The mean of e^|d| over all tokens of the answers, d = the trainer's logprob less the rollout's, in nats."""
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # [B, L]; what is padded on the right is not read
    mask = torch.arange(padded.shape[1])[None] < lengths[:, None]
    logits = model(padded.to(model.device), attention_mask=mask.to(model.device)).logits  # [B, L, V]
    total, count = 0.0, 0
    for row, prompt, answer, served in zip(logits, prompts, answers, logprobs, strict=True):
        own = torch.log_softmax(row[len(prompt) - 1 : len(prompt) + len(answer) - 1].float().cpu(), -1)  # [T, V]
        own = own.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        total += (own - torch.tensor(served)).abs().exp().sum().item()
        count += len(answer)
    return total / count


def acceptance_counts(url: str) -> tuple[float, float]:
    """Draft tokens up to now, and those of them that were accepted, of all replicas."""
    sums: dict[str, float] = defaultdict(float)
    for line in requests.get(f"{url}/metrics", timeout=60).text.splitlines():
        found = re.match(r"(truespec_(?:draft|accepted)_tokens_total)\{.*\} (\S+)", line)
        if found:
            sums[found[1]] += float(found[2])
    return sums["truespec_draft_tokens_total"], sums["truespec_accepted_tokens_total"]


def sums(count: int, seed: int) -> Dataset:
    """Prompts that ask for a sum of two digits, and the sums."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        first, second = draw.randint(1, 9), draw.randint(1, 9)
        question = f"What is {first} + {second}? Answer with the number only."
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": str(first + second)})
    return Dataset.from_list(rows)


def reward(completions: list[Any], answer: list[str], **others: Any) -> list[float]:
    """1 for the number alone, 0.5 where the number stands among other words, 0.2 for another number alone, else 0."""
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        text = completion[0]["content"].strip().rstrip(".")
        numbers = re.findall(r"\d+", text)
        if text == expected:
            scores.append(1.0)
        elif numbers and numbers[-1] == expected:
            scores.append(0.5)
        else:
            scores.append(0.2 if text.isdigit() else 0.0)
    return scores


def compare_speed(client: VLLMClient, prompts: list[list[int]], *, repeats: int = 3) -> dict[str, float]:
    """Tokens a second of one answer at a time, with speculation and without, in turns."""
    seconds: dict[bool, float] = defaultdict(float)
    tokens: dict[bool, int] = defaultdict(int)
    for _ in range(repeats):
        for speculate in (False, True):
            began = time.monotonic()
            out = client.generate(
                prompts[:1], max_tokens=64, temperature=1.0, logprobs=0,
                generation_kwargs={"speculate": speculate, "ignore_eos": True},
            )  # fmt: skip
            seconds[speculate] += time.monotonic() - began
            tokens[speculate] += len(out["completion_ids"][0])
    return {"plain": tokens[False] / seconds[False], "speculating": tokens[True] / seconds[True]}


def plot(history: list[dict[str, float]], rewards: list[float], path: Path) -> None:
    """Reward, TME and acceptance by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(7, 7), sharex=True, layout="constrained")
    rows = (
        ("reward", rewards),
        ("TME, rollout and trainer", [one["tme"] for one in history[: len(rewards)]]),
        ("share of drafts accepted", [one["acceptance"] for one in history[: len(rewards)]]),
    )
    for axis, (name, values) in zip(axes, rows, strict=True):
        axis.plot(range(1, len(values) + 1), values, marker=".")
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, and print and plot what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the service")
    parser.add_argument(
        "--model",
        type=Path,
        default=Path.home() / ".cache/truespec/models/smollm2-135m",
        help="folder of the checkpoint that the service started with (truespec model get smollm2-135m)",
    )
    parser.add_argument("--out", type=Path, default=Path("build/grpo"), help="where weights, figures and the plot go")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=3, help="prompts a step")
    parser.add_argument("--generations", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    options = parser.parse_args()

    client = VLLMClient(base_url=options.url, connection_timeout=60)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    rollouts = Rollouts(client, options.generations, options.max_tokens)
    pushes = PushWeights(options.url, options.out / "weights")
    report = Report(rollouts, pushes)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=sums(options.steps * options.prompts, seed=1),
        rollout_func=rollouts,
        callbacks=[pushes, report],
        args=GRPOConfig(
            output_dir=str(options.out),
            max_steps=options.steps,
            per_device_train_batch_size=options.prompts * options.generations,
            num_generations=options.generations,
            max_completion_length=options.max_tokens,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant",
            beta=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=False,
        ),
    )
    question = [[{"role": "user", "content": "Tell me a story about a lighthouse."}]]
    story = encode(tokenizer, question)
    first = compare_speed(client, story)
    trainer.train()
    last = compare_speed(client, story)
    options.out.mkdir(parents=True, exist_ok=True)
    figures = {"speed_before": first, "speed_after": last, "rewards": report.rewards, "steps": rollouts.history}
    (options.out / "figures.json").write_text(json.dumps(figures, indent=1))
    plot(rollouts.history, report.rewards, options.out / "grpo.png")
    for when, speed in (("before", first), ("after", last)):
        print(
            f"one story {when}: {speed['plain']:.0f} tokens/s plain, {speed['speculating']:.0f} with speculation "
            f"({speed['speculating'] / speed['plain']:.2f} times)"
        )
    print(f"reward {report.rewards[0]:.3f} at first, {report.rewards[-1]:.3f} at last; {options.out / 'grpo.png'}")


if __name__ == "__main__":
    main()
