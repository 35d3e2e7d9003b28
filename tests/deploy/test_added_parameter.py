"""A sampling parameter from outside: in a copy of the tree, in the files that docs/architecture.md names."""

import json
from pathlib import Path

import pytest

from tests.support.changed_tree import changed_tree, files_to_add_to, run_in, with_added
from tools.faults.tiny import write_tiny_pair

pytestmark = pytest.mark.slow

FIELD = """    repeat_bias: float = option(
        0.0, "Added to the logit of the token that came last.", least=-100, most=100, example=-30.0
    )
"""
EFFECT = """        last = [*output[-1:], *drafts][-1:]
        if self._params.repeat_bias and last:
            others = ~np.isin(tokens, last)
            own = values[~others].sum() + self._params.repeat_bias
            tokens, values = np.append(tokens[others], last), np.append(values[others], np.float32(own))
"""
CHANGES = {  # by file: a line that is there, and what comes behind it
    "speculative/request.py": [
        ("    top_p: float = 1.0\n", FIELD),
        ("        tokens = self.bad_words or self.min_tokens or self.logit_bias", " or self.repeat_bias"),
    ],
    "speculative/state/logit_constraints.py": [
        ("        tokens, values = self.biases\n", EFFECT),
        ("        self.reads_drafts = bool(self._phrases)", " or bool(params.repeat_bias)"),
        ("        self.most_biased = ", "bool(params.repeat_bias) + "),
    ],
    "serve_app/openai/requests.py": [
        (
            'share of the likeliest one\'s probability."""\n',
            '    repeat_bias: float | None = None\n    """Added to the logit of the token that came last."""\n',
        )
    ],
}
IN_A_SERVICE = """
import json
from itertools import islice, pairwise
from pathlib import Path

import httpx

from tools.faults.served import TINY, FaultyServer
from tools.faults.traffic import mixed
from deploy.watch.audit import TRIED
from speculative.gpu import logit_edits
from speculative.request import Request, SamplingParams
from speculative.state.batch import Entry
from speculative.state.sequence import Sequence

folder, found = Path("model"), {}
with FaultyServer(folder, config=TINY).running() as url:
    for bias in (100, -100, 101):
        body = {"model": "audited", "prompt": [5, 6, 7], "max_tokens": 24, "return_token_ids": True}
        body |= {"repeat_bias": bias, "logit_bias": {"2": -100}}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        if bias > 100:
            found["error"] = reply["error"]["message"]
            continue
        ids, usage = reply["choices"][0]["token_ids"], reply["usage"]
        repeated = sum(one == other for one, other in pairwise(ids))
        found[bias] = [len(ids), repeated, usage["completion_tokens_details"]["accepted_prediction_tokens"]]
found["audit"] = [one["repeat_bias"] for one in TRIED if "repeat_bias" in one]
found["traffic"] = sum("repeat_bias" in request.params.changed for request in islice(mixed(64), 11))
entry = Entry(Sequence(Request("r", (5, 6), SamplingParams(repeat_bias=1.0))), 1, 3, samples=True)
found["captured"] = [logit_edits.follows(entry.sequence)]
logit_edits.FOLLOWED |= {"repeat_bias"}
found["captured"] += [logit_edits.follows(entry.sequence)]
print(json.dumps(found))
"""


def test_a_parameter_is_served_and_audited_once_it_is_in_the_files_that_the_page_names(tmp_path: Path) -> None:
    assert CHANGES.keys() <= files_to_add_to("a sampling parameter**") and len(CHANGES) <= 6
    tree = changed_tree(tmp_path / "tree", with_added(CHANGES))
    write_tiny_pair(tmp_path)[0].rename(tree / "model")
    found = json.loads(run_in(tree, IN_A_SERVICE))
    assert found["100"][:2] == [24, 23] and found["100"][2] > 10, "one token again and again, most of them drafted"
    assert found["-100"][:2] == [24, 0], "never the last token again"
    assert found["error"] == "repeat_bias must be between -100 and 100, got 101.0."
    assert found["audit"] == [-30.0], "the audit tries its example"
    assert found["traffic"] == 1, "and so do the known faults"
    assert found["captured"] == [False, True], "captured steps take it once they are told of it"
