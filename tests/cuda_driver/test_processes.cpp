// Memory and events between processes.
#include "test_session.h"

using namespace standin::testing;

namespace {

constexpr unsigned kShared = CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;

CUipcMemHandle handle_of(CUdeviceptr address) {
  CUipcMemHandle handle;
  OK(cu().cuIpcGetMemHandle(&handle, address));
  return handle;
}

CUresult open(const CUipcMemHandle& handle, CUdeviceptr* address) {
  return cu().cuIpcOpenMemHandle(address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

CUdeviceptr opened(const CUipcMemHandle& handle) {
  CUdeviceptr address = 0;
  OK(open(handle, &address));
  return address;
}

void fill(CUdeviceptr address, unsigned value, std::size_t words, CUstream stream) {
  OK(cu().cuMemsetD32Async(address, value, words, stream));
  OK(cu().cuStreamSynchronize(stream));
}

}  // namespace

// Opens what it is sent, says what it reads, writes 2, and goes when told to.
PART(opens_memory) {
  const Session session;
  const CUstream stream = new_stream();
  const CUdeviceptr address = opened(from_parent<CUipcMemHandle>());
  to_parent(read(address, 64, stream)[63]);
  fill(address, 2, 64, stream);
  to_parent(1);
  from_parent<int>();
  OK(cu().cuIpcCloseMemHandle(address));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemsetD32Async(address, 0, 1, stream));
}
TEST(memory_is_shared_between_processes) {
  const Session session;
  const CUstream stream = new_stream();
  const CUdeviceptr other = device_words(64), address = device_words(64);
  fill(address, 1, 64, stream);
  const Process process("opens_memory");
  process.send(handle_of(address));
  CHECK(process.receive<std::uint32_t>() == 1);
  CHECK(process.receive<int>() == 1);
  CHECK(read(address, 64, stream)[0] == 2 && read(other, 1, stream)[0] == 0xffffffff);
  process.send(0);
  CHECK(ended_well(process.end().second));
}

TEST(a_handle_does_not_open_where_it_was_made) {
  const Session session;
  CUdeviceptr address = 0;
  EXPECT(CUDA_ERROR_INVALID_CONTEXT, open(handle_of(device_words(4)), &address));
  CUipcEventHandle handle;
  CUevent event = nullptr;
  OK(cu().cuIpcGetEventHandle(&handle, new_event(kShared)));
  EXPECT(CUDA_ERROR_INVALID_CONTEXT, cu().cuIpcOpenEventHandle(&event, handle));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuIpcGetEventHandle(&handle, new_event()));
  CUipcMemHandle inside;
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuIpcGetMemHandle(&inside, device_words(4) + 4));
}

PART(exports_two_and_frees_one) {
  const Session session;
  const CUstream stream = new_stream();
  const CUdeviceptr freed = device_words(64), kept = device_words(64);
  fill(kept, 5, 64, stream);
  const CUipcMemHandle handle = handle_of(freed);
  to_parent(handle_of(kept));
  to_parent(handle);
  from_parent<int>();
  EXPECT(CUDA_ERROR_ILLEGAL_ADDRESS, cu().cuMemFree(freed));  // the other maps it still
  to_parent(1);
  from_parent<int>();
}
TEST(an_opener_outlives_the_exporter) {
  const Session session;
  const CUstream stream = new_stream();
  const Process process("exports_two_and_frees_one");
  const auto kept = process.receive<CUipcMemHandle>(), freed = process.receive<CUipcMemHandle>();
  const CUdeviceptr address = opened(kept), gone = opened(freed);
  CHECK(opened(kept) == address && address != gone);  // counted
  OK(cu().cuIpcCloseMemHandle(address));
  process.send(0);
  process.receive<int>();
  CHECK(read(gone, 1, stream)[0] == 0xdddddddd);
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu().cuMemFree(gone));
  OK(cu().cuIpcCloseMemHandle(gone));
  CUdeviceptr again = 0;
  EXPECT(CUDA_ERROR_INVALID_VALUE, open(freed, &again));
  kill(process.pid, SIGKILL);
  CHECK(WIFSIGNALED(process.end().second));
  CHECK(read(address, 64, stream)[63] == 5);
  fill(address, 6, 64, stream);
  CHECK(read(address, 64, stream)[63] == 6);
  OK(cu().cuIpcCloseMemHandle(address));
  EXPECT(CUDA_ERROR_MAP_FAILED, open(kept, &again));  // nobody is there to open it from
}

PART(opens_and_stays) {
  const Session session;
  const CUdeviceptr address = opened(from_parent<CUipcMemHandle>());
  CHECK(opened(from_parent<CUipcMemHandle>()) == address);
  OK(cu().cuIpcCloseMemHandle(address));
  to_parent(1);
  from_parent<int>();
}
TEST(what_nobody_else_maps_any_more_is_freed) {
  const Session session;
  const Process process("opens_and_stays"), killed("opens_and_stays");
  const CUdeviceptr address = device_words(64);
  for (const Process* each : {&process, &killed}) {
    for (int i = 0; i < 2; ++i) each->send(handle_of(address));
    CHECK(each->receive<int>() == 1);
  }
  process.send(0);
  CHECK(ended_well(process.end().second));
  kill(killed.pid, SIGKILL);
  CHECK(WIFSIGNALED(killed.end().second));
  OK(cu().cuMemFree(address));
}

