// What an object that owns threads must know before it ends them: if it is a copy in a forked child
// (a data loader's worker, say), they are not there, nor may the parent's peers be told anything.
#pragma once
#include <unistd.h>

namespace pycomm {

class ForkGuard {
 public:
  /// True in a child of the process that made this.
  bool in_child() const { return ::getpid() != process_; }

 private:
  const pid_t process_ = ::getpid();
};

}  // namespace pycomm
