import numpy as np

import pycollective as pc


def summed(comm: pc.Communicator, x: np.ndarray, overlap: bool) -> np.ndarray:
    return comm.all_reduce(x, async_op=overlap)  # wrong: Work[ndarray
