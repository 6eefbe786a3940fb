"""How memory is handed out to tensors on a CPU."""

import ctypes
import os
import platform

# Parameters of glibc's mallopt(3), and the largest value that it takes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Keep the memory of freed tensors for the next ones, where the C library is glibc and nobody has set it up.

    glibc maps large blocks anew each time and gives them back when they are freed, so that every step of a training
    touches the same memory for the first time again. On two cores, a step of the quickstart took 0.27 s with that and
    0.18 s without.

    Returns:
        Whether anything was changed.
    """
    configured = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if platform.libc_ver()[0] != "glibc" or configured:
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _NEVER) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))
