"""The fields of KEDA's documents that we use, as KEDA 2 documents them; others are refused."""

# KEDA names its fields in camel case.
# ruff: noqa: N815

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Metadata(_Strict):
    name: str
    namespace: str = ""
    labels: dict[str, str] = {}


class _Prometheus(_Strict):
    serverAddress: str
    query: str
    threshold: str
    activationThreshold: str = "0"
    ignoreNullValues: Literal["true", "false"] = "true"


class _Redis(_Strict):
    address: str
    listName: str
    listLength: str = "5"
    activationListLength: str = "0"
    databaseIndex: str = "0"


class _Named(_Strict):
    name: str


class _Trigger(_Strict):
    name: str
    metricType: Literal["AverageValue", "Value", "Utilization"] = "AverageValue"
    authenticationRef: _Named | None = None


class _PrometheusTrigger(_Trigger):
    type: Literal["prometheus"]
    metadata: _Prometheus


class _RedisTrigger(_Trigger):
    type: Literal["redis"]
    metadata: _Redis


class _AutoscalerConfig(_Strict):
    behavior: dict[str, Any]
    """That of a HorizontalPodAutoscaler."""


class _Advanced(_Strict):
    horizontalPodAutoscalerConfig: _AutoscalerConfig


class _ScaledSpec(_Strict):
    scaleTargetRef: _Named
    minReplicaCount: int = 0
    maxReplicaCount: int = 100
    pollingInterval: int = 30
    cooldownPeriod: int = 300
    advanced: _Advanced
    triggers: list[Annotated[_PrometheusTrigger | _RedisTrigger, Field(discriminator="type")]]


class ScaledObject(_Strict):
    apiVersion: Literal["keda.sh/v1alpha1"]
    kind: Literal["ScaledObject"]
    metadata: _Metadata
    spec: _ScaledSpec

    def autoscaler(self) -> dict[str, Any]:
        """The HorizontalPodAutoscaler that KEDA makes of it, without its metrics."""
        spec = self.spec
        target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": spec.scaleTargetRef.name}
        return {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": self.metadata.name},
            "spec": {
                "scaleTargetRef": target,
                "maxReplicas": spec.maxReplicaCount,
                "behavior": spec.advanced.horizontalPodAutoscalerConfig.behavior,
            },
        }


class _SecretTarget(_Strict):
    parameter: str
    name: str
    key: str


class _AuthenticationSpec(_Strict):
    secretTargetRef: list[_SecretTarget]


class TriggerAuthentication(_Strict):
    apiVersion: Literal["keda.sh/v1alpha1"]
    kind: Literal["TriggerAuthentication"]
    metadata: _Metadata
    spec: _AuthenticationSpec
