#include "transports/shm/read_permit.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>

#include "transports/process.h"

namespace pycomm::read_permit {
namespace {

/// Defined here because some headers lack it.
constexpr int kSetPtracer = 0x59616d61;

/// The name that the groups of this process have given. Never destroyed: groups may end after that.
struct Given {
  std::mutex mutex;
  std::weak_ptr<void> permit;
  pid_t process = 0;  ///< that has given it: its forked children start without

  /// Under the mutex. Null if there is none.
  std::shared_ptr<void> ours() { return process == ::getpid() ? permit.lock() : nullptr; }
};

Given& given() {
  static Given* const given = new Given;
  return *given;
}

/// Returns the process, its parent and so on, without the first process.
std::vector<pid_t> line_of(pid_t process) {
  std::vector<pid_t> line;
  while (process > 1 && std::find(line.begin(), line.end(), process) == line.end()) {
    line.push_back(process);
    process = parent_of(process);
  }
  return line;
}

}  // namespace

bool wanted() {
  int scope = 0;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
  return scope == 1;
}

pid_t common_ancestor(const std::vector<pid_t>& processes) {
  if (processes.empty()) return 0;
  std::vector<std::vector<pid_t>> lines;
  for (const pid_t process : processes) lines.push_back(line_of(process));
  for (const pid_t candidate : lines.front()) {
    const bool all = std::all_of(lines.begin(), lines.end(), [&](const std::vector<pid_t>& line) {
      return std::find(line.begin(), line.end(), candidate) != line.end();
    });
    if (all) return candidate;
  }
  return 0;
}

std::shared_ptr<void> held() {
  const std::lock_guard<std::mutex> lock(given().mutex);
  return given().ours();
}

std::shared_ptr<void> name(pid_t ancestor) {
  const std::lock_guard<std::mutex> lock(given().mutex);
  std::shared_ptr<void> permit = given().ours();
  if (permit) return permit;  // siblings have the same launcher
  if (ancestor <= 1 || ::prctl(kSetPtracer, ancestor, 0, 0, 0) != 0) return nullptr;
  given().process = ::getpid();
  permit = std::shared_ptr<void>(&given(), [self = ::getpid()](void*) {
    if (::getpid() != self) return;
    const std::lock_guard<std::mutex> lock(given().mutex);
    if (!given().ours()) ::prctl(kSetPtracer, 0, 0, 0, 0);  // else another group has it by now
  });
  given().permit = permit;
  return permit;
}

}  // namespace pycomm::read_permit
