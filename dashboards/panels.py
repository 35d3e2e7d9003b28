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


def _annotation(name: str, colour: Colour, counter: str, *labels: str) -> dict[str, Any]:
    """Events of a counter, by pool and these labels, that are marked in all charts of a page."""
    expr = f"{_EVENTS.events(counter, 'pool', *labels)} > 0"
    return {
        "name": name,
        "datasource": _DATASOURCE,
        "enable": True,
        "iconColor": colour,
        "target": {"refId": "Anno", "expr": expr, "interval": _STEP},
        "titleFormat": name,
        "textFormat": ", ".join([*(f"{{{{{label}}}}}" for label in labels), "pool {{pool}}"]),
    }


ANNOTATIONS = [
    _annotation("Breaker trips", "red", "breaker_trips_total", "reason"),
    _annotation("Weight updates", "blue", "weight_updates_total", "result"),
    _annotation("Replicas replaced", "orange", "replica_restarts_total"),
]


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
    links = {
        "type": "dashboards",
        "title": TAG,
        "tags": [TAG],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "The other pages, with the same choices",
        "url": "",
    }
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
        "links": [links],
        "annotations": {"list": ANNOTATIONS},
        "templating": {"list": _VARIABLES},
        "panels": _placed(page),
    }


def _placed(page: Page) -> list[dict[str, Any]]:
    """All rows and panels, which flow from left to right below the heading of their row."""
    placed: list[dict[str, Any]] = []
    y, number = 0, 1
    for row in page.rows:
        panels: list[dict[str, Any]] = []
        position = {"x": 0, "y": y, "w": _GRID_COLUMNS, "h": _ROW_HEIGHT}
        heading = {"id": number, "type": "row", "title": row.title, "collapsed": row.collapsed, "gridPos": position}
        x, at, line_height = 0, y + _ROW_HEIGHT, 0
        for panel in row.panels:
            if x + panel.width > _GRID_COLUMNS:
                x, at, line_height = 0, at + line_height, 0
            position = {"x": x, "y": at, "w": panel.width, "h": panel.height}
            panels.append(_panel_json(panel, number + 1 + len(panels)) | {"gridPos": position})
            x += panel.width
            line_height = max(line_height, panel.height)
        number += 1 + len(panels)
        if row.collapsed:  # Grafana makes room when somebody opens it
            placed.append(heading | {"panels": panels})
            y += _ROW_HEIGHT
        else:
            placed += [heading | {"panels": []}, *panels]
            y = at + line_height
    return placed


def _panel_json(panel: Panel, number: int) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _DATASOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
            "format": "time_series",
            "instant": query.instant,
            "range": not query.instant,
        }
        for index, query in enumerate(panel.queries)
    ]
    steps = [{"value": value, "color": colour} for value, colour in panel.steps]
    bounds = {"min": panel.minimum, "max": panel.maximum, "decimals": panel.decimals}
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
        **{name: value for name, value in bounds.items() if value is not None},
    }
    if panel.names:
        options = {str(value): {"text": name, "index": value} for value, name in enumerate(panel.names)}
        defaults["mappings"] = [{"type": "value", "options": options}]
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineInterpolation": "stepAfter" if panel.names else "linear",
            "lineWidth": 1,
            "fillOpacity": 25 if panel.stacked else 8,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "scaleDistribution": {"type": "log", "log": 10} if panel.log_scale else {"type": "linear"},
            "thresholdsStyle": {"mode": "dashed" if len(panel.steps) > 1 else "off"},
        }
    elif all(query.sparse for query in panel.queries):
        defaults["noValue"] = "0"
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _stat_options(panel) if panel.kind == "stat" else _TIMESERIES_OPTIONS,
        **({"interval": panel.interval} if panel.interval else {}),
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


def _variable(name: str, series: str, *, label: str = "", several: bool = False) -> dict[str, Any]:
    query = f"label_values({series}, {label or name})"
    return {
        "name": name,
        "type": "query",
        "label": name.capitalize(),
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,  # whenever the time range changes
        "sort": 1,
        "hide": 0,
        "multi": several,
        "includeAll": several,
        **({"allValue": ".*", "current": {"text": "All", "value": "$__all"}} if several else {}),
    }


_BUILD = "truespec_build_info"
_SOURCE = {"name": "datasource", "type": "datasource", "label": "Data source", "query": "prometheus"}
_VARIABLES = [
    _SOURCE | {"refresh": 1, "hide": 0},
    # The first namespace, so that releases of one model are not mixed unasked; all where nothing sets the label.
    _variable("namespace", _BUILD) | {"includeAll": True, "allValue": ".*"},
    # One job at a time: a release.
    _variable("job", f'{_BUILD}{{namespace=~"$namespace"}}'),
    _variable("model", f"{_BUILD}{{{_RELEASE}}}", label="model_name", several=True),
    _variable("pool", f'{_BUILD}{{{_RELEASE},model_name=~"$model"}}', several=True),
    _variable("replica", f"{_BUILD}{{{PAGE.matchers}}}", several=True),
]
