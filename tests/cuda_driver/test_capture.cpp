// Graphs: what capture refuses, what it makes of streams, and what replays.
#include "test_session.h"

using namespace standin::testing;

namespace {

constexpr CUstreamCaptureMode kModes[] = {CU_STREAM_CAPTURE_MODE_GLOBAL,
                                          CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                          CU_STREAM_CAPTURE_MODE_RELAXED};

void begin(CUstream stream, CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL) {
  OK(cu().cuStreamBeginCapture(stream, mode));
}

CUgraphExec end(CUstream stream) {
  CUgraph graph = nullptr;
  OK(cu().cuStreamEndCapture(stream, &graph));
  CHECK(graph);
  CUgraphExec executable = nullptr;
  OK(cu().cuGraphInstantiate(&executable, graph, 0));
  OK(cu().cuGraphDestroy(graph));
  return executable;
}

CUstreamCaptureStatus status(CUstream stream) {
  CUstreamCaptureStatus now;
  OK(cu().cuStreamIsCapturing(stream, &now));
  return now;
}

// The capture on the stream was spoiled: it says so until it is ended, and gives no graph.
void expect_spoiled(CUstream stream) {
  CHECK(status(stream) == CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  CUgraph graph = reinterpret_cast<CUgraph>(1);
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cu().cuStreamEndCapture(stream, &graph));
  CHECK(!graph && status(stream) == CU_STREAM_CAPTURE_STATUS_NONE);
}

}  // namespace

TEST(a_graph_replays_what_was_captured) {
  const Session session;
  const CUstream stream = new_stream();
  const CUdeviceptr from = device_words(64), to = device_words(64);
  OK(cu().cuMemsetD32Async(to, 0, 64, stream));
  OK(cu().cuStreamSynchronize(stream));
  kernels::Copy parameters{at(from), at(to), 64};
  const CUfunction copy = session.function("test_copy");
  begin(stream);
  CHECK(status(stream) == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  OK(launch(copy, parameters, 1, 64, stream));
  parameters = {};  // captured by value
  CHECK(status(stream) == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  const CUgraphExec graph = end(stream);
  CHECK(read(to, 1, stream)[0] == 0);  // nothing has run
  for (const unsigned value : {5u, 6u, 7u}) {
    OK(cu().cuMemsetD32Async(from, value, 64, stream));
    OK(cu().cuGraphLaunch(graph, stream));
    CHECK(read(to, 64, stream)[63] == value);
  }
  OK(cu().cuGraphExecDestroy(graph));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuGraphLaunch(graph, stream));
}

TEST(a_fork_of_streams_is_captured_whole) {
  const Session session;
  const CUstream stream = new_stream(), other = new_stream();
  const CUevent forked = new_event(), joined = new_event();
  const CUdeviceptr a = device_words(1), b = device_words(1), c = device_words(1);
  begin(stream);
  OK(cu().cuMemsetD32Async(a, 1, 1, stream));
  OK(cu().cuEventRecord(forked, stream));
  OK(cu().cuStreamWaitEvent(other, forked, 0));
  CHECK(status(other) == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  OK(cu().cuMemcpyAsync(b, a, 4, other));
  OK(cu().cuEventRecord(joined, other));
  OK(cu().cuStreamWaitEvent(stream, joined, 0));
  OK(cu().cuMemcpyAsync(c, b, 4, stream));
  const CUgraphExec graph = end(stream);
  CHECK(status(other) == CU_STREAM_CAPTURE_STATUS_NONE);
  EXPECT(CUDA_ERROR_CAPTURED_EVENT, cu().cuEventQuery(joined));
  EXPECT(CUDA_ERROR_CAPTURED_EVENT, cu().cuStreamWaitEvent(other, joined, 0));
  OK(cu().cuGraphLaunch(graph, other));
  CHECK(read(c, 1, other)[0] == 1);
}

TEST(what_is_unsafe_spoils_a_capture) {
  const Session session;
  const CUstream stream = new_stream(), other = new_stream();
  const CUevent event = new_event();
  OK(cu().cuEventRecord(event, other));
  OK(cu().cuStreamSynchronize(other));
  const auto each = [&](auto call) {
    for (const CUstreamCaptureMode mode : kModes)
      for (const bool elsewhere : {false, true}) {
        begin(stream, mode);
        CUresult result = CUDA_SUCCESS;
        if (elsewhere)
          std::thread([&] {
            OK(cu().cuCtxPushCurrent(session.context));
            result = call();
          }).join();
        else
          result = call();
        const bool spoils = mode == CU_STREAM_CAPTURE_MODE_GLOBAL ||
                            (mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL && !elsewhere);
        EXPECT(spoils ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS, result);
        if (spoils)
          expect_spoiled(stream);
        else
          OK(cu().cuGraphExecDestroy(end(stream)));
      }
  };
  each([] {
    CUdeviceptr address;
    return cu().cuMemAlloc(&address, 4);
  });
  each([] {
    void* host;
    return cu().cuMemHostAlloc(&host, 4, 0);
  });
  each([&] { return cu().cuEventQuery(event); });
  each([&] { return cu().cuStreamQuery(other); });
  each([&] { return cu().cuStreamSynchronize(other); });
  each([&] {
    CUfunction function;
    return cu().cuModuleGetFunction(&function, session.module, "test_copy");
  });
}

TEST(a_capturing_stream_cannot_be_waited_for) {
  const Session session;
  const CUstream stream = new_stream();
  std::vector<std::uint32_t> pageable(4);
  const CUdeviceptr address = device_words(4);
  CUgraphExec executable = nullptr;
  begin(stream);
  executable = end(stream);
  const auto each = [&](CUresult code, auto call) {
    begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    EXPECT(code, call());
    expect_spoiled(stream);
  };
  each(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, [&] { return cu().cuStreamQuery(stream); });
  each(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, [&] { return cu().cuStreamSynchronize(stream); });
  each(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
       [&] { return cu().cuGraphLaunch(executable, stream); });
  each(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
       [&] { return cu().cuMemcpyDtoHAsync(pageable.data(), address, 16, stream); });
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
         cu().cuStreamBeginCapture(nullptr, CU_STREAM_CAPTURE_MODE_GLOBAL));
}

TEST(the_legacy_stream_spoils_a_blocking_capture) {
  const Session session;
  const CUdeviceptr word = device_words(1);
  const CUstream blocking = new_stream(CU_STREAM_DEFAULT), other = new_stream();
  CUstreamCaptureStatus now;
  begin(blocking);
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cu().cuStreamIsCapturing(nullptr, &now));
  CHECK(status(blocking) == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cu().cuMemsetD32Async(word, 1, 1, nullptr));
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cu().cuMemsetD32Async(word, 1, 1, blocking));
  expect_spoiled(blocking);
  begin(other);
  OK(cu().cuMemsetD32Async(word, 1, 1, nullptr));
  OK(cu().cuGraphExecDestroy(end(other)));
}

