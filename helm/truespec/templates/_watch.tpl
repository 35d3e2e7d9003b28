{{/* "true" where a server is watched. */}}
{{- define "truespec.watches" -}}
{{- if .Values.watch.enabled }}true{{ end -}}
{{- end -}}

{{/* "true" unless the release is a watch and nothing else. */}}
{{- define "truespec.serves" -}}
{{- $watch := .Values.watch -}}
{{- if not (and $watch.enabled $watch.only) }}true{{ end -}}
{{- end -}}

{{/* Name and port of the service that clients talk to, as in the backend of a route. */}}
{{- define "truespec.front" -}}
{{- if include "truespec.serves" . -}}
name: {{ printf "%s-serve-svc" (include "truespec.fullname" .) | quote }}
port: {{ .Values.service.port }}
{{- else -}}
name: {{ printf "%s-watch" (include "truespec.fullname" .) | quote }}
port: {{ .Values.watch.port }}
{{- end -}}
{{- end -}}

{{/* URL of the server that is watched. */}}
{{- define "truespec.watchedUrl" -}}
{{- default (printf "http://%s-serve-svc:%d" (include "truespec.fullname" .) (int .Values.service.port)) .Values.watch.url -}}
{{- end -}}

{{/* What the containers of a part of the watch run: dict "root" $ "part" "proxy"|"referee" */}}
{{- define "truespec.watchCommand" -}}
{{- $root := .root -}}
{{- $watch := $root.Values.watch -}}
{{- $command := list "truespec" "watch" .part -}}
{{- if eq .part "proxy" -}}
{{- $referee := printf "http://%s-watch-referee:8101" (include "truespec.fullname" $root) -}}
{{- $command = concat $command (list (include "truespec.watchedUrl" $root) "--host" "0.0.0.0" "--port" (toString $watch.port)) -}}
{{- $command = concat $command (list "--share" (include "truespec.number" $watch.share) "--dialect" $watch.dialect "--referee" $referee) -}}
{{- with $watch.replicaHeader }}{{ $command = concat $command (list "--replica-header" .) }}{{ end -}}
{{- else -}}
{{- $command = concat $command (list "--model" (default $root.Values.config.model.source $watch.model) "--host" "0.0.0.0" "--port" "8101") -}}
{{- $command = concat $command (list "--engine" $watch.engine "--dialect" $watch.dialect "--threads" (toString $watch.referee.cpus)) -}}
{{- if $watch.tolerance.configMap -}}
{{- $command = concat $command (list "--tolerance" "/etc/truespec/tolerance/tolerance.json") -}}
{{- else -}}
{{- $command = concat $command (list "--precision" $watch.precision) -}}
{{- end -}}
{{- end -}}
{{- concat $command (default list (get $watch .part).args) | toYaml -}}
{{- end -}}

