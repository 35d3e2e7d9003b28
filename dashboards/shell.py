"""The commands of the runbooks, for bash with curl, jq, kubectl and helm.

`SETUP` comes first: it names the release that an alert is about, and defines what the commands use.
"""

SETUP = r"""
NAMESPACE=default RELEASE=truespec                  # the alert's labels `namespace` and `job`
PODS="app.kubernetes.io/instance=$RELEASE"
NAME=$(kubectl -n "$NAMESPACE" get rayservice -l "$PODS" -o jsonpath='{.items[0].metadata.name}')
HOST=http://127.0.0.1:8000                          # kubectl port-forward "service/$NAME-serve-svc" 8000
PROMETHEUS=http://127.0.0.1:9090                    # your Prometheus, likewise
ADMIN_TOKEN=                                        # the content of admin.token_file
WATCH=http://127.0.0.1:8101                         # the referee of `truespec watch`, likewise
OF="namespace=\"$NAMESPACE\",job=\"$RELEASE\""      # selects the release's series
promql() {
  curl -sS "$PROMETHEUS/api/v1/query" --data-urlencode "query=$1" | jq -c '.data.result[] | [.metric, .value[1]]'
}
pods() { kubectl -n "$NAMESPACE" get pods -l "$PODS,ray.io/node-type=$1" -o name; }
in_head() {  # of both clusters during an upgrade
  for pod in $(pods head); do kubectl -n "$NAMESPACE" exec "$pod" -c ray-head -- "$@"; done
}
logged() {  # the last lines that match in the logs of the controller, which runs on the head, and of the replicas
  local last='grep -hE -- "$0" /tmp/ray/session_latest/logs/serve/*.log | tail -n 20'
  for type in head worker; do
    for pod in $(pods $type); do kubectl -n "$NAMESPACE" exec "$pod" -c "ray-$type" -- bash -c "$last" "$1"; done
  done
}
watch_report() { curl -sS "$WATCH/report.json" | jq -c "$1"; }
watch_logged() {  # the last lines that match of the proxies or the referee
  local of="$PODS,app.kubernetes.io/component in (watch,watch-$1)"
  kubectl -n "$NAMESPACE" logs -l "$of" -c "$1" --tail=2000 --prefix | awk -v wanted="$2" '$0 ~ wanted' | tail -n 20
}
""".strip()

REPLICAS = "curl -sS \"$HOST/status\" | jq -c '.replicas[] | {replica, pool, breaker, mode, reason, kernels_off}'"
LATEST_REPLAYS = "curl -sS \"$HOST/status\" | jq -c '.latest[]'"
DOUBTFUL = (
    'curl -sS "$HOST/status" | jq -r \'.incidents[] | select(.doubtful_since) '
    '| "replica=\\(.replica | @uri)&since=\\(.doubtful_since)"\' | sort -u | while read -r OF_REPLICA; do '
    'curl -sS -H "authorization: Bearer $ADMIN_TOKEN" "$HOST/admin/verdicts?$OF_REPLICA" '
    "| jq -c '.verdicts[]? | select(.verdict != \"verified\")'; done"
)
SPECULATION_OFF = (
    'curl -sS -X POST -H "authorization: Bearer $ADMIN_TOKEN" -H "content-type: application/json" '
    '-d \'{"mode": "off"}\' "$HOST/admin/speculation" | jq -c ".[]?"'
)
TARGETS = (
    'curl -sS "$PROMETHEUS/api/v1/targets?state=active" '
    "| jq -c '.data.activeTargets[] | [.labels.job, .labels.pod, .health, .lastError]'"
)
PODS = 'kubectl -n "$NAMESPACE" get pods -l "$PODS" -o wide'
EVENTS = 'kubectl -n "$NAMESPACE" describe rayservice "$NAME" | tail -n 40'
HISTORY = 'helm -n "$NAMESPACE" history "$RELEASE"  # then: helm -n "$NAMESPACE" rollback "$RELEASE" REVISION'
SERVE_STATUS = "in_head serve status"
RAY_STATUS = "in_head ray status"
DEAD_ACTORS = "in_head ray list actors --filter state=DEAD --limit 20"
WATCH_FINDINGS = "watch_report '.findings[] | {alarm, stratum, replica, tokens, id: .example.id}'"
WATCH_COUNTS = "watch_report '{requests, answers, unreadable, untested}'"
VERSIONS = 'promql "count by (pool, version, drafter, fingerprint) (truespec_build_info{$OF})"'


def promql(expr: str) -> str:
    """A query about the release; `{}` stands for its selector where the expression has none of its own."""
    return f'promql "{expr}"'.replace("{}", "{$OF}")


def logged(pattern: str) -> str:
    """The replicas' log lines that match an extended regular expression."""
    return f"logged '{pattern}'"


def watch_logged(container: str, pattern: str) -> str:
    """The log lines of `truespec watch`, of its `proxy` or its `referee`, that match an extended regular expression."""
    return f"watch_logged {container} '{pattern}'"
