// One collective call from Python: its arrays, checked, as a Request.
#pragma once

#include <Python.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "bindings/array_view.h"
#include "engine/api.h"

namespace pycollective {

// Keeps the arrays of a call for as long as its messages to other hosts need them. Any thread may
// release them, and only one with the GIL may free them.
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

// The caller's arguments; null or None if not given.
struct CallArguments {
  PyObject* input = nullptr;   // what is read
  PyObject* output = nullptr;  // what is written; the input, where not given
  PyObject* op = nullptr;
  PyObject* counts = nullptr;
  PyObject* algorithm = nullptr;
  PyObject* wire = nullptr;
  PyObject* stream = nullptr;
  long root = 0;
  long tag = 0;
  bool from_any = false;  // in place of the root: a recv

  // The array that holds a collective's result on this rank, or None; borrowed. A broadcast's root
  // only reads what the others are given.
  PyObject* result(OpKind kind) const {
    PyObject* array = kind == OpKind::kBroadcast && output == nullptr ? input : output;
    return array != nullptr ? array : Py_None;
  }
};

// The wire of that name. False with a Python error set.
bool read_wire(PyObject* name, Wire& wire);

class Call {
 public:
  // Fills request(). False with a Python error set; nothing has moved.
  bool prepare(OpKind kind, const CallArguments& arguments, int rank, int size);
  // The same for a reduction of nodes, whose rows are flat arrays of fp32. `shape` is the leaves',
  // a tuple.
  bool prepare_nodes(OpKind kind, const CallArguments& arguments, DealtNodes nodes, PyObject* rows,
                     PyObject* shape, int rank, int size);
  const Request& request() const { return request_; }
  void use(std::shared_ptr<const Program> program) { request_.program = std::move(program); }
  void keep_with(KeptArrays& kept);
  // The rank that sent the message, after a recv that has ended well.
  int source() const { return source_; }
  // After success, for outputs that were not contiguous. False with a Python error set.
  bool finish() { return output_ == nullptr || output_->copy_back(); }

 private:
  bool open_arrays(const CallArguments& arguments);
  bool locate(const ArrayView& one, const ArrayView& other);
  bool read_op(PyObject* op);
  bool read_counts(PyObject* counts);
  bool check_sizes(int rank, int size);
  bool read_rows(DealtNodes nodes, PyObject* rows, std::size_t elements);
  bool check_nodes_sizes(std::size_t elements, PyObject* shape, int rank, int size);

  Request request_;
  ArrayView first_;
  ArrayView second_;
  const ArrayView* input_ = nullptr;
  ArrayView* output_ = nullptr;
  std::vector<std::unique_ptr<ArrayView>> rows_;
  int source_ = 0;
};

}  // namespace pycollective
