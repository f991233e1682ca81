// GIL: the interpreter's lock, for threads that may outlive the interpreter.
#pragma once
#include <cxxabi.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <optional>
#include <thread>

namespace pycomm {

/// Calls a function that may take the lock. When the interpreter has ended, Python (until 3.13)
/// ends a thread that asks for the lock on the spot, by unwinding it; to unwind a destructor is
/// std::terminate(), which ends the process. Such a thread is a daemon, for which nothing waits: it
/// stays here instead, as in Python 3.14.
template <typename F>
void take_gil_or_stay(const F& take) {
  try {
    take();
  } catch (const abi::__forced_unwind&) {
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

/// Like pybind11::gil_scoped_release, but also safe at the interpreter's end.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    take_gil_or_stay([this] { PyEval_RestoreThread(state_); });
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

/// Like pybind11::gil_scoped_acquire, but also safe at the interpreter's end.
class GilAcquired {
 public:
  GilAcquired() {
    take_gil_or_stay([this] { held_.emplace(); });
  }

 private:
  std::optional<pybind11::gil_scoped_acquire> held_;
};

}  // namespace pycomm
