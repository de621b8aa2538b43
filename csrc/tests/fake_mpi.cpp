// An MPI for tests: a shared library that moves nothing, and ends messages as it is told.

#include "tests/fake_mpi.h"

#include <cstring>
#include <string>

using namespace pycollective::testing;

namespace {

FakeMpi state;

int begin(int peer, int* request) {
  if (state.begins != 0) return state.begins;
  state.peers.push_back(peer);
  *request = ++state.requests;
  return 0;
}

}  // namespace

extern "C" {
FakeMpi* fake_mpi() { return &state; }

int MPI_Isend(const void*, int, int, int peer, int, int, int* request) {
  return begin(peer, request);
}
int MPI_Irecv(void*, int, int, int peer, int, int, int* request) { return begin(peer, request); }

int MPI_Testsome(int count, int* requests, int* done, int* indices, void* statuses) {
  int result = 0;
  *done = 0;
  for (int i = 0; i < count; ++i) {
    if (requests[i] == state.forgets) requests[i] = 0;
    const auto end = state.ends.find(requests[i]);
    if (end == state.ends.end()) continue;
    auto* status = static_cast<char*>(statuses) + static_cast<std::size_t>(*done) * kStatusBytes;
    std::memcpy(status + kErrorOffset, &end->second, sizeof(int));
    if (end->second != 0) result = code_of(kInStatus);
    if (end->second != code_of(kProcFailedPending)) requests[i] = 0;
    indices[(*done)++] = i;
    state.ends.erase(end);
  }
  return result;
}

int MPI_Cancel(int* request) {
  state.cancelled.push_back(*request);
  return 0;
}
int MPI_Test_cancelled(const void*, int* cancelled) { return *cancelled = 0; }
int MPI_Comm_free(int*) {
  ++state.freed;
  return 0;
}
int MPI_Finalized(int* finalized) {
  *finalized = state.finalized;
  return 0;
}
int MPI_Error_class(int code, int* error_class) {
  *error_class = code & 0xff;
  return 0;
}
int MPI_Error_string(int code, char* text, int* length) {
  const std::string words = (code & 0xff) == kProcFailed ? "process failed" : "another error";
  *length = static_cast<int>(words.size());
  std::memcpy(text, words.c_str(), words.size() + 1);
  return 0;
}
}
