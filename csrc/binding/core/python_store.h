// Python store: an object of Python as a Store.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "binding/core/gil.h"
#include "core/error.h"
#include "transports/store.h"

namespace pycomm {

/// Calls the methods of an object that has those of Store: `set(key, value)`, `find(key)`, which
/// returns None for a key that is not there, `append(key, value)`, if they count `add(key, amount)`
/// and `erase(key)`, and the properties `appends` and `round_trip` (in seconds). Values are bytes.
class PythonStore final : public Store {
 public:
  explicit PythonStore(pybind11::object target)
      : target_(std::move(target)),
        appends_(target_.attr("appends").cast<bool>()),
        counts_(pybind11::hasattr(target_, "erase")) {}
  ~PythonStore() override {
    if (!Py_IsInitialized()) {
      target_.release();
      return;
    }
    const GilAcquired gil;
    target_ = pybind11::object();
  }

  void set(const std::string& key, const std::string& value) override {
    asking(key, [&] { target_.attr("set")(key, pybind11::bytes(value)); });
  }
  std::optional<std::string> find(const std::string& key) override {
    return asking(key, [&] { return text(target_.attr("find")(key)); });
  }
  bool appends() const override { return appends_; }
  void append(const std::string& key, const std::string& value) override {
    asking(key, [&] { target_.attr("append")(key, pybind11::bytes(value)); });
  }
  int64_t count(const std::string& key) override {
    if (!counts_) return 0;
    return asking(key, [&] { return target_.attr("add")(key, 1).template cast<int64_t>(); });
  }
  void erase(const std::string& key) override {
    asking(key, [&] { target_.attr("erase")(key); });
  }
  std::chrono::microseconds round_trip() const override {
    const GilAcquired gil;
    const double seconds = target_.attr("round_trip").cast<double>();
    return std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
  }

 private:
  static std::optional<std::string> text(const pybind11::object& value) {
    if (value.is_none()) return std::nullopt;
    return value.cast<std::string>();
  }
  /// What the object raises becomes an Error. An interrupt, such as KeyboardInterrupt, stays one.
  template <typename Ask>
  static auto asking(const std::string& key, const Ask& ask) -> decltype(ask()) {
    const GilAcquired gil;
    try {
      return ask();
    } catch (const pybind11::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;
      const auto what = pybind11::str(error.value()).cast<std::string>();
      throw Error("the store failed at the key " + key + ": " + what);
    }
  }

  pybind11::object target_;
  const bool appends_;  ///< several ranks may append to one key
  const bool counts_;
};

}  // namespace pycomm
