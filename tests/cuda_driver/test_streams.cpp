// What waits for what: streams, the legacy one, events.
#include <atomic>

#include "test_session.h"

using namespace standin::testing;

namespace {

bool idle(CUstream stream) {
  const CUresult result = cu().cuStreamQuery(stream);
  CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY);
  return result == CUDA_SUCCESS;
}

// Nothing here takes long; what hangs shall be seen to.
void wait_for(CUstream stream) {
  for (int i = 0; i < 20'000 && !idle(stream); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(idle(stream));
  OK(cu().cuStreamSynchronize(stream));
}

// A memset on the stream.
void work(CUstream stream) {
  static const CUdeviceptr word = device_words(1);
  OK(cu().cuMemsetD32Async(word, 1, 1, stream));
}

}  // namespace

TEST(work_is_done_later_and_in_order) {
  const Session session;
  const Gate gate(session);
  const CUstream stream = new_stream();
  const CUdeviceptr word = device_words(1);
  gate.hold(stream);
  OK(cu().cuMemsetD32Async(word, 1, 1, stream));
  OK(cu().cuMemsetD32Async(word, 2, 1, stream));
  let_others_go_on();
  CHECK(!idle(stream));
  gate.open();
  CHECK(read(word, 1, stream)[0] == 2);
  CHECK(idle(stream));
}

TEST(the_legacy_stream_waits_for_blocking_ones) {
  const Session session;
  const Gate gate(session);
  const CUstream blocking = new_stream(CU_STREAM_DEFAULT);
  const CUevent event = new_event();
  gate.hold(blocking);
  work(nullptr);
  OK(cu().cuEventRecord(event, nullptr));
  let_others_go_on();
  EXPECT(CUDA_ERROR_NOT_READY, cu().cuEventQuery(event));
  CHECK(!idle(nullptr));  // to wait for it is to wait for all of them
  gate.open();
  wait_for(nullptr);
  CHECK(idle(blocking));
}

TEST(blocking_streams_wait_for_the_legacy_one) {
  const Session session;
  const Gate gate(session);
  const CUstream first = new_stream(CU_STREAM_DEFAULT), second = new_stream(CU_STREAM_DEFAULT);
  gate.hold(first);
  work(nullptr);
  work(second);  // by way of the legacy stream it waits for the first
  let_others_go_on();
  CHECK(!idle(second));
  gate.open();
  wait_for(second);
}

TEST(blocking_streams_do_not_wait_for_each_other) {
  const Session session;
  const Gate gate(session);
  const CUstream first = new_stream(CU_STREAM_DEFAULT), second = new_stream(CU_STREAM_DEFAULT);
  gate.hold(first);
  work(second);
  wait_for(second);
  CHECK(!idle(first));
  gate.open();
  wait_for(first);
}

TEST(non_blocking_streams_order_nothing) {
  const Session session;
  const Gate gate(session), other(session);
  const CUstream stream = new_stream();
  gate.hold(stream);
  work(nullptr);
  wait_for(nullptr);
  CHECK(!idle(stream));
  other.hold(nullptr);
  gate.open();
  work(stream);
  wait_for(stream);
  CHECK(!idle(nullptr));
  other.open();
  wait_for(nullptr);
}

TEST(a_wait_binds_to_the_record_before_it) {
  const Session session;
  const Gate gate(session);
  const CUstream first = new_stream(), second = new_stream(), third = new_stream();
  for (const unsigned flags : {0u, unsigned{CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS}}) {
    const CUevent event = new_event(flags);
    // Never recorded: nothing to wait for.
    OK(cu().cuStreamWaitEvent(second, event, 0));
    wait_for(second);
    OK(cu().cuEventRecord(event, first));
    OK(cu().cuEventSynchronize(event));
    const Gate own(session);
    own.hold(second);
    OK(cu().cuStreamWaitEvent(second, event, 0));  // of the record that is reached
    gate.hold(first);
    OK(cu().cuEventRecord(event, first));
    EXPECT(CUDA_ERROR_NOT_READY, cu().cuEventQuery(event));
    own.open();
    wait_for(second);
    OK(cu().cuStreamWaitEvent(third, event, 0));  // of the one that is not
    work(third);
    let_others_go_on();
    CHECK(!idle(third) && !idle(first));
    gate.open();
    wait_for(third);
    OK(cu().cuEventQuery(event));
    __atomic_store_n(gate.word, 0, __ATOMIC_RELEASE);
  }
}

