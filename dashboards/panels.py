"""Pages, rows and panels as values, and the Grafana JSON they become."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from dashboards.queries import QueryScope

_RELEASE = 'namespace=~"$namespace",job="$job"'
PAGE = QueryScope(f'{_RELEASE},model_name=~"$model",pool=~"$pool"', "$__rate_interval")
REPLICA = QueryScope(f'{PAGE.matchers},replica=~"$replica"', PAGE.window)  # of gauges: counters are sums over replicas
VISIBLE = QueryScope(PAGE.matchers, "$__range")  # for a single figure over all that the page shows
TAG = "truespec"

_STEP = "60s"
_EVENTS = QueryScope(PAGE.matchers, "2m")  # so that a step misses none

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SCHEMA_VERSION = 42  # that of Grafana 13, so that a new server migrates nothing
_GRID_COLUMNS = 24
_ROW_HEIGHT = 1

Colour = Literal["green", "yellow", "orange", "red", "blue", "text"]
Steps = tuple[tuple[float | None, Colour], ...]


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and what its series are called."""

    expr: str
    legend: str
    instant: bool = False  # one figure, at the end of the visible time
    sparse: bool = False  # having no series may be the healthy state


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `description` says what a bad value means; `steps` are (from, colour), the first from None."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "none"  # in Grafana's ids
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 12
    height: int = 8
    steps: Steps = ((None, "green"),)
    minimum: float | None = 0  # None leaves it to the data
    maximum: float | None = None
    decimals: int | None = None
    interval: str = ""  # the shortest step; "" leaves it to the data source
    log_scale: bool = False
    stacked: bool = False
    names: tuple[str, ...] = ()  # what the values 0, 1, ... are called
    shows_name: bool = False  # a stat that shows its series' name in place of the value


Stat = partial(Panel, kind="stat", width=6, height=5, minimum=None)
"""A small panel with one figure, or one for each series."""

Rates = partial(Panel, unit="ops", stacked=True)
"""A panel of events a second, one kind above the other."""

Share = partial(Panel, unit="percentunit", maximum=1)
"""A panel whose values are shares of something."""


