// What a test tells the fake MPI beside it, whose handles are ints: requests are numbered from 1.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

namespace pycollective::testing {

// Classes of errors. A code has its class in its low byte.
constexpr int kInStatus = 17;
constexpr int kOther = 15;
constexpr int kProcFailed = 71;
constexpr int kProcFailedPending = 72;
constexpr int code_of(int error_class) { return error_class | 0x300; }

constexpr std::size_t kStatusBytes = 20;
constexpr std::size_t kErrorOffset = 16;  // in a status

struct FakeMpi {
  int begins = 0;           // what MPI_Isend and MPI_Irecv return
  int requests = 0;         // that were made
  std::map<int, int> ends;  // by request, with what error: those that MPI_Testsome tells of next
  int forgets = 0;          // a request that it then ends without telling
  bool finalized = false;
  int freed = 0;               // communicators
  std::vector<int> peers;      // of each request, as MPI numbers them
  std::vector<int> cancelled;  // requests
};

}  // namespace pycollective::testing
