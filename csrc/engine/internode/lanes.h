// The lanes of a communicator: messages on one of them keep their order (link.h).
#pragma once

namespace pycollective {

constexpr int kLaneControl = 1;     // failures, goodbyes, reminders; received from any rank
constexpr int kLaneCall = 2;        // what a rank has called, and its first data if they are short
constexpr int kLanePairCall = 3;    // the same of who sends to one rank, to that rank
constexpr int kLanePairAnswer = 4;  // of who receives, to the sender
constexpr int kLanePair = 5;        // the first of those of the data between the two
constexpr int kPairLanes = 59;      // one for each message that is under way between the two; the
                                    // last for the library's own
constexpr int kLaneFirst = 64;      // of collectives

}  // namespace pycollective
