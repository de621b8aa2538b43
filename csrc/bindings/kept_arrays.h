// Keeps the arrays of a call for as long as its messages to other hosts need them. Any thread may
// release them, and only one with the GIL may free them.
#pragma once

#include <Python.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace pycollective {

class KeptArrays : public std::enable_shared_from_this<KeptArrays> {
 public:
  // With the GIL held. The result's end frees the objects if it has the GIL, else a later sweep()
  // does.
  std::shared_ptr<const void> keep(std::vector<PyObject*> objects) {
    for (PyObject* each : objects) Py_INCREF(each);
    const std::weak_ptr<KeptArrays> home = weak_from_this();
    return {new std::vector<PyObject*>(std::move(objects)), [home](std::vector<PyObject*>* kept) {
              if (PyGILState_Check()) {
                for (PyObject* each : *kept) Py_DECREF(each);
              } else if (const auto arrays = home.lock()) {
                arrays->let_go(*kept);
              }  // else there is no call any more in which to free them
              delete kept;
            }};
  }
  // With the GIL held.
  void sweep() {
    std::vector<PyObject*> freed;
    {
      const std::lock_guard lock(mutex_);
      freed.swap(done_with_);
    }
    for (PyObject* each : freed) Py_DECREF(each);
  }

 private:
  void let_go(const std::vector<PyObject*>& objects) {
    const std::lock_guard lock(mutex_);
    done_with_.insert(done_with_.end(), objects.begin(), objects.end());
  }

  std::mutex mutex_;
  std::vector<PyObject*> done_with_;
};

}  // namespace pycollective
