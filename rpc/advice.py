"""Advice on pool size and eviction policy as operators see it, and on the wire."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from radixpool.radix.advise import Advice, AdvisorState
from radixpool.v1 import admin_pb2

__all__ = ["Advice", "AdviceReport", "AdvisorState", "advice_from_wire", "advice_to_wire"]


@dataclass(frozen=True, slots=True)
class AdviceReport:
    """What other sizes and policies would have hit, and how the estimates came about. Empty without a shadow."""

    advice: tuple[Advice, ...]
    state: AdvisorState


def advice_to_wire(report: AdviceReport) -> admin_pb2.GetAdviceResponse:
    """Return the report as a reply, without its header."""
    return admin_pb2.GetAdviceResponse(
        advice=[
            admin_pb2.PolicyAdvice(
                policy=advice.policy,
                multiple=advice.multiple,
                capacity_blocks=advice.capacity_blocks,
                hit_ratio=advice.hit_ratio,
            )
            for advice in report.advice
        ],
        **asdict(report.state),
    )


def advice_from_wire(reply: admin_pb2.GetAdviceResponse) -> AdviceReport:
    """Return the reply as a report."""
    return AdviceReport(
        advice=tuple(
            Advice(
                policy=advice.policy,
                multiple=advice.multiple,
                capacity_blocks=advice.capacity_blocks,
                hit_ratio=advice.hit_ratio if advice.HasField("hit_ratio") else None,
            )
            for advice in reply.advice
        ),
        state=AdvisorState(**{name: getattr(reply, name) for name in AdvisorState.__dataclass_fields__}),
    )
