// Capture: what streams are asked becomes a graph's nodes, and what may not be captured is
// refused with the driver's own code, and spoils the capture. A graph is launched as often as one
// likes.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "stream.h"

namespace standin {

struct Node {
  Work work;
  std::vector<std::size_t> after;  // earlier nodes
};

struct Graph {
  std::shared_ptr<Context> context;
  std::vector<Node> nodes;
};

struct Capture {
  cuuint64_t number;  // never given twice, and not 0
  CUstreamCaptureMode mode;
  std::thread::id thread;  // that began it
  const Stream* origin;
  bool invalid = false;
  bool ended = false;
  Graph graph;
  std::vector<std::shared_ptr<Stream>> streams;  // that take part
};

// An event's part in a capture.
struct CapturedMoment {
  std::shared_ptr<Capture> capture;
  std::vector<std::size_t> tails;
};

// An error where a capture going on forbids this thread what could disturb it; spoils it.
CUresult forbidden_by_capture();
// An error where the stream itself captures, or is the legacy one beside a blocking one that
// does; spoils the capture.
CUresult forbidden_while_capturing(const std::shared_ptr<Stream>& stream);
// Makes the work a node where the stream captures.
CUresult capture_work(const std::shared_ptr<Stream>& stream, Work& work, bool* captured);

// Recording an event in a stream, and waiting for one. `*captured`: it was the capture's matter.
CUresult capture_record(const std::shared_ptr<Stream>& stream, CapturedMoment& moment,
                        bool* captured);
CUresult capture_wait(const std::shared_ptr<Stream>& stream, const CapturedMoment& moment,
                      bool* captured);

}  // namespace standin