@dataclass(frozen=True, slots=True)
class Row:
    """A heading and its panels, which flow from left to right."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False  # nobody needs it at first


@dataclass(frozen=True, slots=True)
class Annotation:
    """Events that are marked in all charts of a page; `text` may quote the labels of the query."""

    name: str
    expr: str
    text: str
    colour: Colour


ANNOTATIONS = (
    Annotation(
        "Breaker trips",
        f"{_EVENTS.events('breaker_trips_total', 'pool', 'reason')} > 0",
        "{{reason}}, pool {{pool}}",
        "red",
    ),
    Annotation(
        "Weight updates",
        f"{_EVENTS.events('weight_updates_total', 'pool', 'result')} > 0",
        "{{result}}, pool {{pool}}",
        "blue",
    ),
    Annotation(
        "Replicas replaced", f"{_EVENTS.events('replica_restarts_total', 'pool')} > 0", "pool {{pool}}", "orange"
    ),
)


@dataclass(frozen=True, slots=True)
class Page:
    """A dashboard, whose name is in its title, its uid and its file's name."""

    name: str
    description: str
    rows: tuple[Row, ...]

    @property
    def slug(self) -> str:
        """The name as files and addresses have it."""
        return self.name.lower().replace(" ", "-")

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in the order in which they are read."""
        return tuple(panel for row in self.rows for panel in row.panels)


def dashboard_json(page: Page) -> dict[str, Any]:
    """The page as Grafana imports it."""
    return {
        "uid": f"{TAG}-{page.slug}",
        "title": f"{TAG} / {page.name}",
        "description": f"{page.description} Made by `truespec dashboards`; the next push replaces what is edited here.",
        "tags": [TAG],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,  # one cross-hair through all panels
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [_links()],
        "annotations": {"list": [_annotation(one) for one in ANNOTATIONS]},
        "templating": {"list": _variables()},
        "panels": _placed(page),
    }


def _placed(page: Page) -> list[dict[str, Any]]:
    placed: list[dict[str, Any]] = []
    y, number = 0, 1
    for row in page.rows:
        position = {"x": 0, "y": y, "w": _GRID_COLUMNS, "h": _ROW_HEIGHT}
        heading: dict[str, Any] = {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": row.collapsed,
            "gridPos": position,
            "panels": [],
        }
        placed.append(heading)
        y += _ROW_HEIGHT
        panels, below = _flow(row.panels, y, number + 1)
        number += 1 + len(panels)
        if row.collapsed:  # Grafana makes room when somebody opens it
            heading["panels"] = panels
        else:
            placed += panels
            y = below
    return placed


def _flow(panels: tuple[Panel, ...], y: int, number: int) -> tuple[list[dict[str, Any]], int]:
    """Panels from left to right, from that height on, with ids from that number on; and where they end."""
    placed: list[dict[str, Any]] = []
    x = line_height = 0
    for panel in panels:
        if x + panel.width > _GRID_COLUMNS:
            x, y, line_height = 0, y + line_height, 0
        position = {"x": x, "y": y, "w": panel.width, "h": panel.height}
        placed.append(_panel_json(panel, number + len(placed)) | {"gridPos": position})
        x += panel.width
        line_height = max(line_height, panel.height)
    return placed, y + line_height


def _annotation(annotation: Annotation) -> dict[str, Any]:
    return {
        "name": annotation.name,
        "datasource": _DATASOURCE,
        "enable": True,
        "iconColor": annotation.colour,
        "target": {"refId": "Anno", "expr": annotation.expr, "interval": _STEP},
        "titleFormat": annotation.name,
        "textFormat": annotation.text,
    }


def _panel_json(panel: Panel, number: int) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": [_target(panel, query, index) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
        "options": _stat_options(panel) if panel.kind == "stat" else _TIMESERIES_OPTIONS,
    }
    return made | ({"interval": panel.interval} if panel.interval else {})


def _target(panel: Panel, query: Query, index: int) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "format": "time_series",
        "instant": query.instant,
        "range": not query.instant,
    }


def _field_defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": value, "color": colour} for value, colour in panel.steps],
        },
    }
    for name, value in (("min", panel.minimum), ("max", panel.maximum), ("decimals", panel.decimals)):
        if value is not None:
            defaults[name] = value
    if panel.kind == "stat" and all(query.sparse for query in panel.queries):
        defaults["noValue"] = "0"
    if panel.names:
        options = {str(value): {"text": name, "index": value} for value, name in enumerate(panel.names)}
        defaults["mappings"] = [{"type": "value", "options": options}]
    if panel.kind == "timeseries":
        defaults["custom"] = _line_style(panel)
    return defaults


def _line_style(panel: Panel) -> dict[str, Any]:
    has_line = any(value is not None for value, _ in panel.steps)
    return {
        "drawStyle": "line",
        "lineInterpolation": "stepAfter" if panel.names else "linear",
        "lineWidth": 1,
        "fillOpacity": 25 if panel.stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "scaleDistribution": {"type": "log", "log": 10} if panel.log_scale else {"type": "linear"},
        "thresholdsStyle": {"mode": "dashed" if has_line else "off"},
    }


_LEGEND = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["mean", "max", "lastNotNull"]}
_TIMESERIES_OPTIONS = {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}}


def _stat_options(panel: Panel) -> dict[str, Any]:
    return {
        "reduceOptions": {"values": False, "calcs": ["lastNotNull"], "fields": ""},
        "orientation": "auto",
        "textMode": "name" if panel.shows_name else "auto",
        "colorMode": "value",
        "graphMode": "none" if all(query.instant for query in panel.queries) else "area",
        "justifyMode": "auto",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
    }


def _links() -> dict[str, Any]:
    return {
        "type": "dashboards",
        "title": "truespec",
        "tags": [TAG],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "The other pages, with the same choices",
        "url": "",
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {
            "name": "datasource",
            "type": "datasource",
            "label": "Data source",
            "query": "prometheus",
            "refresh": 1,
            "hide": 0,
        },
        # The first namespace, so that releases of one model are not mixed unasked; all where nothing sets the label.
        _label_variable("namespace", "Namespace", "truespec_build_info") | {"includeAll": True, "allValue": ".*"},
        # One job at a time: a release.
        _label_variable("job", "Job", 'truespec_build_info{namespace=~"$namespace"}'),
        _label_variable("model", "Model", f"truespec_build_info{{{_RELEASE}}}", label="model_name", several=True),
        _label_variable("pool", "Pool", f'truespec_build_info{{{_RELEASE},model_name=~"$model"}}', several=True),
        _label_variable("replica", "Replica", f"truespec_build_info{{{PAGE.matchers}}}", several=True),
    ]


def _label_variable(
    name: str, title: str, series: str, *, label: str | None = None, several: bool = False
) -> dict[str, Any]:
    query = f"label_values({series}, {label or name})"
    made: dict[str, Any] = {
        "name": name,
        "type": "query",
        "label": title,
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,  # whenever the time range changes
        "sort": 1,
        "hide": 0,
        "multi": several,
        "includeAll": several,
    }
    return made | ({"allValue": ".*", "current": {"text": "All", "value": "$__all"}} if several else {})
