// Positional and keyword arguments of a METH_FASTCALL method, without building a tuple or a dict.
#pragma once

#include <Python.h>

#include <array>
#include <climits>
#include <cstddef>

namespace pycollective {

template <std::size_t N>
class MethodArguments {
 public:
  // `names`: the parameters in order, null after the last; the first `required` must be given.
  MethodArguments(const char* method, const char* const (&names)[N], std::size_t required)
      : method_(method), names_(names), required_(required) {}

  // False with a TypeError set. The values are borrowed from the caller.
  bool read(PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
    std::size_t most = 0;
    while (most < N && names_[most] != nullptr) ++most;
    if (positional > static_cast<Py_ssize_t>(most)) {
      PyErr_Format(PyExc_TypeError, "%s() takes at most %zu arguments", method_, most);
      return false;
    }
    for (Py_ssize_t i = 0; i < positional; ++i) values_[static_cast<std::size_t>(i)] = args[i];
    const Py_ssize_t named = keywords != nullptr ? PyTuple_GET_SIZE(keywords) : 0;
    for (Py_ssize_t i = 0; i < named; ++i)
      if (!read_keyword(PyTuple_GET_ITEM(keywords, i), args[positional + i])) return false;
    for (std::size_t i = 0; i < required_; ++i) {
      if (values_[i] != nullptr) continue;
      PyErr_Format(PyExc_TypeError, "%s() needs the argument '%s'", method_, names_[i]);
      return false;
    }
    return true;
  }

  PyObject* operator[](std::size_t i) const { return values_[i]; }
  bool has(std::size_t i) const { return values_[i] != nullptr && values_[i] != Py_None; }

  // Both leave the default where the argument was not given; false with an error set.
  bool flag(std::size_t i, bool& value) const {
    if (values_[i] == nullptr) return true;
    const int truth = PyObject_IsTrue(values_[i]);
    value = truth == 1;
    return truth >= 0;
  }
  bool integer(std::size_t i, long& value) const {
    if (values_[i] == nullptr) return true;
    int overflow = 0;
    value = PyLong_AsLongAndOverflow(values_[i], &overflow);
    if (overflow != 0) value = overflow > 0 ? LONG_MAX : LONG_MIN;  // out of any caller's range
    return value != -1 || PyErr_Occurred() == nullptr;
  }

 private:
  bool read_keyword(PyObject* name, PyObject* value) {
    for (std::size_t i = 0; i < N && names_[i] != nullptr; ++i) {
      if (PyUnicode_CompareWithASCIIString(name, names_[i]) != 0) continue;
      if (values_[i] != nullptr) {
        PyErr_Format(PyExc_TypeError, "%s() got '%s' twice", method_, names_[i]);
        return false;
      }
      values_[i] = value;
      return true;
    }
    PyErr_Format(PyExc_TypeError, "%s() has no argument %R", method_, name);
    return false;
  }

  const char* method_;
  const char* const (&names_)[N];
  std::size_t required_;
  std::array<PyObject*, N> values_{};
};

}  // namespace pycollective