PART(cannot_map_another_device) {
  const Session session(1);
  const auto handle = from_parent<CUipcMemHandle>();
  CUdeviceptr address = 0;
  EXPECT(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, open(handle, &address));
  const Session same(0);
  OK(open(handle, &address));
  to_parent(1);
}
TEST(devices_that_cannot_map_each_other_do_not_open) {
  const Session session;
  const Process process("cannot_map_another_device", {{"PYCOLLECTIVE_STANDIN_PEERS", "0"}});
  process.send(handle_of(device_words(4)));
  CHECK(process.receive<int>() == 1);
  CHECK(ended_well(process.end().second));
}

// Records the event it opens at the head of a stream that a gate holds, when told to.
PART(records_behind_a_gate) {
  const Session session;
  const CUstream stream = new_stream();
  const auto handle = from_parent<CUipcEventHandle>();
  CUevent event = nullptr;
  OK(cu().cuIpcOpenEventHandle(&event, handle));
  OK(cu().cuEventRecord(event, stream));
  OK(cu().cuStreamSynchronize(stream));
  to_parent(1);
  from_parent<int>();
  const Gate gate(session);
  gate.hold(stream);
  OK(cu().cuEventRecord(event, stream));
  to_parent(1);
  from_parent<int>();
  gate.open();
  OK(cu().cuStreamSynchronize(stream));
}
TEST(events_order_streams_of_two_processes) {
  const Session session;
  const CUstream early = new_stream(), late = new_stream();
  const CUevent event = new_event(kShared);
  CUipcEventHandle handle;
  OK(cu().cuIpcGetEventHandle(&handle, event));
  const Process process("records_behind_a_gate");
  process.send(handle);
  process.receive<int>();
  OK(cu().cuEventQuery(event));
  const Gate gate(session);
  gate.hold(early);
  OK(cu().cuStreamWaitEvent(early, event, 0));  // of the first record, which is reached
  process.send(0);
  process.receive<int>();
  EXPECT(CUDA_ERROR_NOT_READY, cu().cuEventQuery(event));
  OK(cu().cuStreamWaitEvent(late, event, 0));  // of the second, which is not
  gate.open();
  OK(cu().cuStreamSynchronize(early));
  let_others_go_on();
  EXPECT(CUDA_ERROR_NOT_READY, cu().cuStreamQuery(late));
  process.send(0);
  OK(cu().cuStreamSynchronize(late));
  OK(cu().cuEventSynchronize(event));
  CHECK(ended_well(process.end().second));
}

// What the killed process would have recorded never comes: the host alone can know.
TEST(an_event_of_a_killed_process_is_not_reached) {
  const Session session;
  const CUstream stream = new_stream();
  const CUevent event = new_event(kShared);
  CUipcEventHandle handle;
  OK(cu().cuIpcGetEventHandle(&handle, event));
  const Process process("records_behind_a_gate");
  process.send(handle);
  process.receive<int>();
  process.send(0);
  process.receive<int>();
  OK(cu().cuStreamWaitEvent(stream, event, 0));
  kill(process.pid, SIGKILL);
  CHECK(WIFSIGNALED(process.end().second));
  let_others_go_on();
  EXPECT(CUDA_ERROR_NOT_READY, cu().cuEventQuery(event));
  EXPECT(CUDA_ERROR_NOT_READY, cu().cuStreamQuery(stream));
}

PART(exchanges) {
  const Session session;
  const CUstream stream = new_stream();
  const CUdeviceptr own = device_words(128), got = device_words(64), ended = device_words(1);
  fill(own, 0, 128, stream);
  to_parent(handle_of(own));
  const CUdeviceptr other = opened(from_parent<CUipcMemHandle>());
  const CUfunction function = session.function("test_exchange");
  for (std::uint32_t value = 1; value <= 20; ++value) {
    OK(launch(
        function,
        kernels::Exchange{at(own + 256), at(own), at(other + 256), at(other), nullptr, at(got),
                          at(ended), value, 64, kernels::Fault::kNone, 60'000'000'000},
        1, 64, stream));
    CHECK(read(got, 64, stream)[63] == value + 63 && read(ended, 1, stream)[0] == 0);
    to_parent(1);
    from_parent<int>();
  }
}
TEST(kernels_of_two_processes_wait_for_each_other) {
  const Process processes[] = {Process("exchanges"), Process("exchanges")};
  const auto first = processes[0].receive<CUipcMemHandle>();
  processes[0].send(processes[1].receive<CUipcMemHandle>());
  processes[1].send(first);
  for (int i = 0; i < 20; ++i) {
    for (const Process& process : processes) CHECK(process.receive<int>() == 1);
    for (const Process& process : processes) process.send(0);
  }
  for (const Process& process : processes) CHECK(ended_well(process.end().second));
}

TEST_MAIN
