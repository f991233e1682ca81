// A store of c10d's as one of ours.
#pragma once
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "binding/c10d_support.h"
#include "transports/store.h"

namespace pycomm::torch_binding {

class TorchStore final : public Store {
 public:
  explicit TorchStore(intrusive_ptr<c10d::Store> store)
      : store_(std::move(store)), waits_in_seconds_(!store_->hasExtendedApi()) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::string get(const std::string& key, Deadline deadline) override {
    wait({key}, deadline);
    return as_text(store_->get(key));
  }
  std::optional<std::string> find(const std::string& key) override {
    try {
      if (!store_->check({key})) return std::nullopt;
      return as_text(store_->get(key));
    } catch (const std::exception& e) {
      throw Error("the store failed at the key " + key + ": " + e.what());
    }
  }
  std::vector<std::string> get_many(const std::vector<std::string>& keys,
                                    Deadline deadline) override {
    if (!store_->hasExtendedApi()) return Store::get_many(keys, deadline);
    wait(keys, deadline);
    std::vector<std::string> values;
    for (const auto& value : store_->multiGet(keys)) values.push_back(as_text(value));
    return values;
  }

 private:
  static std::string as_text(const std::vector<uint8_t>& value) {
    return std::string(value.begin(), value.end());
  }
  void wait(const std::vector<std::string>& keys, Deadline deadline) {
    const std::string names = "the key " + keys[0] + (keys.size() > 1 ? " and its like" : "");
    try {
      if (waits_in_seconds_ ? look_until(keys, deadline) : wait_until(keys, deadline)) return;
    } catch (const std::exception& e) {
      if (!deadline.expired()) throw Error("the store failed at " + names + ": " + e.what());
    }
    throw Timeout("nobody set " + names + " in the store within " +
                  std::to_string(deadline.limit().count()) + " ms");
  }
  bool wait_until(const std::vector<std::string>& keys, Deadline deadline) {
    // What is left is rounded down, and c10d reads a wait of 0 as "for ever".
    store_->wait(keys, deadline.left() + Milliseconds(1));
    return true;
  }
  bool look_until(const std::vector<std::string>& keys, Deadline deadline) {
    for (auto pause = Milliseconds(1); !store_->check(keys);
         pause = std::min(2 * pause, Milliseconds(10))) {
      if (deadline.expired()) return false;
      std::this_thread::sleep_for(std::min(pause, deadline.left() + Milliseconds(1)));
    }
    return true;
  }

  const intrusive_ptr<c10d::Store> store_;
  /// c10d's FileStore ends a wait at the next whole second.
  const bool waits_in_seconds_;
};

}  // namespace pycomm::torch_binding
