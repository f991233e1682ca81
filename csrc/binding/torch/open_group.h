// Open group: a group ends by shutdown(), with its backend, or before the interpreter. A part of
// _c10d.
#pragma once
#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "binding/torch/engine.h"
#include "core/fork_guard.h"

namespace pycomm::torch_binding {

/// A backend's engine. Code that observes a group that may end holds a weak reference to this: a
/// weak reference to a backend of torch would keep that from being destroyed.
class OpenGroup {
 public:
  /// A group that is still to be formed has none.
  explicit OpenGroup(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  /// Null after shutdown, and before the group is formed.
  std::shared_ptr<Engine> engine() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return engine_;
  }
  /// Puts another engine in the place of this one, which is closed by a thread of its own: a close
  /// waits for peers that may be dead. Returns false if the group has been shut down meanwhile.
  bool replace(std::shared_ptr<Engine> engine) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) return false;
    engine_.swap(engine);
    last_error_ = c10d::ErrorType::SUCCESS;
    if (!engine) return true;
    if (!closing_) closing_ = std::make_unique<Queue>();
    closing_->submit([old = std::move(engine)]() mutable {
      try {
        old->finish();
      } catch (const std::exception&) {  // nobody uses this group any more
      }
      old.reset();
    });
    return true;
  }
  /// True once it was shut down.
  bool ended() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ended_;
  }
  /// Returns the kind of its last error; after shutdown the one that it had then.
  c10d::ErrorType error() const {
    const auto engine = this->engine();
    return engine ? engine->error() : last_error_.load();
  }
  bool in_child() const { return fork_.in_child(); }
  /// Throws Error in a forked child, which cannot use its parent's group.
  void check_process(const std::string& who) const { fork_.refuse(who, "an operation"); }
  /// Returns Interrupted if a signal has cut the wait for the operations short, or null. After a
  /// `failure` of this rank others may never come to what it has issued.
  std::exception_ptr shutdown(const std::string& failure = "") {
    std::exception_ptr interrupted;
    if (fork_.in_child()) return interrupted;
    const WithoutGil without_gil;  // callbacks may need it
    const auto engine = this->engine();
    if (engine) {
      if (!failure.empty()) engine->end_within(kGrace, failure);
      interrupted = engine->finish();  // callbacks may still issue operations
      last_error_ = engine->error();
    }
    std::unique_ptr<Queue> closing;  // waits for former engines
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    engine_.reset();
    closing.swap(closing_);
    return interrupted;
  }

 private:
  mutable std::mutex mutex_;
  const ForkGuard fork_{};
  std::shared_ptr<Engine> engine_;
  bool ended_ = false;
  std::unique_ptr<Queue> closing_;  ///< closes former engines; null: there are none
  std::atomic<c10d::ErrorType> last_error_{c10d::ErrorType::SUCCESS};
};

/// All open groups of this process: their threads end before the interpreter does.
class OpenGroups {
 public:
  static OpenGroups& all() {
    static OpenGroups groups;
    return groups;
  }
  void add(const std::shared_ptr<OpenGroup>& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    groups_.erase(std::remove_if(groups_.begin(), groups_.end(),
                                 [](const auto& known) { return known.expired(); }),
                  groups_.end());
    groups_.push_back(group);
  }
  /// Closes all groups, the youngest first, before the interpreter ends; after a failure, if any.
  void shutdown(const std::string& failure) {
    InterpreterEnd::begin();
    std::vector<std::weak_ptr<OpenGroup>> groups;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      groups.swap(groups_);
    }
    std::exception_ptr interrupted;
    for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
      const auto open = group->lock();
      const auto one = open ? open->shutdown(failure) : nullptr;
      if (one) interrupted = one;
    }
    if (interrupted) leave_with(interrupted);
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<OpenGroup>> groups_;
};

}  // namespace pycomm::torch_binding
