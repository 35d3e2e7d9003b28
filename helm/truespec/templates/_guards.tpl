{{/*
What only the chart can see: values against values, secrets, pools, the network; and the rules of KubeRay's operator, which
would otherwise refuse the object after the install. Each message names the value and the fix. The rules of the
application's own settings are the application's: the Job of config-check.yaml applies them before anything changes.
*/}}
{{- define "truespec.guards" -}}
{{- include "truespec.guardImage" . -}}
{{- include "truespec.guardNames" . -}}
{{- include "truespec.guardModel" . -}}
{{- include "truespec.guardCache" . -}}
{{- include "truespec.guardVllm" . -}}
{{- include "truespec.guardPools" . -}}
{{- include "truespec.guardPod" (dict "name" "head" "pod" .Values.head) -}}
{{- include "truespec.guardRay" . -}}
{{- include "truespec.guardNetwork" . -}}
{{- include "truespec.guardMade" (dict "root" . "name" "head" "component" "head" "pod" .Values.head) -}}
{{- range $name, $pool := include "truespec.pools" . | fromYaml -}}
{{- include "truespec.guardMade" (dict "root" $ "name" (printf "pools.%s" $name) "component" $name "pod" $pool) -}}
{{- end -}}
{{- end -}}

{{- define "truespec.guardAlerts" -}}
{{- $rules := .Files.Get "dashboards/rules/truespec.json" -}}
{{- if not $rules -}}
{{- fail "This chart has neither dashboards nor alerts yet, as in a fresh checkout; run `make chart` there." -}}
{{- end -}}
{{- $limits := dict -}}
{{- range (last ($rules | fromJson).groups).rules -}}
{{- $_ := set $limits .alert (pick . "threshold" "minimum") -}}
{{- end -}}
{{- range $name, $set := .Values.monitoring.prometheusRule.alerts -}}
{{- if not (hasKey $limits $name) -}}
{{- fail (printf "monitoring.prometheusRule.alerts.%s is not an alert; docs/runbooks.md has their names." $name) -}}
{{- end -}}
{{- range $limit := list "threshold" "minimum" -}}
{{- if and (hasKey $set $limit) (not (hasKey (get $limits $name) $limit)) -}}
{{- fail (printf "monitoring.prometheusRule.alerts.%s has no %s, so none can be set; docs/runbooks.md says which limits an alert has." $name $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "truespec.guardImage" -}}
{{- with .Values.image -}}
{{- if and (not (contains "/" .repository)) (ne .pullPolicy "Never") -}}
{{- fail (printf "image.repository is %s, which nodes would pull from docker.io/library, where it is not; push the image and name it as REGISTRY/%s, or set image.pullPolicy to Never where the nodes have it (kind load docker-image)." .repository .repository) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "truespec.guardNames" -}}
{{- $name := include "truespec.fullname" . -}}
{{- if gt (len $name) 47 -}}
{{- fail (printf "The name %q has %d characters and KubeRay allows 47; set fullnameOverride to a shorter one." $name (len $name)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "The name %q must begin with a letter and have only a-z, 0-9 and -; set fullnameOverride." $name) -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.create is false and serviceAccount.name is empty; name one that exists, or set create to true." -}}
{{- end -}}
{{- end -}}

{{- define "truespec.guardModel" -}}
{{- $config := .Values.config -}}
{{- $drafter := default dict $config.drafter -}}
{{- $catalogued := dict "model.source" $config.model.source -}}
{{- if eq (default "" $drafter.kind) "draft_model" -}}{{- $_ := set $catalogued "drafter.model" (default "" $drafter.model) -}}{{- end -}}
{{- range $key, $name := $catalogued -}}
{{- if and $name (not (contains "/" $name)) (not (hasPrefix "." $name)) (not (has $name (default list $.Values.modelCache.fetch))) (not $.Values.modelCache.readOnly) -}}
{{- fail (printf "config.%s is %s, a name of the catalogue that no pod fetches; add it to modelCache.fetch, or give a folder or a hub id." $key $name) -}}
{{- end -}}
{{- end -}}
{{- range $key, $path := dict "model.source" $config.model.source "drafter.model" (default "" $drafter.model) "model.chat_template" (default "" $config.model.chat_template) -}}
{{- if regexMatch "^[.~]" $path -}}
{{- fail (printf "config.%s is %s, a folder of your machine, which the pods do not have; give its path on a volume, such as %s/NAME, or a hub id." $key $path $.Values.modelCache.mountPath) -}}
{{- end -}}
{{- end -}}
{{- if dig "admin" "token_file" "" $config -}}
{{- fail "config.admin.token_file is the chart's to set; use admin.enabled and admin.existingSecret." -}}
{{- end -}}
{{- if dig "access" "keys_file" "" $config -}}
{{- fail "config.access.keys_file is the chart's to set; use apiKeys.existingSecret." -}}
{{- end -}}
{{- if dig "receipts" "key_file" "" $config -}}
{{- fail "config.receipts.key_file is the chart's to set; use receipts.existingSecret." -}}
{{- end -}}
{{- if not .Values.apiKeys.existingSecret -}}
{{- if .Values.apiKeys.smokeSecret -}}
{{- fail "apiKeys.smokeSecret is set, but there are no keys; set apiKeys.existingSecret, or remove it." -}}
{{- end -}}
{{- else if and .Values.test.enabled (not .Values.apiKeys.smokeSecret) -}}
{{- fail "apiKeys.existingSecret is set, so `helm test` needs a key; set apiKeys.smokeSecret, or test.enabled to false." -}}
{{- end -}}
{{- if and (eq (dig "access" "open_metrics" true $config) false) (not .Values.apiKeys.smokeSecret) (include "truespec.monitored" (dict "root" . "enabled" .Values.monitoring.podMonitor.enabled "kind" "PodMonitor")) -}}
{{- fail "config.access.open_metrics is false, so Prometheus needs a key; set apiKeys.smokeSecret, or monitoring.podMonitor.enabled to false." -}}
{{- end -}}
{{- $dumps := dig "dumps" "folder" "" $config -}}
{{- if and $dumps (not (hasPrefix "/tmp/" $dumps)) (not .Values.worker.volumeMounts) (not .Values.head.volumeMounts) -}}
{{- fail (printf "config.dumps.folder is %s, but only /tmp is writable in the pods; choose a folder below it, or mount a volume with head.volumes and worker.volumes." $dumps) -}}
{{- end -}}
{{- if and .Values.hub.token .Values.hub.existingSecret -}}
{{- fail "hub.token and hub.existingSecret are both set; remove the token." -}}
{{- end -}}
{{- end -}}

{{- define "truespec.guardCache" -}}
{{- $claims := include "truespec.claims" . -}}
{{- with .Values.modelCache -}}
{{- if and .readOnly (or (not $claims) (not .existingClaim)) -}}
{{- fail "modelCache.readOnly is true, but the pods would mount an empty volume; name a claim that holds the models in modelCache.existingClaim, or set readOnly to false." -}}
{{- end -}}
{{- if and .readOnly .fetch -}}
{{- fail (printf "modelCache.readOnly is true, so modelCache.fetch cannot put %s there; remove it, and run `truespec model get %s` where the volume can be written (TRUESPEC_CACHE)." (first .fetch) (first .fetch)) -}}
{{- end -}}
{{- if and .subPath (not $claims) -}}
{{- fail (printf "modelCache.subPath is %s, but there is no claim whose folder it would be; remove it, or set modelCache.enabled to true." .subPath) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "truespec.guardPools" -}}
{{- $pools := include "truespec.pools" . | fromYaml -}}
{{- $pods := 0 -}}
{{- range $name, $pool := $.Values.pools -}}
{{- if and $pool (not (hasKey $pools $name)) -}}
{{- fail (printf "pools.%s is set, but topology %s has only %s; remove it, or change config.topology." $name (default "disaggregated" $.Values.config.topology) (keys $pools | sortAlpha | join " and ")) -}}
{{- end -}}
{{- end -}}
{{- range $name, $pool := $pools -}}
{{- $scale := $pool.autoscaling -}}
{{- $pods = add $pods (mul (ternary $scale.maxReplicas $pool.replicas $scale.enabled) $pool.numOfHosts) -}}
{{- if and $scale.enabled (gt (int $scale.minReplicas) (int $scale.maxReplicas)) -}}
{{- fail (printf "pools.%s.autoscaling.minReplicas (%d) is above maxReplicas (%d); lower it or raise maxReplicas." $name (int $scale.minReplicas) (int $scale.maxReplicas)) -}}
{{- end -}}
{{- if ne (float64 $pool.gpus) (floor $pool.gpus) -}}
{{- fail (printf "pools.%s.gpus is %v, and a pod has whole GPUs only; set it to 1, or with a single GPU also config.topology to monolith." $name $pool.gpus) -}}
{{- end -}}
{{- if and (not $.Values.vllm.enabled) (gt (int $pool.gpus) 1) -}}
{{- fail (printf "pools.%s.gpus is %d, but the torch engine runs on one GPU; set it to 1 and raise replicas." $name (int $pool.gpus)) -}}
{{- end -}}
{{- if and (gt (int $pool.numOfHosts) 1) (not $.Values.vllm.enabled) -}}
{{- fail (printf "pools.%s.numOfHosts is %d, but the torch engine runs in one pod; set it to 1, or use vLLM (vllm.enabled)." $name (int $pool.numOfHosts)) -}}
{{- end -}}
{{- if and (gt (int $pool.numOfHosts) 1) (ne $.Values.config.topology "monolith") (ne (dig "transport" "plasma" (default dict $.Values.config.handoff)) "nixl") -}}
{{- fail (printf "pools.%s.numOfHosts is %d, but handoffs are copied through files of one pod; set config.handoff.transport to nixl, or config.topology to monolith." $name (int $pool.numOfHosts)) -}}
{{- end -}}
{{- if and (int $pool.gpus) (not $pool.gpuResource) (not (dig "claims" list (default dict $pool.resources))) -}}
{{- fail (printf "pools.%s.gpus is %d, but gpuResource is empty and resources.claims too, so the container has no GPU; set one of them." $name (int $pool.gpus)) -}}
{{- end -}}
{{- include "truespec.guardPod" (dict "name" (printf "pools.%s" $name) "pod" $pool) -}}
{{- if lt (int $pool.terminationGracePeriodSeconds) (add $pool.drainSeconds 30) -}}
{{- fail (printf "pools.%s.terminationGracePeriodSeconds (%d) must be at least drainSeconds + 30 (%d); raise it." $name (int $pool.terminationGracePeriodSeconds) (add $pool.drainSeconds 30)) -}}
{{- end -}}
{{- range $label, $_ := merge (dict) (default dict $pool.podLabels) (default dict $.Values.commonLabels) -}}
{{- if or (hasPrefix "app.kubernetes.io/" $label) (hasPrefix "ray.io/" $label) -}}
{{- fail (printf "The label %s is the chart's or KubeRay's own; choose another key in commonLabels and podLabels." $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.modelCache -}}
{{- if has (clean .mountPath) (list "/" "/tmp" "/dev/shm") -}}
{{- fail (printf "modelCache.mountPath is %s, where the pods have something else; choose another folder, /models for example." .mountPath) -}}
{{- end -}}
{{- $shared := or (has "ReadWriteMany" .accessModes) (has "ReadOnlyMany" .accessModes) -}}
{{- if and (include "truespec.claims" $) (not .existingClaim) (not $shared) (gt (int $pods) 1) -}}
{{- fail (printf "modelCache.accessModes has no ReadWriteMany, but %d worker pods mount the claim; use ReadWriteMany, an existingClaim, or modelCache.enabled=false." (int $pods)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What is wrong with any pod's settings: dict "name" of the values "pod" the settings */}}
{{- define "truespec.guardPod" -}}
{{- $name := .name -}}
{{- $given := default dict .pod.resources -}}
{{- $taken := list "ray-head" "ray-worker" "fetch-models" "wait-gcs-ready" "autoscaler" -}}
{{- range concat (default list .pod.initContainers) (default list .pod.sidecars) -}}
{{- if has .name $taken -}}
{{- fail (printf "%s has a container named %s, as another of the pod, the chart's or KubeRay's; give it another name in initContainers or sidecars." $name .name) -}}
{{- end -}}
{{- $taken = append $taken .name -}}
{{- end -}}
{{- range $kind := list "requests" "limits" -}}
{{- if and $.pod.gpuResource (hasKey (default dict (get $given $kind)) $.pod.gpuResource) -}}
{{- fail (printf "%s.resources.%s has %s, of which Ray would not know; set gpus." $name $kind $.pod.gpuResource) -}}
{{- end -}}
{{- end -}}
{{- if lt (include "truespec.storeBytes" .pod | float64) 8e7 -}}
{{- fail (printf "%s.shmSize is %s, and Ray's object store, nine tenths of it, needs 80 MB; raise it, to 1Gi for example." $name .pod.shmSize) -}}
{{- end -}}
{{- $made := include "truespec.resources" .pod | fromYaml -}}
{{- range $what, $amount := $made.requests -}}
{{- $limit := get $made.limits $what -}}
{{- $wholes := or (contains "/" $what) (hasPrefix "hugepages-" $what) -}}
{{- $over := and $limit (gt (include "truespec.amount" $amount | float64) (include "truespec.amount" (default "0" $limit) | float64)) -}}
{{- if and $wholes (ne $amount $limit) -}}
{{- fail (printf "%s.resources.requests has %s of %s, which Kubernetes gives a container only where the limit is the same; set it under limits alone." $name $amount $what) -}}
{{- else if $over -}}
{{- fail (printf "%s asks for %s of %s, but its limit is %s, so that Kubernetes would refuse its pods; raise the limit, or lower resources.requests." $name $amount $what $limit) -}}
{{- end -}}
{{- end -}}
{{- $claims := list -}}
{{- range default list .pod.resourceClaims }}{{ $claims = append $claims .name }}{{ end -}}
{{- range default list $given.claims -}}
{{- if not (has .name $claims) -}}
{{- fail (printf "%s.resources.claims names %s, which resourceClaims does not have; add it there, or remove it." $name .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* KubeRay's CRD takes no name twice, and a mount needs its volume: podTemplate's argument and its "name" in the values. */}}
{{- define "truespec.guardMade" -}}
{{- $name := .name -}}
{{- $spec := (include "truespec.podTemplate" . | fromYaml).spec -}}
{{- $volumes := list -}}
{{- range $spec.volumes -}}
{{- if has .name $volumes -}}
{{- fail (printf "%s.volumes has %s twice, or the chart has it too; give it another name." $name .name) -}}
{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- range $container := concat (default list $spec.initContainers) $spec.containers -}}
{{- $variables := list -}}
{{- range $container.env -}}
{{- if has .name $variables -}}
{{- fail (printf "%s.env has %s twice, or the chart sets it too; remove it (modelCache.mountPath moves caches, ray.haproxy sets Serve's proxy)." $name .name) -}}
{{- end -}}
{{- $variables = append $variables .name -}}
{{- end -}}
{{- $paths := list -}}
{{- range $container.volumeMounts -}}
{{- if has .mountPath $paths -}}
{{- fail (printf "%s.volumeMounts has %s twice, or the chart mounts something there too; choose another path." $name .mountPath) -}}
{{- end -}}
{{- if not (has .name $volumes) -}}
{{- fail (printf "%s.volumeMounts mounts %s, which volumes does not have; add it there." $name .name) -}}
{{- end -}}
{{- $paths = append $paths .mountPath -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "truespec.guardVllm" -}}
{{- $config := .Values.config -}}
{{- $engine := default dict $config.engine -}}
{{- with .Values.vllm -}}
{{- if .enabled -}}
{{- if eq (default "vllm" $engine.kind) "torch" -}}
{{- fail "config.engine.kind is torch, but vllm.enabled is set; remove one of them." -}}
{{- end -}}
{{- $given := dig "engine_args" dict (default dict $config.vllm) -}}
{{- $ranks := mul .tensorParallelSize (int (default 1 $given.pipeline_parallel_size)) -}}
{{- range $argument, $value := dict "tensor_parallel_size" "vllm.tensorParallelSize" "gpu_memory_utilization" "vllm.gpuMemoryUtilization" "distributed_executor_backend" "numOfHosts of a pool" -}}
{{- if hasKey $given $argument -}}
{{- fail (printf "config.vllm.engine_args.%s is the chart's to set; use %s." $argument $value) -}}
{{- end -}}
{{- end -}}
{{- range $name, $pool := include "truespec.pools" $ | fromYaml -}}
{{- if ne (mul $pool.gpus $pool.numOfHosts) $ranks -}}
{{- fail (printf "pools.%s has %d GPUs a replica (gpus times numOfHosts), and vLLM needs %d (vllm.tensorParallelSize times config.vllm.engine_args.pipeline_parallel_size); make them equal." $name (mul $pool.gpus $pool.numOfHosts) $ranks) -}}
{{- end -}}
{{- end -}}
{{- else if eq (default "torch" $engine.kind) "vllm" -}}
{{- fail "config.engine.kind is vllm, but vllm.enabled is not set; set that instead." -}}
{{- else if gt (int .tensorParallelSize) 1 -}}
{{- fail (printf "vllm.tensorParallelSize is %d, but the torch engine runs on one GPU; set it to 1, or use a model that fits." (int .tensorParallelSize)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "truespec.guardRay" -}}
{{- $autoscales := eq (include "truespec.autoscales" .) "true" -}}
{{- with .Values.ray -}}
{{- if and .auth.enabled (semverCompare "<2.52.0-0" .version) -}}
{{- fail (printf "ray.auth.enabled needs Ray 2.52 and ray.version is %s; use a newer image, or set it to false." .version) -}}
{{- end -}}
{{- if semverCompare "<2.60.0-0" .version -}}
{{- fail (printf "ray.version is %s and the application needs 2.60; build the image with a newer Ray." .version) -}}
{{- end -}}
{{- if and (not .auth.enabled) .auth.existingSecret -}}
{{- fail "ray.auth.existingSecret is set, but ray.auth.enabled is false; enable it or remove the secret's name." -}}
{{- end -}}
{{- with .gcsFaultTolerance -}}
{{- if and .enabled (not .redisAddress) -}}
{{- fail "ray.gcsFaultTolerance.redisAddress is not set; give redis://host:port, or set enabled to false." -}}
{{- end -}}
{{- $port := int (regexFind "[0-9]+$" (default "" .redisAddress)) -}}
{{- if and .redisAddress (or (lt $port 1) (gt $port 65535)) -}}
{{- fail (printf "ray.gcsFaultTolerance.redisAddress has port %d; give one from 1 to 65535." $port) -}}
{{- end -}}
{{- if and (not .enabled) .redisAddress -}}
{{- fail "ray.gcsFaultTolerance.redisAddress is set, but enabled is false; KubeRay would not use it: set enabled to true." -}}
{{- end -}}
{{- if and (not .enabled) .redisUsername -}}
{{- fail "ray.gcsFaultTolerance.redisUsername is set, but enabled is false; KubeRay would not use it: set enabled to true." -}}
{{- end -}}
{{- end -}}
{{- with .upgrade -}}
{{- if eq .strategy "NewClusterWithIncrementalUpgrade" -}}
{{- if not $autoscales -}}
{{- fail "ray.upgrade.strategy NewClusterWithIncrementalUpgrade needs Ray's autoscaler; set autoscaling.enabled of a pool (or of worker), or use NewCluster." -}}
{{- end -}}
{{- if not .gatewayClassName -}}
{{- fail "ray.upgrade.gatewayClassName is not set; an incremental upgrade moves traffic through a gateway of that class." -}}
{{- end -}}
{{- if gt (int .stepSizePercent) (int .maxSurgePercent) -}}
{{- fail (printf "ray.upgrade.stepSizePercent (%d) is above maxSurgePercent (%d); lower it." (int .stepSizePercent) (int .maxSurgePercent)) -}}
{{- end -}}
{{- if or $.Values.ingress.enabled $.Values.httpRoute.enabled -}}
{{- fail "ingress and httpRoute point at one service, but an incremental upgrade has one per cluster behind KubeRay's own gateway; disable them, or use NewCluster." -}}
{{- end -}}
{{- if or (ne $.Values.service.type "ClusterIP") $.Values.service.annotations -}}
{{- fail "service.type and service.annotations do nothing in an incremental upgrade: KubeRay makes one service per cluster behind its own gateway; remove them, or use NewCluster." -}}
{{- end -}}
{{- if $.Values.test.enabled -}}
{{- fail "test.enabled is true, but in an incremental upgrade there is no service of a fixed name for `helm test`; set it to false, or use NewCluster." -}}
{{- end -}}
{{- if $.Values.service.loadBalancerClass -}}{{- fail "service.loadBalancerClass does nothing in an incremental upgrade; remove it, or use NewCluster." -}}{{- end -}}
{{- else if .gatewayClassName -}}
{{- fail (printf "ray.upgrade.gatewayClassName is set, but strategy is %s; remove it, or use NewClusterWithIncrementalUpgrade." .strategy) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "truespec.guardNetwork" -}}
{{- if and .Values.service.loadBalancerClass (ne .Values.service.type "LoadBalancer") -}}
{{- fail (printf "service.loadBalancerClass is set, but service.type is %s; set it to LoadBalancer, or remove the class." .Values.service.type) -}}
{{- end -}}
{{- if has (int .Values.service.port) (list 6379 8080 8265 10001 44217 44227 52365) -}}
{{- fail (printf "service.port %d is one of Ray's own ports; choose another, 8000 for example." (int .Values.service.port)) -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.enabled is true and ingress.hosts empty; add at least one host." -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled is true and httpRoute.parentRefs empty; name the gateway." -}}
{{- end -}}
{{- if .Values.networkPolicy.enabled -}}{{- include "truespec.guardClients" . -}}{{- end -}}
{{- with .Values.networkPolicy -}}
{{- if and .enabled (not .operator) -}}
{{- fail "networkPolicy.operator is empty, so KubeRay could not deploy the application; give the operator's namespace and pod labels." -}}
{{- end -}}
{{- if and .enabled (not .allowHttps) (not .extraEgress) -}}
{{- $fetched := $.Values.modelCache.fetch -}}
{{- range $source := list $.Values.config.model.source (dig "model" "" (default dict $.Values.config.drafter)) -}}
{{- if regexMatch "^[^./~][^/]*/[^/]+$" (default "" $source) -}}{{- $fetched = list $source -}}{{- end -}}
{{- end -}}
{{- if $fetched -}}
{{- fail (printf "networkPolicy.allowHttps is false, so %s cannot be fetched; allow it, give a rule in extraEgress, or put it on a volume and name its folder." (first $fetched)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Whoever an Ingress, a route or a service with an outside address sends must be among networkPolicy.clients: a peer that
names pods or a namespace for a controller, addresses for what comes from outside the cluster.
*/}}
{{- define "truespec.guardClients" -}}
{{- $named := false -}}
{{- $addressed := false -}}
{{- range .Values.networkPolicy.clients -}}
{{- $addressed = or $addressed (hasKey . "ipBlock") -}}
{{- $named = or $named (hasKey . "ipBlock") (hasKey . "namespaceSelector") (not (empty .podSelector)) -}}
{{- end -}}
{{- $entry := ternary "ingress" "httpRoute" .Values.ingress.enabled -}}
{{- if and (or .Values.ingress.enabled .Values.httpRoute.enabled) (not $named) -}}
{{- fail (printf "%s.enabled is true, but networkPolicy.clients names no controller or gateway that may reach the pods; add it with a namespaceSelector, or with the labels of its pods where they run in this namespace." $entry) -}}
{{- end -}}
{{- if and (ne .Values.service.type "ClusterIP") (not $addressed) -}}
{{- fail (printf "service.type is %s, but networkPolicy.clients has no ipBlock, so nobody outside the cluster gets in; add the addresses of your clients and load balancer." .Values.service.type) -}}
{{- end -}}
{{- end -}}
