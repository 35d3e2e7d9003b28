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
          num_cpus: {{ int $pool.cpus }}
          num_gpus: {{ mul $pool.gpus $pool.numOfHosts }}
          label_selector:
            truespec-{{ $name }}: "true"
        {{- end }}
        {{- if dig "resume" false (default dict .Values.config.recovery) }}
        # The stream router needs no model, but the keys and the admin token, which the head does not mount.
        router:
          label_selector:
            truespec-{{ ternary "monolith" "decode" (hasKey $pools "monolith") }}: "true"
        {{- end }}
    deployments:
      {{- range $name, $pool := $pools }}
      - name: {{ get $deploymentOf $name }}
        {{- if $pool.autoscaling.enabled }}
        autoscaling_config:
          min_replicas: {{ $pool.autoscaling.minReplicas }}
          max_replicas: {{ $pool.autoscaling.maxReplicas }}
          upscale_delay_s: {{ include "truespec.number" $pool.autoscaling.upscaleDelaySeconds }}
          downscale_delay_s: {{ include "truespec.number" $pool.autoscaling.downscaleDelaySeconds }}
          look_back_period_s: 10
          metrics_interval_s: 1
          {{- if eq $pool.autoscaling.policy "requests" }}
          target_ongoing_requests: {{ include "truespec.number" $pool.autoscaling.targetOngoingRequests }}
          {{- else }}
          policy:
            policy_function: serve_app.cluster.autoscaling:LoadPolicy
            policy_kwargs:
              targets:
                {{- if eq $name "prefill" }}
                backlog_s: {{ include "truespec.number" $pool.autoscaling.targetBacklogSeconds }}
                {{- else }}
                kv_usage: {{ include "truespec.number" $pool.autoscaling.targetKvUsage }}
                running_share: {{ include "truespec.number" $pool.autoscaling.targetRunningShare }}
                {{- end }}
          {{- end }}
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
{{- if .Values.apiKeys.existingSecret }}
{{- $_ := set $args "access" (merge (dict "keys_file" "/etc/truespec/keys/keys.yaml") (default dict .Values.config.access)) }}
{{- end -}}
{{- if .Values.receipts.existingSecret }}
{{- $_ := set $args "receipts" (merge (dict "key_file" "/etc/truespec/receipts/key.pem") (default dict .Values.config.receipts)) }}
{{- end -}}
{{- with .Values.vllm }}
{{- if .enabled }}
{{- $_ := set $args "engine" (merge (dict "kind" "vllm") (default dict $.Values.config.engine)) -}}
{{- $section := default dict $.Values.config.vllm -}}
{{- $own := dict "tensor_parallel_size" .tensorParallelSize -}}
{{- if not (kindIs "invalid" .gpuMemoryUtilization) }}{{ $_ := set $own "gpu_memory_utilization" (float64 .gpuMemoryUtilization) }}{{ end -}}
{{- range include "truespec.pools" $ | fromYaml -}}
{{- if gt (int .numOfHosts) 1 }}{{ $_ := set $own "distributed_executor_backend" "ray" }}{{ end -}}
{{- end -}}
{{- $_ := set $args "vllm" (merge (dict "engine_args" (merge $own (default dict $section.engine_args))) $section) -}}
{{- end -}}
{{- end -}}
{{- toYaml $args -}}
{{- end -}}
