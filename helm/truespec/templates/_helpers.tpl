{{/* Name of the RayService; every other object begins with it. */}}
{{- define "truespec.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}{{ .Release.Name }}{{- else -}}{{ printf "%s-%s" .Release.Name $name }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* What selects this release's pods; never changes. */}}
{{- define "truespec.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "truespec.labels" -}}
{{ include "truespec.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* metadata of an object: dict "root" $ "suffix" "" "labels" {} "annotations" {} */}}
{{- define "truespec.metadata" -}}
{{- $root := .root -}}
name: {{ compact (list (include "truespec.fullname" $root) .suffix) | join "-" | quote }}
namespace: {{ $root.Release.Namespace | quote }}
labels:
  {{- include "truespec.labels" $root | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default dict .annotations) (default dict $root.Values.commonAnnotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "truespec.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "truespec.serviceAccountName" -}}
{{- default (include "truespec.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "truespec.hubSecretName" -}}
{{- if .Values.hub.existingSecret -}}{{ .Values.hub.existingSecret }}
{{- else if .Values.hub.token -}}{{ include "truespec.fullname" . }}-hub
{{- end -}}
{{- end -}}

{{- define "truespec.adminSecretName" -}}
{{- default (printf "%s-admin" (include "truespec.fullname" .)) .Values.admin.existingSecret -}}
{{- end -}}

{{- define "truespec.cacheClaimName" -}}
{{- default (printf "%s-models" (include "truespec.fullname" .)) .Values.modelCache.existingClaim -}}
{{- end -}}

{{/* "true" where models are on a claim. */}}
{{- define "truespec.claims" -}}
{{- $cache := .Values.modelCache -}}
{{- if kindIs "invalid" $cache.enabled -}}
{{- if or (include "truespec.serves" .) $cache.existingClaim }}true{{ end -}}
{{- else if $cache.enabled }}true{{ end -}}
{{- end -}}

{{/* The pools of the topology, each with what it has from `worker`, as a YAML map. */}}
{{- define "truespec.pools" -}}
{{- $names := ternary (list "monolith") (list "prefill" "decode") (eq .Values.config.topology "monolith") -}}
{{- range $name := $names }}
{{ $name }}:
  {{- mustMergeOverwrite (mustDeepCopy $.Values.worker) (mustDeepCopy (default dict (get $.Values.pools $name))) | toYaml | nindent 2 }}
{{- end }}
{{- end -}}

{{/* "true" when a pool scales by itself. */}}
{{- define "truespec.autoscales" -}}
{{- $found := false -}}
{{- range include "truespec.pools" . | fromYaml }}{{ $found = or $found .autoscaling.enabled }}{{ end -}}
{{- if $found }}true{{ end -}}
{{- end -}}

{{/* "true" where a monitoring object is wanted: dict "root" $ "enabled" null|bool "kind" "PodMonitor" */}}
{{- define "truespec.monitored" -}}
{{- if kindIs "invalid" .enabled -}}
{{- if .root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .kind) }}true{{ end -}}
{{- else if .enabled -}}true{{ end -}}
{{- end -}}

{{/* A number that may have come as a text, by `--set`. */}}
{{- define "truespec.number" -}}
{{- float64 . | toJson -}}
{{- end -}}

{{/* A quantity of Kubernetes as a number. */}}
{{- define "truespec.amount" -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- $unit := regexFind "[A-Za-z]+$" . -}}
{{- mulf (trimSuffix $unit . | float64) (get $units $unit) -}}
{{- end -}}

{{/*
Bytes of Ray's object store: a tenth of /dev/shm is left to others. Ray's own choice is 30 % of the memory, and where that is more
than /dev/shm has, it puts the store into /tmp. The argument is the pod's settings.
*/}}
{{- define "truespec.storeBytes" -}}
{{- mulf (include "truespec.amount" .shmSize | float64) 0.9 | int64 -}}
{{- end -}}

{{/*
An expression about this release alone, or another's thresholds and labels would apply to it, too. Its series are known by
what the chart's PodMonitor gives them; where something else scrapes, about all releases. dict "root" $ "expr"
*/}}
{{- define "truespec.ofRelease" -}}
{{- $expr := .expr -}}
{{- if include "truespec.monitored" (dict "root" .root "enabled" .root.Values.monitoring.podMonitor.enabled "kind" "PodMonitor") -}}
{{- $own := printf "job=%q,namespace=%q" .root.Release.Name .root.Release.Namespace -}}
{{- $series := "((?:[a-z_]+:)?truespec_[a-z0-9_]+(?::[a-z0-9_]+)?)" -}}
{{- $expr = regexReplaceAll (print $series "\\{") $expr (printf "${1}{%s," $own) -}}
{{- $expr = regexReplaceAll (print $series "([^a-z0-9_:{]|$)") $expr (printf "${1}{%s}${2}" $own) -}}
{{- end -}}
{{- $expr -}}
{{- end -}}
