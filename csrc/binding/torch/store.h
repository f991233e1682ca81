// Store adapter: a c10d store as a pycomm Store.
#pragma once
#include <atomic>
#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "binding/torch/support.h"
#include "core/interrupt.h"
#include "transports/store.h"

namespace pycomm::torch_binding {

class TorchStore final : public Store {
 public:
  /// `round_trip`: as it is known from earlier requests; 0: not known.
  explicit TorchStore(intrusive_ptr<c10d::Store> store,
                      std::chrono::microseconds round_trip = std::chrono::microseconds(0))
      : store_(std::move(store)),
        extended_(store_->hasExtendedApi()),
        is_tcp_(is_tcp(*store_)),
        round_trip_(round_trip.count()) {}

  void set(const std::string& key, const std::string& value) override {
    asking(key, [&] { store_->set(key, as_bytes(value)); });
  }
  std::optional<std::string> find(const std::string& key) override {
    return asking(key, [&]() -> std::optional<std::string> {
      if (is_tcp_) {  // one round trip where check() and get() take three
        const std::vector<uint8_t> absent = as_bytes(kAbsent);
        const auto start = std::chrono::steady_clock::now();
        const std::vector<uint8_t> value = store_->compareSet(key, absent, absent);
        note(std::chrono::steady_clock::now() - start);
        if (value == absent) return std::nullopt;
        return as_text(value);
      }
      if (!store_->check({key})) return std::nullopt;
      return as_text(store_->get(key));
    });
  }
  const intrusive_ptr<c10d::Store>& torch_store() const { return store_; }
  /// Adds to a counter and returns its value, in one round trip.
  int64_t add(const std::string& key, int64_t amount) {
    return asking(key, [&] {
      const auto start = std::chrono::steady_clock::now();
      const int64_t sum = store_->add(key, amount);
      if (is_tcp_) note(std::chrono::steady_clock::now() - start);
      return sum;
    });
  }
  int64_t count(const std::string& key) override { return add(key, 1); }
  /// A server of torch gets no answer to set(), and so no round trip is spent.
  void erase(const std::string& key) override {
    if (is_tcp_) return set(key, "");
    asking(key, [&] { return store_->deleteKey(key); });
  }
  std::chrono::microseconds round_trip() const override {
    return std::chrono::microseconds(round_trip_);
  }
  bool appends() const override { return extended_; }
  void append(const std::string& key, const std::string& value) override {
    asking(key, [&] { store_->append(key, as_bytes(value)); });
  }

 private:
  /// A value that we never set: compareSet() returns it for a missing key, and sets nothing.
  static constexpr const char* kAbsent = "pycomm: no such key";

  static bool is_tcp(c10d::Store& store) {
    auto* prefix = dynamic_cast<c10d::PrefixStore*>(&store);
    if (prefix == nullptr) return dynamic_cast<c10d::TCPStore*>(&store) != nullptr;
    return dynamic_cast<c10d::TCPStore*>(prefix->getUnderlyingNonPrefixStore().get()) != nullptr;
  }
  /// Keeps the time of the fastest answer.
  void note(std::chrono::steady_clock::duration took) {
    const auto us = std::chrono::duration_cast<std::chrono::microseconds>(took).count();
    if (round_trip_ == 0 || us < round_trip_) round_trip_ = us;
  }
  static std::string as_text(const std::vector<uint8_t>& value) {
    return std::string(value.begin(), value.end());
  }
  static std::vector<uint8_t> as_bytes(const std::string& text) {
    return std::vector<uint8_t>(text.begin(), text.end());
  }
  /// Errors that torch throws have its stack in their text.
  [[noreturn]] static void throw_failed(const std::string& key, const std::exception& error) {
    const auto* torchs = dynamic_cast<const c10::Error*>(&error);
    throw Error("the store failed at the key " + key + ": " +
                (torchs ? torchs->what_without_backtrace() : error.what()));
  }
  template <typename Ask>
  auto asking(const std::string& key, const Ask& ask) -> decltype(ask()) {
    try {
      return ask();
    } catch (const std::exception& e) {
      throw_failed(key, e);
    }
  }
  const intrusive_ptr<c10d::Store> store_;
  const bool extended_;  ///< it has append()
  const bool is_tcp_;
  std::atomic<int64_t> round_trip_;  ///< in microseconds; 0: not known
};

}  // namespace pycomm::torch_binding
