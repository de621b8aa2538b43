"""How messages fit together, and what a call costs however many parameters there are."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycollective import _core
from pycollective.compression import kernels, quantized, top_k
from pycollective.compression.arrays import Elements, Item
from pycollective.compression.bucket import Bucket, ByBucket
from pycollective.compression.message import header_bytes
from pycollective.compression.partition import Hosts, Partition
from pycollective.compression.top_k import TopKOptions
from pycollective.placement import number_hosts
from pycollective.segments import ADDRESS, AT, COUNT, ENTRY, ITEM, K
from tests.compression.players import KINDS, digest, gradients, make
from tests.compression.test_partition import Zeros, chunks, counts, hosts_of, names
from tests.inputs import dtype_of, same_bits

CHUNK = 64
some = st.one_of(st.integers(0, 3 * CHUNK), counts)
parameters = st.dictionaries(names, st.tuples(some, st.booleans()), min_size=1, max_size=6)
# The host of each rank, and whether parameters are shared out: then all hosts have as many ranks.
aligned = st.tuples(st.integers(1, 4), st.integers(1, 3)).flatmap(
    lambda sides: st.permutations([host for host in range(sides[0]) for _ in range(sides[1])])
)
worlds = st.one_of(
    hosts_of.map(lambda host_of: (host_of, False)),
    st.tuples(aligned.map(number_hosts), st.booleans()),
)


def bucket_of(sizes, host_of, chunk=CHUNK, rank=0, scatters=False):
    """The items of names, counts and whether they are dense, seen from a rank."""
    partition, items = Partition(Hosts(rank, host_of), chunk), []
    for name, (count, dense) in sizes.items():
        if scatters:
            items += partition.scatter(name, Zeros(count * len(host_of)), dense)
        else:
            items.append(Item(name, Zeros(count), dense))
    return Bucket(items, partition)


def rows_of(segments, bucket, *columns):
    """Of each segment its (item, start, stop) and some columns, ascending."""
    none = np.zeros(len(bucket.items), np.int64)
    rows = segments.table(Elements(none, none))
    starts = rows[:, ADDRESS] // 4  # of fp32 that begin at 0
    found = [rows[:, ITEM], starts, starts + rows[:, COUNT], *(rows[:, each] for each in columns)]
    return sorted(map(tuple, np.stack(found, 1).tolist()))


def have_each_once(rows, items):
    """Whether segments have each element of these items once."""
    times = [np.zeros(item.flat.count, int) for item in items]
    for item, start, stop, *_ in rows:
        times[item][start:stop] += 1
    return all((each == 1).all() for each in times)


def lie_apart(ranges, end):
    """Whether ranges lie between 0 and `end`, none on another."""
    at = 0
    for start, stop in sorted(ranges):
        if start < at:
            return False
        at = stop
    return at <= end


@given(hosts_of, parameters, chunks)
def test_shards_of_many_parameters_at_once_are_those_of_each(host_of, sizes, chunk):
    partition = Partition(Hosts(0, host_of), chunk)
    shards = bucket_of(sizes, host_of, chunk).shards
    for shard in range(partition.hosts.shards):
        local = list(zip(*map(np.ndarray.tolist, shards.local(shard)), strict=True))
        wants = [partition.local_shards(n, count)[shard] for n, (count, _) in sizes.items()]
        assert local == wants
        for host in range(partition.hosts.count):
            found = zip(*map(np.ndarray.tolist, shards.host(shard, host)), strict=True)
            wants = [partition.host_shards(*each)[host] for each in zip(sizes, local, strict=True)]
            assert list(found) == wants


@given(worlds, parameters)
def test_owners_get_their_host_shards_and_all_ranks_what_owners_send(world, sizes):
    host_of, scatters = world
    ranks, hosts, codec = range(len(host_of)), Hosts(0, host_of), ("int8", CHUNK)
    buckets = [bucket_of(sizes, host_of, rank=rank, scatters=scatters) for rank in ranks]
    plans = [quantized.Plan(bucket, *codec) for bucket in buckets]
    items, stride = buckets[0].items, plans[0].results_bytes
    results, heads, bodies = [], [], []
    for shard in range(hosts.shards):
        for host, owner in enumerate(hosts.across(shard)):
            first, size = host * plans[owner].bytes, plans[owner].bytes
            owned = rows_of(plans[owner].owned, buckets[owner], AT, K)
            for sender in hosts.across(shard):
                sent = rows_of(plans[sender].sent, buckets[sender], AT, K)
                mine = [(*row, at - first, k) for *row, at, k in sent]
                assert [row for row in mine if 0 <= row[3] < size] == owned
            heads.append(shard * stride + first)
            for item, start, stop, at, k in owned:
                assert k != items[item].uncompressed
                results.append((item, start, stop, heads[-1] + at))
                count = stop - start
                of_codec = _core.quantized_bytes(*codec, count)
                bodies.append((results[-1][3], results[-1][3] + (of_codec if k else 4 * count)))
    assert have_each_once(results, items)
    header = header_bytes(len(items))
    assert lie_apart([*bodies, *((at, at + header) for at in heads)], hosts.shards * stride)
    for plan, bucket in zip(plans, buckets, strict=True):
        assert rows_of(plan.results, bucket, AT) == sorted(results)
        assert plan.heads.tolist() == heads


def entries_of(row, by):
    """How many entries a segment of top-k has."""
    _, start, stop, _, k = row
    if by == "tensor":
        return k
    return sum(-(-k * min(CHUNK, stop - at) // CHUNK) for at in range(start, stop, CHUNK))


@given(worlds, parameters, st.sampled_from(["tensor", "chunk"]), st.floats(0.02, 1))
def test_messages_of_top_k_are_read_as_they_were_written(world, sizes, by, density):
    host_of, scatters = world
    ranks, options = range(len(host_of)), TopKOptions(density, by, CHUNK, "float16", "auto", 0, 1.0)
    buckets = [bucket_of(sizes, host_of, rank=rank, scatters=scatters) for rank in ranks]
    plans = [top_k.Plan(bucket, density, options, scatters) for bucket in buckets]
    items, read = buckets[0].items, []
    for rank, (plan, bucket) in enumerate(zip(plans, buckets, strict=True)):
        hosts = Hosts(rank, host_of)
        for number, each in enumerate(plan.came):
            averages = rows_of(each.came(number), bucket, AT)
            copies = rows_of(each.copies(), bucket, AT)
            assert [
                row for row in rows_of(plan.averages, bucket, AT, ENTRY) if row[4] == number
            ] == [(*row, number) for row in averages]
            assert lie_apart(
                [(at, at + stop - start) for _, start, stop, at in averages], each.size
            )
            bodies = [(at, at + 4 * (stop - start)) for _, start, stop, at in copies]
            begins = (0, header_bytes(len(items))), (each.tail, each.bytes)
            assert lie_apart([*bodies, *begins], each.bytes)
            shard, message = (hosts.shard, hosts.own) if scatters else (number, 0)
            read += averages + copies if scatters or rank == 0 else []
            for sender in hosts.across(shard):
                sent, of = plans[sender].sent, buckets[sender]
                first, capacity, size, tail = sent.parts[message].tolist()
                assert (capacity, size) == (each.capacity, each.size)
                assert tail - message * sent.bytes == each.tail
                chosen = rows_of(sent.chosen, of, AT, K, ENTRY)
                mine = [row for row in chosen if first <= row[5] < first + capacity]
                assert [row[:4] for row in mine] == averages
                taken = [(row[5] - first, entries_of(row[:5], by)) for row in mine]
                assert lie_apart([(at, at + count) for at, count in taken], capacity)
                copied = [
                    (*row, at - message * sent.bytes) for *row, at in rows_of(sent.copied, of, AT)
                ]
                assert [row for row in copied if 0 <= row[3] < each.tail] == copies
                assert all(items[row[0]].uncompressed for row in copies)
                if (thresholds := plans[sender].thresholds) is not None:
                    every = rows_of(thresholds.segments, of, AT, K)
                    # Without a K it would be a copy, in bytes.
                    assert all(k or not items[item].flat.count for item, *_, k in every)
                    assert [row[:4] for row in every if row[2] > row[1]] == averages
    assert have_each_once(read, items)


def test_a_parameter_is_in_one_bucket():
    """DDP rebuilds its buckets after the first step: plans of the old ones must not stay."""
    plans = ByBucket(lambda bucket: quantized.Plan(bucket, "one_bit", CHUNK))
    first = [bucket_of({"a": (9, False), "b": (9, False)}, (0, 1))]
    rebuilt = [bucket_of({name: (9, False)}, (0, 1)) for name in "ba"]
    made = [plans.of(each) for each in [*first, *first, *rebuilt, *rebuilt]]
    assert len(set(map(id, made))) == 3
    assert len(plans) == 2
    plans.of(first[0])
    assert len(plans) == 1


class Counting:
    """The native kernels; how often each was called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name):
        kernel = getattr(_core, name)

        def called(*args):
            self.calls[name] += 1
            return kernel(*args)

        return called

    def taken_over(self):
        """Also those that `CpuKernels` has as they are."""
        names = [n for n, each in vars(kernels.CpuKernels).items() if type(each) is staticmethod]
        each = {n: staticmethod(getattr(self, "sparse_add" if n == "add" else n)) for n in names}
        return mock.patch.multiple(kernels.CpuKernels, **each)


