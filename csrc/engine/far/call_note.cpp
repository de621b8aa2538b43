#include "engine/far/call_note.h"

#include <cstring>

#include "engine/program.h"

namespace pycollective {

CallNote::CallNote(const Request& request, std::uint64_t number)
    : sequence(number),
      signature(signature_of(request)),
      count(request.counts.empty() ? request.count : 0),
      counts_hash(hash_of(request.counts)) {
  if (request.program)
    std::memcpy(algorithm, request.program->algorithm.data(), request.program->algorithm.size());
}

bool CallNote::agrees(const CallNote& other) const {
  return sequence == other.sequence && signature == other.signature && count == other.count &&
         counts_hash == other.counts_hash &&
         std::memcmp(algorithm, other.algorithm, sizeof(algorithm)) == 0;
}

std::string CallNote::describe() const {
  // From another rank: the name may lack its end.
  const std::string name(algorithm, strnlen(algorithm, sizeof(algorithm)));
  return describe_call(signature, count, counts_hash, name.c_str()) + " as number " +
         std::to_string(sequence);
}

}  // namespace pycollective
