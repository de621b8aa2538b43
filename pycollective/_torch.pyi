import torch
import torch.distributed as dist

from pycollective.communicator import Communicator

class CompletionThreads:
    def __init__(self, rank: int, limit: float) -> None: ...
    @staticmethod
    def any_busy() -> bool: ...
    @staticmethod
    def end_all() -> None: ...

class Backend(dist.Backend):
    def __init__(self, communicator: Communicator, threads: CompletionThreads) -> None: ...
    @property
    def options(self) -> object: ...

def gloo_link(group: dist.Backend) -> object: ...  # a capsule, as mpi_link of _core
def average(
    group: dist.ProcessGroup, bucket: torch.Tensor
) -> torch.futures.Future[torch.Tensor]: ...
