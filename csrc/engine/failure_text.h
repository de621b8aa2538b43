// What failures say in the same words wherever they are found.
#pragma once

#include <string>

namespace pycollective {

// A failure's report, with who reported it to whom.
std::string reported_text(const std::string& report, int reporter, int rank);
// How rank `lost` was lost, that `rank` has seen it, and what to do. `closed`: it has closed its
// communicator, and may have ended well.
std::string loss_text(const std::string& how, int lost, int rank, bool closed = false);
// "1800 s"
std::string seconds_text(double seconds);

}  // namespace pycollective
