"""Training whose weights are the same bits on any number of ranks (any_number_of_ranks.md).

sync = LeafSync(model_or_ddp, leaves=24)     # a step has 24 micro-batches, over all ranks
loader = DataLoader(dataset, batch_sampler=LeafSampler(sync, len(dataset), micro_batch=8))
for step in sync.steps(loader, until=1000):
    for x, y in step:                        # this rank's
        loss(model_or_ddp(x), y).backward()
    optimizer.step()                         # every .grad is the average of 24
"""

from pycollective.torch.leaves.sampler import LeafSampler
from pycollective.torch.leaves.sync import LeafSync

__all__ = ["LeafSampler", "LeafSync"]
