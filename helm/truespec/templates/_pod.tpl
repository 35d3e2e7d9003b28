{{/*
A Ray pod's template: dict "root" $ "component" "head"|pool "pod" its settings.
KubeRay adds what starts Ray, its probes and, on workers, a container that waits for the head.
*/}}
{{- define "truespec.podTemplate" -}}
{{- $root := .root -}}
{{- $pod := .pod -}}
{{- $values := $root.Values -}}
{{- $isHead := eq .component "head" -}}
metadata:
  labels:
    {{- /* No versions: a changed label would start a second cluster. */}}
    {{- include "truespec.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with $values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $pod.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $stays := dict -}}
  {{- if and $isHead (not $pod.safeToEvict) -}}
  {{- $stays = dict "cluster-autoscaler.kubernetes.io/safe-to-evict" "false" "karpenter.sh/do-not-disrupt" "true" -}}
  {{- end -}}
  {{- with merge (dict) (default dict $pod.podAnnotations) (default dict $values.commonAnnotations) $stays }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "truespec.serviceAccountName" $root | quote }}
  # Only Ray's autoscaler, in the head pod, talks to the Kubernetes API.
  automountServiceAccountToken: {{ and $isHead (eq (include "truespec.autoscales" $root) "true") }}
  enableServiceLinks: false
  {{- with include "truespec.pullSecrets" $root }}{{ . | nindent 2 }}{{ end }}
  securityContext:
    {{- include "truespec.podSecurityContext" $root | nindent 4 }}
  {{- with include "truespec.placement" $pod }}{{ . | nindent 2 }}{{ end }}
  {{- if $pod.hostNetwork }}
  hostNetwork: true
  {{- end }}
  {{- with default (ternary "ClusterFirstWithHostNet" "" (eq true $pod.hostNetwork)) $pod.dnsPolicy }}
  dnsPolicy: {{ . }}
  {{- end }}
  {{- range $key := list "dnsConfig" "resourceClaims" }}
  {{- with get $pod $key }}
  {{- dict $key . | toYaml | nindent 2 }}
  {{- end }}
  {{- end }}
  {{- if not $isHead }}
  terminationGracePeriodSeconds: {{ int $pod.terminationGracePeriodSeconds }}
  {{- end }}
  {{- $fetched := ternary list $values.modelCache.fetch $isHead }}
  {{- if or $pod.initContainers $fetched }}
  initContainers:
    {{- with $pod.initContainers }}
    {{- include "truespec.containers" (dict "containers" . "pod" $pod) | nindent 4 }}
    {{- end }}
    {{- with $fetched }}
    - name: fetch-models
      image: {{ include "truespec.image" $root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        {{- include "truespec.containerSecurityContext" $pod.readOnlyRootFilesystem | nindent 8 }}
      command: [sh, -ceu, 'for name in "$@"; do truespec model get "$name"; done', fetch-models]
      args:
        {{- toYaml . | nindent 8 }}
      env:
        {{- include "truespec.env" $root | nindent 8 }}
      resources:
        {{- toYaml (default dict $values.modelCache.fetchResources) | nindent 8 }}
      volumeMounts:
        {{- include "truespec.modelMounts" $root | nindent 8 }}
    {{- end }}
  {{- end }}
  containers:
    # The first is KubeRay's to complete.
    - name: ray-{{ ternary "head" "worker" $isHead }}
      image: {{ include "truespec.image" $root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        {{- include "truespec.raySecurityContext" $pod | nindent 8 }}
      ports:
        {{- if $isHead }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        {{- end }}
        - {name: metrics, containerPort: 8080}
        - {name: serve, containerPort: {{ $values.service.port }}}
      env:
        {{- include "truespec.env" $root | nindent 8 }}
        {{- if $values.ray.haproxy }}
        - {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
        - {name: RAY_SERVE_THROUGHPUT_OPTIMIZED, value: "1"}
        {{- end }}
        {{- with $pod.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $pod.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- include "truespec.resources" $pod | nindent 8 }}
      {{- if not $isHead }}
      lifecycle:
        preStop:
          exec:
            # Serve then starts this node's replicas elsewhere; requests that run may finish meanwhile.
            command:
              - sh
              - -c
              - >-
                ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the pod is being deleted"
                --deadline-remaining-seconds "$0"; sleep "$0"
              - {{ int $pod.drainSeconds | quote }}
      {{- end }}
      {{- range $key := list "livenessProbe" "readinessProbe" "startupProbe" }}
      {{- with get $pod $key }}
      {{ $key }}:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- end }}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        {{- if $isHead }}
        - {name: tmp, mountPath: /tmp}
        {{- else }}
        {{- include "truespec.modelMounts" $root | nindent 8 }}
        {{- end }}
        {{- if and (not $isHead) $values.admin.enabled }}
        - {name: admin-token, mountPath: /etc/truespec/admin, readOnly: true}
        {{- end }}
        {{- if and (not $isHead) $values.apiKeys.existingSecret }}
        - {name: api-keys, mountPath: /etc/truespec/keys, readOnly: true}
        {{- end }}
        {{- if and (not $isHead) $values.receipts.existingSecret }}
        - {name: receipt-key, mountPath: /etc/truespec/receipts, readOnly: true}
        {{- end }}
        {{- with $pod.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $pod.sidecars }}
    {{- include "truespec.containers" (dict "containers" . "pod" $pod) | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir:
        sizeLimit: {{ $pod.tmpSize }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $pod.shmSize }}
    {{- if not $isHead }}
    {{- include "truespec.modelVolumes" $root | nindent 4 }}
    {{- if $values.admin.enabled }}
    - name: admin-token
      secret:
        secretName: {{ include "truespec.adminSecretName" $root | quote }}
        defaultMode: 0440
        items:
          - {key: {{ $values.admin.key | quote }}, path: token}
    {{- end }}
    {{- with $values.apiKeys.existingSecret }}
    - name: api-keys
      secret:
        secretName: {{ . | quote }}
        defaultMode: 0440
        items:
          - {key: {{ $values.apiKeys.key | quote }}, path: keys.yaml}
    {{- end }}
    {{- with $values.receipts.existingSecret }}
    - name: receipt-key
      secret:
        secretName: {{ . | quote }}
        defaultMode: 0440
        items:
          - {key: {{ $values.receipts.key | quote }}, path: key.pem}
    {{- end }}
    {{- end }}
    {{- with $pod.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "truespec.env" -}}
- {name: HOME, value: /tmp}
- {name: TRUESPEC_CACHE, value: {{ .Values.modelCache.mountPath | quote }}}
- {name: HF_HOME, value: {{ printf "%s/huggingface" (ternary "/tmp" .Values.modelCache.mountPath .Values.modelCache.readOnly) | quote }}}
{{- if not .Values.modelCache.readOnly }}
# What Triton compiles for a model takes a minute, and is then there for every pod.
- {name: TRITON_CACHE_DIR, value: {{ printf "%s/triton" .Values.modelCache.mountPath | quote }}}
{{- end }}
{{- if include "truespec.hubSecretName" . }}
- {name: HF_TOKEN_PATH, value: /etc/truespec/hub/token}
{{- end }}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- end -}}

{{- define "truespec.modelMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- with .Values.modelCache }}
- {name: models, mountPath: {{ .mountPath | quote }}{{ with .subPath }}, subPath: {{ . | quote }}{{ end }}{{ if .readOnly }}, readOnly: true{{ end }}}
{{- end }}
{{- if include "truespec.hubSecretName" . }}
- {name: hub-token, mountPath: /etc/truespec/hub, readOnly: true}
{{- end }}
{{- end -}}

{{/* What modelMounts mounts, apart from /tmp. */}}
{{- define "truespec.modelVolumes" -}}
- name: models
  {{- if include "truespec.claims" . }}
  persistentVolumeClaim:
    claimName: {{ include "truespec.cacheClaimName" . | quote }}
    {{- if .Values.modelCache.readOnly }}
    readOnly: true
    {{- end }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.modelCache.size }}
  {{- end }}
{{- $hub := .Values.hub }}
{{- with include "truespec.hubSecretName" . }}
- name: hub-token
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
    items:
      - {key: {{ $hub.key | quote }}, path: token}
{{- end }}
{{- end -}}

{{/* Pod Security Admission's level "restricted". */}}
{{- define "truespec.podSecurityContext" -}}
runAsNonRoot: true
{{- range $key := list "runAsUser" "runAsGroup" "fsGroup" }}
{{- with get $.Values.podSecurity $key }}
{{ $key }}: {{ int64 . }}
{{- end }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* The argument is whether the root file system is read-only. */}}
{{- define "truespec.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ . }}
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Of Ray's container; the argument is the pod's settings. */}}
{{- define "truespec.raySecurityContext" -}}
{{- if .ipcLock -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ .readOnlyRootFilesystem }}
# Other users' processes would not have the capability.
runAsNonRoot: false
runAsUser: 0
capabilities:
  drop: [ALL]
  add: [IPC_LOCK]
seccompProfile:
  type: RuntimeDefault
{{- else -}}
{{- include "truespec.containerSecurityContext" .readOnlyRootFilesystem -}}
{{- end -}}
{{- end -}}

{{/* Containers of the values: one without a securityContext gets the chart's own. dict "containers" "pod" its settings */}}
{{- define "truespec.containers" -}}
{{- $made := list -}}
{{- $restricted := include "truespec.containerSecurityContext" .pod.readOnlyRootFilesystem | fromYaml -}}
{{- range .containers }}{{ $made = append $made (merge (dict) . (dict "securityContext" (default $restricted .securityContext))) }}{{ end -}}
{{- toYaml $made -}}
{{- end -}}

{{/* What Ray's container asks for; the argument is the pod's settings. */}}
{{- define "truespec.resources" -}}
{{- $gpus := int (default 0 .gpus) -}}
{{- $given := default dict .resources -}}
{{- $made := list -}}
{{- range $kind := list "requests" "limits" -}}
{{- $amounts := dict "cpu" (int $.cpus | toString) "memory" $.memory -}}
{{- if and $gpus $.gpuResource }}{{ $_ := set $amounts $.gpuResource (toString $gpus) }}{{ end -}}
{{- range $name, $amount := default dict (get $given $kind) -}}
{{- if kindIs "invalid" $amount }}{{ $_ := unset $amounts $name }}
{{- else }}{{ $_ := set $amounts $name (ternary $amount (toJson $amount) (kindIs "string" $amount)) }}{{ end -}}
{{- end -}}
{{- $made = append $made (dict $kind $amounts | toYaml) -}}
{{- end -}}
{{- with $given.claims }}{{ $made = append $made (dict "claims" . | toYaml) }}{{ end -}}
{{- join "\n" $made -}}
{{- end -}}

{{- define "truespec.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ ternary . (get (ternary (dict) . (kindIs "string" .)) "name") (kindIs "string" .) | quote }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* Which nodes a pod may run on, and who puts it there; the argument is the pod's settings. */}}
{{- define "truespec.placement" -}}
{{- $placement := dict -}}
{{- range $key := list "runtimeClassName" "priorityClassName" "schedulerName" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with get $ $key }}{{ $_ := set $placement $key . }}{{ end -}}
{{- end -}}
{{- with $placement }}{{ toYaml . }}{{ end -}}
{{- end -}}
