"""Ask the running service for a completion and read its metrics: `smoke.py URL [TIMEOUT_S [KEY_FILE]]`."""

import json
import math
import sys
import time
import urllib.error
import urllib.request

headers = {"content-type": "application/json"}
if sys.argv[3:]:
    with open(sys.argv[3]) as key_file:
        headers["authorization"] = f"Bearer {key_file.read().strip()}"
url, deadline = sys.argv[1].rstrip("/"), time.monotonic() + float((sys.argv[2:] or ["120"])[0])


def call(path, body=None):
    """The answer to a request, as text; waits while nobody answers or the service says that it is not ready."""
    data = None if body is None else json.dumps(body).encode()
    while True:
        request = urllib.request.Request(url + path, data, headers)
        left = deadline - time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=max(left, 1)) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code not in (404, 429, 503) or left < 0:
                sys.exit(f"{url + path}: {error.code} {error.read().decode(errors='replace')[:500]}")
        except OSError as error:
            if left < 0:
                sys.exit(f"{url + path}: {error}")
        time.sleep(2)


def require(holds, what):
    if not holds:
        sys.exit(f"FAILED: {what}")
    sys.stdout.write(f"ok: {what}\n")


def emitted():
    lines = [line for line in call("/metrics").splitlines() if line.startswith("truespec_emitted_tokens_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


require(json.loads(call("/healthz"))["status"] == "ok", "/healthz says ok")
models = [model["id"] for model in json.loads(call("/v1/models"))["data"]]
require(models, f"models are served: {models}")
before = emitted()
body = {"model": models[0], "prompt": "one two three one two three one two", "max_tokens": 16, "logprobs": 1}
answer = json.loads(call("/v1/completions", body))
choice, usage = answer["choices"][0], answer["usage"]
require(choice["finish_reason"] in ("stop", "length"), f"a completion ends: {choice['text']!r}")
logprobs = choice["logprobs"]["token_logprobs"]
require(len(logprobs) == usage["completion_tokens"] > 0, f"it has a logprob for each of its {len(logprobs)} tokens")
require(all(math.isfinite(value) and value <= 0 for value in logprobs), "each logprob is finite and not above 0")
after = emitted()
require(after >= before + len(logprobs) - 1, f"the metrics count its tokens: {before:g}, then {after:g}")
