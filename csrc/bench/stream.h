// What memory allows: reading and writing a buffer in place.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycollective {

// Adds one to every byte, `repetitions` times; returns seconds.
double stream_in_place(std::uint8_t* bytes, std::size_t count, int repetitions);

}  // namespace pycollective
