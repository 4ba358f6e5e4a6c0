"""What torch raises when there is no memory left."""

from __future__ import annotations

import torch

EXCEPTIONS = (RuntimeError, MemoryError)
"""What to catch, and then to ask `is_out_of_memory` about."""


def is_out_of_memory(error: BaseException) -> bool:
    """On a GPU torch has a class for it; on a CPU only the message says so."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or "DefaultCPUAllocator: can't allocate memory" in str(error)
