import numpy as np

import pycollective as pc

with pc.init() as comm:
    comm.broadcast(np.ones(4), root="0")  # wrong: "str"
