#include "engine/watch.h"

#include <unistd.h>

#include <cmath>

#include "engine/internode/messenger.h"

namespace pycollective {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks{10};

Failure failure_of(const Operation& operation, FailureKind kind, std::string message) {
  return {kind, operation.group().world().rank, operation.request().kind, operation.sequence(),
          std::move(message)};
}

// "rank(s) 1, 3 have not called it", or those that have called but not finished.
std::string absentees(const Operation& operation) {
  if (std::string own = operation.held_up(); !own.empty()) return own;
  std::string absent;
  std::string unfinished;
  for (const Member each : operation.group().members()) {
    if (each == operation.group().me()) continue;
    std::string& list = operation.called_by(each) ? unfinished : absent;
    if (operation.called_by(each) && operation.finished_by(each)) continue;
    list += (list.empty() ? "" : ", ") + std::to_string(operation.group().rank_of(each));
  }
  const std::string others = operation.internode_absentees();
  if (!others.empty()) absent += (absent.empty() ? "" : ", ") + others;
  if (!absent.empty()) return "rank(s) " + absent + " have not called it";
  for (const int rank : operation.internode_unfinished())
    unfinished += (unfinished.empty() ? "" : ", ") + std::to_string(rank);
  if (!unfinished.empty()) return "rank(s) " + unfinished + " have called it but not finished";
  return "all ranks have finished their part";
}

}  // namespace

std::string name_of(const Operation& operation) {
  return std::string(name_of(operation.request().kind)) + " number " +
         std::to_string(operation.sequence());
}

void Watch::throw_if_failed(const Operation& operation) {
  const Group& group = operation.group();
  if (group.messenger() != nullptr && !operation.is_over())
    if (const auto notice = group.messenger()->notice())
      throw CollectiveFailure(
          failure_of(operation, notice->kind,
                     reported_text(notice->report, notice->reporter, group.world().rank)));
  const FailureRecord record = group.failure();
  if (record.kind == FailureKind::kNone || operation.is_over()) return;
  const std::string report = group.report_of(record.reporter);
  throw CollectiveFailure(
      failure_of(operation, record.kind,
                 reported_text(report, group.rank_of(record.reporter), group.world().rank)));
}

Mask Sight::gone() {
  if (gone_) return *gone_;
  gone_ = 0;
  for (const Member each : group_.members())
    if (each != group_.me() && (group_.has_left(each) || !group_.alive(each))) *gone_ |= bit(each);
  return *gone_;
}

void Watch::look(const Operation& operation, Sight& sight) {
  const Clock::time_point now = sight.now();
  if (now < next_look_) return;
  next_look_ = now + kBetweenLooks;
  throw_if_failed(operation);
  operation.compare_calls();
  look_for_lost_peers(operation, sight.gone());
  if (time_.is_over(now, operation.grace())) throw_timeout(operation);
  if (!warned_ && time_.waited() >= operation.group().warn_after()) {
    warned_ = true;
    if (!sight.may_warn()) return;
    const std::string text =
        "pycollective: rank " + std::to_string(operation.group().world().rank) + " has waited " +
        seconds_text(std::floor(time_.waited().count())) + " in " + name_of(operation) + ": " +
        absentees(operation) + "; it gives up after " + seconds_text(time_.limit()) + "\n";
    // One write, so that the lines of several ranks do not mix. A lost warning is no error.
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
  }
}

void Watch::look_for_lost_peers(const Operation& operation, Mask gone) const {
  const Group& group = operation.group();
  for (const Member each : group.members()) {
    // `gone` was read before finished_by(): so what it did before it went is not missed.
    if ((gone & bit(each)) == 0 || operation.finished_by(each)) continue;
    throw_lost(operation, each);
  }
}

void Watch::throw_lost(const Operation& operation, Member member) {
  const Group& group = operation.group();
  const bool left = group.has_left(member);
  // It may have reported a failure and left since it was looked at: that report says more.
  throw_if_failed(operation);
  throw CollectiveFailure(
      failure_of(operation, FailureKind::kPeerFailure,
                 loss_text(group.describe(member) +
                               (left ? " closed its communicator" : " died: its process ended") +
                               " before it finished " + name_of(operation),
                           group.rank_of(member), group.world().rank, left)));
}

void Watch::throw_timeout(const Operation& operation) const {
  throw CollectiveFailure(failure_of(
      operation, FailureKind::kTimeout,
      name_of(operation) + " timed out on rank " + std::to_string(operation.group().world().rank) +
          " after its timeout of " + seconds_text(time_.limit()) + ": " + absentees(operation) +
          ". Look at what those ranks do instead, or give a longer timeout"));
}

}  // namespace pycollective
