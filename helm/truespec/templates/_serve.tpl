{{/* Ray Serve's config: the application's YAML. A change of it is applied in place; `deployments` alone restarts nothing. */}}
{{- define "truespec.serveConfig" -}}
{{- $pools := include "truespec.pools" . | fromYaml -}}
{{- $deploymentOf := dict "prefill" "PrefillServer" "decode" "DecodeServer" "monolith" "MonolithServer" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ .Values.service.port }}
applications:
  - name: truespec
    route_prefix: /
    import_path: serve_app.app:build_app
    args:
      {{- include "truespec.args" . | nindent 6 }}
      pools:
        {{- range $name, $pool := $pools }}
        {{ $name }}:
          num_cpus: {{ $pool.cpus }}
          num_gpus: {{ $pool.gpus }}
          label_selector:
            truespec-{{ $name }}: "true"
        {{- end }}
    deployments:
      {{- range $name, $pool := $pools }}
      - name: {{ get $deploymentOf $name }}
        {{- if $pool.autoscaling.enabled }}
        autoscaling_config:
          min_replicas: {{ $pool.autoscaling.minReplicas }}
          max_replicas: {{ $pool.autoscaling.maxReplicas }}
          target_ongoing_requests: {{ $pool.autoscaling.targetOngoingRequests }}
        {{- else }}
        num_replicas: {{ $pool.replicas }}
        {{- end }}
      {{- end }}
{{- end -}}

{{/* `config` without empty sections; with the vLLM engine, what that engine is given. */}}
{{- define "truespec.args" -}}
{{- $args := dict -}}
{{- range $key, $value := .Values.config }}
{{- if not (and (kindIs "map" $value) (empty $value)) }}{{ $_ := set $args $key $value }}{{ end -}}
{{- end -}}
{{- if .Values.admin.enabled }}
{{- $_ := set $args "admin" (merge (dict "token_file" "/etc/truespec/admin/token") (default dict .Values.config.admin)) }}
{{- end -}}
{{- with .Values.vllm }}
{{- if .enabled }}
{{- $engine := dict "kind" "vllm" "tensor_parallel_size" .tensorParallelSize "gpu_memory_utilization" .gpuMemoryUtilization -}}
{{- if eq $.Values.config.topology "disaggregated" }}{{ $_ := set $engine "kv_connector" .kvConnector }}{{ end -}}
{{- $_ := set $args "engine" (merge $engine (default dict $.Values.config.engine)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $args -}}
{{- end -}}
