"""What forks that run the examples have, and need not import: some three seconds for each rank."""

from __future__ import annotations

import sklearn.datasets  # noqa: F401
import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor.parallel

import pycollective.torch  # noqa: F401

torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # the first one imports as much again
