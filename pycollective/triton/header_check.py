"""What a reduction looks at beside its terms: every rank's header of the call.

A header is 8 words of 64 bits (`pycollective.torch.ordered.header`). Ranks that make the same call
have the same first 7. The last says that the rank's leaves are what the call promises: 1, or 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

WORDS = 8  # of a header
BYTES = 8 * WORDS
NUMBER, FITS = 1, 7  # words: of the call in its group, from 1; whether leaves are as promised


class Check(NamedTuple):
    """The headers that came, and who is told where they differ.

    If any of the first 7 words of a row, this rank's row too, differs from `own`, or any row's last
    word is 0, results that are floats become NaN, and what the rows said goes to `found`. Where no
    message has come rows are those of an earlier call, on all ranks alike; `own` is not.

    Attributes:
        rows: int64, ``(ranks, words)``: each row begins with a rank's header, and its words are
            contiguous. Rows may be any distance apart.
        own: int64, ``(8,)``, on the device: the header that this rank has sent.
        rank: this one. In `found` its row is `own`.
        found: int64, ``(1 + ranks * 8,)``, memory of the host that the device writes; of a CPU's
            tensors any. The headers of the first call that differed, and before them 1, which is
            written last. Both stay from then on.
        number: int64, ``(1,)``, on the device: how many calls have ended.
        last: whether this is the call's last reduction, behind which `number` is one more.
    """

    rows: torch.Tensor
    own: torch.Tensor
    rank: int
    found: torch.Tensor
    number: torch.Tensor
    last: bool
