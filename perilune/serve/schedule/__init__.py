"""Who computes what in the next step: pure bookkeeping over the prefix cache, no tensors."""

from perilune.serve.schedule.classes import ServiceClass, service_classes
from perilune.serve.schedule.limits import Limits
from perilune.serve.schedule.plan import Plan, Row
from perilune.serve.schedule.scheduler import Scheduler
from perilune.serve.schedule.sequence import Sequence

__all__ = ["Limits", "Plan", "Row", "Scheduler", "Sequence", "ServiceClass", "service_classes"]
