"""A metric, its panel and its alert: this test writes them into three files, and finds them wherever they are read."""

import json
import re
from pathlib import Path

from tests.support.changed_tree import changed_tree, files_to_add_to, run_in, with_added

CHANGES = {  # file -> behind what, and what
    "serve_app/telemetry/metric_names.py": [("    # Weights and build\n", """\
    _counter("tea_breaks_total", "Breaks that a replica took.", lambda s: {"long": s.num_steps}, length={
        "long": "of ten minutes",
        "short": "of five",
    }),
""")],
    "dashboards/serving.py": [('    Row("First token", (\n', """\
        Panel("Breaks for tea", "By length.",
            (Query(PAGE.rate("tea_breaks_total", "length"), "{{length}}"),)),
"""), ("\nALERTS = (\n", """\
    Alert("TruespecTooMuchTea", "info", "1m", wrong="no", note="but cold", threshold=3,
        expr=f"{IN_15M.events('tea_breaks_total', 'length')} > {THRESHOLD}",
        summary="{{ $labels.model_name }} takes {{ $labels.length }} breaks.",
        means="Somebody drinks tea.", look="The kitchen.", do="Hide the kettle.", commands=(shell.PODS,)),
""")],
    "tests/support/rule_cases.py": [("\nCASES: tuple[Case, ...] = (\n", """\
    *_of("TooMuchTea",
        ("four", {"tea_breaks_total length=long": "0x10 4x20"}, "15m",
         Fires("tiny takes long breaks.", {"length": "long"})),
        ("two", {"tea_breaks_total length=long": "0x10 2x20"}, "15m")),
""")],
}  # fmt: skip
READ = """
import json, re, shutil, tempfile
from pathlib import Path
from dashboards import build
from dashboards.reference import alerts_table, metrics_page, runbooks_page
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from speculative.stats import EngineUsage, StepStats
from tests.support.chart import MINIMAL, merged, one, template
from tests.support.prometheus import Suite, part_of, run_suites
from tests.support.rule_cases import CASES
from tools.chart import ChartError

sink = PrometheusSink()
Metrics(sink, model_name="m", pool="decode").record_steps(StepStats(num_steps=7), EngineUsage(0, 0, 0, 1, 1, 16))


def installed(**change):
    rule = {"enabled": True, "alerts": {"TruespecTooMuchTea": change}}
    return json.dumps(template(merged(MINIMAL, {"monitoring": {"prometheusRule": rule}})))


try:
    installed(minimum=1)
except ChartError as error:
    refused = str(error)
if shutil.which("promtool"):
    cases = [case.as_dict() for case in CASES if case.alert == "TruespecTooMuchTea"]
    rules = part_of(build.rule_file()["groups"], "TruespecTooMuchTea")
    run_suites(Path(tempfile.mkdtemp()), {"tea": Suite(rules, cases)})
texts = [sink.exposition()[0].decode(), *build.server_files().values(), metrics_page(), runbooks_page(), alerts_table()]
print(json.dumps([texts, refused, installed(threshold=11)]))
"""


def test_three_files_are_enough_from_the_exposition_to_the_chart_and_the_pages(tmp_path: Path) -> None:
    assert CHANGES.keys() <= files_to_add_to("a metric")
    tree = changed_tree(tmp_path / "tree", with_added(CHANGES))
    texts, refused, installed = json.loads(run_in(tree, READ))
    exposition, *_, rules, _, metrics, runbooks, table = texts
    assert 'truespec_tea_breaks_total{length="long",model_name="m",pool="decode"} 7.0' in exposition
    assert "# HELP truespec_tea_breaks_total Breaks that a replica took. length: long = of ten minutes;" in exposition
    assert sum('"title": "Breaks for tea"' in text for text in texts) == 1
    assert "alert: TruespecTooMuchTea" in rules
    assert "| `truespec_tea_breaks_total` | counter | Breaks that a replica took. `length`: `long` of ten" in metrics
    assert (
        "## TruespecTooMuchTea\n\nSeverity info; after 1m; threshold 3." in runbooks and "Hide the kettle." in runbooks
    )
    assert "[TooMuchTea](runbooks.md#truespectoomuchtea) (but cold)" in table
    assert "TruespecTooMuchTea has no minimum, so none can be set" in refused
    assert "Breaks for tea" in installed and re.search(r"TruespecTooMuchTea.{,999}> 11\b", installed)
