// How a communicator fails, and hears that it has: the first cause counts, and ends all that is
// pending.
#include <optional>

#include "engine/communicator.h"
#include "engine/internode/messenger.h"

namespace pycollective {

bool Communicator::heard_of_failure() const {
  const auto notice = group_->messenger() != nullptr ? group_->messenger()->notice() : nullptr;
  return notice && notice->reporter != rank();
}

std::optional<Failure> Communicator::reported_failure() const {
  const auto reported = [&](FailureKind kind, const std::string& report, int reporter) {
    return Failure{kind, rank(), OpKind::kBarrier, 0, reported_text(report, reporter, rank())};
  };
  const FailureRecord record = group_->failure();
  if (record.kind != FailureKind::kNone)
    return reported(record.kind, group_->report_of(record.reporter),
                    group_->rank_of(record.reporter));
  if (group_->messenger() == nullptr) return std::nullopt;
  const auto notice = group_->messenger()->notice();
  if (!notice) return std::nullopt;
  return reported(notice->kind, notice->report, notice->reporter);
}

void Communicator::learn_failure() const {
  if (closed_) return;  // the mailbox may serve another group by now
  if (failure_) return;
  if (const auto reported = reported_failure()) failure_ = std::make_shared<Failure>(*reported);
}

void Communicator::fail(const Failure& failure) {
  bool tell = false;
  bool first = false;  // nobody has told this rank
  std::shared_ptr<const Failure> cause;
  std::list<std::shared_ptr<Pending>> ended;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    // Also where this rank has known it before, and told nobody.
    tell = group_->messenger() != nullptr && !told_;
    told_ = true;
    first = tell && group_->failure().kind == FailureKind::kNone && !heard_of_failure();
    if (!failure_) failure_ = std::make_shared<Failure>(failure);
    cause = failure_;
    group_->fail(cause->kind, cause->message);
    for (auto each = queues_.all().begin(); each != queues_.all().end();) {
      Queue& queue = (each++)->second;
      auto first = queue.items.begin();
      if (first != queue.items.end() && first->get() == queue.driven_item) ++first;
      ended.splice(ended.end(), queue.items, first, queue.items.end());
      queues_.let_go(queue);
    }
    for (const std::shared_ptr<Pending>& item : ended) count_telling(*item);
  }
  if (tell) group_->messenger()->tell({cause->kind, rank(), cause->message}, first);
  if (device_) device_->abort();
  end(ended, &failure);
}

void Communicator::tell_own_notice() {
  const auto notice = group_->messenger() != nullptr ? group_->messenger()->notice() : nullptr;
  if (!notice || notice->reporter != rank()) return;
  {
    const std::lock_guard lock(mutex_);
    if (told_) return;
  }
  fail({notice->kind, rank(), OpKind::kBarrier, 0, notice->report});
}

void Communicator::abort(const std::string& reason) {
  if (forked()) return;
  fail({FailureKind::kAborted, rank(), OpKind::kBarrier, 0,
        "rank " + std::to_string(rank()) + " aborted the communicator: " + reason});
}

std::shared_ptr<const Failure> Communicator::failure() {
  if (forked()) return nullptr;
  if (group_->messenger() != nullptr) group_->messenger()->poll();
  tell_own_notice();
  if (device_) watch_device(false);
  std::shared_ptr<const Failure> known;
  {
    const std::lock_guard lock(mutex_);
    learn_failure();
    known = failure_;
    // Another thread that watches the device may have yet to tell what has ended badly there.
    if (!known && device_ && !closed_)
      if (const auto ended = device_->failure(*group_)) known = std::make_shared<Failure>(*ended);
  }
  // Whoever is told may replay a graph next, and another thread may have been told before this one
  // and have yet to tell the device.
  if (known && device_) device_->abort();
  return known;
}

void Communicator::check_peers() {
  if (forked()) return;
  std::optional<Failure> found;
  if (Messenger* const messenger = group_->messenger()) {
    messenger->await_anyone(true);
    messenger->poll();
    messenger->await_anyone(false);
  }
  {
    const std::lock_guard lock(mutex_);
    if (closed_)
      throw CollectiveFailure({FailureKind::kConfiguration, rank(), OpKind::kBarrier, 0,
                               "this communicator is closed"});
    found = reported_failure();
    for (const Member each : group_->members())
      if (!found && each != group_->me() && !group_->alive(each))
        found = Failure{FailureKind::kPeerFailure, rank(), OpKind::kBarrier, 0,
                        loss_text(group_->describe(each) + " died: its process ended",
                                  group_->rank_of(each), rank())};
  }
  if (found) fail(*found);
  if (const auto known = failure()) throw CollectiveFailure(*known);
}

std::shared_ptr<const Failure> Communicator::failure_of(std::uint64_t launch) {
  std::shared_ptr<const Failure> known = failure();
  return known && !device_->has_ended_well(launch) ? known : nullptr;
}

}  // namespace pycollective
