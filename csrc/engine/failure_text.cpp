#include "engine/failure_text.h"

#include <cstdio>

namespace pycollective {

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", seconds);
  return text;
}

std::string reported_text(const std::string& report, int reporter, int rank) {
  if (reporter == rank) return report;
  return report + " (reported by rank " + std::to_string(reporter) + " to rank " +
         std::to_string(rank) + ")";
}

std::string loss_text(const std::string& how, int lost, int rank, bool closed) {
  return how + ", seen by rank " + std::to_string(rank) + ". " +
         (closed
              ? "Either it has made fewer calls: all ranks must make as many (for uneven batches "
                "see torch.distributed.algorithms.Join). Or it failed: the output"
              : "The communicator does no more work; the output") +
         " of rank " + std::to_string(lost) +
         " tells why. Go on without it by shrink(), or start the job again";
}

}  // namespace pycollective
