// pycomm's exceptions as the Python classes of pycomm/errors.py. Shared by _C and _c10d, so that
// `except pycomm.PeerLost` catches both.
#pragma once
#include <pybind11/pybind11.h>

#include <exception>

#include "core/error.h"

namespace pycomm {

/// Sets a Python exception of the given class of pycomm.errors.
inline void set_error(const char* name, const Error& error) {
  const auto type = pybind11::module_::import("pycomm.errors").attr(name);
  pybind11::set_error(type, error.what());
}

/// For pybind11::register_exception_translator and its local form.
inline void translate_errors(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const PeerLost& error) {
    const auto type = pybind11::module_::import("pycomm.errors").attr("PeerLost");
    pybind11::set_error(type, type(error.what(), error.rank));
  } catch (const Timeout& error) {
    set_error("Timeout", error);
  } catch (const WireMismatch& error) {
    set_error("WireMismatch", error);
  } catch (const Error& error) {
    set_error("Error", error);
  }
}

}  // namespace pycomm