TEST(an_event_of_another_context_can_be_waited_for) {
  const Session first(0);
  const Gate gate(first);
  const CUstream theirs = new_stream();
  const CUevent event = new_event();
  gate.hold(theirs);
  OK(cu().cuEventRecord(event, theirs));
  const Session second(1);
  const CUstream own = new_stream();
  OK(cu().cuStreamWaitEvent(own, event, 0));
  let_others_go_on();
  CHECK(!idle(own));
  gate.open();
  wait_for(own);
}

TEST(events_tell_the_time) {
  const Session session;
  const CUstream stream = new_stream();
  const CUevent begin = new_event(), end = new_event(),
                untimed = new_event(CU_EVENT_DISABLE_TIMING);
  float milliseconds = -1;
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu().cuEventElapsedTime(&milliseconds, begin, end));
  const Gate gate(session);
  OK(cu().cuEventRecord(begin, stream));
  gate.hold(stream);
  OK(cu().cuEventRecord(end, stream));
  OK(cu().cuEventRecord(untimed, stream));
  EXPECT(CUDA_ERROR_NOT_READY, cu().cuEventElapsedTime(&milliseconds, begin, end));
  OK(cu().cuEventSynchronize(begin));
  let_others_go_on();
  gate.open();
  OK(cu().cuEventSynchronize(untimed));
  OK(cu().cuEventElapsedTime(&milliseconds, begin, end));
  CHECK(milliseconds > 20 && milliseconds < 60'000);
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu().cuEventElapsedTime(&milliseconds, begin, untimed));
  OK(cu().cuEventDestroy(end));
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu().cuEventRecord(end, stream));
  CUevent event = nullptr;
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuEventCreate(&event, CU_EVENT_INTERPROCESS));
}

TEST(a_destroyed_stream_ends_its_work) {
  const Session session;
  const Gate gate(session);
  const CUstream stream = new_stream(CU_STREAM_DEFAULT), other = new_stream();
  const CUdeviceptr word = device_words(1);
  gate.hold(stream);
  OK(cu().cuMemsetD32Async(word, 9, 1, stream));
  OK(cu().cuStreamDestroy(stream));
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu().cuStreamQuery(stream));
  let_others_go_on();
  CHECK(!idle(nullptr));  // which waits for it still
  gate.open();
  wait_for(nullptr);
  CHECK(read(word, 1, other)[0] == 9);
}

// Calls that wait for the device to drain: here always, so that one beside a kernel that spins is
// found out.
TEST(freeing_and_loading_wait_for_the_device) {
  const Session session;
  const CUstream stream = new_stream();
  void* pinned = nullptr;
  OK(cu().cuMemHostAlloc(&pinned, 4, 0));
  void (*const calls[])(const Session&, CUdeviceptr, void*) = {
      [](const Session&, CUdeviceptr word, void*) { OK(cu().cuMemFree(word)); },
      [](const Session&, CUdeviceptr, void* host) { OK(cu().cuMemFreeHost(host)); },
      [](const Session& its, CUdeviceptr, void*) { its.function("test_sum"); },
      [](const Session&, CUdeviceptr, void*) { const Session again; }};
  const CUdeviceptr word = device_words(1);
  for (const auto& call : calls) {
    const Gate gate(session);
    gate.hold(stream);
    std::atomic<bool> back{false};
    std::thread waits([&] {
      OK(cu().cuCtxPushCurrent(session.context));
      call(session, word, pinned);
      back = true;
    });
    let_others_go_on();
    CHECK(!back);
    gate.open();
    waits.join();
    CHECK(idle(stream));
  }
  session.function("test_sum");  // known by now: does not wait
}

TEST_MAIN
