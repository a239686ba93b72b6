"""How to start and talk to an implementation under test."""

from conformance.targets.fault import TargetFault
from conformance.targets.process import DidNotStart, Ending, Process
from conformance.targets.target import BadTarget, Target, load_target

__all__ = ["BadTarget", "DidNotStart", "Ending", "Process", "Target", "TargetFault", "load_target"]