TEST(events_do_not_cross_a_capture) {
  const Session session;
  const CUstream stream = new_stream(), other = new_stream();
  const CUevent before = new_event(), inside = new_event(), theirs = new_event();
  const CUevent shared = new_event(CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS);
  OK(cu().cuEventRecord(before, other));
  begin(stream);
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, cu().cuStreamWaitEvent(stream, before, 0));
  expect_spoiled(stream);
  begin(stream);
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu().cuEventRecord(shared, stream));
  expect_spoiled(stream);
  begin(stream);
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, cu().cuStreamWaitEvent(stream, shared, 0));
  expect_spoiled(stream);
  begin(stream);
  begin(other);
  OK(cu().cuEventRecord(theirs, other));
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_MERGE, cu().cuStreamWaitEvent(stream, theirs, 0));
  expect_spoiled(stream);
  expect_spoiled(other);
  begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
  OK(cu().cuEventRecord(inside, stream));
  EXPECT(CUDA_ERROR_CAPTURED_EVENT, cu().cuEventQuery(inside));
  EXPECT(CUDA_ERROR_CAPTURED_EVENT, cu().cuEventSynchronize(inside));
  OK(cu().cuGraphExecDestroy(end(stream)));
  OK(cu().cuEventRecord(inside, stream));  // captured no more
  OK(cu().cuEventSynchronize(inside));
}

TEST(a_capture_is_ended_where_it_began_and_joined) {
  const Session session;
  const CUdeviceptr word = device_words(1);
  const CUstream stream = new_stream(), other = new_stream();
  const CUevent event = new_event();
  CUgraph graph = nullptr;
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuStreamEndCapture(stream, &graph));
  begin(stream);
  EXPECT(CUDA_ERROR_INVALID_VALUE,
         cu().cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  OK(cu().cuEventRecord(event, stream));
  OK(cu().cuStreamWaitEvent(other, event, 0));
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, cu().cuStreamEndCapture(other, &graph));
  expect_spoiled(stream);
  begin(stream);
  OK(cu().cuEventRecord(event, stream));
  OK(cu().cuStreamWaitEvent(other, event, 0));
  OK(cu().cuMemsetD32Async(word, 1, 1, other));
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, cu().cuStreamEndCapture(stream, &graph));
  CHECK(!graph && status(other) == CU_STREAM_CAPTURE_STATUS_NONE);
  begin(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  std::thread([&] {
    OK(cu().cuCtxPushCurrent(session.context));
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, cu().cuStreamEndCapture(stream, &graph));
  }).join();
  expect_spoiled(stream);
}

TEST_MAIN
