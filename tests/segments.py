"""What a rank's shared memory takes."""

from __future__ import annotations

import os


def committed(comm):
    """Bytes of it that hold something."""
    return os.fstat(comm._node.fileno()).st_blocks * 512