def calls_of(comm, kind, host_of, several):
    """Of a second step: its calls of kernels, what a third leaves in plans, and a digest."""
    shapes = {f"w{number}": (40, 256) for number in range(several)}
    shapes |= {f"b{number}": (9000,) for number in range(several)}
    state = make(comm, host_of, kind, shapes)
    state.all_reduce(gradients(1, comm.rank, 0, shapes))
    mine, counting = gradients(1, comm.rank, 1, shapes), Counting()
    with mock.patch.object(kernels, "_core", counting), counting.taken_over():
        state.all_reduce(mine)
    with state.step():
        for name, x in mine.items():
            state.all_reduce({name: x})
    return dict(counting.calls), len(state._feedback.codec._plans), digest(mine)


def expected_calls(kind, hosts, local, has_shard):
    """How often a rank calls kernels in a step of one bucket.

    Args:
        kind: of the state.
        hosts: how many there are.
        local: how many ranks this one has.
        has_shard: whether this rank has a local shard.
    """
    alone, sums = local == 1, has_shard and local > 1
    found = Counter(fill_nan=1, reduce_into=int(sums), quantize=int(not alone))
    shards = 2 if local == 2 == hosts else 1
    if kind in ("one_bit", "int8"):
        # What it sends and the mean that it owns; that mean and the result.
        found.update(quantize=2 * has_shard, dequantize=1 + has_shard)
        return +found
    found.update(dequantize=shards, check_finite=shards, sparse_sum=shards, sparse_scatter=shards)
    found.update(unpack_indices=shards * hosts, pack_indices=int(has_shard))
    if kind == "top_k" and shards > 1:
        found.update(sparse_add=1, sparse_histogram=3, sparse_select=1)
    else:
        found.update(top_k=int(has_shard))
    return +found


