// Events: a moment in a stream, of this process or of another.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "capture.h"

namespace standin {

// An event between processes: how often it was recorded, and which of those records were reached.
struct SharedMoment {
  std::atomic<std::uint64_t> recorded, reached;
  char rest[48];  // a cache line each
};
static_assert(sizeof(SharedMoment) == 64);

struct Event {
  Event(std::shared_ptr<Context> owner, unsigned its_flags)
      : context(std::move(owner)), flags(its_flags) {}
  ~Event();

  const std::shared_ptr<Context> context;
  const unsigned flags;
  SharedMoment* shared = nullptr;  // of events between processes
  void* mapping = nullptr;         // of one that another process made
  std::size_t slot = 0;            // of one that this process made

  std::mutex mutex;  // of the rest
  Ticket recorded;
  std::shared_ptr<std::atomic<std::int64_t>> time;  // nanoseconds, of the record; 0 before it
  CapturedMoment captured;
};

std::shared_ptr<Event> find_event(CUevent handle);
CUevent add_event(std::shared_ptr<Event> event);
void close_events(const Context& context);

// ipc.cpp: gives an event its shared moment.
bool share(Event& event);

}  // namespace standin
