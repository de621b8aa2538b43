// What help() says of each collective: its signature, as inspect reads it, and its docstring.
// "The class" is pycollective.Communicator, which says what calls have in common.
#pragma once

namespace pycollective::docs {

constexpr const char* kAllReduce =
    R"(all_reduce(x, op='sum', out=None, async_op=False, algorithm='auto', wire=None, stream=None)
--

Reduce the arrays of all ranks; every rank gets the result, the same bits.

Args:
    x: this rank's array, of one shape and dtype on all ranks. It receives the result unless `out`
        is given; then it is only read.
    op: see the class.
    out: of x's shape and dtype, apart from x; or x itself.
    async_op, algorithm, wire, stream: see the class. Every algorithm can do it.

Returns:
    The array that holds the result: x, or out. With async_op=True a Work.)";

constexpr const char* kReduce =
    R"(reduce(x, root=0, op='sum', out=None, async_op=False, algorithm='auto', wire=None, stream=None)
--

Reduce the arrays of all ranks; the root alone gets the result.

Args:
    x: this rank's array, of one shape and dtype on all ranks. On the root it receives the result
        unless `out` is given; elsewhere it is only read.
    root: the rank that gets the result; the same on all ranks.
    op: see the class.
    out: on the root as `all_reduce` takes it; ignored elsewhere.
    async_op, algorithm, wire, stream: see the class. Algorithms: direct, tree.

Returns:
    On the root the array that holds the result: x, or out. Elsewhere None. With async_op=True a
    Work.)";

constexpr const char* kReduceScatter =
    R"(reduce_scatter(out, x, op='sum', counts=None, async_op=False, algorithm='auto', wire=None, stream=None)
--

Reduce the arrays of all ranks; each rank gets its own shard of the result.

Args:
    out: receives this rank's shard: 1/size of x's elements, or counts[rank], in any shape. It may
        be that shard of x.
    x: this rank's array, of one number of elements and dtype on all ranks: a shard for each rank,
        one after another in rank order. It is only read.
    op: see the class.
    counts: elements of each rank's shard, the same on all ranks; None where shards are equal.
    async_op, algorithm, wire, stream: see the class. Every algorithm but recursive_doubling.

Returns:
    out. With async_op=True a Work.)";

constexpr const char* kAllGather =
    R"(all_gather(out, x, counts=None, async_op=False, algorithm='auto', wire=None, stream=None)
--

Collect the arrays of all ranks; every rank gets all of them, byte for byte.

Args:
    out: receives every rank's x, one after another in rank order: size times x's elements, or the
        sum of counts, in any shape.
    x: this rank's array, its shard of out; of as many elements on all ranks, or of counts[rank].
        It is only read, and may be that shard of out.
    counts: see `reduce_scatter`.
    async_op, algorithm, wire, stream: see the class. Every algorithm can do it.

Returns:
    out. With async_op=True a Work.)";

constexpr const char* kBroadcast =
    R"(broadcast(x, root=0, async_op=False, algorithm='auto', wire=None, stream=None)
--

Give every rank the root's array, byte for byte.

Args:
    x: of as many elements and one dtype on all ranks. On the root it is only read; elsewhere it
        receives the root's.
    root: the rank that sends; the same on all ranks.
    async_op, algorithm, wire, stream: see the class. Algorithms: direct, tree.

Returns:
    x, on every rank. With async_op=True a Work.)";

constexpr const char* kAllToAll =
    R"(all_to_all(out, x, async_op=False, algorithm='auto', wire=None, stream=None)
--

Send shard r of x to each rank r, byte for byte.

Args:
    out: receives a shard of each rank, one after another in rank order; as many elements as x. It
        may be x.
    x: a shard for each rank, in rank order, all of one size: a multiple of the number of ranks;
        the same on all ranks. It is only read, unless it is out.
    async_op, algorithm, wire, stream: see the class. Algorithm: direct.

Returns:
    out. With async_op=True a Work.)";

constexpr const char* kGather =
    R"(gather(out, x, root=0, counts=None, async_op=False, algorithm='auto', wire=None, stream=None)
--

Collect the arrays of all ranks; the root alone gets them, byte for byte.

Args:
    out: on the root as `all_gather` takes it; elsewhere None, or ignored.
    x: as `all_gather` takes it.
    root: the rank that receives; the same on all ranks.
    counts: see `reduce_scatter`.
    async_op, algorithm, wire, stream: see the class. Algorithms: direct, tree.

Returns:
    out on the root, None elsewhere. With async_op=True a Work.)";

constexpr const char* kScatter =
    R"(scatter(out, x, root=0, counts=None, async_op=False, algorithm='auto', wire=None, stream=None)
--

Give each rank its own shard of the root's array, byte for byte.

Args:
    out: receives this rank's shard: 1/size of x's elements, or counts[rank], in any shape.
    x: on the root a shard for each rank, one after another in rank order; it is only read.
        Elsewhere None, or ignored.
    root: the rank that sends; the same on all ranks.
    counts: see `reduce_scatter`.
    async_op, algorithm, wire, stream: see the class. Algorithms: direct, tree.

Returns:
    out, on every rank. With async_op=True a Work.)";

constexpr const char* kSend = R"(send(x, dst, async_op=False, stream=None, tag=0)
--

Send an array to one rank, byte for byte; done when that rank has it all.

Messages of one tag from one rank to another arrive in the order of the calls; those of other tags
do not wait for them.

Args:
    x: any shape; the receiver's array has as many elements of the same dtype. It is only read.
    dst: the rank that receives; not this one.
    async_op, stream: see the class.
    tag: 0 to 2**31 - 1; the receiver's is the same.

Returns:
    None. With async_op=True a Work.

Raises:
    CollectiveMismatch: the receiver's array has another dtype or number of elements.)";

constexpr const char* kRecv = R"(recv(x, src=None, async_op=False, stream=None, tag=0)
--

Receive into x what one rank sends with this tag.

Args:
    x: any shape; as many elements of the same dtype as the sender's.
    src: the rank that sends; None (`pycollective.ANY_SOURCE`) for the first message of the tag
        from any other rank.
    async_op, stream: see the class.
    tag: as `send` takes it.

Returns:
    The rank that sent the message. With async_op=True a Work.

Raises:
    CollectiveMismatch: the sender's array has another dtype or number of elements.
    CollectiveAborted: this rank closed the communicator, and no message had come from any rank.)";

constexpr const char* kBarrier = R"(barrier(async_op=False)
--

Wait until every rank has called it.

Returns:
    None. With async_op=True a Work.)";

}  // namespace pycollective::docs
