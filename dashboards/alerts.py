"""An alert: when it fires, and its runbook. Each is declared in the module of the panels that show what it is about."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from dashboards.queries import QueryScope
from dashboards.recordings import KEEP

RUNBOOKS = "docs/runbooks.md"
THRESHOLD, MINIMUM = "$threshold", "$minimum"  # in an expression: what the chart's values may change
IN_NAMESPACE = "{{ with $labels.namespace }} in {{ . }}{{ end }}"
OF_JOB = "{{ with $labels.job }} (job {{ . }}){{ end }}"
IN_15M, IN_30M, IN_1H = (QueryScope("", window, KEEP) for window in ("15m", "30m", "1h"))
POOLS = QueryScope("", "1h", (*KEEP, "pool"))
REPLICAS = QueryScope("", "1h", (*KEEP, "pool", "replica"))

_MODEL = "{{ $labels.model_name }}"

Severity = Literal["critical", "warning", "info"]
Wrong = Literal["yes", "perhaps", "unnoticed", "not served", "failing", "slower", "no"]
MAY_BE_WRONG: dict[Wrong, str] = {
    "yes": "**yes**",
    "perhaps": "**perhaps**",
    "unnoticed": "nobody would notice, or late",
    "not served": "no; nothing is served",
    "failing": "no; requests fail or are refused",
    "slower": "no; slower, or less room",
    "no": "no",
}
"""Words for whether answers may be wrong while an alert fires, the worst first."""


@dataclass(frozen=True, slots=True)
class Alert:
    """The condition of an alert, and what its reader needs to know.

    `summary` may quote the alert's labels; the namespace, if any, is appended to the model's name. `expr` may have
    `THRESHOLD` and `MINIMUM` (how many events there must be at least), whose defaults are given here.
    """

    name: str
    severity: Severity
    hold: str  # how long it must hold
    _: KW_ONLY
    wrong: Wrong
    note: str = ""  # on what may be wrong
    threshold: float | None = None
    minimum: int | None = None
    expr: str
    summary: str
    means: str
    look: str
    do: str
    commands: tuple[str, ...]  # bash, after `shell.SETUP`

    @property
    def limits(self) -> dict[str, float]:
        """Those of threshold and minimum that it has."""
        limits = {"threshold": self.threshold, "minimum": self.minimum}
        return {name: value for name, value in limits.items() if value is not None}

    @property
    def default_expr(self) -> str:
        """The expression with its default limits."""
        expr = self.expr
        for name, value in self.limits.items():
            expr = expr.replace(f"${name}", f"{value:g}")
        return expr

    def as_dict(self) -> dict[str, Any]:
        """Return the form of a rule file."""
        summary = self.summary.replace(_MODEL, _MODEL + IN_NAMESPACE)
        severity: str = self.severity
        if '"rehearsed"' in self.expr:  # what is rehearsed pages nobody
            severity = f"{{{{ if $labels.rehearsed }}}}info{{{{ else }}}}{severity}{{{{ end }}}}"
        return {
            "alert": self.name,
            "expr": self.default_expr,
            "for": self.hold,
            "labels": {"severity": severity},
            "annotations": {"summary": summary, "runbook": f"{RUNBOOKS}#{self.name.lower()}"},
        }

    def for_chart(self) -> dict[str, Any]:
        """Return the form that the chart reads: limits that its values may change stand beside the expression."""
        return self.as_dict() | {"expr": self.expr} | self.limits


def any_of(label: str, parts: Mapping[str, str]) -> str:
    """Any of several expressions; the label of a series is the name of the one that it comes from."""
    return " or ".join(f'label_replace({expr}, "{label}", "{name}", "", "")' for name, expr in parts.items())


def share(some: str, all_of_them: str, threshold: str = THRESHOLD) -> str:
    """A share beyond the threshold, of at least the minimum of events."""
    return f"({some} / ({all_of_them} > 0) > {threshold} and {some} >= {MINIMUM})"
