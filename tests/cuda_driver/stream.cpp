#include "stream.h"

#include <algorithm>
#include <thread>

#include "capture.h"
#include "faults.h"
#include "handles.h"

namespace standin {
namespace {

Handles<CUstream, Stream>& streams() {
  static auto* const all = new Handles<CUstream, Stream>(2);
  return *all;
}

std::uint64_t next_ordinal() {
  static std::atomic<std::uint64_t> next{0};
  return next++;
}

// The caller holds `order`.
void forget_finished(Context& context) {
  auto& all = context.streams;
  all.erase(std::remove_if(all.begin(), all.end(),
                           [](const std::shared_ptr<Stream>& one) { return one->finished(); }),
            all.end());
}

}  // namespace

bool Ticket::done() const { return !stream || stream->done(number); }
void Ticket::wait() const {
  if (stream) stream->wait(number);
}

Stream::Stream(std::shared_ptr<Context> owner, bool is_legacy, bool is_blocking,
               std::uint64_t ordinal)
    : context(std::move(owner)),
      legacy(is_legacy),
      blocking(is_blocking),
      random_(settings().seed ^ (ordinal << 32)) {}

Ticket Stream::push(Work work, std::vector<Ticket> after) {
  const std::lock_guard lock(mutex_);
  queue_.push_back({std::move(work), std::move(after)});
  ++pushed_;
  if (!started_) {
    started_ = true;
    std::thread([self = shared_from_this()] { self->run(); }).detach();
  }
  changed_.notify_all();
  return {shared_from_this(), pushed_};
}

Ticket Stream::last() {
  const std::lock_guard lock(mutex_);
  return {shared_from_this(), pushed_};
}

bool Stream::done(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  return done_ >= number;
}

void Stream::wait(std::uint64_t number) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= number; });
}

bool Stream::finished() {
  const std::lock_guard lock(mutex_);
  return closed_ && done_ == pushed_;
}

void Stream::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void Stream::run() {
  prepare_fault_stack();
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    {
      const Queued next = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      for (const Ticket& ticket : next.after) ticket.wait();
      // An explorer's delay: work of other streams and ranks goes before this.
      if (settings().exploring && random_.below(4) == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random_.below(300)));
      if (context->error() == CUDA_SUCCESS) next.work(*context, random_);
    }
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

std::shared_ptr<Stream> find_stream(const std::shared_ptr<Context>& context, CUstream handle) {
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  if (number <= 1) {  // CU_STREAM_LEGACY is 1
    const std::lock_guard lock(context->order);
    return context->legacy;
  }
  std::shared_ptr<Stream> stream = streams().find(handle);
  return stream && stream->context == context ? stream : nullptr;
}

CUresult submit(const std::shared_ptr<Stream>& stream, Work work, Ticket* ticket,
                std::vector<Ticket> after) {
  bool captured = false;
  if (const CUresult error = capture_work(stream, work, &captured)) return error;
  if (captured) return CUDA_SUCCESS;
  Context& context = *stream->context;
  const std::lock_guard lock(context.order);
  if (stream->legacy) {
    for (const std::shared_ptr<Stream>& other : context.streams)
      if (other->blocking) after.push_back(other->last());
  } else if (stream->blocking) {
    after.push_back(context.legacy->last());
  }
  after.erase(std::remove_if(after.begin(), after.end(),
                             [](const Ticket& ticket) { return ticket.done(); }),
              after.end());
  const Ticket queued = stream->push(std::move(work), std::move(after));
  if (ticket) *ticket = queued;
  return CUDA_SUCCESS;
}

std::vector<Ticket> ends(const std::shared_ptr<Stream>& stream) {
  Context& context = *stream->context;
  const std::lock_guard lock(context.order);
  std::vector<Ticket> last{stream->last()};
  if (stream->legacy)
    for (const std::shared_ptr<Stream>& other : context.streams)
      if (other->blocking) last.push_back(other->last());
  return last;
}

void synchronise(Context& context) {
  std::vector<Ticket> last;
  {
    const std::lock_guard lock(context.order);
    last.push_back(context.legacy->last());
    for (const std::shared_ptr<Stream>& stream : context.streams) last.push_back(stream->last());
  }
  for (const Ticket& ticket : last) ticket.wait();
}

void open_legacy_stream(const std::shared_ptr<Context>& context) {
  const std::lock_guard lock(context->order);
  context->legacy = std::make_shared<Stream>(context, true, true, next_ordinal());
}

}  // namespace standin

using namespace standin;

CUresult cuStreamCreate(CUstream* out, unsigned flags) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    if (!out || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    auto stream =
        std::make_shared<Stream>(context, false, flags == CU_STREAM_DEFAULT, next_ordinal());
    {
      const std::lock_guard lock(context->order);
      forget_finished(*context);
      context->streams.push_back(stream);
    }
    *out = streams().add(std::move(stream));
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamDestroy_v2(CUstream handle) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Stream> stream = find_stream(context, handle);
    if (!stream || stream->legacy) return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult error = forbidden_while_capturing(stream)) return error;
    streams().remove(handle);
    stream->close();
    const std::lock_guard lock(context->order);
    forget_finished(*context);  // else its work goes on, and others still wait for it
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetFlags(CUstream handle, unsigned* flags) {
  return call(Safety::kSafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Stream> stream = find_stream(context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!flags) return CUDA_ERROR_INVALID_VALUE;
    *flags = stream->blocking ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamQuery(CUstream handle) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Stream> stream = find_stream(context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult error = forbidden_while_capturing(stream)) return error;
    for (const Ticket& ticket : ends(stream))
      if (!ticket.done()) return CUDA_ERROR_NOT_READY;
    return context->error();
  });
}

CUresult cuStreamSynchronize(CUstream handle) {
  return call(Safety::kUnsafe, [&](const std::shared_ptr<Context>& context) {
    const std::shared_ptr<Stream> stream = find_stream(context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult error = forbidden_while_capturing(stream)) return error;
    for (const Ticket& ticket : ends(stream)) ticket.wait();
    return context->error();
  });
}
