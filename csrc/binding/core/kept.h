// Kept: objects of Python that C++ keeps, and that threads without the interpreter's lock drop.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace pycomm {

/// A thread that moves bytes neither waits for the lock, which Python holds for milliseconds, nor
/// asks for it at the interpreter's end, where it would not come back. What it drops is put aside,
/// and released by a thread that has the lock.
class Kept {
 public:
  /// Returns what keeps an object, and its memory if it has a buffer, which then cannot be resized.
  static std::shared_ptr<void> hold(const pybind11::object& object) {
    PyObject* held = PyMemoryView_FromObject(object.ptr());
    if (held == nullptr) {  // a tensor, or an array whose dtype buffers do not know
      PyErr_Clear();
      held = object.inc_ref().ptr();
    }
    return {held, [](void* dropped) { put_aside(static_cast<PyObject*>(dropped)); }};
  }
  /// Releases what was dropped. The caller has the lock.
  static void release() {
    std::vector<PyObject*> objects;
    {
      const std::lock_guard<std::mutex> lock(mutex());
      objects.swap(aside());
    }
    for (PyObject* object : objects) Py_DECREF(object);
  }

 private:
  static void put_aside(PyObject* object) {
    if (!Py_IsInitialized()) return;
    bool first = false;
    {
      const std::lock_guard<std::mutex> lock(mutex());
      first = aside().empty();
      aside().push_back(object);
    }
    const auto call = [](void*) {
      release();
      return 0;
    };
    // If Python has too many calls waiting, the next transfer of this process releases it.
    if (first) Py_AddPendingCall(call, nullptr);
  }
  // Never destroyed: threads may outlive what is static.
  static std::mutex& mutex() {
    static auto* made = new std::mutex;
    return *made;
  }
  static std::vector<PyObject*>& aside() {
    static auto* made = new std::vector<PyObject*>;
    return *made;
  }
};

}  // namespace pycomm
