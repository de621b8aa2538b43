"""Mistakes that type checkers see, a line each; never run."""

import numpy as np

import pycollective as pc
from pycollective.compression import TopKState

x = np.ones(4)
pc.Communicator(0, 4)  # wrong: Too many arguments
pc.init(wire="bf17")  # wrong: "wire"


def summed(comm: pc.Communicator, x: np.ndarray, overlap: bool) -> np.ndarray:
    return comm.all_reduce(x, async_op=overlap)  # wrong: Work[ndarray


with pc.init() as comm:
    comm.broadcast(x, algorithm="rign")  # wrong: "str"
    comm.broadcast(x, root="0")  # wrong: "str"
    comm.all_reduce(x, op="mean")  # wrong: "str"
    comm.all_reduce([1.0, 2.0])  # wrong: "list[float]"
    TopKState({"w": (64, 64)}, comm, density=0.01, values="bfloat61")  # wrong: "values"
    total = comm.reduce(x, root=0)
    print(total.sum())  # wrong: "None"
    source: int = comm.recv(x, async_op=True)  # wrong: "Work[int]"
    y = comm.all_reduce(x, async_op=True)
    print(y.sum())  # wrong: "Work[
