import torch
import torch.distributed as dist

from pycollective.communicator import Communicator

class CompletionThreads:
    def __init__(self) -> None: ...
    def close(self, limit: float) -> None: ...

class Backend(dist.Backend):
    def __init__(self, communicator: Communicator, threads: CompletionThreads) -> None: ...
    @property
    def options(self) -> object: ...

def average(
    group: dist.ProcessGroup, bucket: torch.Tensor
) -> torch.futures.Future[torch.Tensor]: ...
