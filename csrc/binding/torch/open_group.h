// Open group: a group ends by shutdown(), with its backend, or before the interpreter. A part of
// _c10d.
#pragma once
#include <algorithm>
#include <atomic>
#include <list>
#include <mutex>
#include <thread>
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
  ~OpenGroup() { join(); }

  /// Null after shutdown, and before the group is formed.
  std::shared_ptr<Engine> engine() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return engine_;
  }
  /// Puts another engine in the place of this one, which is closed by a thread of its own: a close
  /// waits for peers that may be dead. Returns false if the group has been shut down meanwhile.
  bool replace(std::shared_ptr<Engine> engine) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (ended_) return false;
    engine_.swap(engine);
    last_error_ = c10d::ErrorType::SUCCESS;
    closing_.remove_if([](Closing& closing) {
      if (!closing.done) return false;
      closing.thread.join();
      return true;
    });
    if (!engine) return true;
    closing_.emplace_back();
    Closing& closing = closing_.back();
    closing.thread = std::thread([old = std::move(engine), &done = closing.done]() mutable {
      try {
        old->finish();
        old.reset();
      } catch (const std::exception&) {  // nobody uses this group any more
      }
      done = true;
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
  /// Returns Interrupted if a signal has cut the wait for the operations short, or null.
  std::exception_ptr shutdown() {
    std::exception_ptr interrupted;
    if (fork_.in_child()) return interrupted;
    const WithoutGil without_gil;  // callbacks may need it
    const auto engine = this->engine();
    if (engine) {
      interrupted = engine->finish();  // callbacks may still issue operations
      last_error_ = engine->error();
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
      engine_.reset();
    }
    join();
    return interrupted;
  }

 private:
  struct Closing {
    std::thread thread;
    std::atomic<bool> done{false};
  };
  void join() {
    std::list<Closing> closing;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing.swap(closing_);
    }
    for (Closing& one : closing) {
      if (fork_.in_child()) {  // the thread is the parent's
        static_cast<void>(new std::thread(std::move(one.thread)));
      } else {
        one.thread.join();
      }
    }
  }

  mutable std::mutex mutex_;
  const ForkGuard fork_{};
  std::shared_ptr<Engine> engine_;
  bool ended_ = false;
  std::list<Closing> closing_;  ///< former engines
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
  /// Closes all groups, the youngest first, before the interpreter ends.
  void shutdown() {
    InterpreterEnd::begin();
    std::vector<std::weak_ptr<OpenGroup>> groups;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      groups.swap(groups_);
    }
    std::exception_ptr interrupted;
    for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
      const auto open = group->lock();
      const auto one = open ? open->shutdown() : nullptr;
      if (one) interrupted = one;
    }
    if (interrupted) leave_with(interrupted);
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<OpenGroup>> groups_;
};

}  // namespace pycomm::torch_binding