{{/* The pods of a part of the watch: dict "root" $ "part" "proxy"|"referee" "port" number "portName" "path" of its health */}}
{{- define "truespec.watchPod" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $watch := $values.watch -}}
{{- $pod := get $watch .part -}}
{{- $isReferee := eq .part "referee" -}}
{{- $health := dict "httpGet" (dict "path" .path "port" .portName) -}}
metadata:
  labels:
    {{- include "truespec.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: watch-{{ .part }}
    {{- with $values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $pod.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with merge (dict) (default dict $pod.podAnnotations) (default dict $values.commonAnnotations) }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  serviceAccountName: {{ include "truespec.serviceAccountName" $root | quote }}
  enableServiceLinks: false
  {{- with include "truespec.pullSecrets" $root }}{{ . | nindent 2 }}{{ end }}
  securityContext:
    {{- include "truespec.podSecurityContext" $root | nindent 4 }}
  {{- with include "truespec.placement" $pod }}{{ . | nindent 2 }}{{ end }}
  terminationGracePeriodSeconds: {{ ternary 30 (int $pod.terminationGracePeriodSeconds) $isReferee }}
  containers:
    - name: {{ .part }}
      image: {{ include "truespec.image" $root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        {{- include "truespec.containerSecurityContext" true | nindent 8 }}
      command:
        {{- include "truespec.watchCommand" . | nindent 8 }}
      env:
        {{- if $isReferee }}
        {{- include "truespec.env" $root | nindent 8 }}
        {{- else }}
        - {name: HOME, value: /tmp}
        {{- end }}
        {{- with $pod.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: {{ .portName }}, containerPort: {{ .port }}}
      {{- if $isReferee }}
      # It listens once the model is there: an hour to fetch and load it.
      startupProbe:
        {{- merge (dict "periodSeconds" 10 "failureThreshold" 360) $health | toYaml | nindent 8 }}
      {{- else }}
      lifecycle:
        preStop:
          exec:
            # Until no new request is sent here.
            command: [sleep, "10"]
      {{- end }}
      readinessProbe:
        {{- merge (dict "periodSeconds" 5 "timeoutSeconds" 5) $health | toYaml | nindent 8 }}
      livenessProbe:
        {{- merge (dict "periodSeconds" 10 "timeoutSeconds" 10 "failureThreshold" 6) $health | toYaml | nindent 8 }}
      resources:
        {{- include "truespec.resources" $pod | nindent 8 }}
      volumeMounts:
        {{- if $isReferee }}
        {{- include "truespec.modelMounts" $root | nindent 8 }}
        {{- if $watch.tolerance.configMap }}
        - {name: tolerance, mountPath: /etc/truespec/tolerance, readOnly: true}
        {{- end }}
        {{- else }}
        - {name: tmp, mountPath: /tmp}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir:
        sizeLimit: {{ $pod.tmpSize }}
    {{- if $isReferee }}
    {{- include "truespec.modelVolumes" $root | nindent 4 }}
    {{- with $watch.tolerance }}
    {{- if .configMap }}
    - name: tolerance
      configMap:
        name: {{ .configMap | quote }}
        items:
          - {key: {{ .key | quote }}, path: tolerance.json}
    {{- end }}
    {{- end }}
    {{- end }}
{{- end -}}

{{- define "truespec.guardWatch" -}}
{{- $watch := .Values.watch -}}
{{- if and $watch.only (not $watch.enabled) -}}
{{- fail "watch.only is true, but watch.enabled is not; set it, or the release would be empty." -}}
{{- end -}}
{{- if $watch.enabled -}}
{{- if not (include "truespec.serves" .) -}}
{{- include "truespec.guardImage" . -}}
{{- include "truespec.guardNames" . -}}
{{- include "truespec.guardCache" . -}}
{{- if .Values.networkPolicy.enabled -}}{{- include "truespec.guardClients" . -}}{{- end -}}
{{- end -}}
{{- if and $watch.only (not $watch.url) -}}
{{- fail "watch.only is true and watch.url empty; give the URL of the server that is watched." -}}
{{- end -}}
{{- if and (not $watch.url) (eq .Values.ray.upgrade.strategy "NewClusterWithIncrementalUpgrade") -}}
{{- fail "watch.url is empty, but in an incremental upgrade the release has no service of a fixed name; give the gateway's URL." -}}
{{- end -}}
{{- if eq (int $watch.port) 8101 -}}
{{- fail "watch.port is 8101, which is the referee's; choose another, 8100 for example." -}}
{{- end -}}
{{- $source := default .Values.config.model.source $watch.model -}}
{{- with .Values.networkPolicy -}}
{{- if and .enabled (not .allowHttps) (not .extraEgress) (not (hasPrefix "/" $source)) -}}
{{- fail (printf "networkPolicy.allowHttps is false, so the referee cannot fetch %s; allow it, give a rule in extraEgress, or put it on a volume and name its folder." $source) -}}
{{- end -}}
{{- end -}}
{{- $shared := or (has "ReadWriteMany" .Values.modelCache.accessModes) (has "ReadOnlyMany" .Values.modelCache.accessModes) -}}
{{- if and (include "truespec.serves" .) (include "truespec.claims" .) (not .Values.modelCache.existingClaim) (not $shared) -}}
{{- fail "modelCache.accessModes has no ReadWriteMany, but the referee of watch mounts the claim beside the workers; use ReadWriteMany, an existingClaim, or modelCache.enabled=false." -}}
{{- end -}}
{{- range $part := list "proxy" "referee" -}}
{{- $pod := get $watch $part -}}
{{- if and (eq $part "proxy") (lt (int $pod.terminationGracePeriodSeconds) 20) -}}
{{- fail (printf "watch.proxy.terminationGracePeriodSeconds (%d) must be at least 20: 10 until no request comes any more, the rest for those that run; raise it." (int $pod.terminationGracePeriodSeconds)) -}}
{{- end -}}
{{- range $label, $_ := merge (dict) (default dict $pod.podLabels) (default dict $.Values.commonLabels) -}}
{{- if hasPrefix "app.kubernetes.io/" $label -}}
{{- fail (printf "The label %s is the chart's own; choose another key in commonLabels and podLabels." $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
