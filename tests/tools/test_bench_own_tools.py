"""`python -m tools.bench --own-tools` finds an engine that is slower in the bench than in its own benchmark tool."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from serve_app.text.tokenizer import Tokenizer
from tools.bench import own_tools
from tools.bench.engines import Launch, LeftOut
from tools.bench.own_tools import ToolSpeed, compare_with_own_tools
from tools.bench.plan import BenchCase, BenchPlan, EngineName
from tools.bench.process import EngineProcess
from tools.faults.tiny import write_tiny_tokenizer

WORKER = "tests.support.fake_bench_worker"
TOKENS = 6

# It writes down what it was given, and reports as many tokens a second as the file `speed` beside it says.
LLAMA_TOOL = """#!{python}
import pathlib, sys
folder = pathlib.Path(__file__).parent
with (folder / "asked").open("a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
print("loading the model")
print('{{"pp": 3, "tg": 6, "speed_tg": ' + (folder / "speed").read_text() + "}}")
"""

# In the place of vLLM's interpreter: it runs the worker as itself, and for `-c` reports a time for the prompts it read.
VLLM_PYTHON = """#!{python}
import json, os, sys
from pathlib import Path
if sys.argv[1] == "-m":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
options = dict(argument[2:].split("=", 1) for argument in sys.argv[3:] if "=" in argument)
prompts = [one["conversations"][0]["value"] for one in json.loads(Path(options["dataset-path"]).read_text())]
Path({log!r}).write_text(json.dumps([options, sys.argv[3:], prompts]))
length = int(options["output-len"])
report = {{"elapsed_time": {elapsed_s}, "total_num_tokens": {num_tokens}}}
Path(options["output-json"]).write_text(json.dumps(report))
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def plan(folder: Path, prompts: list[list[int]], *names: str) -> BenchPlan:
    return BenchPlan(
        model=folder,
        engines=tuple(EngineName.parse(name) for name in names),
        prompts={"chat": prompts},
        streams=(1, 2),
        temperatures=(0.0,),
        rounds=1,
        tokens=TOKENS,
        threads=1,
        dtype="float32",
        against=names[:1],
    )


def compare(
    made: BenchPlan, launch: Launch, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[ToolSpeed], list[LeftOut]]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with EngineProcess(launch, folder) as engine:
        return compare_with_own_tools(made, [launch], {launch.name.text: engine}, folder)


def llama_launch(folder: Path, python: str, **settings: Any) -> Launch:
    name = EngineName.parse("llama.cpp/plain")
    own = {"name": "llama", "log": str(folder / "log"), "gguf": "model.gguf", "k": None, "pause_s": 0.01}
    return Launch(name, WORKER, own | settings, threads=3, python=python)


@pytest.mark.parametrize(("own_speed", "fair"), [(50.0, True), (1000.0, False)])
def test_llama_is_compared_with_its_own_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_speed: float, fair: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path / "llama-batched-bench", LLAMA_TOOL.format(python=sys.executable))
    (tmp_path / "speed").write_text(str(own_speed))
    found, left_out = compare(
        plan(tmp_path, [[1, 2], [3, 4, 5, 6]], "llama.cpp/plain"),
        llama_launch(tmp_path, sys.executable),
        tmp_path,
        monkeypatch,
    )
    assert not left_out
    assert [speed.case for speed in found] == [BenchCase("chat", 1, 0.0), BenchCase("chat", 2, 0.0)]
    one, two = found
    assert one.own == two.own == own_speed
    assert one.here == pytest.approx(100), "one token in ten milliseconds"
    assert two.here == pytest.approx(200), "two streams give twice as many"
    assert one.fair is fair
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2 * own_tools._ROUNDS
    assert "-npp 3 -ntg 6 -npl 1 -t 3 -tb 3" in asked[0] and "-m model.gguf" in asked[0]
    assert "-npl 2" in asked[-1]


def test_without_the_tool_an_engine_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    launch = llama_launch(tmp_path, sys.executable)
    found, [missing] = compare(plan(tmp_path, [[1]], "llama.cpp/plain"), launch, tmp_path, monkeypatch)
    assert not found and "llama-batched-bench is neither on PATH" in missing.reason
    with_lookup = llama_launch(tmp_path, sys.executable, k=10)
    found, [missing] = compare(plan(tmp_path, [[1]], "llama.cpp/plain"), with_lookup, tmp_path, monkeypatch)
    assert not found and "no prompt lookup" in missing.reason


def test_a_tool_that_fails_is_named_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path / "llama-batched-bench", f"#!{sys.executable}\nraise SystemExit('no such model')\n")
    launch = llama_launch(tmp_path, sys.executable)
    found, [missing] = compare(plan(tmp_path, [[1]], "llama.cpp/plain"), launch, tmp_path, monkeypatch)
    assert not found and missing.reason.endswith("ended with status 1: no such model")


@pytest.mark.parametrize("missing_tokens", [0, 1])
def test_vllm_is_compared_on_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing_tokens: int
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_tiny_tokenizer(model)
    tokenizer = Tokenizer.from_folder(model)
    texts = ["a first one", "and another"]
    prompts = [tokenizer.encode(text) for text in texts]
    num_tokens = sum(map(len, prompts)) + 2 * TOKENS - missing_tokens
    log = tmp_path / "asked"
    settings = {"python": sys.executable, "log": str(log), "elapsed_s": 0.5, "num_tokens": num_tokens}
    python = program(tmp_path / "python", VLLM_PYTHON.format(**settings))
    llm = {"model": "view", "dtype": "float32", "max_model_len": 99, "seed": 0, "enforce_eager": False}
    launch = Launch(
        EngineName.parse("vllm/off"), WORKER, {"name": "v", "log": str(tmp_path / "log"), "llm": llm}, 1, str(python)
    )
    found, left_out = compare(plan(model, prompts, "vllm/off"), launch, tmp_path, monkeypatch)
    if missing_tokens:
        assert not found and f"not the {num_tokens + 1} of these prompts" in left_out[0].reason
        return
    assert [speed.own for speed in found] == [2 * TOKENS / 0.5] * 2
    options, flags, read = json.loads(log.read_text())
    assert read == texts
    assert options["max-num-seqs"] == "2" and options["num-prompts"] == "2" and options["output-len"] == str(TOKENS)
    assert "--no-enable-prefix-caching" in flags and "--enforce-eager" not in flags
