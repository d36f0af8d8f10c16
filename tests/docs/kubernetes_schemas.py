"""The parts of Kubernetes' schemas that our manifests use, written down from the API references.

Stricter than a cluster: a field that does not stand here is an error, so that a typing error is
one.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65_535}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
QUANTITY: Schema = {
    "type": "string",
    "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$",
}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}


def fields(*required: str, **known: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": known,
        "required": list(required),
        "additionalProperties": False,
    }


def many(one: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": one, **bounds}


def one_of(*words: str) -> Schema:
    return {"enum": list(words)}


SELECTOR = fields("matchLabels", matchLabels=LABELS)
PORT_OR_NAME: Schema = {"anyOf": [PORT, {"type": "string", "maxLength": 15}]}
PROBE = fields(
    "httpGet",
    httpGet=fields("path", "port", path=TEXT, port=PORT_OR_NAME),
    periodSeconds=COUNT,
    timeoutSeconds=COUNT,
    failureThreshold=COUNT,
    initialDelaySeconds=COUNT,
)
KEY = fields("name", "key", name=NAME, key=TEXT, optional=FLAG)
ENV: Schema = {
    "oneOf": [
        fields("name", "value", name=TEXT, value=TEXT),
        fields("name", "valueFrom", name=TEXT, valueFrom=fields("secretKeyRef", secretKeyRef=KEY)),
    ]
}
RESOURCES = fields(
    requests={"type": "object", "additionalProperties": QUANTITY},
    limits={"type": "object", "additionalProperties": QUANTITY},
)
CONTAINER = fields(
    "name",
    "image",
    name=NAME,
    image=TEXT,
    imagePullPolicy=one_of("Always", "IfNotPresent", "Never"),
    args=many(TEXT),
    command=many(TEXT),
    env=many(ENV),
    ports=many(
        fields(
            "containerPort",
            name={"type": "string", "maxLength": 15},
            containerPort=PORT,
            protocol=one_of("TCP", "UDP"),
        )
    ),
    lifecycle=fields(
        preStop=fields("exec", exec=fields("command", command=many(TEXT, minItems=1)))
    ),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    resources=RESOURCES,
    securityContext=fields(
        allowPrivilegeEscalation=FLAG,
        readOnlyRootFilesystem=FLAG,
        capabilities=fields(drop=many(TEXT), add=many(TEXT)),
    ),
    volumeMounts=many(fields("name", "mountPath", name=NAME, mountPath=TEXT, readOnly=FLAG)),
)
POD = fields(
    "metadata",
    "spec",
    metadata=fields("labels", labels=LABELS, annotations=LABELS),
    spec=fields(
        "containers",
        terminationGracePeriodSeconds=COUNT,
        enableServiceLinks=FLAG,
        securityContext=fields(runAsNonRoot=FLAG, runAsUser=COUNT, fsGroup=COUNT),
        containers=many(CONTAINER, minItems=1),
        volumes=many(
            fields(
                "name",
                name=NAME,
                persistentVolumeClaim=fields("claimName", claimName=NAME, readOnly=FLAG),
                emptyDir=fields(medium=one_of("", "Memory"), sizeLimit=QUANTITY),
            )
        ),
    ),
)
DEPLOYMENT = fields(
    "selector",
    "template",
    replicas=COUNT,
    selector=SELECTOR,
    strategy=fields(
        type=one_of("RollingUpdate", "Recreate"),
        rollingUpdate=fields(maxUnavailable=COUNT, maxSurge=COUNT),
    ),
    template=POD,
)
SERVICE = fields(
    "selector",
    "ports",
    selector=LABELS,
    type=one_of("ClusterIP", "NodePort", "LoadBalancer"),
    clusterIP=one_of("None"),
    ports=many(
        fields("port", name=NAME, port=PORT, targetPort=PORT_OR_NAME, protocol=one_of("TCP")),
        minItems=1,
    ),
)
NETWORK_POLICY = fields(
    "podSelector",
    podSelector=SELECTOR,
    policyTypes=many(one_of("Ingress", "Egress")),
    ingress=many(
        {
            "type": "object",
            "properties": {
                "from": many(fields("podSelector", podSelector=SELECTOR)),
                "ports": many(fields("port", protocol=one_of("TCP"), port=PORT_OR_NAME)),
            },
            "additionalProperties": False,
        }
    ),
)
POD_MONITOR = fields(
    "selector",
    "podMetricsEndpoints",
    selector=SELECTOR,
    podMetricsEndpoints=many(
        fields(
            port=TEXT,
            path=TEXT,
            interval={"type": "string", "pattern": r"^[0-9]+(ms|s|m|h)$"},
            authorization=fields(type=TEXT, credentials=KEY),
        ),
        minItems=1,
    ),
)
SCALING_RULES = fields(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy=one_of("Max", "Min", "Disabled"),
    policies=many(
        fields(
            "type",
            "value",
            "periodSeconds",
            type=one_of("Pods", "Percent"),
            value={"type": "integer", "minimum": 1},
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        )
    ),
)
AUTOSCALER = fields(
    "scaleTargetRef",
    "maxReplicas",
    scaleTargetRef=fields("kind", "name", apiVersion=TEXT, kind=TEXT, name=NAME),
    minReplicas={"type": "integer", "minimum": 1},
    maxReplicas={"type": "integer", "minimum": 1},
    metrics=many(
        fields(
            "type",
            "pods",
            type=one_of("Pods"),
            pods=fields(
                "metric",
                "target",
                metric=fields("name", name=TEXT, selector=SELECTOR),
                target=fields(
                    "type", "averageValue", type=one_of("AverageValue"), averageValue=QUANTITY
                ),
            ),
        )
    ),
    behavior=fields(scaleUp=SCALING_RULES, scaleDown=SCALING_RULES),
)
INFERENCE_POOL = fields(
    "selector",
    "targetPorts",
    "endpointPickerRef",
    selector=SELECTOR,
    targetPorts=many(fields("number", number=PORT), minItems=1, maxItems=8),
    appProtocol=one_of("http", "kubernetes.io/h2c"),
    endpointPickerRef=fields(
        "name",
        group=TEXT,
        kind=one_of("Service"),
        name=NAME,
        port=fields("number", number=PORT),
        failureMode=one_of("FailOpen", "FailClose"),
    ),
)
HTTP_ROUTE = fields(
    parentRefs=many(fields("name", group=TEXT, kind=TEXT, name=NAME, namespace=NAME)),
    hostnames=many(TEXT),
    rules=many(
        fields(
            matches=many(
                fields(
                    path=fields(type=one_of("Exact", "PathPrefix", "RegularExpression"), value=TEXT)
                )
            ),
            backendRefs=many(fields("name", group=TEXT, kind=TEXT, name=NAME, port=PORT)),
            timeouts=fields(
                request={"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
            ),
        )
    ),
)
LEADER_WORKER_SET = fields(
    "leaderWorkerTemplate",
    replicas=COUNT,
    leaderWorkerTemplate=fields(
        "workerTemplate",
        "size",
        leaderTemplate=POD,
        workerTemplate=POD,
        size={"type": "integer", "minimum": 1},
        restartPolicy=one_of("Default", "RecreateGroupOnPodRestart", "None"),
    ),
    startupPolicy=one_of("LeaderCreated", "LeaderReady"),
    rolloutStrategy=fields(
        "type",
        type=one_of("RollingUpdate"),
        rollingUpdateConfiguration=fields(maxUnavailable=COUNT, maxSurge=COUNT, partition=COUNT),
    ),
    networkConfig=fields("subdomainPolicy", subdomainPolicy=one_of("Shared", "UniquePerReplica")),
)
CLAIM = fields(
    "accessModes",
    "resources",
    accessModes=many(
        one_of("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"), minItems=1
    ),
    resources=fields("requests", requests=fields("storage", storage=QUANTITY)),
    storageClassName=NAME,
)
DISRUPTION_BUDGET = fields("selector", selector=SELECTOR, maxUnavailable=COUNT, minAvailable=COUNT)
SPECS: dict[tuple[str, str], Schema] = {
    ("apps/v1", "Deployment"): DEPLOYMENT,
    ("v1", "Service"): SERVICE,
    ("v1", "PersistentVolumeClaim"): CLAIM,
    ("policy/v1", "PodDisruptionBudget"): DISRUPTION_BUDGET,
    ("networking.k8s.io/v1", "NetworkPolicy"): NETWORK_POLICY,
    ("monitoring.coreos.com/v1", "PodMonitor"): POD_MONITOR,
    ("autoscaling/v2", "HorizontalPodAutoscaler"): AUTOSCALER,
    ("inference.networking.k8s.io/v1", "InferencePool"): INFERENCE_POOL,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): HTTP_ROUTE,
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LEADER_WORKER_SET,
}


def schema_of(manifest: dict[str, Any]) -> Schema:
    """Raises KeyError for a kind that does not stand here."""
    return fields(
        "apiVersion",
        "kind",
        "metadata",
        "spec",
        apiVersion=TEXT,
        kind=TEXT,
        metadata=fields("name", name=NAME, labels=LABELS, annotations=LABELS),
        spec=SPECS[manifest["apiVersion"], manifest["kind"]],
    )
