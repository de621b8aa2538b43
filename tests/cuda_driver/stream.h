// Streams: a thread with a queue each, and the order that the legacy stream imposes.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "context.h"
#include "settings.h"

namespace standin {

struct Capture;

// What a stream's thread does. Left out where the context has failed.
using Work = std::function<void(Context&, Random&)>;

// A moment in a stream: when so many of its works are done. Without a stream, always.
struct Ticket {
  std::shared_ptr<Stream> stream;
  std::uint64_t number = 0;

  bool done() const;
  void wait() const;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(std::shared_ptr<Context> owner, bool is_legacy, bool is_blocking, std::uint64_t ordinal);

  // The caller holds the context's `order`.
  Ticket push(Work work, std::vector<Ticket> after);
  Ticket last();
  bool done(std::uint64_t number);
  void wait(std::uint64_t number);
  // What is queued is still done; then the thread ends.
  void close();
  bool finished();

  const std::shared_ptr<Context> context;
  const bool legacy, blocking;

  // Guarded by capture.cpp's mutex.
  std::shared_ptr<Capture> capture;
  std::vector<std::size_t> tails;  // nodes that the next one comes after

 private:
  struct Queued {
    Work work;
    std::vector<Ticket> after;
  };
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Queued> queue_;
  std::uint64_t pushed_ = 0, done_ = 0;
  bool started_ = false, closed_ = false;
  Random random_;  // of the thread
};

// The stream that a call of this context means; null where it is none of its.
std::shared_ptr<Stream> find_stream(const std::shared_ptr<Context>& context, CUstream handle);
// Queues the work, or where the stream captures, makes it a node of the graph.
CUresult submit(const std::shared_ptr<Stream>& stream, Work work, Ticket* ticket = nullptr,
                std::vector<Ticket> after = {});
// What a stream's end is: of the legacy stream, that of every blocking one, too.
std::vector<Ticket> ends(const std::shared_ptr<Stream>& stream);
// Waits until the context is idle: what freeing memory and loading code do.
void synchronise(Context& context);

void open_legacy_stream(const std::shared_ptr<Context>& context);

}  // namespace standin
