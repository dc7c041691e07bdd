"""`normscope doctor`: what this machine has, what is missing, and what that disables.

It imports PyTorch only to ask it, and reports an import that fails: it has to work where nothing else does.
"""

from normscope.doctor.diagnosis import diagnose, text_diagnosis

__all__ = ["diagnose", "text_diagnosis"]
