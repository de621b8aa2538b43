#include "engine/cores.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

namespace pycollective {

std::optional<cpu_set_t> allowed_cores(pid_t pid) {
  cpu_set_t cores;
  if (sched_getaffinity(pid, sizeof(cores), &cores) != 0) return std::nullopt;
  return cores;
}

bool each_has_a_core(std::vector<cpu_set_t> allowed, int more) {
  const int ranks = static_cast<int>(allowed.size()) + more;
  cpu_set_t all;
  CPU_ZERO(&all);
  for (const cpu_set_t& each : allowed) CPU_OR(&all, &all, &each);
  if (CPU_COUNT(&all) < ranks) return false;
  // Who may use as many cores as there are ranks finds one after all others have theirs.
  const auto finds_one = [&](const cpu_set_t& each) { return CPU_COUNT(&each) >= ranks; };
  allowed.erase(std::remove_if(allowed.begin(), allowed.end(), finds_one), allowed.end());

  // The others are matched with cores, one after the other; one that has a core may change it.
  std::vector<int> owner(CPU_SETSIZE, -1);
  std::vector<bool> asked;
  const std::function<bool(int)> match = [&](int rank) {
    for (std::size_t core = 0; core < owner.size(); ++core) {
      if (!CPU_ISSET(core, &allowed[static_cast<std::size_t>(rank)]) || asked[core]) continue;
      asked[core] = true;
      if (owner[core] >= 0 && !match(owner[core])) continue;
      owner[core] = rank;
      return true;
    }
    return false;
  };
  for (int rank = 0; rank < static_cast<int>(allowed.size()); ++rank) {
    asked.assign(owner.size(), false);
    if (!match(rank)) return false;
  }
  return true;
}

bool move_off(const cpu_set_t& taken) {
  const std::optional<cpu_set_t> allowed = allowed_cores(0);
  if (!allowed) return false;
  cpu_set_t elsewhere;
  CPU_AND(&elsewhere, &*allowed, &taken);
  CPU_XOR(&elsewhere, &*allowed, &elsewhere);
  if (CPU_COUNT(&elsewhere) == 0 || sched_setaffinity(0, sizeof(elsewhere), &elsewhere) != 0)
    return false;
  // Back to no mask of its own, if it had none: one that is set stays when a cpuset grows.
  cpu_set_t all;
  std::memset(&all, 0xff, sizeof(all));
  const auto may_run = [](const cpu_set_t& cores) {
    return sched_setaffinity(0, sizeof(cores), &cores) == 0;
  };
  if (may_run(all)) {
    const std::optional<cpu_set_t> now = allowed_cores(0);
    if (now && CPU_EQUAL(&*now, &*allowed)) return true;
  }
  if (!may_run(*allowed)) may_run(all);
  return true;
}

}  // namespace pycollective
