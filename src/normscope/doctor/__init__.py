"""`normscope doctor`: what this machine has, what is missing, and what that disables.

It imports PyTorch only to ask it, and reports an import that fails: it has to work where nothing else does.
"""

from normscope.doctor.diagnosis import SCHEMA, Diagnosis, diagnose
from normscope.doctor.words import text_diagnosis

__all__ = ["SCHEMA", "Diagnosis", "diagnose", "text_diagnosis"]