@pytest.mark.parametrize("host_of", [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 0, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_called_once_a_bucket(pool, kind, host_of):
    for several in (1, 12):
        outcomes = pool(4).call(calls_of, kind, host_of, several)
        for rank, (calls, plans, _) in enumerate(outcomes):
            hosts = Hosts(rank, host_of)
            has_shard = hosts.shard is not None
            assert calls == expected_calls(kind, hosts.count, len(hosts.local), has_shard)
            assert plans == 2 * several
        assert len({found for _, _, found in outcomes}) == 1


def mixed(comm, host_of, kind):
    """Whether gradients of several types in a call come to what those of one type do."""
    shapes = {"a": (70, 100), "b": (70, 100), "c": (70, 100), "d": (33,), "e": (33,)}
    types = dict(
        zip(shapes, ("float32", "bfloat16", "float16", "float16", "bfloat16"), strict=True)
    )
    together, apart = (make(comm, host_of, kind, shapes) for _ in range(2))
    same = []
    for step in range(2):
        drawn = gradients(3, comm.rank, step, shapes)
        one, other = (
            {name: x.astype(dtype_of(types[name])) for name, x in drawn.items()} for _ in range(2)
        )
        assert together.all_reduce(one)
        with apart.step():
            for name, x in other.items():
                assert apart.all_reduce({name: x})
        same += [same_bits(one[name], other[name]) for name in shapes]
    return all(same)


@pytest.mark.parametrize("host_of", [(0, 1, 2, 3), (0, 0, 1, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_call_may_differ_in_type(pool, kind, host_of):
    assert pool(4).call(mixed, host_of, kind) == [True] * 4


def small_alone(comm):
    """A call of one small parameter, of which one local shard has all and the other nothing."""
    found = []
    for kind in ("one_bit", "top_k"):
        state = make(comm, (0, 0, 1, 1), kind, {"b": (9,), "none": (0, 4)})
        mine = gradients(5, comm.rank, 0, state._feedback.shapes)
        found += [state.all_reduce({name: x}) for name, x in mine.items()]
        found.append(bool(mine["b"].any()))
    return found


def test_a_local_shard_may_have_nothing_of_a_call(pool):
    assert pool(4).call(small_alone) == [[True] * 6] * 4
