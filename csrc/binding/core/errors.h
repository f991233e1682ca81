// Exceptions: pycomm's errors as the Python classes of pycomm/errors.py. Shared by _C and _c10d, so
// that `except pycomm.PeerLost` catches both.
#pragma once
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>
#include <string>
#include <utility>

#include "binding/core/gil.h"
#include "core/env.h"
#include "core/error.h"
#include "core/interrupt.h"

namespace pycomm {

/// Returns a text of Python. An error may quote what another rank, or a stranger, has written,
/// which need not be UTF-8.
inline pybind11::str python_text(const std::string& text) {
  PyObject* const decoded =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace");
  if (decoded == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::str>(decoded);
}

/// Sets a Python exception of the given class of pycomm.errors.
inline void set_error(const char* name, const pybind11::str& text) {
  const auto type = pybind11::module_::import("pycomm.errors").attr(name);
  pybind11::set_error(type, text);
}

/// Returns the text of an error that ends a group. If PYCOMM_TRACE asks for it, the group's recent
/// operations are written and the text says where.
inline pybind11::str with_trace(const Error& error) {
  const pybind11::str text = python_text(error.what());
  if (env().trace.empty()) return text;
  try {
    return pybind11::module_::import("pycomm.trace").attr("note_failure")(text);
  } catch (const pybind11::error_already_set&) {
    return text;
  }
}

/// True on the thread on which Python runs the handlers of signals.
inline bool handles_signals() { return ::syscall(SYS_gettid) == ::getpid(); }

/// The interrupt check of waits (core/interrupt.h). Runs the handlers of signals that have arrived,
/// and throws what they raise. Python runs them on its main thread only, so other threads do not
/// ask for the GIL.
inline void check_signals() {
  if (!handles_signals() || !Py_IsInitialized()) return;
  const GilAcquired gil;
  if (PyErr_CheckSignals() == 0) return;
  pybind11::error_already_set raised;
  std::string what = pybind11::str(raised.type().attr("__name__"));
  throw Interrupted(std::make_exception_ptr(std::move(raised)), std::move(what));
}

/// Translator for pybind11::register_exception_translator and its local form.
inline void translate_errors(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const Interrupted& interrupted) {
    try {
      std::rethrow_exception(interrupted.cause);
    } catch (pybind11::error_already_set& raised) {
      raised.restore();
    }
  } catch (const PeerLost& error) {
    const auto type = pybind11::module_::import("pycomm.errors").attr("PeerLost");
    pybind11::set_error(type, type(with_trace(error), error.rank, error.ranks));
  } catch (const Timeout& error) {
    set_error("Timeout", with_trace(error));
  } catch (const WireMismatch& error) {
    set_error("WireMismatch", with_trace(error));
  } catch (const Error& error) {
    set_error("Error", python_text(error.what()));
  }
}

}  // namespace pycomm
