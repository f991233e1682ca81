// Hooks: functions that torch or its users ask the "pycomm" process group to call, each under a
// number. A part of _c10d.
#pragma once
#include <torch/version.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

// Torch has abort hooks and clones of options since 2.14, completion hooks since 2.15.
#define PYCOMM_TORCH(major, minor)  \
  (TORCH_VERSION_MAJOR > (major) || \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace pycomm::torch_binding {

/// Hooks of one kind. Any thread. A call costs a memory access while there are none.
template <typename Hook>
class Hooks {
 public:
  void add(int64_t id, Hook hook) {
    const std::lock_guard<std::mutex> lock(mutex_);
    hooks_[id] = std::move(hook);
    any_ = true;
  }
  void remove(int64_t id) {
    Hook removed;  // destroyed after the lock is released: it may be a function of Python
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = hooks_.find(id);
    if (found == hooks_.end()) return;
    removed = std::move(found->second);
    hooks_.erase(found);
    any_ = !hooks_.empty();
  }
  bool any() const { return any_; }
  template <typename... Args>
  void call(const Args&... args) const {
    if (!any_) return;
    std::vector<Hook> hooks;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& entry : hooks_) hooks.push_back(entry.second);
    }
    for (const Hook& hook : hooks) hook(args...);
  }

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, Hook> hooks_;
  std::atomic<bool> any_{false};
};

}  // namespace pycomm::torch_binding
