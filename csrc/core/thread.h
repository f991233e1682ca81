// Threads of ours, in a process that may be allowed no more of them.
#pragma once
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"

namespace pycomm {

/// Starts a thread. Throws Error, which begins with `who`, if there can be no more.
template <typename Run>
std::thread start_thread(const std::string& who, Run&& run) {
  try {
    return std::thread(std::forward<Run>(run));
  } catch (const std::system_error& error) {
    throw Error(who + " cannot start a thread: " + error.code().message() +
                "; raise the limit of processes (ulimit -u, or pids.max of the container), or of "
                "memory (ulimit -v)");
  }
}

}  // namespace pycomm
