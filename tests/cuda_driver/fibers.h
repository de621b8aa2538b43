// Fibers: a stack each, switched to and from by the thread that made them; the sanitizers know
// of every switch. Between fibers a switch orders nothing, so that TSan sees races among them.
#pragma once

#include <cstddef>

namespace standin {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // From now on `entry(argument)` is what the next resume() begins. It must not return, but end
  // in leave(true).
  void prepare(void (*entry)(void*), void* argument);
  // Runs the fiber until it leaves.
  void resume();
  // Of the running fiber: back to whoever resumed it. `for_good`: it is not resumed again.
  static void leave(bool for_good);
  // It has left in the middle, and is never resumed: ready for another prepare(). What it did
  // comes before orders_after(token).
  void abandon(void* token);

 private:
  static void enter();
  char* stack_;
  void* position_ = nullptr;  // its stack pointer while it does not run
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
  void* thread_sanitizer_ = nullptr;
};

}  // namespace standin
